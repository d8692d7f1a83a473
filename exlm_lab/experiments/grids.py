"""The sweeps: the paper's experiments at small scale and ``saddle``, one of our own.

Every cell takes minutes on one core. Unlike the study, the sweeps were not planned in advance.
"""

from __future__ import annotations

from typing import Any

from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.experiments import cells
from exlm_lab.experiments.cells import (
    CURES,
    MLM,
    TEN_SEEDS,
    Cell,
    Claim,
    Downstream,
    Experiment,
    Input,
    exlm,
)
from exlm_lab.experiments.correlations import (
    Grid,
    drop_at_low_share,
    effect_of_mask_ratio,
    effect_of_share,
)
from exlm_lab.experiments.metric_names import DOWNSTREAM, PROBE

_INPUTS: dict[Input, dict[str, Any]] = {
    "toy": {
        "base": "sweep/toy",
        # Chosen on two models of repeated-mlm (p = 15% and 62.2%, seed 1): without clipping and a
        # long warm-up, most models stayed at chance. Many still do.
        "downstream": Downstream(
            "toy-inference",
            TuneConfig(
                epochs=3, batch_size=8, learning_rate=2e-3, clip_norm=1.0, warmup_share=0.2,
                dropout=0.0, attention_dropout=0.0, weight_decay=0.01,
            ),
            2000, 300, 1500,
        ),
    },
    "english": {"base": "sweep/english", "seeds": (1, 2)},
    # Half the study's layers, less width and a third of its steps: some cells read eight copies.
    "molecules": {
        "base": "sweep/smiles",
        "model.num_layers": 2, "model.width": 64, "model.ffn_width": 256,
        "model.max_positions": 1024, "train.steps": 1000, "train.warmup_steps": 100,
    },
    # Two slots, four moods with three words each, and one state per mood.
    "slots": {
        "base": "sweep/slots", "data.grammar": "quartets", "model.states_per_mask": 4,
    },
}  # fmt: skip
"""Recipe, task, and settings that differ from the recipe's, for each input."""


def grid(kind: Input, *axes: dict[str, dict[str, Any]]) -> tuple[Cell, ...]:
    """Cells that train on this input; see ``cells.grid``."""
    return cells.grid({kind: _INPUTS[kind]}, *axes, input=kind)


# ---- Repeated MLM ----

REPEATED = {
    0.0225: (1,),
    0.15: (1, 2),
    0.387: (1, 2, 4),
    0.622: (1, 2, 4, 8),
    0.789: (1, 2, 4, 8),
}
"""Numbers of copies k for each mask ratio p: the 14 cells of Figures 3, 4 and 5."""
REPEATED_ON_TEXT = ((0.15, 1), (0.387, 1), (0.387, 2), (0.789, 1))
"""Two cells with equal lost shares at different mask ratios, and two whose share is too high."""
_GRID = tuple((p, k) for p, copies in REPEATED.items() for k in copies)
_PLACES: dict[Input, tuple[tuple[float, int], ...]] = {
    "toy": _GRID, "english": REPEATED_ON_TEXT, "molecules": _GRID,
}  # fmt: skip


def _repeated(p: float, k: int) -> dict[str, Any]:
    return {
        "objective": "repeated-mlm", "masking.mask_ratio": p, "masking.num_copies": k,
        "paper": ("Figure 3", f"p={100 * p:.3g}%, k={k}"),
    }  # fmt: skip


# ---- parts of ExLM ----

_VARIANTS: dict[str, dict[str, Any]] = {
    "exlm": {**exlm(), "paper": ("Table 2", "ExLM")},
    "rope-1d": {**exlm(), "model.rope": "1d", "paper": ("Table 2", "ExLM w/o 2D RoPE")},
    "ctc": {
        **exlm(), "model.transition": "ctc", "paper": ("Table 2", "ExLM w/o Transitions"),
    },
    "uniform": {**exlm(), "model.transition": "uniform"},
    "paper-transition": {**exlm(), "model.transition": "paper"},
    "paper-boundary": {**exlm(), "model.boundary": "paper"},
    "sparse": {
        **exlm(), "model.sparse": True, "paper": ("Table 13", "ExLM w/ Sparse DAG"),
    },
}  # fmt: skip
_VANILLA = {"mlm": {**MLM, "paper": ("Table 2", "Vanilla MLM")}}


def _paid(kind: Input) -> dict[str, dict[str, Any]]:
    """MLM, and MLM trained at the same cost as ExLM."""
    paper = ("Table 2", "Vanilla MLM++")
    return _VANILLA | {"mlm++": {**MLM, "paper": paper, "cost_of": ("cost", f"{kind}-k4")}}


_ON_TEXT = {
    "exlm": _VARIANTS["exlm"],
    "late": {**exlm(), "model.expand_at": 1},  # of two layers
    "ctc": _VARIANTS["ctc"],
}
_THREE_SEEDS = {"seeds": (1, 2, 3)}
_ABLATIONS = (
    *grid("toy", _VARIANTS | _paid("toy")),
    *grid("slots", _VARIANTS | _VANILLA),  # no mlm++: an MLM never gets below its floor
    *grid(
        "english", {n: {**v, **_THREE_SEEDS} for n, v in (_ON_TEXT | _paid("english")).items()}
    ),
)

# ---- states, mask ratio, cost ----


def _of_table_4(p: float, ks: tuple[int, ...], **other: Any) -> dict[str, dict[str, Any]]:
    """Entries for MLM, and for ExLM with each number of states in ``ks``, at a mask ratio p."""
    models = {"mlm": ("Vanilla MLM", MLM)} | {f"k{k}": (f"ExLM k={k}", exlm(k)) for k in ks}
    return {
        f"p{p:g}-{name}": {
            **settings, "masking.mask_ratio": p,
            "paper": ("Table 4", f"{100 * p:g}%, {row}"), **other,
        }
        for name, (row, settings) in models.items()
    }  # fmt: skip


_ONLY_TIMED = {"is_timed": True, "downstream": None}
_COST = (
    *grid("toy", {f"k{k}": {**exlm(k), **_ONLY_TIMED} for k in (2, 4, 8)}),
    *grid(
        "english",
        {
            "k2": {**exlm(2), **_ONLY_TIMED},
            "k4": {**exlm(), **_ONLY_TIMED, "paper": ("Table 12", "ExLM")},
            "k8": {**exlm(8), **_ONLY_TIMED},
            "k4-n32": {**exlm(), **_ONLY_TIMED, "data.block_length": 32},
            "k4-n128": {**exlm(), **_ONLY_TIMED, "data.block_length": 128},
        },
    ),
)

# ---- the symmetric start ----

_CURES: dict[str, dict[str, Any]] = {
    "none": {},
    "clone-embedding": {"model.clone_embedding_std": 1.0},
    "chain-warmup": {"train.chain_warmup": 0.25},
    "both": CURES,
}
_STARTS = {
    **_CURES,
    "larger-init": {"model.init_std": 0.3},
    "batch-512": {"train.batch_size": 512},
}
"""Ways to leave the symmetric start. The last two, tried on the smallest language only, change
settings that the paper has, too."""
CURED_AT = 0.387
"""Mask ratio of ``town`` in ``saddle``; at the recipe's 15%, masks share only 0.02 of 3.8 bits."""
_UNCURED = {"objective": "exlm", "model.states_per_mask": 4}
_TINY = {"input": "toy", "base": "sweep/slots"}
_TOWN = {**_UNCURED, "masking.mask_ratio": CURED_AT, "seeds": TEN_SEEDS}
_SADDLE = (
    *cells.grid(
        {"toy-pairs": {"data.grammar": "pairs", "model.states_per_mask": 2}}, _STARTS, **_TINY
    ),
    *cells.grid(
        {"toy-fours": {"data.grammar": "fours", "model.states_per_mask": 4}}, _CURES, **_TINY
    ),
    *grid("toy", {"town": _TOWN}, _CURES),
    *grid("english", {name: {**_UNCURED, **cure} for name, cure in _CURES.items()}),
)

# ---- the sweeps, and the claims of the paper that they test ----


def _share_does_more(grid: Grid) -> float:
    """How much more a grid changes with the share of lost tokens than with the mask ratio."""
    return abs(effect_of_share(grid)) - abs(effect_of_mask_ratio(grid))


_FOUR_STATES = {
    f"toy-p{p}-k{k}": weight
    for p in ("0.15", "0.387")
    for k, weight in ((2, -0.25), (4, 0.5), (8, -0.25))
}
_CHEAPER_MASKS = {
    "toy-p0.15-mlm": 1.0, "toy-p0.387-mlm": -1.0, "toy-p0.15-k4": -1.0, "toy-p0.387-k4": 1.0,
}  # fmt: skip

SWEEPS = (
    Experiment(
        "repeated-mlm",
        "mask ratio and copies (§3; Figures 3, 4, 5, 8, 9)",
        tuple(
            cell
            for kind, places in _PLACES.items()
            for cell in grid(kind, {f"p{p:g}-k{k}": _repeated(p, k) for p, k in places})
        ),
        (
            Claim("Uncertainty rises with the lost words",
                  "entropy_bits", "", None, 1, 0.05, statistic=_share_does_more,
                  id="uncertainty"),
            Claim("Too few lost words hurt as well",
                  DOWNSTREAM, "", None, -1, 1.0, statistic=drop_at_low_share,
                  id="too-few-lost"),
            Claim("More copies are easier to train",
                  "validation_mask_accuracy", "", None, -1, 0.02,
                  statistic=lambda grid: effect_of_share(grid, smallest=0.0),
                  id="more-copies"),
        ),
    ),
    Experiment(
        "ablations",
        "parts of ExLM, MLM, MLM at equal cost (Tables 2, 13)",
        _ABLATIONS,
        (
            Claim("ExLM wins at equal cost where they hardly do",
                  "excess_bits", "toy-exlm", "toy-mlm++", -1, 0.02, id="cost-town"),
            Claim("ExLM wins at equal cost on English",
                  "bits_per_mask", "english-exlm", "english-mlm++", -1, 0.05, id="cost-english"),
            Claim("Fine-tuned, ExLM scores higher than MLM",
                  DOWNSTREAM, "toy-exlm", "toy-mlm", 1, 1.0, id="fine-tuned"),
        ),
    ),
    Experiment("saddle", "what it takes to leave the symmetric start (ours)", _SADDLE),
    Experiment("cost", "a step of ExLM over one of MLM, timed (Table 12)", _COST),
    Experiment(
        "k-and-p",
        "states and mask ratio (Table 4, Figure 12)",
        (
            *grid("toy", _of_table_4(0.15, (2, 4, 8), seeds=TEN_SEEDS)),
            *grid("toy", _of_table_4(0.387, (2, 4, 8), seeds=TEN_SEEDS)),
            *grid("english", _of_table_4(0.15, (2, 4))),
        ),
        (
            Claim("Four states are better than two or eight",
                  PROBE, "four states", None, 1, 0.01, weights=_FOUR_STATES, id="four-states"),
            Claim("More masks cost ExLM less than MLM",
                  DOWNSTREAM, "masks", None, 1, 1.0, weights=_CHEAPER_MASKS, id="more-masks"),
            Claim("ExLM is surer of its predictions",
                  "entropy_bits", "toy-p0.15-k4", "toy-p0.15-mlm", -1, 0.02, id="surer"),
        ),
    ),
)  # fmt: skip
"""All sweeps, in the order in which they are worth running."""
