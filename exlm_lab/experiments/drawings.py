"""The front page's figure: ``python -m exlm_lab.experiments.drawings`` draws it anew."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from exlm_lab.experiments.records import by_cell, measured, runs
from exlm_mini.plot.style import COLORS, save_figure, use_book_style

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
