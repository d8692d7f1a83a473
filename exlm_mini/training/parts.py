"""The parts of a run: model, masks, batches, optimiser, schedules, and the loss of a batch.

Shapes: B rows, N tokens of a row, S masked tokens of a batch.

All are functions of the settings; ``trainer`` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.data.units import Units
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood, mlm_loss, states_alignment_loss
from exlm_mini.training.checkpoint import Checkpoint


def make_masker(
    config: RunConfig, special_ids: SpecialIds, tokenizer: Callable[[], Tokenizer] | None = None
) -> Masker:
    """The masker of a run.

    Repeated MLM always masks by independent draws, for any number of copies: only then is the
    corrupted share p^k (Appendix C), and its cells differ in p and k alone.

    Args:
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
    torch.manual_seed(config.seed)
    match config.objective:
        case "mlm" | "repeated-mlm":
            return MaskedLM(config.model, vocab_size, special_ids)
        case "exlm":
            return ExLM(config.model, vocab_size, special_ids)
    assert_never(config.objective)


def load_model(checkpoint: Checkpoint) -> tuple[MaskedLM | ExLM, RunConfig]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, and its settings."""
    config, state = RunConfig(**checkpoint.state["config"]), checkpoint.state
    model = make_model(config, state["vocab_size"], SpecialIds(**state["special_ids"]))
    model.load_state_dict(checkpoint.tensors["model"])
    return model.eval(), config


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
