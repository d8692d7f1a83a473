"""Names of metrics that tables and claims share, see ``measures.measure``."""

from __future__ import annotations

DOWNSTREAM = "downstream"
"""Score of a downstream task, already in percent."""
PROBE = "probe_accuracy"
SHARES = {
    PROBE, "lost_share", "accuracy", "missed_share", "validation_mask_accuracy",
    "read_structure",  # see ``frozen``
}  # fmt: skip


def is_share(metric: str) -> bool:
    """Whether a metric is a share between 0 and 1, as are those of filled-in molecules (see
    ``measures.measure_together``)."""
    return metric in SHARES or metric.startswith(("readable_", "exact_"))


def factor_and_digits(metric: str) -> tuple[int, int]:
    """The factor and the number of decimals to show a metric with: shares and scores of a task are
    shown in percent, with one decimal."""
    if is_share(metric):
        return 100, 1
    return 1, 1 if metric == DOWNSTREAM else 2
