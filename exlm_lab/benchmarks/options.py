"""The options of ``exlm_lab.bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exlm_lab.benchmarks.record import Shape
from exlm_lab.benchmarks.step import LAYOUTS, PRECISIONS
from exlm_lab.benchmarks.training import LEAST_STEPS, WARM_UP_STEPS
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import THREADS, UserError, check_integers, nearest
from exlm_mini.options import command_parser
from exlm_mini.recipes import recipe_names

REFERENCE = {"dag": "vectorized", "emission": "plain", "step": "mlm"}
DTYPES = ("float32", "float64", "bfloat16", "float16")


def bench_parser(text: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of bench.

    Args:
        text: docstring of the command.
        names: of the benchmarks, in the order of the help.
    """
    parser = command_parser("python -m exlm_lab.bench", text)
    commands = parser.add_subparsers(dest="benchmark", metavar="|".join(names), required=True)
    _add_comparisons(commands)
    _add_train(commands)
    return parser


def _add_comparisons(commands: Any) -> None:
    """Those that compare ways to do the same."""
    about = {
        "dag": "the dynamic programme: every alignment backend",
        "emission": "the vocabulary head: plain, one buffer, fused, chunks",
        "step": "a training step: ExLM beside MLM",
    }
    for name, text in about.items():
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument(
            "--shape", type=_shape, action="append", metavar="B,M,L",
            help="rows, targets, states; may be given several times",
        )  # fmt: skip
        sub.add_argument("--json", action="store_true", help="print one JSON list of records")
        sub.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
        usual = "1,2" if name == "step" else "PyTorch's own"
        sub.add_argument(
            "--threads", type=_thread_counts, metavar="N[,N]",
            help=f"CPU threads, one measurement for each; default {usual}",
        )  # fmt: skip
    _add_dag_options(commands.choices["dag"])
    sub = commands.choices["emission"]
    _add(sub, "--width", int, 384, "hidden size D")
    _add(sub, "--vocab-size", int, None, "vocabulary size V; default 8192, and once 50265")
    _add(sub, "--chunk", int, 128, "states per chunk")
    _add_dtype(sub)
    sub = commands.choices["step"]
    _add(sub, "--width", int, 384, "hidden size D")
    _add(sub, "--vocab-size", int, 8192, "vocabulary size V")
    _add(sub, "--layers", int, 6, "Transformer layers")
    _add(sub, "--heads", int, 6, "attention heads")
    _add(sub, "--mask-ratio", float, 0.15, "p: with M it sets the length of a row")
    # As in the recipes made for CPUs; above 0 attention has no fused kernel there.
    _add(sub, "--dropout", float, 0.0, "of hidden states and attention")
    sub.add_argument(
        "--layout", default="ours", choices=LAYOUTS,
        help="released: time ExLM in the layout of the released code, too",
    )  # fmt: skip
    sub.add_argument(
        "--precision", default="fp32", choices=tuple(PRECISIONS), help="of the encoder"
    )
    sub.add_argument("--compile", action="store_true", help="compile the encoder's layers")


def _add_dag_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--backend", action="append", metavar="NAME",
        help=f"one of {', '.join(BACKENDS)}; may be given several times; default: all",
    )  # fmt: skip
    sub.add_argument(
        "--extra-backend", action="append", default=[], type=Path, metavar="FILE.py",
        help="time the function log_likelihood of this file beside ours; for a folder, the "
        "released code's of a checkout in it",
    )  # fmt: skip
    sub.add_argument(
        "--against", default=REFERENCE["dag"], metavar="NAME",
        help=f"backend that ratios compare with; default {REFERENCE['dag']}",
    )  # fmt: skip
    _add_dtype(sub)
    sub.add_argument(
        "--transitions", default="flat", choices=("flat", "sharp"),
        help="as at the start of training, or after it; default flat",
    )  # fmt: skip
    _add(sub, "--seconds", float, 60.0, "that one backend may take at one shape")


def _add_train(commands: Any) -> None:
    about = "optimiser steps of a recipe, without its data"
    sub = commands.add_parser("train", help=about, description=about, allow_abbrev=False)
    sub.add_argument(
        "--recipe", action="append", required=True, metavar="NAME",
        help=f"one of {', '.join(recipe_names())}, or a path; may be given several times",
    )  # fmt: skip
    _add(sub, "--steps", int, 20, f"to time, after {WARM_UP_STEPS} to warm up")
    _add(
        sub, "--seconds", float, None, f"begin no step after so many, if {LEAST_STEPS} are done"
    )
    _add(sub, "--micro-batch", int, None, "rows (or tokens) at a time; default the recipe's")
    _add(
        sub, "--accumulate", int, None, "micro-batches of a step at most; default the recipe's"
    )
    _add(sub, "--precision", str, None, "replaces train.precision")
    _add(sub, "--objective", str, None, "replaces the recipe's; mlm+exlm measures both")
    sub.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    sub.add_argument("--json", action="store_true", help="print one JSON list of records")


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any, what: str
) -> None:
    if default is not None:
        what = f"{what}; default {default}"
    parser.add_argument(name, type=kind, default=default, metavar="X", help=what)


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="float32", help=f"{', '.join(DTYPES)}; default float32"
    )


def _shape(text: str) -> Shape:
    """``B,M,L`` as typed."""
    try:
        shape = Shape(*(int(number) for number in text.split(",")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"'{text}' must be three numbers B,M,L") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{shape}: B, M and L must be at least 1")
    if shape.M > shape.L:
        raise argparse.ArgumentTypeError(
            f"{shape}: {shape.M} targets have no path through {shape.L} states; "
            "make L at least M"
        )
    if shape.M == 1 < shape.L:
        raise argparse.ArgumentTypeError(
            f"{shape}: one target has no path through {shape.L} states; make M at least 2"
        )
    return shape


def _thread_counts(text: str) -> list[int]:
    """``1`` or ``1,2`` as typed."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and THREADS.fits(int(part)) for part in parts):
        raise argparse.ArgumentTypeError(
            f"'{text}' must be one or more numbers, such as 1,2, and each {THREADS.words}"
        )
    return [int(part) for part in parts]


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse what no measurement can be made of.

    Raises:
        UserError: naming the option.
    """
    check_integers({f"--{name.replace('_', '-')}": n for name, n in vars(arguments).items()})
    positive = ("width", "vocab_size", "chunk", "layers", "heads", "seconds")
    for name in (*positive, "epoch_rows", "micro_batch", "accumulate"):
        value = getattr(arguments, name, None)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    vocab_size = getattr(arguments, "vocab_size", None)
    if vocab_size is not None and vocab_size < 8:
        raise UserError(f"--vocab-size is {arguments.vocab_size}; it must be at least 8")
    if getattr(arguments, "dtype", "float32") not in DTYPES:
        raise UserError(f"--dtype is '{arguments.dtype}'; {nearest(arguments.dtype, DTYPES)}")
    if not 0 < getattr(arguments, "mask_ratio", 0.5) < 1:
        raise UserError(f"--mask-ratio is {arguments.mask_ratio}; it must lie between 0 and 1")
