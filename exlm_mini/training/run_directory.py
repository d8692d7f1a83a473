"""The directory of a run: one writer at a time, fixed settings, a log of metrics.

::

    OUTPUT/
        .lock            held while a process writes here
        config.yaml      the settings of the run; all but a few are fixed
        metrics.jsonl    one JSON object per line, in the order of steps
        step-NNNNNN/     checkpoints

Checkpoints hold what a run needs to resume; this module keeps two runs from mixing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig, settings_with
from exlm_mini.config.checks import Effect, UserError
from exlm_mini.config.recipes import dotted, parse_stored, plain
from exlm_mini.data.files import read_bytes, read_text, refuse_odd_files, write_atomically

LOCK = ".lock"
CONFIG = "config.yaml"

FREE_SETTINGS = frozenset(settings_with(Effect.NOTHING, Effect.COURSE))
"""Settings a resumed run may change, because no weight depends on them by design."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locked_directory(path: Path, report: Callable[[str], None] = print) -> Iterator[None]:
    """Make a directory for one writer at a time, and hold its lock.

    The lock is the kernel's (``flock``): it ends with the process, so the file that a killed run
    left behind does not block the next. The file is never removed, because that could let two
    runs in at once.

    Args:
        path: of the directory.
        report: receives a line if the file system has no locks.

    Raises:
        UserError: another process holds it, or a symbolic link lies in it.
        OSError: the directory cannot be made or written.
    """
    path.mkdir(parents=True, exist_ok=True)
    refuse_odd_files(path)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid, _, host = os.pread(lock, 300, 0).decode(errors="replace").partition(" ")
        os.close(lock)
        raise UserError(
            f"process {pid or '?'} on {host.strip() or 'this machine'} is writing to {path}; "
            "wait until it ends, stop it, or choose another --output"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        # Some cluster file systems are mounted without locks; runs must still work there.
        report(f"{path} is on a file system without locks: let no second run write there")
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def settle_config(path: Path, config: RunConfig) -> list[str]:
    """Store the settings of a new run, or check that a resumed run has the same.

    Call it under the lock and before anything else is written to the directory, which may hold a
    finished corpus in ``data/`` and nothing else.

    Args:
        path: the run's directory, existing.
        config: what to store as ``config.yaml``.

    Returns:
        A line for each of ``FREE_SETTINGS`` that changed, and for ``train.steps`` if it was raised;
        the stored file now holds the new ones.

    Raises:
        UserError: another setting differs, or the directory holds something that is not a run.
            Nothing is written then.
    """
    import yaml

    file, text = path / CONFIG, yaml.safe_dump(plain(config), sort_keys=False)
    if not file.exists():
        ours = {LOCK, f"{CONFIG}.tmp"}
        if (path / "data" / "corpus.json").exists():
            ours.add("data")  # from a failed start; its settings are stored with it
        if foreign := sorted({entry.name for entry in path.iterdir()} - ours):
            raise UserError(
                f"{path} holds {foreign[0]} but no {CONFIG}, so it is not the directory of "
                "a run; choose another --output"
            )
        write_atomically(file, text.encode())
        return []
    old, new = dotted(parse_stored(read_text(file))), dotted(plain(config))
    changes = {key: f"{key}: {old[key]} -> {new[key]}" for key in new if old[key] != new[key]}
    free = set(FREE_SETTINGS)
    if new["train.steps"] > old["train.steps"]:
        free.add("train.steps")
        changes["train.steps"] += "; from here on the learning rate follows the longer schedule"
    if fixed := [line for key, line in changes.items() if key not in free]:
        raise UserError(
            f"{path} holds a run with other settings: {'; '.join(fixed)}; use the same settings, "
            "or choose another --output"
        )
    if changes:
        write_atomically(file, text.encode())
    return list(changes.values())


# ---- metrics ----


class MetricsLog:
    """``metrics.jsonl``: append-only, one JSON object per line, written at once."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the log and drop the lines after ``step``, which the run will write again.

        Raises:
            UserError: if a line is damaged.
        """
        self.last: dict[str, Any] | None = None
        """The last line that was kept; None for a new run."""
        if path.exists():
            data = read_bytes(path)
            kept = [pair for pair in _lines(path, data) if pair[1]["step"] <= step]
            self.last = kept[-1][1] if kept else None
            whole = b"".join(line + b"\n" for line, _ in kept)
            if whole != data:
                write_atomically(path, whole)
        # Unbuffered, so that a line has left the process when ``write`` returns.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; nan and infinities become null, because JSON lacks them.

        Raises:
            OSError: if the line cannot be written; the file then ends with the line before it.
        """
        data, end = _encoded(record) + b"\n", os.fstat(self._descriptor).st_size
        try:
            # On a nearly full disk a write may be partial.
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_metrics(path: Path, report: Callable[[str], None] | None = None) -> list[dict]:
    """The records of a ``metrics.jsonl``, even while a run is writing it.

    A truncated last line is dropped, and ``report`` is told.

    Raises:
        UserError: if the file cannot be read, or a line before the last is damaged.
    """
    data = read_bytes(path)
    pairs = _lines(path, data)
    if report is not None and data != b"".join(line + b"\n" for line, _ in pairs):
        report(f"{path}: the last line is cut short and left out")
    return [record for _, record in pairs]


def _lines(path: Path, data: bytes) -> list[tuple[bytes, dict]]:
    """Lines of a log with their records, without a last line that a crash truncated."""
    *lines, rest = data.split(b"\n")
    found = [_record(line) for line in lines]
    # After a power cut the last line may also be zeros, or lack its beginning.
    if rest == b"" and found and found[-1] is None:
        found.pop()
    pairs: list[tuple[bytes, dict]] = []
    for line, record in zip(lines, found, strict=False):
        if record is None or (pairs and record["step"] <= pairs[-1][1]["step"]):
            raise UserError(
                f"{path} line {len(pairs) + 1} is damaged; restore the file from a copy, or "
                "delete that line"
            )
        pairs.append((line, record))
    return pairs


def _record(line: bytes) -> dict | None:
    """The record in a line; None if ``MetricsLog.write`` did not write it."""
    try:
        record = json.loads(line.decode())
        # Encoding it again must give the same bytes: no repeated key, no number out of range.
        if not isinstance(record, dict) or _encoded(record) != line:
            return None
    except (ValueError, RecursionError):
        return None
    step = record.get("step")
    is_whole = type(step) is int and 0 <= step < 2**63
    # Later code adds up the numbers, and a resumed run continues to count the seconds.
    is_counted = isinstance(record.get("seconds"), int | float | None)
    has_words = any(isinstance(value, str) for value in record.values())
    return record if is_whole and is_counted and not has_words else None


def _encoded(record: dict[str, Any]) -> bytes:
    return json.dumps(_finite(record), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """The same value with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
