"""The graph of a reading, as Figure 11 draws it; L states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.path import Path

from exlm_mini.plot.style import COLORS

SMALLEST_EDGE = 0.02
"""Edges less likely than this are left out."""


def draw_dag(
    ax: Axes,
    transition_LL: np.ndarray,
    columns: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """The graph as in Figure 11: one column per mask, edges as wide as they are likely.

    Args:
        ax: made bare.
        transition_LL: E[v, u], probabilities, read above the diagonal.
        columns: of the states, ascending: the target each is a clone of.
        names: of the states, a few short lines each.
        kinds: key of ``COLORS`` for each state.
    """
    at = _in_columns(columns)
    summits = [
        _draw_transition_edge(ax, at[v], at[u], at, float(transition_LL[v, u]))
        for v, u in zip(*np.nonzero(np.triu(transition_LL >= SMALLEST_EDGE, 1)), strict=True)
    ]
    for place, name, kind in zip(at, names, kinds, strict=True):
        box = {"boxstyle": "round,pad=0.35", "facecolor": COLORS[kind], "edgecolor": "white"}
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3}
        ax.text(*place, name, color="black", bbox=box, **style)
    xs, ys = zip(*at, strict=True)
    low, high = min([*ys, *summits]), max([*ys, *summits])
    # 0.4: room for a number on a bent edge; 0.6: room for a box.
    ax.set(
        xlim=(min(xs) - 0.45, max(xs) + 0.45),
        ylim=(min(low - 0.4, min(ys) - 0.6), max(high + 0.4, max(ys) + 0.6)),
    )
    ax.axis("off")


def _in_columns(columns: Sequence[int]) -> list[tuple[float, float]]:
    """Place of each state: columns one apart, its first state on top, each centred on 0."""
    counts = {column: list(columns).count(column) for column in columns}
    seen = dict.fromkeys(columns, 0)
    places = []
    for column in columns:
        places.append((float(column), (counts[column] - 1) / 2 - seen[column]))
        seen[column] += 1
    return places


def _draw_transition_edge(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    states: Sequence[tuple[float, float]],
    probability: float,
) -> float:
    """A line that is wide and dark where it is likely; its number, unless it is small.

    Returns the height of its middle.
    """
    (x0, y0), (x1, y1) = start, end
    bend_x, bend_y = _bend(start, end, states)
    # The middle of the curve lies half way between the straight line and this point.
    control = ((x0 + x1) / 2 + 2 * bend_x, (y0 + y1) / 2 + 2 * bend_y)

    def connect(from_place: Any, to_place: Any, *_: Any, **__: Any) -> Path:
        # In units of the graph, so that the number below is on the line whatever its shape.
        middle = ax.transData.transform(control)
        return Path([from_place, middle, to_place], [Path.MOVETO, Path.CURVE3, Path.CURVE3])

    style: dict[str, Any] = {
        "arrowstyle": "-",
        "connectionstyle": connect,
        "color": "0.2",
        "lw": 0.6 + 4 * probability,
        "alpha": 0.25 + 0.6 * probability,
    }
    ax.annotate("", end, start, arrowprops=style, zorder=1)
    if probability >= 0.1:
        # Where slanted lines cross, at their middle, several numbers would meet.
        t = 0.5 if bend_x or bend_y or y0 == y1 else 0.3
        near, far = (1 - t) ** 2, t**2
        x, y = (
            near * a + (1 - near - far) * c + far * b
            for a, c, b in zip(start, control, end, strict=True)
        )
        ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "lw": 0}
        style = {"ha": "center", "va": "center", "fontsize": 7, "bbox": ground, "zorder": 2}
        ax.text(x, y, f"{probability:.2f}", color="0.2", **style)
    return (y0 + y1) / 2 + bend_y


def _bend(
    start: tuple[float, float],
    end: tuple[float, float],
    states: Sequence[tuple[float, float]],
) -> tuple[float, float]:
    """How far the middle of an edge is moved, so that it passes between the states."""
    (x0, y0), (x1, y1) = start, end
    if x0 == x1:
        return -min(0.175 * abs(y1 - y0), 0.35), 0.0
    slope = (y1 - y0) / (x1 - x0)
    is_free = all(abs(y0 + slope * (x - x0) - y) > 0.3 for x, y in states if x0 < x < x1)
    # States of a column are 1 apart; edges over more columns pass further out.
    lift = 0.0 if is_free else 0.5 + 0.2 * (x1 - x0 - 2)
    return 0.0, lift if y0 + y1 >= 0 else -lift
