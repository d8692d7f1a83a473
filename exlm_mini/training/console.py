"""What a person sees while a command works, and how they stop it. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import Debugging
from exlm_mini.data.files import refused
from exlm_mini.training.loop import Progress

INTERRUPTED = 130
"""Exit code of a command that was asked to stop, as shells report an interrupt."""
SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_SPEAK = 5.0
SECONDS_BETWEEN_SIGNALS = 1.0

EXTRAS = {
    "datasets": "text", "pyarrow": "text", "tokenizers": "text", "rdkit": "chem",
    "docstring_parser": "train", "jsonargparse": "train", "yaml": "train",
    "matplotlib": "plot", "seaborn": "plot", "pandas": "tasks", "scipy": "tasks",
    "sklearn": "tasks", "transformers": "hf", "tensorboard": "watch",
}  # fmt: skip
"""What to install for a module that a command imports when it needs it."""


def say(line: str) -> None:
    """A line for the person, apart from the results on stdout."""
    print(line, file=sys.stderr, flush=True)


def this_python() -> str:
    """The interpreter that runs, as a person here would type it."""
    if shutil.which("python") == sys.executable:
        return "python"
    return shlex.quote(os.path.relpath(sys.executable))


def say_error(error: UserError) -> None:
    """The one line of a mistake; with ``--debug`` what led to it comes first."""
    if Debugging.is_on:
        earlier: BaseException | None = error
        while earlier:
            earlier.__suppress_context__ = False
            earlier = earlier.__cause__ or earlier.__context__
        traceback.print_exception(error)
    say(f"error: {error}")


def mistake(error: UserError | ModuleNotFoundError | OSError) -> UserError:
    """The line for an error: of a library that was left out it names the extra that brings it.

    Raises:
        ModuleNotFoundError, OSError: the error itself if it is our own mistake.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        return refused(error)
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        raise error
    return UserError(f"this needs the package {name}; pip install 'exlm-mini[{EXTRAS[name]}]'")


def drop_output() -> None:
    """When the reader of stdout has seen enough; Python would complain as it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(
    command: Callable[[], int | None],
    interrupted: str = "interrupted",
    unread: int = INTERRUPTED,
    is_talking: Callable[[], bool] = lambda: True,
) -> int:
    """Run a command; its exit code, and one line if it could not be done.

    Args:
        command: the work; none: 0. What trains in it saves and stops by itself when asked to.
        interrupted: printed when it is stopped otherwise, such as while data are read.
        unread: exit code where the reader of stdout left before the end.
        is_talking: false in a process beside which another one prints the line.
    """
    Debugging.is_on = False
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()
        return unread
    except (UserError, ModuleNotFoundError, OSError) as error:
        line = mistake(error)
        if is_talking():
            say_error(line)
        else:
            # torchrun ends all processes once it sees one end: let the other one speak before.
            time.sleep(SECONDS_TO_SPEAK)
        return 2
    except KeyboardInterrupt:
        if is_talking():
            say(interrupted)
        return INTERRUPTED


class ProgressLine:
    """How far, how fast, how long still: a line now and then, on a terminal one that changes.

    ``steps`` is the work in all, ``unit`` what it is counted in.
    """

    def __init__(self, name: str, steps: int, unit: str = "step") -> None:
        self.name, self.steps, self.unit = name, steps, unit
        self.bits = ""
        self._is_terminal, self._is_open = sys.stderr.isatty(), False
        self._start: tuple[float, int] | None = None
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            say("")

    def show(self, progress: Progress) -> None:
        """Show one step of training: bits at the last validation, loss in nats, tokens/s."""
        if progress.evaluation is not None:
            self.bits = f"{progress.evaluation.bits_per_mask:.3f} bits, "
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        self.tell(progress.step, f"{self.bits}loss {progress.loss:.3f}, {speed}")

    def tell(self, step: int, text: str) -> None:
        """Show the work done so far, with a text of the caller's."""
        now = time.monotonic()
        self._start = self._start or (now, step)
        pause = 0.1 if self._is_terminal else SECONDS_BETWEEN_LINES
        if step < self.steps and now - self._last_line < pause:
            return
        self._last_line = now
        seconds, done = now - self._start[0], step - self._start[1]
        eta = in_words(seconds / done * (self.steps - step)) if done else "unknown"
        unit = "" if self.unit == "step" else f" {self.unit}"
        line = f"{self.name}{unit} {step}/{self.steps}: {text}, ETA {eta}"
        if self._is_terminal:
            self._is_open = True
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            say(line)


def in_words(seconds: float) -> str:
    """A time to two or three digits: seconds up to two minutes, minutes up to two hours."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 120 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:,.0f} h"


class Requests:
    """What signals have asked a run to do."""

    is_stop_asked = is_save_asked = False

    def should_stop(self) -> bool:
        """Save and stop after this step."""
        return self.is_stop_asked

    def should_save(self) -> bool:
        """Save after this step and go on; true once for each time it was asked."""
        is_asked, self.is_save_asked = self.is_save_asked, False
        return is_asked


@contextlib.contextmanager
def requests_by_signal(report: Callable[[str], None] = say) -> Iterator[Requests]:
    """Turn SIGINT and SIGTERM into a request to save and stop, SIGUSR1 into one to save.

    A second of SIGINT and SIGTERM stops at once, if it comes ``SECONDS_BETWEEN_SIGNALS`` later:
    torchrun passes signals on, and a scheduler may send the same one to the process itself.
    """
    requests = Requests()
    asked_at = 0.0

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if not requests.is_stop_asked:
            requests.is_stop_asked, asked_at = True, now
            report("stopping after this step; a checkpoint will be saved")
        elif now - asked_at > SECONDS_BETWEEN_SIGNALS:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(number)

    def ask_to_save(number: int, frame: FrameType | None) -> None:
        requests.is_save_asked = True

    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), ask_to_stop)
    handlers[signal.SIGUSR1] = ask_to_save
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
