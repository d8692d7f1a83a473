"""Checkpoints that are whole or refused: written aside, renamed in one step, checked by sha256.

``torch.load`` and safetensors both accept a file in which one bit has flipped, and a full disk
can leave half a file under its final name. So a checkpoint is a directory with a manifest::

    step-001200/
        model.safetensors        one file per group of tensors
        optimizer.safetensors
        manifest.json            step, state, size and sha256 of each file, and its own sha256

It holds no state of random generators or data loaders: data order, masks and dropout are
functions of counters, so the step is enough to go on, on the same machine bit for bit.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from exlm_mini.config import UserError
from exlm_mini.data.files import NO_SPACE, open_regular, reading, sync_directory, write_synced
from exlm_mini.training.manifest import (
    DIRECTORY_NAME,
    FILE_NAME,
    FORMAT,
    MANIFEST,
    USE_EARLIER,
    VERSION,
    broken,
    encode_manifest,
    file_entry,
    read_checked,
    read_manifest,
)

_LEFTOVER_NAME = re.compile(r"(step-[0-9]{6,12})\.(tmp|replaced)")


class Checkpoint(NamedTuple):
    """What was saved after ``step`` optimiser steps; all tensors on the CPU."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict


def save_checkpoint(
    directory: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict
) -> Path:
    """Write ``directory/step-NNNNNN``, so that it is there complete or not at all.

    A crash at any moment leaves the earlier checkpoints as they were and at most a ``.tmp``
    directory, which the next save removes. A checkpoint of the same step is replaced.

    Args:
        directory: where the checkpoints of a run live; made if missing.
        step: optimiser steps done, at least 0.
        tensors: ``{group: {name: tensor}}``, any device and layout. Within a group a tensor
            under two names (tied weights) is written once and comes back tied.
        state: JSON-able: settings, versions, hash of the data. Tuples come back as lists.

    Returns:
        The directory of the new checkpoint.

    Raises:
        UserError: not enough space, or the directory cannot be written.
        ValueError: negative step, or a group name that is not letters, digits and ``_``.
        TypeError: ``state`` is not JSON-able.
    """
    if step < 0:
        raise ValueError(f"step is {step}; it must not be negative")
    for group in tensors:
        if not FILE_NAME.fullmatch(f"{group}.safetensors"):
            raise ValueError(f"group '{group}' must be letters, digits and _")
    stored, tied = _without_duplicates(tensors)
    needed = _num_bytes(stored, state)
    final = directory / f"step-{step:06d}"
    draft = directory / f"{final.name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
        files = {}
        for group, named in stored.items():
            data = safetensors.torch.save(named)
            write_synced(draft / f"{group}.safetensors", data)
            files[f"{group}.safetensors"] = file_entry(data, tied[group])
        fields = {"format": FORMAT, "version": VERSION, "step": step}
        manifest = encode_manifest({**fields, "files": files, "state": state})
        write_synced(draft / MANIFEST, manifest)
        sync_directory(draft)
        _publish(draft, final)
    except OSError as error:
        raise _save_error(error, final, needed) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # already renamed if all went well
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint; nothing is used before its size and sha256 are found right.

    Args:
        path: a ``step-NNNNNN`` directory, or a copy of one under any name.

    Returns:
        The checkpoint, tied tensors tied.

    Raises:
        UserError: missing, truncated or changed file, a manifest this version cannot read, or
            numbers of a model that are not finite: no training goes on from them.
    """
    manifest = read_manifest(path / MANIFEST)
    with reading(path, USE_EARLIER.format(path)):
        tensors = {}
        for file_name, entry in manifest["files"].items():
            file = path / file_name
            data = read_checked(file, entry)
            named = safetensors.torch.load(data)
            named.update({alias: named[owner] for alias, owner in entry["tied"].items()})
            tensors[file_name.removesuffix(".safetensors")] = named
        if name := not_finite(tensors.get("model", {})):
            raise broken(
                path / "model.safetensors", f"has numbers in {name} that are not finite"
            )
        return Checkpoint(manifest["step"], tensors, manifest["state"])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Name of the first tensor with a number that is none, or infinite; none if all are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


def latest_checkpoint(directory: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies.

    Args:
        directory: as for ``save_checkpoint``; anything in it with another name is ignored.
        report: called with one line for each broken or unfinished checkpoint passed over; not
            where the error says it.

    Returns:
        The checkpoint; None if the directory is missing or holds none.

    Raises:
        UserError: there are checkpoints and none of them is intact; says what the newest lacks.
    """
    newest, reasons = None, []
    found = _newest_first(directory)
    for path in found:
        try:
            newest = load_checkpoint(path)
            break
        except UserError as error:
            reasons.append(str(error))
    if found and newest is None:
        which = f"none of the {len(found)} checkpoints in {directory} is intact; the newest"
        if len(found) == 1:
            which = f"the only checkpoint in {directory} is not intact"
        earlier = USE_EARLIER.format(found[0])
        reason = reasons[0].replace(earlier, "start again in another --output")
        raise UserError(f"{which}: {reason}")
    for path in sorted(directory.glob("step-*.tmp")):
        report(f"skipped checkpoint {path.name}: it is not finished; the next save removes it")
    for path, reason in zip(found, reasons, strict=False):
        report(f"skipped checkpoint {path.name}: {reason}")
    return newest


def prune_checkpoints(directory: Path, keep_last: int, best_step: int | None) -> None:
    """Delete old checkpoints, never the only one that is intact, and what a crashed save left.

    Only what is older than the newest intact one goes. To find that, checkpoints are read again
    from the newest on: one per call, as a rule, and none where nothing is to be deleted. A crash
    leaves at most a ``.tmp`` directory, which the next call or save removes.

    Args:
        directory: as for ``save_checkpoint``; anything in it with another name is ignored.
        keep_last: how many of the newest to keep, 0 for all. One whose manifest is damaged, or
            of which a file is missing or of another size, does not count.
        best_step: this one is kept besides, if it is there.

    Raises:
        UserError: an old checkpoint cannot be deleted.
        ValueError: negative ``keep_last``.
    """
    if keep_last < 0:
        raise ValueError(f"keep_last is {keep_last}; it must not be negative")
    if directory.is_dir():
        _remove_leftovers(directory)
    found = _newest_first(directory) if keep_last else []
    old: list[Path] = []
    num_complete = 0
    for path in found:
        if num_complete < keep_last:
            num_complete += _is_complete(path)
        elif _step_of(path) != best_step:
            old.append(path)
    if old:
        intact = next((path for path in found if _is_intact(path)), found[-1])
        old = [path for path in old if found.index(path) > found.index(intact)]
    for path in old:
        # Half of a checkpoint must not stand under its name.
        doomed = directory / f"step-{_step_of(path):06d}.tmp"
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
        except OSError as error:
            raise UserError(
                f"cannot delete the old checkpoint {path} ({error.strerror}); check the "
                "permissions of its directory, or keep all with train.keep_last 0"
            ) from error
        shutil.rmtree(doomed, ignore_errors=True)


def _without_duplicates(
    tensors: dict[str, dict[str, Tensor]],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, str]]]:
    """Contiguous CPU tensors to write, and ``{group: {tied name: name that is written}}``."""
    stored: dict[str, dict[str, Tensor]] = {}
    tied: dict[str, dict[str, str]] = {}
    for group, named in tensors.items():
        stored[group], tied[group] = {}, {}
        owners: dict[tuple, str] = {}
        storages = set()
        for name, tensor in named.items():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            owner = owners.setdefault((*place, tensor.dtype), name)
            if owner != name and tensor.numel():  # all empty tensors lie at address 0
                tied[group][name] = owner
                continue
            plain = tensor.detach().cpu().contiguous()
            # safetensors refuses two views of one storage.
            storage = plain.untyped_storage().data_ptr()
            stored[group][name] = plain.clone() if storage in storages else plain
            storages.add(storage)
    return stored, tied


def _num_bytes(stored: dict[str, dict[str, Tensor]], state: dict) -> int:
    """Bytes a checkpoint takes, a little more rather than less."""
    entries = [(name, tensor) for named in stored.values() for name, tensor in named.items()]
    headers = sum(len(name.encode()) + 128 for name, _ in entries)
    return sum(t.nbytes for _, t in entries) + headers + len(encode_manifest(state)) + 4096


def _remove_leftovers(directory: Path) -> None:
    """Remove what a crashed save left, unless it is the only whole copy of its step."""
    for path in directory.iterdir():
        name = _LEFTOVER_NAME.fullmatch(path.name)
        if name and (name[2] == "tmp" or _is_intact(directory / name[1])):
            shutil.rmtree(path, ignore_errors=True)


def _newest_first(directory: Path) -> list[Path]:
    """Directories with the name of a checkpoint, broken ones too; none if there is no directory."""
    try:
        paths = [path for path in directory.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"cannot list {directory} ({error.strerror}); check its permissions"
        ) from error
    found = [path for path in paths if DIRECTORY_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step_of(path), path.suffix == ""), reverse=True)


def _step_of(path: Path) -> int:
    return int(DIRECTORY_NAME.fullmatch(path.name)[1])


def _is_complete(path: Path) -> bool:
    """Its manifest is right and its files have the sizes it says; costs no reading of them."""
    try:
        files = read_manifest(path / MANIFEST)["files"]
        return all((path / name).stat().st_size == files[name]["bytes"] for name in files)
    except (UserError, OSError):
        return False


def _is_intact(path: Path) -> bool:
    """``load_checkpoint`` would take it; reads all files piece by piece, holds no tensors."""
    try:
        for name, entry in read_manifest(path / MANIFEST)["files"].items():
            with open_regular(path / name) as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != entry["sha256"]:
                    return False
            with safetensors.safe_open(path / name, "pt") as tensors:
                if not set(entry["tied"].values()) <= set(tensors.keys()):
                    return False
    except (UserError, OSError, safetensors.SafetensorError):
        return False
    return _is_complete(path)


def _publish(draft: Path, final: Path) -> None:
    """Give a complete draft its name; at no moment is the step without a whole checkpoint."""
    replaced = final.with_name(f"{final.name}.replaced")
    if replaced.exists():  # whole, for a crashed save left it and what took its place is not
        shutil.rmtree(final, ignore_errors=True)
    elif final.exists():
        os.rename(final, replaced)  # a directory cannot be renamed onto one that has files
    os.rename(draft, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _save_error(error: OSError, final: Path, needed: int) -> UserError:
    """The line for a failed save."""
    if error.errno not in NO_SPACE:
        return UserError(
            f"cannot save checkpoint {final} ({error.strerror}); check the directory, or "
            "choose another --output"
        )
    parents = (path for path in final.parents if path.exists())
    free = shutil.disk_usage(next(parents)).free
    return UserError(
        f"no room for checkpoint {final} ({error.strerror}): it needs {needed:,} bytes, "
        f"{free:,} are free; free some space or lift the file size limit, then start again: "
        "earlier checkpoints are intact"
    )
