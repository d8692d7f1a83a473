"""Files that survive a crash: on the disk before they are counted on, whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean the disk, the quota or the file-size limit is used up."""


def open_to_write(file: Path) -> BinaryIO:
    """Open an empty file; where a symbolic link has its name, that is an ``OSError``."""
    return open(file, "wb", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open_to_write(file) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, data: bytes) -> None:
    """Put new contents under a name; a crash leaves the old ones or the new ones."""
    draft = file.with_name(f"{file.name}.tmp")
    try:
        write_synced(draft, data)
        os.rename(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(file.parent)
