(() => {
  "use strict";
  const percent = (p) => {
    const whole = Math.floor(100 * p + 0.5 + 1e-9); // halves round up despite rounding errors
    return p <= 0 ? "0%" : whole ? whole + "%" : "<1%";
  };
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const plain = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  // Pixels on a phone of 390, where four states stand side by side.
  const PITCH_X = 88, PITCH_Y = 118, WIDTH = 80, HEIGHT = 62, LINE = 13;
  const NUM_LETTERS = 11, NUM_WORDS = 3; // that fit into a node
  const SMALLEST_EDGE = 0.001; // smaller ones are summed over, but not drawn

  // Places of the states, rows are targets, and the size of the picture.
  function lay(owners, S) {
    const counts = Array.from({ length: S + 2 }, (_, row) =>
      owners.filter((owner) => owner === row).length);
    const width = PITCH_X * Math.max(4, ...counts), seen = counts.map(() => 0);
    const places = owners.map((row) => {
      // Nodes of a boundary are lower, so its row is closer to the next.
      const half = row > 0 && row <= S ? HEIGHT / 2 : LINE;
      const above = (HEIGHT / 2 - LINE) * ((row > 0) + (row === S + 1));
      const x = width / 2 + (seen[row]++ - (counts[row] - 1) / 2) * PITCH_X;
      return { x, y: LINE + 4 + row * PITCH_Y - above, half, row };
    });
    const last = places[places.length - 1];
    const below = counts[S + 1] > 1 ? 40 : 4; // where edges between its clones are drawn
    return { places, width, height: Math.ceil(last.y + last.half + below) };
  }

  function edgeOf(key, a, b, p) {
    const start = a.y + a.half, end = b.y - b.half, low = start + 36.4;
    const [path, x, y] = a.row === b.row // below both
      ? [`${low} ${b.x},${low} ${b.x},${b.y + b.half}`, (a.x + b.x) / 2, start + 36]
      : [`${start + 26} ${b.x},${end - 26} ${b.x},${end}`, b.x, end - 4];
    return `<path data-edge="${key}" d="M${a.x},${start}C${a.x},${path}"/>` +
      `<text data-edge="${key}" x="${x}" y="${y}">${percent(p)}</text>`;
  }

  function nodeOf(u, place, label, isChoice, said) {
    const { x, half } = place, top = place.y - half + LINE, kind = place.row % 2;
    const role = isChoice ? 'role="button" aria-pressed="false"' : 'role="img"';
    const all = said.map(([p, word]) => `${word} ${percent(p)}`).join(", ");
    const name = plain(isChoice ? `state ${label}: ${all}` : label);
    const short = (word) => ([...word].length > NUM_LETTERS
      ? [...word].slice(0, NUM_LETTERS - 1).join("") + "\u2026" : word);
    const inner = !isChoice ? `<text x="${x}" y="${place.y + 4}">${plain(label)}</text>`
      : `<text class="exlm-label" x="${x - WIDTH / 2 + 6}" y="${top}">${plain(label)}</text>` +
        `<text class="exlm-share" x="${x + WIDTH / 2 - 6}" y="${top}"></text>` +
        said.map(([, word], line) =>
          `<text x="${x}" y="${top + LINE * (line + 1) + 2}">${plain(short(word))}</text>`).join("");
    return `<g class="exlm-node exlm-${isChoice ? kind : "boundary"}" data-state="${u}"` +
      ` tabindex="0" ${role} aria-label="${name}"><rect x="${x - WIDTH / 2}"` +
      ` y="${place.y - half}" width="${WIDTH}" height="${2 * half}" rx="8"/>${inner}</g>`;
  }

  function page({ text, labels, owners, words, offered, token_LW, transition_LL }) {
    const S = offered.length, { places, width, height } = lay(owners, S);
    const sentence = text.map((piece, mask) => (!mask ? ""
      : ` <b dir="auto" class="exlm-slot exlm-${mask % 2}" data-mask="${mask - 1}">[MASK]</b>` +
        (/^[,.;:!?]/.test(piece) ? "" : " ")) + plain(piece));
    const edges = transition_LL.flatMap((row, v) => row.map((p, u) =>
      (p < SMALLEST_EDGE ? "" : edgeOf(`${v}-${u}`, places[v], places[u], p))));
    const nodes = places.map((place, u) => {
      const said = token_LW[u].map((p, w) => [p, words[w]]).sort((a, b) => b[0] - a[0])
        .slice(0, NUM_WORDS).filter(([p], line) => !line || p >= 0.05);
      return nodeOf(u, place, labels[u], place.row > 0 && place.row <= S, said);
    });
    const lists = offered.map((row, mask) =>
      `<div class="exlm-mask exlm-${(mask + 1) % 2}" role="group" aria-label="Mask ${mask + 1}">` +
      `<p class="exlm-head">Mask ${mask + 1}</p>` + row.map((w) =>
        `<button type="button" class="exlm-word" data-mask="${mask}" data-word="${w}"` +
        ` aria-pressed="false"><i></i><u></u><span dir="auto">${plain(words[w])}</span><em></em></button>`,
      ).join("") + '<p class="exlm-rest">all other words <em></em></p></div>');
    return `<p class="exlm-text" dir="auto">${sentence.join("")}</p>` +
      '<p class="exlm-line"><span class="exlm-status" role="status" tabindex="-1"></span> ' +
      '<button type="button" class="exlm-reset" hidden>release all</button></p>' +
      '<div class="exlm-columns"><div class="exlm-graph">' +
      `<svg viewBox="0 0 ${width} ${height}" style="max-width:${1.25 * width}px" role="group"` +
      ' aria-label="States, one row per mask, and the edges between them">' +
      `<g>${edges.join("")}</g>${nodes.join("")}</svg>` +
      '<p class="exlm-detail">Point at a state to see what it says and where it leads; click ' +
      `it, or a word, to fix a mask.</p></div><div class="exlm-masks">${lists.join("")}</div></div>`;
  }

  function start(root) {
    const scene = JSON.parse(root.dataset.scene);
    const { labels, owners, words, offered, token_LW: token, transition_LL: link } = scene;
    root.querySelector("div").innerHTML = page(scene);
    const S = offered.length, L = labels.length, M = S + 2;
    const find = (selector) => [...root.querySelectorAll(selector)];
    const one = (selector) => root.querySelector(selector);
    const chosen = new Array(S).fill(null); // per mask: null, {word: w} or {state: u}
    let seen = null; // the state that the text below the graph is about

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
        node.dataset.name ??= node.getAttribute("aria-label");
        node.setAttribute("aria-label", `${node.dataset.name}; on ${percent(p)} of the paths`);
      }
      for (const edge of find("path[data-edge]")) {
        const p = now.flow(...edge.dataset.edge.split("-").map(Number));
        edge.setAttribute("stroke-width", (0.8 + 6 * p).toFixed(2));
        edge.setAttribute("stroke-opacity", p < 0.005 ? 0 : (0.2 + 0.6 * p).toFixed(2));
      }
      if (seen !== null) look(seen);
    }

    function look(u) {
      seen = u;
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
        one(".exlm-status").focus(); // the button is about to be hidden
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
    const atFirst = follow(chosen);
    for (const button of find(".exlm-word")) {
      const p = atFirst.word[button.dataset.mask][button.dataset.word];
      button.querySelector("u").style.left = `${100 * p}%`;
    }
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
