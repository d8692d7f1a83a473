"""The curves of a figure show the numbers of the logs, and leave out what is missing."""

import json
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
from commands import fails

from exlm_mini.plot import main
from exlm_mini.plot.curves import PANELS, draw, read
from exlm_mini.plot.style import save_figure


def write_log(folder, scale=1.0, with_accuracy=True, end=""):
    """Write a log of ten lines with known numbers; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for n in range(1, 11):
        record = {"step": 10 * n, "loss": scale / n, "learning_rate": 1e-3 * n}
        record |= {"tokens": 5000 * n, "seconds": 900.0 * n, "tokens_per_second": 5.5}
        if with_accuracy:
            record["mask_accuracy"] = n / 20
        if n % 5 == 0:
            record["validation_mask_accuracy"] = n / 25
            record["validation_perplexity"] = 2 ** (2 * scale / n)
        record["peak_memory_mib"] = 512.0 * n
        records.append(record)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + end)
    return folder


def figure_of(**folders):
    return draw(read({name: folder / "metrics.jsonl" for name, folder in folders.items()}))


def lines(ax, style):
    return [
        line for line in ax.lines if line.get_linestyle() == style and len(line.get_xdata())
    ]


def points(ax, style):
    return [line.get_xydata().tolist() for line in lines(ax, style)]


def test_lines_are_of_training_and_dots_of_held_out_rows(tmp_path):
    first = write_log(tmp_path / "first")
    second = write_log(tmp_path / "second", 2.0, with_accuracy=False)
    figure = figure_of(first=first, second=second)
    loss, accuracy, perplexity, _, memory = figure.axes
    assert [ax.get_title() for ax in figure.axes] == list(PANELS)
    assert [ax.get_yscale() for ax in (loss, accuracy, perplexity)] == [
        "linear",
        "linear",
        "log",
    ]
    steps = range(1, 11)
    for run, scale in enumerate((1.0, 2.0)):
        assert points(loss, "-")[run] == [pytest.approx([10 * n, scale / n]) for n in steps]
        assert points(perplexity, ":")[run] == [
            pytest.approx([10 * n, 2 ** (2 * scale / n)]) for n in (5, 10)
        ]
    # ExLM logs no accuracy on training batches, only on held-out rows.
    assert points(accuracy, "-") == [[pytest.approx([10 * n, 5 * n]) for n in steps]]
    assert points(accuracy, ":") == [[[50, 20], [100, 40]]] * 2
    assert points(memory, "-")[0][-1] == pytest.approx([100, 5])
    # All curves of a run have the same colour.
    colors = [line.get_color() for line in lines(loss, "-")]
    assert [line.get_color() for line in lines(accuracy, ":")] == colors
    assert [line.get_color() for line in figure.legends[0].get_lines()] == colors
    plt.close(figure)


def test_many_long_names_leave_room_for_the_curves(tmp_path):
    log = write_log(tmp_path / "run")
    names = [f"a run with a rather long name, number {n}" for n in range(14)]
    figure = figure_of(**dict.fromkeys(names, log))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when the curves are left no room
        figure.draw_without_rendering()
    assert figure.axes[0].get_window_extent().height / figure.dpi > 1.2
    assert len({tuple(line.get_color()) for line in figure.axes[0].lines}) == 14
    plt.close(figure)


def test_a_name_is_no_formula(tmp_path):
    figure = figure_of(**{"a$b_$c": write_log(tmp_path / "run")})
    figure.draw_without_rendering()
    plt.close(figure)


def test_a_figure_of_two_models_is_written_while_one_of_them_is_trained(tmp_path):
    write_log(tmp_path / "run" / "mlm")
    write_log(tmp_path / "run" / "exlm", end='{"step": 110, "lo')
    open_before = plt.get_fignums()
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "run"]
    assert plt.get_fignums() == open_before


def test_equal_figures_have_equal_bytes_at_any_time(tmp_path, monkeypatch):
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        written = []
        for seconds in ("0", "9"):
            monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)  # Matplotlib's time of day
            figure, ax = plt.subplots(figsize=(1, 1))
            ax.plot([0, 1], "o-")
            save_figure(figure, tmp_path / f"figure{suffix}")
            written.append((tmp_path / f"figure{suffix}").read_bytes())
        assert written[0] == written[1] and written[0].startswith(start)


@pytest.mark.parametrize(
    ("run", "output", "words"),
    [
        ("absent", "a.png", "absent holds no metrics.jsonl"),
        ("new", "a.png", "no run has logged a step yet"),
        ("run", "curves.gif", "curves.gif must end in .png, .svg, .pdf"),
        ("run", "no/folder/a.png", "there is no folder no/folder; create it"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, monkeypatch, capsys, run, output, words):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "run")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    fails(capsys, main, run, "--output", output, parts=[words])
    assert {path.name for path in tmp_path.iterdir()} == {"run", "new"}
