"""Files as the benchmarks publish them: found by name, read as UTF-8, plain or compressed."""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..config import UserError
from ..corpora.text import COMPRESSIONS


def find_file(directory: Path, name: str, is_optional: bool = False) -> Path | None:
    """The file of that name in a directory, plain or compressed.

    Args:
        directory: where to look.
        name: without the suffix of a compression.
        is_optional: return none where there is no such file.

    Raises:
        UserError: if there is none; the files that are there are named.
    """
    for suffix in ("", *COMPRESSIONS):
        if (path := directory / f"{name}{suffix}").is_file():
            return path
    if is_optional:
        return None
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give the one that holds {name}")
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:20]) or "nothing"
    raise UserError(
        f"{directory} holds no {name} (plain, {' or '.join(COMPRESSIONS)}); it holds: {found}"
    )


def read_lines(path: Path) -> Iterator[str]:
    r"""The lines of a file without their ends; only ``\n`` and ``\r\n`` end a line.

    Raises:
        UserError: if the file cannot be read, is damaged, or is not UTF-8.
    """
    try:
        with _open(path) as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}); copy or "
            "download it again"
        ) from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is damaged ({error}); copy or download it again") from None
    except OSError as error:  # gzip's own complaint has no strerror
        raise UserError(f"cannot read {path} ({error.strerror or error})") from None


def read_json(path: Path) -> object:
    """What a JSON file holds.

    Raises:
        UserError: as ``read_lines``, or if it is no JSON.
    """
    try:
        return json.loads("\n".join(read_lines(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if hasattr(error, "msg") else "too deep"
        raise UserError(f"{path} is no JSON ({where}); copy or download it again") from None


def _open(path: Path) -> BinaryIO:
    return COMPRESSIONS.get(path.suffix.lower(), lambda p: p.open("rb"))(path)
