"""Verdicts on the claims: what the records say about each, by the rules of the plan."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.catalogue import EXPERIMENTS, planned
from exlm_lab.experiments.cells import Cell, Claim, Experiment, is_enough
from exlm_lab.experiments.correlations import over_seeds
from exlm_lab.experiments.records import (
    LEFT_BY,
    by_cell,
    by_seed,
    grid,
    measured,
    runs,
    shown,
    since,
)

LEVEL = 0.05
"""Significance level of each family of primary claims (Holm), and of every interval."""
TOO_SMALL = ", too small to matter"
BEST = {"bits_per_row": "joint_bits_per_row"}
"""For a metric, the one that holds what a perfect model would score, where records have it."""
AIDS = ("no aids", "chains alone", "clone vectors alone", "both aids")
"""Start-up aids of a run; the index adds 1 for fixed chains and 2 for clone vectors."""
AIDS_BY = ["train.chain_warmup", "model.clone_embedding_std"]


class Verdict(NamedTuple):
    """A claim and its evidence."""

    claim: Claim
    differences: tuple[float, ...]
    """One for each seed that all compared cells have."""
    planned: int
    """Number of planned seeds."""
    p_value: float | None
    """p-value of a paired two-sided t-test; None for fewer than two seeds."""
    adjusted: float | None
    """p-value after Holm's correction for primary claims; uncorrected for others."""
    limit: float | None = None
    """The lowest possible difference, that of a perfect model, if known."""
    aids: str = ""
    """Start-up aids of each ExLM in the contrast; empty if there is no ExLM."""
    origin: str = ""
    """One of "planned", "planned, primary" (in its plan's family), "sweep" and "unplanned"."""

    @property
    def mean(self) -> float | None:
        return sum(self.differences) / len(self.differences) if self.differences else None

    @property
    def half_width(self) -> float | None:
        """Half width of the mean's interval at ``LEVEL``; None for fewer than two seeds."""
        return half_width(self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean ± half width, cut at ``limit``; two-peaked differences would overshoot it."""
        if self.mean is None or self.half_width is None:
            return None
        low = self.mean - self.half_width
        if self.limit is not None:
            low = min(self.mean, max(low, self.limit))
        return low, self.mean + self.half_width

    @property
    def word(self) -> str:
        """The verdict: for, against or undecided; the first two may add "too small to matter".

        For: the difference has the claimed sign beyond chance. Against: it has the other sign
        beyond chance, or its interval leaves out every effect that would matter. Too small: the
        whole interval lies inside the smallest effect that matters, on either side of zero.
        """
        if self.mean is None or self.adjusted is None or self.half_width is None:
            return "undecided"
        effect, smallest = self.claim.sign * self.mean, self.claim.smallest
        is_for = self.adjusted < LEVEL and effect > 0
        is_against = self.adjusted < LEVEL or effect + self.half_width < smallest
        if not (is_for or is_against):
            return "undecided"
        is_small = abs(effect) + self.half_width < smallest
        return ("for" if is_for else "against") + TOO_SMALL * is_small

    @property
    def word_so_far(self) -> str:
        """The verdict, with "so far" added while only some of the planned seeds are there."""
        is_begun = 0 < len(self.differences) < self.planned
        return self.word + ", so far" * is_begun

    @property
    def is_planned(self) -> bool:
        """Whether the claim was part of a plan."""
        return self.origin.startswith("planned")

    @property
    def seeds(self) -> str:
        """How many of the planned seeds count."""
        return f"{len(self.differences)} of {self.planned}"

    def shown(self, digits: int, factor: float = 1.0) -> str:
        """Format the mean and its interval, both multiplied by ``factor``.

        An interval that is cut is given by its ends, any other by its half width. If it excludes
        zero, decimals are added to ``digits`` until the rounded numbers show it.
        """
        if self.mean is None:
            return "–"
        interval, half = self.interval, self.half_width
        if interval is None or half is None:
            return f"{factor * self.mean:+z.{digits}f}"
        mean, half = factor * self.mean, factor * half
        while abs(mean) > half and round(abs(mean), digits) <= round(half, digits):
            digits += 1
        low, high = (factor * end for end in interval)
        if high - low < 2 * half * (1 - 1e-9):
            return f"{mean:+z.{digits}f} ({low:+z.{digits}f} to {high:+z.{digits}f})"
        return f"{mean:+z.{digits}f} ± {half:.{digits}f}"


def half_width(differences: Sequence[float]) -> float | None:
    """Half width of the t-interval of their mean at ``LEVEL``; None for fewer than two."""
    from scipy.stats import sem, t

    num = len(differences)
    return float(t.ppf(1 - LEVEL / 2, num - 1) * sem(differences)) if num > 1 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's method, which bounds the chance of any false positive among them.

    The smallest is multiplied by their number, the next by one less, and so on; each becomes at
    least as large as the one before it, and at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    multiplied = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(multiplied.clip(max=1.0))
    return adjusted.tolist()


def p_value(differences: Sequence[float]) -> float | None:
    """p-value of a two-sided t-test that their mean is 0; None for fewer than two."""
    from scipy.stats import ttest_1samp

    if len(differences) < 2:
        return None
    if len(set(differences)) == 1:
        return 0.0 if any(differences) else 1.0
    return float(ttest_1samp(differences, 0.0).pvalue)


def differences(
    claim: Claim, table: pd.DataFrame, metric: str | None = None
) -> tuple[float, ...]:
    """The contrast of a claim in every seed that has all its numbers; ``metric``, if given, takes
    the place of the claim's in the cells that are compared with the base."""
    if claim.statistic is not None:
        toy = table[table["input"] == "toy"]
        return tuple(over_seeds(claim.statistic, grid(toy, claim.metric)))
    cells = set(table.index.get_level_values("cell"))
    weights = claim.weights or {claim.cell: 1.0}
    if not weights.keys() <= cells:
        return ()
    terms = [w * by_seed(table, cell, metric or claim.metric) for cell, w in weights.items()]
    if claim.base is not None:
        is_cell = claim.base in cells
        base = (claim.base, claim.metric) if is_cell else (claim.cell, claim.base)
        terms.append(-by_seed(table, *base))
    return tuple(reduce(pd.Series.add, terms).dropna())


def judge(claim: Claim, experiment: Experiment, table: pd.DataFrame) -> Verdict:
    """Judge a claim of an experiment, its p-value not yet corrected."""
    cells = [
        cell
        for cell in experiment.cells
        if (cell.input == "toy" if claim.statistic else cell.name in claim.cells)
    ]
    table = of_plan(table, cells)
    contrast = differences(claim, table)
    measured_cells = measured(table, claim.metric).index.get_level_values("cell")
    if claim.statistic and not {cell.name for cell in cells} <= {*measured_cells}:
        contrast = ()  # the statistic is that of the whole grid
    p = p_value(contrast)
    if experiment.plan is None:
        origin = "sweep"
    elif not claim.is_planned:
        origin = "unplanned"
    else:
        origin = "planned" + ", primary" * claim.is_primary
    limit, aids = _limit(claim, table), _aids(claim, table)
    return Verdict(claim, contrast, len(seeds_of(cells)), p, p, limit, aids, origin)


def seeds_of(cells: Iterable[Cell]) -> set[int]:
    """The seeds that are planned for any of these cells."""
    return {seed for cell in cells for seed in cell.seeds}


def of_plan(table: pd.DataFrame, cells: Iterable[Cell]) -> pd.DataFrame:
    """The runs with planned seeds; runs with further seeds count in no claim."""
    return table[table.index.isin(seeds_of(cells), level="seed")]


def _limit(claim: Claim, table: pd.DataFrame) -> float | None:
    """The difference that a perfect model would make, at the lower end of its own interval.

    The lower end allows for the scatter of the base's runs; an exact floor has none. The result
    is None unless the claim is that bits are fewer: no model needs fewer than the joint entropy.
    """
    if claim.sign > 0 or claim.weights or claim.metric not in BEST:
        return None
    perfect = differences(claim, table, BEST[claim.metric])
    half = half_width(perfect)
    return None if half is None else sum(perfect) / len(perfect) - half


def _aids(claim: Claim, table: pd.DataFrame) -> str:
    is_exlm = (table["objective"] == "exlm") & table.index.isin(claim.cells, level="cell")
    # A setting that a record lacks was at its default, no aid.
    aids = table.reindex(columns=AIDS_BY, fill_value=0.0)[is_exlm] > 0
    each = {
        cell: AIDS[has_chains + 2 * has_vectors]
        for (cell, _), has_chains, has_vectors in aids.itertuples()
    }
    return " against ".join(dict.fromkeys(each[cell] for cell in claim.cells if cell in each))


def fell_short(table: pd.DataFrame) -> pd.Series:
    """Which runs were to train until a watched metric reached its threshold, and never did."""
    short = [
        any(most is not None for most in watched.values())
        and not is_enough(curve[-1] if curve else {}, watched)
        for watched, curve in zip(table["watched"], table["curve"], strict=True)
    ]
    return pd.Series(short, table.index, dtype=bool)


def verdicts(directory: Path) -> dict[str, list[Verdict]]:
    """The verdicts on all claims, by experiment, with p-values corrected."""
    judged: dict[str, list[Verdict]] = {}
    families: dict[str, list[Verdict]] = {}
    for name, experiment in EXPERIMENTS.items():
        table = runs(name, directory)
        table = table[~fell_short(table)]
        judged[name] = [judge(claim, experiment, table) for claim in experiment.claims]
        if experiment.plan:
            primary = [verdict for verdict in judged[name] if verdict.claim.is_primary]
            families.setdefault(experiment.plan, []).extend(primary)
    by_claim: dict[int, float | None] = {}
    for family in families.values():
        # Claims that have no numbers yet count as p = 1: the family is that of the plan.
        adjusted = holm([1.0 if v.p_value is None else v.p_value for v in family])
        for v, p in zip(family, adjusted, strict=True):
            by_claim[id(v)] = None if v.p_value is None else p
    return {
        name: [v._replace(adjusted=by_claim.get(id(v), v.adjusted)) for v in several]
        for name, several in judged.items()
    }


def report(directory: Path, names: Container[str]) -> str:
    """The planned claims of some experiments as Markdown: contrast, interval, verdict, how much of
    the plan is done."""
    lines = []
    every = verdicts(directory)
    for experiment in filter(lambda one: one.name in names, planned()):
        name = experiment.name
        lines += [f"## {name}: {experiment.about}", ""]
        smallest = "smallest effect that matters"
        header = ("claim", "difference", smallest, "p", "verdict", "seeds", "contrast")
        rows = [_row(verdict) for verdict in every[name] if verdict.claim.is_planned]
        lines += [*markdown_table([header, *rows]), ""]
        table = of_plan(runs(name, directory), experiment.cells)
        prizes = by_seed(table, "mlm", "prize_bits")
        if len(prizes):
            most = f"Prize (the most that edges can save): {shown(prizes)} bits per row."
            lines += [most, ""]
        if name == "escape" and len(table):
            lines += [*markdown_table(escapes(table)), ""]
        short = fell_short(table)
        if short.any():
            names = ", ".join(f"{cell} seed {seed}" for cell, seed in table.index[short])
            left_out = "Runs that never reached the plan's threshold, left out of all numbers"
            lines += [f"{left_out}: {names}.", ""]
    lines.append("\\* primary: p by Holm's correction over all primary claims of its plan.")
    lines.append(
        "For: as claimed, p < 0.05. Against: the other sign with p < 0.05, or the interval leaves "
        "out every effect that would matter. Else undecided. Too small to matter: the whole "
        "interval lies inside the smallest effect that matters. Where both ends are given, the "
        "interval is cut at the score of a perfect model."
    )
    return "\n".join(lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    claim, p = verdict.claim, verdict.adjusted
    return (
        claim.text + r" \*" * claim.is_primary,
        verdict.shown(3),
        f"{claim.sign * claim.smallest:+g}" if claim.smallest else "0",
        "–" if p is None else f"{p:.2g}",
        verdict.word_so_far,
        verdict.seeds,
        f"{claim.metric}: {claim.cell}" + (f" − {claim.base}" if claim.base else ""),
    )


def escapes(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Table of the steps from which each seed of a cell is below the frequencies, and links win.

    Below the frequencies means by more than 0.1 bits per lost token; links win if they save at
    least 0.1 bits per row.
    """
    rows: list[tuple[str, ...]] = [
        ("cell", "beats word frequencies from step", "links win from step", "specialisation")
    ]
    for cell, of_cell in by_cell(table).items():
        below, linked = [], []
        for points in of_cell["curve"]:
            below.append(since((p["step"], _is_below(p)) for p in points))
            linked.append(
                since((p["step"], p.get("dependence_bits", 0.0) >= LEFT_BY) for p in points)
            )
        steps = (", ".join(str(s or "never") for s in several) for several in (below, linked))
        rows.append((cell, *steps, shown(measured(of_cell, "specialisation_bits"), 3)))
    return rows


def _is_below(point: Mapping[str, float]) -> bool:
    # Without either metric this is False: nan compares as false.
    bits, frequency = (point.get(n, math.nan) for n in ("bits_per_mask", "frequency_bits"))
    return bits < frequency - LEFT_BY
