"""``python -m exlm_lab.predict``: a fine-tuned model's predictions for the rows of a table. ::

    python -m exlm_lab.predict runs/solubility new.csv --output new-with-logS.csv

DIR is the --output of finetune. TABLE is a .csv, .tsv, .jsonl or .parquet, compressed or not. FILE
gets the rows and columns of TABLE in their order, and a column with the name of each target,
followed by "predicted" if TABLE has such a column: numbers in their unit, the probability of yes,
or the likeliest word, with its probability in a further column. A row that cannot be read gets an
empty cell, and a line on stderr says why; rows are counted from 0.

Exit codes: 0 done, 2 a mistake of the user, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from exlm_lab.downstream.tables import (
    check_paths,
    check_read,
    progressing_chunks,
    table_writer,
    with_columns,
)
from exlm_mini.config.checks import Count, UserError
from exlm_mini.config.options import Parser, command_parser, of
from exlm_mini.data.text import find_column
from exlm_mini.reading.runs import task_of
from exlm_mini.training.console import exit_code, say


def _parser() -> Parser:
    parser = command_parser("python -m exlm_lab.predict", __doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="DIR", help="--output of finetune")
    add("table", type=Path, metavar="TABLE", help="rows to predict")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=".csv, .tsv, .jsonl or .parquet",
    )
    columns = "columns of TABLE with the texts or molecules; default: as in training"
    add("--column", nargs="+", metavar="NAME", help=columns)
    add("--batch-size", type=of(Count), default=64, metavar="N", help="default 64")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def run(options: Any) -> None:
    """Predict chunk by chunk, so that memory does not grow with the number of rows."""
    task_of(options.model)
    check_paths(options.table, options.output)
    import pandas

    from exlm_mini.hf import load_predictor

    model = load_predictor(options.model, options.device)
    learned, num_read = model.task["columns"], 0
    names = options.column or learned
    if len(names) != (len(learned) or 1):
        raise UserError(
            f"{options.model} was trained on {len(learned) or 1} columns ({', '.join(learned)}); "
            "give as many with --column"
        )
    with table_writer(options.output) as write:
        for first, frame in progressing_chunks(options.table, "predicted"):
            places = [find_column(options.table, frame, name) for name in names]
            texts = list(zip(*(frame.iloc[:, p] for p in places), strict=True))
            said = model.predict(texts, options.batch_size, say, first)
            num_read += int(pandas.notna(next(iter(said.values()))).sum())
            write(with_columns(frame, said, "predicted"))
        check_read(num_read, options.table, names)
    say(f"wrote {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(lambda: run(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
