"""``python -m exlm_mini.plot``: curves of runs from their logs, in the form of Figure 9. ::

    python -m exlm_mini.plot runs/first runs/second --output curves.svg
    python -m exlm_mini.plot runs/first --metrics validation --against hours

Without --metrics the panels of Figure 9 come first, then how the machine was used, as far as that
is logged. RUN is the directory of a run, also of one that is still training; one that trained
several models gives a curve for each.

Lines are of training batches, dots of held-out rows. mask_accuracy has no line for exlm, whose
states are several guesses for each mask; its dots count the likeliest token over all states.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from exlm_mini.config.checks import UserError, nearest
from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code

SUFFIXES = (".png", ".svg", ".pdf")
FIGURE_9 = ("loss", "mask_accuracy", "perplexity")
MACHINE = ("tokens_per_second", "utilisation", "memory")
"""Drawn without being asked for, where a run logged them."""


def _parser() -> argparse.ArgumentParser:
    from exlm_mini.plot.curves import AXES, METRICS

    parser = command_parser("python -m exlm_mini.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--output", default="curves.png", metavar="FILE",
        help=f"ends in {', '.join(SUFFIXES)}; default curves.png",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", default=None, metavar="NAME",
        help=f"of {', '.join(METRICS)}; default {' '.join(FIGURE_9)}, as Figure 9, and "
        f"{' '.join(MACHINE)} where logged",
    )  # fmt: skip
    parser.add_argument(
        "--against", default="steps", metavar="AXIS", help=f"{', '.join(AXES)}; default steps"
    )
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N",
        help="lines: mean over the last N logged values; default 1, none",
    )  # fmt: skip
    parser.add_argument(
        "--labels", nargs="+", default=None, metavar="TEXT",
        help="one for each curve; default the names of the directories",
    )  # fmt: skip
    return parser


def _checked(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be drawn before a log is read."""
    from exlm_mini.plot.curves import AXES, METRICS

    for name in arguments.metrics or FIGURE_9:
        if name not in METRICS:
            raise UserError(f"unknown metric '{name}'; {nearest(name, METRICS)}")
    if arguments.against not in AXES:
        raise UserError(
            f"--against is '{arguments.against}'; {nearest(arguments.against, AXES)}"
        )
    if arguments.smooth < 1:
        raise UserError(f"--smooth is {arguments.smooth}; it must be at least 1")
    suffix = Path(arguments.output).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--output {arguments.output} must end in {', '.join(SUFFIXES)}")


def draw(arguments: argparse.Namespace) -> None:
    """Read, draw, write.

    Raises:
        UserError: if nothing of what was asked for is in the logs, or the file cannot be written.
    """
    from exlm_mini.plot.curves import METRICS, in_its_unit, logged, panel_of, read_runs
    from exlm_mini.plot.figures import runs_figure, save_figure

    runs = read_runs([Path(run) for run in arguments.runs], arguments.labels)
    names = arguments.metrics or [*FIGURE_9, *logged(runs, MACHINE)]
    panels = []
    for name in dict.fromkeys(names):
        panel = panel_of(runs, METRICS[name], arguments.against, arguments.smooth)
        if panel.curves or panel.dots:
            panels.append(panel)
    if not panels:
        raise UserError(
            f"none of the runs logged {', '.join(names)} against {arguments.against}; choose "
            "other --metrics or --against steps"
        )
    output = Path(arguments.output)
    panels, x_label = in_its_unit(panels, arguments.against)
    has_dots = any(panel.dots for panel in panels)
    figure = runs_figure(panels, x_label, _caption(arguments.smooth, has_dots))
    try:
        save_figure(figure, output)
    except OSError as error:
        raise UserError(
            f"cannot write {output} ({error.strerror}); check its folder and the disk"
        ) from None
    print(output)


def _caption(window: int, has_dots: bool) -> str:
    text = "Every logged value, not smoothed; those of training are of single batches."
    if window > 1:
        text = (
            f"Each point of a line is the mean of the last {window} logged values, fewer at the "
            "start; perplexity is that of the mean loss."
        )
    if has_dots:
        text += (
            " Dots: held-out rows, per masked token; the training loss of ExLM is per target, "
            "boundaries included."
        )
    return text


def run(arguments: argparse.Namespace) -> None:
    """Draw what was asked for."""
    _checked(arguments)
    draw(arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)))
