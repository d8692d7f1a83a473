"""The metrics of GLUE and MoleculeNet (Appendix M, Table 1), computed by scikit-learn and scipy.

Errors are in the unit of the target. All others are shares or correlations of at most 1; the paper
prints them times 100.
SQuAD has its own scorer in ``squad``.

Shapes: R examples, C classes or tasks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from exlm_lab.downstream.task import Task
from exlm_mini.config.checks import UserError

OF_SEVERAL = ("rmse", "r2", "roc_auc")
"""Metrics that are reported per target if there are several."""


def evaluate(task: Task, scores_RC: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """All metrics of a task.

    Args:
        task: a task of any kind but ``span``.
        scores_RC: the model's output, finite float: logits of the classes (the largest wins), the
            numbers, or a logit per yes-no answer.
        labels: as ``Examples.labels``.

    Returns:
        ``classes``: ``accuracy``; with two classes also ``f1`` and ``matthews`` of class 1, and, if
        both classes occur in the labels, ``roc_auc`` of the difference of the logits. ``numbers``:
        ``rmse`` and ``mae``, in the target's unit, ``r2``, ``pearson`` and ``spearman``; for
        several targets ``rmse NAME`` and ``r2 NAME`` of each, and ``r2``, the mean of these.
        ``labels``: ``roc_auc``, the mean over the tasks counted, and ``num_tasks``, their number.
        ``mixed``: ``rmse NAME`` and ``r2 NAME`` of each number, ``roc_auc NAME`` of each yes-no
        answer with both a yes and a no, and ``score``, the mean of all ``r2`` and ``roc_auc``.
        Undefined correlations, such as that of a constant prediction, are 0.
    """
    from sklearn import metrics

    scores_RC = np.asarray(scores_RC, dtype=np.float64)
    if task.kind == "labels":
        auc, num_tasks = mean_roc_auc(scores_RC, labels)
        return {"roc_auc": auc, "num_tasks": float(num_tasks)}
    if task.kind in ("numbers", "mixed"):
        columns = zip(task.is_number, scores_RC.T, labels.T, strict=True)
        each = [_of_numbers(*p) if is_number else _of_labels(*p) for is_number, *p in columns]
        if len(each) == 1:
            return each[0]
        named = zip(task.classes, each, strict=True)
        own = {f"{m} {name}": one[m] for name, one in named for m in OF_SEVERAL if m in one}
        shares = [value for name, value in own.items() if not name.startswith("rmse ")]
        return own | {"score" if task.kind == "mixed" else "r2": float(np.mean(shares))}
    predicted_R = scores_RC.argmax(axis=1)
    out = {"accuracy": float(np.mean(predicted_R == labels))}
    if len(task.classes) == 2:
        out["f1"] = float(metrics.f1_score(labels, predicted_R, zero_division=0.0))
        out["matthews"] = _quietly(lambda: metrics.matthews_corrcoef(labels, predicted_R))
        if len(np.unique(labels)) == 2:
            margin_R1 = scores_RC[:, 1:] - scores_RC[:, :1]
            out["roc_auc"], _ = mean_roc_auc(margin_R1, labels[:, None].astype(np.float64))
    return out


def _of_numbers(scores_R: np.ndarray, labels_R: np.ndarray) -> dict[str, float]:
    """The metrics of one numeric target, which must be known in at least two rows."""
    from scipy import stats

    pair = [column[~np.isnan(labels_R)] for column in (scores_R, labels_R)]
    error_R = pair[0] - pair[1]
    is_constant = np.ptp(pair[1]) == 0
    share = 0.0 if is_constant else 1.0 - float(np.mean(error_R**2) / np.var(pair[1]))
    return {
        "rmse": float(np.sqrt(np.mean(error_R**2))),
        "mae": float(np.mean(np.abs(error_R))),
        "r2": share,
        "pearson": _quietly(lambda: stats.pearsonr(*pair).statistic),
        "spearman": _quietly(lambda: stats.spearmanr(*pair).statistic),
    }


def _of_labels(scores_R: np.ndarray, labels_R: np.ndarray) -> dict[str, float]:
    """The metric of one yes-no target; empty if all its answers are equal."""
    if len(np.unique(labels_R[~np.isnan(labels_R)])) < 2:
        return {}
    return {"roc_auc": mean_roc_auc(scores_R[:, None], labels_R[:, None])[0]}


def mean_roc_auc(scores_RC: np.ndarray, labels_RC: np.ndarray) -> tuple[float, int]:
    """Area under the ROC curve, averaged over yes-no tasks.

    A task is scored on the examples that have a label. If these labels are all equal there is no
    ROC curve, and the task is skipped; counting it as 0 or 0.5 would shift the mean.

    Args:
        scores_RC: larger means yes, float.
        labels_RC: 0, 1 or nan, float.

    Returns:
        mean: the average over the tasks counted, in [0, 1].
        num_tasks: the number of tasks counted.
    """
    from sklearn.metrics import roc_auc_score

    areas = []
    for scores_R, labels_R in zip(scores_RC.T, labels_RC.T, strict=True):
        has_label_R = ~np.isnan(labels_R)
        if len(np.unique(labels_R[has_label_R])) == 2:
            areas.append(roc_auc_score(labels_R[has_label_R], scores_R[has_label_R]))
    if not areas:
        raise UserError(
            f"none of the {labels_RC.shape[1]} task(s) has both a yes and a no among its "
            f"{len(labels_RC)} examples, so there is no ROC curve; choose another --data.split, "
            "or give data with both answers"
        )
    return float(np.mean(areas)), len(areas)


def _quietly(measure: Callable[[], float]) -> float:
    """Compute a measure, 0 if undefined, and silence the warnings of scikit-learn and scipy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = float(measure())
    return 0.0 if np.isnan(value) else value
