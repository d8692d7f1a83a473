"""The meaning of ``train.precision auto``: bf16 on a GPU that has it, and on a CPU if it is faster.

On CPUs with bf16 instructions products are faster, but the casts around them weigh more the
narrower the layers are. So a layer is timed in both precisions, once per machine. The result is
kept in the cache, and a run stores the precision it was started with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from exlm_mini.alignment.build import cache_dir, machine
from exlm_mini.config import ModelConfig, RunConfig
from exlm_mini.data.files import write_atomically
from exlm_mini.model.encoder import EncoderLayer
from exlm_mini.model.rope import rotation_1d

WIDTHS = (192, 384, 768)
"""Of the timed layers, with a feed-forward width four times as large and heads of 64. A model goes
by the widest that is not wider than itself; narrower models stay in float32."""
LEAST_GAIN = 1.2
"""Smallest speed-up for which bf16 is chosen; a smaller one would vary with the machine's load."""

HOPELESS = 0.4
"""Speed-up on a short row below which bf16 must be emulated; then nothing else is timed, because it
would take minutes."""

_NUM_ROWS, _NUM_TOKENS, _NUM_REPEATS = 8, 128, 7


def with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """The same settings with ``train.precision auto`` resolved for a device."""
    if config.train.precision != "auto":
        return config
    num_threads = config.train.num_threads or torch.get_num_threads()
    narrower = [width for width in WIDTHS if width <= config.model.shape.width]
    if device.type == "cpu":
        is_half = bool(narrower) and cpu_gain(narrower[-1], num_threads) >= LEAST_GAIN
    else:
        is_half = has_bf16(device)
    train = replace(config.train, precision="bf16" if is_half else "fp32")
    return replace(config, train=train)


def has_bf16(gpu: torch.device) -> bool:
    """Whether a GPU has bf16 instructions, as all since Ampere; older ones emulate it slowly."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def cpu_gain(width: int, num_threads: int) -> float:
    """Speed-up of a layer of this width in bf16 over float32 on this CPU."""
    key = (machine(), torch.__version__, num_threads, width)
    file = cache_dir() / f"bf16-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        gain = json.loads(file.read_bytes())
        if isinstance(gain, float):
            return gain
    gain = _measured_gain(width, num_threads)
    with contextlib.suppress(OSError):  # without a cache the next run measures again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(gain).encode())
    return gain


def _measured_gain(width: int, num_threads: int) -> float:
    """Median ratio of the times of forward and backward pass through one layer."""
    model = ModelConfig(width=width, ffn_width=4 * width, num_heads=width // 64)
    before = torch.get_num_threads()
    with torch.random.fork_rng():
        layer = EncoderLayer(model).eval()
        x_BTD = torch.randn(_NUM_ROWS, _NUM_TOKENS, width, requires_grad=True)

    def seconds(x_BTD: Tensor, is_half: bool) -> float:
        rotation = rotation_1d(torch.arange(x_BTD.shape[1]).unsqueeze(0), head_dim=64)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            y_BTD = layer(x_BTD, rotation, None)
        y_BTD.sum().backward()
        return time.perf_counter() - start

    def gain(x_BTD: Tensor, num_repeats: int) -> float:
        ratios = [seconds(x_BTD, False) / seconds(x_BTD, True) for _ in range(num_repeats)]
        return statistics.median(ratios[1:])  # the first is slow

    torch.set_num_threads(num_threads)
    try:
        short = gain(x_BTD[:1, :32], 2)
        return short if short < HOPELESS else gain(x_BTD, _NUM_REPEATS)
    finally:
        torch.set_num_threads(before)
