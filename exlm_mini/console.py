"""What a person sees while a command works, and how they stop it. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from exlm_mini.training import Progress

SECONDS_BETWEEN_LINES = 10.0


def say(line: str) -> None:
    """A line for the person, apart from the results on stdout."""
    print(line, file=sys.stderr, flush=True)


class ProgressLine:
    """How far, how fast, how long still: a bar on a terminal, else a line now and then.

    Args:
        name: of what is done.
        steps: units of work in all.
        unit: what one of them is called.
    """

    def __init__(self, name: str, steps: int, unit: str = "step") -> None:
        self.name, self.steps, self.unit = name, steps, unit
        self.bits = ""
        self._bar: Any = None
        self._start, self._first_step, self._last_line = time.monotonic(), 0, 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Tell of one step of training: loss, tokens/s."""
        if progress.evaluation is not None:
            self.bits = f", validation {progress.evaluation.bits_per_mask:.3f} bits/mask"
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        self.tell(progress.step, f"loss {progress.loss:.3f} nats, {speed}{self.bits}")

    def tell(self, step: int, text: str) -> None:
        """Tell of the work done so far, with a text of the caller's."""
        if sys.stderr.isatty():
            self._show_bar(step, text)
        else:
            self._show_line(step, text)

    def _show_bar(self, step: int, text: str) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=self.steps,
                initial=step - 1,
                desc=self.name,
                unit=self.unit,
                ncols=shutil.get_terminal_size().columns,  # 80 where a terminal gives none
            )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def _show_line(self, step: int, text: str) -> None:
        now = time.monotonic()
        if not self._first_step:
            self._first_step, self._start = step, now
        if step < self.steps and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        done = step - self._first_step
        eta = f"{(now - self._start) / done * (self.steps - step):.0f} s" if done else "unknown"
        say(f"{self.name} {self.unit} {step}/{self.steps}: {text}, ETA {eta}")


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request to save and stop after the step."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, previous[number])  # the second one stops at once
        say("stopping after this step; a checkpoint will be saved")

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
