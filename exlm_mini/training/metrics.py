"""``metrics.jsonl``, a JSON object per line in the order of steps, and copies of its lines for
TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import read_bytes, write_atomically


class MetricsLog:
    """The ``metrics.jsonl`` of a run: append-only, and every line is written at once."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the log and drop the lines after ``step``, which the run will write again."""
        kept = []
        if path.exists():
            kept = [record for record in read_metrics(path) if record["step"] <= step]
            text = "".join(map(_line, kept)).encode()
            if text != path.read_bytes():
                write_atomically(path, text)
        self.last = kept[-1] if kept else None
        """The last line that was kept; None for a new run."""
        # Unbuffered, so that a line has left the process when ``write`` returns.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; nan and infinities become null, because JSON lacks them."""
        data, end = _line(record).encode(), os.fstat(self._descriptor).st_size
        try:
            # On a nearly full disk a write may be partial.
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict]:
    """The records of a ``metrics.jsonl``, even while a run is writing it; a last line that is cut
    short is left out."""
    records = []
    *lines, _ = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UserError(
                f"{path} line {number} is damaged; restore the file from a copy, or delete that "
                "line"
            ) from None
    return records


def _line(record: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class ScalarLog:
    """Writes metrics as scalars for TensorBoard, under their names in ``metrics.jsonl``.

    A run that resumes from ``step`` adds a file to the folder; it makes TensorBoard hide later
    steps in earlier files.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        self.close = self._writer.close

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of a line of ``metrics.jsonl`` and flush them."""
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record["step"])
        # A killed run must not lose lines from before its last checkpoint.
        self._writer.flush()


class WandbLog:
    """Sends metrics to Weights & Biases, which is set up by its own environment variables, such as
    ``WANDB_PROJECT`` and ``WANDB_MODE``. Each start of a run is a W&B run of the group ``name``."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(name=name, group=name, config=settings)
        self.close = self._run.finish

    def write(self, record: dict[str, Any]) -> None:
        """Send the numbers of a line of ``metrics.jsonl``."""
        numbers = {name: value for name, value in record.items() if value is not None}
        self._run.log(numbers, step=record["step"])


def copies_of(output: Path, config: RunConfig, step: int) -> list[ScalarLog | WandbLog]:
    """The logs that also get a run's lines of ``metrics.jsonl``, from ``step`` on."""
    copies: list[ScalarLog | WandbLog] = []
    if config.train.tensorboard:
        copies.append(ScalarLog(output / "tensorboard", step))
    # W&B leaves a folder ``wandb`` in the working directory, which is a package without origin.
    installed = find_spec("wandb")
    if os.environ.get("WANDB_PROJECT") and installed and installed.origin:
        copies.append(WandbLog(output.name, asdict(config)))
    return copies


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process since its start, in MiB: on a GPU what PyTorch allocated, on a
    CPU what was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # getrusage would also count the program that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
