"""Files from outside: read only if they are files, and all that is wrong with one in one line.

What a reader foresees it tells itself, with ``UserError``. ``reading`` stands around the work on a
file and turns everything else into one line that names the file; ``--debug`` shows what it was.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .config import UserError
from .durable import NO_SPACE

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
    """What the operating system says of a file, where nobody foresaw it, as one line.

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


def open_regular(path: str | Path, remedy: str = ANOTHER) -> BinaryIO:
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
