"""The README's figures; ``python -m exlm_lab.experiments.drawings`` redraws them."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from exlm_lab.experiments.records import by_cell, measured, runs
from exlm_lab.experiments.scorecard import Score, scorecard
from exlm_mini.plot.style import COLORS, save_figure, use_book_style

ARMS = {
    "exlm": ("ExLM", COLORS["exlm"], "o"),
    "late": ("ExLM, expanded late", COLORS["mask"], "s"),
    "uniform": ("states without edges", COLORS["second"], "^"),
    "ctc": ("CTC", "0.45", "v"),
    "mlm++": ("MLM of equal cost", COLORS["mlm"], "D"),
    "bare": ("ExLM without start-up aids", "0.2", "x"),
}
"""Label, colour and marker of each arm of the ladder that is drawn. Plain MLM is not: its line
would coincide with that of the MLM of equal cost."""

FARTHEST = 8.0
"""Largest distance from zero on the scorecard, in half widths; larger ones are drawn here."""


def _bits_won(table: pd.DataFrame) -> dict[str, dict[int, list[float]]]:
    """Bits below MLM's floor of each run, by arm and by the number of bits the words share."""
    won: dict[str, dict[int, list[float]]] = {}
    for name, runs_of_cell in by_cell(table).items():
        arm, _, bits = name.rpartition("-")
        if arm in ARMS and bits.isdigit():
            spent = measured(runs_of_cell, "bits_per_row")
            below = (runs_of_cell["floor_bits_per_row"] - spent).dropna()
            won.setdefault(arm, {})[int(bits)] = below.tolist()
    return won


def draw_ladder(ax: Axes, ladder: pd.DataFrame, bare: pd.DataFrame) -> None:
    """Plot bits below MLM's floor against the bits that masked words share, one dot per run.

    The grey line is the most that is possible. ``bare`` has the runs without our start-up aids.
    """
    won = {**_bits_won(ladder), "bare": _bits_won(bare)["exlm"]}
    most = max(shared for by_bits in won.values() for shared in by_bits)
    ax.plot(
        [0, most], [0, most], color="0.85", lw=7, zorder=0, label="the most that is possible"
    )
    for place, (arm, (label, color, marker)) in enumerate(ARMS.items()):
        by_bits = dict(sorted(won.get(arm, {}).items()))
        for shared, bits_won in by_bits.items():
            x = [shared + 0.1 * (place - len(ARMS) // 2)] * len(bits_won)
            ax.plot(x, bits_won, marker, color=color, ms=4, alpha=0.5)
        means = [sum(bits_won) / len(bits_won) for bits_won in by_bits.values()]
        ax.plot(list(by_bits), means, color=color, lw=1.4, marker=marker, ms=5, label=label)
    ax.set(xlabel="bits that the masked words share", ylabel="bits below MLM's floor")
    ax.legend(loc="upper left", fontsize=9)


def draw_scorecard(ax: Axes, scores: list[Score]) -> None:
    """Plot the difference behind each claim; to the right of the line it supports the claim.

    Differences have different units, so each is measured in half widths of its own 95% interval: a
    bar that does not reach the line excludes zero. Arrows mark differences too large to fit.
    """
    colors = {"for": "tab:green", "against": "tab:red"}
    for y, score in enumerate(reversed(scores)):
        verdict = score.verdict
        color = colors.get(verdict.word.partition(",")[0], "0.55")
        assert verdict.mean is not None and verdict.half_width is not None
        effect = verdict.claim.sign * verdict.mean / verdict.half_width
        x = max(-FARTHEST, min(FARTHEST, effect))
        ax.plot([x - 1, x + 1], [y, y], color=color, lw=2)
        if x != effect:
            ax.plot(x + math.copysign(1, x), y, color=color, marker="<" if x < 0 else ">", ms=6)
        ax.plot(x, y, color=color, marker="o" if verdict.is_planned else "D", ms=5,
                mfc=color if verdict.is_planned else "white")  # fmt: skip
        ax.text(
            FARTHEST + 2,
            y,
            f"{score.shown}  {verdict.word_so_far}",
            color=color,
            va="center",
            fontsize=9,
        )
    ax.axvline(0, color="0.3", lw=0.8)
    ax.set_yticks(range(len(scores)), [score.text for score in reversed(scores)], fontsize=9)
    ax.set(xlim=(-FARTHEST - 1.5, FARTHEST + 1.5), xticks=[], ylim=(-0.7, len(scores) - 0.3))
    ax.set_xlabel("against the claim   |   for it")


def pictures(results: Path, output: Path) -> None:
    """Draw the README's figures from the records in ``results``."""
    use_book_style()
    figure, ax = plt.subplots(figsize=(6.2, 3.4))
    draw_ladder(ax, runs("ladder", results), runs("bare", results))
    save_figure(figure, output / "ladder-study-slots.svg")
    figure, ax = plt.subplots(figsize=(11, 8.2))
    draw_scorecard(ax, scorecard(results))
    save_figure(figure, output / "scorecard.svg")


if __name__ == "__main__":
    pictures(Path("book/results"), Path("book/_static"))
