"""Graphs beyond the table of ``exlm_mini.alignment.cases``, for the tests of several backends."""

from __future__ import annotations

from itertools import pairwise

import torch

from exlm_mini.alignment.cases import (
    Graph,
    all_ones_graph,
    likelihood_and_gradients,
    random_graph,
    relative_error,
    without_edges,
)


def flat_graph(num_targets: list[int], num_states: list[int]) -> Graph:
    """All forward edges equally likely, all emissions 1: an untrained model."""
    graph = all_ones_graph(num_targets, num_states)
    num_ways_BL1 = (graph.log_transition_BLL == 0).double().sum(2, keepdim=True)
    return graph._replace(
        log_transition_BLL=graph.log_transition_BLL - num_ways_BL1.clamp(min=1).log()
    )


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


def assert_float32_is_near(
    graph: Graph, backend: str, truth_by: str, limit: float | None = None
) -> None:
    """Against float64 on the same float32 inputs: the loss to 1e-6, its gradients to ``limit``,
    by default 1e-5 up to M = 77 and 1e-4 above."""
    single = graph.to(torch.float32)
    value, *gradients = likelihood_and_gradients(single, backend)
    true_value, *truth = likelihood_and_gradients(single.to(torch.float64), truth_by)
    assert value.dtype == gradients[0].dtype == gradients[1].dtype == torch.float32
    assert relative_error(value, true_value) <= 1e-6
    limit = limit or (1e-5 if graph.log_emission_BML.shape[1] <= 77 else 1e-4)
    for ours, true in zip(gradients, truth, strict=True):
        assert relative_error(ours, true) <= limit
