"""One optimiser step: the micro-batches of all processes, their gradient, and what it is good for.

A step whose loss or gradient is not finite is skipped by all processes together: neither weights
nor moments change. Nothing non-finite is replaced, and too many such steps end the run.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch

from exlm_mini.config import RunConfig, UserError
from exlm_mini.data.batches import TokenBatches, TrainingBatches
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.parts import chain_share, num_copies
from exlm_mini.training.processes import Engine

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Update(NamedTuple):
    """What an optimiser step tells of its batch, over all processes."""

    loss: float
    """Nats per target."""
    gradient_norm: float
    """Before clipping."""
    is_skipped: bool
    """The loss or the gradient was not finite, and nothing changed."""
    num_without_path: int
    num_tokens: int
    """Input tokens, before expansion or repetition and without padding."""
    mask_accuracy: float | None
    """Share of the masked tokens that were guessed; none for ExLM."""


def seed_dropout(seed: int, step: int, micro: int) -> None:
    """Make dropout, like masks and order, a function of counters.

    Args:
        seed: of the run.
        step: from 0.
        micro: number of the micro-batch, over all processes.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + micro) % 2**63)


def change_weights(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let an optimiser make its step with a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def diverged(what: str, config: RunConfig) -> UserError:
    """The line for numbers of a run that are not finite, and what may help."""
    train = config.train
    return UserError(
        f"{what}; lower train.learning_rate ({train.learning_rate:g}), train.weight_decay "
        f"({train.weight_decay:g}) or model.init_std ({config.model.init_std:g}), or raise "
        f"train.warmup_steps ({train.warmup_steps}), and start in another --output; checkpoints "
        "are kept"
    )


class Updater:
    """Makes the steps of a run.

    Args:
        config: of the run, its precision settled (``precision.with_precision``).
        engine: the model is already wrapped by it.
        model: as ``processes.wrap`` returned it.
        optimizer: over the model's parameters.
        batches: of the run.
        pad: id of the padding token.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        model: MaskedLM | ExLM,
        optimizer: torch.optim.Optimizer,
        batches: TrainingBatches | TokenBatches,
        pad: int,
    ) -> None:
        self.config, self.engine, self.model = config, engine, model
        self.optimizer, self.batches, self.pad = optimizer, batches, pad
        is_scaled = config.train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=is_scaled)
        self.skipped_steps = 0
        """Of the run."""
        self.skipped_in_row = 0
        """Up to the last step; without those that fp16 skips to find its scale."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides weights and moments; JSON-able."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Undo ``state``; nothing is known of a checkpoint from before there was one."""
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.skipped_in_row = int(state.get("skipped_in_row", 0))
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])

    def step(self, step: int, rate: float) -> Update:
        """Make one step.

        Args:
            step: number of the step, from 0.
            rate: its learning rate.

        Raises:
            UserError: when too many steps in a row were not finite, or fp16 finds no scale for
                the loss; in all processes alike.
        """
        parts = self.batches.parts(step, self.engine.rank, self.engine.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        num_rows, num_masks, num_tokens = self._count(parts)
        told = self._accumulate(step, parts, num_rows, num_masks)
        self.scaler.unscale_(self.optimizer)
        norm = self.engine.clip(self.model, self.config.train.clip_norm)
        told = torch.tensor([*told, not math.isfinite(norm)], dtype=torch.float64)
        loss, num_without_path, num_correct, num_bad = self.engine.add_up(told).tolist()
        is_skipped = not math.isfinite(loss) or num_bad > 0
        if not is_skipped:
            change_weights(self.optimizer, rate)
        self._note(is_skipped, step, loss)
        is_guess = isinstance(self.model, MaskedLM)
        accuracy = num_correct / max(num_masks, 1) if is_guess else None
        num_tokens //= num_copies(self.config)
        return Update(loss, norm, is_skipped, int(num_without_path), num_tokens, accuracy)

    def precision(self) -> contextlib.AbstractContextManager:
        """Around every forward pass: the arithmetic that the settings ask for."""
        dtype = LOW_PRECISION.get(self.config.train.precision)
        return torch.autocast(
            self.engine.device.type, dtype or torch.bfloat16, enabled=dtype is not None
        )

    def _count(self, parts: list[MaskedBatch]) -> tuple[int, int, int]:
        """Rows, masks and tokens of the whole batch."""
        counts = [
            sum(len(part.token_ids_BN) for part in parts),
            sum(int(part.is_masked_BN.sum()) for part in parts),
            sum(int((part.token_ids_BN != self.pad).sum()) for part in parts),
        ]
        return tuple(map(int, self.engine.add_up(torch.tensor(counts).double()).tolist()))

    def _accumulate(
        self, step: int, parts: list[MaskedBatch], num_rows: int, num_masks: int
    ) -> tuple[float, int, int]:
        """The gradient of the batch; this process's loss, rows without a path, right guesses."""
        loss, num_without_path, num_correct = 0.0, 0, 0
        share_of_chains = chain_share(self.config, step)
        for i, part in enumerate(parts):
            micro = i * self.engine.world_size + self.engine.rank
            seed_dropout(self.config.seed, step, micro)
            with self.engine.accumulate(is_last=i == len(parts) - 1):
                with self.precision():
                    scored = self.engine.score(part.to(self.engine.device), share_of_chains)
                part_loss = scored.loss * self._share(part, num_rows, num_masks)
                # The engine averages over the processes where the batch is their sum.
                self.scaler.scale(part_loss * self.engine.world_size).backward()
            loss += part_loss.item()
            num_without_path += scored.num_without_path
            num_correct += 0 if scored.num_correct is None else int(scored.num_correct)
        return loss, num_without_path, num_correct

    def _share(self, part: MaskedBatch, num_rows: int, num_masks: int) -> float:
        """Weight of a micro-batch in a batch, so that its size does not change the loss."""
        if isinstance(self.model, MaskedLM):
            return int(part.is_masked_BN.sum()) / max(num_masks, 1)
        return len(part.token_ids_BN) / num_rows

    def _note(self, is_skipped: bool, step: int, loss: float) -> None:
        """Count a step that was skipped, adapt the scale of the loss, and stop when it is time."""
        train = self.config.train
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
                return  # too large a scale, not a step gone wrong
        self.skipped_in_row = self.skipped_in_row + 1 if is_skipped else 0
        if self.skipped_in_row >= min(train.max_skipped, train.steps):
            raise diverged(
                f"loss {loss:g} at step {step + 1}: the loss or its gradient was not finite in "
                f"{self.skipped_in_row} steps in a row (train.max_skipped {train.max_skipped})",
                self.config,
            )
