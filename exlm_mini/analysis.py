"""What the paper measures about trained models: uncertainty, and where it comes from.

Shapes: S masked tokens, V vocabulary, N tokens of a row, k copies.
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
    return -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1) / math.log(2)
