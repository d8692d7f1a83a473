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
