"""Compares a backend with the enumeration of all paths on a few small graphs.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exlm_mini.alignment.api import dag_log_likelihood, viterbi
from exlm_mini.alignment.graphs import Graph

JUDGE = "enumerate"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest relative error of a correct result, by dtype: what log space loses on ``SMALL``."""


def random_graph(
    seed: int,
    num_targets: Sequence[int],
    num_states: Sequence[int],
    density: float = 1.0,
    scale: float = 2.0,
) -> Graph:
    """A float64 graph with random emissions and normalised random transitions.

    Args:
        num_targets, num_states: one number per row; the largest ones give M and L.
        density: share of forward edges that exist.
        scale: standard deviation of the scores before they are normalised.

    Returns:
        The graph. Transitions are -inf wherever u <= v; padding holds finite random numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    B, M, L = len(num_states), max(num_targets), max(num_states)
    num_states_B = torch.tensor(num_states)
    log_emission_BML = scale * torch.randn(B, M, L, generator=rng, dtype=torch.float64)
    scores_BLL = scale * torch.randn(B, L, L, generator=rng, dtype=torch.float64)
    is_edge_BLL = torch.rand(B, L, L, generator=rng, dtype=torch.float64) < density
    is_forward_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    is_state_BL = torch.arange(L) < num_states_B.unsqueeze(1)
    is_inside_BLL = is_state_BL.unsqueeze(1) & is_state_BL.unsqueeze(2)
    log_edge_BLL = scores_BLL.masked_fill(
        ~(is_forward_LL & is_edge_BLL & is_inside_BLL), -torch.inf
    )
    log_total_BL1 = log_edge_BLL.logsumexp(2, keepdim=True).nan_to_num(neginf=0.0)
    return Graph(
        log_emission_BML - 2 * scale,
        torch.where(
            is_inside_BLL,
            log_edge_BLL - log_total_BL1,
            scores_BLL.masked_fill(~is_forward_LL, -torch.inf),
        ),
        torch.tensor(num_targets),
        num_states_B,
    )


SMALL = (
    random_graph(1, [1, 1, 1], [2, 5, 1]),
    random_graph(4, [5, 5], [3, 6]),  # more targets than states: no path
    random_graph(5, [4, 2, 1, 3, 5], [7, 6, 1, 3, 8]),
    random_graph(7, [4, 3], [40, 65]),  # more than two tiles
    random_graph(14, [3, 3, 3, 2], [6, 7, 5, 4], density=0.25),
    random_graph(15, [4, 3], [8, 8], scale=100.0),  # beyond the range of rescaled probabilities
)


def likelihood_and_gradients(
    graph: Graph, backend: str, grad_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log_likelihood_B, and gradients of its weighted sum with respect to both score tensors.

    Args:
        grad_B: the weights, that is the incoming gradient; by default those of ``weights``.
    """
    emission, transition = (t.detach().clone().requires_grad_() for t in graph[:2])
    log_likelihood_B = dag_log_likelihood(emission, transition, *graph[2:], backend)
    grad_B = weights(graph) if grad_B is None else grad_B
    gradients = torch.autograd.grad(log_likelihood_B, (emission, transition), grad_B)
    return log_likelihood_B.detach(), gradients[0], gradients[1]


def weights(graph: Graph) -> Tensor:
    """A different incoming gradient for each of up to nine rows, (B,)."""
    grads = [1.5, -0.5, 0.0, 2.0, -1.0, 0.25, 3.0, -2.5, 1.0]
    return graph.log_emission_BML.new_tensor(grads[: len(graph.num_targets_B)])


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """``max |ours - exact| / max |exact|``, compared in float64; inf where either is not finite.

    Infinities at the same places on both sides agree and are left out.
    """
    ours, exact = ours.detach().double(), exact.detach().double()
    difference = torch.where(ours == exact, 0.0, (ours - exact).abs())
    if not bool(difference.isfinite().all()):
        return float("inf")
    size = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    largest = difference.max().item() if difference.numel() else 0.0
    return largest / size if size > 0 else largest


def largest_error(name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Largest relative error of a backend's likelihoods and gradients on ``SMALL``; inf if one of
    its best paths is not that of the reference."""
    largest = 0.0
    for graph in SMALL:
        exact, there = graph.to(dtype).to(torch.float64), graph.to(dtype, device)
        truth = likelihood_and_gradients(exact, JUDGE)
        ours = likelihood_and_gradients(there, name)
        for mine, true in zip(ours, truth, strict=True):
            largest = max(largest, relative_error(mine.cpu(), true))
        path_BM = viterbi(*there, backend=name)[0].cpu()
        if not torch.equal(path_BM, viterbi(*exact, backend=JUDGE)[0]):
            return float("inf")
    return largest
