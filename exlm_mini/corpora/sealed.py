"""Files of a prepared corpus: whole or not there, and JSON that tells when it was edited."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..config import UserError
from ..durable import NO_SPACE, open_to_write, sync_directory
from ..outside import open_regular, read_bytes, reading

REMEDY = "remove its directory and prepare the corpus again"


class _HashedFile:
    """A file being written, hashed on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.is_wanted = True

    def write(self, content: bytes | np.ndarray) -> None:
        view = memoryview(content).cast("B")
        self.num_bytes += len(view)
        self._stream.write(view)
        self._hash.update(view)

    def fingerprint(self) -> dict[str, int | str]:
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[_HashedFile]:
    """A file that appears under its name when all of it is on the disk, or not at all."""
    # Its own for each process: a killed command's worker may be writing for a moment longer.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    file = None
    try:
        with open_to_write(partial) as stream:
            file = _HashedFile(stream)
            yield file
            stream.flush()
            os.fsync(stream.fileno())
        if file.is_wanted:
            os.replace(partial, path)
            sync_directory(path.parent)
    except OSError as error:
        if error.errno in NO_SPACE:
            needed = file.num_bytes if file else 0
            partial.unlink(missing_ok=True)  # it is not what fills the disk
            free = shutil.disk_usage(path.parent).free
            raise UserError(
                f"no space to write {path}: it needs {needed:,} bytes or more, {free:,} are "
                "free; make room or choose another directory"
            ) from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file so that at any moment it is whole, old or new.

    Its field ``seal`` is the sha256 of all others: ``read_json`` refuses a file that was edited.
    """
    sealed = {**content, "seal": seal_of(content)}
    with whole_file(path) as file:
        file.write((json.dumps(sealed, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict:
    """A JSON object from a file of a prepared corpus, without its seal.

    Files written before there were seals have none; they are taken as they are.

    Raises:
        UserError: if it is missing, a directory, not a JSON object, or edited.
    """
    with reading(path, REMEDY):
        content = json.loads(read_bytes(path, REMEDY))
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; {REMEDY}")
    seal = content.pop("seal", None)
    if seal is not None and seal != seal_of(content):
        raise UserError(f"{path} has changed since it was written; {REMEDY}")
    return content


def seal_of(content: dict) -> str:
    """Names the content of a JSON object, however it is laid out: sha256, hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Names the content of a file: sha256, hexadecimal."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
