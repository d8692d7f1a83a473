"""An explorer of the state graph: HTML for the book, for Jupyter and as a file of its own.

``read_scene`` takes from a reading what there is to see, ``explorer`` draws it. In the page a
reader looks at states, and fixes a word or a state for a mask; the distribution of all other
masks then follows, exactly: JavaScript runs the forward-backward recursion over the graph, the
same that ``conditionals`` runs here. Nothing is loaded from elsewhere and nothing is written
but inside the element with the class ``exlm-widget``, so several fit on one page.

The HTML is a pure function of the scene, and a scene holds four significant digits. Those of a
freshly trained model still differ between processors: where the output of a page is compared,
draw a scene that was recorded (``Scene.to_json``).

Shapes: S masks, M targets (S + 2), L states, W words of a scene, N input tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, posteriors
from exlm_mini.decoding import Reading, top_tokens
from exlm_mini.tokenization import Tokenizer, visible

NUM_WORDS_IN_NODE = 3
SMALLEST_EDGE = 0.001
"""Transitions below it are summed over but never drawn."""
TIE = 1e-9
"""Added before a number is rounded: halves go up, whatever the last digit of a sum is."""


class Scene(NamedTuple):
    """What an explorer shows, in plain Python so that JSON holds it; probabilities, not logs."""

    text: list[str]
    """The visible text before, between and after the masks, S + 1 pieces."""
    labels: list[str]
    """Of the states, as in ``decoding.States``."""
    owners: list[int]
    """The target each state is a clone of: 0 for [BOS], 1..S for the masks, S + 1 for [EOS]."""
    words: list[str]
    """As ``visible`` shows them; W of the vocabulary."""
    offered: list[list[int]]
    """For each mask the words one may choose, likeliest first; indices into ``words``."""
    token_LW: list[list[float]]
    """P_u(w). Rows sum to less than one where other words of the vocabulary are likely."""
    transition_LL: list[list[float]]
    """E[v, u], zero unless v < u."""

    @property
    def num_masks(self) -> int:
        return len(self.offered)

    def to_json(self) -> str:
        """One line; ``scene_from_json`` reads it."""
        return json.dumps(self._asdict(), ensure_ascii=False, allow_nan=False)


class Conditionals(NamedTuple):
    """What the graph says once some masks are fixed; all zero if no path allows it."""

    probability: float
    """Of the choices, summed over all paths; without any, of one step per target."""
    word_SW: np.ndarray
    """P(word of each mask | choices, the path fits)."""
    state_SL: np.ndarray
    """P(state that emits each mask | choices, the path fits)."""
    edge_LL: np.ndarray
    """P(the path takes the edge | choices, the path fits)."""


def scene_from_json(text: str) -> Scene:
    """The scene that ``Scene.to_json`` wrote.

    Raises:
        ValueError: if the text is not that of a scene, or its lists do not fit each other.
    """
    try:
        scene = Scene(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"not a scene: {error}") from None
    return _checked(scene)


def read_scene(
    reading: Reading, tokenizer: Tokenizer, masked_ids_BN: Tensor, num_words: int = 12
) -> Scene:
    """What there is to see in a reading, to four significant digits.

    Args:
        reading: of ``read_states``, with a graph.
        tokenizer: of the model.
        masked_ids_BN: the row that was read.
        num_words: offered for each mask, its likeliest; the words of all masks together, and
            the likeliest of each state, are kept for every state.

    Raises:
        ValueError: if the states of the reading are not linked.
    """
    if reading.states is None or reading.graph is None:
        raise ValueError("this reading has no graph to explore: its states are not linked")
    states, special_ids = reading.states, tokenizer.special_ids
    offered_SC = top_tokens(reading.log_token_SV, num_words, special_ids)[0].tolist()
    of_states_LC = top_tokens(states.log_token_LV, NUM_WORDS_IN_NODE, special_ids)[0].tolist()
    ids_W = list(dict.fromkeys(i for row in offered_SC + of_states_LC for i in row))
    place = {token_id: w for w, token_id in enumerate(ids_W)}
    return Scene(
        text=_text_between(tokenizer, masked_ids_BN[0].tolist()),
        labels=states.labels,
        owners=states.owner_L.tolist(),
        words=[visible(tokenizer, token_id) for token_id in ids_W],
        offered=[[place[token_id] for token_id in row] for row in offered_SC],
        token_LW=_short(states.log_token_LV[:, ids_W].double().exp()),
        transition_LL=_short(reading.graph.log_transition_LL.double().exp()),
    )


def conditionals(
    scene: Scene,
    words: Mapping[int, str] | None = None,
    states: Mapping[int, str] | None = None,
) -> Conditionals:
    """The distribution of every mask given choices for some, summed over all paths.

    Args:
        scene: to read.
        words: chosen word by mask, counted from 1.
        states: label of the state that emits a mask, by mask; at most one choice per mask.

    Returns:
        Float64. A mask with a chosen word has that word with probability 1.

    Raises:
        ValueError: for a word, state or mask the scene does not have, or two choices for one.
    """
    words, states = dict(words or {}), dict(states or {})
    L, M = len(scene.labels), scene.num_masks + 2
    token_LW = torch.tensor(scene.token_LW, dtype=torch.float64)
    transition_LL = torch.tensor(scene.transition_LL, dtype=torch.float64)
    emission_ML = torch.ones(M, L, dtype=torch.float64)
    for mask in [*words, *states]:
        if not 1 <= mask <= scene.num_masks or (mask in words and mask in states):
            raise ValueError(f"mask {mask}: want one choice for a mask of 1..{scene.num_masks}")
    for mask, word in words.items():
        emission_ML[mask] = token_LW[:, _index(scene.words, word, "word")]
    for mask, label in states.items():
        emission_ML[mask] = 0.0
        emission_ML[mask, _index(scene.labels, label, "state")] = 1.0
    graph = (emission_ML.log()[None], transition_LL.log()[None])
    counts = (torch.tensor([M]), torch.tensor([L]))
    passes = posteriors(*graph, *counts)
    state_SL = passes.state_BML[0, 1:-1]
    word_SW = state_SL @ token_LW
    for mask, word in words.items():
        # Every path that is left says this word; where none is, all is zero.
        word_SW[mask - 1] = 0.0
        word_SW[mask - 1, scene.words.index(word)] = state_SL[mask - 1].sum()
    probability = dag_log_likelihood(*graph, *counts).exp().item()
    edge_LL = passes.edge_BLL[0].numpy()
    return Conditionals(probability, word_SW.numpy(), state_SL.numpy(), edge_LL)


class Explorer:
    """An interactive drawing of a scene; Jupyter and the book show it, ``save`` writes it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.html = "".join(_fragment(scene))
        """The element with its style and script, to put into any page."""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        scene = self.scene
        return f"Explorer({scene.num_masks} masks, {len(scene.labels)} states)"

    def save(self, path: str | Path, title: str = "ExLM explorer") -> None:
        """Write a page of its own: one file, which needs no other and no network."""
        page = _PAGE.format(title=escape(title), style=_PAGE_STYLE, body=self.html)
        Path(path).write_text(page, encoding="utf-8")


def explorer(scene: Scene) -> Explorer:
    """Draw a scene.

    Raises:
        ValueError: if the lists of the scene do not fit each other.
    """
    return Explorer(_checked(scene))


# ---- from a reading to a scene ----


def _text_between(tokenizer: Tokenizer, row_N: list[int]) -> list[str]:
    """The text around the masks, without [BOS] and [EOS]."""
    pieces: list[list[int]] = [[]]
    for token_id in row_N[1:-1]:
        if token_id == tokenizer.special_ids.mask:
            pieces.append([])
        else:
            pieces[-1].append(token_id)
    return [tokenizer.decode(piece).strip() for piece in pieces]


def _short(probability: Tensor) -> list[list[float]]:
    """Four significant digits."""
    return [[float(f"{p:.4g}") for p in row] for row in probability.tolist()]


def _index(names: list[str], name: str, kind: str) -> int:
    if name not in names:
        raise ValueError(f"the scene has no {kind} '{name}'")
    return names.index(name)


def _checked(scene: Scene) -> Scene:
    """The scene, if its parts fit each other."""
    L, W, S = len(scene.labels), len(scene.words), scene.num_masks
    shapes = {
        "text": (len(scene.text), S + 1),
        "owners": (len(scene.owners), L),
        "token_LW": (np.shape(scene.token_LW), (L, W)),
        "transition_LL": (np.shape(scene.transition_LL), (L, L)),
        "last owner": (scene.owners[-1] if scene.owners else None, S + 1),
    }
    for name, (got, want) in shapes.items():
        if got != want:
            raise ValueError(f"scene with {L} states, {W} words, {S} masks: {name} is {got}")
    if any(not 0 <= w < W for row in scene.offered for w in row):
        raise ValueError(f"the scene offers words beyond its {W}")
    return scene


# ---- the drawing ----

# Units of the picture: pixels on a phone of 390, where four states stand side by side.
PITCH_X, PITCH_Y, NODE_WIDTH, NODE_HEIGHT, LINE = 88, 118, 80, 62, 13
NUM_LETTERS = 11
"""As many of a word as fit a node."""


class _Place(NamedTuple):
    """Of a node: centre, half its height, and its row."""

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
        # The nodes of a boundary are low, so its row is closer to the next.
        half = NODE_HEIGHT / 2 if 0 < row < len(counts) - 1 else LINE
        x = width / 2 + (seen[row] - (counts[row] - 1) / 2) * PITCH_X
        y = LINE + 4 + row * PITCH_Y - spare * ((row > 0) + (row == len(counts) - 1))
        seen[row] += 1
        places.append(_Place(x, y, half, row))
    height = places[-1].y + places[-1].half + 4
    return places, width, math.ceil(height)


def _curve(a: _Place, b: _Place) -> tuple[str, float, float]:
    """Path of an edge, and where its number stands."""
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
    """Whole percent; the script writes the same."""
    if p <= 0:
        return "0 %"
    whole = math.floor(100 * p + 0.5 + TIE)
    return f"{whole} %" if whole else "<1 %"


def _fragment(scene: Scene) -> Iterator[str]:
    """The element, as it looks before anything is chosen, and its script."""
    payload = scene.to_json()
    name = hashlib.sha256(payload.encode()).hexdigest()[:10]
    now = conditionals(scene)
    yield (
        f'<div class="exlm-widget tex2jax_ignore mathjax_ignore" data-exlm="{name}"'
        f' role="group" aria-label="Explorer of the state graph"'
        f' data-scene="{escape(payload)}">\n<style>{_STYLE}</style>\n'
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
    script = _SCRIPT.replace("NAME", name).replace("TIE", str(TIE))
    yield f"</div>\n</div>\n<script>{script}</script>\n</div>"


def _sentence(scene: Scene) -> Iterator[str]:
    """The text with its masks, and what is chosen."""
    yield '<p class="exlm-text">'
    for mask, piece in enumerate(scene.text):
        if mask:
            yield f' <b class="exlm-slot exlm-{mask % 2}" data-mask="{mask - 1}">[MASK]</b> '
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
    """The words a node has room for, if they are worth it."""
    ranked = sorted(enumerate(scene.token_LW[u]), key=lambda entry: -entry[1])
    return [(w, p) for w, p in ranked[:NUM_WORDS_IN_NODE] if p >= 0.05]


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


_STYLE = """
.exlm-widget{--exlm-a:#f2b134;--exlm-b:#b5793a;--exlm-hot:#d9533b;box-sizing:border-box;
width:100%;max-width:100%;color:inherit;font-size:14px;line-height:1.35;text-align:left;
overflow-wrap:anywhere}
.exlm-widget *{box-sizing:border-box}
.exlm-widget p{margin:0 0 .5em}
.exlm-widget .exlm-text{font-size:16px}
.exlm-widget .exlm-slot{padding:0 .35em;border-radius:5px;color:#000}
.exlm-widget .exlm-1{--exlm-own:var(--exlm-a)}
.exlm-widget .exlm-0{--exlm-own:var(--exlm-b)}
.exlm-widget .exlm-boundary{--exlm-own:#9aa5b1}
.exlm-widget .exlm-slot{background:var(--exlm-own)}
.exlm-widget .exlm-line{min-height:2.9em}
.exlm-widget .exlm-columns{display:flex;flex-wrap:wrap;gap:12px 20px;align-items:flex-start}
.exlm-widget .exlm-graph{flex:3 1 320px;min-width:0}
.exlm-widget .exlm-masks{flex:2 1 280px;min-width:0;display:grid;gap:12px;
grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}
.exlm-widget svg{display:block;width:100%;height:auto;margin:0 auto;overflow:visible}
.exlm-widget svg text{font:12px sans-serif;text-anchor:middle;fill:#000}
.exlm-widget svg path{fill:none;stroke:currentColor;transition:stroke-width .25s}
.exlm-widget svg text[data-edge]{fill:currentColor;font-size:11px;visibility:hidden}
.exlm-widget svg path.exlm-on{stroke:var(--exlm-hot);stroke-opacity:1}
.exlm-widget svg text.exlm-on{visibility:visible}
.exlm-widget svg .exlm-label{text-anchor:start;font-size:10px}
.exlm-widget svg .exlm-share{text-anchor:end;font-size:10px}
.exlm-widget .exlm-node{cursor:pointer;outline:none}
.exlm-widget .exlm-node.exlm-boundary{cursor:default}
.exlm-widget .exlm-node rect{fill:var(--exlm-own);stroke:transparent;stroke-width:3;
transition:fill .25s}
.exlm-widget .exlm-node.exlm-off rect{fill:#d8dee6}
.exlm-widget .exlm-node:hover rect,.exlm-widget .exlm-node:focus-visible rect{
stroke:var(--exlm-hot)}
.exlm-widget .exlm-node[aria-pressed=true] rect{stroke:currentColor}
.exlm-widget .exlm-detail{min-height:4.2em;margin:.5em 0 0}
.exlm-widget .exlm-head{font-weight:600;margin:0 0 .2em;
border-bottom:3px solid var(--exlm-own)}
.exlm-widget button{appearance:none;font:inherit;color:inherit;background:transparent;
border:1px solid transparent;border-radius:5px;cursor:pointer;margin:0}
.exlm-widget .exlm-reset{border-color:currentColor;padding:1px 8px}
.exlm-widget .exlm-word{position:relative;display:flex;justify-content:space-between;
gap:.5em;width:100%;min-height:31px;padding:2px 6px 7px;text-align:left}
.exlm-widget .exlm-word i{position:absolute;left:0;bottom:0;height:5px;border-radius:2px;
background:var(--exlm-own);transition:width .25s}
.exlm-widget .exlm-word u{position:absolute;bottom:0;height:8px;width:0;
border-left:2px solid currentColor;visibility:hidden}
.exlm-widget.exlm-fixed .exlm-word u{visibility:visible}
.exlm-widget .exlm-word span,.exlm-widget .exlm-word em{position:relative}
.exlm-widget em{font-style:normal;white-space:nowrap}
.exlm-widget .exlm-word:hover{border-color:currentColor}
.exlm-widget button:focus-visible{outline:2px solid var(--exlm-hot);outline-offset:1px}
.exlm-widget .exlm-word[aria-pressed=true]{border-color:currentColor;font-weight:600;
box-shadow:inset 0 0 0 1px currentColor}
.exlm-widget .exlm-word:disabled{opacity:.45;cursor:not-allowed}
.exlm-widget .exlm-rest{display:flex;justify-content:space-between;padding:3px 6px;
font-size:13px;opacity:.85;margin:0}
@media (prefers-reduced-motion:reduce){.exlm-widget *{transition:none!important}}
"""

# The recursion is that of ``conditionals``; a test drives both and compares.
_SCRIPT = r"""
(() => {
  "use strict";
  const percent = (p) => {
    const whole = Math.floor(100 * p + 0.5 + TIE);
    return p <= 0 ? "0 %" : whole ? whole + " %" : "<1 %";
  };
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  function start(root) {
    const { labels, owners, words, offered, token_LW: token, transition_LL: link } =
      JSON.parse(root.dataset.scene);
    const S = offered.length, L = labels.length, M = S + 2;
    const find = (selector) => [...root.querySelectorAll(selector)];
    const one = (selector) => root.querySelector(selector);
    const chosen = new Array(S).fill(null); // per mask: null, {word: w} or {state: u}

    // Probabilities given the choices, summed over all paths: alpha holds a state's own
    // emission, beta does not.
    function follow(choices) {
      const emit = Array.from({ length: M }, (_, i) => {
        const choice = choices[i - 1];
        return labels.map((_, u) => (!choice ? 1
          : "word" in choice ? token[u][choice.word] : u === choice.state ? 1 : 0));
      });
      const alpha = [labels.map((_, u) => (u ? 0 : emit[0][0]))];
      for (let i = 1; i < M; i++) {
        alpha.push(labels.map((_, u) => {
          let reach = 0;
          for (let v = 0; v < u; v++) reach += alpha[i - 1][v] * link[v][u];
          return reach * emit[i][u];
        }));
      }
      const beta = new Array(M);
      beta[M - 1] = labels.map((_, u) => (u === L - 1 ? 1 : 0));
      for (let i = M - 2; i >= 0; i--) {
        beta[i] = labels.map((_, v) => {
          let on = 0;
          for (let u = v + 1; u < L; u++) on += link[v][u] * emit[i + 1][u] * beta[i + 1][u];
          return on;
        });
      }
      const total = alpha[M - 1][L - 1];
      const scale = total > 0 ? 1 / total : 0;
      const state = [];
      for (let i = 1; i <= S; i++) {
        state.push(labels.map((_, u) => alpha[i][u] * beta[i][u] * scale));
      }
      const word = state.map((row, s) => words.map((_, w) => {
        const choice = choices[s];
        if (choice && "word" in choice) return w === choice.word ? 1 : 0; // a choice is possible
        return sum(row.map((p, u) => p * token[u][w]));
      }));
      const flow = (v, u) => {
        let p = 0;
        for (let i = 1; i < M; i++) p += alpha[i - 1][v] * emit[i][u] * beta[i][u];
        return p * link[v][u] * scale;
      };
      return { total, state, word, flow };
    }

    const instead = (s, choice) => chosen.map((old, t) => (t === s ? choice : old));
    const name = (s, choice) => `mask ${s + 1} ` + ("word" in choice
      ? `is "${words[choice.word]}"` : `comes from state ${labels[choice.state]}`);

    function draw() {
      const now = follow(chosen);
      const fixed = chosen.map((choice, s) => choice && name(s, choice)).filter(Boolean);
      root.classList.toggle("exlm-fixed", fixed.length > 0);
      one(".exlm-reset").hidden = !fixed.length;
      const bits = -Math.log2(now.total);
      one(".exlm-status").textContent = !fixed.length ? "Nothing is fixed."
        : `Fixed: ${fixed.join(", ")}. Joint probability ` +
          `${Number(now.total.toPrecision(2))} = ${bits.toFixed(1)} bits.`;
      for (const slot of find(".exlm-slot")) {
        const choice = chosen[slot.dataset.mask];
        slot.textContent = !choice ? "[MASK]"
          : "word" in choice ? words[choice.word] : `state ${labels[choice.state]}`;
      }
      for (const button of find(".exlm-word")) {
        const s = +button.dataset.mask, w = +button.dataset.word, choice = chosen[s];
        const p = now.word[s][w], pressed = !!choice && choice.word === w;
        button.setAttribute("aria-pressed", pressed);
        button.querySelector("i").style.width = `${100 * p}%`;
        button.querySelector("em").textContent = percent(p);
        button.disabled = !pressed && follow(instead(s, { word: w })).total <= 0;
      }
      find(".exlm-rest em").forEach((rest, s) => {
        const p = 1 - sum(offered[s].map((w) => now.word[s][w]));
        rest.textContent = percent(p < 1e-9 ? 0 : p);
      });
      for (const node of find(".exlm-node")) {
        const u = +node.dataset.state, s = owners[u] - 1;
        if (s < 0 || s >= S) continue;
        const p = now.state[s][u], choice = chosen[s];
        node.setAttribute("aria-pressed", !!choice && choice.state === u);
        node.classList.toggle("exlm-off", p < 0.005);
        node.querySelector(".exlm-share").textContent = percent(p);
      }
      for (const edge of find("path[data-edge]")) {
        const p = now.flow(...edge.dataset.edge.split("-").map(Number));
        edge.setAttribute("stroke-width", (0.8 + 6 * p).toFixed(2));
        edge.setAttribute("stroke-opacity", p + TIE < 0.005 ? 0 : (0.2 + 0.6 * p).toFixed(2));
      }
    }

    function look(u) {
      for (const edge of find("[data-edge]")) {
        edge.classList.toggle("exlm-on", edge.dataset.edge.startsWith(`${u}-`));
      }
      const top = (row, names, count) => row.map((p, x) => [p, names[x]])
        .filter(([p]) => p >= 0.005).sort((a, b) => b[0] - a[0]).slice(0, count)
        .map(([p, text]) => `${text} ${percent(p)}`).join(", ");
      const parts = [`State ${labels[u]}`], s = owners[u] - 1;
      if (s >= 0 && s < S) {
        const p = follow(chosen).state[s][u];
        parts[0] += `, on ${percent(p)} of the paths (by probability)`;
        parts.push(`says ${top(token[u], words, 6) || "none of these words"}`);
      }
      if (u < L - 1) parts.push(`leads to ${top(link[u], labels, 6) || "nowhere"}`);
      one(".exlm-detail").textContent = parts.join("; ") + ".";
    }

    function fix(s, choice) {
      const before = chosen[s];
      const same = before && before.word === choice.word && before.state === choice.state;
      if (!same && follow(instead(s, choice)).total <= 0) return;
      chosen[s] = same ? null : choice;
      draw();
    }

    function press(target) {
      const button = target.closest("button"), node = target.closest(".exlm-node");
      if (button && button.classList.contains("exlm-reset")) {
        chosen.fill(null);
        draw();
      } else if (button) {
        fix(+button.dataset.mask, { word: +button.dataset.word });
      } else if (node) {
        const u = +node.dataset.state, s = owners[u] - 1;
        if (s >= 0 && s < S) fix(s, { state: u });
        look(u);
      }
    }

    const point = (event) => {
      const node = event.target.closest(".exlm-node");
      if (node) look(+node.dataset.state);
    };
    root.addEventListener("click", (event) => press(event.target));
    root.addEventListener("mouseover", point);
    root.addEventListener("focusin", point);
    root.addEventListener("keydown", (event) => {
      // Buttons answer to these keys by themselves.
      if (!event.target.closest(".exlm-node") || !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      press(event.target);
    });
    draw();
  }

  // Jupyter may run the script before it puts the element into the page.
  function begin(patience) {
    const roots = document.querySelectorAll('[data-exlm="NAME"]:not([data-exlm-ready])');
    for (const root of roots) {
      root.dataset.exlmReady = "";
      start(root);
    }
    if (!roots.length && patience > 0) setTimeout(() => begin(patience - 1), 50);
  }
  begin(100);
})();
"""

_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:16px;max-width:980px;font-family:system-ui,sans-serif;
background:Canvas;color:CanvasText}
"""

_PAGE = """<!doctype html>
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
