"""The reference backend: scores every path separately and sums up. For tiny graphs only.

Shapes: B rows, M targets, L states. A row has comb(L - 2, M - 2) paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import torch
from torch import Tensor

from exlm_mini.alignment.graphs import Graph

Path = tuple[int, ...]


def paths(num_targets: int, num_states: int) -> Iterator[Path]:
    """All increasing sequences of ``num_targets`` states from state 0 to the last one."""
    if num_targets == 1 or num_states == 1:
        if num_targets == num_states:
            yield (0,)
        return
    for inner in combinations(range(1, num_states - 1), num_targets - 2):
        yield (0, *inner, num_states - 1)


def path_score(log_emission_ML: Tensor, log_transition_LL: Tensor, path: Path) -> Tensor:
    """log P(Y, A): emissions along the path plus transitions between its states."""
    start = log_emission_ML.new_zeros(())
    score = sum((log_emission_ML[i, u] for i, u in enumerate(path)), start)
    for v, u in pairwise(path):
        score = score + log_transition_LL[v, u]
    return score


def _scored_paths(graph: Graph) -> Iterator[list[tuple[Tensor, Path]]]:
    """For each row, the score and path of every path with non-zero probability."""
    sizes = zip(*(counts_B.tolist() for counts_B in graph[2:]), strict=True)
    for b, size in enumerate(sizes):
        scores = graph.log_emission_BML[b], graph.log_transition_BLL[b]
        scored = ((path_score(*scores, path), path) for path in paths(*size))
        yield [(score, path) for score, path in scored if score.item() != -torch.inf]


def log_likelihood(*arguments: Tensor) -> Tensor:
    """Sum over the enumerated paths; see ``alignment.dag_log_likelihood``."""
    graph = Graph(*arguments)
    lost = graph.log_emission_BML.new_tensor(-torch.inf)
    totals = [
        torch.stack([score for score, _ in scored]).logsumexp(dim=0) if scored else lost
        for scored in _scored_paths(graph)
    ]
    return torch.stack([*totals, graph.nothing])[:-1] + graph.nothing


def viterbi(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Best of the enumerated paths; see ``alignment.viterbi``."""
    graph = Graph(*arguments)
    B, M, _ = graph.log_emission_BML.shape
    path_BM = torch.full((B, M), -1, device=graph.num_states_B.device)
    log_score_B = graph.log_emission_BML.new_full((B,), -torch.inf)
    for b, scored in enumerate(_scored_paths(graph)):
        if scored:
            # Equal scores: the earliest states, compared from the end.
            log_score_B[b], best = max(
                scored, key=lambda sp: (sp[0], [-u for u in sp[1][::-1]])
            )
            path_BM[b, : len(best)] = path_BM.new_tensor(best)
            if any(score.isnan() for score, _ in scored):  # max may miss a NaN
                log_score_B[b] = torch.nan
    return path_BM, log_score_B
