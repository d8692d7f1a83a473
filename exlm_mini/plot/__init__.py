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

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.plot.curves import AXES, METRICS, panel_of, read_runs
from exlm_mini.training.console import exit_code

SUFFIXES = (".png", ".svg", ".pdf")
FIGURE_9 = ("loss", "mask_accuracy", "perplexity")
MACHINE = ("tokens_per_second", "utilisation", "memory")
"""Drawn without being asked for, where a run logged them."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_mini.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--output", default="curves.png", metavar="FILE",
        help=f"ends in {', '.join(SUFFIXES)}; default curves.png",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", choices=METRICS, metavar="NAME",
        help=f"of {', '.join(METRICS)}; default {' '.join(FIGURE_9)}, as Figure 9, and "
        f"{' '.join(MACHINE)} where logged",
    )  # fmt: skip
    parser.add_argument(
        "--against", choices=AXES, default="steps", metavar="AXIS",
        help=f"{', '.join(AXES)}; default steps",
    )  # fmt: skip
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N",
        help="lines: mean over the last N logged values; default 1, none",
    )  # fmt: skip
    parser.add_argument(
        "--labels", nargs="+", metavar="TEXT",
        help="one for each curve; default the directories",
    )  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Read the logs, draw, write.

    Raises:
        UserError: if nothing of what was asked for is in the logs.
    """
    from exlm_mini.plot.figures import runs_figure, save_figure

    window, output = arguments.smooth, Path(arguments.output)
    if window < 1:
        raise UserError(f"--smooth is {window}; it must be at least 1")
    if output.suffix.lower() not in SUFFIXES:
        raise UserError(f"--output {output} must end in {', '.join(SUFFIXES)}")
    runs = read_runs([Path(run) for run in arguments.runs], arguments.labels)
    names = arguments.metrics
    if names is None:
        keys = {key for run in runs for line in run.records for key in line}
        names = [*FIGURE_9, *(name for name in MACHINE if METRICS[name].key in keys)]
    panels = [panel_of(runs, METRICS[name], arguments.against, window) for name in names]
    panels = [panel for panel in panels if panel.curves or panel.dots]
    if not panels:
        raise UserError(
            f"none of the runs logged {', '.join(names)} against {arguments.against}; choose "
            "other --metrics or --against steps"
        )
    caption = _caption(window, has_dots=any(panel.dots for panel in panels))
    save_figure(runs_figure(panels, AXES[arguments.against].label, caption), output)
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)))
