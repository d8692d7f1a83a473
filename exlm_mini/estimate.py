"""What a run will cost, before it starts: parameters, tokens and memory.

Shapes: B rows of a micro-batch, T tokens after expansion, L states, S rows of the vocabulary
head (all states, or all masked tokens), D width, F feed-forward width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.training import longest_row, make_model

_FLOAT = 4  # bytes; weights, moments and the alignment are float32 in every precision


class Estimate(NamedTuple):
    """Costs of one run; bytes are estimates for one device, everything else is exact."""

    num_parameters: int
    num_transition_parameters: int
    """Of these, in the transition head."""
    row_length: int
    """Input tokens of the longest row."""
    expanded_length: int
    """The same after expansion or repetition."""
    tokens_per_step: int
    """Input tokens, before expansion."""
    num_tokens: int
    """Of the whole run."""
    weight_bytes: int
    """Weights, gradients and Adam's two moments."""
    activation_bytes: int
    """Kept for the backward pass of one micro-batch, with an attention kernel that does not
    store its probabilities."""


def estimate(
    config: RunConfig,
    vocab_size: int,
    row_length: int,
    special_ids: SpecialIds = SpecialIds(),
    num_slots: int | None = None,
) -> Estimate:
    """Costs of a run with a single objective.

    Args:
        config: of the run.
        vocab_size: V.
        row_length: longest row, [BOS] and [EOS] included.
        special_ids: of the tokenizer.
        num_slots: masks of a row under the strategy ``slots``.
    """
    with torch.device("meta"):
        model = make_model(config, vocab_size, special_ids)
    num_parameters = sum(p.numel() for p in model.parameters())
    transition = getattr(model, "transition", None)
    tokens_per_step = config.train.batch_size * row_length
    return Estimate(
        num_parameters,
        sum(p.numel() for p in transition.parameters()) if transition is not None else 0,
        row_length,
        longest_row(config, row_length, num_slots),
        tokens_per_step,
        tokens_per_step * config.train.steps,
        4 * _FLOAT * num_parameters,
        _activation_bytes(config, vocab_size, row_length, num_slots),
    )


def _activation_bytes(
    config: RunConfig, vocab_size: int, row_length: int, num_slots: int | None = None
) -> int:
    """Tensors autograd keeps, counted layer by layer."""
    model, is_low = config.model, config.train.precision == "bf16"
    num_layers, D, F, H = model.shape
    B = config.train.micro_batch_size or config.train.batch_size
    T = longest_row(config, row_length, num_slots)
    half = 2 if is_low else _FLOAT
    # Per layer: what enters both norms (the residual stream stays in float32) and comes out of
    # them, one storage of queries, keys and values, rotated queries and keys, attended values;
    # the feed-forward layer before and after its activation; masks of three dropouts.
    masks = 2 * D * (model.dropout > 0) + F * (model.activation_dropout > 0)
    layer = 2 * D * _FLOAT + (8 * D + 2 * F + masks) * half
    ends = (D + D * (model.dropout > 0)) * _FLOAT  # last norm, dropout of the embedding
    encoder = B * T * (num_layers * layer + ends)
    if is_low:  # autocast keeps a copy of each weight
        encoder += half * (num_layers * (4 * D * D + 2 * D * F) + vocab_size * D)
    if config.objective != "exlm":
        num_masks = math.ceil(config.masking.mask_ratio * T)
        if num_slots is not None and config.objective != "repeated-mlm":
            num_masks = num_slots
        # log-softmax, and the hidden states of the head.
        return encoder + B * num_masks * (vocab_size + 4 * D) * _FLOAT
    num_masks = num_slots or math.ceil(config.masking.mask_ratio * (row_length - 2))
    k = model.states_per_mask
    num_targets = num_masks + 2
    L = num_masks * k + (2 * k if model.boundary == "official" else 2)
    head = B * L * 8 * D * _FLOAT
    if model.emission != "chunked":  # chunks are recomputed, none is kept
        head += B * L * vocab_size * (half if model.emission == "fused" else _FLOAT)
    num_heads = {"gated": H, "paper": 1}.get(model.transition, 0)
    transition = B * (2 * num_heads + 3) * L * L * _FLOAT
    alignment = 3 * B * num_targets * L * _FLOAT
    return encoder + head + transition + alignment
