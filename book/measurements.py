"""What ``book/evidence.py`` checks and measures: one function per section of the file.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from exlm_lab.benchmarks.dag import dag, forward_and_backward, made_graph
from exlm_lab.benchmarks.emission import emission
from exlm_lab.benchmarks.limits import floor, replay_ms
from exlm_lab.benchmarks.measure import threads
from exlm_lab.benchmarks.record import DAG_SHAPES, EMISSION_SIZES, TEXT_SHAPE, Shape
from exlm_lab.benchmarks.step import VOCAB_SIZE, model_of, row_length, step
from exlm_lab.benchmarks.training import LEAST_STEPS, speed_settings, train
from exlm_mini.alignment import BACKENDS
from exlm_mini.alignment.cases import JUDGE, check, limits, short
from exlm_mini.config import RunConfig
from exlm_mini.config.recipes import load_recipe, recipe_names
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.training.dry_run import objectives_of

QUICK_SHAPE = Shape(2, 3, 6)
QUICK_SIZES = {"num_layers": 1, "width": 16, "num_heads": 2}
PAPER_SIZES = (Shape(64, 77, 308), 50265)
"""States and vocabulary of the vocabulary head at full size; for a large GPU."""
PAPER_BYTES = 64 * 2**30
"""Of memory, that these sizes want where they are computed in float64."""
TRAIN_SECONDS = 30.0
"""For the steps of one recipe, if it gets its median in that time."""
TRAIN_ACCUMULATED = 8
"""Micro-batches of a step at most: recipes of one GPU have up to 128."""
BASE_SHAPES = (Shape(128, 21, 84), Shape(32, 78, 312))
"""Of a step of the 12-layer base: rows of 128 and of 512 tokens, 15% masked, k = 4."""
BASE_VOCABULARY = 50265
Result = dict[str, Any]


class Item(NamedTuple):
    """One result: how it is called in the file, and what makes it."""

    key: str
    run: Callable[[], Result]


class Setting(NamedTuple):
    """Where and at what sizes every section is made."""

    device: torch.device
    is_quick: bool

    @property
    def backends(self) -> list[str]:
        """Those that work here."""
        return [name for name in BACKENDS if BACKENDS[name].why_not(self.device.type) is None]


# ---- the alignment ----


def checks(setting: Setting) -> Iterator[Item]:
    """Every backend against the enumeration of all paths, as ``doctor`` does."""
    for name in setting.backends:
        if name != JUDGE:
            yield Item(name, partial(_check, name, setting.device))


def _check(name: str, device: torch.device) -> Result:
    found = check(name, device, None)
    return {"errors": found.errors, "passed": found.is_right, "failure": found.reason}


def dag_times(setting: Setting) -> Iterator[Item]:
    """The dynamic programme, forward and backward; its errors are those of graphs too large for
    ``checks``."""
    for shape in (QUICK_SHAPE,) if setting.is_quick else DAG_SHAPES:
        for kind in ("flat", "sharp"):
            yield Item(f"{shape} {kind}", partial(_dag_at, setting, shape, kind == "sharp"))


def _dag_at(setting: Setting, shape: Shape, is_sharp: bool) -> Result:
    notes: list[str] = []
    device, dtype = setting.device, torch.float32
    functions = {name: BACKENDS[name].log_likelihood for name in setting.backends}
    rows = list(dag(shape, functions, device, is_sharp, notes.append))
    graph = made_graph(shape, is_sharp, device, dtype)
    wrong = []
    for row in rows:
        most = limits(row["backend"], graph, dtype)
        for name, error in row["errors"].items():
            if error is None or error > most[name]:  # none: infinite, which JSON cannot hold
                wrong.append(f"{row['backend']}: {name} is off by {error or math.inf:.1e}")
        if device.type == "cuda" and row["backend"] in ("vectorized", "native"):
            try:  # the other backends wait for the GPU
                call = partial(forward_and_backward, functions[row["backend"]], graph)
                row["replay_ms"] = replay_ms(call, device)
            except RuntimeError as error:
                notes.append(f"{row['backend']} is not captured: {error}"[:300])
    return {
        "records": rows,
        "floor": floor(shape, dtype.itemsize)._asdict(),
        "notes": notes,
        "passed": not wrong,
        "failure": "; ".join(wrong) or None,
    }


# ---- the model ----


def emission_times(setting: Setting) -> Iterator[Item]:
    """The vocabulary head: time and peak memory of each way."""
    sizes = list(EMISSION_SIZES)
    dtypes = [torch.float32]
    if setting.device.type == "cuda":
        dtypes.append(torch.bfloat16)
        memory = torch.cuda.get_device_properties(setting.device).total_memory
        sizes += [PAPER_SIZES] if memory > PAPER_BYTES else []
    for shape, vocab_size in [(QUICK_SHAPE, 50)] if setting.is_quick else sizes:
        for dtype in dtypes:
            run = partial(_emission_at, setting, shape, vocab_size, dtype)
            yield Item(f"{shape} vocabulary {vocab_size} {short(dtype)}", run)


def _emission_at(setting: Setting, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Result:
    notes: list[str] = []
    width = 8 if setting.is_quick else 384
    found = emission(shape, vocab_size, setting.device, notes.append, dtype, width)
    return {"records": list(found), "notes": notes}


def step_times(setting: Setting) -> Iterator[Item]:
    """A training step of ExLM beside one of MLM, with and without dropout."""
    is_gpu = setting.device.type == "cuda"
    counts = [torch.get_num_threads()] if setting.is_quick or is_gpu else [1, 2]
    for dropout in (0.0, 0.1):
        for count in counts:
            run = partial(_step_at, setting, dropout, count)
            yield Item(f"dropout {dropout:g} threads {count}", run)
    if setting.is_quick or is_gpu:
        for shape in (QUICK_SHAPE,) if setting.is_quick else BASE_SHAPES:
            name = f"base N={row_length(shape)} bf16"
            yield Item(name, partial(_base_step, setting, shape, False))
            if not setting.is_quick:
                yield Item(f"{name} compiled", partial(_base_step, setting, shape, True))


def _step_at(setting: Setting, dropout: float, num_threads: int) -> Result:
    shape, vocab_size, sizes = TEXT_SHAPE, VOCAB_SIZE, {}
    if setting.is_quick:
        shape, vocab_size, sizes = QUICK_SHAPE, 50, QUICK_SIZES
    config = model_of(shape, dropout, **sizes)
    with threads(num_threads):
        return {"records": list(step(shape, config, setting.device, vocab_size))}


def _base_step(setting: Setting, shape: Shape, is_compiled: bool) -> Result:
    """A step of the 12-layer base in bf16: ours beside the released layout, or ours compiled."""
    sizes, vocab_size = {"num_layers": 12, "width": 768, "num_heads": 12}, BASE_VOCABULARY
    if setting.is_quick:
        sizes, vocab_size = QUICK_SIZES, 50
    config = model_of(shape, 0.1, **sizes)
    if is_compiled:
        config = replace(config, emission="fused")
    way = ("bf16", is_compiled, not is_compiled)
    try:
        return {"records": list(step(shape, config, setting.device, vocab_size, *way))}
    except torch.OutOfMemoryError:
        return {"skipped": "does not fit in the memory of this GPU"}


# ---- recipes ----


def train_times(setting: Setting) -> Iterator[Item]:
    """Steps of the recipes: on a CPU of those that bring their data, on a GPU of all.

    Recipes that train at one speed are measured once.
    """
    measured = []
    for name in ["toy-pairs"] if setting.is_quick else recipe_names():
        config = load_recipe(name)
        if setting.device.type == "cpu" and config.data.pack is not None:
            continue
        for single in objectives_of(config):
            if speed_settings(single) not in measured:
                measured.append(speed_settings(single))
                yield Item(f"{name} {single.objective}", partial(_train_at, setting, single))


def _train_at(setting: Setting, config: RunConfig) -> Result:
    config = replace(config, train=replace(config.train, device=str(setting.device)))
    steps = LEAST_STEPS if setting.is_quick else 20
    try:
        found = train(config, steps, TRAIN_SECONDS, TRAIN_ACCUMULATED)
    except DoesNotFit as error:
        return {"skipped": str(error)}
    return {"records": [found]}


SECTIONS: dict[str, Callable[[Setting], Iterator[Item]]] = {
    "checks": checks,
    "dag": dag_times,
    "emission": emission_times,
    "step": step_times,
    "train": train_times,
}
"""In this order; each yields its items, and an item is run only if its result is missing."""
