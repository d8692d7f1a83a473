"""Training inside a chapter: at which scale, and without leaving files behind."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.console import Progress
from exlm_mini.training.evaluation import Evaluation
from exlm_mini.training.processes import choose_device
from exlm_mini.training.trainer import Trainer

SCALES = ("cpu", "gpu")
T = TypeVar("T")


class Scale(NamedTuple):
    """The sizes and the device that a chapter uses."""

    name: str
    """``cpu``: sizes for a minute on a laptop; ``gpu``: larger sizes."""
    device: torch.device

    def pick(self, cpu: T, gpu: T) -> T:
        """The value for this scale."""
        return gpu if self.name == "gpu" else cpu

    def __str__(self) -> str:
        sizes = "large" if self.name == "gpu" else "small"
        return f"EXLM_SCALE={self.name}: {sizes} sizes, on {self.device.type}"


def chapter_scale() -> Scale:
    """The scale set by ``EXLM_SCALE``, ``cpu`` if unset, on a GPU if there is one.

    On a CPU this limits PyTorch to one thread: tiny models gain nothing from more,
    and sums are then computed in the same order on any number of cores.

    Raises:
        UserError: if ``EXLM_SCALE`` is neither ``cpu`` nor ``gpu``.
    """
    name = os.environ.get("EXLM_SCALE", "cpu")
    if name not in SCALES:
        raise UserError(f"EXLM_SCALE is '{name}'; {nearest(name, SCALES)}")
    device = choose_device("auto")
    if device.type == "cpu":
        torch.set_num_threads(1)
    return Scale(name, device)


class LiveRun(NamedTuple):
    """A finished run in memory."""

    model: MaskedLM | ExLM
    """The trained model, in evaluation mode."""
    config: RunConfig
    tokenizer: Tokenizer
    curve: list[tuple[int, Evaluation]]
    """Step and validation result, every ``train.validate_every`` steps."""

    def bits_per_row(self) -> dict[int, float]:
        """Validation bits per row by step: -log2 P(masked tokens | context)."""
        return {step: evaluation.bits_per_row for step, evaluation in self.curve}


def train_live(config: RunConfig, scale: Scale) -> LiveRun:
    """Train as ``pretrain`` does, on the device of the scale and in a temporary
    directory that is deleted afterwards; return the run."""
    config = replace(config, train=replace(config.train, device=scale.device.type))
    curve: list[tuple[int, Evaluation]] = []

    def note(progress: Progress) -> None:
        if progress.evaluation is not None:
            curve.append((progress.step, progress.evaluation))

    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(config.data, Path(directory) / "data", config.seed)
        trainer = Trainer(config, corpus.train, corpus.validation, Path(directory))
        trainer.run(note)
        tokenizer = Tokenizer.load(corpus.tokenizer_path)
    return LiveRun(trainer.model.eval(), config, tokenizer, curve)
