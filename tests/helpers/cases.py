"""Graphs that test every alignment backend, their correct results, and how large an error may be.

Shapes: B rows, M targets, L states. The reference is the enumeration of all paths in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import viterbi
from exlm_mini.alignment.check import (
    JUDGE,
    likelihood_and_gradients,
    random_graph,
    relative_error,
)
from exlm_mini.alignment.graphs import Graph

DTYPES = FLOAT32, FLOAT64 = (torch.float32, torch.float64)
LOG_SPACE = ("enumerate", "naive", "vectorized")
"""Backends that add logarithms, whose rounding ``limits`` allows for."""
EMISSION, TRANSITION = "log_emission_BML", "log_transition_BLL"
EVERY = slice(None)

# ---- graphs ----


def is_padding(graph: Graph) -> tuple[Tensor, Tensor]:
    """Masks (bool) of the emissions and of the transitions beyond the valid targets or states."""
    M, is_state_BL = graph.log_emission_BML.shape[1], graph.is_state_BL
    is_target_BM = torch.arange(M) < graph.num_targets_B.unsqueeze(1)
    return tuple(
        ~(is_from.unsqueeze(2) & is_state_BL.unsqueeze(1))
        for is_from in (is_target_BM, is_state_BL)
    )


def fill_padding(graph: Graph, value: float) -> Graph:
    """The same graph with ``value`` wherever nothing may be read: in padding and where u <= v."""
    is_beyond_BML, is_beyond_BLL = is_padding(graph)
    is_backward_LL = torch.ones_like(is_beyond_BLL[0]).tril()
    return graph._replace(
        log_emission_BML=graph.log_emission_BML.masked_fill(is_beyond_BML, value),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(
            is_beyond_BLL | is_backward_LL, value
        ),
    )


def with_score(graph: Graph, which: str, place: tuple, value: float = -torch.inf) -> Graph:
    """The same graph with ``value`` at ``place``, an index that may contain slices and lists."""
    scores = getattr(graph, which).clone()
    scores[place] = value
    return graph._replace(**{which: scores})


def shifted(graph: Graph, emission: float, transition: float) -> Graph:
    """The same graph with one number added to every emission and another to every transition."""
    return graph._replace(
        log_emission_BML=graph.log_emission_BML + emission,
        log_transition_BLL=graph.log_transition_BLL + transition,
    )


def all_ones_graph(num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """A graph in which every score is log 1, so that the likelihood counts the paths."""
    graph = random_graph(0, num_targets, num_states)
    is_edge_BLL = graph.log_transition_BLL != -torch.inf
    return graph._replace(
        log_emission_BML=torch.zeros_like(graph.log_emission_BML),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(is_edge_BLL, 0.0),
    )


def flat_graph(num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """A graph like that of an untrained model: forward edges equally likely, all emissions 1."""
    graph = all_ones_graph(num_targets, num_states)
    num_ways_BL1 = (graph.log_transition_BLL == 0).double().sum(2, keepdim=True)
    return graph._replace(
        log_transition_BLL=graph.log_transition_BLL - num_ways_BL1.clamp(min=1).log()
    )


def tied_graph(seed: int, num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """A graph with many best paths: scores are -1 or -2, which add up exactly in any order."""
    graph = random_graph(seed, num_targets, num_states, density=0.8)
    is_edge_BLL = graph.log_transition_BLL != -torch.inf
    edge_BLL = -1.0 - (graph.log_transition_BLL > -2).double()
    return graph._replace(
        log_emission_BML=-1.0 - (graph.log_emission_BML > -4).double(),
        log_transition_BLL=torch.where(is_edge_BLL, edge_BLL, -torch.inf),
    )


def two_ways(unit: float, by: str) -> Graph:
    """A graph with two paths of ten states.

    The path through odd states costs 130 units in its first and in its last step, paid by edges or
    by emissions (``by``); the path through even states costs 50 units in each of its nine steps.
    """
    M, L = 10, 20
    emission_ML = torch.zeros(M, L, dtype=FLOAT64)
    transition_LL = torch.full((L, L), -torch.inf, dtype=FLOAT64)
    odd, even = [0, *range(1, 2 * M - 3, 2), L - 1], [0, *range(2, 2 * M - 2, 2), L - 1]
    for path, cost in ((odd, 0.0), (even, 50.0)):
        for v, u in pairwise(path):
            transition_LL[v, u] = -cost * unit
    if by == "edges":
        transition_LL[odd[0], odd[1]] = transition_LL[odd[-2], odd[-1]] = -130 * unit
    else:
        emission_ML[1, odd[1]] = emission_ML[-2, odd[-2]] = -130 * unit
    counts = torch.tensor([M]), torch.tensor([L])
    return Graph(emission_ML.unsqueeze(0), transition_LL.unsqueeze(0), *counts)


RAGGED = random_graph(5, [4, 2, 1, 3, 5], [7, 6, 1, 3, 8])
SQUARE = random_graph(6, [4, 4], [7, 7])
CASES = {
    "one_target_one_state": random_graph(0, [1, 1], [1, 1]),
    "impossible_only_emission": with_score(
        random_graph(0, [1, 1], [1, 1]), EMISSION, (0, 0, 0)
    ),
    "one_target_many_states": random_graph(1, [1, 1, 1], [2, 5, 1]),
    "as_many_targets_as_states": random_graph(3, [6, 4], [6, 4]),
    "more_targets_than_states": random_graph(4, [5, 5], [3, 6]),
    "ragged": RAGGED,
    "65_states": random_graph(7, [4, 3], [40, 65]),
    # Row 0 has no edge out of its start, row 1 none into its end; row 2 is intact.
    "no_path_through_missing_edges": with_score(
        with_score(random_graph(11, [3, 3, 3], [5, 5, 5]), TRANSITION, (0, 0)),
        TRANSITION,
        (1, EVERY, 4),
    ),
    "sparse": random_graph(13, [3, 4, 5, 4], [6, 9, 7, 8], density=0.5),
    "very_sparse": random_graph(14, [3, 3, 3, 2], [6, 7, 5, 4], density=0.25),
    "huge_scores": shifted(RAGGED, 1e4, 1e4),
    "very_negative_scores": shifted(RAGGED, -1e4, -1e4),
    "huge_spread": random_graph(15, [4, 3], [8, 8], scale=1e4),
    "impossible_state": with_score(
        with_score(SQUARE, EMISSION, (0, EVERY, 3)), EMISSION, (1, EVERY, [2, 5])
    ),
    "impossible_first_emission": with_score(SQUARE, EMISSION, (0, 0, 0)),
    "impossible_last_emission": with_score(SQUARE, EMISSION, (1, 3, 6)),
    "impossible_target": with_score(SQUARE, EMISSION, (0, 2)),
    "ties": tied_graph(18, [3, 4, 5], [7, 8, 7]),
    "all_ones": all_ones_graph([4, 6, 2], [9, 8, 5]),
    "all_minus_infinity": random_graph(19, [3], [5], density=0.0),
}
"""Float64 graphs by name, with few enough paths to be enumerated."""

# Later states of a tile are far likelier, so the kernels' units grow from column to column.
GROWING = random_graph(11, [12, 20], [30, 64], scale=0.5)
GROWING.log_emission_BML[:, :, [9, 40]] += 30.0
# No state of a whole tile can emit target 8 (row 0), or 31 and 32 (row 1), where one warp hands
# over to another.
SILENT = with_score(
    with_score(
        random_graph(13, [20, 40], [70, 96], scale=0.5), EMISSION, (0, 8, slice(32, 64))
    ),
    EMISSION,
    (1, slice(31, 33), slice(32, 64)),
)
LARGE = {
    "size_of_the_paper": random_graph(2, [77, 60], [308, 291], scale=3.0),
    "flat": flat_graph([64], [512]),
    # A pass takes 128 targets of a tile; here a cone has up to 140 targets in a tile, 300 in all.
    "two_passes": random_graph(3, [140, 129], [300, 150], scale=0.5),
    "narrow_cone": random_graph(4, [300], [310], scale=0.2),
    "silent_tile": SILENT,
    "growing_within_tiles": GROWING,
}
"""Graphs as large as in training, with scores within the range of rescaled probabilities."""

# No edge enters states 3 and 20; backends also read the scores of states that no path reaches.
GRAPH_FOR_NAN = with_score(
    random_graph(7, [9, 9], [40, 40]), TRANSITION, (EVERY, EVERY, [3, 20])
)
PLACES_OF_NAN = [
    *((EMISSION, place) for place in ((0, 0, 0), (0, 4, 19), (0, 4, 20), (0, 8, 39))),
    *((TRANSITION, place) for place in ((0, 0, 1), (0, 3, 30), (0, 4, 30), (0, 38, 39))),
]
"""Places in the first row of ``GRAPH_FOR_NAN`` where a test puts NaN."""

# ---- what is true of them ----


class Verdict(NamedTuple):
    """The correct results for a graph."""

    log_likelihood_B: Tensor
    grad_emission_BML: Tensor
    grad_transition_BLL: Tensor
    path_BM: Tensor
    log_score_B: Tensor


@lru_cache
def judge(name: str, dtype: torch.dtype = FLOAT64) -> Verdict:
    """The correct results, in float64, for the graph of that name rounded to ``dtype``: by
    enumeration, or in ``LARGE``, whose graphs have too many paths, by the vectorized backend."""
    graph, by = (CASES[name], JUDGE) if name in CASES else (LARGE[name], "vectorized")
    graph = graph.to(dtype).double()
    return Verdict(*likelihood_and_gradients(graph, by), *viterbi(*graph, backend=by))


def limits(backend: str, graph: Graph) -> tuple[float, float]:
    """Allowed errors of the value and of the gradients, relative to the largest of each.

    Rescaled probabilities suffer from rounding alone. In log space a posterior is the exponential
    of a sum of logarithms, whose rounding errors grow with the scores and the number of targets;
    the limit there is four roundings of the largest path score.
    """
    dtype, M = graph.log_emission_BML.dtype, graph.log_emission_BML.shape[1]
    if backend in LOG_SPACE:
        largest = max(scores.nan_to_num(0, 0, 0).abs().max() for scores in graph[:2])
        gradient = 4 * torch.finfo(dtype).eps * M * (1 + float(largest))
    elif dtype == FLOAT64:
        gradient = 1e-10
    elif backend == "scaled":  # it adds up in float64
        gradient = 1e-6
    else:
        gradient = 1e-5 if M <= 77 else 1e-4
    return 1e-6 if dtype == FLOAT32 else 1e-12, gradient


def assert_right(
    graph: Graph, backend: str, truth: Sequence[Tensor] | str = JUDGE
) -> tuple[Tensor, Tensor, Tensor]:
    """Assert that value and gradients equal float64's on the same numbers, within ``limits``.

    The backend gets NaN wherever it must not read. Scores that are -inf or not read must get
    gradient 0.

    Args:
        graph: its dtype and device are those to compute with.
        backend: name of the backend to test.
        truth: the correct value and gradients, or the name of a backend that computes them.

    Returns:
        log_likelihood_B and the gradients.
    """
    dtype, device = graph.log_emission_BML.dtype, graph.log_emission_BML.device
    if isinstance(truth, str):
        truth = likelihood_and_gradients(graph.to(FLOAT64, "cpu"), truth)
    value, gradient = limits(backend, graph)
    # A probability near 1 has a logarithm near 0, but the rounding error of 1.
    largest = max((abs(value) for value in truth[0].tolist() if value > -torch.inf), default=0)
    if 0 < largest < 1:
        value /= largest
    plain = graph.to(dtype, "cpu")
    answer = likelihood_and_gradients(fill_padding(plain, torch.nan).to(dtype, device), backend)
    for grad, scores, is_beyond in zip(answer[1:], plain[:2], is_padding(plain), strict=True):
        assert not grad.cpu()[is_beyond | (scores == -torch.inf)].any()
    for ours, true, most in zip(answer, truth, (value, gradient, gradient), strict=True):
        assert ours.dtype == dtype and ours.device == device
        assert relative_error(ours.cpu(), true) <= most
    return answer
