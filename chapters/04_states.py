# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-expansion)=
# # States and their coordinates
#
# A masked language model gives each hidden word one [MASK], and the hidden state
# at that [MASK] has to hold everything the word could be. When the sentence
# allows *happy* as well as *sad*, both end up in the same vector. ExLM
# {cite}`zheng2025exlm` gives each [MASK] $k$ states, so that one can stand for
# *happy* and another for *sad*. Here you write the step that makes room for them,
# and answer the question that comes with it: how does a state find out which one it
# is?
#
# **It takes** 25 minutes and half a minute of one CPU core. **Paper:** §4.1, §4.2,
# Appendix P and Table 2.

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
import torch
from drawings import draw_curves, draw_heatmap, draw_tokens

from exlm_mini.plot.style import use_book_style

use_book_style()
_ = torch.set_num_threads(1)

# %%
import math

import torch
from exlm_so_far import BOS, EOS, MASK, PAD, Encoder, initialise, rope_2d, train
from torch import nn
from torch.nn import functional as F

# %% [markdown]
# ## One row grows
#
# Expansion writes each [MASK] $k$ times, at the place where it stands. Each token
# of the new row gets two coordinates. The first, $i$, is the index of the token
# in the *original* row; all clones of a [MASK] share it. The second, $j$, counts
# the clones from 1 to $k$; an ordinary token has $j = 0$.


# %%
def expand_row(row, k):
    """(token, i, j) of every copy: k clones of a [MASK], one of any other token."""
    expanded = []
    for i, token in enumerate(row):
        numbers = range(1, k + 1) if token == "[MASK]" else [0]
        expanded += [(token, i, j) for j in numbers]
    return expanded


row = ["[BOS]", "she", "felt", "[MASK]", "and", "[MASK]", "[EOS]"]
print(*expand_row(row, k=2)[2:6])

# %% [markdown]
# In {numref}`fig-expansion`, the word *and* keeps $i = 4$ although it now stands at
# place 5 of the row. Measured by $i$, the words are as far apart as before.

# %% mystnb={"figure": {"caption": "The masked row (top) and the expanded row with the coordinates (i, j) of each token, k = 2. [M] is a [MASK].", "name": "fig-expansion"}, "image": {"alt": "Seven tokens above, nine below. Each of the two masks has become two boxes with the same i and j = 1, 2."}} tags=["remove-input"]
expanded = expand_row(row, k=2)


def kinds_of(places):
    """Colours: the first [MASK] yellow, the second brown."""
    special = {0: "boundary", 3: "mask", 5: "second", 6: "boundary"}
    return [special.get(i, "token") for i in places]


fig, ax = plt.subplots(figsize=(3.9, 1.7))
for t, (_, i, _) in enumerate(expanded):
    ax.plot([i + 1, t], [1.6, 0.1], color="0.75", lw=1, zorder=0)
short = [token.replace("MASK", "M") for token in row]
draw_tokens(ax, [""] * 7, kinds_of(range(7)), y=5)  # sets the limits
for x, (text, kind) in enumerate(zip(short, kinds_of(range(7)), strict=True)):
    box = ax.inset_axes([x + 0.5, 1.1, 1, 1], transform=ax.transData)
    draw_tokens(box, [text], [kind])
    box.set(xlim=(-0.5, 0.5), ylim=(-0.5, 0.5))
texts = [f"{token.replace('MASK', 'M')}\n{i}, {j}" for token, i, j in expanded]
draw_tokens(ax, texts, kinds_of(i for _, i, _ in expanded))
_ = ax.set(xlim=(-0.6, 8.6), ylim=(-0.5, 2.1))

# %% [markdown]
# The clones of a [MASK] get one and the same embedding. When they enter the
# encoder, they differ in $j$ alone (§4.2). (`ToyExLM` also added a learned vector
# to each, which the paper does not.)
#
# ## A batch of unequal rows
#
# Rows have different numbers of masks, so their expanded rows differ in length. Two
# tensor operations replace the loop over tokens. Add up the numbers of copies from
# left to right: the running sum says where the copies of each token *end* in the
# expanded row. The token at a given place is then the first one whose copies end
# beyond that place, and `searchsorted` finds it. [PAD] gets no copy, and the $j$ of
# a clone is its distance from the first copy, plus one.


# %% tags=["save"]
def expand(masked_BN, k):
    """Expand each [MASK] to k clones; ids, i and j of each token, (B, T)."""
    is_mask_BN = masked_BN == MASK
    copies_BN = torch.where(is_mask_BN, k, 1) * (masked_BN != PAD)
    end_BN = copies_BN.cumsum(dim=1)
    place_BT = torch.arange(int(end_BN.max())).repeat(len(masked_BN), 1)
    is_real_BT = place_BT < end_BN[:, -1:]
    # Padding gets the coordinates of token 0.
    i_BT = torch.searchsorted(end_BN, place_BT, right=True) * is_real_BT
    first_BT = (end_BN - copies_BN).gather(1, i_BT)
    j_BT = (place_BT - first_BT + 1) * is_mask_BN.gather(1, i_BT) * is_real_BT
    ids_BT = masked_BN.gather(1, i_BT).masked_fill(~is_real_BT, PAD)
    return ids_BT, i_BT, j_BT


# %% [markdown]
# The encoder turns every token of the expanded row into a hidden state, and after
# that the ordinary tokens have done their work: they are known and predict
# nothing. Only the outputs at clones are used further, and those at [BOS] and
# [EOS], where a path begins and ends. They are the *states* of the graph; `pack`
# moves them together. (In the paper [BOS] and [EOS] are one state each, Appendix P.
# The released code clones them $k$ times and predicts them like words; the package
# can do both, and its default, `official`, follows the code.)


# %% tags=["save"]
def pack(is_chosen_BX):
    """Indices of the chosen columns of each row, and which of them are real."""
    count_B1 = is_chosen_BX.sum(dim=1, keepdim=True)
    # The chosen columns come first; others follow as padding.
    index_BX = (~is_chosen_BX).int().argsort(dim=1, stable=True)
    column_L = torch.arange(int(count_B1.max()))
    return index_BX[:, : len(column_L)], column_L < count_B1


# %%
rows = [BOS, 6, 7, MASK, 9, MASK, EOS], [BOS, 6, MASK, EOS, PAD, PAD, PAD]
ids_BT, i_BT, j_BT = expand(torch.tensor(rows), k=2)
is_state_BT = (ids_BT == MASK) | (ids_BT == BOS) | (ids_BT == EOS)
print("i     ", *i_BT.tolist(), "\nj     ", *j_BT.tolist())
place_BL, is_real_BL = pack(is_state_BT)
print("states", *place_BL.tolist(), "\nreal  ", *is_real_BL.int().tolist())

# %% [markdown]
# The first row has six states, the second four and two columns of padding.
#
# **What it costs.** A row of $N$ tokens with $m$ masks has $N + (k-1)\,m$ tokens
# after expansion. At a mask ratio of 15% and with $k = 4$ the encoder reads 1.45
# times as many tokens as an MLM's, and the vocabulary is scored at four states for
# each mask. In all, a training step of the paper's base model takes 1.7 times the
# operations of an MLM's; the paper measured 1.9 times the GPU time.
# {ref}`chap-longer-rows` does the counting and shows how to lower the cost.
#
# ## How the encoder sees a coordinate
#
# RoPE takes the numbers of a query and of a key in pairs and turns each pair, as an
# arrow in the plane, by an angle proportional to its position
# {cite}`su2021roformer`. If two arrows are turned by the same angle, their scalar
# product stays the same, so it depends only on the difference of their positions.
# Your `rope_2d` turns one half of a head by $i$ and the other by $j$:

# %% mystnb={"figure": {"caption": "The fastest pair of each half, for a [MASK] at i = 3 with three clones and the tokens beside it. Left: all clones point in one direction. Right: the clones fan out, and the two ordinary tokens coincide. Lengths differ only to be seen.", "name": "fig-halves"}, "image": {"alt": "Two circles of arrows. By i the three clones lie on top of each other between their neighbours; by j they point in three directions."}} tags=["remove-input"]
colors = {"(2,0)": "0.35", "(3,1)": "#f2b134", "(3,2)": "#dd9130"}
colors |= {"(3,3)": "#8a5a2b", "(4,0)": "0.65"}
fig, axes = plt.subplots(1, 2, figsize=(3.6, 2.5))
for half, (ax, title) in enumerate(zip(axes, ("by i", "by j"), strict=True)):
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.85"))
    for number, (name, color) in enumerate(colors.items()):
        angle = int(name[1 + 2 * half])
        size = 1 - 0.15 * number  # keeps overlapping arrows visible
        tip = size * math.cos(angle), size * math.sin(angle)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2}
        arrow |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
        ax.annotate("", tip, (0, 0), arrowprops=arrow)
        ax.plot([], [], color=color, lw=3, label=None if half else name)
    ax.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal", title=title)
    ax.axis("off")
style = {"ncols": 5, "handlelength": 0.8, "columnspacing": 0.7, "fontsize": 8}
_ = fig.legend(loc="outside upper center", **style)

# %% [markdown]
# Let $R(i, j)$ be the rotation by `rope_2d`. A scalar product is the sum over the
# two halves. With a query $q$ at $(i, j)$ and a key $\kappa$ at $(i', j')$,
#
# $$
# \begin{aligned}
# \langle R(i,j)\,q,\ &R(i',j')\,\kappa \rangle\\
# &= A(i'-i) + B(j'-j),
# \end{aligned}
# $$ (eq-relative)
#
# where $A$ and $B$ depend on $q$ and $\kappa$. The softmax of attention turns the
# sum into a product. So one head can ask for "the next mask" with its first half
# and for "the same clone" with its second. Score a random query and key at two
# pairs of places whose coordinates differ by (2, 1), and then at a third that
# differs by (1, 2):

# %% tags=["nbval-ignore-output"]
query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(5))


def attention_score(i, j, i_2, j_2):
    """Score of the query at (i, j) with the key at (i_2, j_2)."""
    turned_query = rope_2d(query, torch.tensor([[i]]), torch.tensor([[j]]))
    turned_key = rope_2d(key, torch.tensor([[i_2]]), torch.tensor([[j_2]]))
    return (turned_query * turned_key).sum().item()


for places in ((3, 1, 5, 2), (43, 2, 45, 3), (3, 1, 4, 3)):
    print(*places, f"{attention_score(*places):8.4f}")

# %% [markdown]
# ## Three ways to tell a clone where it is
#
# Are two coordinates necessary? Compare two simpler ways:
#
# | way | what the encoder is told |
# |---|---|
# | by i | $i$ alone, which all clones of a mask share |
# | by place | the place in the expanded row: 0, 1, 2, … |
# | 2D | $i$ and $j$, half a head each |


# %%
def seen_as(way, i_BT, j_BT):
    """The two coordinates that the encoder gets."""
    if way == "by i":
        return i_BT, 0 * j_BT
    if way == "by place":
        return torch.arange(i_BT.shape[1]).expand_as(i_BT), 0 * j_BT
    return i_BT, j_BT


WAYS = ("by i", "by place", "2D")
masked_1N = torch.tensor([[BOS, 6, 7, MASK, 9, 10, 11, 12, 13, MASK, EOS]])
ids_1T, i_1T, j_1T = expand(masked_1N, k=4)
_ = torch.manual_seed(1)
deep = Encoder(vocab_size=30, num_layers=4)
for way in WAYS:
    with torch.no_grad():
        hidden_TD = deep(ids_1T, *seen_as(way, i_1T, j_1T))[0]
    apart = (hidden_TD[3:7] - hidden_TD[3]).abs().max()
    print(f"{way:9} clones of the first mask differ by {apart:.1f}")

# %% [markdown]
# Here an encoder with random weights read a sentence with two masks. **Told $i$
# alone, the clones do not differ**, and no training changes that. A layer computes
# an output from a vector, its rotation, and the set of all keys and values. Two
# clones with the same vector and the same rotation get the same output, enter the
# next layer as equals, and so on. They predict the same word, and which of them a
# path takes does not change what it says.
#
# To see what position alone does to attention, give all tokens the same query and
# key. A token then attends most to itself and its neighbours (and to tokens six
# away, which is nearly a full turn of the fastest pair).

# %% mystnb={"figure": {"caption": "Attention of the four clones of the first [MASK], (3,1) to (3,4), to all tokens (columns), if position is all that tells tokens apart.", "name": "fig-clone-sees"}, "image": {"alt": "Three maps. By i, four equal rows. By place, each row is the one above moved by a step. In 2D, each clone prefers the clone of the other mask that has its own number."}} tags=["remove-input"]
same_11Td = torch.full((1, 1, ids_1T.shape[1], 16), 0.6)
attention = {}
for way in WAYS:
    turned = rope_2d(same_11Td, *seen_as(way, i_1T, j_1T))
    attention[way] = (turned @ turned.transpose(2, 3))[0, 0].softmax(dim=-1)
names = [
    f"({i},{j})" for i, j in zip(i_1T[0].tolist(), j_1T[0].tolist(), strict=True)
]
fig, axes = plt.subplots(3, 1, figsize=(3.6, 4.6), sharex=True)
top = 100 * max(float(weight_TT[3:7].max()) for weight_TT in attention.values())
for ax, (way, weight_TT) in zip(axes, attention.items(), strict=True):
    weight_kT = 100 * weight_TT[3:7].numpy()
    draw_heatmap(ax, weight_kT, names, names[3:7], "%", None, "Blues", (0, top))
    ax.set(title=way)
    ax.tick_params(labelsize=8)
_ = axes[-1].tick_params(axis="x", rotation=90)

# %% [markdown]
# By place, each clone has a position of its own, so clones differ. But every mask
# between two words now pushes these words $k - 1$ places further apart. With ten
# masks and $k = 4$ that is thirty places, and downstream, where there are no masks,
# the encoder meets distances unlike those in training. With 2D RoPE all four clones
# look at the sentence from the same position, and each prefers the clone of the
# *other* mask that has the same number.
#
# ## A clone that must say its number
#
# How hard is it for a clone to find out which one it is? Train for just that: small
# encoders read random rows of 24 words with a third of them masked, and a linear
# layer predicts the number $j$ of each clone from its state. One number out of four
# is 2 bits; told $i$ alone, a model cannot get below that.


# %% tags=["nbval-ignore-output"]
class OwnNumber(nn.Module):
    """An encoder and a linear layer that predicts the number j of each clone."""

    def __init__(self, way):
        super().__init__()
        self.way, self.encoder = way, Encoder(vocab_size=30)
        self.head = nn.Linear(32, 4)

    def bits(self, ids_BT, i_BT, j_BT):
        hidden_BTD = self.encoder(ids_BT, *seen_as(self.way, i_BT, j_BT))
        logits_S4, number_S = self.head(hidden_BTD)[j_BT > 0], j_BT[j_BT > 0] - 1
        return F.cross_entropy(logits_S4, number_S, reduction="none") / math.log(2)


def random_rows(num_rows=16):
    """Expanded rows of 24 tokens, 8 of them masked."""
    is_masked_BN = torch.rand(num_rows, 24, generator=draw).argsort(dim=1) < 8
    word_BN = torch.randint(6, 30, (num_rows, 24), generator=draw)
    return expand(word_BN.masked_fill(is_masked_BN, MASK), k=4)


curves = {}
for way in WAYS:
    draw = torch.Generator().manual_seed(0)
    _ = torch.manual_seed(0)
    model = OwnNumber(way)
    initialise(model, std=0.125)
    curves[way] = train(model, random_rows, steps=100)
    print(f"{way:9} {curves[way][100]:.3f} bits")

# %% mystnb={"figure": {"caption": "Cross-entropy of the number of a clone during training.", "name": "fig-own-number"}, "image": {"alt": "By i stays at two bits. In 2D falls to zero first; by place follows later."}} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(3.6, 2.6))
draw_curves(ax, curves, {})
for line, style in zip(ax.lines, (":", "--", "-"), strict=True):
    line.set_linestyle(style)
_ = ax.legend(fontsize=9)
_ = ax.set(ylabel="bits per clone", ylim=(0, 2.6))

# %% mystnb={"code_prompt_show": "Checked: expansion and states equal the package's on 60 random batches, rotations keep to differences, and the three ways end as the text says"} tags=["hide-cell", "check"]
from exlm_so_far import rotate

from exlm_mini.config import SpecialIds
from exlm_mini.model.expansion import expand_masks

rng = torch.Generator().manual_seed(4)
for trial in range(60):
    k, N_B1 = 1 + trial % 5, torch.randint(3, 20, (8, 1), generator=rng)
    place_N, row_BN = torch.arange(20), torch.randint(6, 90, (8, 20), generator=rng)
    row_BN[:, 0] = BOS
    row_BN = row_BN.masked_fill(place_N == N_B1, EOS).masked_fill(
        place_N > N_B1, PAD
    )
    is_masked_BN = (torch.rand(8, 20, generator=rng) < 0.3) & (row_BN > 5)
    masked_BN = row_BN.masked_fill(is_masked_BN, MASK)
    ours = expand(masked_BN, k)
    theirs, graph = expand_masks(
        masked_BN, is_masked_BN, row_BN, k, "paper", SpecialIds()
    )
    for name, own, its in zip(("ids", "i", "j"), ours, theirs[:3], strict=True):
        assert torch.equal(own, its), f"expand, k = {k}: {name} is {own}, not {its}"
    names = ["[MASK]" if v == MASK else "word" for v in masked_BN[0] if v != PAD]
    ij_T2 = torch.stack(ours[1:], dim=2)[0][ours[0][0] != PAD]
    assert [ij for _, *ij in expand_row(names, k)] == ij_T2.tolist(), "expand_row"
    is_state_BT = (ours[0] == MASK) | (ours[0] == BOS) | (ours[0] == EOS)
    place_BL, is_real_BL = pack(is_state_BT)
    assert torch.equal(is_real_BL, graph.is_state_BL), "pack: which are real"
    assert torch.equal(place_BL[is_real_BL], graph.place_BL[is_real_BL]), "pack"
near, far = attention_score(3, 1, 5, 2), attention_score(43, 2, 45, 3)
assert math.isclose(near, far, abs_tol=1e-4)
assert abs(near - attention_score(3, 1, 4, 3)) > 0.01
x_BHTd = torch.randn(2, 3, 8, 16)
i_BT, j_BT = torch.randint(0, 50, (2, 2, 8))
turned = rope_2d(x_BHTd, i_BT, j_BT)
torch.testing.assert_close(turned[..., :8], rotate(x_BHTd[..., :8], i_BT))
torch.testing.assert_close(turned.norm(dim=-1), x_BHTd.norm(dim=-1))
for way in WAYS:
    hidden_TD = deep(ids_1T, *seen_as(way, i_1T, j_1T))[0]
    apart = (hidden_TD[4:7] - hidden_TD[3]).abs().amax(dim=1).min()
    assert (apart < 1e-4) == (way == "by i")
both = attention["2D"][3:7]
assert (both[:, 12:16].argmax(dim=1) == torch.arange(4)).all()
by_i = curves["by i"]
assert abs(by_i[100] - 2) < 0.1 and min(by_i.values()) > 2 - 1e-3
assert curves["2D"][100] < 0.1 and curves["2D"][50] < curves["by place"][50]

# %% [markdown]
# In 2D a clone can read its number off its attention to any ordinary token, where
# $j' - j = -j$. By place it has to work the number out, for example from
# neighbouring words, and that takes longer.
#
# ## What it changes
#
# In the paper, ExLM without 2D RoPE loses half a point: 84.6 against 85.1 on MNLI,
# 80.9 against 81.4 on average over four tasks (Table 2, which does not say what
# replaced it). On `pairs`, whose masks never move, 2D RoPE makes no difference: our
# recorded runs, with the start-up aids of {ref}`chap-symmetric-start`, end at one
# bit in 2D and by place ({ref}`reproduction`). Where the number of masks changes,
# the difference is large. In a small language whose words depend on each other,
# models trained with 30% of the words masked, and tested with 90%, need 30.4 bits
# per row by place and 8.7 in 2D; with a vector for each clone, 33.1 and 8.8
# ({ref}`chap-findings`). Neither is good there, as the floor of an MLM is 5.6, but
# by place the model fails: the additional clones push the words to places and
# distances that no training row had.

# %% mystnb={"code_prompt_show": "Checked: these are the means of ten recorded seeds each"} tags=["hide-cell", "check"]
from pathlib import Path

from exlm_lab.experiments.records import runs

parts = runs("parts", Path("../book/results"))
assert round(parts["floor_bits_per_row@many"]["rope-2d"].mean(), 1) == 5.6
bits = parts["bits_per_row@many"]
for name, mean in {
    "rope-1d": 30.4,
    "rope-2d": 8.7,
    "rope-1d-named": 33.1,
    "rope-2d-named": 8.8,
}.items():
    assert len(bits[name]) == 10 and round(bits[name].mean(), 1) == mean

# %% [markdown]
# Next, {ref}`chap-dag-naive` leads paths through these states.
#
# ## Exercise: a vector instead of a number
#
# Tell the encoder $i$ alone, and add to each clone's input a vector of its own that
# depends on $j$, as `ToyExLM` did. **Predict** whether the loss of `OwnNumber` then
# falls below 2 bits, and whether faster or slower than in 2D. Subclass `OwnNumber`
# (the encoder takes `added_BTD`), train, then open the solution.


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
class OwnVector(OwnNumber):
    """The encoder gets j as a learned vector, not as a coordinate."""

    def __init__(self):
        super().__init__("by i")
        self.clone = nn.Embedding(5, 32)

    def bits(self, ids_BT, i_BT, j_BT):
        added_BTD = self.clone(j_BT) * (j_BT > 0)[:, :, None]
        hidden_BTD = self.encoder(ids_BT, i_BT, 0 * j_BT, added_BTD)
        logits_S4, number_S = self.head(hidden_BTD)[j_BT > 0], j_BT[j_BT > 0] - 1
        return F.cross_entropy(logits_S4, number_S, reduction="none") / math.log(2)


draw = torch.Generator().manual_seed(0)
_ = torch.manual_seed(0)
model = OwnVector()
initialise(model, std=0.125)
curve = train(model, random_rows, steps=100)
# It learns faster than in 2D: the vector is there from the first layer on.
assert curve[100] < 0.1 and curve[30] < curves["2D"][30]
