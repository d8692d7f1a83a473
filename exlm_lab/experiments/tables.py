"""The report of a sweep: a table of its cells for each input, with the paper's numbers.

A number is the mean ± standard deviation over seeds, with shares in percent, unless its column says
otherwise; the paper's number follows in parentheses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.correlations import STATISTICS, over_seeds
from exlm_lab.experiments.metric_names import DOWNSTREAM, PROBE, factor_and_digits
from exlm_lab.experiments.paper import ENTROPY, printed_grid, printed_number
from exlm_lab.experiments.records import (
    EMPTY,
    LEFT_BY,
    LEFT_SHARE,
    by_cell,
    by_seed,
    grid,
    leaving,
    measured,
    runs,
    shown,
)
from exlm_mini.config.checks import UserError
from exlm_mini.training.console import in_words

COLUMNS = {
    DOWNSTREAM: ("downstream", 1),
    PROBE: ("read by a probe", 1),
    "read_structure": ("structure read (R²)", 1),
    "lost_share": ("lost tokens", 1),
    "accuracy": ("lost tokens guessed", 1),
    "validation_mask_accuracy": ("masked copies guessed", 1),
    "total_correlation_bits": ("total correlation, bits", 2),
    "bits_per_row": ("bits per row", 3),
    "captured_bits": ("captured bits per row", 3),
    "linked_bits": ("links win, bits", 3),
    "bits_per_mask": ("bits per mask", 3),
    "validation_bits_per_mask": ("bits per masked copy", 3),
    "entropy_bits": ("entropy, bits", 3),
    "optimum_entropy_bits": ("exact entropy, bits", 2),
    "excess_bits": ("above the optimum, bits", 3),
    "cost_ratio": ("measured ratio", 2),
    "cost_ratio_floor": ("floor from operation counts", 2),
}
"""Heading and digits of the column of each metric."""
ASKED = {
    "repeated-mlm": (
        DOWNSTREAM, PROBE, "read_structure", "lost_share", "accuracy",
        "validation_mask_accuracy", "validation_bits_per_mask", "entropy_bits",
        "optimum_entropy_bits", "excess_bits",
    ),
    "ablations": (
        DOWNSTREAM, PROBE, "bits_per_row", "captured_bits", "linked_bits", "bits_per_mask",
        "entropy_bits",
    ),
    "saddle": (
        DOWNSTREAM, PROBE, "total_correlation_bits", "bits_per_row", "captured_bits",
        "bits_per_mask",
    ),
    "cost": ("cost_ratio", "cost_ratio_floor"),
    "k-and-p": (DOWNSTREAM, PROBE, "bits_per_mask", "entropy_bits", "excess_bits"),
}  # fmt: skip
"""The metrics each sweep is about; other experiments show all of ``COLUMNS`` they measured."""
COMPARED = {
    DOWNSTREAM: "points above ExLM ± standard error",
    PROBE: "probe, points above ExLM ± standard error",
    "captured_bits": "captured bits above ExLM ± standard error",
}  # fmt: skip
"""Metrics of ``ablations`` that are also compared with ExLM, seed by seed, and their headings."""
PAPER_GRIDS = {
    DOWNSTREAM: {
        "paper, MNLI (Figure 3)": ("Figure 3", "mnli"),
        "paper, mean of 4 tasks (Figure 8)": ("Figure 8", "average"),
    },
    "entropy_bits": {"paper (Figure 5)": ("Figure 5", ENTROPY)},
    "read_structure": {},
}
"""Metrics of Repeated MLM whose grids get a table of statistics, and the paper's grids of each."""
SHOWN_MISSING = 6
"""Largest number of missing records to name; the rest are only counted."""


def report(name: str, directory: Path) -> str:
    """The report of a sweep as Markdown."""
    cells, table = EXPERIMENTS[name].cells, runs(name, directory)
    if table.empty:
        raise UserError(f"{directory / name}.jsonl holds no record; run the sweep first")
    lines = [f"# {name}", ""]
    for kind, of_input in _in_order(table, cells).groupby("input", sort=False):
        lines += [f"## Input: {kind}", "", *_table(_columns(name, of_input))]
        if name == "repeated-mlm":
            for metric in PAPER_GRIDS:
                if len(measured(of_input, metric)):
                    heading = f"Changes: {COLUMNS[metric][0]}"
                    lines += [heading, "", *_statistics(of_input, metric)]
    if name == "saddle":
        lines += [
            f"A run has left the floor of MLM when it is {LEFT_BY:.2g} bits or {LEFT_SHARE:.0%} of "
            "the total correlation below it, whichever is less, and stays there.",
            "",
        ]
    return "\n".join([*lines, *missing(table, cells), _made_with(table)])


def _table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A Markdown table with these columns, as lines, and an empty line."""
    return [*markdown_table([tuple(columns), *zip(*columns.values(), strict=True)]), ""]


def _columns(name: str, table: pd.DataFrame) -> dict[str, list[str]]:
    """Columns of a sweep's table by heading: what it asks for and was measured, cell by cell."""
    cells = by_cell(table)
    paper = {cell.name: cell.paper for cell in EXPERIMENTS[name].cells}
    kind = table["input"].iloc[0]
    columns = {"cell": [cell.removeprefix(f"{kind}-") for cell in cells]}
    if name == "ablations":
        columns["steps"] = [f"{rows['train.steps'].iloc[0]:,}" for rows in cells.values()]
    for metric in ASKED.get(name, COLUMNS):
        if measured(table, metric).empty:
            continue
        head, digits = COLUMNS[metric]
        factor, _ = factor_and_digits(metric)
        is_percent = factor == 100 or metric == DOWNSTREAM
        columns[head + ", %" * is_percent] = [
            shown(factor * measured(rows, metric), digits)
            + _printed(paper.get(cell), metric, digits)
            for cell, rows in cells.items()
        ]
        if name == "ablations" and metric in COMPARED:
            base = f"{kind}-exlm"
            columns[COMPARED[metric]] = [
                _difference(table, cell, base, metric, factor) for cell in cells
            ]
    if name == "saddle":
        columns |= _left(list(cells.values()))
    return columns


def _printed(paper: tuple[str, str] | None, metric: str, digits: int) -> str:
    number = paper and printed_number(*paper, metric)
    return "" if number is None else f" ({number:.{digits}f})"


def _difference(table: pd.DataFrame, cell: str, base: str, metric: str, factor: float) -> str:
    """Mean difference between two cells, paired by seed, with its standard error.

    Equal seeds have the same data order and, where the models agree, the same initial weights, so
    much of the noise cancels.
    """
    points = (by_seed(table, cell, metric) - by_seed(table, base, metric)).dropna() * factor
    if cell == base or points.empty:
        return EMPTY
    return f"{points.mean():+.2f}" + (f" ± {points.sem():.2f}" if len(points) > 1 else "")


def _left(cells: list[pd.DataFrame]) -> dict[str, list[str]]:
    """How many seeds of each cell left the floor, and when."""
    columns: dict[str, list[str]] = {"left the floor": [], "first step below it": []}
    for rows in cells:
        steps = [leaving(run) for _, run in rows.iterrows()]
        known = [step for step in steps if step is not None]
        left = sorted(int(step) for step in known if math.isfinite(step))
        ends = dict.fromkeys((*left[:1], *left[-1:]))
        columns["left the floor"].append(f"{len(left)} of {len(known)}" if known else EMPTY)
        columns["first step below it"].append(" to ".join(map(str, ends)) or EMPTY)
    return columns


def _statistics(table: pd.DataFrame, metric: str) -> list[str]:
    """Table of each statistic: over the seeds, of means over seeds, and of the paper's numbers."""
    ours = grid(table, metric)
    num_seeds = len(ours.dropna())
    columns = {
        "": [statistic.title for statistic in STATISTICS.values()],
        f"ours, {num_seeds} seed{'s' * (num_seeds != 1)}": [
            shown(over_seeds(statistic.of, ours), 2, "+") for statistic in STATISTICS.values()
        ],
    }
    grids = {"ours, mean of seeds": dict(ours.mean())}
    grids |= {name: printed_grid(*place) for name, place in PAPER_GRIDS[metric].items()}
    for name, one in grids.items():
        numbers = [statistic.of(one) for statistic in STATISTICS.values()]
        columns[name] = [
            EMPTY if math.isnan(number) else f"{number:+.2f}" for number in numbers
        ]
    return _table(columns)


def _in_order(table: pd.DataFrame, cells: Sequence[Cell]) -> pd.DataFrame:
    """The runs in the order of the cells; those of unknown cells come last."""
    order = {cell.name: number for number, cell in enumerate(cells)}
    return table.loc[sorted(table.index, key=lambda key: (order.get(key[0], len(order)), key))]


def missing(table: pd.DataFrame, cells: Sequence[Cell]) -> list[str]:
    """One line about missing records; empty if there are none."""
    planned = [(cell.name, seed) for cell in cells for seed in cell.seeds]
    gone = [f"{name} seed {seed}" for name, seed in planned if (name, seed) not in table.index]
    if not gone:
        return []
    more = len(gone) - SHOWN_MISSING
    names = ", ".join(gone[:SHOWN_MISSING]) + (f" and {more} more" if more > 0 else "")
    return [f"{len(gone)} of {len(planned)} records missing: {names}.", ""]


def _made_with(table: pd.DataFrame) -> str:
    """Devices, commits and total time of all records, in one line."""
    devices, commits = sorted(set(table["device"])), sorted(set(table["commit"].str[:7]))
    return (
        f"{len(table)} records, made on {', '.join(devices)} at commit {', '.join(commits)} in "
        f"{in_words(table['seconds'].sum())}."
    )
