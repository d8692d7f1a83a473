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
"""Of all tokens of the training texts: with more, the vocabulary is that of another corpus."""


@settings("data.")
class ReadingConfig:
    """How a table is split, and molecules are spelled."""

    split: str | None = None
    """scaffold or deepchem, which keep molecules of one frame of rings together; random; or a
    column with the words train, validation and test; none: scaffold for molecules, random for
    text."""
    split_seed: Seed = 0
    """Of rows that are held out at random."""
    canonical: bool = False
    """Write RDKit's canonical SMILES."""

    def rule(self, input: str) -> str:
        """The split of a table of molecules (smiles) or of text."""
        return self.split or ("scaffold" if input == "smiles" else "random")

    def cleaning(self, tokenizer: Tokenizer) -> Cleaning:
        """The cleaning of each molecule."""
        return replace(Cleaning.needed_by(tokenizer), canonical=self.canonical)


@settings("train.")
class TuneConfig:
    """Fine-tuning settings.

    Rate, epochs, dropout and warm-up are for models as small as those that come with the package,
    from a search on the embedded molecules (``book/results/downstream-search.json``); a large model
    needs dropout and a rate far lower, as in the recipes of the paper's tables. The rest follows
    RoBERTa on GLUE.
    """

    epochs: Count = 10
    """Passes over the training rows."""
    batch_size: Count = 32
    """Rows per optimiser step."""
    micro_batch_size: Count | None = None
    """Rows per forward pass; none: the whole batch. Dropout and rounding depend on it."""
    learning_rate: Positive = 2e-3
    """Peak of the schedule."""
    patience: Count | None = None
    """Epochs without a better score on the validation rows, after which a run ends; none: never."""
    warmup_share: Share = 0.06
    """Share of the steps in which the rate rises from 0; then it falls to 0, both linearly."""
    dropout: Below1 = 0.0
    """In the encoder, after the embedding and each sublayer."""
    attention_dropout: Below1 = 0.0
    """In the encoder, on attention probabilities."""
    pooler_dropout: Below1 = 0.0
    """In the head."""
    adam_betas: tuple[Below1, Below1] = (0.9, 0.98)
    """Decay per step of Adam's mean gradient and mean square."""
    adam_eps: Positive = 1e-6
    """Added to the root of the mean square."""
    weight_decay: NotNegative = 0.1
    """Decoupled; not on biases and layer norms."""
    clip_norm: NotNegative = 0.0
    """Largest gradient norm; 0: no clipping."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the encoder; auto: bf16 on a GPU that has it, otherwise fp32."""

    def __post_init__(self) -> None:
        if self.batch_size % (self.micro_batch_size or 1):
            raise UserError(
                f"train.micro_batch_size {self.micro_batch_size} must divide train.batch_size "
                f"{self.batch_size}; change one of them"
            )

    def steps_per_epoch(self, rows: Sized) -> int:
        """Optimiser steps of one pass over some rows."""
        return math.ceil(len(rows) / self.batch_size)
