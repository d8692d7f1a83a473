"""Documents of a local file of text or molecules. What a document is depends on the file:

==============  ==========================================================================
``.txt``        the lines between two blank lines: a paragraph of hard-wrapped text, or a chapter
                if each line is a paragraph. If the first 10,000 lines hold no blank line,
                every line is a document.
``.smi``        one molecule a line: the first field, up to white space; so is ``.txt`` when
                molecules are read
``.csv``        one row, the named column; the first line names the columns, with commas, tabs or
                semicolons between them
``.tsv``        the same with tabs
``.jsonl``      one JSON object a line, the named key
``.parquet``    one row, the named column
``.lmdb``       one entry of Uni-Mol's files, the named field
==============  ==========================================================================

All but the last may be compressed (``.txt.gz``, ``.smi.xz``, ...). Text must be UTF-8.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.unimol import lmdb_rows

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
SUFFIXES = (".txt", ".smi", *TABLES, ".lmdb")
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}

NUM_LINES_SEARCHED = 10_000
"""Lines of a .txt file searched for a blank one."""
NUM_ROWS_BATCH = 1000
NUM_COLUMNS_SHOWN = 20
_LABELS = re.compile(r"\$[^$]*\$|\([^)]*\)")
"""Names and coordinates of atoms in a CXSMILES extension."""
_CHEMISTRY = re.compile(r"[|,]\s*(\^\d|[CHm]:|LN:|Sg:)")
"""Radicals, bonds, positions of substituents and repeats in one."""


def document(value: object, kind: str, where: str) -> str:
    """The text or molecule in a user's entry, without surrounding white space.

    Args:
        value: a line, a cell of a table or an entry of a list.
        kind: smiles, or anything else for text.
        where: its place, for messages.
    """
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r}, no text; write a text or leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} is not UTF-8 text ({value!r}); read it in its own encoding"
        ) from None
    if kind != "smiles":
        return value.strip()
    smiles = smiles_in(value)
    if smiles is None:
        raise UserError(
            f"{where} is {value!r}, which is not one SMILES and its name; write the SMILES alone"
        )
    return smiles


def smiles_in(text: str) -> str | None:
    """The SMILES of a text: its first field. What follows is a name or a CXSMILES extension.

    None if what follows cannot be left out: another line, a mask, or an extension with radicals,
    bonds, positions or repeats that the SMILES lacks.
    """
    smiles, *rest = text.split(maxsplit=1) or [""]
    behind = "".join(rest)
    extension = _LABELS.sub("", behind) if behind.startswith("|") else ""
    is_unclear = len(text.strip().splitlines()) > 1 or "[MASK]" in behind
    return None if is_unclear or _CHEMISTRY.search(extension) else smiles


def file_documents(path: Path, kind: str, column: str | None = None) -> Iterator[str]:
    """Documents of one file, without surrounding white space; blank ones are skipped.

    Args:
        kind: text or smiles. A molecule stays a whole line or cell, see ``smiles_in``.
        column: of a table; none: named like the kind, in Uni-Mol's files "smi".
    """
    suffix, rows = suffix_of(path), _rows(path)
    if suffix == ".lmdb":
        rows = column_of(rows, str(path), column or "smi")
    elif suffix in TABLES:
        rows = column_of(rows, str(path), column or kind)
    elif kind != "smiles":
        rows = _paragraphs(rows)
    return filter(None, map(str.strip, rows))


def suffix_of(path: Path) -> str:
    """The format of a file by its name, compressed or not, such as ".txt"."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return (Path(path.stem) if is_compressed else path).suffix.lower()


def open_decompressed(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a file."""
    return io.BufferedReader(COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb"))


def _rows(path: Path) -> Iterator[Any]:
    """Lines of a file, or the rows of a table as dicts."""
    suffix = suffix_of(path)
    with reading(path, errors=csv.Error), open_decompressed(path) as stream:
        if suffix == ".lmdb":
            yield from lmdb_rows(path)
        elif suffix == ".parquet":
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(NUM_ROWS_BATCH):
                yield from batch.to_pylist()
        elif suffix == ".jsonl":
            yield from map(json.loads, filter(str.strip, _lines(path, stream)))
        elif suffix in (".csv", ".tsv"):
            csv.field_size_limit(sys.maxsize)
            lines = dropwhile(lambda line: not line.strip(), _lines(path, stream))
            head = next(lines, "")
            every, mark = chain([head], lines), separator(head, suffix)
            yield from csv.DictReader(every, delimiter=mark, strict=True)
        else:
            yield from _lines(path, stream)


def separator(header: str, suffix: str) -> str:
    """What stands between the columns of a .csv, by its first line, or of a .tsv."""
    plain = re.sub('"[^"]*"', "", header)
    return "\t" if suffix == ".tsv" else max(",\t;", key=plain.count)


def _lines(path: Path, stream: Iterable[bytes]) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends included."""
    for number, raw in enumerate(stream, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text ({error}); convert it, such as with "
                "iconv -f latin1 -t utf-8"
            ) from None


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Documents of a .txt file: see the table at the top."""
    lines = map(str.rstrip, lines)
    head = list(islice(lines, NUM_LINES_SEARCHED))
    has_blank_line = "" in "\n".join(head).strip().split("\n")
    document: list[str] = []
    for line in chain(head, lines):
        if line:
            document.append(line)
        if document and (not line or not has_blank_line):
            yield "\n".join(document)
            document = []
    yield "\n".join(document)


def column_of(rows: Iterable[Any], source: str, column: str) -> Iterator[str]:
    """One column of a table; a missing value is passed over.

    Args:
        rows: dicts.
        source: name of the table in messages.
        column: holds text; one that differs in case alone is taken if there is no other.
    """
    name, names = None, dict[str, None]()
    for number, row in enumerate(rows, start=1):
        where = f"{source} row {number}"
        if not isinstance(row, dict) or None in row:  # fields without a name
            raise UserError(f"{where} is {row!r}, without a name for each field; mend it")
        if name is None:
            names |= dict.fromkeys(map(str, row))
            alike = [one for one in names if one.lower() == column.lower()]
            name = column if column in alike else alike[0] if len(alike) == 1 else None
            if name is None and number == NUM_ROWS_BATCH:
                break
        if (value := row.get(name)) is not None:
            yield document(value, "text", f"{where}, column '{name}',")
    if name is None and names:  # a row of JSON lines need not have all columns
        raise UserError(
            f"{source} has no column '{column}'; set data.column to one of: "
            f"{', '.join([*names][:NUM_COLUMNS_SHOWN])}"
        )
