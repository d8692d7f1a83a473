"""The book's figures: one style, one colour for each thing, and the drawings several pages share.

Figures have a white ground, so that they read the same in a light page, a dark page and print.
Every function draws on axes it is given and returns nothing, but for the figure of several runs;
numbers come from the caller.

Shapes: T tokens of a row, L states, B rows.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.path import Path as MplPath
from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

from exlm_mini.durable import write_atomically

COLORS = {
    "token": "#d8dee6",
    "mask": "#f2b134",
    "state": "#f2b134",
    "second": "#b5793a",
    "boundary": "#9aa5b1",
    "mlm": "#3b6fb6",
    "repeated-mlm": "#5b8e4b",
    "exlm": "#c8452f",
    "floor": "#3b6fb6",
    "joint": "#c8452f",
}
"""One colour for each thing, the same on every page. ``mask`` and ``second`` are the yellow and the
brown of the paper's figures."""


def use_book_style() -> None:
    """Set matplotlib to the book's style; a chapter calls it once."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind")
    plt.rcParams.update(
        {
            "figure.figsize": (6, 3.2),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "font.size": 10,
        }
    )


def draw_tokens(
    ax: Axes, tokens: Sequence[str], kinds: Sequence[str], y: float = 0.0, width: float = 0.92
) -> None:
    """A row of boxes, one per token, at x = 0, 1, … and height ``y``.

    Args:
        ax: made bare, with room for the boxes.
        tokens: text of each box; a line break is kept.
        kinds: key of ``COLORS`` for each box.
        y: centre of the boxes. Rows of one picture stand 1 apart.
        width: of a box; 1 lets neighbours touch.

    Raises:
        ValueError: if the two lists differ in length.
    """
    if len(tokens) != len(kinds):
        raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds")
    for x, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        box = FancyBboxPatch(
            (x - width / 2, y - 0.3),
            width,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=COLORS[kind],
            edgecolor="white",
        )
        ax.add_patch(box)
        ax.text(x, y, token, ha="center", va="center", fontsize=8, color="black")
    left, right = ax.get_xlim() if len(ax.patches) > len(tokens) else (0.0, 0.0)
    low, high = ax.get_ylim() if len(ax.patches) > len(tokens) else (y, y)
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


# ---- runs ----


class Panel(NamedTuple):
    """One quantity of several runs."""

    title: str
    unit: str
    """Of the vertical axis."""
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """By run: where it stands and what it reached; nan leaves a gap."""
    is_log: bool = False
    dots: Mapping[str, tuple[Sequence[float], Sequence[float]]] = MappingProxyType({})
    """By run: the same of held-out rows."""


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


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix, the same bytes for the same figure.

    Raises:
        OSError: the file cannot be written; what stood there before is left.
    """
    buffer = io.BytesIO()
    suffix = path.suffix[1:].lower()
    when = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with plt.rc_context({"svg.hashsalt": "exlm_mini"}):
        figure.savefig(buffer, format=suffix, dpi=150, metadata=when)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


# ---- one sentence on its way through ExLM ----


class Pipeline(NamedTuple):
    """A row and all that ExLM makes of it, for ``draw_pipeline``; M targets, L states."""

    tokens: Sequence[str]
    """The input tokens, [BOS] and [EOS] included."""
    is_masked: Sequence[bool]
    positions: Sequence[tuple[int, int]]
    """(i, j) of each expanded token."""
    state_places: Sequence[int]
    """Place of each state in the expanded row."""
    state_labels: Sequence[str]
    state_owners: Sequence[int]
    """Which target a state is a clone of; 0 and M - 1 are the boundaries."""
    top_words: Sequence[tuple[str, float]]
    """Likeliest word of each state and its probability."""
    transition_LL: np.ndarray
    """E[v, u], probabilities."""
    targets: Sequence[str]
    forward_ML: np.ndarray
    """f[i, u] of Appendix H, probabilities."""

    def kind(self, owner: int) -> str:
        """Colour of a target's states: boundaries grey, masks yellow and brown in turn."""
        if owner in (0, len(self.targets) - 1):
            return "boundary"
        return "mask" if owner % 2 else "second"


def draw_pipeline(ax: Axes, row: Pipeline, mean_bits: float, floor_bits: float) -> None:
    """Figure 6 of the paper for one real row: tokens, masks, clones, encoder, graph, loss.

    Args:
        ax: made bare; 7.6 by 8.2 inches suit it.
        row: the numbers.
        mean_bits: what the model needs for the masks of a row, on average over the language.
        floor_bits: what a masked language model needs at least, on average.
    """
    ax.set(xlim=(-0.8, len(row.positions) - 0.2), ylim=(-15.75, 1.05), aspect="equal")
    ax.axis("off")
    _draw_input(ax, row)
    _draw_clones(ax, row)
    _draw_encoder(ax, row)
    _draw_states(ax, row)
    _draw_recursion(ax, row)
    _draw_loss(ax, row, mean_bits, floor_bits)


def _headline(ax: Axes, y: float, title: str, text: str, code: str) -> None:
    """One stage: its name, what happens, and the function that does it at the right."""
    left, right = ax.get_xlim()
    ax.text(left + 0.2, y, title, fontsize=10, weight="bold", va="center")
    ax.text(left + 3.65, y, text, fontsize=8.5, color="0.25", va="center")
    ax.text(
        right - 0.1, y, code, fontsize=7.5, color="0.4", va="center", ha="right",
        family="monospace",
    )  # fmt: skip


def _rounded_box(
    ax: Axes, centre: tuple[float, float], size: tuple[float, float], color: Any, **line: Any
) -> None:
    """A box with round corners; ``line`` is for its edge."""
    (x, y), (width, height) = centre, size
    style = f"round,pad=0,rounding_size={min(0.25, height / 5)}"
    line = {"edgecolor": "none", "zorder": 2} | line
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, **line))


def _token_box(ax: Axes, x: float, y: float, text: str, kind: str, width: float = 0.94) -> None:
    _rounded_box(ax, (x, y), (width, 0.54), COLORS[kind])
    ax.text(x, y, text, ha="center", va="center", fontsize=7.3)


def _flow_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, width: float = 1
) -> None:
    style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.35", "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style | {"color": color, "lw": width})


def _token_kinds(row: Pipeline) -> list[str]:
    """Colour of each input token once it is masked."""
    owners = np.cumsum(row.is_masked)
    kinds = [row.kind(o) if m else "token" for o, m in zip(owners, row.is_masked, strict=True)]
    return ["boundary", *kinds[1:-1], "boundary"]


def _draw_input(ax: Axes, row: Pipeline) -> None:
    """Stages 1 and 2: the sentence and its masks, each token above the middle of its clones."""
    _headline(ax, 0.6, "1  Sentence", "drawn from the small language", "toy.Grammar.sample")
    _headline(ax, -1.05, "2  Mask", "both words that show the mood", "masking.Masker")
    owner_of_place = np.array([i for i, _ in row.positions])
    for n, (token, kind) in enumerate(zip(row.tokens, _token_kinds(row), strict=True)):
        x = float(np.flatnonzero(owner_of_place == n).mean())
        is_masked = row.is_masked[n]
        _token_box(ax, x, -0.15, token, "token" if is_masked else kind)
        _token_box(ax, x, -1.8, "[MASK]" if is_masked else token, kind)
        for place in np.flatnonzero(owner_of_place == n):
            color = COLORS[kind] if is_masked else "0.8"
            _flow_arrow(ax, (x, -3.12), (place, -3.88), color)


def _draw_clones(ax: Axes, row: Pipeline) -> None:
    """Stage 3: the expanded row, with the 2D position of each token."""
    k = max(j for _, j in row.positions)
    text = f"each [MASK] becomes k = {k} clones; every token gets a place (i, j)"
    _headline(ax, -2.75, "3  Expand", text, "expansion.expand_masks")
    kinds = _token_kinds(row)
    for place, (i, j) in enumerate(row.positions):
        _token_box(ax, place, -4.2, "[MASK]" if row.is_masked[i] else row.tokens[i], kinds[i])
        color = "black" if j else "0.45"
        ax.text(place, -4.72, f"({i}, {j})", ha="center", fontsize=7, color=color)


def _draw_encoder(ax: Axes, row: Pipeline) -> None:
    """Stage 4: every token goes in, the states alone come out."""
    text = "2D RoPE turns half of each head by i, half by j"
    _headline(ax, -5.45, "4  Encode", text, "encoder.Encoder")
    middle = (len(row.positions) - 1) / 2
    for place in range(len(row.positions)):
        _flow_arrow(ax, (place, -5.75), (place, -6.1), "0.8")
    line = {"edgecolor": COLORS["mlm"], "lw": 0.8}
    _rounded_box(ax, (middle, -6.45), (2 * middle + 0.94, 0.7), "#e8eef6", **line)
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": COLORS["mlm"]}
    ax.text(middle, -6.45, "Transformer encoder", **style)
    for place, owner in zip(row.state_places, row.state_owners, strict=True):
        color = COLORS[row.kind(owner)]
        ax.plot([place, place], [-6.82, -7.15], color=color, lw=2.5, solid_capstyle="round")


def _draw_states(ax: Axes, row: Pipeline) -> None:
    """Stage 5: targets from left to right, clones below each other, edges between them."""
    text = "emit words (P) and hand over to later states (E)"
    _headline(ax, -7.75, "5  States", text, "VocabularyHead, GatedTransition")
    last, owners = len(row.targets) - 1, row.state_owners
    centres, sizes = [], []
    for u, owner in enumerate(owners):
        mates = [v for v in range(len(owners)) if owners[v] == owner]
        x = 0.35 + (len(row.positions) - 1.7) * owner / last
        centres.append((x, -9.75 + 1.1 * (len(mates) - 1 - 2 * mates.index(u))))
        sizes.append((1.3, 0.7) if owner in (0, last) else (2.5, 1.0))
    for u in range(len(owners)):
        for v in range(u):
            _draw_edge(
                ax, centres[v], centres[u], (sizes[v], sizes[u]), row.transition_LL[v, u]
            )
    for (x, y), size, owner, label, (word, probability) in zip(
        centres, sizes, owners, row.state_labels, row.top_words, strict=True
    ):
        is_boundary = owner in (0, last)
        _rounded_box(
            ax, (x, y), size, COLORS[row.kind(owner)], edgecolor="white", lw=1.5, zorder=3
        )
        title = f"[{label}]" if is_boundary else f"{label}  {word}"
        style = {"ha": "center", "va": "center", "zorder": 4}
        ax.text(x, y + 0.16 * (not is_boundary), title, fontsize=9, weight="bold", **style)
        if not is_boundary:
            ax.text(x, y - 0.22, f"P = {probability:.2f}", fontsize=7, **style)


def _draw_edge(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    sizes: tuple[tuple[float, float], tuple[float, float]],
    probability: float,
) -> None:
    """An edge as wide as it is likely; allowed but unlikely ones stay a dotted hair line."""
    (start_size, end_size) = sizes
    leave, arrive = (start[0] + start_size[0] / 2, start[1]), (end[0] - end_size[0] / 2, end[1])
    if start[0] == end[0]:
        leave = (start[0], start[1] - start_size[1] / 2)
        arrive = (end[0], end[1] + end_size[1] / 2)
    if probability < 0.05:
        ax.plot(*zip(leave, arrive, strict=True), color="0.75", lw=0.7, ls=":", zorder=1)
        return
    _flow_arrow(ax, leave, arrive, "0.25", 0.8 + 2.2 * probability)
    middle = ((leave[0] + arrive[0]) / 2, (leave[1] + arrive[1]) / 2)
    white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    style = {"fontsize": 7.5, "ha": "center", "va": "center", "zorder": 5, "bbox": white}
    ax.text(*middle, f"{probability:.2f}", **style)


_CELL, _LEFT, _TOP = 1.3, 2.15, -13.15  # of the table of f: width, first centre, first row


def _draw_recursion(ax: Axes, row: Pipeline) -> None:
    """Stage 6: f[i, u] over targets (down) and states (across)."""
    text = "f: all paths that have spelled the targets so far and stand here"
    _headline(ax, -11.85, "6  Add up paths", text, "dag_log_likelihood")
    num_targets, num_states = row.forward_ML.shape
    for u, (label, owner) in enumerate(zip(row.state_labels, row.state_owners, strict=True)):
        _token_box(ax, _LEFT + _CELL * u, _TOP + 0.62, label, row.kind(owner), _CELL - 0.08)
    for i, target in enumerate(row.targets):
        y = _TOP - 0.68 * i
        ax.text(_LEFT - 0.85, y, target, ha="right", va="center", fontsize=8.5)
        for u in range(num_states):
            value, x = float(row.forward_ML[i, u]), _LEFT + _CELL * u
            is_end = (i, u) == (num_targets - 1, num_states - 1)
            edge = {"edgecolor": COLORS["exlm"], "lw": 1.6} if is_end else {}
            color = (*to_rgb(COLORS["exlm"]), 0.04 + 0.5 * value)
            _rounded_box(ax, (x, y), (_CELL - 0.08, 0.6), color, **edge)
            text = f"{value:.2f}" if value >= 0.005 else "≈ 0" if value else "0"
            ink = "black" if value >= 0.005 else "0.55"
            ax.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)


def _draw_loss(ax: Axes, row: Pipeline, mean_bits: float, floor_bits: float) -> None:
    """Stage 7: what the corner of the table says in bits."""
    likelihood = float(row.forward_ML[-1, -1])
    x = _LEFT + _CELL * (len(row.state_labels) - 0.25)
    ax.text(x, _TOP + 0.62, "7  Loss", fontsize=10, weight="bold", va="center")
    lines = [
        (f"−log₂ {likelihood:.2f} = {-np.log2(likelihood):.2f} bits", "black"),
        ("average of all sentences:", "0.35"),
        (f"this model  {mean_bits:.2f} bits", COLORS["exlm"]),
        (f"any MLM  ≥ {floor_bits:.2f} bits", COLORS["mlm"]),
    ]
    for i, (line, color) in enumerate(lines):
        ax.text(x, _TOP - 0.68 * i, line, fontsize=9, color=color, va="center")


# ---- the graph of a reading (Figures 7, 10 and 11) ----


def draw_transition(
    ax: Axes, transition_LL: np.ndarray, names: Sequence[str], kinds: Sequence[str]
) -> None:
    """The transition matrix as in Figures 7 and 10: rows hand over to columns.

    Args:
        ax: to draw on.
        transition_LL: E[v, u], probabilities; only entries above the diagonal are drawn, as no
            edge leads back.
        names: of the states, for both axes; their words, say, one per line.
        kinds: key of ``COLORS`` for each state, the ground of its name.

    Raises:
        ValueError: if the lengths do not fit.
    """
    _check_states(transition_LL, names, kinds)
    is_edge_LL = np.triu(np.ones_like(transition_LL, dtype=bool), 1)
    draw_heatmap(
        ax,
        np.where(is_edge_LL, transition_LL, np.nan),
        names,
        names,
        "transition probability",
        cmap="Blues",
        limits=(0, 1),
    )
    ax.tick_params(axis="x", rotation=0)
    ax.grid(False)
    for axis in (ax.xaxis, ax.yaxis):
        for text, kind in zip(axis.get_ticklabels(), kinds, strict=True):
            ground = {"boxstyle": "round,pad=0.25", "facecolor": COLORS[kind], "lw": 0}
            text.set(fontsize=7.5, color="black", bbox=ground)
    ax.set(xlabel="to state", ylabel="from state")


def draw_dag(
    ax: Axes,
    transition_LL: np.ndarray,
    columns: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[str],
    smallest: float = 0.02,
) -> None:
    """The graph as in Figure 11: one column per mask, edges as wide as they are likely.

    Args:
        ax: made bare.
        transition_LL: E[v, u], probabilities, read above the diagonal.
        columns: of the states, ascending: the target each is a clone of.
        names: of the states, a few short lines each.
        kinds: key of ``COLORS`` for each state.
        smallest: edges less likely than this are left out.

    Raises:
        ValueError: if the lengths do not fit.
    """
    _check_states(transition_LL, names, kinds)
    _check_states(transition_LL, columns, kinds)
    at = _in_columns(columns)
    summits = [
        _draw_transition_edge(ax, at[v], at[u], at, float(transition_LL[v, u]))
        for v, u in zip(*np.nonzero(np.triu(transition_LL >= smallest, 1)), strict=True)
    ]
    for place, name, kind in zip(at, names, kinds, strict=True):
        box = {"boxstyle": "round,pad=0.35", "facecolor": COLORS[kind], "edgecolor": "white"}
        style = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3}
        ax.text(*place, name, color="black", bbox=box, **style)
    xs, ys = zip(*at, strict=True)
    low, high = min([*ys, *summits]), max([*ys, *summits])
    # 0.4: room for a number on a bent edge; 0.6: room for a box.
    ax.set(
        xlim=(min(xs) - 0.45, max(xs) + 0.45),
        ylim=(min(low - 0.4, min(ys) - 0.6), max(high + 0.4, max(ys) + 0.6)),
    )
    ax.axis("off")


def _check_states(transition_LL: np.ndarray, names: Sequence, kinds: Sequence) -> None:
    if transition_LL.shape != (len(names), len(names)) or len(kinds) != len(names):
        raise ValueError(
            f"transition {transition_LL.shape}, {len(names)} names or columns, "
            f"{len(kinds)} kinds: one for each state"
        )


def _in_columns(columns: Sequence[int]) -> list[tuple[float, float]]:
    """Place of each state: columns one apart, its first state on top, each centred on 0."""
    counts = {column: list(columns).count(column) for column in columns}
    seen = dict.fromkeys(columns, 0)
    places = []
    for column in columns:
        places.append((float(column), (counts[column] - 1) / 2 - seen[column]))
        seen[column] += 1
    return places


def _draw_transition_edge(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    states: Sequence[tuple[float, float]],
    probability: float,
) -> float:
    """A line that is wide and dark where it is likely; its number, unless it is small.

    Returns the height of its middle.
    """
    (x0, y0), (x1, y1) = start, end
    bend_x, bend_y = _bend(start, end, states)
    # The middle of the curve lies half way between the straight line and this point.
    control = ((x0 + x1) / 2 + 2 * bend_x, (y0 + y1) / 2 + 2 * bend_y)

    def connect(from_place, to_place, *_: Any, **__: Any) -> MplPath:
        # In units of the graph, so that the number below is on the line whatever its shape.
        middle = ax.transData.transform(control)
        return MplPath(
            [from_place, middle, to_place], [MplPath.MOVETO, MplPath.CURVE3, MplPath.CURVE3]
        )

    style = {
        "arrowstyle": "-",
        "connectionstyle": connect,
        "color": "0.2",
        "lw": 0.6 + 4 * probability,
        "alpha": 0.25 + 0.6 * probability,
    }
    ax.annotate("", end, start, arrowprops=style, zorder=1)
    if probability >= 0.1:
        # Where slanted lines cross, at their middle, several numbers would meet.
        t = 0.5 if bend_x or bend_y or y0 == y1 else 0.3
        near, far = (1 - t) ** 2, t**2
        x, y = (
            near * a + (1 - near - far) * c + far * b
            for a, c, b in zip(start, control, end, strict=True)
        )
        ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "lw": 0}
        style = {"ha": "center", "va": "center", "fontsize": 7, "bbox": ground, "zorder": 2}
        ax.text(x, y, f"{probability:.2f}", color="0.2", **style)
    return (y0 + y1) / 2 + bend_y


def _bend(
    start: tuple[float, float],
    end: tuple[float, float],
    states: Sequence[tuple[float, float]],
) -> tuple[float, float]:
    """How far the middle of an edge is moved, so that it passes between the states."""
    (x0, y0), (x1, y1) = start, end
    if x0 == x1:
        return -min(0.175 * abs(y1 - y0), 0.35), 0.0
    slope = (y1 - y0) / (x1 - x0)
    is_free = all(abs(y0 + slope * (x - x0) - y) > 0.3 for x, y in states if x0 < x < x1)
    # States of a column are 1 apart; edges over more columns pass further out.
    lift = 0.0 if is_free else 0.5 + 0.2 * (x1 - x0 - 2)
    return 0.0, lift if y0 + y1 >= 0 else -lift


# ---- what a run costs ----


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
    shortest, longest = SPANS["hour"] / 60, 10 * SPANS["year"]
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
