"""The chain of a posterior path: where a path goes next, given the targets (Appendix I).

Shapes: B rows, M targets, L states.

Given the targets, a path is a Markov chain. It starts in state 0, and from state v at target i it
goes on to state u with probability::

    E[v, u] P_u(y_{i+1}) beta[i+1, u] / beta[i, v]

The denominator is the sum of the numerator over u, so one table says it all: the log of
P_u(y_i) beta[i, u], what is still to come once target i is handed to state u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.vectorized import edges_only, is_state


def log_to_come(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The chain of a posterior path: what entering a state is worth, and the edges.

    The recursion for beta of Appendix I.1, with the own emission added, in float64::

        to_come[i, v] = P_v(y_i) * sum over u > v of E[v, u] * to_come[i+1, u]

    and at the last target P_u(y_M) for the last state, 0 for all others.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``, and checked.

    Returns:
        log_to_come_MBL: float64, in nats; -inf from where the end cannot be reached. Its entry
            [0, :, 0] is the log-likelihood. Beyond ``num_targets_B`` it means nothing.
        log_edge_BLL: float64, the transitions with -inf where no edge v < u can be.
    """
    B, M, L = log_emission_BML.shape
    is_state_BL = is_state(log_emission_BML, num_states_B)
    log_edge_BLL = edges_only(log_transition_BLL.double(), is_state_BL)
    state_L = torch.arange(L, device=log_emission_BML.device)
    is_end_BL = state_L == num_states_B.unsqueeze(1) - 1
    log_end_BL = torch.where(is_end_BL, 0.0, -torch.inf).double()
    log_to_come_MBL = log_edge_BLL.new_full((M, B, L), -torch.inf)
    for i in range(M - 1, -1, -1):
        log_beta_BL = log_end_BL
        if i < M - 1:
            log_step_BLL = log_edge_BLL + log_to_come_MBL[i + 1].unsqueeze(1)
            is_last_B1 = (num_targets_B - 1 == i).unsqueeze(1)
            log_beta_BL = torch.where(is_last_B1, log_end_BL, log_step_BLL.logsumexp(dim=2))
        log_emission_BL = log_emission_BML[:, i].masked_fill(~is_state_BL, -torch.inf)
        log_to_come_MBL[i] = log_emission_BL + log_beta_BL
    return log_to_come_MBL, log_edge_BLL
