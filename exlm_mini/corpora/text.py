"""Documents from local files, from the Hugging Face hub, or from Python's own reference manual.

One loader serves text and molecules. What a document is depends on the file:

==============  ==========================================================================
``.txt``        the lines between two blank lines: a paragraph of hard-wrapped text, a chapter
                where each line is a paragraph. If the first 10,000 lines hold no blank line,
                every line is a document.
``.smi``        one molecule a line: the first field, up to white space; so is ``.txt`` when
                molecules are read
``.csv``        one row, the named column; the first line names the columns
``.jsonl``      one JSON object a line, the named key
``.parquet``    one row, the named column
==============  ==========================================================================

Each may be compressed (``.txt.gz``, ``.smi.xz``, ...). Documents are stripped of outer white
space, empty ones are skipped. Text is UTF-8; anything else stops with the position of the first
bad byte.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from ..config import DataConfig, UserError, nearest
from .english import embedded_english

SUFFIXES = (".txt", ".smi", ".csv", ".jsonl", ".parquet")
COMPRESSIONS: dict[str, Callable[[Path], BinaryIO]] = {".gz": gzip.open, ".xz": lzma.open}

NUM_LINES_SEARCHED = 10_000
"""Lines of a .txt file searched for a blank one."""
NUM_COLUMNS_SHOWN = 20


def load_documents(data: DataConfig, default_column: str) -> Iterator[str]:
    """The documents of ``data.files`` or ``data.hub``, at most ``data.max_documents``.

    Args:
        data: sources; one of ``files`` and ``hub`` must be set.
        default_column: column of tables where ``data.column`` is none.

    Raises:
        UserError: for whatever is wrong with a source, while iterating: one line that names the
            file, what is wrong with it and the remedy.
    """
    column = data.column or default_column
    if data.hub:
        documents = _hub_documents(data, column)
    elif data.files:
        documents = chain.from_iterable(
            _file_documents(Path(name), column, data.kind) for name in data.files
        )
    else:
        raise ValueError("neither data.files nor data.hub is set")
    return islice(documents, data.max_documents)


def text_documents(data: DataConfig) -> Iterator[str]:
    """Text to train on: the given files, the hub data set, or the embedded English."""
    if data.files or data.hub:
        return load_documents(data, default_column="text")
    return islice(embedded_english(), data.max_documents)


# ---- local files ----


def _file_documents(path: Path, column: str, kind: str) -> Iterator[str]:
    """Documents of one file; never none."""
    suffix, _ = _suffixes(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the files in it")
    with _readable(path):
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give a file with documents")
    if suffix == ".csv":
        documents: Iterable[str] = _csv_documents(path, column)
    elif suffix == ".jsonl":
        documents = _jsonl_documents(path, column)
    elif suffix == ".parquet":
        documents = _parquet_documents(path, column)
    elif suffix == ".smi" or kind == "smiles":
        documents = (line.split(maxsplit=1)[0] for line in _lines(path) if line.strip())
    else:
        documents = _paragraphs(path)
    is_empty = True
    for document in map(str.strip, documents):
        if document:
            is_empty = False
            yield document
    if is_empty:
        raise UserError(
            f"{path} holds no documents, only blank ones; give a file with documents"
        )


def _suffixes(path: Path) -> tuple[str, str]:
    """(format, compression) of a file name, such as (".txt", ".xz"); no compression is ""."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    suffix = (Path(path.stem) if compression else path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path} has the unknown suffix '{suffix}'; {nearest(suffix, SUFFIXES)} "
            f"(each also with {' or '.join(COMPRESSIONS)})"
        )
    return suffix, compression


def _open(path: Path) -> BinaryIO:
    """The decompressed bytes of a file."""
    _, compression = _suffixes(path)
    if compression:
        return io.BufferedReader(COMPRESSIONS[compression](path))
    return path.open("rb")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what the operating system or a decompressor says of a file into one line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged ({error}); copy or download it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check data.files") from None


def _lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file with their ends; positions count bytes of the decompressed file."""
    num_bytes_before = 0
    with _readable(path), _open(path) as stream:
        for raw in stream:
            if 0 in raw:
                raise UserError(
                    f"{path} is binary (a NUL at byte {num_bytes_before + raw.index(0)}); text "
                    "must be UTF-8"
                )
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} is not UTF-8 (byte 0x{raw[error.start]:02x} at position "
                    f"{num_bytes_before + error.start}); convert it, such as with iconv -f "
                    "latin1 -t utf-8"
                ) from None
            yield line.removeprefix("\ufeff") if num_bytes_before == 0 else line
            num_bytes_before += len(raw)


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


def _csv_documents(path: Path, column: str) -> Iterator[str]:
    """One column of a .csv file."""
    csv.field_size_limit(2**31 - 1)  # the default stops at documents of 131,072 characters
    rows = csv.reader(_lines(path), strict=True)
    try:
        names = next(rows, [])
        check_column(path, column, names)
        index = names.index(column)
        for row in rows:
            if row and len(row) != len(names):
                raise UserError(
                    f"{path} line {rows.line_num} has {len(row)} fields, the header "
                    f"{len(names)}; quote fields that hold commas"
                )
            if row:
                yield row[index]
    except csv.Error as error:
        raise UserError(
            f"{path} line {rows.line_num} is no CSV ({error}); mend the line"
        ) from None


def _jsonl_documents(path: Path, column: str) -> Iterator[str]:
    """One key of a .jsonl file."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = (
                error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            )
            raise UserError(
                f"{path} line {number} is not JSON ({reason}); write one object a line"
            ) from None
        if not isinstance(row, dict):
            raise UserError(
                f"{path} line {number} is not a JSON object; write one object a line"
            )
        check_column(f"{path} line {number}", column, list(row))
        yield document_text(f"{path} line {number}", column, row[column])


def _parquet_documents(path: Path, column: str) -> Iterator[str]:
    """One column of a .parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"reading {path} needs pyarrow; pip install 'exlm-mini[text]'"
        ) from None
    with _readable(path):
        _, compression = _suffixes(path)
        # Parquet is read from its end, which a compressed stream cannot do.
        source = io.BytesIO(_open(path).read()) if compression else path
        try:
            with pyarrow.parquet.ParquetFile(source) as table:
                check_column(path, column, table.schema_arrow.names)
                for batch in table.iter_batches(columns=[column]):
                    for value in batch.column(0).to_pylist():
                        yield document_text(path, column, value)
        except (pyarrow.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{path} is no readable Parquet file ({reason}); copy or download it again"
            ) from None


def check_column(source: object, column: str, names: list[str]) -> None:
    if column not in names:
        shown = ", ".join(" ".join(name.split()) for name in names[:NUM_COLUMNS_SHOWN])
        more = ", ..." if len(names) > NUM_COLUMNS_SHOWN else ""
        raise UserError(
            f"{source} has no column '{column}'; set data.column to one of: {shown}{more}"
        )


def document_text(source: object, column: str, value: object) -> str:
    """A value of a table as a document; a missing value is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"{source}: column '{column}' holds {type(value).__name__}, not text; set "
            "data.column to a column of text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{source}: column '{column}' holds half a surrogate pair at character "
            f"{error.start}; write the text as UTF-8"
        ) from None
    return value


# ---- the hub ----


def _hub_documents(data: DataConfig, column: str) -> Iterator[str]:
    """One column of a data set on the Hugging Face hub, downloaded whole and cached."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.hub needs the package datasets; pip install 'exlm-mini[text]'"
        ) from None
    datasets.disable_progress_bars()
    source = f"hub data set {data.hub}"
    try:
        table = datasets.load_dataset(data.hub, data.hub_config, split=data.hub_split)
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(
            f"cannot load {source}, configuration {data.hub_config}, split {data.hub_split} "
            f"({reason}); check the three names and the network, or give data.files"
        ) from None
    check_column(source, column, table.column_names)
    is_empty = True
    for batch in table.select_columns([column]).iter(batch_size=1000):
        for value in batch[column]:
            document = document_text(source, column, value).strip()
            if document:
                is_empty = False
                yield document
    if is_empty:
        raise UserError(f"{source} holds no documents; choose another split or column")
