"""The few statistics that ``metrics`` takes from scikit-learn and scipy, with NumPy alone.

For a machine that has a GPU and nothing else: there ``metrics`` uses these, under the names and
with the arguments of the libraries. A test holds both to the same numbers.

Shapes: R examples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Correlation(NamedTuple):
    """As scipy returns one."""

    statistic: float


def f1_score(labels_R: np.ndarray, predicted_R: np.ndarray, zero_division: float) -> float:
    """Harmonic mean of precision and recall of class 1; ``zero_division`` without any 1."""
    num_right = np.sum((labels_R == 1) & (predicted_R == 1))
    num_named = np.sum(labels_R == 1) + np.sum(predicted_R == 1)
    return float(2 * num_right / num_named) if num_named else zero_division


def matthews_corrcoef(labels_R: np.ndarray, predicted_R: np.ndarray) -> float:
    """Correlation of two classes 0 and 1; 0 if either side is constant."""
    found = pearsonr(labels_R.astype(np.float64), predicted_R.astype(np.float64)).statistic
    return 0.0 if np.isnan(found) else found


def pearsonr(a_R: np.ndarray, b_R: np.ndarray) -> Correlation:
    """Linear correlation; nan if either side is constant."""
    a_R, b_R = a_R - a_R.mean(), b_R - b_R.mean()
    size = np.linalg.norm(a_R) * np.linalg.norm(b_R)
    return Correlation(float(np.clip(a_R @ b_R / size, -1, 1)) if size > 0 else float("nan"))


def spearmanr(a_R: np.ndarray, b_R: np.ndarray) -> Correlation:
    """Correlation of the ranks; nan if either side is constant."""
    return pearsonr(ranks(a_R), ranks(b_R))


def roc_auc_score(labels_R: np.ndarray, scores_R: np.ndarray) -> float:
    """Area under the ROC curve: how often a 1 is above a 0, equals counting half.

    Args:
        labels_R: 0 and 1, each at least once.
        scores_R: larger means 1.
    """
    is_yes_R = labels_R == 1
    num_yes, num_no = int(is_yes_R.sum()), int((~is_yes_R).sum())
    above = ranks(scores_R)[is_yes_R].sum() - num_yes * (num_yes + 1) / 2
    return float(above / (num_yes * num_no))


def ranks(x_R: np.ndarray) -> np.ndarray:
    """Place of each number from 1 on, by size; equal numbers share their mean place."""
    _, which_R, counts = np.unique(x_R, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[which_R]
