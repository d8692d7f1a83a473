"""The study's experiments on links: where there is something to win on real data, who wins it.

``book/plan.md`` has the design. In each seed one MLM is trained, and every arm goes on from it for
as long as costs the same: MLM itself, or ExLM, whose masks split into k states. ``parts`` of what
wins are taken away one by one, and trained from the start too.
"""

from __future__ import annotations

from typing import Any

from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.experiments.cells import Cell, Claim, Downstream, Experiment, Input
from exlm_mini.data.toy_grammars import LADDER

SECOND_PLAN = "the plan of links"
FIVE_SEEDS, TEN_SEEDS = tuple(range(1, 6)), tuple(range(1, 11))
BRANCH_STEPS = 8_000
"""Of an MLM; other arms get as many as cost the same."""
BRANCH: dict[str, Any] = {
    "train.steps": BRANCH_STEPS, "train.learning_rate": 1e-3, "train.warmup_steps": 100,
}  # fmt: skip
TRUNK_STEPS = 20_000
EXLM: dict[str, Any] = {
    "objective": "exlm", "model.states_per_mask": 4, "model.expand_at": 3,
    "model.clone_embedding_std": 1.0, "model.transition": "spans",
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "exlm": EXLM,
    "chains": {**EXLM, "model.transition": "chains"},
    "uniform": {**EXLM, "model.transition": "uniform"},
    "gated": {**EXLM, "model.transition": "gated"},
}
"""Links within spans; fixed chains in their place; states without links; E as published."""
TASKS = ("bbbp", "bace", "clintox")
RANDOM: dict[str, Any] = {"masking.strategy": "fixed_count", "masking.mask_ratio": 0.15}
"""The paper's masks."""


def _grown(
    name: str, kind: Input, base: str, masks: dict[str, Any], arms: tuple[str, ...]
) -> tuple[Cell, list[Cell]]:
    """An MLM, and the arms that go on from it at equal cost, MLM first.

    Args:
        name: of the experiment, to find what a step of each arm costs.
        kind, base: see ``Cell``.
        masks: changed settings of masking.
        arms: of ``PARTS``.
    """
    trunk = Cell("trunk", kind, base, masks, seeds=FIVE_SEEDS)
    cells = [
        Cell(
            "mlm", kind, base, {**masks, **BRANCH}, seeds=FIVE_SEEDS, start=trunk,
            with_prize=True,
        )
    ]  # fmt: skip
    for arm in arms:
        settings = {**masks, **BRANCH, **PARTS[arm]}
        cost = Cell(f"{arm}-cost", kind, base, settings, seeds=(1,), is_timed=True)
        cells += [
            cost,
            Cell(
                arm, kind, base, settings, seeds=FIVE_SEEDS, start=trunk, with_prize=True,
                cost_of=(name, cost.name),
            ),
        ]  # fmt: skip
    return trunk, [trunk, *cells]


def _molecules() -> Experiment:
    """Molecules in spans, every part by itself."""
    _, cells = _grown("links", "molecules", "sweep/spans", {}, tuple(PARTS))
    cells += [
        Cell(
            f"{arm}-scratch", "molecules", "sweep/spans",
            {**PARTS[arm], "train.steps": TRUNK_STEPS + BRANCH_STEPS}, seeds=FIVE_SEEDS,
            cost_of=("links", f"{arm}-cost"), with_prize=True,
        )
        for arm in PARTS
    ]  # fmt: skip
    bits = "together_bits"
    claims = (
        Claim("Grown, ExLM wins bits of molecules at equal cost",
              bits, "exlm", "mlm", -1, 0.3, is_primary=True),
        Claim("In one pass it fills in more molecules that can be read",
              "readable_at_once_best_of_16", "exlm", "mlm", 1, 0.02, is_primary=True),
        Claim("Links win bits that states alone do not",
              bits, "exlm", "uniform", -1, 0.3, is_primary=True),
        Claim("States without links lose bits against an MLM of their cost",
              bits, "uniform", "mlm", 1, 0.1, is_primary=True),
        Claim("Learned links win bits beyond fixed chains", bits, "exlm", "chains", -1, 0.1),
        Claim("E as published loses bits against links within spans",
              bits, "gated", "exlm", 1, 0.3, is_primary=True),
        Claim("Trained from the start, ExLM loses bits against one that is grown",
              bits, "exlm-scratch", "exlm", 1, 0.3, is_primary=True),
        Claim("So do fixed chains: they lose bits", bits, "chains-scratch", "chains", 1, 0.3),
        Claim("So does E as published: it loses bits", bits, "gated-scratch", "gated", 1, 0.3),
        Claim("So do states without links: they lose bits",
              bits, "uniform-scratch", "uniform", 1, 0.3),
        Claim("Sampled in one pass, more of its molecules can be read",
              "readable_at_once_sampled", "exlm", "mlm", 1, 0.02),
    )  # fmt: skip
    about = "molecules in spans: which part of a grown ExLM wins, at equal cost (bits)"
    return Experiment("links", about, tuple(cells), claims, SECOND_PLAN)


def _english() -> Experiment:
    """English in spans."""
    _, cells = _grown("links-english", "english", "sweep/spans-english", {}, ("exlm",))
    claims = (
        Claim("Grown, ExLM wins bits of English at equal cost",
              "together_bits", "exlm", "mlm", -1, 0.3, is_primary=True),
    )  # fmt: skip
    about = "English in spans: a grown ExLM and MLM at equal cost (bits)"
    return Experiment("links-english", about, tuple(cells), claims, SECOND_PLAN)


def _random() -> Experiment:
    """Molecules with the paper's independent masks."""
    _, cells = _grown("links-random", "molecules", "sweep/spans", RANDOM, ("exlm",))
    claims = (
        Claim("With the paper's masks, which share little, ExLM loses bits at equal cost",
              "together_bits", "exlm", "mlm", 1, 0.05, is_primary=True),
    )  # fmt: skip
    about = "molecules with 15% independent masks, where there is little to win (bits)"
    return Experiment("links-random", about, tuple(cells), claims, SECOND_PLAN)


def _tasks() -> Experiment:
    """The models of ``links``, fine-tuned."""
    _, (trunk, *cells) = _grown("links", "molecules", "sweep/spans", {}, ("exlm",))
    tuned = [
        Cell(
            f"{cell.name}-{task}", "molecules", cell.base, cell.settings, seeds=FIVE_SEEDS,
            start=trunk, cost_of=cell.cost_of, downstream=Downstream(task, TuneConfig()),
        )
        for cell in cells if not cell.is_timed
        for task in TASKS
    ]  # fmt: skip
    weights = {
        f"{arm}-{task}": sign / len(TASKS) for arm, sign in (("exlm", 1), ("mlm", -1))
        for task in TASKS
    }  # fmt: skip
    claims = (
        Claim("Fine-tuned, a grown ExLM is better than an MLM of equal cost",
              "downstream", "exlm − mlm, mean over tasks", None, 1, 1.0, True, weights),
    )  # fmt: skip
    about = "the same models fine-tuned on MoleculeNet, scaffold split (ROC-AUC, %)"
    return Experiment("links-tasks", about, tuple(tuned), claims, SECOND_PLAN)


def _bare() -> Experiment:
    """The ladder once more, as the paper has it."""
    cells = [
        Cell(
            f"exlm-{bits}", "slots", "sweep/slots",
            {"objective": "exlm", "model.states_per_mask": 4, "data.grammar": f"ladder-{bits}"},
            seeds=TEN_SEEDS,
        )
        for bits in LADDER
    ]  # fmt: skip
    claims = [
        Claim(
            f"Without our aids ExLM captures dependence: below MLM's floor at {bits} bits of it",
            "bits_per_row", f"exlm-{bits}", "floor_bits_per_row", -1, 0.25 * bits,
        )
        for bits in (2, 4, 8)
    ]  # fmt: skip
    about = "the ladder without clone vectors and fixed chains (bits)"
    return Experiment("bare", about, tuple(cells), tuple(claims), SECOND_PLAN)


LINKS = (_molecules(), _english(), _random(), _tasks(), _bare())
"""In the order in which the queue takes them."""
