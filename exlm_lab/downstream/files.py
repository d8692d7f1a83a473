"""Files as the benchmarks publish them: found by name, read as UTF-8, plain or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from exlm_mini.config import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import COMPRESSIONS, open_decompressed


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
    with reading(path), open_decompressed(path) as stream:
        for number, raw in enumerate(stream, start=1):
            with reading(f"{path} line {number}"):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield line.removesuffix("\n").removesuffix("\r")


def read_json(path: Path) -> object:
    """What a JSON file holds.

    Raises:
        UserError: as ``read_lines``, or if it is no JSON.
    """
    with reading(path):
        text = "\n".join(read_lines(path))
        content = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair is no text: nothing could encode it
            json.dumps(content, ensure_ascii=False).encode()
        return content
