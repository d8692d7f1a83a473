"""Counted paths: closed form, enumeration, and plain integers where both end.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    CASES,
    Graph,
    all_ones_graph,
    fill_padding,
    random_graph,
    without_edges,
    without_emissions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_mini.alignment.counting import path_count
from exlm_mini.alignment.enumeration import path_score, paths
from exlm_mini.alignment.vectorized import log_likelihood


def by_enumeration(graph: Graph) -> list[int]:
    """Enumerated paths that do not score -inf."""
    sizes = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
    return [
        sum(
            path_score(graph[0][b], graph[1][b], path).item() != -math.inf
            for path in paths(M, L)
        )
        for b, (M, L) in enumerate(sizes)
    ]


def by_integers(graph: Graph) -> int:
    """Appendix H for the first row, which fills the tensors, in Python's integers."""
    is_emission_ML = (graph.log_emission_BML[0] != -torch.inf).tolist()
    is_edge_LL = (graph.log_transition_BLL[0] != -torch.inf).tolist()
    states = range(len(is_edge_LL))
    count = [int(u == 0 and is_emission_ML[0][0]) for u in states]
    for is_emission_L in is_emission_ML[1:]:
        count = [
            sum(count[v] for v in range(u) if is_edge_LL[v][u]) if is_emission_L[u] else 0
            for u in states
        ]
    return count[-1]


@pytest.mark.parametrize("name", CASES)
def test_count_equals_enumeration(name):
    assert path_count(*CASES[name]) == by_enumeration(CASES[name])


@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=3),
    density=st.sampled_from([0.3, 0.6, 1.0]),
)
@settings(max_examples=40)
def test_count_equals_enumeration_on_any_graph(seed, sizes, density):
    graph = random_graph(seed, *zip(*sizes, strict=True), density=density)
    is_out_BML = graph.log_emission_BML > -2.5  # about a quarter
    graph = graph._replace(log_emission_BML=graph[0].masked_fill(is_out_BML, -torch.inf))
    assert path_count(*graph) == by_enumeration(graph)


@pytest.mark.parametrize(
    ("M", "L"),
    [(1, 1), (2, 2), (2, 90), (3, 90), (20, 80), (45, 90), (89, 90), (90, 90), (77, 308)],
)
def test_all_states_linked_leave_a_binomial_number_of_paths(M, L):
    expected = math.comb(L - 2, M - 2) if M > 1 else 1
    assert path_count(*all_ones_graph([M], [L])) == [expected]


def test_a_count_may_be_larger_than_any_float():
    expected = math.comb(1048, 523)
    with pytest.raises(OverflowError):
        float(expected)
    assert path_count(*all_ones_graph([525], [1050])) == [expected]


def test_no_path_counts_zero():
    assert path_count(*all_ones_graph([1, 5, 2], [2, 4, 1])) == [0, 0, 0]
    graph = all_ones_graph([4], [9])
    assert path_count(*without_emissions(graph, [(0, 0, 0)])) == [0]
    assert path_count(*without_emissions(graph, [(0, 3, 8)])) == [0]
    assert path_count(*without_edges(graph, [(0, v, 8) for v in range(8)])) == [0]


@pytest.mark.parametrize("density", [0.4, 0.6, 0.9])
def test_large_sparse_graphs_equal_plain_integers(density):
    graph = random_graph(2, [40], [200], density=density)
    is_out_BML = graph.log_emission_BML > -1.5  # about a tenth
    graph = graph._replace(log_emission_BML=graph[0].masked_fill(is_out_BML, -torch.inf))
    expected = by_integers(graph)
    assert expected > 2**64
    assert path_count(*graph) == [expected]


def test_likelihood_of_all_ones_is_the_logarithm_of_the_count():
    graph = all_ones_graph([30, 50, 9], [100, 100, 40])
    log_count = [math.log(count) for count in path_count(*graph)]
    assert log_likelihood(*graph).tolist() == pytest.approx(log_count, rel=1e-12)


@pytest.mark.parametrize("name", ["ragged", "sparse", "no_path_through_missing_edges"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.0])
def test_padding_changes_nothing(name, value):
    assert path_count(*fill_padding(CASES[name], value)) == path_count(*CASES[name])


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e300, 0.0])
def test_every_score_but_minus_infinity_counts(value):
    graph = all_ones_graph([4], [9])
    filled = Graph(*(torch.where(t == 0, value, t) for t in graph[:2]), *graph[2:])
    assert path_count(*filled) == [math.comb(7, 2)]


def test_scores_too_small_to_multiply_still_count():
    graph = CASES["very_negative_scores"]
    assert path_count(*graph) == by_enumeration(CASES["ragged"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_does_not_matter(dtype):
    assert path_count(*CASES["sparse"].to(dtype)) == by_enumeration(CASES["sparse"])


def test_arguments_that_do_not_fit_are_named():
    graph = CASES["ragged"]
    with pytest.raises(ValueError, match="float32"):
        path_count(graph[0].float(), *graph[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_as_exactly():
    graph = all_ones_graph([77, 525], [308, 1050]).to(device="cuda")
    assert path_count(*graph) == [math.comb(306, 75), math.comb(1048, 523)]
