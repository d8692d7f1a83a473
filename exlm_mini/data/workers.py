"""Worker processes for documents."""

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
"""Option of Linux's ``prctl``: the signal this process receives when its parent dies."""


class Workers:
    """Runs functions in worker processes, or in this process if one is enough."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._num_workers > 1:
            # A forked child would inherit locks held by threads of torch and tokenizers.
            self._executor = ProcessPoolExecutor(
                self._num_workers, multiprocessing.get_context("spawn"), _start_worker
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            # Work in progress is finished and kept.
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable[..., Any], tasks: Iterable[tuple]) -> Iterator[Any]:
        """Results in the order of the tasks. Few tasks wait, because they may hold documents.

        Raises:
            UserError: from the function, or if a process dies.
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
    """One thread per process, which dies with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) and os.getppid() != parent.pid:
        os._exit(1)  # the parent died before prctl was called
