"""A trained model and a text with masks: the newest run, its tokenizer, what it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.checkpoint import latest_checkpoint
from exlm_mini.config import RunConfig, UserError
from exlm_mini.console import say
from exlm_mini.decoding import Reading, read_masked_lm, read_states
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.outside import reading
from exlm_mini.pretrained import TRAINED_IN_TURN, tokenizer_of
from exlm_mini.tokenization import MASK, Tokenizer
from exlm_mini.training import chain_share, load_model, num_copies


class Loaded(NamedTuple):
    """A trained model and what it needs to read text."""

    run: Path
    step: int
    config: RunConfig
    model: ExLM | MaskedLM
    tokenizer: Tokenizer


def single_run(directory: Path) -> Path | None:
    """The directory that has ``checkpoints/``: the one given, or one of two trained in turn."""
    candidates = [directory, *(directory / name for name in TRAINED_IN_TURN)]
    return next((path for path in candidates if any(path.glob("checkpoints/step-*"))), None)


def newest_run(runs: Path) -> Path:
    """The run below a directory that saved a checkpoint last.

    Raises:
        UserError: if no run there has a checkpoint.
    """
    found = [run for path in runs.glob("*") if (run := single_run(path))]
    if not found:
        raise UserError(
            f"no run below {runs}/ has a checkpoint; train one with python -m "
            "exlm_mini.pretrain, or name its directory with --run"
        )
    return max(found, key=lambda run: (run / "checkpoints").stat().st_mtime_ns)


def load_run(directory: Path) -> Loaded:
    """Model and tokenizer of a run's newest intact checkpoint.

    Args:
        directory: OUTPUT of a run, or one of the two directories in it that mlm+exlm trains.

    Raises:
        UserError: no such directory, no intact checkpoint, or not the tokenizer it was trained
            with.
    """
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}; give the --output of a run")
    run = single_run(directory)
    checkpoint = latest_checkpoint(run / "checkpoints", say) if run else None
    if checkpoint is None:
        raise UserError(
            f"{directory} has no checkpoint; give the --output of a run that has saved one"
        )
    if "tokenizer_sha256" not in checkpoint.state:
        raise UserError(
            f"{run} holds no pre-trained model; give the --output of a pre-training run"
        )
    with reading(run):
        tokenizer = tokenizer_of(run, checkpoint)
        model, config = load_model(checkpoint)
        return Loaded(run, checkpoint.step, config, model, tokenizer)


def encode_row(loaded: Loaded, text: str) -> Tensor:
    """masked_ids_BN of one text between [BOS] and [EOS].

    Raises:
        UserError: not UTF-8, no mask, something the vocabulary lacks, or too long for the model.
    """
    tokenizer = loaded.tokenizer
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding reach us as lone surrogates
        raise UserError("the text is not valid UTF-8; check the terminal's encoding") from None
    if MASK not in text:
        raise UserError(f"the text has no {MASK}; write {MASK} in place of each hidden token")
    token_ids = tokenizer.encode_with_masks(text)
    if tokenizer.special_ids.unk in token_ids:
        pieces = re.split(rf" ?{re.escape(MASK)}", text)
        unknown = [piece for part in pieces for piece in tokenizer.unknown_pieces(part)]
        raise UserError(
            f"not in the vocabulary of {loaded.run}: "
            f"{', '.join(repr(piece) for piece in dict.fromkeys(unknown))}; use words or "
            "symbols of its training data, or name another run with --run"
        )
    row = [tokenizer.special_ids.bos, *token_ids, tokenizer.special_ids.eos]
    _check_length(loaded, row)
    return torch.tensor([row])


def _check_length(loaded: Loaded, row: list[int]) -> None:
    """Refuse a row that the positions cannot hold once it is expanded or repeated."""
    config = loaded.config
    needed, how = len(row) * num_copies(config), "after repetition"
    if config.objective == "exlm":
        num_boundaries = 2 if config.model.boundary == "official" else 0
        num_expanded = row.count(loaded.tokenizer.special_ids.mask) + num_boundaries
        needed = len(row) + (config.model.states_per_mask - 1) * num_expanded
        how = "after expansion"
    if needed > config.model.max_positions:
        raise UserError(
            f"the text has {len(row)} tokens with [BOS] and [EOS], {needed} {how}, more than "
            f"model.max_positions {config.model.max_positions} of {loaded.run}; shorten it"
        )


def read(loaded: Loaded, masked_ids_BN: Tensor) -> Reading:
    """What the model of a run says about one row.

    Raises:
        UserError: if its weights give no probabilities.
    """
    if isinstance(loaded.model, ExLM):
        # As at the validation of this step: transitions may still be blended with fixed chains.
        share = chain_share(loaded.config, loaded.step)
        found = read_states(loaded.model, masked_ids_BN, share)
    else:
        found = read_masked_lm(loaded.model, masked_ids_BN, num_copies(loaded.config))
    if found.log_token_SV.isnan().any():
        raise UserError(
            f"the weights of {loaded.run} give no probabilities, for they are too large or no "
            "numbers; give another run"
        )
    return found


def fill_in(tokenizer: Tokenizer, masked_ids_BN: Tensor, token_ids_S: Tensor) -> str:
    """The text with the chosen tokens in place of the masks."""
    filled_N = masked_ids_BN[0].clone()
    filled_N[filled_N == tokenizer.special_ids.mask] = token_ids_S
    return tokenizer.decode(filled_N[1:-1].tolist())
