"""The contract of every alignment backend: closed forms, enumeration, invariants, gradients.

``fibers`` are the CUDA kernels on a CPU and ``cuda`` on a GPU, backends like the others.
``test_scaled``, ``test_native`` and ``test_kernels`` hold what each has of its own.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math
import warnings
from itertools import combinations, pairwise

import pytest
import torch
from cases import CASES, all_ones_graph, fill_padding, is_padding, shifted, tied_graph
from fibers import works_here  # noqa: F401
from hard_graphs import (
    DTYPES,
    GRAPH_FOR_NAN,
    LARGE,
    PLACES_OF_NAN,
    assert_right,
    flat_graph,
    judge,
    two_ways,
    with_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.alignment import (
    BACKENDS,
    api,
    dag_log_likelihood,
    fastest,
    posteriors,
    viterbi,
)
from exlm_mini.alignment.check import (
    JUDGE,
    likelihood_and_gradients,
    random_graph,
    relative_error,
    weights,
)
from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.alignment.graphs import Graph

FLOAT32, FLOAT64 = DTYPES
ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EVERY = [*BACKENDS, "fibers", ON_A_GPU]
JUDGED = [name for name in EVERY if name != JUDGE]
RESCALED = ["scaled", "native", "fibers", ON_A_GPU]
ONCE = ["vectorized", *RESCALED]
"""Their gradient is written by hand."""
RAGGED = CASES["ragged"]

pytestmark = pytest.mark.usefixtures("nan_in_uninitialised_memory")


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to ``tolerance`` times the size of the numbers, -inf and all."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=False)


def all_paths(graph: Graph, b: int) -> dict[tuple[int, ...], float]:
    """Every path of row b with its log-score, by the definition and plain Python."""
    M, L = int(graph.num_targets_B[b]), int(graph.num_states_B[b])
    emission, transition = graph.log_emission_BML[b].tolist(), graph.log_transition_BLL[b]
    transition = transition.tolist()
    scored = {}
    for path in combinations(range(L), M):
        if path[0] == 0 and path[-1] == L - 1:
            emitted = math.fsum(emission[i][u] for i, u in enumerate(path))
            score = emitted + math.fsum(transition[v][u] for v, u in pairwise(path))
            if score > -math.inf:
                scored[path] = score
    return scored


def drawn_graphs(most_targets: int, most_states: int, scales: list[float]):
    """Of one to three rows; by how many nats scores spread is one of ``scales``."""
    row = st.tuples(st.integers(1, most_targets), st.integers(1, most_states))
    return st.builds(
        lambda seed, rows, *how: random_graph(seed, *zip(*rows, strict=True), *how),
        st.integers(0, 2**31),
        st.lists(row, min_size=1, max_size=3),
        st.sampled_from([0.2, 0.7, 1.0]),
        st.sampled_from(scales),
    )


# ---- the judge ----


@pytest.mark.parametrize("name", CASES)
def test_enumeration_equals_the_definition(name):
    """Sum, shares of all paths, and the best one."""
    graph, verdict = CASES[name], judge(name)
    state_BML, edge_BLL = posteriors(*graph, JUDGE)
    for b, path in enumerate(verdict.path_BM.tolist()):
        M, scored = int(graph.num_targets_B[b]), all_paths(graph, b)
        best = max(scored.values(), default=-math.inf)
        shares = {each: math.exp(score - best) for each, score in scored.items()}
        total = math.fsum(shares.values())
        state_ML, edge_LL = torch.zeros_like(state_BML[b]), torch.zeros_like(edge_BLL[b])
        for each, share in shares.items():
            for i, u in enumerate(each):
                state_ML[i, u] += share / total
            for v, u in pairwise(each):
                edge_LL[v, u] += share / total
        assert_near(state_BML[b], state_ML)
        assert_near(edge_BLL[b], edge_LL)
        expected = best + math.log(total) if scored else -math.inf
        assert verdict.log_likelihood_B[b].item() == pytest.approx(expected, 1e-12, 1e-12)
        assert verdict.log_score_B[b].item() == pytest.approx(best, 1e-12, 1e-9)
        assert set(path[M if scored else 0 :]) <= {-1}
        assert not scored or scored[tuple(path[:M])] == pytest.approx(best, 1e-12, 1e-9)


def test_the_cases_hold_what_their_names_say():
    has_path = (judge("very_sparse").log_likelihood_B != -torch.inf).tolist()
    assert True in has_path and False in has_path
    scores = list(all_paths(CASES["ties"], 0).values())
    assert scores.count(max(scores)) > 1
    for name in ("ragged", "sparse", "huge_spread"):
        graph, is_beyond_BLL = CASES[name], is_padding(CASES[name])[1]
        edge_BLL = graph.log_transition_BLL.masked_fill(is_beyond_BLL, -math.inf)
        total_BL = edge_BLL.exp().sum(2)
        assert_near(total_BL, (total_BL > 0).double())  # transitions are probabilities
        assert not edge_BLL.exp().tril().any()


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


@pytest.mark.parametrize("backend", RESCALED)
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
@pytest.mark.parametrize("backend", RESCALED)
def test_backend_equals_the_vectorized_one_at_sizes_to_train_on(backend, name, dtype):
    assert_right(LARGE[name].to(dtype), backend, judge(name, dtype)[:3])


# Tiles hold 16 float32 or 8 float64 states, on a GPU 32.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [7, 8, 9, 15, 16, 17, 31, 32, 33, 65])
@pytest.mark.parametrize("backend", RESCALED)
def test_every_cone_and_remainder_of_a_tile_equals_the_vectorized_backend(backend, L, dtype):
    num_targets = [1, 2, 3, L // 2, max(L - 8, 1), L - 2, L - 1, L, L + 1]
    assert_right(random_graph(L, num_targets, [L] * 9).to(dtype), backend, "vectorized")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ONCE)
def test_all_ones_graph_counts_its_paths(backend, dtype):
    """All scores are log 1, so the likelihood is the number of paths: comb(L - 2, M - 2)."""
    shapes = [(2, 40), (3, 40), (17, 40), (40, 40), (12, 33), (1, 1)]
    graph = all_ones_graph(*zip(*shapes, strict=True)).to(dtype)
    expected = [math.log(math.comb(L - 2, M - 2)) if M > 1 else 0.0 for M, L in shapes]
    ours_B = dag_log_likelihood(*graph, backend)
    assert ours_B.tolist() == pytest.approx(expected, 1e-6, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "L"), [(3, 5), (64, 256)])
@pytest.mark.parametrize("backend", ONCE)
def test_flat_graph_sums_to_a_stirling_number(backend, M, L, dtype):
    """Over M - 2 of the inner states, the product of 1 / (their distance to the end): a Stirling
    number of the first kind over a factorial."""
    cycles = [1] + [0] * (M - 1)  # of n elements, by their number
    for n in range(L - 1):
        cycles = [n * cycles[0]] + [cycles[j - 1] + n * cycles[j] for j in range(1, M)]
    expected = math.log(cycles[M - 1]) - math.lgamma(L - 1) - math.log(L - 1)
    ours_1 = dag_log_likelihood(*flat_graph([M], [L]).to(dtype), backend)
    assert ours_1.item() == pytest.approx(expected, 1e-6 if dtype == FLOAT32 else 1e-11)


@pytest.mark.parametrize("backend", ["naive", "vectorized", "scaled", "native"])
def test_gradients_equal_finite_differences(backend):
    sizes = ([4, 2, 1], [5, 4, 1]) if backend == "naive" else ([6, 2, 1], [12, 4, 1])
    graph = random_graph(22, *sizes, density=0.9)
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
    """e^-130 is flushed in float32 and e^-1040 in float64: each sweep sees only the even path,
    190 units less likely; the two agree with each other, so comparing them shows nothing."""
    graph = two_ways(unit, by).to(dtype)
    value_1, *gradients = likelihood_and_gradients(graph, backend, torch.ones(1, dtype=dtype))
    assert value_1.item() == pytest.approx(-260 * unit, 1e-6)
    assert gradients[0][0, 4, 7].item() == pytest.approx(1.0, 1e-4)
    assert gradients[1][0, 7, 9].item() == pytest.approx(1.0, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e9, -1e5, 1e5, 1e9])
@pytest.mark.parametrize("backend", RESCALED)
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
@pytest.mark.parametrize("backend", RESCALED)
def test_the_gradient_of_an_edge_is_finite_however_unlikely_the_edge(backend, dtype):
    """Its sum over targets, before the edge is multiplied in, may be beyond the range."""
    graph = random_graph(3, [2], [12], scale=0.5)
    graph.log_transition_BLL[:] = -torch.inf
    graph.log_transition_BLL[0, 1, 2] = 0.0  # what all edges are scaled by
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
    """Target 1 at state 2, or the edge from state 2 to the last one: on a path, not on all."""
    for shift in (0.0, 1e9):  # the latter goes straight to log space
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
    assert backend in ("scaled", "vectorized") or path_BM[0].tolist() == [-1] * 9


@pytest.mark.parametrize("backend", EVERY)
def test_only_one_of_the_scores_may_want_a_gradient(backend):
    _, *expected = likelihood_and_gradients(RAGGED, backend)
    for which in (0, 1):
        scores = [t.clone().requires_grad_(n == which) for n, t in enumerate(RAGGED[:2])]
        dag_log_likelihood(*scores, *RAGGED[2:], backend).backward(weights(RAGGED))
        assert_near(scores[which].grad, expected[which])
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
            assert_near(number, same, 1e-13)
    viterbi(*turned, *graph[2:], backend)
    assert all(torch.equal(t, old) for t, old in zip(turned, before, strict=True))


@pytest.mark.parametrize("backend", ONCE)
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"log_emission_BML": torch.zeros(2, 3)}, ["(B, M, L)", "(2, 3)"]),
        ({"log_transition_BLL": torch.zeros(2, 5, 5, device="meta").double()}, ["cpu", "meta"]),
        ({"log_transition_BLL": torch.zeros(2, 4, 4)}, ["(2, 5, 5)", "(2, 3, 5)", "(2, 4, 4)"]),
        ({"log_transition_BLL": torch.zeros(2, 5, 5)}, ["float64", "float32"]),
        ({"num_targets_B": torch.tensor([3, 4])}, ["num_targets", "1..3", "[3, 4]"]),
        (
            {
                "log_emission_BML": torch.zeros(2, 3, 5, dtype=torch.int64),
                "log_transition_BLL": torch.zeros(2, 5, 5, dtype=torch.int64),
            },
            ["int64", "floating-point"],
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed, words):
    graph = random_graph(24, [3, 3], [5, 5])._replace(**changed)
    for function in (dag_log_likelihood, posteriors, viterbi):
        with pytest.raises(ValueError) as caught:
            function(*graph)
        assert all(word in str(caught.value) for word in words)


# ---- posteriors, and the best path ----


@pytest.mark.parametrize("name", CASES)
def test_posteriors_are_numbers_that_sum_to_one_per_target(name):
    graph = CASES[name]
    with torch.no_grad():  # they are gradients, and must not care
        ours = posteriors(*graph)
    for number, expected in zip(ours, posteriors(*graph, JUDGE), strict=True):
        assert not number.requires_grad and (number >= 0).all()
        assert_near(number, expected)
    has_path_B = judge(name).log_likelihood_B != -torch.inf
    assert_near(ours.state_BML.sum((1, 2)), graph.num_targets_B * has_path_B.double())
    assert_near(ours.edge_BLL.sum((1, 2)), (graph.num_targets_B - 1) * has_path_B.double())


@pytest.mark.parametrize("backend", EVERY)
@given(seed=st.integers(0, 2**31), M=st.integers(2, 5), L=st.integers(3, 8))
@settings(max_examples=15)
def test_among_equal_paths_the_earliest_states_from_the_end_win(backend, seed, M, L):
    graph = tied_graph(seed, [M], [L])
    path_BM, _ = viterbi(*graph, backend)
    scored = all_paths(graph, 0)
    best = [path for path, score in scored.items() if score == max(scored.values())]
    expected = min((path[::-1] for path in best), default=(-1,) * M)
    assert tuple(path_BM[0].tolist()) == expected[::-1]


# ---- the table of backends ----


def test_an_unknown_backend_offers_the_nearest():
    with pytest.raises(ValueError, match="'vectorised': did you mean vectorized"):
        dag_log_likelihood(*RAGGED, "vectorised")


@pytest.mark.parametrize("reason", [None, "no C++ compiler 'c++'"])
def test_auto_is_the_fastest_backend_that_works_and_says_once_which_does_not(
    reason, monkeypatch
):
    native = BACKENDS["native"]._replace(why_not=lambda device_type: reason)
    monkeypatch.setitem(BACKENDS, "native", native)
    api._first_that_works.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = fastest("cpu")
        assert torch.equal(dag_log_likelihood(*RAGGED), dag_log_likelihood(*RAGGED, name))
    api._first_that_works.cache_clear()
    assert name == ("native" if reason is None else "scaled")
    (on_cpu,) = [str(warning.message) for warning in caught] if reason else ("",)
    assert ("'scaled', without 'native': no C++ c" in on_cpu) is bool(reason)


def test_naming_a_backend_asks_nothing_of_the_others(monkeypatch):
    monkeypatch.setitem(BACKENDS, "native", BACKENDS["native"]._replace(why_not=None))
    for name in ("enumerate", "naive", "vectorized", "scaled"):
        dag_log_likelihood(*RAGGED, name)


# ---- as a part of a program ----


@pytest.mark.parametrize(
    ("backend", "name", "is_whole"),
    [
        ("native", "ragged", True),
        ("vectorized", "ragged", True),
        ("scaled", "huge_spread", False),  # a row is done again, where the graph breaks in two
    ],
)
def test_compiling_gives_the_same_numbers(backend, name, is_whole):
    graph = CASES[name]
    compiled = torch.compile(dag_log_likelihood, backend="aot_eager", fullgraph=is_whole)
    scores = [t.clone().requires_grad_() for t in graph[:2]]
    value_B = compiled(*scores, *graph[2:], "auto" if backend == "native" else backend)
    ours = value_B.detach(), *torch.autograd.grad(value_B, scores, weights(graph))
    for number, same in zip(ours, likelihood_and_gradients(graph, backend), strict=True):
        assert_near(number, same, 1e-12)


def transforms(graph: Graph, backend: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the likelihood of all rows by both scores, as ``torch.func`` gives them."""

    def each(*scores: Tensor) -> Tensor:
        return dag_log_likelihood(*scores, *graph[2:], backend)

    scores, one_B = graph[:2], torch.ones(len(graph.num_targets_B), dtype=torch.float64)
    by_row = torch.func.jacrev(each, argnums=(0, 1))(*scores)
    _, pull = torch.func.vjp(each, *scores)
    leaves = tuple(torch.nn.Parameter(t.clone()) for t in scores)
    value_B = each(*leaves)
    with torch.no_grad():  # which closes vjp's own level before the gradient is asked for
        _, pull_without_grad = torch.func.vjp(each, *scores)
        without_grad = pull_without_grad(one_B)
    return {
        "grad": torch.func.grad(lambda *s: each(*s).sum(), argnums=(0, 1))(*scores),
        "grad beside a parameter": (
            torch.func.grad(lambda s: each(s, leaves[1]).sum())(scores[0]),
            torch.func.grad(lambda s: each(leaves[0], s).sum())(scores[1]),
        ),
        "vjp": pull(one_B),
        "vjp, no_grad": without_grad,
        "jacrev": tuple(rows.sum(0) for rows in by_row),
        "vmap of autograd.grad": tuple(
            rows.sum(0)
            for rows in torch.func.vmap(lambda v: torch.autograd.grad(value_B, leaves, v))(
                torch.eye(len(one_B), dtype=torch.float64)
            )
        ),
    }


@pytest.mark.parametrize("name", ["ragged", "no_path_through_missing_edges", "huge_spread"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_func_gives_the_gradients_of_autograd(backend, name):
    graph = CASES[name].to(torch.float64)
    _, *expected = likelihood_and_gradients(graph, backend, torch.ones_like(weights(graph)))
    for transform, gradients in transforms(graph, backend).items():
        for ours, same in zip(gradients, expected, strict=True):
            assert relative_error(ours, same) < 1e-12, transform


@pytest.mark.parametrize("backend", BACKENDS)
def test_posteriors_under_torch_func_are_constants(backend):
    graph = random_graph(23, [3], [5])

    def product(log_emission_BML: Tensor) -> Tensor:
        state_BML = posteriors(log_emission_BML, *graph[1:], backend).state_BML
        return (state_BML * log_emission_BML).sum()

    expected = posteriors(*graph, backend).state_BML
    assert_near(torch.func.grad(product)(graph.log_emission_BML), expected)


@pytest.mark.parametrize("backend", ["enumerate", "naive"])
def test_a_second_derivative_is_right(backend):
    graph = random_graph(23, [3], [5])
    scores = graph.log_emission_BML.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: dag_log_likelihood(x, *graph[1:], backend).sum(), scores
    )


func = torch.func
TWICE, LACKS = (
    "backend 'naive' or 'enumerate'",
    "does not (have vmap )?support|implement the jvp",
)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda f, x: torch.autograd.functional.hessian(lambda y: f(y).sum(), x), TWICE),
        (lambda f, x: func.jacrev(func.jacrev(lambda y: f(y).sum()))(x), TWICE),
        (lambda f, x: func.grad(lambda z: func.grad(lambda y: f(y).sum())(z).sum())(x), TWICE),
        (lambda f, x: func.vmap(f)(torch.stack([x, x])), LACKS),
        (lambda f, x: func.jacfwd(f)(x), LACKS),
        (lambda f, x: func.hessian(f)(x), LACKS),
        (lambda f, x: func.jvp(f, (x,), (x,)), LACKS),
    ],
)
@pytest.mark.parametrize("backend", ["vectorized", "scaled", "native"])
def test_what_a_gradient_written_by_hand_lacks_is_refused(backend, transform, words):
    """Of a plain sum, whose own gradient is a constant: easily a wrong number without a word."""
    for graph in (random_graph(23, [3], [5]), two_ways(7.0, "edges")):
        with pytest.raises(RuntimeError, match=words):
            transform(
                lambda x, rest=graph[1:]: dag_log_likelihood(x, *rest, backend),
                graph.log_emission_BML,
            )


# ---- without transitions (the sum itself is in test_objectives) ----


def test_ctc_stands_huge_scores():
    log_target_BMk = torch.tensor([[[-1e4, -1.0, -1e4]]], dtype=torch.float64)
    log_blank_BMk = torch.tensor([[[-2.0, -1e4, -3.0]]], dtype=torch.float64)
    ours_BM = run_log_likelihood(log_target_BMk, log_blank_BMk)
    assert_near(ours_BM, torch.tensor([[-6.0]], dtype=torch.float64))


# ---- the measure of errors ----


def test_relative_error_is_the_largest_difference_over_the_largest_value():
    exact = torch.tensor([4.0, -8.0, 1.0], dtype=torch.float64)
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([5.0, -8.0, 1.5]), exact) == 1 / 8
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.25])) == 1
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    # Infinities are left out where both have them, and nowhere else.
    exact = torch.tensor([-torch.inf, -2.0])
    assert relative_error(torch.tensor([-torch.inf, -3.0]), exact) == 0.5
    assert relative_error(torch.tensor([-5.0, -2.0]), exact) == math.inf
    assert relative_error(torch.tensor([-torch.inf, torch.nan]), exact) == math.inf
