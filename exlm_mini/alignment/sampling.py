"""Paths drawn at random, each as often as it is likely given the targets (Appendix I).

Shapes: B rows, M targets, L states, S samples.

Given the targets, a path is a Markov chain. It starts in state 0, and from state v at target i it
goes on to state u with probability::

    E[v, u] P_u(y_{i+1}) beta[i+1, u] / beta[i, v]

The denominator is the sum of the numerator over u, so one table says it all: the log of
P_u(y_i) beta[i, u], what is still to come once target i is handed to state u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.arguments import checked
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


@torch.no_grad()
def sample_paths(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    num_samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Independent draws from the posterior over paths: P(path | targets).

    The chain of Appendix I (see the module) is followed forward for all samples at once, in
    float64 and in log space. A step takes memory for B x S x L numbers, the recursion before it
    for B x L x L.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``; no gradient flows.
        num_samples: S, paths wanted of each row.
        generator: of random numbers, on the device of the scores; none: PyTorch's own. The same
            state of it gives the same paths for the same batch.

    Returns:
        path_BSM: int64, the state that emits each target; -1 beyond ``num_targets_B`` and in
        rows without a path.

    Raises:
        ValueError: if the arguments do not fit each other, ``num_samples`` is negative, or the
            likelihood of a row is not a number, so that there is nothing to draw from.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    if num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, got {num_samples}")
    log_to_come_MBL, log_edge_BLL = log_to_come(*graph)
    log_likelihood_B = log_to_come_MBL[0, :, 0]
    is_wrong_B = log_likelihood_B.isnan() | (log_likelihood_B == torch.inf)
    if is_wrong_B.any():
        raise ValueError(
            f"rows {is_wrong_B.nonzero().flatten().tolist()} have likelihood nan or infinity: "
            "no path can be drawn from such scores"
        )
    has_path_B = log_likelihood_B != -torch.inf
    M, B, _ = log_to_come_MBL.shape
    batch_B1 = torch.arange(B, device=log_edge_BLL.device).unsqueeze(1)
    state_BS = torch.zeros(B, num_samples, dtype=torch.int64, device=log_edge_BLL.device)
    path_MBS = []
    for i in range(M):
        if i > 0:
            log_weight_BSL = log_edge_BLL[batch_B1, state_BS] + log_to_come_MBL[i].unsqueeze(1)
            # Let every state ring once, at a rate in proportion to its weight: each is the first
            # with its own probability. In logarithms no weight is too large or too small.
            ring_BSL = torch.empty_like(log_weight_BSL).exponential_(generator=generator)
            state_BS = (log_weight_BSL - ring_BSL.log()).argmax(dim=2)
        is_drawn_B1 = (has_path_B & (i < num_targets_B)).unsqueeze(1)
        path_MBS.append(torch.where(is_drawn_B1, state_BS, -1))
    return torch.stack(path_MBS, dim=2)
