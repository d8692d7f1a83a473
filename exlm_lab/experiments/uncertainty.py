"""How far clones differ, and whether to believe a model: divergences and calibration."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

NUM_BINS = 15


def divergence_bits(p_kV: Tensor, weight_k: Tensor) -> Tensor:
    """Jensen-Shannon divergence of k weighted distributions, in bits.

    ``H(sum of w_j P_j) - sum of w_j H(P_j)``: what one learns from an outcome about which of them
    it was drawn from. 0 where they are equal; at most the entropy of the weights, log2 k.

    Args:
        p_kV: probabilities, (..., k, V), each row summing to one.
        weight_k: (..., k), not negative, with a positive sum; scaled to sum to one.

    Returns:
        The leading shape, same dtype.
    """
    weight_k = weight_k / weight_k.sum(dim=-1, keepdim=True)
    mixed_V = (weight_k.unsqueeze(-1) * p_kV).sum(dim=-2)
    gain = _entropy_bits(mixed_V) - (weight_k * _entropy_bits(p_kV)).sum(dim=-1)
    return gain.clamp(min=0.0)  # below 0 only by rounding


def pairwise_divergence_bits(p_kV: Tensor) -> Tensor:
    """Mean Jensen-Shannon divergence over all pairs of k distributions, in bits.

    From 0, where the clones of a mask all say the same, to 1, where no two share a word.

    Args:
        p_kV: probabilities, (..., k, V), k at least 2.

    Returns:
        The leading shape, same dtype.

    Raises:
        ValueError: if there is no pair.
    """
    k = p_kV.shape[-2]
    if k < 2:
        raise ValueError(f"{k} distribution has no pair to compare")
    entropy_k = _entropy_bits(p_kV)
    gains = [
        _entropy_bits((p_kV[..., i, :] + p_kV[..., j, :]) / 2)
        - (entropy_k[..., i] + entropy_k[..., j]) / 2
        for i, j in itertools.combinations(range(k), 2)
    ]
    return torch.stack(gains).mean(dim=0).clamp(min=0.0)


def effective_number(weight: Tensor) -> Tensor:
    """2 to the entropy of some weights: over how many outcomes they spread, from 1 to all.

    Args:
        weight: (..., X), not negative, with a positive sum; scaled to sum to one.
    """
    return 2 ** _entropy_bits(weight / weight.sum(dim=-1, keepdim=True))


def _entropy_bits(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(dim=-1) / math.log(2)


def calibration_error(
    confidence_R: Tensor, is_correct_R: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Expected calibration error: mean distance of confidence and accuracy, over bins.

    The bins hold equally many predictions of rising confidence. With few predictions chance alone
    keeps the error above 0.

    Args:
        confidence_R: probability of the predicted word.
        is_correct_R: whether it was right; or, where the true distribution is known, how likely
            it is to be right, which says the same with less noise.
        num_bins: fewer are made of fewer predictions, so that none is empty.

    Returns:
        From 0 to 1, as a probability.
    """
    order_R = confidence_R.argsort(stable=True)
    pairs = torch.stack([confidence_R.double(), is_correct_R.double()])[:, order_R]
    bins = pairs.tensor_split(min(num_bins, len(order_R)), dim=1)
    confidence_Q, accuracy_Q = torch.stack([one.mean(dim=1) for one in bins], dim=1)
    count_Q = torch.tensor([one.shape[1] for one in bins])
    return (((confidence_Q - accuracy_Q).abs() * count_Q).sum() / count_Q.sum()).item()
