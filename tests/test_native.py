"""The compiled backend on a CPU: by the judge, in range, as an operator.

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

from exlm_mini.alignment import dag_log_likelihood, native, posteriors, viterbi
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

TILED, LOG_SPACE, NO_PATH, NAN = range(4)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def backend() -> str:
    """The name of the backend; skips where it cannot be built."""
    if reason := native.why_not("cpu"):
        pytest.skip(f"no C++ backend here: {reason}")
    return "native"


def status(graph: Graph) -> list[int]:
    """How each row was computed."""
    return torch.ops.exlm_mini.dag_log_likelihood(*graph)[3][:, 0].tolist()


# ---- by the judge ----


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_enumeration(name, backend):
    for ours, true in zip(
        likelihood_and_gradients(CASES[name], backend), judge(name)[:3], strict=True
    ):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_near_float64(name, backend):
    assert_float32_is_near(CASES[name], backend, "enumerate")


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_float32_is_near_float64_at_the_size_of_the_paper(scale, backend):
    graph = random_graph(2, [77, 60, 77], [308, 308, 291], scale=scale)
    assert_float32_is_near(graph, backend, "vectorized")
    assert status(graph.to(torch.float32)) == [TILED] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_viterbi_equals_the_judge(name, dtype, backend):
    graph = CASES[name].to(dtype)
    path_BM, log_score_B = viterbi(*graph, backend)
    expected_BM, expected_B = viterbi(*graph.to(torch.float64), "enumerate")
    assert torch.equal(path_BM, expected_BM)
    assert log_score_B.dtype == dtype
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(log_score_B.double(), expected_B, rtol=rounding, atol=rounding)


def test_gradients_equal_finite_differences(backend):
    graph = random_graph(3, [9, 2, 1], [20, 18, 1], density=0.9)
    is_edge_BLL = graph.log_transition_BLL != -torch.inf

    def likelihood(log_emission_BML: Tensor, scores_BLL: Tensor) -> Tensor:
        log_transition_BLL = torch.where(is_edge_BLL, scores_BLL, -torch.inf)
        return dag_log_likelihood(log_emission_BML, log_transition_BLL, *graph[2:], backend)

    scores_BLL = torch.where(is_edge_BLL, graph.log_transition_BLL, 0.0).requires_grad_()
    emission_BML = graph.log_emission_BML.clone().requires_grad_()
    assert torch.autograd.gradcheck(likelihood, (emission_BML, scores_BLL))


# Tiles hold 16 float32 or 8 float64 states: every remainder, and cones of every width.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_every_cone_and_remainder_equals_the_vectorized_backend(L, dtype, backend):
    num_targets = [2, 3, L // 2, L - 9, L - 8, L - 2, L - 1, L]
    graph = random_graph(L, [max(1, m) for m in num_targets], [L] * 8).to(dtype)
    truth = likelihood_and_gradients(graph.to(torch.float64), "vectorized")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < (3e-6 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ones_graph_counts_its_paths(dtype, backend):
    shapes = [(2, 40), (3, 40), (17, 40), (40, 40), (12, 33), (1, 1)]
    graph = all_ones_graph([m for m, _ in shapes], [num for _, num in shapes]).to(dtype)
    log_count_B = dag_log_likelihood(*graph, backend).double()
    expected = [math.log(math.comb(L - 2, M - 2)) if M > 1 else 0.0 for M, L in shapes]
    torch.testing.assert_close(
        log_count_B, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-5
    )


# ---- range ----


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 300.0, 1000.0, 1e5])
@given(seed=st.integers(0, 2**31), M=st.integers(2, 5), L=st.integers(5, 9))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_float32_is_near_float64_whatever_the_spread(scale, backend, seed, M, L):
    graph = random_graph(seed, [M, M], [L, L], density=0.8, scale=scale)
    assert_float32_is_near(graph, backend, "enumerate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
def test_a_path_that_looks_lost_from_both_ends_is_found(by, dtype, backend):
    """Each sweep flushes the odd path at its own start and sees only the even one, 190 units
    less likely; the two sweeps agree with each other, so comparing them would show nothing."""
    unit = 1.0 if dtype == torch.float32 else 8.0  # e^-130 and e^-1040 are flushed
    graph = two_ways(unit, by).to(dtype)
    log_likelihood_B, grad_emission_BML, _ = likelihood_and_gradients(
        graph, backend, torch.ones(1, dtype=dtype)
    )
    assert math.isclose(log_likelihood_B.item(), -260 * unit, rel_tol=1e-6)
    assert math.isclose(grad_emission_BML[0, 4, 7].item(), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e5, 1e7, 1e9])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_beyond_all_exponents_go_to_log_space(sign, size, dtype, backend):
    graph = all_ones_graph([3, 3], [6, 6])
    graph.log_emission_BML[0] += sign * size
    graph.log_transition_BLL[1] += sign * size
    graph = graph.to(dtype)
    assert status(graph) == [LOG_SPACE, LOG_SPACE]
    truth = likelihood_and_gradients(graph.to(torch.float64), "enumerate")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-6


def test_flat_long_graphs_stay_on_the_fast_path(backend):
    graph = flat_graph([256, 200], [1024, 1000])
    assert status(graph.to(torch.float32)) == [TILED, TILED]
    assert_float32_is_near(graph, backend, backend)
    state_BML, edge_BLL = posteriors(*graph.to(torch.float32), backend)
    is_target_BM = torch.arange(256) < graph.num_targets_B.unsqueeze(1)
    assert (state_BML.sum(2) - is_target_BM.float()).abs().max() < 1e-5
    assert (edge_BLL.sum((1, 2)) - (graph.num_targets_B - 1)).abs().max() < 1e-3


def test_float64_equals_the_vectorized_backend_on_a_long_flat_graph(backend):
    graph = flat_graph([64], [256])
    truth = likelihood_and_gradients(graph, "vectorized")
    for ours, true in zip(likelihood_and_gradients(graph, backend), truth, strict=True):
        assert relative_error(ours, true) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("M", [512, 2048])
def test_2048_states(M, backend):
    graph = flat_graph([M], [2048])
    assert status(graph.to(torch.float32)) == [TILED]
    assert_float32_is_near(graph, backend, backend)


@pytest.mark.slow
def test_4096_states_of_a_flat_graph(backend):
    graph = flat_graph([256], [4096])
    assert status(graph.to(torch.float32)) == [TILED]
    assert_float32_is_near(graph, backend, "scaled")


@pytest.mark.slow
def test_4096_states_with_random_scores(backend):
    assert_float32_is_near(random_graph(6, [300], [4096]), backend, "scaled")


def test_emission_spreads_of_30_nats_stay_on_the_fast_path(backend):
    graph = random_graph(5, [77] * 4, [308] * 4)
    rng = torch.Generator().manual_seed(5)
    emission_BML = -30 * torch.rand(4, 77, 308, generator=rng, dtype=torch.float64)
    graph = graph._replace(log_emission_BML=emission_BML)
    assert status(graph.to(torch.float32)) == [TILED] * 4
    assert_float32_is_near(graph, backend, "vectorized")


def test_what_underflows_is_done_again_in_log_space(backend):
    single = CASES["huge_spread"].to(torch.float32)
    assert status(single) == [LOG_SPACE, LOG_SPACE]
    assert status(CASES["ragged"].to(torch.float32)) == [TILED] * 5
    assert status(CASES["no_path_through_missing_edges"]) == [NO_PATH, NO_PATH, TILED]


# ---- what is read and written ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_never_read_and_gets_no_gradient(dtype, backend):
    graph = random_graph(6, [20, 3, 1, 11], [37, 16, 1, 25]).to(dtype)
    expected = likelihood_and_gradients(graph, backend)
    for value in (math.nan, math.inf, 1e4):
        padded = fill_padding(graph, value)
        for ours, same in zip(likelihood_and_gradients(padded, backend), expected, strict=True):
            assert torch.equal(ours, same)
        assert torch.equal(viterbi(*padded, backend)[0], viterbi(*graph, backend)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "place"), PLACES_OF_NAN)
def test_nan_gives_nan(which, place, dtype, backend):
    graph = GRAPH_FOR_NAN.to(dtype)
    scores = getattr(graph, which).clone()
    scores[place] = math.nan
    graph = graph._replace(**{which: scores})
    log_likelihood_B, *gradients = likelihood_and_gradients(graph, backend)
    assert log_likelihood_B.isnan().tolist() == [True, False]
    assert all(g[0].isnan().any() and g[1].isfinite().all() for g in gradients)
    path_BM, log_score_B = viterbi(*graph, backend)
    assert log_score_B.isnan().tolist() == [True, False]
    assert path_BM[0].tolist() == [-1] * 9


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_among_huge_scores_gives_nan(dtype, backend):
    graph = random_graph(14, [2, 3], [2, 6]).to(dtype)
    graph.log_transition_BLL[:, 0, 1] = 1e9  # straight to log space, emissions unseen
    graph.log_emission_BML[0, 1, 1] = math.nan
    assert dag_log_likelihood(*graph, backend).isnan().tolist() == [True, False]
    graph.log_emission_BML[1, 1, 1] = math.nan
    assert dag_log_likelihood(*graph, backend).isnan().tolist() == [True, True]


def test_a_state_that_cannot_emit_gets_exactly_no_gradient(backend):
    graph = CASES["impossible_state"].to(torch.float32)
    _, *gradients = likelihood_and_gradients(graph, backend)
    is_impossible_BML = graph.log_emission_BML == -torch.inf
    assert is_impossible_BML.any() and not gradients[0][is_impossible_BML].any()
    is_no_edge_BLL = graph.log_transition_BLL == -torch.inf
    assert is_no_edge_BLL.any() and not gradients[1][is_no_edge_BLL].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_row_without_a_path_gets_exactly_no_gradient(name, dtype, backend):
    log_likelihood_B, grad_emission_BML, grad_transition_BLL = likelihood_and_gradients(
        CASES[name].to(dtype), backend
    )
    has_none_B = log_likelihood_B == -torch.inf
    assert torch.equal(has_none_B, judge(name).log_likelihood_B == -torch.inf)
    assert not grad_emission_BML[has_none_B].any()
    assert not grad_transition_BLL[has_none_B].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["no_path_through_missing_edges", "all_minus_infinity"])
def test_the_last_emission_of_a_row_without_a_path_gets_no_gradient(name, dtype, backend):
    """Every path ends there, so its posterior is 1 but for rows that have no path."""
    graph = CASES[name].to(dtype)
    grad_B = torch.ones(len(graph.num_targets_B), dtype=dtype)
    log_likelihood_B, grad_BML, _ = likelihood_and_gradients(graph, backend, grad_B)
    b = torch.arange(len(grad_B))
    last_B = grad_BML[b, graph.num_targets_B - 1, graph.num_states_B - 1]
    has_path_B = (log_likelihood_B != -torch.inf).to(dtype)
    torch.testing.assert_close(last_B, has_path_B, rtol=0, atol=1e-6)
    assert torch.equal(last_B == 0, has_path_B == 0)


@pytest.mark.parametrize(
    ("which", "place"), [("log_emission_BML", (0, 1, 2)), ("log_transition_BLL", (0, 0, 2))]
)
def test_infinity_is_not_swallowed(which, place, backend):
    graph = random_graph(8, [3, 3], [6, 6])
    getattr(graph, which)[place] = math.inf
    log_likelihood_B = dag_log_likelihood(*graph, backend)
    assert log_likelihood_B.isfinite().tolist() == [False, True]
    assert log_likelihood_B[0] != -torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype, backend):
    graph = random_graph(9, [12, 30, 5], [60, 40, 33]).to(dtype)
    before = torch.get_num_threads()
    try:
        runs = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            runs.append((*likelihood_and_gradients(graph, backend), *viterbi(*graph, backend)))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


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
        assert torch.equal(ours, same)


def test_no_rows_give_nothing(backend):
    none = Graph(
        torch.zeros(0, 3, 5), torch.zeros(0, 5, 5), *torch.zeros(2, 0, dtype=torch.int64)
    )
    shapes = [(0,), (0, 3, 5), (0, 5, 5)]
    assert [t.shape for t in likelihood_and_gradients(none, backend)] == shapes
    assert native.viterbi(*none)[0].shape == (0, 3)


# ---- the operator ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ragged", "no_path_through_missing_edges", "huge_spread"])
def test_operators_pass_opcheck(name, dtype, backend):
    graph = CASES[name].to(dtype)
    scores = [t.clone().requires_grad_() for t in graph[:2]]
    torch.library.opcheck(torch.ops.exlm_mini.dag_log_likelihood, (*scores, *graph[2:]))
    torch.library.opcheck(torch.ops.exlm_mini.dag_viterbi, tuple(graph))
    _, *buffers = torch.ops.exlm_mini.dag_log_likelihood(*graph)
    grad_B = torch.ones(len(graph.num_targets_B), dtype=dtype)
    torch.library.opcheck(torch.ops.exlm_mini.dag_gradients, (grad_B, *graph, *buffers))


def test_compile_does_not_break_on_it(backend):
    graph = CASES["ragged"]

    def loss(log_emission_BML: Tensor, log_transition_BLL: Tensor) -> Tensor:
        log_p_BML, log_q_BLL = log_emission_BML * 2, log_transition_BLL * 0.5
        return -native.log_likelihood(log_p_BML, log_q_BLL, *graph[2:]).sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        scores = [t.clone().requires_grad_() for t in graph[:2]]
        value = function(*scores)
        results.append((value.detach(), *torch.autograd.grad(value, scores)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


def test_a_second_derivative_is_refused(backend):
    graph = random_graph(11, [3], [5])
    scores = graph.log_emission_BML.clone().requires_grad_()
    total = dag_log_likelihood(scores, *graph[1:], backend).sum()
    with pytest.raises(RuntimeError, match="backend 'naive' or 'enumerate'"):
        torch.autograd.grad(total, scores, create_graph=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_targets_B": torch.tensor([4, 1])}, "num_targets_B must lie in 1..M"),
        ({"num_states_B": torch.tensor([5, 0])}, "num_states_B in 1..L"),
        ({"num_states_B": torch.tensor([5.0, 5.0])}, "want counts int64"),
        ({"log_transition_BLL": torch.zeros(2, 4, 4).double()}, "want transition"),
        ({"log_transition_BLL": torch.zeros(2, 5, 5)}, "want float32 or float64 for both"),
        (
            {
                "log_emission_BML": torch.zeros(2, 3, 5).bfloat16(),
                "log_transition_BLL": torch.zeros(2, 5, 5).bfloat16(),
            },
            "want float32 or float64 for both, got emission torch.bfloat16",
        ),
    ],
)
def test_the_operator_refuses_what_would_read_elsewhere(changed, words, backend):
    graph = random_graph(12, [3, 3], [5, 5])._replace(**changed)
    for function in (native.log_likelihood, native.viterbi):
        with pytest.raises(ValueError, match=words):
            function(*graph)
