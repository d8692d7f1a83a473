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
from exlm_lab.ledger import check_identity, write_record
from exlm_mini.config import UserError, check_integers
from exlm_mini.data.files import open_regular, read_bytes, reading, write_atomically
from exlm_mini.reading.pretrained import Pretrained
from exlm_mini.recipes import Kind
from exlm_mini.training.loop import Outcome, Progress
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


class TunedRun(NamedTuple):
    """A finished run as the ledger holds it."""

    config: TuneConfig
    seed: int
    record: dict[str, Any]
    """metrics by part, best_epoch, history, seconds, …; of a run that diverged only why."""

    @property
    def is_diverged(self) -> bool:
        return "diverged" in self.record

    def reached(self, part: str, metric: str) -> float:
        """A metric as a share; below every other one for a run that diverged."""
        return -1e9 if self.is_diverged else self.record["metrics"][part][metric]


class Result(NamedTuple):
    """What is reported of a task."""

    task: Task
    config: TuneConfig
    """The setting, chosen on the validation rows if there were several."""
    cells: list[TunedRun]
    """One per seed, of that setting."""
    searched: list[TunedRun]
    """Runs that only served to choose."""
    notes: dict[str, Any]


class StoppedError(Exception):
    """The run was asked to stop; what is done is kept."""


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


class TuningRuns:
    """The finished runs of a directory, and the way to add one.

    Args:
        directory: OUTPUT, locked by the caller.
        pretrained: where every run starts.
        device: auto, cpu, cuda or cuda:N.
        is_kept: whether the last checkpoint of a finished run stays, its best weights in it.
        report: takes lines about something unusual.
    """

    def __init__(
        self,
        directory: Path,
        pretrained: Pretrained,
        device: str = "auto",
        is_kept: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        self.directory, self.pretrained, self.device = directory, pretrained, device
        self.is_kept, self.report = is_kept, report

    def cell(
        self,
        problem: Problem,
        config: TuneConfig,
        seed: int,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TunedRun:
        """A run of the ledger; it is made if it is not there.

        Raises:
            StoppedError: if ``should_stop`` became true before its end.
            UserError: if the ledger holds the run of another checkpoint or of other data.
        """
        place = f"{problem.task.name}/{key(config)}"
        path = self.directory / "cells" / place / f"seed-{seed}.json"
        identity = identity_of(self.pretrained, problem, config, seed)
        identity = {"task": problem.task.name, **identity}
        running = self.directory / "running" / place / f"seed-{seed}"
        if path.exists():
            record = _read(path, identity)
        else:
            tuner = FineTuner(
                self.pretrained, problem, config, seed, running, self.device, self.report
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                outcome = tuner.run(on_progress, should_stop)
            except DivergedError as error:
                self.report(str(error))
                record = {**identity, "diverged": str(error)}
            else:
                if not outcome.is_complete:
                    raise StoppedError
                _write_answers(problem, tuner.scores, path)
                record = {**identity, **_record(tuner, outcome)}
            record["is_kept"] = self.is_kept
            write_record(path, record)
        # Also where a command was killed just before: what was asked for then is in the record.
        if not record.get("is_kept", True):
            shutil.rmtree(running, ignore_errors=True)
            for parent in list(running.parents)[:3]:  # SETTING, TASK and running/ itself
                with contextlib.suppress(OSError):  # others are running there
                    parent.rmdir()
        return TunedRun(config, seed, record)


def best_setting(cells: list[TunedRun], task: Task) -> TuneConfig:
    """The setting with the highest median of the task's metric on the validation rows.

    Of equals the first one asked for.

    Raises:
        UserError: if every run diverged.
    """
    by_setting: dict[TuneConfig, list[float]] = {}
    for cell in cells:
        by_setting.setdefault(cell.config, []).append(cell.reached("validation", task.metric))
    if all(cell.is_diverged for cell in cells):
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


def _record(tuner: FineTuner, outcome: Outcome) -> dict[str, Any]:
    return {
        "metrics": tuner.metrics,
        "best_epoch": tuner.best_epoch,
        "history": tuner.history,
        "steps": outcome.step,
        "parameters": outcome.num_parameters,
        "seconds": tuner.seconds,
        "device": str(tuner.engine.device),
    }


def _write_answers(problem: Problem, found: dict[str, list], path: Path) -> None:
    """What the best epoch predicts, one line of JSON per example."""
    for name, scores in found.items():
        answers = problem.parts[name].answers(scores)
        lines = [json.dumps({"id": i, "answer": answer}) for i, answer in answers]
        write_atomically(
            path.with_name(f"{path.stem}.{name}.jsonl"), ("\n".join(lines) + "\n").encode()
        )


def read_answers(
    directory: Path, cell: TunedRun, task: str, part: str
) -> list[tuple[str, Any]]:
    """The predictions of a finished run: id of each example and its answer, in order."""
    path = directory / "cells" / task / key(cell.config) / f"seed-{cell.seed}.{part}.jsonl"
    with reading(path, MADE_AGAIN), open_regular(path, MADE_AGAIN) as lines:
        found = [json.loads(line) for line in lines]
        return [(entry["id"], entry["answer"]) for entry in found]


def _read(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    with reading(path, MADE_AGAIN):
        record = json.loads(read_bytes(path, MADE_AGAIN))
        found = {name: record[name] for name in identity}
        if "diverged" not in record:
            numbers = [record["seconds"], record["parameters"], record["best_epoch"]]
            numbers += [n for part in record["metrics"].values() for n in part.values()]
            if not (record["metrics"]["validation"] and all(map(math.isfinite, numbers))):
                raise ValueError(f"numbers {numbers}")
    remedy = "choose another --output, or use the same checkpoint and data"
    check_identity(path, found, identity, remedy)
    return record
