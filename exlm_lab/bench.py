"""Time and memory of the alignment backends, and of a training step. ::

    python -m exlm_lab.bench dag             every backend at five shapes
    python -m exlm_lab.bench dag --shape 8,77,308 --extra-backend mine.py
    python -m exlm_lab.bench step            ExLM beside MLM, part by part; expanded late too

All times are medians of forward and backward pass together, after a run to warm up, and are
compared within one process: their ratio is that of the wall clock to vectorized or mlm. The table
goes to stdout, with --output the records to a file too; what was left out, and why, goes to
stderr.

An extra backend is a Python file that defines ::

    log_likelihood(
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B
    )

with the meaning of exlm_mini.alignment.dag_log_likelihood: log-likelihoods (B,), differentiable
by both scores. It is named after its file. Of a checkout of the released code, named by its folder,
it is torch_dag_loss in PyTorch that is timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exlm_lab.benchmarks.record import Shape
from exlm_mini.config import ENCODER_PRESETS
from exlm_mini.config.checks import Threads
from exlm_mini.config.options import command_parser, of
from exlm_mini.training.console import exit_code

ABOUT = {
    "dag": "the dynamic programme: every alignment backend",
    "step": "a training step: ExLM beside MLM",
}
PRECISIONS = ("fp32", "bf16")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_lab.bench", __doc__)
    commands = parser.add_subparsers(dest="benchmark", metavar="|".join(ABOUT), required=True)
    for name, about in ABOUT.items():
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        add = sub.add_argument
        add("--output", type=Path, metavar="FILE", help="write the records, one JSON list")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
        add(
            "--shape", type=_shape, action="append", metavar="B,M,L",
            help="rows, targets, states; may be given several times",
        )  # fmt: skip
        add(
            "--threads", type=of(Threads), metavar="N", help="of the CPU; default PyTorch's own"
        )
        if name == "step":
            add("--precision", choices=PRECISIONS, default="fp32", help="fp32 or bf16")
            add("--preset", choices=ENCODER_PRESETS, help="default 8 layers of width 384")
        if name == "dag":
            add("--sharp", action="store_true", help="graphs like those of a trained model")
            add(
                "--extra-backend", type=Path, action="append", default=[], metavar="PATH",
                help="a file with another, or a checkout of the released code",
            )  # fmt: skip
    return parser


def _shape(text: str) -> Shape:
    """``B,M,L`` as typed."""
    try:
        shape = Shape(*(int(number) for number in text.split(",")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"'{text}' must be three numbers B,M,L") from None
    if not (min(shape) >= 1 and (1 < shape.M <= shape.L or shape.M == shape.L)):
        raise argparse.ArgumentTypeError(
            f"{shape}: {shape.M} targets have no path through {shape.L} states; at least B is 1, M "
            "is 2, and L is M"
        )
    return shape


def run(arguments: argparse.Namespace) -> None:
    """Measure what was asked for and print it, each record as soon as it is there."""
    from exlm_lab.benchmarks.command import report

    report(arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
