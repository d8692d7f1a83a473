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

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.batches import TokenBatches, TrainingBatches
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.packs import Pack
from exlm_mini.training.processes import Engine


class Update(NamedTuple):
    """Numbers of an optimiser step, over all processes."""

    loss: float
    """Loss in nats per target."""
    gradient_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    is_skipped: bool
    """The loss or the gradient was not finite, so nothing was changed."""
    num_without_path: int
    num_tokens: int
    """Input tokens, before expansion or repetition and without padding."""
    mask_accuracy: float | None
    """Share of the masked tokens that were guessed right; None for ExLM."""


class DivergedError(UserError):
    """Raised when numbers are not finite: the settings do not work, but others may."""


class Stepper:
    """Makes the optimiser steps of a run.

    Args:
        config: settings of the run, with ``train.precision auto`` resolved.
    """

    def __init__(
        self, config: RunConfig, pack: Pack, masker: Masker, engine: Engine, model: nn.Module
    ) -> None:
        self.config, self.engine, self.model = config, engine, model
        self.batches = make_batches(config, pack, masker)
        self.optimizer = make_optimizer(model, config.train)
        self._pad = pack.special_ids.pad
        self.skipped_steps = 0
        """Number of skipped steps in the whole run."""
        self.skipped_in_row = 0
        """Number of skipped steps in a row, up to the last step made."""
        self.grown_at = 0
        """Step at which an MLM grew into this model; 0 if none did in this run."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores besides weights and moments; JSON-serialisable."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "grown_at": self.grown_at,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_row = state["skipped_in_row"]
        self.grown_at = state.get("grown_at", self.config.grow_step)  # not in old checkpoints

    def step(self, step: int) -> Update:
        """Make one step; ``step`` counts from 0.

        Raises:
            DivergedError: if too many steps in a row were not finite, in all processes.
        """
        engine, train = self.engine, self.config.train
        parts = self.batches.parts(step, engine.rank, engine.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        sizes_P2 = torch.tensor([self._size(part) for part in parts]).reshape(-1, 2)
        total, num_tokens = map(int, engine.add_up(sizes_P2.double().sum(dim=0)).tolist())
        counted = self._accumulate(step, parts, sizes_P2[:, 0].tolist(), max(total, 1))
        parameters = self.model.parameters()
        norm = nn.utils.clip_grad_norm_(parameters, train.clip_norm or math.inf).item()
        counts = torch.tensor([*counted, not math.isfinite(norm)], dtype=torch.float64)
        loss, num_without_path, num_correct, num_bad = engine.add_up(counts).tolist()
        is_skipped = not math.isfinite(loss) or num_bad > 0
        rate = train.rate(step, self.grown_at)
        if not is_skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self._note(is_skipped, step, loss, norm)
        accuracy = None if math.isnan(num_correct) else num_correct / max(total, 1)
        return Update(loss, norm, rate, is_skipped, int(num_without_path), num_tokens, accuracy)

    def precision(self) -> contextlib.AbstractContextManager:
        """Context manager that runs a forward pass in the precision of the settings."""
        is_low = self.config.train.precision == "bf16"
        return torch.autocast(self.engine.device.type, torch.bfloat16, enabled=is_low)

    def diverged(self, what: str) -> DivergedError:
        """The error for numbers that are not finite, with advice."""
        train = self.config.train
        return DivergedError(
            f"{what}; lower train.learning_rate ({train.learning_rate:g}), train.weight_decay "
            f"({train.weight_decay:g}) or model.init_std ({self.config.model.init_std:g}), or "
            f"raise train.warmup_steps ({train.warmup_steps}), and start in another --output; "
            "checkpoints are kept"
        )

    def _size(self, part: MaskedBatch) -> tuple[int, int]:
        """Counts of a micro-batch: the rows with masks (ExLM) or the masks over which its loss is a
        mean, and its input tokens, before expansion or repetition and without padding."""
        is_masked_BN, is_exlm = part.is_masked_BN, self.config.objective == "exlm"
        num_scored = int((is_masked_BN.any(dim=1) if is_exlm else is_masked_BN).sum())
        num_tokens = int((part.token_ids_BN != self._pad).sum())
        return num_scored, num_tokens // self.config.num_copies

    def _accumulate(
        self, step: int, parts: list[MaskedBatch], sizes: list[int], total: int
    ) -> tuple[float, int, float]:
        """Add up the gradients of the micro-batches. Returns this process's share of the loss, rows
        without a path, and right guesses (nan if the model makes none)."""
        engine, share = self.engine, self.config.chain_share(step)
        loss, num_without_path, num_correct = 0.0, 0, 0.0
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            micro = i * engine.world_size + engine.rank
            # Like masks and order, dropout is a function of counters.
            seed = (self.config.seed * 1_000_003 + step) * 65_537 + micro
            torch.manual_seed(seed % 2**63)
            with engine.accumulate(is_last=i == len(parts) - 1):
                with self.precision():
                    scored = engine.score(part.to(engine.device), share)
                share_of_loss = scored.loss * (size / total)
                # DDP averages over the processes, but the loss of a batch is a sum over them.
                (share_of_loss * engine.world_size).backward()
            loss += share_of_loss.item()
            num_without_path += scored.num_without_path
            num_correct += math.nan if scored.num_correct is None else int(scored.num_correct)
        return loss, num_without_path, num_correct

    def _note(self, is_skipped: bool, step: int, loss: float, norm: float) -> None:
        """Count skipped steps, and stop after too many."""
        train = self.config.train
        self.skipped_steps += is_skipped
        self.skipped_in_row = self.skipped_in_row + 1 if is_skipped else 0
        if self.skipped_in_row >= min(train.max_skipped, train.steps):
            what = f"loss {loss:g}, gradient norm {norm:g} at step {step + 1}: not finite"
            what += f" in {self.skipped_in_row} steps in a row"
            raise self.diverged(f"{what} (train.max_skipped {train.max_skipped})")


def low_rate(config: RunConfig) -> str | None:
    """A warning for a run whose learning rate stays far below its peak, such as a recipe with fewer
    steps and an unchanged warm-up; None if the rate gets high enough."""
    train, start = config.train, 0
    for _, end in config.stages:
        some = range(start, end, -(-(end - start) // 500))
        highest = max(train.rate(step, config.grow_step) for step in some)
        if highest < train.learning_rate / 2:
            after = f"after the growth at step {start:,} " if start else ""
            return (
                f"the learning rate {after}reaches only {highest:.2g} of {train.learning_rate:g}: "
                f"{end - start:,} steps are too few for train.warmup_steps {train.warmup_steps} "
                f"and train.decay_from {train.decay_from:g}"
            )
        start = end
    return None


def make_batches(
    config: RunConfig, pack: Pack, masker: Masker
) -> TrainingBatches | TokenBatches:
    """Batches of ``train.batch_size`` rows, or of ``train.batch_tokens`` tokens."""
    train, seed = config.train, config.seed
    if train.batch_tokens is None:
        return TrainingBatches(pack, masker, train.batch_size, seed, train.micro_batch_size)
    micro = train.micro_batch_tokens or train.batch_tokens
    return TokenBatches(pack, masker, micro, train.batch_tokens // micro, seed)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Adam with decoupled weight decay on every parameter, as fairseq's adam."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        parameters,
        lr=train.learning_rate,
        betas=train.adam_betas,
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        # One call instead of ten per parameter saves a tenth of the time of a tiny model's step.
        fused=all(parameter.device.type == "cpu" for parameter in parameters),
    )
