"""The curves of a figure are the numbers of the logs, and what is missing is said."""

import json
import math
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from exlm_mini import plotting
from exlm_mini.plot import main
from exlm_mini.plotting.curves import METRICS, smoothed
from exlm_mini.pretrain import main as pretrain


def write_log(folder, records, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + end)
    return folder


def made_records(scale=1.0, with_accuracy=True):
    """Ten lines whose every number is known."""
    records = []
    for n in range(1, 11):
        record = {"step": 10 * n, "loss": scale / n, "learning_rate": 1e-3 * n}
        record |= {"tokens": 5000 * n, "seconds": 900.0 * n, "tokens_per_second": 5.5}
        if with_accuracy:
            record["mask_accuracy"] = n / 20
        if n % 5 == 0:
            record["validation_bits_per_mask"] = 2 * scale / n
            record["validation_mask_accuracy"] = n / 25
            record["validation_perplexity"] = 2 ** (2 * scale / n)
        record |= {"model_flops_per_second": 7e9, "model_flops_utilisation": n / 40}
        record["peak_memory_mib"] = 512.0 * n
        records.append(record)
    return records


@pytest.fixture
def figures(monkeypatch):
    """Figures as they are before they are written and closed."""
    kept = []

    def keep(figure, path):
        kept.append(figure)
        path.write_bytes(b"drawn")

    monkeypatch.setattr(plotting, "save_figure", keep)
    yield kept
    plt.close("all")


def drawn(capsys, *arguments):
    """What a figure that must succeed says on stderr."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


def refused(capsys, *arguments):
    """The one line of a mistake."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def panels(figure):
    """By title: the unit, and the points of each curve in the order of the legend."""
    return {
        ax.get_title(): (ax.get_ylabel(), [line.get_xydata().tolist() for line in lines_of(ax)])
        for ax in figure.axes
    }


def lines_of(ax):
    """Curves of training."""
    return [line for line in ax.lines if line.get_linestyle() == "-"]


def dots_of(ax):
    """Curves of held-out rows."""
    return [line for line in ax.lines if line.get_linestyle() == ":"]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ---- what is drawn ----


def test_by_default_the_panels_of_figure_9_come_first(tmp_path, figures, capsys):
    first = write_log(tmp_path / "first", made_records())
    second = write_log(tmp_path / "second", made_records(2.0))
    out, err = drawn(capsys, first, second, "--output", tmp_path / "a.png")
    assert (out, err) == (f"{tmp_path / 'a.png'}\n", "")
    (figure,) = figures
    assert legend(figure) == ["first", "second"]
    found = panels(figure)
    first_row, second_row = list(found)[:3], list(found)[3:]
    assert first_row == ["training loss", "mask accuracy", "perplexity"]
    assert second_row == ["speed", "utilisation", "peak memory"]
    rows = [ax.get_subplotspec().rowspan.start for ax in figure.axes]
    assert rows == [0, 0, 0, 1, 1, 1]
    for number, scale in enumerate((1.0, 2.0)):
        for title, value in (
            ("training loss", lambda n, s: s / n),
            ("mask accuracy", lambda n, s: 100 * n / 20),
            ("perplexity", lambda n, s: math.exp(s / n)),
        ):
            expected = [[10 * n, value(n, scale)] for n in range(1, 11)]
            for point, wanted in zip(found[title][1][number], expected, strict=True):
                assert point == pytest.approx(wanted)
    assert {ax.get_xlabel() for ax in figure.axes} == {"training step"}
    assert [ax.get_yscale() for ax in figure.axes[:3]] == ["linear", "linear", "log"]
    assert found["perplexity"][0] == "exp(loss)"
    assert found["utilisation"][1][0][-1] == [100, pytest.approx(25)]
    assert found["peak memory"][1][0][-1] == [100, pytest.approx(5)]


def test_how_the_machine_was_used_is_drawn_only_where_it_is_logged(tmp_path, figures, capsys):
    records = made_records()
    for record in records:
        del record["model_flops_utilisation"], record["peak_memory_mib"]
    run = write_log(tmp_path / "run", records)
    _, err = drawn(capsys, run, "--output", tmp_path / "a.png")
    assert err == "" and list(panels(figures[0]))[3:] == ["speed"]
    other = write_log(tmp_path / "other", made_records())
    _, err = drawn(capsys, run, other, "--output", tmp_path / "a.png")
    assert err == (
        "not logged: model_flops_utilisation of run\nnot logged: peak_memory_mib of run\n"
    )


def test_held_out_rows_are_dots_in_the_panel_of_their_quantity(tmp_path, figures, capsys):
    first = write_log(tmp_path / "first", made_records())
    second = write_log(tmp_path / "second", made_records(2.0, with_accuracy=False))
    _, err = drawn(capsys, first, second, "--output", tmp_path / "a.png", "--smooth", "3")
    assert err == ""  # ExLM logs no accuracy of training batches, but one of held-out rows
    loss, accuracy, perplexity, *machine = figures[0].axes
    for ax in (loss, *machine):
        assert dots_of(ax) == []
    shares = [[50, pytest.approx(100 * 5 / 25)], [100, pytest.approx(100 * 10 / 25)]]
    assert [line.get_xydata().tolist() for line in dots_of(accuracy)] == [shares, shares]
    assert [line.get_ydata().tolist() for line in dots_of(perplexity)] == [
        pytest.approx([2 ** (2 * scale / 5), 2 ** (2 * scale / 10)]) for scale in (1.0, 2.0)
    ]
    colors = [line.get_color() for line in lines_of(loss)]
    assert [line.get_color() for line in dots_of(accuracy)] == colors
    assert [line.get_color() for line in lines_of(accuracy)] == colors[:1]
    assert "Dots: held-out rows" in figures[0].get_supxlabel().replace("\n", " ")
    drawn(capsys, first, "--metrics", "loss", "--output", tmp_path / "a.png")
    assert "Dots" not in figures[1].get_supxlabel()


def test_curves_of_one_run_have_one_colour(tmp_path, figures, capsys):
    records = made_records(with_accuracy=False)
    for record in records:
        record.pop("validation_mask_accuracy", None)
    first = write_log(tmp_path / "first", records)
    second = write_log(tmp_path / "second", made_records())
    _, err = drawn(capsys, first, second, "--output", tmp_path / "a.png")
    assert err == "not logged: mask_accuracy of first\n"
    loss, accuracy, *_ = figures[0].axes
    assert [line.get_color() for line in lines_of(accuracy)] == [loss.lines[1].get_color()]
    assert loss.lines[0].get_color() != loss.lines[1].get_color()
    handles = figures[0].legends[0].get_lines()
    assert [h.get_color() for h in handles] == [line.get_color() for line in loss.lines]


@pytest.mark.parametrize(
    ("against", "label", "last"),
    [
        ("steps", "training step", 100),
        ("tokens", "input tokens", 50_000),
        ("hours", "hours", 2.5),
    ],
)
def test_the_horizontal_axis_can_be_chosen(tmp_path, figures, capsys, against, label, last):
    run = write_log(tmp_path / "run", made_records())
    drawn(
        capsys, run, "--against", against, "--metrics", "loss", "--output", tmp_path / "a.svg"
    )
    (ax,) = figures[0].axes
    assert ax.get_xlabel() == label
    assert ax.lines[0].get_xdata()[-1] == pytest.approx(last)


@pytest.mark.parametrize(
    ("seconds", "label", "last"),
    [
        (7200, "hours", 2),
        (7199, "minutes", 7199 / 60),
        (120, "minutes", 2),
        (119, "seconds", 119),
    ],
)
def test_short_times_have_a_short_unit(tmp_path, figures, capsys, seconds, label, last):
    run = write_log(tmp_path / "run", [{"step": 1, "loss": 1.0, "seconds": seconds}])
    drawn(
        capsys, run, "--against", "hours", "--metrics", "loss", "--output", tmp_path / "a.png"
    )
    (ax,) = figures[0].axes
    assert ax.get_xlabel() == label
    assert ax.lines[0].get_xdata()[-1] == pytest.approx(last)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_can_be_drawn(tmp_path, figures, capsys, name):
    run = write_log(tmp_path / "run", made_records())
    drawn(capsys, run, "--metrics", name, "--output", tmp_path / "a.png")
    ((_, (points,)),) = panels(figures[0]).values()
    assert len(points) == (2 if name.startswith("validation") else 10)


def test_a_run_of_two_models_gives_two_curves(tmp_path, figures, capsys):
    write_log(tmp_path / "pairs" / "mlm", made_records())
    write_log(tmp_path / "pairs" / "exlm", made_records(2.0, with_accuracy=False))
    _, err = drawn(capsys, tmp_path / "pairs", "--output", tmp_path / "a.png")
    assert legend(figures[0]) == ["pairs/exlm", "pairs/mlm"]
    assert err == ""
    other = write_log(tmp_path / "other", made_records())
    drawn(capsys, tmp_path / "pairs", other, "--output", tmp_path / "a.png")
    assert legend(figures[1]) == ["pairs/exlm", "pairs/mlm", "other"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, figures, capsys):
    runs = [write_log(tmp_path / k / "run", made_records()) for k in ("one", "two")]
    drawn(capsys, *runs, "--output", tmp_path / "a.png")
    assert legend(figures[0]) == ["one/run", "two/run"]
    labels = ["p = 0.15", "p = 0.387"]
    drawn(capsys, *runs, "--output", tmp_path / "a.png", "--labels", *labels)
    assert legend(figures[1]) == labels


def test_a_value_that_was_not_finite_leaves_a_gap(tmp_path, figures, capsys):
    records = made_records()
    records[4]["loss"] = None
    run = write_log(tmp_path / "run", records)
    drawn(capsys, run, "--metrics", "loss", "--smooth", "3", "--output", tmp_path / "a.png")
    values = figures[0].axes[0].lines[0].get_ydata()
    assert [math.isnan(v) for v in values] == [n == 4 for n in range(10)]
    assert values[5] == pytest.approx((1 / 4 + 1 / 6) / 2)


# ---- smoothing ----


def test_smoothing_is_the_mean_over_the_last_values():
    assert smoothed([4.0, 2.0, 3.0, 7.0], 1) == [4.0, 2.0, 3.0, 7.0]
    assert smoothed([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]
    assert smoothed([4.0, 2.0, 3.0, 7.0], 9) == [4.0, 3.0, 3.0, 4.0]


def test_the_caption_says_how_curves_were_smoothed(tmp_path, figures, capsys):
    run = write_log(tmp_path / "run", made_records())
    drawn(capsys, run, "--output", tmp_path / "a.png")
    drawn(capsys, run, "--output", tmp_path / "a.png", "--smooth", "4")
    captions = [figure.get_supxlabel().replace("\n", " ") for figure in figures]
    assert captions[0].startswith("Every logged value, not smoothed")
    assert captions[1].startswith(
        "Each point of a line is the mean of the last 4 logged values"
    )
    loss, _, perplexity = (ax.lines[0].get_ydata() for ax in figures[1].axes[:3])
    assert loss[9] == pytest.approx((1 / 7 + 1 / 8 + 1 / 9 + 1 / 10) / 4)
    assert perplexity[9] == pytest.approx(math.exp(loss[9]))


# ---- files ----


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_a_figure_is_written_twice_with_the_same_bytes(tmp_path, capsys, suffix, start):
    run = write_log(tmp_path / "run", made_records())
    output = tmp_path / f"figure{suffix}"
    drawn(capsys, run, "--output", output)
    first = output.read_bytes()
    assert first.startswith(start)
    drawn(capsys, run, "--output", output)
    assert output.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, "run"]
    assert plt.get_fignums() == []


def test_many_long_names_leave_room_for_the_curves(tmp_path):
    names = [f"a run with a rather long name, number {n}" for n in range(14)]
    curves = {name: ([1.0, 2.0], [3.0, 4.0]) for name in names}
    figure = plotting.runs_figure([plotting.Panel("loss", "nats", curves)], "step", "caption")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when the curves are left no room
        figure.draw_without_rendering()
    height = figure.axes[0].get_window_extent().height / figure.dpi
    assert height > 1.5
    colors = [line.get_color() for line in figure.axes[0].lines]
    assert len(set(map(tuple, colors))) == 14
    plt.close(figure)


def test_a_last_line_cut_short_is_told_and_left_out(tmp_path, figures, capsys):
    run = write_log(tmp_path / "run", made_records(), end='{"step": 110, "lo')
    _, err = drawn(capsys, run, "--output", tmp_path / "a.png")
    assert err == f"{run / 'metrics.jsonl'}: the last line is cut short and left out\n"
    assert len(figures[0].axes[0].lines[0].get_xdata()) == 10


# ---- mistakes ----


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    good = write_log(tmp_path / "good", made_records())
    output = ["--output", tmp_path / "a.png"]
    assert "absent" in refused(capsys, good, tmp_path / "absent", *output)
    (tmp_path / "empty").mkdir()
    assert "holds no metrics.jsonl" in refused(capsys, tmp_path / "empty", *output)
    assert "holds no line yet" in refused(capsys, write_log(tmp_path / "new", []), *output)
    torn = write_log(tmp_path / "torn", [], end='{"st')
    assert main([str(torn), *map(str, output)]) == 2
    assert "holds no line yet" in capsys.readouterr().err
    broken = write_log(tmp_path / "broken", [{"x": 1}, *made_records()])
    assert "line 1 is damaged" in refused(capsys, broken, *output)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics", "los"], ["'los'", "did you mean loss"]),
        (["--against", "epochs"], ["'epochs'", "steps"]),
        (["--smooth", "0"], ["--smooth is 0"]),
        (["--smooth", "few"], ["few"]),
        (["--output", "curves.gif"], ["curves.gif", ".png, .svg, .pdf"]),
        (["--output", "no/folder/a.png"], ["no/folder/a.png", "No such file"]),
        (["--labels", "a", "b"], ["2 different labels for 1 curves"]),
        (["--colour", "red"], ["--colour"]),
    ],
)
def test_a_mistaken_option_is_refused_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, write_log(tmp_path / "run", made_records()), *arguments)
    for word in words:
        assert word in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_named_twice_is_refused(tmp_path, capsys):
    run = write_log(tmp_path / "run", made_records())
    for again in (run, run.parent / "." / "run" / ".." / "run"):
        assert "named twice" in refused(capsys, run, again, "--output", tmp_path / "a.png")


def test_logs_from_before_tokens_were_counted_are_told(tmp_path, capsys):
    run = write_log(tmp_path / "run", [{"step": n, "loss": 1.0} for n in range(1, 4)])
    assert main([str(run), "--against", "tokens", "--output", str(tmp_path / "a.png")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "not logged: loss with tokens of run" in lines
    assert lines[-1].startswith(
        "error: none of the runs logged loss, mask_accuracy, perplexity"
    )


def test_a_real_run_is_drawn_with_all_of_figure_9(tmp_path, figures, capsys):
    small = "--train.steps 6 --train.log_every 1 --train.batch_size 4 --train.validation_rows 8"
    command = "--recipe toy-pairs --objective repeated-mlm --model.max_positions 64 "
    command += (
        f"--data.num_sentences 64 --masking.strategy bernoulli --train.device cpu {small}"
    )
    output = tmp_path / "run"
    assert pretrain([*command.split(), "--output", str(output)]) == 0
    for against in ("steps", "tokens", "hours"):
        capsys.readouterr()
        _, err = drawn(capsys, output, "--against", against, "--output", tmp_path / "a.png")
        assert err == ""
        found = panels(figures[-1])
        assert list(found)[3:] == ["speed", "peak memory"]  # no CPU's peak is known
        assert [len(points) for _, (points,) in found.values()] == [6] * 5


@pytest.mark.parametrize("key", ["loss", "tokens", "tokens_per_second"])
@pytest.mark.parametrize("value", ["soon", [1], {"a": 1}, 10**400])
def test_a_log_with_something_else_than_numbers_is_told(tmp_path, capsys, key, value):
    records = made_records()
    records[3][key] = value
    run = write_log(tmp_path / "run", records)
    metrics = ["--metrics", "tokens_per_second", "loss"]
    options = ["--against", "tokens", "--output", tmp_path / "figure.svg", *metrics]
    assert main([str(word) for word in (run, *options)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and ("must be numbers" in told or "line 4 is damaged" in told)
