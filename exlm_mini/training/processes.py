"""Everything that depends on the number of processes.

The training loop asks an ``Engine`` for its rank, for forward passes, and for agreement with the
other processes. Each engine belongs to one process: the only one, or one of those that ``torchrun``
started on one or more machines, each with its own device and the whole model. PyTorch's DDP
averages their gradients; our code handles data order, random numbers, checkpoints and signals.

All processes must see the same run directory: the first writes there, the others read.

On GPUs, only a single process has been run yet; several are tested on a CPU, connected by gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import refused
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model.answers import Scored
from exlm_mini.training.console import launched_rank, say

LONGEST_WAIT = datetime.timedelta(days=7)
"""Long enough for the first process to prepare a corpus; a dead process is noticed at once."""


class BatchPlan(NamedTuple):
    """Division of a batch: ``size`` = ``num_devices`` x ``per_device`` x ``num_accumulated``."""

    unit: str
    """What is counted: rows or tokens."""
    size: int
    num_devices: int
    per_device: int
    """Rows or tokens in a forward pass of one device."""
    num_accumulated: int
    """Forward passes of each device per optimiser step."""

    @property
    def name(self) -> str:
        """Last word of the settings' names: ``size`` as in train.batch_size, or ``tokens``."""
        return "size" if self.unit == "rows" else "tokens"

    def __str__(self) -> str:
        return (
            f"{self.size:,} {self.unit} = {self.num_devices} device"
            f"{'s' * (self.num_devices > 1)} x {self.per_device:,} {self.unit} x "
            f"{self.num_accumulated} accumulated"
        )


def plan_batch(train: TrainConfig, num_devices: int, option: str = "--devices") -> BatchPlan:
    """Divide a batch among devices; ``option``, which sets their number, is named in errors."""
    unit, name, size, micro = "rows", "size", train.batch_size, train.micro_batch_size
    if train.batch_tokens is not None:
        unit, name = "tokens", "tokens"
        size, micro = train.batch_tokens, train.micro_batch_tokens
    share = num_devices * (micro or 1)
    if size % share:
        of_each = f" x train.micro_batch_{name} {micro:,}" if micro else ""
        most = size // (micro or 1)
        small = [n for n in range(1, math.isqrt(most) + 1) if most % n == 0]
        near = min(small + [most // n for n in small], key=lambda n: abs(n - num_devices))
        each, rest = divmod(size, num_devices)
        fits = f"train.batch_{name} {size + share - size % share:,}"
        if micro and not rest:
            fits = f"train.micro_batch_{name} {_largest_divisor(each, micro):,}"
        raise UserError(
            f"train.batch_{name} {size:,} cannot be spread over {num_devices} devices"
            f"{of_each}: {size % share:,} {unit} are left over; use {option} {near}, or {fits}"
        )
    per_device = micro or size // num_devices
    return BatchPlan(unit, size, num_devices, per_device, size // (num_devices * per_device))


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def check_spread(config: RunConfig, num_processes: int) -> None:
    """Raise ``UserError`` if a batch cannot be spread over the processes, naming the sizes."""
    plan = plan_batch(config.train, num_processes, "--nproc-per-node")
    if num_processes > 1 and plan.unit == "tokens" and config.train.micro_batch_tokens is None:
        raise UserError(
            f"train.batch_tokens {plan.size:,} on {num_processes} processes needs "
            f"train.micro_batch_tokens, such as {plan.per_device:,}: it decides which rows are "
            "grouped together, which must not depend on the number of processes"
        )


def start_engine(train: TrainConfig) -> Engine:
    """Make the engine of this process, and connect it to others that torchrun started."""
    device = choose_device(train.device)
    if launched_rank() is None:
        return Engine(device)
    if device.type == "cuda":
        if device.index is not None:
            raise UserError(
                f"train.device {device} is one GPU, but each process needs its own; use cuda or "
                "auto"
            )
        num_gpus, rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if rank >= num_gpus:
            raise UserError(
                f"there are more processes than GPUs ({num_gpus}); use --nproc-per-node {num_gpus}"
            )
        device = torch.device("cuda", rank)
    return Engine(device, _connect(device))


def with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """The same settings with ``train.precision auto`` resolved for a device."""
    is_half = is_in_bf16(config.train.precision, device)
    return replace(config, train=replace(config.train, precision="bf16" if is_half else "fp32"))


def is_in_bf16(precision: str, device: torch.device) -> bool:
    """Whether the encoder computes in bf16 on a device. ``auto`` does so on GPUs that have
    instructions for it, which are those since Ampere; older ones emulate it slowly."""
    if precision == "auto" and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return precision == "bf16"


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU if there is one.

    Choosing a GPU also turns off attention by cuDNN, in the whole process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"unknown device '{name}'; known: auto, cpu, cuda, cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"the device is {name}, but PyTorch sees {torch.cuda.device_count()} GPUs; use cpu"
        )
    if device.type == "cuda":
        # cuDNN builds a plan for each new shape of a padded batch; other kernels take any shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


class Engine:
    """One training process and its device; there may be other processes.

    ``group`` holds the processes that torchrun started, and exchanges small values between their
    CPUs. It is None if this process is the only one.
    """

    def __init__(
        self, device: torch.device, group: distributed.ProcessGroup | None = None
    ) -> None:
        self.device, self._group = device, group
        self.rank = 0 if group is None else group.rank()
        """Number of this process, from 0."""
        self.world_size = 1 if group is None else group.size()
        """How many processes there are."""
        self._scorer: Any = None

    @property
    def is_main(self) -> bool:
        """True in the process that reports and writes."""
        return self.rank == 0

    def wrap(self, model: Any, train: TrainConfig) -> Any:
        """Move a model to the device, prepare it for ``score``, and return it. It must have an
        ``encoder``, the same weights in every process, and no optimiser yet."""
        model.to(self.device)
        if train.compile:
            # Only the layers, because the head's shapes change from batch to batch.
            for layer in model.encoder.layers:
                layer.compile()
        self._scorer = _Scorer(model)
        if self._group is not None:
            self._scorer = nn.parallel.DistributedDataParallel(self._scorer)
        return model

    def score(self, part: MaskedBatch, chain_share: float) -> Scored:
        """The loss and the counts of one micro-batch, from the model passed to ``wrap``."""
        return self._scorer(part, chain_share)

    def tell(self, line: str) -> None:
        """Print a line for the user, in the first process only."""
        if self.is_main:
            say(line)

    def accumulate(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Context manager for the forward and backward pass of a micro-batch. Only after the last
        micro-batch of a step are gradients averaged over the processes."""
        if self._group is None or is_last:
            return contextlib.nullcontext()
        return self._scorer.no_sync()

    def add_up(self, numbers: Tensor) -> Tensor:
        """The sum over the processes of a float64 tensor on the CPU."""
        if self._group is not None:
            distributed.all_reduce(numbers, group=self._group)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in at least one process."""
        return bool(self.add_up(torch.tensor(flag, dtype=torch.float64)) > 0)

    def same(self, value: Any) -> Any:
        """The value that the first process passed, in all processes."""
        return self._gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context manager for work that may fail in one process. If it does, all processes raise
        the ``UserError`` of the first one that failed."""
        if self._group is None:
            yield
            return
        message = None
        try:
            yield
        except (UserError, OSError) as error:
            message = str(refused(error) if isinstance(error, OSError) else error)
        for first in self._gather(message):
            if first is not None:
                raise UserError(first)

    def _gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        values = [value] * self.world_size
        if self._group is not None:
            distributed.all_gather_object(values, value, group=self._group)
        return values

    def finish(self) -> None:
        """Release the model, then the process group.

        The order matters: with a DDP module alive, a process sometimes aborts when it leaves gloo.
        """
        if self._group is not None:
            distributed.barrier(group=self._group)
            self._scorer = None
            gc.collect()
            distributed.destroy_process_group()


class _Scorer(nn.Module):
    """The model and its loss as one module, for DDP."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, part: MaskedBatch, chain_share: float) -> Scored:
        return self.model.answer(part, chain_share).scored()


def _connect(device: torch.device) -> Any:
    """Connect all processes by gloo, and on GPUs also by NCCL for the gradients.

    They meet in torchrun's store, under a prefix for this start. The store survives restarts, so
    without a prefix a process might read the address of a killed process and wait forever.
    """
    store, rank, world_size = next(distributed.rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_cpu = device.type == "cpu"
    if not is_cpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if is_cpu else "nccl",
        store=distributed.PrefixStore(f"start-{start}", store),
        rank=rank,
        world_size=world_size,
        timeout=LONGEST_WAIT if is_cpu else None,
    )
    if is_cpu:
        return distributed.group.WORLD
    return distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
