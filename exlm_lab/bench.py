"""Time and memory of the alignment backends, and of a training step. ::

    python -m exlm_lab.bench dag             every backend at four shapes, for some minutes
    python -m exlm_lab.bench dag --shape 8,77,308 --extra-backend mine.py
    python -m exlm_lab.bench step            MLM, ExLM and late expansion, part by part
    python -m exlm_lab.bench step --recipe smiles-tiny

All times are medians over several runs in one process, after a warm-up run: of the forward and
backward pass together (dag), or of a whole training step (step). The column "ratio" is the
wall-clock time divided by that of vectorized (dag) or mlm (step), "error" the largest relative
error of the first and of the last row against float64. The table goes to stdout; with
--output, the records also go to a file. What was left out, and why, goes to stderr.

An extra backend is a Python file that defines ::

    log_likelihood(
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B
    )

with the meaning of exlm_mini.alignment.dag_log_likelihood: it returns log-likelihoods (B,) that are
differentiable with respect to both scores. The backend is named after its file. PATH may also be a
checkout of the released code, whose torch_dag_loss, in PyTorch, is timed under the folder's name.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_lab.benchmarks.record import DAG_SHAPES, Record, Shape
from exlm_mini.config.checks import Threads, UserError
from exlm_mini.config.options import command_parser, of
from exlm_mini.config.recipes import load_recipe
from exlm_mini.training.console import exit_code, say

if TYPE_CHECKING:  # neither help nor a mistyped option has to wait for torch
    import torch

ABOUT = {
    "dag": "time the dynamic programme with every alignment backend",
    "step": "time a training step of ExLM and of MLM",
}
RECIPE = "text-tiny"
_COLUMNS = "{:>15} {:<13} {:>10} {:>10} {:>7} {:>9} {:>8}"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_lab.bench", __doc__)
    commands = parser.add_subparsers(dest="benchmark", metavar="|".join(ABOUT), required=True)
    for name, about in ABOUT.items():
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        add = sub.add_argument
        add("--output", type=Path, metavar="FILE", help="also write the records here, as JSON")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
        add(
            "--threads", type=of(Threads), metavar="N",
            help="number of CPU threads; default: PyTorch's own",
        )  # fmt: skip
        if name == "step":
            recipe = (
                f"recipe of the model, default {RECIPE}; run on embedded data of the same kind"
            )
            add("--recipe", metavar="NAME", default=RECIPE, help=recipe)
        if name == "dag":
            add(
                "--shape", type=_shape, action="append", metavar="B,M,L",
                help="rows, targets, states; may be given several times",
            )  # fmt: skip
            add("--sharp", action="store_true", help="use graphs like those of a trained model")
            add(
                "--extra-backend", type=Path, action="append", default=[], metavar="PATH",
                help="file that defines another backend, or a checkout of the released code",
            )  # fmt: skip
    return parser


def _shape(text: str) -> Shape:
    """Parse ``B,M,L`` as typed on the command line."""
    try:
        shape = Shape(*(int(number) for number in text.split(",")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"'{text}' must be three numbers B,M,L") from None
    if not (min(shape) >= 1 and (1 < shape.M <= shape.L or shape.M == shape.L)):
        raise argparse.ArgumentTypeError(
            f"{shape}: B must be at least 1, M at least 2, and L at least M"
        )
    return shape


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark that was asked for, and print each record as soon as it is measured."""
    import torch

    from exlm_lab.benchmarks.measure import threads
    from exlm_mini.data.files import write_atomically
    from exlm_mini.training.processes import choose_device
    from exlm_mini.training.provenance import machine

    device = choose_device(arguments.device)
    about = machine(device)
    rows: list[Record] = []
    with threads(arguments.threads or torch.get_num_threads()):
        for record in _records(arguments, device):
            if not rows:
                name = about["device"] if about["device"] != "cpu" else about["cpu"]
                print(
                    f"{name}, threads {torch.get_num_threads()}, torch {about['torch']}, commit "
                    f"{about['commit']}\n"
                    + _COLUMNS.format(
                        "shape", "", "wall ms", "cpu ms", "ratio", "peak MiB", "error"
                    )
                )
            rows.append({"benchmark": arguments.benchmark, **record, "machine": about})
            print("\n".join(_lines(record)), flush=True)
            if arguments.output:
                text = json.dumps(rows, indent=1, allow_nan=False) + "\n"
                write_atomically(arguments.output, text.encode())
    if not rows:
        raise UserError("nothing was measured; the lines above say why")


def _records(arguments: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    if arguments.benchmark == "dag":
        from exlm_lab.benchmarks.dag import backends, dag

        functions = backends(arguments.extra_backend, device, say)
        for shape in arguments.shape or DAG_SHAPES:
            yield from dag(shape, functions, device, arguments.sharp, say)
    else:
        from exlm_lab.benchmarks.step import step
        from exlm_mini.data.corpus import prepare_corpus

        config = load_recipe(arguments.recipe)
        data = replace(config.data, pack=None, source=())
        train = replace(config.train, device=str(device))
        with tempfile.TemporaryDirectory() as folder:
            corpus = prepare_corpus(data, Path(folder), 1, say)
            yield from step(replace(config, objective="exlm", data=data, train=train), corpus)


def _lines(row: Record) -> Iterator[str]:
    """A record as a line of the table, followed by the parts of a step if it has any."""
    digits = {"median_ms": ".3f", "median_cpu_ms": ".3f", "wall_ratio": ".3f"}
    digits |= {"peak_mib": ".1f", "max_error": ".1e"}
    numbers = ["-" if row.get(n) is None else format(row[n], d) for n, d in digits.items()]
    yield _COLUMNS.format(",".join(map(str, row["shape"])), row["backend"], *numbers)
    if "parts" in row:
        yield f"{'':>15} {row['step_tokens_per_second']:,.0f} tokens/s, {row['dtype']}"
    for part, spent in row.get("parts", {}).items():
        forward, backward = spent["forward_ms"], spent["backward_ms"]
        yield f"{part:>29}: forward {forward:.1f} ms, backward {backward:.1f} ms"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit codes: 0 done, 2 user error, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
