"""The parts of a run: model, masks, batches, optimiser, schedules, and the loss of a batch.

All are functions of the settings; ``trainer`` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import torch

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.data.units import Units
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import Scored
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


def score(model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0) -> Scored:
    """The loss of one micro-batch, and the counts beside it."""
    return model.answer(batch, chain_share).scored()
