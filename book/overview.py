"""Draw ``book/_static/overview.svg``: a sentence's way through a small ExLM, like Figure 6.

Run ``python book/overview.py`` by hand when the picture should change. It trains a model for a few
seconds; all words, edges and numbers are that model's output. Shapes: M targets, L states.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from exlm_mini.config.options import parse
from exlm_mini.data.toy_grammars import grammar, slots_of
from exlm_mini.model.expansion import expand_masks
from exlm_mini.plot.style import COLORS, use_book_style
from exlm_mini.reading.decoding import read_row, top_tokens

sys.path.append(str(Path(__file__).parents[1] / "chapters"))
from live import Scale, train_live

FILE = Path(__file__).parent / "_static" / "overview.svg"
TRAINING = (
    "--recipe toy-pairs --objective exlm --model.boundary paper --train.steps 120 "
    "--train.warmup_steps 20 --data.num_sentences 16384"
)
SENTENCE = "the old baker felt happy this morning so his sister smiled"


def pictured_row() -> SimpleNamespace:
    """Train an ExLM on the spot; return all that the picture shows of ``SENTENCE``."""
    config = parse(TRAINING.split()).config
    run = train_live(config, Scale("cpu", torch.device("cpu")))
    model, special, token = run.model, run.tokenizer.special_ids, run.tokenizer.token
    token_ids_BN = torch.tensor([[special.bos, *run.tokenizer.encode(SENTENCE), special.eos]])
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, list(slots_of(config))] = True
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special.mask)
    k, boundary = config.model.states_per_mask, config.model.boundary
    expanded, graph = expand_masks(
        masked_ids_BN, is_masked_BN, token_ids_BN, k, boundary, special
    )
    with torch.no_grad():
        scores = model(masked_ids_BN, is_masked_BN, token_ids_BN)
    is_boundary_M1 = ~scores.is_scored_BM[0].unsqueeze(1)
    emission_ML = scores.log_emission_BML[0].masked_fill(is_boundary_M1, 0).exp().numpy()
    transition_LL = scores.log_transition_BLL[0].exp().numpy()
    forward_ML = np.zeros_like(emission_ML)  # f[i, u] of Appendix H
    forward_ML[0, 0] = 1
    for i in range(1, len(forward_ML)):
        forward_ML[i] = (forward_ML[i - 1] @ transition_LL) * emission_ML[i]
    states = read_row(model, masked_ids_BN).states
    best_ids_LC, best_LC = top_tokens(states.log_token_LV, 1, special)
    language = grammar(config.data.grammar)
    return SimpleNamespace(
        tokens=[token(i) for i in token_ids_BN[0].tolist()],
        is_masked=is_masked_BN[0].numpy(),
        position_T=expanded.position_BT[0].numpy(),
        clone_T=expanded.clone_BT[0].numpy(),
        places=graph.place_BL[0].tolist(),
        labels=states.labels,
        owners=graph.owner_BL[0].tolist(),
        words=[token(i) for i in best_ids_LC[:, 0].tolist()],
        word_probabilities=best_LC[:, 0].tolist(),
        transition_LL=transition_LL,
        targets=[token(i) for i in graph.target_ids_BM[0].tolist()],
        forward_ML=forward_ML,
        mean_bits=run.curve[-1][1].bits_per_row,
        floor_bits=language.marginal_entropy_bits(language.mask()),
    )


def kind(row: SimpleNamespace, owner: int) -> str:
    """Colour name of a target's states: boundaries are grey, masks alternately yellow and brown."""
    if owner in (0, len(row.targets) - 1):
        return "boundary"
    return "mask" if owner % 2 else "second"


# ---- parts of the picture ----


def headline(ax: Axes, y: float, title: str, text: str, code: str) -> None:
    """Draw the title line of a stage: its name, what happens and, at the right, its function."""
    left, right = ax.get_xlim()
    ax.text(left + 0.2, y, title, fontsize=10, weight="bold", va="center")
    ax.text(left + 3.65, y, text, fontsize=8.5, color="0.25", va="center")
    style = {"va": "center", "ha": "right", "family": "monospace"}
    ax.text(right - 0.1, y, code, fontsize=7.5, color="0.4", **style)


def box(ax: Axes, x: float, y: float, width: float, height: float, color: Any, **line) -> None:
    """Draw a box with round corners, centred on a point; ``line`` styles its edge."""
    style = f"round,pad=0,rounding_size={min(0.25, height / 5)}"
    line = {"edgecolor": "none", "zorder": 2} | line
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, **line))


def token_box(ax: Axes, x: float, y: float, text: str, name: str, width: float = 0.94) -> None:
    box(ax, x, y, width, 0.54, COLORS[name])
    ax.text(x, y, text, ha="center", va="center", fontsize=7.3)


def arrow(ax: Axes, start: tuple, end: tuple, color: str, width: float = 1) -> None:
    style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.35", "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style | {"color": color, "lw": width})


def draw_tokens(ax: Axes, row: SimpleNamespace) -> None:
    """Draw stages 1 to 4: each token above the middle of its clones, and the encoder below them."""
    k, last = row.clone_T.max(), len(row.position_T) - 1
    headline(ax, 0.6, "1  Sentence", "drawn from the small language", "toy.Grammar.sample")
    headline(ax, -1.05, "2  Mask", "both words that show the mood", "masking.Masker")
    text = f"each [MASK] becomes k = {k} clones; every token gets a place (i, j)"
    headline(ax, -2.75, "3  Expand", text, "expansion.expand_masks")
    text = "2D RoPE turns half of each head by i, half by j"
    headline(ax, -5.45, "4  Encode", text, "encoder.Encoder")
    owners = np.cumsum(row.is_masked)
    for n, (token, is_masked) in enumerate(zip(row.tokens, row.is_masked, strict=True)):
        places = np.flatnonzero(row.position_T == n)
        x = float(places.mean())
        name = kind(row, owners[n]) if is_masked else "token"
        name = "boundary" if n in (0, len(row.tokens) - 1) else name
        token_box(ax, x, -0.15, token, "token" if is_masked else name)
        shown = "[MASK]" if is_masked else token
        token_box(ax, x, -1.8, shown, name)
        for place in places:
            arrow(ax, (x, -3.12), (place, -3.88), COLORS[name] if is_masked else "0.8")
            token_box(ax, place, -4.2, shown, name)
            position, color = f"({n}, {row.clone_T[place]})", "black" if is_masked else "0.45"
            ax.text(place, -4.72, position, ha="center", fontsize=7, color=color)
            arrow(ax, (place, -5.75), (place, -6.1), "0.8")
    blue = COLORS["mlm"]
    box(ax, last / 2, -6.45, last + 0.94, 0.7, "#e8eef6", edgecolor=blue, lw=0.8)
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": blue}
    ax.text(last / 2, -6.45, "Transformer encoder", **style)
    for place, owner in zip(row.places, row.owners, strict=True):
        line = {"color": COLORS[kind(row, owner)], "lw": 2.5, "solid_capstyle": "round"}
        ax.plot([place, place], [-6.82, -7.15], **line)


def draw_states(ax: Axes, row: SimpleNamespace) -> None:
    """Draw stage 5: targets from left to right, clones below each other, edges between them."""
    text = "emit words (P) and hand over to later states (E)"
    headline(ax, -7.75, "5  States", text, "VocabularyHead, GatedTransition")
    last, centres, sizes = len(row.targets) - 1, [], []
    for u, owner in enumerate(row.owners):
        mates = [v for v, other in enumerate(row.owners) if other == owner]
        x = 0.35 + (len(row.position_T) - 1.7) * owner / last
        centres.append((x, -9.75 + 1.1 * (len(mates) - 1 - 2 * mates.index(u))))
        sizes.append((1.3, 0.7) if owner in (0, last) else (2.5, 1.0))
    for u, ((x, y), (width, height)) in enumerate(zip(centres, sizes, strict=True)):
        for v in range(u):
            (x_v, y_v), (width_v, height_v) = centres[v], sizes[v]
            leave, arrive = (x_v + width_v / 2, y_v), (x - width / 2, y)
            if x_v == x:
                leave, arrive = (x, y_v - height_v / 2), (x, y + height / 2)
            draw_edge(ax, leave, arrive, row.transition_LL[v, u])
    style: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    for u, owner in enumerate(row.owners):
        (x, y), name = centres[u], kind(row, owner)
        box(ax, x, y, *sizes[u], COLORS[name], edgecolor="white", lw=1.5, zorder=3)
        label, is_boundary = row.labels[u], owner in (0, last)
        title = f"[{label}]" if is_boundary else f"{label}  {row.words[u]}"
        up = 0 if is_boundary else 0.16
        ax.text(x, y + up, title, fontsize=9, weight="bold", **style)
        if not is_boundary:
            text = f"P = {row.word_probabilities[u]:.2f}"
            ax.text(x, y - 0.22, text, fontsize=7, **style)


def draw_edge(ax: Axes, leave: tuple, arrive: tuple, probability: float) -> None:
    """Draw an edge as wide as it is likely; one below 0.05 becomes a thin dotted line."""
    if probability < 0.05:
        ax.plot(*zip(leave, arrive, strict=True), color="0.75", lw=0.7, ls=":", zorder=1)
        return
    arrow(ax, leave, arrive, "0.25", 0.8 + 2.2 * probability)
    middle = (leave[0] + arrive[0]) / 2, (leave[1] + arrive[1]) / 2
    white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    style = {"fontsize": 7.5, "ha": "center", "va": "center", "zorder": 5, "bbox": white}
    ax.text(*middle, f"{probability:.2f}", **style)


def draw_sum(ax: Axes, row: SimpleNamespace) -> None:
    """Draw stages 6 and 7: f[i, u], targets down and states across, and its last value in bits."""
    text = "f: all paths that have spelled the targets so far and stand here"
    headline(ax, -11.85, "6  Add up paths", text, "dag_log_likelihood")
    cell, left, top, red = 1.3, 2.15, -13.15, COLORS["exlm"]
    for u, (label, owner) in enumerate(zip(row.labels, row.owners, strict=True)):
        token_box(ax, left + cell * u, top + 0.62, label, kind(row, owner), cell - 0.08)
    for (i, u), value in np.ndenumerate(row.forward_ML):
        x, y = left + cell * u, top - 0.68 * i
        if u == 0:
            ax.text(left - 0.85, y, row.targets[i], ha="right", va="center", fontsize=8.5)
        is_end = (i + 1, u + 1) == row.forward_ML.shape
        edge = {"edgecolor": red, "lw": 1.6} if is_end else {}
        box(ax, x, y, cell - 0.08, 0.6, (*to_rgb(red), 0.04 + 0.5 * value), **edge)
        text = f"{value:.2f}" if value >= 0.005 else "≈ 0" if value else "0"
        ink = "black" if value >= 0.005 else "0.55"
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
    likelihood, x = row.forward_ML[-1, -1], left + cell * (len(row.labels) - 0.25)
    ax.text(x, top + 0.62, "7  Loss", fontsize=10, weight="bold", va="center")
    for i, (text, color) in enumerate([
        (f"−log₂ {likelihood:.2f} = {-np.log2(likelihood):.2f} bits", "black"),
        ("average of all sentences:", "0.35"),
        (f"this model  {row.mean_bits:.2f} bits", red),
        (f"any MLM  ≥ {row.floor_bits:.2f} bits", COLORS["mlm"]),
    ]):  # fmt: skip
        ax.text(x, top - 0.68 * i, text, fontsize=9, color=color, va="center")


def main() -> None:
    torch.set_num_threads(1)
    row = pictured_row()
    use_book_style()
    plt.rcParams.update({"svg.hashsalt": "pipeline", "figure.constrained_layout.use": False})
    figure = plt.figure(figsize=(7.6, 8.2))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.8, len(row.position_T) - 0.2), ylim=(-15.75, 1.05), aspect="equal")
    ax.axis("off")
    for draw in (draw_tokens, draw_states, draw_sum):
        draw(ax, row)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
