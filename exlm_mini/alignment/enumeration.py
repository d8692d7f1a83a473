"""The reference: scores every path by itself and adds them up. For tiny graphs only.

Shapes: B rows, M targets, L states. A row has comb(L - 2, M - 2) paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import torch
from torch import Tensor

MOST_STEPS = 500_000
"""Steps of all paths together, one per target: about 2 GB including autograd's record."""


def paths(num_targets: int, num_states: int) -> Iterator[tuple[int, ...]]:
    """All increasing sequences of ``num_targets`` states from state 0 to the last one."""
    if num_targets == 1 or num_states == 1:
        if num_targets == num_states:
            yield (0,)
        return
    for inner in combinations(range(1, num_states - 1), num_targets - 2):
        yield (0, *inner, num_states - 1)


def path_score(
    log_emission_ML: Tensor, log_transition_LL: Tensor, path: tuple[int, ...]
) -> Tensor:
    """log P(Y, A): emissions along the path plus transitions between its states."""
    start = log_emission_ML.new_zeros(())
    score = sum((log_emission_ML[i, u] for i, u in enumerate(path)), start)
    for v, u in pairwise(path):
        score = score + log_transition_LL[v, u]
    return score


def _scored_paths(
    log_emission_ML: Tensor, log_transition_LL: Tensor, num_targets: int, num_states: int
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Paths of non-zero probability with their scores."""
    scored = (
        (path_score(log_emission_ML, log_transition_LL, path), path)
        for path in paths(num_targets, num_states)
    )
    return [(score, path) for score, path in scored if score.item() != -torch.inf]


def _check_size(num_targets_B: Tensor, num_states_B: Tensor) -> None:
    """Refuse graphs of more paths than memory and patience hold."""
    num_paths = num_steps = 0
    for M, L in zip(num_targets_B.tolist(), num_states_B.tolist(), strict=True):
        num_paths += math.comb(max(L - 2, 0), max(M - 2, 0))
        num_steps += M * math.comb(max(L - 2, 0), max(M - 2, 0))
    if num_steps > MOST_STEPS:
        raise ValueError(
            f"backend 'enumerate' would score 10^{math.log10(num_paths):.1f} paths one by one, "
            f"10^{math.log10(num_steps):.1f} steps where {MOST_STEPS:,} are the most; use "
            "'vectorized' or 'auto', or a smaller graph"
        )


def log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Tensor:
    """Sum over enumerated paths; see ``alignment.dag_log_likelihood``."""
    _check_size(num_targets_B, num_states_B)
    totals = []
    for b, (M, L) in enumerate(zip(num_targets_B.tolist(), num_states_B.tolist(), strict=True)):
        scored = _scored_paths(log_emission_BML[b], log_transition_BLL[b], M, L)
        if scored:
            totals.append(torch.stack([score for score, _ in scored]).logsumexp(dim=0))
        else:
            totals.append(log_emission_BML.new_tensor(-torch.inf))
    return torch.stack(totals)


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Best of the enumerated paths; see ``alignment.viterbi``."""
    _check_size(num_targets_B, num_states_B)
    B, M, _ = log_emission_BML.shape
    path_BM = torch.full((B, M), -1, dtype=torch.int64, device=log_emission_BML.device)
    log_score_B = log_emission_BML.new_full((B,), -torch.inf)
    for b in range(B):
        num_targets = int(num_targets_B[b])
        scored = _scored_paths(
            log_emission_BML[b], log_transition_BLL[b], num_targets, int(num_states_B[b])
        )
        if scored:
            # Equal scores: the earliest states, compared from the end.
            log_score_B[b], best = max(
                scored, key=lambda sp: (sp[0], [-u for u in sp[1][::-1]])
            )
            path_BM[b, :num_targets] = torch.tensor(best, device=path_BM.device)
    return path_BM, log_score_B
