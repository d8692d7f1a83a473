"""A figure of a fine-tuned model on rows that it has not seen: predictions against truth, or ROC.

Beside molecules with numbers stand those that are predicted worst.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from exlm_lab.downstream.task import Examples, Task
from exlm_mini.config.checks import UserError

NUM_WORST, PIXELS = 6, (300, 200)
MOST_TARGETS = 6
"""That are drawn."""
MOST_WORDS = 9
"""With colours of their own on a map, the most frequent ones."""


def draw(task: Task, examples: Examples, scores_RC: np.ndarray, path: Path) -> None:
    """Draw the figure of a part.

    Args:
        task: of any kind but ``span``.
        examples: of the part.
        scores_RC: what ``Predictor.scores`` says of them.
        path: a .svg.
    """
    import matplotlib.pyplot as plt

    from exlm_mini.plot.style import save_figure, use_book_style

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


def draw_map(pieces: list[tuple[np.ndarray, Any]], color: str | None, path: Path) -> None:
    """Draw vectors by their first two principal components.

    Args:
        pieces: vectors_BD, nan where a row has none, and the values of B rows, or None.
        color: what the values are called.
        path: of the figure.
    """
    import matplotlib.pyplot as plt
    import pandas as pd

    from exlm_mini.plot.style import save_figure, use_book_style

    use_book_style()
    vectors_RD = np.concatenate([vectors_BD for vectors_BD, _ in pieces])
    is_there_R = ~np.isnan(vectors_RD).any(axis=1)
    if is_there_R.sum() < 2:
        raise UserError(
            f"{path} needs two rows with a vector, and there is no second; give more"
        )
    centred_RD = vectors_RD[is_there_R] - vectors_RD[is_there_R].mean(axis=0)
    left_RC, size_C, _ = np.linalg.svd(centred_RD, full_matrices=False)
    x_R, y_R = (left_RC * size_C).T[:2]
    figure, axis = plt.subplots(figsize=(5, 4))
    if color is None:
        axis.scatter(x_R, y_R, s=9, alpha=0.6)
    else:
        values = pd.concat([values for _, values in pieces])[is_there_R].astype(object)
        words = values.where(values.notna(), "nothing").map(str)
        numbers = pd.to_numeric(words, errors="coerce")
        if numbers.notna().any() and numbers.nunique() > 10:
            dots = axis.scatter(x_R, y_R, s=9, c=numbers, cmap="viridis", plotnonfinite=True)
            figure.colorbar(dots, label=color)
        else:
            counts = words.value_counts()
            label_R = words.where(words.isin(counts.index[:MOST_WORDS]), "other")
            for label in dict.fromkeys([*counts.index[:MOST_WORDS], *label_R]):
                is_it_R = (label_R == label).to_numpy()
                axis.scatter(x_R[is_it_R], y_R[is_it_R], s=9, alpha=0.6, label=label)
            axis.legend(title=color, fontsize="small")
    share_C = size_C**2 / ((size_C**2).sum() or 1.0)
    axis.set(
        xlabel=f"first component, {share_C[0]:.0%} of the variance",
        ylabel=f"second, {share_C[1]:.0%}",
    )
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
    axis.set(xlabel="share of the others taken", ylabel="share found")
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
