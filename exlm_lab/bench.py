"""Time, memory and error of the alignment, the vocabulary head and a training step. ::

    python -m exlm_lab.bench dag                       every backend at five shapes
    python -m exlm_lab.bench dag --shape 8,77,308 --extra-backend mine.py
    python -m exlm_lab.bench emission                  the vocabulary head four ways
    python -m exlm_lab.bench step                      ExLM beside MLM, part by part
    python -m exlm_lab.bench train --recipe text-base  whole steps of a recipe on made-up tokens

All times are medians; those of the first three are of forward and backward pass together, after a
run to warm up, and are compared within one process. Results go to stdout, as a table or with --json
as one list of records; what was left out, and why, goes to stderr. The tokens per
second of train are what pretrain --dry-run --throughput takes.

An extra backend is a Python file that defines ::

    log_likelihood(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)

with the meaning of exlm_mini.alignment.dag_log_likelihood: log-likelihoods (B,), differentiable
by both scores. It is named after its file. Of a checkout of the released code, named by its folder,
it is torch_dag_loss in PyTorch that is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from exlm_lab.benchmarks.dag import LogLikelihood, dag, load_extra_backend
from exlm_lab.benchmarks.emission import emission
from exlm_lab.benchmarks.measure import threads
from exlm_lab.benchmarks.options import REFERENCE, bench_parser, check_options
from exlm_lab.benchmarks.record import (
    DAG_SHAPES,
    EMISSION_SIZES,
    TEXT_SHAPE,
    Record,
    Shape,
    as_json,
)
from exlm_lab.benchmarks.step import model_of, row_length, step
from exlm_lab.benchmarks.table import heading, lines, machine_line, train_lines
from exlm_lab.benchmarks.training import LEAST_STEPS, train
from exlm_mini.alignment import BACKENDS, dag_log_likelihood
from exlm_mini.config import ModelConfig, RunConfig, TrainConfig, UserError, nearest
from exlm_mini.data.memory import check_bytes
from exlm_mini.recipes import load_recipe
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.cost import check_memory
from exlm_mini.training.dry_run import objectives_of
from exlm_mini.training.parts import choose_device
from exlm_mini.training.provenance import machine

# ---- backends ----


def _functions(arguments: argparse.Namespace, device: torch.device) -> dict[str, LogLikelihood]:
    """What to time, the reference first, so that ratios can be told at once."""
    functions = {}
    for name in arguments.backend or BACKENDS:
        if name not in BACKENDS:
            raise UserError(f"unknown backend '{name}'; {nearest(name, BACKENDS)}")
        if reason := _why_not(name, device):
            say(f"{name} is left out: {reason}")
            continue
        functions[name] = _function(name, arguments.dtype)
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
        if reason := _why_not(against, device):
            raise UserError(f"--against '{against}': {reason}; choose another")
        functions[against] = _function(against, arguments.dtype)
    return {against: functions.pop(against), **functions}


def _function(name: str, dtype: str) -> LogLikelihood:
    """The backend itself; behind the public interface, which raises it, for half precision."""
    is_half = getattr(torch, dtype).itemsize < torch.float32.itemsize
    return (
        partial(dag_log_likelihood, backend=name) if is_half else BACKENDS[name].log_likelihood
    )


def _why_not(name: str, device: torch.device) -> str | None:
    """Why a backend does not work on a device, in one line; none if it does."""
    reason = BACKENDS[name].why_not(device.type)
    return None if reason is None else reason.partition("\n")[0]


# ---- measuring ----


def _device(name: str) -> torch.device:
    try:
        return choose_device(name)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None


def _records(arguments: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    """One after the other, for every shape and number of threads."""
    measure = {"dag": _dag, "emission": _emission, "step": _step}[arguments.benchmark]
    # Made before anything is measured, so that a mistake shows at once.
    jobs = measure(arguments, device)
    own_threads = [1, 2] if arguments.benchmark == "step" else [torch.get_num_threads()]
    for number in arguments.threads or own_threads:
        with threads(number):
            for job in jobs:
                yield from job()


Jobs = list[Callable[[], Iterator[Record]]]
"""One for each shape."""


def _dag(arguments: argparse.Namespace, device: torch.device) -> Jobs:
    shapes = arguments.shape or DAG_SHAPES
    dtype = getattr(torch, arguments.dtype)
    functions = _functions(arguments, device)
    is_sharp = arguments.transitions == "sharp"
    for B, M, L in shapes:  # scores, gradients, one step
        needed = 3 * B * L * (L + M) * max(dtype.itemsize, 4)
        check_bytes(f"--shape {B},{M},{L}", {"choose a smaller one": needed}, device)
    return [
        partial(dag, shape, functions, device, dtype, is_sharp, arguments.seconds, say)
        for shape in shapes
    ]


def _emission(arguments: argparse.Namespace, device: torch.device) -> Jobs:
    sizes = EMISSION_SIZES
    if arguments.shape or arguments.vocab_size:
        shapes = arguments.shape or dict.fromkeys(shape for shape, _ in EMISSION_SIZES)
        sizes = [(shape, arguments.vocab_size or EMISSION_SIZES[0][1]) for shape in shapes]
    for shape, vocab_size in sizes:  # logits, their log-softmax and gradient, in float64
        needed = 3 * 8 * vocab_size * (shape.B * shape.L + arguments.width)
        told = f"--shape {shape} with --vocab-size {vocab_size:,}"
        check_bytes(told, {"choose a smaller one": needed}, device)
    dtype = getattr(torch, arguments.dtype)
    width, chunk = arguments.width, arguments.chunk
    return [
        partial(emission, shape, width, vocab_size, chunk, device, dtype, say)
        for shape, vocab_size in sizes
    ]


def _step(arguments: argparse.Namespace, device: torch.device) -> Jobs:
    sizes = (arguments.mask_ratio, arguments.vocab_size)
    way = (arguments.precision, arguments.compile, arguments.layout)
    jobs = []
    for shape in arguments.shape or (TEXT_SHAPE,):
        model = _step_config(arguments, shape)
        run = RunConfig(model=model, train=TrainConfig(batch_size=shape.B))
        check_memory(run, arguments.vocab_size, row_length(shape, arguments.mask_ratio), device)
        jobs.append(partial(step, shape, *sizes, model, device, *way))
    return jobs


def _step_config(arguments: argparse.Namespace, shape: Shape) -> ModelConfig:
    """The model whose graph has this shape."""
    if shape.M < 3 or shape.L % shape.M:
        raise UserError(
            f"--shape is {shape}; a step has M = masks + 2 targets, at least 3, and k M states"
        )
    return model_of(
        shape,
        arguments.mask_ratio,
        arguments.dropout,
        num_layers=arguments.layers,
        width=arguments.width,
        num_heads=arguments.heads,
    )


# ---- running ----


def _train(arguments: argparse.Namespace) -> None:
    """Measure steps of recipes and print them."""
    if arguments.steps < LEAST_STEPS:
        raise UserError(f"--steps is {arguments.steps}; a median needs at least {LEAST_STEPS}")
    device = _device(arguments.device)
    configs = [
        single
        for recipe in arguments.recipe
        for single in objectives_of(_recipe(recipe, arguments))
    ]
    about = machine(device)
    seconds = arguments.seconds or math.inf
    found = (
        train(config, arguments.steps, seconds, arguments.accumulate).as_json(about)
        for config in configs
    )
    _print(found, arguments.json, train_lines)


def _recipe(name: str, arguments: argparse.Namespace) -> RunConfig:
    """A recipe with what the options replace."""
    config = load_recipe(name)
    changes: dict[str, Any] = {"device": arguments.device}
    if arguments.precision is not None:
        changes["precision"] = arguments.precision
    if arguments.micro_batch is not None:
        counted = "size" if config.train.batch_tokens is None else "tokens"
        changes[f"micro_batch_{counted}"] = arguments.micro_batch
    config = replace(config, train=replace(config.train, **changes))
    return replace(config, objective=arguments.objective or config.objective)


def _print(
    rows: Iterator[dict[str, Any]], is_json: bool, as_lines: Callable[[dict], list[str]]
) -> None:
    """Each record as soon as it is there, or all of them as JSON at the end."""
    done = []
    for row in rows:
        if not is_json:
            above = [] if done else [machine_line(row["machine"])]
            print("\n".join([*above, *as_lines(row)]), flush=True)
        done.append(row)
    if is_json:
        print(json.dumps(done, allow_nan=False))


def _compare(arguments: argparse.Namespace) -> None:
    """Measure several ways to do the same and print them."""
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
                above = heading(reference, about) if len(rows) == 1 else []
                for line in [*above, *lines(rows[-1])]:
                    print(line, file=stdout, flush=True)
    if not rows:
        raise UserError("nothing was measured; the lines above say why")
    if arguments.json:
        print(json.dumps(rows, allow_nan=False))


RUN = {"dag": _compare, "emission": _compare, "step": _compare, "train": _train}


def run(arguments: argparse.Namespace) -> None:
    """Measure what was asked for and print it."""
    check_options(arguments)
    RUN[arguments.benchmark](arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(bench_parser(__doc__, list(RUN)).parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
