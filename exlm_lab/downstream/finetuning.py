"""Fine-tuning of one model on one task with one seed.

Shapes: R rows, B rows of a batch, N tokens of a row, C outputs of the head.

Data order and dropout are functions of (seed, epoch, step), so on one machine runs with equal
settings end with equal bits, even if they were stopped and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

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
from exlm_lab.ledger import check_identity
from exlm_mini.data.files import reading
from exlm_mini.data.memory import check_bytes
from exlm_mini.reading.pretrained import Pretrained
from exlm_mini.training.checkpoint import Checkpoint
from exlm_mini.training.cost import encoder_bytes
from exlm_mini.training.loop import Loop
from exlm_mini.training.parts import Objective, Scored, choose_device
from exlm_mini.training.processes import Engine
from exlm_mini.training.step import Update

EVALUATION_ROWS = 64


class LabelledBatch(NamedTuple):
    """Rows with their labels."""

    token_ids_BN: Tensor
    labels: Tensor
    """See ``heads.loss_sum``."""

    def to(self, device: torch.device) -> LabelledBatch:
        """The same batch on another device."""
        return LabelledBatch(*(tensor.to(device) for tensor in self))


def identity_of(
    pretrained: Pretrained, problem: Problem, config: TuneConfig, seed: int
) -> dict[str, Any]:
    """What identifies a run in checkpoints and records; JSON-able."""
    return {
        "config": asdict(config) | {"adam_betas": list(config.adam_betas)},
        "seed": seed,
        "pretrained_sha256": pretrained.sha256,
        "problem_sha256": problem.sha256,
    }


class FineTuner(Loop):
    """One run, evaluated after each epoch by the task's metrics on the validation rows.

    After the last step the model has the weights of the best epoch, ``scores`` its output for each
    row, by part, and ``metrics`` the metrics of these.

    Args:
        pretrained: gives the initial weights.
        problem: the task, encoded for that model.
        config: settings.
        seed: of the head's weights, of data order and of dropout.
        directory: of this run; gets ``metrics.jsonl`` and ``checkpoints/``.
        device: auto, cpu, cuda or cuda:N.
        report: receives lines about unusual events, such as a damaged checkpoint.

    Raises:
        UserError: for an unknown device, or batches that do not fit in its memory.
    """

    # A checkpoint of a large model takes longer than a short epoch.
    seconds_between_saves = 60.0

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
        self.problem, self.config = problem, config
        engine = Engine(choose_device(device))
        encoder = pretrained.model(
            dropout=config.dropout, attention_dropout=config.attention_dropout
        )
        width, self.pad = encoder.config.shape.width, encoder.special_ids.pad
        torch.manual_seed(seed)
        if problem.task.kind == "span":
            head: nn.Module = SpanHead(width, config.pooler_dropout, self.pad)
        else:
            head = ClassificationHead(width, problem.num_outputs, config.pooler_dropout)
        model = FineTuned(encoder, head, pretrained.layout.num_copies).train()
        lengths_R = np.array([len(row) for row in problem.train.rows])
        num_rows = min(config.micro_batch_size or config.batch_size, len(lengths_R))
        num_tokens = num_rows * int(lengths_R.max()) * pretrained.layout.num_copies
        check_bytes(
            f"{problem.task.name}: a forward pass of {num_rows:,} rows",
            {"lower micro_batch_size, or give one": encoder_bytes(encoder.config, num_tokens)},
            engine.device,
        )
        self.steps_per_epoch = config.steps_per_epoch(lengths_R)
        self._batches = lru_cache(maxsize=1)(
            partial(training_batches, lengths_R, config.batch_size, seed)
        )
        train = config.train(self.steps_per_epoch, engine.device)
        remedy = (
            f"for {problem.task.name} lower learning_rate ({config.learning_rate:g}) or "
            f"weight_decay ({config.weight_decay:g}), or set clip_norm 1"
        )
        objective = Objective(self._parts, self._size, self._loss, remedy)
        super().__init__(train, seed, model, objective, directory, report, engine)
        self.identity = identity_of(pretrained, problem, config, seed)
        self.history: list[dict[str, Any]] = []
        """Number, mean training loss and evaluation of each epoch."""
        self.best: dict[str, Tensor] = {}
        self.best_epoch = 0
        """From 1, chosen on the validation rows."""
        self.scores: dict[str, list[np.ndarray]] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    @torch.no_grad()
    def score(self, part: Part) -> list[np.ndarray]:
        """The head's output for each row, (C,) or (2, N), float32.

        Raises:
            DivergedError: if a number is not finite.
        """
        was_training = self.model.training
        self.model.eval()
        lengths_R = np.array([len(row) for row in part.rows])
        found: list[np.ndarray] = [np.empty(0)] * len(part.rows)
        num_rows = self.config.micro_batch_size or EVALUATION_ROWS
        for batch in evaluation_batches(lengths_R, num_rows):
            token_ids_BN = padded([part.rows[i] for i in batch], self.pad)
            with self.updater.precision():
                scores = self.model(token_ids_BN.to(self.engine.device)).float().cpu().numpy()
            for i, row in zip(batch, scores, strict=True):
                found[i] = row[..., : lengths_R[i]] if self.problem.task.kind == "span" else row
        self.model.train(was_training)
        if not all(np.isfinite(row).all() for row in found):
            raise self.updater.diverged("scores are not finite")
        return found

    # ---- the objective ----

    def _parts(self, step: int, rank: int, world_size: int) -> list[LabelledBatch]:
        epoch, place = divmod(step, self.steps_per_epoch)
        batch, train = self._batches(epoch)[place], self.problem.train
        size = self.config.micro_batch_size or len(batch)
        starts = range(rank * size, len(batch), world_size * size)
        chosen = [batch[start : start + size] for start in starts]
        return [
            LabelledBatch(
                padded([train.rows[i] for i in rows], self.pad),
                torch.from_numpy(train.labels[rows]),
            )
            for rows in chosen
        ]

    def _size(self, part: LabelledBatch) -> tuple[int, int]:
        num_tokens = int((part.token_ids_BN != self.pad).sum())
        return num_answers(self.problem.task.kind, part.labels), num_tokens

    def _loss(
        self, model: nn.Module, part: LabelledBatch, own: int, total: int, step: int
    ) -> Scored:
        scores = model(part.token_ids_BN)
        return Scored(loss_sum(self.problem.task.kind, scores, part.labels) / total)

    # ---- see Loop ----

    def _evaluate(self, step: int) -> dict[str, float]:
        """Validate, and keep the weights if no earlier epoch was as good."""
        part, metric = self.problem.parts["validation"], self.problem.task.metric
        evaluation = part.judge(self.score(part))
        epoch, loss = step // self.steps_per_epoch, self.loss_sum / self.steps_per_epoch
        self.history.append({"epoch": epoch, "loss": loss, "validation": evaluation})
        self.loss_sum = 0.0
        best = self.history[self.best_epoch - 1]["validation"][metric]
        if self.best_epoch == 0 or evaluation[metric] > best:
            self.best_epoch = epoch
            self.best = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in self.model.state_dict().items()
            }
        return evaluation

    def _numbers(
        self, update: Update, speed: float, evaluation: dict[str, float] | None
    ) -> dict[str, Any]:
        numbers = super()._numbers(update, speed, evaluation)
        return numbers if evaluation is None else numbers | self.history[-1]

    def _finish(self) -> None:
        with reading(self._checkpoints):
            self.model.load_state_dict(self.best)
        for name, part in self.problem.parts.items():
            self.scores[name] = self.score(part)
            self.metrics[name] = part.judge(self.scores[name])

    def _own_state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return {"best": self.best}, {
            "identity": self.identity,
            "history": self.history,
            "best_epoch": self.best_epoch,
            "epoch_loss": self.loss_sum,
        }

    def _take_over(self, checkpoint: Checkpoint) -> None:
        state, metric = checkpoint.state, self.problem.task.metric
        remedy = "use the same settings, or choose another --output"
        check_identity(self._checkpoints, state.get("identity", {}), self.identity, remedy)
        self.best = checkpoint.tensors["best"]
        self.history, self.best_epoch = state["history"], int(state["best_epoch"])
        self.loss_sum = float(state["epoch_loss"])
        # Otherwise a mistake in these would show only after the last step.
        if self.best_epoch:
            self.model.load_state_dict(self.best)
        reached = [past["validation"][metric] for past in self.history]
        if not (all(map(math.isfinite, reached)) and 0 <= self.best_epoch <= len(reached)):
            raise ValueError(f"best_epoch {self.best_epoch} of {reached}")
        self.evaluation = self.history[-1]["validation"] if self.history else None
        super()._take_over(checkpoint)
