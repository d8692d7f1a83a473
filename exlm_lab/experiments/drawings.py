"""Figures of recorded runs that more than one page shows.

``python -m exlm_lab.experiments.drawings`` draws that of the front page anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from exlm_lab.experiments.correlations import SHARES, lost_share
from exlm_lab.experiments.records import Group, Summary, grouped, summaries
from exlm_lab.experiments.tables import read_sweep
from exlm_mini.plot.figures import COLORS, save_figure, use_book_style

Summaries = Mapping[tuple[float, int], Summary]
BESIDE = 0.06
"""Offset between the lines of two mask ratios, which separates their error bars."""


def draw_against_share(ax: Axes, found: Summaries, label: str) -> None:
    """A number by (p, k) against the share of lost tokens, one line for each mask ratio.

    Shares are drawn at equal distances, as in the paper's Figure 4; points close together have
    equal shares and different mask ratios.
    """
    ratios = sorted({p for p, _ in found})
    shares = sorted({*SHARES, *(lost_share(*cell) for cell in found)})
    known = sorted({*ratios, *SHARES})
    colors = dict(zip(known, sns.color_palette("viridis", len(known)), strict=True))
    for number, ratio in enumerate(ratios):
        cells = sorted((lost_share(p, k), s) for (p, k), s in found.items() if p == ratio)
        aside = BESIDE * (number - (len(ratios) - 1) / 2)
        _draw_points(
            ax,
            [shares.index(share) + aside for share, _ in cells],
            [summary for _, summary in cells],
            colors[ratio],
            f"p = {100 * ratio:.4g}%",
        )
    ax.set(xlabel="lost tokens, % ($p^k$, Figure 4)", ylabel=label)
    ax.set_xticks(range(len(shares)), [f"{100 * share:.4g}" for share in shares])


def draw_optimum(ax: Axes, groups: Sequence[Group]) -> None:
    """The exact entropy of the lost tokens against their share, as a dashed line."""
    found = {c: s.mean for c, s in summaries(groups, "optimum_entropy_bits").items()}
    if found:
        means = pd.Series(found).groupby(lambda cell: lost_share(*cell)).mean()
        shares = sorted({*SHARES, *means.index})
        places = [shares.index(share) for share in means.index]
        ax.plot(places, means, "--", color="0.3", lw=1.2, label="exact")


ARMS = {
    "exlm": ("ExLM", COLORS["exlm"], "o"),
    "late": ("ExLM, expanded late", COLORS["mask"], "s"),
    "uniform": ("mixture of states", COLORS["second"], "^"),
    "ctc": ("CTC", "0.45", "v"),
    "mlm++": ("MLM of equal cost", COLORS["mlm"], "D"),
}
"""Arms of the ladder: label, colour, marker. Plain MLM coincides with that of equal cost."""


def draw_ladder(ax: Axes, groups: Sequence[Group]) -> None:
    """Bits won below MLM's floor against the bits that masked words share; a dot is a training.

    The grey line is the most that can be won.
    """
    cells: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        arm, _, bits = group.cell.rpartition("-")
        if arm in ARMS and bits.isdigit():
            floor, spent = (group.by_seed(f"{n}bits_per_row") for n in ("floor_", ""))
            won = [floor[seed] - spent[seed] for seed in spent]
            cells.setdefault(arm, {})[int(bits)] = won
    most = max(shared for found in cells.values() for shared in found)
    ax.plot([0, most], [0, most], color="0.85", lw=7, zorder=0, label="all there is to win")
    for place, (arm, (label, color, marker)) in enumerate(ARMS.items()):
        found = dict(sorted(cells.get(arm, {}).items()))
        for shared, won in found.items():
            x = [shared + 0.1 * (place - len(ARMS) // 2)] * len(won)
            ax.plot(x, won, marker, color=color, ms=4, alpha=0.5)
        means = [sum(won) / len(won) for won in found.values()]
        ax.plot(list(found), means, color=color, lw=1.4, marker=marker, ms=5, label=label)
    ax.set(xlabel="bits that the masked words share", ylabel="bits won below MLM's floor")
    ax.legend(loc="upper left", fontsize=9)


def _draw_points(
    ax: Axes,
    x: Sequence[float],
    found: Sequence[Summary],
    color: object,
    label: str | None = None,
) -> None:
    """A line with markers and standard deviations."""
    means, spread = [s.mean for s in found], [s.sd or 0.0 for s in found]
    line: dict[str, Any] = {"color": color, "lw": 1.2, "label": label}
    ax.errorbar(x, means, spread, marker="o", ms=5, capsize=2, **line)


def ladder_picture(results: Path, output: Path) -> None:
    """Draw the front page's figure, ``draw_ladder`` of the records.

    Raises:
        UserError: if there is no record, or one is damaged.
    """
    use_book_style()
    figure, ax = plt.subplots(figsize=(6.2, 3.4))
    draw_ladder(ax, list(grouped(read_sweep("ladder", results)).values()))
    save_figure(figure, output)


if __name__ == "__main__":
    ladder_picture(Path("book/results"), Path("book/_static/ladder-study-slots.svg"))
