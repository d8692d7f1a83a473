"""When a run leaves the symmetric start, where all states of a mask are alike.

While they are, ExLM predicts each mask by itself and stands at MLM's floor, the sum of the
marginal entropies. On the toy language the floor is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from exlm_lab.experiments.records import Record

LEFT_BY = 0.1
"""Bits per row below the floor that count as having left it."""
LEFT_SHARE = 0.1
"""The same as a share of the total correlation; the smaller of the two counts."""


class Leaving(NamedTuple):
    """Whether and when a run left the floor for good."""

    step: int | None
    """First validation after which the run stays below; none if it ended at the floor."""
    floor_bits: float
    """Per row: the sum of the marginal entropies."""
    joint_bits: float
    """Per row: the joint entropy."""


def leaving(record: Record) -> Leaving | None:
    """When a run left the floor; none where the floor is not known or nothing was validated."""
    floor = record.value("floor_bits_per_row")
    joint = record.value("joint_bits_per_row")
    points = [
        (point["step"], point["validation_bits_per_row"])
        for point in record.data["curve"]
        if point.get("validation_bits_per_row") is not None
    ]
    if floor is None or joint is None or not points:
        return None
    below = floor - min(LEFT_BY, LEFT_SHARE * (floor - joint))
    return Leaving(since((step, bits < below) for step, bits in points), floor, joint)


def since(points: Iterable[tuple[int, bool]]) -> int | None:
    """The step from which on something holds to the end; none if it does not at the end."""
    first = None
    for step, holds in points:
        first = (step if first is None else first) if holds else None
    return first
