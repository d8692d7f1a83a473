"""Shapes that are measured, and the records of measurements: dicts that JSON can hold.

Shapes: B rows, M targets, L states. The data are random with a fixed seed, because times depend on
shapes and hardly on what a model has learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """B rows of M targets and L states, all rows alike."""

    B: int
    M: int
    L: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


DAG_SHAPES = (
    Shape(8, 20, 80),
    Shape(8, 77, 308),
    Shape(64, 77, 308),  # Appendix I.4
    Shape(4, 256, 1024),
)
Record = dict[str, Any]


def compared(records: Iterable[Record], reference: str) -> Iterator[Record]:
    """Add to the records of one shape the ratio of their times to that of ``reference``.

    The record of the reference must come first; without it the ratio is None.
    """
    base = None
    for one in records:
        if one["backend"] == reference:
            base = one["median_ms"]
        ratio = None if base is None else one["median_ms"] / base
        yield one | {"reference": reference if base else None, "wall_ratio": ratio}
