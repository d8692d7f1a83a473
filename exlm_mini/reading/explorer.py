"""An explorer of the state graph: HTML for the book, for Jupyter and as a single file.

``explorer`` draws a scene. In the page a reader inspects states and fixes a word or a state for a
mask; the exact distribution of all other masks follows: JavaScript runs the same forward-backward
recursion as ``scene.conditionals``. Nothing is loaded from elsewhere, and scripts touch only the
element with the class ``exlm-widget``, so several fit on one page.

The HTML is a pure function of the scene, whose numbers have four significant digits. Those of a
freshly trained model still differ between processors; if outputs are compared, draw a recorded
scene (``Scene.to_json``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_mini.reading.scene import (
    NUM_WORDS_IN_NODE,
    Conditionals,
    Scene,
    conditionals,
)

SMALLEST_EDGE = 0.001
"""Smaller transitions are summed over but never drawn."""
TIE = 1e-9
"""Added before rounding, so that halves round up despite rounding errors."""

STYLE = Path(__file__).with_name("explorer.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")
"""Its recursion is that of ``conditionals``; a test compares both. ``NAME`` and ``TIE`` are
filled in for each element."""
PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:16px;max-width:980px;font-family:system-ui,sans-serif;
background:Canvas;color:CanvasText}
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Explorer:
    """An interactive drawing of a scene, shown by Jupyter and the book; ``save`` writes it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.html = "".join(_fragment(scene))
        """The element with its style and script, for any page."""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        scene = self.scene
        return f"Explorer({scene.num_masks} masks, {len(scene.labels)} states)"

    def save(self, path: str | Path, title: str = "ExLM explorer") -> None:
        """Write a self-contained page."""
        page = PAGE.format(title=escape(title), style=PAGE_STYLE, body=self.html)
        Path(path).write_text(page, encoding="utf-8")


def explorer(scene: Scene) -> Explorer:
    """Draw a scene."""
    return Explorer(scene)


# Units of the picture: pixels on a phone of 390, where four states stand side by side.
PITCH_X, PITCH_Y, NODE_WIDTH, NODE_HEIGHT, LINE = 88, 118, 80, 62, 13
NUM_LETTERS = 11
"""Letters of a word that fit into a node."""


class _Place(NamedTuple):
    """Centre of a node, half its height, and its row."""

    x: float
    y: float
    half: float
    row: int


def _places(scene: Scene) -> tuple[list[_Place], int, int]:
    """Place of each state, and width and height of the picture; rows are targets."""
    rows = range(scene.num_masks + 2)
    counts = [scene.owners.count(row) for row in rows]
    width = PITCH_X * max(4, *counts)
    seen = [0] * len(counts)
    places, spare = [], NODE_HEIGHT / 2 - LINE
    for row in scene.owners:
        # Nodes of a boundary are lower, so its row is closer to the next.
        half = NODE_HEIGHT / 2 if 0 < row < len(counts) - 1 else LINE
        x = width / 2 + (seen[row] - (counts[row] - 1) / 2) * PITCH_X
        y = LINE + 4 + row * PITCH_Y - spare * ((row > 0) + (row == len(counts) - 1))
        seen[row] += 1
        places.append(_Place(x, y, half, row))
    height = places[-1].y + places[-1].half + 4
    return places, width, math.ceil(height)


def _curve(a: _Place, b: _Place) -> tuple[str, float, float]:
    """Path of an edge, and the position of its number."""
    start, bend = a.y + a.half, 26
    if a.row == b.row:  # below both
        low = start + 1.4 * bend
        return (
            f"M{a.x:g},{start:g}C{a.x:g},{low:g} {b.x:g},{low:g} {b.x:g},{b.y + b.half:g}",
            (a.x + b.x) / 2,
            start + bend + 10,
        )
    end = b.y - b.half
    curve = (
        f"M{a.x:g},{start:g}C{a.x:g},{start + bend:g} {b.x:g},{end - bend:g} {b.x:g},{end:g}"
    )
    return curve, b.x, end - 4


def _percent(p: float) -> str:
    """Whole percent, as in the script."""
    if p <= 0:
        return "0%"
    whole = math.floor(100 * p + 0.5 + TIE)
    return f"{whole}%" if whole else "<1%"


def _fragment(scene: Scene) -> Iterator[str]:
    """The element before any choice, and its script."""
    payload = scene.to_json()
    name = hashlib.sha256(payload.encode()).hexdigest()[:10]
    now = conditionals(scene)
    yield (
        f'<div class="exlm-widget tex2jax_ignore mathjax_ignore" data-exlm="{name}"'
        f' role="group" aria-label="Explorer of the state graph"'
        f' data-scene="{escape(payload)}">\n<style>\n{STYLE}</style>\n'
    )
    yield from _sentence(scene)
    yield '<div class="exlm-columns">\n<div class="exlm-graph">'
    yield from _graph(scene, now)
    yield (
        '<p class="exlm-detail">Point at a state to see what it says and where it leads; click '
        "it, or a word, to fix a mask.</p></div>\n"
    )
    yield '<div class="exlm-masks">'
    for mask in range(scene.num_masks):
        yield from _word_list(scene, mask, now.word_SW[mask])
    script = SCRIPT.replace("NAME", name).replace("TIE", str(TIE))
    yield f"</div>\n</div>\n<script>\n{script}</script>\n</div>"


def _sentence(scene: Scene) -> Iterator[str]:
    """The text with its masks, and what is chosen."""
    yield '<p class="exlm-text">'
    for mask, piece in enumerate(scene.text):
        if mask:
            yield f' <b class="exlm-slot exlm-{mask % 2}" data-mask="{mask - 1}">[MASK]</b>'
            yield "" if piece[:1] in tuple(",.;:!?") else " "
        yield escape(piece)
    yield (
        '</p>\n<p class="exlm-line"><span class="exlm-status" role="status">Nothing is fixed.'
        '</span> <button type="button" class="exlm-reset" hidden>release all</button></p>\n'
    )


def _graph(scene: Scene, now: Conditionals) -> Iterator[str]:
    """The states in rows, and the edges behind them."""
    places, width, height = _places(scene)
    yield (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{1.25 * width:g}px" role="group"'
        ' aria-label="States, one row per mask, and the edges between them">\n<g>'
    )
    for v, row in enumerate(scene.transition_LL):
        for u, p in enumerate(row):
            if p < SMALLEST_EDGE:
                continue
            curve, x, y = _curve(places[v], places[u])
            flow = now.edge_LL[v, u]
            yield (
                f'<path data-edge="{v}-{u}" d="{curve}" {_stroke(flow)}/>'
                f'<text data-edge="{v}-{u}" x="{x:g}" y="{y:g}">{_percent(p)}</text>'
            )
    yield "</g>\n"
    for u in range(len(scene.labels)):
        yield from _node(scene, u, places[u], now)
    yield "</svg>"


def _stroke(flow: float) -> str:
    """Width and opacity of an edge; the script writes the same."""
    if flow + TIE < 0.005:
        return 'stroke-opacity="0"'
    width, opacity = 0.8 + 6 * flow + TIE, 0.2 + 0.6 * flow + TIE
    return f'stroke-width="{width:.2f}" stroke-opacity="{opacity:.2f}"'


def _node(scene: Scene, u: int, place: _Place, now: Conditionals) -> Iterator[str]:
    """One state: its label, how many paths pass it, and its likeliest words."""
    owner, label = scene.owners[u], scene.labels[u]
    is_choice = 1 <= owner <= scene.num_masks
    kind = f"exlm-{owner % 2}" if is_choice else "exlm-boundary"
    said = ", ".join(f"{scene.words[w]} {_percent(p)}" for w, p in _top(scene, u))
    role = 'role="button" aria-pressed="false"' if is_choice else 'role="img"'
    yield (
        f'<g class="exlm-node {kind}" data-state="{u}" tabindex="0" {role}'
        f' aria-label="{escape(f"state {label}: {said}" if is_choice else label)}">'
        f'<rect x="{place.x - NODE_WIDTH / 2:g}" y="{place.y - place.half:g}"'
        f' width="{NODE_WIDTH}" height="{2 * place.half:g}" rx="8"/>'
    )
    if not is_choice:
        yield f'<text x="{place.x:g}" y="{place.y + 4:g}">{escape(label)}</text></g>\n'
        return
    top = place.y - place.half + LINE
    share = _percent(now.state_SL[owner - 1, u])
    yield (
        f'<text class="exlm-label" x="{place.x - NODE_WIDTH / 2 + 6:g}" y="{top:g}">{label}'
        f'</text><text class="exlm-share" x="{place.x + NODE_WIDTH / 2 - 6:g}" y="{top:g}">'
        f"{share}</text>"
    )
    for line, (w, _) in enumerate(_top(scene, u), start=1):
        word = scene.words[w]
        if len(word) > NUM_LETTERS:
            word = word[: NUM_LETTERS - 1] + "\u2026"
        y = top + LINE * line + 2
        yield f'<text x="{place.x:g}" y="{y:g}">{escape(word)}</text>'
    yield "</g>\n"


def _top(scene: Scene, u: int) -> list[tuple[int, float]]:
    """The likeliest word, and as many others as a node has room for, if they are worth it."""
    ranked = sorted(enumerate(scene.token_LW[u]), key=lambda entry: -entry[1])
    first, *others = ranked[:NUM_WORDS_IN_NODE]
    return [first, *((w, p) for w, p in others if p >= 0.05)]


def _word_list(scene: Scene, mask: int, word_W: np.ndarray) -> Iterator[str]:
    """The words of one mask as buttons, with bars."""
    yield (
        f'<div class="exlm-mask exlm-{(mask + 1) % 2}" role="group"'
        f' aria-label="Mask {mask + 1}"><p class="exlm-head">Mask {mask + 1}</p>\n'
    )
    for w in scene.offered[mask]:
        width = f"{100 * word_W[w] + TIE:.1f}%"
        yield (
            f'<button type="button" class="exlm-word" data-mask="{mask}" data-word="{w}"'
            f' aria-pressed="false"><i style="width:{width}"></i>'
            f'<u style="left:{width}"></u><span>{escape(scene.words[w])}</span>'
            f"<em>{_percent(word_W[w])}</em></button>\n"
        )
    rest = 1 - sum(word_W[w] for w in scene.offered[mask])
    yield f'<p class="exlm-rest">all other words <em>{_percent(max(rest, 0.0))}</em></p></div>\n'
