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
# After states expansion a sentence has more states than hidden words. Which state
# should say which word? The training data leave that open. ExLM
# {cite}`zheng2025exlm` therefore asks how probable it is that *any* path through
# the states says the right words. That is a sum over all paths, and there are far
# too many to list.
#
# The first chapter computed it in six lines. Here you write it so plainly that you
# can follow every number: path by path, then as three loops. Three more loops, run
# backwards, give each state's contribution to the sum, which turns out to be the
# gradient that the model learns from.
#
# **It takes** half an hour and a few seconds of a CPU; nothing is trained.
# **Paper:** §4.3 and Appendices H, I.1 and I.2.

# %% tags=["remove-cell", "nbval-skip"]
# Colab opens this notebook alone: fetch the book around it and install its package.
import importlib.util
import os
import subprocess
import sys

url = "https://github.com/exlm-book/exlm-book"
package = importlib.util.find_spec("exlm_mini")
if package is None:
    if not os.path.isdir("exlm-book"):
        subprocess.run(
            ["git", "clone", "--depth", "1", url, "exlm-book"], check=True
        )
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip, "exlm-book[all]"], check=True)
    os.chdir("exlm-book/chapters")
    # This kernel started before the install.
    sys.path.insert(0, os.path.abspath(".."))
elif not os.path.exists("drawings.py"):
    # A copy of this notebook reads the records of the book its package is from.
    chapters = os.path.abspath(package.origin + "/../../chapters")
    if not os.path.isdir(chapters):
        sys.exit(f"a chapter needs the book around it: open it in a clone of {url}")
    os.chdir(chapters)
    sys.path.insert(0, chapters)

# %% tags=["remove-input"]
import matplotlib.pyplot as plt
import numpy as np
import torch
from drawings import draw_dag, draw_heatmap
from widgets import show_table

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
_ = torch.set_num_threads(1)

# %%
import math
from itertools import combinations, pairwise, product

import pandas as pd
import torch
from exlm_so_far import NO_EDGE, log_forward

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## One alignment is one path
#
# Take the sentence *this was [MASK] and I am [MASK]*, in which *great* and *glad*
# are hidden. Each mask gets $k = 2$ states; [BOS] and [EOS] are one state each,
# as in Appendix P. That makes $L = 6$ states. The *targets* are the tokens to be
# said, [BOS] and [EOS] included, so there are $M = 4$.
#
# We make up the numbers of the graph. Each inner state $u$ has a distribution
# $\mathbf{P}_u$ over words, and row $v$ of the transition matrix $\mathbf{E}$ says
# where a path goes from state $v$, always forward. As in the paper, and unlike in
# {ref}`chap-one-notebook`, an edge may also join two states of one mask.

# %%
labels = ["BOS", "1.1", "1.2", "2.1", "2.2", "EOS"]
words = ["great", "awful", "glad", "sorry"]
P_4V = torch.tensor(  # one row for each inner state
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

# %% mystnb={"figure": {"caption": "Two masks with two states each, between [BOS] and [EOS]. Each state shows its likeliest word. The wider an edge, the more probable it is; probabilities are written from 0.1 up. Edges may join two states of one mask (1.1 to 1.2) or skip a mask (BOS to 2.1).", "name": "fig-naive-dag"}, "image": {"alt": "A graph of six states in four columns. The edges of the likeliest path lead from BOS to state 1.1, from there to 2.1, and from 2.1 to EOS."}} tags=["remove-input"]
columns = [0, 1, 1, 2, 2, 3]
kinds = ["boundary", "mask", "mask", "second", "second", "boundary"]
names = list(labels)
for u, (p, best) in enumerate(zip(*P_4V.max(dim=1), strict=True), start=1):
    names[u] = f"{labels[u]}\n{words[best]} {p:.1f}"
fig, ax = plt.subplots(figsize=(3.6, 2.6))
draw_dag(ax, E_LL.numpy(), columns, names, kinds)

# %% [markdown]
# Once the targets $y_i$ are known, all we need from $\mathbf{P}_u$ is the
# *emission* $\mathbf{P}_u(y_i)$, the probability that state $u$ says target $i$.
# The boundaries are free: [BOS] says itself with probability 1 and nothing else,
# and so does [EOS].
#
# A *path* $\mathbf{A}$ gives each target a state $a_i$. It starts in the first
# state, ends in the last, and only moves forward, so to choose a path is to choose
# which two of the four inner states speak. Its score is the probability of taking
# this path *and* saying the right words:
#
# $$
# P(\mathbf{Y}, \mathbf{A}) = \prod_{i=1}^{M} \mathbf{P}_{a_i}(y_i)
# \prod_{i=2}^{M} \mathbf{E}_{a_{i-1}, a_i}.
# $$ (eq-naive-score)


# %%
def emissions(filling):
    """P_u(y_i) for two words between [BOS] and [EOS], (M, L)."""
    P_ML = torch.zeros(4, 6)
    P_ML[0, 0] = P_ML[-1, -1] = 1.0
    for i, word in enumerate(filling.split(), start=1):
        P_ML[i, 1:5] = P_4V[:, words.index(word)]
    return P_ML


def score(path, P_ML, E_LL):
    """P(Y, A) of one path: its emissions times its edges."""
    emitted = math.prod(P_ML[i, u].item() for i, u in enumerate(path))
    return emitted * math.prod(E_LL[v, u].item() for v, u in pairwise(path))


def all_paths(M, L):
    """All paths of M states from state 0 to state L - 1, for M > 1."""
    return [(0, *inner, L - 1) for inner in combinations(range(1, L - 1), M - 2)]


P_ML = emissions("great glad")
M, L = P_ML.shape
scores = {path: score(path, P_ML, E_LL) for path in all_paths(M, L)}
table = pd.DataFrame({"score": scores.values()})
table.index = [" → ".join(labels[u] for u in path) for path in scores]
table["share"] = table["score"] / table["score"].sum()
table.round(4)

# %% [markdown]
# Almost four fifths of the sum comes from one path. In the first and the last row
# both words are said by states of the same mask; that is allowed, but has little
# weight here. The training objective of §4.3 needs only the sum of the scores, so
# nobody has to know which path is the right one:
#
# $$
# \mathcal{L}_{\text{SA}}
# = -\log \sum_{\mathbf{A} \in \Gamma} P(\mathbf{Y}, \mathbf{A} \mid \mathbf{X}'),
# $$ (eq-naive-loss)
#
# where $\mathbf{X}'$ is the expanded input and $\Gamma$ the set of all paths.
#
# A path chooses $M - 2$ of the $L - 2$ inner states, so there are
# $\binom{L-2}{M-2}$ paths. Appendix I.4 has an example with 77 masks in 512 tokens
# and $k = 4$: that makes $10^{74}$ paths. At a billion paths a second, a computer
# running since the Big Bang would have listed $10^{26}$ of them.
#
# ## Three nested loops compute the same sum
#
# There are many paths, but few edges to build them from: 15 in our graph. So the
# paths have much in common. Cut all paths off after target $i$ and look at those
# that are then in state $u$. Call the sum of their scores $f_{i,u}$.
#
# The last edge of each path came from some state $v < u$. This edge and the word
# said after it contribute the factors $\mathbf{E}_{v,u}$ and $\mathbf{P}_u(y_i)$,
# whatever came before. So they can be pulled out of the sum, and what is left for
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
# A complete path is in state $L$ at target $M$, so the sum over all paths, the
# *likelihood*, is $f_{M,L}$. The second line is Appendix H. The first is Appendix
# P, by which every path starts from [BOS] and ends in [EOS]. (The paper counts from
# 1, code from 0.)


# %% tags=["save"]
def forward(P_ML, E_LL):
    """f[i, u] of Appendix H, for every target i and state u."""
    M, L = P_ML.shape
    f_ML = P_ML.new_zeros(M, L)
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
# corner at the lower right. Follow one entry, *glad* said by state 2.1: two
# partial paths end there, one through 1.1 with $0.225 \cdot 0.50 \cdot 0.5$ and
# one through 1.2 with $0.020 \cdot 0.45 \cdot 0.5$, together $0.061$.
#
# Drag a slider to change a number of the graph; the other edges from the same state
# share what remains. The entries of $f$ that change are framed, and the bars show
# the share of each path.

# %% tags=["remove-input"]
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
show_table(shown)

# %% [markdown]
# The loops visit $(M-1)\,L(L-1)/2$ triples $(i, u, v)$. For the 77 masks above that
# is 3.7 million. Appendix H counts this work, $\mathcal{O}(M L^2)$; §4.3 says
# $\mathcal{O}(M)$ because it counts sequential steps only.
#
# ```{admonition} Why logarithms, and why −1e9 instead of −∞
# :class: dropdown
# The likelihood is a product of many small numbers: early in training every word
# has a probability near 1/50,265, and ten masks are already too much for float32,
# 69 for float64. The zero that results makes the loss infinite, and code that
# replaces infinite losses by 0, to keep running, silently skips the sentence. So
# `log_forward` adds logarithms:
#
# $$
# \log f_{i,u}
# = \log \sum_{v<u} \exp\big(\log f_{i-1,v} + \log \mathbf{E}_{v,u}\big)
# + \log \mathbf{P}_u(y_i).
# $$
#
# Many states cannot be reached at a given target, and the logarithm of their $f$
# is $-\infty$. The value of the sum does not suffer, but its gradients do: the
# derivative of $\log \sum \exp$ with respect to a term $t$ is $e^{t-s}$, where
# $s$ is the result, and for an unreachable state this is $\exp(-\infty +
# \infty)$, not a number. One optimizer step would turn the whole model into
# `nan`, although the loss looks healthy. Masking the result afterwards does not
# help, since the backward pass multiplies by 0, and 0 times `nan` is `nan`.
# `NO_EDGE`, a large negative number, avoids it; the package keeps $-\infty$, puts
# a harmless number in *before* the function, and $-\infty$ back afterwards.
# ```


# %% mystnb={"code_prompt_show": "Checked: on 49 random graphs every entry of f is a sum over partial paths, and log_forward has its logarithm; with -inf it has nan gradients"} tags=["hide-cell", "check"]
def random_graph(M, L, seed, density=1.0):
    """Random emissions; forward edges, each kept with probability `density`."""
    rng = torch.Generator().manual_seed(seed)
    P_ML = torch.rand(M, L, generator=rng)
    P_ML[0] = torch.eye(L)[0]
    E_LL = torch.rand(L, L, generator=rng).triu(1)
    return P_ML, E_LL * (torch.rand(L, L, generator=rng) < density)


shapes = [(2, 7), (3, 6), (5, 8), (6, 6), (6, 9), (7, 5)]
graphs = [(P_ML, E_LL)] + [
    random_graph(*shape, seed, density)
    for shape, seed, density in product(shapes, range(4), (1, 0.5))
]
for P_graph, E_graph in graphs:
    f_graph = forward(P_graph, E_graph)
    for i, u in product(range(1, len(P_graph)), range(1, len(E_graph))):
        # Partial paths to (i, u) are the paths of a smaller graph that ends there.
        by_hand = sum(score(p, P_graph, E_graph) for p in all_paths(i + 1, u + 1))
        found = f"f[{i}, {u}] is {f_graph[i, u]:.6g}, path by path {by_hand:.6g}"
        assert math.isclose(f_graph[i, u], by_hand, rel_tol=1e-12), found
    logs = (x.log().clamp(min=NO_EDGE)[None] for x in (P_graph, E_graph))
    torch.testing.assert_close(log_forward(*logs)[0].exp(), f_graph)
assert len(graphs) == 49 and math.comb(308, 77) > 5e73
assert round(78 * math.comb(310, 2), -5) == 3_700_000
tiny = 1 / 50_265
assert torch.tensor(tiny**10).float() == 0 == tiny**69
assert torch.tensor(tiny**9).float() > 0 < tiny**68
log_E_LL = E_LL.log().requires_grad_()
log_f = log_forward(P_ML.log()[None], log_E_LL[None])[0, -1, -1]
assert log_f.isfinite() and torch.autograd.grad(log_f, log_E_LL)[0].isnan().any()

# %% [markdown]
# ## Forward and backward
#
# $f_{i,u}$ covers what happened until state $u$ spoke. For what happens after that,
# Appendix I.1 defines *backward sums* $\beta_{i,u}$ over all ways to the end from
# state $u$, which has just said $y_i$. The forward sums, our $f$, are called
# $\alpha$ there.
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


# %% tags=["save"]
def backward(P_ML, E_LL):
    """beta[i, u] of Appendix I.1, without the emission of state u itself."""
    M, L = P_ML.shape
    beta_ML = P_ML.new_zeros(M, L)
    beta_ML[-1, -1] = 1.0
    for i in range(M - 2, -1, -1):
        for u in range(L):
            for v in range(u + 1, L):
                beta_ML[i, u] += E_LL[u, v] * P_ML[i + 1, v] * beta_ML[i + 1, v]
    return beta_ML


# %% [markdown]
# A larger graph shows more: three masks, $L = 8$ states, $M = 5$ targets and random
# numbers (`random_graph` is in the folded cell above).

# %%
big_P_ML, big_E_LL = random_graph(5, 8, seed=6)
big_E_LL = big_E_LL / big_E_LL.sum(dim=1, keepdim=True).clamp(min=1e-9)

# %% [markdown]
# {numref}`fig-naive-trellis` unrolls this graph, with a row for each target; a path
# is a line from corner to corner. Look at the marked point, where state 2.2 says
# the third target. Three partial paths lead there, two lead on, and each of the
# three can be continued by either of the two: six paths.

# %% mystnb={"figure": {"caption": "All 20 paths, unrolled. At the marked point alpha sums the blue ways in and beta the red ways out.", "name": "fig-naive-trellis"}, "image": {"alt": "A grid of eight states and five targets. Three blue lines come from the upper left to the marked point, two red ones lead on to the lower right."}} tags=["remove-input"]
big_labels = ["BOS", "1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "EOS"]
big_targets = ["BOS", "y₂", "y₃", "y₄", "EOS"]
big_paths = all_paths(5, 8)
fig, ax = plt.subplots(figsize=(3.6, 2.6))
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
# product adds up to the likelihood, $\sum_u \alpha_{i,u}\,\beta_{i,u} = f_{M,L}$.
# Only a band of entries, the *cone*, is not zero ({numref}`fig-naive-posterior`): a
# path has already left the states to its left, and from those to its right it
# cannot say all remaining targets.

# %% mystnb={"figure": {"caption": "The product of forward and backward sums, as a share of the likelihood in percent. Empty fields are exactly zero. Every row sums to 100.", "name": "fig-naive-posterior"}, "image": {"alt": "A table of five targets and eight states with a diagonal band of percentages; every row sums to 100."}} tags=["remove-input"]
alpha_ML, beta_ML = forward(big_P_ML, big_E_LL), backward(big_P_ML, big_E_LL)
share_ML = alpha_ML * beta_ML / alpha_ML[-1, -1]
fig, ax = plt.subplots(figsize=(3.6, 2.5))
shown_ML = 100 * share_ML.where(share_ML > 0, torch.nan).numpy()
draw_heatmap(ax, shown_ML, big_labels, big_targets, "α β / f, %", ".0f", "Blues")
ax.tick_params(labelsize=8)
ax.grid(False)
_ = ax.set(xlabel="state u", ylabel="target i")

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
# said target $i$. $\xi_{v,u}$ is the share of the paths, by probability, that take
# the edge from $v$ to $u$.


# %% tags=["save"]
def gamma_and_xi(P_ML, E_LL):
    """Posteriors of states (M, L) and of edges (L, L)."""
    alpha_ML, beta_ML = forward(P_ML, E_LL), backward(P_ML, E_LL)
    entered_ML = P_ML * beta_ML
    xi_LL = E_LL * (alpha_ML[:-1].T @ entered_ML[1:])
    return alpha_ML * beta_ML / alpha_ML[-1, -1], xi_LL / alpha_ML[-1, -1]


# %% [markdown]
# Now increase the logarithm of one emission a little. The log scores of the paths
# that use it grow by the same amount, and $\log f_{M,L}$ by that amount times their
# share, the posterior. The same holds for an edge:
#
# $$
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{P}_u(y_i)}
# = \gamma_{i,u},\qquad
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{E}_{v,u}} = \xi_{v,u}.
# $$ (eq-naive-gradient)
#
# Autograd, which knows nothing of $\beta$, agrees:

# %%
gamma_ML, xi_LL = gamma_and_xi(big_P_ML, big_E_LL)
leaves = [t.log().clamp(min=NO_EDGE).requires_grad_() for t in (big_P_ML, big_E_LL)]
log_f = log_forward(*(leaf[None] for leaf in leaves))[0, -1, -1]
grad_ML, grad_LL = torch.autograd.grad(log_f, leaves)
print("third target, by loops   ", *(f"{x:.4f}" for x in gamma_ML[2].tolist()))
print("third target, by autograd", *(f"{x:.4f}" for x in grad_ML[2].tolist()))

# %% [markdown]
# One step further back are the logits $\mathbf{z}_u$, which a softmax turns into
# $\mathbf{P}_u$; the gradient of $\log \mathbf{P}_u(y)$ with respect to them is
# $\mathbf{e}_y - \mathbf{P}_u$, where $\mathbf{e}_y$ is 1 at word $y$ and 0
# elsewhere. A masked language model pulls each state towards one word: the gradient
# of its loss is $\mathbf{P}_u - \mathbf{e}_y$. ExLM does the same, weighted by the
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
# ```{admonition} As printed in the paper
# :class: dropdown
# The two formulas that Appendix I.2 prints for these gradients differ from
# {eq}`eq-naive-gradient`. They divide by the sum of the last row of $\alpha$
# instead of $f_{M,L}$. With that corrected, the one for $\mathbf{P}$ is the
# gradient with respect to $\log \mathbf{P}$, and the one for $\mathbf{E}$ lacks the
# emission $\mathbf{P}_u(y_i)$ and the sum over $i$. The released code computes the
# right gradients.
# ```

# %% mystnb={"code_prompt_show": "Checked: αβ, gamma and xi equal shares of listed paths and autograd; the logits follow; I.2 as printed is off by more than 5%"} tags=["hide-cell", "check"]
assert len(through) == 3 * 2
for i, u in product(range(5), range(8)):
    by_hand = sum(score(p, big_P_ML, big_E_LL) for p in big_paths if p[i] == u)
    product_iu = alpha_ML[i, u] * beta_ML[i, u]
    found = f"alpha times beta at [{i}, {u}] is {product_iu:.6g}, not {by_hand:.6g}"
    assert math.isclose(product_iu, by_hand, rel_tol=1e-12), found
for i, cone in enumerate(([0], range(1, 5), range(2, 6), range(3, 7), [7])):
    assert share_ML[i].nonzero().flatten().tolist() == list(cone)
share_of = {p: score(p, big_P_ML, big_E_LL) / alpha_ML[-1, -1] for p in big_paths}
for v, u in combinations(range(8), 2):
    by_hand = sum(s for p, s in share_of.items() if (v, u) in pairwise(p))
    found = f"xi[{v}, {u}] is {xi_LL[v, u]:.6g}, path by path {by_hand:.6g}"
    assert math.isclose(xi_LL[v, u], by_hand, rel_tol=1e-9, abs_tol=1e-12), found
torch.testing.assert_close(gamma_ML.sum(dim=1), torch.ones(5))
torch.testing.assert_close(grad_ML, gamma_ML)
torch.testing.assert_close(grad_LL, xi_LL)

rng = torch.Generator().manual_seed(7)
target_M = torch.tensor([0, 5, 3, 5, 1])
logits_LV = torch.randn(8, 12, generator=rng).requires_grad_()
log_P_ML = logits_LV.log_softmax(dim=1)[:, target_M].T
is_start_L = torch.arange(8) == 0
log_P_ML = torch.cat([log_P_ML[:1].where(is_start_L, NO_EDGE), log_P_ML[1:]])
log_E_LL = big_E_LL.log().clamp(min=NO_EDGE)
loss = -log_forward(log_P_ML[None], log_E_LL[None])[0, -1, -1]
(grad_LV,) = torch.autograd.grad(loss, logits_LV)
by_logits_ML, _ = gamma_and_xi(log_P_ML.detach().exp(), big_E_LL)
pull_MLV = logits_LV.detach().softmax(dim=1) - torch.eye(12)[target_M][:, None]
torch.testing.assert_close(
    grad_LV, (by_logits_ML[:, :, None] * pull_MLV).sum(dim=0)
)

leaves = [t.clone().requires_grad_() for t in (big_P_ML, big_E_LL)]
rows = [leaves[0][0]]
for P_L in leaves[0][1:]:
    rows.append(rows[-1] @ leaves[1] * P_L)
true_ML, true_LL = torch.autograd.grad(rows[-1][-1].log(), leaves)
last_row = alpha_ML[-1].sum()
printed_ML = alpha_ML * beta_ML / last_row
# To be generous, take for each edge the i that fits best.
printed_iLL = alpha_ML[:-1, :, None] * beta_ML[1:, None] / last_row
is_forward_LL = torch.ones(8, 8).triu(1) > 0
off_iLL = (printed_iLL - true_LL).abs().where(is_forward_LL, 0.0)
assert last_row > 1.05 * alpha_ML[-1, -1]
assert (printed_ML - true_ML).abs().max() > 0.05 * true_ML.abs().max()
assert off_iLL.amin(dim=0).max() > 0.05 * true_LL.where(is_forward_LL, 0.0).max()

# %% [markdown]
# ## Ask the graph
#
# The explorer below runs your forward and backward loops on the first graph, over
# all paths that say two words. While no word is fixed, it shows how often each
# state speaks on such paths, and how likely each word is as the first (Mask 1) and
# as the second (Mask 2). Click *great* below Mask 1 and *glad* below Mask 2: now
# the path through 1.1 and 2.1 has almost four fifths of the probability. Then try
# *awful* and *sorry*, or click a state to make all paths go through it.

# %% tags=["remove-input"]
from exlm_mini.reading.explorer import Explorer
from exlm_mini.reading.scene import Scene, conditionals

silent = [[0.0] * len(words)]  # [BOS] and [EOS] say no word
scene = Scene(
    text=["this was", "and I am", ""],
    labels=labels,
    owners=columns,
    words=words,
    offered=[[0, 1, 2, 3], [2, 3, 0, 1]],
    token_LW=[*silent, *P_4V.tolist(), *silent],
    transition_LL=E_LL.tolist(),
)
Explorer(scene)

# %% [markdown]
# ## The best path
#
# Sometimes we want one alignment and not the sum, to show it or to decode. Replace
# the sum in {eq}`eq-naive-recursion` by a maximum. The largest of several products
# with a common factor is the factor times the largest of the rest, so the
# derivation holds as it stands. If we remember which $v$ won, we can walk back from
# the end. This is the Viterbi algorithm.


# %% tags=["save"]
def best_path(P_ML, E_LL):
    """The path with the highest score, and that score."""
    M, L = P_ML.shape
    best_ML = P_ML.new_zeros(M, L)
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


# %% [markdown]
# To *fill* the masks, let every state say its likeliest word and take the best
# path. Is that the most probable filling? For the first graph we can score all 16:

# %%
fillings = {
    f"{first} {second}": (
        forward(emissions(f"{first} {second}"), E_LL)[-1, -1].item(),
        best_path(emissions(f"{first} {second}"), E_LL)[1],
    )
    for first, second in product(words, words)
}
table = pd.DataFrame(fillings, ["all paths", "best path"]).T
table.sort_values("all paths", ascending=False).head(4).round(4)

# %% [markdown]
# The best of all paths says *great glad*, but the most probable filling is *awful
# sorry*: its best path scores less, yet its paths add up to more. *Great glad*
# comes fourth. So Viterbi gives the best alignment, but only a guess at the best
# words.

# %% mystnb={"code_prompt_show": "Checked: best paths, likelihoods and posteriors equal lists of all paths and the package's, on 49 graphs; the explorer has your posteriors"} tags=["hide-cell", "check"]
from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi


def batch_of_one(P_ML, E_LL):
    """Arguments for the package: logarithms, numbers of targets and of states."""
    M, L = P_ML.shape
    return P_ML.log()[None], E_LL.log()[None], torch.tensor([M]), torch.tensor([L])


for graph in graphs:
    path, p = best_path(*graph)
    path = tuple(path)
    scored = [(score(a, *graph), a) for a in all_paths(*graph[0].shape)]
    best_p, best_a = max(scored, default=(0.0, ()))
    found = f"best_path: {path} with {p:.6g}; best of all: {best_a}, {best_p:.6g}"
    assert math.isclose(p, best_p, rel_tol=1e-12) and (p == 0 or path == best_a), (
        found
    )
    batch = batch_of_one(*graph)
    for backend in ("enumerate", "naive", "vectorized"):
        log_f_B = dag_log_likelihood(*batch, backend=backend)
        torch.testing.assert_close(log_f_B[0], forward(*graph)[-1, -1].log())
        path_BM, log_score_B = viterbi(*batch, backend=backend)
        assert math.isclose(log_score_B.exp(), p, rel_tol=1e-10)
        found = posteriors(*batch, backend=backend)
        if p > 0:
            assert tuple(path_BM[0].tolist()) == path
            gamma, xi = gamma_and_xi(*graph)
            torch.testing.assert_close(found.state_BML[0], gamma)
            torch.testing.assert_close(found.edge_BLL[0], xi)
ranking = sorted(fillings, key=fillings.get, reverse=True)
assert ranking.index("awful sorry") == 0 and ranking.index("great glad") == 3
assert max(fillings, key=lambda name: fillings[name][1]) == "great glad"
for first, second in product(words, words):
    of_page = conditionals(scene, {1: first, 2: second})
    state_ML, edge_LL = gamma_and_xi(emissions(f"{first} {second}"), E_LL)
    np.testing.assert_allclose(of_page.state_SL, state_ML[1:-1], atol=1e-9)
    np.testing.assert_allclose(of_page.edge_LL, edge_LL, atol=1e-9)

# %% [markdown]
# The package judges these functions: it takes batches of logarithms, and its
# backend `naive` is your three loops. {ref}`chap-dag-vectorized` makes them fast.
#
# **Related work.** All that the recursion uses is that multiplication distributes
# over addition. Speech recognition has summed over paths in this way since the
# hidden Markov models of the 1970s; CTC {cite}`graves2006ctc` made the sum the loss
# of a neural network. {ref}`chap-training` tells where the graph comes from. The
# best path of such graphs has been used in translation {cite}`shao2022viterbi`.
#
# ## Exercise: a sparse graph
#
# Remove the two edges inside a mask, 1.1 → 1.2 and 2.1 → 2.2, and divide each row
# of $\mathbf{E}$ by its sum, so that it is a distribution again. **Predict:** how
# many paths are left, and does the likelihood of *great glad* rise or fall? Change
# `E_LL`, run `forward`, then open the solution.

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
sparse_LL = E_LL.clone()
sparse_LL[1, 2] = sparse_LL[3, 4] = 0
sparse_LL[:-1] /= sparse_LL[:-1].sum(dim=1, keepdim=True)
sparse_scores = {path: score(path, P_ML, sparse_LL) for path in all_paths(M, L)}
assert sum(p > 0 for p in sparse_scores.values()) == 4
# It rises: probability that stayed inside a mask now goes on to the next one.
ratio = forward(P_ML, sparse_LL)[-1, -1] / f_ML[-1, -1]
assert 1.5 < ratio < 2
assert math.isclose(forward(P_ML, sparse_LL)[-1, -1], sum(sparse_scores.values()))
