"""Looks up numbers of the sweeps in ``book/results/`` for the pages of the book.

* ``{sweep}`NAME CELL METRIC` ``: mean over seeds ± standard deviation of a cell; METRIC is
  ``downstream`` or the name of a metric in the records; shares are given in percent;
* ``{sweep}`NAME INPUT METRIC STATISTIC` ``: one number for the grid of Repeated MLM, see
  ``exlm_lab.experiments.correlations``;
* ``{score}`ID` ``: the difference by which a claim of the scorecard is judged, without its sign,
  and its interval; ``{difference}`ID` ``: the same with its sign; ``{verdict}`ID` ``: the verdict;
* ``{tally}`planned` `` and ``{tally}`unplanned` ``: how many verdicts are for, against, undecided;
* ``{sweep-made}`NAME` ``: devices and commits of the records.

A lookup that finds nothing raises ``ValueError``.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pandas as pd

from exlm_lab.experiments import records, tables, verdicts
from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.correlations import STATISTICS, over_seeds
from exlm_lab.experiments.metric_names import factor_and_digits
from exlm_lab.experiments.records import DOWNSTREAM, EMPTY, by_seed, grid, shown
from exlm_lab.experiments.scorecard import Score, scorecard

NUMBERS = 5
"""How many columns of numbers fit on a page beside the column of names."""
RESULTS = Path(__file__).resolve().parents[1] / "results"


@cache
def runs(name: str) -> pd.DataFrame:
    """The recorded runs of an experiment as a table."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no sweep '{name}'")
    return records.runs(name, RESULTS)


def sweep(text: str) -> str:
    """The number that a role asks for; the top of this file explains ``text``."""
    match text.split():
        case [name, cell, metric]:
            number = _of_cell(name, cell, metric)
        case [name, kind, metric, statistic]:
            number = _of_grid(name, kind, metric, statistic)
        case _:
            raise ValueError(
                f"expected NAME CELL METRIC or NAME INPUT METRIC STATISTIC, got '{text}'"
            )
    if number == EMPTY:
        raise ValueError(f"the records do not hold '{text}'")
    return number


def _of_cell(name: str, cell: str, metric: str) -> str:
    factor, digits = factor_and_digits(metric)
    return shown(factor * by_seed(runs(name), cell, metric), digits)


def _of_grid(name: str, kind: str, metric: str, statistic: str) -> str:
    if statistic not in STATISTICS:
        raise ValueError(f"'{statistic}' is not one of {', '.join(STATISTICS)}")
    grids = grid(runs(name).query("input == @kind"), metric)
    is_in_points = metric == DOWNSTREAM and statistic.startswith("change")
    return shown(over_seeds(STATISTICS[statistic].of, grids), 1 if is_in_points else 2, "+")


def stamps(name: str) -> list[tuple[str, str]]:
    """Device and commit of each record, sorted."""
    table = runs(name)
    return sorted(zip(table["device"], table["commit"], strict=True))


def sweep_page(name: str) -> str:
    """The tables of a sweep as Markdown; for ``study``, every claim with its evidence."""
    if name == "study":
        return _in_a_section(verdicts.report(RESULTS, EXPERIMENTS))
    report = tables.report(name, RESULTS).partition("\n")[2]
    return _in_a_section(re.sub(r"(records missing): .*", r"\1.", report))


def _in_a_section(text: str) -> str:
    """Fit a report into a section of a page: bold lines for headings, tables that fit the width."""
    text = re.sub(r"^## (?:Input: )?(.*)$", r"**\1**", text, flags=re.M)
    return re.sub(r"((?:^\|.*\n)+)", _as_wide_as_the_page, text, flags=re.M)


def _as_wide_as_the_page(table: re.Match[str]) -> str:
    """Narrow a table: put what a claim compares below the claim, or cut it into several tables."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[1].splitlines()]
    head, _, *rows = [[typeset(cell.strip()) for cell in line] for line in lines]
    if head[0] == "claim":
        parts = [
            ("dense claims", [head[:-1], *([f"{r[0]} `{r[-1]}`", *r[1:-1]] for r in rows)])
        ]
    else:
        parts = [
            ("numbers", [[row[0], *row[at : at + NUMBERS]] for row in (head, *rows)])
            for at in range(1, len(head), NUMBERS)
        ]
    return "\n".join(_table(name, *part) for name, part in parts)


def typeset(text: str) -> str:
    """Text with real minus signs before numbers, and no line break around ±."""
    text = re.sub(r"(?<![\w+])-(?=\d)", "\N{MINUS SIGN}", text)
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _table(name: str, head: list[str], *rows: list[str]) -> str:
    """A Markdown table with a CSS class."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join((f"```{{table}}\n:class: {name}\n", *lines, "```\n"))


@cache
def scores() -> list[Score]:
    """The scorecard, computed from the records."""
    return scorecard(RESULTS)


def score_of(name: str) -> Score:
    """The scorecard's row for a claim, by the claim's id."""
    for score in scores():
        if score.verdict.claim.id == name:
            return score
    raise ValueError(f"the scorecard has no '{name}'")


def score(name: str) -> str:
    """The difference in the scorecard's row for a claim, without its sign, by the claim's id."""
    text = score_of(name).shown
    if text.startswith("-"):  # flip every sign, and swap the ends of the interval
        text = text.translate(str.maketrans("+-", "-+"))
        text = re.sub(r"\((\S+) to (\S+)\)", r"(\2 to \1)", text)
    return text.replace("+", "")


def tally(text: str) -> str:
    """How many verdicts of planned claims, or of unplanned ones, are for, against and undecided."""
    if text not in ("planned", "unplanned"):
        raise ValueError(f"expected planned or unplanned, got '{text}'")
    verdicts = [s.verdict for s in scores() if s.verdict.is_planned == (text == "planned")]
    count = Counter(verdict.word.partition(",")[0] for verdict in verdicts)
    words = ", ".join(f"{count[word]} {word}" for word in ("for", "against", "undecided"))
    return f"{len(verdicts)} rows: {words}"
