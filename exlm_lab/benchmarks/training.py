"""How fast a recipe trains on the machine at hand: real optimiser steps on made-up tokens.

A step is that of training (``step.Updater``), its batch included. The tokens differ from those
of a run, and one setting: ``train.chain_warmup`` is off, so that every step is one as they are
after it.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from exlm_lab.benchmarks.measure import resident_bytes, threads
from exlm_mini.config import Effect, RunConfig, SpecialIds, settings_with
from exlm_mini.data.batches import BUCKET_BATCHES
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Rows
from exlm_mini.data.toy_grammars import grammar, slots_of
from exlm_mini.recipes import plain
from exlm_mini.training.cost import check_memory, plan_batch
from exlm_mini.training.parts import choose_device
from exlm_mini.training.precision import with_precision
from exlm_mini.training.pretraining import Trainer
from exlm_mini.training.provenance import MIB

WARM_UP_STEPS = 2
LEAST_STEPS = 3
"""A median of fewer says nothing."""
TEXT_STEPS = 4
"""Steps of text that see no row twice; what a row says does not change the time."""
SAME_SPEED = tuple(settings_with(Effect.SPEED))
"""Settings that decide how fast a token is worked on."""
MOLECULE_LENGTHS = (
    11, 15, 17, 19, 21, 23, 24, 25, 27, 28, 30, 31, 33, 35, 37, 40, 43, 47, 54, 69,
)  # fmt: skip
"""Tokens of the embedded molecules with [BOS] and [EOS], at the shares 0.025, 0.075, ... 0.975:
drawn with equal chances they stand for all."""
MOLECULE_VOCABULARY = 85
"""That of the embedded molecules."""
CHUNK = 1 << 20
"""Tokens made at a time."""
SHORTAGE = ("out of memory", "can't allocate memory", "alloc_failed")
"""What PyTorch says, in small letters, where there is no more memory."""


@dataclass(frozen=True)
class Speed:
    """How fast a recipe trains on one device; a JSON object when printed."""

    recipe: str
    objective: str
    settings: dict[str, Any]
    """Those of ``SAME_SPEED``; the precision is the one that was used."""
    accumulated: int
    """Micro-batches of a step that was timed."""
    accumulated_by_recipe: int
    """Micro-batches of a step of the recipe on one device."""
    vocab_size: int
    num_parameters: int
    seconds: list[float]
    """Of each step, wall clock, without those to warm up."""
    num_tokens: list[int]
    """Of each step: input tokens, before expansion or repetition and without padding."""
    flops_per_token: float
    """Of ``meter.mean_flops_per_token``."""
    peak_flops: float | None
    """Most operations per second of the device, see ``meter.peak_flops``."""
    peak_mib: float | None
    """Weights, optimiser state and a step together: tensors on a GPU, growth of the process on a
    CPU; none where the system does not tell."""
    num_threads: int

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps."""
        return median(n / s for n, s in zip(self.num_tokens, self.seconds, strict=True))

    def as_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """What was measured, and what it was measured on.

        Args:
            machine: from ``provenance.machine``: device, versions, commit.
        """
        flops_per_second = self.flops_per_token * self.tokens_per_second
        known = self.peak_flops is not None
        return {
            "benchmark": "train",
            "recipe": self.recipe,
            "objective": self.objective,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": sum(self.num_tokens) / len(self.num_tokens),
            "median_ms": 1000 * median(self.seconds),
            "steps": len(self.seconds),
            "accumulated": self.accumulated,
            "accumulated_by_recipe": self.accumulated_by_recipe,
            "flops_per_token": self.flops_per_token,
            "flops_per_second": flops_per_second,
            "flops_utilisation": flops_per_second / self.peak_flops if known else None,
            "peak_mib": self.peak_mib,
            "vocab_size": self.vocab_size,
            "num_parameters": self.num_parameters,
            "threads": self.num_threads,
            "settings": self.settings,
            "machine": machine,
        }


def speed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of ``SAME_SPEED`` by their names, as JSON knows them."""
    settings, found = plain(config), {}
    for name in SAME_SPEED:
        group, _, inner = name.partition(".")
        found[name] = settings[group][inner] if inner else settings[group]
    # Given for --dry-run alone, the vocabulary's size is the tokenizer's otherwise.
    found["model"] = {k: v for k, v in found["model"].items() if k != "vocab_size"}
    return found


def train(
    config: RunConfig,
    steps: int = 20,
    seconds: float = math.inf,
    accumulate: int | None = None,
) -> Speed:
    """Time optimiser steps of a recipe.

    Args:
        config: of a single objective; ``train.device`` says where.
        steps: to time, after ``WARM_UP_STEPS``; at least ``LEAST_STEPS``.
        seconds: no step is begun after so many, once ``LEAST_STEPS`` were timed.
        accumulate: micro-batches of a step at most; none: as many as the recipe has on one
            device. Fewer make a step shorter, and the optimiser's share of it larger.

    Raises:
        DoesNotFit: if the memory of the device is too small for a micro-batch of the recipe;
            says what to lower.
        UserError: if a setting of the recipe does not fit the others.
    """
    plan = plan_batch(config.train, num_devices=1)
    accumulated = min(plan.num_accumulated, accumulate or plan.num_accumulated)
    device = choose_device(config.train.device)
    config = with_precision(config, device)
    run = _as_timed(config, plan.per_device, accumulated)
    num_threads = config.train.num_threads or torch.get_num_threads()
    done: list[_Timed] = []
    with tempfile.TemporaryDirectory() as folder, threads(num_threads):
        is_short = False
        try:
            check_memory(run, len(SpecialIds()), 3, device)  # before the pack is made
            pack = _made_for(run, accumulated * plan.per_device, Path(folder))
            peak = _peak_bytes(run, pack, steps, seconds, done)
        except (DoesNotFit, RuntimeError, MemoryError) as error:
            told = str(error).lower()
            is_short = isinstance(error, DoesNotFit | MemoryError)
            is_short = is_short or any(words in told for words in SHORTAGE)
            if not is_short:
                raise
    if is_short:  # told out here, where nothing holds on to the tensors of the step
        name = "this machine" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise DoesNotFit(
            f"{config.recipe} does not fit in the memory of {name} with {plan.per_device:,} "
            f"{plan.unit} at a time; lower --micro-batch or --accumulate"
        )
    (timed,) = done
    return Speed(
        config.recipe,
        config.objective,
        speed_settings(config),
        accumulated,
        plan.num_accumulated,
        pack.vocab_size,
        *timed,
        None if peak is None else peak / MIB,
        num_threads,
    )


def _as_timed(config: RunConfig, per_device: int, accumulated: int) -> RunConfig:
    """The settings with steps of so many micro-batches, and without chains."""
    counted = "tokens" if config.train.batch_tokens is not None else "size"
    batch = {f"batch_{counted}": accumulated * per_device, f"micro_batch_{counted}": per_device}
    return replace(config, train=replace(config.train, **batch, chain_warmup=0.0))


def _made_for(config: RunConfig, batch: int, folder: Path) -> Pack:
    """Rows like the recipe's, enough for a few steps of ``batch`` rows or tokens."""
    data, vocab_size = config.data, config.model.vocab_size
    row_length: int | None = data.block_length
    if data.kind == "toy":
        language = grammar(data.grammar)
        row_length = language.length + 2
        vocab_size = len(language.words) + len(SpecialIds())
    elif data.kind == "smiles":
        row_length = None
        if vocab_size is None and not (data.files or data.hub or data.pack):
            vocab_size = MOLECULE_VOCABULARY
    # Rows of unequal length are bucketed over many batches.
    num_tokens = batch * (TEXT_STEPS if row_length else BUCKET_BATCHES)
    if config.train.batch_tokens is None:
        num_tokens *= row_length or max(MOLECULE_LENGTHS)
    return made_pack(
        folder, num_tokens, row_length, vocab_size or data.vocab_size, data.block_length
    )


class _Timed(NamedTuple):
    """What comes out of a run; the middle fields of ``Speed``, in order."""

    num_parameters: int
    seconds: list[float]
    num_tokens: list[int]
    flops_per_token: float
    peak_flops: float | None


def _timed_steps(config: RunConfig, pack: Pack, steps: int, enough: float) -> _Timed:
    """Make a model and train it for some steps; nothing is written."""
    trainer = Trainer(config, pack, pack, pack.path.parent, slots_of(config))
    device = trainer.engine.device
    start, seconds, num_tokens = time.perf_counter(), [], []
    for step in range(WARM_UP_STEPS + steps):
        begun = time.perf_counter()
        update = trainer.updater.step(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if step >= WARM_UP_STEPS:
            seconds.append(ended - begun)
            num_tokens.append(update.num_tokens)
        if len(seconds) >= LEAST_STEPS and ended - start >= enough:
            break
    return _Timed(
        sum(parameter.numel() for parameter in trainer.model.parameters()),
        seconds,
        num_tokens,
        trainer.meter.flops_per_token,
        trainer.meter.peak_flops,
    )


def _peak_bytes(
    config: RunConfig, pack: Pack, steps: int, enough: float, done: list[_Timed]
) -> int | None:
    """Most memory a run took, the model included; none where it is not told.

    What the run found is put into ``done``.
    """

    def call() -> None:
        done.append(_timed_steps(config, pack, steps, enough))

    device = choose_device(config.train.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    peak = resident_bytes(call)
    if not done:  # where memory is not told, the call was not made
        call()
    return peak


def made_pack(
    directory: Path,
    num_tokens: int,
    row_length: int | None,
    vocab_size: int,
    longest: int | None = None,
    seed: int = 0,
) -> Pack:
    """Random ordinary tokens between [BOS] and [EOS], written and opened like any pack.

    Args:
        directory: where to, as ``made.json``.
        num_tokens: of the pack, about; at least one row is made.
        row_length: of every row; none: rows of ``MOLECULE_LENGTHS``, at random.
        vocab_size: V, special tokens included.
        longest: rows are cut to it; none: they are not.
        seed: of tokens and lengths.

    Raises:
        UserError: if the disk is full.
        ValueError: if the vocabulary has no ordinary token.
    """
    special_ids = SpecialIds()
    if vocab_size <= len(special_ids):
        raise ValueError(f"a vocabulary of {vocab_size} has no ordinary token")
    rng = np.random.default_rng(seed)

    def rows() -> Iterator[Rows]:
        left = num_tokens
        mean = row_length or sum(MOLECULE_LENGTHS) / len(MOLECULE_LENGTHS)
        while left == num_tokens or left > 0:
            num_rows = max(1, round(min(left, CHUNK) / mean))
            lengths_R = np.full(num_rows, row_length or 0)
            if row_length is None:
                lengths_R = rng.choice(MOLECULE_LENGTHS, num_rows).clip(max=longest)
            token_ids = rng.integers(len(special_ids), vocab_size, lengths_R.sum())
            ends = np.cumsum(lengths_R)
            token_ids[ends - lengths_R], token_ids[ends - 1] = special_ids.bos, special_ids.eos
            left -= len(token_ids)
            yield Rows(token_ids, lengths_R)

    path = directory / "made.json"
    write_pack(
        path,
        rows(),
        row_length=row_length,
        vocab_size=vocab_size,
        special_ids=special_ids,
        tokenizer_sha256="none",
        source="random tokens",
        counts=Counts(),
    )
    return Pack.open(path)
