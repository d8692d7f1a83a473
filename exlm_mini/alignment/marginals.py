"""The token distribution of each target by itself: a mixture over states (Appendix P).

Shapes: B rows, M targets, L states, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.graphs import checked
from exlm_mini.alignment.vectorized import log_to_come

FAR_FROM_UNDERFLOW = 1e-250
"""Beside a number of this size, what float64 products of numbers up to 1 lose is negligible."""


@torch.no_grad()
def marginal_token_log_probs(
    log_prob_BLV: Tensor,
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor | int,
    num_states_B: Tensor | int,
) -> Tensor:
    """Log-probability of every token at every target by itself.

    Each state is weighted by the probability that it emits the target, given the emission::

        P(y_i = w) = sum over u of P(state u emits target i | emission) * P_u(w)

    The emission encodes what is known. An unknown target has emission 0 (log 1) in all states; if
    all targets are unknown, this is Appendix P before any token is known. For one target given
    the others, keep log P_u(y_j) for the others and set its own emission to 0. For a target whose
    token is known, the result is as if it were drawn once more from the state that emitted it.

    Args:
        log_prob_BLV: log P_u(w), floating; read only at valid states.
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``.

    Returns:
        log_prob_BMV in nats, same dtype as ``log_prob_BLV``, detached. Over the tokens the
        probabilities sum to 1 if those of the states do. -inf beyond ``num_targets_B`` and in
        rows without a path. The log-posteriors are computed in float64, so a token keeps its
        relative accuracy however unlikely its states are. Needs memory for L x V float64 numbers
        besides the result.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    B, M, L = log_emission_BML.shape
    if log_prob_BLV.dim() != 3 or log_prob_BLV.shape[:2] != (B, L):
        raise ValueError(
            f"want token log-probabilities ({B}, {L}, V) for emission {(B, M, L)}, "
            f"got {tuple(log_prob_BLV.shape)}"
        )
    log_state_BML = _log_state_posteriors(*graph)
    log_prob_BMV = log_prob_BLV.new_full((B, M, log_prob_BLV.shape[2]), -torch.inf)
    counts = zip(graph[2].tolist(), graph[3].tolist(), strict=True)
    for b, (m, n) in enumerate(counts):
        log_prob_BMV[b, :m] = _mix(log_state_BML[b, :m, :n], log_prob_BLV[b, :n].double())
    return log_prob_BMV


def _log_state_posteriors(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Tensor:
    """log P(state u emits target i | targets), float64; -inf where no path fits.

    Follows the Markov chain of the posterior path, see ``log_to_come``.
    """
    log_to_come_MBL, log_edge_BLL = log_to_come(
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B
    )
    log_state_MBL = torch.full_like(log_to_come_MBL, -torch.inf)
    log_likelihood_B = log_to_come_MBL[0, :, 0]
    # The chain starts in state 0 with probability 1, whose log is 0; NaN stays NaN.
    log_state_MBL[0, :, 0] = torch.where(
        log_likelihood_B == -torch.inf, -torch.inf, 0.0 * log_likelihood_B
    )
    for i in range(1, len(log_state_MBL)):
        log_step_BLL = log_edge_BLL + log_to_come_MBL[i].unsqueeze(1)
        log_beta_BL = log_step_BLL.logsumexp(dim=2)
        log_leave_BL = (log_state_MBL[i - 1] - log_beta_BL).masked_fill(
            log_beta_BL == -torch.inf, -torch.inf
        )
        log_state_MBL[i] = log_step_BLL.add_(log_leave_BL.unsqueeze(2)).logsumexp(dim=1)
    return log_state_MBL.transpose(0, 1)


def _mix(log_state_ML: Tensor, log_prob_LV: Tensor) -> Tensor:
    """log sum over u of exp(log_state[i, u] + log_prob[u, w]), (M, V), at any size of both."""
    # Scaled so that the likeliest state of each token has weight 1.
    peak_V = log_prob_LV.amax(dim=0)
    weight_LV = (log_prob_LV - peak_V.masked_fill(peak_V == -torch.inf, 0.0)).exp()
    weight_MV = log_state_ML.exp() @ weight_LV
    log_prob_MV = weight_MV.log() + peak_V
    # A matrix product is much faster than logsumexp, which is used where the product underflows.
    is_lost_MV = (weight_MV < FAR_FROM_UNDERFLOW) & (peak_V != -torch.inf)
    for i in is_lost_MV.any(dim=1).nonzero().flatten().tolist():
        log_each_LV = log_state_ML[i].unsqueeze(1) + log_prob_LV[:, is_lost_MV[i]]
        log_prob_MV[i, is_lost_MV[i]] = log_each_LV.logsumexp(dim=0)
    return log_prob_MV
