"""The compiled backend on a CPU: in range, at size, and as an operator.

``test_alignment`` and ``test_kernels`` hold it against enumeration. Shapes: B rows, M targets,
L states.
"""

from __future__ import annotations

import pytest
import torch
from hard_graphs import DTYPES, assert_near_float64, flat_graph, spread_graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exlm_mini.alignment import native, posteriors, viterbi
from exlm_mini.alignment.cases import CASES, Graph, likelihood_and_gradients, random_graph

TILED = 0
FLOAT32 = torch.float32


@pytest.fixture(scope="module", autouse=True)
def backend() -> str:
    """The name of the backend; skips where it cannot be built."""
    if reason := native.why_not("cpu"):
        pytest.skip(f"no C++ backend here: {reason}")
    return "native"


def status(graph: Graph) -> list[int]:
    """How each row was computed."""
    return torch.ops.exlm_mini.dag_log_likelihood(*graph)[3][:, 0].tolist()


@pytest.mark.parametrize("scale", [1.0, 100.0, 1000.0, 1e5])
@given(seed=st.integers(0, 2**31), M=st.integers(2, 5), L=st.integers(5, 9))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_float32_is_near_float64_whatever_the_spread(scale, backend, seed, M, L):
    graph = random_graph(seed, [M, M], [L, L], density=0.8, scale=scale)
    assert_near_float64(graph.to(FLOAT32), backend, "enumerate")


def test_flat_long_graphs_stay_on_the_fast_path(backend):
    graph = flat_graph([256, 200], [1024, 1000])
    assert status(graph.to(FLOAT32)) == [TILED, TILED]
    state_BML, edge_BLL = posteriors(*graph.to(FLOAT32), backend)
    is_target_BM = torch.arange(256) < graph.num_targets_B.unsqueeze(1)
    assert (state_BML.sum(2) - is_target_BM.float()).abs().max() < 1e-5
    assert (edge_BLL.sum((1, 2)) - (graph.num_targets_B - 1)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "graph",
    [
        spread_graph(2),
        random_graph(2, [77, 60], [308, 291], scale=3.0),
        flat_graph([64], [256]),
    ],
)
def test_graphs_of_the_size_of_the_paper_stay_on_the_fast_path(graph, backend):
    assert set(status(graph.to(FLOAT32))) == {TILED}
    for dtype in DTYPES:
        assert_near_float64(graph.to(dtype), backend, "vectorized")


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph",
    [flat_graph([2048], [2048]), flat_graph([256], [4096]), random_graph(6, [300], [4096])],
)
def test_thousands_of_states(graph, backend):
    assert status(graph.to(FLOAT32)) == [TILED]
    assert_near_float64(graph.to(FLOAT32), backend, "scaled", 1e-4)


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


# ---- the operator ----


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("ragged", FLOAT32), ("no_path_through_missing_edges", torch.float64)],
)
def test_operators_pass_opcheck(name, dtype):
    graph = CASES[name].to(dtype)
    scores = [t.clone().requires_grad_() for t in graph[:2]]
    torch.library.opcheck(torch.ops.exlm_mini.dag_log_likelihood, (*scores, *graph[2:]))
    torch.library.opcheck(torch.ops.exlm_mini.dag_viterbi, tuple(graph))
    _, *buffers = torch.ops.exlm_mini.dag_log_likelihood(*graph)
    grad_B = torch.ones(len(graph.num_targets_B), dtype=dtype)
    torch.library.opcheck(torch.ops.exlm_mini.dag_gradients, (grad_B, *graph, *buffers))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_targets_B": torch.tensor([4, 1])}, "num_targets_B must lie in 1..3"),
        ({"num_states_B": torch.tensor([5.0, 5.0])}, "want num_states_B int64"),
        ({"log_transition_BLL": torch.zeros(2, 4, 4).double()}, "want transition"),
        ({"log_emission_BML": torch.zeros(2, 3, 5).bfloat16()}, "want float32 or float64"),
    ],
)
def test_the_operator_refuses_what_would_read_elsewhere(changed, words):
    graph = random_graph(12, [3, 3], [5, 5])._replace(**changed)
    for function in (native.log_likelihood, native.viterbi):
        with pytest.raises(ValueError, match=words):
            function(*graph)
