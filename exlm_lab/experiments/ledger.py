"""The records of an experiment on the disk, and the way to add one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exlm_lab.experiments.catalogue import experiment
from exlm_lab.experiments.cells import Cell, Downstream
from exlm_lab.experiments.records import AGAIN, read_lines, read_record
from exlm_lab.experiments.running import Runner
from exlm_lab.ledger import Ledger, check_identity
from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import plain
from exlm_mini.training.console import Progress
from exlm_mini.training.processes import choose_device
from exlm_mini.training.provenance import machine

VERSION = 1
"""Of what a record holds; one of another version is refused."""
TESTED = ("bits_per_mask", "bits_per_row", "floor_bits_per_row", "joint_bits_per_row")
"""Metrics that are also taken with other masks."""
DIGITS = 6
"""Significant ones of a number in a record."""


class SweepLedger(Ledger):
    """The records of one experiment."""

    def __init__(self, output: Path, sweep: str, runner: Runner) -> None:
        self.output, self.sweep, self.runner = output, sweep, runner

    def path(self, cell: Cell, seed: int) -> Path:
        """See ``Ledger``."""
        return self.output / self.sweep / f"{cell.name}-seed{seed}.json"

    def read(self, cell: Cell, seed: int) -> dict[str, Any]:
        """See ``Ledger``."""
        path, lines = self.path(cell, seed), self.output / f"{self.sweep}.jsonl"
        where: object = path
        if not path.exists():
            where = f"the line of cell {cell.name} seed {seed} in {lines}"
        record = read_record(path) if where is path else read_lines(lines)[cell.name, seed]
        tuned = (record.get("downstream") or {}).get("setting")
        identity = {
            **record,
            "config": plain(RunConfig(**record["config"])),
            "watched": record.get("watched", {}),
            "downstream": tuned and plain(Downstream(**tuned)),
        }
        remedy = f"choose another --output, or {AGAIN}"
        check_identity(where, identity, self._identity(cell, seed, record), remedy)
        return record

    def is_done(self, cell: Cell, seed: int) -> bool:
        """See ``Ledger``; a record may have been collected."""
        lines = read_lines(self.output / f"{self.sweep}.jsonl")
        is_there = self.path(cell, seed).exists() or (cell.name, seed) in lines
        return is_there and bool(self.read(cell, seed))

    def make(
        self, cell: Cell, seed: int, on_progress: Callable[[Progress], None]
    ) -> dict[str, Any]:
        """See ``Ledger``."""
        changed, extra = self.equal_cost(cell)
        changed |= self._started(cell, seed)
        if cell.start is not None:
            self.runner.train(cell.start.config(seed), on_progress)
        config = cell.config(seed, changed)
        is_timed, device = cell.is_timed, choose_device(self.runner.device)
        done = self._timed(config) if is_timed else self._trained(cell, config, on_progress)
        done["metrics"] |= extra
        paper = cell.paper and {"table": cell.paper[0], "row": cell.paper[1]}
        return {
            "sweep": self.sweep,
            "cell": cell.name,
            "input": cell.input,
            "seed": seed,
            "version": VERSION,
            "settings": {**cell.settings, **changed},
            "objective": config.objective,
            "config": plain(config),
            "watched": dict(cell.watched),
            "paper": paper,
            **done,
            "versions": machine(device),
        }

    def write(self, path: Path, record: Mapping[str, Any]) -> None:
        """See ``Ledger``; numbers have ``DIGITS`` digits."""
        super().write(path, _short(record))

    def equal_cost(self, cell: Cell) -> tuple[dict[str, Any], dict[str, float]]:
        """Steps of a cell that is to cost what another does, and the ratio; else nothing.

        The ratio is that of a record of another sweep; it is measured if it is not there.
        """
        if cell.cost_of is None:
            return {}, {}
        sweep, name = cell.cost_of
        timed = experiment(sweep).cell(name)
        seed = timed.seeds[0]
        ledger = SweepLedger(self.output, sweep, self.runner)
        ratio = ledger.run(timed, seed)["metrics"]["cost_ratio"]
        config = cell.config(seed)
        factor = ratio if config.objective == "mlm" else 1 / ratio
        return {"train.steps": round(factor * config.train.steps)}, {"cost_ratio": ratio}

    def _started(self, cell: Cell, seed: int) -> dict[str, Any]:
        """The setting of a cell that goes on from another one."""
        if cell.start is None:
            return {}
        folder = self.runner.folder(cell.start.config(seed))
        return {"train.start_from": str(folder.relative_to(self.runner.work))}

    def _timed(self, config: RunConfig) -> dict[str, Any]:
        metrics, seconds = self.runner.time(config)
        return {
            "metrics": metrics, "curve": [], "downstream": None, "seconds": {"measure": seconds}
        }  # fmt: skip

    def _trained(
        self, cell: Cell, config: RunConfig, on_progress: Callable[[Progress], None]
    ) -> dict[str, Any]:
        trained = self.runner.train(config, on_progress, cell.watched)
        metrics, measuring = self.runner.measure(
            config, watched=cell.watched, with_prize=cell.with_prize
        )
        for name, masks in cell.tested_with.items():
            others, seconds = self.runner.measure(config, masks, cell.watched)
            metrics |= {f"{m}@{name}": others[m] for m in TESTED if m in others}
            measuring += seconds
        downstream, tuning = None, 0.0
        if cell.downstream is not None:
            downstream, tuning = self.runner.fine_tune(config, cell.downstream, cell.watched)
        spent = {"pretrain": trained.pop("seconds"), "measure": measuring, "finetune": tuning}
        return {
            "metrics": {**metrics, "steps": trained.pop("steps")},
            "downstream": downstream,
            **trained,
            "seconds": spent,
        }

    def _identity(self, cell: Cell, seed: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the record of a cell must say.

        Steps that were measured are taken from it, and so is the folder that it started from: its
        name is of all settings of the first run, defaults of new ones too, and that run has a
        record of its own.
        """
        train = record["config"].get("train", {})
        changed: dict[str, Any] = {}
        if cell.cost_of is not None:
            changed["train.steps"] = train.get("steps")
        if cell.start is not None:
            changed["train.start_from"] = train.get("start_from")
        return {
            "version": VERSION,
            "sweep": self.sweep,
            "cell": cell.name,
            "seed": seed,
            "config": plain(cell.config(seed, changed)),
            "downstream": cell.downstream and plain(cell.downstream),
            "watched": dict(cell.watched),
        }


def _short(value: Any, name: str = "") -> Any:
    """The same with few digits."""
    if isinstance(value, Mapping):
        return {key: _short(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item, name) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise UserError(
            f"{name} is {value}, so the run is not recorded: its training went wrong; lower the "
            "learning rate of its recipe"
        )
    return float(f"{value:.{DIGITS}g}")
