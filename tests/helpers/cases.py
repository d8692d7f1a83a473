"""Graphs that test every alignment backend, and how large an error may be.

Shapes: B rows, M targets, L states.

The reference is the enumeration of all paths in float64. Cases are float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exlm_mini.alignment.check import random_graph
from exlm_mini.alignment.graphs import Graph

LOG_SPACE = ("enumerate", "naive", "vectorized")
QUANTITIES = ("log_likelihood", "grad_emission", "grad_transition")

# ---- graphs ----


def is_padding(graph: Graph) -> tuple[Tensor, Tensor]:
    """Entries beyond the valid targets or states: of the emission, of the transition (bool)."""
    _, M, L = graph.log_emission_BML.shape
    is_state_BL = torch.arange(L) < graph.num_states_B.unsqueeze(1)
    is_target_BM = torch.arange(M) < graph.num_targets_B.unsqueeze(1)
    return (
        ~(is_target_BM.unsqueeze(2) & is_state_BL.unsqueeze(1)),
        ~(is_state_BL.unsqueeze(2) & is_state_BL.unsqueeze(1)),
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
    """The same graph with a value wherever nothing is read: padding, and edges u <= v."""
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


def without_emissions(
    graph: Graph, b: int, targets: int | slice, states: int | slice | list[int]
) -> Graph:
    """The same graph with some emissions of row b made impossible."""
    log_emission_BML = graph.log_emission_BML.clone()
    log_emission_BML[b, targets, states] = -torch.inf
    return graph._replace(log_emission_BML=log_emission_BML)


def shifted(graph: Graph, emission: float, transition: float) -> Graph:
    """Every emission and every transition plus a number."""
    return graph._replace(
        log_emission_BML=graph.log_emission_BML + emission,
        log_transition_BLL=graph.log_transition_BLL + transition,
    )


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
    every = slice(None)
    return {
        "one_target_one_state": random_graph(0, [1, 1], [1, 1]),
        "impossible_only_emission": without_emissions(random_graph(0, [1, 1], [1, 1]), 0, 0, 0),
        "one_target_many_states": random_graph(1, [1, 1, 1], [2, 5, 1]),
        "as_many_targets_as_states": random_graph(3, [6, 4], [6, 4]),
        "more_targets_than_states": random_graph(4, [5, 5], [3, 6]),
        "ragged": ragged,
        "33_states": random_graph(7, [4, 3], [33, 32]),
        # Row 0 has no way out of its start, row 1 none into its end, row 2 is whole.
        "no_path_through_missing_edges": without_edges(
            random_graph(11, [3, 3, 3], [5, 5, 5]),
            [(0, 0, u) for u in range(1, 5)] + [(1, v, 4) for v in range(4)],
        ),
        "sparse": random_graph(13, [3, 4, 5, 4], [6, 9, 7, 8], density=0.5),
        "very_sparse": random_graph(14, [3, 3, 3, 2], [6, 7, 5, 4], density=0.25),
        "huge_scores": shifted(ragged, 1e4, 1e4),
        "very_negative_scores": shifted(ragged, -1e4, -1e4),
        "huge_spread": random_graph(15, [4, 3], [8, 8], scale=1e4),
        "impossible_state": without_emissions(
            without_emissions(square, 0, every, 3), 1, every, [2, 5]
        ),
        "impossible_first_emission": without_emissions(square, 0, 0, 0),
        "impossible_last_emission": without_emissions(square, 1, 3, 6),
        "impossible_target": without_emissions(square, 0, 2, every),
        "ties": tied_graph(18, [3, 4, 5], [7, 8, 7]),
        "two_tied_paths": _two_tied_paths(),
        "all_ones": all_ones_graph([4, 6, 2], [9, 8, 5]),
        "all_minus_infinity": random_graph(19, [3], [5], density=0.0),
    }


CASES = _cases()
"""Name to graph."""

# ---- the comparison ----


def limits(backend: str, graph: Graph, dtype: torch.dtype) -> dict[str, float]:
    """The allowed errors, relative to the largest value of each quantity.

    Rescaled probabilities suffer from rounding alone. In log space a posterior is the exponential
    of a sum of logarithms, whose rounding errors grow with the scores and the number of targets:
    four roundings of the largest path score.

    Args:
        backend: its name.
        graph: its input.
        dtype: float32 or float64, in which it computes.
    """
    is_single = dtype == torch.float32
    M = graph.log_emission_BML.shape[1]
    if backend in LOG_SPACE:
        finite = [scores[scores.isfinite()].abs() for scores in graph[:2]]
        largest = max((float(f.max()) for f in finite if f.numel()), default=0.0)
        gradient = 4 * torch.finfo(dtype).eps * M * (1 + largest)
    elif is_single:
        gradient = 1e-5 if M <= 77 else 1e-4
    else:
        gradient = 1e-10
    value = 1e-6 if is_single else 1e-12
    return dict(zip(QUANTITIES, (value, gradient, gradient), strict=True))
