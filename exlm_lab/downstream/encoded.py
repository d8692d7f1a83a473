"""A task whose texts are ids already, and the file that carries one to another machine.

Reading the file needs torch, numpy and safetensors: a GPU machine fine-tunes without the libraries
that read benchmarks, split molecules or cut text into tokens.

Shapes: R rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch

from exlm_lab.downstream.task import Task
from exlm_mini.config import UserError
from exlm_mini.data.files import open_regular, reading, write_atomically

FORMAT = "exlm-mini encoded task 1"
AGAIN = "prepare the tasks again"


class EncodedPart(NamedTuple):
    """Some examples of a task."""

    rows: list[np.ndarray]
    """R times int32 ids with boundaries, not padded."""
    labels: np.ndarray
    """As ``task.Examples.labels``; empty where they are secret."""
    ids: list[str]
    """R times what the benchmark calls the example."""


class EncodedTask(NamedTuple):
    """All that fine-tuning needs of a task; not for spans, whose answers are pieces of text."""

    task: Task
    parts: dict[str, EncodedPart]
    """By name, ``train`` and ``validation`` among them; in the order in which they are told."""
    notes: dict[str, Any]
    """What a reader of the numbers must know; JSON-able."""

    @property
    def sha256(self) -> str:
        """Of all rows and labels."""
        return sha256_of((part.rows, part.labels) for part in self.parts.values())


def sha256_of(parts: Iterable[tuple[list[np.ndarray], np.ndarray]]) -> str:
    """One hash over the rows and labels of some parts."""
    digest = hashlib.sha256()
    for rows, labels in parts:
        digest.update(f"{len(rows)} {labels.shape}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(4, "little") + row.tobytes())
        digest.update(np.ascontiguousarray(labels))
    return digest.hexdigest()


def save_encoded_task(path: Path, encoded: EncodedTask, made_for: dict[str, Any]) -> None:
    """Write a task as one safetensors file.

    Args:
        path: of the file.
        encoded: the task.
        made_for: what the rows fit, such as ``tokenizer_sha256``; JSON-able, given back by
            ``load_encoded_task``.
    """
    tensors = {}
    for name, (rows, labels, _) in encoded.parts.items():
        tensors[f"{name}.ids"] = torch.from_numpy(np.concatenate(rows).astype(np.int32))
        tensors[f"{name}.lengths"] = torch.tensor([len(row) for row in rows])
        tensors[f"{name}.labels"] = torch.from_numpy(np.array(labels, order="C"))
    about = {
        "format": FORMAT,
        "task": encoded.task._asdict(),
        "names": {name: part.ids for name, part in encoded.parts.items()},
        "notes": encoded.notes,
        "sha256": encoded.sha256,
        "made_for": made_for,
    }
    metadata = {"about": json.dumps(about)}
    write_atomically(path, safetensors.torch.save(tensors, metadata))


def load_encoded_task(path: Path) -> tuple[EncodedTask, dict[str, Any]]:
    """Read and verify what ``save_encoded_task`` wrote.

    Returns:
        The task, and ``made_for`` as it was given.

    Raises:
        UserError: the file is missing, damaged, or another one.
    """
    with reading(path, AGAIN):
        open_regular(path, AGAIN).close()
        with safetensors.safe_open(path, "pt") as stored:
            about = json.loads((stored.metadata() or {}).get("about", "{}"))
            tensors = {name: stored.get_tensor(name).numpy() for name in stored.keys()}  # noqa: SIM118
        if about.get("format") != FORMAT:
            raise UserError(f"{path} holds no encoded task; {AGAIN}")
        parts = {}
        for name, ids in about["names"].items():
            ends = np.cumsum(tensors[f"{name}.lengths"])
            rows = np.split(tensors[f"{name}.ids"], ends[:-1])
            parts[name] = EncodedPart(rows, tensors[f"{name}.labels"], ids)
        fields = {**about["task"], "classes": tuple(about["task"]["classes"])}
        encoded = EncodedTask(Task(**fields), parts, about["notes"])
        if encoded.sha256 != about["sha256"]:
            raise UserError(f"{path} is damaged (sha256 differs); {AGAIN}")
        return encoded, about["made_for"]
