"""Training speed of a recipe on this machine: real optimiser steps on random tokens.

Steps are those of training (``step.Updater``), batches included. Differences to a run are the
tokens, and ``train.chain_warmup``, which is off so that all steps are like those after it.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from exlm_lab.benchmarks.measure import peak_bytes, resident_bytes, threads
from exlm_lab.benchmarks.record import Record
from exlm_mini.config import RunConfig, SpecialIds, settings_with
from exlm_mini.config.checks import Effect
from exlm_mini.config.recipes import plain
from exlm_mini.data.batches import BUCKET_BATCHES
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Rows
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.training.cost import check_memory, plan_batch
from exlm_mini.training.parts import choose_device
from exlm_mini.training.precision import with_precision
from exlm_mini.training.pretraining import Trainer
from exlm_mini.training.provenance import MIB

WARM_UP_STEPS = 2
LEAST_STEPS = 3
"""A median of fewer would be meaningless."""
TEXT_STEPS = 4
"""Steps of text without repeated rows; the contents of rows do not affect the time."""
MOLECULE_LENGTHS = (
    11, 15, 17, 19, 21, 23, 24, 25, 27, 28, 30, 31, 33, 35, 37, 40, 43, 47, 54, 69,
)  # fmt: skip
"""Lengths of the embedded molecules with [BOS] and [EOS]: quantiles 0.025, 0.075, ... 0.975."""
MOLECULE_VOCABULARY = 85
"""Size of the vocabulary of the embedded molecules."""
SHORTAGE = ("out of memory", "can't allocate memory", "alloc_failed")
"""Parts of PyTorch's messages for exhausted memory, in lower case."""


def speed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that determine the speed, by name."""
    settings, found = plain(config), {}
    for name in settings_with(Effect.SPEED):
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
) -> Record:
    """Time optimiser steps of a recipe.

    Args:
        config: of a single objective; ``train.device`` says where.
        steps: to time, after ``WARM_UP_STEPS``; at least ``LEAST_STEPS``.
        seconds: after this time no step is started once ``LEAST_STEPS`` were timed.
        accumulate: most micro-batches of a step; None: as in the recipe on one device. Fewer make a
            step shorter and increase the optimiser's share.

    Returns:
        The measurements. ``accumulated`` and ``accumulated_by_recipe`` are micro-batches of a step;
        tokens are of the input, before expansion or repetition and without padding; ``peak_mib``
        is of weights, optimiser and a step together: tensors on a GPU, growth of the process on a
        CPU, None if the system does not tell.

    Raises:
        DoesNotFit: if a micro-batch does not fit into memory; says what to lower.
        UserError: if settings contradict each other.
    """
    plan = plan_batch(config.train, num_devices=1)
    accumulated = min(plan.num_accumulated, accumulate or plan.num_accumulated)
    device = choose_device(config.train.device)
    config = with_precision(config, device)
    counted = "size" if config.train.batch_tokens is None else "tokens"
    batch: dict[str, Any] = {
        f"batch_{counted}": accumulated * plan.per_device,
        f"micro_batch_{counted}": plan.per_device,
    }
    run = replace(config, train=replace(config.train, **batch, chain_warmup=0.0))
    num_threads = config.train.num_threads or torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder, threads(num_threads):
            check_memory(run, len(SpecialIds()), 3, device)  # before the pack is made
            pack = _made_for(run, accumulated * plan.per_device, Path(folder))
            timed = _timed_steps(run, pack, steps, seconds)
    except (DoesNotFit, RuntimeError, MemoryError) as error:
        is_short = isinstance(error, DoesNotFit | MemoryError)
        if not is_short and not any(words in str(error).lower() for words in SHORTAGE):
            raise
        name = "this machine" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise DoesNotFit(
            f"{config.recipe} does not fit in the memory of {name} with {plan.per_device:,} "
            f"{plan.unit} at a time; lower --micro-batch or --accumulate"
        ) from None
    return {
        "benchmark": "train",
        "recipe": config.recipe,
        "objective": config.objective,
        **timed,
        "accumulated": accumulated,
        "accumulated_by_recipe": plan.num_accumulated,
        "vocab_size": pack.vocab_size,
        "threads": num_threads,
        "settings": speed_settings(config),
    }


def _made_for(config: RunConfig, batch: int, folder: Path) -> Pack:
    """Rows like those of the recipe, enough for a few steps of ``batch`` rows or tokens."""
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


def _timed_steps(config: RunConfig, pack: Pack, steps: int, enough: float) -> Record:
    """Train a new model for some steps and measure its memory; writes nothing."""
    device = choose_device(config.train.device)
    found: Record = {}

    def call() -> None:
        trainer = Trainer(config, pack, pack, pack.path.parent)
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
        speed = median(n / s for n, s in zip(num_tokens, seconds, strict=True))
        flops, peak = trainer.meter.flops_per_token * speed, trainer.meter.peak_flops
        found.update(
            tokens_per_second=speed,
            tokens_per_step=fmean(num_tokens),
            median_ms=1000 * median(seconds),
            steps=len(seconds),
            flops_per_token=trainer.meter.flops_per_token,
            flops_per_second=flops,
            flops_utilisation=None if peak is None else flops / peak,
            num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        )

    on_gpu = device.type == "cuda"
    taken = peak_bytes(call, device) if on_gpu else resident_bytes(call)
    return {**found, "peak_mib": None if taken is None else taken / MIB}


def made_pack(
    directory: Path,
    num_tokens: int,
    row_length: int | None,
    vocab_size: int,
    longest: int | None = None,
) -> Pack:
    """Random ordinary tokens between [BOS] and [EOS], written and opened like any pack.

    Args:
        directory: for ``made.json``.
        num_tokens: approximate size; at least one row is made.
        row_length: of every row; None: random lengths from ``MOLECULE_LENGTHS``.
        vocab_size: V, special tokens included.
        longest: rows are truncated to it; None: they are not.
    """
    special_ids = SpecialIds()
    rng = np.random.default_rng(0)
    lengths = MOLECULE_LENGTHS if row_length is None else (row_length,)
    num_rows = max(1, round(num_tokens / np.mean(lengths)))
    lengths_R = rng.choice(lengths, num_rows).clip(0, longest)
    token_ids = rng.integers(len(special_ids), vocab_size, lengths_R.sum())
    ends = np.cumsum(lengths_R)
    token_ids[ends - lengths_R], token_ids[ends - 1] = special_ids.bos, special_ids.eos
    path = directory / "made.json"
    write_pack(
        path,
        [Rows(token_ids, lengths_R)],
        row_length=row_length,
        vocab_size=vocab_size,
        special_ids=special_ids,
        tokenizer_sha256="none",
        source="random tokens",
        counts=Counts(),
    )
    return Pack.open(path)
