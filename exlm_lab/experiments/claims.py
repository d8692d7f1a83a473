"""What an experiment of the study is: cells with equal seeds, and the claims that they decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.records import Group


class Claim(NamedTuple):
    """A hypothesis, and the contrast that decides it."""

    text: str
    """In one line; what the contrast says if it holds."""
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
    told: Callable[[Sequence[Group]], list[tuple[str, ...]]] | None = None
    """Rows of one more table of the report, the head first."""
