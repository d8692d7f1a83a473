"""Files: those from outside are read with care, ours survive a crash.

Our files appear under their names when they are whole and on the disk; a JSON file has a seal that
shows whether it was edited. A file from outside is read only if it is a regular file. Errors that a
reader expects become a ``UserError`` with a remedy; ``reading`` turns all others into one line that
names the file (``--debug`` shows the error).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from exlm_mini.config.checks import UserError

# ---- written whole ----

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


# ---- from outside ----

ANOTHER = "restore or download it again, or give another"


@contextlib.contextmanager
def reading(path: object, remedy: str = ANOTHER) -> Iterator[None]:
    """Around the work on one file or directory, and nothing else: it would hide our own mistakes.

    Args:
        path: how the line calls it.
        remedy: how the line ends.

    Raises:
        UserError: for whatever goes wrong inside, but for missing packages, a full disk, a reader
            that left and an interrupt.
    """
    try:
        yield
    except (UserError, ImportError, BrokenPipeError):
        raise
    except BaseException as error:
        # What Rust raises when it gives up (tokenizers, safetensors) is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, OSError) and error.errno is not None:
            if error.errno in NO_SPACE:
                raise
            where = error.filename or path
            if isinstance(error, FileNotFoundError) and remedy == ANOTHER:
                remedy = "give an existing path"
            raise UserError(f"cannot read {where} ({error.strerror}); {remedy}") from error
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        raise UserError(f"{path} is damaged or of another kind ({reason}); {remedy}") from error


def refuse_odd_files(directory: Path) -> None:
    """A directory that is written to holds files and directories alone; itself it may be a link.

    Raises:
        UserError: naming the first symbolic link, whose target would be written to, or the first
            pipe, socket or device, which would be waited for.
    """
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # another process may work here
                mode = os.lstat(path).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    kind = "symbolic link" if stat.S_ISLNK(mode) else "pipe, socket or device"
                    raise UserError(
                        f"{path} is a {kind}; put a file or directory of its own there, or choose "
                        "another --output"
                    )


def refused(error: OSError) -> UserError:
    """An unexpected error of the operating system about a file, as one line.

    Raises:
        OSError: the error itself where it names no file; it may be our own mistake.
    """
    if error.errno in NO_SPACE:
        return UserError(f"no space left to write {error.filename or 'the output'}; make room")
    if error.filename is None:
        raise error
    return UserError(
        f"cannot read or write {error.filename} ({error.strerror}); see what it is and who may "
        "use it, or choose another path"
    )


def open_regular(path: str | Path, remedy: str = ANOTHER) -> BufferedReader:
    """Open a file for reading; a pipe, a device or a directory in its place is refused.

    Raises:
        UserError: if it is not there, is none, or may not be read.
    """
    with reading(path, remedy):
        # A pipe would let us wait for its writer.
        stream = open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK))  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.close()
            raise UserError(f"{path} is a pipe or a device, not a file; {remedy}")
        return stream


def read_bytes(path: str | Path, remedy: str = ANOTHER) -> bytes:
    """The bytes of a file.

    Raises:
        UserError: as ``open_regular``, or if reading fails.
    """
    with reading(path, remedy), open_regular(path, remedy) as stream:
        return stream.read()


def read_text(path: str | Path, remedy: str = ANOTHER) -> str:
    """The text of a file.

    Raises:
        UserError: as ``read_bytes``, or if it is not UTF-8.
    """
    with reading(path, remedy):
        return read_bytes(path, remedy).decode()


# ---- sealed ----

REMEDY = "remove its directory and prepare the corpus again"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when all of it is on the disk, or not at all."""
    # Its own for each process: a killed command's worker may be writing for a moment longer.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open_to_write(partial) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        partial.unlink(missing_ok=True)  # it is not what fills the disk
        free = shutil.disk_usage(path.parent).free
        raise UserError(
            f"no space to write {path}, {free:,} bytes are free; make room or choose another "
            "directory"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(path: Path) -> dict[str, int | str]:
    """Size and sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


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
