"""Style and script of an explorer, and the page that holds one of its own."""

STYLE = """
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
SCRIPT = r"""
(() => {
  "use strict";
  const percent = (p) => {
    const whole = Math.floor(100 * p + 0.5 + TIE);
    return p <= 0 ? "0%" : whole ? whole + "%" : "<1%";
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
