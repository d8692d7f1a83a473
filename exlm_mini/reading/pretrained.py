"""Loads a pre-trained run: its weights, its settings, its tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.files import reading
from exlm_mini.data.tokenizer import TOKENIZER_KINDS, Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.checkpoint import (
    MANIFEST,
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
)
from exlm_mini.training.parts import load_model, num_copies

TRAINED_IN_TURN = ("exlm", "mlm")
"""Directories in a run of the objective mlm+exlm."""
REMEDY = "give the --output of a pre-training run that has saved one"
INPUT_OF_KIND = {tokenizer: data for data, tokenizer in TOKENIZER_KINDS.items()}
"""Kind of data by kind of tokenizer, as in ``exlm_lab.downstream.task.Task``."""

SHIPPED = {
    name: Path(__file__).with_name("shipped") / name for name in ("molecules", "english")
}
"""Small models that come with the package, by name; each has a card."""

OTHER_KINDS = {
    "corpus.json": (
        "a prepared corpus",
        "pre-train on it, with --data.pack, and give the --output of that run",
    ),
    "cells": (
        "the output of fine-tuning",
        "give the pre-training run that it started from",
    ),
    "checkpoint-*": ("a run of fine-tuning", "give the pre-training run that it started from"),
    "step-*": ("the checkpoints of a run", "give the directory above, or one of them"),
    "*/checkpoints/step-*": ("a directory of runs", "give one of them"),
    "config.yaml": ("a run that has not saved one yet", "let it go on, or give another"),
}
"""What a directory with such files is, and what to do."""


class Layout(NamedTuple):
    """How long a row becomes inside a model."""

    special_ids: SpecialIds
    max_positions: int
    """Longest sequence after expansion or repetition, in tokens."""
    num_copies: int = 1
    """Copies of every token; above 1 for Repeated MLM."""
    boundary_copies: int = 1
    """Copies of [BOS] and every [EOS]: ExLM's states per mask with the official boundary."""

    def room(self, num_pieces: int) -> int:
        """Tokens that fit besides the boundaries of a row with one or two texts.

        Raises:
            UserError: if there is no room for one token of each.
        """
        num_special = 2 * num_pieces
        room = self.max_positions // self.num_copies - self.boundary_copies * num_special
        if room < num_pieces:
            raise UserError(
                f"model.max_positions {self.max_positions} of the checkpoint leaves room for "
                f"{max(room, 0)} tokens beside {num_special} boundaries of "
                f"{self.boundary_copies * self.num_copies} positions each; take a checkpoint "
                "with more positions"
            )
        return room


class Pretrained(NamedTuple):
    """A checkpoint, and what is needed to use it."""

    path: Path
    """Of the step's directory."""
    checkpoint: Checkpoint
    config: RunConfig
    tokenizer: Tokenizer
    sha256: str
    """Of the names and bytes of its weights."""

    @property
    def input(self) -> str:
        """The kind of its training data: text, smiles or toy."""
        return INPUT_OF_KIND[self.tokenizer.kind]

    @property
    def layout(self) -> Layout:
        """How long a row becomes inside the model if nothing is masked."""
        model = self.config.model
        is_cloned = self.config.objective == "exlm" and model.boundary == "official"
        return Layout(
            self.tokenizer.special_ids,
            model.max_positions,
            num_copies(self.config),
            model.states_per_mask if is_cloned else 1,
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest text without masks that the model takes, with [BOS] and [EOS]."""
        return self.layout.room(1) + 2

    def model(self, **settings: Any) -> MaskedLM | ExLM:
        """A fresh copy of the trained model, on the CPU.

        Args:
            settings: of ``ModelConfig`` that do not change weights, such as ``dropout``.
        """
        stored = self.checkpoint.state["config"]
        config = {**stored, "model": {**stored["model"], **settings}}
        state = {**self.checkpoint.state, "config": config}
        with reading(self.path):
            return load_model(self.checkpoint._replace(state=state))[0]


def load_pretrained(path: Path, report: Callable[[str], None]) -> Pretrained:
    """Open a run, or one step of it.

    Args:
        path: OUTPUT of a pre-training run, or ``checkpoints/step-NNNNNN`` in it; or, if there is
            no such path, a name in ``SHIPPED``.
        report: receives a line for each damaged checkpoint that is skipped.

    Raises:
        UserError: if there is no intact checkpoint of a pre-training run, or its tokenizer is
            missing or another.
    """
    if not path.exists():
        path = SHIPPED.get(str(path), path)
    if (path / MANIFEST).is_file():
        run, checkpoint = path.parent.parent, load_checkpoint(path)
    else:
        latest = latest_checkpoint(path / "checkpoints", report)
        if latest is None:
            raise UserError(f"there is no checkpoint in {path}{_what_it_is(path)}")
        run, checkpoint, path = path, latest, path / "checkpoints" / f"step-{latest.step:06d}"
    with reading(path, "give a checkpoint of a pre-training run as it was saved"):
        _, config = load_model(checkpoint)  # raises if weights and settings do not fit
        tokenizer, weights = tokenizer_of(run, checkpoint), checkpoint.tensors["model"]
        return Pretrained(path, checkpoint, config, tokenizer, _sha256(weights))


def _what_it_is(path: Path) -> str:
    """The end of a message about a path that holds no run: its kind, and the remedy."""
    if not path.exists():
        return f"; {nearest(str(path), SHIPPED, REMEDY)}"
    if not path.is_dir():
        return f", a file; {REMEDY}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        kind = json.loads((path / "config.json").read_bytes()).get("model_type")
        if kind == "exlm":
            return (
                ", a model for transformers; open it with AutoModelForMaskedLM after import "
                "exlm_mini.hf, or give the run that it was exported from"
            )
        return f", a model of transformers ({kind}); {REMEDY}"
    for pattern, (kind, remedy) in OTHER_KINDS.items():
        if any(path.glob(pattern)):
            return f", {kind}; {remedy}"
    return f"; {REMEDY}" if any(path.iterdir()) else f", which is empty; {REMEDY}"


def _sha256(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {tuple(weights[name].shape)}\n".encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_of(run: Path, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a run was trained with, identified by its sha256.

    Raises:
        UserError: if it is missing or another.
    """
    pack = checkpoint.state["config"]["data"]["pack"]
    corpora = [run / "data", run.parent / "data", *([Path(pack)] if pack else [])]
    paths = [corpus / "tokenizer.json" for corpus in corpora]
    for path in paths:
        with contextlib.suppress(UserError):  # missing or damaged: try the others
            tokenizer = Tokenizer.load(path)
            if tokenizer.sha256 == checkpoint.state["tokenizer_sha256"]:
                return tokenizer
    found = next((path for path in paths if path.is_file()), None)
    problem = (
        f"{found} is not the tokenizer" if found else f"{paths[0]} is missing, the tokenizer"
    )
    raise UserError(
        f"{problem} {run} was trained with; restore it from a copy, its sha256 is "
        f"{checkpoint.state['tokenizer_sha256']}"
    )
