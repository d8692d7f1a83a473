"""Numbers of the sweeps for the pages of the book.

* ``{sweep}`NAME CELL METRIC` ``: mean over seeds ± standard deviation of a cell, from
  ``book/results/``; METRIC is ``downstream`` or a name in the records, shares in percent;
* ``{sweep}`NAME INPUT METRIC STATISTIC` ``: one number for the grid of Repeated MLM, see
  ``exlm_lab.experiments.correlations``;
* ``{score}`ID` ``: the size of the difference that judges a claim of the scorecard, with its
  interval; ``{difference}`ID` ``: the same with its sign; ``{verdict}`ID` ``: the verdict;
* ``{tally}`planned` `` and ``{tally}`unplanned` ``: how many of the scorecard's verdicts are what;
* ``{sweep-made}`NAME` ``: devices and commits of the records.

What the records do not hold is an error.
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
"""Columns of numbers that fit beside a name."""
RESULTS = Path(__file__).resolve().parents[1] / "results"


@cache
def runs(name: str) -> pd.DataFrame:
    """The runs of an experiment."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no sweep '{name}'")
    return records.runs(name, RESULTS)


def sweep(text: str) -> str:
    """The number a role asks for; see the head of this file."""
    match text.split():
        case [name, cell, metric]:
            number = _of_cell(name, cell, metric)
        case [name, kind, metric, statistic]:
            number = _of_grid(name, kind, metric, statistic)
        case _:
            raise ValueError(
                f"want NAME CELL METRIC or NAME INPUT METRIC STATISTIC, got '{text}'"
            )
    if number == EMPTY:
        raise ValueError(f"the records do not hold '{text}'")
    return number


def _of_cell(name: str, cell: str, metric: str) -> str:
    factor, digits = factor_and_digits(metric)
    return shown(factor * by_seed(runs(name), cell, metric), digits)


def _of_grid(name: str, kind: str, metric: str, statistic: str) -> str:
    if statistic not in STATISTICS:
        raise ValueError(f"'{statistic}' is none of {', '.join(STATISTICS)}")
    grids = grid(runs(name).query("input == @kind"), metric)
    is_in_points = metric == DOWNSTREAM and statistic.startswith("change")
    return shown(over_seeds(STATISTICS[statistic].of, grids), 1 if is_in_points else 2, "+")


def stamps(name: str) -> list[tuple[str, str]]:
    """Device and commit of each record, sorted."""
    table = runs(name)
    return sorted(zip(table["device"], table["commit"], strict=True))


def sweep_page(name: str) -> str:
    """Tables of a sweep as Markdown; of ``study``, every claim with its evidence."""
    if name == "study":
        return _in_a_section(verdicts.report(RESULTS))
    report = tables.report(name, RESULTS).partition("\n")[2]
    return _in_a_section(re.sub(r"(records missing): .*", r"\1.", report))


def _in_a_section(text: str) -> str:
    """In a section of a page: headings as bold lines, tables as wide as the page."""
    text = re.sub(r"^## (?:Input: )?(.*)$", r"**\1**", text, flags=re.M)
    return re.sub(r"((?:^\|.*\n)+)", _as_wide_as_the_page, text, flags=re.M)


def _as_wide_as_the_page(table: re.Match[str]) -> str:
    """What a claim compares stands below it; a table of many numbers is cut into several."""
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
    """Numbers with a minus sign where Python writes a hyphen, on one line with what follows ±."""
    text = re.sub(r"(?<![\w+])-(?=\d)", "\N{MINUS SIGN}", text)
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _table(name: str, head: list[str], *rows: list[str]) -> str:
    """A table of Markdown with a class."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join((f"```{{table}}\n:class: {name}\n", *lines, "```\n"))


@cache
def scores() -> list[Score]:
    """The scorecard of the records."""
    return scorecard(RESULTS)


def score_of(name: str) -> Score:
    """The row of a claim by its id."""
    for score in scores():
        if score.verdict.claim.id == name:
            return score
    raise ValueError(f"the scorecard has no '{name}'")


def score(name: str) -> str:
    """The size of the difference of a row of the scorecard, by the claim's id."""
    text = score_of(name).shown
    if text.startswith("-"):  # turned round, the ends of an interval too
        text = text.translate(str.maketrans("+-", "-+"))
        text = re.sub(r"\((\S+) to (\S+)\)", r"(\2 to \1)", text)
    return text.replace("+", "")


def tally(text: str) -> str:
    """Verdicts of the scorecard, counted, of the claims that a plan had or of the others."""
    if text not in ("planned", "unplanned"):
        raise ValueError(f"'{text}' is neither planned nor unplanned")
    verdicts = [s.verdict for s in scores() if s.verdict.is_planned == (text == "planned")]
    count = Counter(verdict.word.partition(",")[0] for verdict in verdicts)
    words = ", ".join(f"{count[word]} {word}" for word in ("for", "against", "undecided"))
    return f"{len(verdicts)} rows: {words}"
