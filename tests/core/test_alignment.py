"""The contract of every alignment backend: closed forms, enumeration, invariants, gradients.

``fibers`` runs the CUDA kernels on a CPU. Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    FLOAT32,
    FLOAT64,
    GRAPH_FOR_NAN,
    LARGE,
    PLACES_OF_NAN,
    RAGGED,
    all_ones_graph,
    assert_right,
    fill_padding,
    flat_graph,
    judge,
    shifted,
    tied_graph,
    two_ways,
    with_score,
)
from fibers import works_here  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.alignment import BACKENDS, dag_log_likelihood, posteriors, viterbi
from exlm_mini.alignment.check import (
    JUDGE,
    likelihood_and_gradients,
    random_graph,
    relative_error,
    weights,
)
from exlm_mini.alignment.enumeration import path_score, paths
from exlm_mini.alignment.graphs import Graph

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EVERY = [*BACKENDS, "fibers", ON_A_GPU]
JUDGED = [name for name in EVERY if name != JUDGE]
ONCE = [name for name in EVERY if name not in ("enumerate", "naive")]
"""Backends for graphs of any size, which handle every edge once per target."""
FAST = [name for name in ONCE if name != "vectorized"]

pytestmark = pytest.mark.usefixtures("nan_in_uninitialised_memory")


def drawn_graphs(most_targets: int, most_states: int, scales: list[float]):
    """Strategy for graphs of one to three rows, with scores spread by one of ``scales`` (nats)."""
    row = st.tuples(st.integers(1, most_targets), st.integers(1, most_states))
    return st.builds(
        lambda seed, rows, *how: random_graph(seed, *zip(*rows, strict=True), *how),
        st.integers(0, 2**31),
        st.lists(row, min_size=1, max_size=3),
        st.sampled_from([0.2, 0.7, 1.0]),
        st.sampled_from(scales),
    )


# ---- values and gradients ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", JUDGED)
def test_backend_equals_enumeration(backend, name, dtype):
    truth = judge(name, dtype)
    assert_right(CASES[name].to(dtype), backend, truth[:3])
    path_BM, log_score_B = viterbi(*fill_padding(CASES[name], math.nan).to(dtype), backend)
    assert torch.equal(path_BM, truth.path_BM)
    rounding = 1e-6 if dtype == FLOAT32 else 1e-12
    assert relative_error(log_score_B, truth.log_score_B) <= rounding


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["vectorized", "scaled"])
def test_backends_of_pytorch_equal_enumeration_on_a_gpu(backend, name):
    graph = CASES[name].to(FLOAT32, "cuda")
    assert_right(graph, backend, judge(name, FLOAT32)[:3])
    assert torch.equal(viterbi(*graph, backend)[0].cpu(), judge(name, FLOAT32).path_BM)


@pytest.mark.parametrize("backend", JUDGED)
@given(graph=drawn_graphs(5, 9, [0.1, 2.0, 30.0, 300.0, 1e4]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=25)
def test_backend_equals_enumeration_on_drawn_graphs(backend, graph, dtype):
    assert_right(graph.to(dtype), backend)


@pytest.mark.parametrize("backend", FAST)
@given(graph=drawn_graphs(40, 70, [0.1, 2.0, 30.0, 300.0]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=15)
def test_backend_equals_the_vectorized_one_on_larger_graphs(backend, graph, dtype):
    assert_right(graph.to(dtype), backend, "vectorized")
    path_BM, log_score_B = viterbi(*graph, backend)
    expected_BM, expected_B = viterbi(*graph, "vectorized")
    assert torch.equal(path_BM, expected_BM)
    assert relative_error(log_score_B, expected_B) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("backend", FAST)
def test_backend_equals_the_vectorized_one_at_sizes_to_train_on(backend, name, dtype):
    assert_right(LARGE[name].to(dtype), backend, judge(name, dtype)[:3])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("scale", [15.0, 20.0, 25.0, 30.0, 40.0])
def test_gradients_of_float32_are_exact_where_paths_differ_by_far_more_than_it_holds(
    backend, scale
):
    for seed in range(8):
        sizes = range(3, 11), range(20 + seed % 4, 60, 5)
        graph = random_graph(seed, *map(list, sizes), (0.3, 1.0)[seed % 2], scale)
        assert_right(graph.to(FLOAT32), backend, "vectorized")


# A tile holds 16 float32 or 8 float64 states on a CPU, and 32 states on a GPU.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [7, 8, 9, 15, 16, 17, 31, 32, 33, 65])
@pytest.mark.parametrize("backend", FAST)
def test_every_cone_and_remainder_of_a_tile_equals_the_vectorized_backend(backend, L, dtype):
    num_targets = [1, 2, 3, L // 2, max(L - 8, 1), L - 2, L - 1, L, L + 1]
    assert_right(random_graph(L, num_targets, [L] * 9).to(dtype), backend, "vectorized")


@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_graph_sums_to_a_stirling_number(dtype):
    """The likelihood sums, over all choices of M - 2 inner states, the product of 1 / (distance to
    the end): a Stirling number of the first kind over a factorial. So the backend that others are
    compared with is right even where there are too many paths to enumerate."""
    M, L = 64, 256
    cycles = [1] + [0] * (M - 1)  # permutations of n elements, by number of cycles
    for n in range(L - 1):
        cycles = [n * cycles[0]] + [cycles[j - 1] + n * cycles[j] for j in range(1, M)]
    expected = math.log(cycles[M - 1]) - math.lgamma(L - 1) - math.log(L - 1)
    ours_1 = dag_log_likelihood(*flat_graph([M], [L]).to(dtype), "vectorized")
    assert ours_1.item() == pytest.approx(expected, 1e-6 if dtype == FLOAT32 else 1e-11)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != JUDGE])
def test_gradients_equal_finite_differences(backend):
    graph = random_graph(22, [4, 2, 1], [5, 4, 1], density=0.9)
    is_edge_BLL = graph.log_transition_BLL != -torch.inf

    def likelihood(log_emission_BML: Tensor, scores_BLL: Tensor) -> Tensor:
        log_transition_BLL = torch.where(is_edge_BLL, scores_BLL, -torch.inf)
        return dag_log_likelihood(log_emission_BML, log_transition_BLL, *graph[2:], backend)

    scores_BLL = torch.where(is_edge_BLL, graph.log_transition_BLL, 0.0).requires_grad_()
    emission_BML = graph.log_emission_BML.clone().requires_grad_()
    assert likelihood(emission_BML, scores_BLL).isfinite().all()
    assert torch.autograd.gradcheck(likelihood, (emission_BML, scores_BLL))


@pytest.mark.parametrize("backend", ONCE)
@pytest.mark.parametrize("name", CASES)
def test_not_even_an_infinite_gradient_gets_through_a_row_without_a_path(name, backend):
    is_lost_B = judge(name).log_likelihood_B == -torch.inf
    grad_B = torch.where(is_lost_B, math.inf, 1.0).double()
    _, *gradients = likelihood_and_gradients(CASES[name], backend, grad_B)
    assert not any(gradient[is_lost_B].any() for gradient in gradients)
    assert gradients[0][~is_lost_B].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
@pytest.mark.parametrize("unit", [1.0, 5.3, 8.0])
@pytest.mark.parametrize("backend", JUDGED)
def test_a_path_that_looks_lost_from_both_ends_is_found(backend, unit, by, dtype):
    """float32 flushes e^-130 to zero, and float64 e^-1040. Each sweep then sees only the even path,
    which is less likely by 190 units; both agree, so comparing them would not reveal the error."""
    graph = two_ways(unit, by).to(dtype)
    value_1, *gradients = likelihood_and_gradients(graph, backend, torch.ones(1, dtype=dtype))
    assert value_1.item() == pytest.approx(-260 * unit, 1e-6)
    assert gradients[0][0, 4, 7].item() == pytest.approx(1.0, 1e-4)
    assert gradients[1][0, 7, 9].item() == pytest.approx(1.0, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e9, -1e5, 1e5, 1e9])
@pytest.mark.parametrize("backend", FAST)
def test_a_shift_of_all_scores_changes_no_posterior(backend, size, dtype):
    graph = all_ones_graph([3, 4], [6, 9])
    value_B, *gradients = likelihood_and_gradients(
        shifted(graph, size, -2 * size).to(dtype), backend
    )
    assert value_B.tolist() == pytest.approx([(3 - 4) * size, (4 - 6) * size], rel=1e-3)
    expected = likelihood_and_gradients(graph, JUDGE)[1:]
    for ours, true in zip(gradients, expected, strict=True):
        is_exact = backend == "scaled" and dtype == FLOAT64
        assert relative_error(ours, true) < (1e-13 if is_exact else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", FAST)
def test_the_gradient_of_an_edge_is_finite_however_unlikely_the_edge(backend, dtype):
    """The sum over targets may overflow before it is multiplied by the probability of the edge."""
    graph = random_graph(3, [2], [12], scale=0.5)
    graph.log_transition_BLL[:] = -torch.inf
    graph.log_transition_BLL[0, 1, 2] = 0.0  # the largest edge, which sets the scale
    for nats in range(20, 140, 3) if dtype == FLOAT32 else range(650, 900, 5):
        graph.log_transition_BLL[0, 0, 11] = -float(nats)  # the only path
        edge_BLL = assert_right(graph.to(dtype), backend, "vectorized")[2]
        assert edge_BLL[0, 0, 11] == pytest.approx(weights(graph)[0].item())


# ---- what is read and written ----


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("which", "place"), [("log_emission_BML", (0, 1, 2)), ("log_transition_BLL", (0, 2, 4))]
)
@pytest.mark.parametrize("backend", EVERY)
def test_nan_and_infinity_among_what_is_read_are_not_hidden(backend, which, place, value):
    """The emission of target 1 in state 2, or the edge from it to the end: on some paths only."""
    for shift in (0.0, 1e9):  # 1e9 is computed in log space
        graph = shifted(random_graph(25, [3, 3], [5, 5]), 0.0, shift)
        log_likelihood_B = dag_log_likelihood(*with_score(graph, which, place, value), backend)
        assert log_likelihood_B.isfinite().tolist() == [False, True]
        assert log_likelihood_B[0] != -torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "place"), PLACES_OF_NAN)
@pytest.mark.parametrize("backend", ONCE)
def test_nan_gives_nan_in_its_row_alone(backend, which, place, dtype):
    graph = GRAPH_FOR_NAN.to(dtype)
    expected = likelihood_and_gradients(graph, backend)
    graph = with_score(graph, which, place, math.nan)
    for ours, same in zip(likelihood_and_gradients(graph, backend), expected, strict=True):
        assert ours[0].isnan().any() and torch.equal(ours[1], same[1])
    path_BM, log_score_B = viterbi(*graph, backend)
    assert log_score_B.isnan().tolist() == [True, False]
    assert path_BM[0].tolist() == [-1] * 9


@pytest.mark.parametrize("backend", EVERY)
def test_only_one_of_the_scores_may_want_a_gradient(backend):
    _, *expected = likelihood_and_gradients(RAGGED, backend)
    for which in (0, 1):
        scores = [t.clone().requires_grad_(n == which) for n, t in enumerate(RAGGED[:2])]
        dag_log_likelihood(*scores, *RAGGED[2:], backend).backward(weights(RAGGED))
        assert relative_error(scores[which].grad, expected[which]) < 1e-12
        assert scores[1 - which].grad is None


@pytest.mark.parametrize("backend", EVERY)
def test_neither_writing_to_inputs_nor_their_layout_nor_a_second_backward_matters(backend):
    graph = random_graph(10, [6, 4], [12, 9])
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in graph[:2]]
    assert not turned[1].is_contiguous()
    before = [t.clone() for t in turned]
    expected = likelihood_and_gradients(graph, backend)
    scores = [t.detach().requires_grad_() for t in turned]
    value_B = dag_log_likelihood(*scores, *graph[2:], backend)
    for keep in (True, False):
        gradients = torch.autograd.grad(value_B, scores, weights(graph), retain_graph=keep)
        for number, same in zip((value_B.detach(), *gradients), expected, strict=True):
            assert relative_error(number, same) < 1e-13
    viterbi(*turned, *graph[2:], backend)
    assert all(torch.equal(t, old) for t, old in zip(turned, before, strict=True))


@pytest.mark.parametrize("backend", EVERY)
def test_inference_mode_changes_nothing(backend):
    graph = random_graph(1, [3, 2], [6, 4])
    expected = *posteriors(*graph, backend), *viterbi(*graph, backend)
    with torch.inference_mode():
        for own in (graph, [t.clone() for t in graph]):  # created outside the mode, and in it
            same = *posteriors(*own, backend), *viterbi(*own, backend)
            assert all(map(torch.equal, same, expected))


@pytest.mark.parametrize("backend", EVERY)
def test_no_rows_give_nothing(backend):
    graph = Graph(*(t[:0].clone() for t in RAGGED))
    log_likelihood_B, *gradients = likelihood_and_gradients(graph, backend)
    assert log_likelihood_B.shape == (0,)
    assert [g.shape for g in gradients] == [t.shape for t in graph[:2]]
    path_BM, log_score_B = viterbi(*graph, backend)
    assert path_BM.shape == (0, 5) and log_score_B.shape == (0,)


@pytest.mark.parametrize("backend", EVERY)
def test_half_precision_is_added_up_in_float32(backend):
    low = RAGGED.to(torch.bfloat16)
    single = low.to(FLOAT32)
    ours, expected = (
        likelihood_and_gradients(g, backend, torch.ones(5)) for g in (low, single)
    )
    assert [t.dtype for t in ours] == [FLOAT32, torch.bfloat16, torch.bfloat16]
    for number, same in zip(ours, expected, strict=True):
        assert torch.equal(number, same.to(number.dtype))
    assert all(t.dtype == FLOAT32 for t in posteriors(*low, backend))
    for number, same in zip(viterbi(*low, backend), viterbi(*single, backend), strict=True):
        assert torch.equal(number, same)


@pytest.mark.parametrize("name", CASES)
def test_posteriors_are_the_gradients_and_sum_to_one_per_target(name):
    graph, has_path_B = CASES[name], judge(name).log_likelihood_B != -torch.inf
    with torch.no_grad():  # which must make no difference
        ours = posteriors(*graph)
    for number, expected in zip(ours, posteriors(*graph, JUDGE), strict=True):
        assert not number.requires_grad and relative_error(number, expected) < 1e-9
    for number, count_B in zip(
        ours, (graph.num_targets_B, graph.num_targets_B - 1), strict=True
    ):
        assert number.sum((1, 2)).tolist() == pytest.approx((count_B * has_path_B).tolist())


@pytest.mark.parametrize("backend", EVERY)
def test_among_equal_paths_the_earliest_states_from_the_end_win(backend):
    graph, num_tied = tied_graph(0, [3, 4, 5] * 9, [7, 8, 8] * 9), 0
    for b, path_M in enumerate(viterbi(*graph, backend)[0].tolist()):
        M, L = int(graph.num_targets_B[b]), int(graph.num_states_B[b])
        scores = graph.log_emission_BML[b], graph.log_transition_BLL[b]
        scored = {path: path_score(*scores, path).item() for path in paths(M, L)}
        best = [path for path, score in scored.items() if score == max(scored.values())]
        if scored[best[0]] > -math.inf:
            assert path_M[:M] == list(min(path[::-1] for path in best)[::-1])
            num_tied += len(best) > 1
    assert num_tied > 8


# ---- what the tests rely on ----


def test_relative_error_is_the_largest_difference_over_the_largest_value():
    exact = torch.tensor([4.0, -8.0, 1.0], dtype=FLOAT64)
    assert relative_error(torch.tensor([5.0, -8.0, 1.5]), exact) == 1 / 8
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    # Infinities are left out where both have them, and nowhere else.
    exact = torch.tensor([-torch.inf, -2.0])
    assert relative_error(torch.tensor([-torch.inf, -3.0]), exact) == 0.5
    assert relative_error(torch.tensor([-5.0, -2.0]), exact) == math.inf
    assert relative_error(torch.tensor([-torch.inf, torch.nan]), exact) == math.inf
