"""Settings of fine-tuning, checked as soon as they are built."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from exlm_mini.config.checks import (
    Below1,
    Count,
    NotNegative,
    Positive,
    Seed,
    Share,
    UserError,
    settings,
)
from exlm_mini.data.molecules import Cleaning

if TYPE_CHECKING:
    from exlm_mini.data.tokenizer import Tokenizer

MAX_UNKNOWN = 0.1
"""Largest share of [UNK] among the tokens of the training texts; with more, the vocabulary was made
for other data."""


@settings("data.")
class ReadingConfig:
    """How a table is split, and how its molecules are spelled."""

    split: str | None = None
    """How to split the rows: scaffold or deepchem, which keep molecules of one ring scaffold
    together; random; or the name of a column with the words train, validation and test. Default:
    scaffold for molecules, random for text."""
    split_seed: Seed = 0
    """Seed for choosing rows to hold out at random."""
    canonical: bool = False
    """Rewrite molecules as RDKit's canonical SMILES."""

    def cleaning(self, tokenizer: Tokenizer) -> Cleaning:
        """How to clean molecules for a model with this tokenizer."""
        return replace(Cleaning.needed_by(tokenizer), canonical=self.canonical)


@settings("train.")
class TuneConfig:
    """Fine-tuning settings.

    The defaults of learning rate, epochs, dropout and warm-up suit models as small as those that
    come with the package. They are from a search on the embedded molecules
    (``book/results/downstream-search.json``). A large model needs dropout and a far lower rate, as
    in the recipes of the paper's tables. The other defaults follow RoBERTa on GLUE.
    """

    epochs: Count = 10
    """Passes over the training rows."""
    batch_size: Count = 32
    """Rows per optimiser step."""
    micro_batch_size: Count | None = None
    """Rows per forward pass; dropout and rounding depend on it. Default: the whole batch."""
    learning_rate: Positive = 2e-3
    """Peak learning rate."""
    patience: Count | None = None
    """End a run after this many epochs without a better validation score. Default: never."""
    warmup_share: Share = 0.06
    """Share of the steps in which the learning rate rises linearly from 0; then it falls linearly
    to 0."""
    dropout: Below1 = 0.0
    """Dropout in the encoder, after the embedding and each sublayer."""
    attention_dropout: Below1 = 0.0
    """Dropout on attention probabilities in the encoder."""
    pooler_dropout: Below1 = 0.0
    """Dropout in the head."""
    adam_betas: tuple[Below1, Below1] = (0.9, 0.98)
    """Adam's decay rates, per step, for the running means of the gradient and of its square."""
    adam_eps: Positive = 1e-6
    """Adam's epsilon, added to the root of the mean squared gradient."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay; biases and layer norms are exempt."""
    clip_norm: NotNegative = 0.0
    """Largest gradient norm; larger gradients are scaled down. 0 turns clipping off."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the encoder; auto is bf16 on a GPU that supports it, otherwise fp32."""

    def __post_init__(self) -> None:
        if self.batch_size % (self.micro_batch_size or 1):
            raise UserError(
                f"train.micro_batch_size {self.micro_batch_size} must divide train.batch_size "
                f"{self.batch_size}; change one of them"
            )

    def steps_per_epoch(self, rows: Sized) -> int:
        """Optimiser steps of one pass over some rows."""
        return math.ceil(len(rows) / self.batch_size)
