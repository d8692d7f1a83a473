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
# vectors for each [MASK]. These clones differ only in their coordinates $(i, j)$:
# $i$ is the place of the token in the sentence, $j$ numbers the clones of a mask,
# and an ordinary token has $j = 0$.
#
# If the encoder saw $i$ alone, the clones would stay identical through every
# layer, and $k$ states would be one state counted $k$ times. If it saw the place
# in the longer row instead, every mask would push the words around it apart. ExLM
# {cite}`zheng2025exlm` avoids both with a rotary position embedding (RoPE)
# {cite}`su2021roformer` that has two coordinates. Here you write it, put it into
# an encoder, and compare it with those two.
#
# **You will know afterwards** why attention with RoPE depends on differences of
# positions alone, what each half of a head sees, and how a clone finds out which
# one it is.
#
# **What it needs.** Less than a minute on a CPU; three very small encoders are
# trained. The chapter covers 2D RoPE (§4.2 of the paper) and its ablation (Table
# 2).

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
import math

import matplotlib.pyplot as plt
import torch
from drawings import draw_heatmap
from live import chapter_scale
from torch import nn
from torch.nn import functional as F

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
torch.set_default_dtype(torch.float64)
rng = torch.Generator().manual_seed(5)
scale = chapter_scale()
print(scale)

# %% [markdown]
# ## Turning a pair of numbers
#
# Attention compares a query with a key by their scalar product. RoPE takes the
# numbers of both in pairs and turns each pair, as an arrow in the plane, by an
# angle proportional to its position $n$:
#
# $$
# R_\omega(n) =
# \begin{pmatrix}
# \cos \omega n & -\sin \omega n \\
# \sin \omega n & \cos \omega n
# \end{pmatrix}.
# $$ (eq-rotation)
#
# If both arrows are turned by the same angle, their scalar product stays the
# same. So it can only depend on the difference between the two positions:


# %%
def turn(pair, angle):
    """An arrow in the plane, turned."""
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin], [sin, cos]]) @ pair


query, key = torch.randn(2, 2, generator=rng)
for n, other in ((3, 5), (103, 105), (5, 3)):
    score = turn(query, 0.1 * n) @ turn(key, 0.1 * other)
    print(f"query at {n:3}, key at {other:3}: {score:.4f}")

# %% [markdown]
# The first two agree, since both differences are 2. The third does not, since its
# difference is $-2$: a rotation also tells left from right.
#
# ## A head in two halves
#
# An attention head has $d$ numbers, or $d/2$ pairs, and each pair turns at its
# own speed, the first by one radian per step and the last very slowly:


# %%
def rotate(x_BHTd, index_BT):
    """Ordinary RoPE: pairs of features turned in proportion to an index."""
    half = x_BHTd.shape[-1] // 2
    speed_r = 10_000 ** (-torch.arange(half) / half)
    angle_B1Tr = index_BT[:, None, :, None] * speed_r
    cos, sin = angle_B1Tr.cos(), angle_B1Tr.sin()
    x, y = x_BHTd.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


# %% [markdown]
# The paper says that 2D RoPE encodes both coordinates; the released code shows
# how. The head is cut into two halves. The first is turned by $i$ and the second
# by $j$, each like a smaller head of its own:


# %%
def rope_2d(x_BHTd, i_BT, j_BT):
    """First half of each head turned by i, second half by j."""
    by_i, by_j = x_BHTd.chunk(2, dim=-1)
    return torch.cat([rotate(by_i, i_BT), rotate(by_j, j_BT)], dim=-1)


# %% mystnb={"figure": {"caption": "The fastest pair of each half, for a [MASK] at i = 3 with three clones and the tokens beside it. Left: all clones point in one direction. Right: the clones fan out, and the two ordinary tokens coincide. Arrows differ in length only so that overlapping ones can be seen.", "name": "fig-halves"}} tags=["hide-input"]
colors = {"(2,0)": "0.35", "(3,1)": "#f2b134", "(3,2)": "#dd9130"}
colors |= {"(3,3)": "#8a5a2b", "(4,0)": "0.65"}
fig, axes = plt.subplots(1, 2, figsize=(4.6, 2.9))
titles = ("first half, by i", "second half, by j")
for half, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.85"))
    for number, (place, color) in enumerate(colors.items()):
        angle = int(place[1 + 2 * half])
        size = 1 - 0.15 * number  # to see arrows that lie on top of each other
        tip = size * math.cos(angle), size * math.sin(angle)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2.5}
        arrow |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
        ax.annotate("", tip, (0, 0), arrowprops=arrow)
        ax.plot([], [], color=color, lw=3, label=None if half else place)
    ax.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal", title=title)
    ax.axis("off")
_ = fig.legend(loc="outside upper center", ncols=5, handlelength=1, columnspacing=1)

# %% [markdown]
# In the second half of an ordinary token nothing turns, because $j = 0$. So in
# ExLM only half of each head sees where a token stands.

# %% mystnb={"code_prompt_show": "Checked: rotations keep lengths, and the halves do not mix"} tags=["hide-cell", "check"]
x_BHTd = torch.randn(2, 3, 50, 16, generator=rng)
i_BT = torch.randint(0, 500, (2, 50), generator=rng)
j_BT = torch.randint(0, 9, (2, 50), generator=rng)
turned = rope_2d(x_BHTd, i_BT, j_BT)
torch.testing.assert_close(turned.norm(dim=-1), x_BHTd.norm(dim=-1))
torch.testing.assert_close(
    turned[..., :8], rope_2d(x_BHTd, i_BT, 0 * j_BT)[..., :8]
)
torch.testing.assert_close(
    turned[..., 8:], rope_2d(x_BHTd, 0 * i_BT, j_BT)[..., 8:]
)
assert torch.equal(rope_2d(x_BHTd, i_BT, 0 * j_BT)[..., 8:], x_BHTd[..., 8:])
pair = turn(x_BHTd[0, 0, 0, [0, 4]], i_BT[0, 0].item())  # 4 pairs in half a head
torch.testing.assert_close(turned[0, 0, 0, [0, 4]], pair)

# %% [markdown]
# ## Scores depend on two differences
#
# The scalar product of two heads is the sum over their halves, and each half
# depends on one difference. With $q$ at $(i, j)$ and $\kappa$ at $(i', j')$,
#
# $$
# \begin{aligned}
# \langle R(i,j)\,q,\ &R(i',j')\,\kappa \rangle\\
# &= f(i'-i) + g(j'-j),
# \end{aligned}
# $$ (eq-relative)
#
# where $f$ and $g$ depend on $q$ and $\kappa$. Take a random query and a random
# key; put the query at two places, and the key at all places around it:

# %%
di, dj = torch.meshgrid(torch.arange(-6, 7), torch.arange(-3, 4), indexing="xy")
query, key = torch.randn(2, 1, 1, 1, 16, generator=rng)
key_11Td = key.expand(1, 1, 91, 16)


def score_map(i, j):
    """Scores of the query at (i, j) with the key all around it, (7, 13)."""
    q = rope_2d(query, torch.tensor([[i]]), torch.tensor([[j]]))
    k = rope_2d(key_11Td, (i + di).view(1, -1), (j + dj).view(1, -1))
    return (q * k).sum(dim=-1).view(7, 13)


near, far = score_map(0, 0), score_map(40, 3)
print(f"largest difference of the two maps: {(near - far).abs().max():.3f}")

# %% mystnb={"figure": {"caption": "Above: score of a query and a key against the differences of their coordinates; every row is the row above plus a constant. Below: the same if the whole head is turned by i + j. One step in j then counts as one step in i, and a clone cannot be told from its neighbour in the next mask.", "name": "fig-relative"}} tags=["hide-input"]
mixed = (query * rotate(key_11Td, (di + dj).view(1, -1))).sum(dim=-1).view(7, 13)
maps = {"2D RoPE": near, "turned by i + j": mixed}
limits = (min(m.min() for m in maps.values()), max(m.max() for m in maps.values()))
fig, axes = plt.subplots(2, 1, figsize=(4.8, 4.6), sharex=True)
for ax, (title, values) in zip(axes, maps.items(), strict=True):
    rows, steps = dj[:, 0].tolist(), di[0].tolist()
    draw_heatmap(ax, values.numpy(), steps, rows, "score", None, limits=limits)
    ax.set(ylabel="j' - j, clones", title=title)
_ = axes[1].set(xlabel="i' - i, tokens")

# %% [markdown]
# The softmax of attention turns the sum into a product. So one head can ask for
# "the next mask" with its first half and for "the same clone" with its second.

# %% mystnb={"code_prompt_show": "Checked: the two maps are equal, and each is a sum of a function of i' - i and one of j' - j"} tags=["hide-cell", "check"]
torch.testing.assert_close(near, far, rtol=0, atol=1e-10)
torch.testing.assert_close(
    near[1:] - near[:-1], (near[1:] - near[:-1])[:, :1].expand(6, 13)
)
assert near[0].std() > 0.1 and near[:, 0].std() > 0.1
torch.testing.assert_close(mixed[1:, :-1], mixed[:-1, 1:])
assert (near[1:, :-1] - near[:-1, 1:]).abs().min() > 1e-3


# %% [markdown]
# ## Three ways to tell a clone where it is
#
# Take a sentence with two masks, each of which becomes $k = 4$ clones:


# %%
def coordinates(is_mask_N, k):
    """i and j of every token of an expanded row, (T,) each."""
    copies_N = torch.where(is_mask_N, k, 1)
    i_T = torch.arange(len(is_mask_N)).repeat_interleave(copies_N)
    first_T = (copies_N.cumsum(0) - copies_N)[i_T]
    return i_T, torch.arange(len(i_T)) - first_T + is_mask_N[i_T]


tokens = ["this", "was", "[MASK]", "and", "I", "am", "[MASK]", "now"]
is_mask_N = torch.tensor([token == "[MASK]" for token in tokens])
i_T, j_T = coordinates(is_mask_N, k=4)
print("i", *i_T.tolist(), "\nj", *j_T.tolist())

# %% [markdown]
# | way | what turns the head |
# |---|---|
# | by i | $i$ alone, which all clones of a mask share |
# | by place | the place in the expanded row: 0, 1, 2, … |
# | 2D | $i$ and $j$, half a head each |


# %%
def turner(way, i_BT, j_BT):
    """The rotation of queries and keys in one of the three ways."""
    if way == "2D":
        return lambda x_BHTd: rope_2d(x_BHTd, i_BT, j_BT)
    index_BT = i_BT if way == "by i" else torch.arange(i_BT.shape[1])[None]
    return lambda x_BHTd: rotate(x_BHTd, index_BT)


WAYS = ("by i", "by place", "2D")

# %% [markdown]
# To see what position alone does to attention, give all tokens the same query and
# the same key. A token then attends most to itself and its neighbours:

# %%
same_11Td = torch.full((1, 1, len(i_T), 16), 0.6)
attention = {}
for way in WAYS:
    turned = turner(way, i_T[None], j_T[None])(same_11Td)
    attention[way] = (turned @ turned.transpose(2, 3))[0, 0].softmax(dim=-1)

# %% mystnb={"figure": {"caption": "Attention of the four clones of the first [MASK], (2,1) to (2,4), to all tokens (columns), if position is all that tells tokens apart.", "name": "fig-clone-sees"}} tags=["hide-input"]
pairs = zip(i_T.tolist(), j_T.tolist(), strict=True)
names = [f"({i},{j})" if j else tokens[i] for i, j in pairs]
fig, axes = plt.subplots(3, 1, figsize=(4.9, 5.2), sharex=True)
top = max(float(weight_TT[2:6].max()) for weight_TT in attention.values())
for ax, (way, weight_TT) in zip(axes, attention.items(), strict=True):
    weight_kT = 100 * weight_TT[2:6].numpy()
    draw_heatmap(
        ax, weight_kT, names, names[2:6], "%", None, "Blues", (0, 100 * top)
    )
    ax.set(title=way)
    ax.grid(False)
_ = axes[-1].tick_params(axis="x", rotation=90)

# %% [markdown]
# Turned by $i$, the four clones attend alike. Turned by place, each stands one
# step further on and sees everything from there. With 2D RoPE, all four look at
# the sentence from the same place, and each prefers the clone of the *other* mask
# that has its own number.

# %% mystnb={"code_prompt_show": "Checked: by i, equal rows; in 2D, each clone prefers its own number and weighs ordinary tokens by i alone"} tags=["hide-cell", "check"]
by_i, by_place, both = (attention[way][2:6] for way in WAYS)
torch.testing.assert_close(by_i, by_i[:1].expand(4, -1))
assert (by_place.argmax(dim=1) == torch.arange(2, 6)).all()
assert (both[:, 9:13].argmax(dim=1) == torch.arange(4)).all()
shift = (both / both[:1])[:, j_T == 0]  # the same factor for all ordinary tokens
torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))


# %% [markdown]
# ## Clones at one position stay equal for ever
#
# Could a deeper encoder, or training, tell apart clones that share a position?
# Here is the attention of {ref}`chap-one-notebook`, with the rotation as an
# argument:


# %%
class Attention(nn.Module):
    """Self-attention whose queries and keys are turned by their positions."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD, turn):
        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        score_BHTT = turn(q) @ turn(k).transpose(2, 3) / math.sqrt(q.shape[-1])
        heads_BHTd = score_BHTT.softmax(dim=-1) @ v
        return self.output(heads_BHTd.transpose(1, 2).flatten(2))


# %% mystnb={"code_prompt_show": "Layer and Encoder around it, as in the first notebook"} tags=["hide-input"]
class Layer(nn.Module):
    """Attention, then a feed-forward network."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD, turn):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turn)
        return x_BTD + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x_BTD))))


class Encoder(nn.Module):
    """Token ids and a rotation to hidden states; weights N(0, 0.125²)."""

    def __init__(self, vocab_size=30, width=64, num_heads=4, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            Layer(width, num_heads) for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.125)

    def forward(self, ids_BT, turn):
        x_BTD = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turn)
        return self.final_norm(x_BTD)


# %% [markdown]
# Four layers with random weights read the sentence. How far apart are the four
# clones of the first mask after each layer?

# %%
_ = torch.manual_seed(1)
deep = Encoder(num_layers=4)
ids_1T = torch.where(is_mask_N, 1, torch.arange(10, 18))[i_T][None]  # 1 is [MASK]


@torch.no_grad()
def spread(encoder, way):
    """Largest difference between the clones of the first mask after each layer."""
    x_1TD, found = encoder.embedding(ids_1T), []
    for layer in encoder.layers:
        x_1TD = layer(x_1TD, turner(way, i_T[None], j_T[None]))
        found.append((x_1TD[0, 2:6] - x_1TD[0, 2]).abs().max().item())
    return found


for way in WAYS:
    print(f"{way:9}", *(f"{size:.2f}" for size in spread(deep, way)))

# %% [markdown]
# Turned by $i$, they never differ. A layer computes an output from a vector, its
# rotation, and the set of all keys and values. Two clones with the same vector and
# the same rotation get the same output, enter the next layer as equals, and so on,
# whatever the weights are, trained or not. They predict the same word, and which of
# them a path takes does not change what it says.

# %% mystnb={"code_prompt_show": "Checked: with five random encoders, clones turned by i are equal after every layer; by place and in 2D they differ"} tags=["hide-cell", "check"]
for seed in range(5):
    torch.manual_seed(seed)
    encoder = Encoder(num_layers=4)
    assert max(spread(encoder, "by i")) < 1e-12
    assert min(spread(encoder, "by place") + spread(encoder, "2D")) > 0.01

# %% [markdown]
# ## The place in the row stretches the sentence
#
# By place, clones do differ. But every mask between two words now pushes those
# words $k - 1$ places further apart. Here are two words ten tokens apart, with
# more and more words between them masked:

# %%
for num_masks in (0, 3, 6, 9):
    is_masked_N = (torch.arange(12) > 1) & (torch.arange(12) < 2 + num_masks)
    row_i, row_j = coordinates(is_masked_N, k=4)
    start, end = (row_i == 1).nonzero(), (row_i == 11).nonzero()
    apart = int(end - start), int(row_i[end] - row_i[start])
    print(f"{num_masks} masks: {apart[0]} by place, {apart[1]} by i")

# %% [markdown]
# Downstream there are no masks ({ref}`chap-downstream`), so there an encoder
# trained by place meets distances unlike those in training. With 2D RoPE they are
# the same.
#
# ## A clone that must say its number
#
# How hard is it for a clone to find out which one it is? We train for just that:
# small encoders read random rows of 24 words with a third of them masked, and a
# linear layer must name each state's number $j$.

# %%
k = 4
num_steps, num_rows = scale.pick(100, 300), scale.pick(32, 128)


def random_rows(rng):
    """Expanded rows with 8 masks each: token ids, i and j."""
    is_mask_BN = torch.rand(num_rows, 24, generator=rng).argsort(dim=1) < 8
    word_BN = torch.randint(2, 30, (num_rows, 24), generator=rng)
    word_BN[is_mask_BN] = 1
    rows = [coordinates(is_mask_N, k) for is_mask_N in is_mask_BN]
    i_BT, j_BT = (torch.stack(row) for row in zip(*rows, strict=True))
    return word_BN.gather(1, i_BT), i_BT, j_BT


def learn_own_number(way):
    """Train an encoder and its linear layer; the share right at each step."""
    torch.manual_seed(0)
    encoder, head = Encoder(), nn.Linear(64, k)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
    rng, curve = torch.Generator().manual_seed(0), []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20)
        ids_BT, i_BT, j_BT = random_rows(rng)
        is_clone_BT = j_BT > 0
        hidden_BTD = encoder(ids_BT, turner(way, i_BT, j_BT))
        logits, number = head(hidden_BTD[is_clone_BT]), j_BT[is_clone_BT] - 1
        loss = F.cross_entropy(logits, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append((logits.argmax(dim=1) == number).double().mean().item())
    return torch.tensor(curve)


curves = {way: learn_own_number(way) for way in WAYS}
for way in ("by i", "2D"):
    print(
        f"{way}: {round(20 * curves[way][-1].item()) / 20:.2f} of the states right"
    )

# %% mystnb={"figure": {"caption": "Share of states that name their own number, during training.", "name": "fig-own-number"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(4.9, 2.9))
for way, color in zip(WAYS, ("black", "0.5", COLORS["exlm"]), strict=True):
    ax.plot(curves[way], color=color)
    ax.annotate(
        way,
        (num_steps - 1, curves[way][-5:].mean()),
        (4, {"2D": 3, "by place": -9}.get(way, -3)),
        textcoords="offset points",
        color=color,
        annotation_clip=False,
    )
_ = ax.set(xlabel="training step", ylabel="share of states right", ylim=(0, 1.05))

# %% mystnb={"code_prompt_show": "Checked: by i, a quarter is right at every step; 2D is above 99% after 50 steps, and ahead of by place before that"} tags=["hide-cell", "check"]
# Equal logits up to rounding: a few ties among 1,024 states may fall either way.
assert (curves["by i"] - 1 / k).abs().max() < 0.02
assert curves["2D"][50:].min() > 0.99
assert curves["2D"][30:50].mean() > curves["by place"][30:50].mean() + 0.2

# %% [markdown]
# By $i$, the four clones of a mask must give the same answer, so exactly one of
# them is right: a quarter. With 2D a state can read its number off its attention
# to any ordinary token, where $j' - j = -j$. By place it has to work the number
# out, for example from neighbouring words, and that takes longer.
#
# ## What it is worth
#
# In the paper, ExLM without 2D RoPE loses half a point: 84.6 against 85.1 on
# MNLI, 80.9 against 81.4 on average over four tasks (Table 2, which does not say
# what replaced it). On `pairs`, recorded runs of 400 steps with 2D RoPE and by
# place (`--model.rope 1d`) both end at 1.00 bits per sentence, the optimum
# ({ref}`reproduction`). That is no surprise: the masks of this language never
# move, so the place *is* a clone number, and the recipe also adds a learned vector
# for each clone.
#
# Where the number of masks changes, they differ a great deal. Models trained with
# 30% of the words masked, and tested with 90%, need about 20 bits more per row by
# place than with 2D RoPE, with learned vectors or without ({ref}`chap-findings`):
# the additional clones push the words to places and distances that no training
# row had.

# %% mystnb={"code_prompt_show": "Checked: the recorded runs say so"} tags=["hide-cell", "check"]
import json
from pathlib import Path

from exlm_lab.experiments.records import runs

results = Path("../book/results")
parts = runs("parts", results)
for kind in ("", "-named"):
    one, two = (parts["bits_per_row@many"][f"rope-{n}d{kind}"] for n in (1, 2))
    assert len(one) == len(two) == 10 and 18 < one.mean() - two.mean() < 27

first = json.loads((results / "first-runs.json").read_text())
command = "python -m exlm_mini.pretrain --recipe toy-pairs"
for rope, options in (("2d", ""), ("1d", " --objective exlm --model.rope 1d")):
    run = next(run for run in first if run["command"] == command + options)
    assert run["config"]["model"]["rope"] == rope
    last = run["validation"]["exlm"][-1]
    assert last["step"] == 400 and abs(last["validation_bits_per_row"] - 1) < 0.01

# %% [markdown]
# ## What the package makes of it
#
# The package's encoder has the same parts under the same names, so it can take
# over your weights. Its setting `rope` is `2d` by default; `1d` is the rotation
# by place.

# %%
from exlm_mini.config import ModelConfig
from exlm_mini.model import encoder as package

_ = torch.manual_seed(2)
mine = Encoder()
config = ModelConfig(rope="2d", dropout=0, attention_dropout=0)
theirs = package.Encoder(config, vocab_size=30, pad=0)
theirs.load_state_dict(mine.state_dict())
ids_BT, i_BT, j_BT = random_rows(rng)
theirs_BTD = theirs(ids_BT, i_BT, j_BT, ids_BT > 0)
off = mine(ids_BT, turner("2D", i_BT, j_BT)) - theirs_BTD
print(f"largest difference {off.abs().max():.6f}")

# %% mystnb={"code_prompt_show": "Checked: the encoders are equal to ten digits, and so are the rotations alone"} tags=["hide-cell", "check"]
from exlm_mini.model import rope as package_rope

for rope, way in (("2d", "2D"), ("1d", "by place")):
    config = ModelConfig(rope=rope, dropout=0, attention_dropout=0)
    theirs = package.Encoder(config, vocab_size=30, pad=0)
    theirs.load_state_dict(mine.state_dict())
    hidden_BTD = mine(ids_BT, turner(way, i_BT, j_BT))
    theirs_BTD = theirs(ids_BT, i_BT, j_BT, ids_BT > 0)
    torch.testing.assert_close(hidden_BTD, theirs_BTD, rtol=0, atol=1e-10)
x_BHTd = torch.randn(*i_BT.shape, 3, 16, generator=rng).transpose(1, 2)
rotation = package_rope.rotation_2d(i_BT, j_BT, 16, x_BHTd.dtype)
want = package_rope.rotate(x_BHTd, rotation)
torch.testing.assert_close(rope_2d(x_BHTd, i_BT, j_BT), want, rtol=0, atol=1e-12)
rotation = package_rope.rotation_1d(i_BT, 16, x_BHTd.dtype)
want = package_rope.rotate(x_BHTd, rotation)
torch.testing.assert_close(rotate(x_BHTd, i_BT), want, rtol=0, atol=1e-12)

# %% [markdown]
# Next, {ref}`chap-dag-naive` puts paths through these states.
#
# ## Exercises
#
# **1. Do clones come round again?** The fastest pair turns by one radian per step
# and is back after about 6.28 steps. Is clone 7 mistaken for clone 1? The
# *similarity* of two clones is the mean cosine of the angles between them, over
# all pairs of the second half. Write it for a head of width 16, for differences
# $1, \dots, 63$.

# %% tags=["hide-input"]


def judge_similarity(similarity):
    """Is it the score of a vector of ones with itself, over its length?"""
    difference = torch.arange(1, 64)
    if (yours := similarity(difference)) is None:
        return "not yet"
    ones = torch.ones(1, 1, 63, 16)
    turned = rope_2d(ones, 0 * difference[None], difference[None])
    want = (turned * ones)[0, 0, :, 8:].mean(dim=-1)
    off = (yours - want).abs().max()
    return "right" if off < 1e-9 else f"off by up to {off:.3f}"


# %%
def similarity(difference_X):
    """Mean cosine of the angles between two clones."""
    ...  # your turn


judge_similarity(similarity)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]


def similarity(difference_X):
    """Half a head of 16 has four pairs, the slowest at 0.001 radians."""
    speed_r = 10_000 ** (-torch.arange(4) / 4)
    return (difference_X[:, None] * speed_r).cos().mean(dim=1)


assert judge_similarity(similarity) == "right"
# The fastest pair is nearly back after 6 steps and after 44; the others are not.
assert math.cos(6) > 0.95 and math.cos(44) > 0.999
assert similarity(torch.arange(1, 64)).max() < 0.99

# %% [markdown]
# **2. Shuffle the row.** The tokens of an expanded row are shuffled together with
# their coordinates. In which of the three ways does each token keep its hidden
# state?

# %% tags=["hide-input"]


@torch.no_grad()
def judge_shuffle(answers):
    """Ask the encoder."""
    if None in answers.values():
        return "not yet"
    order_T = torch.randperm(len(i_T), generator=torch.Generator().manual_seed(3))
    for way, answer in answers.items():
        straight = deep(ids_1T, turner(way, i_T[None], j_T[None]))[:, order_T]
        shuffled = turner(way, i_T[None, order_T], j_T[None, order_T])
        is_same = torch.allclose(deep(ids_1T[:, order_T], shuffled), straight)
        if is_same != answer:
            return f"{way}: no"
    return "right"


# %%
keeps_its_state = {"by i": None, "by place": None, "2D": None}  # True or False
judge_shuffle(keeps_its_state)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
# Attention sees a set; only a rotation by place knows the order of the row.
keeps_its_state = {"by i": True, "by place": False, "2D": True}
assert judge_shuffle(keeps_its_state) == "right"

# %% [markdown]
# **3. Another way to tell clones apart.** Leave the rotation by $i$ as it is and
# add something to the input of the encoder, at clones only. The first notebook,
# {ref}`chap-one-notebook`, does so too.

# %% tags=["hide-input"]


@torch.no_grad()
def judge_addition(addition):
    """Do clones differ after the last layer, and are other tokens left alone?"""
    if (added_TD := addition(j_T)) is None:
        return "not yet"
    if added_TD[j_T == 0].any():
        return "ordinary tokens have changed"
    x_1TD = deep.embedding(ids_1T) + added_TD
    for layer in deep.layers:
        x_1TD = layer(x_1TD, turner("by i", i_T[None], j_T[None]))
    clones = x_1TD[0, 2:6]
    apart = min(
        (a - b).abs().max() for n, a in enumerate(clones) for b in clones[:n]
    )
    return "right" if apart > 0.01 else "two clones are still equal"


# %%
def addition(j_T):
    """What is added to the input vectors, (T, 64)."""
    ...  # your turn


judge_addition(addition)

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
clone = nn.Embedding(
    5, 64, padding_idx=0
)  # a model would learn it; row 0 stays zero


def addition(j_T):
    """A vector of its own for each clone number."""
    return clone(j_T)


assert judge_addition(addition) == "right"
