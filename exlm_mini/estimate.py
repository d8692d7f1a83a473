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
    config: RunConfig, vocab_size: int, row_length: int, special_ids: SpecialIds = SpecialIds()
) -> Estimate:
    """Costs of a run with a single objective.

    Args:
        config: of the run.
        vocab_size: V.
        row_length: longest row, [BOS] and [EOS] included.
        special_ids: of the tokenizer.
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
        longest_row(config, row_length),
        tokens_per_step,
        tokens_per_step * config.train.steps,
        4 * _FLOAT * num_parameters,
        _activation_bytes(config, vocab_size, row_length),
    )


def _activation_bytes(config: RunConfig, vocab_size: int, row_length: int) -> int:
    """Tensors autograd keeps, counted layer by layer."""
    num_layers, D, F, H = config.model.shape
    B = config.train.micro_batch_size or config.train.batch_size
    T = longest_row(config, row_length)
    width_bytes = 2 if config.train.precision == "bf16" else _FLOAT
    # Per layer: two norms with their outputs, rotated queries and keys, values, the attended
    # values twice, and the feed-forward layer before and after its activation.
    encoder = num_layers * B * T * (9 * D + 2 * F) * width_bytes
    num_masks = math.ceil(config.masking.mask_ratio * (T if config.objective != "exlm" else
                                                       row_length - 2))  # fmt: skip
    if config.objective != "exlm":
        # Logits, their log-softmax, and the hidden states of the head.
        return encoder + B * num_masks * (2 * vocab_size + 5 * D) * _FLOAT
    k = config.model.states_per_mask
    num_targets = num_masks + 2
    L = num_masks * k + (2 * k if config.model.boundary == "official" else 2)
    rows = (
        B * L if config.model.emission == "buffer" else min(B * L, config.model.emission_chunk)
    )
    head = B * L * 8 * D * _FLOAT + rows * vocab_size * _FLOAT
    num_heads = H if config.model.transition == "gated" else 1
    transition = B * (3 * num_heads + 2) * L * L * _FLOAT
    alignment = 3 * B * num_targets * L * _FLOAT
    return encoder + head + transition + alignment
