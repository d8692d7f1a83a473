"""Cost of a training step of ExLM relative to MLM on the same rows, and where the time goes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from exlm_lab.benchmarks.measure import LEAST_RUNS, record, time_side_by_side
from exlm_lab.benchmarks.record import Record, compared
from exlm_mini.config import RunConfig
from exlm_mini.data.corpus import Corpus
from exlm_mini.training.cost import row_flops
from exlm_mini.training.trainer import Trainer

PARTS = ("encoder", "head", "transition", "dynamic programme")
"""Names under which the model marks its parts for the profiler."""
NODE = "autograd::engine::evaluate_function: "
ENOUGH_SECONDS = 8.0
"""Time limit for all models together, see ``time_side_by_side``."""


@contextlib.contextmanager
def trainers(configs: Mapping[str, RunConfig], corpus: Corpus) -> Iterator[dict[str, Trainer]]:
    """Context with a trainer for each of the settings, before its first step; settings with
    ``grow_at`` give the grown model, not the MLM that it grows from."""
    with tempfile.TemporaryDirectory() as folder:
        yield {
            name: Trainer(
                replace(config, train=replace(config.train, grow_at=0.0)),
                corpus.train,
                corpus.validation,
                Path(folder) / name,
            )
            for name, config in configs.items()
        }


def step_costs(config: RunConfig, corpus: Corpus) -> dict[str, float]:
    """Cost of a step of ExLM relative to MLM on the same rows, measured and counted.

    The fixed chains are switched off, because only the first steps of training have them.

    Returns:
        ``cost_ratio``: ratio of the median times; ``cost_ratio_floor``: ratio of the unavoidable
        floating-point operations; ``step_ms`` and ``mlm_step_ms``: the median times in
        milliseconds, which on a CPU are processor time.
    """
    config = replace(config, train=replace(config.train, chain_warmup=0.0))
    configs = {"exlm": config, "mlm": replace(config, objective="mlm")}
    with trainers(configs, corpus) as both:
        calls = {name: partial(trainer.stepper.step, 0) for name, trainer in both.items()}
        device = both["mlm"].engine.device
        timings = time_side_by_side(calls, device, ENOUGH_SECONDS)
    ms = {
        name: timing.median_ms if device.type == "cuda" else timing.median_cpu_ms
        for name, timing in timings.items()
    }
    vocab_size, row_length = corpus.train.vocab_size, int(corpus.train.lengths_R.max())
    flops = {
        name: row_flops(single, vocab_size, row_length) for name, single in configs.items()
    }
    return {
        "cost_ratio": ms["exlm"] / ms["mlm"],
        "cost_ratio_floor": flops["exlm"] / flops["mlm"],
        "step_ms": ms["exlm"],
        "mlm_step_ms": ms["mlm"],
    }


def step(config: RunConfig, corpus: Corpus) -> Iterator[Record]:
    """Time the first training step of an MLM, of an ExLM, and of the ExLM with late expansion.

    All are timed alternately and on the same rows; late expansion is after a half and after three
    quarters of the layers.

    Yields:
        Records, whose ``parts`` hold the milliseconds of each part, forward and backward.
    """
    configs = {"mlm": replace(config, objective="mlm"), "exlm": config}
    half = config.model.shape.num_layers // 2
    for E in dict.fromkeys((half, half + half // 2)):
        configs[f"exlm-at-{E}"] = replace(config, model=replace(config.model, expand_at=E))
    with trainers(configs, corpus) as each:
        calls = {name: partial(trainer.stepper.step, 0) for name, trainer in each.items()}
        engine = each["mlm"].engine
        timings = time_side_by_side(calls, engine.device, ENOUGH_SECONDS)

        def records() -> Iterator[Record]:
            for name, call in calls.items():
                num_tokens, timing = call().num_tokens, timings[name]
                details = {
                    "dtype": each[name].config.train.precision,
                    "vocab_size": corpus.train.vocab_size,
                    "parts": time_parts(call, engine.device),
                    "step_tokens_per_second": 1000 * num_tokens / timing.median_ms,
                }
                # Measure the memory of a step that starts without the gradients of an earlier one.
                each[name].stepper.optimizer.zero_grad(set_to_none=True)
                size = config.train.batch_size, int(corpus.train.lengths_R.max())
                yield record(name, size, timing, call, engine.device, **details)

        yield from compared(records(), "mlm")


def time_parts(call: Callable[[], Any], device: torch.device) -> dict[str, dict[str, float]]:
    """Time of each part of the model, as the median over ``LEAST_RUNS`` steps under the profiler.

    On a GPU this is the time of kernels, without the gaps between them; on a CPU, wall-clock time.

    Returns:
        ``forward_ms`` and ``backward_ms``, in milliseconds, for each part that the model has.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    steps = []
    for _ in range(LEAST_RUNS):
        with profile(activities=activities) as profiler:
            call()
        steps.append(_parts(profiler.events(), device))
    return {
        part: {key: statistics.median(spent[part][key] for spent in steps) for key in spent_ms}
        for part, spent_ms in steps[0].items()
    }


def _parts(events: Iterable[Any], device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of one step by part; the model marks its parts for the profiler.

    A node of the backward pass belongs to the part whose operation created it: both have the same
    sequence number.
    """
    spent: dict[str, dict[str, float]] = {}
    part_of_node: dict[int, str | None] = {}

    def add(part: str, key: str, event: Any) -> None:
        us = event.device_time_total if device.type == "cuda" else event.cpu_time_total
        spent.setdefault(part, {"forward_ms": 0.0, "backward_ms": 0.0})[key] += us / 1000

    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    for event in sorted(on_cpu, key=lambda event: event.time_range.start):
        above = event
        while above is not None and above.name not in PARTS:
            above = above.cpu_parent
        part = None if above is None else above.name
        if part and above is event:
            add(part, "forward_ms", event)
        if event.name.startswith(NODE):
            if node_part := part_of_node.get(event.sequence_nr):
                add(node_part, "backward_ms", event)
        elif event.sequence_nr >= 0 and event.scope == 0:
            part_of_node[event.sequence_nr] = part  # the last with this number makes the node
    return {part: spent[part] for part in PARTS if part in spent}
