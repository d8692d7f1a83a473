"""Load the toy languages, defined in ``grammars.yaml``, by name.

They range from two moods and two hidden words to a town with four latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.toy import Grammar, Position

LADDER = (0, 1, 2, 4, 8)
"""Bits of total correlation of the grammars ``ladder-0`` to ``ladder-8``."""


@cache
def _file() -> dict[str, Any]:
    import yaml

    text = Path(__file__).with_name("grammars.yaml").read_text(encoding="utf-8")
    return yaml.load(text, yaml.BaseLoader)  # every value stays a string


def names() -> list[str]:
    """Names of all grammars."""
    return [name for name in _file() if name != "words"]


def grammar(name: str) -> Grammar:
    """Build the grammar with this name."""
    if name not in names():
        raise UserError(f"data.grammar is '{name}'; {nearest(name, names())}")
    language = _file()[name]
    words = _file()["words"] | language.get("words", {})
    positions = (
        _position(words[part[1:-1]] if part[0] == "{" else part)
        for part in language["sentence"].split()
    )
    latents = {
        latent: tuple((about if isinstance(about, str) else about["values"]).split())
        for latent, about in language["latents"].items()
    }
    prior = _prior(latents, language["latents"])
    return Grammar(name, latents, prior, tuple(positions))


def _position(words: str | Mapping[str, Mapping[str, str]]) -> Position:
    """Make a position from words that no latent drives, or from words by the values of latents."""
    if isinstance(words, str):
        return Position({(): words})
    ((latents, choices),) = words.items()
    return Position(
        {tuple(key.split()): text for key, text in choices.items()}, tuple(latents.split())
    )


def _prior(latents: Mapping[str, tuple[str, ...]], about: Mapping[str, Any]) -> np.ndarray:
    """The joint probability of the latents, one axis per latent."""
    prior = np.ones([len(values) for values in latents.values()])
    axes = list(latents)
    for latent, values in latents.items():
        table = np.full(len(values), 1 / len(values))
        own = [latent]
        if not isinstance(about[latent], str):
            table = np.array(about[latent]["probabilities"], dtype=float)
            own = [*([about[latent]["given"]] if table.ndim == 2 else []), latent]
        prior = prior * table.reshape(
            [n if a in own else 1 for a, n in zip(axes, prior.shape, strict=True)]
        )
    return prior


def slots_of(config: RunConfig) -> tuple[int, ...]:
    """Columns that the masking strategy ``slots`` hides, counted from 0 at [BOS]; else empty."""
    if config.masking.strategy != "slots":
        return ()
    return tuple(slot + 1 for slot in grammar(config.data.grammar).slots)
