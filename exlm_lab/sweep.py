"""``python -m exlm_lab.sweep``: the paper's experiments and a study of our own, cell by cell. ::

    python -m exlm_lab.sweep repeated-mlm            its 14 cells of p and k
    python -m exlm_lab.sweep repeated-mlm --list     cells, and what is recorded
    python -m exlm_lab.sweep repeated-mlm --report   the paper's table and ours
    python -m exlm_lab.sweep ablations --only 'toy-*' --seeds 1
    python -m exlm_lab.sweep study                   the study (book/plan.md)
    python -m exlm_lab.sweep study --report          its claims, their verdicts

A cell is a recipe with some settings replaced. Each cell is trained, measured and perhaps
fine-tuned, and its record becomes a line in OUTPUT/NAME.jsonl. A finished cell is not run again, so
the same command resumes where it was stopped. Several commands, such as one for each GPU, may share
one OUTPUT and --work: each takes runs that no other has taken. Records for the book must come from
a clean checkout: start the sweep in a worktree of a fixed commit, and edit elsewhere. Cells whose
corpus is not prepared are left out; the file of their recipe has the command that prepares it.

SIGINT and SIGTERM save a checkpoint and stop. Exit codes: 0 done, 2 user error, 130 stopped and
ready to resume.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exlm_lab.experiments import catalogue
from exlm_lab.experiments.cells import Cell
from exlm_lab.ledger import StoppedError
from exlm_mini.config.checks import Seed, UserError, nearest
from exlm_mini.config.options import Parser, command_parser, of
from exlm_mini.training.console import INTERRUPTED, exit_code, say, stop_by_signal

if TYPE_CHECKING:  # neither help nor a mistyped option has to wait for torch
    from exlm_lab.experiments.running import Runner

OUTPUT = Path("book/results")
WORK = Path("runs/sweep")
STUDY = "study"
"""The name for all experiments of the study together, in the order of the plan."""


class Run(NamedTuple):
    """One model to train: a cell and a seed."""

    sweep: str
    cell: Cell
    seed: int


# ---- which runs ----


def queue(sweeps: dict[str, list[Cell]], seeds: list[int]) -> list[Run]:
    """Every run of the sweeps, sweep by sweep; within one, all first seeds before any second."""
    runs = []
    for name, cells in sweeps.items():
        turns = [
            [Run(name, cell, seed) for seed in dict.fromkeys(seeds or cell.seeds)]
            for cell in cells
        ]
        rounds = itertools.zip_longest(*turns)
        runs += [run for several in rounds for run in several if run is not None]
    return runs


def select(names: list[str], patterns: list[str] | None = None) -> dict[str, list[Cell]]:
    """For each of the named sweeps, the cells that match a pattern, by default all."""
    words = [STUDY, *catalogue.EXPERIMENTS]
    selected: dict[str, list[Cell]] = {}
    for word in names:
        if word not in words:
            raise UserError(f"there is no sweep '{word}'; {nearest(word, words)}")
        study = [one.name for one in catalogue.planned()]
        for name in study if word == STUDY else [word]:
            selected[name] = list(catalogue.EXPERIMENTS[name].cells)
    known = [cell.name for cells in selected.values() for cell in cells]
    for pattern in patterns or ():
        if not fnmatch.filter(known, pattern):
            raise UserError(f"there is no cell '{pattern}'; {nearest(pattern, known)}")
    patterns = patterns or ["*"]
    for name, cells in selected.items():
        selected[name] = [
            c for c in cells if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)
        ]
    return {name: cells for name, cells in selected.items() if cells}


def recorded(runs: list[Run], output: Path) -> list[Run]:
    """The runs that have a record; ``UserError`` if one was made with other settings."""
    from exlm_lab.experiments.ledger import SweepLedger
    from exlm_lab.experiments.running import Runner

    runner = Runner(WORK)
    return [
        run
        for run in runs
        if SweepLedger(output, run.sweep, runner).record(run.cell, run.seed) is not None
    ]


# ---- running ----


def with_data(runs: list[Run], runner: Runner) -> list[Run]:
    """The runs whose data exist; each reason for leaving others out is printed once."""
    reasons = [runner.lacks(run.cell.config(run.seed)) for run in runs]
    if all(reasons):
        raise UserError(reasons[0])
    for reason in dict.fromkeys(filter(None, reasons)):
        say(f"some runs are skipped: {reason}")
    return [run for run, reason in zip(runs, reasons, strict=True) if not reason]


def work(runs: list[Run], output: Path, runner: Runner) -> None:
    """Make the missing runs, one after the other; a run that diverges is left out.

    Raises:
        StoppedError: if a stop was requested; the next call resumes there.
        UserError: at once, if no run has its data; at the end, if runs diverged.
    """
    from exlm_lab.experiments.ledger import SweepLedger
    from exlm_lab.experiments.running import taken
    from exlm_mini.training.step import DivergedError

    possible = with_data(runs, runner)
    ledgers = {run.sweep: SweepLedger(output, run.sweep, runner) for run in possible}
    left = [run for run in possible if not ledgers[run.sweep].record(run.cell, run.seed)]
    if not left:
        say(
            f"{len(possible)} of {len(possible)} runs are recorded in {output}; print them with "
            "--report, or choose another --output to repeat them"
        )
    diverged = []
    for number, (name, cell, seed) in enumerate(left, start=1):
        if runner.should_stop():
            raise StoppedError
        ledger = ledgers[name]
        with taken(ledger.place(cell, seed), say) as is_ours:
            if not is_ours or ledger.record(cell, seed):
                continue
            say(f"{name} {cell.name} seed {seed} (run {number} of {len(left)} to do)")
            try:
                record = ledger.run(cell, seed)
            except DivergedError as error:
                say(f"{cell.name} seed {seed} is left out: {error}")
                diverged.append(f"{cell.name} seed {seed}")
                continue
            seconds = sum(record["seconds"].values())
            print(f"{cell.name} seed {seed}: {seconds:.0f} s", flush=True)
    if diverged:
        raise UserError(f"diverged and not recorded, see above: {', '.join(diverged)}")


def _refuse_changes(output: Path) -> None:
    """Refuse to write records of the book from a checkout whose changes no commit describes."""
    from exlm_mini.training.provenance import commit

    if os.path.realpath(output) == os.path.realpath(OUTPUT) and "with changes" in commit():
        raise UserError(
            "the checkout has uncommitted changes, so records could not name the code they were "
            "made with; commit them, start from a worktree (git worktree add DIR HEAD), or choose "
            "another --output"
        )


# ---- what the command does, one function for each action ----


def run(options: argparse.Namespace) -> int:
    """Make the runs that have no record yet."""
    if options.data is not None and not options.data.exists():
        raise UserError(f"cannot read {options.data} (no such file or directory); check --data")
    sweeps = select(options.names, options.only)
    from exlm_lab.experiments.running import Runner
    from exlm_mini.training.processes import choose_device

    choose_device(options.device)
    _refuse_changes(options.output)
    with stop_by_signal() as should_stop:
        runner = Runner(options.work, options.device, options.data, say, should_stop)
        try:
            work(queue(sweeps, options.seeds), options.output, runner)
        except StoppedError:
            say("stopped; run the same command again to resume")
            return INTERRUPTED
    return 0


def listing(options: argparse.Namespace) -> int:
    """Print how much of each sweep is recorded, and a line for each cell with what it changes."""
    for name, cells in select(options.names, options.only).items():
        runs = queue({name: cells}, options.seeds)
        made = recorded(runs, options.output)
        about = catalogue.EXPERIMENTS[name].about
        print(f"{name}: {len(made)} of {len(runs)} runs recorded; {about}")
        for cell in cells:
            num_made, num = (sum(run.cell is cell for run in own) for own in (made, runs))
            settings = ", ".join(f"{key} {value}" for key, value in cell.settings.items())
            row = f"; {cell.paper[0]}, {cell.paper[1]}" if cell.paper else ""
            text = (
                f"{cell.name}: {num_made} of {num}; {cell.base}, {settings or 'unchanged'}{row}"
            )
            print(f"  {text}")
    return 0


def report(options: argparse.Namespace) -> int:
    """Print the paper's table of each sweep beside our records, and the verdicts of the study."""
    from exlm_lab.experiments import tables, verdicts

    of_runs = options.data or options.device != "auto" or options.work != WORK
    if options.only or options.seeds or of_runs:
        raise UserError(
            "--report covers whole sweeps and runs nothing; leave out --only, --seeds, --work, "
            "--data and --device"
        )
    names = select(options.names)
    recorded(queue(names, []), options.output)
    study = {one.name for one in catalogue.planned()}
    for name in names:
        if name not in study:
            print(tables.report(name, options.output))
    if study & set(names):
        print(verdicts.report(options.output, list(names)))
    return 0


# ---- the command line ----


def _parser() -> Parser:
    study = [one.name for one in catalogue.planned()]
    others = [one for name, one in catalogue.EXPERIMENTS.items() if name not in study]
    parser = command_parser("python -m exlm_lab.sweep", __doc__)
    add = parser.add_argument
    names = [f"{one.name}: {one.about}" for one in others]
    names.append(f"{STUDY}: {', '.join(study)}, each of which can also be named alone")
    add("names", nargs="+", metavar="NAME", help="; ".join(names))
    only = "run only these cells, by name or pattern such as 'toy-*' (see --list)"
    add("--only", nargs="+", metavar="CELL", help=only)
    seeds = "seeds to run; default: those of each cell"
    add("--seeds", nargs="+", type=of(Seed), default=[], metavar="N", help=seeds)
    output = f"records go to DIR/NAME.jsonl; default {OUTPUT}"
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help=output)
    work = f"where models are trained and kept; default {WORK}"
    add("--work", type=Path, default=WORK, metavar="DIR", help=work)
    data = "files of a downstream task that is not embedded, as for finetune"
    add("--data", type=Path, metavar="DIR", help=data)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(action=run)
    actions = parser.add_mutually_exclusive_group()
    for option, action, text in (
        ("--list", listing, "print the cells and how many runs are recorded, and stop"),
        ("--report", report, "print the results, and stop"),
    ):
        actions.add_argument(
            option, action="store_const", dest="action", const=action, help=text
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit codes: 0 done, 2 user error, 130 stopped and ready to resume."""

    def command() -> int:
        options = _parser().parse_args(argv)
        return options.action(options)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
