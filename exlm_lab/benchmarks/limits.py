"""Lower bounds for the cost of the dynamic programme.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from typing import NamedTuple

from exlm_lab.benchmarks.record import Shape

SWEEPS = 3
"""Alpha, beta, and the product of both that is the gradient of the transitions."""


class Floor(NamedTuple):
    """Unavoidable traffic and arithmetic of one forward and backward pass."""

    num_bytes: int
    """Scores read by each pass, edges only where v < u; whole gradients written."""
    num_multiply_adds: int
    """Of the edges inside the cone, in ``SWEEPS`` sweeps; no exponentials."""


def floor(shape: Shape, itemsize: int = 4) -> Floor:
    """Lower bounds for the dynamic programme.

    Target i lives in the L - M + 1 states from i on, so two targets share
    (L - M + 1) (L - M + 2) / 2 edges; the first and the last target have one state.

    Args:
        shape: with 1 < M <= L, or M = L = 1.
        itemsize: bytes of a score.
    """
    B, M, L = shape
    num_edges, width = L * (L - 1) // 2, L - M + 1
    num_numbers = 2 * num_edges + L * L + 3 * M * L
    inner = 2 * width + (M - 3) * width * (width + 1) // 2
    num_pairs = inner if M > 2 else M - 1
    return Floor(B * num_numbers * itemsize, B * SWEEPS * num_pairs)
