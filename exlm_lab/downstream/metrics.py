"""How answers are scored: the metrics of GLUE and MoleculeNet (Appendix M, Table 1).

All are shares or correlations between -1 and 1; the paper prints them times 100. SQuAD has its
own scorer in ``squad``. Formulas are those of scikit-learn and scipy.

Shapes: R examples, C classes or tasks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType

import numpy as np

from exlm_lab.downstream.task import Task
from exlm_mini.config import UserError


def evaluate(task: Task, scores_RC: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Every metric of a task, the one that chooses between runs among them.

    Args:
        task: its ``kind`` says which metrics there are.
        scores_RC: what the model gave out, float: logits of the classes (the largest wins), the
            number itself (R,) or (R, 1), or a logit per yes-no answer.
        labels: as ``Examples.labels``: int64 (R,), float64 (R,), or float64 (R, C) with nan
            where an answer is missing.

    Returns:
        ``classes``: ``accuracy``; with two classes also ``f1`` and ``matthews`` of class 1 and
        ``roc_auc`` of its logit less the other's, where the labels hold both classes.
        ``number``: ``pearson`` and ``spearman``. ``labels``: ``roc_auc``, the mean over the
        answers that are counted, and ``num_tasks``, how many are.

    Raises:
        UserError: if there are no examples, a score is not finite, or nothing can be scored.
        ValueError: if the shapes do not fit, or the task is one of spans.
    """
    scores_RC = np.asarray(scores_RC, dtype=np.float64)
    if task.kind == "span":
        raise ValueError("spans are scored by squad.score_predictions")
    _check(task, scores_RC, labels)
    if task.kind == "number":
        numbers_R = scores_RC.reshape(-1)
        return {"pearson": pearson(numbers_R, labels), "spearman": spearman(numbers_R, labels)}
    if task.kind == "labels":
        auc, num_tasks = mean_roc_auc(scores_RC, labels)
        return {"roc_auc": auc, "num_tasks": float(num_tasks)}
    predicted_R = scores_RC.argmax(axis=1)
    out = {"accuracy": accuracy(predicted_R, labels)}
    if scores_RC.shape[1] == 2:
        out |= {"f1": f1(predicted_R, labels), "matthews": matthews(predicted_R, labels)}
        if len(np.unique(labels)) == 2:
            margin_R1 = scores_RC[:, 1:] - scores_RC[:, :1]
            out["roc_auc"], _ = mean_roc_auc(margin_R1, labels[:, None].astype(np.float64))
    return out


def accuracy(predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    """Share of examples whose class is right."""
    return float(np.mean(predicted_R == labels_R))


def f1(predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1; 0 if it is never right."""
    metrics, _ = libraries()
    return float(metrics.f1_score(labels_R, predicted_R, zero_division=0.0))


def matthews(predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    """Matthews correlation of two classes; 0 if either side is constant."""
    metrics, _ = libraries()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single class on both sides
        return float(metrics.matthews_corrcoef(labels_R, predicted_R))


def pearson(predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    """Linear correlation; 0 if either side is constant, where it has no value."""
    _, stats = libraries()
    return _correlation(stats.pearsonr, predicted_R, labels_R)


def spearman(predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    """Correlation of the ranks; 0 if either side is constant, where it has no value."""
    _, stats = libraries()
    return _correlation(stats.spearmanr, predicted_R, labels_R)


def mean_roc_auc(scores_RC: np.ndarray, labels_RC: np.ndarray) -> tuple[float, int]:
    """Area under the ROC curve, averaged over yes-no tasks.

    A task counts over the examples that have a label. One whose labels are all the same has no
    ROC curve and is skipped; to score it 0, or 0.5, would move the mean.

    Args:
        scores_RC: larger means yes, float.
        labels_RC: 0, 1 or nan, float.

    Returns:
        mean: the average over the tasks counted, in [0, 1].
        num_tasks: how many were.

    Raises:
        UserError: if no task has both answers.
    """
    metrics, _ = libraries()
    areas = []
    for scores_R, labels_R in zip(scores_RC.T, labels_RC.T, strict=True):
        has_label_R = ~np.isnan(labels_R)
        if len(np.unique(labels_R[has_label_R])) == 2:
            areas.append(metrics.roc_auc_score(labels_R[has_label_R], scores_R[has_label_R]))
    if not areas:
        raise UserError(
            f"none of the {labels_RC.shape[1]} task(s) has both answers among its "
            f"{len(labels_RC)} examples, so there is no ROC curve; use a larger split"
        )
    return float(np.mean(areas)), len(areas)


def _correlation(measure: Callable, predicted_R: np.ndarray, labels_R: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant and nearly constant numbers: see below
        value = float(measure(predicted_R, labels_R).statistic)
    return 0.0 if np.isnan(value) else value


def _check(task: Task, scores_RC: np.ndarray, labels: np.ndarray) -> None:
    num_columns = {"classes": len(task.classes), "number": 1, "labels": len(task.classes)}
    shape = (len(labels), num_columns[task.kind])
    is_flat_number = task.kind == "number" and scores_RC.shape == shape[:1]
    if scores_RC.shape != shape and not is_flat_number:
        raise ValueError(f"want scores of shape {shape}, got {scores_RC.shape}")
    if labels.shape != (shape if task.kind == "labels" else shape[:1]):
        raise ValueError(f"labels of shape {labels.shape} do not fit scores {scores_RC.shape}")
    if not len(labels):
        raise UserError(
            f"{task.name}: there is no labelled example to score; use another split"
        )
    num_bad = int((~np.isfinite(scores_RC)).sum())
    if num_bad:
        raise UserError(
            f"{task.name}: {num_bad} of {scores_RC.size} scores are not finite; the model "
            "diverged, lower the learning rate"
        )


def libraries() -> tuple[ModuleType, ModuleType]:
    """The metrics of scikit-learn and the statistics of scipy.

    Raises:
        UserError: one of them is missing.
    """
    try:
        import scipy.stats
        import sklearn.metrics
    except ImportError as error:
        raise UserError(
            f"scoring needs the package {error.name}; pip install 'exlm-mini[tasks]'"
        ) from None
    return sklearn.metrics, scipy.stats
