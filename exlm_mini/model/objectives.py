"""Training objectives: masked language modelling (§2) and states alignment (§4.3).

Shapes: B rows, S masked tokens of a whole batch, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function


@record_function("head")
def mlm_loss(token_logits_SV: Tensor, target_ids_S: Tensor) -> Tensor:
    """L_MLM: mean of -log P(x_i | context) over the masked tokens of the batch (§2).

    Args:
        token_logits_SV: logits at the masked positions.
        target_ids_S: int64, the hidden tokens.

    Returns:
        Scalar in nats per masked token; 0 for a batch in which nothing is masked.
    """
    dtype = torch.promote_types(token_logits_SV.dtype, torch.float32)
    total = F.cross_entropy(token_logits_SV.to(dtype), target_ids_S, reduction="sum")
    return total / max(len(target_ids_S), 1)


def states_alignment_loss(log_likelihood_B: Tensor, num_scored_B: Tensor) -> Tensor:
    """L_SA = -log f_{M,L}, per target (§4.3).

    Deviation from §4.3, after the released code: each row's loss is divided by its number of
    targets, then rows are averaged. In the released code a row without a path counts as a loss
    of 0; here such a row is left out of the mean.

    Args:
        log_likelihood_B: in nats, from ``answers.log_likelihood``.
        num_scored_B: int64, scored targets of each row.

    Returns:
        Scalar in nats per target; 0 where no row has a path.
    """
    has_path_B = log_likelihood_B != -torch.inf
    loss_B = -log_likelihood_B.masked_fill(~has_path_B, 0.0)
    num_scored_B = num_scored_B.clamp(min=1)
    return (loss_B / num_scored_B).sum() / has_path_B.sum().clamp(min=1)


def nats_to_bits(nats: Tensor) -> Tensor:
    """Divide by log 2."""
    return nats / math.log(2)
