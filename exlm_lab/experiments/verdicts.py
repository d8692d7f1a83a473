"""What the records of the study say: each claim with its evidence, by the rules of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.cells import Claim
from exlm_lab.experiments.records import LEFT_BY, Group, Record, grouped, read_records, since
from exlm_lab.experiments.study import EXPERIMENTS
from exlm_mini.config.recipes import run_config_from_dict

LEVEL = 0.05
"""Of the family of all primary claims (Holm), and of every interval."""
TOO_SMALL = ", too small to matter"
BEST = {"bits_per_row": "joint_bits_per_row"}
"""What a perfect model has of a metric, where records hold it."""
AIDS = ("no aids", "chains alone", "clone vectors alone", "both aids")
"""By whether there are fixed chains, plus twice whether clones have vectors."""


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
    limit: float | None = None
    """The lowest difference there can be, if known: what a perfect model would make."""
    aids: str = ""
    """Aids against the symmetric start in each ExLM of the contrast; empty if there is none."""

    @property
    def mean(self) -> float | None:
        return sum(self.differences) / len(self.differences) if self.differences else None

    @property
    def half_width(self) -> float | None:
        """Of the interval around the mean at ``LEVEL``; none for fewer than two seeds."""
        return half_width(self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The mean ± half width, cut at ``limit``: differences with two peaks reach beyond it."""
        if self.mean is None or self.half_width is None:
            return None
        low = self.mean - self.half_width
        if self.limit is not None:
            low = min(self.mean, max(low, self.limit))
        return low, self.mean + self.half_width

    @property
    def word(self) -> str:
        """for, against or undecided; the first two also as "too small to matter".

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
    def told(self) -> str:
        """The same; "so far" as long as planned seeds are missing."""
        is_begun = 0 < len(self.differences) < self.planned
        return self.word + ", so far" * is_begun

    @property
    def seeds(self) -> str:
        """How many of the planned seeds count."""
        return f"{len(self.differences)} of {self.planned}"

    def shown(self, digits: int, factor: float = 1.0) -> str:
        """The mean with its interval, times some factor, and with more digits if it takes them.

        With the ends of the interval where it is cut, else with its half width. An interval that
        leaves out zero is told with so many digits that one sees it.
        """
        if self.mean is None:
            return "–"
        interval, half = self.interval, self.half_width
        if interval is None or half is None:
            return f"{factor * self.mean:+.{digits}f}"
        mean, half = factor * self.mean, factor * half
        while abs(mean) > half and round(abs(mean), digits) <= round(half, digits):
            digits += 1
        low, high = (factor * end for end in interval)
        if high - low < 2 * half * (1 - 1e-9):
            return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
        return f"{mean:+.{digits}f} ± {half:.{digits}f}"


def half_width(differences: Sequence[float]) -> float | None:
    """Of the t-interval around their mean at ``LEVEL``; none for fewer than two."""
    from scipy.stats import sem, t

    num = len(differences)
    return float(t.ppf(1 - LEVEL / 2, num - 1) * sem(differences)) if num > 1 else None


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


def differences(
    claim: Claim, groups: Mapping[str, Group], metric: str | None = None
) -> tuple[float, ...]:
    """The contrast of a claim in every seed that has both numbers.

    Args:
        claim: says which cells, or metrics of a run, are compared.
        groups: by cell.
        metric: of the cells compared with the base; the claim's where there is none.
    """
    weights = claim.weights or {claim.cell: 1.0}
    if not weights.keys() <= groups.keys():
        return ()
    terms = [(w, groups[name].by_seed(metric or claim.metric)) for name, w in weights.items()]
    if claim.base is not None and claim.base in groups:
        terms.append((-1.0, groups[claim.base].by_seed(claim.metric)))
    elif claim.base is not None:
        terms.append((-1.0, groups[claim.cell].by_seed(claim.base)))
    seeds = set.intersection(*(set(values) for _, values in terms))
    return tuple(sum(w * values[seed] for w, values in terms) for seed in sorted(seeds))


def judge(
    claim: Claim,
    groups: Mapping[str, Group],
    planned: int,
    found: Sequence[float] | None = None,
) -> Verdict:
    """A claim with its evidence, its p-value not corrected.

    Args:
        claim: says which cells are compared.
        groups: by cell.
        planned: seeds of the plan.
        found: a number for each seed, in place of a contrast of cells.
    """
    found = differences(claim, groups) if found is None else tuple(found)
    p = p_value(found)
    return Verdict(claim, found, planned, p, p, _limit(claim, groups), _aids(claim, groups))


def _limit(claim: Claim, groups: Mapping[str, Group]) -> float | None:
    """What a perfect model would differ by, at the far end of its own interval.

    That end, because the base is known only as well as its runs scatter; an exact floor does not.
    Only for claims that bits are fewer: no model has fewer than the joint entropy.
    """
    if claim.sign > 0 or claim.weights or claim.metric not in BEST:
        return None
    perfect = differences(claim, groups, BEST[claim.metric])
    half = half_width(perfect)
    return None if half is None else sum(perfect) / len(perfect) - half


def _aids(claim: Claim, groups: Mapping[str, Group]) -> str:
    cells = [*(claim.weights or (claim.cell,)), claim.base]
    records = [groups[cell].first for cell in cells if cell in groups]
    configs = [run_config_from_dict(r.data["config"]) for r in records if r.objective == "exlm"]
    each = [
        AIDS[(c.train.chain_warmup > 0) + 2 * (c.model.clone_embedding_std > 0)]
        for c in configs
    ]
    return " against ".join(dict.fromkeys(each))


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
        records = read_records(experiment.name, directory)
        there = [record for record in records if not fell_short(record)]
        groups = {group.cell: group for group in grouped(there).values()}
        planned = max(len(cell.seeds) for cell in experiment.cells)
        found[experiment.name] = [judge(claim, groups, planned) for claim in experiment.claims]
    families: dict[str, list[Verdict]] = {}
    for name, several in found.items():
        family = families.setdefault(EXPERIMENTS[name].plan, [])
        family += [verdict for verdict in several if verdict.claim.is_primary]
    by_claim: dict[int, float | None] = {}
    for family in families.values():
        # Claims without numbers yet count: the family is that of the plan.
        adjusted = holm([1.0 if v.p_value is None else v.p_value for v in family])
        for v, p in zip(family, adjusted, strict=True):
            by_claim[id(v)] = None if v.p_value is None else p
    return {
        name: [v._replace(adjusted=by_claim.get(id(v), v.adjusted)) for v in several]
        for name, several in found.items()
    }


def report(directory: Path) -> str:
    """All claims as Markdown: contrast, interval, verdict, and how much of the plan is done."""
    lines = []
    for name, several in verdicts(directory).items():
        lines += [f"## {name}: {EXPERIMENTS[name].about}", ""]
        header = ("claim", "difference", "p", "verdict", "seeds", "contrast")
        lines += [*markdown_table([header, *map(_row, several)]), ""]
        records = read_records(name, directory)
        if name == "escape" and records:
            lines += [*markdown_table(escapes(list(grouped(records).values()))), ""]
        if short := list(filter(fell_short, records)):
            told = ", ".join(f"{record.cell} seed {record.seed}" for record in short)
            lines += [f"Never as good as the plan asks, and in no number: {told}.", ""]
    lines.append("\\* primary: p by Holm's correction over all primary claims of its plan.")
    lines.append(
        "For: as claimed, p < 0.05. Against: the other sign with p < 0.05, or the interval leaves "
        "out every effect that would matter. Else undecided. Too small to matter: the whole "
        "interval lies inside the smallest effect that matters. Where both ends are told, the "
        "interval is cut at what a perfect model would win."
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
