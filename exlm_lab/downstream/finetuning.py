"""Fine-tuning one model on one task with one seed: the loop, its checkpoints, its best epoch.

Shapes: R rows, B rows of a batch, N tokens of a row, C outputs of the head.

Data order and dropout are functions of (seed, epoch, step), so two runs with equal settings end
with equal bits on one machine, and so does a run that was stopped and resumed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream.heads import (
    ClassificationHead,
    FineTuned,
    SpanHead,
    loss_sum,
    num_answers,
)
from exlm_lab.downstream.inputs import evaluation_batches, padded, training_batches
from exlm_lab.downstream.prepared import Part, Problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.memory import check_bytes
from exlm_mini.reading.pretrained import Pretrained
from exlm_mini.training.checkpoint import (
    latest_checkpoint,
    not_finite,
    prune_checkpoints,
    save_checkpoint,
)
from exlm_mini.training.cost import encoder_bytes
from exlm_mini.training.manifest import USE_EARLIER
from exlm_mini.training.optimizer_state import flatten_optimizer, restore_optimizer
from exlm_mini.training.parts import choose_device, learning_rate, make_optimizer
from exlm_mini.training.run_directory import MetricsLog
from exlm_mini.training.step import change_weights, seed_dropout

EVALUATION_ROWS = 64
SECONDS_BETWEEN_SAVES = 60.0
"""At least, after the first: a checkpoint of a large model takes longer than a short epoch."""


class DivergedError(UserError):
    """A loss that is not finite: these settings do not work, others may."""


class TuningStep(NamedTuple):
    """What the loop tells after a step."""

    step: int
    """Steps done, from 1."""
    epoch: int
    """Epoch it belongs to, from 1."""
    loss: float
    """Of the batch, per answer."""
    validation: float | None
    """The task's metric, after an epoch."""


class Tuned(NamedTuple):
    """How a run ended."""

    is_complete: bool
    """False when it was asked to stop before its last step."""
    step: int
    best_epoch: int
    """The one whose weights the metrics are of, from 1; chosen on the validation rows."""
    history: list[dict[str, Any]]
    """For each epoch its number, its mean training loss and the metrics on the validation rows."""
    metrics: dict[str, dict[str, float]]
    """By part: validation, test where its labels are known, and others of the task."""
    scores: dict[str, list[np.ndarray]]
    """By part, what the head gave out for each row; also for tests whose labels are secret."""
    num_parameters: int
    seconds: float
    """Of all starts, validation included."""


class FineTuner:
    """One run.

    Args:
        pretrained: where the weights start.
        problem: the task, its rows made for that model.
        config: settings.
        seed: of the head's weights, of data order and of dropout.
        directory: of this run; gets ``metrics.jsonl`` and ``checkpoints/``.
        device: auto, cpu, cuda or cuda:N.
        report: takes a line about something unusual, such as a damaged checkpoint.

    Raises:
        UserError: for an unknown device, or batches that do not fit in its memory.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        problem: Problem,
        config: TuneConfig,
        seed: int,
        directory: Path,
        device: str = "auto",
        report: Callable[[str], None] = print,
    ) -> None:
        self.problem, self.config, self.seed = problem, config, seed
        self.directory, self.report = directory, report
        self.device = choose_device(device)
        encoder = pretrained.model(
            dropout=config.dropout, attention_dropout=config.attention_dropout
        )
        width, pad = encoder.config.shape.width, encoder.special_ids.pad
        torch.manual_seed(seed)
        if problem.task.kind == "span":
            head = SpanHead(width, config.pooler_dropout, pad)
        else:
            head = ClassificationHead(width, problem.num_outputs, config.pooler_dropout)
        self.pad = pad
        self.model = FineTuned(encoder, head, pretrained.layout.num_copies).to(self.device)
        self.lengths_R = np.array([len(row) for row in problem.train.rows])
        num_rows = min(config.micro_batch_size or config.batch_size, len(self.lengths_R))
        num_tokens = num_rows * int(self.lengths_R.max()) * pretrained.layout.num_copies
        check_bytes(
            f"{problem.task.name}: a forward pass of {num_rows:,} rows",
            {"lower micro_batch_size, or give one": encoder_bytes(encoder.config, num_tokens)},
            self.device,
        )
        self.steps_per_epoch = math.ceil(len(self.lengths_R) / config.batch_size)
        self.num_steps = config.epochs * self.steps_per_epoch
        self.schedule = config.schedule(self.num_steps)
        self.optimizer = make_optimizer(self.model, self.schedule)
        # What a checkpoint must agree in to be gone on from.
        self.identity = {
            "config": asdict(config) | {"adam_betas": list(config.adam_betas)},
            "seed": seed,
            "pretrained_sha256": pretrained.sha256,
            "problem_sha256": problem.sha256,
        }
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self.best_epoch, self.epoch_loss, self.seconds = 0, 0.0, 0.0

    def run(
        self,
        on_progress: Callable[[TuningStep], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Tuned:
        """Train from the newest checkpoint, or from the start, to the end of the last epoch.

        Args:
            on_progress: called after every step.
            should_stop: asked after every step; if true the run saves a checkpoint and ends.

        Raises:
            DivergedError: if a loss is not finite.
            UserError: if a checkpoint cannot be read or written.
        """
        step = self._restore()
        started, seconds_before = time.monotonic(), self.seconds
        batches, batches_epoch, last_save = [], -1, -math.inf
        metric = self.problem.task.metric
        with MetricsLog(self.directory / "metrics.jsonl", step) as log:
            while step < self.num_steps:
                epoch, index = divmod(step, self.steps_per_epoch)
                if epoch != batches_epoch:
                    batches = training_batches(
                        self.lengths_R, self.config.batch_size, self.seed, epoch
                    )
                    batches_epoch = epoch
                loss = self._step(step, batches[index])
                self.epoch_loss += loss
                step += 1
                is_epoch_done = index == self.steps_per_epoch - 1
                validation = None
                if is_epoch_done:
                    record = self._end_epoch(epoch + 1)
                    validation = record["validation"][metric]
                is_stopped = should_stop()
                on_progress(TuningStep(step, epoch + 1, loss, validation))
                self.seconds = seconds_before + time.monotonic() - started
                if is_epoch_done:
                    log.write({"step": step, **record, "seconds": self.seconds})
                is_due = is_epoch_done and time.monotonic() - last_save > SECONDS_BETWEEN_SAVES
                if is_due or is_stopped or step == self.num_steps:
                    self._save(step)
                    last_save = time.monotonic()
                if is_stopped and step < self.num_steps:
                    return self._outcome(step, {}, {})
        with reading(self._checkpoints):
            self.model.load_state_dict(self.best)
        scores = {name: self.score(part) for name, part in self.problem.parts.items()}
        metrics = {
            name: part.judge(scores[name])
            for name, part in self.problem.parts.items()
            if part.judge is not None
        }
        self.seconds = seconds_before + time.monotonic() - started
        return self._outcome(step, metrics, scores)

    @torch.no_grad()
    def score(self, part: Part) -> list[np.ndarray]:
        """What the head gives out for each row, (C,) or (2, N), float32, in the order of rows.

        Raises:
            DivergedError: if a number of them is not finite.
        """
        self.model.eval()
        lengths_R = np.array([len(row) for row in part.rows])
        found: list[np.ndarray] = [np.empty(0)] * len(part.rows)
        num_rows = self.config.micro_batch_size or EVALUATION_ROWS
        for batch in evaluation_batches(lengths_R, num_rows):
            token_ids_BN = padded([part.rows[i] for i in batch], self.pad)
            with self._precision():
                scores = self.model(token_ids_BN.to(self.device)).float().cpu().numpy()
            for i, row in zip(batch, scores, strict=True):
                found[i] = row[..., : lengths_R[i]] if self.problem.task.kind == "span" else row
        if not all(np.isfinite(row).all() for row in found):
            raise self._diverged("scores are not finite")
        return found

    def _diverged(self, what: str) -> DivergedError:
        """The line for numbers that are not finite, and what may help."""
        config = self.config
        return DivergedError(
            f"{self.problem.task.name}: {what} with learning_rate {config.learning_rate:g} and "
            f"weight_decay {config.weight_decay:g}; lower them, or set clip_norm 1"
        )

    @property
    def _checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def _step(self, step: int, batch: np.ndarray) -> float:
        """One update; the mean loss of the batch."""
        config, train = self.config, self.problem.train
        kind = self.problem.task.kind
        size = config.micro_batch_size or len(batch)
        total = max(num_answers(kind, train.labels[batch]), 1)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro, start in enumerate(range(0, len(batch), size)):
            chosen = batch[start : start + size]
            token_ids_BN = padded([train.rows[i] for i in chosen], self.pad).to(self.device)
            labels = torch.from_numpy(train.labels[chosen]).to(self.device)
            seed_dropout(self.seed, step, micro)
            with self._precision():
                scores = self.model(token_ids_BN)
            part = loss_sum(kind, scores, labels) / total
            part.backward()
            loss += part.item()
        # Without clipping this only measures: nothing is scaled by a limit that is infinite.
        limit = config.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(f"loss {loss:g}, gradient norm {norm:g} at step {step + 1}")
        change_weights(self.optimizer, learning_rate(self.schedule, step))
        return loss

    def _end_epoch(self, epoch: int) -> dict[str, Any]:
        """Validate, and keep the weights if no epoch before was as good; the epoch's record."""
        part = self.problem.parts["validation"]
        record = {
            "epoch": epoch,
            "loss": self.epoch_loss / self.steps_per_epoch,
            "validation": part.judge(self.score(part)),
        }
        self.history.append(record)
        self.epoch_loss = 0.0
        reached = [past["validation"][self.problem.task.metric] for past in self.history]
        if self.best_epoch == 0 or reached[-1] > reached[self.best_epoch - 1]:
            self.best_epoch = epoch
            self.best = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in self.model.state_dict().items()
            }
        return record

    def _precision(self) -> contextlib.AbstractContextManager:
        precision = self.config.precision
        if precision == "auto":
            precision = "bf16" if self.device.type == "cuda" else "fp32"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    def _outcome(self, step: int, metrics: dict, scores: dict) -> Tuned:
        return Tuned(
            step == self.num_steps,
            step,
            self.best_epoch,
            self.history,
            metrics,
            scores,
            sum(p.numel() for p in self.model.parameters()),
            self.seconds,
        )

    def _save(self, step: int) -> None:
        """Replace the checkpoint by one of this step: weights, moments, and the best weights."""
        if name := not_finite(self.model.state_dict()):
            raise self._diverged(f"the weights {name} are not finite after step {step}")
        moments, groups = flatten_optimizer(self.optimizer, self.model.named_parameters())
        tensors = {"model": self.model.state_dict(), "optimizer": moments, "best": self.best}
        state = {
            "identity": self.identity,
            "optimizer_groups": groups,
            "history": self.history,
            "best_epoch": self.best_epoch,
            "epoch_loss": self.epoch_loss,
            "seconds": self.seconds,
        }
        save_checkpoint(self._checkpoints, step, tensors, state)
        prune_checkpoints(self._checkpoints, 1, None)

    def _restore(self) -> int:
        """Take over the newest checkpoint, if there is one; the number of steps done."""
        checkpoint = latest_checkpoint(self._checkpoints, self.report)
        if checkpoint is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            return 0
        state, metric = checkpoint.state, self.problem.task.metric
        path = self._checkpoints / f"step-{checkpoint.step:06d}"
        with reading(path, USE_EARLIER.format(path)):
            stored = state.get("identity", {})
            for name, value in self.identity.items():
                if stored.get(name) != value:
                    raise UserError(
                        f"{self._checkpoints} holds a run with another "
                        f"{name.removesuffix('_sha256')}; use the same settings, or choose another "
                        "--output"
                    )
            self.best = checkpoint.tensors["best"]
            self.history, self.best_epoch = state["history"], int(state["best_epoch"])
            self.epoch_loss, self.seconds = float(state["epoch_loss"]), float(state["seconds"])
            # Each weight of the best epoch, and each past epoch, is what it will be used as.
            if self.best_epoch:
                self.model.load_state_dict(self.best)
            for epoch, past in enumerate(self.history, 1):
                if past["epoch"] != epoch or not math.isfinite(past["validation"][metric]):
                    raise ValueError(f"history of epoch {epoch}")
            if not 0 <= self.best_epoch <= len(self.history):
                raise ValueError(f"best_epoch {self.best_epoch} of {len(self.history)}")
            self.model.load_state_dict(checkpoint.tensors["model"])
            restore_optimizer(
                self.optimizer,
                list(self.model.named_parameters()),
                checkpoint.tensors["optimizer"],
                state["optimizer_groups"],
            )
        prune_checkpoints(self._checkpoints, 1, None)  # no save may follow one cut short
        return checkpoint.step
