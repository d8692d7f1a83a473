"""Draw a fine-tuned model's predictions on unseen rows: against the truth, or as ROC curves.

If a single number is predicted from molecules, the molecules with the largest errors are shown too.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from exlm_lab.downstream.task import Examples, Task
from exlm_mini.plot.style import save_figure, use_book_style

NUM_WORST, PIXELS = 6, (300, 200)
MOST_TARGETS = 6
"""At most this many numbers, and as many classes or yes-no answers, are drawn."""


def draw(task: Task, examples: Examples, scores_RC: np.ndarray, path: Path) -> None:
    """Draw one part of a task of any kind but ``span`` as an .svg file; ``scores_RC`` is what
    ``Predictor.scores`` returns for its examples."""
    use_book_style()
    labels_RC = examples.labels
    if task.kind == "classes":
        labels_RC = np.eye(len(task.classes))[examples.labels]
    columns = [*zip(task.classes, labels_RC.T, scores_RC.T, strict=True)]
    numbers, others = (
        [columns[c] for c in np.flatnonzero(chosen)[:MOST_TARGETS]]
        for chosen in (task.is_number, ~task.is_number)
    )
    with_worst = len(numbers) == 1 and task.input == "smiles"
    num_panels = len(numbers) + with_worst + bool(others)
    figure, axes = plt.subplots(1, num_panels, figsize=(3.6 * num_panels, 3.6), squeeze=False)
    for axis, column in zip(axes[0], numbers, strict=False):
        _scatter(axis, *column)
    if with_worst:
        _worst(axes[0, 1], examples, *numbers[0][1:])
    for column in others:
        _roc(axes[0, -1], *column)
    save_figure(figure, path)


def _scatter(axis: Any, name: str, truth_R: np.ndarray, said_R: np.ndarray) -> None:
    axis.scatter(truth_R, said_R, s=9, alpha=0.6)
    ends = [np.nanmin([truth_R, said_R]), np.nanmax([truth_R, said_R])]
    axis.plot(ends, ends, color="0.6", lw=0.8, zorder=0)
    axis.set(xlabel=f"{name}, measured", ylabel=f"{name}, predicted")


def _roc(axis: Any, name: str, truth_R: np.ndarray, said_R: np.ndarray) -> None:
    from sklearn.metrics import roc_auc_score, roc_curve

    is_there_R = ~np.isnan(truth_R + said_R)
    if len(set(truth_R[is_there_R])) < 2:
        return
    pair = truth_R[is_there_R], said_R[is_there_R]
    axis.plot(*roc_curve(*pair)[:2], label=f"{name}, {roc_auc_score(*pair):.2f}")
    axis.plot([0, 1], [0, 1], color="0.6", lw=0.8, zorder=0)
    axis.set(xlabel="false positive rate", ylabel="true positive rate")
    axis.legend(title="area under the curve", fontsize="small")


def _worst(axis: Any, examples: Examples, truth_R: np.ndarray, said_R: np.ndarray) -> None:
    """The molecules with the largest errors, as RDKit draws them."""
    import matplotlib.image
    from rdkit.Chem import Draw

    from exlm_mini.data.molecules import read_molecule

    error_R = np.abs(truth_R - said_R)
    order = [row for row in np.argsort(-error_R)[:NUM_WORST] if not np.isnan(error_R[row])]
    canvas = Draw.rdMolDraw2D.MolDraw2DCairo(2 * PIXELS[0], 3 * PIXELS[1], *PIXELS)
    canvas.DrawMolecules(
        [read_molecule(examples.texts[row][0]) for row in order],
        legends=[f"measured {truth_R[row]:.3g}, predicted {said_R[row]:.3g}" for row in order],
    )
    canvas.FinishDrawing()
    axis.imshow(matplotlib.image.imread(io.BytesIO(canvas.GetDrawingText())))
    axis.set_title("the largest errors")
    axis.axis("off")
