"""How large the studies of ``book/evidence.py`` are: every number is an option ``--study``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from exlm_mini.config import UserError, nearest

LEAST_STEPS = 8
"""With fewer there is no median of a step's time."""


@dataclass(frozen=True)
class Sizes:
    """A model, how long it is trained, and how often; in the file they stand as ``sizes``."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    batch_tokens: int = 65536
    """Input tokens of an optimiser step, before expansion."""
    seconds: float = 150.0
    """Of pre-training ExLM once: as many steps as fit are made. MLM makes as many, and again as
    many as take it equally long."""
    steps: int = 0
    """Of ExLM, in place of ``seconds``; 0: by ``seconds``."""
    learning_rate: float = 1e-3
    warmup_share: float = 0.06
    pretrain_seeds: tuple[int, ...] = (1,)
    """More of them may be asked for later."""
    tune_seeds: tuple[int, ...] = (1, 2, 3)
    most_epochs: int = 0
    """Of fine-tuning, where the paper's table has more; 0: as the table."""
    validation_rows: int = 2048
    compile: bool = False

    def __post_init__(self) -> None:
        for name in (
            "layers", "width", "heads", "batch_tokens", "seconds", "learning_rate",
            "validation_rows",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"--study {name}={getattr(self, name)}: it must be above 0, and finite"
                )
        if self.steps and self.steps < LEAST_STEPS:
            raise UserError(
                f"--study steps={self.steps}: it must be 0, or at least {LEAST_STEPS}"
            )
        if self.most_epochs < 0:
            raise UserError(f"--study most_epochs={self.most_epochs}: it must not be below 0")
        if not 0 <= self.warmup_share < 1:
            raise UserError(f"--study warmup_share={self.warmup_share}: it must lie in [0, 1)")
        for name in ("pretrain_seeds", "tune_seeds"):
            seeds = getattr(self, name)
            if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
                raise UserError(
                    f"--study {name}={','.join(map(str, seeds))}: give different ones"
                )


QUICK = Sizes(
    layers=1, width=16, heads=2, batch_tokens=1024, steps=8, tune_seeds=(1,), most_epochs=1,
    validation_rows=64,
)  # fmt: skip
"""Shows in seconds that everything runs."""


def sizes_from(words: Iterable[str], start: Sizes) -> Sizes:
    """``KEY=VALUE`` as typed, over some sizes.

    Args:
        words: each names a field of ``Sizes``; seeds as ``1,2``.
        start: what is not named.

    Raises:
        UserError: an unknown name, a value of another type, or one that cannot be.
    """
    kinds = get_type_hints(Sizes)
    changed: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"--study {word}: write KEY=VALUE, such as steps=1000")
        if name not in kinds:
            known = [field.name for field in fields(Sizes)]
            raise UserError(f"--study {word}: {nearest(name, known)}")
        try:
            changed[name] = _value(kinds[name], text)
        except ValueError:
            raise UserError(f"--study {word}: '{text}' is no value of {name}") from None
    return replace(start, **changed)


def _value(kind: Any, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False}[text] if text in ("true", "false") else int("")
    if kind in (int, float):
        return kind(text)
    return tuple(int(part) for part in text.split(","))
