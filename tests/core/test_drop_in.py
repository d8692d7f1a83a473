"""The sum over all paths in other programs: their arguments, and their use of PyTorch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from cases import CASES, FLOAT64, RAGGED, two_ways
from fibers import works_here  # noqa: F401
from torch import Tensor

from exlm_mini.alignment import (
    BACKENDS,
    api,
    dag_log_likelihood,
    dag_loss,
    fastest,
    posteriors,
    torch_dag_loss,
    viterbi,
)
from exlm_mini.alignment.check import (
    likelihood_and_gradients,
    random_graph,
    relative_error,
    weights,
)
from exlm_mini.alignment.graphs import Graph

# ---- arguments ----


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16])
def test_counts_may_be_any_integers_and_the_order_that_of_da_transformer(dtype):
    value_B, *gradients = likelihood_and_gradients(RAGGED, "scaled")
    scores = [t.clone().requires_grad_() for t in RAGGED[:2]]
    num_targets, num_states = (count_B.to(dtype) for count_B in RAGGED[2:])
    for loss_B in (
        dag_loss(*scores, num_targets=num_targets, num_states=num_states),
        -torch_dag_loss(*scores, num_states, num_targets),
    ):
        ours = -loss_B, *torch.autograd.grad(-loss_B, scores, weights(RAGGED))
        for number, same in zip(ours, (value_B, *gradients), strict=True):
            assert relative_error(number, same) < 1e-12


@pytest.mark.parametrize("as_count", [int, np.int64, torch.tensor])
def test_one_number_counts_for_all_rows(as_count):
    graph = random_graph(3, [4, 4, 4], [9, 9, 9])
    M, L = as_count(4), as_count(9)
    expected_B = dag_log_likelihood(*graph)
    for ours_B in (
        -dag_loss(*graph[:2], num_targets=M, num_states=L),
        torch_dag_loss(*graph[:2], L, M),
        dag_log_likelihood(*graph[:2], M, L),
    ):
        assert torch.equal(ours_B, expected_B)
    assert torch.equal(viterbi(*graph[:2], M, L)[0], viterbi(*graph)[0])
    assert torch.equal(posteriors(*graph[:2], M, L).edge_BLL, posteriors(*graph).edge_BLL)


@pytest.mark.parametrize("reach", [1, 3])
def test_edges_by_how_far_they_reach_are_those_of_a_matrix_with_a_band(reach):
    (emission, _, *counts), L = RAGGED, RAGGED.log_emission_BML.shape[2]
    banded = torch.randn(5, L, reach, dtype=FLOAT64).log_softmax(2)
    dense = torch.full((5, L, L), -torch.inf, dtype=FLOAT64)
    for t in range(reach):
        dense.diagonal(1 + t, 1, 2).copy_(banded[:, : L - 1 - t, t])
    ours_B, expected_B = (
        dag_log_likelihood(emission, edges, *counts) for edges in (banded, dense)
    )
    assert torch.equal(ours_B, expected_B) and expected_B.isfinite().any()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"log_emission_BML": torch.zeros(2, 3)}, ["(B, M, L)", "(2, 3)"]),
        ({"log_transition_BLL": torch.zeros(2, 5, 5, device="meta").double()}, ["cpu", "meta"]),
        ({"log_transition_BLL": torch.zeros(2, 4, 4)}, ["(2, 5, 5)", "(2, 3, 5)", "(2, 4, 4)"]),
        ({"log_transition_BLL": torch.zeros(2, 5, 5)}, ["float64", "float32"]),
        (
            {
                "log_emission_BML": torch.zeros(2, 3, 5, dtype=torch.int64),
                "log_transition_BLL": torch.zeros(2, 5, 5, dtype=torch.int64),
            },
            ["int64", "floating-point"],
        ),
        ({"num_targets_B": 4}, ["num_targets must lie in 1..3, got 4"]),
        ({"num_targets_B": [0, 3]}, ["num_targets must lie in 1..3, got [0, 3]"]),
        ({"num_states_B": torch.tensor([5, 6])}, ["num_states must lie in 1..5, got [5, 6]"]),
        ({"num_states_B": 0}, ["num_states must lie in 1..5, got 0"]),
        (
            {"num_states_B": 5.0},
            ["num_states must be an integer", "shape (2,), got torch.float32 ()"],
        ),
        ({"num_states_B": True}, ["num_states must be an integer", "got torch.bool ()"]),
        (
            {"num_targets_B": [3, 2, 1]},
            ["num_targets must be an integer", "got torch.int64 (3,)"],
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed, words):
    graph = random_graph(24, [3, 3], [5, 5])._replace(**changed)
    for function in (dag_log_likelihood, posteriors, viterbi):
        with pytest.raises(ValueError) as caught:
            function(*graph)
        assert all(word in str(caught.value) for word in words)


# ---- the table of backends ----


def test_an_unknown_backend_offers_the_nearest():
    with pytest.raises(ValueError, match="'vectorised'; did you mean vectorized"):
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
    assert len(caught) == (reason is not None)
    assert all("'native' is not available: no C++ c" in str(w.message) for w in caught)


def test_naming_a_backend_asks_nothing_of_the_others(monkeypatch):
    monkeypatch.setitem(BACKENDS, "native", BACKENDS["native"]._replace(why_not=None))
    for name in ("enumerate", "naive", "vectorized", "scaled"):
        dag_log_likelihood(*RAGGED, name)


# ---- torch.compile and torch.func ----


@pytest.mark.parametrize(
    ("backend", "name", "reach"),
    [
        ("native", "ragged", None),
        ("native", "ragged", 4),
        ("vectorized", "ragged", None),
        # The compiled graph breaks where a row is computed again.
        pytest.param("scaled", "huge_spread", None, marks=pytest.mark.slow),
    ],
)
def test_compiling_gives_the_same_numbers(backend, name, reach):
    graph = CASES[name]
    graph = graph._replace(log_transition_BLL=graph.log_transition_BLL[..., :reach])
    is_whole, asked = backend != "scaled", "auto" if backend == "native" else backend
    compiled = torch.compile(dag_log_likelihood, backend="aot_eager", fullgraph=is_whole)
    scores = [t.clone().requires_grad_() for t in graph[:2]]
    value_B = compiled(*scores, *graph[2:], asked)
    ours = value_B.detach(), *torch.autograd.grad(value_B, scores, weights(graph))
    for number, same in zip(ours, likelihood_and_gradients(graph, backend), strict=True):
        assert relative_error(number, same) < 1e-12


def transforms(graph: Graph, backend: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the summed log-likelihood for both scores, by each way of ``torch.func``."""

    def each(*scores: Tensor) -> Tensor:
        return dag_log_likelihood(*scores, *graph[2:], backend)

    scores, one_B = graph[:2], torch.ones(len(graph.num_targets_B), dtype=torch.float64)
    by_row = torch.func.jacrev(each, argnums=(0, 1))(*scores)
    _, pull = torch.func.vjp(each, *scores)
    leaves = tuple(torch.nn.Parameter(t.clone()) for t in scores)
    value_B = each(*leaves)
    with torch.no_grad():  # vjp's own level is closed before the gradient is asked for
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
def test_posteriors_and_best_paths_under_torch_func_are_constants(backend):
    graph = random_graph(23, [3], [5])

    def product(log_emission_BML: Tensor) -> Tensor:
        state_BML = posteriors(log_emission_BML, *graph[1:], backend).state_BML
        _, log_score_B = viterbi(log_emission_BML, *graph[1:], backend)
        return (state_BML * log_emission_BML).sum() + log_score_B.sum()

    expected = posteriors(*graph, backend).state_BML
    ours = torch.func.grad(product)(graph.log_emission_BML)
    assert relative_error(ours, expected) < 1e-12


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
    """A plain sum has a constant gradient, so its derivatives could easily be silently wrong."""
    for graph in (random_graph(23, [3], [5]), two_ways(7.0, "edges")):
        with pytest.raises(RuntimeError, match=words):
            transform(
                lambda x, rest=graph[1:]: dag_log_likelihood(x, *rest, backend),
                graph.log_emission_BML,
            )
