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
``.lmdb``       one entry of Uni-Mol's files, the named field
==============  ==========================================================================

All but the last may be compressed (``.txt.gz``, ``.smi.xz``, ...). Text must be UTF-8.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.unimol import lmdb_rows

TABLES = {".csv": "csv", ".jsonl": "json", ".parquet": "parquet"}
"""Formats of tables, and their readers in ``datasets``."""
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
        kind: text or smiles.
        column: of a table; none: see ``column_of``.
    """
    suffix = suffix_of(path)
    is_smiles = kind == "smiles" or suffix == ".smi"
    if suffix in TABLES:
        documents: Iterable[str] = _table(path, TABLES[suffix], column_of(kind, column))
    elif suffix == ".lmdb":
        documents = _entries(path, column or "smi")
    else:
        documents = _lines(path) if is_smiles else _paragraphs(path)
    for text in filter(None, map(str.strip, documents)):
        # What is not one molecule stays whole, for ``clean`` to reject.
        yield (smiles_in(text) if is_smiles else None) or text


def column_of(kind: str, column: str | None) -> str:
    """The column of a table that holds the documents: the named one, or "text" or "smiles"."""
    return column or kind


def suffix_of(path: Path) -> str:
    """The format of a file by its name, compressed or not, such as ".txt"."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    return (Path(path.stem) if is_compressed else path).suffix.lower()


def open_decompressed(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a file."""
    with reading(path):
        return io.BufferedReader(COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb"))


def _lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends included."""
    with open_decompressed(path) as stream:
        for number in count(1):
            with reading(path):
                raw = stream.readline()
            if not raw:
                return
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} line {number} is not UTF-8 text ({error}); convert it, such as "
                    "with iconv -f latin1 -t utf-8"
                ) from None


def _paragraphs(path: Path) -> Iterator[str]:
    """Documents of a .txt file: see the table at the top."""
    lines = (line.rstrip() for line in _lines(path))
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


# ---- tables ----


def _table(path: Path, reader: str, column: str) -> Iterator[str]:
    """One column of a file."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong we say ourselves
    guard = partial(reading, path, errors=datasets.exceptions.DatasetsError)
    options: dict[str, Any] = {}
    if reader == "csv":  # numbers and words such as NA stay as they are written
        import pandas

        with guard():
            names = list(map(str, pandas.read_csv(path, nrows=0)))
        column = _column_among(names, str(path), column)
        options = {"converters": {column: str}, "keep_default_na": False}
    with guard():
        stream = datasets.load_dataset(
            reader, data_files=str(path), split="train", streaming=True, **options
        )
    return table_documents(stream, str(path), column, guard)


def table_documents(
    stream: Any, source: str, column: str, guard: Callable[[], AbstractContextManager[None]]
) -> Iterator[str]:
    """One column of a streamed data set; a missing value is a blank document.

    Args:
        stream: a ``datasets.IterableDataset``.
        source: its name in messages.
        column: holds text.
        guard: the context in which the stream is read.
    """
    with guard():
        if stream.column_names is not None:
            column = _column_among(stream.column_names, source, column)
            stream = stream.select_columns([column])
        batches = stream.iter(batch_size=NUM_ROWS_BATCH)
    while True:
        with guard():
            batch = next(batches, None)
        if batch is None:
            return
        column = _column_among(list(batch), source, column)
        for value in batch[column]:
            yield _text_of(source, column, value)


def _entries(path: Path, column: str) -> Iterator[str]:
    """One field of the entries of an LMDB file."""
    for where, row in lmdb_rows(path):
        yield _text_of(where, column, row[_column_among(list(map(str, row)), where, column)])


def _column_among(names: list[str], source: str, column: str) -> str:
    """The column of this name; without one, the only one that differs in case alone."""
    alike = [name for name in names if name.lower() == column.lower()]
    if column in names or len(alike) == 1:
        return column if column in names else alike[0]
    shown = ", ".join(" ".join(name.split()) for name in names[:NUM_COLUMNS_SHOWN])
    more = ", ..." if len(names) > NUM_COLUMNS_SHOWN else ""
    raise UserError(
        f"{source} has no column '{column}'; set data.column to one of: {shown}{more}"
    )


def _text_of(source: str, column: str, value: object) -> str:
    """A value of a table as a document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"{source}: column '{column}' holds {type(value).__name__}, not text; set data.column "
            "to a column of text"
        )
    return value
