"""The curves of a figure are the numbers of the logs, and what is missing is said."""

import json
import math
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest

from exlm_mini.plot import figures as drawings
from exlm_mini.plot import main
from exlm_mini.plot.curves import smoothed


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

    monkeypatch.setattr(drawings, "save_figure", keep)
    yield kept
    plt.close("all")


def drawn(capsys, *arguments):
    """What a figure that must succeed says on stderr."""
    code = main([str(argument) for argument in arguments])
    err = capsys.readouterr().err
    assert code == 0, err
    return err


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
    assert drawn(capsys, first, second, "--output", tmp_path / "a.png") == ""
    (figure,) = figures
    assert legend(figure) == [str(first), str(second)]
    found = panels(figure)
    assert list(found)[:3] == ["training loss", "mask accuracy", "perplexity"]
    assert list(found)[3:] == ["speed", "utilisation", "peak memory"]
    rows = [ax.get_subplotspec().rowspan.start for ax in figure.axes]
    assert rows == [0, 0, 0, 1, 1, 1]
    for number, scale in enumerate((1.0, 2.0)):
        for title, value in (
            ("training loss", lambda n, s: s / n),
            ("mask accuracy", lambda n, s: 100 * n / 20),
            ("perplexity", lambda n, s: math.exp(s / n)),
        ):
            expected = [(10 * n, value(n, scale)) for n in range(1, 11)]
            assert np.allclose(found[title][1][number], expected)
    assert [ax.get_yscale() for ax in figure.axes[:3]] == ["linear", "linear", "log"]
    assert found["utilisation"][1][0][-1] == [100, pytest.approx(25)]
    assert found["peak memory"][1][0][-1] == [100, pytest.approx(5)]


def test_what_is_not_logged_is_left_out_and_told(tmp_path, figures, capsys):
    records = made_records(with_accuracy=False)
    for record in records:
        del record["model_flops_utilisation"], record["peak_memory_mib"]
        record.pop("validation_mask_accuracy", None)
    first = write_log(tmp_path / "first", records)
    err = drawn(capsys, first, "--output", tmp_path / "a.png")
    assert err == f"not logged: mask_accuracy of {first}\n"  # the machine's were not asked for
    assert list(panels(figures[0])) == ["training loss", "perplexity", "speed"]
    second = write_log(tmp_path / "second", made_records())
    err = drawn(capsys, first, second, "--output", tmp_path / "a.png")
    for name in ("mask_accuracy", "model_flops_utilisation", "peak_memory_mib"):
        assert f"not logged: {name} of {first}\n" in err
    # The curves of one run have one colour.
    loss, accuracy, *_ = figures[1].axes
    colors = [line.get_color() for line in loss.lines]
    assert [line.get_color() for line in lines_of(accuracy)] == colors[1:]
    assert [line.get_color() for line in figures[1].legends[0].get_lines()] == colors


def test_held_out_rows_are_dots_in_the_panel_of_their_quantity(tmp_path, figures, capsys):
    first = write_log(tmp_path / "first", made_records())
    second = write_log(tmp_path / "second", made_records(2.0, with_accuracy=False))
    err = drawn(capsys, first, second, "--output", tmp_path / "a.png", "--smooth", "3")
    assert err == ""  # ExLM logs no accuracy of training batches, but one of held-out rows
    loss, accuracy, perplexity, *machine = figures[0].axes
    assert not any(map(dots_of, (loss, *machine)))
    shares = [[50, pytest.approx(100 * 5 / 25)], [100, pytest.approx(100 * 10 / 25)]]
    assert [line.get_xydata().tolist() for line in dots_of(accuracy)] == [shares, shares]
    assert [line.get_ydata().tolist() for line in dots_of(perplexity)] == [
        pytest.approx([2 ** (2 * scale / 5), 2 ** (2 * scale / 10)]) for scale in (1.0, 2.0)
    ]
    colors = [line.get_color() for line in lines_of(loss)]
    assert [line.get_color() for line in dots_of(accuracy)] == colors


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
    options = ["--metrics", "validation", "--output", tmp_path / "a.svg"]
    drawn(capsys, run, "--against", against, *options)
    (ax,) = figures[0].axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == (label, "bits per masked token")
    assert ax.lines[0].get_xydata()[-1].tolist() == pytest.approx([last, 2 / 10])


def test_curves_are_named_by_their_directories_or_as_one_likes(tmp_path, figures, capsys):
    pairs, other = tmp_path / "pairs", write_log(tmp_path / "other", made_records())
    for name in ("mlm", "exlm"):
        write_log(pairs / name, made_records())
    drawn(capsys, pairs, other, "--output", tmp_path / "a.png")
    assert legend(figures[0]) == [str(pairs / "exlm"), str(pairs / "mlm"), str(other)]
    labels = ["p = 0.15", "p = 0.387", "p = 0.5"]
    drawn(capsys, pairs, other, "--output", tmp_path / "a.png", "--labels", *labels)
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
    assert smoothed([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]
    assert smoothed([4.0, 2.0, 3.0, 7.0], 9) == [4.0, 3.0, 3.0, 4.0]


def test_perplexity_is_that_of_the_smoothed_loss(tmp_path, figures, capsys):
    run = write_log(tmp_path / "run", made_records())
    drawn(capsys, run, "--output", tmp_path / "a.png", "--smooth", "4")
    assert "mean of the last 4 logged values" in figures[0].get_supxlabel().replace("\n", " ")
    loss, _, perplexity = (ax.lines[0].get_ydata() for ax in figures[0].axes[:3])
    assert loss[9] == pytest.approx((1 / 7 + 1 / 8 + 1 / 9 + 1 / 10) / 4)
    assert perplexity[9] == pytest.approx(math.exp(loss[9]))


# ---- files ----


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_a_figure_is_written_twice_with_the_same_bytes(tmp_path, capsys, suffix, start):
    run = write_log(tmp_path / "run", made_records())
    output = tmp_path / f"figure{suffix}"
    drawn(capsys, run, "--metrics", "loss", "--output", output)
    first = output.read_bytes()
    assert first.startswith(start)
    drawn(capsys, run, "--metrics", "loss", "--output", output)
    assert output.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, "run"]
    assert plt.get_fignums() == []


def test_many_long_names_leave_room_for_the_curves():
    names = [f"a run with a rather long name, number {n}" for n in range(14)]
    curves = {name: ([1.0, 2.0], [3.0, 4.0]) for name in names}
    figure = drawings.runs_figure([drawings.Panel("loss", "nats", curves)], "step", "caption")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when the curves are left no room
        figure.draw_without_rendering()
    assert figure.axes[0].get_window_extent().height / figure.dpi > 1.5
    assert len({tuple(line.get_color()) for line in figure.axes[0].lines}) == 14
    plt.close(figure)


def test_a_last_line_cut_short_is_told_and_left_out(tmp_path, figures, capsys):
    run = write_log(tmp_path / "run", made_records(), end='{"step": 110, "lo')
    err = drawn(capsys, run, "--output", tmp_path / "a.png")
    assert str(run / "metrics.jsonl") in err and "cut short" in err
    assert len(figures[0].axes[0].lines[0].get_xdata()) == 10


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    good = write_log(tmp_path / "good", made_records())
    output = ["--output", tmp_path / "a.png"]
    assert "holds no metrics.jsonl" in refused(capsys, good, tmp_path / "absent", *output)
    assert "holds no line yet" in refused(capsys, write_log(tmp_path / "new", []), *output)
    broken = write_log(tmp_path / "broken", [{"x": 1}, *made_records()])
    assert "line 1 is damaged" in refused(capsys, broken, *output)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("loss", "soon"), ("tokens", [1]), ("loss", 10**400)]
)
def test_a_log_with_something_else_than_numbers_is_told(tmp_path, capsys, key, value):
    records = made_records()
    records[3][key] = value
    run = write_log(tmp_path / "run", records)
    metrics = ["--metrics", "tokens_per_second", "loss"]
    options = ["--against", "tokens", "--output", tmp_path / "figure.svg", *metrics]
    assert main([str(word) for word in (run, *options)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and ("must be numbers" in told or "line 4 is damaged" in told)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics", "los"], ["'los'", "loss"]),
        (["--smooth", "0"], ["--smooth is 0"]),
        (["--output", "curves.gif"], ["curves.gif", ".png, .svg, .pdf"]),
        (
            ["--output", "no/folder/a.png", "--metrics", "loss"],
            ["no/folder/a.png", "No such file"],
        ),
        (["--against", "days"], ["'days'", "hours"]),
        (["--labels", "a", "b"], ["2 different labels for 1 curves"]),
    ],
)
def test_a_mistaken_option_is_refused_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, write_log(tmp_path / "run", made_records()), *arguments)
    assert all(word in line for word in words)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
