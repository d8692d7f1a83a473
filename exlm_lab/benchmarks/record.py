"""Shapes that are measured, and the record of each measurement: a dict that JSON can hold.

Shapes: B rows, M targets, L states.

Records come one at a time, so that what was measured can be shown before the rest is. Data are
random but for a seed: times depend on shapes, hardly on what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # shapes are read without torch
    import torch

    from exlm_lab.benchmarks.measure import Timing


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
    Shape(1, 1024, 4096),
)
TEXT_SHAPE = Shape(16, 21, 84)
"""Rows of 128 tokens of which 19 are masked, k = 4, expanded boundaries."""
LONG_SHAPE = Shape(4, 78, 312)
"""Rows of 512 tokens, 76 masked."""
EMISSION_SIZES = ((TEXT_SHAPE, 8192), (LONG_SHAPE, 8192), (TEXT_SHAPE, 50265))
"""With the size of the vocabulary; the last is RoBERTa's."""
Note = Callable[[str], None]
"""Takes a line about what was left out, and why."""
Record = dict[str, Any]


def record(
    benchmark: str,
    backend: str,
    shape: Shape,
    timing: Timing,
    call: Callable[[], Any],
    device: torch.device,
    errors: dict[str, float],
    details: Record,
) -> Record:
    """The record of a call that was timed; measures its memory.

    Args:
        benchmark, backend, shape: what was measured.
        timing: of the call, forward and backward.
        call, device: to measure its memory.
        errors: ``max |difference| / max |value|`` against float64, by quantity.
        details: more fields.
    """
    import torch

    from exlm_lab.benchmarks.measure import peak_bytes
    from exlm_mini.training.provenance import MIB

    largest = max(errors.values(), default=None)
    return {
        "benchmark": benchmark,
        "backend": backend,
        "shape": list(shape),
        "median_ms": timing.median_ms,
        "median_cpu_ms": timing.median_cpu_ms,
        "runs": len(timing.wall_ms),
        "peak_mib": peak_bytes(call, device) / MIB,
        "max_error": None if largest == math.inf else largest,
        "errors": {n: None if e == math.inf else e for n, e in errors.items()},
        **details,
        "threads": torch.get_num_threads(),
    }


def compared(records: Iterable[Record], reference: str) -> Iterator[Record]:
    """Records of one shape with their times over those of the reference, which comes first.

    The ratios are none where the reference was left out, or the processor's clock did not move.
    """
    base: Record = {}
    for one in records:
        if one["backend"] == reference:
            base = one
        ratios = {
            f"{name}_ratio": one[time] / base[time] if base.get(time) else None
            for name, time in (("wall", "median_ms"), ("cpu", "median_cpu_ms"))
        }
        yield one | {"reference": reference if base else None} | ratios
