"""Numbers of the sweeps for the pages of the book.

* ``{sweep}`NAME CELL METRIC` ``: mean over seeds ± standard deviation of a cell, from
  ``book/results/NAME/``; METRIC is ``downstream`` or a name in the records, shares in percent;
* ``{sweep}`NAME INPUT METRIC STATISTIC` ``: one number for the grid of Repeated MLM, see
  ``exlm_lab.experiments.correlations``;
* ``{score}`CLAIM` ``: the size of the difference that judges a claim of the scorecard, with its
  interval; ``{difference}`CLAIM` ``: the same with its sign; ``{verdict}`CLAIM` ``: the verdict;
* ``{tally}`planned` `` and ``{tally}`unplanned` ``: how many of the scorecard's verdicts are what;
* ``{sweep-made}`NAME` ``: devices and commits of the records.

What the records do not hold is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from exlm_lab.experiments import tables, verdicts
from exlm_lab.experiments.correlations import STATISTICS, over_seeds
from exlm_lab.experiments.grids import cells_of
from exlm_lab.experiments.metric_names import SHARES
from exlm_lab.experiments.records import (
    DOWNSTREAM,
    Group,
    grids_by_seed,
    grouped,
    read_records,
)
from exlm_lab.experiments.scorecard import Score, scorecard
from exlm_mini.config.checks import UserError

RESULTS = Path(__file__).resolve().parents[1] / "results"


@cache
def groups(name: str) -> list[Group]:
    """The cells of a sweep that have records.

    Raises:
        ValueError: if there is no such sweep, or a record is damaged.
    """
    try:
        cells_of(name)
        return list(grouped(read_records(name, RESULTS)).values())
    except UserError as error:
        raise ValueError(str(error)) from None


def sweep(text: str) -> str:
    """The number a role asks for; see the head of this file.

    Raises:
        ValueError: if the text is of another form, or the records do not hold it.
    """
    match text.split():
        case [name, cell, metric]:
            return _of_cell(name, cell, metric)
        case [name, kind, metric, statistic]:
            return _of_grid(name, kind, metric, statistic)
    raise ValueError(f"want NAME CELL METRIC or NAME INPUT METRIC STATISTIC, got '{text}'")


def _of_cell(name: str, cell: str, metric: str) -> str:
    group = next((g for g in groups(name) if g.cell == cell), None)
    found = group and group.summary(metric)
    if found is None:
        raise ValueError(f"the records of {name} hold no '{metric}' of a cell '{cell}'")
    if metric == DOWNSTREAM:
        return found.shown(1)
    return found.scaled(100).shown(1) if metric in SHARES else found.shown(2)


def _of_grid(name: str, kind: str, metric: str, statistic: str) -> str:
    if statistic not in STATISTICS:
        raise ValueError(f"'{statistic}' is none of {', '.join(STATISTICS)}")
    grids = grids_by_seed([g for g in groups(name) if g.input == kind], metric)
    found = over_seeds(STATISTICS[statistic].of, grids)
    if found is None:
        raise ValueError(f"the records of {name} on {kind} do not tell {statistic} of {metric}")
    is_in_points = metric == DOWNSTREAM and statistic.startswith("change")
    return found.shown(1 if is_in_points else 2, "+")


def made(name: str) -> list[tuple[str, str]]:
    """Device and commit of each record, sorted."""
    found = [record.data["versions"] for group in groups(name) for record in group.records]
    return sorted((str(v.get("device")), str(v.get("commit"))) for v in found)


def sweep_page(name: str) -> str:
    """Tables of a sweep as Markdown; of ``study``, every claim with its evidence.

    Raises:
        UserError: if there is no such sweep, or no record of it.
    """
    if name == "study":
        return _in_a_section(verdicts.report(RESULTS))
    return _in_a_section(tables.report(name, RESULTS).partition("\n")[2])


def _in_a_section(text: str) -> str:
    """In a section of a page: headings as bold lines, tables that scroll rather than wrap."""
    text = re.sub(r"^## (?:Input: )?(.*)$", r"**\1**", text, flags=re.M)
    return re.sub(
        r"((?:^\|.*\n)+)", "```{table}\n:class: numbers\n\n\\1```\n", text, flags=re.M
    )


@cache
def scores() -> list[Score]:
    """The scorecard of the records."""
    return scorecard(RESULTS)


def _score(text: str) -> Score:
    for found in scores():
        if found.entry.text == text:
            return found
    raise ValueError(f"the scorecard has no '{text}'")


def score(text: str) -> str:
    """The size of the difference of an entry of the scorecard, by its text.

    Raises:
        ValueError: if there is none.
    """
    shown = difference(text)
    if shown.startswith("-"):  # turned round, the ends of an interval too
        shown = shown.translate(str.maketrans("+-", "-+"))
        shown = re.sub(r"\((\S+) to (\S+)\)", r"(\2 to \1)", shown)
    return shown.replace("+", "")


def difference(text: str) -> str:
    """The same with its sign.

    Raises:
        ValueError: if there is none.
    """
    return _score(text).shown


def verdict(text: str) -> str:
    """Its verdict in words.

    Raises:
        ValueError: if there is none.
    """
    return _score(text).word


def tally(text: str) -> str:
    """Verdicts of the scorecard, counted, of the claims that a plan had or of the others.

    Raises:
        ValueError: if the text is neither ``planned`` nor ``unplanned``.
    """
    if text not in ("planned", "unplanned"):
        raise ValueError(f"'{text}' is neither planned nor unplanned")
    chosen = [s for s in scores() if s.entry.is_planned == (text == "planned")]
    count = Counter(s.verdict.word.partition(",")[0] for s in chosen)
    told = ", ".join(f"{count[word]} {word}" for word in ("for", "against", "undecided"))
    return f"{len(chosen)} rows: {told}"
