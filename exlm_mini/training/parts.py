"""The parts of a run: model, masks, batches, optimiser, schedules, and the loss of a batch.

Shapes: B rows, N tokens of a row, S masked tokens of a batch.

All are functions of the settings; ``trainer`` puts them together.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import exlm_mini
from exlm_mini.config import RunConfig, SpecialIds, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.batches import TokenBatches, TrainingBatches
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.data.units import Units
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood, mlm_loss, states_alignment_loss
from exlm_mini.training.checkpoint import Checkpoint, latest_checkpoint, misfit


def num_copies(config: RunConfig) -> int:
    """Copies of each token in the input: §3's k for Repeated MLM, otherwise 1."""
    return config.masking.num_copies if config.objective == "repeated-mlm" else 1


def grow_step(config: RunConfig) -> int:
    """Steps of an exlm run as an MLM, before each mask splits into its states (``grow_at``)."""
    is_exlm = config.objective == "exlm"
    return round(config.train.grow_at * config.train.steps) if is_exlm else 0


def stages_of(config: RunConfig) -> list[tuple[RunConfig, int]]:
    """The models that a run trains one after the other, and the step at which each ends.

    The first stage of a run that grows is a masked language model, and its checkpoints are those
    of one.
    """
    last = [(config, config.train.steps)]
    step = grow_step(config)
    return [(replace(config, objective="mlm"), step), *last] if step else last


def expanded_length(config: RunConfig, num_tokens: int, num_masks: Any = 0) -> Any:
    """Tokens in the encoder of a row of ``num_tokens``, [BOS] and [EOS] included."""
    if config.objective != "exlm":
        return num_tokens * num_copies(config)
    num_boundaries = 2 if config.model.boundary == "official" else 0
    return num_tokens + (config.model.states_per_mask - 1) * (num_masks + num_boundaries)


def longest_text(config: RunConfig, num_pieces: int = 1) -> int:
    """Tokens of the longest row without masks that the model takes, with the [BOS] and [EOS] of
    each of its pieces.
    """
    most = config.model.max_positions // num_copies(config)
    length = most - num_pieces * expanded_length(config, 0)
    if length < 3 * num_pieces:
        raise UserError(
            f"model.max_positions {config.model.max_positions} of the checkpoint leaves room for "
            f"{length} tokens, boundaries included; take a checkpoint with more positions"
        )
    return length


def stages_left(config: RunConfig, output: Path) -> list[tuple[RunConfig, int]]:
    """The stages of a run that its newest checkpoint does not end; always the last one."""
    *earlier, last = stages_of(config)
    newest = latest_checkpoint(output / "checkpoints", lambda line: None) if earlier else None
    step = 0 if newest is None else newest.step
    # With more steps than at its start, a run may have grown before it would now.
    has_grown = newest is not None and newest.state["config"]["objective"] == "exlm"
    return [*((stage, end) for stage, end in earlier if step < end and not has_grown), last]


def mask_count(config: RunConfig, num_tokens: int) -> float:
    """Masks of a row on average, counted in its copies together; the places of a toy's slots."""
    if config.objective != "repeated-mlm" and (slots := slots_of(config)):
        return len(slots)
    return config.masking.mask_ratio * num_copies(config) * (num_tokens - 2)


def longest_row(config: RunConfig, row_length: int) -> int:
    """Length of the longest sequence in the encoder; arguments as for ``cost.estimate``."""
    num_masks = row_length - 2
    if config.masking.has_fixed_count or slots_of(config):
        num_masks = max(1, math.ceil(mask_count(config, row_length)))
    return expanded_length(config, row_length, num_masks)


def check_row_length(config: RunConfig, row_length: int) -> None:
    """Raise ``UserError`` if rows are too long for the position range, naming both lengths."""
    needed = longest_row(config, row_length)
    if needed > config.model.max_positions:
        raise UserError(
            f"rows of {row_length} tokens become {needed} after expansion or repetition, more "
            f"than model.max_positions {config.model.max_positions}; raise it to {needed}, or "
            "lower data.block_length, masking.mask_ratio or the number of states or copies"
        )


def make_masker(
    config: RunConfig, special_ids: SpecialIds, tokenizer: Callable[[], Tokenizer] | None = None
) -> Masker:
    """The masker of a run.

    Repeated MLM always masks by independent draws, for any number of copies: only then is the
    corrupted share p^k (Appendix C), and its cells differ in p and k alone.

    Args:
        config: of the run.
        special_ids: of its tokenizer.
        tokenizer: loads it, such as ``Pack.tokenizer``; only the strategy ``units`` needs one.
    """
    masking, units = config.masking, None
    if config.objective == "repeated-mlm":
        masking = replace(masking, strategy="bernoulli")
    if masking.strategy == "units" and tokenizer is not None:
        units = Units.of(tokenizer())
    copies, slots = num_copies(config), slots_of(config)
    return Masker(masking, special_ids, config.seed, copies, slots, units)


def make_model(config: RunConfig, vocab_size: int, special_ids: SpecialIds) -> MaskedLM | ExLM:
    """The untrained model of a run; its weights depend on the seed alone."""
    kind = ExLM if config.objective == "exlm" else MaskedLM
    torch.manual_seed(config.seed)
    return kind(config.model, vocab_size, special_ids)


def count_parameters(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """Number of parameters of a run's model, and of those in its transition head.

    Counted on one layer without storage, so a model of any size can be counted.
    """
    shape = config.model.shape
    of_one_layer = replace(config, model=replace(config.model, num_layers=1, expand_at=0))
    try:
        with torch.device("meta"):
            model = make_model(of_one_layer, vocab_size, SpecialIds())
    except RuntimeError:
        raise UserError(
            f"model.width {shape.width:,} makes a weight of 2**63 bytes or more; lower it"
        ) from None
    parts = (model, model.encoder.layers, getattr(model, "transition", None) or nn.Identity())
    whole, layer, transition = (sum(p.numel() for p in part.parameters()) for part in parts)
    return whole + (shape.num_layers - 1) * layer, transition


def load_model(checkpoint: Checkpoint) -> tuple[MaskedLM | ExLM, RunConfig]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, and its settings."""
    config, weights, state = (
        stored_config(checkpoint),
        checkpoint.tensors["model"],
        checkpoint.state,
    )
    model = make_model(config, state["vocab_size"], SpecialIds(**state["special_ids"]))
    if reason := misfit(model.state_dict(), weights):
        raise _unlike(checkpoint, reason)
    model.load_state_dict(weights)
    return model.eval(), config


def stored_config(checkpoint: Checkpoint) -> RunConfig:
    """The settings of a checkpoint."""
    try:
        return RunConfig(**checkpoint.state["config"])
    except UserError as error:
        raise _unlike(checkpoint, str(error)) from None


def _unlike(checkpoint: Checkpoint, reason: str) -> UserError:
    return UserError(
        f"{checkpoint.path} holds settings and weights that do not belong together ({reason}); "
        "give a checkpoint of a pre-training run as it was saved"
    )


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
        # One call instead of ten per parameter saves a tenth of a tiny model's step.
        fused=all(parameter.device.type == "cpu" for parameter in parameters),
    )


def learning_rate(train: TrainConfig, step: int, grown_at: int = 0) -> float:
    """Linear warm-up, the peak until ``decay_from``, then linear decay to 0 after the last step
    (polynomial decay, power 1).

    Args:
        train: the settings.
        step: from 0.
        grown_at: the step at which an MLM grew, from 0. Adam's moments begin anew there, so the
            rate warms up once more.
    """
    update = step + 1
    if update <= train.warmup_steps:
        return train.learning_rate * update / train.warmup_steps
    rate, left = train.learning_rate, train.steps - update + 1
    peak_ends = max(train.warmup_steps, round(train.decay_from * train.steps))
    if update > peak_ends:
        rate = rate * left / (train.steps - peak_ends + 1)
    if 0 < grown_at < update <= grown_at + train.warmup_steps:
        rate *= (update - grown_at) / train.warmup_steps
    return rate


def chain_share(config: RunConfig, step: int) -> float:
    """Weight of the fixed parallel chains at a step: 1, then falling to 0 (``chain_warmup``)."""
    warmup_steps = config.train.chain_warmup * config.train.steps
    if config.objective != "exlm" or warmup_steps == 0:
        return 0.0
    return min(1.0, max(0.0, 2.0 - (step - grow_step(config)) / warmup_steps))


def with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """The same settings with ``train.precision auto`` resolved for a device."""
    if config.train.precision != "auto":
        return config
    is_half = device.type == "cuda" and has_bf16(device)
    return replace(config, train=replace(config.train, precision="bf16" if is_half else "fp32"))


def has_bf16(gpu: torch.device) -> bool:
    """Whether a GPU has bf16 instructions, as all since Ampere; older ones emulate it slowly."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"train.device is '{name}'; known: auto, cpu, cuda, cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"train.device is {name}, but torch sees {torch.cuda.device_count()} GPUs; use cpu"
        )
    return device


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the software, and the device."""
    return {
        "exlm_mini": exlm_mini.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


class Scored(NamedTuple):
    """The loss of a micro-batch, and counts."""

    loss: Tensor
    """Nats per target, scalar."""
    num_without_path: int = 0
    """Rows that had no path and were left out; only for ExLM."""
    num_correct: Tensor | None = None
    """Masked tokens that the model guessed, int64 scalar; None for ExLM, where they cost more."""


def score(model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0) -> Scored:
    """The loss of one micro-batch, and the counts beside it."""
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
