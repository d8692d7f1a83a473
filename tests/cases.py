"""The table of graphs every alignment backend meets, and what the judge says of each.

Shapes: B rows, M targets, L states. All graphs are float64; ``Graph.to`` makes another dtype or
device of them. The judge is ``alignment/enumeration.py``, which ``test_alignment.py`` holds
against an enumeration of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, viterbi


class Graph(NamedTuple):
    """The four arguments of every alignment function, in order."""

    log_emission_BML: Tensor
    log_transition_BLL: Tensor
    num_targets_B: Tensor
    num_states_B: Tensor

    def to(
        self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> Graph:
        """The same graph in another dtype, on another device."""
        scores = (t.to(device, dtype) for t in self[:2])
        return Graph(*scores, *(t.to(device) for t in self[2:]))

    def row(self, b: int) -> Graph:
        """Row b by itself, without padding."""
        M, L = int(self.num_targets_B[b]), int(self.num_states_B[b])
        return Graph(
            self.log_emission_BML[b : b + 1, :M, :L],
            self.log_transition_BLL[b : b + 1, :L, :L],
            self.num_targets_B[b : b + 1],
            self.num_states_B[b : b + 1],
        )


class Verdict(NamedTuple):
    """What the judge says of a graph."""

    log_likelihood_B: Tensor
    grad_emission_BML: Tensor
    grad_transition_BLL: Tensor
    path_BM: Tensor
    log_score_B: Tensor


def is_padding(graph: Graph) -> tuple[Tensor, Tensor]:
    """Entries beyond the valid targets or states: of the emission, of the transition (bool)."""
    _, M, L = graph.log_emission_BML.shape
    is_state_BL = torch.arange(L) < graph.num_states_B.unsqueeze(1)
    is_target_BM = torch.arange(M) < graph.num_targets_B.unsqueeze(1)
    return (
        ~(is_target_BM.unsqueeze(2) & is_state_BL.unsqueeze(1)),
        ~(is_state_BL.unsqueeze(2) & is_state_BL.unsqueeze(1)),
    )


def random_graph(
    seed: int,
    num_targets: Sequence[int],
    num_states: Sequence[int],
    density: float = 1.0,
    scale: float = 2.0,
) -> Graph:
    """A graph with random emissions and normalised random transitions.

    Args:
        seed: of the numbers.
        num_targets, num_states: one entry per row; the tensors are as large as the largest.
        density: share of forward edges that exist.
        scale: standard deviation of the scores before they are normalised.

    Returns:
        The graph. Transitions are -inf wherever u <= v, padding holds finite random numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    B, M, L = len(num_states), max(num_targets), max(num_states)
    normal = {"generator": rng, "dtype": torch.float64}
    log_emission_BML = scale * torch.randn(B, M, L, **normal) - 2 * scale
    scores_BLL = scale * torch.randn(B, L, L, **normal)
    is_forward_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    is_kept_BLL = torch.rand(B, L, L, **normal) < density
    graph = Graph(
        log_emission_BML, scores_BLL, torch.tensor(num_targets), torch.tensor(num_states)
    )
    _, is_beyond_BLL = is_padding(graph)
    is_edge_BLL = is_forward_LL & is_kept_BLL & ~is_beyond_BLL
    log_total_BL1 = scores_BLL.masked_fill(~is_edge_BLL, -torch.inf).logsumexp(2, keepdim=True)
    log_transition_BLL = torch.where(
        is_edge_BLL, scores_BLL - log_total_BL1.nan_to_num(neginf=0.0), -torch.inf
    )
    padding_BLL = torch.where(is_forward_LL, scores_BLL, -torch.inf)
    return graph._replace(
        log_transition_BLL=torch.where(is_beyond_BLL, padding_BLL, log_transition_BLL)
    )


def all_ones_graph(num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """Every score is log 1, so the likelihood counts the paths."""
    graph = random_graph(0, num_targets, num_states)
    return graph._replace(
        log_emission_BML=torch.zeros_like(graph.log_emission_BML),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(
            graph.log_transition_BLL != -torch.inf, 0.0
        ),
    )


def fill_padding(graph: Graph, value: float) -> Graph:
    """The same graph with a value wherever nothing is read: padding, and edges not forward."""
    is_beyond_BML, is_beyond_BLL = is_padding(graph)
    is_forward_LL = torch.ones_like(is_beyond_BLL[0]).triu(1)
    return graph._replace(
        log_emission_BML=graph.log_emission_BML.masked_fill(is_beyond_BML, value),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(
            is_beyond_BLL | ~is_forward_LL, value
        ),
    )


def without_edges(graph: Graph, edges: Sequence[tuple[int, int, int]]) -> Graph:
    """The same graph with edges (row, from, to) taken out."""
    log_transition_BLL = graph.log_transition_BLL.clone()
    for b, v, u in edges:
        log_transition_BLL[b, v, u] = -torch.inf
    return graph._replace(log_transition_BLL=log_transition_BLL)


def without_emissions(graph: Graph, emissions: Sequence[tuple[int, int, int]]) -> Graph:
    """The same graph with emissions (row, target, state) made impossible."""
    log_emission_BML = graph.log_emission_BML.clone()
    for b, i, u in emissions:
        log_emission_BML[b, i, u] = -torch.inf
    return graph._replace(log_emission_BML=log_emission_BML)


def _column(graph: Graph, b: int, u: int) -> list[tuple[int, int, int]]:
    """All emissions of one state."""
    return [(b, i, u) for i in range(graph.log_emission_BML.shape[1])]


def _shifted(graph: Graph, emission: float, transition: float) -> Graph:
    """Every emission and every transition plus a number."""
    return graph._replace(
        log_emission_BML=graph.log_emission_BML + emission,
        log_transition_BLL=graph.log_transition_BLL + transition,
    )


def _one_likely_edge(graph: Graph) -> Graph:
    """Edges differ by 1e4: all are unlikely, but for the last of each state."""
    is_edge_BLL = graph.log_transition_BLL != -torch.inf
    is_last_BLL = is_edge_BLL & (is_edge_BLL.long().flip(2).cumsum(2).flip(2) == 1)
    log_transition_BLL = graph.log_transition_BLL - 1e4 * ~is_last_BLL
    return graph._replace(log_transition_BLL=log_transition_BLL)


def flat_graph(num_targets: list[int], num_states: list[int]) -> Graph:
    """All forward edges equally likely, all emissions 1: an untrained model."""
    graph = all_ones_graph(num_targets, num_states)
    num_ways_BL1 = (graph.log_transition_BLL == 0).double().sum(2, keepdim=True)
    return graph._replace(
        log_transition_BLL=graph.log_transition_BLL - num_ways_BL1.clamp(min=1).log()
    )


def two_ways(unit: float, by: str) -> Graph:
    """Two paths of ten states: odd ones, whose first and last steps cost 130 units, and even
    ones, whose nine steps cost 50 each. ``by`` says where the 130 are paid."""
    M, L = 10, 20
    emission_ML = torch.zeros(M, L, dtype=torch.float64)
    transition_LL = torch.full((L, L), -torch.inf, dtype=torch.float64)
    odd, even = [0, *range(1, 2 * M - 3, 2), L - 1], [0, *range(2, 2 * M - 2, 2), L - 1]
    for path, cost in ((odd, 0.0), (even, 50.0)):
        for v, u in pairwise(path):
            transition_LL[v, u] = -cost * unit
    if by == "edges":
        transition_LL[odd[0], odd[1]] = transition_LL[odd[-2], odd[-1]] = -130 * unit
    else:
        emission_ML[1, odd[1]] = emission_ML[-2, odd[-2]] = -130 * unit
    counts = (torch.tensor([M]), torch.tensor([L]))
    return Graph(emission_ML.unsqueeze(0), transition_LL.unsqueeze(0), *counts)


def tied_graph(seed: int, num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """Scores are -1 or -2, exact in any order of summation: many best paths."""
    graph = random_graph(seed, num_targets, num_states, density=0.8)
    return graph._replace(
        log_emission_BML=-1.0 - (graph.log_emission_BML > -4).double(),
        log_transition_BLL=torch.where(
            graph.log_transition_BLL == -torch.inf,
            -torch.inf,
            -1.0 - (graph.log_transition_BLL > -2).double(),
        ),
    )


def _two_tied_paths() -> Graph:
    """0-1-4-5 and 0-2-3-5 are equally likely, and no other path exists."""
    graph = all_ones_graph([4], [6])
    edges = {(0, 1), (1, 4), (4, 5), (0, 2), (2, 3), (3, 5)}
    missing = [(0, v, u) for v in range(6) for u in range(6) if (v, u) not in edges]
    return without_edges(graph, missing)


def _cases() -> dict[str, Graph]:
    ragged = random_graph(5, [4, 2, 1, 3, 5], [7, 6, 1, 3, 8])
    square = random_graph(6, [4, 4], [7, 7])
    return {
        "one_target_one_state": random_graph(0, [1, 1], [1, 1]),
        "one_target_many_states": random_graph(1, [1, 1, 1], [2, 5, 1]),
        "two_targets": random_graph(2, [2, 2], [2, 6]),
        "as_many_targets_as_states": random_graph(3, [6, 4], [6, 4]),
        "more_targets_than_states": random_graph(4, [5, 5], [3, 6]),
        "ragged": ragged,
        "33_states": random_graph(7, [4, 3], [33, 32]),
        "65_states": random_graph(8, [3], [65]),
        "many_rows": random_graph(9, [3] * 9, [5] * 9),
        "many_targets": random_graph(10, [11, 12], [13, 13]),
        # Row 0 has no way out of its start, row 1 none into its end, row 2 is whole.
        "no_path_through_missing_edges": without_edges(
            random_graph(11, [3, 3, 3], [5, 5, 5]),
            [(0, 0, u) for u in range(1, 5)] + [(1, v, 4) for v in range(4)],
        ),
        # Only paths that are too short or too long exist.
        "no_path_of_this_length": without_edges(
            random_graph(12, [3], [4]), [(0, 0, 2), (0, 1, 3)]
        ),
        "sparse": random_graph(13, [3, 4, 5, 4], [6, 9, 7, 8], density=0.5),
        "very_sparse": random_graph(14, [3, 3, 3, 2], [6, 7, 5, 4], density=0.25),
        "huge_scores": _shifted(ragged, 1e4, 1e4),
        "very_negative_scores": _shifted(ragged, -1e4, -1e4),
        "huge_spread": random_graph(15, [4, 3], [8, 8], scale=1e4),
        "one_likely_edge": _one_likely_edge(random_graph(16, [3, 5], [7, 8])),
        "impossible_state": without_emissions(
            square, [*_column(square, 0, 3), *_column(square, 1, 2), *_column(square, 1, 5)]
        ),
        "impossible_first_emission": without_emissions(square, [(0, 0, 0)]),
        "impossible_last_emission": without_emissions(square, [(1, 3, 6)]),
        "impossible_target": without_emissions(square, [(0, 2, u) for u in range(7)]),
        "one_target_impossible": without_emissions(
            random_graph(17, [1, 1], [1, 1]), [(0, 0, 0)]
        ),
        "ties": tied_graph(18, [3, 4, 5], [7, 8, 7]),
        "two_tied_paths": _two_tied_paths(),
        "all_ones": all_ones_graph([4, 6, 2], [9, 8, 5]),
        "all_minus_infinity": random_graph(19, [3], [5], density=0.0),
    }


CASES = _cases()
"""Name to graph."""

UNREACHED = (3, 20)
GRAPH_FOR_NAN = without_edges(
    random_graph(7, [9, 9], [40, 40]),
    [(b, v, u) for b in range(2) for u in UNREACHED for v in range(u)],
)
"""No edge enters the states ``UNREACHED``."""
PLACES_OF_NAN = [
    ("log_emission_BML", (0, 0, 0)),
    ("log_emission_BML", (0, 4, 19)),
    ("log_emission_BML", (0, 4, 20)),
    ("log_emission_BML", (0, 8, 39)),
    ("log_transition_BLL", (0, 0, 1)),
    ("log_transition_BLL", (0, 3, 30)),
    ("log_transition_BLL", (0, 4, 30)),
    ("log_transition_BLL", (0, 38, 39)),
]
"""In its first row: what no path reaches is read as well."""

WEIGHTS = (1.5, -0.5, 0.0, 2.0, -1.0, 0.25, 3.0, -2.5, 1.0)
"""Incoming gradients, one per row."""


def weights(graph: Graph) -> Tensor:
    """The incoming gradient of each row, (B,)."""
    return graph.log_emission_BML.new_tensor(WEIGHTS[: len(graph.num_targets_B)])


def likelihood_and_gradients(
    graph: Graph, backend: str, grad_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log_likelihood_B and the gradients of its weighted sum by emission and transition.

    Args:
        graph: the graph.
        backend: a name in ``BACKENDS``.
        grad_B: the incoming gradient; none: ``weights``.
    """
    scores = [t.detach().clone().requires_grad_() for t in graph[:2]]
    log_likelihood_B = dag_log_likelihood(*scores, *graph[2:], backend)
    grad_B = weights(graph) if grad_B is None else grad_B
    return log_likelihood_B.detach(), *torch.autograd.grad(log_likelihood_B, scores, grad_B)


@lru_cache
def judge(name: str) -> Verdict:
    """What enumeration says of the case of that name, with ``weights`` as incoming gradient."""
    graph = CASES[name]
    return Verdict(
        *likelihood_and_gradients(graph, "enumerate"), *viterbi(*graph, backend="enumerate")
    )


def error(ours: Tensor, truth: Tensor) -> float:
    """max |difference| / max |truth|, where -inf must stand at the same places."""
    is_finite = truth.isfinite()
    assert torch.equal(ours.isfinite(), is_finite)
    assert torch.equal(ours[~is_finite].double(), truth[~is_finite])
    difference = (ours.double() - truth)[is_finite].abs().max() if is_finite.any() else 0.0
    size = truth[is_finite].abs().max() if is_finite.any() else 1.0
    return float(difference / size) if difference > 0 else 0.0


def assert_float32_is_near(
    graph: Graph, backend: str, truth_by: str, limit: float | None = None
) -> None:
    """Against float64 on the same float32 inputs: the loss to 1e-6, its gradients to ``limit``,
    by default 1e-5 up to M = 77 and 1e-4 above."""
    single = graph.to(torch.float32)
    value, *gradients = likelihood_and_gradients(single, backend)
    true_value, *truth = likelihood_and_gradients(single.to(torch.float64), truth_by)
    assert value.dtype == gradients[0].dtype == gradients[1].dtype == torch.float32
    assert error(value, true_value) <= 1e-6
    limit = limit or (1e-5 if graph.log_emission_BML.shape[1] <= 77 else 1e-4)
    for ours, true in zip(gradients, truth, strict=True):
        assert error(ours, true) <= limit
