"""Does the paper's recipe leave the symmetric start on real text?

A run soon stands at the frequencies of words, like any masked language model. ExLM has a second
place to stay at, where the states of a mask are alike and links win nothing (chapter 9). The law of
that chapter says what leads away: differences between clones that are there from the start, links
that cannot get lost, and batches whose noise does not drown a gain of third order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.claims import Claim, Experiment
from exlm_lab.experiments.records import Group
from exlm_lab.experiments.saddles import LEFT_BY, since

HELPS = {
    "none": {},
    "clones": {"model.clone_embedding_std": 1.0},
    "chains": {"train.chain_warmup": 0.25},
    "both": {"model.clone_embedding_std": 1.0, "train.chain_warmup": 0.25},
}
"""None is the paper's recipe."""
CELLS = {
    (64, 64): ("none", "clones", "chains", "both", "mlm"),
    (64, 512): ("none", "both"),
    (64, 1024): ("none",),
    (128, 64): ("none", "both"),
}
"""By width and batch."""
WATCHED = ("bits_per_mask", "frequency_bits", "dependence_bits", "specialisation_bits")
PAPER_WIDTH, PAPER_INIT = 768, 0.02


def _cell(arm: str, width: int, batch: int) -> Cell:
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
        seeds=tuple(range(1, 6)), watched=dict.fromkeys(WATCHED),
    )  # fmt: skip


def escape() -> Experiment:
    """The cells, and the claims they decide."""
    cells = tuple(_cell(arm, *size) for size, arms in CELLS.items() for arm in arms)
    nearer = {"none-w128-b64": 1.0, "both-w128-b64": -1.0}
    nearer |= {"none-w64-b64": -1.0, "both-w64-b64": 1.0}
    claims = (
        Claim(
            "On real text the paper's recipe stays behind one with both helps",
            "bits_per_mask", "none-w64-b512", "both-w64-b512", 1, 0.3, is_primary=True,
        ),
        Claim(
            "A batch of 1,024 frees it", "bits_per_mask", "none-w64-b1024", "none-w64-b64",
            -1, 0.3, is_primary=True,
        ),
        Claim(
            "Chains alone win bits", "bits_per_mask", "chains-w64-b64", "none-w64-b64", -1, 0.3,
        ),
        Claim(
            "A clone embedding alone wins bits",
            "bits_per_mask", "clones-w64-b64", "none-w64-b64", -1, 0.3,
        ),
        Claim(
            "Width 128 brings it nearer to both helps than width 64",
            "bits_per_mask", "none − both: width 128 − width 64", None, -1, 0.3, weights=nearer,
        ),
        Claim(
            "With both helps links win bits",
            "dependence_bits", "both-w64-b512", None, 1, 0.1,
        ),
        Claim(
            "At batch 1,024 links win bits without help",
            "dependence_bits", "none-w64-b1024", None, 1, 0.1,
        ),
        Claim(
            "With both helps clones say different words",
            "specialisation_bits", "both-w64-b512", "none-w64-b512", 1, 0.05,
        ),
        Claim(
            "The steps are enough: MLM leaves the frequencies of words",
            "bits_per_mask", "mlm-w64-b64", "frequency_bits", -1, 0.3,
        ),
    )  # fmt: skip
    about = "on real text, whether and when states stop to be alike (bits)"
    return Experiment("escape", about, cells, claims, told=escapes)


def escapes(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A table: from which step on each seed of a cell is below the frequencies, and links win.

    Below the frequencies is by 0.1 bits per lost token, and links win from 0.1 bits per row on.
    """
    rows = [("cell", "below the frequencies from", "links win from", "specialisation")]
    for group in groups:
        below, linked = [], []
        for record in group.records:
            points = record.data["curve"]
            below.append(
                since(
                    (p["step"], p["bits_per_mask"] < p["frequency_bits"] - LEFT_BY)
                    for p in points
                )
            )
            linked.append(
                since((p["step"], p.get("dependence_bits", 0.0) >= LEFT_BY) for p in points)
            )
        special = group.summary("specialisation_bits")
        rows.append(
            (
                group.cell,
                *(", ".join(str(s or "never") for s in steps) for steps in (below, linked)),
                special.shown(3) if special else "–",
            )
        )
    return rows
