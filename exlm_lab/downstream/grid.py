"""Many runs of one task: which settings and seeds, a ledger of what is done, and what to report.

A recipe says for each task which values to try (Tables 6, 8 and 11). The ledger is a directory::

    cells/TASK/SETTING/seed-1.json           metrics of a finished run, there whole or not at all
    cells/TASK/SETTING/seed-1.PART.jsonl     what it predicts for the rows of a part
    running/TASK/SETTING/seed-1/             metrics and checkpoints of a run that is not finished

A finished run is not run again, so a command that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from exlm_lab.downstream.catalogue import task_names
from exlm_lab.downstream.finetuning import FineTuner, identity_of
from exlm_lab.downstream.prepared import Problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Task
from exlm_lab.ledger import Ledger, StoppedError, check_identity
from exlm_mini.config import UserError, check_integers
from exlm_mini.data.files import open_regular, read_bytes, reading, write_atomically
from exlm_mini.reading.pretrained import Pretrained
from exlm_mini.recipes import Kind, build
from exlm_mini.training.loop import Progress
from exlm_mini.training.step import DivergedError

RECIPES = Path(__file__).parents[1] / "recipes" / "finetune"
PAPER = RECIPES / "paper.json"
MADE_AGAIN = "delete it, and the run is made again"
PAPER_TABLES = {
    "table-6": ("Table 2", "Table 4", "Table 13", "Figure 3", "Figure 8"),
    "table-8": ("Table 1",),
    "table-11": ("Table 3",),
}
"""Recipe: what it made in the paper."""

Report = Literal["median", "mean", "mean-sd"]


@dataclass(frozen=True)
class Space:
    """Values to try for one task; every combination is a setting (``TuneConfig`` says of what)."""

    learning_rate: tuple[float, ...] = ()
    batch_size: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    warmup_share: tuple[float, ...] = ()
    dropout: tuple[float, ...] = ()
    attention_dropout: tuple[float, ...] = ()
    pooler_dropout: tuple[float, ...] = ()
    weight_decay: tuple[float, ...] = ()
    clip_norm: tuple[float, ...] = ()

    def settings(self, base: TuneConfig) -> list[TuneConfig]:
        """All combinations; what is not named stays as in ``base``."""
        named = {f.name: values for f in fields(self) if (values := getattr(self, f.name))}
        return [
            replace(base, **dict(zip(named, combination, strict=True)))
            for combination in itertools.product(*named.values())
        ]


class Tuning(NamedTuple):
    """Settings and seeds for some tasks, and how their results are put together."""

    name: str
    report: Report
    seeds: tuple[int, ...]
    spaces: dict[str, Space]
    """By task."""
    changed: tuple[str, ...] = ()
    """Settings that were given in place of the recipe's."""


class Result(NamedTuple):
    """What is reported of a task."""

    task: Task
    config: TuneConfig
    """The setting, chosen on the validation rows if there were several."""
    cells: list[dict[str, Any]]
    """Records of that setting, one per seed, see ``TuningLedger``."""
    searched: list[dict[str, Any]]
    """Of runs that only served to choose."""
    notes: dict[str, Any]


def _tuning(name: str, settings: dict[str, Any]) -> Tuning:
    """What the settings of a recipe ask for."""
    seeds, report = settings.pop("seeds", ()), settings.pop("report", "mean-sd")
    check_integers({"seeds": seeds})
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds is {list(seeds)}; give different ones")
    spaces = {task: Space(**values) for task, values in settings.items()}
    for space in spaces.values():
        space.settings(TuneConfig())  # refuses what cannot be
    return Tuning(Path(name).stem, report, seeds, spaces)


TUNING = Kind(
    RECIPES,
    {"report": Report, "seeds": tuple[int, ...], **dict.fromkeys(task_names(), Space)},
    _tuning,
    "finetune/",
)
"""Recipes that ``load_recipe`` makes a ``Tuning`` of."""


class TuningLedger(Ledger):
    """The finished runs of a task in a directory. A cell is its settings, a ``TuneConfig``.

    A record holds what the run was made with, metrics by part, best_epoch, history, seconds, …;
    that of a run that diverged only says why.

    Args:
        directory: OUTPUT, locked by the caller.
        pretrained: where every run starts.
        problem: the task, its rows made for that model.
        device: auto, cpu, cuda or cuda:N.
        is_kept: whether the last checkpoint of a finished run stays, its best weights in it.
        report: takes lines about something unusual.
        should_stop: asked after every step; if true a checkpoint is saved and ``StoppedError``
            raised.
    """

    def __init__(
        self,
        directory: Path,
        pretrained: Pretrained,
        problem: Problem,
        device: str = "auto",
        is_kept: bool = False,
        report: Callable[[str], None] = print,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.directory, self.pretrained, self.problem = directory, pretrained, problem
        self.device, self.is_kept = device, is_kept
        self.report, self.should_stop = report, should_stop

    def path(self, cell: TuneConfig, seed: int) -> Path:
        """See ``Ledger``."""
        return self.directory / "cells" / f"{self._name(cell, seed)}.json"

    def read(self, cell: TuneConfig, seed: int) -> dict[str, Any]:
        """See ``Ledger``."""
        path, identity = self.path(cell, seed), self._identity(cell, seed)
        with reading(path, MADE_AGAIN):
            record = json.loads(read_bytes(path, MADE_AGAIN))
            found = {name: record[name] for name in identity}
            if not is_diverged(record):
                numbers = [record["seconds"], record["parameters"], record["best_epoch"]]
                numbers += [n for part in record["metrics"].values() for n in part.values()]
                if not (record["metrics"]["validation"] and all(map(math.isfinite, numbers))):
                    raise ValueError(f"numbers {numbers}")
        remedy = "choose another --output, or use the same checkpoint and data"
        check_identity(path, found, identity, remedy)
        return record

    def make(
        self, cell: TuneConfig, seed: int, on_progress: Callable[[Progress], None]
    ) -> dict[str, Any]:
        """See ``Ledger``; also writes what the run predicts."""
        record = {**self._identity(cell, seed), "is_kept": self.is_kept}
        run = self.pretrained, self.problem, cell, seed, self._running(cell, seed)
        tuner = FineTuner(*run, self.device, self.report)
        try:
            outcome = tuner.run(on_progress, self.should_stop)
        except DivergedError as error:
            self.report(str(error))
            return {**record, "diverged": str(error)}
        if not outcome.is_complete:
            raise StoppedError
        self.path(cell, seed).parent.mkdir(parents=True, exist_ok=True)
        for part, scores in tuner.scores.items():
            answers = self.problem.parts[part].answers(scores)
            lines = [json.dumps({"id": i, "answer": answer}) + "\n" for i, answer in answers]
            write_atomically(self._answers_path(cell, seed, part), "".join(lines).encode())
        return {
            **record,
            "metrics": tuner.metrics,
            "best_epoch": tuner.best_epoch,
            "history": tuner.history,
            "steps": outcome.step,
            "parameters": outcome.num_parameters,
            "seconds": tuner.seconds,
            "device": str(tuner.engine.device),
        }

    def run(
        self,
        cell: TuneConfig,
        seed: int,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> dict[str, Any]:
        """See ``Ledger``; what is no longer needed is removed."""
        record = super().run(cell, seed, on_progress)
        # Also where a command was killed just before: what was asked for then is in the record.
        if not record.get("is_kept", True):
            running = self._running(cell, seed)
            shutil.rmtree(running, ignore_errors=True)
            for parent in list(running.parents)[:3]:  # SETTING, TASK and running/ itself
                with contextlib.suppress(OSError):  # others are running there
                    parent.rmdir()
        return record

    def _name(self, cell: TuneConfig, seed: int) -> str:
        return f"{self.problem.task.name}/{key(cell)}/seed-{seed}"

    def _running(self, cell: TuneConfig, seed: int) -> Path:
        return self.directory / "running" / self._name(cell, seed)

    def _identity(self, cell: TuneConfig, seed: int) -> dict[str, Any]:
        run = identity_of(self.pretrained, self.problem, cell, seed)
        return {"task": self.problem.task.name, **run}

    def answers(self, cell: TuneConfig, seed: int, part: str) -> list[tuple[str, Any]]:
        """The predictions of a finished run: id of each example and its answer, in order."""
        path = self._answers_path(cell, seed, part)
        with reading(path, MADE_AGAIN), open_regular(path, MADE_AGAIN) as lines:
            found = [json.loads(line) for line in lines]
            return [(entry["id"], entry["answer"]) for entry in found]

    def _answers_path(self, cell: TuneConfig, seed: int, part: str) -> Path:
        return self.path(cell, seed).with_suffix(f".{part}.jsonl")


def is_diverged(record: dict[str, Any]) -> bool:
    """Whether a run ended with numbers that are not finite."""
    return "diverged" in record


def setting_of(record: dict[str, Any]) -> TuneConfig:
    """The settings of a run."""
    return build(TuneConfig, record["config"])


def reached(record: dict[str, Any], part: str, metric: str) -> float:
    """A metric as a share; below every other one for a run that diverged."""
    return -1e9 if is_diverged(record) else record["metrics"][part][metric]


def best_setting(cells: list[dict[str, Any]], task: Task) -> TuneConfig:
    """The setting with the highest median of the task's metric on the validation rows.

    Of equals the first one asked for.

    Args:
        cells: records of runs.
        task: of all of them.

    Raises:
        UserError: if every run diverged.
    """
    by_setting: dict[TuneConfig, list[float]] = {}
    for cell in cells:
        shares = by_setting.setdefault(setting_of(cell), [])
        shares.append(reached(cell, "validation", task.metric))
    if all(map(is_diverged, cells)):
        raise UserError(f"{task.name}: every run diverged; try lower learning rates")
    return max(by_setting, key=lambda config: statistics.median(by_setting[config]))


def key(config: TuneConfig) -> str:
    """A short name of a setting: what the paper's tables vary, and a hash of the whole."""
    text = json.dumps(asdict(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return (
        f"lr{config.learning_rate:g}-b{config.batch_size}-e{config.epochs}"
        f"-w{config.warmup_share:g}-{digest}"
    )


def summary(values: list[float], report: Report) -> dict[str, Any]:
    """Several seeds put together.

    Args:
        values: a metric of each seed, as a share.
        report: median, mean, or mean with the standard deviation of the sample.

    Returns:
        ``value``, ``sd`` (None for one seed) and ``seeds``, in percent.
    """
    percent = [100 * value for value in values]
    center = statistics.median if report == "median" else statistics.fmean
    sd = statistics.stdev(percent) if len(percent) > 1 else None
    return {"value": center(percent), "sd": sd, "rule": report, "seeds": percent}


def paper_numbers(tables: tuple[str, ...], task: str) -> dict[str, dict[str, float]]:
    """What the paper prints for a task: ``{table: {row: percent}}``."""
    printed = json.loads(PAPER.read_text(encoding="utf-8"))
    return {
        table: {row: values[task] for row, values in printed[table].items() if task in values}
        for table in tables
        if any(task in values for values in printed[table].values())
    }
