# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-training)=
# # The transition matrix, and ExLM trained
#
# The earlier chapters built the encoder, the states of a [MASK], their two
# coordinates, and the sum over all paths through a graph. One piece is missing:
# the probabilities on the edges, the transition matrix $\mathbf{E}$. In this
# chapter you write it, join all pieces into an ExLM, and train it on the small
# language of {ref}`chap-multimodality`, where a masked language model cannot get
# below 2 bits and the best possible score is 1 bit.
#
# It is here that ExLM becomes a different kind of model. The states of two masks
# can only agree on a reading through $\mathbf{E}$; without it, however many
# states there are, the words are predicted independently.
#
# **You will know afterwards** how $\mathbf{E}$ is computed in the paper and in
# the released code, what "states alignment" means as a loss, how the pieces fit
# together in one class, and what an edge between two states of the same mask is
# for.
#
# **What it needs.** A minute on one CPU core. The encoder, which you know from
# {ref}`chap-mlm` and {ref}`chap-rope`, comes from the package; everything else is
# on this page. The chapter covers §4.2, §4.3 and Appendix Q.3 of the paper
# {cite}`zheng2025exlm`.

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
import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from drawings import draw_dag
from live import chapter_scale
from torch import nn
from torch.nn import functional as F

from exlm_mini.config import SPECIAL_TOKENS, ModelConfig, SpecialIds
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model.encoder import Encoder
from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
scale = chapter_scale()
print(scale)

# %% [markdown]
# ## Sentences and states
#
# The language first. A hidden mood decides two words of a sentence, *happy …
# smiled* or *sad … wept*. Both are hidden behind [MASK], and no other word tells
# the mood. There are only 162 sentences, so we keep them all.

# %%
language = grammar("pairs")
special = SpecialIds()
WORDS = [*SPECIAL_TOKENS, *language.words]
drawn_SN = torch.from_numpy(language.sample(10_000, seed=1)).unique(dim=0)
sentence_BN = F.pad(drawn_SN + len(SPECIAL_TOKENS), (1, 1), value=special.bos)
sentence_BN[:, -1] = special.eos
slots = [1 + n for n in language.slots]  # behind [BOS]
masked_BN = sentence_BN.clone()
masked_BN[:, slots] = special.mask
target_BM = sentence_BN[:, slots]
B, N = sentence_BN.shape
print(*(WORDS[i] for i in masked_BN[0]))

# %% [markdown]
# Next, the states expansion of {ref}`chap-expansion`: every [MASK] is repeated $k$
# times. All copies keep the position $i$ of their [MASK], and $j$ numbers them from
# 1 to $k$. The two masks stand at the same places in every sentence, so one list of
# coordinates serves all rows. Besides the copies, [BOS] and [EOS] are states, one
# each: a path begins and ends there.

# %%
K = 2  # states per [MASK]
copies_N = torch.ones(N, dtype=torch.long)
copies_N[slots] = K
i_T = torch.arange(N).repeat_interleave(copies_N)
first_T = (copies_N.cumsum(0) - copies_N)[i_T]
j_T = torch.where(copies_N[i_T] > 1, torch.arange(len(i_T)) - first_T + 1, 0)
is_state_T = (j_T > 0) | (i_T == 0) | (i_T == N - 1)
i_L, j_L = i_T[is_state_T], j_T[is_state_T]
L = len(i_L)
owner_L = i_L.unique(return_inverse=True)[1]  # which target: 0, 1, 1, 2, 2, 3
names = ["BOS", "1.1", "1.2", "2.1", "2.2", "EOS"]
print(f"{N} tokens, {len(i_T)} after expansion, {L} states:", *names)

# %% [markdown]
# The suffixes of names stand for axes: `T` tokens after expansion, `L` states;
# {ref}`notation` has all of them.
#
# ## An edge may only lead forward
#
# A path visits one state for every hidden word and must never return to a state.
# The paper takes the simplest rule that ensures this: state $v$ may hand over to
# state $u$ only if $v < u$, in the order of the row. As a matrix this is the part
# above the diagonal:

# %%
is_edge_LL = torch.ones(L, L).triu(1).bool()
is_edge_LL.int()

# %% [markdown]
# With six states there are 15 edges. The rule allows more than one might think.
# An edge may skip a mask altogether, as the one from [BOS] to 2.1 does; and it
# may join two states of the *same* mask, as 1.1 → 1.2. The end of the chapter
# shows what the latter is good for.
#
# ## One softmax says how likely each edge is
#
# Row $v$ of $\mathbf{E}$ holds the probabilities of the states that may come
# after $v$. The paper computes $\mathbf{E}$ as attention computes its weights:
#
# $$
# \begin{gathered}
# \mathbf{E} = \mathrm{softmax}\left(\frac{\mathbf{Q}\mathbf{K}^\top}{\sqrt{D}}
# + \mathbf{M}\right), \\
# \mathbf{Q} = \mathbf{H}\mathbf{W}_Q, \quad \mathbf{K} = \mathbf{H}\mathbf{W}_K
# \end{gathered}
# $$ (eq-paper-transition)
#
# $\mathbf{H}$ holds the encoder's hidden states for the $L$ states, $D$ is their
# width, and $\mathbf{W}_Q$ and $\mathbf{W}_K$ are learned. $\mathbf{M}$ is 0 on
# allowed edges and $-\infty$ elsewhere. The class below departs from the formula
# twice. It keeps logarithms, because the sum over paths needs them. And $-\infty$
# becomes a large negative number: the last state has no successor, and the gradient
# of a softmax over nothing but $-\infty$ is not a number. (The package keeps
# $-\infty$ and treats such rows apart.)

# %%
NO_EDGE = -1e9  # log 0, near enough


class Transition(nn.Module):
    """log E, (B, L, L): one softmax over the later states."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, state_BLD):
        q_BLD, k_BLD = self.query(state_BLD), self.key(state_BLD)
        score_BLL = q_BLD @ k_BLD.transpose(1, 2) / math.sqrt(q_BLD.shape[-1])
        log_BLL = score_BLL.masked_fill(~is_edge_LL, NO_EDGE).log_softmax(dim=-1)
        return log_BLL.masked_fill(~is_edge_LL, NO_EDGE)


# %%
_ = torch.manual_seed(9)
some_state_BLD = torch.randn(1, L, 16)
some_transition = Transition(16)
with torch.no_grad():
    some_E_LL = some_transition(some_state_BLD)[0].exp()
some_E_LL.shape, some_E_LL.sum(dim=1).round(decimals=3).tolist()


# %% [markdown]
# Every row but the last sums to one; no path leaves the last state.
# {numref}`fig-transition` shows the same matrix as a graph, for random states:
# nothing is learned yet.


# %% tags=["hide-input"]
def show_graph(ax, transition_LL, labels=names):
    """One column per target; edges as wide as they are likely."""
    kinds = ["boundary", *["mask"] * K, *["second"] * K, "boundary"]
    draw_dag(ax, np.triu(transition_LL, 1), owner_L.tolist(), labels, kinds)


# %% mystnb={"figure": {"caption": "The paper's transition matrix for random states. The number on an edge is its probability. Yellow and brown are the states of the first and the second mask.", "name": "fig-transition"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(4.6, 2.8))
show_graph(ax, some_E_LL.numpy())

# %% [markdown]
# **The released code** computes something richer. It has several heads $c$, each
# with a softmax $\mathbf{E}^{(c)}$ like the one above, and every state mixes them
# with a learned gate: $\mathbf{E}_{vu} = \sum_c g_{vc}\,\mathbf{E}^{(c)}_{vu}$,
# where $g_v = \mathrm{softmax}(\mathbf{W}_g \mathbf{h}_v)$. Queries, keys and
# gate also read a learned vector for the *place* of a state in the row. The
# published numbers presumably come from this version, so it is the package's
# default; `--model.transition paper` gives the one above. With a single head, no
# places and no biases the two are the same; in exercise 2 you write the mixture.

# %% mystnb={"code_prompt_show": "Checked: the class equals the package's, and so does the gated version with one head"} tags=["hide-cell", "check"]
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.transition import GatedTransition, PaperTransition

is_masked_BN = masked_BN == special.mask
batch = masked_BN, is_masked_BN, sentence_BN
_, package_graph = expand_masks(*(x[:1] for x in batch), K, "paper", special)
small = ModelConfig(width=16, num_heads=1, ffn_width=32, use_position=False)
paper, gated = PaperTransition(small), GatedTransition(small)
_ = paper.load_state_dict(some_transition.state_dict())
with torch.no_grad():
    for name in ("query", "key"):
        mine, theirs = getattr(some_transition, name), getattr(gated, name)
        _ = theirs.weight.copy_(mine.weight), theirs.bias.zero_()
    for module in (paper, gated):
        theirs_LL = module(some_state_BLD, package_graph)[0].exp()
        torch.testing.assert_close(theirs_LL, some_E_LL, rtol=1e-5, atol=1e-6)

# %% [markdown]
# ## What a state says
#
# A state $u$ predicts words as a masked language model does at a [MASK]: a small
# network, then the product with every word vector. Its probability for a word,
# $P_u(w)$, is called the **emission**. The graph needs it only for the hidden
# words of the row, $y_1 \dots y_M$.


# %%
class Head(nn.Module):
    """log P_u(w) at every state, (B, L, V)."""

    def __init__(self, width):
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(len(WORDS)))

    def forward(self, state_BLD, embedding_VD):
        feature_BLD = self.norm(F.gelu(self.dense(state_BLD)))
        return (feature_BLD @ embedding_VD.T + self.bias).log_softmax(dim=-1)


def emission(log_word_BLV, target_BM):
    """log P_u(y_i), (B, M, L)."""
    index_BML = target_BM[:, :, None].expand(-1, -1, log_word_BLV.shape[1])
    return log_word_BLV.transpose(1, 2).gather(1, index_BML)


# %% [markdown]
# ## States alignment is the loss
#
# Nobody says which state should stand for which word. A path chooses, and the
# probability of the hidden words is the sum over all paths,
#
# $$
# f_{M,L} = \sum_{\mathbf{a}} \;
# \prod_{i=1}^{M} \mathbf{E}_{a_{i-1} a_i}\, P_{a_i}(y_i) \;
# \mathbf{E}_{a_M a_{M+1}},
# $$
#
# where the path $\mathbf{a}$ starts in [BOS], $a_0$, and ends in [EOS],
# $a_{M+1}$, and $M$ counts the hidden words alone. {ref}`chap-dag-naive` computes
# the sum word by word; here is its fast form again.


# %%
def log_sum_over_paths(log_emission_BML, log_transition_BLL):
    """log P(hidden words) of every row."""
    f_BL = log_transition_BLL[:, 0] + log_emission_BML[:, 0]
    for i in range(1, log_emission_BML.shape[1]):
        arriving_BL = (f_BL[:, :, None] + log_transition_BLL).logsumexp(dim=1)
        f_BL = arriving_BL + log_emission_BML[:, i]
    return (f_BL + log_transition_BLL[:, :, -1]).logsumexp(dim=1)


# %% [markdown]
# The loss, called **states alignment**, is $-\log f_{M,L}$, per target. Its
# gradient does what an alignment should: each state is pulled towards word $i$ in
# proportion to the share of the paths that let it say word $i$ (§4.3;
# {ref}`chap-dag-naive` derives it). A state that already says a word well gets
# more of it, so the states can come to divide the words among themselves.
#
# ## ExLM
#
# Now everything is in place: expand, encode, link the states, score the words,
# sum over the paths.


# %%
class ExLM(nn.Module):
    """K states for every hidden word, and a learned graph over them."""

    def __init__(self, config):
        super().__init__()
        width = config.shape.width
        self.encoder = Encoder(config, len(WORDS), special.pad)
        self.transition, self.head = Transition(width), Head(width)
        self.clone = nn.Embedding(K + 1, width)  # an aid, see below

    def graph(self, masked_BN, log_chain_LL=None, share=0.0):
        """log P_u(word), (B, L, V), and log E, (B, L, L)."""
        expanded_BT = masked_BN[:, i_T]
        i_BT, j_BT = i_T.expand_as(expanded_BT), j_T.expand_as(expanded_BT)
        is_real_BT = torch.ones_like(expanded_BT, dtype=torch.bool)  # no padding
        hidden_BTD = self.encoder(expanded_BT, i_BT, j_BT, is_real_BT)
        state_BLD = hidden_BTD[:, is_state_T] + self.clone(j_L)
        log_E_BLL = self.transition(state_BLD)
        if share > 0:  # an aid, too
            log_E_BLL = torch.logaddexp(
                log_E_BLL + math.log(1 - share), log_chain_LL + math.log(share)
            )
        return self.head(state_BLD, self.encoder.embedding.weight), log_E_BLL

    def log_likelihood(self, masked_BN, target_BM, **help):
        """log P(hidden words | visible words), in nats, for every row."""
        log_word_BLV, log_E_BLL = self.graph(masked_BN, **help)
        return log_sum_over_paths(emission(log_word_BLV, target_BM), log_E_BLL)


# %% [markdown]
# The shapes, from the row to the likelihood:

# %%
config = ModelConfig(
    num_layers=1, width=32, num_heads=2, ffn_width=64,
    dropout=0.0, attention_dropout=0.0, states_per_mask=K,
    transition="paper", boundary="paper", clone_embedding_std=1.0,
)  # fmt: skip
_ = torch.manual_seed(1)
exlm = ExLM(config)
with torch.no_grad():
    log_word_BLV, log_E_BLL = exlm.graph(masked_BN)
    log_emission_BML = emission(log_word_BLV, target_BM)
    log_p_B = exlm.log_likelihood(masked_BN, target_BM)
for name in ("log_word_BLV", "log_E_BLL", "log_emission_BML", "log_p_B"):
    print(f"{name:17}{tuple(globals()[name].shape)}")

# %% mystnb={"code_prompt_show": "Checked: the likelihood is the sum over the six paths, listed one by one"} tags=["hide-cell", "check"]
paths = list(itertools.combinations(range(1, L - 1), 2))
log_path_BP = torch.stack(
    [
        sum(log_emission_BML[:, i, u] for i, u in enumerate(path))
        + sum(log_E_BLL[:, v, u] for v, u in itertools.pairwise((0, *path, L - 1)))
        for path in paths
    ],
    dim=1,
)
assert len(paths) == 6
torch.testing.assert_close(log_path_BP.logsumexp(dim=1), log_p_B)

# %% [markdown]
# ## Training
#
# Two lines of the class are not in the paper, and without them the model does no
# better here than a masked language model. One adds a learned vector to each
# state according to its number $j$. The other mixes $\mathbf{E}$, at the start of
# training, with $k$ fixed **chains**: state $j$ of one mask leads to state $j$ of
# the next, and to nowhere else. Both help the states of a mask to become
# different; {ref}`chap-symmetric-start` explains why they do not do so by
# themselves.

# %%
is_next_LL = owner_L[:, None] + 1 == owner_L
is_boundary_LL = (j_L[:, None] == 0) | (j_L == 0)
chain_LL = (is_next_LL & (is_boundary_LL | (j_L[:, None] == j_L))).float()
log_chain_LL = (chain_LL / chain_LL.sum(dim=1, keepdim=True).clamp(min=1)).log()
log_chain_LL = log_chain_LL.clamp(min=NO_EDGE)
chain_LL.int()

# %% [markdown]
# The chains' share falls from one to zero over the first half of training. The
# rest is the loop you know. The folded `start` draws the weights from N(0,
# 0.125²) and leaves out the vectors where they are not wanted.


# %% tags=["hide-input"]
def start(seed, clone_std):
    """An untrained model; without the help of vectors they are zero and stay so."""
    _ = torch.manual_seed(seed)
    model = ExLM(config)
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.125)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    nn.init.normal_(model.clone.weight, std=clone_std)
    model.clone.requires_grad_(clone_std > 0)
    return model


# %%
def train(model, with_chains, steps=300, peak=3e-3):
    """Minimise states alignment; the bits over all sentences, every 10 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    draw, curve = torch.Generator().manual_seed(1), {}
    for step in range(1, steps + 1):
        rate = peak * min(1, step / 30, (steps - step + 1) / 120)
        optimizer.param_groups[0]["lr"] = rate
        share = max(0.0, 1 - 2 * step / steps) if with_chains else 0.0
        rows = torch.randint(B, (64,), generator=draw)
        log_p_B = model.log_likelihood(
            masked_BN[rows], target_BM[rows], log_chain_LL=log_chain_LL, share=share
        )
        loss = -log_p_B.mean() / len(slots)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            curve[step] = bits(model)
    return curve


@torch.no_grad()
def bits(model):
    """-log2 P(both hidden words), the mean over all sentences."""
    return -model.log_likelihood(masked_BN, target_BM).mean().item() / math.log(2)


# %%
bare, exlm = start(seed=1, clone_std=0.0), start(seed=1, clone_std=1.0)
bare_curve = train(bare, with_chains=False)
exlm_curve = train(exlm, with_chains=True)
floor_bits = language.marginal_entropy_bits(language.mask())
joint_bits = language.joint_entropy_bits(language.mask())
print(f"floor of MLM {floor_bits:.1f}, joint entropy {joint_bits:.1f}")
print(f"ExLM {bits(exlm):.1f} bits, without the two aids {bits(bare):.1f}")

# %% [markdown]
# With the aids the model goes below the floor and wins the whole bit; without
# them it ends where a masked language model ends. {numref}`fig-passed` shows
# both. The dashed levels come from the language itself.

# %% mystnb={"figure": {"caption": "Bits for the two hidden words, scored with the learned E alone. The share of the chains reaches zero at the dotted line.", "name": "fig-passed"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3.4))
for curve, label, color in (
    (bare_curve, "without aids", "0.5"),
    (exlm_curve, "ExLM", COLORS["exlm"]),
):
    ax.plot(list(curve), list(curve.values()), color=color, label=label)
for level, label in ((floor_bits, "floor of MLM"), (joint_bits, "joint entropy")):
    ax.axhline(level, color="0.3", lw=1.2, ls="--", zorder=1)
    ax.text(300, level - 0.03, label, ha="right", va="top", fontsize=9)
ax.axvline(150, color="0.3", lw=1.2, ls=":")
ax.grid(False)
fig.legend(loc="outside upper center", ncols=2)
_ = ax.set(xlim=(0, 303), ylim=(0.8, 3.2), xlabel="step", ylabel="bits, both words")

# %% mystnb={"code_prompt_show": "Checked: within 0.05 bits of the joint entropy with the aids, and of the floor without"} tags=["hide-cell", "check"]
assert joint_bits - 1e-3 < bits(exlm) < joint_bits + 0.05
assert abs(bits(bare) - floor_bits) < 0.05

# %% [markdown]
# ## What the graph has learned
#
# {numref}`fig-learned` is the graph of one sentence, every state with its
# likeliest word. [BOS] tosses a coin: each of the two states of the first mask is
# taken half of the time. From there $\mathbf{E}$ leads to the one state of the
# second mask that says the word of the same mood. The bit that a masked language
# model cannot express lies in these edges. Which state gets which mood is an
# accident of the start.

# %% mystnb={"figure": {"caption": "One sentence after training: the likeliest word of each state, and the learned transition matrix.", "name": "fig-learned"}} tags=["hide-input"]
with torch.no_grad():
    log_word_BLV, log_E_BLL = exlm.graph(masked_BN)
says_L = [WORDS[w] for w in log_word_BLV[0].argmax(dim=-1).tolist()]
shown = [f"{n}\n{w}" for n, w in zip(names[1:-1], says_L[1:-1], strict=True)]
fig, ax = plt.subplots(figsize=(4.6, 2.8))
show_graph(ax, log_E_BLL[0].exp().numpy(), ["[BOS]", *shown, "[EOS]"])

# %% mystnb={"code_prompt_show": "Checked: two routes, one for each mood, each with probability 0.5 ± 0.1"} tags=["hide-cell", "check"]
E_LL = log_E_BLL[0].exp()
for v in (1, 2):
    u = int(E_LL[v].argmax())
    assert abs(E_LL[0, v] - 0.5) < 0.1 and E_LL[v, u] > 0.9
    mood = [("happy", "sad").index(says_L[v]), ("smiled", "wept").index(says_L[u])]
    assert mood[0] == mood[1]

# %% [markdown]
# ## The package gives the same likelihood
#
# The class above is small because its rows are all alike: no padding, masks at
# the same places, one kind of boundary. The package's `ExLM` handles all of this,
# on a GPU and in half precision. Its parameters have the same names as ours, so
# the trained weights fit into it.

# %%
from exlm_mini.model import ExLM as PackageExLM
from exlm_mini.model.objectives import log_likelihood

package_exlm = PackageExLM(config, len(WORDS), special)
_ = package_exlm.load_state_dict(exlm.state_dict())
with torch.no_grad():
    theirs_B = log_likelihood(package_exlm(masked_BN, is_masked_BN, sentence_BN))
    ours_B = exlm.log_likelihood(masked_BN, target_BM)
torch.allclose(theirs_B, ours_B, atol=1e-4)

# %% mystnb={"code_prompt_show": "Checked: all 162 sentences agree to 4 digits, untrained and trained"} tags=["hide-cell", "check"]
torch.testing.assert_close(theirs_B, ours_B, rtol=1e-4, atol=1e-4)
with torch.no_grad():
    untrained = start(seed=5, clone_std=1.0)
    _ = package_exlm.load_state_dict(untrained.state_dict())
    scores = package_exlm(masked_BN, is_masked_BN, sentence_BN)
    torch.testing.assert_close(
        log_likelihood(scores),
        untrained.log_likelihood(masked_BN, target_BM),
        rtol=1e-4,
        atol=1e-4,
    )

# %% [markdown]
# One thing differs between the paper and the released code here. In the paper's
# Appendix P, [BOS] and [EOS] are single states, as on this page. The released
# code clones them $k$ times like a mask and scores them as targets; this is the
# package's default, `--model.boundary official`.
#
# ## Two states of one mask
#
# Appendix Q.3 of the paper takes the edges inside a mask away and calls the
# result the *sparse* graph. Its average over four tasks of GLUE is 81.0, against
# 81.4 for the full graph and 80.4 "w/o Transitions" (Table 13), which the paper
# does not describe further. The reason it gives for the loss is that a mask may
# stand for two words: in "*this is [MASK], and I'm very [MASK] to see this*", the
# first could be "*so good*". A graph written by hand shows this. Take "this is
# [MASK] [MASK] for us", and let each state know one word:

# %%
said = ["", "very", "good", "news", "food", ""]  # BOS 1.1 1.2 2.1 2.2 EOS
dense_LL = torch.zeros(6, 6)
dense_LL[0, 1] = dense_LL[0, 2] = 0.5
dense_LL[1, 2] = 1.0  # "very" to "good": two states of mask 1
dense_LL[2, 3:6] = torch.tensor([0.4, 0.2, 0.4])  # news, food, or the end
dense_LL[3, 5] = dense_LL[4, 5] = 1.0
sparse_LL = dense_LL * (owner_L[:, None] < owner_L)


# %% tags=["hide-input"]
def probability(filling, words, transition_LL):
    """Of the only path that says these words, all states saying different ones."""
    path = [0, *(words.index(w) for w in filling.split()), 5]
    return math.prod(
        transition_LL[v, u].item() for v, u in itertools.pairwise(path)
    )


fillings = ["good", "good news", "very good", "very good news"]
table = pd.DataFrame(index=fillings)
for name, graph_LL in (("dense", dense_LL), ("sparse", sparse_LL)):
    table[name] = [round(probability(f, said, graph_LL), 2) for f in fillings]
table

# %% [markdown]
# The dense graph can say one, two or three words. In "very good" the first mask
# supplies both words and the second is skipped. The sparse graph cannot say
# "very" at all.
#
# In pre-training this freedom is of little use. There the targets are the hidden
# words, as many as masks. A path that takes two states of one mask must then
# leave another mask out, so all that edges inside a mask can add is a shift: a
# mask that says its neighbour's word as well as its own. The study has a language
# made for such shifts, where a graph with these edges could win up to 0.67 bits
# if [BOS] and [EOS] are cloned. In ten seeds, trained models gained nothing from
# it ({ref}`chap-findings`).
#
# ## Where this comes from
#
# Translation models that write all words of a sentence at once had the same
# problem of mixed readings. The Directed Acyclic Transformer
# {cite}`huang2022datransformer` solved it with more states than words, a
# transition matrix like {eq}`eq-paper-transition`, and the same sum over paths;
# ExLM brings it to masked language models, where the states stand at the masks.
# ExLM's released code is built on that model's.
#
# ## Exercises
#
# **1. How many paths?** For $m$ masks with $k$ states each and $m$ hidden words,
# how many paths has the dense graph, and how many the sparse one?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_counts(answer):
    """Compares with a list of all paths."""
    if answer(2, 2) is None:
        return "not yet"
    for m, k in ((2, 2), (3, 2), (2, 4), (3, 3)):
        every = list(itertools.combinations(range(m * k), m))
        spread = [p for p in every if len({u // k for u in p}) == m]
        if tuple(answer(m, k)) != (len(every), len(spread)):
            return f"wrong for {m} masks with {k} states"
    return "right"


assert judge_counts(lambda m, k: (0, 0)).startswith("wrong")


# %%
def count_paths(m, k):
    """(dense, sparse)"""
    ...  # your turn


judge_counts(count_paths)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def count_paths(m, k):
    """Any m of the m k states in order; or one state of each mask."""
    return math.comb(m * k, m), k**m


assert judge_counts(count_paths) == "right"
judge_counts(count_paths)

# %% [markdown]
# **2. The gate of the released code.** You are given the scores of every head,
# `(H, L, L)`, and the logits of the gate, `(L, H)`. Return the mixed
# $\mathbf{E}$, `(L, L)`. The last row is not checked.


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_mix(answer):
    """Compares with the package's module, which computes scores and gate itself."""
    torch.manual_seed(3)
    wide = ModelConfig(width=16, num_heads=4, ffn_width=32, use_position=False)
    module, x_LD = GatedTransition(wide), some_state_BLD[0]
    with torch.no_grad():
        q, k = (
            linear(x_LD).unflatten(-1, (4, 4)).transpose(0, 1)
            for linear in (module.query, module.key)
        )
        found = answer(q @ k.transpose(1, 2) / 2, module.gate(x_LD))
        wanted = module(some_state_BLD, package_graph)[0].exp()
    if found is None:
        return "not yet"
    alike = torch.allclose(found[:-1], wanted[:-1], atol=1e-5)
    return "right" if alike else "not the package's E"


assert judge_mix(lambda score_HLL, gate_LH: score_HLL[0]) == "not the package's E"


# %%
def mix(score_HLL, gate_LH): ...  # your turn


judge_mix(mix)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def mix(score_HLL, gate_LH):
    """A softmax per head, then the weighted mean over heads."""
    E_HLL = score_HLL.masked_fill(~is_edge_LL, NO_EDGE).softmax(dim=-1)
    return torch.einsum("lh,hlm->lm", gate_LH.softmax(dim=-1), E_HLL)


assert judge_mix(mix) == "right"
judge_mix(mix)

# %% [markdown]
# **3. The paper's own sentence.** "This is [MASK], and I'm very [MASK] to see
# this." The states say *so*, *good*, *happy*, *glad*. Write a dense graph in
# which "so good happy" has probability 0.3. What does the sparse graph make of
# it?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-cell"]
def judge_graph(answer):
    """Rows must be probabilities, edges must lead forward."""
    E_LL = answer()
    if E_LL is None:
        return "not yet"
    if (E_LL.tril() != 0).any() or not torch.allclose(
        E_LL[:-1].sum(1), torch.ones(5)
    ):
        return "rows must sum to one and lead forward"
    p = probability("so good happy", ["", "so", "good", "happy", "glad", ""], E_LL)
    return "right" if abs(p - 0.3) < 1e-6 else f"probability {p:.2f}"


assert judge_graph(lambda: dense_LL).startswith("prob")


# %%
def so_good_happy():
    """E, (6, 6): BOS, so, good, happy, glad, EOS."""
    ...  # your turn


judge_graph(so_good_happy)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def so_good_happy():
    """The product of the edges is 0.5 · 1 · 0.6 · 1."""
    E_LL = torch.zeros(6, 6)
    E_LL[0, 1] = E_LL[0, 2] = 0.5
    E_LL[1, 2] = 1.0
    E_LL[2, 3], E_LL[2, 4] = 0.6, 0.4
    E_LL[3, 5] = E_LL[4, 5] = 1.0
    return E_LL


assert judge_graph(so_good_happy) == "right"
is_sparse_LL = owner_L[:, None] < owner_L  # the edge from "so" to "good" is gone
assert (so_good_happy() * is_sparse_LL)[1].sum() == 0
judge_graph(so_good_happy)
