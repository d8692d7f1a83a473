"""What the records of the study say: each claim with its evidence, by the rules of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.cells import Claim
from exlm_lab.experiments.records import LEFT_BY, Group, Record, grouped, read_records, since
from exlm_lab.experiments.study import EXPERIMENTS, SCALE

LEVEL = 0.05
"""Of the family of all primary claims (Holm), and of every interval."""


class Verdict(NamedTuple):
    """A claim and its evidence."""

    claim: Claim
    differences: tuple[float, ...]
    """One for each seed that both have."""
    planned: int
    """Seeds of the plan."""
    p_value: float | None
    """Of a paired two-sided t-test; none for fewer than two seeds."""
    adjusted: float | None
    """The same after Holm's correction over the primary claims; of others as it is."""

    @property
    def mean(self) -> float | None:
        return sum(self.differences) / len(self.differences) if self.differences else None

    @property
    def half_width(self) -> float | None:
        """Of the interval around the mean at ``LEVEL``; none for fewer than two seeds."""
        from scipy.stats import sem, t

        num = len(self.differences)
        return float(t.ppf(1 - LEVEL / 2, num - 1) * sem(self.differences)) if num > 1 else None

    @property
    def word(self) -> str:
        """for, against or undecided.

        For: the difference has the claimed sign beyond chance. Against: it has the other sign
        beyond chance, or its interval leaves out every effect that would matter.
        """
        if self.mean is None or self.adjusted is None or self.half_width is None:
            return "undecided"
        effect = self.claim.sign * self.mean
        if self.adjusted < LEVEL:
            return "for" if effect > 0 else "against"
        return "against" if effect + self.half_width < self.claim.smallest else "undecided"

    @property
    def told(self) -> str:
        """The same; "so far" as long as planned seeds are missing."""
        is_begun = 0 < len(self.differences) < self.planned
        return self.word + ", so far" * is_begun

    @property
    def seeds(self) -> str:
        """How many of the planned seeds count."""
        return f"{len(self.differences)} of {self.planned}"

    def shown(self, digits: int, factor: float = 1.0) -> str:
        """The mean with its interval, times some factor."""
        if self.mean is None:
            return "–"
        text = f"{factor * self.mean:+.{digits}f}"
        half = self.half_width
        return text if half is None else f"{text} ± {factor * half:.{digits}f}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: with each below a level, the family is wrong no oftener than it.

    The smallest is multiplied by their number, the next by one less, and none may fall behind a
    smaller one's.
    """
    order = np.argsort(p_values, kind="stable")
    multiplied = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(multiplied.clip(max=1.0))
    return adjusted.tolist()


def p_value(differences: Sequence[float]) -> float | None:
    """Of a two-sided t-test that their mean is 0; none for fewer than two, or all of them 0."""
    from scipy.stats import ttest_1samp

    if len(differences) < 2 or not any(differences):
        return None
    if len(set(differences)) == 1:
        return 0.0
    return float(ttest_1samp(differences, 0.0).pvalue)


def differences(claim: Claim, groups: Mapping[str, Group]) -> tuple[float, ...]:
    """The contrast of a claim in every seed that has both numbers."""
    weights = claim.weights or {claim.cell: 1.0}
    if not weights.keys() <= groups.keys():
        return ()
    terms = [(w, groups[name].by_seed(claim.metric)) for name, w in weights.items()]
    if claim.base is not None and claim.base in groups:
        terms.append((-1.0, groups[claim.base].by_seed(claim.metric)))
    elif claim.base is not None:
        terms.append((-1.0, groups[claim.cell].by_seed(claim.base)))
    seeds = set.intersection(*(set(values) for _, values in terms))
    return tuple(sum(w * values[seed] for w, values in terms) for seed in sorted(seeds))


def fell_short(record: Record) -> bool:
    """Whether a run was to train until a watched metric was low enough, and never was there."""
    levels = {n: most for n, most in record.data.get("watched", {}).items() if most is not None}
    last = record.data["curve"][-1] if levels else {}
    return bool(levels) and all(last[name] > most for name, most in levels.items())


def verdicts(directory: Path) -> dict[str, list[Verdict]]:
    """Every claim with its evidence, by experiment.

    Args:
        directory: of the study's records.

    Raises:
        UserError: if a record is damaged.
    """
    found: dict[str, list[Verdict]] = {}
    for experiment in EXPERIMENTS.values():
        records = read_records(experiment.name, directory, SCALE)
        there = [record for record in records if not fell_short(record)]
        groups = {group.cell: group for group in grouped(there).values()}
        planned = max(len(cell.seeds) for cell in experiment.cells)
        found[experiment.name] = [
            Verdict(claim, d := differences(claim, groups), planned, p_value(d), None)
            for claim in experiment.claims
        ]
    primary = [v for several in found.values() for v in several if v.claim.is_primary]
    # Claims without numbers yet count: the family is that of the plan.
    adjusted = holm([1.0 if v.p_value is None else v.p_value for v in primary])
    by_claim = {
        id(v): None if v.p_value is None else p for v, p in zip(primary, adjusted, strict=True)
    }
    return {
        name: [v._replace(adjusted=by_claim.get(id(v), v.p_value)) for v in several]
        for name, several in found.items()
    }


def report(directory: Path) -> str:
    """All claims as Markdown: contrast, interval, verdict, and how much of the plan is done."""
    lines = []
    for name, several in verdicts(directory).items():
        lines += [f"## {name}: {EXPERIMENTS[name].about}", ""]
        header = ("claim", "difference", "p", "verdict", "seeds", "contrast")
        lines += [*markdown_table([header, *map(_row, several)]), ""]
        records = read_records(name, directory, SCALE)
        if name == "escape" and records:
            lines += [*markdown_table(escapes(list(grouped(records).values()))), ""]
        if short := list(filter(fell_short, records)):
            told = ", ".join(f"{record.cell} seed {record.seed}" for record in short)
            lines += [f"Never as good as the plan asks, and in no number: {told}.", ""]
    lines.append("\\* primary: p by Holm's correction over all primary claims of the plan.")
    lines.append(
        "For: as claimed, p < 0.05. Against: the other sign with p < 0.05, or the interval leaves "
        "out every effect that would matter. Else undecided."
    )
    return "\n".join(lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    claim, p = verdict.claim, verdict.adjusted
    return (
        claim.text + r" \*" * claim.is_primary,
        verdict.shown(3),
        "–" if p is None else f"{p:.2g}",
        verdict.told,
        verdict.seeds,
        f"{claim.metric}: {claim.cell}" + (f" − {claim.base}" if claim.base else ""),
    )


def escapes(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A table: from which step on each seed of a cell is below the frequencies, and links win.

    Below the frequencies is by 0.1 bits per lost token, and links win from 0.1 bits per row on.
    """
    rows: list[tuple[str, ...]] = [
        ("cell", "below the frequencies from", "links win from", "specialisation")
    ]
    for group in groups:
        below, linked = [], []
        for record in group.records:
            points = record.data["curve"]
            below.append(since((p["step"], _is_below(p)) for p in points))
            linked.append(
                since((p["step"], p.get("dependence_bits", 0.0) >= LEFT_BY) for p in points)
            )
        special = group.summary("specialisation_bits")
        steps = (", ".join(str(s or "never") for s in several) for several in (below, linked))
        rows.append((group.cell, *steps, special.shown(3) if special else "–"))
    return rows


def _is_below(point: Mapping[str, float]) -> bool:
    return point["bits_per_mask"] < point["frequency_bits"] - LEFT_BY
