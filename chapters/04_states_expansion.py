# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-expansion)=
# # States expansion
#
# A masked language model has one hidden state per [MASK], so it has one place in
# which to keep everything the missing word could be. ExLM {cite}`zheng2025exlm`
# gives each [MASK] $k$ states instead of one. This chapter follows one sentence
# through that step, writes the step in a few lines, and counts what it costs.
#
# **You will** expand a sentence and draw it before and after, derive the lengths
# that come out, check an operation count against PyTorch's own counter, and see
# why a fixed number of masks per block keeps all tensors in one shape.
#
# **Afterwards you know** what the encoder reads, which of its outputs take part
# in the rest of the model, and why ExLM with $k = 4$ costs about 1.7 times an MLM
# and not four times.
#
# **It needs** about 10 seconds on a CPU and no GPU. Nothing is trained here. It
# covers §4.1 and the first part of §4.2 of the paper, Figures 1 and 6, and
# Appendices P and Q.2.

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
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exlm_mini.config import (
    ENCODER_PRESETS,
    EncoderShape,
    MaskingConfig,
    ModelConfig,
    SpecialIds,
)
from exlm_mini.data.masking import Masker, num_masks
from exlm_mini.data.tokenizer import word_level
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.expansion import expand, expand_masks, gather_states
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.model.rope import rotation_2d
from exlm_mini.plotting import COLORS, draw_tokens, use_book_style
from exlm_mini.training.live import chapter_scale

use_book_style()
scale = chapter_scale()
special = SpecialIds()
rng = torch.Generator().manual_seed(4)
str(scale)

# %% [markdown]
# Tensors carry their shape in their name: `B` rows, `N` input tokens, `T` tokens
# after expansion, `L` states, `M` targets, `D` width, `V` vocabulary.
#
# ## One sentence, before and after
#
# **Question.** What becomes of a sentence with two hidden words?
#
# The sentence is close to the one in the paper's case study (Figure 7). Two words
# are hidden, and $k = 2$ states stand in for each of them. In this chapter $k$ is
# always the number of states per [MASK], `states_per_mask` in the settings. (In
# §3 the paper uses the same letter for the copies of Repeated MLM.)

# %%
sentence = "this is great and i am very glad to see it"
tokenizer = word_level(sentence.split())
ids = [special.bos, *tokenizer.encode(sentence), special.eos]
token_ids_BN = torch.tensor([ids])
is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
is_masked_BN[0, [3, 8]] = True
masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special.mask)
print(" ".join(tokenizer.token(i) for i in masked_ids_BN[0].tolist()))

# %% [markdown]
# `expand_masks` returns two things: the sequence that the encoder will read, and
# the *graph*, which says which of its outputs are states and what they must
# spell.

# %%
k = 2
expanded, graph = expand_masks(
    masked_ids_BN, is_masked_BN, token_ids_BN, k, "official", special
)
print("token  ", expanded.token_ids_BT[0].tolist())
print("i      ", expanded.position_BT[0].tolist())
print("j      ", expanded.clone_BT[0].tolist())

# %% [markdown]
# Every token of the new sequence has a pair of positions $(i, j)$. The first,
# $i$, is the place of the token in the *original* sentence; all copies share it.
# The second, $j$, numbers the copies from 1 to $k$; an ordinary token has $j = 0$
# (§4.2). The copies are called *clones*.
#
# **Figure.** Follow the lines from top to bottom. The two [MASK] fan out into two
# clones each. Here [BOS] and [EOS] are cloned as well; a section below says why.
# Then the clones are collected: they are the states, and only they go on.

# %% tags=["hide-input"]
STATE_COLORS = ("boundary", "state", "second", "boundary")


def kind(token_id):
    """Which colour a token has."""
    if token_id == special.mask:
        return "mask"
    return "boundary" if token_id in (special.bos, special.eos) else "token"


def draw_expansion(ax, masked_ids_N, expanded, graph):
    """Input, expanded sequence and states of one row, with lines between them."""
    places, owners = graph.place_BL[0].tolist(), graph.owner_BL[0].tolist()
    expanded_ids = expanded.token_ids_BT[0].tolist()
    positions, clones = (
        expanded.position_BT[0].tolist(),
        expanded.clone_BT[0].tolist(),
    )
    for t, i in enumerate(positions):
        ax.plot([i, t], [3.7, 2.3], color="0.75", lw=1, zorder=0)
    for u, t in enumerate(places):
        ax.plot(
            [t, u],
            [1.7, 0.3],
            color=COLORS[STATE_COLORS[owners[u]]],
            lw=1,
            zorder=0,
        )
    draw_tokens(
        ax, [tokenizer.token(i) for i in masked_ids_N], map_kinds(masked_ids_N), 4
    )
    cells = zip(expanded_ids, positions, clones, strict=True)
    texts = [f"{tokenizer.token(token)}\n({i},{j})" for token, i, j in cells]
    draw_tokens(ax, texts, map_kinds(expanded_ids), 2)
    texts = [f"state\n{u}" for u in range(len(places))]
    draw_tokens(ax, texts, [STATE_COLORS[owner] for owner in owners], 0)
    captions = {
        4.45: f"input, N = {len(masked_ids_N)}",
        2.45: f"expanded, T = {len(expanded_ids)}: token and (i, j)",
        0.45: f"states, L = {len(places)}",
    }
    for y, text in captions.items():
        ax.text(
            -0.5,
            y,
            text,
            fontsize=9,
            color="0.3",
            va="bottom",
            backgroundcolor="white",
        )
    ax.set_ylim(-0.4, 5)


def map_kinds(token_ids):
    return [kind(token_id) for token_id in token_ids]


# %% mystnb={"figure": {"caption": "A sentence before and after states expansion, k = 2.", "name": "fig-expansion"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(9, 3.6))
_ = draw_expansion(ax, masked_ids_BN[0].tolist(), expanded, graph)

# %% [markdown]
# **Takeaway.** Expansion repeats the [MASK] tokens in place and writes down, for
# each token, where it came from and which copy it is.
#
# ## The same in a few lines
#
# **Question.** Is there more to it than repeating tokens? For a single row, no:


# %%
def expand_row(ids_N, is_expanded_N, k):
    """(token, i, j) of each copy: k clones of a flagged token, others once."""
    return [
        (token, i, j)
        for i, (token, is_expanded) in enumerate(
            zip(ids_N, is_expanded_N, strict=True)
        )
        for j in (range(1, k + 1) if is_expanded else [0])
    ]


expand_row(["so", "[MASK]", "it", "is"], [False, True, False, False], 3)

# %% [markdown]
# The package does the same to a whole padded batch without a loop. It adds up the
# number of copies from left to right, which says where the copies of each token
# *end*. The token that stands at a place of the expanded row is then the first
# whose copies end beyond it, and `searchsorted` finds that.

# %%
copies_N = torch.tensor([1, 3, 1, 1])
end_N = copies_N.cumsum(0)
place_T = torch.arange(int(end_N[-1]))
print("ends at", end_N.tolist())
print("token i", torch.searchsorted(end_N, place_T, right=True).tolist())

# %% [markdown]
# **Check.** Over random batches with rows of different lengths, the package's
# `expand` agrees with the loop in every token and every pair of positions, and
# what is left of a short row is padding. From here on we use the package's.


# %%
def random_batch(num_rows, max_length, ratio):
    """Padded rows [BOS] ... [EOS] of random lengths, some tokens masked."""
    ids_BN = torch.randint(6, 90, (num_rows, max_length), generator=rng)
    last_B = torch.randint(3, max_length, (num_rows,), generator=rng)
    index_BN = torch.arange(max_length).expand(num_rows, -1)
    ids_BN[:, 0] = special.bos
    ids_BN[index_BN == last_B[:, None]] = special.eos
    ids_BN[index_BN > last_B[:, None]] = special.pad
    is_inner_BN = (index_BN > 0) & (index_BN < last_B[:, None])
    noise_BN = torch.rand(ids_BN.shape, generator=rng)
    is_masked_BN = is_inner_BN & (noise_BN < ratio)
    return ids_BN.masked_fill(is_masked_BN, special.mask), is_masked_BN, ids_BN


for k in (1, 2, 3, 4, 8):
    masked, is_masked, _ = random_batch(16, 20, 0.3)
    copies = torch.where(is_masked, k, 1)
    ours = expand(masked, copies, is_masked, special.pad)
    for b in range(len(masked)):
        is_token = masked[b] != special.pad
        row_N, flags_N = masked[b][is_token].tolist(), is_masked[b].tolist()
        want = expand_row(row_N, flags_N[: len(row_N)], k)
        columns = [t[b][ours.is_real_BT[b]].tolist() for t in ours[:3]]
        assert list(zip(*columns, strict=True)) == want
        assert (ours.token_ids_BT[b, len(want) :] == special.pad).all()

# %% [markdown]
# **Takeaway.** Expansion is an index computation: a cumulative sum and a search,
# with no parameters and nothing to learn.
#
# ## What the clones have in common
#
# **Question.** What does the encoder get to read at the clones of one [MASK]?
#
# §4.2 writes the expanded input as
#
# $$
# \mathbf{X}' = [e_{x_1}, \dots, e^{(1)}_{[\mathrm{MASK}]}, \dots,
# e^{(k)}_{[\mathrm{MASK}]}, \dots, e_{x_n}],
# $$ (eq-expanded-input)
#
# and the $k$ vectors in the middle are copies of one embedding. **Check.** In an
# untrained ExLM, all [MASK] rows of the encoder's input are the same vector. Its
# outputs are not.

# %%
config = ModelConfig(states_per_mask=2, max_positions=1024)
torch.manual_seed(0)
model = ExLM(config, vocab_size=90, special_ids=special).eval().to(scale.device)
row = [t.to(scale.device) for t in (masked_ids_BN, is_masked_BN, token_ids_BN)]
with torch.no_grad():
    hidden_BTD, graph = model.encode(*row)
    input_BTD = model.encoder.embedding(expanded.token_ids_BT.to(scale.device))
is_mask_T = expanded.token_ids_BT[0] == special.mask
masks_XD = input_BTD[0, is_mask_T.to(scale.device)]
assert (masks_XD == masks_XD[0]).all()
outputs_XD = hidden_BTD[0, is_mask_T.to(scale.device)]
assert not torch.allclose(outputs_XD[0], outputs_XD[1], atol=1e-3)

# %% [markdown]
# **Takeaway.** At the input nothing tells two clones apart but $j$. How the
# encoder reads $j$ is the subject of the next chapter, {ref}`chap-rope`.
#
# ## Only the states go on
#
# **Question.** What happens to the outputs at ordinary tokens?
#
# They have done their work inside the encoder, where every clone could attend to
# them. The transition matrix, the vocabulary head and the sum over paths (the
# chapters on the dynamic programme) see the *compacted* states: the bottom row of
# {numref}`fig-expansion`. The graph says for each of the $L$ states where it
# stands in the expanded sequence and which target it is a clone of.

# %%
print("place  ", graph.place_BL[0].tolist())
print("owner  ", graph.owner_BL[0].tolist())
print("clone  ", graph.clone_BL[0].tolist())
print("targets", [tokenizer.token(i) for i in graph.target_ids_BM[0].tolist()])

# %% [markdown]
# **Check.** Gathering the states takes exactly the rows at those places. The
# matrix over states has $L^2$ entries; one over the expanded sequence, as in the
# released code, would have $T^2$, most of them forbidden.

# %%
state_BLD = gather_states(hidden_BTD, graph)
assert torch.equal(state_BLD[0], hidden_BTD[0, graph.place_BL[0]])
with torch.no_grad():
    scores = model(*row)
L, T = state_BLD.shape[1], hidden_BTD.shape[1]
assert scores.log_transition_BLL.shape == (1, L, L)
assert scores.log_emission_BML.shape == (1, int(graph.num_targets_B[0]), L)
L, T

# %% [markdown]
# **Takeaway.** The encoder works on $T$ tokens. Everything after it works on $L$
# states.
#
# ## Two ways to treat [BOS] and [EOS]
#
# **Question.** A path through the graph needs a start and an end. Which states
# are those?
#
# The paper and its released code answer differently, and both answers are in the
# package:
#
# | `model.boundary` | [BOS] and [EOS] | scored targets | source |
# |---|---|---|---|
# | `official` (default) | $k$ clones each, as a [MASK] | $m + 2$ | released code |
# | `paper` | one state each, never cloned | $m$ | Appendix P |
#
# Here $m$ is the number of masked tokens. With `official` the model must also
# emit [BOS] and [EOS], and a path runs from the first clone of [BOS] to the last
# clone of [EOS]. The default follows the released code because the published
# numbers come from it.
#
# **Figure.** The same sentence with `paper`: the ends are single states, and
# everything is shorter by $2(k - 1) = 2$.

# %% mystnb={"figure": {"caption": "The sentence of the first figure with boundary = paper.", "name": "fig-expansion-paper"}} tags=["hide-input"]
paper_row = expand_masks(
    masked_ids_BN, is_masked_BN, token_ids_BN, 2, "paper", special
)
fig, ax = plt.subplots(figsize=(9, 3.6))
_ = draw_expansion(ax, masked_ids_BN[0].tolist(), *paper_row)

# %% [markdown]
# **Check.** Which targets count is in `is_scored_BM`. With `paper` the ends are
# targets of the path but their emissions are left out of the score.

# %%
paper_model = (
    ExLM(ModelConfig(boundary="paper"), 90, special).eval().to(scale.device)
)
with torch.no_grad():
    by_boundary = {"official": model(*row), "paper": paper_model(*row)}
for name, its_scores in by_boundary.items():
    print(f"{name:8}", its_scores.is_scored_BM[0].tolist())
assert by_boundary["official"].is_scored_BM.sum() == 4
assert by_boundary["paper"].is_scored_BM.sum() == 2

# %% [markdown]
# ### The lengths
#
# Counting boxes in the two figures gives, for a row of $N$ tokens of which $m$
# are masked, with one [BOS] and one [EOS]:
#
# $$
# \begin{aligned}
# \text{official:}\quad & T = N + (k-1)(m+2), & L &= k\,(m+2), \\
# \text{paper:}\quad & T = N + (k-1)\,m, & L &= k\,m + 2.
# \end{aligned}
# $$ (eq-lengths)
#
# **Check.** {eq}`eq-lengths` holds for every row of random batches, for several
# $k$ and both boundaries.


# %%
def lengths(N, m, k, boundary):
    """T and L of a row with N tokens and m masks."""
    if boundary == "official":
        return N + (k - 1) * (m + 2), k * (m + 2)
    return N + (k - 1) * m, k * m + 2


num_checked = 0
for k in (1, 2, 4, 7):
    for boundary in ("official", "paper"):
        batch = random_batch(32, 40, 0.25)
        its_expanded, its_graph = expand_masks(*batch, k, boundary, special)
        N_B, m_B = (batch[2] != special.pad).sum(1), batch[1].sum(1)
        T_B, L_B = lengths(N_B, m_B, k, boundary)
        assert torch.equal(its_expanded.is_real_BT.sum(1), T_B)
        assert torch.equal(its_graph.num_states_B, L_B)
        num_checked += len(N_B)
num_checked

# %% [markdown]
# **Takeaway.** Expansion adds $k - 1$ tokens per mask and not $k$ times the
# sentence. With few masks the sequence grows little.
#
# ### Two defects that are not copied
#
# The released code has two defects in just this place ({ref}`reproduction` lists
# them with their tests).
#
# 1. In a batch, rows with fewer masks come out shorter. The released code fills
#    their tail with copies of their *last token*, which are attended to like real
#    ones. So the loss of a sentence depends on its batch mates.
# 2. Its graph ends in the last *position*. Where a block does not end in [EOS]
#    this is an ordinary token, and the last target has to be emitted there.
#
# Here the tail is padding, which no token attends to, and the graph ends in the
# last state. **Check.** A row scores the same alone and beside a longer one.
# Filled with copies of its last token it would not. And in a row without [EOS]
# the last state is the last clone of the last mask, though ordinary tokens
# follow.

# %%
rows = random_batch(64, 40, 0.25)
its_expanded, _ = expand_masks(*rows, 2, "official", special)
order_B = its_expanded.is_real_BT.sum(1).argsort()
# The shortest row and the longest.
pair = [t[order_B[[0, -1]]].to(scale.device) for t in rows]
short_N = int((pair[2][0] != special.pad).sum())
alone = [t[:1, :short_N] for t in pair]
with torch.no_grad():
    beside = log_likelihood(model(*pair))[0]
    by_itself = log_likelihood(model(*alone))[0]
    its_expanded, its_graph = expand_masks(*pair, 2, "official", special)
    real_BTD = model.encoder(*its_expanded)
    tail = its_expanded.token_ids_BT.masked_fill(
        ~its_expanded.is_real_BT, special.eos
    )
    is_all_BT = torch.ones_like(its_expanded.is_real_BT)
    filled_BTD = model.encoder(tail, *its_expanded[1:3], is_all_BT)
# float32: both are sums of a few hundred rounded terms.
assert torch.isclose(beside, by_itself, rtol=1e-4)
assert not torch.allclose(filled_BTD[0, 0], real_BTD[0, 0], atol=1e-3)

# %%
no_end = [t[:, :-1] for t in (masked_ids_BN, is_masked_BN, token_ids_BN)]
its_expanded, its_graph = expand_masks(*no_end, 2, "official", special)
last_state = int(its_graph.place_BL[0, -1])
assert its_expanded.token_ids_BT[0, last_state] == special.mask
assert last_state < its_expanded.token_ids_BT.shape[1] - 1

# %% [markdown]
# **Takeaway.** With padding as padding and an end in a state, a row's score
# depends on the row alone.
#
# ## What it costs
#
# **Question.** If $k = 4$ states replace each [MASK], is ExLM four times as
# expensive?
#
# The encoder grows with the number of *tokens*. With a share $p$ of masked tokens
# (`mask_ratio`) and boundaries aside, {eq}`eq-lengths` divided by $N$ gives
#
# $$
# \frac{T}{N} \approx 1 + p\,(k - 1),
# $$ (eq-token-ratio)
#
# which is 1.45 for $p = 0.15$ and $k = 4$. To go beyond tokens we count
# multiplications followed by an addition, one for each term of each matrix
# product. For one row, in a Transformer with width $D$ and feed-forward width
# $F$:
#
# | part | operations |
# |---|---|
# | projections of attention, per layer | $4 T D^2$ |
# | scores and weighted sum of attention, per layer | $2 T^2 D$ |
# | feed-forward, per layer | $2 T D F$ |
# | vocabulary head, for $S$ hidden states | $S (D^2 + D V)$ |
# | transition matrix (`gated`, $H$ heads) | $L (2 D^2 + D H) + L^2 D$ |
# | products of states and targets | $M L D$ |
#
# For an MLM $T = N$ and $S = m$. For ExLM $S = L$. The transition matrix reads the
# places of its states as well. A place has the same embedding in every row, so its
# $2 D^2 + D H$ operations are done once for a whole batch, $T$ times in all: next
# to nothing per row. The dynamic programme itself does sums and exponentials, about
# $M L^2 / 2$ of them, and no matrix products.


# %%
def encoder_operations(T, shape):
    num_layers, D, F, _ = shape
    return num_layers * (4 * T * D * D + 2 * T * T * D + 2 * T * D * F)


def head_operations(S, shape, V):
    return S * (shape.width * shape.width + shape.width * V)


def link_operations(L, M, shape):
    D, H = shape.width, shape.num_heads
    return L * (2 * D * D + D * H) + L * L * D + M * L * D


def place_operations(num_places, shape):
    """Once per batch."""
    return num_places * (2 * shape.width + shape.num_heads) * shape.width


def mlm_operations(N, m, shape, V):
    return encoder_operations(N, shape) + head_operations(m, shape, V)


def exlm_operations(N, m, k, shape, V, boundary="official"):
    T, L = lengths(N, m, k, boundary)
    head = head_operations(L, shape, V)
    links = link_operations(L, m + 2, shape)
    return encoder_operations(T, shape) + head + links


# %% [markdown]
# **Check.** A formula about a program can be wrong about the program. PyTorch can
# count the products that really run: `FlopCounterMode` counts two operations (one
# multiplication, one addition) per term. We run both models of the package and
# ask for equality to the last digit. (Attention is switched to its plain version
# for the count; the fused CPU kernel is invisible to the counter.)


# %%
def counted(model, batch, is_training=False):
    """Multiply-adds of one pass, counted by PyTorch while it runs."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        if is_training:
            log_likelihood(model(*batch)).sum().backward()
        else:
            with torch.no_grad():
                model(*batch)
    return counter.get_total_flops() // 2


def fixed_batch(num_rows, N, m):
    """Rows of one length with m masks each."""
    ids_BN = torch.randint(6, 90, (num_rows, N), generator=rng)
    ids_BN[:, 0], ids_BN[:, -1] = special.bos, special.eos
    is_masked_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
    is_masked_BN[:, 1 : 2 * m : 2] = True
    batch = ids_BN.masked_fill(is_masked_BN, special.mask), is_masked_BN, ids_BN
    return [t.to(scale.device) for t in batch]


V = 500
shape = ENCODER_PRESETS["tiny"]
batch = fixed_batch(3, 66, 9)
mlm = MaskedLM(ModelConfig(), V, special).eval().to(scale.device)
assert counted(mlm, batch[:2]) == 3 * mlm_operations(66, 9, shape, V)
for k in (1, 2, 4):
    for boundary in ("official", "paper"):
        settings = ModelConfig(states_per_mask=k, boundary=boundary)
        exlm = ExLM(settings, V, special).eval().to(scale.device)
        want = 3 * exlm_operations(66, 9, k, shape, V, boundary)
        num_places, _ = lengths(66, 9, k, boundary)
        if scale.device.type == "cuda":  # the package takes all it might need
            num_places = settings.max_positions
        assert counted(exlm, batch) == want + place_operations(num_places, shape)

# %% [markdown]
# A training step adds the backward pass, which does two products for each of the
# forward pass. So the step costs three times the forward pass, for MLM and ExLM
# alike, and the ratio of the two stays as it is.

# %%
steps_cost = counted(exlm, batch, is_training=True) / counted(exlm, batch)
# The backward pass of the head has one more product, with a vector: 1%.
assert abs(steps_cost - 3) < 0.03
round(steps_cost, 2)

# %% [markdown]
# Now to the size the paper trains, with the formula alone: BERT-base
# {cite}`devlin2019bert`, rows of $N = 512$, 15% masks, $k = 4$. The vocabulary
# is 50,265, the one for which the paper's parameter counts come out
# ({ref}`reproduction`). The first two lines leave something out; the last is for a
# head and a transition matrix over *all* expanded positions, as in the released
# code.

# %%
base, N, p, V = ENCODER_PRESETS["base"], 512, 0.15, 50_265
m = round(p * N)
T, L = lengths(N, m, 4, "official")


def linear_operations(T, S):
    """Without the attention scores and without the graph."""
    scores = base.num_layers * 2 * T * T * base.width
    return encoder_operations(T, base) - scores + head_operations(S, base, V)


all_T = encoder_operations(T, base) + head_operations(T, base, V)
# Places are not shared there.
all_T += link_operations(T, m + 2, base) + place_operations(T, base)
mlm_cost = mlm_operations(N, m, base, V)
linear = linear_operations(N + 3 * m, 4 * m)
by_paper = exlm_operations(N, m, 4, base, V, "paper")
ratios = {
    "tokens, 1 + p (k - 1)": 1 + p * 3,
    "linear layers, boundary = paper": linear / linear_operations(N, m),
    "all, boundary = paper": by_paper / mlm_cost,
    "all, boundary = official": exlm_operations(N, m, 4, base, V) / mlm_cost,
    "head and graph over all T": all_T / mlm_cost,
}
for name, ratio in ratios.items():
    print(f"{name:32} {ratio:.2f}")

# %% [markdown]
# The paper measured time: 104.2 GPU hours against 54.7, a ratio of 1.9 (Table
# 12). The count lies around it: 1.7 when only states are scored and 2.1 when
# every position is. By count, the difference between the two is avoidable, and
# nearly all of it is the vocabulary head: 50,265 products of width 768 per
# position, spent on positions that predict nothing.

# %%
ours, released = ratios["all, boundary = official"], all_T / mlm_cost
paper_time = 104.2 / 54.7
assert ours < paper_time < released
saved_by_head = head_operations(T - L, base, V) / mlm_cost / (released - ours)
assert saved_by_head > 0.9
f"paper {paper_time:.2f}, head's share of the difference {saved_by_head:.2f}"

# %% [markdown]
# **Figure.** Cost relative to an MLM of the same size, against $k$, at the two
# mask ratios of the paper's Table 4. Solid lines count everything, dashed lines
# tokens only. The cost is nearly linear in $k$ and $p$ sets its slope. The dotted
# line is $p = 0.15$ with head and graph over all $T$ positions; the paper's
# measured time lies between the two.

# %% mystnb={"figure": {"caption": "Operations of ExLM relative to an MLM, BERT-base, N = 512.", "name": "fig-cost"}} tags=["hide-input"]
ks = np.arange(1, 9)
fig, ax = plt.subplots(figsize=(6, 3.6))
for color, ratio in ((COLORS["exlm"], 0.15), (COLORS["mlm"], 0.387)):
    m = round(ratio * N)
    cost = mlm_operations(N, m, base, V)
    cost_k = [exlm_operations(N, m, k, base, V) / cost for k in ks.tolist()]
    ax.plot(ks, cost_k, color=color, marker="o", ms=3, label=f"p = {ratio:g}")
    ax.plot(
        ks, 1 + ratio * (ks - 1), color=color, ls="--", lw=1, label="tokens only"
    )
m = round(p * N)
T_k, _ = lengths(N, m, ks, "official")
over_all = encoder_operations(T_k, base) + head_operations(T_k, base, V)
over_all += link_operations(T_k, m + 2, base) + place_operations(T_k, base)
over_all = over_all / mlm_cost
ax.plot(ks, over_all, color=COLORS["exlm"], ls=":", label="p = 0.15, all positions")
ax.plot(4, paper_time, "o", color="black", ms=6, zorder=5, label="paper, time")
ax.set(xlabel="states per mask, k", ylabel="cost relative to MLM", ylim=(0.8, 6))
_ = ax.legend(loc="upper left", fontsize=9)

# %% [markdown]
# Memory has one new term: the transition matrix with its $L^2$ entries per row,
# times the number of heads while it is computed. For the base model this is what
# compacting buys:

# %%
print(" k    T    L   L*L   (L/T)^2")
for k in (1, 2, 4, 8):
    T, L = lengths(N, m, k, "official")
    print(f"{k:2} {T:4} {L:4} {L * L / 1e3:4.0f}k     {(L / T) ** 2:.2f}")
T, L = lengths(N, m, 4, "official")
assert (T / L) ** 2 > 5

# %% [markdown]
# **Takeaway.** $k = 4$ at $p = 0.15$ costs 1.7 times an MLM. The states are less
# than half of the expanded sequence, so a matrix over states alone is over five
# times smaller.
#
# ### Expanding later
#
# **Question.** The clones of a mask enter as identical vectors. Do they have to
# go through every layer?
#
# In the paper they do. The package can also expand inside the encoder, which the
# paper does not: with `model.expand_at` $= e$ the $e$ lowest layers read the row
# as it is, one token for each [MASK]. What they make of a mask is copied to its
# $k$ clones, and the layers above tell these apart by $j$, and by the clone
# embedding where there is one ({ref}`chap-training`). Of the cost only the share
# of the lower layers changes. **Check.** The model with one layer on each side of
# the expansion does as many operations as we count.


# %%
def saved_operations(N, m, k, shape, expand_at):
    """Of the lower layers, by reading N tokens instead of T."""
    below = shape._replace(num_layers=expand_at)
    T, _ = lengths(N, m, k, "official")
    return encoder_operations(T, below) - encoder_operations(N, below)


counts = []
for expand_at in (0, 1):
    settings = ModelConfig(expand_at=expand_at)
    model_at = ExLM(settings, 500, special).eval().to(scale.device)
    counts.append(counted(model_at, batch))
assert counts[0] - counts[1] == 3 * saved_operations(66, 9, 4, shape, 1)
m = round(p * N)
for expand_at in (0, 6, 9):
    saved = saved_operations(N, m, 4, base, expand_at)
    cost = exlm_operations(N, m, 4, base, V) - saved
    print(f"expand_at {expand_at}: {cost / mlm_cost:.2f}")
assert 1.25 < cost / mlm_cost < 1.35
assert head_operations(L - m, base, V) > 0.5 * (cost - mlm_cost)

# %% [markdown]
# **Takeaway.** Expanded after 9 of its 12 layers, the base model with $k = 4$ costs
# 1.3 times an MLM by operation count. More than half of what is left over is the
# vocabulary head, which scores four states for each mask wherever they come from.
#
# ## A fixed number of masks, one shape
#
# **Question.** Masks are usually drawn independently: each token is hidden with
# probability $p$. What does that do to the lengths?
#
# Let $n = N - 2$ be the number of tokens that may be hidden. The number of masks
# is then binomial, and by {eq}`eq-lengths` the expanded length inherits its
# spread, $k-1$ times as wide:
#
# $$
# \operatorname{E}[T] = N + (k-1)(np + 2), \qquad
# \operatorname{sd}[T] = (k-1)\sqrt{n p (1-p)}.
# $$ (eq-spread)
#
# We draw masks for many blocks of 128 tokens both ways: `bernoulli` as described,
# and `fixed_count`, the default, which hides the same number in every row.

# %%
N, k, p = 128, 4, 0.15
num_blocks = scale.pick(4096, 65536)
block_ids_BN = torch.randint(6, 90, (num_blocks, N), generator=rng)
block_ids_BN[:, 0], block_ids_BN[:, -1] = special.bos, special.eos
length_of = {}
for strategy in ("bernoulli", "fixed_count"):
    masker = Masker(MaskingConfig(p, strategy), special, seed=1)
    zeros = np.zeros(num_blocks, dtype=int)
    drawn = masker(block_ids_BN, zeros, np.arange(num_blocks), step=0)
    length_of[strategy] = lengths(
        N, drawn.is_masked_BN.sum(1).numpy(), k, "official"
    )[0]
    first = [t[:32] for t in drawn]
    its_expanded, _ = expand_masks(*first, k, "official", special)
    T_B = its_expanded.is_real_BT.sum(1).numpy()
    assert (length_of[strategy][:32] == T_B).all()

# %% [markdown]
# **Check.** Mean and spread are those of {eq}`eq-spread`, within four standard
# errors. With a fixed count there is a single length.

# %%
n = N - 2
mean, spread = N + (k - 1) * (n * p + 2), (k - 1) * math.sqrt(n * p * (1 - p))
lengths_B = length_of["bernoulli"]
assert abs(lengths_B.mean() - mean) < 4 * spread / math.sqrt(num_blocks)
# The standard error of a standard deviation, for a nearly normal distribution.
assert abs(lengths_B.std() - spread) < 4 * spread / math.sqrt(2 * num_blocks)
assert len(set(length_of["fixed_count"])) == 1
f"mean {mean:.1f}, spread {spread:.1f} tokens"

# %% [markdown]
# **Figure.** The histogram of lengths with independent masks against the single
# length with a fixed count; the curve is the binomial distribution.

# %% mystnb={"figure": {"caption": "Expanded lengths of blocks of 128 tokens, p = 0.15, k = 4.", "name": "fig-lengths"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3))
values, counts = np.unique(lengths_B, return_counts=True)
ax.bar(
    values, counts / num_blocks, width=2.4, color=COLORS["token"], label="bernoulli"
)
masks = np.arange(2, 40)
pmf = [math.comb(n, m) * p**m * (1 - p) ** (n - m) for m in masks.tolist()]
ax.plot(
    lengths(N, masks, k, "official")[0], pmf, color="0.3", lw=1, label="binomial"
)
fixed = length_of["fixed_count"][0]
ax.axvline(fixed, color=COLORS["exlm"], lw=2, label=f"fixed_count: {fixed}")
ax.set(
    xlabel="expanded length T, tokens", ylabel="share of blocks", xlim=(138, 240)
)
_ = ax.legend(loc="upper right")

# %% [markdown]
# A batch is as long as its longest row; the rest is padding, computed and thrown
# away. Here is the share that is thrown away, for batches of different sizes:


# %%
def padding_share(lengths_B, batch_size):
    """Padding over all places, in batches padded to their longest row."""
    rows = lengths_B[: len(lengths_B) // batch_size * batch_size].reshape(
        -1, batch_size
    )
    return 1 - rows.mean() / rows.max(axis=1).mean()


for batch_size in (8, 32, 128):
    shares = {
        name: padding_share(T_B, batch_size) for name, T_B in length_of.items()
    }
    assert shares["fixed_count"] == 0
    text = {name: f"{share:.1%}" for name, share in shares.items()}
    print(f"{batch_size:3} rows", text)
assert padding_share(lengths_B, 32) > 0.1

# %% [markdown]
# A fixed count must be a whole number, and $np = 18.9$ is not. It is rounded up
# or down at random, with one draw per training step that all rows share. So a run
# meets two lengths and not dozens, and on average $p$ is kept. **Check.**

# %%
num_maskable_B = torch.tensor([n])
steps = range(4000)
masks_of_step = [int(num_masks(p, num_maskable_B, 1, step)) for step in steps]
assert set(masks_of_step) == {18, 19}
standard_error = math.sqrt(0.9 * 0.1 / 4000)
assert abs(np.mean(masks_of_step) - n * p) < 4 * standard_error
len(np.unique(lengths_B)), len(set(masks_of_step))

# %% [markdown]
# Static shapes matter once more to a compiler. `torch.compile` specialises a
# model to the shapes it meets and starts again at a new one (it can also be asked
# for one program for all lengths, at the price of less specialised code). We let
# it count: a *backend* that is called once per compilation, and one encoder layer
# run on six batches, one per training step.


# %%
def num_compilations(lengths_of_steps):
    """How often torch.compile starts anew for these lengths."""
    calls = []

    def backend(graph_module, example_inputs):
        calls.append(graph_module)
        return graph_module.forward

    torch.compiler.reset()
    layer = model.encoder.layers[0]
    layer = torch.compile(layer, backend=backend, dynamic=False)
    for T in lengths_of_steps:
        place_BT = torch.arange(T, device=scale.device).expand(2, T)
        x_BTD = torch.zeros(2, T, 64, device=scale.device)
        with torch.no_grad():
            layer(x_BTD, rotation_2d(place_BT, place_BT, 16), None)
    return len(calls)


padded_to = lengths_B.reshape(-1, 32).max(axis=1)[:6].tolist()
fixed_to = [lengths(N, m, k, "official")[0] for m in masks_of_step[:6]]
compilations = num_compilations(padded_to), num_compilations(fixed_to)
assert compilations == (len(set(padded_to)), len(set(fixed_to)))
assert compilations[0] > compilations[1]
compilations

# %% [markdown]
# **Takeaway.** A fixed number of masks removes all padding from fixed-length
# blocks and leaves at most two shapes per run. Molecules differ in length anyway,
# so there rows of similar length are put together and padded.
#
# ## Summary
#
# - Each [MASK] becomes $k$ clones at $(i, 1), \dots, (i, k)$; an ordinary token
#   is at $(i, 0)$. The clones enter the encoder as identical vectors.
# - After the encoder only the $L$ states matter. [BOS] and [EOS] are states too,
#   cloned and scored (`official`) or single and unscored (`paper`).
# - $T = N + (k-1)(m+2)$ and $L = k(m+2)$ with `official`.
# - At BERT-base size, $k = 4$ costs 1.7 MLM steps by operation count.
# - A fixed number of masks per block makes all rows equally long.
#
# Next: {ref}`chap-rope`, on how an encoder can see $j$.
#
# ## Exercises
#
# **1. Predict the lengths.** A block of $N = 64$ tokens has 9 masks and $k = 8$
# states each. Predict $T$ and $L$ for both boundaries, then expand such a block.
# How many of the states are clones of a mask?

# %% tags=["hide-cell"]
N, m, k = 64, 9, 8
found = {}
for boundary in ("official", "paper"):
    batch = [t.cpu() for t in fixed_batch(1, N, m)]
    its_expanded, its_graph = expand_masks(*batch, k, boundary, special)
    found[boundary] = (
        its_expanded.token_ids_BT.shape[1],
        int(its_graph.num_states_B[0]),
    )
    state_ids_L = its_expanded.token_ids_BT[0, its_graph.place_BL[0]]
    assert int((state_ids_L == special.mask).sum()) == m * k == 72
assert found == {
    "official": (64 + 7 * 11, 8 * 11),
    "paper": (64 + 7 * 9, 8 * 9 + 2),
}
found

# %% [markdown]
# **2. Undo it.** Expansion loses nothing. Write one line that recovers the input
# row from the expanded row and its clone indices, and check it on random batches.

# %% tags=["hide-cell"]
masked_batch = random_batch(32, 30, 0.4)
masked = masked_batch[0]
its_expanded, _ = expand_masks(*masked_batch, 5, "official", special)
for b in range(len(masked)):
    # One token per position: the ordinary one (j = 0) or the first clone.
    is_kept_T = its_expanded.is_real_BT[b] & (its_expanded.clone_BT[b] <= 1)
    row_N = its_expanded.token_ids_BT[b][is_kept_T]
    assert torch.equal(row_N, masked[b][masked[b] != special.pad])

# %% [markdown]
# **3. High mask ratio.** The paper also trains with $p = 0.387$ (Table 4). Which
# $k$ is then the largest that costs no more than $k = 4$ at $p = 0.15$, each
# relative to the MLM with the same $p$? Predict with {eq}`eq-token-ratio`, then
# with the full count.


# %% tags=["hide-cell"]
def cost(k, p, N=512):
    m = round(p * N)
    return exlm_operations(N, m, k, base, V) / mlm_operations(N, m, base, V)


by_tokens = max(k for k in range(1, 9) if 0.387 * (k - 1) <= 0.15 * 3)
by_count = max(k for k in range(1, 9) if cost(k, 0.387) <= cost(4, 0.15))
# 0.45 / 0.387 = 1.16 more states: k = 2. The full count agrees.
assert by_tokens == by_count == 2
by_count, round(cost(2, 0.387), 2), round(cost(4, 0.15), 2)

# %% [markdown]
# **4. Molecules.** The molecular model has 9 layers of width 768 and feed-forward
# width 2,048, a vocabulary of 369 and $k = 2$ (Table 7). Predict whether it
# matters there that the head reads states only. Rows of 64 tokens and $p = 0.15$
# will do.

# %% tags=["hide-cell"]
molecular = EncoderShape(9, 768, 2048, 12)
assert molecular == ENCODER_PRESETS["molecular"]
N, m, V = 64, round(0.15 * 64), 369
T, L = lengths(N, m, 2, "official")
ours = exlm_operations(N, m, 2, molecular, V)
wasted = head_operations(T - L, molecular, V) / ours
# A small vocabulary makes a cheap head: a few percent, against a fifth for text.
assert 0 < wasted < 0.03
text_T, text_L = lengths(512, 77, 4, "official")
text_wasted = head_operations(text_T - text_L, base, 50_265)
text_wasted /= exlm_operations(512, 77, 4, base, 50_265)
assert text_wasted > 0.15
f"molecules {wasted:.1%}, text {text_wasted:.1%}"
