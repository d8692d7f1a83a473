"""Repeated MLM at equal competence: what hurts the probe, lost tokens or many masks (§3)?

At equal steps, models that read every token several times are behind (Figure 3). Here every run
ends where its exact excess over the optimum is an equal share of what the visible words tell,
however many steps that takes.
"""

from __future__ import annotations

import numpy as np

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.claims import Claim, Experiment

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
    names = [_name(p, k) for p, k in PAIRS]
    design_C3 = np.array([[1.0, p**k, p] for p, k in PAIRS])
    _, lost_C, ratio_C = np.linalg.pinv(design_C3)
    return dict(zip(names, lost_C.tolist(), strict=True)), dict(
        zip(names, ratio_C.tolist(), strict=True)
    )


def _name(p: float, k: int) -> str:
    return f"p{p:g}-k{k}"


def competence() -> Experiment:
    """The cells, and the slopes they decide."""
    cells = tuple(
        Cell(
            _name(p, k), "toy", "sweep/toy",
            {
                "objective": "repeated-mlm", "masking.mask_ratio": p, "masking.num_copies": k,
                "train.steps": MOST_STEPS, "train.validate_every": STEPS_BETWEEN_LOOKS,
            },
            seeds=tuple(range(1, 11)), watched={"missed_share": ENOUGH},
        )
        for p, k in PAIRS
    )  # fmt: skip
    of_lost, of_ratio = slopes()
    more = {name: of_lost[name] - of_ratio[name] for name in of_lost}
    claims = (
        Claim(
            "At equal competence and mask ratio, lost tokens cost the probe",
            "probe_accuracy", "slope on lost share", None, -1, 0.1, True, of_lost,
        ),
        Claim(
            "They cost more than as many masks beside visible copies",
            "probe_accuracy", "slope on lost share − slope on p", None, -1, 0.1, True, more,
        ),
        Claim(
            "At equal competence and lost share, masks cost the probe",
            "probe_accuracy", "slope on p", None, -1, 0.1, False, of_ratio,
        ),
    )  # fmt: skip
    about = "lost tokens or many masks, every model equally far above the optimum (probe)"
    return Experiment("competence", about, cells, claims)
