"""``--dry-run``: print what a run would cost in parameters, tokens, memory and hours."""

from __future__ import annotations

import math
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exlm_mini.config import RunConfig
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.sources import size_of
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.training.checkpoint import Checkpoint
from exlm_mini.training.console import say
from exlm_mini.training.cost import Estimate, check_row_length, estimate
from exlm_mini.training.processes import BatchPlan, choose_device, plan_batch, with_precision
from exlm_mini.training.run_directory import check_start
from exlm_mini.training.step import low_rate

DRY_RUN_DOCUMENTS = 10_000


def dry_run(
    config: RunConfig,
    num_devices: int = 1,
    tokens_per_second: float | None = None,
    before: Checkpoint | None = None,
) -> None:
    """Print what a run would cost; nothing is written.

    Args:
        num_devices: number of devices that share a batch; memory is printed for one of them.
        tokens_per_second: measured speed of one device, needed for the hours, in input tokens
            before expansion or repetition and without padding.
        before: the checkpoint that the run starts from.
    """
    config = with_precision(config, choose_device(config.train.device))
    plan = plan_batch(config.train, num_devices)
    vocab_size, row_length, lengths_R, tokenizer_sha256 = _corpus_shape(config)
    if before is not None:
        check_start(before, config, tokenizer_sha256, None, say)
    changed: dict[str, Any] = {f"micro_batch_{plan.name}": plan.per_device}
    config = replace(config, train=replace(config.train, **changed))
    check_row_length(config, row_length)
    if plan.unit == "tokens" and row_length > plan.per_device:
        say(
            f"rows may have up to {row_length} tokens, but a row with more than the "
            f"{plan.per_device} of a micro-batch stops the run; if that happens, raise "
            "train.micro_batch_tokens (or train.batch_tokens)"
        )
    if line := low_rate(config):
        say(line)
    costs = estimate(config, vocab_size, row_length, lengths_R)
    parameters = f"{costs.num_parameters:,} = {costs.num_parameters / 1e6:.1f} M"
    if costs.num_transition_parameters:
        rest = costs.num_parameters - costs.num_transition_parameters
        parameters += f" ({rest / 1e6:.1f} M without the transition head)"
    # Text is cut into rows of equal length, so the number of its tokens is not just a bound.
    is_bound = plan.unit == "tokens" or (config.data.kind == "smiles" and lengths_R is None)
    at_most = "at most " if is_bound else ""
    mean = row_length if lengths_R is None else float(lengths_R.mean())
    row = f"{row_length} tokens, {costs.expanded_length} expanded"
    rows = f"rows of {row_length}"
    if mean < row_length:
        row, rows = f"up to {row}; {mean:.1f} on average", "the rows of the corpus"
    weights, activations = costs.weight_bytes / 2**20, costs.activation_bytes / 2**20
    lines = {
        "objective": config.objective,
        "parameters": parameters,
        "vocabulary": f"{vocab_size:,}",
        "row": row,
        "batch": f"{plan}",
        "tokens per step": f"{at_most}{costs.tokens_per_step:,}",
        "steps": f"{config.train.steps:,}",
        "tokens": f"{at_most}{costs.num_tokens:,}",
        "operations": f"{costs.flops_per_token:.3g} FLOP per token, {costs.num_flops:.3g} in "
        f"all, for {rows}",
        "memory": f"about {weights + activations:,.0f} MiB = {weights:,.0f} MiB weights, "
        f"gradients, Adam + {activations:,.0f} MiB activations",
        "disk": _disk(config, costs, vocab_size),
        "device hours": _hours(costs, plan, tokens_per_second),
    }
    if before is not None:
        run, state = RunConfig(**before.state["config"]), before.state
        longest = run.data.block_length
        cost = estimate(run, state["vocab_size"], longest, lengths_R).flops_per_token
        lines["goes on from"] = (
            f"{run.objective} of {before.step:,} steps, about "
            f"{cost * state['num_tokens']:.3g} FLOP not counted above"
        )
    indent = " " * 19
    wrapper = textwrap.TextWrapper(80, indent, indent, break_long_words=False)
    for name, text in lines.items():
        print(f"{name:18} " + "\n".join(map(wrapper.fill, text.splitlines())).lstrip())


def _corpus_shape(config: RunConfig) -> tuple[int, int, np.ndarray | None, str | None]:
    """Size of the vocabulary, length of the longest row, and, if known, lengths_R of all rows and
    the hash of the tokenizer.

    Without ``model.vocab_size`` the corpus is built in a temporary directory, from at most
    ``DRY_RUN_DOCUMENTS`` documents unless it is embedded. For a pack that does not exist yet, the
    numbers come from the settings.
    """
    data, row_length = config.data, row_length_of(config)
    is_there = data.pack is not None and Path(data.pack).exists()
    if config.model.vocab_size is not None and not is_there:
        return config.model.vocab_size, row_length, None, None
    if data.pack is not None and not is_there:
        say(
            f"{data.pack} does not exist yet; this estimate uses data.vocab_size "
            f"{data.vocab_size:,} and rows of data.block_length {row_length}"
        )
        return data.vocab_size, row_length, None, None
    if data.source:
        limit = min(data.max_documents or DRY_RUN_DOCUMENTS, DRY_RUN_DOCUMENTS)
        data = replace(data, max_documents=limit)
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(data, Path(directory) / "data", config.seed, say)
        vocab_size = config.model.vocab_size or corpus.train.vocab_size
        is_whole = is_there or not data.source or data.tokenizer is not None
        tokenizer_sha256 = corpus.train.tokenizer_sha256 if is_whole else None
        lengths_R = corpus.train.lengths_R
        return vocab_size, int(lengths_R.max()), lengths_R, tokenizer_sha256


def row_length_of(config: RunConfig) -> int:
    """Length of the longest row, from the settings alone."""
    if config.data.kind == "toy":
        return grammar(config.data.grammar).length + 2
    return config.data.block_length


def _disk(config: RunConfig, costs: Estimate, vocab_size: int) -> str:
    """Disk space for a run's checkpoints, including one being written, and its packed rows."""
    train, data = config.train, config.data
    num = math.ceil(train.steps / train.save_every)
    num = min(num, train.keep_last + 1) if train.keep_last else num
    each = 0.75 * costs.weight_bytes / 2**20  # without gradients
    words = () if data.pack is not None else data.source
    tokens = sum(size_of(word, data).tokens or 0 for word in words)
    packed = tokens * (2 if vocab_size <= 2**16 else 4) / 2**20
    rows = f" + {packed:,.0f} MiB packed rows" * bool(tokens)
    return f"about {num * each + packed:,.0f} MiB = {num} checkpoints x {each:,.1f} MiB{rows}"


def _hours(costs: Estimate, plan: BatchPlan, tokens_per_second: float | None) -> str:
    """Hours at a measured speed; if the speed is not given, how to measure it."""
    if tokens_per_second is None:
        return (
            "unknown: add --throughput NUMBER, the tokens_per_second\n"
            "that a run of a few steps has in its metrics.jsonl"
        )
    hours = costs.num_tokens / tokens_per_second / 3600
    each = hours / plan.num_devices
    all_and_each = [f"{h:,.1f}" if h >= 1 else f"{h:.2g}" for h in (hours, each)]
    text = (
        f"{all_and_each[0]} at {tokens_per_second:,.0f} tokens/s, which is "
        f"{tokens_per_second * costs.flops_per_token:.3g} FLOP/s"
    )
    if plan.num_devices > 1:
        text += f"; {all_and_each[1]} hours if {plan.num_devices} devices "
        text += "divide the work perfectly"
    return text
