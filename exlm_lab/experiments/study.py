"""The study: experiments and the claims they are to decide.

``book/plan.md`` explains why each is made as it is. An experiment is a sweep, its cells run with
equal seeds; a claim is a contrast between two of its cells, seed by seed. What was claimed,
measured and deemed large enough stands here before the first number, and is changed only with a
dated line in the plan.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from exlm_lab.experiments.cells import CHAINS, CLONES, CURES, Cell, Claim, Experiment, Input
from exlm_lab.experiments.links import LINKS
from exlm_mini.data.toy_grammars import LADDER

TEN_SEEDS, FIVE_SEEDS = tuple(range(1, 11)), tuple(range(1, 6))
FIRST_PLAN = "the first plan"
_EXLM = {"objective": "exlm", "model.states_per_mask": 4, **CURES}


# ---- how much masks have to share ----

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
    timed = {**_EXLM, "data.grammar": "ladder-2"}
    cells = [Cell("exlm-cost", "slots", "sweep/slots", timed, seeds=(1,), is_timed=True)]
    for bits in LADDER:
        for arm, settings in _ARMS.items():
            cost = ("ladder", "exlm-cost") if arm == "mlm++" else None
            settings = {**settings, "data.grammar": f"ladder-{bits}"}
            cells.append(
                Cell(
                    f"{arm}-{bits}", "slots", "sweep/slots", settings,
                    seeds=TEN_SEEDS, cost_of=cost,
                )
            )  # fmt: skip
    claims = [
        Claim(
            f"ExLM captures dependence: below MLM's floor at {bits} bits of it",
            "bits_per_row", f"exlm-{bits}", "floor_bits_per_row", -1, 0.25 * bits,
            is_primary=bits in (2, 8), id=f"floor-{bits}",
        )
        for bits in (1, 2, 4, 8)
    ]  # fmt: skip
    claims += [
        Claim("Links win bits that states alone do not",
              "bits_per_row", "exlm-4", "uniform-4", -1, 1.0, is_primary=True, id="links"),
        Claim("ExLM wins bits at equal cost",
              "bits_per_row", "exlm-4", "mlm++-4", -1, 1.0, is_primary=True,
              id="cost-ladder"),
        Claim("Links win bits beyond CTC", "bits_per_row", "exlm-4", "ctc-4", -1, 1.0),
        Claim("Where nothing is shared, states cost bits",
              "bits_per_row", "exlm-0", "mlm-0", 1, 0.05),
        Claim("Expanding late loses bits", "bits_per_row", "late-4", "exlm-4", 1, 0.25),
        Claim("Expanding late loses bits where much is shared",
              "bits_per_row", "late-8", "exlm-8", 1, 0.25),
    ]  # fmt: skip
    about = "how much slots depend on each other, in six models (bits)"
    return Experiment("ladder", about, tuple(cells), tuple(claims), FIRST_PLAN)


# ---- where each part must matter ----


def _parts() -> Experiment:
    some_masks = {
        "objective": "exlm", **CHAINS, "data.grammar": "ladder-8", "model.states_per_mask": 4,
        "masking.strategy": "bernoulli", "masking.mask_ratio": 0.3,
    }  # fmt: skip
    phrases = {**CURES, "objective": "exlm", "data.grammar": "shifts"}
    variants: dict[str, dict[str, Any]] = {
        "rope-2d": some_masks,
        "rope-1d": {**some_masks, "model.rope": "1d"},
        "rope-2d-named": {**some_masks, **CLONES},
        "rope-1d-named": {**some_masks, **CLONES, "model.rope": "1d"},
        "dense": phrases,
        "sparse": {**phrases, "model.sparse": True},
        "dense-paper": {**phrases, "model.boundary": "paper"},
        "sparse-paper": {**phrases, "model.boundary": "paper", "model.sparse": True},
    }
    cells = tuple(
        Cell(
            name, "slots", "sweep/slots", settings, seeds=TEN_SEEDS,
            tested_with={"many": {"masking.mask_ratio": 0.9}} if name.startswith("rope") else {},
        )
        for name, settings in variants.items()
    )  # fmt: skip
    claims = (
        Claim("2D positions carry over to more masks than were trained on",
              "bits_per_row@many", "rope-2d", "rope-1d", -1, 0.5, is_primary=True, id="rope-2d"),
        Claim("At the trained ratio 2D positions win bits",
              "bits_per_row", "rope-2d", "rope-1d", -1, 0.25),
        Claim("They carry over even where a learned vector names each clone",
              "bits_per_row@many", "rope-2d-named", "rope-1d-named", -1, 0.5),
        Claim("Edges inside a mask win bits where two states are too few",
              "bits_per_row", "dense", "sparse", -1, 0.2, is_primary=True, id="edges"),
        Claim("They win bits with single boundary states too",
              "bits_per_row", "dense-paper", "sparse-paper", -1, 0.2),
    )  # fmt: skip
    about = "2D positions and edges inside a mask, where theory says they must matter (bits)"
    return Experiment("parts", about, cells, claims, FIRST_PLAN)


# ---- lost tokens or many masks, every model equally good ----

PAIRS = (
    (0.15, 1), (0.387, 1), (0.387, 2), (0.622, 1), (0.622, 2), (0.622, 4),
    (0.789, 1), (0.789, 2), (0.789, 4), (0.789, 8),
)  # fmt: skip
"""Mask ratio p and copies k of the sweep ``repeated-mlm`` where more than a tenth is lost."""
ENOUGH = 0.6
"""``missed_share`` at which training ends."""
MOST_STEPS, STEPS_BETWEEN_LOOKS = 4000, 50


def slopes() -> tuple[dict[str, float], dict[str, float]]:
    """The least-squares plane over lost share and mask ratio, as weights of the cells.

    Returns:
        Weights whose sum over the cells' numbers is the slope along the lost share p^k, at equal
        p; and those of the slope along p, at equal lost share.
    """
    names = [f"p{p:g}-k{k}" for p, k in PAIRS]
    design_C3 = np.array([[1.0, p**k, p] for p, k in PAIRS])
    _, lost_C, ratio_C = np.linalg.pinv(design_C3)
    return dict(zip(names, lost_C.tolist(), strict=True)), dict(
        zip(names, ratio_C.tolist(), strict=True)
    )


def _competence() -> Experiment:
    """The cells, and the slopes they decide."""
    cells = tuple(
        Cell(
            f"p{p:g}-k{k}", "toy", "sweep/toy",
            {
                "objective": "repeated-mlm", "masking.mask_ratio": p, "masking.num_copies": k,
                "train.steps": MOST_STEPS, "train.validate_every": STEPS_BETWEEN_LOOKS,
            },
            seeds=TEN_SEEDS, watched={"missed_share": ENOUGH},
        )
        for p, k in PAIRS
    )  # fmt: skip
    of_lost, of_ratio = slopes()
    more = {name: of_lost[name] - of_ratio[name] for name in of_lost}
    claims = (
        Claim("At equal competence and mask ratio, lost tokens cost the probe",
              "probe_accuracy", "slope on lost share", None, -1, 0.1, True, of_lost),
        Claim("They cost more than as many masks beside visible copies",
              "probe_accuracy", "slope on lost share − slope on p", None, -1, 0.1, True, more,
              id="lost-words"),
        Claim("At equal competence and lost share, masks cost the probe",
              "probe_accuracy", "slope on p", None, -1, 0.1, False, of_ratio),
    )  # fmt: skip
    about = "lost tokens or many masks, every model equally far above the optimum (probe)"
    return Experiment("competence", about, cells, claims, FIRST_PLAN)


# ---- leaving the symmetric start on real text ----

HELPS: dict[str, dict[str, Any]] = {
    "none": {},
    "clones": CLONES,
    "chains": CHAINS,
    "both": CURES,
}
"""None is the paper's recipe."""
CELLS = {
    (64, 64): ("none", "clones", "chains", "both", "mlm"),
    (64, 512): ("none", "both", "mlm"),
    (64, 1024): ("none",),
    (128, 64): ("none", "both"),
}
"""By width and batch."""
WATCHED = ("bits_per_mask", "frequency_bits", "dependence_bits", "specialisation_bits")
PAPER_WIDTH, PAPER_INIT = 768, 0.02


def _escape_cell(arm: str, width: int, batch: int) -> Cell:
    settings = {"objective": "mlm"} if arm == "mlm" else {"objective": "exlm", **HELPS[arm]}
    sizes = {
        "model.width": width, "model.ffn_width": 4 * width, "model.num_heads": width // 16,
        # As large in what a layer adds up as the paper's at its width.
        "model.init_std": round(PAPER_INIT * math.sqrt(PAPER_WIDTH / width), 4),
        "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.states_per_mask": 4,
        "train.steps": 500, "train.warmup_steps": 50, "train.validate_every": 25,
        "train.batch_size": batch, "train.micro_batch_size": min(batch, 256),
        "train.learning_rate": 6e-3 * 64 / width,
    }  # fmt: skip
    return Cell(
        f"{arm}-w{width}-b{batch}", "english", "sweep/english", {**settings, **sizes},
        seeds=FIVE_SEEDS, watched=dict.fromkeys(WATCHED),
    )  # fmt: skip


def _escape() -> Experiment:
    """The cells, and the claims they decide."""
    cells = tuple(_escape_cell(arm, *size) for size, arms in CELLS.items() for arm in arms)
    nearer = {"none-w128-b64": 1.0, "both-w128-b64": -1.0}
    nearer |= {"none-w64-b64": -1.0, "both-w64-b64": 1.0}
    claims = (
        Claim("On real text the paper's recipe stays behind one with both helps",
              "bits_per_mask", "none-w64-b512", "both-w64-b512", 1, 0.3, is_primary=True,
              id="no-help"),
        Claim("A batch of 1,024 gets further than one of 64",
              "bits_per_mask", "none-w64-b1024", "none-w64-b64", -1, 0.3, is_primary=True),
        Claim("Chains alone win bits",
              "bits_per_mask", "chains-w64-b64", "none-w64-b64", -1, 0.3),
        Claim("A clone embedding alone wins bits",
              "bits_per_mask", "clones-w64-b64", "none-w64-b64", -1, 0.3),
        Claim("Width 128 brings it nearer to both helps than width 64",
              "bits_per_mask", "none − both: width 128 − width 64", None, -1, 0.3, weights=nearer),
        Claim("With both helps links win bits",
              "dependence_bits", "both-w64-b512", None, 1, 0.1),
        Claim("At batch 1,024 links win bits without help",
              "dependence_bits", "none-w64-b1024", None, 1, 0.1),
        Claim("With both helps clones say different words",
              "specialisation_bits", "both-w64-b512", "none-w64-b512", 1, 0.05),
        Claim("The steps are enough: MLM leaves the frequencies of words",
              "bits_per_mask", "mlm-w64-b64", "frequency_bits", -1, 0.3),
    )  # fmt: skip
    about = "on real text, whether and when states stop being alike (bits)"
    return Experiment("escape", about, cells, claims, FIRST_PLAN)


# ---- molecules ----

_OF_TABLE_7 = {**_EXLM, "model.states_per_mask": 2}
_MOLECULE_ARMS: dict[str, dict[str, Any]] = {
    "mlm": {},
    "mlm++": {},
    "exlm": _OF_TABLE_7,
    "late": {**_OF_TABLE_7, "model.expand_at": 2},
    "later": {**_OF_TABLE_7, "model.expand_at": 3},
    "uniform": {**_OF_TABLE_7, "model.transition": "uniform"},
}
"""As in the ladder, without ``ctc``; rows are expanded ``late`` after two of the four layers, and
``later`` after three."""


def _molecules() -> Experiment:
    """The cells, and the claims they decide."""
    name: Input = "molecules"
    base = "sweep/smiles"
    cells = [Cell("exlm-cost", name, base, _OF_TABLE_7, seeds=(1,), is_timed=True)]
    cells += [
        Cell(
            arm, name, base, settings, seeds=FIVE_SEEDS,
            cost_of=(name, "exlm-cost") if arm == "mlm++" else None,
        )
        for arm, settings in _MOLECULE_ARMS.items()
    ]  # fmt: skip
    groups = {
        "rings": "both digits of a ring", "brackets": "both ends of a branch",
        "aromatics": "two aromatic atoms of a ring",
    }  # fmt: skip
    claims = [
        Claim(f"ExLM wins bits of {of} at equal cost",
              f"{kind}_together_bits", "exlm", "mlm++", -1, 0.25, is_primary=kind == "rings",
              id=f"{kind}-cost")
        for kind, of in groups.items()
    ]  # fmt: skip
    claims += [
        Claim("It wins more bits where symbols depend on each other than where they do not",
              "rings_gap_bits", "exlm", "mlm++", -1, 0.25),
        Claim("More of the rings it fills in are molecules",
              "rings_together_valid", "exlm", "mlm++", 1, 0.05),
        Claim("ExLM wins bits of both digits of a ring at equal steps",
              "rings_together_bits", "exlm", "mlm", -1, 0.25, id="rings-steps"),
        Claim("Links win bits that states alone do not",
              "rings_together_bits", "exlm", "uniform", -1, 0.25),
        Claim("Expanding late loses bits", "rings_together_bits", "late", "exlm", 1, 0.25),
        Claim("Expanding after three of four layers loses bits",
              "rings_together_bits", "later", "exlm", 1, 0.25),
    ]  # fmt: skip
    claims += [
        Claim(f"ExLM's frozen states tell more of structure at equal {equal}",
              "read_structure", "exlm", arm, 1, 0.01, is_primary=arm == "mlm++",
              id=f"structure-{equal}")
        for arm, equal in (("mlm++", "cost"), ("mlm", "steps"))
    ]  # fmt: skip
    claims += [
        Claim("Its states alone beat an MLM",
              "rings_together_bits", "uniform", "mlm", -1, 0.25, id="states-alone",
              is_planned=False),
    ]  # fmt: skip
    about = "dependent symbols of molecules, and what frozen states tell of structure"
    return Experiment(name, about, tuple(cells), tuple(claims), FIRST_PLAN)


# ---- how late rows may be expanded ----

DEPTHS = (0, 2, 3)
"""Layers below the expansion, of four."""


def _depth() -> Experiment:
    """The cells, and the claims they decide."""
    mlm = {"model.num_layers": 4}
    exlm = {depth: {**mlm, **_EXLM, "model.expand_at": depth} for depth in DEPTHS}
    latest = exlm[DEPTHS[-1]]
    cells = [
        Cell("english-cost", "english", "sweep/english", latest, seeds=(1,), is_timed=True),
        Cell("english-mlm", "english", "sweep/english", mlm),
        Cell(
            "english-mlm++", "english", "sweep/english", mlm, cost_of=("depth", "english-cost")
        ),
    ]
    for depth, settings in exlm.items():
        slots = {**settings, "data.grammar": "ladder-4"}
        cells += [
            Cell(f"english-after-{depth}", "english", "sweep/english", settings),
            Cell(f"slots-after-{depth}", "slots", "sweep/slots", slots),
        ]
    claims = (
        Claim("Expanding after three of four layers loses bits where 4 are shared",
              "bits_per_row", "slots-after-3", "slots-after-0", 1, 0.25),
        Claim("It loses bits on English",
              "bits_per_mask", "english-after-3", "english-after-0", 1, 0.1),
        Claim("On English it is behind MLM at equal steps",
              "bits_per_mask", "english-after-3", "english-mlm", 1, 0.1),
        Claim("On English it is behind MLM at equal cost",
              "bits_per_mask", "english-after-3", "english-mlm++", 1, 0.1),
    )  # fmt: skip
    about = "after how many of four layers rows may be expanded (bits)"
    return Experiment("depth", about, tuple(cells), claims, FIRST_PLAN)


STUDY = (_ladder(), _parts(), _competence(), _escape(), _molecules(), _depth(), *LINKS)
"""In the order in which the queue takes them."""
