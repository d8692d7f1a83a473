"""Measures the time and memory of a call, and makes a record of both."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from exlm_lab.benchmarks.record import Record
from exlm_mini.training.provenance import MIB

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs every start
MOST_RUNS = 50
LEAST_RUNS = 3
"""A median of fewer runs would be meaningless."""
ENOUGH_SECONDS = 5.0
"""After this time no further run is started, provided that ``LEAST_RUNS`` are done."""


class Timing(NamedTuple):
    """Medians over several runs of one call."""

    median_ms: float
    """Milliseconds of wall-clock time; on a GPU, measured by CUDA events."""
    median_cpu_ms: float
    """Milliseconds of processor time, all threads together; with a GPU, of the host alone."""
    runs: int


def time_side_by_side(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    enough_seconds: float = ENOUGH_SECONDS,
) -> dict[str, Timing]:
    """Time calls alternately, so that a temporary slowdown affects all of them.

    Every call is first run once untimed, which allocates, compiles and fills caches.

    A GPU is synchronised around each call. ``enough_seconds`` is the limit for all calls together,
    see ``ENOUGH_SECONDS``.

    Returns:
        The medians of each call, all over the same number of runs: ``LEAST_RUNS`` to ``MOST_RUNS``.
    """
    wall_ms: dict[str, list[float]] = {name: [] for name in calls}
    cpu_ms: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    start, runs = time.monotonic(), 0
    while runs < LEAST_RUNS or (runs < MOST_RUNS and time.monotonic() - start < enough_seconds):
        for name, call in calls.items():
            for each, ms in zip((wall_ms, cpu_ms), _once(call, device), strict=True):
                each[name].append(ms)
        runs += 1
    median = statistics.median
    return {name: Timing(median(wall_ms[name]), median(cpu_ms[name]), runs) for name in calls}


def _once(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds of one run: by the wall clock (or CUDA events), and of processor time."""
    cpu_start = time.process_time()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record(torch.cuda.current_stream(device))
        call()
        end.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        wall_ms = begin.elapsed_time(end)
    else:
        start = time.perf_counter()
        call()
        wall_ms = 1000 * (time.perf_counter() - start)
    return wall_ms, 1000 * (time.process_time() - cpu_start)


# ---- memory ----


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes of tensors allocated during a call, its result included.

    On a GPU this is the caching allocator's peak; on a CPU it is computed from all allocations and
    releases of PyTorch's allocator that the profiler sees, including C++ operators and the backward
    pass. Both count requested bytes and are reproducible. Memory that libraries allocate elsewhere
    (a ``std::vector``, BLAS) is missed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        call()
    changes = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda change: change.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def record(
    backend: str,
    shape: tuple[int, ...],
    timing: Timing,
    call: Callable[[], Any],
    device: torch.device,
    **details: Any,
) -> Record:
    """The record of a call that was timed; runs it once more to measure its peak memory."""
    return {
        "backend": backend,
        "shape": list(shape),
        **timing._asdict(),
        "peak_mib": peak_bytes(call, device) / MIB,
        **details,
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Set PyTorch's number of CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
