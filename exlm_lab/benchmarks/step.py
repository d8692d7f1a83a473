"""Cost of a training step of ExLM relative to MLM, and where the time goes.

Shapes: B rows, N input tokens, M targets, L states, D width, V vocabulary.

A step is the forward and the backward pass of one batch. The optimiser is excluded: its cost
depends on the number of parameters alone, which differs by the transition head.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from exlm_lab.benchmarks.measure import LEAST_RUNS, Timing, time_side_by_side
from exlm_lab.benchmarks.record import Record, Shape, compared, record
from exlm_mini.alignment.cases import relative_error
from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood, mlm_loss, states_alignment_loss
from exlm_mini.training.cost import row_flops
from exlm_mini.training.meter import peak_flops
from exlm_mini.training.parts import score

PARTS = ("encoder", "head", "transition", "dynamic programme")
MASK_RATIO = 0.15
SIZES = {"num_layers": 8, "width": 384, "ffn_width": 1536, "num_heads": 6}
VOCAB_SIZE = 8192
ENOUGH_SECONDS = 30.0
"""For both models; three steps of each are too few on a busy machine."""
ERROR_ROWS = 8
"""Rows to compare with float64; a whole batch of a base model may not fit into memory."""
Clock = Callable[[str, str], AbstractContextManager[None]]
"""Takes the name of a part and ``forward`` or ``backward``; times the block."""


def row_length(shape: Shape) -> int:
    """N: tokens of a row, boundaries included, of which ``MASK_RATIO`` are M - 2 masks."""
    return 2 + int((shape.M - 2) / MASK_RATIO)


def model_of(shape: Shape, preset: str | None = None, dropout: float = 0.0) -> ModelConfig:
    """The model whose graph has this shape; L must be k M.

    Args:
        shape: of the graph.
        preset: of the encoder; none: 8 layers of width 384.
        dropout: of hidden states and attention. Recipes for CPUs set it to 0, because fused
            attention kernels there have no dropout.
    """
    k = shape.L // shape.M
    sizes: dict[str, Any] = SIZES if preset is None else {"preset": preset}
    return ModelConfig(
        **sizes,
        states_per_mask=k,
        max_positions=max(512, row_length(shape) + shape.M * (k - 1)),
        dropout=dropout,
        attention_dropout=dropout,
    )


def made_batch(shape: Shape, vocab_size: int) -> MaskedBatch:
    """Random tokens between [BOS] and [EOS], M - 2 of each row masked.

    Args:
        shape: B rows; M counts the two boundaries.
        vocab_size: V, special tokens included.
    """
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
    shape: Shape,
    config: ModelConfig,
    device: torch.device,
    vocab_size: int = VOCAB_SIZE,
    precision: str = "fp32",
    is_compiled: bool = False,
    expand_at: Sequence[int] = (),
) -> Iterator[Record]:
    """One step of ``mlm`` and of ``exlm`` on the same batch, timed alternately.

    Args:
        shape: M counts the two boundaries, as with ``boundary="official"``; L is k M.
        config: of both models, which are in training mode, with dropout.
        device: of the models.
        vocab_size: of the batch, see ``made_batch``.
        precision: of the encoder, as ``train.precision``: fp32 or bf16; weights are float32.
        is_compiled: compile the layers of ``mlm`` and ``exlm``, as ``train.compile`` does.
        expand_at: time ``exlm-at-E`` too for each of these E: ``model.expand_at``.

    Yields:
        Records whose ``parts`` give milliseconds by part, forward and backward, wall clock and
        processor time; their error is that of the loss and of the
        embedding's gradient on the first rows, without dropout.
    """
    batch = made_batch(shape, vocab_size).to(device)
    configs = {"mlm": config, "exlm": config}
    configs |= {f"exlm-at-{E}": replace(config, expand_at=E) for E in expand_at}
    models: dict[str, MaskedLM | ExLM] = {}
    for name, own in configs.items():
        torch.manual_seed(0)
        models[name] = (MaskedLM if name == "mlm" else ExLM)(own, vocab_size).to(device)
    errors = {name: _errors(model, batch, precision) for name, model in models.items()}
    for model in models.values() if is_compiled else ():
        for layer in model.encoder.layers:
            layer.compile()
    calls = {
        name: partial(whole_step, model, batch, precision) for name, model in models.items()
    }
    timings = time_side_by_side(calls, device, ENOUGH_SECONDS)

    def records() -> Iterator[Record]:
        for name, model in models.items():
            details = {
                "dtype": "float32" if precision == "fp32" else "bfloat16",
                "is_compiled": is_compiled,
                "num_tokens": batch.token_ids_BN.shape[1],
                "vocab_size": vocab_size,
                "dropout": [config.dropout, config.attention_dropout],
                "parts": time_parts(model, batch, device, precision),
                **_speed(name, configs[name], batch, vocab_size, timings[name], precision),
            }
            # The memory of a step is that of one which finds no gradients of an earlier one.
            model.zero_grad(set_to_none=True)
            yield record(
                "step", name, shape, timings[name], calls[name], device, errors[name], details
            )

    yield from compared(records(), "mlm")


def _speed(
    name: str,
    config: ModelConfig,
    batch: MaskedBatch,
    vocab_size: int,
    timing: Timing,
    precision: str,
) -> dict[str, float | None]:
    """Tokens per second; operations by this package's count, per second and of the peak."""
    B, N = batch.token_ids_BN.shape
    masking = MaskingConfig(mask_ratio=MASK_RATIO)
    run = RunConfig(objective="mlm" if name == "mlm" else "exlm", model=config, masking=masking)
    seconds = timing.median_ms / 1000
    flops_per_second = B * row_flops(run, vocab_size, N) / seconds
    device = batch.token_ids_BN.device
    is_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device) if is_gpu else "cpu", precision)
    return {
        "step_tokens_per_second": B * N / seconds,
        "flops_per_second": flops_per_second,
        "flops_utilisation": None if peak is None else flops_per_second / peak,
    }


def whole_step(
    model: MaskedLM | ExLM, batch: MaskedBatch, precision: str = "fp32"
) -> torch.Tensor:
    """Forward and backward pass as training does them; the loss."""
    model.zero_grad(set_to_none=True)
    with _precision(precision, batch):
        loss = score(model, batch).loss
    loss.backward()
    return loss.detach()


def _precision(precision: str, batch: MaskedBatch) -> AbstractContextManager:
    """Around a forward pass: autocast to bf16, or nothing."""
    device_type = batch.token_ids_BN.device.type
    return torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16")


def step_in_parts(
    model: MaskedLM | ExLM, batch: MaskedBatch, clock: Clock, precision: str = "fp32"
) -> torch.Tensor:
    """The same step with each part timed by ``clock``; returns the loss.

    The graph is cut between parts and the gradients are passed on by hand, so that the backward
    pass of each part runs separately.
    """
    model.zero_grad(set_to_none=True)
    if isinstance(model, ExLM):
        return _exlm_in_parts(model, batch, clock, precision)
    with clock("encoder", "forward"), _precision(precision, batch):
        hidden_SD = model.encode(batch.masked_ids_BN)[batch.is_masked_BN]
    cut_SD = hidden_SD.detach().requires_grad_()
    with clock("head", "forward"), _precision(precision, batch):
        token_logits_SV = model.head.logits(cut_SD, model.encoder.embedding.weight)
        loss = mlm_loss(token_logits_SV, batch.token_ids_BN[batch.is_masked_BN])
    with clock("head", "backward"):
        loss.backward()
    with clock("encoder", "backward"):
        hidden_SD.backward(cut_SD.grad)
    return loss.detach()


def _exlm_in_parts(
    model: ExLM, batch: MaskedBatch, clock: Clock, precision: str
) -> torch.Tensor:
    with torch.no_grad(), _precision(precision, batch):
        scores = model(*batch)  # for the graph and the scored targets
    with clock("encoder", "forward"), _precision(precision, batch):
        hidden_BTD, graph = model.encode(*batch)
        state_BLD = model.states(hidden_BTD, graph)
    cut_BLD = state_BLD.detach().requires_grad_()
    assert model.transition is not None
    with clock("transition", "forward"), _precision(precision, batch):
        log_transition_BLL = model.transition(cut_BLD, graph)
    with clock("head", "forward"), _precision(precision, batch):
        log_emission_BML = model.head.log_emission(
            cut_BLD, model.encoder.embedding.weight, graph.target_ids_BM
        )
    scores = scores._replace(
        log_emission_BML=log_emission_BML.detach().requires_grad_(),
        log_transition_BLL=log_transition_BLL.detach().requires_grad_(),
    )
    with clock("dynamic programme", "forward"):
        num_scored_B = scores.is_scored_BM.sum(dim=1)
        loss = states_alignment_loss(log_likelihood(scores), num_scored_B, on_no_path="skip")
    with clock("dynamic programme", "backward"):
        loss.backward()
    with clock("head", "backward"):
        log_emission_BML.backward(scores.log_emission_BML.grad)
    with clock("transition", "backward"):
        log_transition_BLL.backward(scores.log_transition_BLL.grad)
    with clock("encoder", "backward"):
        state_BLD.backward(cut_BLD.grad)
    return loss.detach()


def time_parts(
    model: MaskedLM | ExLM, batch: MaskedBatch, device: torch.device, precision: str = "fp32"
) -> dict[str, dict[str, float]]:
    """Medians over ``LEAST_RUNS`` steps after one to warm up, in milliseconds.

    Returns:
        For each part that the model has: ``forward_ms``, ``backward_ms``, ``forward_cpu_ms``
        and ``backward_cpu_ms``.
    """
    spent: dict[str, dict[str, list[float]]] = {}

    @contextlib.contextmanager
    def clock(part: str, direction: str) -> Iterator[None]:
        _wait(device)
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        _wait(device)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        times = spent.setdefault(part, {})
        times.setdefault(f"{direction}_ms", []).append(1000 * wall)
        times.setdefault(f"{direction}_cpu_ms", []).append(1000 * cpu)

    for _ in range(1 + LEAST_RUNS):
        step_in_parts(model, batch, clock, precision)
    return {
        part: {key: statistics.median(ms[1:]) for key, ms in spent[part].items()}
        for part in PARTS
        if part in spent
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _errors(model: MaskedLM | ExLM, batch: MaskedBatch, precision: str) -> dict[str, float]:
    """Loss and embedding gradient against the same step in float64, without dropout."""
    model.eval()
    some = MaskedBatch(*(rows[:ERROR_ROWS] for rows in batch))
    numbers = []
    for dtype, exactness in ((torch.float32, precision), (torch.float64, "fp32")):
        model.to(dtype)
        loss = whole_step(model, some, exactness)
        gradient = model.encoder.embedding.weight.grad
        assert gradient is not None
        numbers.append((loss, gradient.clone()))  # .to() changes it
    model.to(torch.float32).train()
    model.zero_grad(set_to_none=True)
    names = ("loss", "grad_embedding")
    return {name: relative_error(a, b) for name, a, b in zip(names, *numbers, strict=True)}
