"""The study's experiments on links: which model gains where tokens of real data are dependent.

``book/plan.md`` has the design. For each seed one MLM is trained, and every arm continues from it,
for as many steps as cost the same: as an MLM, or as an ExLM, whose masks split into k states. Parts
of that ExLM are replaced one by one (``PARTS``), and every variant is trained from the start, too.
"""

from __future__ import annotations

from typing import Any

from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.experiments.cells import (
    FIVE_SEEDS,
    LADDER_AXIS,
    TEN_SEEDS,
    TIMED,
    Cell,
    Claim,
    Downstream,
    Experiment,
    grid,
)

SECOND_PLAN = "the plan of links"
BRANCH_STEPS = 8_000
"""Steps by which an MLM continues; other arms get as many as cost the same."""
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
"""ExLM with links within spans, with fixed chains, without links, and with E as published."""
TASKS = ("bbbp", "bace", "clintox")
RANDOM: dict[str, Any] = {"masking.strategy": "fixed_count", "masking.mask_ratio": 0.15}
"""Masks of single tokens, as in the paper's runs on text."""
_SPANS = {"input": "molecules", "base": "sweep/spans", "seeds": FIVE_SEEDS}
_SPANS_ENGLISH = {"input": "english", "base": "sweep/spans-english", "seeds": FIVE_SEEDS}


def _grown(
    name: str, arms: tuple[str, ...], masks: dict[str, Any], **common: Any
) -> tuple[Cell, ...]:
    """Cells of an MLM, the trunk, and of arms in ``PARTS`` that continue from it at equal cost, MLM
    first. Cells ``…-cost`` of the experiment ``name`` time a step of each arm."""
    (trunk,) = grid({"trunk": {**masks, "with_prize": True}}, **common)
    after = {**masks, **BRANCH}
    grown = {"start": trunk, "with_prize": True}
    cells = {"mlm": {**after, **grown}}
    for arm in arms:
        cells[f"{arm}-cost"] = {**after, **PARTS[arm], **TIMED}
        cells[arm] = {**after, **PARTS[arm], **grown, "cost_of": (name, f"{arm}-cost")}
    return trunk, *grid(cells, **common)


_FROM_THE_START = {
    f"{arm}-scratch": {
        **settings, "train.steps": TRUNK_STEPS + BRANCH_STEPS,
        "cost_of": ("links", f"{arm}-cost"), "with_prize": True,
    }
    for arm, settings in PARTS.items()
}  # fmt: skip
_BITS = "together_bits"
_LINKS = Experiment(
    "links",
    "molecules in spans: which part of a grown ExLM wins, at equal cost (bits)",
    _grown("links", tuple(PARTS), {}, **_SPANS) + grid(_FROM_THE_START, **_SPANS),
    (
        Claim("Grown, ExLM wins bits of molecules at equal cost",
              _BITS, "exlm", "mlm", -1, 0.3, is_primary=True, id="grown-cost"),
        Claim("In one pass it fills in more molecules that can be read",
              "readable_at_once_best_of_16", "exlm", "mlm", 1, 0.02, is_primary=True,
              id="grown-readable"),
        Claim("Links win bits that states alone do not",
              _BITS, "exlm", "uniform", -1, 0.3, is_primary=True),
        Claim("States without links lose bits against an MLM of their cost",
              _BITS, "uniform", "mlm", 1, 0.1, is_primary=True),
        Claim("Learned links win bits beyond fixed chains", _BITS, "exlm", "chains", -1, 0.1),
        Claim("E as published loses bits against links within spans",
              _BITS, "gated", "exlm", 1, 0.3, is_primary=True),
        Claim("Trained from the start, ExLM loses bits against one that is grown",
              _BITS, "exlm-scratch", "exlm", 1, 0.3, is_primary=True, id="growing"),
        Claim("So do fixed chains: they lose bits", _BITS, "chains-scratch", "chains", 1, 0.3),
        Claim("So does E as published: it loses bits", _BITS, "gated-scratch", "gated", 1, 0.3),
        Claim("So do states without links: they lose bits",
              _BITS, "uniform-scratch", "uniform", 1, 0.3),
        Claim("Sampled in one pass, more of its molecules can be read",
              "readable_at_once_sampled", "exlm", "mlm", 1, 0.02),
    ),
    SECOND_PLAN,
)  # fmt: skip
_LINKS_ENGLISH = Experiment(
    "links-english",
    "English in spans: a grown ExLM and MLM at equal cost (bits)",
    _grown("links-english", ("exlm",), {}, **_SPANS_ENGLISH),
    (
        Claim("Grown, ExLM wins bits of English at equal cost",
              _BITS, "exlm", "mlm", -1, 0.3, is_primary=True, id="grown-english"),
    ),
    SECOND_PLAN,
)  # fmt: skip
_LINKS_RANDOM = Experiment(
    "links-random",
    "molecules with 15% independent masks, where there is little to win (bits)",
    _grown("links-random", ("exlm",), RANDOM, **_SPANS),
    (
        Claim("With the paper's masks, which share little, ExLM loses bits at equal cost",
              _BITS, "exlm", "mlm", 1, 0.05, is_primary=True),
    ),
    SECOND_PLAN,
)  # fmt: skip
_MODELS = {
    arm: {
        **BRANCH,
        **settings,
        "start": _LINKS.cell("trunk"),
        "cost_of": _LINKS.cell(arm).cost_of,
    }
    for arm, settings in (("mlm", {}), ("exlm", EXLM))
}
_WEIGHTS = {
    f"{arm}-{task}": sign / len(TASKS)
    for arm, sign in (("exlm", 1), ("mlm", -1))
    for task in TASKS
}
_LINKS_TASKS = Experiment(
    "links-tasks",
    "models trained as in links, fine-tuned on MoleculeNet, scaffold split (ROC-AUC, %)",
    grid(
        _MODELS, {task: {"downstream": Downstream(task, TuneConfig())} for task in TASKS},
        **_SPANS,
    ),
    (
        Claim("Fine-tuned, a grown ExLM is better than an MLM of equal cost",
              "downstream", "exlm − mlm, mean over tasks", None, 1, 1.0, True, _WEIGHTS,
              id="grown-tuned"),
    ),
    SECOND_PLAN,
)  # fmt: skip
_BARE = Experiment(
    "bare",
    "the ladder without clone vectors and fixed chains (bits)",
    grid(
        {"exlm": {"objective": "exlm", "model.states_per_mask": 4}},
        LADDER_AXIS,
        input="slots", base="sweep/slots", seeds=TEN_SEEDS,
    ),
    tuple(
        Claim(f"Without our aids ExLM captures dependence: below MLM's floor at {bits} bits of it",
              "bits_per_row", f"exlm-{bits}", "floor_bits_per_row", -1, 0.25 * bits)
        for bits in (2, 4, 8)
    ),
    SECOND_PLAN,
)  # fmt: skip
LINKS = (_LINKS, _LINKS_ENGLISH, _LINKS_RANDOM, _LINKS_TASKS, _BARE)
"""The experiments on links, in the order in which the queue takes them."""
