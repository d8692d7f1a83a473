"""One sentence on its way through ExLM, as Figure 6 draws it; M targets, L states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from exlm_mini.plot.style import COLORS


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
