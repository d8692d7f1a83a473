"""One PyTorch operation per target, in log space, with its own backward pass.

Shapes: B rows, M targets, L states.

The forward pass runs the recursion of Appendix I.1 from the end (beta, own emission not
included)::

    log beta[i, v] = logsumexp over u > v of (log E[v, u] + log P_u(y_{i+1}) + log beta[i+1, u])

and reads the likelihood off the start: log f = log P_0(y_0) + log beta[0, 0]. Given beta, a path
drawn from the posterior is a Markov chain: from state v it goes to u with probability
E[v, u] P_u(y_{i+1}) beta[i+1, u] / beta[i, v]. The backward pass runs this chain forward, which
yields state and edge posteriors (the gradients) directly as probabilities; no difference of large
log-scores is ever exponentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.autograd import with_gradients
from exlm_mini.alignment.graphs import Graph


def _hand_over(log_step_BLL: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise each row of exp(log_step) in place.

    Returns:
        The probabilities, all 0 in rows without a successor, and the log-sums (B, L).
    """
    peak_BL1 = log_step_BLL.amax(dim=2, keepdim=True)
    peak_BL1 = peak_BL1.masked_fill(peak_BL1 == -torch.inf, 0.0)
    weight_BLL = log_step_BLL.sub_(peak_BL1).exp_()
    total_BL1 = weight_BLL.sum(dim=2, keepdim=True)
    log_total_BL = (total_BL1.log() + peak_BL1).squeeze(2)
    # A row with a successor contains exp(0) = 1, its peak, so the clamp only changes the others.
    return weight_BLL.div_(total_BL1.clamp(min=1.0)), log_total_BL


def _log_step(graph: Graph, log_edge_BLL: Tensor, i: int, log_beta_BL: Tensor) -> Tensor:
    """log (E[v, u] P_u(y_{i+1}) beta[i+1, u]), (B, L, L); -inf after the last target."""
    is_read_BL = graph.is_state_BL & (i + 1 < graph.num_targets_B).unsqueeze(1)
    log_enter_BL = graph.log_emission_BML[:, i + 1] + log_beta_BL
    log_enter_BL = log_enter_BL.masked_fill(~is_read_BL, -torch.inf)
    return log_edge_BLL + log_enter_BL.unsqueeze(1)


def log_beta(graph: Graph, log_edge_BLL: Tensor) -> Tensor:
    """log beta for every target and state, (M, B, L); -inf at padding."""
    B, M, L = graph.log_emission_BML.shape
    state_L = torch.arange(L, device=graph.num_states_B.device)
    is_end_BL = state_L == (graph.num_states_B - 1).unsqueeze(1)
    end_BL = graph.log_emission_BML.new_zeros(B, L).masked_fill(~is_end_BL, -torch.inf)
    log_beta_MBL = graph.log_emission_BML.new_full((M, B, L), -torch.inf)
    for i in range(M - 1, -1, -1):
        if i < M - 1:
            log_step_BLL = _log_step(graph, log_edge_BLL, i, log_beta_MBL[i + 1])
            _, log_beta_MBL[i] = _hand_over(log_step_BLL)
        is_last_B1 = (graph.num_targets_B - 1 == i).unsqueeze(1)
        log_beta_MBL[i] = torch.where(is_last_B1, end_BL, log_beta_MBL[i])
    return log_beta_MBL


def _sum_over_paths(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """log_likelihood_B and log_beta_MBL."""
    graph = Graph(*arguments)
    log_beta_MBL = log_beta(graph, graph.log_edge_BLL)
    return graph.log_emission_BML[:, 0, 0] + log_beta_MBL[0, :, 0], log_beta_MBL


def _gradients(grad_B: Tensor, *arguments_and_log_beta_MBL: Tensor) -> tuple[Tensor, Tensor]:
    """State and edge posteriors of each row, times its incoming gradient."""
    *arguments, log_beta_MBL = arguments_and_log_beta_MBL
    graph = Graph(*arguments)
    log_edge_BLL = graph.log_edge_BLL
    log_likelihood_B = graph.log_emission_BML[:, 0, 0] + log_beta_MBL[0, :, 0]
    # The chain starts in state 0 with the weight of the incoming gradient.
    weight_B = grad_B.masked_fill(log_likelihood_B.isnan(), torch.nan)
    state_BML = torch.zeros_like(graph.log_emission_BML)
    state_BML[:, 0, 0] = weight_B.masked_fill(log_likelihood_B == -torch.inf, 0.0)
    edge_BLL = torch.zeros_like(log_edge_BLL)
    for i in range(state_BML.shape[1] - 1):
        step_BLL, _ = _hand_over(_log_step(graph, log_edge_BLL, i, log_beta_MBL[i + 1]))
        step_BLL.mul_(state_BML[:, i].unsqueeze(2))
        state_BML[:, i + 1] = step_BLL.sum(dim=1)
        edge_BLL += step_BLL
    return state_BML, edge_BLL


_differentiable = with_gradients(_sum_over_paths, _gradients)


def log_to_come(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """What drawing a path from the posterior needs: likelihoods to come, and transitions.

    Given the targets, a path is a Markov chain (Appendix I). It starts in state 0, and from state
    v at target i it moves to state u with a probability proportional to
    E[v, u] P_u(y_{i+1}) beta[i+1, u]. The last two factors are the likelihood of what is still to
    come if state u emits target i+1.

    Returns:
        log_to_come_MBL: log of these two factors, float64, in nats; -inf where the end cannot be
            reached, meaningless beyond ``num_targets_B``. Entry [0, :, 0] is the log-likelihood.
        log_edge_BLL: float64, the transitions, with -inf where there is no edge v < u.
    """
    graph = Graph(*arguments).double()
    log_edge_BLL = graph.log_edge_BLL
    is_beyond_BL = ~graph.is_state_BL
    log_emission_MBL = graph.log_emission_BML.transpose(0, 1)
    log_to_come_MBL = log_beta(graph, log_edge_BLL) + log_emission_MBL
    return log_to_come_MBL.masked_fill(is_beyond_BL, -torch.inf), log_edge_BLL


def log_likelihood(*arguments: Tensor) -> Tensor:
    """See ``alignment.dag_log_likelihood``; differentiable once."""
    return _differentiable(*arguments)[0]


def viterbi(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """The recursion with max in place of sum, and back-pointers; see ``alignment.viterbi``."""
    graph = Graph(*arguments)
    (B, M, L), device = graph.log_emission_BML.shape, graph.num_states_B.device
    log_edge_BLL, is_state_BL = graph.log_edge_BLL, graph.is_state_BL
    is_start_L = torch.arange(L, device=device) == 0
    best_BL = graph.log_emission_BML[:, 0].masked_fill(~is_start_L, -torch.inf)
    best_MBL, came_from_MBL = [best_BL], []
    for i in range(1, M):
        reach_BL, from_BL = (best_BL.unsqueeze(2) + log_edge_BLL).max(dim=1)
        best_BL = reach_BL + graph.log_emission_BML[:, i]
        best_BL = best_BL.masked_fill(~is_state_BL, -torch.inf)
        best_MBL.append(best_BL)
        came_from_MBL.append(from_BL)
    batch_B, state_B = torch.arange(B, device=device), graph.num_states_B - 1
    log_score_B = torch.stack(best_MBL)[graph.num_targets_B - 1, batch_B, state_B]

    path_BM = torch.full((B, M), -1, device=device)
    for i in range(M - 1, -1, -1):
        is_on_path_B = (i < graph.num_targets_B) & (log_score_B != -torch.inf)
        path_BM[:, i] = torch.where(is_on_path_B, state_B, -1)
        if i > 0:
            state_B = torch.where(is_on_path_B, came_from_MBL[i - 1][batch_B, state_B], state_B)
    return path_BM, log_score_B
