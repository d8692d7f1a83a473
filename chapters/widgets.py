"""Two interactive figures, each a piece of HTML that a cell displays."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from IPython.display import display


def show_table(graph: Mapping[str, Any]) -> None:
    """Show the table f of a small graph, with sliders for some probabilities.

    Args:
        graph: ``labels`` of states, ``targets``, all ``paths``, emissions ``P``,
            transitions ``E``, and ``knobs``, a dict for each slider: its ``name``,
            its ``kind`` (``edge`` for ``E``, ``says`` for ``P``), the indices ``a``
            and ``b`` of the entry there, and the initial ``value``.
    """
    note = "The table f, with sliders for four numbers of the graph."
    html = TABLE.replace("DATA", json.dumps(graph))
    display({"text/html": html, "text/plain": note}, raw=True)


def show_film(frames: Mapping[str, Sequence[Sequence[int]]], every: int) -> None:
    """Show an animation of two masks with two clones each during training.

    Args:
        frames: a list of frames for each named start. A frame has eight numbers in
            hundredths: the probability of entering the first mask's first clone, of
            *happy* at each clone of that mask, of the edges from both to the second
            mask's first clone, of *smiled* at each clone there; and the bits.
        every: training steps from one frame to the next.
    """
    note = "An animation; the figure below has the same curves."
    data = json.dumps(frames, separators=(",", ":"))
    html = FILM.replace("DATA", data).replace("EVERY", str(every))
    display({"text/html": html, "text/plain": note}, raw=True)


TABLE = """
<div class="exlm-widget exlm-table tex2jax_ignore mathjax_ignore" role="group"
 aria-label="The table f for a graph that can be changed">
<style>
.exlm-table{max-width:560px;font-size:14px;print-color-adjust:exact}
.exlm-table label{display:flex;gap:8px;align-items:center;margin:2px 0}
.exlm-table label span{width:9.5em}
.exlm-table input{flex:1;min-width:80px;accent-color:#0173b2}
.exlm-table output{width:2.6em;text-align:right}
.exlm-table .cells{display:grid;grid-template-columns:3em repeat(6,1fr);gap:2px;
margin:8px 0;text-align:center;font-size:12px}
.exlm-table .cells b{font-weight:400;opacity:.8}
.exlm-table .cells i{font-style:normal;padding:6px 0;border:1px solid #8888}
.exlm-table .cells .changed{outline:2px solid #de8f05}
.exlm-table .path{display:grid;grid-template-columns:7em 1fr 3.2em;gap:8px}
.exlm-table .path u{background:#0173b2;height:.8em;align-self:center}
.exlm-table .path em{font-style:normal;text-align:right}
</style>
<noscript>This figure is drawn by JavaScript.</noscript>
<div class="knobs"></div><div class="cells"></div><div class="paths"></div>
<script>
(() => {
const root = document.querySelector(".exlm-table:not([data-on])");
root.dataset.on = 1;
const {labels, targets, P, E, knobs, paths} = DATA;
const find = (name) => root.querySelector(name), inputs = [];
let before = null;
function graph() {
  const emit = P.map(row => [...row]), edge = E.map(row => [...row]);
  knobs.forEach(({kind, a, b}, n) => {
    const x = inputs[n].value / 100;
    if (kind === "says") { emit[a][b] = x; return; }
    const rest = edge[a].reduce((sum, e, u) => sum + (u === b ? 0 : e), 0);
    edge[a] = edge[a].map((e, u) => u === b ? x : e * (1 - x) / rest);
  });
  return [emit, edge];
}
function forward(emit, edge) {
  const f = emit.map(row => row.map(() => 0));
  f[0][0] = emit[0][0];
  for (let i = 1; i < emit.length; i++)
    for (let u = 0; u < labels.length; u++)
      for (let v = 0; v < u; v++)
        f[i][u] += f[i - 1][v] * edge[v][u] * emit[i][u];
  return f;
}
function draw() {
  const [emit, edge] = graph(), f = forward(emit, edge);
  const total = f.at(-1).at(-1), hide = f.map(r => r.map(x => x.toFixed(4)));
  let out = "<b></b>" + labels.map(l => `<b>${l}</b>`).join("");
  f.forEach((row, i) => {
    const most = Math.max(...row);
    out += `<b>${targets[i]}</b>` + row.map((x, u) => {
      const changed = before && before[i][u] !== hide[i][u] ? "changed" : "";
      const deep = `background:rgba(1,115,178,${(0.25 * x / most).toFixed(2)})`;
      return `<i class="${changed}" style="${deep}">${x ? x.toFixed(3) : 0}</i>`;
    }).join("");
  });
  find(".cells").innerHTML = out;
  find(".paths").innerHTML = paths.map(a => {
    let p = 1;
    a.forEach((u, i) => { p *= emit[i][u] * (i ? edge[a[i - 1]][u] : 1); });
    const share = total ? 100 * p / total : 0;
    const name = a.slice(1, -1).map(u => labels[u]).join(" → ");
    return `<div class="path"><span>${name}</span><u style="width:${share}%"></u>
<em>${share.toFixed(0)}%</em></div>`;
  }).join("") + `<p>sum over all paths: ${total.toFixed(4)}</p>`;
  inputs.forEach((input) => {
    input.nextSibling.textContent = (input.value / 100).toFixed(2);
    input.setAttribute("aria-valuetext", input.nextSibling.textContent);
  });
  before ??= hide;
}
for (const {name, value} of knobs) {
  const label = document.createElement("label");
  label.innerHTML = `<span>${name}</span><input type="range" min="0" max="100"
 value="${Math.round(100 * value)}"><output></output>`;
  inputs.push(label.querySelector("input"));
  label.querySelector("input").oninput = draw;
  find(".knobs").append(label);
}
draw();
})();
</script></div>"""

FILM = """
<div class="exlm-widget exlm-film tex2jax_ignore mathjax_ignore" role="group"
 aria-label="Clones of two masks during training">
<style>
.exlm-film{max-width:640px;font-size:14px}
.exlm-film .exlm-row{display:flex;flex-wrap:wrap;gap:6px;align-items:center;
margin:4px 0}
.exlm-film button{font:inherit;color:inherit;background:transparent;cursor:pointer;
border:1px solid currentColor;border-radius:5px;padding:2px 9px;min-height:30px}
.exlm-film button[aria-pressed=true]{background:#0173b2;color:#fff}
.exlm-film input{flex:1;min-width:120px;accent-color:#0173b2}
.exlm-film svg{display:block;width:100%;height:auto}
.exlm-film text{font:12px sans-serif;fill:currentColor;text-anchor:middle}
.exlm-film .in{fill:#000}
.exlm-film line{stroke:currentColor}
.exlm-film .dash{stroke-dasharray:4 4;opacity:.6}
.exlm-film .curve{fill:none;stroke:#de8f05;stroke-width:2.5}
.exlm-film .left{text-anchor:start}.exlm-film .right{text-anchor:end}
</style>
<div class="exlm-row starts"></div>
<noscript>This figure is drawn by JavaScript.</noscript>
<svg viewBox="0 0 400 300" role="img"
 aria-label="States of two masks, and the bits over the steps of training"></svg>
<div class="exlm-row"><button type="button" class="play">play</button>
<input type="range" min="0" value="0" aria-label="step">
<span class="step"></span></div>
<script>
(() => {
const root = document.querySelector(".exlm-film:not([data-on])");
root.dataset.on = 1;
const data = DATA, every = EVERY;
const svg = root.querySelector("svg"), slider = root.querySelector("input");
const play = root.querySelector(".play"), told = root.querySelector(".step");
const starts = root.querySelector(".starts"), names = Object.keys(data);
const last = data[names[0]].length - 1;
let name = names[1], timer = null;
slider.max = last;
const t = (x, y, s, c) => `<text x="${x}" y="${y}" class="${c || ""}">${s}</text>`;
const at = {b: [34, 88], "10": [140, 48], "11": [140, 128], "20": [262, 48],
  "21": [262, 128], e: [368, 88]};
const edge = (v, u, p) => `<line x1="${at[v][0]}" y1="${at[v][1]}" x2="${at[u][0]}"
 y2="${at[u][1]}" stroke-width="${(12 * p).toFixed(2)}" stroke-opacity=".55"/>`;
const box = (k, p, words) => {
  const [x, y] = at[k], w = 72, h = 44, cut = w * p;
  const part = (from, width, fill) => `<rect x="${from}" y="${y - 22}"
 width="${width}" height="${h}" fill="${fill}"/>`;
  return part(x - 36, cut, "#de8f05") + part(x - 36 + cut, w - cut, "#7cbcec")
    + t(x, y - 4, words[p < .5 ? 1 : 0], "in")
    + t(x, y + 13, Math.round(100 * Math.max(p, 1 - p)) + "%", "in");
};
const Y = (bits) => 282 - 62 * (bits - 0.9);
const X = (f) => 34 + 340 * f / last;
function draw() {
  const f = +slider.value, now = data[name][f].map(n => n / 100);
  const [s, p1, p2, e1, e2, q1, q2, bits] = now;
  let out = edge("b", "10", s) + edge("b", "11", 1 - s)
    + edge("10", "20", s * e1) + edge("10", "21", s * (1 - e1))
    + edge("11", "20", (1 - s) * e2) + edge("11", "21", (1 - s) * (1 - e2));
  const r = s * e1 + (1 - s) * e2;
  out += edge("20", "e", r) + edge("21", "e", 1 - r);
  for (const [k, label] of [["b", "[BOS]"], ["e", "[EOS]"]]) {
    out += `<circle cx="${at[k][0]}" cy="88" r="24" fill="#9aa5b1"/>`;
    out += t(at[k][0], 92, label, "in");
  }
  out += box("10", p1, ["happy", "sad"]) + box("11", p2, ["happy", "sad"])
    + box("20", q1, ["smiled", "wept"]) + box("21", q2, ["smiled", "wept"])
    + t(140, 16, "first mask") + t(262, 16, "second mask");
  const levels = [[2, "2 bits: floor"], [1, "1 bit: joint entropy"]];
  for (const [level, label] of levels) {
    const y = Y(level);
    out += `<line class="dash" x1="34" x2="374" y1="${y}" y2="${y}"/>`;
    out += t(374, y - 6, label, "right");
  }
  const line = data[name].slice(0, f + 1)
    .map((n, i) => `${X(i).toFixed(1)},${Y(Math.min(2.3, n[7] / 100)).toFixed(1)}`);
  out += `<polyline class="curve" points="${line.join(" ")}"/>`;
  const [x, y] = line[f].split(",");
  out += `<circle cx="${x}" cy="${y}" r="4.5" fill="#de8f05"/>`;
  svg.innerHTML = out;
  told.textContent = `step ${f * every}, ${bits.toFixed(2)} bits`;
  slider.setAttribute("aria-valuetext", told.textContent);
  for (const b of starts.children)
    b.setAttribute("aria-pressed", b.textContent === name);
}
function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
play.onclick = () => {
  if (timer) return stop();
  if (+slider.value === last) slider.value = 0;
  play.textContent = "pause";
  timer = setInterval(() => {
    slider.value = +slider.value + 1;
    draw();
    if (+slider.value === last) stop();
  }, 90);
};
slider.oninput = () => { stop(); draw(); };
for (const n of names) {
  const b = document.createElement("button");
  b.type = "button";
  b.textContent = n;
  b.onclick = () => { name = n; slider.value = 0; stop(); draw(); };
  starts.append(b);
}
draw();
})();
</script></div>"""
