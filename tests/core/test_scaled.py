"""The backend with rescaled probabilities: its range, and which rows it computes again.

``test_alignment`` compares it with enumeration. Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    FLOAT32,
    GRAPH_FOR_NAN,
    LARGE,
    PLACES_OF_NAN,
    assert_right,
    flat_graph,
    judge,
    shifted,
    two_ways,
    with_score,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, scaled
from exlm_mini.alignment.check import (
    likelihood_and_gradients,
    random_graph,
    relative_error,
)
from exlm_mini.alignment.graphs import Graph


@pytest.fixture(params=["subnormals", "flushed"])
def arithmetic(request):
    """Arithmetic with subnormal numbers, or with subnormals flushed to zero."""
    if not torch.set_flush_denormal(request.param == "flushed"):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def is_exact(graph: Graph) -> list[bool]:
    """Whether each row is exact, so that it need not be computed again."""
    return scaled.rescaled_log_likelihood(*graph)[1].tolist()


# ---- range ----


@pytest.mark.parametrize("graph", [*LARGE.values(), flat_graph([40], [1024])])
def test_sizes_to_train_on_need_no_second_computation(graph):
    for dtype in DTYPES:
        assert all(is_exact(graph.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
@pytest.mark.parametrize(("unit", "is_lost"), [(5.1, False), (5.15, True), (8.0, True)])
def test_a_path_that_might_be_lost_is_looked_for_again(unit, is_lost, by, dtype, arithmetic):
    """At 5.15 nothing is flushed yet, but the lift against underflow is no longer negligible."""
    graph = two_ways(unit, by).to(dtype)
    assert is_exact(graph) == [not is_lost]
    assert_right(graph, "scaled", "naive")


@given(
    seed=st.integers(0, 2**31),
    M=st.integers(2, 8),
    num_more=st.integers(0, 12),
    scale=st.floats(50, 400),
)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_row_called_exact_is_exact(arithmetic, seed, M, num_more, scale):
    """Scores spread by about the limit, so that some rows are called exact and others are not."""
    graph = random_graph(seed, [M] * 6, [M + num_more] * 6, density=0.8, scale=scale)
    scores = [t.requires_grad_() for t in graph[:2]]
    log_likelihood_B, is_exact_B = scaled.rescaled_log_likelihood(*scores, *graph[2:])
    is_found_B = is_exact_B & (log_likelihood_B != -torch.inf)
    truth_B = dag_log_likelihood(*scores, *graph[2:], "vectorized")
    assert relative_error(log_likelihood_B[is_exact_B], truth_B[is_exact_B]) < 1e-12
    ours = torch.autograd.grad(log_likelihood_B[is_found_B].sum(), scores)
    truth = torch.autograd.grad(truth_B[is_found_B].sum(), scores)
    for gradient, true in zip(ours, truth, strict=True):
        assert (gradient - true).abs().max() < 1e-9  # absolute: a posterior is at most 1


# ---- rows that are computed again ----


def test_rows_that_are_not_exact_are_done_again_and_no_others(monkeypatch):
    rows, seen = [8.0, 1.0, 6.0], []
    graph = Graph(
        *(torch.cat(t) for t in zip(*(two_ways(u, "edges") for u in rows), strict=True))
    )
    again = scaled.vectorized.log_likelihood

    def watched(*graphs: Tensor) -> Tensor:
        seen.append((graphs[0].dtype, graphs[1][:, 0, 1].tolist()))
        return again(*graphs)

    monkeypatch.setattr(scaled.vectorized, "log_likelihood", watched)
    single = graph.to(FLOAT32)
    assert is_exact(single) == [False, True, False]
    assert_right(single, "scaled", "naive")
    assert seen == [(torch.float64, [-1040.0, -780.0])]


def test_what_log_space_would_not_change_is_not_done_again():
    """Such rows have no usable state, a NaN, or scores that are large without being spread."""
    for name in ("impossible_target", "more_targets_than_states", "impossible_last_emission"):
        assert judge(name).log_likelihood_B.isinf().any() and all(is_exact(CASES[name])), name
    assert is_exact(CASES["no_path_through_missing_edges"]) == [False, False, True]
    for which, place in PLACES_OF_NAN:
        assert all(is_exact(with_score(GRAPH_FOR_NAN, which, place, torch.nan)))
    assert all(is_exact(shifted(CASES["all_ones"], 1e9, -2e9)))


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_rows_may_go_in_any_company(rows_at_once, monkeypatch):
    graph = random_graph(4, [12, 30, 5, 1, 20], [60, 40, 33, 1, 20])
    expected = likelihood_and_gradients(graph, "scaled")
    monkeypatch.setattr(scaled, "CACHE_BYTES", rows_at_once * 8 * 60 * 60)
    for ours, same in zip(likelihood_and_gradients(graph, "scaled"), expected, strict=True):
        assert relative_error(ours, same) < 1e-13
