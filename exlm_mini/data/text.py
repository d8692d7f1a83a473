"""Read the documents of local files of text or molecules. The format decides what a document is:

==============  ==========================================================================
``.txt``        the lines between two blank lines: a paragraph of hard-wrapped text, or a chapter
                if each line is a paragraph. If the first 10,000 lines hold no blank line,
                every line is a document.
``.smi``        the first field of each line, up to white space: one molecule; the same holds for
                ``.txt`` when molecules are read
``.csv``        the named column of each row; the first line names the columns, separated by commas,
                tabs or semicolons
``.tsv``        the same, separated by tabs
``.jsonl``      the named key of each line, which is a JSON object
``.parquet``    the named column of each row
``.lmdb``       the named field of each entry in Uni-Mol's files
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
"""Number of lines of a .txt file that are searched for a blank one."""
NUM_ROWS_BATCH = 1000
NAME_COLUMN = "name one of these, or give another file"
SET_COLUMN = "set data.column to one of these"
_LABELS = re.compile(r"\$[^$]*\$|\([^)]*\)")
"""Matches names and coordinates of atoms in a CXSMILES extension."""
_CHEMISTRY = re.compile(r"[|,]\s*(\^\d|[CHm]:|LN:|Sg:)")
"""Matches radicals, bonds, positions of substituents and repeats in a CXSMILES extension."""


def document(value: object, kind: str, where: str) -> str:
    """The text or molecule in a user's entry, without surrounding white space.

    Args:
        value: a line, a cell of a table or an entry of a list.
        kind: smiles, or anything else for text.
        where: position of the entry, for messages.
    """
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r}, which is not text; give a text or leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} is not UTF-8 text ({value!r}); read it with the right encoding"
        ) from None
    if kind != "smiles":
        return value.strip()
    smiles = smiles_in(value)
    if smiles is None:
        raise UserError(
            f"{where} is {value!r}, not a SMILES followed at most by a name; give only the SMILES"
        )
    return smiles


def smiles_in(text: str) -> str | None:
    """The SMILES in a text: its first field, which a name or a CXSMILES extension may follow.

    None if what follows must not be ignored: another line, [MASK], or an extension with radicals,
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
        kind: text or smiles. A molecule is the whole line or cell; see ``smiles_in``.
        column: column of a table; None means the one named like the kind, "smi" in Uni-Mol's files.
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
    """The suffix that tells the format of a file, ignoring compression: .txt for news.txt.gz."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return (Path(path.stem) if is_compressed else path).suffix.lower()


def open_decompressed(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressing it on the fly."""
    return io.BufferedReader(COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb"))


def _rows(path: Path, stream: io.BufferedReader, column: str) -> Iterator[Any]:
    """The rows of a table as dicts; columns other than ``column`` may be left out."""
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
        if header := next(rows):  # an empty file has no header, and yields nothing
            place = find_column(path, header, column, SET_COLUMN)
            yield from ({column: row[place]} for row in rows)


def csv_rows(path: Path, stream: Iterable[bytes]) -> Iterator[list[str]]:
    """Yield the header of a .csv or .tsv, then its rows, each with a field for every column."""
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
                f"closing one ({error}); double each quotation mark inside a field, and put the "
                "field in quotation marks"
            ) from None
        if row is None:
            return
        if len(row) != len(header):  # such as the last row of a truncated file
            raise UserError(
                f"{path} row {number} (from 0) has {len(row)} fields, but the header has "
                f"{len(header)} (separated by {mark!r}); fix that row"
            )
        yield row


def jsonl_rows(path: Path, stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    for number, line in enumerate(filter(str.strip, _lines(path, stream))):
        with reading(f"{path} row {number} (from 0)", "fix that row"):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise UserError(
                f"{path} row {number} (from 0) is not a JSON object; write one object per line"
            )
        yield row


def separator(header: str, suffix: str) -> str:
    """Column separator: a tab for .tsv, for .csv whichever is most frequent in the header."""
    plain = re.sub('"[^"]*"', "", header)
    return "\t" if suffix == ".tsv" else max(",\t;", key=plain.count)


def _lines(path: Path, stream: Iterable[bytes]) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends included; some spreadsheets end lines with \\r alone."""
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield from io.StringIO(text, newline="") if "\r" in text else [text]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text ({error}); convert it with iconv -f "
                "ENCODING -t utf-8, where ENCODING is the file's, such as latin1 or GB18030"
            ) from None


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Documents of a .txt file, as the table at the top of this module defines them."""
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
    """The values of one column of a table; missing values are skipped.

    Args:
        rows: dicts; a row need not have every column.
        source: name of the table, for messages.
        column: name of a column of text, looked up by ``find_column``.
    """
    name, names = None, dict[str, None]()
    for number, row in enumerate(rows):
        where = f"{source} row {number} (from 0)"
        if not isinstance(row, dict):
            raise UserError(f"{where} is {row!r}, which does not name its fields; fix that row")
        if name is None:
            names |= dict.fromkeys(map(str, row))
            if folded(column) in map(folded, names) or number + 1 == NUM_ROWS_BATCH:
                name = [*names][find_column(source, names, column, SET_COLUMN)]
        key = name
        if name is not None and name not in row:  # rows may spell the name differently
            key = next((own for own in row if folded(own) == folded(name)), None)
        if (value := row.get(key)) is not None:
            yield document(value, "text", f"{where}, column '{key}',")
    if name is None and names:
        find_column(source, names, column, SET_COLUMN)


def folded(name: object) -> str:
    """A name normalised for comparison, so that case, surrounding blanks and the coding of accents
    do not matter."""
    return unicodedata.normalize("NFC", str(name)).strip().casefold()


def find_column(
    source: object, header: Iterable[Any], name: str, remedy: str = NAME_COLUMN
) -> int:
    """Index of the column with this name in a header, or of the only one with this name ``folded``.

    Args:
        remedy: advice at the end of the message if there is no such column.
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
            f"{source} has the column '{name}' {len(places)} times ({twice}); keep one, or give "
            "its exact name"
        )
    if name == "text" and "smiles" in map(folded, names):
        remedy += ", or data.kind to smiles"
    raise UserError(
        f"{source} has no column '{name}'; it has: {', '.join(names)[:300] or 'none'}; {remedy}"
    )
