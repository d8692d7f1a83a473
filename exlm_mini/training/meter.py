"""Machine figures in ``metrics.jsonl``, and copies of its lines for TensorBoard and W&B."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from exlm_mini.config import RunConfig
from exlm_mini.training.cost import row_flops


class Peak(NamedTuple):
    """Peak speed of a GPU by its data sheet, in 10¹² operations per second, dense."""

    half: float
    """bf16 or fp16 products with sums in fp32."""
    tf32: float
    fp32: float
    """Without tensor cores."""


_A100 = Peak(312, 156, 19.5)  # A100 datasheet, for all four
_H100 = Peak(989.5, 494.5, 67)  # H100 datasheet: 1,979 and 989 with sparsity, which doubles
_NVL = Peak(835.5, 417.5, 60)  # H100 datasheet: 1,671 and 835 with sparsity
PEAKS = {
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "H100 80GB HBM3": _H100,
    "H100 PCIe": Peak(756.5, 378, 51),  # H100 datasheet of 2022: 1,513 and 756 with sparsity
    "H100 NVL": _NVL,
    "H200": _H100,  # H200 datasheet: the same numbers
    "H200 NVL": _NVL,  # H200 datasheet
    "L4": Peak(121, 60, 30.3),  # L4 datasheet: 242 and 120 with sparsity
    "L40S": Peak(362.05, 183, 91.6),  # L40S datasheet
    "A10": Peak(125, 62.5, 31.2),  # A10 datasheet
    "GeForce RTX 3090": Peak(71, 35.6, 35.6),  # GA102 whitepaper, appendix A
    "GeForce RTX 4090": Peak(165.2, 82.6, 82.6),  # Ada whitepaper, appendix A
}
"""By the full name that PyTorch gives a GPU, without the maker; a slice of a GPU or a laptop
version has another name, and no entry."""


def peak_flops(name: str, precision: str, is_tf32: bool = False) -> float | None:
    """Peak floating-point operations per second of a device; None if it is not in ``PEAKS``.

    Args:
        name: ``torch.cuda.get_device_name()``, or any other for a device that is no GPU.
        precision: of the run: ``fp32``, ``bf16`` or ``fp16``.
        is_tf32: products of fp32 run as TF32.
    """
    peak = PEAKS.get(name.removeprefix("NVIDIA "))
    if peak is None:
        return None
    tera = (peak.tf32 if is_tf32 else peak.fp32) if precision == "fp32" else peak.half
    return 1e12 * tera


def mean_flops_per_token(config: RunConfig, vocab_size: int, lengths_R: np.ndarray) -> float:
    """Training operations per input token, forward and backward, averaged over one epoch.

    Longer rows cost more per token, so ``cost.row_flops`` is averaged over the lengths. Expanded
    states, copies and heads are counted; padding and recomputation are not. Arguments as for
    ``cost.estimate``, with the lengths of all rows.
    """
    lengths, counts = np.unique(lengths_R, return_counts=True)
    flops = np.array([row_flops(config, vocab_size, int(length)) for length in lengths])
    return float(counts @ flops / (counts @ lengths))


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process since its start, in MiB.

    On a GPU the memory that PyTorch allocated, on a CPU the resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # getrusage would also count the program that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


class Meter:
    """How well a run with a definite precision uses its ``num_devices`` equal devices."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        lengths_R: np.ndarray,
        device: torch.device,
        num_devices: int = 1,
    ) -> None:
        self.device = device
        self.flops_per_token = mean_flops_per_token(config, vocab_size, lengths_R)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
        peak = peak_flops(name, config.train.precision, is_tf32)
        self.peak_flops = None if peak is None else num_devices * peak
        """Of all devices together; None if unknown."""

    def read(self, tokens_per_second: float) -> dict[str, float]:
        """Machine figures for a line of metrics, at a speed in input tokens over all devices.

        ``model_flops_per_second`` of all devices; ``model_flops_utilisation``, its share of their
        peak, if known; ``peak_memory_mib`` of this process.
        """
        speed = self.flops_per_token * tokens_per_second
        numbers = {"model_flops_per_second": speed}
        if self.peak_flops is not None:
            numbers["model_flops_utilisation"] = speed / self.peak_flops
        return numbers | {"peak_memory_mib": peak_memory_mib(self.device)}


class ScalarLog:
    """Writes metrics as scalars for TensorBoard, under their names in ``metrics.jsonl``.

    A run that resumes from ``step`` adds a file to the folder, which hides later steps of earlier
    files.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict) -> None:
        """Add the numbers of a line and flush them."""
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record["step"])
        # A killed run must not lose lines from before its last checkpoint.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbLog:
    """Sends metrics to Weights & Biases, whose own variables say where: ``WANDB_PROJECT``,
    ``WANDB_MODE`` and others. Each start of a run is a W&B run of the group ``name``."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(name=name, group=name, config=settings)

    def write(self, record: dict) -> None:
        """Send the numbers of a line."""
        numbers = {name: value for name, value in record.items() if value is not None}
        self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


def copies_of(output: Path, config: RunConfig, step: int) -> list[ScalarLog | WandbLog]:
    """The logs that get copies of a run's lines, from ``step`` on."""
    copies: list[ScalarLog | WandbLog] = []
    if config.train.tensorboard:
        copies.append(ScalarLog(output / "tensorboard", step))
    if os.environ.get("WANDB_PROJECT") and find_spec("wandb"):
        copies.append(WandbLog(output.name, asdict(config)))
    return copies
