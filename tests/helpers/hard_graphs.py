"""What the tests of several backends share: the judge's verdicts, and graphs beyond ``CASES``.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from cases import (
    CASES,
    all_ones_graph,
    fill_padding,
    is_padding,
    limits,
    without_edges,
    without_emissions,
)
from torch import Tensor

from exlm_mini.alignment import viterbi
from exlm_mini.alignment.check import (
    JUDGE,
    likelihood_and_gradients,
    random_graph,
    relative_error,
)
from exlm_mini.alignment.graphs import Graph

DTYPES = (torch.float32, torch.float64)


class Verdict(NamedTuple):
    """What the judge says of a graph."""

    log_likelihood_B: Tensor
    grad_emission_BML: Tensor
    grad_transition_BLL: Tensor
    path_BM: Tensor
    log_score_B: Tensor


@lru_cache
def judge(name: str, dtype: torch.dtype = torch.float64) -> Verdict:
    """What enumeration says, in float64, of the case of that name rounded to a dtype; of those in
    ``LARGE``, which have too many paths, the vectorized backend."""
    graph, by = (CASES[name], JUDGE) if name in CASES else (LARGE[name], "vectorized")
    graph = graph.to(dtype).double()
    return Verdict(*likelihood_and_gradients(graph, by), *viterbi(*graph, backend=by))


def assert_right(
    graph: Graph, backend: str, truth: Sequence[Tensor] | str = JUDGE
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients equal those of float64 on the same numbers, within ``limits``.

    With NaN wherever nothing is to be read. What is not read, or -inf, gets no gradient.

    Args:
        graph: of the dtype to compute in.
        backend: the one to test.
        truth: value and gradients, or the backend to ask for them.

    Returns:
        log_likelihood_B and the gradients.
    """
    dtype, device = graph.log_emission_BML.dtype, graph.log_emission_BML.device
    allowed = limits(backend, graph, dtype)
    if backend == "scaled" and dtype == torch.float32:  # it adds up in float64
        allowed = dict.fromkeys(allowed, 1e-6)
    if isinstance(truth, str):
        truth = likelihood_and_gradients(graph.to(torch.float64, "cpu"), truth)
    # A probability near 1 has a logarithm near 0, but the rounding of 1.
    largest = max((abs(value) for value in truth[0].tolist() if value > -torch.inf), default=0)
    if 0 < largest < 1:
        allowed["log_likelihood"] /= largest
    plain = graph.to(dtype, "cpu")
    answer = likelihood_and_gradients(fill_padding(plain, torch.nan).to(dtype, device), backend)
    for gradient, scores, is_beyond in zip(
        answer[1:], plain[:2], is_padding(plain), strict=True
    ):
        assert not gradient.cpu()[is_beyond | (scores == -torch.inf)].any()
    for ours, true, (what, most) in zip(answer, truth, allowed.items(), strict=True):
        assert ours.dtype == dtype and ours.device == device
        assert relative_error(ours.cpu(), true) <= most, what
    return answer


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


def _spread() -> Graph:
    """Emissions spread over 30 nats."""
    graph = random_graph(5, [77], [308])
    rng = torch.Generator().manual_seed(5)
    emission_BML = -30 * torch.rand(1, 77, 308, generator=rng, dtype=torch.float64)
    return graph._replace(log_emission_BML=emission_BML)


def _growing() -> Graph:
    """Later states of a tile are likelier by far: units grow column by column."""
    graph = random_graph(11, [12, 20], [30, 64], scale=0.5)
    graph.log_emission_BML[:, :, [9, 40]] += 30.0
    return graph


def _silent() -> Graph:
    """No emission in a whole tile, in row 1 where one warp hands over to another."""
    graph = random_graph(13, [20, 40], [70, 96], scale=0.5)
    graph = without_emissions(graph, 0, 8, slice(32, 64))
    return without_emissions(graph, 1, slice(31, 33), slice(32, 64))


LARGE = {
    "size_of_the_paper": random_graph(2, [77, 60], [308, 291], scale=3.0),
    "spread": _spread(),
    "flat": flat_graph([64], [512]),
    # A pass takes 128 targets of a tile: here a cone has up to 140 in one, and 300 in all.
    "two_passes": random_graph(3, [140, 129], [300, 150], scale=0.5),
    "narrow_cone": random_graph(4, [300], [310], scale=0.2),
    "silent_tile": _silent(),
    "growing_within_tiles": _growing(),
}
"""Of sizes to train on, and within the range of rescaled probabilities."""

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


def with_score(graph: Graph, which: str, place: tuple[int, int, int], value: float) -> Graph:
    """The same graph with one score changed."""
    scores = getattr(graph, which).clone()
    scores[place] = value
    return graph._replace(**{which: scores})
