"""Numbers printed in the paper, arranged like our cells: by (p, k), or by the row of a table.

They are stored in ``recipes/finetune/paper.json``; none was measured by us.
"""

from __future__ import annotations

import json
import re
import statistics
from functools import cache

from exlm_lab.downstream.grid import PAPER

TASKS = ("mnli", "qnli", "qqp", "rte")
"""Tasks of Tables 2, 4 and 13 and Figure 8; the tables' last column is the mean over them."""
ENTROPY = "entropy, bits"


@cache
def printed(table: str) -> dict[str, dict[str, float]]:
    """Rows of a table or figure, in percent except for Figure 5 (bits) and Table 12 (hours)."""
    return json.loads(PAPER.read_text(encoding="utf-8"))[table]


def printed_average(table: str, row: str) -> float | None:
    """Mean accuracy of a row over the four tasks, in percent; None where the paper lacks a task.

    This is the printed mean, which is not always the rounded mean of the printed numbers. Figure 8
    prints no mean, so it is computed here.
    """
    numbers = printed(table).get(row, {})
    if "average" in numbers:
        return numbers["average"]
    return statistics.fmean(numbers[t] for t in TASKS) if numbers.keys() >= set(TASKS) else None


def printed_grid(figure: str, column: str) -> dict[tuple[float, int], float]:
    """One number for each (p, k) of Figure 3, 4, 5 or 8."""
    grid = {}
    for row, values in printed(figure).items():
        percent, copies = re.findall(r"[\d.]+", row)
        number = printed_average(figure, row) if column == "average" else values[column]
        assert number is not None
        grid[round(float(percent) / 100, 4), int(copies)] = number
    return grid


def printed_number(table: str, row: str, metric: str) -> float | None:
    """The paper's number in a row for a metric of ours, in percent, bits or as a ratio, if any."""
    match metric, table:
        case "downstream", "Figure 3":
            return printed(table)[row]["mnli"]
        case "downstream", _:
            return printed_average(table, row)
        case "entropy_bits", "Figure 3":
            return printed("Figure 5").get(row, {}).get(ENTROPY)
        case "cost_ratio", "Table 12":
            return printed(table)[row]["GPU hours"] / printed(table)["Vanilla MLM"]["GPU hours"]
    return None
