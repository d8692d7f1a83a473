"""The alignment, the vocabulary head and a training step, measured on made-up data.

Shapes: B rows, M targets, L states.

``benchmarks.dag``, ``.emission`` and ``.step`` yield one ``Record`` at a time, so that what was
measured can be shown before the rest is. Data are random but for a seed: times depend on shapes,
hardly on what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from exlm_lab.benchmarks.measure import Timing, peak_bytes, resident_bytes
from exlm_mini.training.provenance import MIB


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


@dataclass(frozen=True)
class Record:
    """What was measured of one backend at one shape; a JSON object once it is printed."""

    benchmark: str
    backend: str
    shape: Shape
    """B, M, L."""
    median_ms: float
    """Forward and backward, wall clock."""
    median_cpu_ms: float
    """Processor time, all threads together."""
    runs: int
    peak_mib: float
    """Tensors at their most, see ``measure.peak_bytes``."""
    resident_mib: float | None
    """Memory of the process, see ``measure.resident_bytes``; none on a GPU."""
    max_error: float | None
    """``max |difference| / max |value|`` against float64, the worst of ``errors``."""
    errors: dict[str, float]
    """The same for the value and for each gradient by itself."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else is told: dtype, threads, who judged, time by part."""


def record(
    benchmark: str,
    backend: str,
    shape: Shape,
    timing: Timing,
    call: Callable[[], Any],
    device: torch.device,
    errors: dict[str, float],
    details: dict[str, Any],
) -> Record:
    """The record of a call that was timed; measures its memory."""
    resident = resident_bytes(call) if device.type == "cpu" else None
    return Record(
        benchmark,
        backend,
        shape,
        timing.median_ms,
        timing.median_cpu_ms,
        len(timing.wall_ms),
        peak_bytes(call, device) / MIB,
        None if resident is None else resident / MIB,
        max(errors.values(), default=None),
        errors,
        details | {"threads": torch.get_num_threads()},
    )


def as_json(
    record: Record, reference: Record | None, machine: dict[str, Any]
) -> dict[str, Any]:
    """A record as JSON knows it, beside the reference of its benchmark, shape and threads.

    Args:
        record: what was measured.
        reference: what it is compared with; none if that was left out.
        machine: from ``provenance.machine``.

    Returns:
        The fields and details of the record, ``reference``, ``wall_ratio`` and ``cpu_ratio``
        (time of this one over the reference's; none without one, or where the clock of the
        processor did not move), and ``machine``.
    """
    fields = asdict(record)
    fields["shape"] = list(record.shape)
    details = fields.pop("details")
    cpu_ms = reference.median_cpu_ms if reference else None
    return {
        **fields,
        **details,
        "reference": reference.backend if reference else None,
        "wall_ratio": record.median_ms / reference.median_ms if reference else None,
        "cpu_ratio": record.median_cpu_ms / cpu_ms if cpu_ms else None,
        "machine": machine,
    }
