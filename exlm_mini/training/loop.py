"""The training loop: steps in, checkpoints and metrics out.

The loop reports through a callback and knows nothing of command line or terminal. Each step is a
function of the settings and the step number, so a run that was stopped and resumed ends with the
same bits as one that was not: on one machine, with the same versions and threads. Another processor
adds in another order, and trainings diverge from a difference in the last bit.

With several processes, all run the loop side by side, and only the first reports and writes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from exlm_mini.config import TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.training.checkpoint import (
    REMEDY,
    Checkpoint,
    latest_checkpoint,
    not_finite,
    optimizer_tensors,
    prune_checkpoints,
    restore_optimizer,
    save_checkpoint,
)
from exlm_mini.training.meter import ScalarLog
from exlm_mini.training.parts import Objective, make_optimizer, versions
from exlm_mini.training.processes import Engine
from exlm_mini.training.run_directory import MetricsLog
from exlm_mini.training.step import Update, Updater


class Progress(NamedTuple):
    """What the loop reports after a step."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Of the last batch, see ``Update``."""
    tokens_per_second: float
    """Input tokens, before expansion or repetition and without padding, since this start."""
    evaluation: Any
    """After a validation an ``Evaluation``, in fine-tuning the task's metrics; otherwise None."""


class Outcome(NamedTuple):
    """How a run ended."""

    step: int
    is_complete: bool
    """False if it was asked to stop before its end."""
    evaluation: Any
    """Of the last validation, as in ``Progress``; None if there was none yet."""
    num_parameters: int
    skipped_steps: int
    """Steps whose loss or gradient was not finite, see ``step``."""


class Loop:
    """One run, from its newest checkpoint to its last step.

    A subclass defines validation and what else a checkpoint holds.

    Args:
        train: settings, with a definite precision.
        seed: of dropout.
        model: before training, on any device; has an ``encoder``.
        objective: what is learned.
        output: run directory; gets ``checkpoints/`` and ``metrics.jsonl``.
        report: takes a line about something unusual, such as a damaged checkpoint.
        engine: of this process.
    """

    model: Any
    """A module with an ``encoder``, on the engine's device."""
    seconds_between_saves = 0.0
    """Least time between two saves by ``save_every``."""

    def __init__(
        self,
        train: TrainConfig,
        seed: int,
        model: nn.Module,
        objective: Objective,
        output: Path,
        report: Callable[[str], None],
        engine: Engine,
    ) -> None:
        self.train, self.output, self.report, self.engine = train, output, report, engine
        self._checkpoints = output / "checkpoints"
        self.model = engine.wrap(model, train, objective.loss)
        self.optimizer = make_optimizer(self.model, train)
        self.updater = Updater(train, seed, engine, self.model, self.optimizer, objective)
        self.evaluation: Any = None
        self.num_tokens = 0
        """Input tokens of all steps done, before expansion or repetition, without padding."""
        self.loss_sum = 0.0
        """Over the steps since a subclass last set it to 0."""
        self.seconds = 0.0
        """Of all starts, validation included."""
        self._saved_at = -math.inf

    # ---- defined by the subclass ----

    def _evaluate(self, step: int) -> Any:
        """Validate after a step, see ``Progress``; ``DivergedError`` if a number is not finite."""
        raise NotImplementedError

    def _own_state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Further tensors (by group) and JSON-able state for a checkpoint."""
        raise NotImplementedError

    def _beside_weights(self, step: int) -> dict[str, bytes]:
        """Further files of a checkpoint."""
        raise NotImplementedError

    def _finish(self) -> None:
        """After the last step."""

    # ---- the run ----

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        should_save: Callable[[], bool] = lambda: False,
        watch: Callable[[], dict[str, float]] = dict,
        until: int | None = None,
    ) -> Outcome:
        """Train from the newest checkpoint, or from the start, to the last step.

        Args:
            on_progress: called after every step, in the first process.
            should_stop: asked after every step; if true in any process, all save a checkpoint of
                the same step and the run ends.
            should_save: the same, but the run goes on.
            watch: called after every validation, in the first process and before ``should_stop``;
                its numbers go into the line of ``metrics.jsonl``.
            until: step at which this model ends, if another goes on from its checkpoint.

        Raises:
            DivergedError: if too many steps, a validation or the weights are not finite.
            UserError: if a checkpoint cannot be read or written.
        """
        train, engine = self.train, self.engine
        end = train.steps if until is None else until
        step = self._restore()
        start_time, start_tokens = time.monotonic(), self.num_tokens
        with contextlib.ExitStack() as open_files:
            logs = self._open_logs(step, open_files)
            seconds_before = self.seconds
            while step < end:
                update = self.updater.step(step)
                step += 1
                self.num_tokens += update.num_tokens
                self.loss_sum += update.loss
                evaluation, watched = None, {}
                if step % train.validate_every == 0 or step == end:
                    evaluation = self.evaluation = self._evaluate(step)
                    watched = watch() if engine.is_main else {}
                is_stopped, is_asked = engine.any(should_stop(), should_save())
                is_last = step == end or is_stopped
                seconds = max(time.monotonic() - start_time, 1e-9)
                self.seconds = seconds_before + seconds
                speed = (self.num_tokens - start_tokens) / seconds
                if engine.is_main:
                    on_progress(Progress(step, update.loss, speed, evaluation))
                if evaluation is not None or is_last or step % train.log_every == 0:
                    record = {"step": step, **self._numbers(update, speed, evaluation)}
                    with engine.together():
                        for log in logs:
                            log.write(record | watched)
                is_late = time.monotonic() - self._saved_at >= self.seconds_between_saves
                if is_last or is_asked or (step % train.save_every == 0 and is_late):
                    self._save(step)
                if is_stopped:
                    break
        if step == train.steps:
            self._finish()
        return Outcome(
            step,
            step == end,
            self.evaluation,
            sum(p.numel() for p in self.model.parameters()),
            self.updater.skipped_steps,
        )

    def _open_logs(
        self, step: int, open_files: contextlib.ExitStack
    ) -> list[MetricsLog | ScalarLog]:
        """The logs of the first process; restores ``seconds`` from the metrics."""
        logs: list[MetricsLog | ScalarLog] = []
        with self.engine.together():
            if self.engine.is_main:
                self.output.mkdir(parents=True, exist_ok=True)
                # There may be no further save to remove the remains of one that was cut short.
                prune_checkpoints(self._checkpoints, self.train.keep_last, step)
                metrics = MetricsLog(self.output / "metrics.jsonl", step)
                self.seconds = (metrics.last or {}).get("seconds") or 0.0
                logs.append(metrics)
                if self.train.tensorboard:
                    logs.append(ScalarLog(self.output / "tensorboard", step))
                for log in logs:
                    open_files.callback(log.close)
        return logs

    def _numbers(self, update: Update, speed: float, evaluation: Any) -> dict[str, Any]:
        """A line of ``metrics.jsonl``, extended by subclasses; ``speed`` in input tokens per second
        since this start."""
        return {
            "loss": update.loss,
            "learning_rate": update.learning_rate,
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "num_processes": self.engine.world_size,
            "gradient_norm": update.gradient_norm,
            "skipped_steps": self.updater.skipped_steps,
        }

    # ---- checkpoints ----

    def _save(self, step: int) -> None:
        """The first process writes a checkpoint; all must call."""
        with self.engine.together():
            if self.engine.is_main:
                weights = self.model.state_dict()
                if name := not_finite(weights):
                    what = f"the weights {name} are not finite after step {step}"
                    raise self.updater.diverged(what)
                tensors, state = self._own_state()
                tensors |= {
                    "model": weights,
                    "optimizer": optimizer_tensors(self.optimizer, self.model),
                }
                state |= {
                    "num_tokens": self.num_tokens,
                    "update": self.updater.state(),
                    "num_processes": self.engine.world_size,
                    "versions": versions(self.engine.device),
                }
                others = self._beside_weights(step)
                save_checkpoint(self._checkpoints, step, tensors, state, others)
                prune_checkpoints(self._checkpoints, self.train.keep_last, step)
        self._saved_at = time.monotonic()

    def _restore(self) -> int:
        """Load the newest intact checkpoint, if there is one; returns the number of steps done."""
        engine = self.engine
        with engine.together():
            report = self.report if engine.is_main else lambda line: None
            checkpoint = latest_checkpoint(self._checkpoints, report)
        step = 0 if checkpoint is None else checkpoint.step
        if any(engine.any(step != engine.same(step))):
            raise UserError(
                f"processes see other checkpoints in {self._checkpoints}; all machines must see "
                "one --output"
            )
        if checkpoint is None:
            return 0
        path = self._checkpoints / f"step-{step:06d}"
        with engine.together(), reading(path, REMEDY.format(path)):
            self._take_over(checkpoint)
        return step

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """Put weights, moments and counts where they belong; refuse those of another run."""
        state = checkpoint.state
        self.model.load_state_dict(checkpoint.tensors["model"])
        restore_optimizer(self.optimizer, self.model, checkpoint.tensors["optimizer"])
        # Older checkpoints hold neither of these.
        self.num_tokens = int(state.get("num_tokens", 0))
        self.updater.restore(state.get("update", {}))
