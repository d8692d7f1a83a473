"""Figures of the sweeps, drawn from their records in the book's style.

Filled markers are ours, mean over seeds with its standard deviation; hollow ones are the paper's
printed numbers; dashed lines are exact values of the toy language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from exlm_lab.experiments.correlations import SHARES, lost_share, paired_difference
from exlm_lab.experiments.grids import cells_of
from exlm_lab.experiments.paper import cost_ratio, printed_average
from exlm_lab.experiments.records import DOWNSTREAM, Group, Summary, leaving, summaries
from exlm_lab.experiments.tables import by_input, read_sweep
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


def ceiling(groups: Sequence[Group]) -> float | None:
    """The best possible downstream accuracy, in percent; none where the task cannot say."""
    found = [(group.first.data.get(DOWNSTREAM) or {}).get("best_possible") for group in groups]
    return next((100 * best for best in found if best is not None), None)


def draw_ceiling(ax: Axes, groups: Sequence[Group]) -> None:
    """The best possible downstream accuracy, as a dashed line across where it is known."""
    best = ceiling(groups)
    if best is not None:
        ax.axhline(best, color="0.3", ls="--", lw=1.2)


def draw_bits(ax: Axes, groups: Sequence[Group]) -> None:
    """Bits per row of each variant, above the joint entropy if it is known.

    Dashed: the joint entropy, and the best possible MLM.
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

    Dashed: the best possible accuracy, if it is known.
    """
    base = next((g for g in groups if g.name == "exlm"), None)
    found = [g for g in groups if g is not base and g.summary(DOWNSTREAM)]
    printed_base = printed_average("Table 2", "ExLM")
    assert printed_base is not None
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
    best = ceiling(groups)
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
        # Without this the first validations would take up most of the height.
        last = max(bits for group in groups for bits in group.by_seed(key).values())
        between = max(bounds.floor_bits, last) - bounds.joint_bits
        ax.set_ylim(bounds.joint_bits - 0.15 * between, bounds.joint_bits + 1.6 * between)
    ax.set(xlabel="training step", ylabel=f"bits per {'sentence' if bounds else 'mask'}")
    # There is space above the floor.
    ax.legend(fontsize=8, loc="upper right", ncols=2, frameon=True)


def by_language(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups by grammar, or by input if it is not a toy language."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        data = group.first.data["config"]["data"]
        name = data["grammar"] if data["kind"] == "toy" else group.input
        found.setdefault(name, []).append(group)
    return found


def draw_cost(ax: Axes, groups: Sequence[Group]) -> None:
    """Measured step-cost ratio of ExLM against k, its floor by operations, and Table 12."""
    for group in groups:
        k = group.first.states_per_mask
        if ratio := group.summary("cost_ratio"):
            _draw_points(ax, [k], [ratio], COLORS["exlm"])
        if floor := group.summary("cost_ratio_floor"):
            ax.plot(k, floor.mean, "_", color="0.3", ms=14)
    if any(group.paper_row for group in groups):
        ax.plot(4, cost_ratio(), "o", mfc="none", mec="0.3", ms=8)
    ax.set(xlabel="states per mask, k", ylabel="step of ExLM / step of MLM")


def draw_against_k(ax: Axes, groups: Sequence[Group], metric: str, label: str) -> None:
    """A number against the states per mask, one line for each mask ratio; k = 1 is MLM.

    Dashed across, for an entropy: the exact one of the language.
    """
    ratios = sorted({group.first.mask_ratio for group in groups})
    colors = sns.color_palette("viridis", len(ratios) + 1)
    for ratio, color in zip(ratios, colors, strict=False):
        cells = {g.first.states_per_mask: g for g in groups if g.first.mask_ratio == ratio}
        found = {k: s for k, group in sorted(cells.items()) if (s := group.summary(metric))}
        exact = cells[min(cells)].summary("optimum_entropy_bits")
        if metric == "entropy_bits" and exact:
            ax.axhline(exact.mean, color=color, ls="--", lw=1)
        if found:
            _draw_points(ax, [*found], [*found.values()], color, f"p = {100 * ratio:.4g}%")
    ax.set(xscale="log", xlabel="states per mask, k (1: MLM)", ylabel=label)
    ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    ax.xaxis.set_minor_formatter(NullFormatter())


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


# ---- the figures of one input ----


def repeated_mlm(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Accuracy and entropy against the share of lost tokens (Figures 3 and 5).

    For molecules, the structure read from frozen states is drawn instead of accuracy.
    """
    use = (DOWNSTREAM, "downstream accuracy, %")
    if groups[0].input == "molecules":
        use = ("read_structure", "structure read from states, R²")
    draw_against_share(axes[0], summaries(groups, use[0]), use[1])
    draw_against_share(axes[1], summaries(groups, "entropy_bits"), "entropy, bits")
    draw_ceiling(axes[0], groups)
    draw_optimum(axes[1], groups)
    axes[1].legend(fontsize=8)


def saddle(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Bits of every run over its steps: who leaves the floor, and when."""
    for ax, (language, found) in zip(axes, by_language(groups).items(), strict=True):
        draw_leaving(ax, found)
        ax.set_title(language, fontsize=10)


def k_and_p(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Accuracy and entropy against k for each mask ratio (Table 4, Figure 12)."""
    draw_against_k(axes[0], groups, DOWNSTREAM, "downstream accuracy, %")
    draw_against_k(axes[1], groups, "entropy_bits", "entropy, bits")
    draw_ceiling(axes[0], groups)
    axes[0].legend(fontsize=8, loc=(0.02, 0.72))  # below the best possible


def ablations(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Bits of the variants and, where they were fine-tuned, accuracy (Tables 2 and 13)."""
    draw_bits(axes[0], groups)
    for ax in axes[1:]:
        draw_against_exlm(ax, groups)


FIGURES: dict[str, tuple[int, Callable[[Sequence[Axes], Sequence[Group]], None]]] = {
    "repeated-mlm": (2, repeated_mlm),
    "ablations": (2, ablations),
    "saddle": (1, saddle),
    "cost": (1, lambda axes, groups: draw_cost(axes[0], groups)),
    "k-and-p": (2, k_and_p),
    "ladder": (1, lambda axes, groups: draw_ladder(axes[0], groups)),
}
"""By the name of the sweep or experiment: number of axes, and what draws on them."""


def sweep_figure(name: str, groups: Sequence[Group]) -> Figure:
    """The figure of a sweep on one input, its groups in the order of the grid."""
    use_book_style()
    num_axes, draw = FIGURES[name]
    if name == "saddle":
        num_axes = len(by_language(groups))
    elif name == "ablations" and not any(group.summary(DOWNSTREAM) for group in groups):
        num_axes = 1
    height = max(3.4, 1.2 + 0.32 * len(groups)) if name == "ablations" else 3.4
    width = 4.6 * num_axes if name != "ladder" else 6.2
    figure, axes = plt.subplots(1, num_axes, figsize=(width, height), squeeze=False)
    draw(axes[0], groups)
    return figure


def write_figures(
    name: str,
    scale: str,
    directory: Path,
    output: Path,
    report: Callable[[Path], None] = lambda path: None,
) -> None:
    """Draw a sweep, a figure for each input that has records, as SVG and PNG.

    Args:
        name, scale: of the sweep.
        directory: that holds the folders of all sweeps.
        output: directory of the figures; made where it is missing.
        report: called with each file once it is written.

    Raises:
        UserError: if there is no record, or one is damaged.
    """
    records = read_sweep(name, scale, directory)
    output.mkdir(parents=True, exist_ok=True)
    for kind, groups in by_input(records, cells_of(name, scale)).items():
        for suffix in (".svg", ".png"):
            path = output / f"{name}-{scale}-{kind}{suffix}"
            save_figure(sweep_figure(name, groups), path)
            report(path)
