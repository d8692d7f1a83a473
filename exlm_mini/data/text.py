"""Documents of a local file of text or molecules. What a document is depends on the file:

==============  ==========================================================================
``.txt``        the lines between two blank lines: a paragraph of hard-wrapped text, or a chapter
                if each line is a paragraph. If the first 10,000 lines hold no blank line,
                every line is a document.
``.smi``        one molecule a line: the first field, up to white space; so is ``.txt`` when
                molecules are read
``.csv``        one row, the named column; the first line names the columns
``.jsonl``      one JSON object a line, the named key
``.parquet``    one row, the named column
==============  ==========================================================================

Each may be compressed (``.txt.gz``, ``.smi.xz``, ...). Documents are stripped of outer white space,
and empty ones are skipped. Text must be UTF-8; an error names the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.files import open_regular, reading

SUFFIXES = (".txt", ".smi", ".csv", ".jsonl", ".parquet")
COMPRESSIONS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}

NUM_LINES_SEARCHED = 10_000
"""Lines of a .txt file searched for a blank one."""
NUM_COLUMNS_SHOWN = 20
DEFAULT_COLUMNS = {"text": "text", "smiles": "smiles"}
LONGEST = 1 << 24
"""Characters of a document, or bytes of a line; the tokenizer needs 130 bytes for each."""
_LABELS = re.compile(r"\$[^$]*\$|\([^)]*\)")
"""Names and coordinates of atoms in a CXSMILES extension."""
_CHEMISTRY = re.compile(r"[|,]\s*(\^\d|[CHm]:|LN:|Sg:)")
"""Radicals, bonds, positions of substituents and repeats in one."""


def document(value: object, kind: str, where: str) -> str:
    """The text or molecule in what a person handed in: white space around it is not part of it.

    Args:
        value: a line, a cell of a table or an entry of a list.
        kind: smiles, or anything else for text.
        where: its place, for messages.

    Raises:
        UserError: if it is no text, or not one molecule (see ``smiles_in``).
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
    """Documents of one file; never none.

    Args:
        path: of a format of the table above.
        kind: text or smiles.
        column: of a table; none: ``DEFAULT_COLUMNS``.

    Raises:
        UserError: while iterating, for anything wrong with the file.
    """
    suffix, column = suffix_of(path), column or DEFAULT_COLUMNS[kind]
    is_smiles = suffix == ".smi" or kind == "smiles"
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path} has the unknown suffix '{suffix}'; {nearest(suffix, SUFFIXES)} "
            f"(each also with {' or '.join(COMPRESSIONS)})"
        )
    is_empty = True
    with reading(path), open_decompressed(path) as stream:
        if suffix == ".csv":
            documents: Iterable[str] = _csv_documents(path, stream, column)
        elif suffix == ".jsonl":
            documents = _jsonl_documents(path, stream, column)
        elif suffix == ".parquet":
            documents = _parquet_documents(path, stream, column)
        elif is_smiles:
            documents = _lines(path, stream)
        else:
            documents = _paragraphs(path, stream)
        for text in map(str.strip, documents):
            if text:
                is_empty = False
                _check_length(path, text)
                # What is not one molecule stays whole, for ``clean`` to reject.
                yield (smiles_in(text) if is_smiles else None) or text
    if is_empty:
        raise UserError(
            f"{path} holds no documents, only blank ones; give a file with documents"
        )


def suffix_of(path: Path) -> str:
    """The format of a file by its name, compressed or not, such as ".txt"."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return (Path(path.stem) if is_compressed else path).suffix.lower()


def open_decompressed(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a file."""
    stream = open_regular(path)
    decompress = COMPRESSIONS.get(path.suffix.lower())
    if decompress is None:
        return stream
    stream.close()
    return io.BufferedReader(decompress(path))


def _lines(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends included."""
    for number, raw in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), start=1):
        _check_length(path, raw)
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\0" in line:
                raise ValueError("it holds a NUL")
        except ValueError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text ({error}); convert it, such as "
                "with iconv -f latin1 -t utf-8"
            ) from None
        yield line


def _check_length(path: Path, text: str | bytes) -> None:
    """Refuse a text that would take gigabytes to encode."""
    if len(text) > LONGEST:
        raise UserError(
            f"{path} has a line or document of more than {LONGEST:,} characters; break it up, by "
            "ends of lines and, in a .txt, blank lines"
        )


def _paragraphs(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Documents of a .txt file: see the table at the top."""
    lines = (line.rstrip() for line in _lines(path, stream))
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


def _csv_documents(path: Path, stream: IO[bytes], column: str) -> Iterator[str]:
    """One column of a .csv file."""
    rows = csv_rows(path, _lines(path, stream))
    names = next(rows, [])
    check_column(path, column, names)
    index = names.index(column)
    for row in rows:
        yield row[index]


def csv_rows(path: Path, lines: Iterator[str]) -> Iterator[list[str]]:
    """The header of a CSV file and its rows, all of the same length, without blank lines.

    Raises:
        UserError: naming the line that is malformed.
    """
    csv.field_size_limit(LONGEST)  # the default stops at documents of 131,072 characters
    rows, num_fields = csv.reader(lines, strict=True), None
    try:
        for row in filter(None, rows):
            num_fields = num_fields or len(row)
            if len(row) != num_fields:
                raise csv.Error(f"it has {len(row)} fields, the header {num_fields}")
            yield row
    except csv.Error as error:
        raise UserError(
            f"{path} line {rows.line_num} is no CSV ({error}); mend the line, and quote fields "
            "that hold commas"
        ) from error


def _jsonl_documents(path: Path, stream: IO[bytes], column: str) -> Iterator[str]:
    """One key of a .jsonl file."""
    for number, line in enumerate(_lines(path, stream), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        with reading(where, "write one JSON object a line"):
            row = json.loads(line)
            check_column(where, column, list(row.keys()))
        yield document_text(where, column, row[column])


def _parquet_documents(path: Path, stream: IO[bytes], column: str) -> Iterator[str]:
    """One column of a .parquet file."""
    import pyarrow.parquet

    # Parquet is read from its end, to which a compressed stream cannot seek.
    is_compressed = path.suffix.lower() in COMPRESSIONS
    source = io.BytesIO(stream.read()) if is_compressed else stream
    with pyarrow.parquet.ParquetFile(source) as table:
        check_column(path, column, table.schema_arrow.names)
        for batch in table.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                yield document_text(path, column, value)


def check_column(source: object, column: str, names: list[str]) -> None:
    """Check that exactly one column has this name."""
    if names.count(column) == 1:
        return
    if column in names:
        raise UserError(f"{source} has {names.count(column)} columns '{column}'; keep one")
    shown = ", ".join(" ".join(name.split()) for name in names[:NUM_COLUMNS_SHOWN])
    more = ", ..." if len(names) > NUM_COLUMNS_SHOWN else ""
    raise UserError(
        f"{source} has no column '{column}'; set data.column to one of: {shown}{more}"
    )


def document_text(source: object, column: str, value: object) -> str:
    """A value of a table as a document; a missing value becomes an empty one."""
    if value is None:
        return ""
    with reading(f"{source}: column '{column}'", "set data.column to a column of text"):
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__}, not text")
        value.encode()  # a lone surrogate, which JSON may contain, would fail much later
        return value
