"""One CTC per mask instead of transitions, as in the released code ("w/o Transitions", Table 2).

Shapes: B rows, M targets, k states per mask.

The k states of a mask emit exactly one contiguous run of the target, with blanks around it; masks
are independent of each other. The paper does not describe this; the released criterion works this
way, with the unknown token as the blank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def run_log_likelihood(
    log_target_BMk: Tensor, log_blank_BMk: Tensor, is_blank_BM: Tensor
) -> Tensor:
    """Log-probability that k states spell their target, summed over its k (k + 1) / 2 runs.

    For the run of states a..b, the target's log-probabilities are summed over a..b and the
    blank's over the rest. A target that is itself the blank has a single labelling, blanks
    everywhere; the released code counts this labelling once per run.

    Args:
        log_target_BMk: log-probability of the target at each of its own states, finite.
        log_blank_BMk: log-probability of the blank at the same states, finite.
        is_blank_BM: bool, true where the target is the blank.

    Returns:
        log_likelihood_BM in nats.
    """
    k = log_target_BMk.shape[-1]
    # Compared with blanks everywhere, a run gains (target - blank) at each of its states.
    gain_BMk = log_target_BMk - log_blank_BMk
    upto_BMk = gain_BMk.cumsum(dim=-1)
    before_BMk = upto_BMk - gain_BMk
    is_run_kk = torch.ones(k, k, dtype=torch.bool, device=gain_BMk.device).triu()
    run_BMkk = upto_BMk.unsqueeze(-2) - before_BMk.unsqueeze(-1)
    runs_BM = run_BMkk[..., is_run_kk].logsumexp(dim=-1)
    return runs_BM.masked_fill(is_blank_BM, 0.0) + log_blank_BMk.sum(dim=-1)
