"""The parts of a run: model, masks, batches, optimiser, schedules, and the loss of a batch.

Shapes: B rows, N tokens of a row, S masked tokens of a batch.

All are functions of the settings; ``trainer`` puts them together.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

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
from exlm_mini.training.checkpoint import Checkpoint, misfit


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
    copies, slots = config.num_copies, slots_of(config)
    return Masker(masking, special_ids, config.seed, copies, slots, units)


def make_model(config: RunConfig, vocab_size: int, special_ids: SpecialIds) -> MaskedLM | ExLM:
    """The untrained model of a run; its weights depend on the seed alone."""
    kind = ExLM if config.objective == "exlm" else MaskedLM
    torch.manual_seed(config.seed)
    return kind(config.model, vocab_size, special_ids)


def load_model(checkpoint: Checkpoint) -> tuple[MaskedLM | ExLM, RunConfig]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, and its settings."""
    config, weights, state = (
        stored_config(checkpoint),
        checkpoint.tensors["model"],
        checkpoint.state,
    )
    with torch.device("meta"):  # settings that are too large would take the memory first
        model = make_model(config, state["vocab_size"], SpecialIds(**state["special_ids"]))
    if reason := misfit(model.state_dict(), weights):
        raise _unlike(checkpoint, reason)
    model.to_empty(device="cpu").load_state_dict(weights)
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


def with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """The same settings with ``train.precision auto`` resolved for a device."""
    if config.train.precision == "fp16" and device.type == "cpu":
        raise UserError("train.precision fp16 needs a GPU; on a CPU use auto, bf16 or fp32")
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
