"""The directory of a run: one writer at a time, fixed settings, a log of metrics.

::

    OUTPUT/
        .lock            held while a process writes here
        config.yaml      the settings of the run, for good but for a few
        metrics.jsonl    one JSON object per line, in the order of steps
        step-NNNNNN/     checkpoints

Checkpoints hold what a run needs to go on; this file keeps two runs from mixing in one place.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

from exlm_mini.config import settings_with
from exlm_mini.config.checks import Effect, UserError
from exlm_mini.config.recipes import dotted
from exlm_mini.data.files import read_bytes, read_text, refuse_odd_files, write_atomically

LOCK = ".lock"
CONFIG = "config.yaml"

FREE_SETTINGS = frozenset(settings_with(Effect.NOTHING, Effect.COURSE))
"""Settings a resumed run may change, because no weight depends on them by design."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunDirectory:
    """A directory that one process at a time may write to; use it with ``with``.

    The lock is the kernel's (``flock``): it ends with the process, however that dies, so a lock
    file left by a killed run stands in nobody's way.

    ``report`` takes a line where the file system has no locks.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = print) -> None:
        self.path = path
        self._report = report
        self._descriptor: int | None = None

    def __enter__(self) -> RunDirectory:
        """Make the directory and take the lock.

        Raises:
            UserError: another process holds it, or a symbolic link lies in it.
            OSError: the directory cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_odd_files(self.path)
            self._descriptor = lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock(lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except (OSError, UserError):
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back; its file stays, for removing it could free two runs at once."""
        self._release()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid, _, host = os.pread(descriptor, 300, 0).decode(errors="replace").partition(" ")
            raise UserError(
                f"process {pid or '?'} on {host.strip() or 'this machine'} is writing to "
                f"{self.path}; wait until it ends, stop it, or choose another --output"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Some cluster file systems are mounted without locks; runs there must still work.
            self._report(
                f"{self.path} is on a file system without locks: let no second run write there"
            )

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def settle_config(
    path: Path, config_text: str, config: dict, parse: Callable[[str], dict]
) -> list[str]:
    """Fix the settings of a run at its start, and hold a resumed run to them.

    Call it under the lock and before anything else is written to the directory; only a finished
    corpus in ``data/`` may lie there already.

    Args:
        path: the run's directory, existing.
        config_text, config: what to store as ``config.yaml``, and the same as nested dicts.
        parse: from a stored text to nested dicts, with a value for every setting.

    Returns:
        A line for each of ``FREE_SETTINGS`` that changed, and for ``train.steps`` if it was raised;
        the stored file now holds the new ones.

    Raises:
        UserError: another setting differs, or the directory holds something that is not a run.
            Nothing is written then.
    """
    file = path / CONFIG
    if not file.exists():
        ours = {LOCK, f"{CONFIG}.tmp"}
        if (path / "data" / "corpus.json").exists():
            ours.add("data")  # left by a start that failed; it knows its own settings
        if foreign := sorted({entry.name for entry in path.iterdir()} - ours):
            raise UserError(
                f"{path} holds {foreign[0]} but no {CONFIG}, so it is not the directory of "
                "a run; choose another --output"
            )
        write_atomically(file, config_text.encode())
        return []
    stored = parse(read_text(file))
    changes, free = _changes(stored, config), set(FREE_SETTINGS)
    old, new = (dotted(settings).get("train.steps", 0) for settings in (stored, config))
    if new > old:
        free.add("train.steps")
        changes["train.steps"] += "; from here on the learning rate follows the longer schedule"
    if fixed := [line for key, line in changes.items() if key not in free]:
        more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
        raise UserError(
            f"{path} holds a run with other settings: {'; '.join(fixed[:3])}{more}; use "
            "the same settings, or choose another --output"
        )
    if changes:
        write_atomically(file, config_text.encode())
    return list(changes.values())


class MetricsLog:
    """``metrics.jsonl``: append-only, one JSON object per line, written at once."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the log and forget the lines after ``step``, which the run will write again.

        Raises:
            UserError: a line is damaged.
        """
        self.last: dict | None = None
        """The last line that was kept; none for a new run."""
        if path.exists():
            data = read_bytes(path)
            kept = [pair for pair in _lines(path, data) if pair[1]["step"] <= step]
            self.last = kept[-1][1] if kept else None
            whole = b"".join(line + b"\n" for line, _ in kept)
            if whole != data:
                write_atomically(path, whole)
        self._step = self.last["step"] if self.last else -1
        # Unbuffered, so that a line is on its way when ``write`` returns.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: dict) -> None:
        """Append one line; nan and infinities become null, which JSON has no numbers for.

        Raises:
            ValueError: its ``step`` is no whole number above that of the line before.
            OSError: the line cannot be written; the file then ends with the line before it.
        """
        step = record.get("step")
        if type(step) is not int or step <= self._step:
            raise ValueError(f"'step' must be a whole number above {self._step}: {record}")
        data = _encoded(record) + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            # On a nearly full disk an unbuffered write may take only a part.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(end)
            error.filename = self._file.name
            raise
        self._step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path, report: Callable[[str], None] | None = None) -> list[dict]:
    """The records of a ``metrics.jsonl``, also of a run that is still writing it.

    Each has a whole ``step``. A last line cut short is left out, and ``report`` takes a line then.

    Raises:
        UserError: the file cannot be read, or a line before the last is damaged.
    """
    data = read_bytes(path)
    pairs = _lines(path, data)
    if report is not None and data != b"".join(line + b"\n" for line, _ in pairs):
        report(f"{path}: the last line is cut short and left out")
    return [record for _, record in pairs]


def _lines(path: Path, data: bytes) -> list[tuple[bytes, dict]]:
    """Lines of a log with their records, without a last line that a crash cut short."""
    *lines, rest = data.split(b"\n")
    found = [_record(line) for line in lines]
    # After a power cut the last line may also be zeros, or lack its beginning.
    if rest == b"" and found and found[-1] is None:
        found.pop()
    records: list[dict] = []
    step = -1
    for number, record in enumerate(found, 1):
        if record is None or record["step"] <= step:
            raise UserError(
                f"{path} line {number} is damaged; restore the file from a copy, or delete that "
                "line"
            )
        step = record["step"]
        records.append(record)
    return list(zip(lines, records, strict=False))


def _record(line: bytes) -> dict | None:
    """What a line holds; None if ``MetricsLog.write`` did not write it."""
    try:
        record = json.loads(line.decode())
        # Written again it must come out byte for byte: no key twice, no number beyond its range.
        is_whole = _encoded(record) == line
    except (ValueError, RecursionError):
        return None
    is_record = (
        is_whole
        and isinstance(record, dict)
        and type(record.get("step")) is int
        and isinstance(record.get("seconds"), int | float | None)  # a resumed run counts on
    )
    # Words would end in a sum.
    is_record = is_record and not any(isinstance(v, str) for v in record.values())
    return record if is_record and record["step"] < 2**63 else None


def _encoded(record: object) -> bytes:
    return json.dumps(_finite(record), allow_nan=False).encode()


def _finite(value: object) -> object:
    """The same value with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _changes(stored: dict, asked: dict) -> dict[str, str]:
    """Settings that differ: dotted name to ``name: stored -> asked``."""
    old, new = dotted(stored), dotted(asked)
    absent = "(absent)"
    return {
        key: f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent) != new.get(key, absent)
    }
