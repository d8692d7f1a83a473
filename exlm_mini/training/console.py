"""What users see while a command works, and how they stop it. All output goes to stderr."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from exlm_mini.config.checks import UserError, missing_extra
from exlm_mini.config.options import Debugging
from exlm_mini.data.files import refused

INTERRUPTED = 130
"""Exit code of a command that was asked to stop; shells report interrupts this way."""
SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_SPEAK = 5.0
SECONDS_BETWEEN_SIGNALS = 1.0


def say(line: str) -> None:
    """Print a line for the user on stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)


def this_python() -> str:
    """The running interpreter, as a user would type it in the current directory."""
    if shutil.which("python") == sys.executable:
        return "python"
    return shlex.quote(os.path.relpath(sys.executable))


def drop_output() -> None:
    """Discard further output once the reader of stdout is gone; flushing at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(
    command: Callable[[], int | None],
    interrupted: str = "interrupted",
    unread: int = INTERRUPTED,
) -> int:
    """Run a command and return its exit code; a failure is reported in one line.

    If a launcher started several processes on a machine, only the first prints the line. Others
    print errors about files and disks too, because one of them may be alone in having the error.

    Args:
        command: does the work and returns an exit code, or None for 0.
        interrupted: line for an interrupt, such as while data are read. An interrupt of training
            does not get here: training itself saves and stops.
        unread: exit code if the reader of stdout is gone before the end.
    """
    Debugging.is_on = False
    is_talking = launched_rank() is None or os.environ["LOCAL_RANK"] == "0"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a text may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command() or 0
        print(end="", flush=True)  # unlike sys.stdout.flush, even if stdout is closed
        return code
    except BrokenPipeError:
        drop_output()
        return unread
    except (UserError, ModuleNotFoundError, OSError) as error:
        line = _line_of(error)
        if is_talking and Debugging.is_on:
            traceback.print_exception(error)
        # An OSError may be of this process alone; one that all share has become a UserError.
        if is_talking or isinstance(error, OSError):
            say(f"error: {line}")
        else:
            # torchrun ends all processes when one ends, so let the first one print its line.
            time.sleep(SECONDS_TO_SPEAK)
        return 2
    except KeyboardInterrupt:
        if is_talking:
            say(interrupted)
        return INTERRUPTED


def _line_of(error: UserError | ModuleNotFoundError | OSError) -> str:
    """The line to print for a user's mistake; an error that is a bug is raised again."""
    if isinstance(error, OSError):
        return str(refused(error))
    if not isinstance(error, ModuleNotFoundError):
        return str(error)
    line = missing_extra(error)  # names the extra that installs the module
    if line is None:
        raise error
    return line


class Progress(NamedTuple):
    """What a training run reports after each step."""

    step: int
    """Number of steps done, including this one."""
    loss: float
    """Loss of the last batch, see ``Update``."""
    tokens_per_second: float
    """Mean speed since this start; counts input tokens as ``Update.num_tokens`` does."""
    evaluation: Any
    """An ``Evaluation`` (in fine-tuning the task's metrics) after a validation, otherwise None."""


class ProgressLine:
    """Shows progress, speed and ETA: a line every few seconds, on a terminal one line that changes.

    ``steps`` is the total number of steps, or of whatever else is counted.
    """

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.bits = ""
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_open = False
        self._start: tuple[float, int] | None = None
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            say("")

    def show(self, progress: Progress) -> None:
        """Show a training step: bits of the last validation, loss in nats, tokens/s."""
        if progress.evaluation is not None:
            self.bits = f"{progress.evaluation.bits_per_mask:.3f} bits, "
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        self.tell(progress.step, f"{self.bits}loss {progress.loss:.3f}, {speed}")

    def tell(self, step: int, text: str) -> None:
        """Show the number of steps done so far, and a text."""
        now = time.monotonic()
        self._start = self._start or (now, step)
        pause = 0.1 if self._is_terminal else SECONDS_BETWEEN_LINES
        if step < self.steps and now - self._last_line < pause:
            return
        self._last_line = now
        seconds, done = now - self._start[0], step - self._start[1]
        left = self.steps - step
        eta = in_words(seconds / max(done, 1) * left) if done or not left else "unknown"
        line = f"{self.name} {step}/{self.steps}: {text}, ETA {eta}"
        if self._is_terminal:
            self._is_open = True
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            say(line)


def in_words(seconds: float) -> str:
    """Format a time: in seconds up to two minutes, in minutes up to two hours, else in hours."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 120 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:,.0f} h"


def launched_rank() -> int | None:
    """Rank of this process if a launcher such as torchrun started it, else None."""
    is_launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return int(os.environ["RANK"]) if is_launched else None


def leave(code: int) -> NoReturn:
    """Exit; a launched process skips Python's own shutdown, in which gloo may abort."""
    if launched_rank() is None:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)
    os._exit(code)


@contextlib.contextmanager
def stop_by_signal(report: Callable[[str], None] = say) -> Iterator[Callable[[], bool]]:
    """Context manager that turns SIGINT and SIGTERM into a request to save and stop.

    Yields a function that says whether a signal came. A second signal stops the program at once, if
    it comes more than ``SECONDS_BETWEEN_SIGNALS`` later: torchrun forwards signals, and a scheduler
    may also send them to the process itself, so one request can arrive twice.
    """
    asked_at: float | None = None

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            report("stopping after this step; a checkpoint will be saved")
        elif now - asked_at > SECONDS_BETWEEN_SIGNALS:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)

    numbers = signal.SIGINT, signal.SIGTERM
    previous = {number: signal.signal(number, ask_to_stop) for number in numbers}
    try:
        yield lambda: asked_at is not None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
