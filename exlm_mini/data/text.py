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
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, dropwhile, islice
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
NAME_COLUMN = "name one of these, or give another file"
SET_COLUMN = "set data.column to one of these"
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
    suffix = suffix_of(path)
    with reading(path, errors=csv.Error), open_decompressed(path) as stream:
        if suffix in (*TABLES, ".lmdb"):
            column = column or ("smi" if suffix == ".lmdb" else kind)
            rows = column_of(_rows(path, stream, column), str(path), column)
        else:
            lines = _lines(path, stream)
            rows = lines if kind == "smiles" else _paragraphs(lines)
        yield from filter(None, map(str.strip, rows))


def suffix_of(path: Path) -> str:
    """The format of a file by its name, compressed or not, such as ".txt"."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return (Path(path.stem) if is_compressed else path).suffix.lower()


def open_decompressed(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a file."""
    return io.BufferedReader(COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb"))


def _rows(path: Path, stream: io.BufferedReader, column: str) -> Iterator[Any]:
    """The rows of a table as dicts, which need hold no other column."""
    suffix = suffix_of(path)
    if suffix == ".lmdb":
        yield from lmdb_rows(path)
    elif suffix == ".parquet":
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(stream)
        place = find_column(path, file.schema_arrow.names, column, SET_COLUMN)
        for batch in file.iter_batches(NUM_ROWS_BATCH):
            yield from ({column: value} for value in batch.column(place).to_pylist())
    elif suffix == ".jsonl":
        yield from jsonl_rows(path, stream)
    else:
        rows = csv_rows(path, stream)
        if header := next(rows):  # nothing comes of an empty file, as of one without a table
            place = find_column(path, header, column, SET_COLUMN)
            yield from ({column: row[place]} for row in rows)


def csv_rows(path: Path, stream: Iterable[bytes]) -> Iterator[list[str]]:
    """The header of a .csv or .tsv and then its rows, each with a field for every column."""
    csv.field_size_limit(sys.maxsize)
    lines = dropwhile(lambda line: not line.strip(), _lines(path, stream))
    first = next(lines, "")
    mark = separator(first, suffix_of(path))
    rows = csv.reader(chain([first], lines), delimiter=mark, strict=True)
    header = next(rows, [])
    yield header
    filled = (row for row in rows if len(row) == len(header) or any(map(str.strip, row)))
    for number in count():
        try:
            row = next(filled, None)
        except csv.Error as error:
            raise UserError(
                f"{path} row {number} (from 0) has an unclosed quotation mark, or text after a "
                f"closing one ({error}); write a mark within a field twice, and put the field in "
                "quotation marks"
            ) from None
        if row is None:
            return
        if len(row) != len(header):  # such as the last one of a file that was cut off
            raise UserError(
                f"{path} row {number} (from 0) has {len(row)} fields, the header {len(header)}, "
                f"with {mark!r} between them; mend it"
            )
        yield row


def jsonl_rows(path: Path, stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    for number, line in enumerate(filter(str.strip, _lines(path, stream))):
        with reading(f"{path} row {number} (from 0)", "mend it"):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number} (from 0) is no JSON object; write it so")
        yield row


def separator(header: str, suffix: str) -> str:
    """What stands between the columns of a .csv, by its first line, or of a .tsv."""
    plain = re.sub('"[^"]*"', "", header)
    return "\t" if suffix == ".tsv" else max(",\t;", key=plain.count)


def _lines(path: Path, stream: Iterable[bytes]) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends included; some spreadsheets write \\r alone."""
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield from io.StringIO(text, newline="") if "\r" in text else [text]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text ({error}); convert it with iconv -f "
                "ENCODING -t utf-8, where ENCODING is its own, such as latin1 or GB18030"
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
        rows: dicts, of which not each needs to have every column.
        source: name of the table in messages.
        column: holds text, see ``find_column``.
    """
    name, names = None, dict[str, None]()
    for number, row in enumerate(rows):
        where = f"{source} row {number} (from 0)"
        if not isinstance(row, dict):
            raise UserError(f"{where} is {row!r}, without a name for each field; mend it")
        if name is None:
            names |= dict.fromkeys(map(str, row))
            if folded(column) in map(folded, names) or number + 1 == NUM_ROWS_BATCH:
                name = [*names][find_column(source, names, column, SET_COLUMN)]
        key = name
        if name is not None and name not in row:  # rows may spell it differently
            key = next((own for own in row if folded(own) == folded(name)), None)
        if (value := row.get(key)) is not None:
            yield document(value, "text", f"{where}, column '{key}',")
    if name is None and names:
        find_column(source, names, column, SET_COLUMN)


def folded(name: object) -> str:
    """A name without case, blanks around it and the way its accents are coded, which do not
    count."""
    return unicodedata.normalize("NFC", str(name)).strip().casefold()


def find_column(
    source: object, header: Iterable[Any], name: str, remedy: str = NAME_COLUMN
) -> int:
    """The place of a column in a header: the one of this name, or the only one ``folded`` to it.

    Args:
        source: the table, in messages.
        header: the names of all columns.
        remedy: for a name that is not there.
    """
    names = [str(own) for own in header]
    places = [place for place, own in enumerate(names) if own == name] or [
        place for place, own in enumerate(names) if folded(own) == folded(name)
    ]
    if len(places) == 1:
        return places[0]
    if places:
        twice = ", ".join(f"'{names[place]}'" for place in places)
        raise UserError(
            f"{source} has the column '{name}' {len(places)} times ({twice}); keep or name one of "
            "them"
        )
    raise UserError(
        f"{source} has no column '{name}', it has: {', '.join(names)[:300] or 'none'}; {remedy}"
    )
