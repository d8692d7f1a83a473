"""The likelihood of the targets, what it agrees on, and the best path (§4.3, Appendices H and I).

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.arguments import checked
from exlm_mini.alignment.backends import choose


class Posteriors(NamedTuple):
    """What the paths agree on, given the targets."""

    state_BML: Tensor
    """P(target i is emitted by state u); sums to 1 over u for each target of a row."""
    edge_BLL: Tensor
    """Expected number of times a path takes the edge v -> u; sums to M - 1 over a row."""


def dag_log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of the targets, summed over every path through the graph.

    Appendix H::

        f[i, u] = sum over v < u of f[i-1, v] * E[v, u] * P_u(y_i),      L_SA = -log f[M, L]

    Appendix H fixes the end of a path (f_{M,L}) but not its start; like the released code and
    Appendix P, a path starts in state 0.

    Args:
        log_emission_BML: log P_u(y_i), any floating dtype; larger is likelier. Half precision is
            raised to float32 first.
        log_transition_BLL: log E[v, u], same dtype; read only at v < u.
        num_targets_B: int64, valid rows of the emission, from 1 to M.
        num_states_B: int64, valid states, from 1 to L. What stands beyond the valid rows and
            states is never read.
        backend: a name in ``BACKENDS``, or ``auto``: the fastest that works on this device.

    Returns:
        log_likelihood_B in nats, float32 or float64; -inf, with zero gradient, where no path
        fits. In float32 the gradients of ``native`` and ``scaled`` are exact to about 1e-6 of
        the largest. In log space the logarithms themselves become large and take digits with
        them: ``vectorized`` is off by about 2e-5 at M = 77 and 8e-5 at M = 256, ``naive``, whose
        gradient is autograd's, by several times that.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other, the backend is unknown, or
            the graph has more paths than ``enumerate``, or more terms than ``naive`` can add up.
            Counts that lie on a GPU are not compared with M and L, as that would wait for it.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return choose(backend, graph[0].device.type).log_likelihood(*graph)


def posteriors(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> Posteriors:
    """State and edge posteriors: alpha beta / f_{M,L} of Appendix I, per row.

    They are the gradients of log f_{M,L} by the log-scores, so any backend provides them.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend: as for
            ``dag_log_likelihood``.

    Returns:
        Posteriors, detached; all zero for a row without a path.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    scores = [t.detach().requires_grad_() for t in graph[:2]]
    with torch.enable_grad():
        total = dag_log_likelihood(*scores, *graph[2:], backend).sum()
    return Posteriors(*torch.autograd.grad(total, scores))


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The single best path and its score.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend: as for
            ``dag_log_likelihood``.

    Returns:
        path_BM: int64, the state that emits each target; -1 beyond ``num_targets_B`` and where
            no path fits. Among equal paths the one with the earliest states, compared from the
            end, wins.
        log_score_B: log-probability of that path in nats; -inf where no path fits.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return choose(backend, graph[0].device.type).viterbi(*(t.detach() for t in graph))
