"""Read files from outside, and write files that survive a crash.

A file that this package writes gets its name only once it is complete and on the disk; JSON files
carry a seal that shows whether they were edited.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from exlm_mini.config.checks import UserError

ANOTHER = "restore it or download it again, or give another file"
REMEDY = "remove its directory and prepare the corpus again"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exhausted quota or the file size limit."""
DAMAGE = (
    OSError, ValueError, KeyError, OverflowError, RecursionError, EOFError, StopIteration,
    zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Exceptions that parsers raise for a file they cannot read."""


# ---- writing ----


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets its name only once it is completely on the disk."""
    # One name per process, as a worker of a killed command may keep writing for a moment.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(partial, path)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(partial):
            error.filename = str(path)  # the path asked for; a full disk names no file
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file; a crash leaves either the old contents or the new."""
    with whole_file(path) as stream:
        stream.write(data)


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----


@contextlib.contextmanager
def reading(
    path: object, remedy: str = ANOTHER, errors: type[Exception] = OSError
) -> Iterator[None]:
    """Context manager that turns a parser's errors into a ``UserError`` about the file.

    Only the parser belongs inside it: bugs in our own code would be reported as a damaged file.

    Args:
        path: the file, or a name for whatever else is read, for the message.
        remedy: advice at the end of the message.
        errors: exception that the parser raises besides those in ``DAMAGE``.
    """
    try:
        yield
    except (UserError, BrokenPipeError, ModuleNotFoundError):
        raise
    except (*DAMAGE, errors) as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        if isinstance(error, OSError) and error.errno is not None:
            path, reason = error.filename or path, str(error.strerror)
        raise UserError(f"cannot read {path} ({reason}); {remedy}") from error


def refused(error: OSError) -> UserError:
    """The one-line ``UserError`` for an unexpected ``OSError``; raises ``error`` itself if it names
    no file, unless the disk is full."""
    if error.errno in NO_SPACE:
        return UserError(
            f"no space left to write {error.filename or 'the output'}; free some space"
        )
    if error.filename is None:
        raise error
    folder = Path(os.fsdecode(error.filename)).parent
    if error.errno == errno.ENOENT and not folder.exists():
        return UserError(
            f"cannot write {error.filename}: there is no folder {folder}; create it"
        )
    return UserError(
        f"cannot read or write {error.filename} ({error.strerror}); check its type and "
        "permissions, or choose another path"
    )


def check_file(path: Path) -> None:
    """Refuse a path that is not a file, before anything is imported or read for it."""
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "no such file"
        raise UserError(f"cannot read {path} ({why}); give an existing path")


def read_bytes(path: str | Path, remedy: str = ANOTHER) -> bytes:
    """The bytes of a file."""
    with reading(path, remedy):
        return Path(path).read_bytes()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with reading(path), open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- sealed JSON ----


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, with the sha256 of its content as the field ``seal``."""
    sealed = {**content, "seal": seal_of(content)}
    text = json.dumps(sealed, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode(errors="backslashreplace"))  # lone surrogates in paths


def read_json(path: Path, remedy: str = REMEDY) -> dict:
    """Read the JSON object that ``write_json`` wrote, without its seal; refuse an edited file."""
    data = read_bytes(path, remedy)
    with reading(path, remedy):
        content = json.loads(data)
    if not isinstance(content, dict) or content.pop("seal", None) != seal_of(content):
        raise UserError(f"{path} has changed since it was written; {remedy}")
    return content


def seal_of(content: dict) -> str:
    """SHA-256 of a JSON object's content, independent of its layout, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
