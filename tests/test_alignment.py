"""Alignment: closed forms, enumeration, invariants, gradcheck, and every backend by the judge.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import math
import re
import warnings
from itertools import combinations, groupby, pairwise, product

import pytest
import torch
from hard_graphs import (
    DTYPES,
    assert_counts_paths,
    assert_gradcheck,
    assert_near_float64,
    judge,
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
from exlm_mini.alignment.cases import (
    CASES,
    Graph,
    fill_padding,
    is_padding,
    likelihood_and_gradients,
    random_graph,
    relative_error,
    tied_graph,
    weights,
)
from exlm_mini.alignment.ctc import run_log_likelihood

JUDGED = [name for name in BACKENDS if name != "enumerate"]
ONCE = ("vectorized", "scaled", "native")
"""Backends whose gradient is written by hand."""
RESCALED = ("scaled", "native")
RAGGED = CASES["ragged"]


@pytest.fixture(autouse=True)
def works_here(request):
    """Skips a backend that cannot be built here."""
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("backend") if parameters else None
    if name in BACKENDS and (reason := BACKENDS[name].why_not("cpu")):
        pytest.skip(f"no backend {name} here: {reason}")


@pytest.fixture(autouse=True, scope="module")
def nan_in_uninitialised_memory():
    """torch.empty gives NaN, so that a number never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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


def log_sum(scores: list[float]) -> float:
    peak = max(scores, default=-math.inf)
    if peak == -math.inf:
        return peak
    return peak + math.log(math.fsum(math.exp(score - peak) for score in scores))


graphs = st.builds(
    lambda seed, rows, density, scale: random_graph(
        seed, [m for m, _ in rows], [num for _, num in rows], density, scale
    ),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=3),
    st.sampled_from([0.3, 0.7, 1.0]),
    st.sampled_from([0.1, 2.0, 100.0]),
)


# ---- values ----


@pytest.mark.parametrize("backend", ["vectorized", *RESCALED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ones_graph_counts_its_paths(dtype, backend):
    assert_counts_paths(lambda graph: dag_log_likelihood(*graph, backend), dtype)


@pytest.mark.parametrize("name", CASES)
def test_enumeration_equals_the_definition(name):
    graph, verdict = CASES[name], judge(name)
    for b, total in enumerate(verdict.log_likelihood_B.tolist()):
        expected = log_sum(list(all_paths(graph, b).values()))
        assert total == expected or math.isclose(total, expected, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("backend", JUDGED)
@pytest.mark.parametrize("name", CASES)
def test_backend_equals_enumeration(name, backend):
    verdict = judge(name)
    log_likelihood_B, *gradients = likelihood_and_gradients(CASES[name], backend)
    assert_near(log_likelihood_B, verdict.log_likelihood_B)
    assert_near(gradients[0], verdict.grad_emission_BML)
    assert_near(gradients[1], verdict.grad_transition_BLL)


@pytest.mark.parametrize("backend", JUDGED)
@given(graph=graphs)
@settings(max_examples=15)
def test_backend_equals_enumeration_on_drawn_graphs(backend, graph):
    ours = likelihood_and_gradients(graph, backend)
    for number, expected in zip(
        ours, likelihood_and_gradients(graph, "enumerate"), strict=True
    ):
        assert_near(number, expected)


def test_the_cases_hold_what_their_names_say():
    has_path = (judge("very_sparse").log_likelihood_B != -torch.inf).tolist()
    assert True in has_path and False in has_path
    scores = list(all_paths(CASES["ties"], 0).values())
    assert scores.count(max(scores)) > 1


# ---- gradients ----


@pytest.mark.parametrize("backend", JUDGED)
def test_gradients_equal_finite_differences(backend):
    sizes = ([6, 2, 1], [12, 4, 1]) if backend == "native" else ([4, 2, 1], [5, 4, 1])
    assert_gradcheck(random_graph(22, *sizes, density=0.9), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("more_targets_than_states", [0]),
        ("one_target_many_states", [0, 1]),
        ("no_path_through_missing_edges", [0, 1]),
        ("impossible_first_emission", [0]),
        ("impossible_last_emission", [1]),
        ("impossible_target", [0]),
        ("all_minus_infinity", [0]),
    ],
)
def test_no_path_is_minus_infinity_with_zero_gradient(name, rows, backend):
    graph = CASES[name]
    grad_B = torch.ones(len(graph.num_targets_B), dtype=torch.float64)
    if backend in ONCE:
        grad_B[rows] = math.inf
    log_likelihood_B, *gradients = likelihood_and_gradients(graph, backend, grad_B)
    for b in range(len(grad_B)):
        if b in rows:
            assert log_likelihood_B[b] == -torch.inf
            assert not any(gradient[b].any() for gradient in gradients)
        else:
            assert log_likelihood_B[b].isfinite() and gradients[0][b].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_one_of_the_scores_may_want_a_gradient(backend):
    _, *expected = likelihood_and_gradients(RAGGED, backend)
    for which in (0, 1):
        scores = [t.clone().requires_grad_(n == which) for n, t in enumerate(RAGGED[:2])]
        dag_log_likelihood(*scores, *RAGGED[2:], backend).backward(
            torch.tensor([1.5, -0.5, 0.0, 2.0, -1.0], dtype=torch.float64)
        )
        assert_near(scores[which].grad, expected[which])
        assert scores[1 - which].grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_written_to(backend):
    before = [t.clone() for t in RAGGED]
    likelihood_and_gradients(RAGGED, backend)
    posteriors(*RAGGED, backend)
    viterbi(*RAGGED, backend)
    assert all(torch.equal(t, old) for t, old in zip(RAGGED, before, strict=True))


# ---- padding ----


@pytest.mark.parametrize("value", [0.0, 1e4, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_backward_edges_are_never_read_and_get_no_gradient(backend, value):
    # Of several tiles, for the backend that has them.
    tiles = random_graph(6, [20, 3, 1, 11], [37, 16, 1, 25])
    plain = tiles if backend in ONCE else RAGGED
    graph = fill_padding(plain, value)
    expected = likelihood_and_gradients(plain, backend)
    for number, same in zip(likelihood_and_gradients(graph, backend), expected, strict=True):
        assert_near(number, same, 1e-12)
    for ours, same in zip(viterbi(*graph, backend), viterbi(*plain, backend), strict=True):
        assert_near(ours, same, 1e-12)
    is_beyond_BML, _ = is_padding(plain)
    assert (~is_beyond_BML).sum() == (plain.num_targets_B * plain.num_states_B).sum()
    for gradient, is_beyond in zip(expected[1:], is_padding(plain), strict=True):
        assert is_beyond.any() and not gradient[is_beyond].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("which", "place"), [("log_emission_BML", (0, 1, 2)), ("log_transition_BLL", (0, 2, 4))]
)
def test_nan_and_infinity_among_what_is_read_are_not_hidden(which, place, backend, value):
    """Target 1 at state 2, or the edge from state 2 to the last one: on a path, not on all."""
    graph = with_score(random_graph(25, [3, 3], [5, 5]), which, place, value)
    log_likelihood_B = dag_log_likelihood(*graph, backend)
    assert log_likelihood_B.isfinite().tolist() == [False, True]
    assert log_likelihood_B[0] != -torch.inf


# ---- posteriors ----


@pytest.mark.parametrize("name", ["ragged", "sparse", "huge_spread", "impossible_state"])
def test_posteriors_equal_shares_of_enumerated_paths(name):
    graph = CASES[name]
    state_BML, edge_BLL = posteriors(*graph)
    assert not state_BML.requires_grad and not edge_BLL.requires_grad
    for b in range(len(state_BML)):
        scored = all_paths(graph, b)
        total = log_sum(list(scored.values()))
        state_ML, edge_LL = torch.zeros_like(state_BML[b]), torch.zeros_like(edge_BLL[b])
        for path, score in scored.items():
            share = math.exp(score - total)
            for i, u in enumerate(path):
                state_ML[i, u] += share
            for v, u in pairwise(path):
                edge_LL[v, u] += share
        assert_near(state_BML[b], state_ML)
        assert_near(edge_BLL[b], edge_LL)


@pytest.mark.parametrize("name", CASES)
def test_posteriors_sum_to_one_per_target(name):
    graph = CASES[name]
    with torch.no_grad():  # they are gradients, and must not care
        state_BML, edge_BLL = posteriors(*graph)
    has_path_B = judge(name).log_likelihood_B != -torch.inf
    is_target_BM = torch.arange(state_BML.shape[1]) < graph.num_targets_B.unsqueeze(1)
    is_expected_BM = (is_target_BM & has_path_B.unsqueeze(1)).double()
    assert_near(state_BML.sum(2), is_expected_BM)
    assert_near(edge_BLL.sum((1, 2)), (graph.num_targets_B - 1) * has_path_B.double())
    assert (state_BML >= 0).all() and (edge_BLL >= 0).all()
    # A state is entered by edges for all targets but the first, and left again.
    assert_near(edge_BLL.sum(1), state_BML[:, 1:].sum(1))
    is_inner_BM = torch.arange(state_BML.shape[1]) < (graph.num_targets_B - 1).unsqueeze(1)
    assert_near(edge_BLL.sum(2), (state_BML * is_inner_BM.unsqueeze(2)).sum(1))


# ---- viterbi ----


@pytest.mark.parametrize("name", CASES)
def test_the_judges_path_is_the_best_by_the_definition(name):
    graph, (path_BM, log_score_B) = CASES[name], judge(name)[3:]
    for b, path in enumerate(path_BM.tolist()):
        scored = all_paths(graph, b)
        M = int(graph.num_targets_B[b])
        assert set(path[M:]) <= {-1}
        if not scored:
            assert set(path) == {-1} and log_score_B[b] == -torch.inf
            continue
        best = max(scored.values())
        assert math.isclose(log_score_B[b], best, rel_tol=1e-12, abs_tol=1e-9)
        assert math.isclose(scored[tuple(path[:M])], best, rel_tol=1e-12, abs_tol=1e-9)


@pytest.mark.parametrize("backend", JUDGED)
@pytest.mark.parametrize("name", CASES)
def test_viterbi_paths_equal_the_judges(name, backend):
    path_BM, log_score_B = viterbi(*CASES[name], backend)
    assert torch.equal(path_BM, judge(name).path_BM)
    assert_near(log_score_B, judge(name).log_score_B, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize(
    ("function", "backend", "counts", "told"),
    [
        (dag_log_likelihood, "enumerate", ([1024], [4096]), "10^997"),  # beyond any float
        (viterbi, "enumerate", ([4] * 300, [40] * 300), "10^5.3 paths"),  # of all rows together
        (dag_log_likelihood, "naive", ([20] * 20, [80] * 20), "1,200,800 terms"),
        (viterbi, "naive", ([20] * 20, [80] * 20), "1,200,800 terms"),
    ],
)
def test_what_no_memory_holds_is_refused_with_its_number(function, backend, counts, told):
    M, L = max(counts[0]), max(counts[1])
    B, zero = len(counts[0]), torch.zeros(1, 1, 1)
    graph = (zero.expand(B, M, L), zero.expand(B, L, L), *map(torch.tensor, counts))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        function(*graph, backend)
    assert "use 'vectorized'" in str(error.value)


@pytest.fixture
def choice(monkeypatch):
    """``auto`` chooses anew; the function sets how well ``native`` works from here on."""
    api._first_that_works.cache_clear()

    def native_is(reason: str | None) -> None:
        asked = BACKENDS["native"]._replace(why_not=lambda device_type: reason)
        monkeypatch.setitem(BACKENDS, "native", asked)

    yield native_is
    api._first_that_works.cache_clear()


def test_auto_is_the_fastest_backend_that_works(choice):
    choice(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastest("cpu") == "native"


def test_auto_falls_back_with_one_warning(choice):
    choice("no C++ compiler 'c++'")
    with pytest.warns(UserWarning, match=r"'scaled', without 'native': no C\+\+ c") as caught:
        ours = [dag_log_likelihood(*RAGGED) for _ in range(3)]
        viterbi(*RAGGED)
    assert len(caught) == 1
    assert all(torch.equal(one, dag_log_likelihood(*RAGGED, "scaled")) for one in ours)


def test_auto_works_on_a_device_without_float64(choice):
    with pytest.warns(
        UserWarning, match="'vectorized', without 'native': .*; 'scaled': "
    ) as found:
        assert fastest("mps") == "vectorized"
    assert len(found) == 1


def test_naming_a_backend_asks_nothing_of_the_others(choice, monkeypatch):
    monkeypatch.setitem(BACKENDS, "native", BACKENDS["native"]._replace(why_not=None))
    for backend in ("enumerate", "naive", "vectorized", "scaled"):
        dag_log_likelihood(*RAGGED, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_added_up_in_float32(backend):
    dtype = torch.bfloat16
    low = CASES["ragged"].to(dtype)
    ours = likelihood_and_gradients(low, backend, torch.ones(5))
    same_in_float32 = likelihood_and_gradients(low.to(torch.float32), backend, torch.ones(5))
    assert ours[0].dtype == torch.float32 and ours[1].dtype == ours[2].dtype == dtype
    assert torch.equal(ours[0], same_in_float32[0])
    for our, theirs in zip(ours[1:], same_in_float32[1:], strict=True):
        assert torch.equal(our, theirs.to(dtype))
    assert all(t.dtype == torch.float32 for t in posteriors(*low, backend))
    path_BM, log_score_B = viterbi(*low, backend)
    expected_BM, expected_B = viterbi(*low.to(torch.float32), backend)
    assert torch.equal(path_BM, expected_BM) and torch.equal(log_score_B, expected_B)


@pytest.mark.parametrize(("backend", "limit"), [("scaled", 1e-6), ("native", 1e-5)])
@pytest.mark.parametrize("name", CASES)
def test_float32_gradients_of_rescaled_backends_are_exact(name, backend, limit):
    assert_near_float64(CASES[name].to(torch.float32), backend, "enumerate", limit)


@pytest.mark.parametrize("backend", ONCE)
def test_layout_of_memory_does_not_matter(backend):
    graph = random_graph(10, [6, 4], [19, 12])
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in graph[:2]]
    assert not turned[1].is_contiguous()
    ours = likelihood_and_gradients(Graph(*turned, *graph[2:]), backend)
    for number, same in zip(ours, likelihood_and_gradients(graph, backend), strict=True):
        assert_near(number, same, 1e-13)


@pytest.mark.parametrize("backend", ONCE)
def test_no_rows_give_nothing(backend):
    graph = Graph(*(t[:0].clone() for t in RAGGED))
    log_likelihood_B, *gradients = likelihood_and_gradients(graph, backend)
    assert log_likelihood_B.shape == (0,)
    assert [g.shape for g in gradients] == [t.shape for t in graph[:2]]
    path_BM, log_score_B = viterbi(*graph, backend)
    assert path_BM.shape == (0, 5) and log_score_B.shape == (0,)


@pytest.mark.parametrize("backend", ["auto", "vectorized"])
def test_compiling_gives_the_same_numbers(backend):
    if reason := BACKENDS["native"].why_not("cpu"):
        pytest.skip(f"no backend native here: {reason}")
    compiled = torch.compile(dag_log_likelihood, backend="aot_eager", fullgraph=True)
    expected = likelihood_and_gradients(RAGGED, backend)
    scores = [t.clone().requires_grad_() for t in RAGGED[:2]]
    log_likelihood_B = compiled(*scores, *RAGGED[2:], backend)
    grad_B = torch.tensor([1.5, -0.5, 0.0, 2.0, -1.0], dtype=torch.float64)
    ours = (log_likelihood_B.detach(), *torch.autograd.grad(log_likelihood_B, scores, grad_B))
    for number, same in zip(ours, expected, strict=True):
        assert_near(number, same, 1e-12)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"log_emission_BML": torch.zeros(2, 3)}, ["(B, M, L)", "(2, 3)"]),
        ({"log_transition_BLL": torch.zeros(2, 4, 4)}, ["(2, 5, 5)", "(2, 3, 5)", "(2, 4, 4)"]),
        ({"log_transition_BLL": torch.zeros(2, 5, 5)}, ["float64", "float32"]),
        ({"num_targets_B": torch.tensor([3])}, ["num_targets_B", "(2,)", "(1,)"]),
        ({"num_states_B": torch.tensor([5.0, 5.0])}, ["num_states_B", "int64", "float32"]),
        ({"num_targets_B": torch.tensor([3, 4])}, ["num_targets_B", "1..3", "[3, 4]"]),
        ({"num_targets_B": torch.tensor([0, 3])}, ["num_targets_B", "1..3", "[0, 3]"]),
        ({"num_states_B": torch.tensor([5, 6])}, ["num_states_B", "1..5", "[5, 6]"]),
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


# ---- without transitions ----


def spells(labels: tuple[int, ...]) -> list[int]:
    """CTC's reading of labels: merge neighbours, then drop blanks (0)."""
    return [label for label, _ in groupby(labels) if label != 0]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_ctc_equals_the_sum_over_labelings(k):
    rng = torch.Generator().manual_seed(k)
    # Probabilities of blank, of the target (1) and of another token (2) at each state.
    log_label_BMk3 = torch.randn(2, 3, k, 3, generator=rng, dtype=torch.float64).log_softmax(-1)
    total_BM = torch.zeros(2, 3, dtype=torch.float64)
    for labels in product(range(3), repeat=k):
        if spells(labels) == [1]:
            steps = [log_label_BMk3[..., place, label] for place, label in enumerate(labels)]
            total_BM += torch.stack(steps).sum(0).exp()
    ours_BM = run_log_likelihood(log_label_BMk3[..., 1], log_label_BMk3[..., 0])
    assert_near(ours_BM, total_BM.log(), 1e-12)


def test_ctc_stands_huge_scores():
    log_target_BMk = torch.tensor([[[-1e4, -1.0, -1e4]]], dtype=torch.float64)
    log_blank_BMk = torch.tensor([[[-2.0, -1e4, -3.0]]], dtype=torch.float64)
    ours_BM = run_log_likelihood(log_target_BMk, log_blank_BMk)
    assert_near(ours_BM, torch.tensor([[-6.0]], dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_right_or_refused(backend):
    """Of a plain sum, whose own gradient is a constant: easily a wrong number without a word."""
    graph = random_graph(23, [3], [5])

    def likelihood(log_emission_BML: Tensor) -> Tensor:
        return dag_log_likelihood(log_emission_BML, *graph[1:], backend).sum()

    inputs = (graph.log_emission_BML.clone().requires_grad_(),)
    if backend in ONCE:
        with pytest.raises(RuntimeError, match="backend 'naive' or 'enumerate'"):
            torch.autograd.functional.hessian(likelihood, inputs)
    else:
        assert torch.autograd.gradgradcheck(likelihood, inputs)


def transforms(graph: Graph, backend: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the likelihood of all rows by both scores, as ``torch.func`` gives them."""

    def each(*scores: Tensor) -> Tensor:
        return dag_log_likelihood(*scores, *graph[2:], backend)

    scores, one_B = graph[:2], torch.ones(len(graph.num_targets_B), dtype=torch.float64)
    by_row = torch.func.jacrev(each, argnums=(0, 1))(*scores)
    _, pull = torch.func.vjp(each, *scores)
    leaves = tuple(t.clone().requires_grad_() for t in scores)
    value_B = each(*leaves)
    with torch.no_grad():  # which closes vjp's own level before the gradient is asked for
        _, pull_without_grad = torch.func.vjp(each, *scores)
        without_grad = pull_without_grad(one_B)
    return {
        "grad": torch.func.grad(lambda *s: each(*s).sum(), argnums=(0, 1))(*scores),
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
def test_scores_may_be_parameters_under_torch_func(backend):
    graph = random_graph(23, [3], [5])
    transition = torch.nn.Parameter(graph.log_transition_BLL)

    def total(log_emission_BML: Tensor) -> Tensor:
        return dag_log_likelihood(log_emission_BML, transition, *graph[2:], backend).sum()

    expected = likelihood_and_gradients(graph, backend, torch.ones_like(weights(graph)))[1]
    assert_near(torch.func.grad(total)(graph.log_emission_BML), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_posteriors_under_torch_func_are_constants(backend):
    graph = random_graph(23, [3], [5])

    def product(log_emission_BML: Tensor) -> Tensor:
        state_BML = posteriors(log_emission_BML, *graph[1:], backend).state_BML
        return (state_BML * log_emission_BML).sum()

    expected = posteriors(*graph, backend).state_BML
    assert_near(torch.func.grad(product)(graph.log_emission_BML), expected)


@pytest.mark.parametrize("backend", ONCE)
@pytest.mark.parametrize("transform", ["vmap", "jacfwd", "hessian", "jvp"])
def test_torch_func_is_told_what_a_hand_written_gradient_lacks(transform, backend):
    graph = random_graph(23, [3], [5])

    def each(log_emission_BML: Tensor) -> Tensor:
        return dag_log_likelihood(log_emission_BML, *graph[1:], backend)

    scores = graph.log_emission_BML
    with pytest.raises(RuntimeError, match=rf"torch.func has grad, vjp and .*{transform}"):
        if transform == "jvp":
            torch.func.jvp(each, (scores,), (scores,))
        elif transform == "vmap":
            torch.func.vmap(each)(torch.stack([scores, scores]))
        else:
            getattr(torch.func, transform)(each)(scores)


@pytest.mark.parametrize("backend", ONCE)
def test_torch_func_of_a_gradient_is_refused_as_a_second_derivative(backend):
    graph = random_graph(23, [3], [5])

    def total(log_emission_BML: Tensor) -> Tensor:
        return dag_log_likelihood(log_emission_BML, *graph[1:], backend).sum()

    for twice in (torch.func.jacrev(torch.func.jacrev(total)),
                  torch.func.grad(lambda x: torch.func.grad(total)(x).sum())):  # fmt: skip
        with pytest.raises(RuntimeError, match="backend 'naive' or 'enumerate'"):
            twice(graph.log_emission_BML)


def test_relative_error_is_the_largest_difference_over_the_largest_value():
    exact = torch.tensor([4.0, -8.0, 1.0], dtype=torch.float64)
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([5.0, -8.0, 1.5]), exact) == 1 / 8
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    # Infinities are left out where both have them, and nowhere else.
    exact = torch.tensor([-torch.inf, -2.0])
    assert relative_error(torch.tensor([-torch.inf, -3.0]), exact) == 0.5
    assert relative_error(torch.tensor([-5.0, -2.0]), exact) == math.inf
    assert relative_error(torch.tensor([-torch.inf, torch.nan]), exact) == math.inf
