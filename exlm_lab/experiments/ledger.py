"""The records of an experiment on disk, and how a missing one is made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.cells import Cell, Downstream
from exlm_lab.experiments.records import AGAIN, Record, add, read
from exlm_lab.experiments.running import Runner
from exlm_lab.ledger import check_identity
from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import plain
from exlm_mini.training.processes import choose_device
from exlm_mini.training.provenance import machine
from exlm_mini.training.step import DivergedError

VERSION = 1
"""Version of the format of records; a record of another version is refused."""
DIGITS = 6
"""Significant digits of a number in a record."""


class SweepLedger(NamedTuple):
    """The records of one experiment, by cell and seed."""

    output: Path
    sweep: str
    runner: Runner

    def place(self, cell: Cell, seed: int) -> Path:
        """The folder to lock while a run is made, so that no other process makes it, too."""
        return self.runner.work / "queue" / self.sweep / f"{cell.name}-seed{seed}"

    def record(self, cell: Cell, seed: int) -> Record | None:
        """The record of a run, or None if there is none yet; ``UserError`` if it is damaged or was
        made with other settings."""
        record = read(self.sweep, self.output).get((cell.name, seed))
        if record is None:
            return None
        tuned = (record.get("downstream") or {}).get("setting")
        identity = {
            **record,
            "config": plain(RunConfig(**record["config"])),
            "watched": record.get("watched", {}),
            "downstream": tuned and plain(Downstream(**tuned)),
        }
        remedy = f"choose another --output, or {AGAIN}"
        where = f"the record of {cell.name} seed {seed} in {self.output / self.sweep}.jsonl"
        check_identity(where, identity, self._identity(cell, seed, record), remedy)
        for masks in cell.tested_with:
            if not any(metric.endswith(f"@{masks}") for metric in record["metrics"]):
                raise UserError(f"{where} has no metric @{masks}; {remedy}")
        return record

    def run(self, cell: Cell, seed: int) -> Record:
        """The record of a run, which is trained, measured and recorded first if there is none yet.

        Raises:
            UserError: as in ``record``.
            DivergedError: if a number is not finite.
            StoppedError: if the run was stopped; the next call resumes it.
        """
        if record := self.record(cell, seed):
            return record
        with self.runner.alone(self.output):  # fail here, not after a long run
            pass
        record = _short(self._made(cell, seed))
        with self.runner.alone(self.output):
            add(record, self.output)
        return record

    def equal_cost(self, cell: Cell) -> tuple[dict[str, Any], dict[str, float]]:
        """The steps of a cell at equal cost, and the cost ratio; both empty without ``cost_of``.

        The ratio is read from the record that ``cost_of`` names. If that record is missing, it is
        made first, by one process for all.
        """
        if cell.cost_of is None:
            return {}, {}
        sweep, name = cell.cost_of
        timed, ledger = EXPERIMENTS[sweep].cell(name), self._replace(sweep=sweep)
        seed = timed.seeds[0]
        record = ledger.record(timed, seed)
        if record is None:
            with self.runner.alone(ledger.place(timed, seed)):
                record = ledger.run(timed, seed)
        ratio, config = record["metrics"]["cost_ratio"], cell.config(seed)
        factor = ratio if config.objective == "mlm" else 1 / ratio
        return {"train.steps": round(factor * config.train.steps)}, {"cost_ratio": ratio}

    def _made(self, cell: Cell, seed: int) -> dict[str, Any]:
        runner, (changed, extra) = self.runner, self.equal_cost(cell)
        # Asked for before training, for the checkout may be at another commit afterwards.
        made_with = machine(choose_device(runner.device))
        if cell.start is not None:
            start = cell.start.config(seed)
            runner.train(start, cell.start.watched, f"{cell.start.name}, for {cell.name}")
            folder = runner.folder(start, cell.start.watched).relative_to(runner.work)
            changed["train.start_from"] = str(folder)
        config = cell.config(seed, changed)
        own = runner.time(config) if cell.is_timed else runner.run(cell, config)
        own["metrics"] |= extra
        return {**self._about(cell, seed, config), **own, "versions": made_with}

    def _about(self, cell: Cell, seed: int, config: RunConfig) -> dict[str, Any]:
        """What the record of a run says, whatever was measured."""
        return {
            "sweep": self.sweep,
            "cell": cell.name,
            "input": cell.input,
            "seed": seed,
            "version": VERSION,
            "config": plain(config),
            "watched": dict(cell.watched),
        }

    def _identity(self, cell: Cell, seed: int, record: Record) -> dict[str, Any]:
        """What the record of a cell must say.

        Steps that follow from a measured ratio are taken from the record itself. So is the folder
        of the run it started from, whose name is a hash of all that run's settings and changes
        when a new setting with a default is added; that run has a record of its own.
        """
        train = record["config"].get("train", {})
        changed: dict[str, Any] = {}
        if cell.cost_of is not None:
            changed["train.steps"] = train.get("steps")
        if cell.start is not None:
            changed["train.start_from"] = train.get("start_from")
        identity = self._about(cell, seed, cell.config(seed, changed))
        if cell.downstream is not None:  # a record may have a task that the cell lacks
            identity["downstream"] = plain(cell.downstream)
        return identity


def _short(record: dict[str, Any]) -> Record:
    """The record with its measured numbers rounded to ``DIGITS``; they must be finite."""
    for numbers in (record["metrics"], *record["curve"]):
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"{name} is {value}, so the run is not recorded: its training went wrong; "
                    "lower the learning rate of its recipe"
                )
    own = {name: record[name] for name in ("metrics", "curve", "seconds")}
    text = json.dumps(own, allow_nan=False)
    own = json.loads(text, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))
    return json.loads(json.dumps(record, allow_nan=False)) | own
