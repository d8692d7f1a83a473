"""Lower bounds for the cost of the dynamic programme, and its time on a GPU without the host.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from exlm_lab.benchmarks.measure import time_side_by_side
from exlm_lab.benchmarks.record import Shape

SWEEPS = 3
"""Alpha, beta, and the product of both that is the gradient of the transitions."""
REPLAYS = 10


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


def replay_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call on a GPU without the host: captured as a CUDA graph and replayed.

    Raises:
        RuntimeError: if the call waits for the GPU, which a graph cannot hold.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            call()

        def replay() -> None:
            for _ in range(REPLAYS):
                captured.replay()

        return time_side_by_side({"replay": replay}, device)["replay"].median_ms / REPLAYS
