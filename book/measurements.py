"""What ``book/evidence.py`` measures and checks: one function per section of the file.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from correctness import check_cases, check_graph, groups
from evidence_file import Result

from exlm_lab.benchmarks.dag import LogLikelihood, dag, forward_and_backward, made_graph
from exlm_lab.benchmarks.data import Reading, epochs, readings
from exlm_lab.benchmarks.emission import emission
from exlm_lab.benchmarks.limits import Floor, Limits, floor, measured_limits, replay_ms
from exlm_lab.benchmarks.measure import threads
from exlm_lab.benchmarks.record import (
    DAG_SHAPES,
    EMISSION_SIZES,
    TEXT_SHAPE,
    Record,
    Shape,
    as_json,
)
from exlm_lab.benchmarks.step import model_of, row_length, step
from exlm_lab.benchmarks.training import LEAST_STEPS, singles, speed_settings, train
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import RunConfig, UserError
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.recipes import load_recipe, recipe_names

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


class Item(NamedTuple):
    """One result: how it is called in the file, and what makes it."""

    key: str
    run: Callable[[], Result]


class Setting(NamedTuple):
    """What every section is told."""

    device: torch.device
    is_quick: bool
    backends: list[str]
    """Those that work here."""
    extra: dict[str, LogLikelihood]
    stored: Callable[[str, str], Result | None]
    """Takes section and name: a result that is there already."""


def checks(setting: Setting) -> Iterator[Item]:
    """Every backend against float64: the table of cases, then larger graphs."""
    device = setting.device
    for backend, shape, kind, dtype in groups(setting.backends, setting.is_quick):
        name = str(dtype).removeprefix("torch.")
        if shape is None:
            yield Item(f"cases {backend} {name}", partial(check_cases, backend, dtype, device))
        else:
            run = partial(check_graph, backend, shape, kind, dtype, device)
            yield Item(f"{shape} {kind} {backend} {name}", run)


def dag_times(setting: Setting) -> Iterator[Item]:
    """The dynamic programme, forward and backward, beside the floor of the device."""
    size = 64 if setting.is_quick else None
    yield Item("limits", lambda: measured_limits(setting.device, size)._asdict())
    shapes = (Shape(2, 3, 6),) if setting.is_quick else DAG_SHAPES
    functions = {name: BACKENDS[name].log_likelihood for name in setting.backends}
    functions = {"vectorized": functions.pop("vectorized", None), **functions, **setting.extra}
    functions = {name: function for name, function in functions.items() if function}
    is_all = not setting.extra and set(functions) == set(BACKENDS)
    suffix = "" if is_all else f" ({', '.join(functions)})"
    for shape in shapes:
        for kind in ("flat", "sharp"):
            run = partial(_dag_at, setting, functions, shape, kind == "sharp")
            yield Item(f"{shape} {kind}{suffix}", run)


def _dag_at(
    setting: Setting, functions: dict[str, LogLikelihood], shape: Shape, is_sharp: bool
) -> Result:
    notes: list[str] = []
    device, dtype = setting.device, torch.float32
    records = dag(shape, functions, device, dtype, is_sharp, 60.0, notes.append)
    rows = _rows(list(records), "vectorized")
    if device.type == "cuda":
        graph = made_graph(shape, is_sharp, device, dtype)
        for row in rows:
            if row["backend"] not in ("vectorized", "native"):
                continue  # the others wait for the GPU
            try:
                call = partial(forward_and_backward, functions[row["backend"]], graph)
                row["replay_ms"] = replay_ms(call, device)
            except RuntimeError as error:
                notes.append(f"{row['backend']} is not captured: {error}"[:300])
    least = floor(shape, dtype.itemsize)
    result = {"records": rows, "floor": least._asdict(), "notes": notes}
    if limits := setting.stored("dag", "limits"):
        ours = {name: limits[name] for name in Limits._fields if name in limits}
        if len(ours) == len(Limits._fields):
            best = Limits(**ours)
            result["floor"]["milliseconds"] = least.milliseconds(best)
            for row in rows:
                row["of_ceiling"] = _of_ceiling(least, best, row)
    return result


def _of_ceiling(least: Floor, best: Limits, row: dict[str, Any]) -> dict[str, float]:
    """Bytes and operations that the floor counts, by second, over what was measured as most.

    Of the time on the GPU alone, where a call could be replayed.
    """
    seconds = row.get("replay_ms", row["median_ms"]) / 1000
    return {
        "bytes": least.num_bytes / seconds / best.bytes_per_second,
        "multiply_adds": least.num_multiply_adds / seconds / best.multiply_adds_per_second,
    }


def emission_times(setting: Setting) -> Iterator[Item]:
    """The vocabulary head: time and peak memory of each way."""
    sizes = list(EMISSION_SIZES)
    dtypes = [torch.float32]
    if setting.device.type == "cuda":
        dtypes.append(torch.bfloat16)
        memory = torch.cuda.get_device_properties(setting.device).total_memory
        sizes += [PAPER_SIZES] if memory > PAPER_BYTES else []
    if setting.is_quick:
        sizes = [(Shape(2, 3, 6), 50)]
    for shape, vocab_size in sizes:
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            run = partial(_emission_at, setting, shape, vocab_size, dtype)
            yield Item(f"{shape} vocabulary {vocab_size} {name}", run)


def _emission_at(setting: Setting, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Result:
    notes: list[str] = []
    width = 8 if setting.is_quick else 384
    found = emission(shape, width, vocab_size, 128, setting.device, dtype, notes.append)
    return {"records": _rows(list(found), "plain"), "notes": notes}


def step_times(setting: Setting) -> Iterator[Item]:
    """A training step of ExLM beside one of MLM, with and without dropout."""
    here = torch.get_num_threads()
    counts = [here] if setting.is_quick or setting.device.type == "cuda" else [1, 2]
    for dropout in (0.0, 0.1):
        for count in counts:
            run = partial(_step_at, setting, dropout, count)
            yield Item(f"dropout {dropout:g} threads {count}", run)
    if setting.is_quick or setting.device.type == "cuda":
        yield from _base_steps(setting)


def _base_steps(setting: Setting) -> Iterator[Item]:
    """A step of the 12-layer base in bf16, ours beside the released layout, and ours compiled."""
    for shape in (Shape(2, 3, 6),) if setting.is_quick else BASE_SHAPES:
        name = f"base N={row_length(shape, 0.15)} bf16"
        yield Item(name, partial(_base_step, setting, shape, False))
        if not setting.is_quick:
            yield Item(f"{name} compiled", partial(_base_step, setting, shape, True))


def _base_step(setting: Setting, shape: Shape, is_compiled: bool) -> Result:
    sizes = {"num_layers": 12, "width": 768, "num_heads": 12}
    vocab_size = BASE_VOCABULARY
    if setting.is_quick:
        sizes, vocab_size = {"num_layers": 1, "width": 16, "num_heads": 2}, 50
    config = model_of(shape, 0.15, 0.1, **sizes)
    if is_compiled:
        config = replace(config, emission="fused")
    layout = "ours" if is_compiled else "released"
    way = ("bf16", is_compiled, layout)
    try:
        found = list(step(shape, 0.15, vocab_size, config, setting.device, *way))
    except torch.OutOfMemoryError:
        return {"skipped": "does not fit in the memory of this GPU"}
    rows = _rows(found, "mlm")
    result = {"records": rows, "cost_ratio": rows[1]["wall_ratio"]}
    if layout == "released":
        result["times_released"] = rows[2]["median_ms"] / rows[1]["median_ms"]
    return result


def _step_at(setting: Setting, dropout: float, num_threads: int) -> Result:
    shape, vocab_size = TEXT_SHAPE, 8192
    config = model_of(shape, 0.15, dropout)
    if setting.is_quick:
        shape, vocab_size = Shape(2, 3, 6), 50
        config = model_of(shape, 0.15, dropout, num_layers=1, width=16, num_heads=2)
    with threads(num_threads):
        found = list(step(shape, 0.15, vocab_size, config, setting.device))
    return {"records": _rows(found, "mlm")}


def data_times(setting: Setting) -> Iterator[Item]:
    """From a pack to masked batches, on one core."""
    quick = setting.is_quick
    batches = readings(num_tokens=100_000, seconds=0) if quick else readings()
    orders = epochs(text_rows=1000, molecule_rows=1000) if quick else epochs()
    yield Item("batches", partial(_data_of, batches))
    yield Item("epochs", partial(_data_of, orders))


def _data_of(found: Iterator[Reading]) -> Result:
    return {"records": [_without_machine(reading.as_json({})) for reading in found]}


def train_times(setting: Setting) -> Iterator[Item]:
    """Steps of the recipes: on a CPU of those that bring their data, on a GPU of all.

    Recipes that train at one speed are measured once.
    """
    measured = []
    for name in ["toy-pairs"] if setting.is_quick else recipe_names():
        try:
            config = load_recipe(name)
        except UserError as error:  # PyYAML is missing
            yield Item(name, partial(dict, skipped=str(error)))
            continue
        if setting.device.type == "cpu" and config.data.pack is not None:
            continue
        for single in singles(config):
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
    return {"records": [_without_machine(found.as_json({}))]}


def _without_machine(row: dict[str, Any]) -> dict[str, Any]:
    """A record; the machine is told once for all."""
    return {name: value for name, value in row.items() if name != "machine"}


def _rows(records: list[Record], reference: str) -> list[dict[str, Any]]:
    """Records as JSON; the machine is told once for all."""
    by_name = {record.backend: record for record in records}
    rows = [as_json(record, by_name.get(reference), {}) for record in records]
    for row in rows:
        del row["machine"]
        for name, error in row["errors"].items():
            row["errors"][name] = error if error < float("inf") else None
        if row["max_error"] == float("inf"):
            row["max_error"] = None
    return rows
