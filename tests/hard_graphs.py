"""What the tests of several backends share: the judge's verdicts, and graphs beyond ``CASES``.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, viterbi
from exlm_mini.alignment.cases import (
    CASES,
    JUDGE,
    Graph,
    all_ones_graph,
    likelihood_and_gradients,
    random_graph,
    relative_error,
    without_edges,
)

DTYPES = (torch.float32, torch.float64)


class Verdict(NamedTuple):
    """What the judge says of a graph."""

    log_likelihood_B: Tensor
    grad_emission_BML: Tensor
    grad_transition_BLL: Tensor
    path_BM: Tensor
    log_score_B: Tensor


@lru_cache
def judge(name: str, dtype: torch.dtype = torch.float64) -> Verdict:
    """What enumeration says, in float64, of the case of that name rounded to a dtype."""
    graph = CASES[name].to(dtype).double()
    return Verdict(*likelihood_and_gradients(graph, JUDGE), *viterbi(*graph, backend=JUDGE))


def flat_graph(num_targets: list[int], num_states: list[int]) -> Graph:
    """All forward edges equally likely, all emissions 1: an untrained model."""
    graph = all_ones_graph(num_targets, num_states)
    num_ways_BL1 = (graph.log_transition_BLL == 0).double().sum(2, keepdim=True)
    return graph._replace(
        log_transition_BLL=graph.log_transition_BLL - num_ways_BL1.clamp(min=1).log()
    )


def spread_graph(num_rows: int) -> Graph:
    """Emissions spread over 30 nats, at the size of the paper."""
    graph = random_graph(5, [77] * num_rows, [308] * num_rows)
    rng = torch.Generator().manual_seed(5)
    emission_BML = -30 * torch.rand(num_rows, 77, 308, generator=rng, dtype=torch.float64)
    return graph._replace(log_emission_BML=emission_BML)


def two_ways(unit: float, by: str) -> Graph:
    """Two paths of ten states: odd ones, whose first and last steps cost 130 units, and even
    ones, whose nine steps cost 50 each. ``by`` says where the 130 are paid."""
    M, L = 10, 20
    emission_ML = torch.zeros(M, L, dtype=torch.float64)
    transition_LL = torch.full((L, L), -torch.inf, dtype=torch.float64)
    odd, even = [0, *range(1, 2 * M - 3, 2), L - 1], [0, *range(2, 2 * M - 2, 2), L - 1]
    for path, cost in ((odd, 0.0), (even, 50.0)):
        for v, u in pairwise(path):
            transition_LL[v, u] = -cost * unit
    if by == "edges":
        transition_LL[odd[0], odd[1]] = transition_LL[odd[-2], odd[-1]] = -130 * unit
    else:
        emission_ML[1, odd[1]] = emission_ML[-2, odd[-2]] = -130 * unit
    counts = (torch.tensor([M]), torch.tensor([L]))
    return Graph(emission_ML.unsqueeze(0), transition_LL.unsqueeze(0), *counts)


UNREACHED = (3, 20)
GRAPH_FOR_NAN = without_edges(
    random_graph(7, [9, 9], [40, 40]),
    [(b, v, u) for b in range(2) for u in UNREACHED for v in range(u)],
)
"""No edge enters the states ``UNREACHED``."""
PLACES_OF_NAN = [
    ("log_emission_BML", (0, 0, 0)),
    ("log_emission_BML", (0, 4, 19)),
    ("log_emission_BML", (0, 4, 20)),
    ("log_emission_BML", (0, 8, 39)),
    ("log_transition_BLL", (0, 0, 1)),
    ("log_transition_BLL", (0, 3, 30)),
    ("log_transition_BLL", (0, 4, 30)),
    ("log_transition_BLL", (0, 38, 39)),
]
"""In its first row: what no path reaches is read as well."""


def with_score(graph: Graph, which: str, place: tuple[int, int, int], value: float) -> Graph:
    """The same graph with one score changed."""
    scores = getattr(graph, which).clone()
    scores[place] = value
    return graph._replace(**{which: scores})


def assert_near_float64(graph: Graph, backend: str, truth_by: str, limit: float = 1e-5) -> None:
    """Against float64 on the same inputs: the value to 1e-6 and the gradients to ``limit`` in
    float32, to 1e-12 and 1e-10 in float64."""
    value, *gradients = likelihood_and_gradients(graph, backend)
    true_value, *truth = likelihood_and_gradients(graph.double(), truth_by)
    dtype = graph.log_emission_BML.dtype
    assert value.dtype == gradients[0].dtype == gradients[1].dtype == dtype
    is_single = dtype == torch.float32
    assert relative_error(value, true_value) <= (1e-6 if is_single else 1e-12)
    for ours, true in zip(gradients, truth, strict=True):
        assert relative_error(ours, true) <= (limit if is_single else 1e-10)


def assert_counts_paths(log_likelihood: Callable[[Graph], Tensor], dtype: torch.dtype) -> None:
    """All scores are log 1, so the likelihood is the number of paths: comb(L - 2, M - 2)."""
    shapes = [(2, 40), (3, 40), (17, 40), (40, 40), (12, 33), (1, 1)]
    graph = all_ones_graph([m for m, _ in shapes], [num for _, num in shapes]).to(dtype)
    expected = [math.log(math.comb(L - 2, M - 2)) if M > 1 else 0.0 for M, L in shapes]
    torch.testing.assert_close(
        log_likelihood(graph).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-6,
        atol=1e-5,
    )


def assert_gradcheck(graph: Graph, backend: str) -> None:
    """Both gradients equal finite differences."""
    is_edge_BLL = graph.log_transition_BLL != -torch.inf

    def likelihood(log_emission_BML: Tensor, scores_BLL: Tensor) -> Tensor:
        log_transition_BLL = torch.where(is_edge_BLL, scores_BLL, -torch.inf)
        return dag_log_likelihood(log_emission_BML, log_transition_BLL, *graph[2:], backend)

    scores_BLL = torch.where(is_edge_BLL, graph.log_transition_BLL, 0.0).requires_grad_()
    emission_BML = graph.log_emission_BML.clone().requires_grad_()
    assert likelihood(emission_BML, scores_BLL).isfinite().all()
    assert torch.autograd.gradcheck(likelihood, (emission_BML, scores_BLL))
