# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-rope)=
# # Two coordinates for a clone: 2D RoPE
#
# After {ref}`states expansion <chap-expansion>` the encoder reads $k$ identical
# vectors for each [MASK]. They differ only in their positions $(i, j)$: $i$ is
# the place of the token in the sentence, $j$ the number of the clone, and an
# ordinary token has $j = 0$. ExLM {cite}`zheng2025exlm` lets the encoder see both
# with a rotary position embedding (RoPE) {cite}`su2021roformer` in two
# dimensions.
#
# **You will** build the rotation from scratch, prove by machine what it
# preserves, look at it as heatmaps, and see what a clone sees with it, with an
# ordinary RoPE, and with nothing.
#
# **Afterwards you know** why attention depends on differences in $i$ and in $j$
# alone, why clones without a position of their own stay identical for ever, and
# what an ordinary RoPE over the expanded sequence gets wrong.
#
# **It needs** about 20 seconds on a CPU and no GPU; three very small encoders are
# trained. It covers §4.2 of the paper ("Using 2D RoPE to distinguish expanded
# states") and the ablation in Table 2.

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
import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.tokenizer import word_level
from exlm_mini.model import ExLM
from exlm_mini.model.encoder import Encoder, initialise
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.model.rope import rotate, rotation_1d, rotation_2d
from exlm_mini.plotting import COLORS, draw_heatmap, use_book_style
from exlm_mini.training.live import chapter_scale

use_book_style()
scale = chapter_scale()
special = SpecialIds()
FLOAT64 = torch.float64
rng = torch.Generator().manual_seed(5)
str(scale)

# %% [markdown]
# ## Turning a pair of numbers
#
# **Question.** How can a vector carry a position without becoming another vector?
#
# Attention compares a query $q$ with a key $k$ by their scalar product. RoPE
# takes the numbers of a vector in pairs and turns each pair, as an arrow in the
# plane, by an angle proportional to the position $n$:
#
# $$
# R_\omega(n) =
# \begin{pmatrix}
# \cos \omega n & -\sin \omega n \\
# \sin \omega n & \cos \omega n
# \end{pmatrix}.
# $$ (eq-rotation)
#
# (The letter $k$ is the key in this paragraph only; everywhere else it is the
# number of states per [MASK].) Turning both arrows by the same angle changes
# nothing about how they lie to each other. So the product of $R_\omega(n)\,q$ and
# $R_\omega(n')\,k$ depends on the difference $n' - n$ alone.


# %%
def turn_pair(pair, angle):
    """An arrow in the plane, turned."""
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=FLOAT64) @ pair


query, key = torch.randn(2, 2, generator=rng, dtype=FLOAT64)
for n, other in ((3, 5), (103, 105), (5, 3)):
    score = turn_pair(query, 0.1 * n) @ turn_pair(key, 0.1 * other)
    print(f"query at {n:3}, key at {other:3}: {score:.4f}")

# %% [markdown]
# **Check.** The first two agree: both differences are 2. The third does not: the
# difference is $-2$, so a rotation also knows left from right. And for many
# random positions:

# %%
for _ in range(200):
    n, other, shift = torch.randint(0, 500, (3,), generator=rng).tolist()
    here = turn_pair(query, 0.1 * n) @ turn_pair(key, 0.1 * other)
    n, other = n + shift, other + shift
    there = turn_pair(query, 0.1 * n) @ turn_pair(key, 0.1 * other)
    # float64: products of numbers of size 1, angles up to 100.
    assert abs(here - there) < 1e-12

# %% [markdown]
# **Takeaway.** A rotation writes the position into the direction of an arrow, and
# a scalar product reads off differences of positions.
#
# ## A head in two halves
#
# **Question.** How are *two* positions written into one vector?
#
# The paper says that 2D RoPE encodes both coordinates; how exactly is in the
# released code. The numbers of an attention head (there are $d$ of them) are cut
# in two halves. The first half is turned by $i$, the second by $j$. Each half has
# its own pairs, and the pairs turn at different speeds,
#
# $$
# \omega_r = 10000^{-2r / (d/2)}, \qquad r = 0, \dots, d/4 - 1,
# $$ (eq-frequencies)
#
# in radians per step: the first pair by one radian, the last very slowly.
# Coordinate $r$ of a half pairs with coordinate $r + d/4$.


# %%
def turn(part_X, index):
    """One half of a head, turned by an index: ordinary RoPE."""
    first, second = part_X.chunk(2, dim=-1)
    pairs = first.shape[-1]
    angle = index * 10_000.0 ** (-torch.arange(pairs, dtype=FLOAT64) / pairs)
    cos, sin = angle.cos(), angle.sin()
    turned_XX = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned_XX, dim=-1)


def turn_2d(vector_d, i, j):
    """The first half by the token index, the second by the clone index."""
    first_half, second_half = vector_d.chunk(2, dim=-1)
    return torch.cat([turn(first_half, i), turn(second_half, j)], dim=-1)


# %% [markdown]
# **Check.** This is the package's `rotation_2d` and `rotate`, for random vectors
# and positions; lengths stay as they are; and the two halves do not mix. From
# here on we use the package's.

# %%
HEAD_DIM = 16


def turned(vector_d, i, j):
    """The package's rotation of a single vector."""
    i_11, j_11 = torch.tensor([[i]]), torch.tensor([[j]])
    rotation = rotation_2d(i_11, j_11, HEAD_DIM, FLOAT64)
    return rotate(vector_d.view(1, 1, 1, -1), rotation).flatten()


for _ in range(100):
    vector_d = torch.randn(HEAD_DIM, generator=rng, dtype=FLOAT64)
    i, j = (int(torch.randint(0, n, (), generator=rng)) for n in (500, 9))
    ours = turned(vector_d, i, j)
    want = turn_2d(vector_d, i, j)
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-12)
    assert abs(ours.norm() - vector_d.norm()) < 1e-12
    assert torch.equal(ours[:8], turned(vector_d, i, 0)[:8])
    assert torch.equal(ours[8:], turned(vector_d, 0, j)[8:])
    assert torch.equal(turned(vector_d, i, 0)[8:], vector_d[8:])

# %% [markdown]
# The last line says something about ordinary tokens: with $j = 0$ their second
# half is never turned. In ExLM only half of each head sees where a token stands.
#
# **Figure.** Five tokens of an expanded sentence, a [MASK] at $i = 3$ with three
# clones and its two neighbours. On the left the fastest pair of the first half:
# the clones point in one direction, the neighbours lie to either side. In the
# middle the fastest pair of the second half: now the clones fan out and the two
# ordinary tokens coincide. (The arrows have different lengths only to be seen
# apart.) On the right all four speeds of a half with $d = 16$: where the fast
# pair has gone round, the slow ones still tell positions apart.

# %% mystnb={"figure": {"caption": "The two halves of a head turn independently.", "name": "fig-halves"}} tags=["hide-input"]
colors = {"(2,0)": "0.35", "(3,1)": "#f2b134", "(3,2)": "#dd9130"}
colors |= {"(3,3)": "#b5793a", "(4,0)": "0.65"}
fig, axes = plt.subplots(1, 3, figsize=(8, 3.3), width_ratios=(1, 1, 1.1))
titles = ("first half, by i", "second half, by j")
for half, ax in enumerate(axes[:2]):
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.85"))
    for number, (place, color) in enumerate(colors.items()):
        angle = int(place[1 + 2 * half])
        size = 1 - 0.15 * number  # to see arrows that lie on top of each other
        tip = size * math.cos(angle), size * math.sin(angle)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2.5}
        arrow |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
        ax.annotate("", tip, (0, 0), arrowprops=arrow)
        label = place if half else None
        ax.plot([], [], color=color, lw=3, label=label)
    ax.set(
        xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal", title=titles[half]
    )
    ax.axis("off")
index = np.linspace(0, 30, 301)
for r, style in enumerate(("-", "--", "-.", ":")):
    speed = 10_000.0 ** (-r / 4)
    axes[2].plot(index, np.cos(speed * index), ls=style, label=f"{speed:g} rad")
axes[2].set(xlabel="index i or j", title="cosine of the angle", ylim=(-1.05, 1.05))
fig.legend(loc="outside lower center", ncols=9, fontsize=8, handlelength=1.6)
_ = axes[2].set_yticks([-1, 0, 1])

# %% [markdown]
# **Takeaway.** Two clones of one [MASK] agree in the first half of every head and
# differ in the second. Two ordinary tokens differ in the first and agree in the
# second.
#
# ## Relative in both coordinates
#
# **Question.** What does the score of a query at $(i, j)$ and a key at $(i', j')$
# depend on?
#
# Each half depends on a difference, and the scalar product adds up the halves:
#
# $$
# \langle R(i,j)\,q,\ R(i',j')\,k \rangle = f_{q,k}(i'-i) + g_{q,k}(j'-j).
# $$ (eq-relative)
#
# **Check.** Moving query and key together, by any shift in either coordinate,
# leaves the score alone. Moving the key alone, in either coordinate, does not.

# %%
query_d, key_d = torch.randn(2, HEAD_DIM, generator=rng, dtype=FLOAT64)
for _ in range(300):
    i, other_i, di = torch.randint(0, 500, (3,), generator=rng).tolist()
    j, other_j, dj = torch.randint(0, 9, (3,), generator=rng).tolist()
    score = turned(query_d, i, j) @ turned(key_d, other_i, other_j)
    key_there = turned(key_d, other_i + di, other_j + dj)
    moved = turned(query_d, i + di, j + dj) @ key_there
    assert abs(score - moved) < 1e-10

origin = query_d @ key_d
assert abs(query_d @ turned(key_d, 1, 0) - origin) > 0.1
assert abs(query_d @ turned(key_d, 0, 1) - origin) > 0.1

# %% [markdown]
# **Figure.** The score as a function of the two differences. In the upper row the
# query stands at $(0, 0)$ and at $(40, 3)$: the same picture. Below on the left
# is what happens if the two positions are *mixed*: the whole head turned by the
# sum $i + j$. Then all cells on a diagonal are equal, and the second clone of a
# [MASK] cannot be told from the first clone of a [MASK] at the next place. Below
# on the right are the two terms of {eq}`eq-relative`.

# %%
STEPS_I, STEPS_J = range(-6, 7), range(-3, 4)


def score_map(origin_i, origin_j, is_mixed=False):
    """Scores (dj, di) of a query at the origin and a key at all differences."""

    def at(vector_d, i, j):
        return turn(vector_d, i + j) if is_mixed else turned(vector_d, i, j)

    query_here = at(query_d, origin_i, origin_j)
    scores = np.empty((len(STEPS_J), len(STEPS_I)))
    for v, dj in enumerate(STEPS_J):
        for u, di in enumerate(STEPS_I):
            key_there = at(key_d, origin_i + di, origin_j + dj)
            scores[v, u] = query_here @ key_there
    return scores


near, far = score_map(0, 0), score_map(40, 3)
mixed = score_map(0, 0, is_mixed=True)
np.testing.assert_allclose(near, far, rtol=0, atol=1e-10)
# Mixed: one step in j is one step in i.
np.testing.assert_allclose(mixed[1:, :-1], mixed[:-1, 1:], rtol=0, atol=1e-10)
assert np.abs(near[1:, :-1] - near[:-1, 1:]).min() > 1e-3

# %% mystnb={"figure": {"caption": "Score of a query and a key against the differences of their positions.", "name": "fig-relative"}} tags=["hide-input"]
fig, axes = plt.subplots(2, 2, figsize=(8, 5))
limits = (min(near.min(), mixed.min()), max(near.max(), mixed.max()))
titles = ("query at (0, 0)", "query at (40, 3)", "mixed: turned by i + j")
for ax, values, title in zip(
    axes.flat[:3], (near, far, mixed), titles, strict=True
):
    draw_heatmap(ax, values, STEPS_I, STEPS_J, "score", None, limits=limits)
    ax.set(xlabel="i' - i, tokens", ylabel="j' - j, clones", title=title)
    ax.tick_params(axis="both", labelsize=8)
ax = axes[1, 1]
ax.plot(STEPS_I, near[3] - near[3, 6], "o-", ms=3, label="f, by i' - i")
ax.plot(STEPS_J, near[:, 6] - near[3, 6], "o-", ms=3, label="g, by j' - j")
ax.set(xlabel="difference of positions", ylabel="score, less that at 0")
ax.set_title("2D is a sum: f + g")
_ = ax.legend(fontsize=8)

# %% [markdown]
# By {eq}`eq-relative` the score is a *sum* of a function of $i' - i$ and one of
# $j' - j$, so each row of the first heatmap is the row above plus a constant.
# Softmax takes the exponential, which turns the sum into a product: an attention
# head can ask for "the next [MASK]" and "the same clone" at once. **Check.**

# %%
row_steps = near[1:] - near[:-1]
assert np.ptp(row_steps, axis=1).max() < 1e-10
by_i, by_j = np.exp(near[3]), np.exp(near[:, 6])
outer = by_j[:, None] * by_i[None, :] / np.exp(near[3, 6])
np.testing.assert_allclose(np.exp(near), outer, rtol=1e-9)

# %% [markdown]
# **Takeaway.** Scores are relative in both coordinates, and the coordinates do
# not get in each other's way because each has its own half.
#
# ## What a clone sees
#
# **Question.** Now in a real encoder: what does each of the $k$ clones of a
# [MASK] attend to?
#
# We take the sentence of the last chapter with $k = 4$, an untrained encoder of
# the package, and three ways of telling it positions:
#
# | name | positions | where it occurs |
# |---|---|---|
# | none | all clones at $(i, 0)$ | nowhere; the limit case |
# | 1D | place in the expanded sequence, for the whole head | `model.rope 1d` |
# | 2D | $(i, j)$ | `model.rope 2d`, the default |

# %%
sentence = "this is great and i am very glad to see it"
tokenizer = word_level(sentence.split())
ids = [special.bos, *tokenizer.encode(sentence), special.eos]
token_ids_BN = torch.tensor([ids])
is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
is_masked_BN[0, [3, 8]] = True
masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special.mask)
row = [t.to(scale.device) for t in (masked_ids_BN, is_masked_BN, token_ids_BN)]
expanded, _ = expand_masks(*row, 4, "paper", special)
WAYS = ("none", "1D", "2D")


def see(way, expanded):
    """The expanded batch as this way shows it to the encoder."""
    if way != "none":
        return expanded
    return expanded._replace(clone_BT=torch.zeros_like(expanded.clone_BT))


def make_encoder(way, seed=0, dtype=torch.float32):
    """A small untrained encoder without dropout."""
    torch.manual_seed(seed)
    rope = "1d" if way == "1D" else "2d"
    config = ModelConfig(rope=rope, dropout=0, attention_dropout=0)
    encoder = Encoder(config, vocab_size=90, pad=special.pad)
    initialise(encoder, std=0.125)
    return encoder.to(scale.device, dtype)


# %% [markdown]
# In the first layer all clones bring the same query and the same key, so any
# difference between their scores comes from the rotation.


# %%
def first_layer_scores(way, expanded, seed=0):
    """Scores before the softmax, (H, T, T), float64, of the first layer."""
    encoder = make_encoder(way, seed, FLOAT64)
    layer, shown = encoder.layers[0], see(way, expanded)
    x_BTD = layer.attention_norm(encoder.embedding(shown.token_ids_BT))
    three_BTD = layer.attention.query_key_value(x_BTD).chunk(3, dim=-1)
    query, key, _ = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in three_BTD)
    if way == "1D":
        place_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        rotation = rotation_1d(place_BT, encoder.head_dim, FLOAT64)
    else:
        rotation = rotation_2d(*shown[1:3], encoder.head_dim, FLOAT64)
    query, key = rotate(query, rotation), rotate(key, rotation)
    scores_BHTT = query @ key.transpose(2, 3) / math.sqrt(encoder.head_dim)
    return scores_BHTT[0].detach().cpu()


scores = {way: first_layer_scores(way, expanded) for way in WAYS}
is_clone_T = (expanded.clone_BT[0] > 0).cpu()
position_T = expanded.position_BT[0].cpu()
first_mask_T = (position_T == 3) & is_clone_T
second_mask_T = (position_T == 8) & is_clone_T

# %% [markdown]
# We wrote the scores out by hand, so first a **check** that the encoder uses the
# same: softmax, values and output layer applied to them give what its attention
# gives.

# %%
for way in WAYS:
    encoder, caught = make_encoder(way, dtype=FLOAT64), []
    attention = encoder.layers[0].attention
    attention.register_forward_hook(lambda _, x, y, to=caught: to.append((x[0], y)))
    with torch.no_grad():
        encoder(*see(way, expanded))
        x_BTD, output_BTD = caught[0]
        value_TD = attention.query_key_value(x_BTD)[0].chunk(3, dim=-1)[2]
        value_HTd = value_TD.unflatten(-1, (4, -1)).transpose(0, 1)
        weight_HTT = scores[way].softmax(dim=-1).to(scale.device)
        want_TD = attention.output(
            (weight_HTT @ value_HTd).transpose(0, 1).flatten(1)
        )
    torch.testing.assert_close(output_BTD[0], want_TD, rtol=0, atol=1e-10)

# %% [markdown]
# **Check.** Without positions of their own the four clones have exactly the same
# scores. With 1D and with 2D each has its own. With 2D the scores from the clones
# of the first [MASK] to those of the second depend on $j' - j$ alone: from clone
# 1 to clone 2 as from 2 to 3. What changes from clone to clone is the same
# towards both groups of clones.

# %%
rows = {way: scores[way][:, first_mask_T] for way in WAYS}
assert (rows["none"] - rows["none"][:, :1]).abs().max() < 1e-12
for way in ("1D", "2D"):
    assert (rows[way][:, 0] - rows[way][:, 1]).abs().amax(dim=1).min() > 1e-3
between = scores["2D"][:, first_mask_T][:, :, second_mask_T]
for step in (-2, -1, 0, 1, 2):
    diagonal = between.diagonal(step, dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))
change = rows["2D"] - rows["2D"][:, :1]
by_group = change[:, :, first_mask_T], change[:, :, second_mask_T]
torch.testing.assert_close(*by_group, rtol=0, atol=1e-12)

# %% [markdown]
# **Figure.** Scores of one head from the four clones of the first [MASK] (rows)
# to all tokens (columns), less those of clone 1. Without positions of their own
# all rows are alike. With 1D each clone stands one place further on and sees
# everything from there. With 2D all four look from the same place; what differs
# is the term $g(j' - j)$, which tells $j$ against the ordinary tokens ($j' = 0$)
# and repeats from one group of clones to the other.

# %% mystnb={"figure": {"caption": "What the clones of the first [MASK] see, relative to clone 1.", "name": "fig-clone-sees"}} tags=["hide-input"]
head = int((rows["2D"] - rows["2D"][:, :1]).abs().sum(dim=(1, 2)).argmax())
cells = zip(*(t[0].tolist() for t in expanded[:3]), strict=True)
columns = [f"{tokenizer.token(token)} ({i},{j})" for token, i, j in cells]
fig, axes = plt.subplots(3, 1, figsize=(8, 5.6), sharex=True)
differences = {way: (rows[way][head] - rows[way][head, :1]).numpy() for way in WAYS}
top = max(np.abs(values).max() for values in differences.values())
for ax, way in zip(axes, WAYS, strict=True):
    clones = [f"({3},{j})" for j in (1, 2, 3, 4)]
    limits = (-top, top)
    draw_heatmap(
        ax, differences[way], columns, clones, "score", None, "RdBu_r", limits
    )
    ax.set(title=way)
_ = axes[-1].tick_params(axis="x", rotation=90, labelsize=8)

# %% [markdown]
# **Takeaway.** The rotation is the only thing that lets one clone look at the
# sentence differently from another.
#
# ## Without: clones that never differ
#
# **Question.** Could a deeper encoder, or training, tell clones apart that share
# one position?
#
# No. Attention and feed-forward layers compute an output from a vector, its
# rotation, and the set of all keys and values. Two clones with the same vector
# and the same rotation get the same output; so they enter the next layer as
# equals, and so on to the end, whatever the weights are.
#
# **Check.** We record what leaves every layer, in float64, for weights from
# several seeds.


# %%
def layer_outputs(way, expanded, seed=0):
    """Hidden states after the embedding and after each layer, each (T, D)."""
    encoder = make_encoder(way, seed, FLOAT64)
    outputs = []
    for module in (encoder.embedding, *encoder.layers):
        module.register_forward_hook(
            lambda _, __, output: outputs.append(output[0])
        )
    with torch.no_grad():
        encoder(*see(way, expanded))
    return [output.cpu() for output in outputs]


def spread(hidden_TD):
    """Largest difference between the clones of the first mask."""
    clones_kD = hidden_TD[first_mask_T]
    return float((clones_kD - clones_kD[0]).abs().max())


for way in WAYS:
    by_layer = [spread(hidden_TD) for hidden_TD in layer_outputs(way, expanded)]
    print(f"{way:5}", [f"{value:.2f}" for value in by_layer])

# %%
for seed in range(5):
    # Equal up to the order in which the machine adds.
    none = [spread(h) for h in layer_outputs("none", expanded, seed)]
    assert max(none) < 1e-12
    for way in ("1D", "2D"):
        first, *others = (spread(h) for h in layer_outputs(way, expanded, seed))
        assert first == 0 and min(others) > 1e-2

# %% [markdown]
# Equal states emit equal distributions, and then a transition has nothing to
# link: whichever clone a path takes, the word it emits is the same. **Check.** We
# put whole models side by side, one of them with hidden clone indices, and link
# the states by $k$ fixed parallel chains: clone $j$ of the first [MASK] hands
# over to clone $j$ of the second. This is the simplest way to carry a choice from
# one word to the other. Where clones differ, the joint probability of the two
# words is not the product of their own probabilities. Where they do not, it is
# the product exactly, which is all that a plain MLM can say.

# %%
config = ModelConfig(
    boundary="paper", dropout=0, attention_dropout=0, init_std=0.125
)


def hide_clones(encoder, arguments):
    """Show the encoder every clone at (i, 0)."""
    token_ids_BT, position_BT, clone_BT, *rest = arguments
    return token_ids_BT, position_BT, torch.zeros_like(clone_BT), *rest


def joint_and_product(is_hidden, seed):
    """log P of both words, the sum of each alone, and how far clones differ."""
    torch.manual_seed(seed)
    model = ExLM(config, 90, special).eval().to(scale.device, FLOAT64)
    if is_hidden:
        model.encoder.register_forward_pre_hook(hide_clones)
    with torch.no_grad():
        model_scores = model(*row, chain_share=1.0)
        joint = log_likelihood(model_scores, with_boundaries=False)[0]
    log_p_ML = model_scores.log_emission_BML[0]
    owner_L = model_scores.graph.owner_BL[0]
    own = [log_p_ML[m, owner_L == m] for m in (1, 2)]
    # Each word's own probability is the equal mixture of its k states.
    product = sum(states.logsumexp(0) - math.log(4) for states in own)
    return float(joint), float(product), float(own[0].max() - own[0].min())


for seed in range(5):
    joint, product, range_of_clones = joint_and_product(True, seed)
    assert abs(joint - product) < 1e-10 and range_of_clones < 1e-10
    joint, product, range_of_clones = joint_and_product(False, seed)
    assert abs(joint - product) > 1e-4 and range_of_clones > 1e-2

# %% [markdown]
# **Takeaway.** Without a position of its own a clone is a copy for ever, by
# symmetry and not for lack of training. The $k$ states are then one state,
# counted $k$ times.
#
# ## One coordinate instead of two
#
# **Question.** The expanded sequence already has places $0, 1, 2, \dots$ Why not
# turn by those, as an ordinary RoPE would?
#
# Clones are then apart. But so are the words: every [MASK] on the way from one
# word to another pushes them $k - 1$ places further apart.
#
# $$
# \text{1D: } \; n' - n = (i' - i) + (k - 1) \cdot (\text{masks in between}),
# \qquad \text{2D: } \; i' - i.
# $$ (eq-stretch)
#
# **Check.** We take two real words ten places apart and hide more and more of the
# words between them. The distance in the expanded sequence follows
# {eq}`eq-stretch`, and the position $i$ does not move.


# %%
def between_masks(num_masks, k):
    """Expanded row with that many masks between the words at 1 and 11."""
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, 2 : 2 + num_masks] = True
    masked = token_ids_BN.masked_fill(is_masked_BN, special.mask)
    batch = [t.to(scale.device) for t in (masked, is_masked_BN, token_ids_BN)]
    return expand_masks(*batch, k, "paper", special)[0]


def places(expanded):
    """Places of the words at 1 and 11 in the expanded row."""
    position_T = expanded.position_BT[0].tolist()
    return position_T.index(1), position_T.index(11)


distance_1d = {}
for k in (2, 4, 8):
    rows_m = [between_masks(m, k) for m in range(10)]
    distance_1d[k] = [end - start for start, end in map(places, rows_m)]
    assert distance_1d[k] == [10 + (k - 1) * m for m in range(10)]
    for its_row in rows_m:
        start, end = places(its_row)
        position_T, clone_T = its_row.position_BT[0], its_row.clone_BT[0]
        assert position_T[end] - position_T[start] == 10
        assert clone_T[start] == clone_T[end] == 0

# %% [markdown]
# The score of the two words in the first layer shows it. With 2D it is the same
# number however many words between them are hidden. With 1D it is different each
# time.

# %%
score_of = {}
for way in ("1D", "2D"):
    values = []
    for m in range(10):
        its_row = between_masks(m, 4)
        start, end = places(its_row)
        values.append(first_layer_scores(way, its_row)[0, start, end].item())
    score_of[way] = np.array(values)
assert np.ptp(score_of["2D"]) < 1e-12
assert np.ptp(score_of["1D"]) > 0.1

# %% [markdown]
# **Figure.** Left: the distance of two words ten apart. Right: their score in one
# head for $k = 4$. With 2D both are flat.

# %% mystnb={"figure": {"caption": "1D positions stretch with the number of masks, 2D positions do not.", "name": "fig-stretch"}} tags=["hide-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for k, style in ((8, ":"), (4, "-"), (2, "--")):
    left.plot(distance_1d[k], color="0.5", ls=style, label=f"1D, k = {k}")
left.plot([10] * 10, color=COLORS["exlm"], label="2D, any k")
left.set(
    xlabel="masks between the words", ylabel="distance, tokens", ylim=(0, None)
)
left.legend(fontsize=8)
right.plot(score_of["1D"], color="0.5", marker="o", ms=3, label="1D")
right.plot(score_of["2D"], color=COLORS["exlm"], marker="o", ms=3, label="2D")
right.set(xlabel="masks between the words", ylabel="score")
_ = right.legend(fontsize=8)

# %% [markdown]
# Downstream there are no masks ({ref}`chap-downstream`). With 1D the encoder,
# trained on distances that masks have stretched, then meets all of them
# unstretched. With 2D it meets the distances it knows.
#
# **Takeaway.** 1D makes clones different at the price of the geometry of the
# sentence. 2D leaves the words where they are.
#
# ## With and without: a clone that must say its number
#
# **Question.** How hard is it for a clone to find out which one it is?
#
# We ask for just that. Small encoders read random sentences with a third of the
# tokens hidden, $k = 4$, and a linear layer must say at each state which clone it
# is. The three encoders differ only in the positions they are given.

# %%
k, num_words, N = 4, 30, 24
num_steps, num_rows = scale.pick(100, 300), scale.pick(32, 128)


def random_rows(num_rows, rng):
    """Expanded random sentences with 8 masks each, and the masks."""
    ids_BN = torch.randint(6, num_words, (num_rows, N), generator=rng)
    ids_BN[:, 0], ids_BN[:, -1] = special.bos, special.eos
    noise_BN = torch.rand(num_rows, N, generator=rng)
    noise_BN[:, [0, -1]] = 2.0
    is_masked_BN = noise_BN.argsort(1).argsort(1) < 8
    masked = ids_BN.masked_fill(is_masked_BN, special.mask)
    batch = [t.to(scale.device) for t in (masked, is_masked_BN, ids_BN)]
    return expand_masks(*batch, k, "paper", special)[0], is_masked_BN


def clone_logits(encoder, head, way, expanded):
    """Guesses (states, k) and true clone numbers from 0."""
    is_clone_BT = expanded.clone_BT > 0
    hidden_BTD = encoder(*see(way, expanded))
    return head(hidden_BTD[is_clone_BT]), expanded.clone_BT[is_clone_BT] - 1


# %%
def learn_own_number(way, num_steps, seed=0):
    """Train; the encoder, its head, and loss and accuracy at each step."""
    encoder = make_encoder(way, seed)
    head = nn.Linear(64, k).to(scale.device)
    weights = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    rng = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        expanded, _ = random_rows(num_rows, rng)
        logits, number = clone_logits(encoder, head, way, expanded)
        loss = F.cross_entropy(logits, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(1) == number).double().mean().item()
        curve.append((loss.item(), accuracy))
    return encoder, head, np.array(curve)


learned = {way: learn_own_number(way, num_steps) for way in WAYS}

# %% [markdown]
# **Check.** Without positions, all four clones of a [MASK] must give the same
# answer, so exactly one of them is right: the accuracy is $1/4$ at every step and
# the loss cannot fall below $\ln 4$. With 2D the answer is right for practically
# all states after 50 steps. With 1D the encoder has to find it by other means,
# such as which words stand next to it, and takes longer.

# %%
curves = {way: curve for way, (_, _, curve) in learned.items()}
# Equal logits up to rounding: a few ties among 1,024 states may fall either way.
assert np.abs(curves["none"][:, 1] - 1 / k).max() < 0.02
assert curves["none"][:, 0].min() > math.log(k) - 1e-4
assert curves["2D"][50:, 1].min() > 0.99
assert curves["2D"][30:50, 1].mean() > curves["1D"][30:50, 1].mean() + 0.2
# To a twentieth, so that such ties do not show.
{way: round(20 * curve[-1, 1]) / 20 for way, curve in curves.items() if way != "1D"}

# %% [markdown]
# **Figure.** Share of states that know their number, during training.

# %% mystnb={"figure": {"caption": "Learning to say which clone one is.", "name": "fig-own-number"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3))
for way, color in zip(WAYS, ("black", "0.5", COLORS["exlm"]), strict=True):
    ax.plot(curves[way][:, 1], color=color, label=way)
ax.set(xlabel="training step", ylabel="share of states right", ylim=(0, 1.05))
_ = ax.legend(loc="center right")

# %% [markdown]
# **Takeaway.** With 2D RoPE a clone can read its number off its attention to any
# ordinary token, where $j' - j = -j$. Without, it cannot know it; with 1D it must
# work it out.
#
# ## What it is worth
#
# In the paper, ExLM without 2D RoPE loses half a point: 84.6 against 85.1 on MNLI
# and 80.9 against 81.4 on average over four tasks (Table 2). The paper does not
# say what took the place of 2D RoPE there. The variant in this package is 1D as
# above, `--model.rope 1d`.
#
# On the smallest of this book's languages, `pairs`, the choice makes no
# difference to the end result. These are two recorded runs of 400 steps
# ({ref}`reproduction`), in bits per sentence; the optimum is 1 and a plain MLM
# cannot pass 2.

# %%
runs = json.loads(Path("../book/results/first-runs.json").read_text())
command = "python -m exlm_mini.pretrain --recipe toy-pairs"
bits = {}
for name, options in (("2D", ""), ("1D", " --objective exlm --model.rope 1d")):
    run = next(run for run in runs if run["command"] == command + options)
    assert run["config"]["model"]["rope"] == name.lower()
    bits[name] = run["validation"]["exlm"][-1]["validation_bits_per_row"]
assert abs(bits["1D"] - bits["2D"]) < 0.01 and max(bits.values()) < 1.01
{name: f"{value:.3f}" for name, value in bits.items()}

# %% [markdown]
# That is no surprise. In this language the masks stand at the same places in
# every sentence, so a place in the expanded sequence *is* a clone number; and the
# recipe adds a learned vector per clone to the states, which tells them apart by
# another way. What 2D RoPE buys must be looked for where masks fall anywhere. The
# experiment above shows it there, on a task made for the purpose; on a language
# it remains to be shown.
#
# ## Summary
#
# - RoPE turns pairs of coordinates by an angle proportional to the position;
#   scores then depend on differences of positions.
# - 2D RoPE gives half of each head to the token index $i$ and half to the clone
#   index $j$. Scores are a function of $i' - i$ plus a function of $j' - j$.
# - Clones that share a position are equal after every layer, whatever the
#   weights. Their distributions are equal too, and chains of them carry no choice
#   from one word to the next.
# - Turning by the place in the expanded sequence separates clones but stretches
#   the distances of words by $k - 1$ per mask. 2D does not.
#
# ## Exercises
#
# **1. Do clones come round again?** The fastest pair turns by one radian per
# step, so after $2 \pi \approx 6.28$ steps it is back. Take $k = 8$: is clone 7
# mistaken for clone 1, or clone 8? The *similarity* of two clones is the score of
# a vector with all coordinates equal with itself, over its value at the same
# clone: the mean cosine over the pairs of the second half. Predict whether any
# two clones of 64 have similarity 1, for head size 16.

# %% tags=["hide-cell"]
speeds = 10_000.0 ** (-np.arange(4) / 4)
difference = np.arange(1, 64)
similarity = np.cos(difference[:, None] * speeds).mean(axis=1)
# The fastest pair alone is nearly back after 6 steps, and after 44 ...
assert np.cos(6) > 0.95 and np.cos(44) > 0.999
# ... but the slower pairs are not: no two of 64 clones look the same.
assert similarity.max() < 0.99
ones_d = torch.ones(HEAD_DIM, dtype=FLOAT64)
its_score = ones_d[8:] @ turned(ones_d, 0, 6)[8:] / 8
assert abs(float(its_score) - similarity[5]) < 1e-12
{int(d): round(float(similarity[d - 1]), 2) for d in (1, 2, 6, 7, 44)}

# %% [markdown]
# **2. Shuffle the sequence.** With 2D RoPE the encoder gets all it knows about
# order from $(i, j)$. Predict what happens to the hidden states when the expanded
# tokens are shuffled together with their positions. And with 1D?

# %% tags=["hide-cell"]
order_T = torch.randperm(expanded.token_ids_BT.shape[1], generator=rng)
shuffled = type(expanded)(*(t[:, order_T.to(t.device)] for t in expanded))
for way in ("1D", "2D"):
    straight = layer_outputs(way, expanded)[-1][order_T]
    crooked = layer_outputs(way, shuffled)[-1]
    is_same = torch.allclose(straight, crooked, atol=1e-10)
    # 2D: the same states in another order. 1D: places are read off the order.
    assert is_same == (way == "2D")

# %% [markdown]
# **3. Masks side by side.** Where does an encoder with 1D positions err on the
# way? Train one for 60 steps. Predict whether it does better on masks that stand
# alone or on those with another mask next to them, then measure both.

# %% tags=["hide-cell"]
test_rows, is_masked = random_rows(256, torch.Generator().manual_seed(99))
is_beside = torch.zeros_like(is_masked)
is_beside[:, 1:] |= is_masked[:, :-1]
is_beside[:, :-1] |= is_masked[:, 1:]
is_beside = is_beside.to(scale.device)
is_beside = is_beside.gather(1, test_rows.position_BT)[test_rows.clone_BT > 0]
halfway = {**learned, "1D": learn_own_number("1D", num_steps=60)}
accuracy = {}
for way in ("1D", "2D"):
    encoder, head, _ = halfway[way]
    with torch.no_grad():
        logits, number = clone_logits(encoder, head, way, test_rows)
    is_right = (logits.argmax(1) == number).double()
    pair = is_right[~is_beside].mean(), is_right[is_beside].mean()
    accuracy[way] = [float(share) for share in pair]
# A mask alone has words at both ends to count from. In a run of 2k or more equal
# tokens the clones in the middle have none close by. 2D does not care.
assert accuracy["1D"][0] > accuracy["1D"][1] + 0.02
assert min(accuracy["2D"]) > 0.99

# %% [markdown]
# **4. Another way.** Find a second way to tell clones apart that leaves the
# distances of words alone, and show that it breaks the symmetry. (Hint: the
# encoder's input.)

# %% tags=["hide-cell"]
encoder = make_encoder("none", dtype=FLOAT64)
clone_vectors = torch.randn(5, 64, generator=rng, dtype=FLOAT64)
clone_vectors[0] = 0  # ordinary tokens stay as they are
added_BTD = clone_vectors.to(scale.device)[expanded.clone_BT]


def add_clone_vectors(embedding, inputs, output_BTD):
    """A vector per clone on top of the embedding; a model would learn them."""
    return output_BTD + added_BTD


encoder.embedding.register_forward_hook(add_clone_vectors)
with torch.no_grad():
    hidden_TD = encoder(*see("none", expanded))[0].cpu()
assert spread(hidden_TD) > 0.1
