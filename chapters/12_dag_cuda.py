# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-dag-cuda)=
# # GPU kernels, proved on a CPU
#
# {ref}`chap-dag-vectorized` took the loops over states and sentences out of Python.
# This chapter compiles the dynamic programme, in C++ for the cores of a CPU and in
# CUDA for the thread blocks of a GPU. Here the CUDA kernels run on a CPU, thread by
# thread, where more of their errors show; times on an H100 are recorded.
#
# You cut the states into tiles, so that most of the programme becomes matrix
# products, give each tile an exponent of its own, find a graph on which two sweeps
# agree on a wrong result, run GPU kernels on a CPU, and delete barriers to see what
# happens.
#
# **It takes** 50 minutes and half a minute of one CPU core, with a C++ compiler.
# **Paper:** Appendix I of {cite}`zheng2025exlm`. The paper runs the kernels of
# DA-Transformer {cite}`huang2022datransformer`; those of this book are new and
# work differently. Their sources are in the folder `cuda/`.

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
from matplotlib.patches import Rectangle

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()

# %%
import ctypes
import itertools
import json
import math
import re
import subprocess
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from live import chapter_scale

from exlm_lab.benchmarks.dag import made_graph
from exlm_lab.benchmarks.record import Shape
from exlm_mini.alignment import (
    build,
    dag_log_likelihood,
    dag_loss,
    native,
    posteriors,
)

scale = chapter_scale()

# %% [markdown]
# `T` is the number of states in a tile. Numbers are float32, whose limits are a
# subject of the chapter; they are compared with float64.
#
# ## One product for all targets
#
# The backends `vectorized` and `scaled` go target by target, with one large
# operation each. Three things take time, the last two in both, here for the
# example of Appendix I.4, 77 targets and 308 states:
#
# - *Exponentials.* In log space each term of each target needs one, forward and
#   backward; `scaled` needs one for each edge.
# - *Reading.* The whole transition matrix is read again for every target, 76 times
#   in each direction. For one sentence it takes 380 kB, for a batch 24 MB: more
#   than the caches next to a core hold.
# - *Waiting.* Target $i$ waits for target $i - 1$, and a new operation has to be
#   started for each.
#
# The repeated reading can be avoided by another order of work. The table of the
# recursion
#
# $$
# f_{i,u} = \mathbf{P}_u(y_i) \sum_{v<u} f_{i-1,v}\, \mathbf{E}_{v,u}
# $$ (eq-cuda-recursion)
#
# may be filled in row by row, as before. It may equally well be filled in *column
# by column*: for all targets, state $u$ needs only states before $u$. Cut the
# states into tiles of $T$ neighbours. For a tile $t$, split the sum into states of
# earlier tiles and states of the same tile:
#
# $$
# \begin{gathered}
# \sum_{v<u} f_{i-1,v}\,\mathbf{E}_{v,u} = {} \\
# \underbrace{\sum_{v \,\text{before tile}\, t} f_{i-1,v}\,\mathbf{E}_{v,u}}
# _{\text{known for all } i} + {} \\
# \underbrace{\sum_{v \,\text{in tile}\, t,\; v<u} f_{i-1,v}\,\mathbf{E}_{v,u}}
# _{\text{target by target}} .
# \end{gathered}
# $$ (eq-cuda-split)
#
# Once the earlier tiles are finished, the first part is *one matrix product for all
# targets at once*. The second is a small triangle.
#
# {numref}`fig-cuda-tiles` shows the split for 32 states in tiles of 8. To finish
# the third tile, multiply the finished part of the table (above, blue) by one
# block column of edges (below, blue), and then walk through the triangle
# (yellow). Every edge is needed for one tile only, so it is read once.

# %% mystnb={"figure": {"caption": "Above: the table f, with the cone (dashed). Below: the edges. Blue times blue is what enters the third tile, a single product for all targets; the yellow triangle joins states of the tile itself.", "name": "fig-cuda-tiles"}, "image": {"alt": "Above, a table whose left half is blue, finished, with a yellow column for the current tile. Below, a triangle of edges with a blue block above a small yellow triangle."}} tags=["remove-input"]
import numpy as np

M, L, T, t = 10, 32, 8, 2
fig, (ax, right) = plt.subplots(2, 1, figsize=(3.6, 5.6), height_ratios=(1, 2))
finished, current = "#c9d8ee", COLORS["mask"]
ax.add_patch(Rectangle((0, 0), t * T, M, color=finished))
ax.add_patch(Rectangle((t * T, 0), T, M, color=current, alpha=0.55))
ax.text(t * T * 0.7, M / 2, "finished", ha="center", va="center")
ax.text(t * T + T / 2, M / 2, "tile t", ha="center", va="center")
for shift in (0, L - M + 1):
    ax.plot([shift, shift + M], [0, M], "--", color="0.2", lw=1)
for u in range(T, L, T):
    ax.axvline(u, color="white", lw=1.5)
ax.set(xlim=(0, L), ylim=(M, 0), xlabel="state", ylabel="target", yticks=(0, 5))
ax.set_title("table f", loc="left")
u = np.arange(L)
kind_LL = np.where(u[:, None] < u, 1.0, np.nan)
right.imshow(kind_LL, cmap="Greys", vmin=0, vmax=8, extent=(0, L, L, 0))
right.add_patch(Rectangle((t * T, 0), T, t * T, color=finished))
corners = [(t * T, t * T), (t * T + T, t * T), (t * T + T, t * T + T)]
right.add_patch(plt.Polygon(corners, color=current, alpha=0.55))
for x in range(T, L, T):
    right.axvline(x, color="white", lw=1.5)
    right.axhline(x, color="white", lw=1.5)
right.set(xlabel="to state u", ylabel="from state v")
right.set_title("edges E", loc="left")
for panel in (ax, right):
    panel.grid(False)

# %% [markdown]
# How much of the work is in products? Of the $L(L - 1)/2$ edges, $T - 1$ of every
# $L - 1$ are in triangles, if $T$ divides $L$. So the smaller the tile, the larger
# the share of products; and the larger the tile, the fewer tiles have to wait for
# each other.


# %% tags=["remove-input"]
def share_in_triangles(L, T):
    """Share of all edges v < u that join two states of one tile."""
    tile_L = torch.arange(L) // T
    is_edge_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    is_inner_LL = is_edge_LL & (tile_L.unsqueeze(1) == tile_L)
    return (is_inner_LL.sum() / is_edge_LL.sum()).item()


M, L = 77, 308
assert math.isclose(share_in_triangles(1024, 32), 31 / 1023, rel_tol=1e-6)
assert share_in_triangles(L, 1) == 0 and share_in_triangles(L, L) == 1
for T in (8, 16, 32, 77):
    print(
        f"tiles of {T:2}: {share_in_triangles(L, T):5.1%} of the edges in triangles"
    )

# %% [markdown]
# Here is the whole algorithm for one sentence. It works in probabilities and
# gives each tile of each target an integer exponent: mantissas $x$ with exponent
# $e$ stand for $x \cdot 2^e$. The next section says why. Ignore `lift` until the
# section after that.

# %%
NONE = -(10**8)  # exponent of an exact zero


def times_two_to(x, exponent):
    """Each row of x (last dimension) times two to the power of its exponent."""
    return x * exponent.to(x.dtype).exp2().unsqueeze(-1)


def in_units(x):
    """Rows of x as mantissas below one, and the exponent of each row."""
    peak = x.amax(dim=-1)
    exponent = torch.frexp(peak).exponent.long()
    return times_two_to(x, -exponent), exponent.where(peak > 0, NONE)


def exp_in_units(log_x):
    """The same for exp(log_x), however large or small the logarithms are."""
    log2_peak = (log_x.amax(dim=-1) / math.log(2)).nan_to_num(neginf=0.0)
    exponent = log2_peak.floor().long() + 1
    log_unit = exponent.to(log_x.dtype) * math.log(2)
    return (log_x - log_unit.unsqueeze(-1)).exp(), exponent


def sweep(log_P_ML, log_E_LL, tile, lift=0.0):
    """f of one sentence: mantissas (M, L), exponents (M, tiles)."""
    M, L = log_P_ML.shape
    E_LL = log_E_LL.exp()
    tables, units = [], []
    for begin in range(0, L, tile):
        here = slice(begin, min(begin + tile, L))
        P_MT, P_unit_M = exp_in_units(log_P_ML[:, here])
        lift_MT = lift * (log_P_ML[:, here] > -torch.inf)
        entering_MT, unit_M = torch.zeros_like(P_MT), torch.full((M,), NONE)
        if begin > 0:  # all that enters from earlier tiles: one matrix product
            unit_M = torch.stack(units).amax(dim=0)
            earlier = zip(tables, units, strict=True)
            aligned = [times_two_to(x_MT, e_M - unit_M) for x_MT, e_M in earlier]
            entering_MT = torch.cat(aligned, dim=1) @ E_LL[:begin, here]
        is_start_T = torch.arange(here.start, here.stop) == 0
        row_T, row_unit = in_units(is_start_T * P_MT[0])
        rows = [(row_T, row_unit + P_unit_M[0])]
        for i in range(1, M):  # the triangle, target by target
            row_T, row_unit = rows[-1]
            unit = torch.maximum(unit_M[i - 1], row_unit)
            reach_T = times_two_to(entering_MT[i - 1], unit_M[i - 1] - unit)
            reach_T = (
                reach_T + times_two_to(row_T, row_unit - unit) @ E_LL[here, here]
            )
            emitted_T = (reach_T + lift_MT[i]) * P_MT[i] + lift_MT[i]
            row_T, shift = in_units(emitted_T)
            rows.append((row_T, unit + shift + P_unit_M[i]))
        tables.append(torch.stack([row_T for row_T, _ in rows]))
        units.append(torch.stack([unit for _, unit in rows]))
    return torch.cat(tables, dim=1), torch.stack(units, dim=1)


def by_tiles(log_P_ML, log_E_LL, tile=16, lift=0.0):
    """log f[M, L], with the last sum in float64."""
    table_ML, unit_Mt = sweep(log_P_ML, log_E_LL, tile, lift)
    last, unit = table_ML[-1, -1].double(), unit_Mt[-1, -1].double()
    has_path = last > 0  # else -inf, with gradient 0
    log_last = last.where(has_path, 1.0).log() + unit * math.log(2)
    return log_last.where(has_path, -torch.inf)


# %% [markdown]
# A product mixes tiles of different exponents, so they are aligned first: `unit_M`
# is the largest exponent that a target has in any earlier tile. Whatever is so
# small that it vanishes beside that is also too small to matter for this product.
# Inside the tile the same is done for each target.
#
# Value and gradients equal enumeration on all kinds of small graphs:
# with all edges, with half of them, without a path, and for tiles that do or do not
# divide the number of states. (The gradients come from autograd, which passes
# through `sweep`; the compiled code has something better.)
#
# In float32 it also agrees with `vectorized` in float64 on a graph of the paper's
# size, where the sum runs over more than $10^{70}$ paths.


# %% mystnb={"code_prompt_show": "Checked: value and gradients equal enumeration on small graphs of all kinds and tile sizes; in float32 a graph of the paper's size is right to 1e-7, its gradients to 1e-5"} tags=["hide-cell", "check"]
def random_graph(M, L, seed, density=1.0, dtype=torch.float64):
    """One row: random emissions; each forward edge exists with chance `density`."""
    rng = torch.Generator().manual_seed(seed)
    P_BML = torch.rand(1, M, L, generator=rng, dtype=dtype)
    E_BLL = torch.rand(1, L, L, generator=rng, dtype=dtype).triu(1)
    E_BLL = E_BLL * (torch.rand(1, L, L, generator=rng) < density)
    return P_BML.log(), E_BLL.log(), torch.tensor([M]), torch.tensor([L])


def value_and_gradients(function, graph):
    """log f (B,) and both gradients of its sum, zero where there is no path."""
    leaves = [t.clone().requires_grad_() for t in graph[:2]]
    log_f_B = function(*leaves, *graph[2:])
    total = log_f_B.where(log_f_B != -torch.inf, 0.0).sum()
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return log_f_B.detach(), *gradients


def tiled(log_P_BML, log_E_BLL, *counts, **options):
    """by_tiles as a backend, for a batch of one."""
    return by_tiles(log_P_BML[0], log_E_BLL[0], **options).unsqueeze(0)


def backend(name):
    """A backend of the package as a function of the four arguments."""
    return partial(dag_log_likelihood, backend=name)


num_without_path = 0
sizes = [(1, 1), (2, 2), (2, 7), (3, 8), (5, 5), (5, 9), (6, 4)]
seeds = range(scale.pick(3, 30))
for (M, L), seed, density in itertools.product(sizes, seeds, (1.0, 0.5)):
    graph = random_graph(M, L, seed, density)
    judge = value_and_gradients(backend("enumerate"), graph)
    num_without_path += int(judge[0] == -torch.inf)
    for tile in (1, 2, 3, 8):
        ours = value_and_gradients(partial(tiled, tile=tile), graph)
        torch.testing.assert_close(ours, judge, rtol=1e-10, atol=1e-10)
assert num_without_path > 6

from exlm_mini.alignment.check import relative_error

cpu = torch.device("cpu")
flat = made_graph(Shape(1, 77, 308), False, cpu)  # as an untrained model makes it
exact = value_and_gradients(backend("vectorized"), flat.double())
ours = value_and_gradients(tiled, flat)
errors = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
assert ours[1].dtype == torch.float32 and math.comb(306, 75) > 1e70
assert errors[0] < 1e-7 and max(errors[1:]) < 1e-5

# %% [markdown]
# The gain is again counted in exponentials, and in passes over the edges. (The
# compiled code exponentiates edges a third time for the gradient, rather than keep
# them.)

# %% tags=["remove-input"]
M, L = 77, 308
in_log_space = 2 * (M - 1) * L * L  # all terms, forward and backward
in_tiles = 3 * L * (L - 1) // 2 + 2 * M * L
assert 70 < in_log_space / in_tiles < 90
print(f"exponentials in log space {in_log_space:,}, in tiles {in_tiles:,}")
print(f"passes over the edges, row by row {2 * (M - 1)}, in tiles 3")

# %% [markdown]
# ## One exponent for every tile
#
# {ref}`chap-dag-vectorized` divided each row of the table by its largest entry, and
# float32 underflowed: with 192 targets and 384 states *no path at all* was left.
# One exponent per target is the same as a single tile, so our function can compute
# both.

# %% tags=["remove-input"]
outcome = {}
for M in (64, 128, 192):
    graph = made_graph(Shape(1, M, 2 * M), False, cpu)
    truth = backend("vectorized")(*graph.double()).item()
    for name, tile in (("a target", 2 * M), ("a tile of 16", 16)):
        wrong_by = abs(tiled(*graph, tile=tile).item() - truth)
        verdict = "no path" if wrong_by == math.inf else "wrong"
        outcome[M, name] = "right" if wrong_by < 1e-4 else verdict
verdicts = {
    name: [v for (_, n), v in outcome.items() if n == name] for _, name in outcome
}
print(f"{'targets':29}" + "".join(f"{M:9}" for M in (64, 128, 192)))
for name, found in verdicts.items():
    print(f"an exponent for {name:13}" + "".join(f"{v:>9}" for v in found))
assert verdicts["a target"] == ["right", "wrong", "no path"]
assert verdicts["a tile of 16"] == ["right"] * 3

# %% [markdown]
# {numref}`fig-cuda-range` shows one target in the middle of the longest of these
# sentences. The black curve is the true size of its entries, which span more than a
# hundred powers of ten. Float32 holds what lies in a band of 45 powers of ten below
# the unit: one band for the whole row (grey), or one for each tile (yellow), which
# follows the curve.

# %% mystnb={"figure": {"caption": "f of one target (of 192) over 384 states. A band reaches from the unit down to the smallest number that float32 has in it; entries below a band are lost.", "name": "fig-cuda-range"}, "image": {"alt": "A black curve rises from minus 145 to zero. The grey band covers its last third, the yellow steps cover all of it."}} tags=["remove-input"]
i, tile = 96, 16
table_ML, unit_Mt = sweep(*(t[0].double() for t in graph[:2]), tile)
L = table_ML.shape[1]
log2_f_L = table_ML[i].log2() + unit_Mt[i].repeat_interleave(tile)
log_f_L = (log2_f_L - log2_f_L.max()) * math.log10(2)
units_t = (unit_Mt[i] - log2_f_L.max()) * math.log10(2)
depth = 149 * math.log10(2)
fig, ax = plt.subplots(figsize=(3.6, 3.8), layout="constrained")
ax.fill_between(
    [0, L], 0, -depth, color="0.88", label="one exponent for the target"
)
for t, unit in enumerate(units_t):
    label = "one exponent for a tile" if t == len(units_t) - 1 else None
    span = (t * tile - 0.5, (t + 1) * tile - 0.5)
    band = {"color": COLORS["mask"], "alpha": 0.6, "lw": 0, "label": label}
    ax.fill_between(span, unit, unit - depth, **band)
shown_L = log_f_L.masked_fill(log_f_L == -torch.inf, torch.nan)
ax.plot(shown_L, color="black", lw=1.5, label="f, relative to the largest")
fig.legend(loc="outside lower center", fontsize=8)
_ = ax.set(xlabel=f"state u, at target {i}", ylabel="log₁₀ of f", xlim=(i - 5, L))
_ = ax.set(ylim=(-190, 5))

# %% [markdown]
# Inside a tile of 16 or 32 states the curve falls little. And for the product,
# large entries of *later* tiles do not matter, since edges only go forward. So an
# exponent per (target, tile), one integer for 16 or 32 numbers, removes the limit
# on length.
#
# ## How to know that nothing was lost
#
# The range is still not sufficient for *every* graph. An edge of $e^{-130}$ is zero
# in float32 before any exponent can help it. One might hope to notice by comparing:
# $\alpha$ and $\beta$ both yield $f_{M,L}$, and if underflow spoils one, why should
# it spoil the other equally? Here is a graph on which it does, with ten targets and
# two ways from start to end. The way through the odd states costs 130 nats at its
# first step and 130 at its last; the way through the even states costs 50 at each
# of nine steps.


# %%
def two_ways():
    """Two paths: one costs 260 nats at its ends, the other 450 evenly."""
    M, L = 10, 20
    log_E_LL = torch.full((L, L), -torch.inf)
    odd = [0, *range(1, 2 * M - 3, 2), L - 1]
    even = [0, *range(2, 2 * M - 2, 2), L - 1]
    for path, cost in ((odd, 0.0), (even, 50.0)):
        for v, u in pairwise(path):
            log_E_LL[v, u] = -cost
    log_E_LL[odd[0], odd[1]] = log_E_LL[odd[-2], odd[-1]] = -130.0
    counts = torch.tensor([M]), torch.tensor([L])
    return torch.zeros(1, M, L), log_E_LL.unsqueeze(0), *counts


def read_backwards(log_P_BML, log_E_BLL, *counts):
    """The reversed graph, whose forward sweep is our backward sweep."""
    return log_P_BML.flip(1, 2), log_E_BLL.flip(1, 2).mT, *counts


trap = two_ways()
trap_in_double = (trap[0].double(), trap[1].double(), *trap[2:])
truth = backend("vectorized")(*trap_in_double).item()
forward, backward = (tiled(*g).item() for g in (trap, read_backwards(*trap)))
print(f"forward {forward:.0f}, backward {backward:.0f}, truth {truth:.0f} nats")
assert math.isclose(truth, -260.0, abs_tol=1e-6)
assert math.isclose(forward, -450.0, abs_tol=1e-4)
assert math.isclose(forward, backward, abs_tol=1e-6)
assert math.exp(-130) > 0 and torch.tensor(-130.0).exp() == 0

# %% [markdown]
# The two sweeps agree to the last digit, on a result that is off by 190 nats. Each
# lost the better way at its own start. So comparing the sweeps proves nothing.
#
# Underflow only ever *takes away*. Without it the result would be larger: but for
# rounding, the sweep is a lower bound. An upper bound is found by adding, wherever
# a path may be, a little more than underflow can have taken there: the `lift` of
# our function. In units where entries of the table, edges and emissions are below
# 1, a number flushed to zero loses at most $2^{-126}$, the smallest normal number
# of float32 (processors may flush whatever is smaller), and a state has a few
# hundred terms. $2^{-100}$ is more than enough. So the truth lies between the
# sweeps with and without lift. If they agree, both are right.
#
# The package saves the second sweep. It adds the lift in its only one, so that both
# directions yield at least the truth. Then it bounds the excess. What was added to
# a state at one target raises the result by that amount times the value of the
# *other* direction there, of which an upper bound is known:
#
# $$
# \begin{aligned}
# \text{excess} \le
# \sum_{i,u} \big( & \text{lift}^{\alpha}_{i,u}\,\beta_{i,u} + {} \\
# & \text{lift}^{\beta}_{i,u}\,\alpha_{i,u}\big).
# \end{aligned}
# $$ (eq-cuda-excess)
#
# The bound needs only the exponents of each tile. Where it exceeds $2^{-26}$ of the
# likelihood (a quarter of a rounding error of float32), the sentence is computed
# again, in log space and double precision. `cuda/dag_graph.h` has the derivation,
# and counts what each step can lose.
#
# The compiled backend reports how it computed each sentence: 0 in tiles, 1 in log
# space. (Everything from here on needs a C++ compiler. Without one these cells do
# nothing.)

# %%
why_not = native.why_not("cpu")  # builds the library on first use
has_native = why_not is None
if not has_native:
    print("no compiled backend here:", why_not)


def status(graph):
    """How each sentence was computed: 0 tiles, 1 log space, 2 no path, 3 nan."""
    return torch.ops.exlm_mini.dag_log_likelihood(*graph)[3][:, 0].tolist()


if has_native:
    long = made_graph(Shape(1, 192, 384), False, cpu)
    print("untrained, two ways, 192 targets:", *map(status, (flat, trap, long)))

# %% [markdown]
# ## Compiled on first use
#
# The first call of `native` compiles the source with `torch.utils.cpp_extension`
# and keeps the library in a cache folder, which takes some seconds, once. A changed
# source, compiler or PyTorch gets a folder of its own. Without a compiler, `auto`
# falls back to `scaled` and warns once. `python -m exlm_mini.doctor` reports what a
# machine has, builds what it can, and checks every backend against enumeration.
#
# For PyTorch the library is two *operators*, one for the value and one for the
# gradients, so `torch.compile` does not break its graph in two. On a CPU any number
# of threads gives the same bits, because every number is computed by one thread, in
# an order that does not depend on the others. PyTorch has a test for operators:

# %%
small = made_graph(Shape(2, 5, 20), False, cpu)
if has_native:
    operator = torch.ops.exlm_mini.dag_log_likelihood
    verdict = torch.library.opcheck(operator, small)
    assert set(verdict.values()) == {"SUCCESS"} and len(verdict) == 4
    print(", ".join(sorted(verdict)))

# %% [markdown]
# {numref}`fig-cuda-speed` is the recorded benchmark of
# {ref}`chap-dag-vectorized` once more, as ratios: how many times as long as
# `native` the two backends in plain PyTorch take for both passes. Ratios within one
# process depend less on the machine than times do.

# %% mystnb={"figure": {"caption": "Recorded time of forward and backward pass, divided by that of the compiled backend.", "name": "fig-cuda-speed"}, "image": {"alt": "Ratios at six shapes. Vectorized takes five to several hundred times as long as native, scaled five to 20 times."}} tags=["remove-input"]
times = json.loads(Path("../book/results/bench-dag.json").read_text())
alike = ("benchmark", "dtype", "transitions", "threads")
times = [r for r in times if all(r[key] == times[0][key] for key in alike)]
by_backend = {}
for record in times:
    curve = by_backend.setdefault(record["backend"], {})
    curve[tuple(record["shape"])] = record["median_ms"]
shapes = sorted(by_backend["native"], key=lambda shape: math.prod(shape) * shape[2])
machine, num_threads = times[0]["machine"], times[0]["threads"]
on_cpu = f"{machine.get('cpu')}, {num_threads} thread{'s' * (num_threads > 1)}"
where = on_cpu if machine["device"] == "cpu" else machine["device"]
fig, ax = plt.subplots(figsize=(3.6, 3.4), layout="constrained")
ratios = {}
styles = {"vectorized": COLORS["exlm"], "scaled": COLORS["repeated-mlm"]}
for name, color in styles.items():
    ratios[name] = {
        shape: by_backend[name][shape] / by_backend["native"][shape]
        for shape in shapes
        if shape in by_backend[name]
    }
    places = [shapes.index(shape) for shape in ratios[name]]
    ax.semilogy(places, ratios[name].values(), "o-", color=color, label=name)
ax.axhline(1, color="0.4", lw=1, ls="-.")
ax.text(0, 1.06, "native", fontsize=9, color="0.3")
names = ["{}, {}, {}".format(*shape) for shape in shapes]
ax.set_xticks(range(len(shapes)), names, rotation=40, ha="right", fontsize=8)
ax.legend(loc="upper left")
ax.set_title(f"{where},\n{times[0]['dtype']}", fontsize=8, loc="left")
_ = ax.set(xlabel="B, M, L", ylabel="times as long as native")

# %% mystnb={"code_prompt_show": "Checked: most of the posterior lies below what one exponent can hold; with and without lift the sweeps disagree on the trap and the truth lies between; native against float64, in one compiled graph, with the same bits for any number of threads; at the largest shape ten times as fast as vectorized, twice as fast as scaled"} tags=["hide-cell", "check"]
from exlm_lab.benchmarks.measure import threads
from exlm_mini.alignment import viterbi
from exlm_mini.alignment.check import TOLERANCE, largest_error

is_used_L = log_f_L > -torch.inf
is_held_L = log_f_L > units_t.repeat_interleave(tile) - depth
assert is_held_L[is_used_L].all()
assert (log_f_L[is_used_L] < -depth).sum() > 50  # lost with one exponent
# Nearly all of the posterior lies on the lost states.
state_L = posteriors(*graph.double(), "vectorized").state_BML[0, i]
assert state_L[log_f_L < -depth].sum() > 0.99

enough = 2.0**-100
assert enough > 1000 * 3 * 308 * 2.0**-126
print("graph                   lower     truth     upper")
brackets = {}
for name, graph, log_f in (
    ("untrained, 77 x 308", flat, exact[0].item()),
    ("two ways", trap, truth),
):
    brackets[name] = [tiled(*graph, lift=lift).item() for lift in (0.0, enough)]
    low, high = brackets[name]
    print(f"{name:20} {low:8.0f}  {log_f:8.0f}  {high:8.0f}")
low, high = brackets["untrained, 77 x 308"]
assert high - low < 1e-7  # nothing was lost, and we know it
low, high = brackets["two ways"]
assert low + 100 < truth < high - 100  # the gap shows that something was lost

if has_native:
    for dtype, tolerance in TOLERANCE.items():
        assert largest_error("native", dtype) < tolerance

rows = torch.arange(3)
for is_sharp, dtype in itertools.product(
    (False, True), (torch.float32, torch.float64)
):
    made = made_graph(Shape(3, 77, 308), is_sharp, cpu, dtype)
    ragged = (*made[:2], 77 - 9 * rows, 308 - 40 * rows)
    limits = (1e-6, 1e-5, 1e-5) if dtype == torch.float32 else (1e-12, 1e-10, 1e-10)
    for graph in (made, ragged) if has_native else ():
        in_double = (graph[0].double(), graph[1].double(), *graph[2:])
        judge = value_and_gradients(backend("vectorized"), in_double)
        ours = value_and_gradients(backend("native"), graph)
        assert ours[0].dtype == dtype
        for mine, exact_one, limit in zip(ours, judge, limits, strict=True):
            assert relative_error(mine, exact_one) < limit


def loss(log_P_BML, log_E_BLL, num_targets_B, num_states_B):
    """Other operations around the operator, so that there is a graph to compile."""
    arguments = (2 * log_P_BML, 0.5 * log_E_BLL, num_targets_B, num_states_B)
    return -native.log_likelihood(*arguments) / num_targets_B


if has_native:
    # fullgraph=True raises an error if the graph would have to be broken.
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager_results = value_and_gradients(loss, small)
    torch.testing.assert_close(value_and_gradients(compiled, small), eager_results)

batch = made_graph(Shape(5, 30, 90), False, cpu)
answers = []
for num_threads in (1, 2, 5) if has_native else ():
    with threads(num_threads):
        path_BM, log_score_B = viterbi(*batch, backend="native")
        answers.append(
            (*value_and_gradients(backend("native"), batch), path_BM, log_score_B)
        )
for other in answers[1:]:
    assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))

for name, curve in ratios.items():
    largest = max(curve, key=shapes.index)  # the most terms, B M L²
    assert curve[largest] > (10 if name == "vectorized" else 2)

if has_native:
    assert status(flat) == [0] and status(trap) == [1]
    log_f, grad_BML, _ = value_and_gradients(backend("native"), trap)
    assert math.isclose(log_f.item(), -260.0, rel_tol=1e-6)
    assert math.isclose(grad_BML[0, 4, 7].item(), 1.0, rel_tol=1e-6)  # odd states
    assert status(long) == [0]

# %% [markdown]
# ## From threads to thread blocks
#
# A CPU has a few fast cores. A GPU such as the H100 has 132 multiprocessors with
# 128 simple arithmetic units each. CUDA starts a kernel as a *grid* of *blocks*. A
# block runs on one multiprocessor. Its threads share a small, fast memory there,
# and can wait for each other at a *barrier*; blocks, as a rule, cannot. 32 threads
# that run in step are a *warp*. So work that has to wait for other work must stay
# in its block, and independent work should be in different ones. The numbers below
# are read from the sources.

# %% tags=["remove-input"]
CUDA = build.SOURCE_DIR
HEADERS = sorted(CUDA.glob("dag_block*.h"))


def constant(name):
    """An integer constant of the kernels, as the headers define it."""
    text = "".join(file.read_text() for file in HEADERS)
    return int(re.search(rf"constexpr int {name} = (\d+);", text)[1])


TILE, ROWS, COLUMNS = (constant(name) for name in ("kTile", "kRows", "kColumns"))
SWEEP_THREADS = constant("kSweepThreads")
assert TILE == 32 and TILE % COLUMNS == 0 and ROWS % TILE == 0
print(f"tiles of {TILE} states, {ROWS} targets at a time, {SWEEP_THREADS} threads")

# %% [markdown]
# Five kernels do the work; a row is a sentence of the batch:
#
# | kernel | a block is | a thread is | what it does |
# |---|---|---|---|
# | scan | a row and a tile | every 32nd edge | the largest edge, any NaN |
# | sweep | a row and a direction | see below | $\alpha$ or $\beta$, tile by tile |
# | finish | a row | some exponents | the bound; log space, where it is needed |
# | gradient | a row, 32 × 32 edges | 4 × 4 edges | posteriors: edges, and states |
# | Viterbi | a row | a state | the best path |
#
# The two directions of a row are different blocks, and never wait for each other.
# With 64 rows that makes 128 blocks of the sweep: nearly one for each
# multiprocessor. The gradient of the edges is a matrix product
# ({ref}`chap-dag-vectorized`), and every 32 × 32 tile of it has a block of its own.
#
# {numref}`fig-cuda-blocks` shows one block of the sweep. *Above*, the matrix
# product of a tile: entries of the table times edges, 32 states at a time through
# shared memory. All eight warps take part; a thread has four states of up to four
# targets. *Below*, the triangle, where each lane (a thread of a warp) has one
# target. It has to be sequential, but in which direction? Target by target it would
# take 77 steps. But column $u$ needs earlier columns only, so it can be walked
# column by column as well: 32 steps for a warp, of 32 targets. In each
# step a target hands one number to the next target, that is a lane to the next
# lane. The last lane of a warp hands it to the next warp through shared memory, so
# the next warp runs one stage of four columns behind. A barrier closes each stage.

# %% mystnb={"figure": {"caption": "A block of the sweep kernel. Above: a pair of tiles is multiplied; one warp's share is framed. Below: the staircase through the triangle of a tile, for 77 targets in three warps. Vertical lines are barriers; a box holds the columns that a warp walks.", "name": "fig-cuda-blocks"}, "image": {"alt": "Above, entries times edges give a sum with the framed share of a warp. Below, three rows of eight boxes, each row one stage later than the row above it."}} tags=["remove-input"]
num_warps = -(-77 // TILE)
num_stages = num_warps + TILE // COLUMNS - 1
fig, (ax, right) = plt.subplots(2, 1, figsize=(3.9, 5.2), height_ratios=(1.4, 1))


def matrix(x, y, width, height, color, label):
    """Draw a matrix as a box, with its name and size above it."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="0.3"))
    ax.text(x + width / 2, y + height + 3, label, ha="center", fontsize=8)


matrix(0, 0, 32, 96, finished, "entries\n96 × 32")
matrix(46, 64, 32, 32, finished, "edges\n32 × 32")
matrix(92, 0, 32, 96, current, "sum\n96 × 32")
ax.text(39, 80, "×", ha="center", va="center")
ax.text(85, 80, "=", ha="center", va="center")
for k in range(3):  # warp 2 has the targets 8 .. 11 of each 32
    style = {"facecolor": "none", "edgecolor": COLORS["exlm"], "lw": 1.5}
    ax.add_patch(Rectangle((92, 96 - 32 * k - 12), 32, 4, **style))
words = "framed: a warp;\na thread has\n4 states of\n3 targets"
ax.text(62, 22, words, ha="center", fontsize=8)
ax.set(xlim=(-3, 127), ylim=(-4, 118), aspect="equal")
ax.axis("off")
for warp, step in itertools.product(range(num_warps), range(TILE // COLUMNS)):
    x, y = warp + step, num_warps - 1 - warp
    box = Rectangle((x + 0.06, y + 0.12), 0.88, 0.76, facecolor=current, alpha=0.8)
    right.add_patch(box)
    first = step * COLUMNS
    text = f"{first}–\n{first + COLUMNS - 1}"
    right.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6)
for warp, step in itertools.product(range(num_warps - 1), range(TILE // COLUMNS)):
    arrow = {"arrowstyle": "->", "color": COLORS["exlm"], "lw": 1}
    x, y = warp + step + 0.85, num_warps - 1 - warp
    right.annotate("", (x + 0.3, y - 0.14), (x, y + 0.14), arrowprops=arrow)
for stage in range(num_stages + 1):
    right.axvline(stage, color="0.35", lw=1, ls=":")
right.set_yticks(
    [num_warps - 0.5 - warp for warp in range(num_warps)],
    [f"{32 * w}–{min(32 * w + 31, 76)}" for w in range(num_warps)],
    fontsize=8,
)
right.set_xticks([s + 0.5 for s in range(num_stages)], range(num_stages))
right.set(xlim=(-0.05, num_stages + 0.05), ylim=(-0.1, num_warps), xlabel="stage")
right.set_ylabel("targets")
right.grid(False)

# %% [markdown]
# Little is done between barriers, so we count them. For a tile there are two per
# earlier tile, one before the triangle, one for each stage, and one at the end.


# %% tags=["remove-input"]
def barriers_of_sweep(M, L):
    """Number of barriers that a block of the sweep meets for one row, M <= 128."""
    total, num_tiles = 0, -(-L // TILE)
    for t in range(num_tiles):
        # Only the first state can say the first target, and only the last the last.
        first = 0 if t == 0 else max(1, t * TILE - (L - M))
        is_last_tile = t == num_tiles - 1
        last = M - 1 if is_last_tile else min(M - 2, t * TILE + TILE - 1)
        earliest = max(0, t * TILE - 1 - (L - M)) // TILE
        num_warps = -(-(last - first + 1) // TILE)
        if num_warps > 0:
            total += 2 * (t - earliest) + 1 + (num_warps + TILE // COLUMNS - 1) + 1
    return total


for M, L in ((20, 80), (77, 308)):
    num = barriers_of_sweep(M, L)
    print(f"{M:3} targets, {L:4} states: {num:4} barriers in a sweep")

# %% [markdown]
# ## GPU kernels without a GPU
#
# Errors in a kernel often go unseen: with a missing barrier, or memory read before
# it is written, the kernel may run well a thousand times. We test ours by running
# the very same source on a CPU. The kernels are templates over a *context* `c`,
# which provides a handful of things: which thread it is (`c.thread()`), the
# barriers (`c.sync()`), a number from the lane before, the shared memory, and
# $2^x$. nvcc fills it in with the instructions of the GPU, in `dag_cuda.cu`. g++
# fills it in with *fibers*, in `dag_fibers.cpp`: every thread of a block is a
# function with a stack of its own that runs until it meets a barrier, and then lets
# another run. Between two barriers threads run one after the other in an order that
# is shuffled anew each time, and shared memory starts as NaN. Here is the start of
# a sweep in both, and what a barrier is:


# %%
def show(file, words):
    """Print the one line of a source file that contains these words."""
    (line,) = [x for x in (CUDA / file).read_text().splitlines() if words in x]
    print(f"{file:15} {line.strip()}")


show("dag_cuda.cu", "sweep_row(c")
show("dag_fibers.cpp", "sweep_row(c")
show("dag_cuda.cu", "void sync()")
show("fiber_shim.h", "void sync()")

# %% [markdown]
# We compile the sources in a folder of our own, so that we can change them: an
# edit replaces one piece of text, which must occur exactly once. The package
# calls such a library as it calls the one for the GPU; in place of a CUDA stream
# it gets a seed for the order of threads. The first library is intact, except
# that it counts the barriers a block has passed.

# %% mystnb={"code_prompt_show": "How the kernels are compiled and called"} tags=["hide-input"]
workshop = tempfile.TemporaryDirectory()


def compile_fibers(name, edits, more=""):
    """Compile the float32 kernels for the CPU; `edits` maps old text to new."""
    folder = Path(workshop.name) / name
    folder.mkdir()
    counts = dict.fromkeys(edits, 0)
    for file in [*CUDA.glob("*.h"), CUDA / "dag_fibers.cpp"]:
        text = file.read_text()
        for old, new in edits.items():
            counts[old] += text.count(old)
            text = text.replace(old, new)
        (folder / file.name).write_text(text)
    assert set(counts.values()) <= {1}, counts
    with open(folder / "dag_fibers.cpp", "a") as source:
        source.write(more)
    options = "-std=c++17 -O1 -shared -fPIC -Wno-unknown-pragmas -DDAG_ONLY_FLOAT32"
    output = folder / "fibers.so"
    command = [build.cxx(), *options.split(), folder / "dag_fibers.cpp"]
    subprocess.run([*command, "-o", output], check=True)
    return ctypes.CDLL(str(output))


def waited_in_vain(result):
    return RuntimeError("threads wait at a barrier for others that never come")


def fiber_kernels(library, seed):
    """What the package needs to call the library; seed 0 keeps threads in order."""

    def last_argument(device):
        return ctypes.c_uint64(seed)

    as_on_a_gpu = native.CUDA_LAYOUT
    how = ("dag_fibers_", as_on_a_gpu, last_argument, waited_in_vain)
    return native.Kernels(library, *how)


def run_fibers(library, graph, seed):
    """log f, both gradients and the status of each row."""
    kernels = fiber_kernels(library, seed)
    log_f_B, *sweeps = native.log_likelihood_with(kernels, graph)
    grad_B = torch.ones_like(log_f_B)
    gradients = native.gradients_with(kernels, grad_B, graph, sweeps)
    return log_f_B, *gradients, sweeps[2][:, 0]


COUNTING = {
    "namespace dag {\n\nclass FiberBlock": "namespace dag {\n\nstatic int64_t "
    "barriers_passed = 0;\n\nclass FiberBlock",
    "std::fill(state_.begin(), state_.end(), kReady);": "++barriers_passed, "
    "std::fill(state_.begin(), state_.end(), kReady);",
}
COUNTER = """
extern "C" int64_t barriers_passed() { return dag::barriers_passed; }
extern "C" void shared_bytes(int64_t M, int64_t L, int64_t* bytes) {
  bytes[0] = dag::kScanThreads * sizeof(float);
  bytes[1] = dag::Shared<float>::bytes(M);
  bytes[2] = dag::kFinishBytes;
  bytes[3] = dag::gradient_bytes<float>();
  bytes[4] = dag::viterbi_bytes(L);
}
"""
if has_native:
    library = compile_fibers("intact", COUNTING, COUNTER)

# %% [markdown]
# 256 fibers for each block of the sweep compute a sentence of the paper's size.
# Values and gradients agree with float64 and with the C++ code for CPUs, and the
# bits are the same whatever the order of the threads. The barriers counted are
# those computed above for two sweeps, plus one for each tile of the scan and two
# when the row is finished. The compiled sources also report their sizes, here for
# the example of Appendix I.4. On an H100 a block may have 227 KiB of shared memory.

# %% tags=["remove-input"]
if has_native:
    B, M, L = 64, 77, 308
    num_tiles = -(-L // TILE)
    blocks = {
        "scan": B * num_tiles,
        "sweep": 2 * B,
        "finish": B,
        "gradient": B * num_tiles * (num_tiles + 1),
        "Viterbi": B,
    }
    shared = (ctypes.c_int64 * len(blocks))()
    library.shared_bytes(ctypes.c_int64(M), ctypes.c_int64(L), shared)
    print("kernel     blocks   threads   shared memory")
    for (name, num_blocks), num_bytes in zip(blocks.items(), shared, strict=True):
        num_threads = constant(f"k{name.capitalize()}Threads")
        assert num_bytes < 227 * 1024 and num_threads % 32 == 0
        print(f"{name:10} {num_blocks:6} {num_threads:9}", end="")
        print(f" {num_bytes / 1024:11.1f} KiB")

# %% [markdown]
# Now we break the kernels. Take three barriers, each with a comment that says
# what it is for. We delete one at a time, and run a sentence in several orders of
# threads.

# %% mystnb={"code_prompt_show": "How barriers are deleted"} tags=["hide-input"]
wounded = {
    "what was handed over is there": "stages of the triangle",
    "the product is there": "gradient, before it is written",
    "the factors are there": "matrix product",
}
graph_70 = made_graph(Shape(1, 70, 110), False, cpu)
symptoms = {}
for number, comment in enumerate(wounded if has_native else ()):
    edit = {f"c.sync();  // {comment}": f";  // {comment}"}
    broken = compile_fibers(f"broken-{number}", edit)
    intact = run_fibers(library, graph_70, seed=0)
    for seed in range(4):
        found = run_fibers(broken, graph_70, seed)
        value, _, edges, status_B = found
        is_nan = value.isnan().any() or edges.isnan().any()
        is_same = all(torch.equal(a, b) for a, b in zip(found, intact, strict=True))
        verdict = "nan" if is_nan else "wrong numbers"
        verdict = "in log space" if status_B.item() == 1 else verdict
        symptoms[comment, seed] = "right" if is_same else verdict
        if verdict == "in log space":  # right, but not to the bit
            for ours, true in zip(found[:3], intact[:3], strict=True):
                assert relative_error(ours, true) < 1e-5
if has_native:
    print(f"{'order of threads':31} {'as numbered':14} shuffled, three times")
for comment, name in wounded.items() if has_native else ():
    row = [symptoms[comment, seed] for seed in range(4)]
    print(f"{name:31} " + " ".join(f"{verdict:14}" for verdict in row).rstrip())

# %% [markdown]
# - The first is the hardest to find. With the threads in order nothing is wrong,
#   since warp 0 runs before warp 1. Shuffled, it yields finite, wrong
#   numbers. On a GPU it may work a thousand times.
# - The second reads shared memory before anybody has written to it, and finds the
#   NaN with which the fibers fill it. On a GPU it would find whatever was left
#   there.
# - The third reads NaN too, but the likelihood is right: the check for underflow
#   fails, as it should for NaN, and the sentence is redone in log space. A test
#   that only looked at results would pass, and the kernel would always be slow. So
#   tests look at the status as well.
#
# `tests/core/test_kernels.py` does this for every barrier: each is deleted in
# turn, and some test has to notice.
#
# On fibers no two threads ever run at the same moment, and the GPU's own
# arithmetic, memory and timing do not show. `pytest -m gpu` runs the same
# comparisons on a device, and NVIDIA's compute-sanitizer watches for races and
# stray accesses.
#
# ## How fast, on a GPU
#
# At the shape of Appendix I.4, 64 rows, forward and backward together have to move
# 67 MB and to do 384 million multiply-adds. By the data sheet of the NVIDIA H100
# (3.35 TB/s and 67 trillion operations per second) neither takes more than 20 µs.
# But a sweep of this shape meets two hundred barriers one after the other, with
# little to do between them; they decide how long it takes. The table has
# recorded medians in milliseconds: first of kernels alone, replayed from a CUDA
# graph, then *called*, with what Python and PyTorch add. *Plain* is 150 lines of
# CUDA written for the comparison, one block for each row and direction, in log
# space. DA-Transformer's kernels have four configurations of their forward pass;
# its code uses the first.

# %% tags=["remove-input"]
import pandas as pd

on_gpu = json.loads(Path("../book/results/bench-gpu.json").read_text())
flat_rows = [r for r in on_gpu["dag"] if r["transitions"] == "flat"]
flat_rows.sort(key=lambda r: r["shape"][::-1])
theirs = {
    tuple(r["shape"]): [r["median_ms"][f"DA-Transformer {n}"] for n in (1, 2, 3, 4)]
    for r in flat_rows
}
table = pd.DataFrame(
    {
        "B, M, L": ", ".join(map(str, r["shape"])),
        "kernels: ours": r["median_ms"]["native kernels"],
        "plain": r["median_ms"]["plain kernels"],
        "called: ours": r["median_ms"]["native"],
        "DA-T.'s": theirs[tuple(r["shape"])][0],
        "its best": min(theirs[tuple(r["shape"])]),
    }
    for r in flat_rows
)
print(on_gpu["machine"]["device"])
table.set_index("B, M, L").round(2)

# %% [markdown]
# With 8 rows our kernels take three quarters as long as with 64: they mostly wait.
# Called from Python, they are three times as fast at the paper's shape as
# DA-Transformer's best configuration, timed only that way. In three of eight rows
# ours lose by the cost of calling PyTorch's operator, 0.3 to 1.1 ms, which the
# package now avoids. In a fourth, 1,400 short rows of molecules, the kernels are
# slower, probably because a thread needs many registers: a multiprocessor holds one
# block at a time, and 2,800 queue for 132 places.
#
# The plain kernel takes twice as long as ours at the paper's shape, four times as
# long at 1,024 states, half as long on the molecules. Its gradients, from float32
# logarithms like DA-Transformer's, are off by up to 4 in 10,000 of the largest,
# ours by less than one in a million. Another, of 200 lines, starts a grid for each
# target and keeps an exponent for each state. It is nearly as exact as ours, as
# fast at 1,024 states, five times as fast on the molecules, 2.6 times as slow at
# the paper's shape. In a training step it hardly matters which one runs: in the
# paper's molecular model the programme takes less than a hundredth of it
# ({ref}`chap-full-runs`).
#
# ## In a model of your own
#
# Nothing here depends on ExLM. Non-autoregressive translation with DA-Transformer
# maximises the same sum over paths, and CTC is a special case. `dag_loss` wraps
# the backend in an interface for such models: arguments by keyword, counts of any
# integer type, edges as a matrix or by how far they reach.

# %%
B, M, L, V = 3, 6, 24, 50
rng = torch.Generator().manual_seed(1)
log_word_BLV = torch.randn(B, L, V, generator=rng).log_softmax(-1)
target_BM = torch.randint(V, (B, M), generator=rng)
log_P_BML = log_word_BLV.mT.gather(1, target_BM[:, :, None].expand(-1, -1, L))
counts = {
    "num_targets": torch.tensor([6, 4, 5]),
    "num_states": torch.tensor([24, 20, 9]),
}
is_edge_BLL = torch.ones(B, L, L).bool().triu(1)
is_edge_BLL &= torch.arange(L) < counts["num_states"][:, None, None]
# Not -inf: the last state has no edges, and its softmax would be nan.
score_BLL = torch.randn(B, L, L, generator=rng).masked_fill(~is_edge_BLL, -1e9)
log_E_BLL = score_BLL.log_softmax(-1)

loss_B = dag_loss(log_P_BML, log_E_BLL, **counts)
print(*(f"{nats:.1f}" for nats in loss_B), "nats")

# %% [markdown]
# `torch_dag_loss` has the name, arguments and sign of the function in
# DA-Transformer's repository, so that one import replaces the other. Here are times
# of the original and of `dag_loss` on one thread of a CPU, recorded by
# `python -m exlm_lab.bench dag --extra-backend PATH`:

# %% tags=["remove-input"]
records = json.loads(Path("../book/results/bench-drop-in.json").read_text())
ms = {(tuple(r["shape"]), r["backend"]): r["median_ms"] for r in records}
rival = next(name for _, name in ms if "DA-Transformer" in name)
rows = [
    {"B, M, L": ", ".join(map(str, shape)), "DA-Transformer, ms": ms[shape, rival]}
    | {"ours, ms": ms[shape, "native"]}
    | {"times as fast": ms[shape, rival] / ms[shape, "native"]}
    for shape in dict.fromkeys(shape for shape, _ in ms)
]
pd.DataFrame(rows).set_index("B, M, L").round(1)

# %% mystnb={"code_prompt_show": "Checked: fibers in three orders give the same bits, equal to float64 and to the C++ code; the barriers are those of the formula, and every missing one is noticed in some order; the least work at the paper's shape; what is said of the H100; the loss with DA-Transformer's arguments, and in log space"} tags=["hide-cell", "check"]
from exlm_mini.alignment.drop_in import torch_dag_loss

same_B = torch_dag_loss(
    log_P_BML, log_E_BLL, counts["num_states"], counts["num_targets"]
)
torch.testing.assert_close(-same_B, loss_B)
exact_B = dag_log_likelihood(log_P_BML, log_E_BLL, *counts.values(), "vectorized")
torch.testing.assert_close(-exact_B, loss_B, rtol=1e-5, atol=0)

if has_native:
    answers = [run_fibers(library, flat, seed) for seed in range(3)]
    for other in answers[1:]:
        assert all(
            torch.equal(a, b) for a, b in zip(answers[0], other, strict=True)
        )
    *ours, status_B = answers[0]
    by_cpu = value_and_gradients(backend("native"), flat)
    for mine, true, cpus in zip(ours, exact, by_cpu, strict=True):
        assert relative_error(mine, true) < 1e-5
        assert relative_error(mine, cpus) < 1e-5
    assert status_B.tolist() == [0]  # in tiles

for M, L in ((20, 80), (77, 308)) if has_native else ():
    graph = made_graph(Shape(1, M, L), False, cpu)
    before = library.barriers_passed()
    native.log_likelihood_with(fiber_kernels(library, seed=1), graph)
    counted = library.barriers_passed() - before
    assert counted == 2 * barriers_of_sweep(M, L) + -(-L // TILE) + 2

for comment in wounded if has_native else ():
    row = [symptoms[comment, seed] for seed in range(4)]
    assert set(row[1:]) != {"right"}, comment  # the test notices each of them
if has_native:
    first = [symptoms["what was handed over is there", seed] for seed in range(4)]
    assert first[0] == "right" and "wrong numbers" in first[1:]

device = torch.device("cpu" if native.why_not("cuda") else "cuda")
on_device = [t.to(device) for t in flat]
if device.type == "cuda" or has_native:
    there = value_and_gradients(backend("native"), on_device)
    for mine, true in zip(there, exact, strict=True):
        assert relative_error(mine.cpu(), true) < 1e-5


def least_bytes(B, M, L):
    edges = L * (L - 1) // 2
    return 4 * B * (2 * edges + L * L + 3 * M * L)


def least_multiply_adds(B, M, L):
    W = L - M + 1
    return B * 3 * (2 * W + (M - 3) * W * (W + 1) // 2)


def is_inside(i, u, M, L):
    is_between = i <= u <= L - M + i
    return is_between and (i > 0 or u == 0) and (i < M - 1 or u == L - 1)


for M, L in ((3, 8), (5, 5), (6, 17)):
    pairs = sum(
        is_inside(i, v, M, L) and is_inside(i + 1, u, M, L)
        for i in range(M - 1)
        for u in range(L)
        for v in range(u)
    )
    assert least_multiply_adds(4, M, L) == 4 * 3 * pairs
# Counted by hand for Appendix I.4: numbers moved and products, per row.
assert least_bytes(64, 77, 308) == 64 * 4 * 260_568 == 66_705_408
assert least_multiply_adds(64, 77, 308) == 64 * 6_001_608 == 384_102_912

by_bytes = least_bytes(64, 77, 308) / 3.35e12
assert by_bytes < 20e-6 and 2 * least_multiply_adds(64, 77, 308) / 67e12 < by_bytes
assert 200 < barriers_of_sweep(77, 308) < 250

gpu_ms = {tuple(r["shape"]): r["median_ms"] for r in flat_rows}
paper, long_one, molecules = (64, 77, 308), (4, 256, 1024), (1400, 13, 44)
alone = {shape: r["native kernels"] for shape, r in gpu_ms.items()}
assert alone[8, 77, 308] > 0.7 * alone[paper]  # it mostly waits
assert min(theirs[paper]) > 3 * gpu_ms[paper]["native"]
assert min(theirs[long_one]) > 2 * gpu_ms[long_one]["native"]
assert min(theirs[molecules]) < alone[molecules]
(step,) = (r for r in on_gpu["step"] if r["model"] == "exlm" and "gpu_ms" in r)
assert sum(step["gpu_ms"]["dynamic programme"].values()) < 0.01 * step["median_ms"]
over_ours = {s: r["plain kernels"] / alone[s] for s, r in gpu_ms.items()}
assert over_ours[paper] < 2 and over_ours[long_one] > 3.9
assert over_ours[molecules] < 0.5
grids = {
    s: r["launches kernels"] / alone[s]
    for s, r in gpu_ms.items()
    if "launches" in r
}
assert 2.5 < grids[paper] < 2.7 and 0.9 < grids[long_one] < 1.1
assert 4.5 < 1 / grids[molecules] < 5.5
off = {
    name: max(max(r["errors"].get(name, {"": 0}).values()) for r in on_gpu["dag"])
    for name in ("native", "plain", "launches", "DA-Transformer")
}
assert (
    off["native"] < 1e-6
    and off["launches"] < 4e-6
    and 3e-4 < off["plain"] < off["DA-Transformer"] < 4e-4
)

# %% [markdown]
# ## Summary
#
# - Taken in tiles of states, the programme is one matrix product per tile for all
#   targets, and a small triangle. Edges are read once per sweep.
# - One exponent per (target, tile) removes the limit on length. What underflow may
#   still remove is bounded by a lift; sentences that fail the bound are redone in
#   log space. Comparing the two sweeps would prove nothing.
# - Compiled on first use, the backend is an operator of PyTorch with gradients,
#   shapes and a place in compiled graphs, and gives the same bits for any number of
#   threads.
# - Independent work becomes blocks, dependent work a staircase of warps. Fibers run
#   the same source on a CPU, where missing barriers show.
#
# ## Exercises
#
# **1. Beta without code.** The kernels have no code for $\beta$: a block of the
# other direction reads the graph from its end. With `sweep` and `read_backwards`,
# compute the posteriors of one sentence's states. Remember that $\beta$ leaves out
# the state's own emission.


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_posteriors(answer):
    graph = random_graph(6, 20, seed=7)
    found = answer(*graph)
    if found is None:
        return "not yet"
    judge_ML = posteriors(*graph, "enumerate").state_BML[0]
    posterior_ML = torch.as_tensor(found).to(judge_ML)
    is_right = posterior_ML.shape == judge_ML.shape and torch.allclose(
        posterior_ML, judge_ML, rtol=1e-4
    )
    return "right" if is_right else "not the posteriors"


assert judge_posteriors(lambda *graph: None) == "not yet"


# %%
def state_posteriors(log_P_BML, log_E_BLL, num_targets_B, num_states_B):
    """P(target i comes from state u) of one sentence, (M, L)."""
    ...  # your turn


judge_posteriors(state_posteriors)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def state_posteriors(*graph, tile=5):
    def log_table(log_P_BML, log_E_BLL, *counts):
        """log f for every target and state."""
        table_ML, unit_Mt = sweep(log_P_BML[0], log_E_BLL[0], tile)
        unit_ML = unit_Mt.repeat_interleave(tile, dim=1).double()
        return table_ML.log() + unit_ML * math.log(2)

    log_alpha_ML = log_table(*graph)
    # Flipped back, it is beta times the state's own emission, divided out here.
    log_beta_ML = log_table(*read_backwards(*graph)).flip(0, 1) - graph[0][0]
    return (log_alpha_ML + log_beta_ML - log_alpha_ML[-1, -1]).exp()


assert judge_posteriors(state_posteriors) == "right"

# %% [markdown]
# **2. Which tile?** For $M$ targets and $L$ states, a multiple of the tile, count
# the steps that wait for each other if triangles are walked target by target, the
# first included, or column by column. Which order suits a CPU core with vectors of
# 16 numbers, and which a block of 256 threads?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_steps(answer):
    found = [answer(77, 320, tile) for tile in (8, 32)]
    if found[0] is None:
        return "not yet"
    is_right = [list(steps) for steps in found] == [[3080, 320], [770, 320]]
    return "right" if is_right else "count the tiles, then the steps in each"


assert judge_steps(lambda M, L, tile: None) == "not yet"


# %%
def waiting_steps(M, L, tile):
    """Numbers of steps: target by target, and column by column."""
    ...  # your turn


judge_steps(waiting_steps)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def waiting_steps(M, L, tile):
    num_tiles = L // tile
    return num_tiles * M, num_tiles * tile


assert judge_steps(waiting_steps) == "right"
# By columns there are about L steps, whatever the tile. Each serves all targets,
# which suits many threads. By targets, a step is a product with a vector as wide as
# the tile, which takes one core with such vectors only a few instructions.
