"""What paths visit, against counting over every path.

Shapes: B rows, M targets, L states, k states of a target.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_lab.experiments.states import Visits, path_visits
from exlm_mini.alignment import posteriors
from exlm_mini.alignment.cases import (
    Graph,
    all_ones_graph,
    fill_padding,
    random_graph,
    without_edges,
)
from exlm_mini.alignment.enumeration import paths


def owners(graph: Graph, k: int) -> Tensor:
    """Each target owns k neighbouring states, the last one all that are left; 0 at padding."""
    L = graph.log_emission_BML.shape[2]
    state_L = torch.arange(L)
    last_B1 = graph.num_targets_B.unsqueeze(1) - 1
    owner_BL = (state_L // k).expand(len(last_B1), L).minimum(last_B1)
    return owner_BL.masked_fill(state_L >= graph.num_states_B.unsqueeze(1), 0)


def visits_of(graph: Graph, owner_BL: Tensor) -> Visits:
    return path_visits(*graph[:2], owner_BL, *graph[2:])


def by_counting(graph: Graph, owner_BL: Tensor) -> Visits:
    """Weigh every path by its probability and look at what it visits."""
    B, M, L = graph.log_emission_BML.shape
    state_BL = torch.zeros(B, L, dtype=torch.float64)
    once_BM, twice_BM = torch.zeros(2, B, M, dtype=torch.float64)
    for b in range(B):
        total = 0.0
        for path in paths(int(graph.num_targets_B[b]), int(graph.num_states_B[b])):
            score = sum(graph.log_emission_BML[b, i, u].item() for i, u in enumerate(path))
            for v, u in itertools.pairwise(path):
                score += graph.log_transition_BLL[b, v, u].item()
            total += (weight := math.exp(score))
            state_BL[b, list(path)] += weight
            count_M = torch.bincount(owner_BL[b, list(path)], minlength=M)
            once_BM[b] += weight * (count_M >= 1).double()
            twice_BM[b] += weight * (count_M >= 2).double()
        if total:
            for visited in (state_BL, once_BM, twice_BM):
                visited[b] /= total
    return Visits(state_BL, once_BM, twice_BM)


GRAPHS = {
    "one state each": (random_graph(0, [4], [4]), 1),
    "two states each": (random_graph(1, [4], [8]), 2),
    "three states each": (random_graph(2, [4], [12]), 3),
    "ragged": (random_graph(3, [2, 4, 3], [6, 12, 7]), 3),
    "few edges": (random_graph(4, [3, 4], [9, 12], density=0.6), 3),
    "steep": (random_graph(5, [5], [10], scale=30.0), 2),
    "one target": (random_graph(6, [1, 3], [1, 6]), 2),
    "more targets than owners use": (random_graph(7, [5], [6]), 2),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_visits_equal_counting_over_paths(name):
    graph, k = GRAPHS[name]
    owner_BL = owners(graph, k)
    found, counted = visits_of(graph, owner_BL), by_counting(graph, owner_BL)
    for found_BX, counted_BX in zip(found, counted, strict=True):
        torch.testing.assert_close(found_BX, counted_BX, rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_a_path_visits_one_state_per_target(k, sizes, seed):
    graph = random_graph(seed, [m for m, _ in sizes], [m + more for m, more in sizes])
    owner_BL = owners(graph, k)
    found = visits_of(graph, owner_BL)
    has_path_B = (graph.num_targets_B > 1) | (graph.num_states_B == 1)
    torch.testing.assert_close(found.state_BL.sum(1), has_path_B * graph.num_targets_B.double())
    state_BL = posteriors(*graph).state_BML.sum(dim=1)
    torch.testing.assert_close(found.state_BL, state_BL, rtol=1e-7, atol=1e-9)
    assert (found.twice_BM <= found.once_BM + 1e-12).all()
    assert (found.once_BM <= 1 + 1e-12).all()


def test_padding_changes_nothing():
    graph, k = GRAPHS["ragged"]
    owner_BL = owners(graph, k)
    for plain, filled in zip(
        visits_of(graph, owner_BL),
        visits_of(fill_padding(graph, math.nan), owner_BL),
        strict=True,
    ):
        assert torch.equal(plain, filled)


def test_a_sparse_graph_visits_every_target_once():
    # Four targets of two states, edges only to later targets, and the first and last state fixed.
    graph = random_graph(0, [4], [8])
    owner_BL = owners(graph, 2)
    inside = [(0, v, v + 1) for v in range(0, 8, 2)]
    found = visits_of(without_edges(graph, inside), owner_BL)
    torch.testing.assert_close(found.once_BM, torch.ones(1, 4, dtype=torch.float64))
    assert found.twice_BM.abs().max() == 0


def test_skipping_and_using_twice_in_closed_form():
    # Between the ends two masks of two states each, two to be visited, all alike: of the 6 pairs
    # one lies in the first mask (and skips the second), one in the second, four in both.
    graph = all_ones_graph([4], [6])
    found = visits_of(graph, torch.tensor([[0, 1, 1, 2, 2, 3]]))
    torch.testing.assert_close(
        found.once_BM[0, 1:3], torch.full((2,), 5 / 6, dtype=torch.float64)
    )
    torch.testing.assert_close(
        found.twice_BM[0, 1:3], torch.full((2,), 1 / 6, dtype=torch.float64)
    )
    torch.testing.assert_close(
        found.state_BL[0, 1:5], torch.full((4,), 1 / 2, dtype=torch.float64)
    )


def test_a_row_without_a_path_visits_nothing():
    graph = random_graph(0, [3, 3], [6, 6])
    graph = without_edges(graph, [(0, v, 5) for v in range(5)])
    owner_BL = owners(graph, 2)
    alone = visits_of(graph.row(1), owner_BL[1:])
    for both, one in zip(visits_of(graph, owner_BL), alone, strict=True):
        assert both[0].abs().max() == 0
        torch.testing.assert_close(both[1:], one)


def test_owners_must_fit_the_graph():
    graph = random_graph(0, [3], [6])
    with pytest.raises(ValueError, match=r"want the owner of \(1, 6\) states, got \(1, 5\)"):
        visits_of(graph, torch.zeros(1, 5, dtype=torch.int64))
