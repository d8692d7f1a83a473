"""Checkpoints that are either complete or refused when they are read.

``torch.load`` and safetensors both accept a file with a flipped bit, and a full disk can leave
half a file under its final name. So a checkpoint is a directory that is written under another name,
renamed in one step, and verified by the sha256 sums in its manifest::

    step-001200/
        model.safetensors        one file per group of tensors
        optimizer.safetensors
        manifest.json            step, state, sha256 of each file, and its own sha256
        config.json, ...         for transformers, see beside_weights

It holds no state of random generators or data loaders: data order, masks and dropout are
functions of counters, so the step is enough to resume, bit for bit on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import read_bytes, reading, sync_directory, write_atomically

MANIFEST = "manifest.json"
REMEDY = "restore it from a copy, or delete {} to use an earlier checkpoint"

_NAME = re.compile(r"step-[0-9]{6,12}")


class Checkpoint(NamedTuple):
    """The state of a run after ``step`` optimiser steps; tensors that were read are on the CPU."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict
    path: Path
    """Directory of the checkpoint."""


# ---- one checkpoint ----


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    state: dict,
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write ``directory/step-NNNNNN``, completely or not at all; returns its path.

    A crash at any moment leaves earlier checkpoints intact and at most a ``.tmp`` directory, which
    the next save removes.

    Args:
        directory: holds the checkpoints of a run; made if missing.
        step: number of optimiser steps done. An existing checkpoint of this step is replaced: it
            must be damaged, because the run would have resumed from an intact one.
        tensors: ``{group: {name: tensor}}``, on any device and in any layout, without shared
            storage; names of groups consist of letters, digits and ``_``.
        state: values that JSON can hold; tuples come back as lists.
        others: contents of more files, which the manifest does not list (see ``beside_weights``).
    """
    final = directory / f"step-{step:06d}"
    draft = directory / f"{final.name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_drafts(directory)
        draft.mkdir()
        files = {}
        for group, named in tensors.items():
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            data = safetensors.torch.save(plain)
            write_atomically(draft / f"{group}.safetensors", data)
            files[f"{group}.safetensors"] = {"sha256": _sha256(data)}
        for name, data in others.items():
            write_atomically(draft / name, data)
        manifest = encode_manifest({"step": step, "files": files, "state": state})
        write_atomically(draft / MANIFEST, manifest)
        if final.exists():  # a directory cannot be renamed onto one with files
            shutil.rmtree(final)
        os.rename(draft, final)
        sync_directory(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # does nothing after the rename
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a ``step-NNNNNN`` directory, or a copy under any name, verifying every sha256."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint {path}; give a step-NNNNNN directory")
    remedy = REMEDY.format(path)
    file, data = path / MANIFEST, read_bytes(path / MANIFEST, remedy)
    with reading(file, remedy):
        fields = json.loads(data)
    is_sealed = isinstance(fields, dict) and fields.pop("manifest_sha256", None) is not None
    if not is_sealed or encode_manifest(fields) != data:
        raise UserError(f"{file} is damaged or is not the manifest of a checkpoint; {remedy}")
    tensors = {}
    for name, entry in fields["files"].items():
        data = read_bytes(path / name, remedy)
        if _sha256(data) != entry["sha256"]:
            raise UserError(f"{path / name} is damaged: its sha256 does not match; {remedy}")
        tensors[name.removesuffix(".safetensors")] = safetensors.torch.load(data)
    return Checkpoint(fields["step"], tensors, fields["state"], path)


def encode_manifest(fields: dict) -> bytes:
    """The manifest as JSON; its last entry is the sha256 of the text without that entry."""
    digest = _sha256(json.dumps(fields, indent=1).encode())
    return (json.dumps({**fields, "manifest_sha256": digest}, indent=1) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- the checkpoints of a run ----


def latest_checkpoint(directory: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint of a run; None if there are no checkpoints.

    Directories with other names than ``save_checkpoint`` gives are ignored. ``report`` receives a
    line for each damaged checkpoint that was skipped.
    """
    lines = []
    for path in _newest_first(directory):
        try:
            newest = load_checkpoint(path)
        except UserError as error:
            lines.append(f"skipped checkpoint {path.name}: {error}")
            continue
        for line in lines:
            report(line)
        return newest
    if lines:
        raise UserError(
            f"no checkpoint in {directory} is intact; restore one from a copy, or start again in "
            f"another --output; {lines[-1]}"
        )
    return None


def prune_checkpoints(directory: Path, keep_last: int, intact_step: int) -> None:
    """Delete old checkpoints, and the remains of crashed saves.

    Args:
        keep_last: number of checkpoints to keep; 0 keeps all.
        intact_step: step of the newest intact checkpoint, just written or read. Counting begins
            with it; newer checkpoints are damaged, and are neither counted nor deleted.
    """
    _remove_drafts(directory)
    usable = [path for path in _newest_first(directory) if _step_of(path) <= intact_step]
    for path in usable[keep_last:] if keep_last else []:
        # A half-deleted checkpoint must not keep its name.
        doomed = path.with_name(f"{path.name}.tmp")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_drafts(directory: Path) -> None:
    """Remove the remains of crashed saves and deletions."""
    for path in directory.glob("step-*.tmp"):
        if _NAME.fullmatch(path.stem):
            shutil.rmtree(path, ignore_errors=True)


def _newest_first(directory: Path) -> list[Path]:
    """Directories with the name of a checkpoint, intact or not."""
    found = [p for p in directory.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# ---- the optimiser ----


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's state of each parameter as ``{"parameter/quantity": tensor}``, without copying."""
    return {
        f"{name}/{quantity}": tensor
        for name, parameter in model.named_parameters()
        for quantity, tensor in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Restore the result of ``optimizer_tensors``, so that the next step is, bit for bit, the one
    that would have followed. The optimiser keeps its own settings."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [
        names[parameter] for group in optimizer.param_groups for parameter in group["params"]
    ]
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, quantity = full_name.rpartition("/")
        # Cloned, because the optimiser keeps the tensor and writes into it.
        state.setdefault(order.index(name), {})[quantity] = tensor.clone()
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
