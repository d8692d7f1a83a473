"""The parts of a run that follow from its settings: the masker, and the model with its weights.

``trainer`` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import Masker
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.toy_grammars import slots_of
from exlm_mini.data.units import Units
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.checkpoint import Checkpoint


def make_masker(
    config: RunConfig, special_ids: SpecialIds, tokenizer: Callable[[], Tokenizer] | None = None
) -> Masker:
    """The masker of a run.

    Repeated MLM always masks by independent draws, for any number of copies: only then is the
    corrupted share p^k (Appendix C), and its runs differ in nothing but p and k.

    Args:
        tokenizer: function that loads the tokenizer, such as ``Pack.tokenizer``; only the strategy
            ``units`` needs one.
    """
    masking, units = config.masking, None
    if config.objective == "repeated-mlm":
        masking = replace(masking, strategy="bernoulli")
    if masking.strategy == "units" and tokenizer is not None:
        units = Units.of(tokenizer())
    copies, slots = config.num_copies, slots_of(config)
    return Masker(masking, special_ids, config.seed, copies, slots, units)


def make_model(config: RunConfig, vocab_size: int, special_ids: SpecialIds) -> MaskedLM | ExLM:
    """The untrained model of a run, on the CPU; its weights depend on the seed alone."""
    torch.default_generator.manual_seed(config.seed)
    match config.objective:
        case "mlm" | "repeated-mlm":
            return MaskedLM(config.model, vocab_size, special_ids)
        case "exlm":
            return ExLM(config.model, vocab_size, special_ids)
    assert_never(config.objective)


def load_model(checkpoint: Checkpoint) -> tuple[MaskedLM | ExLM, RunConfig]:
    """The trained model of a checkpoint, in evaluation mode on the CPU, and its settings."""
    config, state = RunConfig(**checkpoint.state["config"]), checkpoint.state
    with torch.random.fork_rng(devices=[]):  # the caller's own draws do not change
        model = make_model(config, state["vocab_size"], SpecialIds(**state["special_ids"]))
    remedy = "a model with custom parts can only be opened by the program that made it"
    set_weights(model, checkpoint.tensors["model"], checkpoint.path, remedy)
    return model.eval(), config


def set_weights(
    model: MaskedLM | ExLM, weights: Mapping[str, Tensor], path: Path, remedy: str
) -> None:
    """Load the weights of a checkpoint into a model; ``UserError`` if names or shapes differ."""
    own, theirs = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (model.state_dict(), weights)
    )
    if others := own.items() ^ theirs.items():
        name, _ = min(others)
        raise UserError(
            f"{path} does not fit the model ({name} is {theirs.get(name)}, not {own.get(name)}); "
            f"{remedy}"
        )
    model.load_state_dict(weights)
