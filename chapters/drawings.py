"""Drawings shared by several chapters; most draw on axes that the caller gives."""

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
    """Draw a row of boxes, one per token, at x = 0, 1, … and height ``y``.

    Args:
        ax: axes to draw on; their frame is hidden and their limits fit the boxes.
        tokens: text of each box; a line break is kept.
        kinds: key of ``COLORS`` for each box.
        y: centre of the boxes. The rows of one picture should be 1 apart.

    Raises:
        ValueError: if ``tokens`` and ``kinds`` differ in length.
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
    """Draw a matrix as a heat map, row 0 on top, with its values in the cells.

    Args:
        ax: axes to draw on.
        values: (rows, columns); nan leaves a cell empty.
        x_labels, y_labels: labels of the columns and of the rows.
        label: what a colour means, with its unit.
        number_format: format of the values in the cells; ``None`` omits them.
        cmap: name of a matplotlib colour map.
        limits: values at the two ends of the colour map; by default the smallest
            and the largest of ``values``.
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
    """Draw tables of probabilities side by side in a new figure.

    Args:
        tables: arrays (rows, columns) by title; values up to 0.005 are shown as 0.
        rows, columns: labels of the rows and of the columns, the words of a pair.
        is_stacked: put the tables one above the other, for more than a few columns.
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
    """Draw bits over training steps, with the exact values as dashed lines.

    Args:
        ax: axes to draw on.
        curves: bits by step for each name; an objective's name gives the colour. Of
            "ExLM 1", "ExLM 2" and so on the legend lists only the first, as "ExLM".
        levels: exact values by name, drawn as lines with the name at the right; a
            first word such as ``floor`` or ``joint`` gives the colour.
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
        # Beside the axes: inside, a curve at this level would cross the text.
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
"""Edges with a lower probability are not drawn."""
Place = tuple[float, float]


def draw_dag(
    ax: Axes,
    transition_LL: np.ndarray,
    columns: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """Draw the graph as in Figure 11: one column per mask, likely edges wide.

    Args:
        ax: axes to draw on; their frame is hidden.
        transition_LL: probabilities E[v, u]; only the upper triangle is read.
        columns: column of each state, ascending: the target that it is a clone of.
        names: label of each state, a few short lines.
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
    ax.figure.draw_without_rendering()  # boxes have no size before
    taken = [box.get_bbox_patch().get_window_extent() for box in boxes]
    for curve, probability in zip(curves, probabilities, strict=True):
        if probability >= 0.1:
            taken.append(_draw_number(ax, curve, probability, taken))


def _in_columns(columns: Sequence[int]) -> list[Place]:
    """Place of each state, in columns 1 apart, top to bottom and centred on 0."""
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
    """Draw an edge, the wider and darker the likelier it is.

    Returns its curve: the start, the point that it bends towards, and the end.
    """
    (x0, y0), (x1, y1) = start, end
    bend_x, bend_y = _bend(start, end, states)
    # The curve's middle is half way between the straight line and this point.
    control = ((x0 + x1) / 2 + 2 * bend_x, (y0 + y1) / 2 + 2 * bend_y)

    def connect(from_place: Any, to_place: Any, *_: Any, **__: Any) -> Path:
        # Bent in data units, so that ``_point`` is on the line for any axes.
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
    """Write an edge's probability where there is room; return the box it covers."""
    start, control, end = curve
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    # Slanted lines cross at their middles, where several numbers would collide.
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
        extent = number.get_window_extent().expanded(1.2, 1.4)  # with background
        if not any(extent.overlaps(other) for other in taken):
            break
    return extent


def _point(curve: tuple[Place, Place, Place], t: float) -> Place:
    """The point at ``t``, from 0 to 1, of a quadratic Bézier curve."""
    weights = (1 - t) ** 2, 2 * t * (1 - t), t**2
    x, y = np.array(weights) @ np.array(curve)
    return float(x), float(y)


def _bend(start: Place, end: Place, states: Sequence[Place]) -> Place:
    """Offset (x, y) of an edge's middle that lets it pass between the states."""
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
