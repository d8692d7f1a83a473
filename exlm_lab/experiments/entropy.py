"""The uncertainty of predictions (Appendix E).

Shapes: B rows, N tokens of a repeated row, M tokens of the row before, k copies.

In Repeated MLM a masked copy is not yet a lost word, because other copies may be visible. So
Appendix E measures *fully masked* tokens only, those with every copy masked.
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
    """The tokens whose copies are all masked (§3.1).

    Args:
        is_masked_BN: bool, rows as made by ``repeat_tokens``: copies of a token are adjacent.
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
