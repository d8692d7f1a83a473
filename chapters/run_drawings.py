"""Drawings of runs and their costs, on axes that the caller gives."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from exlm_lab.experiments.correlations import PAPER_SHARES, lost_share

SPANS = {"hour": 1, "day": 24, "week": 168, "month": 730, "year": 8766}
"""Hours in the spans of time that people plan in."""


def draw_device_hours(
    ax: Axes,
    flops: Mapping[str, float],
    speeds: tuple[float, float],
    marks: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw the hours that one device needs for whole runs against its speed.

    Args:
        ax: axes to draw on; both become logarithmic.
        flops: floating-point operations of each run by name, in the legend's order.
        speeds: operations per second at the two ends of the horizontal axis.
        marks: measured points (operations per second, hours).
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
            f"a{'n' * (name == 'hour')} {name}", (1, hours), fontsize=8,
            color="0.35", xycoords=("axes fraction", "data"), xytext=(4, 0),
            va="center", textcoords="offset points",
        )  # fmt: skip
        below = hours
    ax.set(
        xscale="log", yscale="log", xlim=speeds, ylim=(shortest, longest),
        xlabel="sustained operations per second (FLOP/s)",
        ylabel="hours of one device",
    )  # fmt: skip
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, fontsize=8)


BESIDE = 0.06
"""Offset between the lines of two mask ratios, which separates their error bars."""


def draw_against_share(
    ax: Axes, means: pd.Series, spread: pd.Series, label: str
) -> None:
    """Draw a metric by (p, k) against the share of lost tokens, one line per p.

    Shares are drawn at equal distances, as in the paper's Figure 4; points close
    together have equal shares and different p. Error bars show the spread.
    """
    ratios = sorted({p for p, _ in means.index})
    shares = sorted({*PAPER_SHARES, *(lost_share(*cell) for cell in means.index)})
    known = sorted({*ratios, *PAPER_SHARES})
    colors = dict(zip(known, sns.color_palette("viridis", len(known)), strict=True))
    for number, ratio in enumerate(ratios):
        cells = sorted(
            (cell for cell in means.index if cell[0] == ratio), key=_share
        )
        aside = BESIDE * (number - (len(ratios) - 1) / 2)
        ax.errorbar(
            [shares.index(lost_share(*cell)) + aside for cell in cells],
            means[cells], spread[cells].fillna(0.0), marker="o", ms=5, capsize=2,
            color=colors[ratio], lw=1.2, label=f"p = {100 * ratio:.4g}%",
        )  # fmt: skip
    ax.set(xlabel="lost tokens, % ($p^k$, Figure 4)", ylabel=label)
    ax.set_xticks(range(len(shares)), [f"{100 * share:.4g}" for share in shares])


def _share(cell: tuple[float, int]) -> float:
    return lost_share(*cell)


def draw_optimum(ax: Axes, optimum: pd.Series) -> None:
    """Draw the exact entropy of lost tokens, given by (p, k), as a dashed line."""
    means = optimum.groupby(_share).mean()
    shares = sorted({*PAPER_SHARES, *means.index})
    places = [shares.index(share) for share in means.index]
    ax.plot(places, means, "--", color="0.3", lw=1.2, label="exact")
