"""Appendix H as it reads: three loops, over targets, states and predecessors, in log space.

Shapes: B rows, M targets, L states. Slow on purpose; autograd follows every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_TERMS = 1_000_000
"""In all rows together: a minute, and about 3 GB including autograd's record."""


def _check_size(num_targets_B: Tensor, num_states_B: Tensor) -> None:
    """Refuse graphs that would take too much memory or time."""
    num_terms = int(((num_targets_B - 1) * num_states_B * (num_states_B - 1) // 2).sum())
    if num_terms > MOST_TERMS:
        raise ValueError(
            f"backend 'naive' would add up {num_terms:,} terms one by one, {MOST_TERMS:,} are the "
            "most; use 'vectorized' or 'auto', or a smaller graph"
        )


def log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Tensor:
    """log f_{M,L} row by row; see ``alignment.dag_log_likelihood``."""
    _check_size(num_targets_B, num_states_B)
    return torch.stack(
        [
            _log_f(log_emission_BML[b], log_transition_BLL[b], M, L)
            for b, (M, L) in enumerate(
                zip(num_targets_B.tolist(), num_states_B.tolist(), strict=True)
            )
        ]
    )


def _log_f(log_emission_ML: Tensor, log_transition_LL: Tensor, M: int, L: int) -> Tensor:
    """log f_{M,L} of one row."""
    impossible = log_emission_ML.new_tensor(-torch.inf)
    log_f = [[impossible] * L for _ in range(M)]
    if log_emission_ML[0, 0] != -torch.inf:
        log_f[0][0] = log_emission_ML[0, 0]
    for i in range(1, M):
        for u in range(L):
            terms = []
            for v in range(u):
                term = log_f[i - 1][v] + log_transition_LL[v, u] + log_emission_ML[i, u]
                if term.item() != -torch.inf:  # a logsumexp of -inf alone has gradient nan
                    terms.append(term)
            if terms:
                log_f[i][u] = torch.stack(terms).logsumexp(dim=0)
    return log_f[M - 1][L - 1]


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same loops with max in place of sum; see ``alignment.viterbi``."""
    _check_size(num_targets_B, num_states_B)
    B, M, _ = log_emission_BML.shape
    path_BM = torch.full((B, M), -1, dtype=torch.int64, device=log_emission_BML.device)
    log_score_B = log_emission_BML.new_full((B,), -torch.inf)
    for b in range(B):
        path, log_score_B[b] = _best_path(
            log_emission_BML[b].tolist(),
            log_transition_BLL[b].tolist(),
            int(num_targets_B[b]),
            int(num_states_B[b]),
        )
        path_BM[b, : len(path)] = torch.tensor(path, dtype=torch.int64, device=path_BM.device)
    return path_BM, log_score_B


def _best_path(
    log_emission: list[list[float]], log_transition: list[list[float]], M: int, L: int
) -> tuple[list[int], float]:
    """Best path of one row, found forward and read off backward; empty when there is none."""
    impossible = float("-inf")
    best = [[impossible] * L for _ in range(M)]
    came_from = [[0] * L for _ in range(M)]
    best[0][0] = log_emission[0][0]
    for i in range(1, M):
        for u in range(L):
            for v in range(u):
                score = best[i - 1][v] + log_transition[v][u] + log_emission[i][u]
                if score > best[i][u]:
                    best[i][u], came_from[i][u] = score, v
    score = best[M - 1][L - 1]
    if score == impossible:
        return [], score
    path = [L - 1]
    for i in range(M - 1, 0, -1):
        path.append(came_from[i][path[-1]])
    return path[::-1], score
