"""``python -m exlm_mini.plot``: plot the curves of runs from their logs, as in Figure 9. ::

    python -m exlm_mini.plot runs/first runs/second --output curves.svg

Loss, mask accuracy and perplexity come first, then speed and memory, if they were logged. RUN is
the directory of a run, which may still be training; a run that trained several models gives a curve
for each.

Lines show training batches, dots held-out rows. For exlm, mask accuracy has no line, because its
states make several guesses for each mask; the dots count the likeliest token over all states.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code

SUFFIXES = (".png", ".svg", ".pdf")
LOG = "metrics.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_mini.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a training run")
    parser.add_argument(
        "--output", default="curves.png", metavar="FILE",
        help=f"file to write, which ends in {', '.join(SUFFIXES)}; default curves.png",
    )  # fmt: skip
    return parser


def logs_of(paths: list[Path]) -> dict[str, Path]:
    """The path of each model's log, by the directory that holds it."""
    logs: dict[str, Path] = {}
    for path in paths:
        found = [path / LOG] if (path / LOG).is_file() else sorted(path.glob(f"*/{LOG}"))
        if not found:
            raise UserError(
                f"{path} holds no {LOG}; give the --output of a run that has begun to train"
            )
        logs |= {str(log.parent): log for log in found}
    return logs


def run(arguments: argparse.Namespace) -> None:
    """Read the logs, draw the curves and write the figure."""
    output = Path(arguments.output)
    if output.suffix.lower() not in SUFFIXES:
        raise UserError(f"--output {output} must end in {', '.join(SUFFIXES)}")
    logs = logs_of([Path(path) for path in arguments.runs])
    from exlm_mini.plot.curves import draw, read
    from exlm_mini.plot.style import save_figure

    table = read(logs)
    if table.empty:
        raise UserError("no run has logged a step yet; wait until one has")
    save_figure(draw(table), output)
    print(output)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done), 2 (user error) or 130 (interrupted)."""
    return exit_code(lambda: run(_parser().parse_args(argv)))
