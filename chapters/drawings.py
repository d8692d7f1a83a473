"""Drawings that several chapters share, on axes they are given."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from exlm_mini.plot.style import COLORS


def draw_tokens(
    ax: Axes, tokens: Sequence[str], kinds: Sequence[str], y: float = 0.0
) -> None:
    """A row of boxes, one per token, at x = 0, 1, … and height ``y``.

    Args:
        ax: made bare, with room for the boxes.
        tokens: text of each box; a line break is kept.
        kinds: key of ``COLORS`` for each box.
        y: centre of the boxes. Rows of one picture stand 1 apart.

    Raises:
        ValueError: if the two lists differ in length.
    """
    is_first_row = not ax.patches
    for x, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        shape: dict[str, Any] = {
            "boxstyle": "round,pad=0,rounding_size=0.1",
            "edgecolor": "white",
        }
        box = FancyBboxPatch(
            (x - 0.46, y - 0.3), 0.92, 0.6, facecolor=COLORS[kind], **shape
        )
        ax.add_patch(box)
        ax.text(x, y, token, ha="center", va="center", fontsize=8, color="black")
    left, right = (0.0, 0.0) if is_first_row else ax.get_xlim()
    low, high = (y, y) if is_first_row else ax.get_ylim()
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
        limits: values of the colour map's two ends; by default those of ``values``.
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


def draw_tables(
    tables: Mapping[str, np.ndarray],
    rows: Sequence[str],
    columns: Sequence[str],
    is_stacked: bool = False,
) -> None:
    """Tables of probabilities, as a figure of their own.

    Args:
        tables: by title, (rows, columns); a field that is not zero shows its value.
        rows, columns: names of both words.
        is_stacked: one above the other, for tables of more than a few columns.
    """
    count = len(tables)
    shape = (count, 1) if is_stacked else (1, count)
    size = 3.6, 0.42 * len(rows) * shape[0] + 1.1
    _, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey=True)
    most = 1.6 * max(table.max() for table in tables.values())
    for ax, (title, table) in zip(axes, tables.items(), strict=True):
        shown = np.where(table > 0.005, np.char.mod("%.2f", table), "0")
        style: dict[str, Any] = {
            "annot": shown,
            "fmt": "",
            "annot_kws": {"size": 9},
        }
        style |= {"cmap": "Blues", "vmin": 0, "vmax": most, "linewidths": 0.5}
        labels = {"xticklabels": list(columns), "yticklabels": list(rows)}
        sns.heatmap(table, ax=ax, cbar=False, **style, **labels)
        ax.set_title(title)
        ax.tick_params(axis="both", rotation=0)


def draw_curves(
    ax: Axes, curves: Mapping[str, Mapping[int, float]], levels: Mapping[str, float]
) -> None:
    """Bits over training steps, with the exact values as dashed lines.

    Args:
        ax: to draw on.
        curves: by name, value by step; the objectives' names have their colour. Of
            "ExLM 1", "ExLM 2" and so on the first is listed, without its number.
        levels: exact values by name, drawn across and named at the right; ``floor``
            and ``joint`` at the start of a name give the colour.
    """
    for name, curve in curves.items():
        kind, _, number = name.partition(" ")
        style: dict[str, Any] = {
            "color": COLORS.get(kind.lower(), "0.5"),
            "lw": 1.3,
        }
        if number.isdigit():
            style["alpha"] = 0.6
            name = kind if number == "1" else "_"
        ax.plot(list(curve), list(curve.values()), label=name, **style)
    for name, level in levels.items():
        color = COLORS.get(name.split()[0], "0.4")
        ax.axhline(level, color=color, ls="--", lw=1)
        # Beside the axes: a curve at its level would run through the words.
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
    ax.legend(loc="upper right", fontsize=9)


SMALLEST_EDGE = 0.02
"""Edges less likely than this are left out."""
Place = tuple[float, float]


def draw_dag(
    ax: Axes,
    transition_LL: np.ndarray,
    columns: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """The graph as in Figure 11: one column per mask, likely edges wide.

    Args:
        ax: made bare.
        transition_LL: E[v, u], probabilities, read above the diagonal.
        columns: of the states, ascending: the target each is a clone of.
        names: of the states, a few short lines each.
        kinds: key of ``COLORS`` for each state.
    """
    at = _in_columns(columns)
    likely = np.nonzero(np.triu(transition_LL >= SMALLEST_EDGE, 1))
    probabilities = transition_LL[likely].tolist()
    curves = [
        _draw_edge(ax, at[v], at[u], at, probability)
        for v, u, probability in zip(*likely, probabilities, strict=True)
    ]
    boxes = []
    for place, name, kind in zip(at, names, kinds, strict=True):
        box = {
            "boxstyle": "round,pad=0.35",
            "facecolor": COLORS[kind],
            "edgecolor": "white",
        }
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": 8,
            "zorder": 3,
        }
        boxes.append(ax.text(*place, name, color="black", bbox=box, **style))
    xs, ys = zip(*at, strict=True)
    summits = [_point(curve, 0.5)[1] for curve in curves]
    low, high = min([*ys, *summits]), max([*ys, *summits])
    # 0.4: room for a number on a bent edge; 0.6: room for a box.
    ax.set(
        xlim=(min(xs) - 0.45, max(xs) + 0.45),
        ylim=(min(low - 0.4, min(ys) - 0.6), max(high + 0.4, max(ys) + 0.6)),
    )
    ax.axis("off")
    ax.figure.draw_without_rendering()  # else no box has a size yet
    taken = [box.get_bbox_patch().get_window_extent() for box in boxes]
    for curve, probability in zip(curves, probabilities, strict=True):
        if probability >= 0.1:
            taken.append(_draw_number(ax, curve, probability, taken))


def _in_columns(columns: Sequence[int]) -> list[Place]:
    """Place of each state: columns one apart, first state on top, centred on 0."""
    counts = {column: list(columns).count(column) for column in columns}
    seen = dict.fromkeys(columns, 0)
    places = []
    for column in columns:
        places.append((float(column), (counts[column] - 1) / 2 - seen[column]))
        seen[column] += 1
    return places


def _draw_edge(
    ax: Axes,
    start: Place,
    end: Place,
    states: Sequence[Place],
    probability: float,
) -> tuple[Place, Place, Place]:
    """A line, wide and dark where it is likely.

    Returns its ends and, between them, the point that it is bent towards.
    """
    (x0, y0), (x1, y1) = start, end
    bend_x, bend_y = _bend(start, end, states)
    # The curve's middle is half way between the straight line and this point.
    control = ((x0 + x1) / 2 + 2 * bend_x, (y0 + y1) / 2 + 2 * bend_y)

    def connect(from_place: Any, to_place: Any, *_: Any, **__: Any) -> Path:
        # In units of the graph: its number is on the line whatever its shape.
        middle = ax.transData.transform(control)
        return Path(
            [from_place, middle, to_place], [Path.MOVETO, Path.CURVE3, Path.CURVE3]
        )

    style: dict[str, Any] = {
        "arrowstyle": "-",
        "connectionstyle": connect,
        "color": "0.2",
        "lw": 0.6 + 4 * probability,
        "alpha": 0.25 + 0.6 * probability,
    }
    ax.annotate("", end, start, arrowprops=style, zorder=1)
    return start, control, end


def _draw_number(
    ax: Axes,
    curve: tuple[Place, Place, Place],
    probability: float,
    taken: Sequence[Bbox],
) -> Bbox:
    """The number of an edge, where there is room. Returns what it covers."""
    start, control, end = curve
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    # Where slanted lines cross, at their middle, several numbers would meet.
    first = 0.3 if control == middle and start[1] != end[1] else 0.5
    ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "lw": 0}
    style: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": 7,
        "bbox": ground,
        "zorder": 2,
    }
    number = ax.text(*middle, f"{probability:.2f}", color="0.2", **style)
    nearest = sorted((0.3, 0.4, 0.5, 0.6, 0.7), key=lambda t: abs(t - first))
    for t in [*nearest, first]:
        number.set_position(_point(curve, t))
        extent = number.get_window_extent().expanded(1.2, 1.4)  # with its ground
        if not any(extent.overlaps(other) for other in taken):
            break
    return extent


def _point(curve: tuple[Place, Place, Place], t: float) -> Place:
    """Where a curve is after the share ``t`` of it."""
    weights = (1 - t) ** 2, 2 * t * (1 - t), t**2
    x, y = np.array(weights) @ np.array(curve)
    return float(x), float(y)


def _bend(start: Place, end: Place, states: Sequence[Place]) -> Place:
    """How far the middle of an edge is moved, to pass between the states."""
    (x0, y0), (x1, y1) = start, end
    if x0 == x1:
        return -min(0.175 * abs(y1 - y0), 0.35), 0.0
    slope = (y1 - y0) / (x1 - x0)
    is_free = all(
        abs(y0 + slope * (x - x0) - y) > 0.3 for x, y in states if x0 < x < x1
    )
    # States of a column are 1 apart; edges over more columns pass further out.
    lift = 0.0 if is_free else 0.5 + 0.2 * (x1 - x0 - 2)
    return 0.0, lift if y0 + y1 >= 0 else -lift
