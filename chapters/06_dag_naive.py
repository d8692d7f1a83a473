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
# ExLM has more states than words to predict. Which state should emit which word?
# Nobody says. So training asks for *any* way that works, and adds all of them up.
# This chapter is about that sum: what is in it, why it cannot be taken term by
# term, and the three loops that take it all the same.
#
# **You will** draw a small graph with all its paths, count paths until counting
# is hopeless, derive the recursion of the paper and check every number of it
# against enumeration, fall into two numerical traps and climb out, read gradients
# as probabilities, and compare two formulas of the paper with what autograd says.
#
# **You will know after** what $f_{i,u}$, $\alpha$ and $\beta$ stand for, what
# training does to a single state, and how many multiplications all of this takes.
#
# **It needs** a few seconds on a CPU and no GPU. Nothing is trained here. It
# covers §4.3 of the paper {cite}`zheng2025exlm`, its Appendix H, and Appendices
# I.1, I.2 and the serial part of I.3. {ref}`chap-expansion` says where the states
# come from, {ref}`chap-training` where their numbers come from.

# %% tags=["remove-cell", "nbval-skip"]
# Colab opens this notebook alone: fetch the book around it and install its package.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("exlm_mini") is None:
    url = "https://github.com/exlm-book/exlm-book"
    subprocess.run(["git", "clone", "--depth", "1", url, "exlm-book"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e"]
    subprocess.run([*pip, "exlm-book[text,chem,train,tasks]"], check=True)
    os.chdir("exlm-book/chapters")
    # This kernel started before the install.
    sys.path.insert(0, os.path.abspath(".."))

# %%
import itertools
import math
from itertools import combinations, pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch

from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi
from exlm_mini.alignment.enumeration import path_score, paths
from exlm_mini.config import SpecialIds
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.transition import edges
from exlm_mini.plotting import COLORS, draw_dag, draw_heatmap, use_book_style
from exlm_mini.training.live import chapter_scale

use_book_style()
torch.set_default_dtype(torch.float64)
scale = chapter_scale()
str(scale)

# %% [markdown]
# Names end in the shape of the tensor: `L` states, `M` targets (the tokens to be
# spelled, [BOS] and [EOS] included), `V` words. The paper counts from 1, code from
# 0. All numbers are float64, unless a section says otherwise, and stay on the CPU.
#
# ## One alignment is one path
#
# **Question.** A sentence has two masks, *this was [MASK] and I am [MASK]*, and
# the words behind them are *great* and *glad*. Each mask has $k = 2$ states.
# In how many ways can the graph spell the two words?
#
# We take one [BOS] and one [EOS] state, as in Appendix P, which makes $L = 6$
# states and $M = 4$ targets. The numbers of the graph are made up. Every state has
# a distribution $\mathbf{P}_u$ over words; row $v$ of the transition matrix
# $\mathbf{E}$ says where the walk goes from state $v$, always forward.

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
assert torch.allclose(P_LV.sum(dim=1), torch.ones(4))
assert torch.allclose(E_LL.sum(dim=1)[:-1], torch.ones(5))


# %% [markdown]
# The *emission* $\mathbf{P}_u(y_i)$ is the probability that state $u$ says the
# $i$-th target. It is all we need of the words once the targets are known. The
# boundaries are not scored here: [BOS] and [EOS] have a one at every state. The two
# boundary states have a one for every word; it will not matter, since no path is
# there when a word is due.
# %%
def emission_of(filling):
    """P_u(y_i) for two words between [BOS] and [EOS]; the boundaries are free."""
    emission_ML = torch.ones(4, 6)
    for i, word in enumerate(filling.split(), start=1):
        emission_ML[i, 1:5] = P_LV[:, words.index(word)]
    return emission_ML


P_ML = emission_of("great glad")
M, L = P_ML.shape
P_ML.tolist()

# %% [markdown]
# **Figure.** {numref}`fig-naive-dag` shows the graph. The thickness of an arrow is
# the probability of the step. An edge may join two states of one mask (1.1 to 1.2),
# and it may skip a mask (BOS to 2.1).

# %% mystnb={"figure": {"caption": "Two masks with two states each, between [BOS] and [EOS]. Each state shows its likeliest word; the numbers on the edges are the transition probabilities, written from 0.1 up.", "name": "fig-naive-dag"}} tags=["hide-input"]
columns = [0, 1, 1, 2, 2, 3]
kinds = ["boundary", "mask", "mask", "second", "second", "boundary"]
names = list(labels)
for u, (p, best) in enumerate(zip(*P_LV.max(dim=1), strict=True), start=1):
    names[u] = f"{labels[u]}\n{words[best]} {p:.1f}"
fig, ax = plt.subplots(figsize=(7.2, 3))
draw_dag(ax, E_LL.numpy(), columns, names, kinds)

# %% [markdown]
# A *path* $\mathbf{A}$ gives each target one state. It starts in the first state,
# ends in the last, and moves forward: state numbers grow. So a path is an
# alignment of targets to states, and choosing it means choosing which two of the
# four inner states speak. Its score is the probability of walking this way *and*
# saying the right words:
#
# $$
# P(\mathbf{Y}, \mathbf{A}) = \prod_{i=1}^{M} \mathbf{P}_{a_i}(y_i)\;
# \prod_{i=2}^{M} \mathbf{E}_{a_{i-1},\, a_i},
# $$ (eq-naive-score)
#
# with $a_i$ the state of target $y_i$.


# %%
def score(path, P_ML, E_LL):
    """P(Y, A) of one path: its emissions times its edges."""
    product = math.prod(P_ML[i, u].item() for i, u in enumerate(path))
    return product * math.prod(E_LL[v, u].item() for v, u in pairwise(path))


all_paths = [(0, *inner, L - 1) for inner in combinations(range(1, L - 1), M - 2)]
scores = {path: score(path, P_ML, E_LL) for path in all_paths}
for path, p in scores.items():
    print(f"{' → '.join(labels[u] for u in path):24} {p:.6f}")
print(f"{'sum':24} {sum(scores.values()):.6f}")

# %% [markdown]
# **Figure.** The six paths of the graph, with the share of the sum that each one
# has. The four on the right use one state of each mask. The two on the left have
# both words said by states of one mask: allowed, but of little weight here.


# %% tags=["hide-input"]
def draw_path(ax, path, title):
    """One path through the graph, the other states pale."""
    at = [(0, 0), (1, 0.5), (1, -0.5), (2, 0.5), (2, -0.5), (3, 0)]
    ax.plot(*zip(*(at[u] for u in path), strict=True), color=COLORS["exlm"], lw=2)
    for u, ((x, y), kind) in enumerate(zip(at, kinds, strict=True)):
        is_on = u in path
        box = {"boxstyle": "round,pad=0.3", "edgecolor": "white"}
        box["facecolor"] = COLORS[kind] if is_on else "0.94"
        ink = "black" if is_on else "0.6"
        ax.text(
            x,
            y,
            labels[u],
            bbox=box,
            color=ink,
            fontsize=8,
            ha="center",
            va="center",
        )
    ax.set(xlim=(-0.5, 3.5), ylim=(-0.95, 0.95))
    ax.set_title(title, fontsize=9)
    ax.axis("off")


likelihood = sum(scores.values())
inside = [path for path in all_paths if columns[path[1]] == columns[path[2]]]
across = [path for path in all_paths if path not in inside]
fig, axes = plt.subplots(2, 3, figsize=(7.6, 3.4))
for column, pair in enumerate((inside, across[:2], across[2:])):
    for row, path in enumerate(pair):
        draw_path(axes[row, column], path, f"{scores[path] / likelihood:.1%}")

# %% [markdown]
# **Check.** The package enumerates the same paths, gives them the same scores, and
# its backend `enumerate` returns the logarithm of their sum.


# %%
def arguments(P_ML, E_LL):
    """What the package's alignment functions take: a batch of one, logarithms."""
    M, L = P_ML.shape
    counts = torch.tensor([M]), torch.tensor([L])
    return P_ML.log().unsqueeze(0), E_LL.log().unsqueeze(0), *counts


assert list(paths(M, L)) == all_paths
for path, p in scores.items():
    log_p = path_score(P_ML.log(), E_LL.log(), path).item()
    assert math.isclose(math.exp(log_p), p, rel_tol=1e-12)
log_f = dag_log_likelihood(*arguments(P_ML, E_LL), backend="enumerate").item()
assert math.isclose(math.exp(log_f), likelihood, rel_tol=1e-12)
assert 0.7 < scores[0, 1, 3, 5] / likelihood < 0.8
assert sum(scores[path] for path in inside) / likelihood < 0.05

# %% [markdown]
# **Takeaway.** Nobody has to know which state should say which word. The training
# objective of §4.3 is the sum over all paths,
#
# $$
# \mathcal{L}_{\text{SA}} = -\log P(\mathbf{Y} \mid \mathbf{X}')
# = -\log \sum_{\mathbf{A} \in \Gamma} P(\mathbf{Y}, \mathbf{A} \mid \mathbf{X}'),
# $$ (eq-naive-loss)
#
# where $\mathbf{X}'$ is the expanded input and $\Gamma$ the set of all paths. (The
# package divides it by the number of targets, so that sentences of different
# length compare.)
#
# ## How many paths there are
#
# **Question.** Six paths are easily added. How many are there for a real sentence?
#
# If all forward edges exist, a path is a choice of $M - 2$ inner states out of
# $L - 2$; the order is given. That makes $\binom{L-2}{M-2}$ paths. In the sparse
# graph of Appendix Q.3 no edge joins two states of one mask. Then each of the
# $M - 2 = m$ masks must speak exactly once, and there are $k^m$ paths.
#
# **Check.** We build the graphs of rows with $m$ masks by the package, for both
# treatments of the boundaries, and count: entry $(v, u)$ of the $n$-th power of the
# 0/1 matrix of edges is the number of walks of $n$ steps from $v$ to $u$.


# %%
def edges_of_row(m, k, boundary, sparse):
    """Which edges exist for a row of m masked tokens, and nothing else."""
    special = SpecialIds()
    ids_BN = torch.tensor([[special.bos, *[special.unk] * m, special.eos]])
    is_masked_BN = ids_BN == special.unk
    masked_BN = ids_BN.masked_fill(is_masked_BN, special.mask)
    _, graph = expand_masks(masked_BN, is_masked_BN, ids_BN, k, boundary, special)
    return edges(graph, sparse)[0]


def num_paths(is_edge_LL, num_targets):
    """Walks from the first state to the last with a stop per target."""
    walks_LL = torch.linalg.matrix_power(is_edge_LL.double(), num_targets - 1)
    return walks_LL[0, -1].item()


# %%
for m, k in itertools.product((1, 2, 3, 5), (1, 2, 4)):
    for boundary, num_states in (("paper", k * m + 2), ("official", k * (m + 2))):
        full_LL = edges_of_row(m, k, boundary, sparse=False)
        sparse_LL = edges_of_row(m, k, boundary, sparse=True)
        assert full_LL.shape == (num_states, num_states)
        assert num_paths(full_LL, m + 2) == math.comb(num_states - 2, m)
        assert num_paths(sparse_LL, m + 2) == k**m
assert num_paths(edges_of_row(2, 2, "paper", sparse=False), 4) == len(all_paths)
assert math.comb(8, 5) == len(list(paths(7, 10)))

# %% [markdown]
# Appendix I.4 has an example: 77 masks in a row of 512 tokens, $k = 4$. How long
# would it take a machine that scores a thousand million paths a second?

# %%
count = math.comb(4 * 77, 77)
age_of_the_universe = 13.8e9 * 365.25 * 24 * 3600  # seconds
since_the_start = 1e9 * age_of_the_universe  # paths such a machine has scored
assert count > 1e73 and since_the_start < 1e27
print(f"{count:.1e} paths, {4**77:.1e} in the sparse graph")
print(f"{since_the_start:.1e} paths scored since the start of the universe")

# %% [markdown]
# **Figure.** In {numref}`fig-naive-count` the number of paths is on a logarithmic
# scale: straight lines are exponential growth, as Appendix H says. The grey curve
# at the bottom is where this chapter is going.

# %% mystnb={"figure": {"caption": "Paths of a row against its number of masks. Grey, solid: multiplications of the recursion for k = 4.", "name": "fig-naive-count"}} tags=["hide-input"]
m_axis = range(1, 78)
fig, ax = plt.subplots(figsize=(6.6, 3.4))


def label(text, y, shift=-3):
    """Words at the right of the axes."""
    style = {"textcoords": "offset points", "fontsize": 9, "annotation_clip": False}
    ax.annotate(text, (77, float(y)), (6, shift), **style)


lines = {
    "k = 4, all edges": ([math.comb(4 * m, m) for m in m_axis], "-", -3),
    "k = 4, sparse": ([4**m for m in m_axis], "--", 2),
    "k = 2, all edges": ([math.comb(2 * m, m) for m in m_axis], ":", -9),
}
for name, (numbers, style, shift) in lines.items():
    ax.semilogy(m_axis, [float(n) for n in numbers], style, color=COLORS["exlm"])
    label(name, numbers[-1], shift)
products = [(m + 1) * (4 * m + 1) * (2 * m + 2) for m in m_axis]
ax.semilogy(m_axis, products, color="0.5")
label("the recursion", products[-1])
ax.axhline(since_the_start, color="0.3", lw=1, ls="-.")
label("10⁹ per second\nsince the Big Bang", since_the_start, -10)
_ = ax.set(xlabel="masks in the row, m", ylabel="paths (or multiplications)")
_ = ax.set(xlim=(0, 77), ylim=(1, 1e77))

# %% [markdown]
# **Takeaway.** The sum has a meaning for every row, and can be written out for
# hardly any. Enumeration stays useful as a judge on tiny graphs.
#
# ## The recursion
#
# **Question.** The paths are many, but they are made of few edges: 15 in our
# graph. What do different paths share?
#
# Take all *prefixes* of paths: partial paths that have spelled the first $i$
# targets and now stand in state $u$. Call the sum of their scores $f_{i,u}$. Each
# of them came from some state $v < u$ in its last step, and that step contributes
# the same two factors $\mathbf{E}_{v,u}$ and $\mathbf{P}_u(y_i)$ whatever
# happened before. So they can be pulled out of the sum, and what remains for each
# $v$ is the sum over all prefixes that end in $v$, which is $f_{i-1,v}$:
#
# $$
# f_{1,u} = \begin{cases} \mathbf{P}_u(y_1) & u = 1\\ 0 & u > 1 \end{cases}
# \qquad
# f_{i,u} = \sum_{v<u} f_{i-1,v}\, \mathbf{E}_{v,u}\, \mathbf{P}_u(y_i).
# $$ (eq-naive-recursion)
#
# A whole path ends in state $L$ with target $M$, so the sum over all paths is
# $f_{M,L}$. The second equation is Appendix H. The first is ours to add: the
# appendix does not say where a path starts; we let it start in the first state, as
# the released code does. In code, {eq}`eq-naive-recursion` is three loops:


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


f_ML = forward(P_ML, E_LL)
assert math.isclose(f_ML[-1, -1], likelihood, rel_tol=1e-12)

# %% [markdown]
# Here is one entry step by step: *glad* (the third target) said by state 2.1. Two
# prefixes end there, one through 1.1 and one through 1.2.

# %%
i, u = 2, 3
for v in range(u):
    factors = f_ML[i - 1, v], E_LL[v, u], P_ML[i, u]
    written = " · ".join(f"{x:.3f}" for x in factors)
    print(f"from {labels[v]:4} {written} = {math.prod(factors):.5f}")
print(f"sum {f_ML[i, u]:.5f}")

# %% [markdown]
# **Check.** Not only the corner: *every* entry of the table is a sum over prefixes.
# The prefixes that end in state $u$ at target $i$ are the paths of the smaller
# graph that stops there, so the enumeration of the package finds them too.

# %%
for i, u in itertools.product(range(M), range(L)):
    prefixes = list(paths(i + 1, u + 1))
    by_hand = sum(score(prefix, P_ML, E_LL) for prefix in prefixes)
    assert math.isclose(f_ML[i, u], by_hand, rel_tol=1e-12), (i, u)

# %% [markdown]
# **Figure.** {numref}`fig-naive-table` is the whole table, filled from top to
# bottom. Each row needs only the row above it. Empty fields are zero: after $i$
# steps forward a path cannot stand to the left of state $i$. The last row has more
# than its corner: prefixes that have spelled everything and stand elsewhere. They
# are no paths. Keep an eye on them, they come back below.

# %% mystnb={"figure": {"caption": "f for the targets BOS, great, glad, EOS. The likelihood is the corner at the lower right. Colours end at 0.3.", "name": "fig-naive-table"}} tags=["hide-input"]
targets = ["BOS", "great", "glad", "EOS"]
fig, ax = plt.subplots(figsize=(6.4, 2.9))
shown_ML = f_ML.where(f_ML > 0, torch.nan).numpy()
draw_heatmap(ax, shown_ML, labels, targets, "f", ".4f", "Blues", (0, 0.3))
ax.grid(False)
_ = ax.set(xlabel="state u", ylabel="target i")

# %% [markdown]
# **Check.** One graph is an anecdote, so here are more, of many shapes, with random
# numbers and with edges taken out; some have no path at all. The loops agree with
# the package's `naive`, which is the same three loops in logarithms, and with
# enumeration. Nothing needs to be normalised for that.


# %%
def random_graph(M, L, seed, density=1.0):
    """Random emissions and forward edges; a share of the edges exists."""
    rng = torch.Generator().manual_seed(seed)
    P_ML = torch.rand(M, L, generator=rng)
    E_LL = torch.rand(L, L, generator=rng).triu(1)
    return P_ML, E_LL * (torch.rand(L, L, generator=rng) < density)


num_without_path = 0
shapes = [(1, 1), (2, 2), (2, 7), (3, 6), (5, 8), (6, 6), (6, 9), (7, 5)]
seeds = range(scale.pick(4, 40))
for (rows, states), seed, density in itertools.product(shapes, seeds, (1, 0.5)):
    graph = random_graph(rows, states, seed, density)
    log_f = forward(*graph)[-1, -1].log()
    num_without_path += int(log_f == -torch.inf)
    for backend in ("naive", "enumerate"):
        package = dag_log_likelihood(*arguments(*graph), backend=backend)[0]
        torch.testing.assert_close(log_f, package, rtol=1e-10, atol=1e-10)
assert num_without_path > len(seeds)  # seven targets never fit into five states

# %% [markdown]
# **Takeaway.** Multiplication distributes over addition; that is the whole trick. A
# sum over exponentially many paths becomes $M$ rows of $L$ entries. It is the same
# idea as in CTC {cite}`graves2006ctc` and in the DA-Transformer
# {cite}`huang2022datransformer`, whose algorithm the authors adopted (Appendix I).
#
# ## Why logarithms
#
# **Question.** The loops are right. Why does no code use them as they stand?
#
# A likelihood is a product of many small numbers. At the start of training the
# vocabulary head knows nothing: every word has a probability near
# $1 / 50{,}265$, the size of the vocabulary of RoBERTa, and the transitions are
# close to even. Let us build such rows, with $k = 4$. To go faster, the two inner
# loops become one line, which is equal to them.


# %%
def forward_by_rows(P_ML, E_LL):
    """The same recursion; the loops over u and v are one PyTorch line."""
    rows = [torch.zeros_like(P_ML[0])]
    rows[0][0] = P_ML[0, 0]
    for P_L in P_ML[1:]:
        rows.append((rows[-1].unsqueeze(1) * E_LL).sum(dim=0) * P_L)
    return torch.stack(rows)


torch.testing.assert_close(forward_by_rows(P_ML, E_LL), f_ML)


# %%
def untrained_graph(m, word_probability, k=4):
    """Even transitions, equal emissions; the boundaries are free."""
    P_ML = torch.full((m + 2, k * m + 2), word_probability)
    P_ML[0] = P_ML[-1] = 1.0
    is_edge_LL = torch.ones(k * m + 2, k * m + 2).triu(1)
    return P_ML, is_edge_LL / is_edge_LL.sum(dim=1, keepdim=True).clamp(min=1)


# %% [markdown]
# The smallest positive float32 number is about $1.4 \cdot 10^{-45} = e^{-103}$;
# anything smaller is zero. For float64 the end is at $e^{-745}$.

# %%
reached = {}
for m in (4, 16, 77):
    graph = untrained_graph(m, 1 / 50_265)
    for dtype in (torch.float32, torch.float64):
        f = forward_by_rows(*(t.to(dtype) for t in graph))[-1, -1].item()
        reached[m, dtype] = f
        print(f"{m:2} masks, {str(dtype)[6:]}: f = {f:.1e}")

# %% [markdown]
# **Check.** The zeros are wrong, for every path has a positive score. With 16
# masks float32 fails, with 77 masks float64 does too. Nor is this a matter of the
# first steps alone. Give every word a probability of $e^{-2} = 0.14$, which is
# good, and let the walk cost nothing, on a graph with a single path: float32 still
# returns zero at 77 masks. The loss is then $-\log 0 = \infty$. Code that turns
# such a value into 0 to stay alive skips the sentence without a word.

# %%
assert reached[4, torch.float32] > 0 and reached[16, torch.float64] > 0
assert reached[16, torch.float32] == reached[77, torch.float64] == 0
chain = torch.full((77, 77), math.exp(-2)), torch.ones(76).diag(1)
assert math.isclose(forward_by_rows(*chain)[-1, -1].log(), -154, rel_tol=1e-12)
assert forward_by_rows(*(t.float() for t in chain))[-1, -1] == 0

# %% [markdown]
# In logarithms products become sums, and nothing can get too small:
#
# $$
# \log f_{i,u} = \log \mathbf{P}_u(y_i) + \log \sum_{v<u}
# \exp\big(\log f_{i-1,v} + \log \mathbf{E}_{v,u}\big).
# $$ (eq-naive-log)
#
# The function $\log \sum \exp$ is safe if the largest term is pulled out first;
# then the largest exponential is $e^0 = 1$.


# %%
def log_sum_exp(terms):
    """log of the sum of exp of numbers; -inf stands for log 0."""
    peak = max(terms, default=-math.inf)
    if peak == -math.inf:  # nothing to add: -inf - (-inf) would be nan
        return -math.inf
    return peak + math.log(sum(math.exp(term - peak) for term in terms))


def log_forward(log_P, log_E):
    """log f[i][u]; lists of numbers in, lists of numbers out."""
    L = len(log_E)
    rows = [[log_P[0][0]] + [-math.inf] * (L - 1)]
    for log_P_L in log_P[1:]:
        row = []
        for u in range(L):
            terms = [rows[-1][v] + log_E[v][u] for v in range(u)]
            row.append(log_P_L[u] + log_sum_exp(terms))
        rows.append(row)
    return rows


# %% [markdown]
# **Check.** Where nothing underflows both agree. And at 77 masks we know what must
# come out: all words have one probability $p$, so $\log f = m \log p$ plus the log
# of the sum over the transitions alone, which float64 can still hold.

# %%
log_f = torch.tensor(log_forward(P_ML.log().tolist(), E_LL.log().tolist()))
torch.testing.assert_close(log_f, f_ML.log())

m = 77
P_77, E_77 = untrained_graph(m, 1 / 50_265)
log_f_77 = log_forward(P_77.log().tolist(), E_77.log().tolist())[-1][-1]
log_walk = forward_by_rows(torch.ones_like(P_77), E_77)[-1, -1].log().item()
assert math.isclose(log_f_77, -m * math.log(50_265) + log_walk, rel_tol=1e-10)
package = dag_log_likelihood(*arguments(P_77, E_77), backend="vectorized")
assert math.isclose(log_f_77, package.item(), rel_tol=1e-10)
f"{log_f_77:.0f} nats: words {-m * math.log(50_265):.0f}, edges {log_walk:.0f}"

# %% [markdown]
# The second part is a price that MLM does not pay: an untrained walk rarely makes
# exactly 77 stops among 308 states, and that has to be learned too.
#
# **Check.** The recursion also counts. With every score at one, $f_{M,L}$ is the
# number of paths; in logarithms it counts those of the example of Appendix I.4.

# %%
ones_77 = arguments(torch.ones_like(P_77), (E_77 > 0).double())
log_count = dag_log_likelihood(*ones_77, backend="vectorized").item()
assert math.isclose(log_count, math.log(count), rel_tol=1e-12)
f"e^{log_count:.1f} = {math.exp(log_count):.1e} paths"

# %% [markdown]
# **Takeaway.** Probabilities for the derivation, logarithms for the machine. (There
# is a second cure, rescaling every row. It is faster, and its range has to be
# proved: {ref}`chap-dag-vectorized` does both.)
#
# ## A trap: nothing but minus infinity
#
# **Question.** "Cannot be reached" is $-\infty$ in logarithms, and many entries
# cannot be reached. Does that go well with gradients?
#
# The natural line of PyTorch uses `torch.logsumexp` over the previous states.


# %%
def log_f_last(log_P_ML, log_E_LL, log_sum):
    """log f[M, L] with one log-sum-exp over the previous states per target."""
    is_start_L = torch.arange(log_P_ML.shape[1]) == 0
    row_L = log_P_ML[0].where(is_start_L, -torch.inf)
    for log_P_L in log_P_ML[1:]:
        # The emission goes inside, as in Appendix H: added to the result it would
        # have gradient 1 even where no path leads.
        row_L = log_sum(row_L.unsqueeze(1) + log_E_LL + log_P_L, 0)
    return row_L[-1]


def value_and_gradients(log_sum, P_ML, E_LL):
    leaves = [t.log().requires_grad_() for t in (P_ML, E_LL)]
    log_f = log_f_last(*leaves, log_sum)
    return log_f.detach(), *torch.autograd.grad(log_f, leaves)


log_f, grad_P_ML, grad_E_LL = value_and_gradients(torch.logsumexp, P_ML, E_LL)
assert math.isclose(log_f, math.log(likelihood), rel_tol=1e-12)
assert grad_P_ML.isnan().any() and grad_E_LL.isnan().any()
f"log f = {log_f:.4f}, gradients that are nan: {int(grad_E_LL.isnan().sum())} of 36"

# %% [markdown]
# The value is right and the gradients are `nan`. One optimizer step would turn the
# model into `nan` while the loss looked healthy. The reason fits on a line: the
# derivative of $\log \sum \exp$ by a term is $\exp(\text{term} - \text{result})$,
# and for an unreachable state that is $\exp(-\infty + \infty)$. Masking the result
# afterwards does not help, since the backward pass multiplies by 0, and
# $0 \cdot \text{nan}$ is `nan`:


# %%
def masked_too_late(scores, dim):
    is_dead = (scores == -torch.inf).all(dim)
    return scores.logsumexp(dim).masked_fill(is_dead, -torch.inf)


nothing = torch.full((3,), -torch.inf, requires_grad=True)
assert torch.autograd.grad(nothing.logsumexp(0), nothing)[0].isnan().all()
assert value_and_gradients(masked_too_late, P_ML, E_LL)[2].isnan().any()

# %% [markdown]
# The cure is to put a harmless number *in front* of the function, so that its
# derivative is finite, and $-\infty$ behind it.


# %%
def guarded(scores, dim):
    """logsumexp, with gradient 0 where there is nothing but -inf."""
    is_dead = (scores == -torch.inf).all(dim, keepdim=True)
    total = torch.logsumexp(scores.masked_fill(is_dead, 0.0), dim)
    return total.masked_fill(is_dead.squeeze(dim), -torch.inf)


log_f, grad_P_ML, grad_E_LL = value_and_gradients(guarded, P_ML, E_LL)
found = posteriors(*arguments(P_ML, E_LL), backend="naive")
torch.testing.assert_close(grad_P_ML, found.state_BML[0])
torch.testing.assert_close(grad_E_LL, found.edge_BLL[0])

# %% [markdown]
# **Check.** A row without any path is the extreme case. Cut the edges into [EOS]:
# the likelihood is zero, the log-likelihood is $-\infty$, and all gradients are
# zero, here and in the package. What to do with such a row is for the caller to
# say; the training objective of the package refuses it by default and names the
# sentence.

# %%
cut_LL = E_LL.clone()
cut_LL[:, -1] = 0
log_f, *gradients = value_and_gradients(guarded, P_ML, cut_LL)
assert log_f == -torch.inf and all((g == 0).all() for g in gradients)
for backend in ("enumerate", "naive", "vectorized"):
    package = dag_log_likelihood(*arguments(P_ML, cut_LL), backend=backend)
    assert package.item() == -torch.inf
    found = posteriors(*arguments(P_ML, cut_LL), backend=backend)
    assert all((gradient == 0).all() for gradient in found)

# %% [markdown]
# **Takeaway.** A right loss does not mean right gradients. Test both, on graphs
# with unreachable states and on graphs without a path.
#
# ## Forward and backward
#
# **Question.** $f_{i,u}$ sums up what happened *before* state $u$ spoke. What about
# the part that comes after?
#
# Appendix I.1 calls the forward sums $\alpha$ (they are our $f$) and adds backward
# sums $\beta$. $\beta_{i,u}$ belongs to all the ways to get from state $u$, which
# has just said $y_i$, to the end:
#
# $$
# \beta_{M,u} = \begin{cases} 1 & u = L\\ 0 & u < L \end{cases}
# \qquad
# \beta_{i,u} = \sum_{v>u} \mathbf{E}_{u,v}\, \mathbf{P}_v(y_{i+1})\, \beta_{i+1,v}.
# $$ (eq-naive-beta)
#
# Mind who owns which factor. $\alpha_{i,u}$ includes the emission of state $u$
# itself, $\beta_{i,u}$ does not. So in the product $\alpha_{i,u}\,\beta_{i,u}$
# every factor of a path occurs exactly once.


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
# From here on the graph is a little larger, with one more mask and random numbers:
# $L = 8$ states, $M = 5$ targets, 20 paths.

# %%
first_E_LL = E_LL
P_ML, E_LL = random_graph(5, 8, seed=6)
E_LL = E_LL / E_LL.sum(dim=1, keepdim=True).clamp(min=1e-9)
M, L = P_ML.shape
labels = ["BOS", "1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "EOS"]
alpha_ML, beta_ML = forward(P_ML, E_LL), backward(P_ML, E_LL)
all_paths = list(paths(M, L))
# A counts paths.
score_A = torch.tensor([score(path, P_ML, E_LL) for path in all_paths])
likelihood = score_A.sum()
len(all_paths)

# %% [markdown]
# **Figure.** {numref}`fig-naive-trellis` unrolls the graph: one row per target, one
# column per state, and a path is a line from corner to corner. Look at one point:
# state 2.2 says the third target. Three prefixes lead there (blue), two suffixes
# lead on (red), and any of the blue fits any of the red: six paths.

# %% mystnb={"figure": {"caption": "All 20 paths, unrolled. Through the marked point: alpha sums the blue ways in, beta the red ways out.", "name": "fig-naive-trellis"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6.4, 3.3))
at_i, at_u = 2, 4
for path in all_paths:
    ax.plot(path, range(M), color="0.85", lw=1, zorder=1)
through = [path for path in all_paths if path[at_i] == at_u]
for path in through:
    before, after = path[: at_i + 1], path[at_i:]
    ax.plot(before, range(at_i + 1), color=COLORS["mlm"], lw=2, zorder=2)
    ax.plot(after, range(at_i, M), color=COLORS["exlm"], lw=2, zorder=2)
ax.scatter(*np.meshgrid(range(L), range(M)), s=14, color="0.55", zorder=3)
ax.scatter([at_u], [at_i], s=110, color=COLORS["mask"], edgecolor="black", zorder=4)
note = {"fontsize": 12, "ha": "center", "va": "center"}
ax.text(1.55, 1.75, "α", color=COLORS["mlm"], **note)
ax.text(6.55, 2.5, "β", color=COLORS["exlm"], **note)
ax.set_xticks(range(L), labels)
ax.set_yticks(range(M), ["BOS", "y₂", "y₃", "y₄", "EOS"])
ax.invert_yaxis()
ax.grid(False)
_ = ax.set(xlabel="state u", ylabel="target i")

# %% [markdown]
# **Check.** $\alpha_{i,u}\,\beta_{i,u}$ is the sum over all paths that let state
# $u$ say target $i$. We hold every entry against enumeration. And since every path
# visits *some* state at target $i$, each row adds up to the same number:
#
# $$
# \sum_u \alpha_{i,u}\,\beta_{i,u} = f_{M,L} \qquad\text{for every } i.
# $$ (eq-naive-rows)

# %%
assert len(through) == 3 * 2
for i, u in itertools.product(range(M), range(L)):
    is_through_A = torch.tensor([path[i] == u for path in all_paths])
    by_hand = score_A[is_through_A].sum()
    torch.testing.assert_close(alpha_ML[i, u] * beta_ML[i, u], by_hand)
row_sum_M = (alpha_ML * beta_ML).sum(dim=1)
torch.testing.assert_close(row_sum_M, likelihood.expand(M))
[f"{z:.6f}" for z in row_sum_M.tolist()]

# %% [markdown]
# **Figure.** {numref}`fig-naive-alpha-beta` shows the three tables. $\alpha$ is
# zero to the left, where a path cannot be yet; $\beta$ is zero to the right, where
# it can no longer get to the end in time. What is left of the product is a band,
# the *cone*: counting from zero, target $i$ can only be said by states $i$ to $i +
# L - M$. The middle rows of the cone have width $L - M + 1 = 4$.

# %% mystnb={"figure": {"caption": "Forward sums, backward sums, and their product divided by the likelihood. Empty fields are exactly zero. Colours end at the largest number below 1.", "name": "fig-naive-alpha-beta"}} tags=["hide-input"]
fig, axes = plt.subplots(3, 1, figsize=(6.6, 7.2), sharex=True)
rows = ["BOS", "y₂", "y₃", "y₄", "EOS"]
share_ML = alpha_ML * beta_ML / likelihood
tables = {"α": alpha_ML, "β": beta_ML, "α β / f": share_ML}
for ax, (name, table_ML) in zip(axes, tables.items(), strict=True):
    shown_ML = table_ML.where(table_ML > 0, torch.nan).numpy()
    ends = (0, shown_ML[shown_ML < 1 - 1e-9].max())
    draw_heatmap(ax, shown_ML, labels, rows, name, ".2g", "Blues", ends)
    ax.grid(False)
    _ = ax.set(ylabel="target i")
_ = axes[-1].set(xlabel="state u")

# %%
for i in range(M):
    own = range(i, i + L - M + 1)
    cone = [0] if i == 0 else [L - 1] if i == M - 1 else list(own)
    assert share_ML[i].nonzero().flatten().tolist() == cone

# %% [markdown]
# **Takeaway.** $\alpha$ looks back, $\beta$ looks forward, and their product says
# how much of the likelihood passes through one point.
#
# ## Gradients are posteriors
#
# **Question.** What does training do to a single state? Divide by the likelihood,
# and the product becomes a probability:
#
# $$
# \begin{aligned}
# \gamma_{i,u} &= \frac{\alpha_{i,u}\,\beta_{i,u}}{f_{M,L}}
# = P(\text{state } u \text{ says } y_i \mid \mathbf{Y}),\\
# \xi_{v,u} &= \sum_{i=2}^{M}
# \frac{\alpha_{i-1,v}\,\mathbf{E}_{v,u}\,\mathbf{P}_u(y_i)\,\beta_{i,u}}{f_{M,L}}.
# \end{aligned}
# $$ (eq-naive-posterior)
#
# $\gamma$ is a *posterior*: of all the ways to spell these words, which share uses
# this state for this word? $\xi_{v,u}$ is the expected number of times a path takes
# the edge from $v$ to $u$.


# %%
def edge_terms(alpha_ML, beta_ML, P_ML, E_LL):
    """alpha[i-1, v] E[v, u] P_u(y_i) beta[i, u] for every i >= 1, v and u."""
    enter_iL = P_ML[1:] * beta_ML[1:]  # one row per step i
    return alpha_ML[:-1].unsqueeze(2) * E_LL * enter_iL.unsqueeze(1)


gamma_ML = alpha_ML * beta_ML / likelihood
xi_LL = edge_terms(alpha_ML, beta_ML, P_ML, E_LL).sum(dim=0) / likelihood

# %% [markdown]
# **Check.** First by enumeration, where a posterior is a share of paths. Each
# target is said by exactly one state, so each row of $\gamma$ sums to 1; each path
# has $M - 1$ edges, so $\xi$ sums to $M - 1 = 4$.

# %%
share_A = score_A / likelihood
for v, u in combinations(range(L), 2):
    uses_A = torch.tensor([(v, u) in pairwise(path) for path in all_paths])
    torch.testing.assert_close(xi_LL[v, u], share_A[uses_A].sum())
torch.testing.assert_close(gamma_ML.sum(dim=1), torch.ones(M))
torch.testing.assert_close(xi_LL.sum(), torch.tensor(float(M - 1)))

# %% [markdown]
# **Check.** Now the surprise: these numbers are the gradients. Increase the
# logarithm of one emission by a little, and $\log f_{M,L}$ grows by the share of
# the paths that use it. The same holds for the logarithm of an edge:
#
# $$
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{P}_u(y_i)} = \gamma_{i,u},
# \qquad
# \frac{\partial \log f_{M,L}}{\partial \log \mathbf{E}_{v,u}} = \xi_{v,u}.
# $$ (eq-naive-gradient)
#
# Autograd, which knows nothing of $\beta$, agrees. So do the posteriors of the
# package, which are computed in just this way.

# %%
_, grad_P_ML, grad_E_LL = value_and_gradients(guarded, P_ML, E_LL)
torch.testing.assert_close(grad_P_ML, gamma_ML)
torch.testing.assert_close(grad_E_LL, xi_LL)
for backend in ("enumerate", "naive", "vectorized"):
    found = posteriors(*arguments(P_ML, E_LL), backend=backend)
    torch.testing.assert_close(found.state_BML[0], gamma_ML)
    torch.testing.assert_close(found.edge_BLL[0], xi_LL)

# %% [markdown]
# **Figure.** {numref}`fig-naive-posterior` goes back to the first graph. There
# {numref}`fig-naive-dag` shows where the walk goes if nobody asks for words; here
# is where it went, given that it spelled *great glad* (above) or *awful sorry*
# (below). The words pull the paths towards the states that like to say them, and
# some doubt is left.

# %% mystnb={"figure": {"caption": "Expected uses of each edge, given the words.", "name": "fig-naive-posterior"}} tags=["hide-input"]
fig, axes = plt.subplots(2, 1, figsize=(7.2, 5))
for ax, filling in zip(axes, ("great glad", "awful sorry"), strict=True):
    graph = arguments(emission_of(filling), first_E_LL)
    edge_LL = posteriors(*graph, backend="naive").edge_BLL[0]
    draw_dag(ax, edge_LL.numpy(), columns, names, kinds)
    _ = ax.set_title(filling, loc="left")

# %%
uses = {}
for filling in ("great glad", "awful sorry"):
    graph = arguments(emission_of(filling), first_E_LL)
    uses[filling] = posteriors(*graph, backend="naive").edge_BLL[0, 1:3, 3:5]
assert uses["great glad"].argmax() == 0 and uses["great glad"][0, 0] > 0.7
assert uses["awful sorry"].argmax() == 3 and uses["awful sorry"][1, 1] < 0.5

# %% [markdown]
# One step further, to the logits. Let $\mathbf{P}_u$ be a softmax of logits, as in
# the vocabulary head. A masked language model pulls each of its states towards one
# word: the gradient of its loss is $\mathbf{P}_u - \mathbf{e}_{y}$, where
# $\mathbf{e}_y$ is 1 at the right word and 0 elsewhere. ExLM does the same,
# weighted by the posterior:
#
# $$
# \frac{\partial\,(-\log f_{M,L})}{\partial\,\text{logits}_u}
# = \sum_i \gamma_{i,u}\,\big(\mathbf{P}_u - \mathbf{e}_{y_i}\big).
# $$ (eq-naive-logits)

# %%
rng = torch.Generator().manual_seed(7)
V, target_M = 12, torch.tensor([0, 5, 3, 5, 1])
logits_LV = torch.randn(L, V, generator=rng).requires_grad_()
log_P_ML = logits_LV.log_softmax(dim=1)[:, target_M].T
loss = -log_f_last(log_P_ML, E_LL.log(), guarded)
(grad_LV,) = torch.autograd.grad(loss, logits_LV)

token_LV = logits_LV.detach().softmax(dim=1)
P_of_logits_ML = token_LV[:, target_M].T
found = posteriors(*arguments(P_of_logits_ML, E_LL), backend="naive")
pull_MLV = token_LV - torch.eye(V)[target_M].unsqueeze(1)
by_hand_LV = torch.einsum("iu,iuw->uw", found.state_BML[0], pull_MLV)
torch.testing.assert_close(grad_LV, by_hand_LV)

# %% [markdown]
# **Takeaway.** Training asks each state: for which words were you responsible? Then
# it trains the state on those words, in proportion. A state that takes part in no
# likely path learns nothing. That is how clones can come to specialise, and why a
# route that has lost its share is slow to win it back ({ref}`chap-training`).
#
# ## Where Appendix I.2 disagrees with I.1
#
# **Question.** The paper prints formulas for the gradients (Appendix I.2):
#
# $$
# \nabla \mathbf{P}_u(y_i) = \frac{\alpha_{i,u}\,\beta_{i,u}}{\sum_{u'}
# \alpha_{M,u'}},
# \qquad
# \nabla \mathbf{E}_{v,u} = \frac{\alpha_{i-1,v}\,\beta_{i,u}}{\sum_{u'}
# \alpha_{M,u'}}.
# $$ (eq-naive-printed)
#
# The text says that they are gradients of the log-likelihood of the sequence with
# respect to $\mathbf{P}_u(y_i)$ and $\mathbf{E}_{v,u}$. Are they, with $\alpha$ and
# $\beta$ as Appendix I.1 defines them? We compute both sides. First the true
# gradients, by probabilities and not by logarithms, from autograd.

# %%
leaves = [t.clone().requires_grad_() for t in (P_ML, E_LL)]
log_f = forward_by_rows(*leaves)[-1, -1].log()
true_P_ML, true_E_LL = torch.autograd.grad(log_f, leaves)
is_forward_LL = torch.ones(L, L).triu(1).bool()
true_E_LL = true_E_LL.where(is_forward_LL, 0.0)  # no edge leads back


def error(found, true):
    """Largest difference, as a share of the largest true gradient."""
    return ((found - true).abs().max() / true.abs().max()).item()


# %% [markdown]
# *The denominator.* Appendix H says that the likelihood is $f_{M,L}$: a path ends
# in the last state. I.2 divides by the whole last row, which also holds the
# prefixes that have spelled everything and stand elsewhere. The two agree where no
# other state can emit the last target; here they differ.

# %%
whole_row = alpha_ML[-1].sum()
only_last_ML = P_ML.clone()
only_last_ML[-1, :-1] = 0  # nobody but the last state says [EOS]
last_row_L = forward(only_last_ML, E_LL)[-1]
torch.testing.assert_close(last_row_L.sum(), likelihood)
assert whole_row > 1.05 * likelihood
f"f[M, L] = {likelihood:.5f}, whole last row = {whole_row:.5f}"

# %% [markdown]
# *The emissions.* Even with the right denominator, $\alpha\beta / f_{M,L}$ is
# $\gamma$, the gradient by the *logarithm* of the emission. By the emission itself
# it lacks a factor $1 / \mathbf{P}_u(y_i)$.

# %%
versions_P = {
    "as printed": alpha_ML * beta_ML / whole_row,
    "divided by f[M, L]": alpha_ML * beta_ML / likelihood,
    "... and by P_u(y_i)": alpha_ML * beta_ML / likelihood / P_ML,
}
for name, found_ML in versions_P.items():
    print(f"{name:22} relative error {error(found_ML, true_P_ML):.2f}")
assert error(versions_P["as printed"], true_P_ML) > 0.1
assert error(versions_P["divided by f[M, L]"], true_P_ML) > 0.1
assert error(versions_P["... and by P_u(y_i)"], true_P_ML) < 1e-12

# %% [markdown]
# *The edges.* The index $i$ stands on the right side alone. One edge can be taken
# at several targets, so there must be a sum over $i$. And between $\alpha_{i-1,v}$
# and $\beta_{i,u}$ the emission $\mathbf{P}_u(y_i)$ belongs to neither: it is
# missing. With three possible repairs there are eight versions. Where there is no
# sum, we are generous and take the $i$ that fits best.

# %%
product_iLL = alpha_ML[:-1].unsqueeze(2) * beta_ML[1:].unsqueeze(1)
product_iLL = product_iLL.where(is_forward_LL, 0.0)
errors = {}
for repairs in itertools.product((False, True), repeat=3):
    has_end, has_emission, has_sum = repairs
    found_iLL = product_iLL / (likelihood if has_end else whole_row)
    if has_emission:
        found_iLL = found_iLL * P_ML[1:].unsqueeze(1)
    candidates = [found_iLL.sum(dim=0)] if has_sum else list(found_iLL)
    errors[repairs] = min(error(found_LL, true_E_LL) for found_LL in candidates)

print("f[M, L]  P_u(y_i)  sum over i   relative error")
for repairs, size in errors.items():
    ticks = ["yes" if repair else " - " for repair in repairs]
    print("{:>6} {:>8} {:>10}".format(*ticks), f"{size:15.2f}")
assert errors.pop((True, True, True)) < 1e-12
assert min(errors.values()) > 0.05

# %% [markdown]
# Could another $\beta$ save the printed formulas? Let $\beta'$ include the state's
# own emission, as in the released code. Then the edge formula is right once it is
# summed over $i$ and divided by $f_{M,L}$. But the emission formula, which was
# right for logarithms, no longer is: it is off by a factor $\mathbf{P}_u(y_i)$
# there, and by its square for the plain gradient. Neither $\beta$ makes both
# right.

# %%
own_beta_ML = P_ML * beta_ML
steps_iLL = alpha_ML[:-1].unsqueeze(2) * own_beta_ML[1:].unsqueeze(1)
edge_LL = (steps_iLL.sum(dim=0) / likelihood).where(is_forward_LL, 0.0)
emission_ML = alpha_ML * own_beta_ML / likelihood
assert error(edge_LL, true_E_LL) < 1e-12
torch.testing.assert_close(emission_ML, gamma_ML * P_ML)
torch.testing.assert_close(emission_ML, true_P_ML * P_ML.square())
assert error(emission_ML, true_P_ML) > 0.1 and error(emission_ML, gamma_ML) > 0.1

# %% [markdown]
# **Takeaway.** Take the gradients from {eq}`eq-naive-gradient`, not from the
# printed page:
#
# $$
# \frac{\partial \log f_{M,L}}{\partial \mathbf{P}_u(y_i)} =
# \frac{\alpha_{i,u}\,\beta_{i,u}}{\mathbf{P}_u(y_i)\, f_{M,L}},
# \qquad
# \frac{\partial \log f_{M,L}}{\partial \mathbf{E}_{v,u}} =
# \sum_{i=2}^{M} \frac{\alpha_{i-1,v}\,\mathbf{P}_u(y_i)\,\beta_{i,u}}{f_{M,L}}.
# $$ (eq-naive-right)
#
# This is about the printed page. It says nothing against the paper's experiments,
# which ran code and not the page.
#
# ## The best path
#
# **Question.** Sometimes we want one alignment and not the sum: to show it, or to
# decode. Which path has the highest score?
#
# Take the recursion and write max for the sum. The largest of several products with
# a common factor is the factor times the largest, so the derivation holds as it
# stands. Remembering which $v$ won lets us walk back from the end. This is the
# Viterbi algorithm; {cite}`shao2022viterbi` decode the DA-Transformer with it.


# %%
def best_path(P_ML, E_LL):
    """The path with the highest score, and that score; no path: () and 0."""
    M, L = P_ML.shape
    best_ML = torch.zeros(M, L)
    best_ML[0, 0] = P_ML[0, 0]
    came_from_ML = torch.zeros(M, L, dtype=torch.int64)
    for i in range(1, M):
        for u in range(1, L):
            reach_U = best_ML[i - 1, :u] * E_LL[:u, u]  # U: the states before u
            came_from_ML[i, u] = reach_U.argmax()
            best_ML[i, u] = reach_U.max() * P_ML[i, u]
    if best_ML[-1, -1] == 0:
        return (), 0.0
    path = [L - 1]
    for i in range(M - 1, 0, -1):
        path.append(int(came_from_ML[i, path[-1]]))
    return tuple(path[::-1]), best_ML[-1, -1].item()


# %% [markdown]
# **Check.** It finds the best of all enumerated paths, and the one that the package
# finds, on random graphs with and without all edges.

# %%
for shape, seed, density in itertools.product(shapes[2:], seeds, (1, 0.5)):
    graph = random_graph(*shape, seed, density)
    path, p = best_path(*graph)
    scored = [(score(a, *graph), a) for a in paths(*shape)]
    best_p, best_a = max(scored, default=(0.0, ()))
    assert path == (best_a if best_p > 0 else ())
    assert math.isclose(p, best_p, rel_tol=1e-12)
    package_path, log_p = viterbi(*arguments(*graph), backend="naive")
    assert p == 0 or tuple(package_path[0].tolist()) == path
    assert math.isclose(math.exp(log_p.item()), p, rel_tol=1e-10)

# %% [markdown]
# To *fill* the masks the words are free: let every state say its likeliest word,
# and take the best path. Is that the most probable filling? We go back to the
# first graph and compare with all 16 fillings, each with its sum over paths.

# %%
free_ML = torch.ones(4, 6)
free_ML[1:3, 1:5] = P_LV.max(dim=1).values
path, p = best_path(free_ML, first_E_LL)
on_path = " ".join(words[P_LV[u - 1].argmax()] for u in path[1:3])
fillings = [" ".join(pair) for pair in itertools.product(words, repeat=2)]
total = {
    filling: forward(emission_of(filling), first_E_LL)[-1, -1].item()
    for filling in fillings
}
print(f"best path: {on_path}, probability {p:.5f}")
for filling in sorted(total, key=total.get, reverse=True)[:4]:
    _, of_best = best_path(emission_of(filling), first_E_LL)
    print(f"{filling:12} sum {total[filling]:.5f}, its best path {of_best:.5f}")

# %% [markdown]
# **Check.** The best of all paths says *great glad*. The most probable filling is
# another one, *awful sorry*, which no single path says so well, but several paths
# say. *great glad* comes only fourth.

# %%
ranking = sorted(total, key=total.get, reverse=True)
assert on_path == "great glad" and ranking[0] == "awful sorry"
assert ranking.index(on_path) == 3
of_best = [best_path(emission_of(filling), first_E_LL)[1] for filling in fillings]
assert math.isclose(max(of_best), p, rel_tol=1e-12)
assert total["awful sorry"] > 1.5 * total["great glad"]

# %% [markdown]
# **Takeaway.** Max for sum gives the best alignment, at the price of the sum. It is
# a guess at the best words, not a guarantee. {ref}`chap-reading` shows that the two
# nearly agree once the states of a trained model have specialised.
#
# ## Multiplications, counted
#
# **Question.** What do three loops cost? §4.3 says $\mathcal{O}(M)$, Appendix H
# says $\mathcal{O}(M L^2)$.
#
# We let the loops count. Each product of a sum counts, with the emission pulled out
# of the inner loop. With `cone=True` the loops visit only the states that can be on
# a path at all, which changes nothing but the work.


# %%
def states_at(i, M, L, cone):
    """States that the loops visit for target i."""
    if not cone:
        return range(L)
    if i == 0:
        return range(1)
    return range(L - 1, L) if i == M - 1 else range(i, i + L - M + 1)


def counted_forward(P_ML, E_LL, cone):
    """f[M, L] and the number of multiplications it took."""
    (M, L), P, E = P_ML.shape, P_ML.tolist(), E_LL.tolist()
    f, num_products = [[P[0][0]] + [0.0] * (L - 1)], 0
    for i in range(1, M):
        f.append([0.0] * L)
        for u in states_at(i, M, L, cone):
            for v in states_at(i - 1, M, L, cone):
                if v < u:
                    f[i][u] += f[i - 1][v] * E[v][u]
                    num_products += 1
            if u > 0:  # nothing leads to state 0, so there is nothing to multiply
                f[i][u] *= P[i][u]
                num_products += 1
    return f[-1][-1], num_products


# %% [markdown]
# **Check.** All states: each of the $M - 1$ steps has $L(L-1)/2$ edges and $L - 1$
# emissions. In the cone: a row has $W = L - M + 1$ states, and the states of two
# neighbouring rows are joined by $W(W+1)/2$ edges; only the first step, which
# leaves one state, and the last, which enters one, have $W$.


# %%
def full_products(M, L):
    return (M - 1) * (L * (L - 1) // 2 + L - 1)


def cone_products(M, L):
    W = L - M + 1
    return 2 * W + (M - 3) * W * (W + 1) // 2 + (M - 2) * W + 1


for shape in [(3, 3), (3, 9), (4, 6), (5, 8), (9, 10), (12, 42)]:
    graph = random_graph(*shape, seed=1)
    f_full, num_full = counted_forward(*graph, cone=False)
    f_cone, num_cone = counted_forward(*graph, cone=True)
    assert (num_full, num_cone) == (full_products(*shape), cone_products(*shape))
    assert math.isclose(f_full, f_cone, rel_tol=1e-12)
    assert math.isclose(f_full, forward(*graph)[-1, -1], rel_tol=1e-12)

# %% [markdown]
# Enumeration needs $2M - 2$ multiplications per path: $M$ emissions and $M - 1$
# edges are $2M - 1$ factors. Here are the three side by side, for $m$ masks with $k
# = 4$ states, one [BOS] and one [EOS].


# %%
def products_of(m, k=4):
    """Multiplications by enumeration, by the full loops, and in the cone."""
    M, L = m + 2, k * m + 2
    by_path = math.comb(L - 2, M - 2) * (2 * M - 2)
    return by_path, full_products(M, L), cone_products(M, L)


print("masks   enumeration     loops      cone")
for m in (1, 2, 4, 8, 16, 77):
    by_path, full, cone = products_of(m)
    print(f"{m:5} {by_path:13.3g} {full:9,} {cone:9,}")
assert products_of(77)[1] == products[-1]  # the grey curve of the figure above
assert products_of(1)[0] < products_of(1)[1]  # tiny graphs: enumeration is cheaper
assert products_of(77)[0] > 1e75 > 1e7 > products_of(77)[1]

# %% [markdown]
# **Figure.** In {numref}`fig-naive-cost` both scales are logarithmic, so a power is
# a straight line. Enumeration bends up and leaves the picture at once. The loops
# follow a line of slope 3: $L = km + 2$ grows with $m$, so $M L^2$ is about $k^2
# m^3$. The points are counted by the loops themselves.

# %% mystnb={"figure": {"caption": "Multiplications for one row with k = 4. Lines: formulas; points: counted while running.", "name": "fig-naive-cost"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3.6))
m_axis = np.unique(np.logspace(0, 9, 40, base=2).round().astype(int)).tolist()
above = 10**30  # beyond the picture, where a float would overflow
curves = np.array(
    [[float(min(n, above)) for n in products_of(m)] for m in m_axis]
).T
styles = {
    "enumeration": (COLORS["mlm"], ":"),
    "loops, all states": (COLORS["exlm"], "-"),
    "loops, cone": (COLORS["exlm"], "--"),
}
for curve, (name, (color, style)) in zip(curves, styles.items(), strict=True):
    ax.loglog(m_axis, curve, style, color=color, label=name)
for m in (1, 2, 4, 8, 16):
    graph = random_graph(m + 2, 4 * m + 2, seed=m)
    for cone in (False, True):
        _, num_products = counted_forward(*graph, cone)
        ax.plot(m, num_products, "o", ms=4, color=COLORS["exlm"])
ax.axvline(77, color="0.5", lw=1, ls="-.")
ax.text(80, 30, "the example\nof Appendix I.4", fontsize=8)
ax.legend(loc="upper left")
_ = ax.set(xlabel="masks, m", ylabel="multiplications", ylim=(8, 3e10))

# %%
many = 10_000
full_slope = math.log2(
    full_products(2 * many, 8 * many) / full_products(many, 4 * many)
)
assert abs(full_slope - 3) < 0.01
assert abs(full_products(many, 4 * many) / (many * (4 * many) ** 2 / 2) - 1) < 0.01
saved = 1 - cone_products(many, 4 * many) / full_products(many, 4 * many)
assert abs(saved - 7 / 16) < 0.01
f"slope {full_slope:.2f}; the cone saves {saved:.0%}"

# %% [markdown]
# **Takeaway.** Appendix H counts the work (and so does the serial count of
# Appendix I.3, times the rows of a batch): $\mathcal{O}(M L^2)$ multiplications,
# here about $M L^2 / 2$ for $\alpha$, and as much again for $\beta$ and for the
# gradients. §4.3 counts the steps that have to wait for each other:
# $\mathcal{O}(M)$ rows, each of which is one operation for a machine wide enough.
# Both are right, of different things. How to
# hand a whole row to a real machine is the subject of {ref}`chap-dag-vectorized`.
#
# ## Summary
#
# - A path gives each target one state; its score is a product of emissions and
#   edges. Training maximises the sum over all $\binom{L-2}{M-2}$ of them.
# - The sum factorises: $f_{i,u}$ needs only the row above it. Three loops replace
#   $10^{73}$ paths by a few million multiplications.
# - Logarithms keep it in range; a guard in front of `logsumexp` keeps the gradients
#   finite.
# - $\alpha\beta / f_{M,L}$ is the posterior of a state, and the gradient by the log
#   of its emission. The formulas of Appendix I.2 lack factors, as printed.
# - Max in place of sum gives the best path, which need not spell the best words.
#
# ## Exercises
#
# **1. All lengths.** Set every emission of the first graph to 1 and sum $f_{M,L}$
# over all numbers of targets $M$, from 2 to 6. Predict the result before you run
# it. Why does the sum over the 16 fillings above give less?

# %% tags=["hide-cell"]
by_length = {
    num_targets: forward(torch.ones(num_targets, 6), first_E_LL)[-1, -1].item()
    for num_targets in range(2, 7)
}
# The walk always ends in [EOS], after some number of stops: the lengths share 1.
assert math.isclose(sum(by_length.values()), 1, rel_tol=1e-12)
# The fillings have two words: they share out the probability of exactly two stops.
assert math.isclose(sum(total.values()), by_length[4], rel_tol=1e-12)
{num_targets - 2: round(p, 4) for num_targets, p in by_length.items()}

# %% [markdown]
# **2. One state per mask.** With $k = 1$ there are as many states as targets.
# Predict the number of paths, the posterior $\gamma$, and the gradient by the
# logits of a state. Is the loss the one of a masked language model?

# %% tags=["hide-cell"]
logits_LV = torch.randn(5, V, generator=rng).requires_grad_()
target_M = torch.tensor([0, 7, 2, 9, 1])
_, E_one_LL = random_graph(5, 5, seed=2)
log_P_ML = logits_LV.log_softmax(dim=1)[:, target_M].T
loss = -log_f_last(log_P_ML, E_one_LL.log(), guarded)
(grad_LV,) = torch.autograd.grad(loss, logits_LV)

assert list(paths(5, 5)) == [(0, 1, 2, 3, 4)]  # one path
graph = log_P_ML.detach().exp(), E_one_LL
posterior_ML = posteriors(*arguments(*graph), backend="naive").state_BML[0]
torch.testing.assert_close(posterior_ML, torch.eye(5))
# So every state has one target and the gradient of MLM ...
mlm_loss = torch.nn.functional.cross_entropy(logits_LV, target_M, reduction="sum")
(mlm_grad_LV,) = torch.autograd.grad(mlm_loss, logits_LV)
torch.testing.assert_close(grad_LV, mlm_grad_LV)
# ... but the loss pays for the edges of the forced path too.
price = -E_one_LL.diagonal(1).log().sum()
torch.testing.assert_close(loss, mlm_loss + price)
assert price > 0

# %% [markdown]
# **3. Draw paths.** Given $\beta$, a path can be drawn from the posterior step by
# step: from state $v$ at target $i$ go to $u$ with probability
# $\mathbf{E}_{v,u}\,\mathbf{P}_u(y_{i+1})\,\beta_{i+1,u} / \beta_{i,v}$. Show that
# these probabilities sum to 1. Draw 20,000 paths of the graph with three masks and
# compare how often a state says a target with $\gamma$.

# %% tags=["hide-cell"]
num_draws = 20_000
state_A = torch.zeros(num_draws, dtype=torch.int64)
share_ML = torch.zeros(M, L)
share_ML[0, 0] = 1.0
for i in range(M - 1):
    step_LL = E_LL * P_ML[i + 1] * beta_ML[i + 1]
    can_go_L = beta_ML[i] > 0
    row_sums = step_LL.sum(dim=1)[can_go_L] / beta_ML[i][can_go_L]
    torch.testing.assert_close(row_sums, torch.ones_like(row_sums))
    state_A = torch.multinomial(step_LL[state_A], 1, generator=rng).flatten()
    share_ML[i + 1] = state_A.bincount(minlength=L) / num_draws
# Five standard errors leave room for chance in 40 comparisons, not for a bug.
standard_error_ML = (gamma_ML * (1 - gamma_ML)).clamp(min=0).sqrt() / num_draws**0.5
assert ((share_ML - gamma_ML).abs() <= 5 * standard_error_ML + 1e-12).all()
f"{int((gamma_ML > 0).sum())} of {M * L} entries can occur"

# %% [markdown]
# **4. The cone.** For $k = 4$ the cone saved 44% of the multiplications. Predict
# the share for $k = 2$ and $k = 8$ when there are many masks, then count.

# %% tags=["hide-cell"]
# About M W^2 / 2 of M L^2 / 2, and W / L is 1 - M / L = 1 - 1 / k.
for k in (2, 4, 8):
    M_many, L_many = 2000, 2000 * k
    kept = cone_products(M_many, L_many) / full_products(M_many, L_many)
    assert abs(kept - (1 - 1 / k) ** 2) < 0.01
    print(f"k = {k}: the cone saves {1 - kept:.0%}")
