"""The graph of a reading, as Figures 7, 10 and 11 draw it; L states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from exlm_mini.plotting.basics import draw_heatmap
from exlm_mini.plotting.style import COLORS


def draw_transition(
    ax: Axes, transition_LL: np.ndarray, names: Sequence[str], kinds: Sequence[str]
) -> None:
    """The transition matrix as in Figures 7 and 10: rows hand over to columns.

    Args:
        ax: to draw on.
        transition_LL: E[v, u], probabilities; only entries above the diagonal are drawn, as no
            edge leads back.
        names: of the states, for both axes; their words, say, one per line.
        kinds: key of ``COLORS`` for each state, the ground of its name.

    Raises:
        ValueError: if the lengths do not fit.
    """
    _check_states(transition_LL, names, kinds)
    is_edge_LL = np.triu(np.ones_like(transition_LL, dtype=bool), 1)
    draw_heatmap(
        ax,
        np.where(is_edge_LL, transition_LL, np.nan),
        names,
        names,
        "transition probability",
        cmap="Blues",
        limits=(0, 1),
    )
    ax.tick_params(axis="x", rotation=0)
    ax.grid(False)
    for axis in (ax.xaxis, ax.yaxis):
        for text, kind in zip(axis.get_ticklabels(), kinds, strict=True):
            ground = {"boxstyle": "round,pad=0.25", "facecolor": COLORS[kind], "lw": 0}
            text.set(fontsize=7.5, color="black", bbox=ground)
    ax.set(xlabel="to state", ylabel="from state")


def draw_dag(
    ax: Axes,
    transition_LL: np.ndarray,
    columns: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[str],
    smallest: float = 0.02,
) -> None:
    """The graph as in Figure 11: one column per mask, edges as wide as they are likely.

    Args:
        ax: made bare.
        transition_LL: E[v, u], probabilities, read above the diagonal.
        columns: of the states, ascending: the target each is a clone of.
        names: of the states, a few short lines each.
        kinds: key of ``COLORS`` for each state.
        smallest: edges less likely than this are left out.

    Raises:
        ValueError: if the lengths do not fit.
    """
    _check_states(transition_LL, names, kinds)
    _check_states(transition_LL, columns, kinds)
    at = _in_columns(columns)
    for v, u in zip(*np.nonzero(np.triu(transition_LL >= smallest, 1)), strict=True):
        _draw_transition_edge(ax, at[v], at[u], float(transition_LL[v, u]))
    for place, name, kind in zip(at, names, kinds, strict=True):
        box = {"boxstyle": "round,pad=0.35", "facecolor": COLORS[kind], "edgecolor": "white"}
        style = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3}
        ax.text(*place, name, color="black", bbox=box, **style)
    xs, ys = zip(*at, strict=True)
    ax.set(xlim=(min(xs) - 0.45, max(xs) + 0.45), ylim=(min(ys) - 0.6, max(ys) + 0.6))
    ax.axis("off")


def _check_states(transition_LL: np.ndarray, names: Sequence, kinds: Sequence) -> None:
    if transition_LL.shape != (len(names), len(names)) or len(kinds) != len(names):
        raise ValueError(
            f"transition {transition_LL.shape}, {len(names)} names or columns, "
            f"{len(kinds)} kinds: one for each state"
        )


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
    ax: Axes, start: tuple[float, float], end: tuple[float, float], probability: float
) -> None:
    """A line that is wide and dark where it is likely; its number, unless it is small."""
    # An edge inside a column, or past one, bends around the states between.
    bend = {0.0: 0.35, 1.0: 0.0}.get(end[0] - start[0], -0.2)
    style = {
        "arrowstyle": "-",
        "connectionstyle": f"arc3,rad={bend}",
        "color": "0.2",
        "lw": 0.6 + 4 * probability,
        "alpha": 0.25 + 0.6 * probability,
    }
    ax.annotate("", end, start, arrowprops=style, zorder=1)
    if probability < 0.1:
        return
    share = 0.5 if bend else 0.42
    (x0, y0), (x1, y1) = start, end
    # Where a bent line is furthest from the straight one, half its bend to the side.
    x = x0 + share * (x1 - x0) + bend / 2 * (y1 - y0)
    y = y0 + share * (y1 - y0) - bend / 2 * (x1 - x0)
    ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "lw": 0}
    style = {"ha": "center", "va": "center", "fontsize": 7, "bbox": ground, "zorder": 2}
    ax.text(x, y, f"{probability:.2f}", color="0.2", **style)
