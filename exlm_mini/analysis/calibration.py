"""Whether a model's probabilities can be believed: confidence against what came true.

Shapes: R predictions, Q bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
