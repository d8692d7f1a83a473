"""Which states the paths through a graph visit: all, one per mask, or the same ones always (§4.3).

Shapes: B rows, M targets, L states.

A path visits as many states as there are targets, boundaries included, but it is free in which:
it may pass over a mask and visit another twice (so does the paper's "fabulous bests"). In a sparse
graph (Appendix Q.3) each target is emitted by one of its own states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.arguments import checked
from exlm_mini.alignment.sampling import log_to_come


class Visits(NamedTuple):
    """What paths visit, given the emissions; float64, 0 at padding and in rows without a path."""

    state_BL: Tensor
    """P(a path passes the state)."""
    once_BM: Tensor
    """P(a path passes at least one state of the target)."""
    twice_BM: Tensor
    """P(a path passes at least two states of the target)."""


@torch.no_grad()
def path_visits(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    owner_BL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Visits:
    """Exact probabilities that a path visits states, and the states of each target.

    The chain of a posterior path (see ``sample_paths``) is pushed forward. The states of a target
    are neighbours, so a path meets them one after the other: it has met two of them when the step
    after the first stays with the same target.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``; an emission of 0 everywhere asks before any token is known.
        owner_BL: int64, the target each state is a clone of, rising along a row.

    Returns:
        The probabilities.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    if owner_BL.shape != log_transition_BLL.shape[:2]:
        raise ValueError(
            f"want the owner of {tuple(log_transition_BLL.shape[:2])} states, got "
            f"{tuple(owner_BL.shape)}"
        )
    log_to_come_MBL, log_edge_BLL = log_to_come(*graph)
    M, B, L = log_to_come_MBL.shape
    state_L = torch.arange(L, device=owner_BL.device)
    is_own_BLL = owner_BL.unsqueeze(2) == owner_BL.unsqueeze(1)
    at_BL = (log_to_come_MBL[0, :, :1].isfinite() & (state_L == 0)).double()
    first_BL = at_BL  # also at a state, and no state of its target was met before
    state_BL, first_ever_BL, second_BL = (
        at_BL.clone(),
        first_BL.clone(),
        torch.zeros_like(at_BL),
    )
    for i in range(1, M):
        # What a path may yet do from a state is what entering it is worth, emission aside.
        log_beta_BL = log_to_come_MBL[i - 1] - log_emission_BML[:, i - 1]
        is_live_BL = (at_BL > 0) & (i < num_targets_B).unsqueeze(1)
        step_BLL = _steps(log_edge_BLL, log_to_come_MBL[i], log_beta_BL, is_live_BL)
        second_BL += (first_BL.unsqueeze(1) @ (step_BLL * is_own_BLL)).squeeze(1)
        first_BL = (at_BL.unsqueeze(1) @ (step_BLL * ~is_own_BLL)).squeeze(1)
        at_BL = (at_BL.unsqueeze(1) @ step_BLL).squeeze(1)
        state_BL += at_BL
        first_ever_BL += first_BL
    of_target_2BM = at_BL.new_zeros(2, B, M)
    of_target_2BM[0].scatter_add_(1, owner_BL, first_ever_BL)
    of_target_2BM[1].scatter_add_(1, owner_BL, second_BL)
    return Visits(state_BL, *of_target_2BM)


def _steps(
    log_edge_BLL: Tensor, log_to_come_BL: Tensor, log_beta_BL: Tensor, is_live_BL: Tensor
) -> Tensor:
    """P(next state | state) of the chain, 0 from where it does not go on."""
    log_step_BLL = log_edge_BLL + log_to_come_BL.unsqueeze(1)
    log_step_BLL -= log_beta_BL.masked_fill(~is_live_BL, 0.0).unsqueeze(2)
    return log_step_BLL.masked_fill_(~is_live_BL.unsqueeze(2), -torch.inf).exp_()
