"""``sweep NAME --report``: the paper's table with ours beside it, from the records alone.

Nothing is trained and nothing is written. What the grid asks for and no record has is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exlm_mini.config import UserError
from exlm_mini.experiments.grids import cells_of
from exlm_mini.experiments.records import Group, Record, grouped, read_records
from exlm_mini.experiments.tables import TABLES

SHOWN_MISSING = 6
"""Names of missing cells that are spelled out; of more only the number is told."""
Wanted = Sequence[tuple[str, str, int]]
"""Input, cell and seed of every record a sweep is to have, in the order of its tables."""


def wanted(name: str, scale: str) -> Wanted:
    """What the grid of a sweep asks for.

    Raises:
        UserError: if there is no such sweep, or it has no cells at this scale.
    """
    return [
        (cell.input, cell.name, seed) for cell in cells_of(name, scale) for seed in cell.seeds
    ]


def report(name: str, scale: str, directory: Path) -> str:
    """The report of a sweep as Markdown.

    Args:
        name: of the sweep.
        scale: mini, gpu or paper.
        directory: that holds the folders of all sweeps.

    Raises:
        UserError: if the sweep is unknown, a record is damaged, or there is none yet.
    """
    asked = wanted(name, scale)
    records = read_records(name, Path(directory), scale)
    if not records:
        raise UserError(
            f"{Path(directory) / name} holds no record of scale {scale}; run the sweep first"
        )
    lines = [f"# {name}, {scale}", ""]
    for kind, groups in by_input(records, asked).items():
        lines += [f"## Input: {kind}", "", *TABLES[name](groups)]
    return "\n".join([*lines, *missing(records, asked), made_with(records)])


def by_input(records: Sequence[Record], asked: Wanted = ()) -> dict[str, list[Group]]:
    """Groups of each input in the order of the grid; what the grid does not name stands last."""
    groups = grouped(list(records))
    order = list(dict.fromkeys((kind, cell) for kind, cell, _ in asked))
    place = {key: number for number, key in enumerate(order)}
    found: dict[str, list[Group]] = {}
    for key in sorted(groups, key=lambda key: place.get(key, len(place))):
        found.setdefault(key[0], []).append(groups[key])
    return found


def missing(records: Sequence[Record], asked: Wanted) -> list[str]:
    """One line about the records that are not there yet; empty when all are."""
    known = {(record.input, record.cell, record.seed) for record in records}
    gone = [
        f"{cell} seed {seed}" for kind, cell, seed in asked if (kind, cell, seed) not in known
    ]
    if not gone:
        return []
    shown = ", ".join(gone[:SHOWN_MISSING])
    more = len(gone) - SHOWN_MISSING
    rest = f" and {more} more" if more > 0 else ""
    return [f"{len(gone)} of {len(asked)} records missing: {shown}{rest}.", ""]


def made_with(records: Sequence[Record]) -> str:
    """Devices, commits and hours of all records, in one line."""
    versions = [record.data["versions"] for record in records]
    devices = sorted({str(found.get("device")) for found in versions})
    commits = sorted({str(found.get("commit"))[:7] for found in versions})
    seconds = sum(sum((record.data.get("seconds") or {}).values()) for record in records)
    return (
        f"{len(records)} records, made on {', '.join(devices)} at commit {', '.join(commits)} in "
        f"{seconds / 60:,.0f} minutes."
    )
