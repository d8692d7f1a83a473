"""``python -m exlm_lab.embed``: a vector for each row of a table. ::

    python -m exlm_lab.embed molecules mine.csv --column SMILES --output mine.npy
    python -m exlm_lab.embed runs/text reviews.jsonl --column text --output reviews.parquet

MODEL is the --output of a pre-training run, or a shipped model. TABLE is a .csv, .tsv, .jsonl or
.parquet, compressed or not. A .npy output has a float32 vector for each row of TABLE, in the same
order; a .parquet has the columns of TABLE and ``embedding`` (``embedding computed`` if that name is
taken). A row that cannot be read, such as a SMILES that RDKit rejects or a text whose tokens are
mostly [UNK], gets nan in a .npy and an empty cell in a .parquet. A line on stderr says why, and
counts rows from 0.

Exit codes: 0 done, 2 a mistake of the user, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exlm_lab.downstream.tables import (
    check_paths,
    check_read,
    num_rows,
    progressing_chunks,
    table_writer,
    with_columns,
)
from exlm_mini.config.checks import Count
from exlm_mini.config.options import Parser, command_parser, of
from exlm_mini.data.files import whole_file
from exlm_mini.data.text import find_column
from exlm_mini.reading.runs import model_directory
from exlm_mini.training.console import exit_code, say


def _parser() -> Parser:
    parser = command_parser("python -m exlm_lab.embed", __doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="--output of pretrain, or a shipped model")
    add("table", type=Path, metavar="TABLE", help="rows to embed")
    column = "column of TABLE with the texts or molecules"
    add("--column", required=True, metavar="NAME", help=column)
    add("--output", type=Path, required=True, metavar="FILE", help=".npy or .parquet")
    add("--batch-size", type=of(Count), default=64, metavar="N", help="default 64")
    return parser


@contextlib.contextmanager
def _npy(path: Path, *shape: int) -> Iterator[Callable[[np.ndarray], object]]:
    """Open a .npy file for one array of this shape; yields a function that writes vectors_BD."""
    from numpy.lib import format as npy

    fields = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with whole_file(path) as stream:
        npy.write_array_header_1_0(stream, fields)
        yield lambda piece_BD: stream.write(piece_BD.astype("<f4").tobytes())


def run(options: Any) -> None:
    """Embed chunk by chunk, so that memory does not grow with the number of rows."""
    is_array = options.output.suffix == ".npy"
    lines, counts = dict[str, str](), Counter[str]()
    check_paths(options.table, options.output, (".npy", ".parquet"))
    model_directory(options.model)
    import pandas
    import pyarrow

    from exlm_mini.reading.entries import tell
    from exlm_mini.reading.trained import load

    model, vector = load(options.model), pyarrow.list_(pyarrow.float32())
    writer: Any = table_writer(options.output)
    if is_array:
        shape = num_rows(options.table), model.config.model.shape.width
        writer = _npy(options.output, *shape)
    num_read = 0

    def remark(kind: str, num: int, _: int, line: str) -> None:
        lines.setdefault(kind, line)
        counts[kind] += num

    with writer as write:
        for first, frame in progressing_chunks(options.table, "embedded"):
            column = frame.iloc[:, find_column(options.table, frame, options.column)]
            vectors_BD, reasons = model.vectors(
                list(column),
                options.batch_size,
                remark,
                "row {}",
                first,
            )
            tell(reasons, "row {}", "this row gets no vector", say, first)
            rows = vectors_BD.numpy()
            num_read += len(rows) - len(reasons)
            if not is_array:
                cells = [None if i in reasons else row for i, row in enumerate(rows)]
                column = pandas.array(cells, pandas.ArrowDtype(vector))
                rows = with_columns(frame, {"embedding": column}, "computed")
            write(rows)
        check_read(num_read, options.table, [options.column])
    for kind, line in lines.items():
        say(f"{counts[kind]:,} of {num_read:,} {line}")
    say(f"wrote {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
