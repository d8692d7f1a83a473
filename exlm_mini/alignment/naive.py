"""Appendix H as written: three loops, over targets, states and predecessors, in log space.

Shapes: B rows, M targets, L states. Slow on purpose; autograd differentiates every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.graphs import Graph


def log_likelihood(*arguments: Tensor) -> Tensor:
    """log f_{M,L} row by row; see ``alignment.dag_log_likelihood``."""
    graph = Graph(*arguments)
    sizes = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
    rows = zip(graph.log_emission_BML, graph.log_transition_BLL, sizes, strict=True)
    log_f = [_log_f(emission, edges, M, L) for emission, edges, (M, L) in rows]
    return torch.stack([*log_f, graph.nothing])[:-1] + graph.nothing


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
