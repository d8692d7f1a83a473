"""The backend in rescaled probabilities: by the judge, and which rows are done again.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math

import pytest
import torch
from hard_graphs import (
    GRAPH_FOR_NAN,
    PLACES_OF_NAN,
    assert_float32_is_near,
    flat_graph,
    two_ways,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini import alignment
from exlm_mini.alignment import Backend, dag_log_likelihood, posteriors, scaled, viterbi
from exlm_mini.alignment.cases import (
    CASES,
    Graph,
    all_ones_graph,
    fill_padding,
    judge,
    likelihood_and_gradients,
    random_graph,
    relative_error,
)

DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def backend():
    """The name of the backend, registered for this file."""
    ours = Backend(scaled.log_likelihood, scaled.viterbi)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(alignment.BACKENDS, "scaled", ours)
        yield "scaled"


@pytest.fixture(autouse=True, scope="module")
def nan_in_uninitialised_memory():
    """torch.empty gives NaN, so that a number never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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


# ---- by the judge ----


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_enumeration(name, backend):
    for ours, true in zip(
        likelihood_and_gradients(CASES[name], backend), judge(name)[:3], strict=True
    ):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_near_float64(name, backend, arithmetic):
    assert_float32_is_near(CASES[name], backend, "enumerate", 1e-6)


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_float32_is_near_float64_at_the_size_of_the_paper(scale, backend):
    graph = random_graph(2, [77, 60, 77], [308, 308, 291], scale=scale)
    assert_float32_is_near(graph, backend, "vectorized", 1e-6)
    assert all(is_exact(graph))


@pytest.mark.parametrize("name", CASES)
def test_viterbi_equals_the_judge(name, backend):
    path_BM, log_score_B = viterbi(*CASES[name], backend)
    assert torch.equal(path_BM, judge(name).path_BM)
    torch.testing.assert_close(log_score_B, judge(name).log_score_B, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences(backend):
    graph = random_graph(3, [4, 2, 1], [8, 6, 1], density=0.9)
    is_edge_BLL = graph.log_transition_BLL != -torch.inf

    def likelihood(log_emission_BML: Tensor, scores_BLL: Tensor) -> Tensor:
        log_transition_BLL = torch.where(is_edge_BLL, scores_BLL, -torch.inf)
        return dag_log_likelihood(log_emission_BML, log_transition_BLL, *graph[2:], backend)

    scores_BLL = torch.where(is_edge_BLL, graph.log_transition_BLL, 0.0).requires_grad_()
    emission_BML = graph.log_emission_BML.clone().requires_grad_()
    assert torch.autograd.gradcheck(likelihood, (emission_BML, scores_BLL))


@pytest.mark.parametrize("L", [7, 16, 33])
def test_every_cone_equals_the_vectorized_backend(L, backend):
    num_targets = [1, 2, 3, L // 2, L - 2, L - 1, L, L + 1]
    graph = random_graph(L, num_targets, [L] * 8)
    truth = likelihood_and_gradients(graph, "vectorized")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-11


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_rows_may_go_in_any_company(rows_at_once, backend, monkeypatch):
    graph = random_graph(4, [12, 30, 5, 1, 20], [60, 40, 33, 1, 20])
    expected = likelihood_and_gradients(graph, backend)
    monkeypatch.setattr(scaled, "CACHE_BYTES", rows_at_once * 8 * 60 * 60)
    for ours, same in zip(likelihood_and_gradients(graph, backend), expected, strict=True):
        assert relative_error(ours, same) < 1e-13


# ---- range ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 300.0, 1000.0, 1e5])
@given(seed=st.integers(0, 2**31), M=st.integers(2, 5), L=st.integers(5, 9))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_spread_it_is_near_enumeration(scale, dtype, backend, seed, M, L):
    graph = random_graph(seed, [M, M], [L, L], density=0.8, scale=scale)
    if dtype == torch.float32:
        return assert_float32_is_near(graph, backend, "enumerate", 1e-6)
    truth = likelihood_and_gradients(graph, "enumerate")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
@pytest.mark.parametrize(("unit", "is_lost"), [(5.0, False), (5.3, True), (8.0, True)])
def test_a_path_that_looks_lost_from_both_ends_is_found(
    unit, is_lost, by, dtype, backend, arithmetic
):
    """At 8, each sweep flushes the odd path at its own start and sees only the even one, 190 units
    less likely; the two agree with each other, so comparing them shows nothing. At 5.3 nothing is
    flushed yet, but what is added against it could be seen."""
    graph = two_ways(unit, by).to(dtype)
    assert is_exact(graph) == [not is_lost]
    log_likelihood_B, grad_emission_BML, grad_transition_BLL = likelihood_and_gradients(
        graph, backend, torch.ones(1, dtype=dtype)
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
    max_examples=60,
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
@pytest.mark.parametrize("size", [1e4, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_shift_of_all_scores_changes_no_posterior(sign, size, dtype, backend):
    graph = all_ones_graph([3, 4], [6, 9])
    shifted = graph._replace(
        log_emission_BML=graph.log_emission_BML + sign * size,
        log_transition_BLL=graph.log_transition_BLL - 2 * sign * size,
    ).to(dtype)
    assert is_exact(shifted) == [True, True]
    value_B, *gradients = likelihood_and_gradients(shifted, backend)
    _, *expected = likelihood_and_gradients(graph, "enumerate")
    for ours, true in zip(gradients, expected, strict=True):
        assert relative_error(ours, true) < (1e-7 if dtype == torch.float32 else 1e-13)
    true_B = torch.tensor([3 - 4, 4 - 6]) * sign * size
    torch.testing.assert_close(value_B.double(), true_B.double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [1e4, 1e5])
def test_scores_of_any_size_are_near_enumeration(scale, backend, arithmetic):
    graph = random_graph(15, [4, 3, 5], [8, 8, 9], scale=scale)
    assert not all(is_exact(graph))
    assert_float32_is_near(graph, backend, "enumerate", 1e-6)


def test_emission_spreads_of_30_nats_need_no_second_computation(backend):
    graph = random_graph(5, [77] * 2, [308] * 2)
    rng = torch.Generator().manual_seed(5)
    emission_BML = -30 * torch.rand(2, 77, 308, generator=rng, dtype=torch.float64)
    graph = graph._replace(log_emission_BML=emission_BML)
    assert is_exact(graph.to(torch.float32)) == [True, True]
    assert_float32_is_near(graph, backend, "vectorized", 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "L"), [(3, 5), (64, 256), (256, 1024), (40, 1024)])
def test_flat_graphs_need_no_second_computation(M, L, dtype):
    graph = flat_graph([M], [L]).to(dtype)
    log_likelihood_B, is_exact_B = scaled.rescaled_log_likelihood(*graph)
    assert is_exact_B.tolist() == [True]
    rounding = 1e-6 if dtype == torch.float32 else 1e-11
    assert math.isclose(log_likelihood_B.item(), log_flat_likelihood(M, L), rel_tol=rounding)


def test_posteriors_of_a_flat_graph_are_those_of_the_vectorized_backend(backend):
    graph = flat_graph([48, 40], [192, 180])
    truth = posteriors(*graph, "vectorized")
    for ours, true in zip(posteriors(*graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-10


@pytest.mark.slow
def test_a_flat_graph_of_1024_states_is_that_of_the_vectorized_backend(backend):
    graph = flat_graph([256], [1024])
    truth = likelihood_and_gradients(graph, "vectorized")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ones_graph_counts_its_paths(dtype, backend):
    shapes = [(2, 40), (3, 40), (17, 40), (40, 40), (12, 33), (1, 1)]
    graph = all_ones_graph([m for m, _ in shapes], [num for _, num in shapes]).to(dtype)
    log_count_B = dag_log_likelihood(*graph, backend).double()
    expected = [math.log(math.comb(L - 2, M - 2)) if M > 1 else 0.0 for M, L in shapes]
    torch.testing.assert_close(
        log_count_B, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-5
    )


# ---- what is done again ----


def test_rows_that_are_not_exact_are_done_again_and_no_others(backend, monkeypatch):
    rows, seen = [8.0, 1.0, 6.0], []
    graph = Graph(
        *(torch.cat(t) for t in zip(*(two_ways(u, "edges") for u in rows), strict=True))
    )
    again = scaled.vectorized.log_likelihood

    def watched(*graphs: Tensor) -> Tensor:
        seen.append((graphs[0].dtype, graphs[1][:, 0, 1].tolist()))
        return again(*graphs)

    monkeypatch.setattr(scaled.vectorized, "log_likelihood", watched)
    single = graph.to(torch.float32)
    assert is_exact(single) == [False, True, False]
    assert_float32_is_near(graph, backend, "naive", 1e-6)
    assert seen == [(torch.float64, [-1040.0, -780.0])]
    seen.clear()
    likelihood_and_gradients(CASES["ragged"], backend)
    assert seen == []


@pytest.mark.parametrize("name", CASES)
def test_all_rows_may_be_done_again(name, backend, monkeypatch):
    monkeypatch.setattr(scaled, "TOLERANCE", -1.0)
    assert_float32_is_near(CASES[name], backend, "enumerate", 1e-6)


def test_a_row_without_a_usable_state_is_not_done_again():
    for name in ("impossible_target", "more_targets_than_states", "impossible_last_emission"):
        assert all(is_exact(CASES[name])), name
    assert is_exact(CASES["no_path_through_missing_edges"]) == [False, False, True]


@pytest.mark.parametrize(
    "name", [name for name in CASES if judge(name).log_likelihood_B.isinf().any()]
)
def test_a_row_without_a_path_gets_exactly_no_gradient(name, backend):
    graph = CASES[name].to(torch.float32)
    value_B, *gradients = likelihood_and_gradients(
        graph, backend, torch.full_like(graph.num_targets_B, math.inf, dtype=torch.float32)
    )
    is_lost_B = judge(name).log_likelihood_B.isinf()
    assert torch.equal(value_B == -torch.inf, is_lost_B)
    assert all((g[is_lost_B] == 0).all() for g in gradients)


# ---- what is read and written ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_never_read_and_gets_no_gradient(dtype, backend):
    graph = random_graph(6, [20, 3, 1, 11], [37, 16, 1, 25]).to(dtype)
    expected = likelihood_and_gradients(fill_padding(graph, 0.0), backend)
    for value in (math.nan, math.inf, 1e4):
        padded = fill_padding(graph, value)
        for ours, same in zip(likelihood_and_gradients(padded, backend), expected, strict=True):
            assert torch.equal(ours, same)
    for b in range(4):
        M, L = int(graph.num_targets_B[b]), int(graph.num_states_B[b])
        assert not expected[1][b, M:].any() and not expected[1][b, :, L:].any()
        assert not expected[2][b, L:].any() and not expected[2][b, :, L:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "place"), PLACES_OF_NAN)
def test_nan_gives_nan_in_its_row_only(which, place, dtype, backend):
    graph = GRAPH_FOR_NAN.to(dtype)
    expected = likelihood_and_gradients(graph, backend)
    scores = getattr(graph, which).clone()
    scores[place] = math.nan
    graph = graph._replace(**{which: scores})
    assert is_exact(graph) == [True, True]  # nothing to be found out in log space
    for ours, same in zip(likelihood_and_gradients(graph, backend), expected, strict=True):
        assert ours[0].isnan().any()
        assert torch.equal(ours[1], same[1])


@pytest.mark.parametrize(
    ("which", "place"), [("log_emission_BML", (0, 1, 2)), ("log_transition_BLL", (0, 0, 2))]
)
def test_infinity_is_not_swallowed(which, place, backend):
    graph = random_graph(8, [3, 3], [6, 6])
    getattr(graph, which)[place] = math.inf
    log_likelihood_B = dag_log_likelihood(*graph, backend)
    assert log_likelihood_B.isfinite().tolist() == [False, True]
    assert log_likelihood_B[0] != -torch.inf


def test_a_state_that_cannot_emit_gets_exactly_no_gradient(backend):
    graph = CASES["impossible_state"].to(torch.float32)
    _, *gradients = likelihood_and_gradients(graph, backend)
    for scores, gradient in zip(graph[:2], gradients, strict=True):
        is_impossible = scores == -torch.inf
        assert is_impossible.any() and not gradient[is_impossible].any()


def test_no_rows_give_nothing(backend):
    none = (torch.zeros(0, 3, 5), torch.zeros(0, 5, 5), *torch.zeros(2, 0, dtype=torch.int64))
    assert dag_log_likelihood(*none, backend).shape == (0,)
    assert viterbi(*none, backend)[0].shape == (0, 3)


def test_layout_of_memory_does_not_matter(backend):
    graph = random_graph(10, [6, 4], [19, 12])
    turned = Graph(
        *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in graph[:2]), *graph[2:]
    )
    assert not turned.log_transition_BLL.is_contiguous()
    for ours, same in zip(
        likelihood_and_gradients(turned, backend),
        likelihood_and_gradients(graph, backend),
        strict=True,
    ):
        torch.testing.assert_close(ours, same, rtol=1e-13, atol=1e-13)


def test_scores_are_left_as_they_are(backend):
    graph = random_graph(11, [6, 4], [19, 12])
    before = [t.clone() for t in graph]
    likelihood_and_gradients(graph, backend)
    assert all(torch.equal(now, then) for now, then in zip(graph, before, strict=True))


# ---- as a part of a program ----


def test_compiled_equals_eager():
    graph, spread = random_graph(14, [4, 3], [8, 8]), CASES["huge_spread"]
    assert (all(is_exact(graph)), all(is_exact(spread))) == (True, False)

    def loss(log_emission_BML: Tensor, log_transition_BLL: Tensor) -> Tensor:
        return -scaled.log_likelihood(log_emission_BML, log_transition_BLL * 0.5, *graph[2:])

    compiled_loss = torch.compile(loss, backend="aot_eager")
    for scores in (graph[:2], spread[:2]):
        results = []
        for function in (loss, compiled_loss):
            leaves = [t.clone().requires_grad_() for t in scores]
            value_B = function(*leaves)
            results.append((value_B.detach(), *torch.autograd.grad(value_B.sum(), leaves)))
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_again", [False, True])
def test_a_second_derivative_is_refused(is_again, backend):
    graph = two_ways(7.0, "edges") if is_again else random_graph(12, [3], [5])
    scores = graph.log_emission_BML.clone().requires_grad_()
    total = dag_log_likelihood(scores, *graph[1:], backend).sum()
    with pytest.raises(RuntimeError, match="backend 'naive' or 'enumerate'"):
        torch.autograd.grad(total, scores, create_graph=True)


def test_the_gradient_may_be_asked_for_twice(backend):
    graph = random_graph(13, [3, 4], [5, 7])
    scores = [t.requires_grad_() for t in graph[:2]]
    total = dag_log_likelihood(*scores, *graph[2:], backend).sum()
    first = torch.autograd.grad(total, scores, retain_graph=True)
    second = torch.autograd.grad(2 * total, scores)
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, "two_ways"])
def test_a_gpu_gives_what_the_cpu_gives(name, dtype, backend):
    graph = two_ways(8.0, "edges") if name == "two_ways" else CASES[name]
    expected = likelihood_and_gradients(graph.to(dtype).to(torch.float64), "vectorized")
    for ours, true in zip(
        likelihood_and_gradients(graph.to(dtype, "cuda"), backend), expected, strict=True
    ):
        assert ours.device.type == "cuda"
        assert relative_error(ours.cpu(), true) < (1e-6 if dtype == torch.float32 else 1e-10)
