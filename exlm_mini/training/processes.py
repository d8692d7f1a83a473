"""What a run does differently when it is several processes; the rest of the code is the same.

The loop asks an engine who it is, to run a forward pass, and to agree with the others. An engine is
one process, or one of those that ``torchrun`` started, on one machine or many, each with its device
and the whole model; PyTorch's DDP averages their gradients. Data order, random numbers, checkpoints
and signals are our own.

All processes must see one run directory: the first writes there, the others read.

More than one process has not run on GPUs yet; it is tested on a CPU, connected by gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn

from exlm_mini.config import TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import refused
from exlm_mini.training.parts import Scored, choose_device

Loss = Callable[..., Scored]
LONGEST_WAIT = datetime.timedelta(days=7)
"""For the first process, which may prepare a corpus; one that died is noticed at once."""


def launched_rank() -> int | None:
    """Number of this process among those that a launcher such as torchrun started, from 0."""
    is_launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return int(os.environ["RANK"]) if is_launched else None


def start_engine(train: TrainConfig) -> Engine:
    """The engine for the way in which this process was started.

    Raises:
        UserError: for a device that is absent; of several processes for one GPU by number, or
            fewer GPUs than processes.
    """
    device = choose_device(train.device)
    if launched_rank() is None:
        return Engine(device)
    if device.type == "cuda":
        if device.index is not None:
            raise UserError(
                f"train.device {device} is one GPU, and processes take one each; use cuda or auto"
            )
        num_gpus, rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if rank >= num_gpus:
            raise UserError(
                f"there are {num_gpus} GPUs and more processes; use --nproc-per-node {num_gpus}"
            )
        device = torch.device("cuda", rank)
    return Engine(device, _connect(device))


class Engine:
    """One process on its device, which may have others beside it.

    ``group`` are the processes that torchrun started, in which small numbers travel between CPUs;
    none: this process is the only one.
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
        """This is the process that talks and writes."""
        return self.rank == 0

    def wrap(self, model: Any, train: TrainConfig, loss: Loss) -> Any:
        """Take over a model with an ``encoder`` and with the same weights in every process, before
        its optimiser is built; the same model on the device."""
        model.to(self.device)
        if train.compile:
            # Layer by layer: the head's shapes change from batch to batch.
            for layer in model.encoder.layers:
                layer.compile()
        self._scorer = _Scorer(model, loss)
        if self._group is not None:
            self._scorer = nn.parallel.DistributedDataParallel(self._scorer)
        return model

    def score(self, *part: Any) -> Scored:
        """The loss of one micro-batch under the wrapped model, see ``parts.Objective``."""
        return self._scorer(*part)

    def accumulate(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward pass of a micro-batch: the gradients of the processes are
        averaged after the last one of a step."""
        if self._group is None or is_last:
            return contextlib.nullcontext()
        return self._scorer.no_sync()

    def clip(self, model: nn.Module, largest: float) -> float:
        """Scale the gradient down to a norm, 0 leaves it alone; the norm it had."""
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if largest > 0:
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return norm.item()

    def add_up(self, numbers: Tensor) -> Tensor:
        """The sum over the processes of a float64 tensor on the CPU."""
        if self._group is not None:
            distributed.all_reduce(numbers, group=self._group)
        return numbers

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags are raised in at least one process."""
        counts = self.add_up(torch.tensor(flags, dtype=torch.float64))
        return tuple(count > 0 for count in counts.tolist())

    def same(self, value: Any) -> Any:
        """The first process's value of something small."""
        return self._gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Work at which one process may fail: all leave it together, with the ``UserError`` of the
        first that had one."""
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
        """The value of each process."""
        values = [value] * self.world_size
        if self._group is not None:
            distributed.all_gather_object(values, value, group=self._group)
        return values

    def has_lost_another(self, error: RuntimeError) -> bool:
        """Whether an error says that another process has ended."""
        # Gloo gives its errors no type of their own.
        is_of_them = isinstance(error, distributed.DistError) or "gloo" in str(error)
        return self._group is not None and is_of_them

    def finish(self) -> None:
        """Let go of the model, then of the other processes.

        In this order: with a DDP module alive a process now and then aborts as it leaves gloo.
        """
        if self._group is not None:
            distributed.barrier(group=self._group)
            self._scorer = None
            gc.collect()
            distributed.destroy_process_group()


class _Scorer(nn.Module):
    """What DDP wraps: the call of the model and its loss, as one module."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *part: Any) -> Scored:
        return self.loss(self.model, *part)


def _connect(device: torch.device) -> Any:
    """All processes, connected by gloo; on GPUs NCCL connects them besides, for gradients.

    They meet where torchrun says, under a name of this start: torchrun keeps one store over all
    restarts, and without a name a process may read there the address that another one had before
    it was killed, and wait for it for ever.
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


def leave(code: int) -> NoReturn:
    """End this process; a launched one without Python's own end, in which gloo may abort."""
    if launched_rank() is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
