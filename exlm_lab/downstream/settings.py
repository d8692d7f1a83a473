"""Settings of fine-tuning, checked as soon as they are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exlm_mini.config import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TrainConfig,
    UserError,
    check_fields,
    check_numbers,
)


@dataclass(frozen=True)
class TuneConfig:
    """How to fine-tune (Tables 6, 8 and 11; where they are silent, as RoBERTa's on GLUE)."""

    epochs: int = 10
    """Passes over the training rows."""
    batch_size: int = 32
    """Rows per optimiser step."""
    micro_batch_size: int | None = None
    """Rows per forward pass; none: the whole batch. Dropout and rounding depend on it."""
    learning_rate: float = 5e-5
    """Peak of the schedule."""
    warmup_share: float = 0.06
    """Share of the steps in which the rate rises from 0; then it falls to 0, both linearly."""
    dropout: float = 0.1
    """In the encoder, after the embedding and each sublayer."""
    attention_dropout: float = 0.1
    """In the encoder, on attention probabilities."""
    pooler_dropout: float = 0.0
    """In the head."""
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_eps: float = 1e-6
    weight_decay: float = 0.1
    """Decoupled, on every parameter."""
    clip_norm: float = 0.0
    """Largest gradient norm; 0: no clipping."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the encoder; auto: bf16 on a GPU, fp32 on a CPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adam_betas", tuple(self.adam_betas))
        check_fields("", self)
        check_numbers("", self, AT_LEAST_1, "epochs", "batch_size", "micro_batch_size")
        check_numbers("", self, BELOW_1, "dropout", "attention_dropout", "pooler_dropout")
        check_numbers("", self, NOT_NEGATIVE, "weight_decay", "clip_norm")
        check_numbers("", self, POSITIVE, "learning_rate", "adam_eps")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise UserError(f"adam_betas is {self.adam_betas}; give two, both in [0, 1)")
        check_numbers("", self, SHARE, "warmup_share")

    def train(self, steps_per_epoch: int, device: str) -> TrainConfig:
        """The same in the words of pre-training, whose loop is used, for a type of device."""
        num_steps = self.epochs * steps_per_epoch
        auto = "bf16" if device == "cuda" else "fp32"
        return TrainConfig(
            steps=num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=round(self.warmup_share * num_steps),
            adam_betas=self.adam_betas,
            adam_eps=self.adam_eps,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            precision=auto if self.precision == "auto" else self.precision,
            max_skipped=1,
            save_every=steps_per_epoch,
            keep_last=1,
            log_every=steps_per_epoch,
            validate_every=steps_per_epoch,
        )
