"""A child that dies of an item, hangs on it or is interrupted costs nothing else."""

import faulthandler
import multiprocessing
import os
import signal
import time

import pytest

from exlm_mini.data import workers
from exlm_mini.data.workers import BATCH_SIZE, in_child

ITEMS = list(range(3 * BATCH_SIZE + 1))
"""The last is a batch of its own."""


@pytest.mark.parametrize(
    "killers",
    [
        [], [0], [ITEMS[-1]], [BATCH_SIZE - 1, BATCH_SIZE], [10, 11, 250],
        [5, 5 + BATCH_SIZE], ITEMS[95:106],
    ],
    ids=str,
)  # fmt: skip
def test_what_a_child_dies_of_is_left_out(killers):
    def doubled(batch):
        if set(batch) & set(killers):
            faulthandler.disable()  # of pytest
            os.kill(os.getpid(), signal.SIGSEGV)
        return [2 * item for item in batch]

    results, lost = in_child(doubled, ITEMS)
    assert lost == killers
    kept = [item for item in ITEMS if item not in killers]
    assert [item for part in results for item in part] == [2 * item for item in kept]


def test_what_a_child_hangs_on_is_left_out(monkeypatch):
    monkeypatch.setattr(workers, "MAX_SECONDS", 1)

    def slow(batch):
        time.sleep(3600 * (ITEMS[120] in batch))
        return len(batch)

    results, lost = in_child(slow, ITEMS)
    assert lost == [120] and sum(results) == len(ITEMS) - 1


@pytest.mark.parametrize("item", [120, ITEMS[-1]])
def test_nothing_is_left_out_for_a_child_killed_by_chance(tmp_path, item):
    def unlucky(batch):
        if item in batch and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    results, lost = in_child(unlucky, ITEMS)
    assert ([item for part in results for item in part], lost) == (ITEMS, [])


@pytest.fixture
def heard():
    """Ctrl-C interrupts, also where a shell's "&" has had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_ends_the_child():
    def interrupted(batch):
        time.sleep(1)  # until its parent waits for it
        for pid in (os.getpid(), os.getppid()):  # Ctrl-C tells both
            os.kill(pid, signal.SIGINT)
        time.sleep(3600)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_child(interrupted, ITEMS)
    assert not multiprocessing.active_children()
    assert time.monotonic() - start < workers.MAX_SECONDS / 2


def test_no_items_need_no_child():
    assert in_child(None, []) == ([], [])
