"""What is measured with; no test asks how long something took."""

from __future__ import annotations

import pytest
import torch

from exlm_lab.benchmarks import measure
from exlm_lab.benchmarks.measure import (
    LEAST_RUNS,
    REPLAYS,
    peak_bytes,
    replay_ms,
    time_side_by_side,
)

pytestmark = pytest.mark.usefixtures("three_runs")
CPU = torch.device("cpu")
FLOAT = 4


# ---- time ----


def test_calls_are_timed_in_turn_after_one_run_each_to_warm_up():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_side_by_side(calls, CPU, enough_seconds=0)
    assert order == ["a", "b"] * (1 + LEAST_RUNS)
    assert {name: len(timing.wall_ms) for name, timing in timings.items()} == {
        "a": LEAST_RUNS,
        "b": LEAST_RUNS,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_call_is_captured_and_replayed():
    device = torch.device("cuda")
    total = torch.zeros(1000, device=device)
    assert replay_ms(lambda: total.add_(1), device) > 0
    assert total.unique().numel() == 1 and total[0] > REPLAYS
    with pytest.raises(RuntimeError):
        replay_ms(lambda: total.sum().item(), device)


def test_the_number_of_threads_is_set_for_a_while_only():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), measure.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


# ---- memory ----


def test_peak_memory_is_what_is_alive_at_one_time_to_the_byte():
    kept = torch.ones(1000, 1000)  # was there before: does not count

    def two_alive_then_one() -> None:
        _ = kept + 1 + kept
        for _ in range(5):
            torch.ones(1000)

    assert peak_bytes(two_alive_then_one, CPU) == 2 * 1000 * 1000 * FLOAT


def test_peak_memory_counts_the_backward_pass():
    x = torch.ones(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        return (x * 2 * x).sum()

    assert peak_bytes(lambda: torch.autograd.grad(forward(), x), CPU) > peak_bytes(forward, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_memory_of_a_gpu_leaves_out_what_was_there_before():
    device = torch.device("cuda")
    kept = torch.ones(1000, 1024, device=device)
    assert peak_bytes(lambda: kept + 1 + kept, device) == 2 * 1000 * 1024 * FLOAT
    assert min(time_side_by_side({"": lambda: kept + 1}, device)[""].wall_ms) > 0
