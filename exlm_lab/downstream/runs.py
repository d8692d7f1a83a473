"""The runs of one task: a ledger of finished runs, the search for a setting, and its seeds.

The ledger is a directory::

    cells/TASK/SETTING/seed-1.json           metrics of a finished run, written atomically
    running/TASK/SETTING/seed-1/             metrics and checkpoints of an unfinished run

Finished runs are not repeated, so a killed command resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exlm_lab.downstream.grid import best_setting, key, setting_of
from exlm_lab.downstream.prepared import ANOTHER_OUTPUT, Problem, identity_of
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Task
from exlm_lab.ledger import MADE_AGAIN, StoppedError, check_identity
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import read_json, write_json
from exlm_mini.reading.runs import fine_tuning
from exlm_mini.reading.trained import Trained
from exlm_mini.training.console import Progress, ProgressLine, in_words
from exlm_mini.training.processes import choose_device
from exlm_mini.training.step import DivergedError

if TYPE_CHECKING:
    import torch


class Result(NamedTuple):
    """What is reported for a task."""

    task: Task
    config: TuneConfig
    """The setting, chosen on the validation rows if there were several."""
    runs: list[dict[str, Any]]
    """Records of that setting, one per seed, see ``TuningLedger``."""
    searched: list[dict[str, Any]]
    """Records of the runs that served to choose it; empty if there was only one setting."""
    notes: dict[str, Any]
    baselines: dict[str, list[dict[str, float]]] = {}  # noqa: RUF012
    """Metrics of each baseline on the reported rows, by its name, as ``baselines`` returns them."""


@dataclass
class TuningLedger:
    """The finished runs of a task in a directory, by setting and seed.

    A record holds the identity of the run, metrics by part, best_epoch, history, seconds, …; if the
    run diverged, it holds the reason instead of results.
    """

    directory: Path
    """The command's output directory, locked by the caller."""
    pretrained: Trained
    """The model that every run starts from."""
    problem: Problem
    """The task, made ready for that model."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    model: Path | None = None
    """Where to save the model of the run that is best on the validation rows; None saves none."""
    report: Callable[[str], None] = print
    """Receives lines about unusual events."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after every step; if true, a checkpoint is saved and ``StoppedError`` raised."""

    def path(self, config: TuneConfig, seed: int) -> Path:
        """The path of a run's record."""
        return self.directory / "cells" / f"{self.name(config, seed)}.json"

    def run(
        self,
        config: TuneConfig,
        seed: int,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> dict[str, Any]:
        """The record of a run; if there is none yet, the run is made first.

        Raises:
            UserError: if the record is damaged, or belongs to another run.
            StoppedError: if ``should_stop`` asked it to stop; the next call resumes there.
        """
        path = self.path(config, seed)
        run = identity_of(self.pretrained, self.problem, config, seed)
        identity = {"task": self.problem.task.name, **run}
        running = self.directory / "running" / self.name(config, seed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # may fail: better before a long run
            write_json(path, identity | self._made(config, seed, running, on_progress))
        record = read_json(path, MADE_AGAIN)
        check_identity(path, record, identity, ANOTHER_OUTPUT)
        # Also removes what a kill just before this line left there.
        shutil.rmtree(running, ignore_errors=True)
        for parent in list(running.parents)[:3]:  # SETTING, TASK and running/ itself
            with contextlib.suppress(OSError):  # not empty: other runs are in there
                parent.rmdir()
        return record

    def _made(
        self,
        config: TuneConfig,
        seed: int,
        running: Path,
        on_progress: Callable[[Progress], None],
    ) -> dict[str, Any]:
        # importing transformers takes seconds
        from exlm_lab.downstream.finetuning import fine_tune
        from exlm_lab.downstream.saving import save_model

        run = self.pretrained, self.problem, config, seed, running
        try:
            tuned = fine_tune(*run, self.device, on_progress, self.should_stop)
        except DivergedError as error:
            self.report(str(error))
            return {"diverged": str(error)}
        if self.model is not None:
            reached = tuned.metrics["validation"][self.problem.task.metric]
            name = self.name(config, seed)
            save_model(self.model, tuned.model, self.pretrained, self.problem, name, reached)
        numbers = {name: value for name, value in tuned._asdict().items() if name != "model"}
        return {**numbers, "device": str(choose_device(self.device))}

    def name(self, config: TuneConfig, seed: int) -> str:
        """Task, setting and seed of a run."""
        return f"{self.problem.task.name}/{key(config)}/seed-{seed}"


def plan(
    problem: Problem,
    settings: list[TuneConfig],
    seeds: tuple[int, ...],
    pretrained: Trained,
    device: torch.device,
) -> str:
    """Describe the runs that ``tune`` would make, and the time they need."""
    from exlm_lab.downstream.finetuning import seconds_per_step

    rows, num_runs = problem.train.rows, len(settings) + len(seeds) - 1
    steps = [config.epochs * config.steps_per_epoch(rows) for config in settings]
    # Evaluating a row takes a third of the time of training on it.
    judged = len(problem.parts["validation"].rows) / (3 * len(rows))
    seconds = seconds_per_step(pretrained, problem, settings[0], device)
    seconds *= (1 + judged) * (sum(steps) + (len(seeds) - 1) * max(steps))
    of_each = " to ".join(f"{n:,}" for n in sorted({min(steps), max(steps)}))
    return (
        f"{len(settings)} setting(s), {len(seeds)} seed(s), {num_runs} run(s) "
        f"of {of_each} steps, about {in_words(seconds)} on {device}"
    )


def tune(ledger: TuningLedger, settings: list[TuneConfig], seeds: tuple[int, ...]) -> Result:
    """Make all runs of a task: every setting with the first seed, to choose the best, then the best
    with all other seeds. Runs in the ledger are not repeated.

    Raises:
        StoppedError: if ``ledger.should_stop`` asked it to stop.
        UserError: if ``ledger.model`` holds a model of another task, another pre-trained model or
            another run, or has lost its model; or if every setting or every seed diverged.
    """
    if ledger.model is not None and (there := fine_tuning(ledger.model)):
        start, problem = ledger.pretrained.sha256, ledger.problem.sha256
        identity = {"pretrained_sha256": start, "problem_sha256": problem}
        check_identity(ledger.model, there, identity, ANOTHER_OUTPUT)
        if there["run"] not in {ledger.name(own, seed) for own in settings for seed in seeds}:
            raise UserError(
                f"{ledger.model} holds the model of another run, {there['run']}; choose another "
                "--output, or repeat the settings and seeds it was made with"
            )
    task, numbers = ledger.problem.task, itertools.count(1)
    num_runs = len(settings) + len(seeds) - 1

    def run(config: TuneConfig, seed: int) -> dict[str, Any]:
        if ledger.should_stop():
            raise StoppedError
        name = f"{task.name} {next(numbers)}/{num_runs} seed {seed}"
        steps_per_epoch = config.steps_per_epoch(ledger.problem.train.rows)
        with ProgressLine(name, config.epochs * steps_per_epoch) as line:
            return ledger.run(config, seed, partial(_show, line, steps_per_epoch))

    searched = [run(config, seeds[0]) for config in settings] if len(settings) > 1 else []
    chosen = best_setting(searched, task) if searched else settings[0]
    runs = [record for record in searched if setting_of(record) == chosen]
    runs += [run(chosen, seed) for seed in seeds[len(runs) :]]
    best_setting(runs, task)  # raises if all diverged
    if ledger.model is not None and fine_tuning(ledger.model) is None:
        raise UserError(
            f"the runs are recorded in {ledger.directory / 'cells'}, but {ledger.model} no "
            "longer has its model; restore it from a copy, or delete both and the runs will be "
            "repeated"
        )
    return Result(task, chosen, runs, searched, ledger.problem.notes)


def compare(result: Result, problem: Problem, seeds: tuple[int, ...], model: Path) -> Result:
    """Add the baselines to a task's result, and draw ``figure.svg`` beside its saved model."""
    from exlm_lab.downstream.baselines import baselines
    from exlm_lab.downstream.figure import draw
    from exlm_mini.hf import load_predictor

    part = problem.parts.get("test", problem.parts["validation"])
    assert part.examples is not None and problem.train.examples is not None
    scores_RC, _ = load_predictor(model).scores(part.examples.texts)
    draw(problem.task, part.examples, scores_RC, model / "figure.svg")
    own = baselines(problem.task, problem.train.examples, part.examples, seeds)
    return result._replace(baselines=own)


def _show(line: ProgressLine, steps_per_epoch: int, progress: Progress) -> None:
    """Show the progress of a run on stderr."""
    epoch = -(-progress.step // steps_per_epoch)
    loss = "" if math.isnan(progress.loss) else f", loss {progress.loss:.3f}"
    line.tell(progress.step, f"epoch {epoch}{loss}")
