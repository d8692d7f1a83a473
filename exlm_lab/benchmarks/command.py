"""Measures what ``bench`` is asked for, and prints it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch

from exlm_lab.benchmarks.dag import dag, load_extra_backend
from exlm_lab.benchmarks.measure import threads
from exlm_lab.benchmarks.record import DAG_SHAPES, TEXT_SHAPE, Record
from exlm_lab.benchmarks.step import VOCAB_SIZE, model_of, row_length, step
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import write_atomically
from exlm_mini.training.console import say
from exlm_mini.training.cost import check_bytes, check_memory
from exlm_mini.training.processes import choose_device
from exlm_mini.training.provenance import machine


def _dag(arguments: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    functions = {}
    for name, backend in BACKENDS.items():
        if reason := backend.why_not(device.type):
            say(f"{name} is left out: {reason.partition(chr(10))[0]}")
        else:
            functions[name] = backend.log_likelihood
    for path in arguments.extra_backend:
        if path.stem in functions:
            raise UserError(
                f"--extra-backend {path}: the name '{path.stem}' is taken; rename it"
            )
        functions[path.stem] = load_extra_backend(path)
    for shape in arguments.shape or DAG_SHAPES:
        B, M, L = shape
        needed = 3 * B * L * (L + M) * 4  # scores, gradients, one step
        check_bytes(f"--shape {shape}", {"choose a smaller one": needed}, device)
        asked_for = {path.stem for path in arguments.extra_backend}
        yield from dag(shape, functions, device, arguments.sharp, say, asked_for)


def _step(arguments: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    for shape in arguments.shape or (TEXT_SHAPE,):
        if shape.M < 3 or shape.L % shape.M:
            raise UserError(
                f"--shape is {shape}; a step has M = masks + 2 targets, at least 3, and k M states"
            )
        model = model_of(shape, arguments.preset)
        run = RunConfig(model=model, train=TrainConfig(batch_size=shape.B))
        check_memory(run, VOCAB_SIZE, row_length(shape), device)
        half = model.shape.num_layers // 2
        expand_at = half, half + half // 2
        yield from step(shape, model, device, VOCAB_SIZE, arguments.precision, expand_at)


MEASURE = {"dag": _dag, "step": _step}
_COLUMNS = "{:>15} {:<13} {:>10} {:>10} {:>7} {:>9} {:>8}"


def _heading(about: dict[str, Any]) -> str:
    """What stands above the first record: the machine, and the names of the columns."""
    device = about["device"] if about["device"] != "cpu" else about["cpu"]
    names = ("B,M,L", "", "wall ms", "cpu ms", "ratio", "peak MiB", "error")
    return (
        f"{device}, threads {torch.get_num_threads()}, torch {about['torch']}, "
        f"commit {about['commit']}\n" + _COLUMNS.format(*names)
    )


def _lines(row: Record) -> Iterator[str]:
    """A record, and below it the parts of a step."""

    def number(name: str, digits: str) -> str:
        return "-" if row.get(name) is None else format(row[name], digits)

    digits = {"median_ms": ".3f", "median_cpu_ms": ".3f", "wall_ratio": ".3f"}
    digits |= {"peak_mib": ".1f", "max_error": ".1e"}
    shape, numbers = ",".join(map(str, row["shape"])), [number(*one) for one in digits.items()]
    yield _COLUMNS.format(shape, row["backend"], *numbers)
    if "parts" in row:
        yield f"{'':>15} {row['step_tokens_per_second']:,.0f} tokens/s, {row['dtype']}"
    for part, spent in row.get("parts", {}).items():
        forward, backward = spent["forward_ms"], spent["backward_ms"]
        yield f"{part:>29}: forward {forward:.1f} ms, backward {backward:.1f} ms"


def report(arguments: argparse.Namespace) -> None:
    """Measure what was asked for and print it, each record as soon as it is there."""
    try:
        device = choose_device(arguments.device)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None
    about = machine(device)
    rows: list[Record] = []
    with threads(arguments.threads or torch.get_num_threads()):
        for record in MEASURE[arguments.benchmark](arguments, device):
            if not rows:
                print(_heading(about))
            rows.append({"benchmark": arguments.benchmark, **record, "machine": about})
            print("\n".join(_lines(record)), flush=True)
            if arguments.output:
                text = json.dumps(rows, indent=1, allow_nan=False) + "\n"
                write_atomically(arguments.output, text.encode())
    if not rows:
        raise UserError("nothing was measured; the lines above say why")
