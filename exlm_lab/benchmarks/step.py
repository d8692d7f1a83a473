"""Cost of a training step of ExLM relative to MLM, and where the time goes.

Shapes: B rows, N input tokens, M targets, L states, D width, V vocabulary.

The step of a benchmark is the forward and the backward pass of one batch. The optimiser is
excluded: its cost depends on the number of parameters alone, which differs by the transition head.
``step_costs`` is of whole steps of training.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from exlm_lab.benchmarks.measure import LEAST_RUNS, time_side_by_side
from exlm_lab.benchmarks.record import Record, Shape, compared, record
from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, SpecialIds, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.corpus import Corpus
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.cost import check_memory, row_flops
from exlm_mini.training.parts import score
from exlm_mini.training.trainer import Trainer

PARTS = ("encoder", "head", "transition", "dynamic programme")
"""As the model names them."""
NODE = "autograd::engine::evaluate_function: "
MASK_RATIO = 0.15
SIZES = {"num_layers": 8, "width": 384, "ffn_width": 1536, "num_heads": 6}
VOCAB_SIZE = 8192
ENOUGH_SECONDS = 30.0
"""For all models; three steps of each are too few on a busy machine."""
ENOUGH_TRAINED_SECONDS = 8.0
"""The same for ``step_costs``."""


def row_length(shape: Shape) -> int:
    """N: tokens of a row, boundaries included, of which ``MASK_RATIO`` are M - 2 masks."""
    return 2 + int((shape.M - 2) / MASK_RATIO)


def model_of(shape: Shape, preset: str | None = None) -> ModelConfig:
    """The model whose graph has this shape; L must be k M. Without dropout, as recipes for CPUs.

    Args:
        shape: of the graph.
        preset: of the encoder; none: 8 layers of width 384.
    """
    k = shape.L // shape.M
    sizes: dict[str, Any] = SIZES if preset is None else {"preset": preset}
    return ModelConfig(
        **sizes,
        states_per_mask=k,
        max_positions=max(512, row_length(shape) + shape.M * (k - 1)),
        dropout=0.0,
        attention_dropout=0.0,
    )


def made_batch(shape: Shape, vocab_size: int) -> MaskedBatch:
    """Random tokens between [BOS] and [EOS], M - 2 of each row masked."""
    special = SpecialIds()
    N = row_length(shape)
    rng = torch.Generator().manual_seed(0)
    token_ids_BN = torch.randint(len(special), vocab_size, (shape.B, N), generator=rng)
    token_ids_BN[:, 0], token_ids_BN[:, -1] = special.bos, special.eos
    exact_ratio = (shape.M - 2) / (N - 2)  # so that nothing is left to round
    masker = Masker(MaskingConfig(mask_ratio=exact_ratio), special, seed=0)
    sample_B = np.arange(shape.B)
    return masker(token_ids_BN, np.zeros_like(sample_B), sample_B, step=0)


def step(
    shape: Shape, preset: str | None, device: torch.device, precision: str = "fp32"
) -> Iterator[Record]:
    """One step of ``mlm`` and of ``exlm`` on the same batch, timed alternately, and of ``exlm``
    with its rows expanded after a half and three quarters of the layers.

    Args:
        shape: M counts the two boundaries, as with ``boundary="official"``; L is k M.
        preset: of the encoder, see ``model_of``.
        device: of the models, which are in training mode.
        precision: of the encoder, as ``train.precision``: fp32 or bf16; weights are float32.

    Yields:
        Records whose ``parts`` give milliseconds by part, forward and backward.
    """
    if shape.M < 3 or shape.L % shape.M:
        raise UserError(
            f"--shape is {shape}; a step has M = masks + 2 targets, at least 3, and k M states"
        )
    config = model_of(shape, preset)
    run = RunConfig(model=config, train=TrainConfig(batch_size=shape.B))
    check_memory(run, VOCAB_SIZE, row_length(shape), device)
    batch = made_batch(shape, VOCAB_SIZE).to(device)
    half = config.shape.num_layers // 2
    configs = {"mlm": config, "exlm": config}
    for E in (half, half + half // 2):
        configs[f"exlm-at-{E}"] = replace(config, expand_at=E)
    models: dict[str, MaskedLM | ExLM] = {}
    for name, own in configs.items():
        torch.manual_seed(0)
        models[name] = (MaskedLM if name == "mlm" else ExLM)(own, VOCAB_SIZE).to(device)
    calls = {
        name: partial(whole_step, model, batch, precision) for name, model in models.items()
    }
    timings = time_side_by_side(calls, device, ENOUGH_SECONDS)
    B, N = batch.token_ids_BN.shape

    def records() -> Iterator[Record]:
        for name, model in models.items():
            details = {
                "dtype": "float32" if precision == "fp32" else "bfloat16",
                "num_tokens": N,
                "vocab_size": VOCAB_SIZE,
                "parts": time_parts(model, batch, device, precision),
                "step_tokens_per_second": 1000 * B * N / timings[name].median_ms,
            }
            # The memory of a step is that of one which finds no gradients of an earlier one.
            model.zero_grad(set_to_none=True)
            yield record(name, shape, timings[name], calls[name], device, **details)

    yield from compared(records(), "mlm")


def whole_step(
    model: MaskedLM | ExLM, batch: MaskedBatch, precision: str = "fp32"
) -> torch.Tensor:
    """Forward and backward pass as training does them; the loss."""
    model.zero_grad(set_to_none=True)
    device_type = batch.token_ids_BN.device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16"):
        loss = score(model, batch).loss
    loss.backward()
    return loss.detach()


def time_parts(
    model: MaskedLM | ExLM, batch: MaskedBatch, device: torch.device, precision: str = "fp32"
) -> dict[str, dict[str, float]]:
    """Medians over ``LEAST_RUNS`` steps under PyTorch's profiler, in milliseconds.

    On a GPU its own time, without gaps between kernels; on a CPU the wall clock's.

    Returns:
        For each part that the model has: ``forward_ms`` and ``backward_ms``.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    steps = []
    for _ in range(LEAST_RUNS):
        with profile(activities=activities) as profiler:
            whole_step(model, batch, precision)
        steps.append(_parts(profiler.events(), device))
    return {
        part: {key: statistics.median(spent[part][key] for spent in steps) for key in spent_ms}
        for part, spent_ms in steps[0].items()
    }


def _parts(events: Iterable[Any], device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of one step by part; the model marks its parts for the profiler.

    A node of the backward pass belongs to the part whose operation made it: both have one number.
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
            part_of_node[event.sequence_nr] = part  # the last with a number makes the node
    return {part: spent[part] for part in PARTS if part in spent}


# ---- a step of training ----


def step_costs(config: RunConfig, corpus: Corpus) -> dict[str, float]:
    """Cost of a step of ExLM relative to MLM on the same rows, measured and counted.

    Without chains, which only the first steps have.

    Returns:
        ``cost_ratio``, of the medians; ``cost_ratio_floor``, of the unavoidable floating-point
        operations; ``step_ms`` and ``mlm_step_ms``, medians, of processor time on a CPU.
    """
    config = replace(config, train=replace(config.train, chain_warmup=0.0))
    configs = {"exlm": config, "mlm": replace(config, objective="mlm")}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: Trainer(single, corpus.train, corpus.validation, Path(folder) / name)
            for name, single in configs.items()
        }
        calls = {name: partial(trainer.stepper.step, 0) for name, trainer in trainers.items()}
        device = trainers["mlm"].engine.device
        timings = time_side_by_side(calls, device, ENOUGH_TRAINED_SECONDS)
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
