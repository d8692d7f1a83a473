"""Settings of fine-tuning, checked as soon as they are built."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from exlm_mini.config.checks import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_fields,
)
from exlm_mini.training.precision import has_bf16


@dataclass(frozen=True)
class TuneConfig:
    """Fine-tuning settings.

    Rate, epochs, dropout and warm-up are for models as small as those that come with the package,
    from a search on the embedded molecules (``book/results/downstream-search.json``); a large model
    needs dropout and a rate far lower, as in the recipes of the paper's tables. The rest follows
    RoBERTa on GLUE.
    """

    epochs: Annotated[int, AT_LEAST_1] = 10
    """Passes over the training rows."""
    batch_size: Annotated[int, AT_LEAST_1] = 32
    """Rows per optimiser step."""
    micro_batch_size: Annotated[int | None, AT_LEAST_1] = None
    """Rows per forward pass; none: the whole batch. Dropout and rounding depend on it."""
    learning_rate: Annotated[float, POSITIVE] = 2e-3
    """Peak of the schedule."""
    warmup_share: Annotated[float, SHARE] = 0.06
    """Share of the steps in which the rate rises from 0; then it falls to 0, both linearly."""
    dropout: Annotated[float, BELOW_1] = 0.0
    """In the encoder, after the embedding and each sublayer."""
    attention_dropout: Annotated[float, BELOW_1] = 0.0
    """In the encoder, on attention probabilities."""
    pooler_dropout: Annotated[float, BELOW_1] = 0.0
    """In the head."""
    adam_betas: Annotated[tuple[float, float], BELOW_1] = (0.9, 0.98)
    """Decay per step of Adam's mean gradient and mean square."""
    adam_eps: Annotated[float, POSITIVE] = 1e-6
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled, on every parameter."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 0.0
    """Largest gradient norm; 0: no clipping."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the encoder; auto: bf16 on a GPU that has it, otherwise fp32."""

    def __post_init__(self) -> None:
        check_fields("", self)

    def steps_per_epoch(self, rows: Sized) -> int:
        """Optimiser steps of one pass over some rows."""
        return math.ceil(len(rows) / self.batch_size)

    def is_half(self, device: torch.device) -> bool:
        """Whether the encoder works in bf16 on a device."""
        if self.precision == "auto":
            return device.type == "cuda" and has_bf16(device)
        return self.precision == "bf16"
