"""Processes that work on documents, several at once."""

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
from typing import Any

from exlm_mini.config.checks import UserError

PR_SET_PDEATHSIG = 1
"""Of Linux' ``prctl``: a signal for this process when its parent ends, however that ends."""


class Workers:
    """Runs functions in processes of their own, or in this one where one is enough."""

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


def _start_worker() -> None:
    """One thread per process; an end with the parent, however that ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) and os.getppid() != parent.pid:
        os._exit(1)  # it was gone before we could ask for that
