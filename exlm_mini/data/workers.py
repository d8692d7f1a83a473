"""Processes that work on documents: several at once, or a child that may be lost."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from exlm_mini.config.checks import UserError

BATCH_SIZE = 100
MAX_SECONDS = 60
"""Of the clock, for an item alone. The slowest molecules we found take RDKit four, a thousand
spellings of 2,000 characters as long; the rest is for slow and busy machines."""
PR_SET_PDEATHSIG = 1
"""Of Linux' ``prctl``: a signal for this process when its parent ends, however that ends."""


class Workers:
    """Runs functions in processes of their own, or in this one where one is enough.

    Args:
        num_workers: processes.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._num_workers > 1:
            # A forked child would inherit the threads' locks of torch and tokenizers.
            self._executor = ProcessPoolExecutor(
                self._num_workers, multiprocessing.get_context("spawn"), _start_worker
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            # What is under way is finished and kept, whatever stopped us.
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable[..., Any], tasks: Iterable[tuple]) -> Iterator[Any]:
        """Results in the order of the tasks, of which few wait, since they may hold documents.

        Raises:
            UserError: as the function does, or when a process dies.
        """
        if self._executor is None:
            for task in tasks:
                yield function(*task)
            return
        waiting: deque[Future] = deque()
        try:
            for task in tasks:
                waiting.append(self._executor.submit(function, *task))
                if len(waiting) > 2 * self._num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, perhaps for want of memory; the same command goes on "
                "(with fewer --workers, or a smaller --shard-megabytes)"
            ) from None


def in_child(function: Callable[[list], Any], items: list) -> tuple[list[Any], list[int]]:
    """Results of a function of batches of items, in a child that it may kill, or hang in.

    A batch that does not end well within ``MAX_SECONDS`` is done again in a new child, item by
    item. Only what fails again is left out: a child may also be killed by chance.

    Args:
        function: of a list of items; its result is all that is kept of what it does.
        items: in order; like the function they are not pickled.

    Returns:
        results in order, of batches of any size, and the indices of the items left out.
    """
    # Forked, it starts at once. It calls nothing whose locks a thread of ours might hold.
    fork, indices = multiprocessing.get_context("fork"), range(len(items))
    batches = [indices[start : start + BATCH_SIZE] for start in indices[::BATCH_SIZE]][::-1]
    results: list[Any] = []
    lost: list[int] = []
    tried: set[int] = set()
    while batches:
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=_work, args=(function, items, batches, sender), daemon=True)
        child.start()
        sender.close()
        try:
            while batches:
                results.append(receiver.recv())
                batches.pop()
        except (EOFError, OSError):  # it ended between two results, or within one
            failed = batches.pop()
            if failed[0] in tried:
                lost += failed
            else:
                tried.update(failed)
                batches.extend(range(i, i + 1) for i in reversed(failed))
        finally:
            child.kill()
            child.join()
    return results, lost


def _work(function: Callable, items: list, batches: list[range], sender: Connection) -> None:
    """What the child does; the system's clock ends it where it hangs."""
    _start_worker()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for batch in reversed(batches):
        signal.alarm(MAX_SECONDS)
        sender.send(function(items[batch.start : batch.stop]))


def _start_worker() -> None:
    """One thread per process; an end with the parent, however that ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) and os.getppid() != parent.pid:
        os._exit(1)  # it was gone before we could ask for that
