"""The study: experiments that can tell, and the claims they are to decide.

``book/plan.md`` says why each is made as it is. An experiment is a sweep, its cells run with equal
seeds; a claim is a contrast between two of its cells, seed by seed. What was claimed, measured and
deemed large enough stands here before the first number, and is changed only with a dated line in
the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.claims import Claim, Experiment
from exlm_lab.experiments.competence import competence
from exlm_lab.experiments.escape import escape
from exlm_lab.experiments.molecules import molecules
from exlm_lab.experiments.records import Group, Record, grouped, read_records, summarize
from exlm_mini.data.toy_grammars import LADDER

LEVEL = 0.05
"""Of the family of all primary claims (Holm), and of every interval."""
SCALE = "study"


# ---- the experiments ----

_CURES = {"model.clone_embedding_std": 1.0, "train.chain_warmup": 0.25}
"""Against the symmetric start, as in the small recipes; not in the paper (``saddle`` is why)."""
_EXLM = {"objective": "exlm", "model.states_per_mask": 4, **_CURES}
_ARMS: dict[str, dict[str, Any]] = {
    "mlm": {"objective": "mlm"},
    "mlm++": {"objective": "mlm"},
    "exlm": _EXLM,
    "late": {**_EXLM, "model.expand_at": 1},
    "uniform": {**_EXLM, "model.transition": "uniform"},
    "ctc": {**_EXLM, "model.transition": "ctc"},
}
"""MLM, MLM at the measured cost of ExLM, ExLM, expanded after the first of two layers, and the two
variants that have states and no links."""


def _ladder() -> Experiment:
    seeds = tuple(range(1, 11))
    cells = [
        Cell(
            "exlm-cost", "slots", "sweep/slots",
            {**_EXLM, "data.grammar": "ladder-2"}, seeds=(1,), is_timed=True,
        )
    ]  # fmt: skip
    for bits in LADDER:
        for arm, settings in _ARMS.items():
            cost = {"cost_of": ("ladder", "exlm-cost")} if arm == "mlm++" else {}
            language = {"data.grammar": f"ladder-{bits}"}
            cells.append(
                Cell(
                    f"{arm}-{bits}", "slots", "sweep/slots", {**settings, **language},
                    seeds=seeds, **cost,
                )
            )  # fmt: skip
    claims = [
        Claim(
            f"ExLM captures dependence: below MLM's floor at {bits} bits of it",
            "bits_per_row", f"exlm-{bits}", "floor_bits_per_row", -1, 0.25 * bits,
            is_primary=bits in (2, 8),
        )
        for bits in (1, 2, 4, 8)
    ]  # fmt: skip
    claims += [
        Claim(
            "Links win bits that states alone do not",
            "bits_per_row", "exlm-4", "uniform-4", -1, 1.0, is_primary=True,
        ),
        Claim(
            "ExLM wins bits at equal cost",
            "bits_per_row", "exlm-4", "mlm++-4", -1, 1.0, is_primary=True,
        ),
        Claim(
            "Links win bits beyond CTC", "bits_per_row", "exlm-4", "ctc-4", -1, 1.0,
        ),
        Claim(
            "Where nothing is shared, states cost bits",
            "bits_per_row", "exlm-0", "mlm-0", 1, 0.05,
        ),
        Claim(
            "Expanding late loses bits", "bits_per_row", "late-4", "exlm-4", 1, 0.25,
        ),
        Claim(
            "Expanding late loses bits where much is shared",
            "bits_per_row", "late-8", "exlm-8", 1, 0.25,
        ),
    ]  # fmt: skip
    about = "how much slots depend on each other, in six models (bits)"
    return Experiment("ladder", about, tuple(cells), tuple(claims))


def _parts() -> Experiment:
    seeds = tuple(range(1, 11))
    chains = {"objective": "exlm", "train.chain_warmup": 0.25}
    some_masks = {
        **chains, "data.grammar": "ladder-8", "model.states_per_mask": 4,
        "masking.strategy": "bernoulli", "masking.mask_ratio": 0.3,
    }  # fmt: skip
    phrases = {**_CURES, "objective": "exlm", "data.grammar": "shifts"}
    variants: dict[str, dict[str, Any]] = {
        "rope-2d": some_masks,
        "rope-1d": {**some_masks, "model.rope": "1d"},
        "rope-2d-named": {**some_masks, "model.clone_embedding_std": 1.0},
        "rope-1d-named": {**some_masks, "model.clone_embedding_std": 1.0, "model.rope": "1d"},
        "dense": phrases,
        "sparse": {**phrases, "model.sparse": True},
        "dense-paper": {**phrases, "model.boundary": "paper"},
        "sparse-paper": {**phrases, "model.boundary": "paper", "model.sparse": True},
    }
    cells = tuple(
        Cell(
            name, "slots", "sweep/slots", settings, seeds=seeds,
            tested_with={"many": {"masking.mask_ratio": 0.9}} if name.startswith("rope") else {},
        )
        for name, settings in variants.items()
    )  # fmt: skip
    claims = (
        Claim(
            "2D positions carry over to more masks than were trained on",
            "bits_per_row@many", "rope-2d", "rope-1d", -1, 0.5, is_primary=True,
        ),
        Claim(
            "At the trained ratio 2D positions win bits",
            "bits_per_row", "rope-2d", "rope-1d", -1, 0.25,
        ),
        Claim(
            "They carry over even where a learned vector names each clone",
            "bits_per_row@many", "rope-2d-named", "rope-1d-named", -1, 0.5,
        ),
        Claim(
            "Edges inside a mask win bits where two states are too few",
            "bits_per_row", "dense", "sparse", -1, 0.2, is_primary=True,
        ),
        Claim(
            "They win bits with single boundary states too",
            "bits_per_row", "dense-paper", "sparse-paper", -1, 0.2,
        ),
    )  # fmt: skip
    about = "2D positions and edges inside a mask, where theory says they must matter (bits)"
    return Experiment("parts", about, cells, claims)


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (_ladder(), _parts(), competence(), escape(), molecules())
}
"""By name, in the order in which the queue takes them."""


# ---- what the records say ----


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
        from scipy.stats import t

        found = summarize(list(self.differences))
        if found is None or found.sd is None:
            return None
        return float(t.ppf(1 - LEVEL / 2, found.num - 1) * found.standard_error)

    @property
    def word(self) -> str:
        """for, against or undecided.

        For: the difference has the claimed sign beyond chance. Against: it has the other sign
        beyond chance, or its interval leaves out every effect that would matter.
        """
        if self.adjusted is None or self.half_width is None:
            return "undecided"
        effect = self.claim.sign * self.mean
        if self.adjusted < LEVEL:
            return "for" if effect > 0 else "against"
        return "against" if effect + self.half_width < self.claim.smallest else "undecided"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: with each below a level, the family is wrong no oftener than it.

    The smallest is multiplied by their number, the next by one less, and none may fall behind a
    smaller one's.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


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
    if claim.base in groups:
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
    everything = [verdict for several in found.values() for verdict in several]
    primary = [v for v in everything if v.claim.is_primary and v.p_value is not None]
    # Claims without numbers yet count: the family is that of the plan.
    missing = sum(v.claim.is_primary for v in everything) - len(primary)
    adjusted = holm([*(v.p_value for v in primary), *[1.0] * missing])
    by_claim = dict(zip((id(v) for v in primary), adjusted, strict=False))
    return {
        name: [v._replace(adjusted=by_claim.get(id(v), v.p_value)) for v in several]
        for name, several in found.items()
    }


def report(directory: Path) -> str:
    """All claims as Markdown: contrast, interval, verdict, and how much of the plan is done."""
    lines = []
    for name, several in verdicts(directory).items():
        lines += [f"## {name}: {EXPERIMENTS[name].about}", ""]
        rows = [("claim", "contrast", "seeds", "difference", "p", "verdict")]
        rows += [_row(verdict) for verdict in several]
        lines += [*markdown_table(rows), ""]
        records = read_records(name, directory, SCALE)
        if (told := EXPERIMENTS[name].told) is not None:
            lines += [*markdown_table(told(list(grouped(records).values()))), ""]
        if short := list(filter(fell_short, records)):
            told = ", ".join(f"{record.cell} seed {record.seed}" for record in short)
            lines += [f"Never as good as the plan asks, and in no number: {told}.", ""]
    lines.append("* primary: p by Holm's correction over all primary claims of the plan.")
    return "\n".join(lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    claim, half = verdict.claim, verdict.half_width
    told = "–"
    if verdict.mean is not None:
        told = f"{verdict.mean:+.3f}" + ("" if half is None else f" ± {half:.3f}")
    p = "–" if verdict.adjusted is None else f"{verdict.adjusted:.2g}"
    return (
        claim.text + " *" * claim.is_primary,
        f"{claim.metric}: {claim.cell}" + (f" − {claim.base}" if claim.base else ""),
        f"{len(verdict.differences)} of {verdict.planned}",
        told,
        p,
        verdict.word + ", so far" * (0 < len(verdict.differences) < verdict.planned),
    )
