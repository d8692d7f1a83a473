"""Rows of tokens, heat maps and curves; T tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from exlm_mini.plot.style import COLORS


def draw_tokens(
    ax: Axes, tokens: Sequence[str], kinds: Sequence[str], y: float = 0.0, width: float = 0.92
) -> None:
    """A row of boxes, one per token, at x = 0, 1, … and height ``y``.

    Args:
        ax: made bare, with room for the boxes.
        tokens: text of each box; a line break is kept.
        kinds: key of ``COLORS`` for each box.
        y: centre of the boxes. Rows of one picture stand 1 apart.
        width: of a box; 1 lets neighbours touch.

    Raises:
        ValueError: if the two lists differ in length.
    """
    if len(tokens) != len(kinds):
        raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds")
    for x, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        box = FancyBboxPatch(
            (x - width / 2, y - 0.3),
            width,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=COLORS[kind],
            edgecolor="white",
        )
        ax.add_patch(box)
        ax.text(x, y, token, ha="center", va="center", fontsize=8, color="black")
    left, right = ax.get_xlim() if len(ax.patches) > len(tokens) else (0.0, 0.0)
    low, high = ax.get_ylim() if len(ax.patches) > len(tokens) else (y, y)
    ax.set_xlim(min(left, -0.6), max(right, len(tokens) - 0.4))
    ax.set_ylim(min(low, y - 0.5), max(high, y + 0.5))
    ax.axis("off")


def draw_heatmap(
    ax: Axes,
    values: np.ndarray,
    x_labels: Sequence[str],
    y_labels: Sequence[str],
    label: str,
    number_format: str | None = ".2f",
    cmap: str = "viridis",
    limits: tuple[float, float] | None = None,
) -> None:
    """A matrix as colours, row 0 on top, with its numbers written in.

    Args:
        ax: to draw on.
        values: (rows, columns); nan leaves a cell empty.
        x_labels, y_labels: of columns and rows.
        label: what a colour means, with its unit.
        number_format: of the numbers in the cells; ``None`` writes none.
        cmap: matplotlib's name of a colour map.
        limits: values of the two ends of the colour map; by default those of ``values``.
    """
    low, high = limits or (float(np.nanmin(values)), float(np.nanmax(values)))
    sns.heatmap(
        values,
        ax=ax,
        mask=np.isnan(values),
        annot=number_format is not None,
        fmt=number_format or "",
        annot_kws={"fontsize": 8},
        cmap=cmap,
        vmin=low,
        vmax=high,
        linewidths=0.5,
        xticklabels=list(x_labels),
        yticklabels=list(y_labels),
        cbar_kws={"label": label},
    )
    ax.tick_params(axis="y", rotation=0)


def draw_curves(
    ax: Axes, curves: Mapping[str, Mapping[int, float]], levels: Mapping[str, float]
) -> None:
    """Bits over training steps, with the exact values as dashed lines.

    Args:
        ax: to draw on.
        curves: by name, value by step; the objectives' names have their colour.
        levels: exact values by name, drawn across and named at the right; ``floor`` and
            ``joint`` at the start of a name give the colour.
    """
    for name, curve in curves.items():
        color = COLORS.get(name)
        ax.plot(list(curve), list(curve.values()), marker="o", ms=3, color=color, label=name)
    for name, level in levels.items():
        color = COLORS.get(name.split()[0], "0.4")
        ax.axhline(level, color=color, ls="--", lw=1)
        # Beside the axes: a curve that has reached its level would run through the words.
        ax.annotate(
            f"{name} {level:.2f}",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=color,
        )
    ax.set(xlabel="training step", ylabel="bits per sentence")
    ax.legend(loc="upper right")
