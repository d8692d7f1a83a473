"""The book's figures: one style, one colour for each thing, and the drawings several pages share.

Figures have a white ground, so that they read the same in a light page, a dark page and print.
Every function draws on axes it is given and returns nothing, but for the figure of several runs;
numbers come from the caller.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

from exlm_mini.plot.curves import Panel
from exlm_mini.plot.graphs import draw_dag
from exlm_mini.plot.style import COLORS, save_figure, use_book_style

__all__ = [
    "COLORS",
    "Panel",
    "draw_curves",
    "draw_dag",
    "draw_device_hours",
    "draw_heatmap",
    "draw_tokens",
    "runs_figure",
    "save_figure",
    "use_book_style",
]


def draw_tokens(ax: Axes, tokens: Sequence[str], kinds: Sequence[str], y: float = 0.0) -> None:
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
        box = FancyBboxPatch((x - 0.46, y - 0.3), 0.92, 0.6, facecolor=COLORS[kind], **shape)
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


PANELS_IN_A_ROW = 3


def runs_figure(panels: Sequence[Panel], x_label: str, caption: str) -> Figure:
    """Figure 9's form: one panel for each quantity, one colour and legend entry for each run.

    Args:
        panels: at least one; a run may be missing in some.
        x_label: of the shared horizontal axis, with its unit.
        caption: stands below; says what was smoothed.
    """
    use_book_style()
    names = list(
        dict.fromkeys(name for panel in panels for name in [*panel.curves, *panel.dots])
    )
    # Beyond ten the colours would repeat.
    palette = sns.color_palette("colorblind" if len(names) <= 10 else "husl", len(names))
    num_columns = min(len(panels), PANELS_IN_A_ROW)
    num_rows = math.ceil(len(panels) / num_columns)
    width = max(5.0, 3.6 * num_columns)
    # Inches of a legend entry: its line, and its letters.
    columns = max(1, min(len(names), int(width / (0.65 + 0.085 * max(map(len, names))))))
    height = 0.4 + 2.8 * num_rows + 0.24 * math.ceil(len(names) / columns)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    for ax in grid.flat[len(panels) :]:
        ax.remove()
    for ax, panel in zip(grid.flat, panels, strict=False):
        for name, color in zip(names, palette, strict=True):
            if name in panel.curves:
                x, y = panel.curves[name]
                # A single point would be invisible as a line.
                ax.plot(x, y, color=color, lw=1.4, marker="o" if len(x) == 1 else None)
            if name in panel.dots:
                x, y = panel.dots[name]
                edge = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
                ax.plot(x, y, color=color, lw=0.8, ls=":", marker="o", ms=5, **edge)
        ax.set(title=panel.title, xlabel=x_label, ylabel=panel.unit)
        ax.tick_params(which="both", labelsize=9)
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            axis.label.set_size(10)
            if limits[1] > 9999:
                axis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if panel.is_log:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    handles = [Line2D([], [], color=color, lw=2) for color in palette]
    figure.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=9)
    figure.supxlabel(textwrap.fill(caption, int(15 * width)), fontsize=8, color="0.35")
    return figure


SPANS = {"hour": 1, "day": 24, "week": 168, "month": 730, "year": 8766}
"""Hours of the spans people plan in."""


def draw_device_hours(
    ax: Axes,
    flops: Mapping[str, float],
    speeds: tuple[float, float],
    marks: Sequence[tuple[float, float]] = (),
) -> None:
    """Time of one device for whole runs against the speed it keeps up, on two log axes.

    Args:
        ax: to draw on.
        flops: operations of each run, by name; drawn and listed in this order.
        speeds: operations per second at the two ends of the horizontal axis.
        marks: measured points, operations per second and hours.
    """
    ends = np.array(speeds)
    for (name, operations), color in zip(
        flops.items(), sns.color_palette("colorblind", len(flops)), strict=True
    ):
        ax.plot(ends, operations / ends / 3600, color=color, lw=1.8, label=name)
    if marks:
        x, y = zip(*marks, strict=True)
        ax.plot(x, y, "x", color="black", ms=7, mew=2, zorder=5)
    shortest, longest = SPANS["hour"] / 120, 10 * SPANS["year"]
    below = shortest
    for number, (name, hours) in enumerate(SPANS.items()):
        ax.axhspan(below, hours, color="0.5", alpha=0.14 * (number % 2), lw=0)
        ax.annotate(
            f"a{'n' * (name == 'hour')} {name}", (1, hours), xycoords=("axes fraction", "data"),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color="0.35",
        )  # fmt: skip
        below = hours
    ax.set(
        xscale="log", yscale="log", xlim=speeds, ylim=(shortest, longest),
        xlabel="sustained operations per second (FLOP/s)", ylabel="hours of one device",
    )  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=3, fontsize=9)
