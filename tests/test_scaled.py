"""The backend in rescaled probabilities: its range, and which rows are done again.

``test_alignment`` holds it against enumeration. Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math

import pytest
import torch
from hard_graphs import (
    DTYPES,
    GRAPH_FOR_NAN,
    PLACES_OF_NAN,
    assert_near_float64,
    flat_graph,
    judge,
    spread_graph,
    two_ways,
    with_score,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, scaled
from exlm_mini.alignment.cases import (
    CASES,
    Graph,
    all_ones_graph,
    likelihood_and_gradients,
    random_graph,
    relative_error,
)

FLOAT32, FLOAT64 = DTYPES


@pytest.fixture(params=["subnormals", "flushed"])
def arithmetic(request):
    """With numbers below the smallest normal one, and without."""
    if not torch.set_flush_denormal(request.param == "flushed"):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def is_exact(graph: Graph) -> list[bool]:
    """Which rows need no second computation."""
    return scaled.rescaled_log_likelihood(*graph)[1].tolist()


def log_flat_likelihood(M: int, L: int) -> float:
    """Of ``flat_graph``: the sum over M - 2 of the inner states of the product of 1 / (their
    distance to the end), a Stirling number of the first kind over a factorial."""
    cycles = [1] + [0] * (M - 1)  # of n elements, by their number
    for n in range(L - 1):
        cycles = [n * cycles[0]] + [cycles[j - 1] + n * cycles[j] for j in range(1, M)]
    return math.log(cycles[M - 1]) - math.lgamma(L - 1) - math.log(L - 1)


# ---- by plainer backends ----


@pytest.mark.parametrize("name", ["very_negative_scores", "huge_spread", "impossible_state"])
def test_float32_is_near_float64_with_and_without_subnormals(name, arithmetic):
    assert_near_float64(CASES[name].to(FLOAT32), "scaled", "enumerate", 1e-6)


@pytest.mark.parametrize("L", [7, 33])
def test_every_cone_equals_the_vectorized_backend(L):
    num_targets = [1, 2, 3, L // 2, L - 2, L - 1, L, L + 1]
    assert_near_float64(random_graph(L, num_targets, [L] * 8), "scaled", "vectorized")


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_rows_may_go_in_any_company(rows_at_once, monkeypatch):
    graph = random_graph(4, [12, 30, 5, 1, 20], [60, 40, 33, 1, 20])
    expected = likelihood_and_gradients(graph, "scaled")
    monkeypatch.setattr(scaled, "CACHE_BYTES", rows_at_once * 8 * 60 * 60)
    for ours, same in zip(likelihood_and_gradients(graph, "scaled"), expected, strict=True):
        assert relative_error(ours, same) < 1e-13


# ---- range ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [30.0, 300.0, 1e5])
@given(seed=st.integers(0, 2**31), M=st.integers(2, 5), L=st.integers(5, 9))
@settings(max_examples=10)
def test_whatever_the_spread_it_is_near_enumeration(scale, dtype, seed, M, L):
    graph = random_graph(seed, [M, M], [L, L], density=0.8, scale=scale)
    assert_near_float64(graph.to(dtype), "scaled", "enumerate", 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
@pytest.mark.parametrize(("unit", "is_lost"), [(5.0, False), (5.3, True), (8.0, True)])
def test_a_path_that_looks_lost_from_both_ends_is_found(unit, is_lost, by, dtype, arithmetic):
    """At 8, each sweep flushes the odd path at its own start and sees only the even one, 190 units
    less likely; the two agree with each other, so comparing them shows nothing. At 5.3 nothing is
    flushed yet, but what is added against it could be seen."""
    graph = two_ways(unit, by).to(dtype)
    assert is_exact(graph) == [not is_lost]
    log_likelihood_B, grad_emission_BML, grad_transition_BLL = likelihood_and_gradients(
        graph, "scaled", torch.ones(1, dtype=dtype)
    )
    assert math.isclose(log_likelihood_B.item(), -260 * unit, rel_tol=1e-6)
    assert math.isclose(grad_emission_BML[0, 4, 7].item(), 1.0, rel_tol=1e-6)
    assert math.isclose(grad_transition_BLL[0, 7, 9].item(), 1.0, rel_tol=1e-6)


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
    """With spreads around the limit, so that the verdict falls both ways."""
    graph = random_graph(seed, [M] * 6, [M + num_more] * 6, density=0.8, scale=scale)
    scores = [t.requires_grad_() for t in graph[:2]]
    log_likelihood_B, is_exact_B = scaled.rescaled_log_likelihood(*scores, *graph[2:])
    is_found_B = is_exact_B & (log_likelihood_B != -torch.inf)
    truth_B = dag_log_likelihood(*scores, *graph[2:], "vectorized")
    assert (
        relative_error(log_likelihood_B[is_exact_B].detach(), truth_B[is_exact_B].detach())
        < 1e-12
    )
    ours = torch.autograd.grad(log_likelihood_B[is_found_B].sum(), scores)
    truth = torch.autograd.grad(truth_B[is_found_B].sum(), scores)
    for gradient, true in zip(ours, truth, strict=True):
        assert (gradient - true).abs().max() < 1e-9  # of a posterior, at most 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e9, -1e4, 1e5, 1e9])
def test_a_shift_of_all_scores_changes_no_posterior(size, dtype):
    graph = all_ones_graph([3, 4], [6, 9])
    shifted = graph._replace(
        log_emission_BML=graph.log_emission_BML + size,
        log_transition_BLL=graph.log_transition_BLL - 2 * size,
    ).to(dtype)
    assert is_exact(shifted) == [True, True]
    value_B, *gradients = likelihood_and_gradients(shifted, "scaled")
    _, *expected = likelihood_and_gradients(graph, "enumerate")
    for ours, true in zip(gradients, expected, strict=True):
        assert relative_error(ours, true) < (1e-7 if dtype == FLOAT32 else 1e-13)
    true_B = torch.tensor([3 - 4, 4 - 6]) * size
    torch.testing.assert_close(value_B.double(), true_B.double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "graph", [spread_graph(2), random_graph(2, [77, 60], [308, 291], scale=3.0)]
)
def test_graphs_of_the_size_of_the_paper_need_no_second_computation(graph):
    assert is_exact(graph.to(FLOAT32)) == [True, True]
    assert_near_float64(graph.to(FLOAT32), "scaled", "vectorized", 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "L"), [(3, 5), (64, 256), (40, 1024)])
def test_flat_graphs_need_no_second_computation(M, L, dtype):
    graph = flat_graph([M], [L]).to(dtype)
    log_likelihood_B, is_exact_B = scaled.rescaled_log_likelihood(*graph)
    assert is_exact_B.tolist() == [True]
    rounding = 1e-6 if dtype == FLOAT32 else 1e-11
    assert math.isclose(log_likelihood_B.item(), log_flat_likelihood(M, L), rel_tol=rounding)


# ---- what is done again ----


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
    assert_near_float64(single, "scaled", "naive", 1e-6)
    assert seen == [(FLOAT64, [-1040.0, -780.0])]
    seen.clear()
    likelihood_and_gradients(CASES["ragged"], "scaled")
    assert seen == []


@pytest.mark.parametrize("name", CASES)
def test_all_rows_may_be_done_again(name, monkeypatch):
    monkeypatch.setattr(scaled, "TOLERANCE", -1.0)
    assert_near_float64(CASES[name].to(FLOAT32), "scaled", "enumerate", 1e-6)


def test_a_row_without_a_usable_state_is_not_done_again():
    for name in ("impossible_target", "more_targets_than_states", "impossible_last_emission"):
        assert judge(name).log_likelihood_B.isinf().any() and all(is_exact(CASES[name])), name
    assert is_exact(CASES["no_path_through_missing_edges"]) == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "place"), PLACES_OF_NAN)
def test_nan_gives_nan_in_its_row_only(which, place, dtype):
    graph = GRAPH_FOR_NAN.to(dtype)
    expected = likelihood_and_gradients(graph, "scaled")
    graph = with_score(graph, which, place, math.nan)
    assert is_exact(graph) == [True, True]  # nothing to be found out in log space
    for ours, same in zip(likelihood_and_gradients(graph, "scaled"), expected, strict=True):
        assert ours[0].isnan().any()
        assert torch.equal(ours[1], same[1])


# ---- as a part of a program ----


def test_compiled_equals_eager():
    """With a row that is done again, where the compiled graph breaks in two."""
    graph = CASES["huge_spread"]
    assert not all(is_exact(graph))

    def loss(log_emission_BML: Tensor, log_transition_BLL: Tensor) -> Tensor:
        return -scaled.log_likelihood(log_emission_BML, log_transition_BLL * 0.5, *graph[2:])

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in graph[:2]]
        value_B = function(*leaves)
        results.append((value_B.detach(), *torch.autograd.grad(value_B.sum(), leaves)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


def test_a_second_derivative_is_refused_of_rows_done_again_too():
    graph = two_ways(7.0, "edges")
    scores = graph.log_emission_BML.clone().requires_grad_()
    total = dag_log_likelihood(scores, *graph[1:], "scaled").sum()
    (gradient,) = torch.autograd.grad(total, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="backend 'naive' or 'enumerate'"):
        torch.autograd.grad(gradient.sum(), scores)


def test_the_gradient_may_be_asked_for_twice():
    graph = random_graph(13, [3, 4], [5, 7])
    scores = [t.requires_grad_() for t in graph[:2]]
    total = dag_log_likelihood(*scores, *graph[2:], "scaled").sum()
    first = torch.autograd.grad(total, scores, retain_graph=True)
    second = torch.autograd.grad(2 * total, scores)
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, "two_ways"])
def test_a_gpu_gives_what_the_cpu_gives(name, dtype):
    graph = two_ways(8.0, "edges") if name == "two_ways" else CASES[name]
    expected = likelihood_and_gradients(graph.to(dtype).to(FLOAT64), "vectorized")
    for ours, true in zip(
        likelihood_and_gradients(graph.to(dtype, "cuda"), "scaled"), expected, strict=True
    ):
        assert ours.device.type == "cuda"
        assert relative_error(ours.cpu(), true) < (1e-6 if dtype == FLOAT32 else 1e-10)
