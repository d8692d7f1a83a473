"""Names of metrics that tables and claims share, see ``measures.measure``."""

from __future__ import annotations

DOWNSTREAM = "downstream"
PROBE = "probe_accuracy"
WAYS = (
    "at_once", "at_once_best_of_16", "in_two_passes", "in_turn", "at_once_sampled",
    "in_turn_sampled",
)  # fmt: skip
"""In which molecules are filled in; see ``reading.filling``."""
SHARES = {
    PROBE, "lost_share", "accuracy", "missed_share", "validation_mask_accuracy",
    "read_structure",  # of ``frozen``
    *(f"{what}_{way}" for what in ("readable", "exact") for way in WAYS),
}  # fmt: skip
"""Shown in percent."""
