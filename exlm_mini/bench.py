"""Time, memory and error of the alignment, the vocabulary head and a training step. ::

    python -m exlm_mini.bench dag                       every backend at five shapes
    python -m exlm_mini.bench dag --shape 8,77,308 --extra-backend mine.py
    python -m exlm_mini.bench emission                  the vocabulary head three ways
    python -m exlm_mini.bench step                      ExLM beside MLM, part by part

All times are medians of forward and backward pass together, after a run to warm up, and are
compared within one process. Results go to stdout, as a table or with --json as one list of
records; what was left out, and why, goes to stderr.

An extra backend is a Python file that defines ::

    log_likelihood(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)

with the meaning of exlm_mini.alignment.dag_log_likelihood: log-likelihoods (B,), differentiable
by both scores. It is named after its file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from exlm_mini.alignment import BACKENDS
from exlm_mini.benchmarks import DAG_SHAPES, TEXT_SHAPE, Record, Shape, as_json
from exlm_mini.benchmarks.dag import LogLikelihood, dag
from exlm_mini.benchmarks.emission import emission
from exlm_mini.benchmarks.step import PARTS, row_length, step
from exlm_mini.config import ModelConfig, UserError, nearest
from exlm_mini.console import say
from exlm_mini.measure import machine, threads
from exlm_mini.training import choose_device

INTERRUPTED = 130
REFERENCE = {"dag": "vectorized", "emission": "plain", "step": "mlm"}
DTYPES = ("float32", "float64", "bfloat16", "float16")
LONG_SHAPE = Shape(4, 78, 312)
"""Rows of 512 tokens, 76 masked."""


class _Parser(argparse.ArgumentParser):
    """An option that cannot be is a ``UserError``, not argparse's several lines."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


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
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"'{text}' must be one or more numbers, such as 1,2")
    return [int(part) for part in text.split(",")]


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any, what: str
) -> None:
    parser.add_argument(
        name, type=kind, default=default, metavar="X", help=f"{what}; default {default}"
    )


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n")
    parser = _Parser(
        prog="python -m exlm_mini.bench",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        dest="benchmark", metavar="dag|emission|step", required=True
    )
    about = {
        "dag": "the dynamic programme: every alignment backend",
        "emission": "the vocabulary head: plain, one buffer, chunks",
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
    for name, width in (("emission", 384), ("step", 384)):
        sub = commands.choices[name]
        _add(sub, "--width", int, width, "hidden size D")
        _add(sub, "--vocab-size", int, 8192, "vocabulary size V")
    _add(commands.choices["emission"], "--chunk", int, 1024, "states per chunk")
    sub = commands.choices["step"]
    _add(sub, "--layers", int, 6, "Transformer layers")
    _add(sub, "--heads", int, 6, "attention heads")
    _add(sub, "--mask-ratio", float, 0.15, "p: with M it sets the length of a row")
    _add(sub, "--dropout", float, 0.1, "of hidden states and attention")
    return parser


def _add_dag_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--backend", action="append", metavar="NAME",
        help=f"one of {', '.join(BACKENDS)}; may be given several times; default: all",
    )  # fmt: skip
    sub.add_argument(
        "--extra-backend", action="append", default=[], type=Path, metavar="FILE.py",
        help="time the function log_likelihood of this file beside ours",
    )  # fmt: skip
    sub.add_argument(
        "--against", default=REFERENCE["dag"], metavar="NAME",
        help=f"backend that ratios compare with; default {REFERENCE['dag']}",
    )  # fmt: skip
    sub.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)}; default float32")
    sub.add_argument(
        "--transitions", default="flat", choices=("flat", "sharp"),
        help="as at the start of training, or after it; default flat",
    )  # fmt: skip
    _add(sub, "--seconds", float, 60.0, "that one backend may take at one shape")


# ---- backends ----


def load_extra_backend(path: Path) -> LogLikelihood:
    """The function ``log_likelihood`` of a file.

    Raises:
        UserError: there is no such file, it does not run, or defines no such function.
    """
    if not path.is_file():
        raise UserError(f"--extra-backend {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"extra_backend_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--extra-backend {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and torch.library look modules up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--extra-backend {path} does not run: {reason}") from None
    function = getattr(module, "log_likelihood", None)
    if not callable(function):
        raise UserError(
            f"--extra-backend {path} defines no function log_likelihood(log_emission_BML, "
            "log_transition_BLL, num_targets_B, num_states_B)"
        )
    return function


def _functions(arguments: argparse.Namespace) -> dict[str, LogLikelihood]:
    """What to time, the reference first, so that ratios can be told at once."""
    functions = {}
    for name in arguments.backend or BACKENDS:
        if name not in BACKENDS:
            raise UserError(f"unknown backend '{name}'; {nearest(name, BACKENDS)}")
        functions[name] = BACKENDS[name].log_likelihood
    for path in arguments.extra_backend:
        if path.stem in BACKENDS or path.stem in functions:
            raise UserError(
                f"--extra-backend {path}: the name '{path.stem}' is taken; rename it"
            )
        functions[path.stem] = load_extra_backend(path)
    against = arguments.against
    if against not in functions:
        if against not in BACKENDS:
            raise UserError(f"--against '{against}': {nearest(against, functions)}")
        functions[against] = BACKENDS[against].log_likelihood
    return {against: functions.pop(against), **functions}


# ---- measuring ----


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse what no measurement can be made of."""
    for name in ("width", "vocab_size", "chunk", "layers", "heads", "seconds"):
        value = getattr(arguments, name, 1)
        if not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if getattr(arguments, "vocab_size", 8) < 8:
        raise UserError(f"--vocab-size is {arguments.vocab_size}; it must be at least 8")
    if getattr(arguments, "dtype", "float32") not in DTYPES:
        raise UserError(f"--dtype is '{arguments.dtype}'; {nearest(arguments.dtype, DTYPES)}")
    if not 0 < getattr(arguments, "mask_ratio", 0.5) < 1:
        raise UserError(f"--mask-ratio is {arguments.mask_ratio}; it must lie between 0 and 1")


def _device(name: str) -> torch.device:
    try:
        return choose_device(name)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None


def _records(arguments: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    """One after the other, for every shape and number of threads."""
    usual = {"dag": DAG_SHAPES, "emission": (TEXT_SHAPE, LONG_SHAPE), "step": (TEXT_SHAPE,)}
    measure = {"dag": _dag, "emission": _emission, "step": _step}[arguments.benchmark]
    # Made before anything is measured, so that a mistake shows at once.
    jobs = measure(arguments, arguments.shape or usual[arguments.benchmark], device)
    own_threads = [1, 2] if arguments.benchmark == "step" else [torch.get_num_threads()]
    for number in arguments.threads or own_threads:
        with threads(number):
            for job in jobs:
                yield from job()


Jobs = list[Callable[[], Iterator[Record]]]
"""One for each shape."""


def _dag(arguments: argparse.Namespace, shapes: Sequence[Shape], device: torch.device) -> Jobs:
    dtype = getattr(torch, arguments.dtype)
    functions = _functions(arguments)
    is_sharp = arguments.transitions == "sharp"
    for B, M, L in shapes:  # scores, gradients, one step
        _check_memory(Shape(B, M, L), 3 * B * L * (L + M) * max(dtype.itemsize, 4), device)
    return [
        partial(dag, shape, functions, device, dtype, is_sharp, arguments.seconds, say)
        for shape in shapes
    ]


def _emission(
    arguments: argparse.Namespace, shapes: Sequence[Shape], device: torch.device
) -> Jobs:
    sizes = (arguments.width, arguments.vocab_size, arguments.chunk)
    for shape in shapes:  # logits, their log-softmax and gradient, in float64
        _check_memory(shape, 3 * 8 * shape.B * shape.L * arguments.vocab_size, device)
    return [partial(emission, shape, *sizes, device) for shape in shapes]


def _step(arguments: argparse.Namespace, shapes: Sequence[Shape], device: torch.device) -> Jobs:
    sizes = (arguments.mask_ratio, arguments.vocab_size)
    return [
        partial(step, shape, *sizes, _step_config(arguments, shape), device) for shape in shapes
    ]


def _step_config(arguments: argparse.Namespace, shape: Shape) -> ModelConfig:
    """The model whose graph has this shape."""
    if shape.M < 3 or shape.L % shape.M:
        raise UserError(
            f"--shape is {shape}; a step has M = masks + 2 targets, at least 3, and k M states"
        )
    k = shape.L // shape.M
    N = row_length(shape, arguments.mask_ratio)
    return ModelConfig(
        num_layers=arguments.layers,
        width=arguments.width,
        ffn_width=4 * arguments.width,
        num_heads=arguments.heads,
        states_per_mask=k,
        max_positions=max(512, N + shape.M * (k - 1)),
        dropout=arguments.dropout,
        attention_dropout=arguments.dropout,
    )


def _check_memory(shape: Shape, needed: int, device: torch.device) -> None:
    """Refuse bytes that cannot fit, before the machine comes to a halt."""
    if device.type == "cuda":
        present = torch.cuda.get_device_properties(device).total_memory
    else:
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise UserError(
            f"--shape {shape} needs {needed / 2**30:.1f} GiB and there are "
            f"{present / 2**30:.1f}; choose a smaller one"
        )


# ---- showing ----

COLUMNS = "{:>14} {:<12} {:>3} {:>12} {:>12} {:>18} {:>10} {:>10} {:>9}"


def _heading(reference: str, machine: dict[str, Any]) -> list[str]:
    device = machine["device"] if machine["device"] != "cpu" else machine["cpu"]
    names = ("B,M,L", "", "thr", "wall ms", "cpu ms", f"vs {reference}", "peak MiB")
    return [
        f"{device}, torch {machine['torch']}, commit {machine['commit']}",
        COLUMNS.format(*names, "RSS MiB", "error"),
    ]


def _row(row: dict[str, Any], benchmark: str) -> list[str]:
    """A record for a person, the parts of a step below it."""
    ratio = "-"
    if row["wall_ratio"] is not None and benchmark == "dag":
        ratio = f"{1 / row['wall_ratio']:.3g}x faster"
    elif row["wall_ratio"] is not None:
        ratio = f"{row['wall_ratio']:.2f}, cpu {row['cpu_ratio']:.2f}"
    lines = [
        COLUMNS.format(
            ",".join(map(str, row["shape"])),
            row["backend"],
            row["threads"],
            f"{row['median_ms']:.3f}",
            f"{row['median_cpu_ms']:.3f}",
            ratio,
            f"{row['peak_mib']:.1f}",
            "-" if row["resident_mib"] is None else f"{row['resident_mib']:.1f}",
            "-" if row["max_error"] is None else f"{row['max_error']:.1e}",
        )
    ]
    for part in PARTS:
        if spent := row.get("parts", {}).get(part):
            forward, backward = spent["forward_ms"], spent["backward_ms"]
            lines.append(
                f"{part:>30}: forward {forward:8.1f} ms, backward {backward:8.1f} ms "
                f"(cpu {spent['forward_cpu_ms']:.1f}, {spent['backward_cpu_ms']:.1f})"
            )
    return lines


def run(arguments: argparse.Namespace) -> None:
    """Measure what was asked for and print it."""
    _check_numbers(arguments)
    device = _device(arguments.device)
    about = machine(device)
    reference = getattr(arguments, "against", REFERENCE[arguments.benchmark])
    references: dict[tuple[Shape, int], Record] = {}
    stdout = sys.stdout
    rows = []
    # What a backend prints is not what was measured.
    with contextlib.redirect_stdout(sys.stderr):
        for record in _records(arguments, device):
            here = (record.shape, record.details["threads"])
            if record.backend == reference:
                references[here] = record
            rows.append(as_json(record, references.get(here), about))
            if not arguments.json:
                heading = _heading(reference, about) if len(rows) == 1 else []
                for line in [*heading, *_row(rows[-1], arguments.benchmark)]:
                    print(line, file=stdout, flush=True)
    if not rows:
        raise UserError("nothing was measured; the lines above say why")
    if arguments.json:
        print(json.dumps(rows, allow_nan=False))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    try:
        run(_parser().parse_args(argv))
        sys.stdout.flush()
    except UserError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
