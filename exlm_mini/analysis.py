"""What the paper measures about trained models: uncertainty, and where it comes from.

Shapes: B rows, N tokens of a repeated row, M tokens of the row before, k copies, S masked
positions of a batch, R fully masked tokens of a batch, V vocabulary.

In Repeated MLM a [MASK] is not yet a lost word: other copies of it may stand beside it. So
Appendix E measures over *fully masked* tokens only, those with every copy masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy_bits(log_p: Tensor) -> Tensor:
    """Entropy of distributions over the last dimension (Appendix E), in bits.

    Args:
        log_p: natural logs of probabilities that sum to one over the last dimension; ``-inf``
            where a token is impossible.

    Returns:
        The shape without the last dimension, same dtype; 0 for a certain token.
    """
    return torch.special.entr(log_p.exp()).sum(dim=-1) / math.log(2)


def fully_masked(is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """Which tokens have lost every copy (§3.1).

    Args:
        is_masked_BN: bool, rows as ``repeat_tokens`` writes them: the copies of a token stand
            beside each other.
        num_copies: k.

    Returns:
        is_lost_BM, bool (B, N / k); with one copy the mask itself.

    Raises:
        ValueError: if a row is not a whole number of tokens.
    """
    N = is_masked_BN.shape[1]
    if num_copies < 1 or N % num_copies:
        raise ValueError(f"rows of {N} positions do not hold {num_copies} copies of each token")
    return is_masked_BN.unflatten(1, (-1, num_copies)).all(dim=2)


def mean_over_copies(value_S: Tensor, is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """The filter and the average of Appendix E.1, for any number measured at masked positions.

    Positions of tokens with at least one visible copy are left out; the k values of every other
    token are averaged.

    Args:
        value_S: float, one value per masked position, row by row from left to right, as
            ``MaskedLM.forward`` orders its logits.
        is_masked_BN: bool, as for ``fully_masked``.
        num_copies: k.

    Returns:
        value_R, same dtype: one per fully masked token, row by row from left to right; empty if
        there is none.

    Raises:
        ValueError: if the values are not one per masked position, or as ``fully_masked``.
    """
    num_masked = int(is_masked_BN.sum())
    if value_S.shape != (num_masked,):
        raise ValueError(f"want {num_masked} values, got shape {tuple(value_S.shape)}")
    is_lost_BM = fully_masked(is_masked_BN, num_copies)
    is_counted_BN = is_lost_BM.repeat_interleave(num_copies, dim=1)
    return value_S[is_counted_BN[is_masked_BN]].view(-1, num_copies).mean(dim=1)


def repeated_entropy_bits(log_p_SV: Tensor, is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """H_token of Appendix E.1: a model's uncertainty about the tokens it sees no copy of.

    ``H_token = 1/k * sum over copies j of H[P(x_j)]``, for tokens with all k copies masked.

    Args:
        log_p_SV: log-probabilities in nats at the masked positions (not logits), row by row
            from left to right.
        is_masked_BN: bool, as for ``fully_masked``.
        num_copies: k; with 1 this is the entropy at every masked position.

    Returns:
        entropy_R in bits, one per fully masked token; its mean is a cell of Figure 5.

    Raises:
        ValueError: as ``mean_over_copies``.
    """
    return mean_over_copies(entropy_bits(log_p_SV), is_masked_BN, num_copies)
