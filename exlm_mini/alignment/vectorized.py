"""One PyTorch operation per target, in log space, with its own backward pass.

Shapes: B rows, M targets, L states.

The forward pass runs the recursion of Appendix I.1 from the end (beta, own emission not
included)::

    log beta[i, v] = logsumexp over u > v of (log E[v, u] + log P_u(y_{i+1}) + log beta[i+1, u])

and reads the likelihood off the start: log f = log P_0(y_0) + log beta[0, 0]. Given beta, a path
drawn from the posterior is a Markov chain: from state v it goes to u with probability
E[v, u] P_u(y_{i+1}) beta[i+1, u] / beta[i, v]. The backward pass pushes the chain forward, which
yields state and edge posteriors, that is the gradients, as numbers in [0, 1] that sum to one; no
difference of large log-scores is ever exponentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.autograd import with_gradients
from exlm_mini.alignment.graphs import edges_only, is_state


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
    # A live row holds its peak, exp(0) = 1, so only dead rows are touched by the clamp.
    return weight_BLL.div_(total_BL1.clamp(min=1.0)), log_total_BL


class _Graphs:
    """A batch of graphs; padding is masked, so its contents do not matter."""

    def __init__(
        self,
        log_emission_BML: Tensor,
        log_transition_BLL: Tensor,
        num_targets_B: Tensor,
        num_states_B: Tensor,
    ) -> None:
        self.log_emission_BML = log_emission_BML
        self.num_targets_B, self.num_states_B = num_targets_B, num_states_B
        self.is_state_BL = is_state(log_emission_BML, num_states_B)
        self.log_edge_BLL = edges_only(log_transition_BLL, self.is_state_BL)

    def log_step(self, i: int, log_beta_BL: Tensor) -> Tensor:
        """log of E[v, u] P_u(y_{i+1}) beta[i+1, u], (B, L, L); -inf after the last target."""
        is_read_BL = self.is_state_BL & (i + 1 < self.num_targets_B).unsqueeze(1)
        log_enter_BL = self.log_emission_BML[:, i + 1] + log_beta_BL
        log_enter_BL = log_enter_BL.masked_fill(~is_read_BL, -torch.inf)
        return self.log_edge_BLL + log_enter_BL.unsqueeze(1)

    def log_beta(self) -> Tensor:
        """log beta for every target and state, (M, B, L); -inf at padding."""
        B, M, L = self.log_emission_BML.shape
        state_L = torch.arange(L, device=self.log_emission_BML.device)
        is_end_BL = state_L == (self.num_states_B - 1).unsqueeze(1)
        end_BL = self.log_emission_BML.new_zeros(B, L).masked_fill(~is_end_BL, -torch.inf)
        log_beta_MBL = self.log_emission_BML.new_full((M, B, L), -torch.inf)
        for i in range(M - 1, -1, -1):
            if i < M - 1:
                _, log_beta_MBL[i] = _hand_over(self.log_step(i, log_beta_MBL[i + 1]))
            is_last_B1 = (self.num_targets_B - 1 == i).unsqueeze(1)
            log_beta_MBL[i] = torch.where(is_last_B1, end_BL, log_beta_MBL[i])
        return log_beta_MBL


def _sum_over_paths(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """log_likelihood_B and log_beta_MBL."""
    graphs = _Graphs(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    log_beta_MBL = graphs.log_beta()
    return log_emission_BML[:, 0, 0] + log_beta_MBL[0, :, 0], log_beta_MBL


def _gradients(
    grad_B: Tensor,
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    log_beta_MBL: Tensor,
) -> tuple[Tensor, Tensor]:
    """State and edge posteriors of each row, times its incoming gradient."""
    graphs = _Graphs(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    log_likelihood_B = log_emission_BML[:, 0, 0] + log_beta_MBL[0, :, 0]
    # The chain starts in state 0 with the weight of the incoming gradient.
    weight_B = grad_B.masked_fill(log_likelihood_B.isnan(), torch.nan)
    state_BML = torch.zeros_like(log_emission_BML)
    state_BML[:, 0, 0] = weight_B.masked_fill(log_likelihood_B == -torch.inf, 0.0)
    edge_BLL = torch.zeros_like(log_transition_BLL)
    for i in range(state_BML.shape[1] - 1):
        step_BLL, _ = _hand_over(graphs.log_step(i, log_beta_MBL[i + 1]))
        step_BLL.mul_(state_BML[:, i].unsqueeze(2))
        state_BML[:, i + 1] = step_BLL.sum(dim=1)
        edge_BLL += step_BLL
    return state_BML, edge_BLL


_differentiable = with_gradients(_sum_over_paths, _gradients)


def log_to_come(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The posterior path as a Markov chain: the weight of entering each state, and the edges.

    Given the targets, a path is a Markov chain (Appendix I). It starts in state 0, and from state
    v at target i it moves to state u with a probability proportional to
    E[v, u] P_u(y_{i+1}) beta[i+1, u]. The last two factors are the likelihood of what is still to
    come if state u emits target i+1. A table of them, with the edges, describes the whole chain.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``, and checked.

    Returns:
        log_to_come_MBL: float64, in nats; -inf where the end cannot be reached. Its entry
            [0, :, 0] is the log-likelihood. Beyond ``num_targets_B`` it has no meaning.
        log_edge_BLL: float64, the transitions, with -inf where there is no edge v < u.
    """
    is_state_BL = is_state(log_emission_BML, num_states_B)
    log_emission_BML = log_emission_BML.double().masked_fill(
        ~is_state_BL.unsqueeze(1), -torch.inf
    )
    graphs = _Graphs(log_emission_BML, log_transition_BLL.double(), num_targets_B, num_states_B)
    return graphs.log_beta() + log_emission_BML.transpose(0, 1), graphs.log_edge_BLL


def log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Tensor:
    """See ``alignment.dag_log_likelihood``; differentiable once."""
    graph = (log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return _differentiable(*graph)[0]


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The recursion with max in place of sum, and back-pointers; see ``alignment.viterbi``."""
    B, M, L = log_emission_BML.shape
    device = log_emission_BML.device
    is_state_BL = is_state(log_emission_BML, num_states_B)
    log_edge_BLL = edges_only(log_transition_BLL, is_state_BL)
    is_start_L = torch.arange(L, device=device) == 0
    best_BL = log_emission_BML[:, 0].masked_fill(~is_start_L, -torch.inf)
    best_MBL, came_from_MBL = [best_BL], []
    for i in range(1, M):
        reach_BL, from_BL = (best_BL.unsqueeze(2) + log_edge_BLL).max(dim=1)
        best_BL = (reach_BL + log_emission_BML[:, i]).masked_fill(~is_state_BL, -torch.inf)
        best_MBL.append(best_BL)
        came_from_MBL.append(from_BL)
    batch_B = torch.arange(B, device=device)
    log_score_B = torch.stack(best_MBL)[num_targets_B - 1, batch_B, num_states_B - 1]

    path_BM = torch.full((B, M), -1, dtype=torch.int64, device=device)
    state_B = num_states_B - 1
    for i in range(M - 1, -1, -1):
        is_on_path_B = (i < num_targets_B) & (log_score_B != -torch.inf)
        path_BM[:, i] = torch.where(is_on_path_B, state_B, -1)
        if i > 0:
            state_B = torch.where(is_on_path_B, came_from_MBL[i - 1][batch_B, state_B], state_B)
    return path_BM, log_score_B
