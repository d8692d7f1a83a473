# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-dag-naive)=
# # The sum over all paths
#
# After states expansion a sentence has more states than hidden words, for example
# four for every [MASK]. Which state should say which word? The training data
# leave that open. ExLM {cite}`zheng2025exlm` therefore asks how probable it is
# that *any* path through the states says the right words. That is a sum over all
# paths, and there are far too many to list.
#
# In this chapter you write that sum, first path by path, then as three loops that
# need a few million multiplications instead. Three more loops, run backwards,
# give each state's contribution to the sum, which turns out to be the gradient
# that the model learns from.
#
# **You will know afterwards** what $f_{i,u}$, $\alpha$ and $\beta$ stand for,
# what training does to a single state, why the sum is computed in logarithms, and
# how the best path is found.
#
# **What it needs.** A few seconds on a CPU; nothing is trained. The chapter
# covers §4.3 of the paper and its Appendices H, I.1 and I.2. Every function is
# written on this page and judged by the package at the end.

# %% tags=["remove-cell", "nbval-skip"]
# Colab opens this notebook alone: fetch the book around it and install its package.
import importlib.util
import os
import subprocess
import sys

package = importlib.util.find_spec("exlm_mini")
if package is None:
    url = "https://github.com/exlm-book/exlm-book"
    subprocess.run(["git", "clone", "--depth", "1", url, "exlm-book"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip, "exlm-book[text,chem,train,tasks]"], check=True)
    os.chdir("exlm-book/chapters")
    # This kernel started before the install.
    sys.path.insert(0, os.path.abspath(".."))
elif not os.path.isdir("../book"):
    # A copy of this notebook reads the records of the book its package is from.
    os.chdir(os.path.abspath(package.origin + "/../../chapters"))

# %% tags=["hide-input"]
import json
import math
from itertools import combinations, pairwise, product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from drawings import draw_dag, draw_heatmap
from IPython.display import display
from live import chapter_scale

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
torch.set_default_dtype(torch.float64)
scale = chapter_scale()
print(scale)

# %% [markdown]
# ## One alignment is one path
#
# Take the sentence *this was [MASK] and I am [MASK]*, in which *great* and *glad*
# are hidden. Each mask gets $k = 2$ states; [BOS] and [EOS] are one state each,
# as in Appendix P. That makes $L = 6$ states. The *targets* are the tokens to be
# said, [BOS] and [EOS] included, so there are $M = 4$.
#
# We make up the numbers of the graph. Each inner state $u$ has a distribution
# $\mathbf{P}_u$ over words, and row $v$ of the transition matrix $\mathbf{E}$
# says where a path goes from state $v$, always forward.

# %%
labels = ["BOS", "1.1", "1.2", "2.1", "2.2", "EOS"]
words = ["great", "awful", "glad", "sorry"]
P_LV = torch.tensor(
    [
        [0.5, 0.3, 0.1, 0.1],  # state 1.1
        [0.1, 0.5, 0.1, 0.3],  # state 1.2
        [0.1, 0.1, 0.5, 0.3],  # state 2.1
        [0.1, 0.2, 0.1, 0.6],  # state 2.2
    ]
)
E_LL = torch.zeros(6, 6)
E_LL[0, 1:] = torch.tensor([0.45, 0.2, 0.2, 0.05, 0.1])
E_LL[1, 2:] = torch.tensor([0.1, 0.5, 0.2, 0.2])
E_LL[2, 3:] = torch.tensor([0.45, 0.5, 0.05])
E_LL[3, 4:] = torch.tensor([0.4, 0.6])
E_LL[4, 5] = 1.0

# %% mystnb={"figure": {"caption": "Two masks with two states each, between [BOS] and [EOS]. Each state shows its likeliest word. The wider an edge, the more probable the step; probabilities are written from 0.1 up. Edges may join two states of one mask (1.1 to 1.2) or skip a mask (BOS to 2.1).", "name": "fig-naive-dag"}} tags=["hide-input"]
columns = [0, 1, 1, 2, 2, 3]
kinds = ["boundary", "mask", "mask", "second", "second", "boundary"]
names = list(labels)
for u, (p, best) in enumerate(zip(*P_LV.max(dim=1), strict=True), start=1):
    names[u] = f"{labels[u]}\n{words[best]} {p:.1f}"
fig, ax = plt.subplots(figsize=(5.0, 2.8))
draw_dag(ax, E_LL.numpy(), columns, names, kinds)

# %% [markdown]
# Once the targets $y_i$ are known, all we need from $\mathbf{P}_u$ is the
# *emission* $\mathbf{P}_u(y_i)$, the probability that state $u$ says target $i$.
# The boundaries are free in this chapter: [BOS] says itself with probability 1 and
# nothing else, and so does [EOS].


# %%
def emissions(filling):
    """P_u(y_i) for two words between [BOS] and [EOS], (M, L)."""
    P_ML = torch.zeros(4, 6)
    P_ML[0, 0] = P_ML[-1, -1] = 1.0
    for i, word in enumerate(filling.split(), start=1):
        P_ML[i, 1:5] = P_LV[:, words.index(word)]
    return P_ML


P_ML = emissions("great glad")
M, L = P_ML.shape

# %% [markdown]
# A *path* $\mathbf{A}$ gives each target a state $a_i$. It starts in the first
# state, ends in the last, and only moves forward, so to choose a path is to
# choose which two of the four inner states speak. Its score is the probability of
# taking this path *and* saying the right words:
#
# $$
# P(\mathbf{Y}, \mathbf{A}) = \prod_{i=1}^{M} \mathbf{P}_{a_i}(y_i)
# \prod_{i=2}^{M} \mathbf{E}_{a_{i-1}, a_i}.
# $$ (eq-naive-score)


# %%
def score(path, P_ML, E_LL):
    """P(Y, A) of one path: its emissions times its edges."""
    emitted = math.prod(P_ML[i, u].item() for i, u in enumerate(path))
    return emitted * math.prod(E_LL[v, u].item() for v, u in pairwise(path))


def all_paths(M, L):
    """Every way from state 0 to state L - 1 with M stops, for M > 1."""
    return [(0, *inner, L - 1) for inner in combinations(range(1, L - 1), M - 2)]


scores = {path: score(path, P_ML, E_LL) for path in all_paths(M, L)}
table = pd.DataFrame({"score": scores.values()})
table.index = [" → ".join(labels[u] for u in path) for path in scores]
table["share"] = table["score"] / table["score"].sum()
table.round(4)

# %% [markdown]
# Almost four fifths of the sum comes from one path. In the first and the last row
# both words are said by states of the same mask. That is allowed, but these two
# paths have little weight here.
#
# The training objective of §4.3 needs only the sum of the scores, so nobody has to
# know which path is the right one:
#
# $$
# \mathcal{L}_{\text{SA}}
# = -\log \sum_{\mathbf{A} \in \Gamma} P(\mathbf{Y}, \mathbf{A} \mid \mathbf{X}'),
# $$ (eq-naive-loss)
#
# where $\mathbf{X}'$ is the expanded input and $\Gamma$ the set of all paths.
# (The package divides the loss by the number of targets, so that sentences of
# different length can be compared.)
#
# ## There are too many paths to list
#
# A path chooses $M - 2$ of the $L - 2$ inner states, so there are
# $\binom{L-2}{M-2}$ paths. If no edge joins two states of the same mask, as in
# the sparse graph of Appendix Q.3, each of the $m = M - 2$ masks speaks once, and
# there are $k^m$. Appendix I.4 has an example with 77 masks in 512 tokens and $k
# = 4$:

# %%
m, k = 77, 4
seconds_since_big_bang = 13.8e9 * 365.25 * 24 * 3600
print(f"all edges: {math.comb(k * m, m):.0e} paths")
print(f"sparse:    {k**m:.0e} paths")
print(f"1e9 a second since the Big Bang: {1e9 * seconds_since_big_bang:.0e}")

# %% mystnb={"figure": {"caption": "Number of paths against the number of masks in a row, on a logarithmic scale. Grey: multiplications of the three loops of the next section, for k = 4.", "name": "fig-naive-count"}} tags=["hide-input"]
m_axis = range(1, 78)
fig, ax = plt.subplots(figsize=(4.9, 3.1))


def label(text, y, shift=-3):
    """Words at the right of the axes."""
    style = {
        "textcoords": "offset points",
        "fontsize": 10,
        "annotation_clip": False,
    }
    ax.annotate(text, (77, float(y)), (6, shift), **style)


lines = {
    "k = 4, all edges": ([math.comb(4 * m, m) for m in m_axis], "-", -3),
    "k = 4, sparse": ([4**m for m in m_axis], "--", 3),
    "k = 2, all edges": ([math.comb(2 * m, m) for m in m_axis], ":", -11),
}
for name, (numbers, style, shift) in lines.items():
    ax.semilogy(m_axis, [float(n) for n in numbers], style, color=COLORS["exlm"])
    label(name, numbers[-1], shift)
products = [(m + 1) * (4 * m + 1) * (2 * m + 1) for m in m_axis]
ax.semilogy(m_axis, products, color="0.5")
label("three loops", products[-1])
ax.axhline(1e9 * seconds_since_big_bang, color="0.3", lw=1, ls="-.")
label("10⁹ per second\nsince the Big Bang", 1e9 * seconds_since_big_bang, -10)
_ = ax.set(xlabel="masks in the row, m", ylabel="paths (or multiplications)")
_ = ax.set(xlim=(0, 77), ylim=(1, 1e77))

# %% [markdown]
# ## Three loops take the same sum
#
# There are many paths, but few edges to build them from: 15 in our graph. So the
# paths must share a lot. Cut all paths off after target $i$ and look at those
# that are then in state $u$. Call the sum of their scores $f_{i,u}$.
#
# Each of them came from some state $v < u$ in its last step. That step multiplied
# its score by $\mathbf{E}_{v,u}$ and $\mathbf{P}_u(y_i)$, whatever had happened
# before. So these two factors can be pulled out of the sum, and what is left for
# each $v$ is the sum over all paths that were in $v$ one target earlier, which is
# $f_{i-1,v}$:
#
# $$
# \begin{aligned}
# f_{1,u} &= \begin{cases} \mathbf{P}_u(y_1) & u = 1\\ 0 & u > 1 \end{cases}\\
# f_{i,u} &= \sum_{v<u} f_{i-1,v}\, \mathbf{E}_{v,u}\, \mathbf{P}_u(y_i).
# \end{aligned}
# $$ (eq-naive-recursion)
#
# A complete path is in state $L$ at target $M$, so the sum over all paths is
# $f_{M,L}$. The second line is Appendix H. The first is Appendix P, by which every
# path starts from [BOS] and ends in [EOS]. (The paper counts from 1, code from 0.)


# %%
def forward(P_ML, E_LL):
    """f[i, u] of Appendix H for every target and state."""
    M, L = P_ML.shape
    f_ML = torch.zeros(M, L)
    f_ML[0, 0] = P_ML[0, 0]
    for i in range(1, M):
        for u in range(L):
            for v in range(u):
                f_ML[i, u] += f_ML[i - 1, v] * E_LL[v, u] * P_ML[i, u]
    return f_ML


# %%
f_ML = forward(P_ML, E_LL)
print(f"three loops {f_ML[-1, -1]:.6f}, list of paths {sum(scores.values()):.6f}")
pd.DataFrame(f_ML, ["BOS", "great", "glad", "EOS"], labels).round(3)

# %% [markdown]
# Each row of the table needs only the row above it, and the likelihood is the
# corner at the lower right. Let us follow one entry: *glad* said by state 2.1.
# Two partial paths end there, one through 1.1 and one through 1.2.

# %%
i, u = 2, 3
for v in (1, 2):
    came, edge, emission = (
        x.item() for x in (f_ML[i - 1, v], E_LL[v, u], P_ML[i, u])
    )
    print(f"from {labels[v]}: {came:.3f} · {edge:.2f} · {emission:.1f}")
print(f"sum {f_ML[i, u]:.3f}")

# %% [markdown]
# Drag a slider to change a number of the graph; the other steps from the same
# state share what remains. The entries of $f$ that follow are framed, and the bars
# show what share each path has.

# %% tags=["hide-input"]
PAGE = """
<div class="exlm-widget exlm-table tex2jax_ignore mathjax_ignore" role="group"
 aria-label="The table f for a graph that can be changed">
<style>
.exlm-table{max-width:560px;font-size:14px}
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
      const deep = `background:rgba(1,115,178,${(0.5 * x / most).toFixed(2)})`;
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
KNOBS = [("edge", 0, 1), ("edge", 1, 3), ("says", 1, 1), ("says", 2, 3)]
targets = ["BOS", "great", "glad", "EOS"]
knobs = [
    {
        "kind": kind,
        "a": a,
        "b": b,
        "name": f"{labels[a]} → {labels[b]}"
        if kind == "edge"
        else f"{labels[b]} says {targets[a]}",
        "value": (E_LL if kind == "edge" else P_ML)[a, b].item(),
    }
    for kind, a, b in KNOBS
]
shown = {"labels": labels, "targets": targets, "knobs": knobs, "paths": [*scores]}
shown |= {"P": P_ML.tolist(), "E": E_LL.tolist()}
note = "The table f, with sliders for four numbers of the graph."
html = PAGE.replace("DATA", json.dumps(shown))
display({"text/html": html, "text/plain": note}, raw=True)

# %% [markdown]
# The loops visit $(M-1)\,L(L-1)/2$ triples $(i, u, v)$. For the 77 masks above
# that is 3.7 million instead of $10^{74}$ paths. Appendix H counts this work,
# $\mathcal{O}(M L^2)$; §4.3 says $\mathcal{O}(M)$ because it counts the rows,
# which have to wait for each other.
#
# To try the loops on more graphs, here are random ones, optionally with edges
# removed.


# %%
def random_graph(M, L, seed, density=1.0):
    """Random emissions and forward edges; only a share of the edges exists."""
    rng = torch.Generator().manual_seed(seed)
    P_ML = torch.rand(M, L, generator=rng)
    E_LL = torch.rand(L, L, generator=rng).triu(1)
    return P_ML, E_LL * (torch.rand(L, L, generator=rng) < density)


# %% mystnb={"code_prompt_show": "Checked: on 48 random graphs every entry of f is a sum over partial paths"} tags=["hide-cell", "check"]
shapes = [(2, 2), (2, 7), (3, 6), (5, 8), (6, 6), (6, 9), (7, 5)]
graphs = [(P_ML, E_LL)] + [
    random_graph(*shape, seed, density)
    for shape, seed, density in product(shapes[1:], range(4), (1, 0.5))
]
num_entries = num_without_path = 0
for P_graph, E_graph in graphs:
    f_graph = forward(P_graph, E_graph)
    for i, u in product(range(1, len(P_graph)), range(1, len(E_graph))):
        # The partial paths are the paths of the smaller graph that stops there.
        by_hand = sum(score(p, P_graph, E_graph) for p in all_paths(i + 1, u + 1))
        assert math.isclose(f_graph[i, u], by_hand, rel_tol=1e-12)
        num_entries += 1
    num_without_path += int(f_graph[-1, -1] == 0)
assert len(graphs) == 49 and num_entries > 1000
assert num_without_path >= 8  # seven targets never fit into five states
assert (
    products[-1] == 78 * math.comb(310, 2) and round(products[-1], -5) == 3_700_000
)

# %% [markdown]
# ## Logarithms keep it in range
#
# The likelihood is a product of many small numbers. Early in training every word
# has a probability near $1/50{,}265$ (one over RoBERTa's vocabulary size), and
# the transitions are nearly even. Here are such rows. To save time, the two inner
# loops are written as the product of a vector and a matrix.


# %%
def likelihood(P_ML, E_LL):
    """f[M, L]; the loops over u and v are one product."""
    row_L = P_ML[0] * (torch.arange(len(E_LL)) == 0)
    for P_L in P_ML[1:]:
        row_L = (row_L @ E_LL) * P_L
    return row_L[-1]


def untrained_graph(m, k=4):
    """Even transitions, equal emissions; the boundaries are free."""
    P_ML = torch.full((m + 2, k * m + 2), 1 / 50_265)
    P_ML[0] = P_ML[-1] = 1.0
    is_edge_LL = torch.ones(k * m + 2, k * m + 2).triu(1)
    return P_ML, is_edge_LL / is_edge_LL.sum(dim=1, keepdim=True).clamp(min=1)


for m in (4, 16, 77):
    graph = untrained_graph(m)
    f_32 = likelihood(*(t.float() for t in graph))
    print(f"{m:2} masks: float32 {f_32:.1g}, float64 {likelihood(*graph):.1g}")

# %% [markdown]
# The zeros are wrong, because every path has a positive score. But float32 ends
# near $10^{-45}$ and float64 near $10^{-324}$. Such a zero makes the loss
# infinite, and code that replaces infinite losses by 0, to keep running, silently
# skips the sentence.
#
# In logarithms products become sums and nothing gets too small:
#
# $$
# \begin{aligned}
# \log f_{i,u} &= \log \sum_{v<u} \exp s_v,\\
# s_v &= \log f_{i-1,v} + \log \mathbf{E}_{v,u}\\
# &\quad + \log \mathbf{P}_u(y_i).
# \end{aligned}
# $$ (eq-naive-log)
#
# The function $\log \sum \exp$ is safe because it pulls the largest term out of
# the sum before it takes exponentials. PyTorch has it as `logsumexp`.


# %%
def log_likelihood(log_P_ML, log_E_LL, log_sum=torch.logsumexp):
    """log f[M, L], a row at a time."""
    is_start_L = torch.arange(len(log_E_LL)) == 0
    row_L = log_P_ML[0].where(is_start_L, -torch.inf)
    for log_P_L in log_P_ML[1:]:
        row_L = log_sum(row_L[:, None] + log_E_LL + log_P_L, dim=0)
    return row_L[-1]


log_f_77 = log_likelihood(*(t.log() for t in untrained_graph(77)))
print(
    f"77 masks: log f = {log_f_77:.0f}, of the words {-77 * math.log(50_265):.0f}"
)

# %% [markdown]
# The difference is a price that a masked language model does not pay: an
# untrained graph rarely makes exactly 77 stops among 308 states, and the model
# has to learn that, too.

# %% mystnb={"code_prompt_show": "Checked: 77 masks cost the words plus the edges; with all scores 1 the recursion counts the paths"} tags=["hide-cell", "check"]
P_77, E_77 = untrained_graph(77)
log_edges = likelihood(
    torch.ones_like(P_77), E_77
).log()  # float64 can still hold it
assert math.isclose(log_f_77, log_edges - 77 * math.log(50_265), rel_tol=1e-10)
log_count = log_likelihood(torch.zeros_like(P_77), (E_77 > 0).double().log())
assert math.isclose(log_count, math.log(math.comb(308, 77)), rel_tol=1e-12)
for graph in graphs:
    assert math.isclose(likelihood(*graph), forward(*graph)[-1, -1], rel_tol=1e-12)
    log_f = log_likelihood(*(t.log() for t in graph))
    torch.testing.assert_close(log_f, forward(*graph)[-1, -1].log())

# %% [markdown]
# ## A right loss with wrong gradients
#
# Many states cannot be reached at a given target, and the logarithm of their $f$
# is $-\infty$. The value of the sum does not suffer, but its gradients do:


# %%
def value_and_gradients(P_ML, E_LL, log_sum):
    """log f[M, L], and its gradients by log P and by log E."""
    leaves = [t.log().requires_grad_() for t in (P_ML, E_LL)]
    log_f = log_likelihood(*leaves, log_sum)
    return log_f.item(), *torch.autograd.grad(log_f, leaves)


log_f, _, grad_LL = value_and_gradients(P_ML, E_LL, torch.logsumexp)
print(f"log f = {log_f:.4f}, {grad_LL.isnan().sum()} of {L * L} gradients are nan")

# %% [markdown]
# One optimizer step would turn the whole model into `nan`, although the loss
# looks healthy. The derivative of $\log \sum \exp$ with respect to a term $t$ is
# $e^{t-s}$, where $s$ is the result, and for an unreachable state this is
# $\exp(-\infty + \infty)$. Masking the result afterwards does not help, since the
# backward pass multiplies by 0, and 0 times `nan` is `nan`. The cure is to put in
# a harmless number *before* the function, so that its derivative is finite, and
# $-\infty$ afterwards.


# %%
def guarded(scores, dim):
    """logsumexp, with gradient 0 where there is nothing but -inf."""
    is_dead = (scores == -torch.inf).all(dim, keepdim=True)
    total = torch.logsumexp(scores.masked_fill(is_dead, 0.0), dim)
    return total.masked_fill(is_dead.squeeze(dim), -torch.inf)


log_f, _, grad_LL = value_and_gradients(P_ML, E_LL, guarded)
print(f"log f = {log_f:.4f}, {grad_LL.isnan().sum()} of {L * L} gradients are nan")

# %% mystnb={"code_prompt_show": "Checked: masking afterwards leaves nan; a graph without a path has gradient 0"} tags=["hide-cell", "check"]


def masked_too_late(scores, dim):
    is_dead = (scores == -torch.inf).all(dim)
    return scores.logsumexp(dim).masked_fill(is_dead, -torch.inf)


assert value_and_gradients(P_ML, E_LL, masked_too_late)[2].isnan().any()
cut_LL = E_LL.clone()
cut_LL[:, -1] = 0  # nothing leads to [EOS]
log_f_cut, *gradients = value_and_gradients(P_ML, cut_LL, guarded)
assert log_f_cut == -math.inf and all((g == 0).all() for g in gradients)

# %% [markdown]
# ## Forward and backward
#
# $f_{i,u}$ covers what happened until state $u$ spoke. For what happens after
# that, Appendix I.1 defines *backward sums* $\beta_{i,u}$: from state $u$, which
# has just said $y_i$, over all ways to the end. The forward sums, our $f$, are
# called $\alpha$ there.
#
# $$
# \begin{aligned}
# \beta_{M,u} &= \begin{cases} 1 & u = L\\ 0 & u < L \end{cases}\\
# \beta_{i,u} &= \sum_{v>u} \mathbf{E}_{u,v}\, \mathbf{P}_v(y_{i+1})\,
# \beta_{i+1,v}.
# \end{aligned}
# $$ (eq-naive-beta)
#
# $\alpha_{i,u}$ includes the emission of state $u$ itself and $\beta_{i,u}$ does
# not, so that $\alpha_{i,u}\,\beta_{i,u}$ contains every factor of a path once.


# %%
def backward(P_ML, E_LL):
    """beta[i, u] of Appendix I.1: own emission not included."""
    M, L = P_ML.shape
    beta_ML = torch.zeros(M, L)
    beta_ML[-1, -1] = 1.0
    for i in range(M - 2, -1, -1):
        for u in range(L):
            for v in range(u + 1, L):
                beta_ML[i, u] += E_LL[u, v] * P_ML[i + 1, v] * beta_ML[i + 1, v]
    return beta_ML


# %% [markdown]
# A somewhat larger graph shows more: three masks, $L = 8$ states, $M = 5$
# targets, random numbers.

# %%
big_P_ML, big_E_LL = random_graph(5, 8, seed=6)
big_E_LL = big_E_LL / big_E_LL.sum(dim=1, keepdim=True).clamp(min=1e-9)
alpha_ML, beta_ML = forward(big_P_ML, big_E_LL), backward(big_P_ML, big_E_LL)

# %% [markdown]
# {numref}`fig-naive-trellis` unrolls it, with a row for each target; a path is a
# line from corner to corner. Look at the marked point, where state 2.2 says the
# third target. Three partial paths lead there, two lead on, and each of the three
# can be continued by either of the two: six paths.

# %% mystnb={"figure": {"caption": "All 20 paths, unrolled. At the marked point alpha sums the blue ways in and beta the red ways out.", "name": "fig-naive-trellis"}} tags=["hide-input"]
big_labels = ["BOS", "1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "EOS"]
big_targets = ["BOS", "y₂", "y₃", "y₄", "EOS"]
big_paths = all_paths(5, 8)
fig, ax = plt.subplots(figsize=(4.9, 2.9))
at_i, at_u = 2, 4
for path in big_paths:
    ax.plot(path, range(5), color="0.85", lw=1, zorder=1)
through = [path for path in big_paths if path[at_i] == at_u]
for path in through:
    before, after = path[: at_i + 1], path[at_i:]
    ax.plot(before, range(at_i + 1), color=COLORS["mlm"], lw=2, zorder=2)
    ax.plot(after, range(at_i, 5), color=COLORS["exlm"], lw=2, zorder=2)
ax.scatter(*np.meshgrid(range(8), range(5)), s=14, color="0.55", zorder=3)
ax.scatter([at_u], [at_i], s=110, color=COLORS["mask"], edgecolor="black", zorder=4)
note = {"fontsize": 14, "ha": "center", "va": "center"}
ax.text(1.4, 1.85, "α", color=COLORS["mlm"], **note)
ax.text(6.6, 2.4, "β", color=COLORS["exlm"], **note)
ax.set_xticks(range(8), big_labels)
ax.set_yticks(range(5), big_targets)
ax.invert_yaxis()
ax.grid(False)
_ = ax.set(xlabel="state u", ylabel="target i")

# %% [markdown]
# So $\alpha_{i,u}\,\beta_{i,u}$ is the sum over all paths in which state $u$ says
# target $i$. Every path visits *some* state at target $i$, so each row of the
# product must add up to the likelihood:
#
# $$
# \sum_u \alpha_{i,u}\,\beta_{i,u} = f_{M,L}.
# $$ (eq-naive-rows)

# %%
print(*(f"{row:.6f}" for row in (alpha_ML * beta_ML).sum(dim=1).tolist()))

# %% mystnb={"figure": {"caption": "The product of forward and backward sums, as a share of the likelihood in percent. Empty fields are exactly zero. Every row sums to 100.", "name": "fig-naive-posterior"}} tags=["hide-input"]
share_ML = alpha_ML * beta_ML / alpha_ML[-1, -1]
fig, ax = plt.subplots(figsize=(4.9, 2.7))
shown_ML = 100 * share_ML.where(share_ML > 0, torch.nan).numpy()
draw_heatmap(ax, shown_ML, big_labels, big_targets, "α β / f, %", ".1f", "Blues")
ax.grid(False)
_ = ax.set(xlabel="state u", ylabel="target i")

# %% [markdown]
# $\alpha$ is zero to the left, where a path cannot be at its $i$-th stop yet, and
# $\beta$ is zero to the right, from where it cannot reach the end in time. What
# remains of the product is a band, the *cone* ({numref}`fig-naive-posterior`):
# counting from zero, target $i$ can only be said by states $i$ to $i + W - 1$
# with $W = L - M + 1$, here 4. Two neighbouring targets share $W(W+1)/2$ edges in
# it, and no other edge can be on a path.

# %% mystnb={"code_prompt_show": "Checked: αβ is the sum over the paths through each point; nothing lies outside the cone"} tags=["hide-cell", "check"]
assert len(through) == 3 * 2
for i, u in product(range(5), range(8)):
    by_hand = sum(score(p, big_P_ML, big_E_LL) for p in big_paths if p[i] == u)
    assert math.isclose(alpha_ML[i, u] * beta_ML[i, u], by_hand, rel_tol=1e-12)
torch.testing.assert_close(
    (alpha_ML * beta_ML).sum(dim=1), alpha_ML[-1, -1].expand(5)
)
for i, cone in enumerate(([0], range(1, 5), range(2, 6), range(3, 7), [7])):
    assert share_ML[i].nonzero().flatten().tolist() == list(cone)
steps = {step for path in big_paths for step in pairwise(list(enumerate(path)))}
assert sum(v[0] == 1 for v, _ in steps) == 4 * 5 // 2

# %% [markdown]
# ## Gradients are posteriors
#
# Divided by the likelihood, the sums become probabilities:
#
# $$
# \begin{aligned}
# \gamma_{i,u} &= \frac{\alpha_{i,u}\,\beta_{i,u}}{f_{M,L}},\\
# \xi_{v,u} &= \sum_{i=2}^{M}
# \frac{\alpha_{i-1,v}\,\mathbf{E}_{v,u}\,\mathbf{P}_u(y_i)\,\beta_{i,u}}{f_{M,L}}.
# \end{aligned}
# $$ (eq-naive-posterior)
#
# $\gamma_{i,u}$ is a *posterior*: given the words, the probability that state $u$
# said target $i$. $\xi_{v,u}$ is the expected number of times a path takes the
# edge from $v$ to $u$.


# %%
def gamma_and_xi(P_ML, E_LL):
    """Posteriors of states (M, L) and of edges (L, L)."""
    alpha_ML, beta_ML = forward(P_ML, E_LL), backward(P_ML, E_LL)
    entered_ML = P_ML * beta_ML
    xi_LL = E_LL * (alpha_ML[:-1].T @ entered_ML[1:])
    return alpha_ML * beta_ML / alpha_ML[-1, -1], xi_LL / alpha_ML[-1, -1]


gamma_ML, xi_LL = gamma_and_xi(big_P_ML, big_E_LL)
print(f"a row of gamma sums to {gamma_ML[2].sum():.4f}, xi to {xi_LL.sum():.4f}")

# %% [markdown]
# This is right: each target is said by one state, and each path has
# $M - 1 = 4$ edges. Now increase the logarithm of one emission a little. The log
# scores of the paths that use it grow by as much, and $\log f_{M,L}$ by their
# share of that, which is the posterior. The same holds for an edge:
#
# $$
# \begin{aligned}
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{P}_u(y_i)} &= \gamma_{i,u},\\
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{E}_{v,u}} &= \xi_{v,u}.
# \end{aligned}
# $$ (eq-naive-gradient)
#
# Autograd, which knows nothing of $\beta$, agrees:

# %%
_, grad_ML, grad_LL = value_and_gradients(big_P_ML, big_E_LL, guarded)
print(f"states, largest difference: {(grad_ML - gamma_ML).abs().max():.3f}")
print(f"edges,  largest difference: {(grad_LL - xi_LL).abs().max():.3f}")

# %% [markdown]
# One step further back are the logits $\mathbf{z}_u$, which a softmax turns into
# $\mathbf{P}_u$. A masked language model pulls each state towards one word: the
# gradient of its loss is $\mathbf{P}_u - \mathbf{e}_y$, where $\mathbf{e}_y$ is 1
# at the right word and 0 elsewhere. ExLM does the same, weighted by the
# posterior:
#
# $$
# -\frac{\partial \log f_{M,L}}{\partial\,\mathbf{z}_u}
# = \sum_i \gamma_{i,u}\,(\mathbf{P}_u - \mathbf{e}_{y_i}).
# $$ (eq-naive-logits)
#
# So training finds out which words each state was responsible for, and trains the
# state on them in proportion. A state on no likely path learns almost nothing.
# This is how the states of a mask can come to specialise, and why a state that has
# lost its share is slow to win it back ({ref}`chap-symmetric-start`).
#
# Appendix I.2 prints two formulas for these gradients, and as printed both differ
# from {eq}`eq-naive-gradient`. They divide by the whole last row of $\alpha$
# instead of $f_{M,L}$. With that corrected, the one for $\mathbf{P}$ is the
# gradient with respect to $\log \mathbf{P}$, and the one for $\mathbf{E}$ lacks
# the emission $\mathbf{P}_u(y_i)$ and the sum over $i$. This is about the printed
# page only; the released code computes the right gradients. Exercise 3 derives
# the second one.

# %% mystnb={"code_prompt_show": "Checked: gamma and xi equal shares of listed paths and autograd; the logits follow; I.2 as printed is off by more than 5 %"} tags=["hide-cell", "check"]
share_of = {p: score(p, big_P_ML, big_E_LL) / alpha_ML[-1, -1] for p in big_paths}
for v, u in combinations(range(8), 2):
    by_hand = sum(s for p, s in share_of.items() if (v, u) in pairwise(p))
    assert math.isclose(xi_LL[v, u], by_hand, rel_tol=1e-9, abs_tol=1e-12)
torch.testing.assert_close(gamma_ML.sum(dim=1), torch.ones(5))
torch.testing.assert_close(grad_ML, gamma_ML)
torch.testing.assert_close(grad_LL, xi_LL)

rng = torch.Generator().manual_seed(7)
target_M = torch.tensor([0, 5, 3, 5, 1])
logits_LV = torch.randn(8, 12, generator=rng).requires_grad_()
log_P_ML = logits_LV.log_softmax(dim=1)[:, target_M].T
loss = -log_likelihood(log_P_ML, big_E_LL.log(), guarded)
(grad_LV,) = torch.autograd.grad(loss, logits_LV)
by_logits_ML, _ = gamma_and_xi(log_P_ML.detach().exp(), big_E_LL)
pull_MLV = logits_LV.detach().softmax(dim=1) - torch.eye(12)[target_M][:, None]
torch.testing.assert_close(
    grad_LV, (by_logits_ML[:, :, None] * pull_MLV).sum(dim=0)
)

leaves = [t.clone().requires_grad_() for t in (big_P_ML, big_E_LL)]
true_ML, true_LL = torch.autograd.grad(likelihood(*leaves).log(), leaves)
last_row = alpha_ML[-1].sum()
printed_ML = alpha_ML * beta_ML / last_row
# Generous: whichever i fits an edge best.
printed_iLL = alpha_ML[:-1, :, None] * beta_ML[1:, None] / last_row
is_forward_LL = torch.ones(8, 8).triu(1) > 0
off_iLL = (printed_iLL - true_LL).abs().where(is_forward_LL, 0.0)
assert last_row > 1.05 * alpha_ML[-1, -1]
assert (printed_ML - true_ML).abs().max() > 0.05 * true_ML.abs().max()
assert off_iLL.amin(dim=0).max() > 0.05 * true_LL.where(is_forward_LL, 0.0).max()

# %% [markdown]
# ## Ask the graph
#
# Back to the first graph. The explorer below runs your forward and backward loops
# in the page. While no word is fixed, it shows how often each state speaks, and
# what each mask says on average. Click *great* below Mask 1 and *glad* below Mask
# 2: now the path through 1.1 and 2.1 has almost four fifths of the probability.
# Then try *awful* and *sorry*, or click a state to make all paths go through it.

# %% tags=["hide-input"]
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import Scene, conditionals

silent = [[0.0] * len(words)]  # the boundaries
scene = Scene(
    text=["this was", "and I am", ""],
    labels=labels,
    owners=columns,
    words=words,
    offered=[[0, 1, 2, 3], [2, 3, 0, 1]],
    token_LW=[*silent, *P_LV.tolist(), *silent],
    transition_LL=E_LL.tolist(),
)
explorer(scene)

# %% mystnb={"code_prompt_show": "Checked: the explorer's numbers are your posteriors, for all 16 fillings"} tags=["hide-cell", "check"]
for first, second in product(words, words):
    found = conditionals(scene, {1: first, 2: second})
    state_ML, edge_LL = gamma_and_xi(emissions(f"{first} {second}"), E_LL)
    np.testing.assert_allclose(found.state_SL, state_ML[1:-1], atol=1e-9)
    np.testing.assert_allclose(found.edge_LL, edge_LL, atol=1e-9)
assert 0.7 < conditionals(scene, {1: "great", 2: "glad"}).edge_LL[1, 3] < 0.8

# %% [markdown]
# ## The best path
#
# Sometimes we want one alignment and not the sum: to show it, or to decode.
# Replace the sum in {eq}`eq-naive-recursion` by a maximum. The largest of several
# products with a common factor is the factor times the largest of the rest, so
# the derivation holds as it stands. If we remember which $v$ won, we can walk
# back from the end. This is the Viterbi algorithm.


# %%
def best_path(P_ML, E_LL):
    """The path with the highest score, and that score."""
    M, L = P_ML.shape
    best_ML = torch.zeros(M, L)
    best_ML[0, 0] = P_ML[0, 0]
    came_from_ML = torch.zeros(M, L, dtype=torch.int64)
    for i in range(1, M):
        for u in range(1, L):
            arriving_v = best_ML[i - 1, :u] * E_LL[:u, u]
            came_from_ML[i, u] = arriving_v.argmax()
            best_ML[i, u] = arriving_v.max() * P_ML[i, u]
    path = [L - 1]
    for i in range(M - 1, 0, -1):
        path.append(int(came_from_ML[i, path[-1]]))
    return tuple(path[::-1]), best_ML[-1, -1].item()


path, p = best_path(P_ML, E_LL)
print(" → ".join(labels[u] for u in path), f"with score {p:.4f}")

# %% [markdown]
# To *fill* the masks, let every state say its likeliest word and take the best
# path. Is that the most probable filling? For the first graph we can ask all 16:

# %%
fillings = {
    f"{first} {second}": (
        likelihood(emissions(f"{first} {second}"), E_LL).item(),
        best_path(emissions(f"{first} {second}"), E_LL)[1],
    )
    for first, second in product(words, words)
}
table = pd.DataFrame(fillings, ["all paths", "best path"]).T
table.sort_values("all paths", ascending=False).head(4).round(4)

# %% [markdown]
# The best of all paths says *great glad*. The most probable filling is *awful
# sorry*: its best path scores less, but its paths add up to more. *Great glad*
# comes fourth. So Viterbi gives the best alignment, but only a guess at the best
# words. {ref}`chap-reading` shows that the two nearly agree once the states of a
# trained model have specialised.

# %% mystnb={"code_prompt_show": "Checked: on 48 random graphs it finds the best of all listed paths"} tags=["hide-cell", "check"]
for graph in graphs[1:]:
    path, p = best_path(*graph)
    scored = [(score(a, *graph), a) for a in all_paths(*graph[0].shape)]
    best_p, best_a = max(scored, default=(0.0, ()))
    assert math.isclose(p, best_p, rel_tol=1e-12)
    assert p == 0 or path == best_a
ranking = sorted(fillings, key=fillings.get, reverse=True)
assert ranking.index("awful sorry") == 0 and ranking.index("great glad") == 3
assert max(fillings, key=lambda name: fillings[name][1]) == "great glad"

# %% [markdown]
# ## What the package makes of it
#
# The package takes batches of logarithms and has one function for each of yours.
# Its backend `naive` is your three loops, `vectorized` a row at a time, and
# `enumerate` the list of paths. The numbers agree:

# %%
from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi


def batch_of_one(P_ML, E_LL):
    """What the package takes: logarithms, and the numbers of targets and states."""
    M, L = P_ML.shape
    return P_ML.log()[None], E_LL.log()[None], torch.tensor([M]), torch.tensor([L])


print(f"here       {forward(big_P_ML, big_E_LL)[-1, -1].log():.8f}")
for backend in ("enumerate", "naive", "vectorized"):
    log_f_B = dag_log_likelihood(*batch_of_one(big_P_ML, big_E_LL), backend=backend)
    print(f"{backend:10} {log_f_B[0]:.8f}")

# %% mystnb={"code_prompt_show": "Checked: likelihoods, posteriors and best paths agree on 49 graphs, with and without a path"} tags=["hide-cell", "check"]
for graph, backend in product(graphs, ("enumerate", "naive", "vectorized")):
    log_f = log_likelihood(*(t.log() for t in graph))
    batch = batch_of_one(*graph)
    torch.testing.assert_close(
        dag_log_likelihood(*batch, backend=backend)[0], log_f
    )
    found = posteriors(*batch, backend=backend)
    path_BM, log_score_B = viterbi(*batch, backend=backend)
    path, p = best_path(*graph)
    assert math.isclose(log_score_B.exp(), p, rel_tol=1e-10)
    if p == 0:
        assert all((gradient == 0).all() for gradient in found)
        continue
    assert tuple(path_BM[0].tolist()) == path
    gamma, xi = gamma_and_xi(*graph)
    torch.testing.assert_close(found.state_BML[0], gamma)
    torch.testing.assert_close(found.edge_BLL[0], xi)

# %% [markdown]
# **Related work.** Multiplication distributes over addition; that is all the
# recursion uses, and speech recognition has used it in the same way since CTC
# {cite}`graves2006ctc`. The graph, its loss and the first GPU kernels for it come
# from the DA-Transformer {cite}`huang2022datransformer`, a translation model,
# whose algorithm the authors of ExLM adopted (Appendix I).
# {cite}`shao2022viterbi` decode it with Viterbi. {ref}`chap-dag-vectorized` makes
# the loops fast, and {ref}`the next chapter <chap-training>` computes
# $\mathbf{E}$ and trains a model with this loss.
#
# ## Exercises
#
# **1. One state per mask.** With $k = 1$ there are as many states as targets.
# Write the loss $-\log f_{M,L}$ without a loop over paths or states. What does it
# contain that the loss of a masked language model does not?

# %% tags=["hide-input"]
one_state = [random_graph(5, 5, seed) for seed in range(3)]


def judge_one_state(loss_of):
    """Is it -log f for M = L?"""
    for graph in one_state:
        logs = [t.log() for t in graph]
        if (yours := loss_of(*logs)) is None:
            return "not yet"
        want = -log_likelihood(*logs).item()
        if not math.isclose(yours, want, rel_tol=1e-9):
            return f"{float(yours):.4f} should be {want:.4f}"
    return "right"


# %%
def one_state_loss(log_P_ML, log_E_LL):
    """-log f[M, L] for M = L."""
    ...  # your turn


judge_one_state(one_state_loss)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]


def one_state_loss(log_P_ML, log_E_LL):
    """There is one path: the loss of an MLM, and the price of the path's edges."""
    return -log_P_ML.diagonal().sum() - log_E_LL.diagonal(1).sum()


assert judge_one_state(one_state_loss) == "right"

# %% [markdown]
# **2. Draw a path.** Given the words, a path can be drawn from the posterior step
# by step. With what probabilities does it go from state $v$ at target $i$
# (counted from 0) to each of the states at target $i + 1$? Use `big_P_ML`,
# `big_E_LL` and `beta_ML`. The judge multiplies your steps along each of the 20
# paths and compares the product with the path's share of the likelihood.

# %% tags=["hide-input"]


def judge_next_state(next_state):
    """Do the steps multiply to the share of every path?"""
    if next_state(0, 0) is None:
        return "not yet"
    for path, share in share_of.items():
        steps = [next_state(i, path[i])[path[i + 1]] for i in range(4)]
        if not math.isclose(math.prod(steps), share, rel_tol=1e-9):
            return f"path {path}: {math.prod(steps):.4f} should be {share:.4f}"
    return "right"


# %%
def next_state(i, v):
    """Probabilities of the states at target i + 1, (L,)."""
    ...  # your turn


judge_next_state(next_state)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]


def next_state(i, v):
    """By its recursion, beta[i, v] is the sum of these terms."""
    return big_E_LL[v] * big_P_ML[i + 1] * beta_ML[i + 1] / beta_ML[i, v]


assert judge_next_state(next_state) == "right"
assert math.isclose(next_state(1, 2).sum(), 1, rel_tol=1e-12)

# %% [markdown]
# **3. The gradient of an edge.** Appendix I.2 prints
#
# $$
# \nabla \mathbf{E}_{v,u} = \frac{\alpha_{i-1,v}\,\beta_{i,u}}{\sum_{u'}
# \alpha_{M,u'}}.
# $$
#
# Write the derivative of $\log f_{M,L}$ with respect to $\mathbf{E}_{v,u}$
# itself, not its logarithm. The judge asks autograd.

# %% tags=["hide-input"]


def judge_edge_gradient(gradient):
    """Is it the derivative of log f by E, on all forward edges?"""
    if (yours_LL := gradient(alpha_ML, beta_ML, big_P_ML)) is None:
        return "not yet"
    off = (yours_LL - true_LL).abs().where(is_forward_LL, 0.0).max()
    return "right" if off < 1e-9 else f"off by up to {off:.3f}"


# %%
def edge_gradient(alpha_ML, beta_ML, P_ML):
    """d log f[M, L] / d E[v, u], (L, L)."""
    ...  # your turn


judge_edge_gradient(edge_gradient)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]


def edge_gradient(alpha_ML, beta_ML, P_ML):
    """The posterior of the edge without its own factor E."""
    return alpha_ML[:-1].T @ (P_ML * beta_ML)[1:] / alpha_ML[-1, -1]


assert judge_edge_gradient(edge_gradient) == "right"
