"""Figures of recorded runs that more than one page shows.

``python -m exlm_lab.experiments.drawings`` draws that of the front page anew.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from exlm_lab.experiments.correlations import SHARES, lost_share
from exlm_lab.experiments.records import by_cell, measured, runs
from exlm_mini.plot.style import COLORS, save_figure, use_book_style

BESIDE = 0.06
"""Offset between the lines of two mask ratios, which separates their error bars."""


def draw_against_share(ax: Axes, means: pd.Series, spread: pd.Series, label: str) -> None:
    """A number by (p, k) against the share of lost tokens, one line for each mask ratio.

    Shares are drawn at equal distances, as in the paper's Figure 4; points close together have
    equal shares and different mask ratios. The spread is that of the error bars.
    """
    ratios = sorted({p for p, _ in means.index})
    shares = sorted({*SHARES, *(lost_share(*cell) for cell in means.index)})
    known = sorted({*ratios, *SHARES})
    colors = dict(zip(known, sns.color_palette("viridis", len(known)), strict=True))
    for number, ratio in enumerate(ratios):
        cells = sorted((cell for cell in means.index if cell[0] == ratio), key=_share)
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
    """The exact entropy of the lost tokens, by (p, k), against their share, as a dashed line."""
    means = optimum.groupby(_share).mean()
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


def draw_ladder(ax: Axes, table: pd.DataFrame) -> None:
    """Bits won below MLM's floor against the bits that masked words share; a dot is a training.

    The grey line is the most that can be won.
    """
    won: dict[str, dict[int, list[float]]] = {}
    for name, runs_of_cell in by_cell(table).items():
        arm, _, bits = name.rpartition("-")
        if arm in ARMS and bits.isdigit():
            spent = measured(runs_of_cell, "bits_per_row")
            below = (runs_of_cell["floor_bits_per_row"] - spent).dropna()
            won.setdefault(arm, {})[int(bits)] = below.tolist()
    most = max(shared for by_bits in won.values() for shared in by_bits)
    ax.plot([0, most], [0, most], color="0.85", lw=7, zorder=0, label="all there is to win")
    for place, (arm, (label, color, marker)) in enumerate(ARMS.items()):
        by_bits = dict(sorted(won.get(arm, {}).items()))
        for shared, bits_won in by_bits.items():
            x = [shared + 0.1 * (place - len(ARMS) // 2)] * len(bits_won)
            ax.plot(x, bits_won, marker, color=color, ms=4, alpha=0.5)
        means = [sum(bits_won) / len(bits_won) for bits_won in by_bits.values()]
        ax.plot(list(by_bits), means, color=color, lw=1.4, marker=marker, ms=5, label=label)
    ax.set(xlabel="bits that the masked words share", ylabel="bits won below MLM's floor")
    ax.legend(loc="upper left", fontsize=9)


def ladder_picture(results: Path, output: Path) -> None:
    """Draw the front page's figure, ``draw_ladder`` of the records."""
    use_book_style()
    figure, ax = plt.subplots(figsize=(6.2, 3.4))
    draw_ladder(ax, runs("ladder", results))
    save_figure(figure, output)


if __name__ == "__main__":
    ladder_picture(Path("book/results"), Path("book/_static/ladder-study-slots.svg"))
