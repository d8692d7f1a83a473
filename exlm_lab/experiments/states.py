"""Entropy and divergence of the predictions of masks and clones, and which tokens are lost.

Shapes: B rows, M targets, N positions, k clones or copies, R masks of all rows, V vocabulary.

Masks are numbered row by row, from left to right, like the predictions of ``MaskedLM``.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from exlm_mini.model.answers import StateScores


def log_token_alone(scores: StateScores) -> Tensor:
    """log P(w) of each mask by itself, in nats; (R, V), float64.

    ``ctc`` gives part of its probability to several tokens in one mask: that part is dropped and
    the rest renormalised.
    """
    log_token_RV = scores.log_token_SV.double()
    return log_token_RV if scores.is_linked else log_token_RV.log_softmax(dim=1)


def pairwise_divergence_bits(p_kV: Tensor) -> Tensor:
    """Mean Jensen-Shannon divergence over all pairs of k distributions, in bits.

    0 if the clones of a mask have the same distribution, 1 if no two share a word.

    Args:
        p_kV: probabilities, (..., k, V), k at least 2.

    Returns:
        A tensor of the leading shape, same dtype.
    """
    entropy_k = entropy_bits(p_kV.log())
    gains = [
        entropy_bits(((p_kV[..., i, :] + p_kV[..., j, :]) / 2).log())
        - (entropy_k[..., i] + entropy_k[..., j]) / 2
        for i, j in itertools.combinations(range(p_kV.shape[-2]), 2)
    ]
    return torch.stack(gains).mean(dim=0).clamp(min=0.0)  # below 0 only by rounding


def entropy_bits(log_p: Tensor) -> Tensor:
    """Entropy of distributions over the last dimension (Appendix E), in bits.

    Args:
        log_p: natural logs of probabilities that sum to one over the last dimension; ``-inf``
            where a token is impossible.

    Returns:
        A tensor without the last dimension, same dtype; 0 for a certain token.
    """
    return torch.special.entr(log_p.exp()).sum(dim=-1) / math.log(2)


def fully_masked(is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """Which tokens have all their copies masked (§3.1).

    Args:
        is_masked_BN: bool, rows as made by ``repeat_tokens``: copies of a token are adjacent.
        num_copies: copies of each token, k.

    Returns:
        is_lost_BM, bool (B, N / k); with one copy the mask itself.

    Raises:
        ValueError: if a row is not a whole number of tokens.
    """
    N = is_masked_BN.shape[1]
    if num_copies < 1 or N % num_copies:
        raise ValueError(f"rows of {N} positions do not hold {num_copies} copies of each token")
    return is_masked_BN.unflatten(1, (-1, num_copies)).all(dim=2)
