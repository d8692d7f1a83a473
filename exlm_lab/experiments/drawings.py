"""What the figures of the sweeps are made of: each function draws on the axes it is given.

Filled markers are ours, mean over seeds with its standard deviation; hollow ones are the paper's
printed numbers; dashed lines are exact values of the toy language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from exlm_lab.experiments.correlations import SHARES, lost_share, paired_difference
from exlm_lab.experiments.metric_names import PROBE
from exlm_lab.experiments.paper import cost_ratio, printed, printed_average
from exlm_lab.experiments.records import (
    DOWNSTREAM,
    Group,
    Summary,
    leaving,
    summaries,
)
from exlm_mini.plot.figures import COLORS

Summaries = Mapping[tuple[float, int], Summary]
BESIDE = 0.06
"""Between the lines of two mask ratios, that their error bars can be told apart."""


def draw_against_share(ax: Axes, found: Summaries, label: str) -> None:
    """A number by (p, k) against the share of lost tokens, one line for each mask ratio.

    The shares stand at equal distances, as the paper's cells are ranked and not spread; points
    close together lose equal shares under different mask ratios.
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


def ceiling(groups: Sequence[Group], metric: str) -> float | None:
    """The most that anyone can reach, in the unit of ``Record.value``; none if unknown.

    A task says it itself. What a probe is to read is what a perfect reader of the whole sentence
    would name, so it can read all of it.
    """
    if metric == PROBE:
        return 1.0
    found = [(group.first.data.get(DOWNSTREAM) or {}).get("best_possible") for group in groups]
    known = [100 * best for best in found if best is not None]
    return known[0] if metric == DOWNSTREAM and known else None


def draw_ceiling(ax: Axes, groups: Sequence[Group], metric: str = DOWNSTREAM) -> None:
    """The most that anyone can reach, as a dashed line across where it is known."""
    best = ceiling(groups, metric)
    if best is not None:
        ax.axhline(best, color="0.3", ls="--", lw=1.2)


def draw_bits(ax: Axes, groups: Sequence[Group]) -> None:
    """What each variant needs for the masks of a row, above the joint entropy where it is known.

    Dashed: 0, the joint entropy, and the best that MLM could do.
    """
    joint, floor = (groups[0].summary(f"{name}_bits_per_row") for name in ("joint", "floor"))
    exact = joint.mean if joint else 0.0
    found = [(g, s) for g in groups if (s := g.summary("bits_per_row"))]
    for place, (group, summary) in enumerate(found):
        color = COLORS.get(group.first.objective, "0.4")
        ax.barh(place, summary.mean - exact, xerr=summary.sd, color=color, height=0.6)
    if joint and floor:
        ax.axvline(0, color=COLORS["joint"], ls="--", lw=1)
        ax.axvline(floor.mean - exact, color=COLORS["floor"], ls="--", lw=1)
    ax.set_yticks(range(len(found)), [group.name for group, _ in found])
    ax.invert_yaxis()
    ax.set(xlabel=f"bits per row{' above the joint entropy' if joint else ''}")
    ax.grid(axis="y", visible=False)


def draw_against_exlm(ax: Axes, groups: Sequence[Group]) -> None:
    """Downstream points of each variant to ExLM, seeds paired; the paper's mean beside it.

    Dashed: what is left above the mean of ExLM, where the best possible accuracy is known.
    """
    base = next((g for g in groups if g.name == "exlm"), None)
    found = [g for g in groups if g is not base and g.summary(DOWNSTREAM)]
    printed_base = printed("Table 2")["ExLM"]["average"]
    for place, group in enumerate(found):
        points = base and paired_difference(group.by_seed(DOWNSTREAM), base.by_seed(DOWNSTREAM))
        if points:
            color = COLORS.get(group.first.objective, "0.4")
            error = points.standard_error or 0.0
            ax.errorbar(points.mean, place, xerr=error, color=color, marker="o", capsize=2)
        mean = printed_average(*group.paper_row) if group.paper_row else None
        if mean is not None:
            ax.plot(mean - printed_base, place, "o", mfc="none", mec="0.3", ms=8)
    ax.axvline(0, color="0.3", lw=1)
    best = ceiling(groups, DOWNSTREAM)
    if base and best is not None and (exlm := base.summary(DOWNSTREAM)):
        ax.axvline(best - exlm.mean, color="0.3", ls="--", lw=1.2)
    ax.set_yticks(range(len(found)), [group.name for group in found])
    ax.invert_yaxis()
    ax.set(xlabel="points to ExLM (hollow: the paper)")


ARMS = {
    "exlm": ("ExLM", COLORS["exlm"], "o"),
    "late": ("ExLM, expanded late", COLORS["mask"], "s"),
    "uniform": ("mixture of states", COLORS["second"], "^"),
    "ctc": ("CTC", "0.45", "v"),
    "mlm++": ("MLM of equal cost", COLORS["mlm"], "D"),
}
"""Of the ladder: label, colour and marker. MLM itself lies where the one of equal cost does."""


def draw_ladder(ax: Axes, groups: Sequence[Group]) -> None:
    """Bits won below MLM's floor against the bits that masked words share; a dot is a training.

    The grey line is all there is to win.
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


def draw_leaving(ax: Axes, groups: Sequence[Group]) -> None:
    """Validation of every run of one language, one colour for each cell, with exact bounds."""
    bounds = leaving(groups[0].first)
    key = f"validation_bits_per_{'row' if bounds else 'mask'}"
    palette = sns.color_palette("colorblind", len(groups))
    for group, color in zip(groups, palette, strict=True):
        for number, record in enumerate(group.records):
            points = [p for p in record.data["curve"] if p.get(key) is not None]
            ax.plot(
                [p["step"] for p in points],
                [p[key] for p in points],
                color=color,
                lw=1.2,
                label=None if number else group.name,
            )
    if bounds:
        ax.axhline(bounds.floor_bits, color=COLORS["floor"], ls="--", lw=1)
        ax.axhline(bounds.joint_bits, color=COLORS["joint"], ls="--", lw=1)
        # The first validations, before the words are learned, would take most of the height.
        last = max(bits for group in groups for bits in group.by_seed(key).values())
        between = max(bounds.floor_bits, last) - bounds.joint_bits
        ax.set_ylim(bounds.joint_bits - 0.15 * between, bounds.joint_bits + 1.6 * between)
    ax.set(xlabel="training step", ylabel=f"bits per {'sentence' if bounds else 'mask'}")
    ax.legend(fontsize=7, loc="upper right", ncols=2)  # above the floor there is room


def by_language(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each grammar, or of the input itself where it is no toy language."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        data = group.first.data["config"]["data"]
        name = data["grammar"] if data["kind"] == "toy" else group.input
        found.setdefault(name, []).append(group)
    return found


def draw_cost(ax: Axes, groups: Sequence[Group]) -> None:
    """Measured step-cost ratio of ExLM against k, its floor by operations, and Table 12."""
    known = [(g, ratio) for g in groups if (ratio := g.summary("cost_ratio"))]
    for group, ratio in known:
        k, color = group.first.states_per_mask, COLORS["exlm"]
        _draw_points(ax, [k], [ratio], color, None)
        if floor := group.summary("cost_ratio_floor"):
            ax.plot(k, floor.mean, "_", color="0.3", ms=14)
    if any(group.paper_row for group in groups):
        ax.plot(4, cost_ratio(), "o", mfc="none", mec="0.3", ms=8)
    ax.set(xlabel="states per mask, k", ylabel="step of ExLM / step of MLM")


def draw_against_k(ax: Axes, groups: Sequence[Group], metric: str, label: str) -> None:
    """A number against the states per mask, one line for each mask ratio; k = 1 is MLM.

    Dashed across: the exact entropy of the language, or the most that anyone can reach.
    """
    ratios = sorted({group.first.mask_ratio for group in groups})
    for ratio, color in zip(
        ratios, sns.color_palette("viridis", len(ratios) + 1), strict=False
    ):
        cells = [g for g in groups if g.first.mask_ratio == ratio and g.summary(metric)]
        cells.sort(key=lambda group: group.first.states_per_mask)
        if not cells:
            continue
        exact = cells[0].summary("optimum_entropy_bits")
        if metric == "entropy_bits" and exact:
            ax.axhline(exact.mean, color=color, ls="--", lw=1)
        x = [group.first.states_per_mask for group in cells]
        found = [summary for group in cells if (summary := group.summary(metric))]
        _draw_points(ax, x, found, color, f"p = {100 * ratio:.4g}%")
    draw_ceiling(ax, groups, metric)
    ax.set(xscale="log", xlabel="states per mask, k (1: MLM)", ylabel=label)
    ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    ax.xaxis.set_minor_formatter(NullFormatter())


def draw_sizes(
    ax: Axes,
    groups: Sequence[Group],
    metric: str = "bits_per_mask",
    label: str = "bits per mask",
) -> None:
    """A number against width, one line for each objective and amount of data.

    Dashed across: MLM's floor and the joint entropy, per mask, or the most that anyone can reach.
    """
    lines: dict[tuple[str, int], list[tuple[int, Summary]]] = {}
    for group in groups:
        if summary := group.summary(metric):
            data = group.first.data["config"]["data"]["num_sentences"]
            width = group.first.data["config"]["model"]["width"]
            lines.setdefault((group.first.objective, data), []).append((width, summary))
    amounts = {data for _, data in lines}
    for (objective, data), cells in sorted(lines.items()):
        x, found = zip(*sorted(cells, key=lambda cell: cell[0]), strict=True)
        name = f"{objective}, {data:,} sentences" if len(amounts) > 1 else objective
        style = "-" if data == max(amounts) else ":"
        _draw_points(ax, x, found, COLORS[objective], name, style)
    for name in ("floor", "joint") if metric == "bits_per_mask" else ():
        bits = groups[0].summary(f"{name}_bits_per_row")
        lost = groups[0].summary("lost_per_row")
        if bits and lost:
            ax.axhline(bits.mean / lost.mean, color=COLORS[name], ls="--", lw=1)
    draw_ceiling(ax, groups, metric)
    ax.set(xscale="log", xlabel="width of the encoder", ylabel=label)
    widths = sorted({width for cells in lines.values() for width, _ in cells})
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.xaxis.set_minor_formatter(NullFormatter())


def _draw_points(
    ax: Axes,
    x: Sequence[float],
    found: Sequence[Summary],
    color: object,
    label: str | None,
    style: str = "-",
) -> None:
    """A line with markers and standard deviations."""
    spread = [summary.sd or 0.0 for summary in found]
    means = [summary.mean for summary in found]
    line: dict[str, Any] = {"color": color, "ls": style, "lw": 1.2, "label": label}
    ax.errorbar(x, means, spread, marker="o", ms=5, capsize=2, **line)
