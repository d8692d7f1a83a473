"""The records of finished runs: one file, and one table, for each experiment.

``DIRECTORY/NAME.jsonl`` has a line for each run, sorted by cell and seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from exlm_lab.experiments.metric_names import DOWNSTREAM
from exlm_lab.ledger import Shape, parsed
from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import dotted
from exlm_mini.data.files import read_bytes, reading, write_atomically

EMPTY = "–"
AGAIN = "delete it and the sweep will run this cell again"
LEFT_BY = 0.1
"""Bits per row below MLM's floor at which a run counts as having left it."""
LEFT_SHARE = 0.1
"""The same threshold as a share of the total correlation; the smaller of the two counts."""


class _Config(Shape):
    objective: str


class _Task(Shape):
    test: float | None = None


class _Record(Shape):
    """The fields of a record that its readers rely on."""

    sweep: str
    cell: str
    input: str
    seed: int
    config: _Config
    metrics: dict[str, float | None]
    curve: list[dict[str, float | None]]
    versions: dict[str, Any]
    downstream: _Task | None = None
    seconds: dict[str, float] | None = None
    watched: dict[str, float | None] | None = None


Record = dict[str, Any]
Key = tuple[str, int]
"""Cell and seed."""


# ---- files ----


def read(name: str, directory: Path) -> Mapping[Key, Record]:
    """All records of an experiment by cell and seed; empty before its first run."""
    path = directory / f"{name}.jsonl"
    if not path.exists():
        return {}
    return _read(path, path.stat().st_mtime_ns, path.stat().st_size)


def add(record: Record, directory: Path) -> None:
    """Add the record of a run to its experiment's file; the caller has locked ``directory``."""
    records = {**read(record["sweep"], directory), key_of(record): record}
    order = sorted(records, key=lambda key: (f"{key[0]}-seed", key[1]))
    lines = (json.dumps(records[key]) + "\n" for key in order)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{record['sweep']}.jsonl", "".join(lines).encode())


def key_of(record: Record) -> Key:
    """Cell and seed."""
    return record["cell"], record["seed"]


@lru_cache(maxsize=32)
def _read(path: Path, *version: int) -> Mapping[Key, Record]:
    records: dict[Key, Record] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        where = f"{path} line {number}"
        record = _parsed(line, where)
        cell, seed = key_of(record)
        if record["sweep"] != path.stem:
            raise UserError(
                f"{where} belongs to the sweep {record['sweep']}; move it to that sweep's file"
            )
        if (cell, seed) in records:
            raise UserError(
                f"{where} records cell {cell} seed {seed}, which is already recorded; delete one"
            )
        records[cell, seed] = record
    return records


def _parsed(data: bytes, where: object) -> Record:
    """The record in a line."""
    with reading(where, AGAIN):
        record = json.loads(data)
        json.dumps(record, ensure_ascii=False).encode()  # fails on a lone surrogate
    parsed(_Record, record, where, AGAIN)
    try:
        _check_settings(json.dumps({**record["config"], "seed": 1}))
    except UserError as error:
        raise UserError(
            f"{where} does not hold valid run settings ({error}); {AGAIN}"
        ) from None
    return record


@cache
def _check_settings(config: str) -> None:
    RunConfig(**json.loads(config))


# ---- the table ----


def runs(name: str, directory: Path) -> pd.DataFrame:
    """The runs of an experiment as a table.

    Returns:
        A row for each run, indexed by ``cell`` and ``seed``, in the order of the file. Columns:
        every setting by its dotted name; every metric; ``downstream``, the score on the test rows
        in percent, and other facts about the task as ``downstream.NAME``; ``validation_…`` metrics
        of the last validation; ``input``, ``objective``, ``curve``, ``watched``, ``device``,
        ``commit`` and ``seconds``. What was not measured, or is not finite, is nan.
        ``table[metric][cell]`` is a series by seed.
    """
    rows = [_row(record) for record in read(name, directory).values()]
    columns = ["cell", "seed", "input", "objective", "curve", "watched"]
    return pd.DataFrame(rows, columns=None if rows else columns).set_index(["cell", "seed"])


def _row(record: Record) -> dict[str, Any]:
    curve = record["curve"]
    last = curve[-1] if curve else {}
    task = record.get(DOWNSTREAM) or {}
    numbers = record["metrics"] | {n: v for n, v in last.items() if n.startswith("validation_")}
    numbers[DOWNSTREAM] = None if task.get("test") is None else 100 * task["test"]
    return {
        **dotted(record["config"]),
        **{name: record[name] for name in ("cell", "seed", "input")},
        **{n: math.nan if v is None or not math.isfinite(v) else v for n, v in numbers.items()},
        **{f"{DOWNSTREAM}.{name}": value for name, value in task.items()},
        "curve": curve,
        "watched": record.get("watched") or {},
        "device": str(record["versions"].get("device")),
        "commit": str(record["versions"].get("commit")),
        "seconds": sum((record.get("seconds") or {}).values()),
    }


def measured(table: pd.DataFrame, metric: str) -> pd.Series:
    """A metric by cell and seed, without runs that lack it; empty if none has it."""
    return table.get(metric, pd.Series(math.nan, table.index)).dropna().astype(float)


def by_seed(table: pd.DataFrame, cell: str, metric: str) -> pd.Series:
    """A metric of one cell by seed, without seeds that lack it; empty if none has it."""
    values = measured(table, metric)
    return values[values.index.isin([cell], level="cell")].droplevel("cell").sort_index()


def by_cell(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The runs of each cell by seed, with cells in the order of the table."""
    return {
        str(cell): rows.droplevel("cell").sort_index()
        for cell, rows in table.groupby(level="cell", sort=False)
    }


def grid(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric of Repeated MLM, a row per seed and a column per (p, k), mask ratio and copies."""
    values = table.loc[measured(table, metric).index].reset_index()
    if values.empty:
        return pd.DataFrame()
    return values.pivot(
        index="seed", columns=["masking.mask_ratio", "masking.num_copies"], values=metric
    )


def shown(values: pd.Series, digits: int = 2, sign: str = "") -> str:
    """Format as ``1.23 ± 0.04``, mean and standard deviation; for one value, the mean alone."""
    values = values.dropna()
    if values.empty:
        return EMPTY
    spread = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():{sign}z.{digits}f}{spread}"


# ---- leaving the symmetric start ----


def leaving(run: pd.Series) -> float | None:
    """Step of the validation from which a run stays below MLM's floor; infinite if it never does.

    While all states of a mask are alike, ExLM predicts each mask by itself, and its loss is the
    sum of the marginal entropies, which is known exactly for the toy language. None if that
    floor is not known, or if nothing was validated.
    """
    floor, joint = (run.get(f"{name}_bits_per_row", math.nan) for name in ("floor", "joint"))
    name = "validation_bits_per_row"
    points = [point for point in run["curve"] if name in point]
    if math.isnan(floor) or math.isnan(joint) or not points:
        return None
    below = floor - min(LEFT_BY, LEFT_SHARE * (floor - joint))
    step = since((p["step"], p[name] < below) for p in points)
    return math.inf if step is None else step


def since(points: Iterable[tuple[int, bool]]) -> int | None:
    """The step from which a condition holds to the end; None if it does not hold at the end."""
    first = None
    for step, holds in points:
        first = (step if first is None else first) if holds else None
    return first
