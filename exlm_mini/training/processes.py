"""What a run does differently when it is several processes: everything else need not know.

The trainer asks an engine who it is, to run a forward pass, and to agree with the others. There are
two: ``Engine``, one process with PyTorch alone, and ``ProcessGroup``, the processes that
``torchrun`` started, on one machine or many, each with its device. The latter needs accelerate,
which wraps the model in DDP; data order, random numbers, checkpoints and signals are our own.

All processes must see one run directory: the first writes there, the others read.

Not run on GPUs yet: more than one process, and ``train.sharding fsdp2``. Both are tested with
processes on a CPU, connected by gloo.
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
from torch import Tensor, nn

from exlm_mini.config import TrainConfig, UserError
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
        UserError: for a device that is absent, or not for several processes.
    """
    if launched_rank() is None:
        return Engine(choose_device(train.device))
    return ProcessGroup(train.device)


class Engine:
    """One process, and what several have in common."""

    rank = 0
    """Number of this process, from 0."""
    world_size = 1
    """How many processes there are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scorer: nn.Module | None = None

    @property
    def is_main(self) -> bool:
        """This is the process that talks and writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module, train: TrainConfig, loss: Loss) -> nn.Module:
        """Take over a model, before its optimiser is built.

        Args:
            model: with an ``encoder``, and with the same weights in every process.
            train: for ``compile`` and ``sharding``.
            loss: of ``parts.Objective``.

        Returns:
            The same model on the device; with FSDP2 each parameter is a part of a whole.
        """
        model.to(self.device)
        if train.compile:
            # Layer by layer: the head's shapes change from batch to batch.
            for layer in model.encoder.layers:
                layer.compile()
        self._scorer = self._distribute(_Scorer(model, loss), train)
        return model

    def _distribute(self, scorer: _Scorer, train: TrainConfig) -> nn.Module:
        return scorer

    def score(self, *part: Any) -> Scored:
        """The loss of one micro-batch under the wrapped model, see ``parts.Objective``."""
        return self._scorer(*part)

    def accumulate(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward pass of a micro-batch.

        The gradients of the processes are averaged after the last one of a step.
        """
        return contextlib.nullcontext()

    def clip(self, model: nn.Module, largest: float) -> float:
        """Scale the gradient down to a norm; 0 leaves it alone.

        Returns:
            The norm it had, over all parameters and processes.
        """
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = self.whole(nn.utils.get_total_norm([p.grad for p in parameters]))
        if largest > 0:
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return norm.item()

    def add_up(self, numbers: Tensor) -> Tensor:
        """The sum over the processes of a float64 tensor on the CPU."""
        return numbers

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags are raised in at least one process."""
        return flags

    def same(self, value: Any) -> Any:
        """The first process's value of something small."""
        return value

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Work at which one process may fail: all leave it together, with the same error.

        Raises:
            UserError: of the first process that had one.
        """
        yield

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of which each process holds a part; all must ask."""
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, laid out as another."""
        return tensor

    def has_lost_another(self, error: RuntimeError) -> bool:
        """Whether an error says that another process has ended."""
        return False

    def finish(self) -> None:
        """Let go of the model and of the other processes."""
        self._scorer = None


class ProcessGroup(Engine):
    """One of the processes that torchrun started.

    Args:
        device: ``train.device``; each process takes the GPU of its number on its machine.

    Raises:
        UserError: for one GPU by number, or fewer GPUs than processes; or accelerate is missing.
    """

    def __init__(self, device: str) -> None:
        super().__init__(_device_of_process(device))
        try:
            from accelerate import Accelerator
        except ImportError:
            raise UserError(
                "several processes need accelerate; install it: pip install accelerate"
            ) from None
        is_cpu = self.device.type == "cpu"
        _connect("gloo" if is_cpu else "nccl")
        # Autocast is the updater's.
        self._accelerator = Accelerator(mixed_precision="no", cpu=is_cpu)
        self.rank = self._accelerator.process_index
        self.world_size = self._accelerator.num_processes
        asked = int(os.environ["WORLD_SIZE"])
        if self.world_size != asked:
            raise UserError(
                f"accelerate sees {self.world_size} processes where {asked} were started; use "
                "torchrun, and unset ACCELERATE_* variables"
            )
        self._group = None
        if self.world_size > 1:
            # Small numbers travel by gloo, so that no GPU is waited for.
            self._group = (
                torch.distributed.group.WORLD
                if is_cpu
                else torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
            )

    def _distribute(self, scorer: _Scorer, train: TrainConfig) -> nn.Module:
        self._accelerator.free_memory()  # forget the model before
        if self.world_size > 1 and train.sharding == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            model = scorer.model
            mesh = torch.distributed.init_device_mesh(self.device.type, (self.world_size,))
            for layer in model.encoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(
                model, mesh=mesh
            )  # all that is left; the embedding is also the head's weight
            return scorer
        return self._accelerator.prepare(scorer)

    @contextlib.contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        """See ``Engine.accumulate``."""
        scorer = self._scorer
        if isinstance(scorer, nn.parallel.DistributedDataParallel):
            with contextlib.nullcontext() if is_last else scorer.no_sync():
                yield
            return
        if hasattr(scorer.model, "set_requires_gradient_sync"):  # FSDP2
            scorer.model.set_requires_gradient_sync(is_last)
        yield

    def add_up(self, numbers: Tensor) -> Tensor:
        """See ``Engine.add_up``."""
        if self._group is not None:
            torch.distributed.all_reduce(numbers, group=self._group)
        return numbers

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """See ``Engine.any``."""
        counts = self.add_up(torch.tensor(flags, dtype=torch.float64))
        return tuple(count > 0 for count in counts.tolist())

    def same(self, value: Any) -> Any:
        """See ``Engine.same``."""
        return self._gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See ``Engine.together``."""
        message = None
        try:
            yield
        except UserError as error:
            message = str(error)
        except OSError as error:
            message = str(refused(error))
        for first in self._gather(message):
            if first is not None:
                raise UserError(first)

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self.world_size
        if self._group is not None:
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def whole(self, tensor: Tensor) -> Tensor:
        """See ``Engine.whole``."""
        return tensor.full_tensor() if _is_sharded(tensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """See ``Engine.part``."""
        if not _is_sharded(like) or tensor.shape != like.shape:
            return tensor
        from torch.distributed.tensor import distribute_tensor

        # Every process has the whole, so nothing need be sent.
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )

    def has_lost_another(self, error: RuntimeError) -> bool:
        """See ``Engine.has_lost_another``; gloo gives its errors no type of their own."""
        return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)

    def finish(self) -> None:
        """Let go of the model, then of the other processes.

        In this order: with a DDP module alive a process now and then aborts as it leaves gloo.
        """
        if self._group is not None:
            torch.distributed.barrier(group=self._group)
        super().finish()
        self._accelerator.free_memory()
        gc.collect()
        self._accelerator.end_training()


class _Scorer(nn.Module):
    """What DDP wraps: the call of the model and its loss, as one module."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *part: Any) -> Scored:
        return self.loss(self.model, *part)


def _is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _connect(backend: str) -> None:
    """Meet the other processes where torchrun says, under a name of this start.

    torchrun keeps one store over all restarts. Without a name a process may read there the
    address that another one had before it was killed, and wait for it for ever.
    """
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"start-{start}", store),
        rank=rank,
        world_size=world_size,
        timeout=LONGEST_WAIT if backend == "gloo" else None,
    )


def _device_of_process(name: str) -> torch.device:
    """The device of a launched process: the GPU of its number on its machine, or the CPU."""
    device = choose_device(name)
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise UserError(
            f"train.device {name} is one GPU, and processes take one each; use cuda or auto"
        )
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if num_processes > torch.cuda.device_count():
        raise UserError(
            f"{num_processes} processes on a machine with {torch.cuda.device_count()} GPUs; use "
            f"--nproc-per-node {torch.cuda.device_count()}"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def leave(code: int) -> NoReturn:
    """End this process; a launched one without Python's own end, in which gloo may abort."""
    if launched_rank() is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
