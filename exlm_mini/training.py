"""The training loop: batches in, checkpoints and metrics out.

Shapes: B rows, N tokens of a row, S masked tokens of a batch.

The loop knows nothing of the command line or the terminal: it reports through a callback. What
it does at a step is a function of the settings and the step, so a run that was stopped and
resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import exlm_mini
from exlm_mini.batches import TokenBatches, TrainingBatches, split_batch
from exlm_mini.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    save_checkpoint,
)
from exlm_mini.config import RunConfig, SpecialIds, TrainConfig, UserError, run_config_from_dict
from exlm_mini.corpora.packing import Pack
from exlm_mini.evaluation import Evaluation, evaluate
from exlm_mini.masking import MaskedBatch, Masker
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.objectives import (
    log_likelihood,
    mlm_loss,
    states_alignment_loss,
)
from exlm_mini.optimizer_state import flatten_optimizer, restore_optimizer
from exlm_mini.run_directory import MetricsLog


class Progress(NamedTuple):
    """What the loop tells after a step."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Nats per target of the last batch."""
    tokens_per_second: float
    """Input tokens, before expansion or repetition and without padding, since this start."""
    evaluation: Evaluation | None
    """Present after a validation."""


class Outcome(NamedTuple):
    """How a run ended."""

    step: int
    is_complete: bool
    """False when it was asked to stop before its last step."""
    evaluation: Evaluation | None
    """Of the last validation; none if the run stopped before any."""
    num_parameters: int


def num_copies(config: RunConfig) -> int:
    """Copies of each token in the input: §3's k for Repeated MLM, otherwise 1."""
    return config.masking.num_copies if config.objective == "repeated-mlm" else 1


def longest_row(config: RunConfig, row_length: int, num_slots: int | None = None) -> int:
    """Longest sequence the encoder can meet, in tokens.

    Args:
        config: of the run.
        row_length: longest row of the data, [BOS] and [EOS] included.
        num_slots: masks of a row under the strategy ``slots``.
    """
    if config.objective != "exlm":
        return row_length * num_copies(config)
    num_maskable = row_length - 2
    num_masks = num_maskable if num_slots is None else num_slots
    if config.masking.strategy == "fixed_count":
        num_masks = min(
            num_maskable, max(1, math.ceil(config.masking.mask_ratio * num_maskable))
        )
    num_boundaries = 2 if config.model.boundary == "official" else 0
    return row_length + (config.model.states_per_mask - 1) * (num_masks + num_boundaries)


def check_row_length(config: RunConfig, row_length: int, num_slots: int | None = None) -> None:
    """Refuse rows the position range cannot hold.

    Raises:
        UserError: naming both lengths.
    """
    needed = longest_row(config, row_length, num_slots)
    if needed > config.model.max_positions:
        raise UserError(
            f"rows of {row_length} tokens become {needed} after expansion or repetition, more "
            f"than model.max_positions {config.model.max_positions}; raise it to {needed}, or "
            "lower data.block_length, masking.mask_ratio or the number of states or copies"
        )


def make_masker(
    config: RunConfig, special_ids: SpecialIds, slots: tuple[int, ...] = ()
) -> Masker:
    """The masker of a run; ``slots`` are the toy grammar's, counted from [BOS] = 0.

    Repeated MLM always masks by independent draws, whatever the number of copies: only then is
    the corrupted share p^k (Appendix C), and its cells differ in nothing but p and k.
    """
    masking = config.masking
    if config.objective == "repeated-mlm":
        masking = replace(masking, strategy="bernoulli")
    return Masker(masking, special_ids, config.seed, num_copies(config), slots)


def make_model(config: RunConfig, vocab_size: int, special_ids: SpecialIds) -> MaskedLM | ExLM:
    """The untrained model of a run; its weights depend on the seed alone."""
    kind = ExLM if config.objective == "exlm" else MaskedLM
    torch.manual_seed(config.seed)
    return kind(config.model, vocab_size, special_ids)


def load_model(checkpoint: Checkpoint) -> tuple[MaskedLM | ExLM, RunConfig]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, and its settings."""
    config = run_config_from_dict(checkpoint.state["config"])
    special_ids = SpecialIds(**checkpoint.state["special_ids"])
    model = make_model(config, checkpoint.state["vocab_size"], special_ids)
    model.load_state_dict(checkpoint.tensors["model"])
    return model.eval(), config


def make_batches(
    config: RunConfig, pack: Pack, masker: Masker
) -> TrainingBatches | TokenBatches:
    """Batches of ``train.batch_size`` rows, or of ``train.batch_tokens`` tokens.

    Raises:
        UserError: if a row has more tokens than a micro-batch may have.
    """
    train = config.train
    if train.batch_tokens is None:
        return TrainingBatches(pack, masker, train.batch_size, config.seed)
    micro = train.micro_batch_tokens or train.batch_tokens
    return TokenBatches(pack, masker, micro, train.batch_tokens // micro, config.seed)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Adam with decoupled weight decay on every parameter, as fairseq's adam."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=train.adam_betas,
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up, then linear decay to 0 after the last step (polynomial decay, power 1).

    Args:
        train: settings.
        step: of the update to make, from 0.
    """
    update = step + 1
    if update <= train.warmup_steps:
        return train.learning_rate * update / train.warmup_steps
    return (
        train.learning_rate
        * (train.steps - update + 1)
        / (train.steps - train.warmup_steps + 1)
    )


def chain_share(config: RunConfig, step: int) -> float:
    """Weight of the fixed parallel chains at a step: 1, then falling to 0 (``chain_warmup``)."""
    warmup_steps = config.train.chain_warmup * config.train.steps
    if config.objective != "exlm" or warmup_steps == 0:
        return 0.0
    return min(1.0, max(0.0, 2.0 - step / warmup_steps))


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        UserError: for an unknown or absent device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"train.device is '{name}'; known: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device is '{name}'; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"train.device is {name}, but torch sees {torch.cuda.device_count()} GPUs; use cpu"
        )
    return device


def versions(device: torch.device) -> dict[str, str]:
    """What a run was made with."""
    return {
        "exlm_mini": exlm_mini.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


class Scored(NamedTuple):
    """A micro-batch under a model."""

    loss: Tensor
    """Nats per target, scalar."""
    num_without_path: int
    """Rows that had no path and were left out; ExLM only."""
    num_correct: Tensor | None
    """Masked tokens that are the model's likeliest guess, int64 scalar; none for ExLM, whose
    states are several guesses for each mask."""


def score(model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0) -> Scored:
    """The objective of one micro-batch, and what is told about it besides."""
    if isinstance(model, MaskedLM):
        token_logits_SV = model(batch.masked_ids_BN, batch.is_masked_BN)
        target_ids_S = batch.token_ids_BN[batch.is_masked_BN]
        num_correct = (token_logits_SV.detach().argmax(dim=1) == target_ids_S).sum()
        return Scored(mlm_loss(token_logits_SV, target_ids_S), 0, num_correct)
    scores = model(*batch, chain_share)
    log_likelihood_B = log_likelihood(scores)
    loss = states_alignment_loss(
        log_likelihood_B, scores.is_scored_BM.sum(dim=1), on_no_path="skip"
    )
    return Scored(loss, int((log_likelihood_B == -torch.inf).sum()), None)


def loss_of(
    model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0
) -> tuple[Tensor, int]:
    """The objective of one micro-batch.

    Returns:
        The loss in nats per target (scalar), and how many rows had no path and were left out.
    """
    return score(model, batch, chain_share)[:2]


class _Update(NamedTuple):
    """What an optimiser step tells of its batch."""

    loss: float
    num_without_path: int
    num_tokens: int
    """Input tokens, before expansion or repetition and without padding."""
    mask_accuracy: float | None
    """Share of the masked tokens that were guessed; none for ExLM."""


class Trainer:
    """One run: a model, its data and its directory.

    Args:
        config: of the run; the objective is one of the three single ones.
        train_pack, validation_pack: rows to learn from and to validate with.
        output: run directory, locked by the caller; gets ``checkpoints/`` and
            ``metrics.jsonl``.
        slots: positions the masking strategy ``slots`` hides.
        report: takes a line about something unusual, such as a damaged checkpoint.

    Raises:
        UserError: for rows the model cannot hold, or settings that do not fit the data.
    """

    def __init__(
        self,
        config: RunConfig,
        train_pack: Pack,
        validation_pack: Pack,
        output: Path,
        slots: tuple[int, ...] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.device = choose_device(config.train.device)
        self.train_pack, self.validation_pack = train_pack, validation_pack
        self.output, self.report = output, report
        asked = config.model.vocab_size
        if asked is not None and asked != train_pack.vocab_size:
            raise UserError(
                f"model.vocab_size is {asked}, the tokenizer has {train_pack.vocab_size} tokens; "
                "leave model.vocab_size out, it is for --dry-run"
            )
        special_ids = train_pack.special_ids
        self.masker = make_masker(config, special_ids, slots)
        longest = max(int(train_pack.lengths_R.max()), int(validation_pack.lengths_R.max()))
        check_row_length(config, longest, len(slots) or None)
        if train_pack.row_length is not None:
            self.masker.check_row_length(train_pack.row_length)
        self.model = make_model(config, train_pack.vocab_size, special_ids).to(self.device)
        self.optimizer = make_optimizer(self.model, config.train)
        self.batches = make_batches(config, train_pack, self.masker)
        self.evaluation: Evaluation | None = None
        self.num_tokens = 0
        """Input tokens of all steps done, before expansion or repetition, without padding."""

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Train from the newest checkpoint, or from the start, to the last step.

        Args:
            on_progress: called after every step.
            should_stop: asked after every step; if true, a checkpoint is saved and the run ends.

        Raises:
            UserError: when the loss is not finite, or a checkpoint cannot be written.
        """
        train = self.config.train
        step = self._restore()
        start_time, start_tokens = time.monotonic(), self.num_tokens
        with MetricsLog(self.output / "metrics.jsonl", step) as metrics:
            seconds_before = (metrics.last or {}).get("seconds") or 0.0
            while step < train.steps:
                rate = learning_rate(train, step)
                update = self._update(step, rate)
                step += 1
                self.num_tokens += update.num_tokens
                is_last = step == train.steps or should_stop()
                evaluation = None
                if step % train.validate_every == 0 or step == train.steps:
                    evaluation = self.evaluation = self._evaluate(step)
                seconds = max(time.monotonic() - start_time, 1e-9)
                speed = (self.num_tokens - start_tokens) / seconds
                on_progress(Progress(step, update.loss, speed, evaluation))
                if evaluation or is_last or step % train.log_every == 0:
                    record = {"step": step, "loss": update.loss, "learning_rate": rate}
                    record |= {"tokens": self.num_tokens, "seconds": seconds_before + seconds}
                    record["tokens_per_second"] = speed
                    record["rows_without_path"] = update.num_without_path
                    if update.mask_accuracy is not None:
                        record["mask_accuracy"] = update.mask_accuracy
                    if evaluation:
                        record["validation_bits_per_mask"] = evaluation.bits_per_mask
                        record["validation_bits_per_row"] = evaluation.bits_per_row
                    metrics.write(record)
                if is_last or step % train.save_every == 0:
                    self._save(step)
                if is_last:
                    break
        return Outcome(
            step,
            step == train.steps,
            self.evaluation,
            sum(p.numel() for p in self.model.parameters()),
        )

    def _parts(self, step: int) -> list[MaskedBatch]:
        """The micro-batches of a step."""
        if isinstance(self.batches, TokenBatches):
            return self.batches.parts(step)
        train = self.config.train
        batch = self.batches.batch(step)
        return split_batch(batch, train.micro_batch_size or train.batch_size, self._pad)

    def _update(self, step: int, rate: float) -> _Update:
        """One optimiser step."""
        train = self.config.train
        parts = self._parts(step)
        num_rows = sum(len(part.token_ids_BN) for part in parts)
        num_masks = sum(int(part.is_masked_BN.sum()) for part in parts)
        self.optimizer.zero_grad(set_to_none=True)
        share = chain_share(self.config, step)
        loss, num_left_out, num_correct = 0.0, 0, None
        for micro, part in enumerate(parts):
            # Dropout, like masks and order, is a function of counters.
            torch.manual_seed(((self.config.seed * 1_000_003 + step) * 65_537 + micro) % 2**63)
            with self._precision():
                scored = score(self.model, part.to(self.device), share)
            part_loss = scored.loss * self._share(part, num_rows, num_masks)
            part_loss.backward()
            loss += part_loss.item()
            num_left_out += scored.num_without_path
            if scored.num_correct is not None:
                num_correct = (num_correct or 0) + int(scored.num_correct)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step + 1}; lower train.learning_rate "
                f"({train.learning_rate:g}) or raise train.warmup_steps ({train.warmup_steps}) "
                "and start in another --output"
            )
        if train.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        num_tokens = sum(int((part.token_ids_BN != self._pad).sum()) for part in parts)
        num_tokens //= num_copies(self.config)
        accuracy = None if num_correct is None else num_correct / max(num_masks, 1)
        return _Update(loss, num_left_out, num_tokens, accuracy)

    @property
    def _pad(self) -> int:
        return self.train_pack.special_ids.pad

    def _share(self, part: MaskedBatch, num_rows: int, num_masks: int) -> float:
        """Weight of a micro-batch in a batch, so that its size does not change the loss."""
        if isinstance(self.model, MaskedLM):
            return int(part.is_masked_BN.sum()) / max(num_masks, 1)
        return len(part.token_ids_BN) / num_rows

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        is_low = self.config.train.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_low):
            yield

    def _evaluate(self, step: int) -> Evaluation:
        with self._precision():
            return evaluate(
                self.model,
                self.validation_pack,
                self.masker,
                self.config.train.validation_rows,
                self.device,
                chain_share(self.config, step),
            )

    @property
    def _checkpoints(self) -> Path:
        return self.output / "checkpoints"

    def _save(self, step: int) -> None:
        moments, groups = flatten_optimizer(self.optimizer, self.model.named_parameters())
        state = {
            "config": asdict(self.config),
            "special_ids": self.train_pack.special_ids._asdict(),
            "vocab_size": self.train_pack.vocab_size,
            "train_sha256": self.train_pack.sha256,
            "validation_sha256": self.validation_pack.sha256,
            "tokenizer_sha256": self.train_pack.tokenizer_sha256,
            "optimizer_groups": groups,
            "num_tokens": self.num_tokens,
            "evaluation": None if self.evaluation is None else self.evaluation._asdict(),
            "versions": versions(self.device),
        }
        tensors: dict[str, dict[str, Any]] = {
            "model": self.model.state_dict(),
            "optimizer": moments,
        }
        save_checkpoint(self._checkpoints, step, tensors, state)

    def _restore(self) -> int:
        """Load the newest whole checkpoint; the number of steps done."""
        if not self._checkpoints.is_dir():
            return 0
        checkpoint = latest_checkpoint(self._checkpoints, self.report)
        if checkpoint is None:
            return 0
        state = checkpoint.state
        for name, pack in (("train", self.train_pack), ("validation", self.validation_pack)):
            if state[f"{name}_sha256"] != pack.sha256:
                raise UserError(
                    f"{pack.path} is not the data that {self._checkpoints} was trained with; "
                    "restore the data or choose another --output"
                )
        self.model.load_state_dict(checkpoint.tensors["model"])
        restore_optimizer(
            self.optimizer,
            self.model.named_parameters(),
            checkpoint.tensors["optimizer"],
            state["optimizer_groups"],
        )
        self.num_tokens = state.get("num_tokens", 0)  # older checkpoints do not count
        if state["evaluation"]:
            self.evaluation = Evaluation(**state["evaluation"])
        return checkpoint.step
