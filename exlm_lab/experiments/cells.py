"""Building blocks of sweeps and the study: cells, and the claims that an experiment decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import RunConfig
from exlm_mini.config.checks import settings
from exlm_mini.config.recipes import PRETRAINING, load_recipe, replaced
from exlm_mini.data.toy_grammars import LADDER

Input = Literal["toy", "slots", "english", "molecules"]
"""The small language ``town``, smaller languages with slots, the embedded English or files in its
place, and prepared molecules."""
Watched = Mapping[str, float | None]
"""Metrics, and the threshold of each or none; empty for a run of fixed length."""
BASES = PRETRAINING._replace(
    folder=Path(__file__).parents[1] / "recipes" / "sweep", prefix="sweep/"
)
"""Recipes for pre-training that are used only by sweeps."""
CLONES, CHAINS = {"model.clone_embedding_std": 1.0}, {"train.chain_warmup": 0.25}
CURES = CLONES | CHAINS
"""Against the symmetric start, as in the small recipes; not in the paper (``saddle`` is why)."""
FIVE_SEEDS, TEN_SEEDS = tuple(range(1, 6)), tuple(range(1, 11))
LADDER_AXIS = {f"{bits}": {"data.grammar": f"ladder-{bits}"} for bits in LADDER}
"""Languages whose masks share more and more bits, an axis of ``grid``."""
MLM: dict[str, Any] = {"objective": "mlm"}
TIMED: dict[str, Any] = {"is_timed": True, "seeds": (1,)}


def exlm(num_states: int = 4) -> dict[str, Any]:
    """Settings of ExLM with k states for each mask, and both cures."""
    return {"objective": "exlm", "model.states_per_mask": num_states, **CURES}


@settings()
class Downstream:
    """The task that a trained model is fine-tuned on."""

    task: str
    """One of ``downstream.catalogue``."""
    tune: TuneConfig
    num_train: int | None = None
    """Use only the first so many training examples of an embedded task, and likewise for validation
    and test; None: all."""
    num_validation: int | None = None
    num_test: int | None = None


@dataclass(frozen=True)
class Cell:
    """A setting that is trained and measured, once per seed."""

    name: str
    """Begins with the input."""
    input: Input
    base: str
    """Name of a recipe; those of ``recipes/sweep`` begin with ``sweep/``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings that differ from the base."""
    downstream: Downstream | None = None
    paper: tuple[str, str] | None = None
    """Table or figure and row of the paper that it reproduces, as named in ``paper.json``."""
    seeds: tuple[int, ...] = (1, 2, 3)
    is_timed: bool = False
    """Only time steps, against those of an MLM on the same rows."""
    tested_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further mask settings (dotted) to measure with, by a suffix for the metrics' names."""
    watched: Watched = field(default_factory=dict)
    """Metrics that are also measured at every validation; training ends when one reaches its
    threshold, see ``is_enough``."""
    cost_of: tuple[str, str] | None = None
    """Sweep and cell with a measured ratio of costs: an MLM's steps are multiplied by it, those of
    others, which are counted in steps of an MLM, divided."""
    start: Cell | None = None
    """The cell whose trained model, of the same seed, this one goes on from."""
    with_prize: bool = False
    """Also measure what there is to win (``reading.prize``) and how masks are filled."""

    def config(self, seed: int, changed: Mapping[str, Any] | None = None) -> RunConfig:
        """Settings of the run with a seed."""
        changed = {**self.settings, **(changed or {}), "seed": seed}
        return replaced(load_base(self.base), changed)


def is_enough(numbers: Mapping[str, Any], watched: Watched) -> bool:
    """Whether a watched metric is at its threshold."""
    return any(
        most is not None and name in numbers and numbers[name] <= most
        for name, most in watched.items()
    )


def grid(*axes: Mapping[str, Mapping[str, Any]], **common: Any) -> tuple[Cell, ...]:
    """A cell for every combination of one entry of each axis.

    Args:
        axes: by name, dotted settings and fields of ``Cell``; where entries say the same, the last
            counts. Names are joined by a dash, and the first axis varies slowest.
        common: fields that all cells have, unless an entry says otherwise.
    """
    cells = []
    for entries in itertools.product(*(axis.items() for axis in axes)):
        settings = {name: value for _, entry in entries for name, value in entry.items()}
        own = {f.name: settings.pop(f.name) for f in fields(Cell) if f.name in settings}
        name = "-".join(name for name, _ in entries)
        cells.append(Cell(**{"name": name, "settings": settings, **common, **own}))
    return tuple(cells)


@cache
def load_base(name: str) -> RunConfig:
    """The settings of a recipe by name, those of ``recipes/sweep`` too."""
    return load_recipe(name, BASES if name.startswith(BASES.prefix) else PRETRAINING)


class Claim(NamedTuple):
    """A hypothesis, and the contrast that decides it."""

    text: str
    """One line: what is true if the contrast comes out as expected."""
    metric: str
    cell: str
    base: str | None
    """The cell it is compared with, or a metric of the same run, such as its exact floor, or None
    for zero."""
    sign: int
    """1: true if the cell's number is larger, -1: if it is smaller."""
    smallest: float
    """The smallest effect that matters, in the unit of the metric."""
    is_primary: bool = False
    weights: Mapping[str, float] | None = None
    """Weights of cells: the contrast is their weighted sum, such as a regression slope, and
    ``cell`` is its name."""
    id: str = ""
    """By which the scorecard and pages name the claim."""
    statistic: Callable[[Mapping[tuple[float, int], float]], float] | None = None
    """Of the grid of Repeated MLM on the small language, in place of a contrast of cells."""
    is_planned: bool = True
    """False if it was chosen after looking; without meaning where the experiment has no plan."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the cells that are compared; a base may be a metric, too."""
        return tuple(self.weights or filter(None, (self.cell, self.base)))


@dataclass(frozen=True)
class Experiment:
    """Cells, and the claims they decide."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    plan: str | None = None
    """The plan it is part of, whose primary claims are one family; None for a sweep."""

    def cell(self, name: str) -> Cell:
        """The cell of a name."""
        return next(cell for cell in self.cells if cell.name == name)
