"""Estimates of what a run costs, before it starts: parameters, tokens, operations and memory.

Shapes: B rows of a micro-batch, T tokens after expansion, L states, M targets, D width, F
feed-forward width, H heads, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from torch import nn

from exlm_mini.config import ModelConfig, RunConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.packs import Pack
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.training.parts import make_model
from exlm_mini.training.processes import plan_batch

CGROUP = Path("/sys/fs/cgroup")
_FLOAT = 4  # bytes; weights, moments and the alignment are float32 in every precision
_BATCH_TOKEN = 25
"""Bytes per token of a step's batch: ids before and after masking, the mask, and the noise."""
_SURE = 0.75
"""Share of the estimated activations that is surely needed; the estimate is good to within 30%."""


# ---- lengths ----


def mask_count(config: RunConfig, num_tokens: int) -> float:
    """Mean number of masks in a row, counting all copies; if slots are masked, their number."""
    if config.objective != "repeated-mlm" and (slots := slots_of(config)):
        return len(slots)
    return config.masking.mask_ratio * config.num_copies * (num_tokens - 2)


def longest_row(config: RunConfig, row_length: int) -> int:
    """Length of the longest row after expansion or repetition; arguments as for ``estimate``."""
    num_masks = row_length - 2  # independent draws may mask every token
    if config.masking.strategy != "bernoulli" and config.objective != "repeated-mlm":
        num_masks = max(1, math.ceil(mask_count(config, row_length)))
    return config.expanded_length(row_length, num_masks)


def check_row_length(config: RunConfig, row_length: int) -> None:
    """Raise ``UserError`` if rows are too long for the position range, or too short for a mask."""
    needed, masking = longest_row(config, row_length), config.masking
    if needed > config.model.max_positions:
        raise UserError(
            f"rows of {row_length} tokens become {needed} after expansion or repetition, more "
            f"than model.max_positions {config.model.max_positions}; raise it to {needed}, or "
            "lower data.block_length, masking.mask_ratio or the number of states or copies"
        )
    num_masks = masking.mask_ratio * (row_length - 2)
    is_fixed = masking.strategy not in ("bernoulli", "slots")
    if config.objective != "repeated-mlm" and is_fixed and num_masks < 1:
        longer = "use a pack of longer rows" if config.data.pack else "data.block_length"
        raise UserError(
            f"rows of {row_length} tokens have {row_length - 2} that can be masked, of which "
            f"masking.mask_ratio {masking.mask_ratio:g} masks {num_masks:.2f}; raise it, or "
            f"{longer}, so that each row has at least one mask"
        )


def count_parameters(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """Number of parameters of a run's model, and of those in its transition head.

    Builds a single layer, without storage, so a model of any size can be counted.
    """
    of_one_layer = replace(config, model=replace(config.model, num_layers=1, expand_at=0))
    with torch.device("meta"):
        model = make_model(of_one_layer, vocab_size, SpecialIds())
    parts = (model, model.encoder.layers, getattr(model, "transition", None) or nn.Identity())
    whole, layer, transition = (sum(p.numel() for p in part.parameters()) for part in parts)
    return whole + (config.model.shape.num_layers - 1) * layer, transition


# ---- estimates ----


class Estimate(NamedTuple):
    """Costs of a run; bytes are estimates for one device. If the lengths of rows are not known,
    every row counts as the longest; everything else is exact."""

    num_parameters: int
    num_transition_parameters: int
    """Those of the transition head, which ``num_parameters`` includes."""
    row_length: int
    """Input tokens of the longest row."""
    expanded_length: int
    """Length of the longest row after expansion or repetition."""
    tokens_per_step: int
    """Mean number of input tokens, before expansion; with ``train.batch_tokens`` the maximum."""
    num_tokens: int
    """Input tokens of the whole run: ``tokens_per_step`` times the number of steps."""
    flops_per_token: float
    """Floating-point operations of training per input token, forward and backward."""
    num_flops: float
    """Floating-point operations of the whole run."""
    weight_bytes: int
    """Weights, gradients and Adam's two moments."""
    activation_bytes: int
    """Tensors kept for the backward pass of one micro-batch, with an attention kernel that does not
    store its probabilities."""


def check_fits(
    config: RunConfig, train_pack: Pack, validation_pack: Pack, device: torch.device, num: int
) -> None:
    """Raise ``UserError`` if the packs do not suit the model, or if the run does not fit into the
    memory of each of ``num`` devices."""
    asked, vocab_size = config.model.vocab_size, train_pack.vocab_size
    if asked is not None and asked != vocab_size:
        raise UserError(
            f"model.vocab_size is {asked}, but the tokenizer has {vocab_size} tokens; drop "
            "model.vocab_size, which is for --dry-run"
        )
    longest = max(int(train_pack.lengths_R.max()), int(validation_pack.lengths_R.max()))
    check_row_length(config, longest)
    check_memory(config, vocab_size, longest, device, num)


def estimate(
    config: RunConfig,
    vocab_size: int,
    row_length: int,
    lengths_R: np.ndarray | None = None,
) -> Estimate:
    """Estimate the costs of a run.

    Args:
        row_length: length of the longest row, [BOS] and [EOS] included.
        lengths_R: lengths of rows like those to train on; None if they are not known.
    """
    lengths_R = np.array([row_length]) if lengths_R is None else lengths_R
    num_parameters, num_transition = count_parameters(config, vocab_size)
    tokens_per_step = config.train.batch_tokens or round(
        config.train.batch_size * float(lengths_R.mean())
    )
    num_tokens = tokens_per_step * config.train.steps
    flops, start = 0.0, 0
    for stage, end in config.stages:
        flops += mean_flops_per_token(stage, vocab_size, lengths_R) * (end - start)
        start = end
    flops_per_token = flops / config.train.steps
    return Estimate(
        num_parameters,
        num_transition,
        row_length,
        longest_row(config, row_length),
        tokens_per_step,
        num_tokens,
        flops_per_token,
        flops_per_token * num_tokens,
        4 * _FLOAT * num_parameters,
        _activation_bytes(config, vocab_size, row_length),
    )


def check_memory(
    config: RunConfig,
    vocab_size: int,
    row_length: int,
    device: torch.device,
    num_devices: int = 1,
) -> None:
    """Raise ``UserError``, naming the settings to lower, if a run does not fit into memory."""
    plan = plan_batch(config.train, num_devices)
    changed: dict[str, Any] = {f"micro_batch_{plan.name}": plan.per_device}
    train = replace(config.train, **changed)
    masking = config.masking
    if masking.strategy == "bernoulli":  # may mask every token, but practically never does
        masking = replace(masking, strategy="fixed_count")
    config = replace(config, train=train, masking=masking)
    costs = estimate(config, vocab_size, row_length)
    tokens = costs.tokens_per_step * config.num_copies / num_devices
    needed = costs.weight_bytes + _SURE * costs.activation_bytes + _BATCH_TOKEN * tokens
    remedy = (
        f"lower train.micro_batch_{plan.name} (or give one), train.batch_{plan.name}, model.width, "
        "model.num_layers, model.max_positions or the vocabulary"
    )
    check_bytes("the run", needed, device, remedy)


def check_bytes(what: str, needed: float, device: torch.device, remedy: str) -> None:
    """Raise ``UserError`` for work that does not fit into a device's memory, before anything large
    is allocated: on a CPU, allocating too much succeeds, and the system kills the process later."""
    if needed > (present := device_memory(device)):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
        raise UserError(
            f"{what} needs about {needed / 2**30:,.1f} GiB, but {name} has "
            f"{present / 2**30:,.1f} GiB; {remedy}"
        )


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU; for a CPU, of the machine or the container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup v2 and v1
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            present = min(present, int((CGROUP / name).read_text()))
    return present


def num_states(model: ModelConfig, num_masks: float) -> float:
    """Number of states L of a row with ``num_masks`` masks, those of the boundaries included."""
    k = model.states_per_mask
    return num_masks * k + (2 * k if model.boundary == "official" else 2)


def _learned_heads(model: ModelConfig) -> int:
    """Number of attention heads that the transition learns."""
    match model.transition:
        case "gated" | "spans":
            return model.shape.num_heads
        case "paper":
            return 1
        case "uniform" | "chains" | "ctc":
            return 0
        case _ as other:
            assert_never(other)


def row_flops(config: RunConfig, vocab_size: int, row_length: int) -> float:
    """Floating-point operations of training on one row with the mean number of masks.

    Counts two for each multiply-add of a matrix product, times three because the backward pass has
    two products for each product of the forward pass. The dynamic programme has no matrix products.
    Recomputation is not counted, nor are the learned positions of the transition, which are
    multiplied once per batch. The chapter on states expansion derives the terms. Arguments as for
    ``estimate``.
    """
    model, num_masks = config.model, mask_count(config, row_length)
    num_layers, D, F, H = model.shape
    T = config.expanded_length(row_length, num_masks)
    if config.objective != "exlm":
        heads = num_masks * (D * D + D * vocab_size)
    else:
        L = num_states(model, num_masks)
        M = num_masks + 2 + (model.transition == "ctc")  # plus the blank
        heads = L * (D * D + D * vocab_size) + M * L * D
        if _learned_heads(model):  # queries, keys and their products
            heads += L * 2 * D * D + L * L * D
            heads += L * D * H * (model.transition != "paper")  # the gate
    num_below = model.expand_at if config.objective == "exlm" else 0
    encoder = sum(
        layers * (4 * length * D * D + 2 * length**2 * D + 2 * length * D * F)
        for layers, length in ((num_below, row_length), (num_layers - num_below, T))
    )
    return 2 * 3 * (encoder + heads)


def mean_flops_per_token(config: RunConfig, vocab_size: int, lengths_R: np.ndarray) -> float:
    """``row_flops`` per input token, averaged over rows of these lengths."""
    lengths, counts = np.unique(lengths_R, return_counts=True)
    flops = np.array([row_flops(config, vocab_size, int(length)) for length in lengths])
    return float(counts @ flops / (counts @ lengths))


def _activation_bytes(config: RunConfig, vocab_size: int, row_length: int) -> int:
    """Bytes that autograd keeps, counted layer by layer."""
    model, train, is_exlm = config.model, config.train, config.objective == "exlm"
    num_layers, D, F, _ = model.shape
    B = train.micro_batch_size or train.batch_size
    if train.batch_tokens is not None:  # a micro-batch of the longest rows
        B = max(1, (train.micro_batch_tokens or train.batch_tokens) // row_length)
    T = longest_row(config, row_length)
    is_low = train.precision == "bf16"
    half = 2 if is_low else _FLOAT
    # Per layer: inputs (the residual stream stays in float32) and outputs of both norms; queries,
    # keys and values, rotated queries and keys, attended values; the feed-forward layer before
    # and after its activation; masks of three dropouts.
    dropouts = 2 * D * (model.dropout > 0) + F * (model.activation_dropout > 0)
    layer = 2 * D * _FLOAT + (8 * D + 2 * F + dropouts) * half
    ends = (D + D * (model.dropout > 0)) * _FLOAT  # last norm, dropout of the embedding
    num_below = model.expand_at if is_exlm else 0
    kept = B * ((num_below * row_length + (num_layers - num_below) * T) * layer + T * ends)
    if is_low:  # autocast keeps a copy of each weight
        kept += half * (num_layers * (4 * D * D + 2 * D * F) + vocab_size * D)
    num_masks = math.ceil(mask_count(config, row_length))
    if not is_exlm:
        # The log-softmax and the head's hidden states.
        return kept + B * num_masks * (vocab_size + 4 * D) * _FLOAT
    L = num_states(model, num_masks)
    head = B * L * 8 * D * _FLOAT
    if model.emission != "chunked":  # chunks are recomputed, not kept
        head += B * L * vocab_size * _FLOAT
    transition = B * (2 * _learned_heads(model) + 3) * L * L * _FLOAT
    alignment = 3 * B * (num_masks + 2) * L * _FLOAT
    return int(kept + head + transition + alignment)
