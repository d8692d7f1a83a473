"""What a device can do at best, and the least that the dynamic programme asks of it.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from exlm_lab.benchmarks.measure import time_call
from exlm_lab.benchmarks.record import Shape
from exlm_mini.training.provenance import MIB

SWEEPS = 3
"""Alpha, beta, and the product of both that is the gradient of the transitions."""
REPLAYS = 10


class Floor(NamedTuple):
    """Traffic and arithmetic of one forward and backward pass that nothing can avoid."""

    num_bytes: int
    """Scores read by each pass, edges only where v < u; whole gradients written."""
    num_multiply_adds: int
    """Of the edges inside the cone, in ``SWEEPS`` sweeps; no exponentials."""

    def milliseconds(self, limits: Limits) -> float:
        """The least time, as if traffic and arithmetic ran side by side."""
        return 1000 * max(
            self.num_bytes / limits.bytes_per_second,
            self.num_multiply_adds / limits.multiply_adds_per_second,
        )


class Limits(NamedTuple):
    """What was measured of a device."""

    bytes_per_second: float
    """Read and written together, by a large copy."""
    multiply_adds_per_second: float
    """float32, by a large matrix product without TF32."""


def floor(shape: Shape, itemsize: int = 4) -> Floor:
    """What the dynamic programme cannot do without.

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


def measured_limits(device: torch.device, size: int | None = None) -> Limits:
    """Best of several large copies and matrix products.

    Args:
        device: to measure.
        size: side of the matrices; none: 8192 on a GPU, 2048 elsewhere. What is copied is a
            GiB on a GPU and 256 MiB elsewhere, or as much as these matrices hold.
    """
    is_gpu = device.type == "cuda"
    copied = (1024 if is_gpu else 256) * MIB if size is None else 4 * size * size
    size = size or (8192 if is_gpu else 2048)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy_ms = min(time_call(lambda: target.copy_(source), device).wall_ms)
    matrix = torch.ones(size, size, device=device)
    product = torch.empty_like(matrix)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        product_ms = min(
            time_call(lambda: torch.mm(matrix, matrix, out=product), device).wall_ms
        )
    finally:
        torch.set_float32_matmul_precision(before)
    return Limits(1000 * 2 * copied / copy_ms, 1000 * size**3 / product_ms)


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

        return time_call(replay, device).median_ms / REPLAYS
