"""One optimiser step: the micro-batches of all processes, their gradient, and the update.

A step whose loss or gradient is not finite is skipped by all processes: neither weights nor moments
change. Nothing non-finite is replaced, and too many such steps in a row end the run.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from exlm_mini.config import TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.training.parts import Objective, learning_rate
from exlm_mini.training.processes import Engine

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Update(NamedTuple):
    """Numbers of an optimiser step, over all processes."""

    loss: float
    """Nats per target, or per answer in fine-tuning."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    is_skipped: bool
    """The loss or the gradient was not finite, so nothing was changed."""
    num_without_path: int
    num_tokens: int
    """Input tokens, before expansion or repetition and without padding."""
    mask_accuracy: float | None
    """Share of the masked tokens that were guessed; None for ExLM and in fine-tuning."""


class DivergedError(UserError):
    """Numbers are not finite: these settings do not work, but others may."""


class Updater:
    """Makes the steps of a run. Arguments as for ``Loop``; the model comes from ``Engine.wrap``."""

    def __init__(
        self,
        train: TrainConfig,
        seed: int,
        engine: Engine,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
    ) -> None:
        self.train, self.seed, self.engine, self.model = train, seed, engine, model
        self.optimizer, self.objective = optimizer, objective
        is_scaled = train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=is_scaled)
        self.skipped_steps = 0
        """In the whole run."""
        self.grown_at = 0
        """See ``learning_rate``."""
        self.skipped_in_row = 0
        """Up to the last step, without those that fp16 skips while it looks for its scale."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint besides weights and moments; JSON-able."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``; early checkpoints have none, and counting starts at 0."""
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.skipped_in_row = int(state.get("skipped_in_row", 0))
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])

    def step(self, step: int) -> Update:
        """Make one step; ``step`` counts from 0.

        Raises:
            DivergedError: if too many steps in a row were not finite, in all processes.
            UserError: if fp16 finds no scale for the loss, in all processes.
        """
        engine, objective = self.engine, self.objective
        parts = objective.parts(step, engine.rank, engine.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        sizes_P2 = torch.tensor([objective.size(part) for part in parts]).reshape(-1, 2)
        total, num_tokens = map(int, engine.add_up(sizes_P2.double().sum(dim=0)).tolist())
        counted = self._accumulate(step, parts, sizes_P2[:, 0].tolist(), max(total, 1))
        self.scaler.unscale_(self.optimizer)
        norm = engine.clip(self.model, self.train.clip_norm)
        counts = torch.tensor([*counted, not math.isfinite(norm)], dtype=torch.float64)
        loss, num_without_path, num_correct, num_bad = engine.add_up(counts).tolist()
        is_skipped = not math.isfinite(loss) or num_bad > 0
        rate = learning_rate(self.train, step, self.grown_at)
        if not is_skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self._note(is_skipped, step, loss, norm)
        accuracy = None if math.isnan(num_correct) else num_correct / max(total, 1)
        return Update(loss, norm, rate, is_skipped, int(num_without_path), num_tokens, accuracy)

    def precision(self) -> contextlib.AbstractContextManager:
        """Context of every forward pass: the precision of the settings."""
        dtype = LOW_PRECISION.get(self.train.precision)
        return torch.autocast(
            self.engine.device.type, dtype or torch.bfloat16, enabled=dtype is not None
        )

    def diverged(self, what: str) -> DivergedError:
        """The error for numbers that are not finite, with advice."""
        return DivergedError(f"{what}; {self.objective.remedy}")

    def _accumulate(
        self, step: int, parts: list[Any], sizes: list[int], total: int
    ) -> tuple[float, int, float]:
        """Add up the gradient; returns loss, rows without a path and right guesses of this process
        (nan if there are no guesses)."""
        loss, num_without_path, num_correct = 0.0, 0, 0.0
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            micro = i * self.engine.world_size + self.engine.rank
            # Like masks and order, dropout is a function of counters.
            torch.manual_seed(((self.seed * 1_000_003 + step) * 65_537 + micro) % 2**63)
            with self.engine.accumulate(is_last=i == len(parts) - 1):
                with self.precision():
                    scored = self.engine.score(part.to(self.engine.device), size, total, step)
                # DDP averages over the processes, but the batch is their sum.
                self.scaler.scale(scored.loss * self.engine.world_size).backward()
            loss += scored.loss.item()
            num_without_path += scored.num_without_path
            num_correct += math.nan if scored.num_correct is None else int(scored.num_correct)
        return loss, num_without_path, num_correct

    def _note(self, is_skipped: bool, step: int, loss: float, norm: float) -> None:
        """Count skipped steps, adapt the scale of the loss, and stop after too many."""
        train = self.train
        self.skipped_steps += is_skipped
        if self.scaler.is_enabled():
            before = self.scaler.get_scale()
            self.scaler.update()
            scale = self.scaler.get_scale()
            if scale < train.min_loss_scale:
                raise UserError(
                    f"the loss scale fell to {scale:g} at step {step + 1}, below "
                    f"train.min_loss_scale {train.min_loss_scale:g}; go on in bf16 or fp32 "
                    "(--train.precision) or with a lower train.learning_rate, in another --output"
                )
            if scale < before and math.isfinite(loss):
                return  # the scale was too large; the step itself was fine
        self.skipped_in_row = self.skipped_in_row + 1 if is_skipped else 0
        if self.skipped_in_row >= min(train.max_skipped, train.steps):
            what = f"loss {loss:g}, gradient norm {norm:g} at step {step + 1}: not finite"
            what += f" in {self.skipped_in_row} steps in a row"
            raise self.diverged(f"{what} (train.max_skipped {train.max_skipped})")
