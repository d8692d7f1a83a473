# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-training)=
# # Transitions, and training until the floor is passed
#
# Every [MASK] has become $k$ states. This chapter links the states by a matrix
# $\mathbf{E}$, joins all pieces of ExLM, and trains the result in front of your
# eyes.
#
# **You will** write the transition matrix in both versions, the paper's and the
# released code's, and find them equal to the package's. You will follow one batch
# from token ids to the loss. Then you will train ExLM on the small language. It
# will *fail* first: without help it stays at the floor of an ordinary masked
# language model, and you will see why, in numbers. With two small helps it passes
# the floor and reaches the joint entropy.
#
# **You will know after** what an edge of the graph may do, what the training signal
# of the clones is at the start and why it is so faint, and what is lost when two
# states of one mask may not be linked.
#
# **It needs** about a minute on one CPU core and no GPU. **It covers** §4.2 and
# §4.3 of the paper {cite}`zheng2025exlm`, Appendix H, and Appendix Q.3 with Table
# 13. The dynamic programme is used here and explained in {ref}`chap-dag-naive`,
# {ref}`chap-dag-vectorized` and {ref}`chap-dag-cuda`.

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
import dataclasses
import json
import math
import tempfile
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi
from exlm_mini.alignment.enumeration import paths
from exlm_mini.config import SPECIAL_TOKENS, ModelConfig, SpecialIds
from exlm_mini.config.options import parse
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.objectives import log_likelihood, states_alignment_loss
from exlm_mini.model.transition import (
    GatedTransition,
    PaperTransition,
    edges,
    parallel_chains,
)
from exlm_mini.plotting import (
    COLORS,
    draw_curves,
    draw_dag,
    draw_heatmap,
    use_book_style,
)
from exlm_mini.training.evaluation import row_bits
from exlm_mini.training.live import chapter_scale, train_live
from exlm_mini.training.parts import (
    chain_share,
    learning_rate,
    make_model,
    make_optimizer,
    score,
)

use_book_style()
scale = chapter_scale()
str(scale)

# %% [markdown]
# ## Which edges may there be?
#
# **Question.** The states of one row are to form a directed acyclic graph, a DAG:
# arrows, and no way to walk in a circle. What is the simplest rule that
# guarantees it?
#
# Take one sentence with two masks and $k = 2$ states each. As in the released code,
# the boundaries [BOS] and [EOS] are cloned too.

# %%
words = ["[BOS]", "she", "felt", "happy", "and", "smiled", "[EOS]"]
vocabulary = [*SPECIAL_TOKENS, *words[1:-1]]
token_ids_BN = torch.tensor([[vocabulary.index(word) for word in words]])
is_masked_BN = torch.tensor([[word in ("happy", "smiled") for word in words]])
masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, SpecialIds().mask)
expanded, graph = expand_masks(
    masked_ids_BN, is_masked_BN, token_ids_BN, 2, "official", SpecialIds()
)
target_names = ["BOS", "1", "2", "EOS"]  # the target a state is a clone of
labels = [
    f"{target_names[owner]}.{clone}"
    for owner, clone in zip(graph.owner_BL[0], graph.clone_BL[0], strict=True)
]
labels

# %% [markdown]
# The rule is: forward only. State $v$ may hand over to state $u$ if $v < u$. As a
# matrix of ones and zeros this is an upper triangle without its diagonal; the paper
# writes it as a mask $\mathbf{M}$ that is added to the scores.

# %%
num_states = len(labels)
is_forward_LL = torch.ones(num_states, num_states).triu(1).bool()
is_forward_LL.int()

# %% [markdown]
# **Check.** The package's `edges` gives the same matrix. Every pair of states is
# one possible edge, so there are $\binom{8}{2} = 28$. And no walk can be longer
# than $L - 1$ steps: the $L$-th power of the matrix is zero, so there is no circle.

# %%
is_edge_LL = edges(graph)[0]
assert torch.equal(is_edge_LL, is_forward_LL)
assert is_edge_LL.sum() == math.comb(num_states, 2) == 28
walks_LL = torch.linalg.matrix_power(is_edge_LL.double(), num_states - 1)
assert walks_LL.sum() == 1  # the one walk through all states
assert (walks_LL @ is_edge_LL.double()).sum() == 0

# %% [markdown]
# **Takeaway.** The order of the states makes the graph acyclic; nothing has to be
# learned for that. Note what the rule allows: an edge may skip whole masks, and it
# may join two clones of *one* mask. The last section comes back to both.

# %% [markdown]
# ## The paper's E: one softmax
#
# **Question.** How likely is each edge? §4.2 answers with one attention-like step
# over the hidden states $\mathbf{H}$ of the encoder:
#
# $$
# \mathbf{E} = \mathrm{softmax}\!\left(\frac{\mathbf{Q}\mathbf{K}^\top}{\sqrt d}
# + \mathbf{M}\right),\qquad
# \mathbf{Q} = \mathbf{H}\mathbf{W}_Q,\quad \mathbf{K} = \mathbf{H}\mathbf{W}_K,
# $$ (eq-paper-transition)
#
# where $d$ is the width of a state and $\mathbf{M}$ is 0 on the allowed edges and
# $-\infty$ elsewhere. Row $v$ of $\mathbf{E}$ holds the probabilities of all
# successors of state $v$. In code, with logarithms:


# %%
def paper_transition(state_LD, query_DD, key_DD, is_edge_LL):
    """log E of one row, as in the paper."""
    scores_LL = (state_LD @ query_DD) @ (state_LD @ key_DD).T
    scores_LL = scores_LL / math.sqrt(state_LD.shape[1])
    mask_LL = torch.zeros_like(scores_LL).masked_fill(~is_edge_LL, -torch.inf)
    return (scores_LL + mask_LL).log_softmax(dim=1)


# %%
config = ModelConfig(width=16, num_heads=2, ffn_width=32, states_per_mask=2)
generator = torch.Generator().manual_seed(9)
state_LD = torch.randn(num_states, 16, generator=generator)
_ = torch.manual_seed(9)  # of the weights that PyTorch draws
paper = PaperTransition(config)
by_hand_LL = paper_transition(
    state_LD, paper.query.weight.T, paper.key.weight.T, is_edge_LL
).detach()
log_paper_LL = paper(state_LD.unsqueeze(0), graph)[0].detach()
by_hand_LL[-2:]

# %% [markdown]
# The last row is `nan`: the last state has no successor, and a softmax over nothing
# but $-\infty$ is undefined. No path ever leaves the last state, so the value does
# not matter, but a `nan` would poison the gradients. The package returns $-\infty$
# there, "no edge".
#
# **Check.** All other rows agree with the package; each sums to one over its
# allowed edges; below the diagonal there is nothing.

# %%
assert by_hand_LL[-1].isnan().all()
# Two orders of the same float32 sums: a few last bits.
torch.testing.assert_close(by_hand_LL[:-1], log_paper_LL[:-1], rtol=1e-5, atol=1e-6)
row_sums_L = log_paper_LL.exp().sum(dim=1)
assert torch.allclose(row_sums_L[:-1], torch.ones(num_states - 1), atol=1e-6)
assert row_sums_L[-1] == 0
assert ((log_paper_LL == -torch.inf) == ~is_edge_LL).all()

# %% [markdown]
# **Figure.** {numref}`fig-transition` shows one matrix twice: as colours, and as
# the graph it stands for, one column per target, where the thickness of an arrow is
# the probability of the edge. These are random weights; nothing is learned yet.


# %% tags=["hide-input"]
def show_transition(transition_LL, owners, names):
    """The matrix and, below, its graph; edges that cannot be stay white."""
    _, (above, below) = plt.subplots(2, 1, figsize=(6.2, 5.8), height_ratios=(4, 3))
    shown_LL = np.where(
        np.triu(np.ones_like(transition_LL), 1), transition_LL, np.nan
    )
    draw_heatmap(above, shown_LL, names, names, "E[v, u]", limits=(0, 1))
    above.set(xlabel="to state u", ylabel="from state v")
    above.grid(False)
    kinds = ["mask" if 0 < owner < max(owners) else "boundary" for owner in owners]
    draw_dag(below, transition_LL, owners, names, kinds)


# %% mystnb={"figure": {"caption": "The paper's transition matrix for random states, as a matrix and as a graph. Yellow: clones of the two masks; grey: clones of the boundaries.", "name": "fig-transition"}} tags=["hide-input"]
show_transition(log_paper_LL.exp().numpy(), graph.owner_BL[0].tolist(), labels)

# %% [markdown]
# **Takeaway.** $\mathbf{E}$ is attention without values: a probability for every
# step forward. A path starts in the first state; the product of its edges is the
# probability that the graph takes it.

# %% [markdown]
# ## The released E: heads mixed by a gate
#
# **Question.** The released code computes something richer. What is it, and what
# does it add?
#
# It differs from {eq}`eq-paper-transition` in two ways. There are several heads,
# each with a softmax of its own, and every state mixes them with a learned gate.
# And queries, keys and gate read, besides the state, a learned embedding of its
# *place* in the expanded row.


# %%
def gated_transition(module, state_LD, place_L, is_edge_LL):
    """E of the released code, one head after the other."""
    x_LX = torch.cat([state_LD, module.place(place_L)], dim=1)
    gate_LH = module.gate(x_LX).softmax(dim=1)
    mixed_LL = torch.zeros(len(x_LX), len(x_LX))
    query_LHd, key_LHd = (
        linear(x_LX).unflatten(1, (module.num_heads, -1))
        for linear in (module.query, module.key)
    )
    for head in range(module.num_heads):
        query_Ld, key_Ld = query_LHd[:, head], key_LHd[:, head]
        scores_LL = query_Ld @ key_Ld.T / math.sqrt(query_Ld.shape[1])
        head_LL = scores_LL.masked_fill(~is_edge_LL, -torch.inf).softmax(dim=1)
        mixed_LL = mixed_LL + gate_LH[:, head, None] * head_LL
    return mixed_LL


# %%
_ = torch.manual_seed(9)
gated = GatedTransition(config)
gated_LL = gated_transition(gated, state_LD, graph.place_BL[0], is_edge_LL).detach()
log_gated_LL = gated(state_LD.unsqueeze(0), graph)[0].detach()
torch.testing.assert_close(
    gated_LL[:-1], log_gated_LL[:-1].exp(), rtol=1e-5, atol=1e-6
)
row_sums_L = log_gated_LL.exp().sum(dim=1)
assert torch.allclose(row_sums_L[:-1], torch.ones(num_states - 1), atol=1e-6)
gated_LL.round(decimals=2)

# %% [markdown]
# **Check.** One head without places is the paper's version (up to the biases, which
# start at any value and are set to zero here).

# %%
one_head = ModelConfig(width=16, num_heads=1, ffn_width=32, use_position=False)
single = GatedTransition(one_head)
with torch.no_grad():
    for mine, theirs in ((single.query, paper.query), (single.key, paper.key)):
        _ = mine.weight.copy_(theirs.weight), mine.bias.zero_()
log_single_LL = single(state_LD.unsqueeze(0), graph)[0].detach()
torch.testing.assert_close(log_single_LL, log_paper_LL, rtol=1e-5, atol=1e-6)

# %% [markdown]
# The places matter when states look alike. Give every state the same features: the
# paper's $\mathbf{E}$ can only spread evenly over what is left, the released one
# can still tell the states apart.

# %%
alike_LD = torch.ones_like(state_LD)
even_LL = paper(alike_LD.unsqueeze(0), graph)[0].exp()
uneven_LL = gated(alike_LD.unsqueeze(0), graph)[0].exp()
for v in range(num_states - 1):
    num_successors = num_states - 1 - v
    assert torch.allclose(even_LL[v, v + 1 :], torch.tensor(1 / num_successors))
    assert num_successors == 1 or uneven_LL[v, v + 1 :].std() > 0.01
even_LL[0].tolist()[:3], uneven_LL[0, :3].detach().round(decimals=2).tolist()

# %% [markdown]
# **Takeaway.** Two versions of one idea. The released one is the default of this
# package, because the published numbers come from it; `--model.transition paper`
# trains the other. Keep the last check in mind: clones that are alike get rows of
# $\mathbf{E}$ that are alike.

# %% [markdown]
# ## The pieces joined
#
# **Question.** What happens between a masked row and the loss?
#
# From here on we use the small language `pairs` of {ref}`chap-multimodality`: a
# hidden mood decides two words of a sentence, both are masked, and nothing visible
# tells the mood. The language has few sentences, so we keep them all: an average
# over them is an exact expectation.

# %%
SMALL = "--recipe toy-pairs --objective exlm --model.num_layers 1 --model.width 32"
SMALL += " --model.num_heads 2 --model.ffn_width 64"
small = parse(SMALL.split()).config
with tempfile.TemporaryDirectory() as folder:
    corpus = prepare_corpus(small.data, Path(folder), small.seed)
    all_rows, _ = corpus.train.gather(np.arange(len(corpus.train)))
token_ids_BN, count_B = all_rows.unique(dim=0, return_counts=True)
language = grammar("pairs")
special_ids = corpus.train.special_ids
slots = [slot + 1 for slot in language.slots]  # after [BOS]
is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
is_masked_BN[:, slots] = True
masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special_ids.mask)
batch = MaskedBatch(masked_ids_BN, is_masked_BN, token_ids_BN).to(scale.device)
floor_bits = language.marginal_entropy_bits(language.mask())
joint_bits = language.joint_entropy_bits(language.mask())
print(f"{len(token_ids_BN)} sentences, {len(all_rows):,} drawn for training")
print(f"MLM's floor {floor_bits:.3f} bits, joint entropy {joint_bits:.3f} bits")

# %% [markdown]
# The model is a chain of five steps. Each line below is one of them; the suffixes
# name the axes: `B` rows, `N` tokens, `T` expanded tokens, `L` states, `M` targets,
# `D` width.

# %%
model = (
    make_model(small, corpus.train.vocab_size, special_ids).to(scale.device).eval()
)
k = small.model.states_per_mask
expanded, graph = expand_masks(*batch, k, small.model.boundary, special_ids)
hidden_BTD = model.encoder(*expanded)  # Transformer with 2D RoPE
state_BLD = model.states(hidden_BTD, graph)  # the clones alone
log_transition_BLL = model.transition(state_BLD, graph)
log_emission_BML = model.head.log_emission(
    state_BLD, model.encoder.embedding.weight, graph.target_ids_BM
)
counts = (graph.num_targets_B, graph.num_states_B)
log_likelihood_B = dag_log_likelihood(log_emission_BML, log_transition_BLL, *counts)
loss = states_alignment_loss(log_likelihood_B, graph.num_targets_B)

# %%
stages = {
    "masked tokens": masked_ids_BN,
    "expanded tokens": expanded.token_ids_BT,
    "hidden states H": hidden_BTD,
    "states of the graph": state_BLD,
    "log E": log_transition_BLL,
    "log P_u(y_i)": log_emission_BML,
    "log-likelihood": log_likelihood_B,
    "loss": loss,
}
for name, value in stages.items():
    print(f"{name:20} {tuple(value.shape)}")

# %% [markdown]
# **Check.** The sizes follow from the sentence: 13 tokens, of which 4 are expanded
# (two masks, two boundaries), give $13 + 4(k-1) = 17$ places and $4k = 8$ states
# for 4 targets. The emission is the softmax of the vocabulary logits, read at the
# targets. And the whole is what the package calls the loss.

# %%
B, N = masked_ids_BN.shape
T, L, M, D = N + 4 * (k - 1), 4 * k, 4, small.model.shape.width
assert hidden_BTD.shape == (B, T, D) and state_BLD.shape == (B, L, D)
assert log_transition_BLL.shape == (B, L, L) and log_emission_BML.shape == (B, M, L)
log_token_BLV = model.token_logits(state_BLD).log_softmax(dim=2)
target_BLM = graph.target_ids_BM.unsqueeze(1).expand(B, L, M)
read_BML = log_token_BLV.gather(2, target_BLM).transpose(1, 2)
torch.testing.assert_close(log_emission_BML, read_BML, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(loss, score(model, batch).loss)

# %% [markdown]
# **Check.** The dynamic programme sums over every path. On this graph there are
# only $\binom{8-2}{4-2} = 15$ of them, from the first state to the last with two
# stops in between, so we can score each by itself: the product of its emissions and
# edges.

# %%
every_path = list(paths(M, L))
assert len(every_path) == math.comb(L - 2, M - 2) == 15
log_path_P = torch.stack(
    [
        sum(log_emission_BML[0, i, u] for i, u in enumerate(path))
        + sum(log_transition_BLL[0, v, u] for v, u in pairwise(path))
        for path in every_path
    ]
)
torch.testing.assert_close(log_path_P.logsumexp(dim=0), log_likelihood_B[0])
scores = (log_emission_BML[:3], log_transition_BLL[:3], *(c[:3] for c in counts))
enumerated_B = dag_log_likelihood(*scores, backend="enumerate")
torch.testing.assert_close(enumerated_B, log_likelihood_B[:3])

# %% [markdown]
# **Takeaway.** One softmax for the words, one for the edges, and a sum over paths:
# that is all of ExLM. Training minimises $-\log f_{M,L}$, divided by the number of
# targets.

# %% [markdown]
# ## Training from the paper's start
#
# **Question.** Does it learn? MLM cannot pass the floor of 2 bits on this language.
# ExLM can reach the joint entropy of 1 bit, if different states come to stand for
# the two moods.
#
# We start as the paper does, with nothing to tell the clones of a mask apart but
# the second coordinate of 2D RoPE. Two choices make this a kind start: larger
# initial weights (standard deviation 0.3, where the recipe has 0.125), and no
# learned places in $\mathbf{E}$. And since the language has only 162 sentences,
# every step here sees all of them. This is the gradient of an infinite batch: no
# chance is left but the initial weights.

# %%
HELPLESS = "--train.chain_warmup 0 --model.clone_embedding_std 0"
KIND = "--model.init_std 0.3 --model.use_position false --train.steps 1000"
kind = parse(f"{SMALL} {HELPLESS} {KIND}".split()).config


# %%
def exact_bits(model):
    """Mean over all sentences of -log2 P(both masked words | the others)."""
    return row_bits(model.eval(), batch).mean().item()


def train(config, stop):
    """The training loop; returns the bits and the weights every 50 steps."""
    model = make_model(config, corpus.train.vocab_size, special_ids).to(
        scale.device
    )
    optimizer = make_optimizer(model, config.train)
    curve, weights = {}, {}
    for step in range(stop + 1):
        if step % 50 == 0:
            curve[step] = exact_bits(model)
            weights[step] = {
                name: t.clone() for name, t in model.state_dict().items()
            }
        optimizer.zero_grad()
        score(model.train(), batch).loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(config.train, step)
        optimizer.step()
    return curve, weights


curve_live, weights_live = train(kind, stop=600)

# %% [markdown]
# What does chance add? The same start, that is the same initial weights, was
# recorded with batches of 64 and of 512 random sentences by `python -m
# exlm_mini.pretrain`; the file holds the exact command, the settings, the commit
# and the machine of each run.

# %%
saddle = json.loads(Path("../book/results/saddle.json").read_text())


def recorded(file, **wanted):
    """Bits by step of the recorded runs with these settings, by seed."""
    found = {}
    for record in file:
        config = dict(record["config"])
        for group in ("model", "data", "train"):
            config |= record["config"][group]
        if all(config[name] == value for name, value in wanted.items()):
            points = record["validation"]["exlm"]
            found[config["seed"]] = {
                point["step"]: point["validation_bits_per_row"] for point in points
            }
    return found


runs_64 = recorded(saddle, init_std=0.3, batch_size=64)
runs_512 = recorded(saddle, init_std=0.3, batch_size=512)
kind_64 = {"init_std": 0.3, "batch_size": 64, "seed": 1}
command = next(r["command"] for r in saddle if recorded([r], **kind_64))
print(command.replace(" --", " \\\n    --"))

# %% [markdown]
# **Figure.** In {numref}`fig-plateau` all three fall to the floor at once and stay
# there. Without noise ExLM drops to the joint entropy after some 350 steps, within
# about fifty. At batch 512 it does so later. At batch 64 it does not move.

# %% mystnb={"figure": {"caption": "ExLM from the paper's start and one set of initial weights. The run on all sentences was trained on this page; the other two are recorded.", "name": "fig-plateau"}} tags=["hide-input"]
late_live = {step: bits for step, bits in curve_live.items() if step >= 50}
fig, ax = plt.subplots()
levels = {"floor of MLM": floor_bits, "joint entropy": joint_bits}
draw_curves(ax, {"exlm": late_live}, levels)
for run, style in ((runs_512[1], "o--"), (runs_64[1], "s:")):
    ax.plot(list(run), list(run.values()), style, ms=4, color="0.5")
lines = ["all sentences, live", "batch 512, recorded", "batch 64, recorded"]
ax.legend(ax.lines[:1] + ax.lines[3:5], lines, loc="upper right")
_ = ax.set(xlim=(0, 1010), ylim=(0.9, 2.9))

# %%
assert all(
    bits > floor_bits - 0.1
    for run in (runs_64[1], {s: b for s, b in curve_live.items() if s <= 250})
    for bits in run.values()
)
assert curve_live[600] < joint_bits + 0.1


def first_step_below(curve, bits):
    """When a curve first is lower than that."""
    return next(step for step, reached in curve.items() if reached < bits)


assert first_step_below(curve_live, 1.5) < first_step_below(runs_512[1], 1.5)

# %% [markdown]
# But do not take this start for the rule. The recorded runs were repeated with
# other seeds, that is from other initial weights, and with the initial weights of
# the recipe.

# %%
usual_64 = recorded(saddle, init_std=0.125, batch_size=64)
usual_512 = recorded(saddle, init_std=0.125, batch_size=512)


def left_floor(runs):
    """Seeds whose run ended well below the floor, and all seeds."""
    ends = {seed: list(run.values())[-1] for seed, run in runs.items()}
    return sorted(s for s in ends if ends[s] < floor_bits - 0.5), sorted(ends)


assert left_floor(runs_64)[0] == left_floor(usual_64)[0] == []
assert left_floor(runs_512)[0] == [1] and left_floor(usual_512)[0] == []
for name, runs in {
    "kind start, batch 64": runs_64,
    "kind start, batch 512": runs_512,
    "usual start, batch 64": usual_64,
    "usual start, batch 512": usual_512,
}.items():
    left, tried = left_floor(runs)
    print(f"{name:22} {len(left)} of {len(tried)} seeds left the floor")

# %% [markdown]
# **Takeaway.** From a start that leaves the floor, noise decides when: the larger
# the batch, the sooner. But most starts do not leave at all within such a run. What
# holds them is what we look at next.

# %% [markdown]
# ## What the states have learned, and what not
#
# **Question.** What is missing while the curve is flat? For each masked word, ask
# two things of the graph. How many states take turns in emitting it? And does the
# choice of the state tell the mood? Both are entropies of the state posterior, the
# probability that a state emits a target given the sentence:
#
# - *choice*: the entropy of its average over all sentences. 0 bits: always the same
# state; 1 bit: two states take turns.
# - *told*: how much of that the sentence decides, the mutual information between
# sentence and state. 0 bits: the state is a coin flip; 1 bit: one state per mood.


# %%
def posterior_of(model):
    """P(state u emits word i | sentence) for the two masked words, (B, 2, L)."""
    scores = model.eval()(*batch)
    graph = scores.graph
    found = posteriors(
        scores.log_emission_BML,
        scores.log_transition_BLL,
        graph.num_targets_B,
        graph.num_states_B,
    )
    return found.state_BML[:, 1:-1]


def bits_of(p_XL):
    """Entropy over the last axis."""
    return torch.special.entr(p_XL).sum(dim=-1) / math.log(2)


def choice_and_told(model):
    """Per masked word: bits of choice between states, bits told by the state."""
    p_B2L = posterior_of(model)
    choice_2 = bits_of(p_B2L.mean(dim=0))
    told_2 = choice_2 - bits_of(p_B2L).mean(dim=0)
    return choice_2.tolist(), told_2.tolist()


def at_step(weights, step):
    """The model of the live run as it was after so many steps."""
    model = make_model(kind, corpus.train.vocab_size, special_ids).to(scale.device)
    _ = model.load_state_dict(weights[step])
    return model.eval()


told = {
    step: choice_and_told(at_step(weights_live, step))[1] for step in curve_live
}

# %% [markdown]
# **Figure.** {numref}`fig-told` repeats the live curve, with the bits told by the
# states of either word. The second word's states know the mood from early on. The
# first word's do not. The moment they do, the loss falls.

# %% mystnb={"figure": {"caption": "Above: the live run. Below: how much of the mood the state of each masked word tells.", "name": "fig-told"}} tags=["hide-input"]
fig, (above, below) = plt.subplots(2, 1, figsize=(6, 4.4), sharex=True)
draw_curves(above, {"exlm": late_live}, levels)
_ = above.get_legend().remove(), above.set(xlabel="", ylim=(0.9, 2.4))
for word, style in ((0, "-"), (1, "--")):
    line = [told[step][word] for step in late_live]
    below.plot(list(late_live), line, style, color="0.3", label=f"word {word + 1}")
below.legend(loc="center left")
_ = below.set(xlabel="training step", ylabel="bits told", ylim=(-0.05, 1.1))

# %%
plateau = at_step(weights_live, 250)
share_L = posterior_of(plateau).mean(dim=0)[0]  # who emits the first word
assert share_L[labels.index("2.1")] > 0.9 and share_L[labels.index("1.1")] < 0.1
assert told[250][0] < 0.2 and told[250][1] > 0.8
assert min(told[600]) > 0.8

# %% [markdown]
# Which states are they? Each mood has a best path of its own. Here are the states
# that the two paths take for either word, on the plateau and at the end. (The last
# bits of the sums decide which mood takes which of two states; on another machine
# it may be the other way round.)


# %%
def best_paths(model):
    """The best paths and how many sentences take each."""
    scores = model(*batch)
    graph = scores.graph
    path_BM, _ = viterbi(
        scores.log_emission_BML,
        scores.log_transition_BLL,
        graph.num_targets_B,
        graph.num_states_B,
    )
    return Counter(" ".join(labels[u] for u in path) for path in path_BM.tolist())


for name, snapshot in (("plateau", plateau), ("end", at_step(weights_live, 600))):
    taken = best_paths(snapshot)
    assert list(taken.values()) == [B // 2] * 2  # one path for each mood
    first, second = ({path.split()[i] for path in taken} for i in (1, 2))
    print(f"{name:8} first word from {' or '.join(sorted(first))},", end=" ")
    print(f"second from {' or '.join(sorted(second))}")

# %% [markdown]
# On the plateau the first word always comes from state 2.1, a clone of the *second*
# mask. A path cannot carry a choice through a single state: given that state, what
# comes before and what comes after are independent, and the joint probability of
# the two words is a product, as in MLM.
#
# **Check.** Leave only that one state for the first word. The probabilities of the
# four word pairs then form a table of rank one, whatever the other numbers are.


# %%
def pair_table(model, only_state=None):
    """P(word 1, word 2 | context) of one sentence, two words for each mask."""
    options = [token_ids_BN[:, slot].unique() for slot in slots]
    pairs = torch.cartesian_prod(*options)
    rows_4N = token_ids_BN[:1].repeat(4, 1)
    rows_4N[:, slots] = pairs
    hidden = MaskedBatch(masked_ids_BN[:1].repeat(4, 1), is_masked_BN[:4], rows_4N)
    scores = model(*hidden.to(scale.device))
    if only_state is not None:
        is_other_L = torch.arange(L, device=scale.device) != only_state
        scores.log_emission_BML[:, 1, is_other_L] = -torch.inf
    return log_likelihood(scores, with_boundaries=False).exp().view(2, 2)


with torch.no_grad():
    single_22 = pair_table(plateau, only_state=labels.index("2.1"))
    final_22 = pair_table(at_step(weights_live, 600))
assert torch.linalg.det(single_22 / single_22.sum()).abs() < 1e-6
assert torch.linalg.det(final_22 / final_22.sum()).abs() > 0.2

# %% [markdown]
# **Takeaway.** Early in training one route through the graph wins, before the
# states have learned to differ. Here the route through state 1.1 was left with less
# than a tenth of the paths, and it took hundreds of steps to grow from there.

# %% [markdown]
# ## The symmetric point
#
# **Question.** And if the graph *cannot* settle on one route? In the sparse graph
# of Appendix Q.3 (more in the last section) every path visits every mask once, and
# from the start two clones share the work. We train it without noise.

# %%
sparse_start = parse(f"{SMALL} {HELPLESS} --model.sparse true".split()).config
curve_sparse, weights_sparse = train(sparse_start, stop=200)
sparse_model = make_model(sparse_start, corpus.train.vocab_size, special_ids)
_ = sparse_model.to(scale.device).load_state_dict(weights_sparse[200])
choice_2, told_2 = choice_and_told(sparse_model)
assert abs(curve_sparse[200] - floor_bits) < 0.05
assert min(choice_2) > 0.5 and max(told_2) < 0.05

# %% [markdown]
# Two states take turns for each word, yet neither tells anything: the clones of a
# mask are copies of each other. That is the *symmetric point*. Why does gradient
# descent not leave it?
#
# A model small enough to write on one line has the answer: two masks with two
# clones each, two words per mask, two moods. Four numbers say how far it is from
# symmetry:
#
# - $a$: how differently the clones of the first mask emit (0 alike, 1 a word each);
# - $b$: the same for the second mask;
# - $c$: how differently the clones of the first mask hand over to those of the
# second;
# - $\ell$, the lead: 0 if both clones of the first mask are entered equally often,
# $\pm 1$ if one takes every path.
#
# The averages are held at one half, so that every word keeps its frequency, as even
# an MLM would learn.


# %%
def word_pairs(a, b, c, lead):
    """P(word of mask 1, word of mask 2): a sum over the four paths."""
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    balance = torch.stack([1 - lead, -1 - lead])  # so that the averages stay 1/2
    enter_j = torch.stack([1 + lead, 1 - lead]) / 2
    emit_jx = (1 + a * balance[:, None] * sign) / 2
    hand_over_jk = (1 + c * balance[:, None] * sign) / 2
    emit_ky = (1 + b * sign[:, None] * sign) / 2
    return torch.einsum("j,jx,jk,ky->xy", enter_j, emit_jx, hand_over_jk, emit_ky)


def bits_won(*numbers):
    """Bits below the floor of 2; the language has the pairs (0, 0) and (1, 1)."""
    p_xy = word_pairs(*numbers)
    return 2 + (p_xy[0, 0].log2() + p_xy[1, 1].log2()) / 2


point = [torch.tensor(x, dtype=torch.float64) for x in (0.3, 0.5, 0.4, 0.2)]
assert torch.allclose(word_pairs(*point).sum(dim=0), torch.tensor(0.5).double())
assert torch.allclose(word_pairs(*point).sum(dim=1), torch.tensor(0.5).double())

# %% [markdown]
# **Check.** Multiply out, and the four numbers meet in a single product:
#
# $$
# \text{bits won} = \log_2\!\big(1 + (1 - \ell^2)\,a\,b\,c\big).
# $$ (eq-saddle)
#
# The dynamic programme of the package agrees.

# %%
a, b, c, lead = point
assert torch.isclose(bits_won(*point), torch.log2(1 + (1 - lead**2) * a * b * c))
p_xy = word_pairs(*point)
minus = -torch.inf
emission_ML = torch.zeros(4, 6, dtype=torch.float64)  # BOS 1.1 1.2 2.1 2.2 EOS
emission_ML[1, 1:3] = torch.tensor([0.62, 0.32]).double().log()
emission_ML[2, 3:5] = torch.tensor([0.75, 0.25]).double().log()
transition_LL = torch.full((6, 6), minus, dtype=torch.float64)
transition_LL[0, 1:3] = torch.tensor([0.6, 0.4]).double().log()
transition_LL[1:3, 3:5] = torch.tensor([[0.66, 0.34], [0.26, 0.74]]).double().log()
transition_LL[3:5, 5] = 0.0
log_p = dag_log_likelihood(
    emission_ML[None], transition_LL[None], torch.tensor([4]), torch.tensor([6])
)
assert torch.isclose(log_p[0].exp(), p_xy[0, 0])

# %% [markdown]
# Everything follows from the product. At the symmetric point $a = b = c = 0$ the
# gradient vanishes, and so does every second derivative: it is a saddle of *third*
# order. If all differences are of size $\varepsilon$, the gain is $\varepsilon^3$.
# Two of the three without the third win nothing. And a lead of one route switches
# all of it off, whatever the clones have learned.

# %%
zeros = tuple(torch.zeros(4, dtype=torch.float64))
gradient = torch.autograd.functional.jacobian(bits_won, zeros)
hessian = torch.autograd.functional.hessian(bits_won, zeros)
assert all(g == 0 for g in gradient)
assert all(h == 0 for row in hessian for h in row)
one = torch.ones((), dtype=torch.float64)
for missing in ((a, b, 0 * c, lead), (a, 0 * b, c, lead), (a, b, c, one)):
    assert bits_won(*missing).abs() < 1e-12

# %% [markdown]
# **Figure.** {numref}`fig-orders` shows the bits won when all free differences are
# $\varepsilon$. The lower line is the start of the paper: a tenth of the difference
# wins a thousandth. The other two show what a help can do: if the hand-over is
# given ($c = 1$) the gain is of second order, and if the clones of one mask differ
# too it is of first order.

# %%
epsilon = torch.logspace(-3, -0.5, 11, dtype=torch.float64)
given = {"nothing given": (0, 0, 0), "c = 1": (0, 0, 1), "c = 1, b = 1": (0, 1, 1)}
won = {
    name: [bits_won(*(one if x else e for x in fixed), 0 * e) for e in epsilon]
    for name, fixed in given.items()
}
slopes = [
    math.log(line[1] / line[0]) / math.log(epsilon[1] / epsilon[0])
    for line in won.values()
]
assert np.allclose(slopes, [3, 2, 1], atol=0.01)  # log(1 + x) is x up to x^2 / 2

# %% mystnb={"figure": {"caption": "Bits won by small differences between clones, in the four-number model. The slopes are 3, 2 and 1.", "name": "fig-orders"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5.2, 3.2))
for (name, line), shade in zip(won.items(), ("-", "--", ":"), strict=True):
    ax.loglog(epsilon, line, shade, color=COLORS["exlm"], label=name)
ax.legend(loc="lower right")
_ = ax.set(xlabel="difference between clones, ε", ylabel="bits won")

# %% [markdown]
# **How this meets the noise.** By {eq}`eq-saddle` the slope towards $c$ is about
# $(1 - \ell^2)\,ab$: tiny near the symmetric point and under a lead, while the
# noise of a batch does not care how alike the clones are. We measure both on the
# plateau of the live run: the exact gradient over all sentences is the signal; the
# spread of the gradients of single sentences, divided by the root of the batch
# size, is the noise.


# %%
def gradient_of(model, rows):
    """The gradient of all parameters, as one vector."""
    model.zero_grad()
    score(model, MaskedBatch(*(t[rows] for t in batch))).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


signal = gradient_of(plateau, slice(None))
spread = torch.stack(
    [
        (gradient_of(plateau, slice(b, b + 1)) - signal).square().sum()
        for b in range(0, B, 3)
    ]
)
noise = {size: (spread.mean() / size).sqrt() for size in (64, 512)}
ratio = {size: (signal.norm() / noise[size]).item() for size in noise}
assert ratio[64] < 1
assert math.isclose(ratio[512] / ratio[64], math.sqrt(8), rel_tol=1e-5)

# %% [markdown]
# At batch 64 the noise is larger than the signal. At batch 512 the ratio is better
# by $\sqrt 8 \approx 2.8$, for eight times the sentences.
#
# **Takeaway.** Without help there are two ways to be stuck, and one formula for
# both: the clones are alike ($abc \approx 0$), or one route has the lead ($\ell^2
# \approx 1$). The pull out of it is a product of small numbers, and a small batch
# drowns it.

# %% [markdown]
# ## Two helps, and the floor is passed
#
# **Question.** Which of the factors can we give the model at the start? The recipe
# `toy-pairs` gives it all of them. Both helps are ours; the paper does not have
# them.
#
# *Chains.* For the first quarter of the steps $\mathbf{E}$ is replaced by $k$ fixed
# parallel chains: clone $j$ hands over to clone $j$ of the next mask. Then the
# learned $\mathbf{E}$ fades in over as many steps. In {eq}`eq-saddle` this is $c =
# 1$ and $\ell = 0$, and neither can get lost. While the chains stand alone,
# $\mathbf{E}$ has no part in the loss and would fade in as it was drawn. So it is
# taught: the gradient of the chains, how often a path is expected to take each
# edge, goes to $\log \mathbf{E}$ instead. From these counts the M-step of EM would
# estimate $\mathbf{E}$.
#
# *Clone embedding.* A learned vector per clone index is added to the states. So $a$
# and $b$ are not small at the start.

# %%
RECIPE = "--recipe toy-pairs --objective exlm"
OFTEN = "--train.validate_every 20 --train.validation_rows 512"  # for a finer curve
recipe = parse(f"{RECIPE} {OFTEN}".split()).config
with torch.no_grad():
    chains_LL = parallel_chains(state_BLD, graph)[0].exp().cpu()
share = {step: chain_share(recipe, step) for step in (0, 100, 150, 200, 399)}
print("share of the chains:", share)
chains_LL

# %% [markdown]
# **Check.** With the chains in place the model is an average of $k$ independent
# ones: $P$ is $\frac1k \sum_j \prod_i P_{i,j}(y_i)$ if $P_{i,j}$ is what clone $j$
# of mask $i$ emits. (Boundaries aside, whose end is fixed in the last clone.)

# %%
with torch.no_grad():
    scores = model(*batch, chain_share=1.0)
log_p_B = log_likelihood(scores, with_boundaries=False)
first, second = (
    scores.log_emission_BML[:, 1, 2:4],
    scores.log_emission_BML[:, 2, 4:6],
)
log_mixture_B = (first + second).logsumexp(dim=1) - math.log(k)
torch.testing.assert_close(log_p_B, log_mixture_B, rtol=1e-4, atol=1e-4)

# %% [markdown]
# **Check.** How much do the two clones of a mask differ before training, as a share
# of their length?


# %%
def clone_distance(config):
    """|h_1 - h_2| / |h_1| for the two states of the first mask, untrained."""
    untrained = make_model(config, corpus.train.vocab_size, special_ids).eval()
    with torch.no_grad():
        found = untrained.states(*untrained.encode(*(t.cpu() for t in batch)))
    return (
        ((found[:, 2] - found[:, 3]).norm(dim=1) / found[:, 2].norm(dim=1))
        .mean()
        .item()
    )


bare = parse(f"{RECIPE} {HELPLESS}".split()).config
distance_bare, distance_helped = clone_distance(bare), clone_distance(recipe)
assert distance_bare < 0.25 < 0.75 < distance_helped
print(f"paper's start {distance_bare:.1f}, clone embedding {distance_helped:.1f}")

# %% [markdown]
# Now the run itself: `python -m exlm_mini.pretrain --recipe toy-pairs --objective
# exlm`, batch 128, 400 steps.

# %%
helped = train_live(recipe, scale)
curve_helped = helped.bits_per_row()
passed = first_step_below(curve_helped, 0.95 * floor_bits)
assert passed <= 100  # while the chains stand
assert curve_helped[400] < joint_bits + 0.02

# %% [markdown]
# **Figure.** {numref}`fig-helped` sets it beside the recorded runs of the same
# model without the helps, at batch 64 and 512. Under the chains the floor is passed
# in the first quarter, and the joint entropy holds when the learned $\mathbf{E}$
# takes over.

# %% mystnb={"figure": {"caption": "With both helps, live (red), and without, recorded (grey). The chains stand alone up to the first dotted line and are gone from the second.", "name": "fig-helped"}} tags=["hide-input"]
fig, ax = plt.subplots()
draw_curves(ax, {"exlm": curve_helped}, levels)
for run, style in ((usual_64[1], "o--"), (usual_512[1], "s:")):
    ends = {step: bits for step, bits in run.items() if step <= 400}
    ax.plot(list(ends), list(ends.values()), style, ms=4, color="0.5")
for step in (100, 200):
    ax.axvline(step, color="0.3", ls=":", lw=1.5)
lines = ["with both helps, live", "without, batch 64", "without, batch 512"]
ax.legend(ax.lines[:1] + ax.lines[3:5], lines, loc="center right")
_ = ax.set(xlim=(0, 410), ylim=(0.9, 2.6))

# %% [markdown]
# One run is an anecdote. The recorded runs have more seeds; each ended either at
# the joint entropy or at the floor.

# %%
first_runs = json.loads(Path("../book/results/first-runs.json").read_text())


def arrived(chains, clone):
    """How many of the recorded seeds reached the joint entropy, and of how many."""
    wanted = dataclasses.replace(recipe.model, clone_embedding_std=clone)
    # Settings that are younger than a record have their defaults.
    alike = [r for r in first_runs if ModelConfig(**r["config"]["model"]) == wanted]
    alike = [r for r in alike if "exlm" in r["validation"]]
    runs = recorded(alike, grammar="pairs", chain_warmup=chains)
    ends = [list(run.values())[-1] for run in runs.values()]
    return sum(bits < joint_bits + 0.05 for bits in ends), len(ends)


for name, chains, clone in (
    ("neither", 0.0, 0.0),
    ("clone embedding", 0.0, 1.0),
    ("chains", 0.25, 0.0),
    ("both", 0.25, 1.0),
):
    num_arrived, num_tried = arrived(chains, clone)
    print(f"{name:16} {num_arrived} of {num_tried} at the joint entropy")
assert arrived(0.25, 1.0) == (12, 12) and arrived(0.0, 0.0) == (0, 6)

# %% [markdown]
# **Figure.** {numref}`fig-learned` is the $\mathbf{E}$ of the live run, learned
# after the chains were gone: two routes, one per mood, and no edge between them.

# %% mystnb={"figure": {"caption": "The transition matrix of one sentence after training.", "name": "fig-learned"}} tags=["hide-input"]
trained = helped.model
with torch.no_grad():
    learned_LL = trained(*batch).log_transition_BLL[0].exp().cpu().numpy()
show_transition(learned_LL, graph.owner_BL[0].tolist(), labels)

# %%
choice_2, told_2 = choice_and_told(trained)
assert min(told_2) > 0.9
sorted(best_paths(trained).items())

# %% [markdown]
# **Takeaway.** Give the gain a lower order at the start, and ExLM passes the floor
# of MLM within a hundred steps and wins the whole bit. Whether ExLM at the scale of
# the paper needs such help is not known here; {ref}`reproduction` has what we
# measured.

# %% [markdown]
# ## One mask, two states: what a sparse graph cannot say
#
# **Question.** Appendix Q.3 of the paper removes the edges between clones of one
# mask, and calls the result the sparse DAG. Its scores on GLUE tasks fall a little
# (Table 13: 81.4 on average for ExLM, 81.0 for sparse, 80.4 without any edges). The
# paper's reason: in "*This is [MASK], and I'm very [MASK] to see this*" the first
# mask could stand for two words, "*so good*", and a path needs two states of one
# mask to say so. Can we watch that happen?
#
# One of our models did it. These are the best paths of the live run on its plateau,
# with the number of states that each mask lends to the two words:

# %%
on_plateau = best_paths(plateau)
for path in sorted(on_plateau):
    states = path.split()[1:-1]
    lent = {mask: sum(s.startswith(mask) for s in states) for mask in ("1", "2")}
    print(f"{path}: mask 1 lends {lent['1']}, mask 2 lends {lent['2']}")

# %% [markdown]
# In one of the moods the second mask takes both words; in the other it takes the
# first word and a clone of [EOS] the second. The first mask is passed over. Now a
# sentence where that has a meaning to the eye: "this is [MASK] [MASK] for us", as a
# graph by hand. Each state knows one word.

# %%
WORDS = ["", "very", "good", "news", "food", ""]
labels_6 = ["BOS", "1.1", "1.2", "2.1", "2.2", "EOS"]
owner_L = torch.tensor([0, 1, 1, 2, 2, 3])
dense_LL = torch.zeros(6, 6, dtype=torch.float64)
dense_LL[0, 1], dense_LL[0, 2] = 0.5, 0.5  # "very" or "good" comes first
dense_LL[1, 2] = 1.0  # "very" leads to "good": both are states of mask 1
dense_LL[2, 3], dense_LL[2, 4], dense_LL[2, 5] = 0.4, 0.2, 0.4  # news, food, end
dense_LL[3, 5] = dense_LL[4, 5] = 1.0
is_across_LL = owner_L.unsqueeze(1) < owner_L.unsqueeze(0)
sparse_LL = dense_LL * is_across_LL  # the edge from "very" to "good" is gone


# %%
def graph_scores(filling, transition_LL):
    """The arguments of the alignment for one filling, boundaries not scored."""
    targets = ["", *filling.split(), ""]
    is_spelled_ML = torch.tensor([[word == y for word in WORDS] for y in targets])
    log_emission_1ML = is_spelled_ML.double().log().unsqueeze(0)
    num_targets_1, num_states_1 = torch.tensor([len(targets)]), torch.tensor([6])
    return log_emission_1ML, transition_LL.log()[None], num_targets_1, num_states_1


def probability(filling, transition_LL):
    """Sum over all paths that spell the filling."""
    return dag_log_likelihood(*graph_scores(filling, transition_LL)).exp().item()


said = [" ".join(c) for n in (1, 2, 3, 4) for c in combinations(WORDS[1:5], n)]
dense = {filling: probability(filling, dense_LL) for filling in said}
sparse = {filling: probability(filling, sparse_LL) for filling in said}
{
    filling: (round(p, 2), round(sparse[filling], 2))
    for filling, p in dense.items()
    if p
}

# %% [markdown]
# The left number is the dense graph's, the right one the sparse graph's.
#
# **Check.** The dense graph speaks in one, two or three words, all of them
# sensible: "this is very good news for us". In the sparse graph "very" is a dead
# end, and every filling that contains it has probability 0. The best path shows who
# says what.

# %%
assert math.isclose(sum(dense.values()), 1)  # all lengths together
assert math.isclose(dense["very good news"], 0.5 * 1.0 * 0.4)
assert all(sparse[filling] == 0 for filling in said if "very" in filling)
assert math.isclose(sparse["good news"], dense["good news"])
for filling in ("very good", "good news", "very good news"):
    path_1M, _ = viterbi(*graph_scores(filling, dense_LL))
    print(f"{filling:15}", " -> ".join(labels_6[u] for u in path_1M[0].tolist()))
assert viterbi(*graph_scores("very good", sparse_LL))[0].eq(-1).all()  # no path

# %% [markdown]
# **Figure.** {numref}`fig-two-states` shows the graph, and for each filling how
# many of its words each mask supplies: the posterior of the states, added up per
# mask. In "very good" the first mask takes two path states and the second none.

# %% mystnb={"figure": {"caption": "Left: the dense graph; the sparse one lacks the edge from very to good. Right: words supplied by each mask, for every filling the dense graph can say.", "name": "fig-two-states"}} tags=["hide-input"]
fillings = [filling for filling in said if dense[filling] > 0]
supplied = np.array(
    [
        [
            posteriors(*graph_scores(filling, dense_LL))
            .state_BML[0, 1:-1][:, owner_L == mask]
            .sum()
            for mask in (1, 2)
        ]
        for filling in fillings
    ]
)
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 2))
names = [
    f"{label}\n{word}".strip() for label, word in zip(labels_6, WORDS, strict=True)
]
kinds = ["boundary", *["mask"] * 4, "boundary"]
draw_dag(left, dense_LL.numpy(), owner_L.tolist(), names, kinds)
draw_heatmap(right, supplied, ["mask 1", "mask 2"], fillings, "words", ".0f")
right.collections[0].colorbar.set_ticks([0, 1, 2])

# %%
assert supplied[fillings.index("very good")].tolist() == [2, 0]
assert supplied[fillings.index("good news")].tolist() == [1, 1]

# %% [markdown]
# **How much smaller is the sparse graph?** For $m$ masks with $k$ states each, a
# path that says $n$ words chooses $n$ states in order. In the dense graph that is
# any $n$ of the $mk$ states; in the sparse one it is $n$ of the masks and one state
# of each:
#
# $$
# \text{dense:}\ \binom{mk}{n},\qquad \text{sparse:}\ \binom{m}{n}\,k^n .
# $$ (eq-sparse-paths)


# %%
def count_paths(m, k, n):
    """Paths that say n words: all of them, and those with one state per mask."""
    owner = [0, *(1 + i // k for i in range(m * k)), m + 1]
    dense = list(paths(n + 2, m * k + 2))
    sparse = [p for p in dense if len({owner[u] for u in p}) == n + 2]
    return len(dense), len(sparse)


for m, k, n in [(2, 2, 1), (2, 2, 2), (3, 2, 3), (3, 3, 2), (4, 2, 4)]:
    assert count_paths(m, k, n) == (math.comb(m * k, n), math.comb(m, n) * k**n)
assert count_paths(2, 2, 3)[1] == 0  # three words from two masks: dense only
count_paths(3, 2, 3), count_paths(4, 2, 4)

# %% [markdown]
# **What training makes of it.** In pre-training the targets are the hidden tokens,
# one per mask, so $n = m$ always, and the three words above are never asked for. By
# counting, a path that takes two states of one mask must then leave another mask
# out. A sparse graph has exactly one kind of path left: one state per mask, target
# $i$ from mask $i$. So what Q.3 switches off in training is the *shift*: a mask
# that emits its neighbour's word as well as its own.

# %%
m, k = 3, 2
owner = [0, *(1 + i // k for i in range(m * k)), m + 1]
for path in paths(m + 2, m * k + 2):
    visits = [sum(owner[u] == mask for u in path) for mask in range(1, m + 1)]
    assert visits == [1] * m or (max(visits) > 1 and min(visits) == 0)

# %% [markdown]
# **Takeaway.** Edges inside a mask let one mask say two words, and another none.
# The longer outputs of Q.3 are in the graph and can be read off it. The training
# objective never asks for them, since it counts one word per mask: there the edges
# inside a mask only matter for shifts like those of our live run.

# %% [markdown]
# ## Summary
#
# - The graph is acyclic because edges only go forward. $\mathbf{E}$ says how likely
# each edge is: one softmax in the paper, several mixed by a gate in the released
# code.
# - Ids, expansion, encoder, states, $\mathbf{E}$ and emission, a sum over all
# paths: the whole model is five steps, and each can be checked by hand on a small
# case.
# - From the paper's start training stalls at the floor of MLM on this language. One
# formula has both reasons: the gain is the product of three differences between
# clones, and it is switched off when one route takes all paths. Noise decides how
# long the stall lasts, the start decides whether it ends.
# - Fixed chains that fade out and a clone embedding raise the first gain from third
# order to first. Then ExLM passes the floor within a hundred steps.
# - Edges inside a mask let one mask take two states and another none. Sparse graphs
# forbid it.
#
# ## Exercises
#
# **1. The paper's own sentence.** "This is [MASK], and I'm very [MASK] to see
# this." Write a dense graph with the states *so*, *good*, *happy*, *glad* in which
# "so good ... happy" has probability 0.3. What does it become in the sparse graph?

# %% tags=["hide-cell"]
WORDS = ["", "so", "good", "happy", "glad", ""]
own_LL = torch.zeros(6, 6, dtype=torch.float64)
own_LL[0, 1] = own_LL[0, 2] = 0.5
own_LL[1, 2] = 1.0
own_LL[2, 3], own_LL[2, 4] = 0.6, 0.4
own_LL[3, 5] = own_LL[4, 5] = 1.0
assert math.isclose(probability("so good happy", own_LL), 0.3)
assert probability("so good happy", own_LL * is_across_LL) == 0
assert math.isclose(probability("good happy", own_LL * is_across_LL), 0.3)

# %% [markdown]
# **2. How long is the stall?** Let all three differences of the four-number model
# grow along the gradient, from $\varepsilon_0$ = 0.1, 0.05 and 0.025, without
# noise. Predict first: what does halving $\varepsilon_0$ do to the time until half
# a bit is won, and what if $c = 1$ is given?


# %% tags=["hide-cell"]
def time_to_half_a_bit(start, order, pace=1e-3):
    """Follow d eps / dt = slope of log2(1 + eps^order) towards one difference."""
    eps, time = start, 0.0
    while math.log2(1 + eps**order) < 0.5:
        eps += pace * eps ** (order - 1) / (1 + eps**order) / math.log(2)
        time += pace
    return time


third = [time_to_half_a_bit(start, 3) for start in (0.1, 0.05, 0.025)]
second = [time_to_half_a_bit(start, 2) for start in (0.1, 0.05, 0.025)]
# Third order: the time doubles, since d eps / dt = eps^2 means time 1 / eps_0.
assert 1.8 < third[1] / third[0] < 2.2 and 1.8 < third[2] / third[1] < 2.2
# Second order: each halving costs the same extra time, ln 2 times ln 2.
steps = second[1] - second[0], second[2] - second[1]
assert math.isclose(steps[0], steps[1], rel_tol=0.05)
assert math.isclose(steps[0], math.log(2) ** 2, rel_tol=0.05)

# %% [markdown]
# **3. Paths at the size of the paper.** Appendix I.4 counts with 77 masks of $k =
# 4$ states in a row. How many digits has the number of dense paths with one word
# per mask, and how many the number of sparse ones? Guess the difference before you
# compute it.

# %% tags=["hide-cell"]
num_dense, num_sparse = math.comb(77 * 4, 77), 4**77
assert len(str(num_dense)) == 74 and len(str(num_sparse)) == 47
assert num_sparse == math.comb(77, 77) * 4**77  # the formula with n = m

# %% [markdown]
# **4. What is left of 15.** The small language has 15 paths in the dense graph with
# two clones each of [BOS], two masks and [EOS]. How many keep all their edges in
# the sparse graph? And is the path of the live run on its plateau one of them?

# %% tags=["hide-cell"]
is_sparse_edge_LL = edges(graph, sparse=True)[0]
kept = [
    p for p in every_path if all(is_sparse_edge_LL[v, u] for v, u in pairwise(p))
]
assert len(kept) == k**2 == 4
assert not {" ".join(labels[u] for u in path) for path in kept} & set(on_plateau)
