"""Settings of a run: frozen dataclasses, checked as soon as they are built.

A field says everything about its setting: the type with its bounds, the default, the ``Effect``,
and in its docstring the meaning and unit. Help, checks and the lists of settings that matter are
derived from this. Nothing here reads files or the command line.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Literal

from exlm_mini.config.checks import Effect, Seed, UserError, fields_of, settings
from exlm_mini.config.groups import (
    ENCODER_PRESETS,
    SPECIAL_TOKENS,
    DataConfig,
    EncoderShape,
    MaskingConfig,
    ModelConfig,
    SpecialIds,
    TrainConfig,
)

__all__ = [
    "ENCODER_PRESETS",
    "SPECIAL_TOKENS",
    "DataConfig",
    "EncoderShape",
    "MaskingConfig",
    "ModelConfig",
    "RunConfig",
    "SpecialIds",
    "TrainConfig",
    "settings_with",
]


@settings()
class RunConfig:
    """One pre-training run."""

    recipe: str = "text-tiny"
    """Name of the recipe these settings started from."""
    objective: Literal["mlm", "repeated-mlm", "exlm"] = "exlm"
    """Training objective."""
    model: ModelConfig = field(default_factory=ModelConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: Seed = 1
    """Seed for weights, row order, masks and dropout."""

    def __post_init__(self) -> None:
        strategy, kind = self.masking.strategy, self.data.kind
        if (strategy, kind == "toy") in (("units", True), ("slots", False)):
            raise UserError(
                f"masking.strategy {strategy} cannot be used with data.kind {kind}; only the toy "
                "language has slots, and only text and smiles have units"
            )

    @property
    def num_copies(self) -> int:
        """Copies of each token in the input: §3's k for Repeated MLM, otherwise 1."""
        return self.masking.num_copies if self.objective == "repeated-mlm" else 1

    @property
    def grow_step(self) -> int:
        """Steps that an exlm run trains as an MLM before it expands masks (``grow_at``), or 0."""
        share, steps = self.train.grow_at, self.train.steps
        if self.objective != "exlm" or share == 0:
            return 0
        return min(max(1, round(share * steps)), steps - 1)

    @property
    def stages(self) -> list[tuple[RunConfig, int]]:
        """Settings of each model that the run trains in turn, and the step at which it ends.

        A run that grows (``grow_at``) first trains an MLM, with the checkpoints of one.
        """
        last = [(self, self.train.steps)]
        step = self.grow_step
        return [(replace(self, objective="mlm"), step), *last] if step else last

    def chain_share(self, step: int) -> float:
        """Weight of the fixed parallel chains: 1 at first, then falling to 0 (``chain_warmup``)."""
        warmup_steps = self.train.chain_warmup * self.train.steps
        if self.objective != "exlm" or warmup_steps == 0:
            return 0.0
        return min(1.0, max(0.0, 2.0 - (step - self.grow_step) / warmup_steps))

    def expanded_length(self, num_tokens: int, num_masks: Any = 0) -> Any:
        """Length of a row of ``num_tokens`` tokens, [BOS] and [EOS] included, in the encoder."""
        if self.objective != "exlm":
            return num_tokens * self.num_copies
        num_boundaries = 2 if self.model.boundary == "official" else 0
        return num_tokens + (self.model.states_per_mask - 1) * (num_masks + num_boundaries)

    def longest_text(self, num_pieces: int = 1) -> int:
        """Length of the longest row without masks that fits into the model.

        Each of the ``num_pieces`` texts of the row has a [BOS] and an [EOS], which count too."""
        most = self.model.max_positions // self.num_copies
        length = most - num_pieces * self.expanded_length(0)
        if length < 3 * num_pieces:
            raise UserError(
                f"model.max_positions {self.model.max_positions} of the checkpoint leaves room for "
                f"only {length} tokens with [BOS] and [EOS]; use a checkpoint with more positions"
            )
        return length


def settings_with(*effects: Effect) -> list[str]:
    """Dotted names of the settings that have one of these effects."""
    return [name for name, setting in fields_of(RunConfig) if {*effects} & {*setting.metadata}]
