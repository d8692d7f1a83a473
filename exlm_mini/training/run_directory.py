"""The directory of a run, which has one writer at a time and fixed settings. ::

    OUTPUT/
        .lock            held while a process writes here
        config.yaml      the settings of the run; all but a few are fixed
        versions.json    the software, device and commit that made it
        data/            the packs of the run, unless they were prepared before
        metrics.jsonl    see ``metrics``
        checkpoints/     see ``checkpoint``

Checkpoints hold what a run needs to resume; this module keeps two runs from mixing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_mini.config import DataConfig, ModelConfig, RunConfig, settings_with
from exlm_mini.config.checks import Effect, UserError
from exlm_mini.config.recipes import dotted, plain, stored_config
from exlm_mini.data.files import write_atomically

if TYPE_CHECKING:  # preparing a corpus takes the lock too, and needs no torch
    import torch

    from exlm_mini.training.checkpoint import Checkpoint

LOCK = ".lock"
CONFIG = "config.yaml"

FREE_SETTINGS = frozenset(settings_with(Effect.NOTHING, Effect.COURSE))
"""Settings that a resumed run may change, because by design no weight depends on them."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locked_directory(path: Path, report: Callable[[str], None] = print) -> Iterator[None]:
    """Context manager that makes a directory and holds its lock, for one writer at a time.

    The lock is the kernel's (``flock``): it ends with the process, so the file that a killed run
    left behind does not block the next. The lock file of a run that wrote something is never
    removed, because that could let two runs in at once.

    Args:
        report: receives a line if the file system has no locks.
    """
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir(path))
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(lock)
        if not os.fstat(lock).st_nlink:  # a start that was refused has just removed it
            os.close(lock)
            raise UserError(f"another command in {path} has just failed; run this one again")
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
        report(
            f"{path} is on a file system without locks; make sure no second run writes there"
        )
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield
    except UserError:
        if set(os.listdir(path)) - before == {LOCK}:  # refused before anything was written
            (path / LOCK).unlink()
            if is_new:
                with contextlib.suppress(OSError):  # others have put files there
                    path.rmdir()
        raise
    finally:
        os.close(lock)


def _take(lock: int, seconds: float = 2.0) -> None:
    """Lock a file, waiting for a worker that outlives its killed parent by up to a second."""
    last = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise
            time.sleep(0.1)


def as_begun(
    path: Path,
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    is_timed: bool = False,
) -> RunConfig:
    """The settings with ``train.precision auto`` resolved, and checked if the run is resumed.

    A resumed run is held to the settings of its start. From there it takes the precision in place
    of ``auto`` and, if it is timed, the steps and their warm-up.

    Args:
        report: receives a line for each of ``FREE_SETTINGS`` that changed, and for ``train.steps``
            if it was raised; other changes are refused.
        is_timed: whether the length of the run was given in minutes in place of steps.
    """
    from exlm_mini.training.processes import with_precision

    file, train = path / CONFIG, config.train
    if not file.is_file():
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        # A start that failed may have left its corpus, whose settings are stored with it.
        names -= {LOCK, "data", *(name for name in names if name.endswith(".partial"))}
        if names:
            raise UserError(
                f"{path} holds {min(names)} but no {CONFIG}, so it is not the directory of a run; "
                "choose another --output"
            )
        return with_precision(config, device)
    start = stored_config(file)
    if train.precision == "auto":
        train = replace(train, precision=start.train.precision)
    if is_timed:
        of_start = start.train
        report(
            f"{path} keeps the {of_start.steps} steps that it was begun with; to train longer, "
            "give --train.steps in place of --train.minutes"
        )
        train = replace(train, steps=of_start.steps, warmup_steps=of_start.warmup_steps)
    config = replace(config, train=train)
    old, new = dotted(plain(start)), dotted(plain(config))
    changes = {key: f"{key}: {old[key]} -> {new[key]}" for key in new if old[key] != new[key]}
    free = set(FREE_SETTINGS)
    if start.data.pack and config.data.pack:  # the checkpoint knows its content, wherever it is
        free.add("data.pack")
    if new["train.steps"] > old["train.steps"]:
        free.add("train.steps")
        shares = {
            "train.chain_warmup": "fixed chains",
            "train.grow_at": "the growth, if it has not come yet",
        }
        what = ["the learning rate", *(shares[key] for key in shares if new[key])]
        changes["train.steps"] += (
            f"; from here on, these follow the longer schedule: {', '.join(what)}"
        )
    if fixed := [line for key, line in changes.items() if key not in free]:
        raise UserError(
            f"{path} holds a run with other settings: {'; '.join(fixed)}; use the same settings, "
            "or choose another --output"
        )
    for line in changes.values():
        report(f"changed since the last start: {line}")
    return config


def check_start(
    checkpoint: Checkpoint,
    config: RunConfig,
    tokenizer_sha256: str | None,
    validation_sha256: str | None,
    report: Callable[[str], None],
) -> None:
    """Raise ``UserError`` if a run cannot start with the weights of another, see
    ``train.start_from``.

    Args:
        tokenizer_sha256: hash of this run's tokenizer; None if it is not made yet.
        validation_sha256: hash of the rows that this run holds out; None if they are not known yet.
        report: receives a line if the other run may have learned from rows held out here.
    """
    state, path = checkpoint.state, checkpoint.path
    data, ours = DataConfig(**state["config"]["data"]), config.data
    is_same = (data.kind, data.source) == (ours.kind, ours.source) and ours.kind != "toy"
    held_out_by = {
        "seed": (state["config"]["seed"], config.seed),
        "data.validation_share": (data.validation_share, ours.validation_share),
        "data.max_documents": (data.max_documents, ours.max_documents),
    }
    is_split_alike = is_same and data.pack is ours.pack is None
    for name, (theirs, mine) in held_out_by.items():
        if is_split_alike and theirs != mine:
            raise UserError(
                f"{path} learned from rows that this run holds out, because its {name} is "
                f"{theirs} and not {mine}; prepare the data once and give both runs "
                "--data.pack"
            )
    if tokenizer_sha256 not in (None, state["tokenizer_sha256"]):
        raise UserError(
            f"{path} was trained with another tokenizer; prepare the data with its "
            "tokenizer.json (--data.tokenizer)"
        )
    if (objective := state["config"]["objective"]) not in ("mlm", config.objective):
        raise UserError(
            f"{path} was trained with objective {objective}, but this run has "
            f"{config.objective}; start from an mlm run"
        )
    # Weights may not fit an encoder with other settings, or have another meaning to it.
    own, other = config.model, ModelConfig(**state["config"]["model"])
    names = [f"shape.{name}" for name in own.shape._fields]
    names += ["rope", *["boundary", "transition"] * (objective == "exlm")]
    for name in names:
        mine, theirs = map(attrgetter(name), (own, other))
        if mine != theirs:
            raise UserError(
                f"{path} has model.{name.removeprefix('shape.')} {theirs}, but this run has "
                f"{mine}; use its model.* settings"
            )
    holds_out_other = validation_sha256 not in (None, state["validation_sha256"])
    if holds_out_other and not is_split_alike and ours.kind != "toy":
        report(
            f"{path} held out other rows; if it learned from some that this run holds out, "
            "validation looks better than it is (give both runs the same --data.pack)"
        )


def settle(path: Path, config: RunConfig, device: torch.device, num_processes: int) -> None:
    """Store the settings of a run, and the software, device and commit that it is made with."""
    import yaml

    from exlm_mini.training.provenance import commit, versions

    for partial in path.glob("*.partial"):  # left by a start that was killed
        partial.unlink()
    text = yaml.safe_dump(plain(config), sort_keys=False)
    write_atomically(path / CONFIG, text.encode())
    used = {**versions(device), "commit": commit(), "num_processes": num_processes}
    write_atomically(path / "versions.json", (json.dumps(used, indent=2) + "\n").encode())
