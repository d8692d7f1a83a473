"""How far clones differ, how much of the dependence a model captures, and whether to believe it.

Jensen-Shannon divergences between the words of clones; the bits of total correlation that a model
wins over the best independent predictions (§3.2, "inter-token multimodality"); and its calibration.
A model that predicts masks independently cannot get below the sum of their marginal entropies; one
that knows how they depend on each other can reach their joint entropy. What lies between is their
total correlation. Of the toy language all of it is known (``toy_contexts``).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor


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


class Captured(NamedTuple):
    """Bits of the masks of a row, on average over rows; visible words are given."""

    floor_bits: float
    """Sum of the marginal entropies: the best that independent predictions can do."""
    joint_bits: float
    """Joint entropy: the best there is."""
    bits: float
    """-log2 P(masked words) of the model; on average not below ``joint_bits``."""

    @property
    def total_correlation_bits(self) -> float:
        """What dependencies are worth; 0 where the masked words are independent."""
        return self.floor_bits - self.joint_bits

    @property
    def captured_bits(self) -> float:
        """Bits won over the best independent predictions; below 0 for a model worse than them."""
        return self.floor_bits - self.bits

    @property
    def captured_share(self) -> float:
        """Part of the total correlation that is won; 1 for the true distribution.

        Raises:
            ValueError: if there is no total correlation.
        """
        if not self.total_correlation_bits > 0:
            raise ValueError("the masked words do not depend on each other: nothing to capture")
        return self.captured_bits / self.total_correlation_bits


NUM_BINS = 15


class Reliability(NamedTuple):
    """A reliability diagram: predictions in bins of rising confidence, float64."""

    confidence_Q: Tensor
    """Mean probability the model gives its likeliest word."""
    accuracy_Q: Tensor
    """Share of these words that were right."""
    count_Q: Tensor
    """Predictions in the bin, int64."""


def reliability_curve(
    confidence_R: Tensor, is_correct_R: Tensor, num_bins: int = NUM_BINS
) -> Reliability:
    """Mean confidence and accuracy in bins of equally many predictions.

    Args:
        confidence_R: probability of the predicted word.
        is_correct_R: whether it was right; or, where the true distribution is known, how likely
            it is to be right, which says the same with less noise.
        num_bins: fewer are made of fewer predictions, so that none is empty.

    Returns:
        The diagram; the sizes of bins differ by one at most.

    Raises:
        ValueError: if there is no prediction, or the two do not pair up.
    """
    if confidence_R.dim() != 1 or confidence_R.shape != is_correct_R.shape:
        raise ValueError(
            f"want one confidence per prediction, got {tuple(confidence_R.shape)} for "
            f"{tuple(is_correct_R.shape)}"
        )
    if len(confidence_R) == 0 or num_bins < 1:
        raise ValueError(f"cannot put {len(confidence_R)} predictions into {num_bins} bins")
    order_R = confidence_R.argsort(stable=True)
    pairs = torch.stack([confidence_R.double(), is_correct_R.double()])[:, order_R]
    bins = pairs.tensor_split(min(num_bins, len(order_R)), dim=1)
    means = torch.stack([one.mean(dim=1) for one in bins], dim=1)
    return Reliability(*means, torch.tensor([one.shape[1] for one in bins]))


def calibration_error(
    confidence_R: Tensor, is_correct_R: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Expected calibration error: mean distance of confidence and accuracy, over the bins.

    Arguments as in ``reliability_curve``. With few predictions chance alone keeps it above 0.

    Returns:
        From 0 to 1, as a probability.
    """
    curve = reliability_curve(confidence_R, is_correct_R, num_bins)
    distance_Q = (curve.confidence_Q - curve.accuracy_Q).abs()
    return ((distance_Q * curve.count_Q).sum() / curve.count_Q.sum()).item()
