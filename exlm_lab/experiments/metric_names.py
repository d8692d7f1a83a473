"""Names of metrics that tables and claims share, see ``measures.measure``."""

from __future__ import annotations

DOWNSTREAM = "downstream"
"""In percent already."""
PROBE = "probe_accuracy"
SHARES = {
    PROBE, "lost_share", "accuracy", "missed_share", "validation_mask_accuracy",
    "read_structure",  # of ``frozen``
}  # fmt: skip


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1; so do those of filled-in molecules, see
    ``measures.measure_together``."""
    return metric in SHARES or metric.startswith(("readable_", "exact_"))


def factor_and_digits(metric: str) -> tuple[int, int]:
    """By what a metric is multiplied before it is shown, and with how many decimals: shares, and
    scores of a task, in percent with one."""
    if is_share(metric):
        return 100, 1
    return 1, 1 if metric == DOWNSTREAM else 2
