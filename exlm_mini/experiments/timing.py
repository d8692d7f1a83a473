"""What a training step of a cell costs beside one of an MLM on the same rows (Table 12).

Both are whole steps of training on the cell's own corpus, batch and optimiser included, taken in
turn in one process. Processor time is what counts on a CPU: it does not see what else the machine
does.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from exlm_mini.config import RunConfig
from exlm_mini.corpora import Corpus
from exlm_mini.corpora.grammars import slots_of
from exlm_mini.estimate import row_flops
from exlm_mini.measure import time_side_by_side
from exlm_mini.trainer import Trainer
from exlm_mini.training import learning_rate

WARM_UP_STEPS = 2
ENOUGH_SECONDS = 8.0
"""For both models together."""


def step_costs(config: RunConfig, corpus: Corpus) -> dict[str, float]:
    """The ratio of costs, measured and counted.

    Args:
        config: of an ExLM; chains are left out, as they are absent from all but the first steps.
        corpus: of its data.

    Returns:
        ``cost_ratio``, of the medians; ``cost_ratio_floor``, of the floating-point operations
        that no implementation can leave out; ``step_ms`` and ``mlm_step_ms``, medians, of
        processor time on a CPU.
    """
    config = replace(config, train=replace(config.train, chain_warmup=0.0))
    configs = {"exlm": config, "mlm": replace(config, objective="mlm")}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: Trainer(
                single, corpus.train, corpus.validation, Path(folder) / name, slots_of(single)
            )
            for name, single in configs.items()
        }
        calls = {
            name: partial(trainer.updater.step, 0, learning_rate(config.train, 0))
            for name, trainer in trainers.items()
        }
        for call in calls.values():
            for _ in range(WARM_UP_STEPS):
                call()
        device = trainers["mlm"].engine.device
        timings = time_side_by_side(calls, device, ENOUGH_SECONDS, is_warm=True)
    ms = {
        name: timing.median_ms if device.type == "cuda" else timing.median_cpu_ms
        for name, timing in timings.items()
    }
    flops = {name: _flops(single, corpus) for name, single in configs.items()}
    return {
        "cost_ratio": ms["exlm"] / ms["mlm"],
        "cost_ratio_floor": flops["exlm"] / flops["mlm"],
        "step_ms": ms["exlm"],
        "mlm_step_ms": ms["mlm"],
    }


def _flops(config: RunConfig, corpus: Corpus) -> float:
    row_length = int(corpus.train.lengths_R.max())
    return row_flops(config, corpus.train.vocab_size, row_length, len(slots_of(config)) or None)
