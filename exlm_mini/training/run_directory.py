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
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_mini.config import RunConfig, settings_with
from exlm_mini.config.checks import Effect, UserError
from exlm_mini.config.recipes import dotted, plain, stored_config
from exlm_mini.data.files import read_bytes, write_atomically

if TYPE_CHECKING:  # a prepared corpus is locked without torch
    import torch

LOCK = ".lock"
CONFIG = "config.yaml"
OURS = (LOCK, f"{CONFIG}.tmp")

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
        report: receives a line if the file system has no locks.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(lock)
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


def _take(lock: int, seconds: float = 2.0) -> None:
    """Lock a file; a worker that outlived its killed parent lets go of it within a second."""
    last = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise
            time.sleep(0.1)


def as_begun(
    path: Path, config: RunConfig, device: torch.device, is_timed: bool = False
) -> RunConfig:
    """The settings with a definite precision: a resumed run keeps that of its start and, if it was
    asked for minutes, the steps counted then."""
    from exlm_mini.training.processes import with_precision

    if config.train.precision == "fp16" and device.type == "cpu":
        raise UserError("train.precision fp16 needs a GPU; on a CPU use auto, bf16 or fp32")
    train = config.train
    if (path / CONFIG).is_file():
        old = stored_config(path / CONFIG).train
        if train.precision == "auto":
            train = replace(train, precision=old.precision)
        train = replace(train, steps=old.steps) if is_timed else train
    return with_precision(replace(config, train=train), device)


def changed_settings(path: Path, config: RunConfig) -> list[str]:
    """Compare settings with those that a run began with.

    Returns:
        A line for each of ``FREE_SETTINGS`` that changed, and for ``train.steps`` if it was raised.
    """
    file = path / CONFIG
    if not file.exists():
        # A start that failed may have left its corpus, whose settings are stored with it.
        if foreign := sorted({entry.name for entry in path.iterdir()} - {*OURS, "data"}):
            raise UserError(
                f"{path} holds {foreign[0]} but no {CONFIG}, so it is not the directory of "
                "a run; choose another --output"
            )
        return []
    old, new = dotted(plain(stored_config(file))), dotted(plain(config))
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
    return list(changes.values())


def settle(
    path: Path,
    config: RunConfig,
    device: torch.device,
    num_processes: int,
    report: Callable[[str], None],
) -> None:
    """Store a run's settings and software versions, and report what changed."""
    import yaml

    from exlm_mini.training.provenance import commit, versions

    changes, file = changed_settings(path, config), path / CONFIG
    for change in changes:
        report(f"changed since the last start: {change}")
    if changes or not file.exists():
        write_atomically(file, yaml.safe_dump(plain(config), sort_keys=False).encode())
    used = {**versions(device), "commit": commit(), "num_processes": num_processes}
    write_atomically(path / "versions.json", (json.dumps(used, indent=2) + "\n").encode())


# ---- metrics ----


class MetricsLog:
    """``metrics.jsonl``: append-only, one JSON object per line, written at once."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the log and drop the lines after ``step``, which the run will write again."""
        kept = []
        if path.exists():
            records = read_metrics(path)
            kept = [record for record in records if record["step"] <= step]
            text = "".join(map(_line, kept)).encode()
            if text != path.read_bytes():
                write_atomically(path, text)
        self.last = kept[-1] if kept else None
        """The last line that was kept; None for a new run."""
        # Unbuffered, so that a line has left the process when ``write`` returns.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; nan and infinities become null, because JSON lacks them."""
        data, end = _line(record).encode(), os.fstat(self._descriptor).st_size
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


def read_metrics(path: Path) -> list[dict]:
    """The records of a ``metrics.jsonl``, even while a run is writing it; a last line that is cut
    short is left out."""
    records = []
    *lines, _ = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UserError(
                f"{path} line {number} is damaged; restore the file from a copy, or delete that "
                "line"
            ) from None
    return records


def _line(record: dict[str, Any]) -> str:
    """A line of the log; what is not finite is null, because JSON has no word for it."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
