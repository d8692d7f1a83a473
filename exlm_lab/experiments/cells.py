"""What sweeps and the study are made of: cells, and the claims that an experiment decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import RunConfig
from exlm_mini.config.recipes import PRETRAINING, load_recipe, run_config_from_dict

Input = Literal["toy", "slots", "english", "text", "molecules"]
"""The small language ``town``, the smaller ones of two slots, the embedded English or files in its
place, what the paper's recipes read, and molecules prepared before."""
BASES = PRETRAINING._replace(
    folder=Path(__file__).parents[1] / "recipes" / "sweep", prefix="sweep/"
)
"""Recipes of pre-training that only sweeps start from."""


@dataclass(frozen=True)
class Downstream:
    """The task a trained model is fine-tuned on, once for each seed of the sweep."""

    task: str
    """One of ``downstream.catalogue.task_names``."""
    tune: TuneConfig
    num_train: int | None = None
    """Training examples, the first of an embedded task, and so for validation and test; none:
    all of each."""
    num_validation: int | None = None
    num_test: int | None = None


@dataclass(frozen=True)
class Cell:
    """What is trained and measured under one name, once for each seed."""

    name: str
    """Begins with the input."""
    input: Input
    base: str
    """Name of a recipe; those of ``recipes/sweep`` begin with ``sweep/``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings that differ from the base."""
    downstream: Downstream | None = None
    paper: tuple[str, str] | None = None
    """Table or figure and row of the paper it stands for, as ``paper.json`` calls them."""
    seeds: tuple[int, ...] = (1, 2, 3)
    is_timed: bool = False
    """Only steps are timed, against those of an MLM on the same rows; nothing is kept."""
    tested_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other dotted settings of masks it is also measured with, by a name that metrics end in."""
    watched: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics also taken at every validation, on its number of rows; training ends where one is
    not above its number."""
    cost_of: tuple[str, str] | None = None
    """Sweep and cell that measured a ratio of costs: the steps of the base times that ratio."""

    def config(self, seed: int, changed: Mapping[str, Any] | None = None) -> RunConfig:
        """Settings of the run with a seed.

        Args:
            seed: of weights, data order, masks, dropout.
            changed: more dotted settings, such as a number of steps that was measured.

        Raises:
            UserError: if a setting is unknown, or a value cannot be.
        """
        return with_settings(
            load_base(self.base), {**self.settings, **(changed or {}), "seed": seed}
        )


@cache
def load_base(name: str) -> RunConfig:
    """The settings of a recipe by name, those of ``recipes/sweep`` too.

    Raises:
        UserError: if there is no such recipe.
    """
    return load_recipe(name, BASES if name.startswith(BASES.prefix) else PRETRAINING)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The same with dotted settings replaced.

    Raises:
        UserError: if a setting is unknown, or a value cannot be.
    """
    nested = asdict(config)
    for name, value in settings.items():
        group, _, key = name.rpartition(".")
        (nested[group] if group else nested)[key] = value
    return run_config_from_dict(nested)


class Claim(NamedTuple):
    """A hypothesis, and the contrast that decides it."""

    text: str
    """In one line; what is true if the contrast comes out as expected."""
    metric: str
    cell: str
    base: str | None
    """The cell it is compared with; or a metric of the same run, such as its exact floor; or
    none, for zero."""
    sign: int
    """1: true if the cell's number is larger, -1: if it is smaller."""
    smallest: float
    """Effect that would matter, in the unit of the metric."""
    is_primary: bool = False
    weights: Mapping[str, float] | None = None
    """Of cells, in place of one and its base: the contrast is their weighted sum, such as the
    slope of a regression, and ``cell`` is what it is called."""


@dataclass(frozen=True)
class Experiment:
    """Cells with equal seeds, and what they are to decide."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
