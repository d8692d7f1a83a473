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
from exlm_mini.config.checks import UserError, nearest, settings
from exlm_mini.config.recipes import PRETRAINING, load_recipe, replaced
from exlm_mini.data.toy_grammars import LADDER

Input = Literal["toy", "slots", "english", "molecules"]
"""What a cell trains on: the small language ``town``, smaller languages in which only slots are
masked, the embedded English text or files in its place, or prepared molecules."""
Watched = Mapping[str, float | None]
"""Metrics to measure at every validation, each with the threshold at which training ends, or None
to only record it. Empty for a run of fixed length."""
BASES = PRETRAINING._replace(
    folder=Path(__file__).parents[1] / "recipes" / "sweep", prefix="sweep/"
)
"""Recipes for pre-training that are used only by sweeps."""
CLONES, CHAINS = {"model.clone_embedding_std": 1.0}, {"train.chain_warmup": 0.25}
CURES = CLONES | CHAINS
"""Start-up aids, which break the symmetry between the clones of a mask. The small recipes have
them, the paper does not; the sweep ``saddle`` shows why we do."""
FIVE_SEEDS, TEN_SEEDS = tuple(range(1, 6)), tuple(range(1, 11))
LADDER_AXIS = {f"{bits}": {"data.grammar": f"ladder-{bits}"} for bits in LADDER}
"""An axis for ``grid``: languages whose masks share more and more bits."""
MLM: dict[str, Any] = {"objective": "mlm"}
TIMED: dict[str, Any] = {"is_timed": True, "seeds": (1,)}


def exlm(num_states: int = 4) -> dict[str, Any]:
    """Settings of an ExLM with k states per mask and both start-up aids."""
    return {"objective": "exlm", "model.states_per_mask": num_states, **CURES}


@settings()
class Downstream:
    """The task that a trained model is fine-tuned on."""

    task: str
    """Name of a task in ``downstream.catalogue``."""
    tune: TuneConfig
    num_train: int | None = None
    """For an embedded task: how many of the first training examples to use; None: all. The next
    two fields limit validation and test in the same way."""
    num_validation: int | None = None
    num_test: int | None = None


@dataclass(frozen=True)
class Cell:
    """A configuration that is trained and measured, once per seed."""

    name: str
    """Name of the cell; in a sweep it begins with the input."""
    input: Input
    base: str
    """Name of the recipe to start from; those in ``recipes/sweep`` begin with ``sweep/``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings that differ from the base."""
    downstream: Downstream | None = None
    paper: tuple[str, str] | None = None
    """Table or figure of the paper, and its row, that the cell reproduces; named as in
    ``paper.json``."""
    seeds: tuple[int, ...] = (1, 2, 3)
    is_timed: bool = False
    """Train nothing; only time a step against a step of an MLM on the same rows."""
    tested_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other mask settings (dotted) to measure the model with, by the suffix their metrics get."""
    watched: Watched = field(default_factory=dict)
    """Metrics that are also measured at every validation; training ends when one reaches its
    threshold, see ``is_enough``."""
    cost_of: tuple[str, str] | None = None
    """Sweep and cell with a measured ratio of costs, a step of ExLM over one of MLM. An MLM's steps
    are multiplied by it; those of other models, given in steps of an MLM, are divided by it."""
    start: Cell | None = None
    """Another cell; training continues from its trained model with the same seed."""
    with_prize: bool = False
    """Also measure what hidden tokens tell about each other (``reading.prize``) and, for molecules,
    how well masks are filled in (``reading.filling``)."""

    def config(self, seed: int, changed: Mapping[str, Any] | None = None) -> RunConfig:
        """Settings of the run with this seed; those in ``changed`` override the cell's own."""
        changed = {**self.settings, **(changed or {}), "seed": seed}
        return replaced(load_base(self.base), changed)


def is_enough(numbers: Mapping[str, Any], watched: Watched) -> bool:
    """Whether any watched metric has come down to its threshold."""
    return any(
        most is not None and name in numbers and numbers[name] <= most
        for name, most in watched.items()
    )


def grid(*axes: Mapping[str, Mapping[str, Any]], **common: Any) -> tuple[Cell, ...]:
    """Make a cell for every combination of one entry from each axis.

    Args:
        axes: each maps names to dotted settings and fields of ``Cell``. Where two entries of a
            combination set the same thing, the last counts. A cell is named by the entries' names,
            joined by dashes; the first axis varies slowest.
        common: fields of all cells, unless an entry overrides them.
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
    """The settings of the recipe with this name, which may be one of ``recipes/sweep``."""
    return load_recipe(name, BASES if name.startswith(BASES.prefix) else PRETRAINING)


class Claim(NamedTuple):
    """A hypothesis, and the contrast that decides it."""

    text: str
    """One line: what is true if the contrast comes out as expected."""
    metric: str
    cell: str
    base: str | None
    """What ``cell`` is compared with: another cell, a metric of the same run (such as its exact
    floor), or None for zero."""
    sign: int
    """1 if the claim is that the cell's number is larger than the base's, -1 if smaller."""
    smallest: float
    """The smallest effect that matters, in the unit of the metric."""
    is_primary: bool = False
    weights: Mapping[str, float] | None = None
    """Weights by cell, if the contrast is a weighted sum of cells, such as a regression slope;
    ``cell`` is then the name of the contrast."""
    id: str = ""
    """Short name by which the scorecard and the book's pages refer to the claim."""
    statistic: Callable[[Mapping[tuple[float, int], float]], float] | None = None
    """For a claim about the grid of Repeated MLM on ``town``: the function of the grid to test, in
    place of a contrast of cells."""
    is_planned: bool = True
    """False if chosen after looking at results; meaningless if the experiment has no plan."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the cells that are compared, and of the base even if it is a metric."""
        return tuple(self.weights or filter(None, (self.cell, self.base)))


@dataclass(frozen=True)
class Experiment:
    """Cells, and the claims they decide."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    plan: str | None = None
    """Name of the plan it is part of, whose primary claims form one family; None for a sweep."""

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"{self.name} has several cells named {min(twice)!r}; rename them")
        if without := [cell.name for cell in self.cells if not cell.seeds]:
            raise UserError(f"cell {without[0]!r} of {self.name} has no seeds; give it some")

    def cell(self, name: str) -> Cell:
        """The cell with this name."""
        for cell in self.cells:
            if cell.name == name:
                return cell
        known = (cell.name for cell in self.cells)
        raise UserError(f"{self.name} has no cell {name!r}; {nearest(name, known)}")
