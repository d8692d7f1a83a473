"""What a step of ExLM costs relative to MLM on the same rows, measured and counted."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from exlm_lab.benchmarks.measure import time_side_by_side
from exlm_mini.config import RunConfig
from exlm_mini.data.corpus import Corpus
from exlm_mini.training.cost import row_flops
from exlm_mini.training.trainer import Trainer

ENOUGH_SECONDS = 8.0
"""For both models together."""


def step_costs(config: RunConfig, corpus: Corpus) -> dict[str, float]:
    """Cost of a step of ExLM relative to MLM on the same rows, measured and counted.

    Without chains, which only the first steps have.

    Returns:
        ``cost_ratio``, of the medians; ``cost_ratio_floor``, of the unavoidable floating-point
        operations; ``step_ms`` and ``mlm_step_ms``, medians, of processor time on a CPU.
    """
    config = replace(config, train=replace(config.train, chain_warmup=0.0))
    configs = {"exlm": config, "mlm": replace(config, objective="mlm")}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: Trainer(single, corpus.train, corpus.validation, Path(folder) / name)
            for name, single in configs.items()
        }
        calls = {name: partial(trainer.stepper.step, 0) for name, trainer in trainers.items()}
        device = trainers["mlm"].engine.device
        timings = time_side_by_side(calls, device, ENOUGH_SECONDS)
    ms = {
        name: timing.median_ms if device.type == "cuda" else timing.median_cpu_ms
        for name, timing in timings.items()
    }
    vocab_size, row_length = corpus.train.vocab_size, int(corpus.train.lengths_R.max())
    flops = {
        name: row_flops(single, vocab_size, row_length) for name, single in configs.items()
    }
    return {
        "cost_ratio": ms["exlm"] / ms["mlm"],
        "cost_ratio_floor": flops["exlm"] / flops["mlm"],
        "step_ms": ms["exlm"],
        "mlm_step_ms": ms["mlm"],
    }
