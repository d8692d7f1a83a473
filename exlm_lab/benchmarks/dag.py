"""Times forward and backward pass of every alignment backend; measures errors against float64.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from exlm_lab.benchmarks.measure import record, time_side_by_side
from exlm_lab.benchmarks.record import Record, Shape, compared
from exlm_mini.alignment import BACKENDS
from exlm_mini.alignment.check import relative_error
from exlm_mini.alignment.graphs import Graph
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.training.cost import check_bytes

QUANTITIES = ("log_likelihood", "grad_emission", "grad_transition")
ENDS = [0, -1]
"""Rows that are judged: a wrong index among the rows of a batch spares at most one of them."""
LogLikelihood = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

REFERENCE = "vectorized"
TERMS: dict[str, Callable[[Shape], int]] = {
    "enumerate": lambda s: s.B * s.M * (math.comb(s.L - 2, s.M - 2) if s.M > 1 else 1),
    "naive": lambda s: s.B * (s.M - 1) * s.L * (s.L - 1) // 2,
}
"""How many terms the backends for teaching go through one by one in Python, by shape."""
MOST_TERMS = 50_000
RELEASED = Path("fs_plugins/custom_ops/dag_loss.py")
"""File of the released code; its ``torch_dag_loss`` takes states before targets, unlike ours."""
NATS = 8.0
"""By how many nats per step the best path of a sharp graph stands out."""


def made_graph(
    shape: Shape,
    is_sharp: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Graph:
    """A random graph like those of an untrained or a trained model.

    Args:
        shape: size of the graph, with 1 < M <= L or M = L = 1.
        is_sharp: if false, all edges of a state are about equally likely and every emission is
            about e^-9, as in an untrained model with 8192 tokens. If true, one random path stands
            out by ``NATS`` per step, in its emissions and, before the softmax, in its edges.

    Returns:
        The graph. Each row of E but the last sums to one, and an edge needs v < u.
    """
    B, M, L = shape
    rng = torch.Generator().manual_seed(seed)
    log_emission_BML = 0.3 * torch.randn(B, M, L, generator=rng) - 9
    scores_BLL = 0.3 * torch.randn(B, L, L, generator=rng)
    if is_sharp:
        for b in range(B):
            inner = torch.randperm(max(L - 2, 0), generator=rng)[: max(M - 2, 0)].sort().values
            ends = torch.tensor([0, L - 1])
            path_M = torch.cat([ends[:1], inner + 1, ends[1:]])[: min(M, L)]
            log_emission_BML[b, torch.arange(M), path_M] += NATS
            scores_BLL[b, path_M[:-1], path_M[1:]] += NATS
    is_backward_LL = torch.ones(L, L, dtype=torch.bool).tril()
    scores_BLL.masked_fill_(is_backward_LL, -torch.inf)
    log_transition_BLL = scores_BLL.log_softmax(2).masked_fill_(is_backward_LL, -torch.inf)
    return Graph(
        log_emission_BML.to(device, dtype),
        log_transition_BLL.to(device, dtype),
        torch.full((B,), M, device=device),
        torch.full((B,), L, device=device),
    )


def forward_and_backward(function: LogLikelihood, graph: Graph) -> tuple[Tensor, ...]:
    """log_likelihood_B and the gradients of its sum with respect to emission and transition.

    Raises:
        ValueError: if the function does not return (B,).
        RuntimeError: from autograd, if the result does not depend on both scores.
    """
    scores = tuple(t.detach().requires_grad_() for t in graph[:2])
    log_likelihood_B = function(scores[0], scores[1], *graph[2:])
    B = len(graph.num_targets_B)
    if log_likelihood_B.shape != (B,):
        shape = tuple(log_likelihood_B.shape)
        raise ValueError(
            f"it must return one log-likelihood per row, shape ({B},), not {shape}"
        )
    return log_likelihood_B.detach(), *torch.autograd.grad(log_likelihood_B.sum(), scores)


def load_extra_backend(path: Path) -> LogLikelihood:
    """Load ``log_likelihood`` from a file, or ``torch_dag_loss`` from the released code."""
    file, name = path, "log_likelihood"
    if path.is_dir():
        file, name = path / RELEASED, "torch_dag_loss"
    remedy = f"give --extra-backend a Python file that defines {name}"
    with reading(file, remedy, errors=Exception):  # code of others may raise anything
        loader = SourceFileLoader(f"extra_backend_{path.stem}", str(file))
        module = ModuleType(loader.name)
        module.__file__ = str(file)
        sys.modules[loader.name] = module  # dataclasses and torch.library look here
        loader.exec_module(module)
        function = getattr(module, name)
    if not path.is_dir():
        return function
    return lambda emission, transition, targets, states: function(
        emission, transition, states, targets
    )


def judged(graph: Graph) -> tuple[Tensor, ...]:
    """log_likelihood_B and both gradients of the rows ``ENDS``, by ``REFERENCE`` in float64."""
    exact = Graph(*(numbers[ENDS] for numbers in graph.double()))
    return forward_and_backward(BACKENDS[REFERENCE].log_likelihood, exact)


def errors(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float | None]:
    """``relative_error`` of likelihood and gradients in ``ENDS``; None where it is infinite."""
    pairs = zip(QUANTITIES, ours, exact, strict=True)
    off = {name: relative_error(mine[ENDS], theirs) for name, mine, theirs in pairs}
    return {name: error if math.isfinite(error) else None for name, error in off.items()}


def backends(
    extra: Sequence[Path], device: torch.device, note: Callable[[str], None]
) -> dict[str, LogLikelihood]:
    """``log_likelihood`` by backend, for those that work on a device and for those in ``extra``."""
    functions = {}
    for name, backend in BACKENDS.items():
        if reason := backend.why_not(device.type):
            note(f"{name} is left out: {reason.partition(chr(10))[0]}")
        else:
            functions[name] = backend.log_likelihood
    for path in extra:
        if path.stem in functions:
            raise UserError(
                f"--extra-backend {path}: the name '{path.stem}' is taken; rename the file"
            )
        functions[path.stem] = load_extra_backend(path)
    return functions


def dag(
    shape: Shape,
    functions: Mapping[str, LogLikelihood],
    device: torch.device,
    is_sharp: bool,
    note: Callable[[str], None],
) -> Iterator[Record]:
    """Time the forward and backward pass in float32 of each function that can handle the shape.

    ``REFERENCE`` comes first. ``note`` receives a line about each function that was left out.
    """
    B, M, L = shape
    needed = 3 * B * L * (L + M) * 4  # scores, gradients, one step
    check_bytes(f"--shape {shape}", needed, device, "choose a smaller one")
    graph = made_graph(shape, is_sharp, device)
    exact = judged(graph)

    def one(name: str) -> Record:
        if name in TERMS and TERMS[name](shape) > MOST_TERMS:
            raise ValueError(f"it would sum more than {MOST_TERMS:,} terms")
        call = partial(forward_and_backward, functions[name], graph)
        off = errors(call(), exact)
        finite = [error for error in off.values() if error is not None]
        details = {
            "dtype": "float32",
            "transitions": "sharp" if is_sharp else "flat",
            "judge": REFERENCE,
            "errors": off,
            "max_error": max(finite) if len(finite) == len(off) else None,
        }
        timing = time_side_by_side({name: call}, device)[name]
        return record(name, shape, timing, call, device, **details)

    def records() -> Iterator[Record]:
        for name in sorted(functions, key=lambda name: name != REFERENCE):
            try:
                yield one(name)
            except Exception as error:  # the others are still timed
                reason = " ".join(str(error).split()) or type(error).__name__
                note(f"{name} is left out at B,M,L = {shape}: {reason[:300]}")

    yield from compared(records(), REFERENCE)
