"""``python -m exlm_lab.sweep``: the paper's experiments, cell by cell (§3, §5.3). ::

    python -m exlm_lab.sweep repeated-mlm              14 cells of p and k, three seeds each
    python -m exlm_lab.sweep ablations --only 'toy-*' --seeds 1
    python -m exlm_lab.sweep repeated-mlm --list       what it consists of
    python -m exlm_lab.sweep repeated-mlm --report     the paper's table with ours beside it
    python -m exlm_lab.sweep repeated-mlm --figures figures

A cell is a recipe with some settings replaced; each is trained, measured and fine-tuned, and leaves
one JSON file in OUTPUT/NAME. A finished cell is not run again, so the same command goes on where it
was stopped. With --scale gpu or paper the same cells are larger; one process for each GPU is
started with --shard 1/8 to --shard 8/8.

SIGINT and SIGTERM save a checkpoint and stop. Exit codes: 0 done, 2 a mistake of the user, 130
stopped and ready to go on.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

from exlm_lab.experiments.cells import Cell, Input
from exlm_lab.experiments.grids import SWEEPS, cells_of
from exlm_lab.experiments.ledger import SweepLedger
from exlm_lab.experiments.records import SCALES
from exlm_lab.experiments.running import Runner
from exlm_lab.ledger import StoppedError
from exlm_mini.config import UserError, check_integers, nearest
from exlm_mini.data.files import refuse_odd_files
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.options import GuessingParser, command_parser
from exlm_mini.training.console import (
    INTERRUPTED,
    ProgressLine,
    Requests,
    exit_code,
    requests_by_signal,
    say,
)
from exlm_mini.training.dry_run import row_length_of
from exlm_mini.training.parts import choose_device, longest_row

OUTPUT = Path("book/results")


class Request(NamedTuple):
    """What the command line asked for."""

    name: str
    scale: str
    runs: list[tuple[Cell, int]]
    """Cells and seeds, every cell with the first seed before any with the second."""
    output: Path
    work: Path | None
    data: Path | None
    device: str
    shard: str
    """Such as 1-of-8."""
    task: str
    """run, report, list, dry-run or measure-again."""
    figures: Path | None = None
    """Directory to draw into, instead of a task."""


def run(request: Request) -> int:
    """Do what was asked; the exit code."""
    if request.task == "list":
        print("\n".join(_listed(request.runs)))
        return 0
    if request.figures is not None:
        from exlm_lab.experiments.figures import write_figures

        write_figures(request.name, request.scale, request.output, request.figures, print)
        return 0
    if request.task == "report":
        from exlm_lab.experiments.tables import report

        print(report(request.name, request.scale, request.output))
        return 0
    choose_device(request.device)
    if request.task == "run":
        _refuse_unwritable(request.output / request.name)
    # Its own for each process: what one has no more use for, it removes.
    beside = request.output.with_name(f"{request.output.name}-work")
    work = request.work or beside / f"{request.name}-{request.scale}-{request.shard}"
    if request.work is None and beside.is_symlink():  # nobody named it
        raise UserError(
            f"{beside} is a symbolic link; remove it, or name a directory with --work"
        )
    for written in (request.output, work):
        refuse_odd_files(written)
    with requests_by_signal() as requests:
        runner = Runner(work, request.device, request.data, say, requests.should_stop)
        ledger = SweepLedger(request.output, request.name, request.scale, runner)
        try:
            _run_all(request, ledger, requests)
        except StoppedError:
            say("stopped; the same command goes on")
            return INTERRUPTED
    if request.work is None and request.task == "run":
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are working there
            beside.rmdir()
    return 0


def _refuse_unwritable(directory: Path) -> None:
    """Told before a cell is trained, not after; nothing is made yet."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{directory} is a file, or lies below one; choose another --output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {there} (Permission denied); check its permissions, or choose "
            "another --output"
        )


def _open(request: Request, ledger: SweepLedger) -> list[tuple[Cell, int]]:
    """The runs that have no record yet."""
    return [run for run in request.runs if not ledger.is_done(*run)]


def _run_all(request: Request, ledger: SweepLedger, requests: Requests) -> None:
    if request.task == "measure-again":
        is_any = False
        for number, (cell, seed) in enumerate(request.runs, 1):
            if requests.should_stop():
                raise StoppedError
            if ledger.measure_again(cell, seed):
                is_any = True
                say(f"measured {cell.name} seed {seed} again ({number}/{len(request.runs)})")
        if not is_any:
            raise UserError(
                f"{request.output / request.name} holds no record of these cells that can be "
                "measured again; run the sweep first"
            )
        return
    left = _open(request, ledger)
    weights = {(cell.name, seed): _weight(cell, seed) for cell, seed in request.runs}
    if request.task == "dry-run":
        print(f"{request.name}: {len(left)} of {len(request.runs)} runs to do")
        print("\n".join(f"{cell.name} seed {seed}" for cell, seed in left))
        return
    num_done, spent, worked = len(request.runs) - len(left), 0.0, 0.0
    for number, (cell, seed) in enumerate(left):
        if requests.should_stop():
            raise StoppedError
        if ledger.is_done(cell, seed):  # by another process, in the meantime
            continue
        rest = sum(weights[c.name, s] for c, s in left[number:])
        eta = f", about {spent / worked * rest / 60:.0f} min left" if worked else ""
        say(f"cell {num_done + number + 1}/{len(request.runs)} {cell.name} seed {seed}{eta}")
        start = time.monotonic()
        changed, _ = ledger.equal_cost(cell)
        with ProgressLine(cell.name, cell.config(seed, changed).train.steps) as line:
            record = ledger.run(cell, seed, line.show)
        spent, worked = spent + time.monotonic() - start, worked + weights[cell.name, seed]
        print(_told(record), flush=True)


def _weight(cell: Cell, seed: int) -> float:
    """Work of a cell against others of its sweep: tokens in its encoder."""
    config = cell.config(seed)
    train = config.train
    if cell.is_timed:
        return 1.0
    steps = train.steps * (train.batch_size if train.batch_tokens is None else 1)
    return steps * longest_row(config, row_length_of(config), len(slots_of(config)) or None)


def _told(record: dict) -> str:
    """A line about a finished cell."""
    shown = [f"{record['cell']} seed {record['seed']}:"]
    for name, text in (("bits_per_mask", "bits/mask"), ("cost_ratio", "times the cost")):
        if name in record["metrics"]:
            shown.append(f"{record['metrics'][name]:.3f} {text},")
    if record["downstream"]:
        shown.append(
            f"{record['downstream']['task']} {100 * record['downstream']['test']:.1f}%,"
        )
    shown.append(f"{sum(record['seconds'].values()):.0f} s")
    return " ".join(shown)


def _listed(runs: list[tuple[Cell, int]]) -> list[str]:
    """The cells with what they change, one line each."""
    cells = {cell.name: cell for cell, _ in runs}
    lines = []
    for cell in cells.values():
        seeds = " ".join(str(seed) for c, seed in runs if c.name == cell.name)
        settings = ", ".join(f"{name} {value}" for name, value in cell.settings.items())
        row = f"; {cell.paper[0]}, {cell.paper[1]}" if cell.paper else ""
        lines.append(f"{cell.name}: {cell.base}, {settings or 'as it is'}; seeds {seeds}{row}")
    return lines


# ---- the command line ----


def _parser() -> GuessingParser:
    names = "; ".join(f"{sweep.name}: {sweep.about}" for sweep in SWEEPS.values())
    parser = command_parser("python -m exlm_lab.sweep", __doc__, GuessingParser)
    add = parser.add_argument
    add("name", metavar="NAME", help=names)
    add("--scale", default="mini", metavar="S", help=f"{', '.join(SCALES)}; default mini")
    add(
        "--only", nargs="+", metavar="CELL",
        help="cells, by name or pattern: 'toy-*' (see --list)",
    )  # fmt: skip
    add(
        "--input", nargs="+", metavar="I", help=f"of {', '.join(get_args(Input))}; default: all"
    )
    add("--files", nargs="+", metavar="FILE", help="text in place of the embedded English")
    add("--seeds", nargs="+", metavar="N", help="default: those of each cell")
    add(
        "--shard", default="1/1", metavar="I/N",
        help="only every Nth run, from the Ith on: one process for each GPU",
    )  # fmt: skip
    add(
        "--output", type=Path, default=OUTPUT, metavar="DIR",
        help=f"records go to DIR/NAME; default {OUTPUT}",
    )  # fmt: skip
    add(
        "--work", type=Path, metavar="DIR",
        help="where models are trained, and kept; default: beside OUTPUT, removed when all is done",
    )  # fmt: skip
    add(
        "--data", type=Path, metavar="DIR",
        help="the files of a downstream task that is not embedded, see finetune",
    )  # fmt: skip
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    tasks = parser.add_mutually_exclusive_group()
    for name, text in (
        ("report", "print the paper's table with the records beside it, and stop"),
        ("list", "print the cells and what they change, and stop"),
        ("dry-run", "print what is still to be run, and stop"),
        ("measure-again", "take the metrics of all records again, from the models in --work"),
    ):
        tasks.add_argument(f"--{name}", action="store_true", help=text)
    tasks.add_argument(
        "--figures", type=Path, metavar="DIR",
        help="draw the records, one figure for each input as SVG and PNG, and stop",
    )  # fmt: skip
    return parser


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` prints and exits.

    Raises:
        UserError: for an unknown option, sweep or cell, or a value that cannot be.
    """
    found = _parser().parse_args(argv)
    if found.scale not in SCALES:
        raise UserError(f"--scale is '{found.scale}'; {nearest(found.scale, SCALES)}")
    if found.data is not None and not found.data.exists():
        raise UserError(f"cannot read {found.data} (no such file or directory); check --data")
    cells = cells_of(found.name, found.scale)
    cells = _of_inputs(cells, found.input)
    cells = _with_files(_named(cells, found.only), found.files)
    task = next(
        (t for t in ("report", "list", "dry-run", "measure-again") if getattr(found, _key(t))),
        "run",
    )
    return Request(
        found.name,
        found.scale,
        _sharded(_with_seeds(cells, found.seeds), found.shard),
        found.output,
        found.work,
        found.data,
        found.device,
        found.shard.replace("/", "-of-"),
        task,
        found.figures,
    )


def _key(option: str) -> str:
    return option.replace("-", "_")


def _of_inputs(cells: list[Cell], inputs: list[str] | None) -> list[Cell]:
    present = list(dict.fromkeys(cell.input for cell in cells))
    for name in inputs or ():
        if name not in present:
            raise UserError(f"--input is '{name}'; of this sweep {nearest(name, present)}")
    return [cell for cell in cells if not inputs or cell.input in inputs]


def _with_files(cells: list[Cell], files: list[str] | None) -> list[Cell]:
    if not files:
        return cells
    if not any(cell.input == "english" for cell in cells):
        raise UserError(
            f"--files {files[0]} is for cells of English, and none is chosen; drop it"
        )
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"cannot read {file} (no such file); check --files")
    return [
        replace(cell, settings={**cell.settings, "data.files": tuple(files)})
        if cell.input == "english"
        else cell
        for cell in cells
    ]


def _named(cells: list[Cell], patterns: list[str] | None) -> list[Cell]:
    names = [cell.name for cell in cells]
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise UserError(f"there is no cell '{pattern}'; {nearest(pattern, names)}")
    return [
        cell
        for cell in cells
        if not patterns or any(fnmatch.fnmatchcase(cell.name, p) for p in patterns)
    ]


def _with_seeds(cells: list[Cell], texts: list[str] | None) -> list[tuple[Cell, int]]:
    """All first seeds before any second one, so that a sweep is soon whole."""
    seeds = None
    if texts is not None:
        if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in texts):
            raise UserError(f"--seeds is '{' '.join(texts)}'; give whole numbers such as 1 2 3")
        seeds = list(dict.fromkeys(int(text) for text in texts))
        check_integers({"--seeds": seeds})
    most = max(len(seeds or cell.seeds) for cell in cells)
    return [
        (cell, (seeds or cell.seeds)[turn])
        for turn in range(most)
        for cell in cells
        if turn < len(seeds or cell.seeds)
    ]


def _sharded(runs: list[tuple[Cell, int]], text: str) -> list[tuple[Cell, int]]:
    part, _, whole = text.partition("/")
    numbers = [
        int(n) if n.isascii() and n.isdigit() and len(n) < 10 else 0 for n in (part, whole)
    ]
    if not 1 <= numbers[0] <= numbers[1]:
        raise UserError(f"--shard is '{text}'; give I/N with I from 1 to N, such as 1/8")
    return runs[numbers[0] - 1 :: numbers[1]]


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to go on."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
