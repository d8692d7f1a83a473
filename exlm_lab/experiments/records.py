"""Records of the sweeps, one JSON file per cell and seed, and summaries over seeds.

Metrics have their names in ``metrics``; ``downstream`` is the score on the test rows of the
downstream task, in percent, and ``validation_…`` is from the run's last validation.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import run_config_from_dict
from exlm_mini.data.files import read_bytes, reading

DOWNSTREAM = "downstream"
WANTED = {
    "sweep": str, "cell": str, "input": str, "seed": int, "objective": str,
    "config": dict, "metrics": dict, "curve": list, "versions": dict,
}  # fmt: skip
"""Required fields of a record, with their types."""
LEFT_BY = 0.1
"""Bits per row below MLM's floor at which a run counts as having left it."""
LEFT_SHARE = 0.1
"""The same as a share of the total correlation; the smaller of the two counts."""


@dataclass(frozen=True)
class Record:
    """One trained and measured model."""

    cell: str
    input: str
    """Of ``cells.Input``."""
    seed: int
    objective: str
    metrics: Mapping[str, float]
    data: Mapping[str, Any]
    """The whole file."""

    @property
    def mask_ratio(self) -> float:
        """The paper's p."""
        return self.data["config"]["masking"]["mask_ratio"]

    @property
    def num_copies(self) -> int:
        """The paper's k of §3."""
        return self.data["config"]["masking"]["num_copies"]

    @property
    def states_per_mask(self) -> int:
        """The paper's k of §4; 1 for a model without states."""
        return (
            self.data["config"]["model"]["states_per_mask"] if self.objective == "exlm" else 1
        )

    def value(self, metric: str) -> float | None:
        """A metric; None if it was not measured or is not finite."""
        if metric == DOWNSTREAM:
            found = (self.data.get(DOWNSTREAM) or {}).get("test")
            return None if found is None else 100 * found
        found = self.metrics.get(metric)
        if metric.startswith("validation_") and self.data["curve"]:
            found = self.data["curve"][-1].get(metric)
        return found if found is not None and math.isfinite(found) else None


class Summary(NamedTuple):
    """A number over seeds."""

    mean: float
    sd: float | None
    """Of the sample; none for a single seed."""
    num: int

    @property
    def standard_error(self) -> float | None:
        """Of the mean; none for a single seed."""
        return None if self.sd is None else self.sd / math.sqrt(self.num)

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        sd = None if self.sd is None else abs(factor) * self.sd
        return Summary(factor * self.mean, sd, self.num)

    def shown(self, digits: int = 2, sign: str = "") -> str:
        """``1.23 ± 0.04``: mean and standard deviation; the mean alone for one seed."""
        spread = "" if self.sd is None else f" ± {self.sd:.{digits}f}"
        return f"{self.mean:{sign}z.{digits}f}{spread}"


def summarize(values: Iterable[float]) -> Summary | None:
    """Mean, standard deviation and number of some values; None without values."""
    values = list(values)
    if not values:
        return None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class Group:
    """The seeds of one cell on one input."""

    cell: str
    input: str
    records: tuple[Record, ...]
    """By seed, ascending; at least one."""

    @property
    def name(self) -> str:
        """The cell without the input it may start with."""
        return self.cell.removeprefix(f"{self.input}-")

    @property
    def first(self) -> Record:
        """A record, for what does not depend on the seed."""
        return self.records[0]

    @property
    def paper_row(self) -> tuple[str, str] | None:
        """Table and row of the paper that the cell reproduces, as named in ``paper.json``."""
        found = self.first.data.get("paper")
        return (found["table"], found["row"]) if found else None

    def by_seed(self, metric: str) -> dict[int, float]:
        """The metric of each seed that has it."""
        found = {record.seed: record.value(metric) for record in self.records}
        return {seed: value for seed, value in found.items() if value is not None}

    def summary(self, metric: str) -> Summary | None:
        """The metric over seeds; None if no seed has it."""
        return summarize(self.by_seed(metric).values())


def read_record(path: Path) -> Record:
    """One file.

    Raises:
        UserError: if it is no record.
    """
    remedy = "delete it, and the sweep runs this cell again"
    with reading(path, remedy):
        data = json.loads(read_bytes(path))
        for name, kind in WANTED.items():
            if not isinstance(data[name], kind):
                raise TypeError(f"{name} is of another kind")
        numbers = [*data["metrics"].values(), (data.get(DOWNSTREAM) or {}).get("test")]
        numbers += [number for point in data["curve"] for number in point.values()]
        numbers += (data.get("seconds") or {}).values()
        if not all(number is None or isinstance(number, int | float) for number in numbers):
            raise TypeError("a metric is no number")
        if (paper := data.get("paper")) and {"table", "row"} - paper.keys():
            raise KeyError("paper names no table or no row")
        try:
            run_config_from_dict(data["config"])
        except UserError as error:
            raise ValueError(str(error)) from None
    return Record(
        data["cell"], data["input"], data["seed"], data["objective"], data["metrics"], data
    )


def read_records(sweep: str, directory: Path) -> list[Record]:
    """All records of a sweep, in the order of their files' names.

    Args:
        sweep: name of the sweep and of its folder.
        directory: of all sweeps; a sweep without a folder has no records yet.

    Raises:
        UserError: if a file is damaged, or lies in the folder of another sweep.
    """
    found = []
    for path in sorted((directory / sweep).glob("*.json")):
        record = read_record(path)
        if record.data["sweep"] != sweep:
            raise UserError(
                f"{path} is of the sweep {record.data['sweep']}; move it to that folder"
            )
        found.append(record)
    return found


def grouped(records: Iterable[Record]) -> dict[tuple[str, str], Group]:
    """The records by input and cell, seeds ascending.

    Raises:
        UserError: if two records are of the same input, cell and seed.
    """
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        seeds = found.setdefault((record.input, record.cell), {})
        if record.seed in seeds:
            raise UserError(
                f"cell {record.cell} on {record.input} is recorded twice for seed {record.seed}; "
                "delete one of the files"
            )
        seeds[record.seed] = record
    return {
        key: Group(key[1], key[0], tuple(seeds[seed] for seed in sorted(seeds)))
        for key, seeds in found.items()
    }


# ---- the grid of Repeated MLM ----


def summaries(groups: Sequence[Group], metric: str) -> dict[tuple[float, int], Summary]:
    """A metric by (p, k), for the cells that have it."""
    found = {(g.first.mask_ratio, g.first.num_copies): g.summary(metric) for g in groups}
    return {cell: summary for cell, summary in found.items() if summary}


def grids_by_seed(
    groups: Sequence[Group], metric: str
) -> dict[int, dict[tuple[float, int], float]]:
    """A metric by (p, k) for each seed that all cells with the metric have."""
    cells = {(g.first.mask_ratio, g.first.num_copies): g.by_seed(metric) for g in groups}
    cells = {cell: values for cell, values in cells.items() if values}
    seeds = set.intersection(*map(set, cells.values())) if cells else ()
    return {
        seed: {cell: values[seed] for cell, values in cells.items()} for seed in sorted(seeds)
    }


# ---- leaving the symmetric start ----


class Leaving(NamedTuple):
    """Whether and when a run left MLM's floor for good.

    While all states of a mask are alike, ExLM predicts each mask by itself, and its loss is the
    sum of the marginal entropies, which is known exactly for the toy language.
    """

    step: int | None
    """First validation after which the run stays below; None if it ended at the floor."""
    floor_bits: float
    """Per row: the sum of the marginal entropies."""
    joint_bits: float
    """Per row: the joint entropy."""


def leaving(record: Record) -> Leaving | None:
    """When a run left the floor; None if the floor is unknown or nothing was validated."""
    floor, joint = (record.value(f"{name}_bits_per_row") for name in ("floor", "joint"))
    name = "validation_bits_per_row"
    points = [p for p in record.data["curve"] if p.get(name) is not None]
    if floor is None or joint is None or not points:
        return None
    below = floor - min(LEFT_BY, LEFT_SHARE * (floor - joint))
    return Leaving(since((p["step"], p[name] < below) for p in points), floor, joint)


def since(points: Iterable[tuple[int, bool]]) -> int | None:
    """The step from which a condition holds to the end; None if it does not hold at the end."""
    first = None
    for step, holds in points:
        first = (step if first is None else first) if holds else None
    return first
