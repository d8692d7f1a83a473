# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-dag-vectorized)=
# # One operation per target
#
# The three loops of {ref}`chap-dag-naive` are right, and far too slow to train
# with: a batch of the paper's size has more than two hundred million terms, and
# Python would compute them in turn. Here you compute the same sum without a loop
# over states. One loop remains, over the targets, because each target has to wait
# for the one before.
#
# You turn two loops and the batch into one PyTorch operation, see what minus
# infinity breaks, write the backward pass by hand, count bytes and operations, see
# where float32 loses its digits, and rebuild the sum in plain probabilities, which
# is faster and can underflow.
#
# **You will know afterwards** what the backends `vectorized` and `scaled` do, why
# their gradients can be trusted, and what Appendix I says about time and memory.
#
# **It takes** 45 minutes and ten seconds of one CPU core; nothing is trained.
# **Paper:** the parallel part of Appendix I.3, and Appendix I.4, of
# {cite}`zheng2025exlm`. Times come from a recorded benchmark; everything else is
# computed here.

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

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()

# %%
import itertools
import json
import math
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from live import chapter_scale
from torch.autograd.graph import saved_tensors_hooks

from exlm_lab.benchmarks.dag import made_graph
from exlm_lab.benchmarks.record import Shape
from exlm_mini.alignment import dag_log_likelihood, posteriors

torch.set_default_dtype(torch.float64)
scale = chapter_scale()
cpu = torch.device("cpu")

# %% [markdown]
# ## Three loops become one
#
# The recursion of Appendix H, in logarithms, reads
#
# $$
# \begin{aligned}
# \log f_{i,u} = \log \sum_{v<u} \exp\big( & \log f_{i-1,v} + {} \\
# & \log \mathbf{E}_{v,u} + {} \\
# & \log \mathbf{P}_u(y_i)\big).
# \end{aligned}
# $$ (eq-vec-log)
#
# Three loops run over $i$, $u$ and $v$, and a fourth over the rows of the batch.
# Which of them have to run one after the other?
#
# Only the one over $i$: row $i$ of the table reads row $i - 1$ and nothing else.
# The $L$ entries of a row do not depend on each other, nor do the sentences of a
# batch. So all terms of one target can be formed at once, by broadcasting: $\log
# f$ of the previous target along $v$, the transitions along both, the emissions
# along $u$. One log-sum-exp over $v$ then gives the whole row.

# %%
B, M, L = 2, 5, 8
from_v = torch.zeros(B, L).unsqueeze(2)
edges = torch.zeros(B, L, L)
emit_u = torch.zeros(B, L).unsqueeze(1)
terms = from_v + edges + emit_u
sums = terms.logsumexp(dim=1)
shapes = [tuple(t.shape) for t in (from_v, edges, emit_u, terms, sums)]
assert shapes[3:] == [(B, L, L), (B, L)]
print("{} + {} + {} -> {}, log-sum-exp: {}".format(*shapes))

# %% [markdown]
# The condition $v < u$ needs no loop either: where there is no edge, the
# transition is $\log 0 = -\infty$. Here is the whole forward pass. `guarded` is
# the log-sum-exp of {ref}`chap-dag-naive`; the next section says what happens
# without it.


# %%
def guarded(scores, dim):
    """logsumexp whose gradient is 0 where all scores are -inf."""
    is_dead = (scores == -torch.inf).all(dim, keepdim=True)
    total = torch.logsumexp(scores.masked_fill(is_dead, 0.0), dim)
    return total.masked_fill(is_dead.squeeze(dim), -torch.inf)


def log_f_rows(log_P_BML, log_E_BLL, log_sum=guarded):
    """log f[i, u] of a whole batch: one log-sum-exp per target."""
    is_start_L = torch.arange(log_P_BML.shape[2]) == 0
    rows = [log_P_BML[:, 0].where(is_start_L, -torch.inf)]
    for log_P_BL in log_P_BML.unbind(dim=1)[1:]:
        terms_BLL = rows[-1].unsqueeze(2) + log_E_BLL + log_P_BL.unsqueeze(1)
        rows.append(log_sum(terms_BLL, 1))
    return torch.stack(rows, dim=1)


def by_rows(log_P_BML, log_E_BLL, num_targets_B, num_states_B, log_sum=guarded):
    """log f of each sentence, read where its last target meets its last state."""
    log_f_BML = log_f_rows(log_P_BML, log_E_BLL, log_sum)
    return log_f_BML[range(len(log_f_BML)), num_targets_B - 1, num_states_B - 1]


# %% [markdown]
# Sentences of different length share a batch, so most rows end in padding. The
# recursion runs on through it, and we read each sentence's result at its own
# corner. That suffices: padding lies behind the sentence, and the recursion never
# looks ahead.
#
# We compare with enumeration, the three loops, and the package's `vectorized`, on
# random graphs with all edges and with half of them, sentences of different length
# in one batch, and sentences without a path.
#
# The package goes one step further: it never reads the padding, even if that holds
# `nan`. Our short version would return `nan` gradients, because it multiplies the
# entries that it does not use by zero.


# %% mystnb={"code_prompt_show": "Checked: values and gradients equal enumeration, the three loops and the package's vectorized, on 20 ragged batches a seed; the package never reads the padding, even where it holds nan"} tags=["hide-cell", "check"]
def random_graph(num_targets, num_states, seed, density=1.0):
    """Random emissions; forward edges, each kept with probability `density`."""
    rng = torch.Generator().manual_seed(seed)
    B, M, L = len(num_targets), max(num_targets), max(num_states)
    P_BML = torch.rand(B, M, L, generator=rng)
    E_BLL = torch.rand(B, L, L, generator=rng).triu(1)
    E_BLL = E_BLL * (torch.rand(B, L, L, generator=rng) < density)
    counts = torch.tensor(num_targets), torch.tensor(num_states)
    return P_BML.log(), E_BLL.log(), *counts


def value_and_gradients(function, log_P_BML, log_E_BLL, *counts):
    """log f of each sentence, and the gradients of those that have a path."""
    leaves = [t.clone().requires_grad_() for t in (log_P_BML, log_E_BLL)]
    log_f_B = function(*leaves, *counts)
    total = log_f_B.where(log_f_B != -torch.inf, 0.0).sum()
    # With one target no edge is used: materialize_grads makes its gradient zero.
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return log_f_B.detach(), *gradients


backends = ("enumerate", "naive", "vectorized")
batches = {
    "one target": ([1, 1], [1, 1]),
    "square": ([4, 4], [4, 4]),
    "ragged": ([2, 5, 4, 3], [6, 8, 4, 7]),
    "too many targets": ([5, 4], [4, 6]),
}
num_checked = num_without_path = 0
seeds = range(scale.pick(3, 30))
for sizes, seed, density in itertools.product(batches.values(), seeds, (1, 0.5)):
    graph = random_graph(*sizes, seed, density)
    ours = value_and_gradients(by_rows, *graph)
    num_checked += len(ours[0])
    num_without_path += int((ours[0] == -torch.inf).sum())
    for backend in backends:
        package = partial(dag_log_likelihood, backend=backend)
        theirs = value_and_gradients(package, *graph)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
assert num_checked == 20 * len(seeds) and num_without_path > len(seeds)

graph = random_graph([2, 4], [5, 7], seed=1)
is_state_BL = torch.arange(7) < graph[3].unsqueeze(1)
is_target_BM = torch.arange(4) < graph[2].unsqueeze(1)
is_read_BML = is_target_BM.unsqueeze(2) & is_state_BL.unsqueeze(1)
torn = graph[0].where(is_read_BML, torch.nan), *graph[1:]
vectorized = partial(dag_log_likelihood, backend="vectorized")
clean, dirty = (value_and_gradients(vectorized, *g) for g in (graph, torn))
assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
assert value_and_gradients(by_rows, *torn)[1].isnan().any()

# %% [markdown]
# {numref}`fig-vec-table` shows $\log f$ for a graph as an untrained model makes
# it: 20 targets, 80 states, edges and words about equally likely (`made_graph` is
# what the benchmarks of the package use). A row of the picture is one operation,
# and only rows have to wait for each other. Colours compare the states of one
# row; from row to row $\log f$ falls by about ten nats, the cost of a word here.

# %% mystnb={"figure": {"caption": "log f of an untrained model, filled row by row from the top, relative to the largest number of the row. White: no prefix ends there. Dashed: the cone, outside which nothing belongs to a whole path.", "name": "fig-vec-table"}, "image": {"alt": "A table of 20 targets and 80 states. Its lower left corner is white. In every row the largest numbers stand at the far right, outside the dashed cone."}} tags=["remove-input"]
graph_20 = made_graph(Shape(1, 20, 80), False, cpu, torch.float64)
log_f_ML = log_f_rows(*graph_20[:2])[0]


def draw_table(ax, table_ML, label, **colours):
    """Draw a table of targets and states in colour, with the cone dashed."""
    M, L = table_ML.shape
    shown_ML = np.ma.masked_invalid(table_ML.numpy())
    picture = ax.imshow(shown_ML, aspect="auto", **colours)
    plt.colorbar(picture, ax=ax, label=label)
    edge_M = np.array([-0.5, M - 0.5])
    for shift in (-1, L - M + 1):
        ax.plot(edge_M + shift, edge_M, "--", color="0.2", lw=1)
    ax.grid(False)
    ax.set(xlabel="state u", ylabel="target i", xlim=(-0.5, L - 0.5))
    ax.set(ylim=(M - 0.5, -0.5))


fig, ax = plt.subplots(figsize=(3.6, 2.7))
below_ML = log_f_ML - log_f_ML.amax(dim=1, keepdim=True)
colours = {"cmap": "viridis", "vmin": -40, "vmax": 0}
draw_table(ax, below_ML, "log f − row's largest", **colours)

# %% [markdown]
# This is how Appendix H comes to "$\mathcal{O}(M)$ PyTorch operations".
#
# ## Sums over nothing but minus infinity
#
# The white corner of the figure is $-\infty$. A prefix of $i$ steps cannot end
# left of state $i$. That makes $1 + 2 + \dots + (M - 1)$ log-sum-exps over
# nothing, in *every* sentence, so this is no rare accident.

# %% tags=["remove-input"]
num_dead = int((log_f_ML[1:] == -torch.inf).sum())
assert num_dead == 20 * 19 // 2
f"{num_dead} of {19 * 80} log-sum-exps have nothing to add up"

# %% [markdown]
# {ref}`chap-dag-naive` showed the first fault: `torch.logsumexp` gives a right
# value there and `nan` for a gradient. The textbook formula, which pulls out the
# largest term, fails in more ways. As it stands, it forms $-\infty - (-\infty)$,
# so that even the value is `nan`. With a guard on the maximum alone the value is
# right, but the gradient is `nan` again, because $\log 0$ has an infinite slope.


# %%
def textbook(scores, dim):
    peak = scores.amax(dim, keepdim=True)
    return (scores - peak).exp().sum(dim).log() + peak.squeeze(dim)


def textbook_with_a_guarded_peak(scores, dim):
    peak = scores.amax(dim, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    return (scores - peak).exp().sum(dim).log() + peak.squeeze(dim)


# %% tags=["remove-input"]
versions = (torch.logsumexp, textbook, textbook_with_a_guarded_peak, guarded)
exact_20 = value_and_gradients(vectorized, *graph_20)
verdicts = []
for log_sum in versions:
    found = value_and_gradients(partial(by_rows, log_sum=log_sum), *graph_20)
    is_right = [torch.allclose(a, b) for a, b in zip(found, exact_20, strict=True)]
    words = ["right" if right else "nan" for right in is_right]
    assert [not t.isnan().any() for t in found] == is_right
    verdicts.append((is_right[0], all(is_right[1:])))
    print(f"{log_sum.__name__:29} value {words[0]:6} gradients {words[2]}")
assert verdicts == [(True, False), (False, False), (True, False), (True, True)]

# %% [markdown]
# Some code avoids infinity with a large negative number, such as $-10^5$ for an
# edge that does not exist. No `nan` can occur then. But what was impossible is now
# only unlikely: a sentence without a path gets a finite loss, and its gradient
# raises the probability of edges that do not exist.
#
# So a guard has to hold for the value *and* for the derivative. The package
# avoids the trouble: its backward pass differentiates no logarithm at all.
#
# ## The backward pass as a walk
#
# Autograd would go back through every one of those operations. But the gradients
# are posteriors ({ref}`chap-dag-naive`), and posteriors can be computed without
# autograd.
#
# Run the recursion from the end, which gives $\beta$ of Appendix I.1. Suppose a
# path is in state $v$ and has just said target $i$. By the meaning of $\beta$,
# the share of all continuations that go to $u$ next is
#
# $$
# \begin{gathered}
# P(v \to u \mid i, \mathbf{Y}) = {} \\
# \frac{\mathbf{E}_{v,u}\,\mathbf{P}_u(y_{i+1})\,\beta_{i+1,u}}{\beta_{i,v}}.
# \end{gathered}
# $$ (eq-vec-chain)
#
# The sum of the numerators over $u$ is the definition of $\beta_{i,v}$, so these
# are probabilities: given the words, a path is a *Markov chain*. It starts in the
# first state with probability 1. Pushed forward step by step, it yields the
# posterior of every state, and on the way the flow over every edge.


# %%
def log_beta_rows(log_P_BML, log_E_BLL):
    """log beta[i], (B, L), for every target of a batch without padding."""
    is_end_L = torch.arange(log_P_BML.shape[2]) == log_P_BML.shape[2] - 1
    rows = [torch.zeros_like(log_P_BML[:, 0]).where(is_end_L, -torch.inf)]
    for log_P_BL in log_P_BML.unbind(dim=1)[:0:-1]:
        rows.append(guarded(log_E_BLL + (log_P_BL + rows[-1]).unsqueeze(1), 2))
    return rows[::-1]


def walk(log_P_BML, log_E_BLL):
    """State and edge posteriors, by pushing the Markov chain of paths forward."""
    log_beta = log_beta_rows(log_P_BML, log_E_BLL)
    state_BL = log_beta[0].new_zeros(log_beta[0].shape)
    state_BL[:, 0] = 1.0
    rows, edge_BLL = [state_BL], torch.zeros_like(log_E_BLL)
    for i, log_P_BL in enumerate(log_P_BML.unbind(dim=1)[1:]):
        before_BL, after_BL = log_beta[i : i + 2]
        total_BL1 = before_BL.masked_fill(before_BL == -torch.inf, 0.0).unsqueeze(2)
        step_BLL = log_E_BLL + (log_P_BL + after_BL).unsqueeze(1) - total_BL1
        flow_BLL = rows[-1].unsqueeze(2) * step_BLL.exp()
        rows.append(flow_BLL.sum(dim=1))
        edge_BLL += flow_BLL
    return torch.stack(rows, dim=1), edge_BLL


# %% [markdown]
# This is what `alignment/vectorized.py` does: $\beta$ in the forward pass, the
# chain in the backward pass. Three log-sum-exps per target ($\alpha$, $\beta$ and
# an edge formula) would be the obvious way. Two are enough, since the chain needs
# no $\alpha$: one for $\beta$, and one in the backward pass, where the package
# normalises each row of {eq}`eq-vec-chain` by its own sum instead of dividing by
# $\beta_{i,v}$, and a row that leads nowhere stays zero.
#
# {numref}`fig-vec-posterior` is the walk through the graph of
# {numref}`fig-vec-table`. There the prefixes gathered at the far right, where a
# walk with even transitions soon ends up. The paths that spell all words run
# elsewhere; remember this for the last section.

# %% mystnb={"figure": {"caption": "State posteriors of the same graph. White: less than one in a million.", "name": "fig-vec-posterior"}, "image": {"alt": "The posterior lies in a band along the diagonal, inside the dashed cone, far left of the largest prefixes."}} tags=["remove-input"]
state_ML = walk(*graph_20[:2])[0][0]
fig, ax = plt.subplots(figsize=(3.6, 2.7))
shown_ML = state_ML.where(state_ML > 1e-6, torch.nan).log10()
draw_table(ax, shown_ML, "log₁₀ posterior", cmap="Blues", vmin=-6, vmax=0)

# %% [markdown]
# The chain has a second advantage, in float32. The usual formula for a posterior is
# $\exp(\log\alpha + \log\beta - \log f_{M,L})$: numbers around 1,000, accurate to
# about $10^{-4}$ in float32, are subtracted from each other, and the error lands in
# the exponent. The chain compares $\beta$ only with its own neighbours. Every
# number of the walk lies between 0 and 1, and in the package, which normalises each
# step, each row adds up to one by construction.
#
# ## What the backward pass keeps in memory
#
# Appendix I.4 says that the dynamic programme, as this recursion is called, takes
# little memory, and gives numbers. That would not hold if autograd kept all it
# needs for the backward pass. PyTorch can tell how much that is:
# `saved_tensors_hooks` is called for every tensor kept. We count the memory behind
# these tensors, each piece once.


# %%
def saved_bytes(function, log_P_BML, log_E_BLL, *counts):
    """Bytes that autograd holds between forward and backward pass."""
    kept = {}

    def count(tensor):
        memory = tensor.untyped_storage()
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    leaves = [t.clone().requires_grad_() for t in (log_P_BML, log_E_BLL)]
    with saved_tensors_hooks(count, lambda tensor: tensor):
        log_f_B = function(*leaves, *counts)
    assert log_f_B.requires_grad  # the graph, and all it holds, is still alive
    return sum(kept.values())


def log_f_corner(log_P_BML, log_E_BLL, *counts):
    """by_rows for a batch without padding."""
    return log_f_rows(log_P_BML, log_E_BLL)[:, -1, -1]


# %% [markdown]
# Under autograd, each of the $M - 1$ log-sum-exps keeps its terms, $B L^2$ numbers
# of four bytes, its result, and a mask of one byte per state; the mask of the start
# is kept once. The package keeps its two inputs and $\beta$, and computes the terms
# a second time in the backward pass. These counts are exact, to the byte:


# %% tags=["remove-input"]
def autograd_bytes(B, M, L):
    """Terms, results (4 bytes), a mask per target but one; the start's mask."""
    return (M - 1) * B * (4 * L * L + 4 * L + L) + L


def package_bytes(B, M, L):
    """Emissions and beta, transitions, and the two counts (8 bytes)."""
    return 4 * (2 * B * M * L + B * L * L) + 16 * B


print(" B  M   L    autograd   package   ratio")
for B, M, L in [(1, 5, 10), (2, 10, 40), (2, 20, 80), (1, 40, 160)]:
    graph = made_graph(Shape(B, M, L), False, cpu, torch.float32)
    by_autograd = saved_bytes(log_f_corner, *graph)
    by_package = saved_bytes(vectorized, *graph)
    assert by_autograd == autograd_bytes(B, M, L)
    assert by_package == package_bytes(B, M, L)
    print(f"{B:2} {M:2} {L:3} {by_autograd:11,} {by_package:9,}", end=" ")
    print(f"{by_autograd / by_package:7.1f}")

# %% [markdown]
# $\mathcal{O}(B M L^2)$ against $\mathcal{O}(B L (M + L))$: the ratio grows with
# the number of targets, to $2M/3$ or so where $L = 4M$. In exchange the terms are
# computed twice.
#
# Now the example of Appendix I.4: 64 rows of 512 tokens, 15% of them masked, four
# states each. We compute its numbers again, and some that it leaves out.

# %% tags=["remove-input"]
MIB = 2**20
B, M, L = 64, 77, 308
assert round(512 * 0.15) == M and 4 * M == L
table_MIB = 4 * B * M * L / MIB
links_MIB = 4 * B * L * L / MIB
memory = {
    "alpha, or beta: B M L": (B * M * L, table_MIB, "5.8"),
    "transitions: B L L": (B * L * L, links_MIB, "23.2"),
    "alpha, beta and transitions": (None, 2 * table_MIB + links_MIB, "34.8"),
    "what `vectorized` keeps": (None, package_bytes(B, M, L) / MIB, ""),
    "inputs, alpha, beta, gradients": (None, 4 * table_MIB + 2 * links_MIB, ""),
    "autograd, row by row": (None, autograd_bytes(B, M, L) / MIB, ""),
}
print(f"{'float32':31} {'numbers':>9} {'MiB':>7} {'paper':>6}")
for name, (numbers, size, paper) in memory.items():
    count = f"{numbers:,}" if numbers else ""
    print(f"{name:31} {count:>9} {size:7.1f} {paper:>6}")

# %% [markdown]
# Size by size the paper is right, once its MB are read as MiB
# ($2^{20}$ bytes). Its total is the sum of the rounded sizes. Two remarks:
#
# - The total counts $\alpha$, $\beta$ and the transitions. Training also needs the
#   emissions and two gradients, which doubles it.
# - Appendix I.4 counts the states of masks alone; the package adds the clones of
#   [BOS] and [EOS], 316 states in all. The released code runs the recursion over
#   the whole expanded row ({ref}`reproduction`): 749 states, and transitions almost
#   six times the size of Appendix I.4's.

# %% mystnb={"code_prompt_show": "Checked: with -1e5 in place of -inf a sentence without a path has a finite loss; the walk finds what autograd and the package find, nothing outside the cone, and in float32 sums to 1 within 2e-6; the sizes of Appendix I.4"} tags=["hide-cell", "check"]
log_P_BML, log_E_BLL, *counts = random_graph([4], [6], seed=3)
log_E_BLL[:, :, -1] = -torch.inf  # no way into the last state
finite = log_P_BML, log_E_BLL.clamp(min=-1e5), *counts
log_f, _, pull = value_and_gradients(by_rows, *finite)
assert -2e5 < log_f.item() < -9e4
assert math.isclose(pull[log_E_BLL == -torch.inf].sum(), 1.0, rel_tol=1e-9)
log_f, *gradients = value_and_gradients(vectorized, log_P_BML, log_E_BLL, *counts)
assert log_f.item() == -torch.inf and not any(g.any() for g in gradients)

for sizes, seed in itertools.product([([2], [2]), ([4], [4]), ([5], [9])], seeds):
    graph = random_graph(*sizes, seed)
    state_BML, edge_BLL = walk(*graph[:2])
    _, by_autograd_BML, by_autograd_BLL = value_and_gradients(by_rows, *graph)
    torch.testing.assert_close(state_BML, by_autograd_BML)
    torch.testing.assert_close(edge_BLL, by_autograd_BLL)
    package = posteriors(*graph, backend="vectorized")
    torch.testing.assert_close((state_BML, edge_BLL), tuple(package))
    assert torch.allclose(state_BML.sum(dim=2), torch.tensor(1.0))
    assert math.isclose(edge_BLL.sum(), sizes[0][0] - 1, rel_tol=1e-12)

W = 80 - 20
is_in_cone_ML = torch.ones(20, 80).triu().tril(W).bool()
assert (state_ML[~is_in_cone_ML] == 0).all()
inner = slice(3, 12)
gap_M = log_f_ML[inner].argmax(dim=1) - state_ML[inner].argmax(dim=1)
assert (gap_M > 10).all()

graph_77 = made_graph(Shape(1, 77, 308), False, cpu, torch.float32)
log_f_BML = log_f_rows(*graph_77[:2])
log_beta_BML = torch.stack(log_beta_rows(*graph_77[:2]), dim=1)
by_difference_BML = (log_f_BML + log_beta_BML - log_f_BML[:, -1:, -1:]).exp()
assert by_difference_BML.dtype == torch.float32 and log_f_BML[0, -1, -1] < -800
by_walk_BML = posteriors(*graph_77, backend="vectorized").state_BML
both = by_difference_BML, by_walk_BML
off = [(state_BML.sum(dim=2) - 1).abs().max() for state_BML in both]
assert off[0] > 2e-5 and off[1] < 2e-6 and off[0] > 20 * off[1]

B, M, L = 64, 77, 308
assert (f"{table_MIB:.1f}", f"{links_MIB:.1f}") == ("5.8", "23.2")
assert f"{2 * table_MIB + links_MIB:.1f}" == "34.7"
assert f"{2 * 5.8 + 23.2:.1f}" == "34.8"
assert round(B * M * L / 1e6, 2) == 1.52 and round(B * L * L / 1e6, 2) == 6.07
assert math.isclose(512 * 0.15 * 4, 307.2)
assert B * (M - 1) * L * (L - 1) // 2 > 2e8  # terms with an edge, in one batch
doubled = memory["inputs, alpha, beta, gradients"][1]
assert math.isclose(doubled, 2 * (2 * table_MIB + links_MIB))
assert memory["autograd, row by row"][1] > 49 * memory["what `vectorized` keeps"][1]
whole_row = 512 + 3 * (77 + 2)
assert whole_row == 749 and 5.9 < (whole_row / L) ** 2 < 6

# %% [markdown]
# So the programme takes little memory, as the paper says, *if* the backward pass is
# written by hand. Autograd over the rows would keep fifty times as much.
#
# ## How many operations wait for each other
#
# Appendix H promises $\mathcal{O}(M L^2)$ work; §4.3 and Appendix I.3 promise
# $\mathcal{O}(M)$ time. They count different things: the numbers that have to be
# computed, and the operations that have to wait for each other. We count both,
# forward and backward: PyTorch passes every operation through a dispatcher, where a
# mode can listen.
#
# The number of operations depends on $M$ alone, and exactly linearly:
# each further target adds the same number of them. Neither $L$ nor the size of
# the batch changes it. The work behind them is another matter. Doubling the targets
# doubles the numbers computed; doubling the states multiplies them by four.
#
# In {numref}`fig-vec-operations` masks have four states each, so $L = 4M$ grows
# with $M$. The three loops need several operations for *each* term, so their
# number grows like the work. On a scale where both axes are logarithmic a power
# is a straight line, and its slope is the exponent.

# %% mystnb={"figure": {"caption": "Forward and backward pass of one sentence with four states per target, counted. Solid: operations that PyTorch starts, one after the other. Dashed: numbers that they compute.", "name": "fig-vec-operations"}, "image": {"alt": "Three straight lines on two logarithmic axes. Operations of vectorized have slope 1, the numbers it computes slope 3, operations of the three loops slope 3.3."}} tags=["remove-input"]
from torch.utils._python_dispatch import TorchDispatchMode


class Tally(TorchDispatchMode):
    """Counts operations, and the numbers they return."""

    def __init__(self):
        super().__init__()
        self.num_operations = self.num_values = self.num_exps = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.num_operations += 1
        if isinstance(result, torch.Tensor):
            self.num_values += result.numel()
            if operation.overloadpacket.__name__ in ("exp", "exp_"):
                self.num_exps += result.numel()
        return result


def tally(function, B, M, L):
    """Count the operations of a forward and backward pass of one batch."""
    graph = made_graph(Shape(B, M, L), False, cpu, torch.float64)
    leaves = [t.requires_grad_() for t in graph[:2]]
    with Tally() as counts:
        function(*leaves, *graph[2:]).sum().backward()
    return counts


def slope(counts):
    """Exponent of the power law through the first and the last point of {x: y}."""
    (x0, y0), *_, (x1, y1) = counts.items()
    return math.log(y1 / y0) / math.log(x1 / x0)


naive = partial(dag_log_likelihood, backend="naive")
axis = (3, 5, 10, 20, 40, 80)
ours = {M: tally(vectorized, 1, M, 4 * M) for M in axis}
loops = {M: tally(naive, 1, M, 4 * M) for M in axis[:3]}
curves = {
    "three loops, operations": (loops, "num_operations", COLORS["mlm"], "o-"),
    "vectorized, operations": (ours, "num_operations", COLORS["exlm"], "o-"),
    "vectorized, numbers": (ours, "num_values", COLORS["exlm"], "o--"),
}
fig, ax = plt.subplots(figsize=(3.6, 3.9), layout="constrained")
slopes = {}
for name, (counts, what, color, style) in curves.items():
    curve = {M: getattr(tally_M, what) for M, tally_M in counts.items()}
    slopes[name] = slope(dict(list(curve.items())[-2:]))
    label = f"{name}: slope {slopes[name]:.1f}"
    ax.loglog(curve.keys(), curve.values(), style, color=color, ms=4, label=label)
ax.set_xticks(axis, [str(M) for M in axis])
ax.minorticks_off()
fig.legend(loc="outside lower center", fontsize=8)
_ = ax.set(xlabel="targets M, with L = 4M states", ylabel="count")

# %% [markdown]
# Of the $L^2$ terms of a target only $L(L - 1)/2$ have an edge. A dense operation
# computes the others too, all of them $-\infty$, which costs a factor of two; terms
# outside the cone cost nearly another. So both claims hold, but $\mathcal{O}(M)$
# time needs a machine wide enough to compute $B L^2$ terms at once.
#
# ## How long it takes
#
# {numref}`fig-vec-times` draws a recorded benchmark, made with this command:
#
# ```bash
# python -m exlm_lab.bench dag --threads 2 --shape 2,5,20 --shape 2,10,40 \
#     --shape 8,20,80 --shape 8,77,308 --shape 64,77,308 --shape 4,256,1024 \
#     --output book/results/bench-dag.json
# ```

# %% tags=["remove-input"]
times = json.loads(Path("../book/results/bench-dag.json").read_text())
alike = ("benchmark", "dtype", "transitions", "threads")
times = [r for r in times if all(r[key] == times[0][key] for key in alike)]
assert times[0]["benchmark"] == "dag" and all(r["median_ms"] > 0 for r in times)


def work(record):
    """B M L^2, the terms of the recursion, including edges that do not exist."""
    B, M, L = record["shape"]
    return B * M * L**2


by_backend = {}
for record in sorted(times, key=work):
    by_backend.setdefault(record["backend"], {})[work(record)] = record["median_ms"]
assert "vectorized" in by_backend

# %% [markdown]
# A curve that climbs with the grey line is bound by work; where it is flatter,
# most of the time goes into starting single operations. `scaled` is the subject
# of the last two sections; `native` is compiled code for the same recursion, from
# {ref}`chap-dag-cuda`.

# %% mystnb={"figure": {"caption": "Recorded times of forward and backward pass, against the terms of the recursion. Grey: proportional to the terms.", "name": "fig-vec-times"}, "image": {"alt": "Times of five backends on logarithmic axes. Enumerate and naive are slowest, vectorized follows the grey line at the right, scaled and native lie below it."}} tags=["remove-input"]
machine = times[0]["machine"]
is_gpu = machine["device"] != "cpu"
num_threads = times[0]["threads"]
on_cpu = f"{machine['cpu']}, {num_threads} thread{'s' * (num_threads > 1)}"
where = machine["device"] if is_gpu else on_cpu
fig, ax = plt.subplots(figsize=(3.6, 3.9), layout="constrained")
known = {"enumerate": "0.55", "naive": COLORS["mlm"], "vectorized": COLORS["exlm"]}
known |= {"scaled": COLORS["repeated-mlm"], "native": "0.1"}
markers = dict(zip(sorted(by_backend), "os^vDP*X", strict=False))
for name, curve in by_backend.items():
    style = {"marker": markers.get(name, "."), "ms": 5, "color": known.get(name)}
    ax.loglog(curve.keys(), curve.values(), label=name, **style)
terms = np.array([min(map(work, times)), max(map(work, times))], dtype=float)
largest = max(by_backend["vectorized"])
in_proportion = by_backend["vectorized"][largest] * terms / largest
ax.loglog(terms, in_proportion, color="0.75", zorder=0)
fig.legend(loc="outside lower center", ncols=3, fontsize=8)
ax.set_title(f"{where},\n{times[0]['dtype']}", fontsize=8, loc="left")
_ = ax.set(xlabel="terms B M L²", ylabel="forward and backward, ms")

# %% [markdown]
# On a CPU the time of `vectorized` follows the work, once there is enough of it.
# For small graphs it is the time to start $\mathcal{O}(M)$ operations. A compiled
# kernel can save at both ends, with fewer and larger steps, and with cheaper
# terms. The rest of the chapter is about the terms.
#
# ## Where float32 loses its digits
#
# Logarithms cannot underflow, but they can lose digits. A float32 number has 24
# binary digits, at any size. A log-likelihood is a sum, and it grows with the
# sentence: about ten nats per target at the start of training. The larger the
# number, the coarser its last digit; and an error of $\varepsilon$ in an exponent
# is a relative error of $\varepsilon$ in a probability.

# %%
print("targets      log f   last digit of float32")
for M in (8, 32, 128):
    graph = made_graph(Shape(1, M, 4 * M), False, cpu, torch.float64)
    log_f = vectorized(*graph).item()
    print(f"{M:7} {log_f:10.0f}   {np.spacing(np.float32(-log_f)):.1e}")
assert np.spacing(np.float32(-log_f)) == 2.0 ** (10 - 23)  # between 1024 and 2048

# %% [markdown]
# So the error has to grow with the number of targets. {numref}`fig-vec-digits`
# compares float32 gradients with those of `vectorized` in float64 on the same
# numbers. Autograd through the rows of `by_rows` is the worst, because it takes
# differences of large logarithms. The walk of `vectorized` compares only
# neighbours. But its $\beta$ is a large logarithm too, and it loses digits in the
# same way: with 128 targets the error is about one part in 100,000, that of
# autograd several times as much. These are graphs of an untrained model, where very
# many paths count. Where one path stands out in each sentence, as after training,
# posteriors are near 0 and 1, and the error of the walk is below a tenth of that.
#
# ## Rescaled probabilities
#
# {ref}`chap-dag-naive` gave up plain probabilities because they underflow. But a
# row may be multiplied by any number, as long as we remember it. Divide each row
# by its largest entry before the next step, and add the logarithm of the divisor
# to a running sum:
#
# $$
# \begin{gathered}
# \hat f_{i,u} = \frac{f_{i,u}}{s_1 s_2 \cdots s_i}, \\
# \log f_{M,L} = \log \hat f_{M,L} + \sum_{i=1}^{M} \log s_i.
# \end{gathered}
# $$ (eq-vec-scaled)
#
# The step itself is then what it was at the very beginning: a sum of products.
# For a whole row and a whole batch that is one matrix product, for which every
# machine has fast code.


# %%
def by_rescaled_rows(P_BML, E_BLL):
    """log f of a batch without padding, in probabilities rescaled per target."""
    row_BL = P_BML[:, 0] * (torch.arange(P_BML.shape[2]) == 0)
    log_scale_B = torch.zeros_like(row_BL[:, 0])
    for P_BL in P_BML.unbind(dim=1)[1:]:
        # The clamp avoids a division by zero where a row is all zeros.
        peak_B1 = row_BL.amax(dim=1, keepdim=True).clamp(min=1e-30)
        log_scale_B = log_scale_B + peak_B1.squeeze(1).log()
        row_B1L = torch.bmm((row_BL / peak_B1).unsqueeze(1), E_BLL)
        row_BL = row_B1L.squeeze(1) * P_BL
    return log_scale_B + row_BL[:, -1].log()


# %% [markdown]
# The gradients need no autograd either. Take $\alpha$ as a matrix with a row for
# each target, and beside it $\mathbf{G}$ with the entries
# $\mathbf{P}_u(y_{i+1})\,\beta_{i+1,u}$, each row in units of its own. The expected
# uses of an edge are a sum over targets, each term a factor that depends on $v$
# times one that depends on $u$, which is again a matrix product:
#
# $$
# \xi = \mathbf{E} \odot \big(\alpha^{\top}\, \mathbf{W}\, \mathbf{G}\big).
# $$ (eq-vec-product)
#
# The diagonal matrix $\mathbf{W}$ undoes the units, which need not even be
# remembered: each target but the first is entered by exactly one edge, so what
# step $i$ adds must sum to one.


# %%
def by_products(P_BML, E_BLL):
    """State and edge posteriors: two rescaled sweeps and one matrix product."""
    _, M, L = P_BML.shape
    is_start_L, is_end_L = torch.eye(L)[[0, -1]].to(P_BML)
    alpha, back = [P_BML[:, :1] * is_start_L], [P_BML[:, -1:] * is_end_L]
    for i in range(1, M):
        alpha.append(alpha[-1] @ E_BLL * P_BML[:, i : i + 1])
        back.append(back[-1] @ E_BLL.mT * P_BML[:, M - 1 - i : M - i])
        for rows in (alpha, back):
            rows[-1] = rows[-1] / rows[-1].amax(dim=2, keepdim=True)
    alpha_BML, G_BML = torch.cat(alpha[:-1], dim=1), torch.cat(back[-2::-1], dim=1)
    state_BML = (alpha_BML @ E_BLL) * G_BML
    share_BM1 = 1 / state_BML.sum(dim=2, keepdim=True)
    edge_BLL = E_BLL * ((alpha_BML * share_BM1).mT @ G_BML)
    first_B1L = is_start_L.expand_as(state_BML[:, :1])
    return torch.cat([first_B1L, state_BML * share_BM1], dim=1), edge_BLL


# %% [markdown]
# The package's backend `scaled` is built in this way and also takes padding and
# sentences without a path.
#
# This saves exponentials, the most expensive operation here. In log space each
# term needs one, in the forward pass and again in the backward pass. In
# probabilities each *edge* needs one, once for all targets.
#
# Rescaling keeps the digits, too: numbers near one have all their digits, and
# errors do not grow with the sentence. `scaled` takes float32 and gives float32,
# but also adds up in float64, which now costs little. In {numref}`fig-vec-digits`
# both log-space curves climb with the length of the sentence; the lowest one stays
# below half of the last digit of float32 (grey).

# %% mystnb={"figure": {"caption": "Error of float32 gradients against float64, as a share of the largest gradient: median of three untrained graphs with four states per target.", "name": "fig-vec-digits"}, "image": {"alt": "Autograd and the walk rise with the number of targets, from 1e-6 to above 1e-5; probabilities stay flat below 1e-7."}} tags=["remove-input"]
from exlm_mini.alignment.check import relative_error

scaled = partial(dag_log_likelihood, backend="scaled")


@cache
def judged_graph(M, seed, is_sharp):
    """A float32 graph, and its gradients in float64."""
    graph = made_graph(Shape(1, M, 4 * M), is_sharp, cpu, torch.float32, seed)
    return graph, value_and_gradients(vectorized, *graph.double())[1:]


def gradient_error(function, M, seed, is_sharp=False):
    """Relative error of the float32 gradients, the larger of the two."""
    graph, judge = judged_graph(M, seed, is_sharp)
    _, *ours = value_and_gradients(function, *graph)
    assert ours[0].dtype == torch.float32 and judge[0].dtype == torch.float64
    return max(relative_error(a, b) for a, b in zip(ours, judge, strict=True))


def error_curve(function, **options):
    """Median error over three graphs, for each number of targets."""
    curve = {}
    for M in lengths:
        errors = [gradient_error(function, M, seed, **options) for seed in range(3)]
        curve[M] = float(np.median(errors))
    return curve


lengths = scale.pick((8, 16, 32, 64, 128), (8, 16, 32, 64, 128, 256))
of_autograd, of_walk = error_curve(by_rows), error_curve(vectorized)
of_scaled = error_curve(scaled)
fig, ax = plt.subplots(figsize=(3.6, 3.9), layout="constrained")
errors = {
    "log space, autograd": (of_autograd, COLORS["mlm"]),
    "log space, walk (vectorized)": (of_walk, COLORS["exlm"]),
    "probabilities (scaled)": (of_scaled, COLORS["repeated-mlm"]),
}
for name, (curve, color) in errors.items():
    ax.loglog(curve.keys(), curve.values(), "o-", ms=4, color=color, label=name)
ax.axhline(2.0**-24, color="0.5", lw=1, ls="-.")
style = {"fontsize": 8, "color": "0.3"}
ax.text(lengths[0], 2.0**-24 * 1.15, "half of the last digit", **style)
ax.set_xticks(lengths, [str(M) for M in lengths])
ax.minorticks_off()
fig.legend(loc="outside lower center", fontsize=8)
_ = ax.set(xlabel="targets M", ylabel="relative error", ylim=(1e-8, 1e-3))

# %% [markdown]
# ## Underflow
#
# Each row is divided by its largest entry, so nothing can overflow. But an entry
# can underflow: one scale serves a whole row, and an entry smaller than the largest
# by more than the range of the format, $10^{-45}$ for float32, becomes zero. That
# would not matter if small entries were unimportant. But {numref}`fig-vec-table`
# showed where the large entries stand: at the far right, in states that can no
# longer reach the end with so many words left. The entries that matter may be
# arbitrarily far below.

# %% tags=["remove-input"]
outcome = {}
for M in (64, 128, 192):
    graph = made_graph(Shape(1, M, 2 * M), False, cpu, torch.float32)
    naively = by_rescaled_rows(*(t.exp() for t in graph[:2])).item()
    wrong_by = abs(naively - vectorized(*graph.double()).item())
    close = "right" if wrong_by < 0.01 else "wrong"
    outcome[M] = "no path" if naively == -math.inf else close
assert list(outcome.values()) == ["right", "wrong", "no path"]
assert math.comb(2 * 192 - 2, 192 - 2) > 1e100
outcome

# %% [markdown]
# With 64 targets the loss is right. With 128 it is wrong, and looks like any other
# number. With 192 the sentence seems to have no path, though it has more than
# $10^{100}$ of them; code that replaces an infinite loss by zero, to keep
# running, would drop it silently. This happens at the *start* of training, when
# all edges are about equally likely, and goes away as they become sharp.
#
# {numref}`fig-vec-underflow` shows one target in the middle of the last of these
# sentences. The scale of the row is set by states beyond the cone. The states
# that hold the posterior lie below what float32 can represent.

# %% mystnb={"figure": {"caption": "One row of the table, 192 targets and 384 states: f relative to its largest entry, and the posterior. To the right of the dotted line no path can be.", "name": "fig-vec-underflow"}, "image": {"alt": "f peaks right of the dotted line. The posterior peaks near the middle, where f is 60 powers of ten smaller, below the end of float32."}} tags=["remove-input"]
graph_192 = graph.double()
i = M // 2
with torch.no_grad():
    log_f_L = log_f_rows(*graph_192[:2])[0, i]
    log_beta_L = log_beta_rows(*graph_192[:2])[i][0]
log_posterior_L = log_f_L + log_beta_L - vectorized(*graph_192)
state_L = np.arange(2 * M)
fig, ax = plt.subplots(figsize=(3.6, 3.6), layout="constrained")
curves = {
    "f, relative to the largest": (log_f_L - log_f_L.max(), COLORS["mlm"], "-"),
    "posterior": (log_posterior_L, COLORS["exlm"], "-"),
}
for name, (log_L, color, style) in curves.items():
    shown_L = (log_L / math.log(10)).masked_fill(log_L == -torch.inf, torch.nan)
    ax.plot(state_L, shown_L, style, color=color, label=name)
ax.axhline(-45, color="0.4", lw=1, ls="-.")
style = {"fontsize": 8, "color": "0.3", "va": "top"}
ax.text(i, -46, "float32 ends here", **style)
ax.axvline(i + M + 0.5, color="0.4", lw=1, ls=":")
fig.legend(loc="outside lower center", fontsize=8)
_ = ax.set(xlabel=f"state u, at target i = {i}", ylabel="log₁₀", ylim=(-130, 4))
_ = ax.set(xlim=(i - 4, 2 * M + 2))

# %% [markdown]
# The package has three answers.
#
# 1. *Range.* The sums are float64, which reaches down to $10^{-308}$.
# 2. *Cone.* States that no path can visit are left out before the scale is taken.
#    Then they cannot set it, and there is less work.
# 3. *Proof.* These two are not enough for every graph. So to every entry that a
#    path may use `scaled` adds a number near the smallest there is. An entry can
#    then be too large, but never too small. Afterwards it bounds what all these
#    additions can have contributed to the likelihood. If that is below $2^{-40}$ of
#    the likelihood, the result is exact to that fraction. If not, this one sentence
#    is computed again in log space. So underflow can cost time, but not the result.
#
# With these, the sentences that went wrong above come out right. The check adds a
# sentence that needs the third: a state inside the cone that no edge leaves gives
# one target $e^{800}$ times the probability that other states give it. This state
# sets the scale and leads nowhere. In a batch of three the package must then be
# sure of the other two sentences, but not of this one.

# %% mystnb={"code_prompt_show": "Checked: operations are linear in M, numbers computed grow with M and with the square of L; the recorded times; errors of scaled stay below 1e-6 whatever the length; what float32 loses holds 99% of the posterior; the package is right on all of these and knows which sentence its sweeps are not sure of"} tags=["hide-cell", "check"]
from torch.utils.flop_counter import FlopCounterMode

from exlm_mini.alignment import scaled as rescaling

best = int(log_posterior_L.argmax())
lost_L = log_f_L - log_f_L.max() < math.log(2.0**-149)  # smallest float32 number
assert log_f_L.argmax() > i + M >= best  # the scale is set outside the cone
assert lost_L[best] and log_posterior_L[lost_L].exp().sum() > 0.99

operations = {
    M: tally(vectorized, 1, M, 64).num_operations for M in (8, 16, 32, 64)
}
per_target = (operations[64] - operations[8]) / (64 - 8)
for M, number in operations.items():
    assert number == operations[8] + per_target * (M - 8)
    assert number == tally(vectorized, 1, M, 128).num_operations
    assert number == tally(vectorized, 3, M, 64).num_operations
assert 20 < per_target < 100

by_targets = {M: tally(vectorized, 1, M, 128).num_values for M in (16, 32, 64, 128)}
by_states = {L: tally(vectorized, 1, 16, L).num_values for L in (64, 128, 256, 512)}
assert abs(slope(by_targets) - 1) < 0.05
assert abs(slope(by_states) - 2) < 0.05

assert abs(slopes["vectorized, operations"] - 1) < 0.05
assert abs(slopes["vectorized, numbers"] - 3) < 0.1
assert 2.8 < slopes["three loops, operations"] < 3.5
num_terms = (10 - 1) * 40 * 39 // 2
assert loops[10].num_operations > num_terms > ours[10].num_operations

if not is_gpu:
    busy = {n: ms for n, ms in by_backend["vectorized"].items() if n > 1e6}
    assert 0.6 < slope(busy) < 1.4  # a CPU follows the work
    for name in {"scaled", "native"} & by_backend.keys():
        shared = by_backend[name].keys() & by_backend["vectorized"].keys()
        assert (
            by_backend[name][max(shared)]
            < by_backend["vectorized"][max(shared)] / 2
        )

for curve in (of_autograd, of_walk):
    assert curve[128] > curve[32] > curve[8] and curve[128] > 4 * curve[8]
assert of_autograd[128] > 2 * of_walk[128]
assert 1e-6 < of_walk[128] < 1e-4

of_sharp_walk = gradient_error(vectorized, 128, seed=0, is_sharp=True)
assert of_sharp_walk < of_walk[128] / 10

unpadded = ([2] * 3, [5] * 3), ([5] * 2, [9] * 2)
for sizes, seed in itertools.product(unpadded, seeds):
    graph = random_graph(*sizes, seed)
    probabilities = [t.exp() for t in graph[:2]]
    log_f_B = by_rescaled_rows(*probabilities)
    for backend in ("enumerate", "vectorized", "scaled"):
        torch.testing.assert_close(log_f_B, dag_log_likelihood(*graph, backend))
        package = posteriors(*graph, backend)
        torch.testing.assert_close(by_products(*probabilities), tuple(package))
for sizes, seed, density in itertools.product(batches.values(), seeds, (1, 0.5)):
    graph = random_graph(*sizes, seed, density)
    judge, ours = (
        value_and_gradients(partial(dag_log_likelihood, backend=name), *graph)
        for name in ("enumerate", "scaled")
    )
    torch.testing.assert_close(ours, judge, rtol=1e-10, atol=1e-10)

B, M, L = 2, 20, 80
exps = {f: tally(f, B, M, L).num_exps for f in (vectorized, scaled)}
assert exps[vectorized] == 2 * (M - 1) * B * L * L
assert exps[scaled] <= 2 * B * L * (L + M)
with FlopCounterMode(display=False) as flops:
    by_products(*(t.exp() for t in made_graph(Shape(B, M, L), False, cpu)[:2]))
assert flops.get_total_flops() == 4 * 2 * (M - 1) * B * L * L

assert max(of_scaled.values()) < 1e-6
assert of_walk[128] > 10 * of_scaled[128]

for M in outcome:
    graph = made_graph(Shape(1, M, 2 * M), False, cpu, torch.float32)
    exact = vectorized(*graph.double())
    assert relative_error(scaled(*graph), exact) < 1e-6

three = made_graph(Shape(3, 8, 16), False, cpu, torch.float64)
log_P_BML, log_E_BLL, *counts = three
log_P_BML[1, 4, :] -= 800.0
log_P_BML[1, 4, 9] += 800.0  # likely only at state 9 ...
log_E_BLL[1, 9, :] = -torch.inf  # ... which no edge leaves
trap = log_P_BML, log_E_BLL, *counts
exact = value_and_gradients(vectorized, *trap)
naively = by_rescaled_rows(*(t.exp() for t in trap[:2]))
assert naively.isfinite().tolist() == [True, False, True]  # in float64
torch.testing.assert_close(value_and_gradients(scaled, *trap), exact)
# The sweeps alone report which sentence they are not sure of.
_, is_exact_B = rescaling.rescaled_log_likelihood(*trap)
assert is_exact_B.tolist() == [True, False, True]
assert rescaling.TOLERANCE == 2.0**-40

# %% [markdown]
# The compiled backend of {ref}`chap-dag-cuda` has a finer scale: one exponent per
# target and *group* of states.
#
# ## Summary
#
# - Only the targets have to wait for each other. States and sentences become the
#   width of one operation per target: $\mathcal{O}(M)$ operations,
#   $\mathcal{O}(M L^2)$ work, both counted.
# - A log-sum-exp over nothing needs a guard for the value and one for the
#   gradient. The package's backward pass is a Markov chain instead, in numbers
#   between 0 and 1.
# - A backward pass written by hand keeps $\mathcal{O}(B L (M + L))$ numbers,
#   autograd $\mathcal{O}(B M L^2)$: 35 MiB against 1.7 GiB for the example of
#   Appendix I.4.
# - In log space float32 loses digits with the number of targets. Rescaled
#   probabilities do not, and replace exponentials by matrix products; what
#   underflow may have hidden is bounded, and computed again where it matters.
#
# ## Exercises
#
# **1. The best path.** Put `torch.amax` in place of the log-sum-exp in
# `by_rows`. First predict its value and its gradient; then use it to write
# `best_path`, which returns the states (B, M) of the likeliest paths and their
# log-scores (B,). The judge ignores what stands in the padding.

# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
from exlm_mini.alignment import viterbi


def judge_best_path(answer):
    graph = random_graph([5, 3], [9, 7], seed=3)
    found = answer(*graph)
    if found is None:
        return "not yet"
    path_BM, log_score_B = viterbi(*graph, backend="vectorized")
    is_target_BM = path_BM >= 0  # -1 is padding
    is_right = torch.equal(found[0][is_target_BM], path_BM[is_target_BM])
    is_right = is_right and torch.allclose(found[1], log_score_B)
    return "right" if is_right else "not the path that viterbi finds"


assert judge_best_path(lambda *graph: None) == "not yet"


# %%
def best_path(log_P_BML, log_E_BLL, num_targets_B, num_states_B):
    """States (B, M) of the likeliest paths, and their log-scores (B,)."""
    ...  # your turn


judge_best_path(best_path)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def best_path(*graph):
    # A maximum has gradient 1 at its argmax, so the gradients mark the path.
    best_B, gradient_BML, _ = value_and_gradients(
        partial(by_rows, log_sum=torch.amax), *graph
    )
    return gradient_BML.argmax(dim=2), best_B


assert judge_best_path(best_path) == "right"

# %% [markdown]
# **2. Fewer steps that wait.** Let $\mathbf{T}_i$ be the matrix with entries
# $\mathbf{E}_{v,u}\mathbf{P}_u(y_i)$. Then $f_{M,L}$ is $\mathbf{P}_1(y_1)$ times
# an entry of the product $\mathbf{T}_2 \mathbf{T}_3 \cdots \mathbf{T}_M$.
# Products can be bracketed in any way: multiply neighbours in pairs, then the
# results in pairs, and so on. Implement that. How many steps have to wait for each
# other for 33 targets, and why does it not pay here, though it does for chains of
# few states?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_by_pairs(answer):
    for M, fewest in ((33, 5), (12, 4)):  # of 11 matrices one has no partner
        probabilities = [t.exp() for t in random_graph([M], [2 * M], seed=5)[:2]]
        found = answer(*(t[0] for t in probabilities))
        if found is None:
            return "not yet"
        wanted = by_rescaled_rows(*probabilities).exp()
        if not math.isclose(found[0], wanted, rel_tol=1e-10):
            return "not the sum over all paths"
        if found[1] != fewest:
            return "there is a way with fewer rounds"
    return "right"


assert judge_by_pairs(lambda P_ML, E_LL: None) == "not yet"


# %%
def by_pairs(P_ML, E_LL):
    """f[M, L] from products of neighbouring pairs, and the number of rounds."""
    ...  # your turn


judge_by_pairs(by_pairs)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def by_pairs(P_ML, E_LL):
    T_iLL = E_LL * P_ML[1:].unsqueeze(1)
    num_rounds = 0
    while len(T_iLL) > 1:
        odd_LL = T_iLL[len(T_iLL) // 2 * 2 :]  # one without a partner
        pairs = T_iLL[: len(T_iLL) // 2 * 2]
        T_iLL = torch.cat([torch.bmm(pairs[::2], pairs[1::2]), odd_LL])
        num_rounds += 1
    return P_ML[0, 0] * T_iLL[0, 0, -1], num_rounds


assert judge_by_pairs(by_pairs) == "right"

# A matrix-matrix product costs L times as much as a vector-matrix product: little
# for the few tags of a conditional random field, much where L is several times M.
probabilities = [t.exp() for t in random_graph([33], [66], seed=5)[:2]]
with FlopCounterMode(display=False) as in_pairs:
    by_pairs(*(t[0] for t in probabilities))
with FlopCounterMode(display=False) as in_rows:
    by_rescaled_rows(*probabilities)
ratio = in_pairs.get_total_flops() / in_rows.get_total_flops()
assert math.isclose(ratio, 66 * 31 / 32)
f"5 rounds in place of 32 steps, for {ratio:.0f} times the work"
