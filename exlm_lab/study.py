"""``python -m exlm_lab.study``: run what is left of the study, or say what it has decided. ::

    python -m exlm_lab.study                 the next missing run, and the next, to the end
    python -m exlm_lab.study --only ladder   of one experiment
    python -m exlm_lab.study --list          what is done and what is left
    python -m exlm_lab.study --report        every claim: contrast, interval, verdict

``book/plan.md`` says what is tried and why. A run leaves one JSON file in OUTPUT/EXPERIMENT and is
never made again; one that was stopped goes on where it was. Several of these commands may work side
by side, on one OUTPUT and --work: each takes what no other has taken. Records are of a clean
checkout: start from a worktree of a fixed commit, and work on beside it. An experiment whose corpus
nobody has prepared is left out; the file of its recipe has the command.

SIGINT and SIGTERM save a checkpoint and stop. Exit codes: 0 done, 2 a mistake of the user, 130
stopped and ready to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.ledger import SweepLedger
from exlm_lab.experiments.running import Runner
from exlm_lab.experiments.study import EXPERIMENTS, SCALE, report
from exlm_lab.ledger import StoppedError
from exlm_mini.config import UserError, nearest
from exlm_mini.data.files import refuse_odd_files
from exlm_mini.options import command_parser
from exlm_mini.training.console import (
    INTERRUPTED,
    ProgressLine,
    exit_code,
    requests_by_signal,
    say,
)
from exlm_mini.training.provenance import commit
from exlm_mini.training.run_directory import RunDirectory

OUTPUT = Path("book/results/study")
WORK = Path("runs/study")


def planned(names: list[str]) -> list[tuple[str, Cell, int]]:
    """Every run of some experiments: one after the other, all first seeds before any second."""
    runs = []
    for name in names:
        cells = EXPERIMENTS[name].cells
        for turn in range(max(len(cell.seeds) for cell in cells)):
            runs += [(name, c, c.seeds[turn]) for c in cells if turn < len(c.seeds)]
    return runs


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """Whether a run is ours to make: no other process has its folder, and none gets it now."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunDirectory(folder, say))
        except UserError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            yield False
            return
        yield True


def ready(names: list[str], runner: Runner) -> list[str]:
    """The experiments whose data are there; of the others it is said what is missing."""
    found = []
    for name in names:
        cell = EXPERIMENTS[name].cells[0]
        try:
            runner.check_inputs(cell.config(cell.seeds[0]))
        except UserError as error:
            say(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found


def work(names: list[str], output: Path, work: Path, device: str) -> int:
    """Make the missing runs, one after the other; the exit code."""
    if "with changes" in commit():
        raise UserError(
            "the checkout has changes, and a record could not say of what it is; commit them, or "
            "start from a worktree (git worktree add DIR HEAD)"
        )
    for written in (output, work):
        refuse_odd_files(written)
    with requests_by_signal() as requests:
        runner = Runner(work, device, None, say, requests.should_stop)
        names = ready(names, runner)
        runs, seconds = planned(names), []
        ledgers = {name: SweepLedger(output, name, SCALE, runner) for name in names}
        left = [run for run in runs if not ledgers[run[0]].is_done(*run[1:])]
        for number, (name, cell, seed) in enumerate(left):
            if requests.should_stop():
                say("stopped; the same command goes on")
                return INTERRUPTED
            with taken(work / "queue" / f"{name}-{cell.name}-seed{seed}") as is_ours:
                if not is_ours or ledgers[name].is_done(cell, seed):
                    continue
                eta = ""
                if seconds:
                    hours = sum(seconds) / len(seconds) * (len(left) - number) / 3600
                    eta = f", about {hours:.1f} h left"
                say(f"{name} {cell.name} seed {seed} ({number + 1} of {len(left)} left{eta})")
                start = time.monotonic()
                changed, _ = ledgers[name].equal_cost(cell)
                steps = cell.config(seed, changed).train.steps
                try:
                    with ProgressLine(cell.name, steps) as line:
                        ledgers[name].run(cell, seed, line.show)
                except StoppedError:
                    say("stopped; the same command goes on")
                    return INTERRUPTED
                seconds.append(time.monotonic() - start)
    return 0


def listed(names: list[str], output: Path) -> Iterator[str]:
    """A line for each experiment: how much of it is recorded."""
    for name in names:
        runs = planned([name])
        ledger = SweepLedger(output, name, SCALE, Runner(Path()))
        done = sum(ledger.is_done(cell, seed) for _, cell, seed in runs)
        yield f"{name}: {done} of {len(runs)} runs recorded; {EXPERIMENTS[name].about}"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_lab.study", __doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=list(EXPERIMENTS),
        help=f"of {', '.join(EXPERIMENTS)}; default: all, in this order",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR",
        help=f"records go to DIR/NAME; default {OUTPUT}",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=WORK, metavar="DIR",
        help=f"where models are trained, and kept; default {WORK}",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    tasks = parser.add_mutually_exclusive_group()
    tasks.add_argument("--list", action="store_true", help="print what is done, and stop")
    tasks.add_argument("--report", action="store_true", help="print the verdicts, and stop")
    return parser


def run(argv: list[str] | None) -> int:
    """Do what the command line asks for; the exit code."""
    found = _parser().parse_args(argv)
    for name in found.only:
        if name not in EXPERIMENTS:
            raise UserError(f"--only is '{name}'; {nearest(name, EXPERIMENTS)}")
    if found.report:
        print(report(found.output))
        return 0
    if found.list:
        print("\n".join(listed(found.only, found.output)))
        return 0
    return work(found.only, found.output, found.work, found.device)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to go on."""
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
