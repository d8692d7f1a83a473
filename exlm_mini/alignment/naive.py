"""Appendix H as it reads: three loops, over targets, states and predecessors, in log space.

Shapes: B rows, M targets, L states. Slow on purpose; autograd follows every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exlm_mini.alignment.graphs import Graph


def _log_f(
    log_emission_ML: Tensor,
    log_transition_LL: Tensor,
    M: int,
    L: int,
    combine: Callable[[Tensor], Tensor],
) -> Tensor:
    """log f_{M,L} of one row; ``combine`` makes one number of the ways into a state."""
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
                log_f[i][u] = combine(torch.stack(terms))
    return log_f[M - 1][L - 1]


def _of_rows(graph: Graph, combine: Callable[[Tensor], Tensor]) -> Tensor:
    sizes = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
    rows = zip(graph.log_emission_BML, graph.log_transition_BLL, sizes, strict=True)
    log_f = [_log_f(emission, edges, M, L, combine) for emission, edges, (M, L) in rows]
    return torch.stack([*log_f, graph.nothing])[:-1] + graph.nothing


def log_likelihood(*arguments: Tensor) -> Tensor:
    """log f_{M,L} row by row; see ``alignment.dag_log_likelihood``."""
    return _of_rows(Graph(*arguments), lambda terms: terms.logsumexp(dim=0))


def viterbi(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """The same loops with max in place of sum, whose gradient is 1 along the path and 0
    elsewhere; see ``alignment.viterbi``."""
    with torch.inference_mode(False), torch.enable_grad():
        graph = Graph(*arguments).ordinary()
        scores_BML = graph.log_emission_BML.detach().requires_grad_()
        log_score_B = _of_rows(
            graph._replace(log_emission_BML=scores_BML), lambda terms: terms.max(dim=0).values
        )
        (is_on_path_BML,) = torch.autograd.grad(log_score_B.sum(), scores_BML)
    path_BM = is_on_path_BML.argmax(dim=2).masked_fill(~is_on_path_BML.any(dim=2), -1)
    return path_BM, log_score_B.detach()
