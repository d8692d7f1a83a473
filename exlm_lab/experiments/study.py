"""The study: its experiments, and the claims that they decide.

``book/plan.md`` explains the design of each. An experiment is a sweep whose cells are run with
equal seeds; a claim is a contrast between two of its cells, seed by seed. The claims, their metrics
and the smallest effects that matter were written here before the first number was known, and are
changed only with a dated line in the plan.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from exlm_lab.experiments.cells import (
    CHAINS,
    CLONES,
    CURES,
    FIVE_SEEDS,
    LADDER_AXIS,
    MLM,
    TEN_SEEDS,
    TIMED,
    Cell,
    Claim,
    Experiment,
    exlm,
    grid,
)
from exlm_lab.experiments.links import LINKS

FIRST_PLAN = "the first plan"
_SLOTS = {"input": "slots", "base": "sweep/slots"}
_ENGLISH = {"input": "english", "base": "sweep/english"}
_MOLECULES = {"input": "molecules", "base": "sweep/smiles"}

# ---- how much masks have to share ----

_ARMS: dict[str, dict[str, Any]] = {
    "mlm": MLM,
    "mlm++": {**MLM, "cost_of": ("ladder", "exlm-cost")},
    "exlm": exlm(),
    "late": {**exlm(), "model.expand_at": 1},
    "uniform": {**exlm(), "model.transition": "uniform"},
    "ctc": {**exlm(), "model.transition": "ctc"},
}
"""MLM; MLM at the measured cost of ExLM; ExLM; ExLM expanded after the first of two layers; and the
two variants that have states but no links."""
_LADDER = Experiment(
    "ladder",
    "how much slots depend on each other, in six models (bits)",
    (
        *grid({"exlm-cost": {**exlm(), "data.grammar": "ladder-2", **TIMED}}, **_SLOTS),
        *(
            cell
            for bits, language in LADDER_AXIS.items()
            for cell in grid(_ARMS, {bits: language}, seeds=TEN_SEEDS, **_SLOTS)
        ),
    ),
    (
        *(
            Claim(f"ExLM captures dependence: below MLM's floor at {bits} bits of it",
                  "bits_per_row", f"exlm-{bits}", "floor_bits_per_row", -1, 0.25 * bits,
                  is_primary=bits in (2, 8), id=f"floor-{bits}")
            for bits in (1, 2, 4, 8)
        ),
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
    ),
    FIRST_PLAN,
)  # fmt: skip

# ---- where each part must matter ----

_SOME_MASKS = {
    "objective": "exlm", **CHAINS, "data.grammar": "ladder-8", "model.states_per_mask": 4,
    "masking.strategy": "bernoulli", "masking.mask_ratio": 0.3,
    "tested_with": {"many": {"masking.mask_ratio": 0.9}},
}  # fmt: skip
_PHRASES = {**CURES, "objective": "exlm", "data.grammar": "shifts"}
_PARTS = Experiment(
    "parts",
    "2D positions and edges inside a mask, where theory says they must matter (bits)",
    grid(
        {
            "rope-2d": _SOME_MASKS,
            "rope-1d": {**_SOME_MASKS, "model.rope": "1d"},
            "rope-2d-named": {**_SOME_MASKS, **CLONES},
            "rope-1d-named": {**_SOME_MASKS, **CLONES, "model.rope": "1d"},
            "dense": _PHRASES,
            "sparse": {**_PHRASES, "model.sparse": True},
            "dense-paper": {**_PHRASES, "model.boundary": "paper"},
            "sparse-paper": {**_PHRASES, "model.boundary": "paper", "model.sparse": True},
        },
        seeds=TEN_SEEDS, **_SLOTS,
    ),
    (
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
    ),
    FIRST_PLAN,
)  # fmt: skip

# ---- lost tokens or many masks, every model equally good ----

PAIRS = (
    (0.15, 1), (0.387, 1), (0.387, 2), (0.622, 1), (0.622, 2), (0.622, 4),
    (0.789, 1), (0.789, 2), (0.789, 4), (0.789, 8),
)  # fmt: skip
"""Mask ratio p and copies k of cells of ``repeated-mlm`` that lose over a tenth of the tokens."""
ENOUGH = 0.6
"""``missed_share`` at which training ends."""
_COPIES = {
    f"p{p:g}-k{k}": {
        "objective": "repeated-mlm", "masking.mask_ratio": p, "masking.num_copies": k,
        "train.steps": 4000, "train.validate_every": 50,
    }
    for p, k in PAIRS
}  # fmt: skip


def slopes() -> tuple[dict[str, float], dict[str, float]]:
    """Weights of the cells for the slopes of a least-squares plane over lost share and mask ratio.

    Returns:
        Two sets of weights by cell. The sum of the cells' numbers, weighted by the first, is the
        slope along the lost share p^k at equal p; by the second, that along p at equal lost share.
    """
    design_C3 = np.array([[1.0, p**k, p] for p, k in PAIRS])
    _, lost_C, ratio_C = np.linalg.pinv(design_C3)
    of_lost, of_ratio = (
        dict(zip(_COPIES, weights_C.tolist(), strict=True)) for weights_C in (lost_C, ratio_C)
    )
    return of_lost, of_ratio


_OF_LOST, _OF_RATIO = slopes()
_MORE = {name: _OF_LOST[name] - _OF_RATIO[name] for name in _OF_LOST}
_COMPETENCE = Experiment(
    "competence",
    "lost tokens or many masks, every model equally far above the optimum (probe)",
    grid(
        _COPIES, input="toy", base="sweep/toy", seeds=TEN_SEEDS, watched={"missed_share": ENOUGH}
    ),
    (
        Claim("At equal competence and mask ratio, lost tokens cost the probe",
              "probe_accuracy", "slope on lost share", None, -1, 0.1, True, _OF_LOST),
        Claim("They cost more than as many masks beside visible copies",
              "probe_accuracy", "slope on lost share − slope on p", None, -1, 0.1, True, _MORE,
              id="lost-words"),
        Claim("At equal competence and lost share, masks cost the probe",
              "probe_accuracy", "slope on p", None, -1, 0.1, False, _OF_RATIO),
    ),
    FIRST_PLAN,
)  # fmt: skip

# ---- leaving the symmetric start on real text ----

HELPS: dict[str, dict[str, Any]] = {
    "mlm": MLM,
    "none": {"objective": "exlm"},
    "clones": {"objective": "exlm", **CLONES},
    "chains": {"objective": "exlm", **CHAINS},
    "both": {"objective": "exlm", **CURES},
}
"""MLM, and ExLM by its start-up aids; ``none`` is the paper's recipe."""
CELLS = {
    (64, 64): ("none", "clones", "chains", "both", "mlm"),
    (64, 512): ("none", "both", "mlm"),
    (64, 1024): ("none",),
    (128, 64): ("none", "both"),
}
"""Which of ``HELPS`` are run at each width and batch size."""
WATCHED = ("bits_per_mask", "frequency_bits", "dependence_bits", "specialisation_bits")
PAPER_WIDTH, PAPER_INIT = 768, 0.02


def _sizes(width: int, batch: int) -> dict[str, Any]:
    return {
        "model.width": width, "model.ffn_width": 4 * width, "model.num_heads": width // 16,
        # Scaled so that the sums in a layer are as large as at the paper's width.
        "model.init_std": round(PAPER_INIT * math.sqrt(PAPER_WIDTH / width), 4),
        "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.states_per_mask": 4,
        "train.steps": 500, "train.warmup_steps": 50, "train.validate_every": 25,
        "train.batch_size": batch, "train.micro_batch_size": min(batch, 256),
        "train.learning_rate": 6e-3 * 64 / width,
    }  # fmt: skip


_NEARER = {
    "none-w128-b64": 1.0, "both-w128-b64": -1.0, "none-w64-b64": -1.0, "both-w64-b64": 1.0,
}  # fmt: skip
_ESCAPE = Experiment(
    "escape",
    "on real text, whether and when states stop being alike (bits)",
    tuple(
        cell
        for (width, batch), arms in CELLS.items()
        for cell in grid(
            {arm: HELPS[arm] for arm in arms}, {f"w{width}-b{batch}": _sizes(width, batch)},
            seeds=FIVE_SEEDS, watched=dict.fromkeys(WATCHED), **_ENGLISH,
        )
    ),
    (
        Claim("On real text the paper's recipe stays behind one with both aids",
              "bits_per_mask", "none-w64-b512", "both-w64-b512", 1, 0.3, is_primary=True,
              id="no-help"),
        Claim("A batch of 1,024 gets further than one of 64",
              "bits_per_mask", "none-w64-b1024", "none-w64-b64", -1, 0.3, is_primary=True),
        Claim("Chains alone win bits",
              "bits_per_mask", "chains-w64-b64", "none-w64-b64", -1, 0.3),
        Claim("A clone embedding alone wins bits",
              "bits_per_mask", "clones-w64-b64", "none-w64-b64", -1, 0.3),
        Claim("Width 128 brings it nearer to both aids than width 64",
              "bits_per_mask", "none − both: width 128 − width 64", None, -1, 0.3,
              weights=_NEARER),
        Claim("With both aids links win bits",
              "dependence_bits", "both-w64-b512", None, 1, 0.1),
        Claim("At batch 1,024 links win bits without help",
              "dependence_bits", "none-w64-b1024", None, 1, 0.1),
        Claim("With both aids clones say different words",
              "specialisation_bits", "both-w64-b512", "none-w64-b512", 1, 0.05),
        Claim("The steps are enough: MLM leaves the frequencies of words",
              "bits_per_mask", "mlm-w64-b64", "frequency_bits", -1, 0.3),
    ),
    FIRST_PLAN,
)  # fmt: skip

# ---- molecules ----

_OF_TABLE_7 = exlm(2)
_MOLECULE_ARMS: dict[str, dict[str, Any]] = {
    "exlm-cost": {**_OF_TABLE_7, **TIMED},
    "mlm": {},
    "mlm++": {"cost_of": ("molecules", "exlm-cost")},
    "exlm": _OF_TABLE_7,
    "late": {**_OF_TABLE_7, "model.expand_at": 2},
    "later": {**_OF_TABLE_7, "model.expand_at": 3},
    "uniform": {**_OF_TABLE_7, "model.transition": "uniform"},
}
"""Arms as in the ladder, without ``ctc``; ``late`` expands rows after two of the four layers, and
``later`` after three."""
_GROUPS = {
    "rings": "both digits of a ring", "brackets": "both ends of a branch",
    "aromatics": "two aromatic atoms of a ring",
}  # fmt: skip
_OF_MOLECULES = Experiment(
    "molecules",
    "dependent symbols of molecules, and what frozen states tell of structure",
    grid(_MOLECULE_ARMS, seeds=FIVE_SEEDS, **_MOLECULES),
    (
        *(
            Claim(f"ExLM wins bits of {of} at equal cost",
                  f"{kind}_together_bits", "exlm", "mlm++", -1, 0.25, kind == "rings",
                  id=f"{kind}-cost")
            for kind, of in _GROUPS.items()
        ),
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
        *(
            Claim(f"ExLM's frozen states tell more of structure at equal {equal}",
                  "read_structure", "exlm", arm, 1, 0.01, is_primary=arm == "mlm++",
                  id=f"structure-{equal}")
            for arm, equal in (("mlm++", "cost"), ("mlm", "steps"))
        ),
        Claim("Its states alone beat an MLM",
              "rings_together_bits", "uniform", "mlm", -1, 0.25, id="states-alone",
              is_planned=False),
    ),
    FIRST_PLAN,
)  # fmt: skip

# ---- how late rows may be expanded ----

_FOUR_LAYERS = {"model.num_layers": 4}
_LATE = {d: {**_FOUR_LAYERS, **exlm(), "model.expand_at": d} for d in (0, 2, 3)}
"""Settings of ExLM, by the number of layers below the expansion."""


def _depth_cells() -> tuple[Cell, ...]:
    arms: dict[str, dict[str, Any]] = {
        "english-cost": {**_LATE[3], **TIMED},
        "english-mlm": _FOUR_LAYERS,
        "english-mlm++": {**_FOUR_LAYERS, "cost_of": ("depth", "english-cost")},
    }
    for depth, late in _LATE.items():
        arms[f"english-after-{depth}"] = late
        arms[f"slots-after-{depth}"] = {**late, "data.grammar": "ladder-4", **_SLOTS}
    return grid(arms, **_ENGLISH)


_DEPTH = Experiment(
    "depth",
    "after how many of four layers rows may be expanded (bits)",
    _depth_cells(),
    (
        Claim("Expanding after three of four layers loses bits where 4 are shared",
              "bits_per_row", "slots-after-3", "slots-after-0", 1, 0.25),
        Claim("It loses bits on English",
              "bits_per_mask", "english-after-3", "english-after-0", 1, 0.1),
        Claim("On English it is behind MLM at equal steps",
              "bits_per_mask", "english-after-3", "english-mlm", 1, 0.1),
        Claim("On English it is behind MLM at equal cost",
              "bits_per_mask", "english-after-3", "english-mlm++", 1, 0.1),
    ),
    FIRST_PLAN,
)  # fmt: skip

STUDY = (_LADDER, _PARTS, _COMPETENCE, _ESCAPE, _OF_MOLECULES, _DEPTH, *LINKS)
"""All experiments of the study, in the order in which the queue takes them."""
