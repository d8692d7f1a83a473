# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-one-notebook)=
# # ExLM in one notebook
#
# A masked language model hides some words of a sentence and guesses them. It
# guesses each one *by itself*: two hidden words that belong together are
# predicted as if they were unrelated. ExLM {cite}`zheng2025exlm` changes that. It
# replaces every [MASK] by several states, links the states into a graph, and lets
# a path through the graph decide which state speaks for which word.
#
# In this notebook you write all of it, about 200 lines of PyTorch: a masked
# language model first, then the five pieces that make it an ExLM. You train both on
# a language so small that the best possible score of either is known exactly. The
# masked language model stops at its limit, and ExLM gets below it.
#
# **You will know afterwards** what the five pieces are, how few lines each takes,
# and why they only work together. The other chapters take the pieces one by one.
#
# **What it needs.** Under two minutes on one CPU core. No GPU, no download.
# Only the toy language comes from the package; everything else is on this page.

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

# %%
import itertools
import math

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from exlm_mini.data.toy_grammars import grammar

torch.set_num_threads(1)
# %config InlineBackend.figure_format = "retina"

# %% [markdown]
# ## Two words that belong together
#
# Here are a few sentences of the language:

# %%
language = grammar("pairs")
for word_ids_N in language.sample(4, seed=1):
    print(language.sentence(word_ids_N))

# %% [markdown]
# If he felt *happy*, his sister *smiled*; if he felt *sad*, she *wept*. The two
# moods are equally likely, and no other word tells which it is. Now hide
# both words. Each of them alone is a fair coin: 1 bit. A model that guesses
# each by itself needs 2 bits for the two, and no training can lower that. But the
# second word follows from the first: together they hold 1 bit. Both numbers can
# be computed from the language itself.

# %%
floor_bits = language.marginal_entropy_bits(language.mask())
joint_bits = language.joint_entropy_bits(language.mask())
print(f"word by word {floor_bits:.2f} bits, together {joint_bits:.2f} bits")

# %% [markdown]
# The language has 162 sentences, all equally likely. We train on all of them at
# every step, so that every loss below is an exact expectation. A sentence becomes a
# row of numbers: [BOS], eleven words, [EOS].

# %%
WORDS = ["[BOS]", "[EOS]", "[MASK]", *language.words]
BOS, EOS, MASK = 0, 1, 2

drawn_SN = torch.from_numpy(language.sample(10_000, seed=1))
sentence_BN = F.pad(drawn_SN.unique(dim=0) + 3, (1, 1))  # pads with 0, [BOS]
sentence_BN[:, -1] = EOS
slots = [1 + n for n in language.slots]  # counted after [BOS]
masked_BN = sentence_BN.clone()
masked_BN[:, slots] = MASK
target_BM = sentence_BN[:, slots]

B, N = sentence_BN.shape
M = len(slots)
print(f"{B} rows of {N} tokens, {M} of them hidden")
print(*(WORDS[i] for i in masked_BN[0]))

# %% [markdown]
# The letters at the end of a name are its axes, here and throughout the book: `B`
# rows, `N` tokens, `M` hidden words, `T` tokens after expansion, `L` states, `D`
# features, `V` words of the vocabulary.
#
# ## The encoder, with two coordinates
#
# Both models share a Transformer encoder. It differs from the usual one in how it
# encodes positions. Every token has *two* coordinates: $i$, its place in the
# sentence, and $j$, which is 0 for an ordinary token and will number the states
# of a [MASK]. A rotary embedding turns pairs of features by an angle proportional
# to a position, so that attention sees the difference between two positions. With
# two coordinates, one half of the features turns with $i$ and the other half with
# $j$: **2D RoPE**, the first of ExLM's five pieces.


# %%
def rotate(x_BHTd, position_T):
    """Turn pairs of features by an angle proportional to a position."""
    half = x_BHTd.shape[-1] // 2
    speed_d = 10_000 ** (-torch.arange(half) / half)
    angle_Td = position_T[:, None] * speed_d
    x, y = x_BHTd.chunk(2, dim=-1)
    cos, sin = angle_Td.cos(), angle_Td.sin()
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


def rope_2d(x_BHTd, i_T, j_T):
    """One half of the features turned by i, the other by j."""
    by_i, by_j = x_BHTd.chunk(2, dim=-1)
    return torch.cat([rotate(by_i, i_T), rotate(by_j, j_T)], dim=-1)


class Layer(nn.Module):
    """A Transformer layer: attention, then a feed-forward network."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x_BTD, i_T, j_T):
        qkv = self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in qkv
        )
        q, k = rope_2d(q, i_T, j_T), rope_2d(k, i_T, j_T)
        heads_BHTd = F.scaled_dot_product_attention(q, k, v)
        x_BTD = x_BTD + self.out(heads_BHTd.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Encoder(nn.Module):
    """Word vectors, two layers, and the logarithms of word probabilities."""

    def __init__(self, width=32, num_heads=2, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width)
        self.layers = nn.ModuleList(
            Layer(width, num_heads) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BTD, i_T, j_T):
        for layer in self.layers:
            x_BTD = layer(x_BTD, i_T, j_T)
        return self.norm(x_BTD)

    def log_words(self, hidden_BTD):
        """log P(word) at every place, (B, T, V)."""
        return (hidden_BTD @ self.embedding.weight.T).log_softmax(dim=-1)


# %% [markdown]
# ## A masked language model stops at its floor
#
# The masked language model reads the masked row and predicts each hidden word from
# the hidden state at its place. Its score for a row is $-\log_2$ of the
# probability of both hidden words. Because it predicts each by itself, this is a
# sum of two terms.


# %%
class MLM(nn.Module):
    """Predicts each hidden word from its own [MASK]."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def bits(self):
        """-log2 P(hidden words | visible words), for every row."""
        i_N = torch.arange(N)
        x_BND = self.encoder.embedding(masked_BN)
        hidden_BND = self.encoder(x_BND, i_N, torch.zeros_like(i_N))
        log_word_BMV = self.encoder.log_words(hidden_BND[:, slots])
        log_hidden_BM = log_word_BMV.gather(2, target_BM[:, :, None])[:, :, 0]
        return -log_hidden_BM.sum(dim=1) / math.log(2)


# %% [markdown]
# Training is the usual loop. The learning rate rises for 30 steps and falls at
# the end.


# %%
def initialise(model):
    """Weights N(0, 0.3²), biases 0."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.3)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


def train(model, steps=300, peak=3e-3):
    """Minimise the mean bits over all sentences; return every tenth value."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    curve = {}
    for step in range(1, steps + 1):
        rate = peak * min(1, step / 30, (steps - step + 1) / 120)
        optimizer.param_groups[0]["lr"] = rate
        loss = model.bits().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            curve[step] = loss.item()
    return curve


# %%
_ = torch.manual_seed(1)
mlm = MLM()
initialise(mlm)
mlm_curve = train(mlm)
print(f"MLM ends at {mlm.bits().mean():.1f} bits; its floor is {floor_bits:.1f}")

# %% [markdown]
# There it stays, however long we train. Asked for both words, it says *happy* or
# *sad*, *smiled* or *wept*, each with probability ½, so a quarter of its
# probability goes to *happy … wept*, which no one ever says. The paper calls this
# *inter-token multimodality*: hiding the words hides their dependence, too.
#
# ## States expansion
#
# Now the second piece. Every [MASK] becomes $k$ copies, its **states**, which
# stand in the row side by side. All of them keep the place $i$ of the [MASK];
# $j$ counts them from 1 to $k$. The row gets longer, but the other words keep
# their places $i$.

# %%
K = 4  # states per [MASK]


def expand(ids_BN):
    """Write every [MASK] K times; also the coordinates, and which are states."""
    copies_N = torch.ones(N, dtype=torch.long)
    copies_N[slots] = K
    i_T = torch.arange(N).repeat_interleave(copies_N)
    is_state_T = torch.isin(i_T, torch.tensor(slots))
    first_T = (copies_N.cumsum(0) - copies_N)[i_T]
    j_T = torch.where(is_state_T, torch.arange(len(i_T)) - first_T + 1, 0)
    return ids_BN[:, i_T], i_T, j_T, is_state_T


expanded_BT, i_T, j_T, is_state_T = expand(masked_BN)
for name, values in (("i", i_T), ("j", j_T)):
    print(name, *(f"{v:2d}" for v in values.tolist()))

# %% [markdown]
# What is gained? Each state predicts a word by itself, as before. But now there
# is a *choice*: if one state of the first mask says *happy* and another one
# *sad*, and likewise at the second mask, then choosing the states means choosing
# the mood. What remains is to choose them together.
#
# ## The transition matrix
#
# The third piece links the states into a graph. From every state an edge leads to
# every state of a later [MASK], and each edge has a probability: row $v$ of the
# matrix $\mathbf{E}$ says where a path goes from state $v$. $\mathbf{E}$ is
# attention without values,
#
# $$
# \begin{aligned}
# \mathbf{E} = \mathrm{softmax}\Big( & \frac{(\mathbf{H}\mathbf{W}_Q)
# (\mathbf{H}\mathbf{W}_K)^\top}{\sqrt{D}} \\
# & + \text{only forward}\Big),
# \end{aligned}
# $$
#
# where $\mathbf{H}$ are the hidden states of the encoder and *only forward* is
# $-\infty$ where no edge leads. A path starts at [BOS], visits a state for every
# hidden word, and ends at [EOS]. $\mathbf{E}$ decides which states it visits, and
# it is learned. (The paper also allows edges inside a [MASK]; {ref}`chap-training`
# compares the two.)

# %%
NO_EDGE = -1e9  # close enough to log 0, and without nan gradients


class Transition(nn.Module):
    """log E, (B, L, L)."""

    def __init__(self, width=32):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state_BLD, i_L):
        q_BLD, k_BLD = self.query(state_BLD), self.key(state_BLD)
        score_BLL = q_BLD @ k_BLD.transpose(1, 2) / math.sqrt(q_BLD.shape[-1])
        is_forward_LL = i_L[:, None] < i_L
        log_BLL = score_BLL.masked_fill(~is_forward_LL, NO_EDGE).log_softmax(dim=-1)
        return log_BLL.masked_fill(~is_forward_LL, NO_EDGE)


# %% [markdown]
# ## The sum over all paths
#
# A path is one way to produce the hidden words. Its probability is the product
# over its edges and over the words at the states it visits. Nothing says which
# path was meant, so the probability of the words is the sum over all paths. Call
# $f_{i,u}$ the probability of having produced the first $i$ words with a path
# that stands in state $u$. One step adds one word:
#
# $$
# f_{i,u} = P_u(y_i) \sum_{v<u} f_{i-1,v}\, \mathbf{E}_{vu}.
# $$
#
# That is the fourth piece, and in code it is three loops: over words, over the
# state where the path arrives, and over the state it comes from.


# %%
def sum_over_paths(emission_ML, transition_LL):
    """P(words) of one row; states 0 and L - 1 are [BOS] and [EOS]."""
    num_words, num_states = emission_ML.shape
    f = [[0.0] * num_states for _ in range(num_words + 1)]
    f[0][0] = 1.0
    for i in range(1, num_words + 1):
        for u in range(1, num_states - 1):
            for v in range(u):
                f[i][u] += f[i - 1][v] * transition_LL[v][u] * emission_ML[i - 1][u]
    return sum(f[-1][v] * transition_LL[v][-1] for v in range(num_states - 1))


# %% [markdown]
# The two inner loops are a matrix product. With logarithms, so that nothing
# gets too small for a float, the product becomes a `logsumexp`, and the batch
# comes for free.


# %%
def log_sum_over_paths(log_emission_BML, log_transition_BLL):
    """log P(words) of every row."""
    from_start_BL = log_transition_BLL[:, 0]
    f_BL = from_start_BL + log_emission_BML[:, 0]
    for i in range(1, log_emission_BML.shape[1]):
        arriving_BL = (f_BL[:, :, None] + log_transition_BLL).logsumexp(dim=1)
        f_BL = arriving_BL + log_emission_BML[:, i]
    return (f_BL + log_transition_BLL[:, :, -1]).logsumexp(dim=1)


# %% [markdown]
# Do the two agree, and are they the sum over all paths? A small random graph has
# few enough paths to list.


# %%
def one_by_one(emission_ML, transition_LL):
    """The same sum, path by path."""
    num_words, num_states = emission_ML.shape
    total = 0.0
    for path in itertools.combinations(range(1, num_states - 1), num_words):
        stops = (0, *path, num_states - 1)
        edges = math.prod(transition_LL[v][u] for v, u in itertools.pairwise(stops))
        words = math.prod(emission_ML[i][u] for i, u in enumerate(path))
        total += edges * words
    return total


generator = torch.Generator().manual_seed(1)
emission_ML = torch.rand(3, 9, generator=generator, dtype=torch.float64)
transition_LL = torch.rand(9, 9, generator=generator, dtype=torch.float64).triu(1)
fast = log_sum_over_paths(
    emission_ML[None].log(), transition_LL[None].log().clamp(min=NO_EDGE)
).exp()
loops = sum_over_paths(emission_ML, transition_LL)
listed = one_by_one(emission_ML, transition_LL)
print(
    f"{math.comb(7, 3)} paths: {listed:.6f}, loops {loops:.6f}, fast {fast[0]:.6f}"
)

# %% mystnb={"code_prompt_show": "Checked: the loops and the fast sum equal the list of all paths"} tags=["hide-cell", "check"]
assert math.isclose(loops, listed, rel_tol=1e-9)
assert math.isclose(fast[0], listed, rel_tol=1e-9)

# %% [markdown]
# ## ExLM
#
# Now put everything together. The encoder reads the expanded row; the states
# predict words, and transitions link them; the sum over paths gives the
# probability of the hidden words. The last piece, **states alignment**, takes its
# negative logarithm as the loss: no state is told which word it stands for.
#
# Two details help a small model to start. Copies of a [MASK] that are told
# apart by their position alone behave alike at first, so each of the $k$ gets a
# learned vector of its own, and $\mathbf{E}$ starts with equal probabilities.
# Neither is in the paper; {ref}`chap-symmetric-start` is about what happens without
# them.


# %%
class ExLM(nn.Module):
    """K states for every hidden word, and a graph over them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.transition = Encoder(), Transition()
        self.clone = nn.Embedding(K + 1, self.encoder.embedding.embedding_dim)

    def graph(self):
        """log P_u(word) of every state (B, L, V), and log E (B, L, L)."""
        expanded_BT, i_T, j_T, is_state_T = expand(masked_BN)
        clone_TD = self.clone(j_T) * is_state_T[:, None]
        x_BTD = self.encoder.embedding(expanded_BT) + clone_TD
        hidden_BTD = self.encoder(x_BTD, i_T, j_T)
        is_state_T = is_state_T | (i_T == 0) | (i_T == N - 1)  # [BOS], [EOS]
        state_BLD = hidden_BTD[:, is_state_T]
        log_transition_BLL = self.transition(state_BLD, i_T[is_state_T])
        return self.encoder.log_words(state_BLD), log_transition_BLL

    def bits(self):
        """-log2 P(hidden words | visible words), for every row."""
        log_word_BLV, log_transition_BLL = self.graph()
        index_BML = target_BM[:, :, None].expand(-1, -1, log_word_BLV.shape[1])
        log_emission_BML = log_word_BLV.transpose(1, 2).gather(1, index_BML)
        log_p_B = log_sum_over_paths(log_emission_BML, log_transition_BLL)
        return -log_p_B / math.log(2)


# %%
_ = torch.manual_seed(1)
exlm = ExLM()
initialise(exlm)
_ = nn.init.normal_(exlm.clone.weight, std=1.0)
_ = nn.init.zeros_(exlm.transition.query.weight)
exlm_curve = train(exlm)
print(f"ExLM ends at {exlm.bits().mean():.1f} bits; the best is {joint_bits:.1f}")

# %% [markdown]
# One bit. The model has found the mood, which no sentence names: it shows only in
# how the two words go together.

# %% tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3.2))
for curve, name, color in (
    (mlm_curve, "MLM", "#d95f02"),
    (exlm_curve, "ExLM", "#1b6ca8"),
):
    ax.plot(list(curve), list(curve.values()), color=color)
    ax.text(304, curve[300], name, color=color, va="center")
for level, name in ((floor_bits, "word by word"), (joint_bits, "together")):
    ax.plot([0, 300], [level, level], color="0.6", lw=0.8, ls="--", zorder=0)
    ax.text(200, level - 0.02, name, color="0.35", va="top", fontsize=8)
ax.set(xlim=(0, 330), ylim=(0.8, 3.6), xlabel="step", ylabel="bits for both words")
ax.spines[["top", "right"]].set_visible(False)

# %% mystnb={"code_prompt_show": "Checked: MLM ends within 0.05 bits of its floor, ExLM within 0.1 of the joint entropy"} tags=["hide-cell", "check"]
# Robust to the last bits of the sums: both ends keep a margin.
assert floor_bits <= mlm.bits().mean() < floor_bits + 0.05
assert joint_bits <= exlm.bits().mean() < joint_bits + 0.1, (
    f"ExLM ended at {exlm.bits().mean():.2f} bits. With one state it is an MLM; "
    "with two or three, most starts stay with one; try another, or see chapter 8."
)

# %% [markdown]
# ## The graph it has learned
#
# Look inside. For one sentence, here are all states, each with its most likely
# word, and the edges that paths take.

# %% tags=["hide-input"]
with torch.no_grad():
    log_word_BLV, log_transition_BLL = exlm.graph()
word_L = [WORDS[v] for v in log_word_BLV[0].argmax(dim=-1).tolist()]
transition_LL = log_transition_BLL[0].exp()
reached_L = torch.zeros(len(word_L))
reached_L[0] = 1
for u in range(1, len(word_L)):
    reached_L[u] = reached_L[:u] @ transition_LL[:u, u]
states = [(m + 1, (K - 1) / 2 - j) for m in range(M) for j in range(K)]
places = [(0, 0), *states, (M + 1, 0)]
fig, ax = plt.subplots(figsize=(6, 3))
for v, u in itertools.combinations(range(len(word_L)), 2):
    share = float(reached_L[v] * transition_LL[v, u])
    if share > 0.02:
        (x0, y0), (x1, y1) = places[v], places[u]
        ax.plot([x0, x1], [y0, y1], color="#1b6ca8", lw=5 * share, zorder=1)
for (x, y), word, reached in zip(places, word_L, reached_L.tolist(), strict=True):
    name = "[BOS]" if x == 0 else "[EOS]" if x == M + 1 else word
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "#1b6ca8"}
    alpha = 1 if reached > 0.02 else 0.25
    ax.text(x, y, name, ha="center", va="center", bbox=box, alpha=alpha, zorder=2)
ax.set(xlim=(-0.4, M + 1.4), ylim=(-2, 2))
_ = ax.axis("off")

# %% [markdown]
# A wider line is taken more often. Follow the lines from left to right: from a
# state that says *happy* they lead to one that says *smiled*, from *sad* to *wept*.
# States that paths hardly ever visit are pale. A masked language model cannot
# express this: it offers two words at each place, but not two *pairs* of words.
#
# ## What the package makes of it
#
# The package has the same five pieces, with everything that long texts and large
# models need. Give its dynamic programme the graph you have just trained: it
# finds the same number.

# %%
from exlm_mini.alignment import dag_log_likelihood

L = len(word_L)
index_BML = target_BM[:, :, None].expand(-1, -1, L)
log_emission_BXL = torch.full((B, M + 2, L), -torch.inf)  # [BOS] and [EOS], too
log_emission_BXL[:, 0, 0] = log_emission_BXL[:, -1, -1] = 0
log_emission_BXL[:, 1:-1] = log_word_BLV.transpose(1, 2).gather(1, index_BML)
log_edge_BLL = log_transition_BLL.masked_fill(
    log_transition_BLL == NO_EDGE, -torch.inf
)
counts = torch.full((B,), M + 2), torch.full((B,), L)
log_p_B = dag_log_likelihood(log_emission_BXL, log_edge_BLL, *counts)
print(f"by the package {-log_p_B.mean() / math.log(2):.1f} bits")

# %% mystnb={"code_prompt_show": "Checked: the package gives every row the same bits, to 4 digits"} tags=["hide-cell", "check"]
torch.testing.assert_close(-log_p_B / math.log(2), exlm.bits(), rtol=0, atol=1e-4)

# %% mystnb={"code_prompt_show": "Checked: with your weights the package's rotation, encoder, MLM loss, expansion and transition give the same numbers"} tags=["hide-cell", "check"]
from exlm_mini.config import ModelConfig
from exlm_mini.model import encoder, expansion, objectives, rope, transition

x_BHTd = torch.randn(B, 2, len(i_T), 16)
rotation = rope.rotation_2d(i_T[None], j_T[None], 16)
torch.testing.assert_close(rope_2d(x_BHTd, i_T, j_T), rope.rotate(x_BHTd, rotation))

copies_BN = 1 + (K - 1) * (masked_BN == MASK)
theirs = expansion.expand(masked_BN, copies_BN, masked_BN == MASK, pad=-1)
assert torch.equal(expanded_BT, theirs.token_ids_BT) and theirs.is_real_BT.all()
assert (theirs.position_BT == i_T).all() and (theirs.clone_BT == j_T).all()

NAMES = {
    "norm_1": "attention_norm", "qkv": "attention.query_key_value",
    "out": "attention.output", "norm_2": "ffn_norm", "up": "ffn_in",
    "down": "ffn_out", "norm": "final_norm",
}  # fmt: skip
size = {"num_layers": 2, "width": 32, "ffn_width": 128}
packaged = encoder.Encoder(
    ModelConfig(**size, num_heads=2, dropout=0, attention_dropout=0), len(WORDS), 0
)
for model in (mlm, exlm):
    weights = model.encoder.state_dict().items()
    renamed = {
        ".".join(NAMES.get(part, part) for part in name.split(".")): weight
        for name, weight in weights
    }
    _ = packaged.load_state_dict(renamed)
    ours_BTD = model.encoder(model.encoder.embedding(expanded_BT), i_T, j_T)
    torch.testing.assert_close(ours_BTD, packaged(*theirs), rtol=1e-4, atol=1e-4)
    if model is mlm:
        place_BN = torch.arange(N).expand(B, N)
        no_clone_BN, is_real_BN = torch.zeros_like(place_BN), place_BN >= 0
        hidden_BND = packaged(masked_BN, place_BN, no_clone_BN, is_real_BN)
        logits_SV = hidden_BND[:, slots].flatten(0, 1) @ packaged.embedding.weight.T
        loss = objectives.mlm_loss(logits_SV, target_BM.flatten())
        bits = M * loss / math.log(2)
        torch.testing.assert_close(mlm.bits().mean(), bits, rtol=1e-4, atol=1e-4)

is_state_T = (j_T > 0) | (i_T == 0) | (i_T == N - 1)
owner_L = torch.unique(i_T[is_state_T], return_inverse=True)[1]
graph = expansion.StateGraph(
    place_BL=torch.zeros(B, L),
    owner_BL=owner_L.expand(B, L),
    clone_BL=None,
    num_states_B=torch.full((B,), L),
    target_ids_BM=None,
    is_boundary_BM=None,
    num_targets_B=torch.full((B,), M + 2),
)
config = ModelConfig(**size, num_heads=1, use_position=False, sparse=True)
gated = transition.GatedTransition(config)
_ = gated.load_state_dict(exlm.transition.state_dict(), strict=False)
state_BLD = ours_BTD[:, is_state_T]
log_E_BLL = exlm.transition(state_BLD, i_T[is_state_T])
torch.testing.assert_close(
    log_E_BLL.exp(), gated(state_BLD, graph).exp(), rtol=0, atol=1e-5
)

# %% [markdown]
# The package's own model, trained from its recipe as `python -m
# exlm_mini.pretrain --recipe toy-pairs` would do it, ends there, too.

# %%
from live import chapter_scale, train_live

from exlm_mini.config.options import parse

config = parse(["--recipe", "toy-pairs", "--objective", "exlm"]).config
run = train_live(config, chapter_scale())
steps, bits = list(run.bits_per_row().items())[-1]
print(f"the package's ExLM after {steps} steps: {bits:.1f} bits")

# %% mystnb={"code_prompt_show": "Checked: within 0.05 bits of the joint entropy"} tags=["hide-cell", "check"]
assert abs(bits - joint_bits) < 0.05

# %% [markdown]
# ## Three things to try
#
# 1. **Take the links away.** Let `Transition.forward` return the same logarithm
#    on every forward edge, whatever the states are. There are as many states as
#    before, each still free to predict any word, but the loss stays above two
#    bits. ExLM's gain comes from choosing states *together*.
# 2. **Take the learned vectors of the states away** (`nn.init.zeros_` on
#    `exlm.clone.weight`, and freeze it). Position alone has to tell the states
#    apart. More than half of the starts now stay at two bits for all 300 steps;
#    {ref}`chap-symmetric-start` finds out why.
# 3. **Another language.** `grammar("quartets")` has four moods and three words
#    for each; its floor is 7.17 bits for the two words, and together they hold
#    5.17. How many states does it take? Its 10,000 draws hold
#    2,826 different sentences, and a step over all of them takes that much longer
#    than one over 162: train on a few hundred drawn anew at each step.
#
# ## Where to go from here
#
# {ref}`Chapter 1 <chap-mlm>` takes the masked language model slowly, and
# {ref}`chap-multimodality` explains the two bits and the one. The pieces follow
# one by one: {ref}`states expansion <chap-expansion>`, {ref}`2D RoPE
# <chap-rope>`, the {ref}`sum over all paths <chap-dag-naive>`, and {ref}`the
# transitions <chap-training>`. The later chapters measure whether all this helps
# on molecules and English, and at what price.
