"""Read and write tables piece by piece: .csv, .tsv, .jsonl and .parquet; compressed ones can be
read, too."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import check_file, reading, whole_file
from exlm_mini.data.text import (
    TABLES,
    csv_rows,
    folded,
    jsonl_rows,
    open_decompressed,
    suffix_of,
)
from exlm_mini.training.console import ProgressLine

CHUNK = 1000
"""Rows in memory at a time while a table is read and written piece by piece."""

# ---- reading ----


def check_paths(table: Path, output: Path, endings: Collection[str] = TABLES) -> None:
    """Refuse a table that is not a file, and an output that is the table or has a wrong ending."""
    check_file(table)
    if output.suffix not in endings:
        raise UserError(f"--output is {output}; give a name that ends in {', '.join(endings)}")
    if output.exists() and output.samefile(table):
        raise UserError(f"--output {output} would replace the table; give another name")


def chunks(path: Path, size: int = CHUNK) -> Iterator[Any]:
    """Read a table as data frames of up to ``size`` rows, with cells as they are in the file; a
    table without rows gives one empty frame."""
    import pandas

    suffix = suffix_of(path)
    if suffix not in TABLES:
        raise UserError(
            f"{path} is not a table; give a {', '.join(TABLES)}, compressed or not, with column "
            "names"
        )
    read = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}[suffix]
    with reading(path, errors=csv.Error), open_decompressed(path) as stream:
        empty, is_empty = pandas.DataFrame(), True
        for frame in read(path, stream, size):
            if len(frame):
                yield frame
                is_empty = False
            else:
                empty = frame
        if is_empty:
            yield empty


def num_rows(path: Path) -> int:
    """Number of rows in a table."""
    return sum(map(len, chunks(path)))


def progressing_chunks(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """The ``chunks``, each with the number of its first row; progress is shown on stderr."""
    done = 0
    with ProgressLine("rows", num_rows(path)) as line:
        for frame in chunks(path):
            yield done, frame
            done += len(frame)
            line.tell(done, what)


def check_read(num_read: int, table: Path, columns: Collection[str]) -> None:
    """Refuse a table if none of its rows could be read: the columns are probably the wrong ones."""
    if num_read == 0 and num_rows(table) > 0:
        raise UserError(
            f"no row of {table} could be read (column {', '.join(columns)}); check --column"
        )


def read_table(path: Path) -> Any:
    """The data frame of a whole table."""
    import pandas

    return pandas.concat(chunks(path), ignore_index=True)


def _csv(path: Path, stream: io.BufferedReader, size: int) -> Iterator[Any]:
    # pandas' own reader would accept a truncated row as one with missing cells.
    rows = csv_rows(path, stream)
    return _frames(rows, next(rows), size)


def _jsonl(path: Path, stream: io.BufferedReader, size: int) -> Iterator[Any]:
    # Any line may lack some of the columns.
    header = list(dict.fromkeys(chain.from_iterable(jsonl_rows(path, stream))))
    stream.seek(0)
    return _frames(jsonl_rows(path, stream), header, size)


def _frames(rows: Iterator[Any], header: list[str], size: int) -> Iterator[Any]:
    import pandas

    yield pandas.DataFrame([], None, header, object)
    start = 0
    while own := list(islice(rows, size)):
        yield pandas.DataFrame(own, range(start, start + len(own)), header, object)
        start += len(own)


def _parquet(path: Path, stream: io.BufferedReader, size: int) -> Iterator[Any]:
    import pandas
    import pyarrow.parquet

    start, file = 0, pyarrow.parquet.ParquetFile(stream)
    for batch in chain([file.schema_arrow.empty_table()], file.iter_batches(size)):
        frame = batch.to_pandas(types_mapper=pandas.ArrowDtype, ignore_metadata=True)
        yield frame.set_axis(range(start, start + len(frame)))
        start += len(frame)


# ---- writing ----


def with_columns(frame: Any, columns: Mapping[str, Any], word: str) -> Any:
    """Add columns to a frame; ``word`` is appended to a name that the frame already has."""
    taken = set(map(folded, frame))
    for name, cells in columns.items():
        while folded(name) in taken:
            name += f" {word}"
        taken.add(folded(name))
        frame = frame.assign(**{name: cells})
    return frame


@contextlib.contextmanager
def table_writer(path: Path) -> Iterator[Callable[[Any], None]]:
    """A function that appends data frames to a table; the file gets its name once complete."""
    with whole_file(path) as stream, contextlib.ExitStack() as sheets:
        if path.suffix == ".parquet":
            yield _parquet_writer(path, stream, sheets)
        elif path.suffix == ".jsonl":
            yield partial(_write_jsonl, path, stream)
        else:
            yield partial(_write_csv, path, stream)


def _write_csv(path: Path, stream: BinaryIO, frame: Any) -> None:
    mark = "\t" if path.suffix == ".tsv" else ","
    how = {"sep": mark, "index": False, "header": stream.tell() == 0}
    frame = frame.copy(deep=False)
    for place, (_, cells) in enumerate(frame.items()):
        if any(isinstance(cell, list | dict) for cell in cells):  # pandas cuts long lists short
            frame.isetitem(place, [*map(_json_if_nested, cells)])
    text = frame.to_csv(**how)
    if "\r" in text:  # unquoted, as pandas leaves it, it would end the line
        text = frame.to_csv(**how, quoting=csv.QUOTE_ALL)
    stream.write(text.encode(errors="backslashreplace"))  # for lone surrogates


def _write_jsonl(path: Path, stream: BinaryIO, frame: Any) -> None:
    _check_names(path, frame)
    cells = frame.astype(object)
    for row in cells.where(cells.notna(), None).to_dict("records"):
        line = json.dumps(row, default=_plain, ensure_ascii=False) + "\n"
        stream.write(line.encode(errors="backslashreplace"))


def _parquet_writer(
    path: Path, stream: BinaryIO, sheets: contextlib.ExitStack
) -> Callable[[Any], None]:
    """A function that writes data frames, all with the column types of the first."""
    import pyarrow
    import pyarrow.parquet

    sheet: Any = None

    def column(name: str, cells: Any) -> Any:
        kind = sheet and sheet.schema.field(name).type
        try:
            own = pyarrow.array(cells, kind, from_pandas=True)
            # A column that begins empty may hold words later.
            return own.cast(pyarrow.string()) if pyarrow.types.is_null(own.type) else own
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise UserError(
                f"'{name}' in rows {cells.index[0]} to {cells.index[-1]} (from 0) does not fit "
                f"into {path}, where a column has the type of its first rows ({error}); choose "
                "another format"
            ) from None

    def write(frame: Any) -> None:
        nonlocal sheet
        _check_names(path, frame)
        piece = pyarrow.table({str(n): column(str(n), cells) for n, cells in frame.items()})
        if sheet is None:
            sheet = sheets.enter_context(pyarrow.parquet.ParquetWriter(stream, piece.schema))
        sheet.write_table(piece)

    return write


def _check_names(path: Path, frame: Any) -> None:
    if twice := [*map(str, frame.columns[frame.columns.duplicated()])]:
        raise UserError(
            f"{path} cannot hold two columns named '{twice[0]}'; choose another format"
        )


def _json_if_nested(cell: Any) -> Any:
    return json.dumps(cell, default=_plain) if isinstance(cell, list | dict) else cell


def _plain(cell: Any) -> Any:
    """Convert a cell of a type that JSON does not know."""
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)
