"""Does an alignment backend compute correctly here? A few small graphs tell.

Shapes: B rows, M targets, L states.

Each is compared with the enumeration of all paths in float64: likelihood, gradients, best path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import BACKENDS, Backend
from exlm_mini.measure import relative_error

JUDGE = "enumerate"
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Relative errors; log space loses digits in float32."""


class Graph(NamedTuple):
    """The arguments of every backend, float32 and on the CPU."""

    log_emission_BML: Tensor
    log_transition_BLL: Tensor
    num_targets_B: Tensor
    num_states_B: Tensor

    def to(self, dtype: torch.dtype, device: torch.device) -> Graph:
        """The same graph in another dtype, on another device."""
        scores = (t.to(device, dtype) for t in self[:2])
        return Graph(*scores, *(t.to(device) for t in self[2:]))


class Check(NamedTuple):
    """A backend on a device, held against enumeration."""

    backend: str
    device: str
    errors: dict[str, float | None]
    """Largest relative error by dtype; none where it raised an exception, or is infinite."""
    is_right: bool | None
    """None if the backend does not work there."""
    reason: str | None
    """Why it does not work, or is not right."""


def made_graphs() -> list[Graph]:
    """Rows of unlike sizes, several tiles, scores far apart, and rows without a path."""
    ragged = _made_graph(0, [4, 2, 1, 3, 5], [7, 6, 1, 3, 8], scale=2.0)
    no_path = _made_graph(1, [3, 3, 5, 3], [5, 5, 4, 5], scale=1.0)
    no_path.log_transition_BLL[0, :, 4] = -torch.inf
    no_path.log_emission_BML[1, 0, 0] = -torch.inf
    tiles = _made_graph(2, [3, 2], [70, 33], scale=1.0)
    spread = _made_graph(3, [4, 8], [8, 8], scale=1000.0)
    return [ragged, no_path, tiles, spread]


def _made_graph(
    seed: int, num_targets: list[int], num_states: list[int], scale: float
) -> Graph:
    """Random scores, nan where nothing may be read."""
    rng = torch.Generator().manual_seed(seed)
    B, M, L = len(num_states), max(num_targets), max(num_states)
    log_emission_BML = scale * torch.randn(B, M, L, generator=rng)
    log_transition_BLL = scale * torch.randn(B, L, L, generator=rng)
    for b, (m, num) in enumerate(zip(num_targets, num_states, strict=True)):
        log_emission_BML[b, m:], log_emission_BML[b, :, num:] = torch.nan, torch.nan
        log_transition_BLL[b, num:], log_transition_BLL[b, :, num:] = torch.nan, torch.nan
    is_forward_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    log_transition_BLL = log_transition_BLL.masked_fill(~is_forward_LL, -torch.inf)
    counts = (torch.tensor(num_targets), torch.tensor(num_states))
    return Graph(log_emission_BML, log_transition_BLL, *counts)


def answers(backend: Backend, graph: Graph) -> list[Tensor]:
    """Likelihood, both gradients of its sum, path and score."""
    scores = [t.clone().requires_grad_() for t in graph[:2]]
    log_likelihood_B = backend.log_likelihood(*scores, *graph[2:])
    finite = log_likelihood_B.masked_fill(log_likelihood_B == -torch.inf, 0.0)
    gradients = torch.autograd.grad(finite.sum(), scores)
    return [log_likelihood_B.detach(), *gradients, *backend.viterbi(*graph)]


def largest_error(backend: Backend, dtype: torch.dtype, device: torch.device) -> float:
    """Over all graphs, relative to enumeration in float64; inf where the best path differs."""
    largest = 0.0
    for graph in made_graphs():
        truth = answers(BACKENDS[JUDGE], graph.to(torch.float64, torch.device("cpu")))
        ours = [t.cpu() for t in answers(backend, graph.to(dtype, device))]
        if not torch.equal(ours[3], truth[3]):
            return float("inf")
        largest = max(largest, *map(relative_error, ours, truth))
    return largest


def check(name: str, device: torch.device, reason: str | None) -> Check:
    """Hold a backend against enumeration.

    Args:
        name: in ``BACKENDS``.
        device: to compute on.
        reason: why the backend does not work there, if it does not.
    """
    if reason is not None:
        return Check(name, str(device), {}, None, reason)
    errors: dict[str, float | None] = {}
    for dtype, tolerance in TOLERANCES.items():
        key = short(dtype)
        try:
            error = largest_error(BACKENDS[name], dtype, device)
        except Exception as raised:  # whatever it is, the report must go on
            errors[key] = None
            reason = reason or f"{type(raised).__name__}: {raised}"
            continue
        errors[key] = error if error < float("inf") else None
        if error > tolerance:
            reason = reason or f"{key} differs from enumeration by {error:.1e}"
    return Check(name, str(device), errors, reason is None, reason)


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
