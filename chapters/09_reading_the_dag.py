# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-reading)=
# # Reading the DAG
#
# A trained ExLM does not only fill in words. Its states, and the edges between
# them, say which words it considers, which of them go together, and how sure it
# is. In this chapter you train a model on a small language whose true
# distribution is known, and then read it: you fill masks, compare the best path
# with the best words, check joint probabilities against the truth, redraw the
# case study of the paper (Figures 7, 10 and 11), put one of its findings to a
# test, and explore the graph by hand in the page.
#
# Afterwards you can say what a state of ExLM has learned, what the best path
# promises and what it does not, and why a later mask can look less uncertain.
#
# Needs: about a minute on a CPU, no GPU. Covers §5.3 (case study) and Appendix P
# of {cite}`zheng2025exlm`; the recursion behind it is that of Appendices H and I.

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
import json
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from exlm_mini.alignment import dag_log_likelihood, viterbi
from exlm_mini.alignment.enumeration import path_score, paths
from exlm_mini.config.options import parse
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.toy import Grammar, Position
from exlm_mini.data.toy_grammars import GRAMMARS, grammar
from exlm_mini.plotting import (
    draw_dag,
    draw_heatmap,
    draw_transition,
    use_book_style,
)
from exlm_mini.reading.decoding import Reading, read_states, top_tokens
from exlm_mini.reading.entropy import entropy_bits, path_entropy
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import conditionals, read_scene, scene_from_json
from exlm_mini.training.evaluation import row_bits
from exlm_mini.training.live import LiveRun, chapter_scale, train_live

use_book_style()
scale = chapter_scale()
str(scale)

# %% [markdown]
# ## A model worth reading
#
# **Question.** Which model shows most clearly what states are for? The paper
# reads "This is [MASK], and I'm very [MASK] to see this." with four states per
# mask. Our language `quartets` has a sentence of the same kind: *the old baker
# felt* [MASK] *this morning so his sister* [MASK]. A hidden mood, one of four,
# chooses both words, each out of three; nothing else in the sentence tells the
# mood. We give every mask $k = 4$ states and, as Appendix P does, one [BOS] and
# one [EOS] node. The two settings that help ExLM off the ground are those of the
# recipe ({ref}`chap-training` shows why they are needed).


# %%
def train(objective: str, *options: str) -> LiveRun:
    recipe = ["--recipe", "toy-pairs", "--objective", objective]
    return train_live(parse([*recipe, *options]).config, scale)


QUARTETS = ["--data.grammar", "quartets"]
GRAPH = ["--model.states_per_mask", "4", "--model.boundary", "paper"]
steps = ["--train.steps", str(scale.pick(300, 800))]
exlm = train("exlm", *QUARTETS, *GRAPH, *steps)
mlm = train(
    "mlm", *QUARTETS, "--train.steps", "150", "--train.validate_every", "50"
)

# %% [markdown]
# **Check.** The language says how good a model can be. Predicting the two words
# independently costs at least the sum of their marginal entropies; together they
# carry $\log_2 36$ bits, because 4 moods × 3 × 3 words are equally likely. The
# masked language model (MLM) stops at the first number, ExLM is close to the
# second.

# %%
language = grammar("quartets")
is_masked = language.mask()
floor = language.marginal_entropy_bits(is_masked)
joint_bits = language.joint_entropy_bits(is_masked)
bits = {"mlm": mlm.bits_per_row(), "exlm": exlm.bits_per_row()}
last = {name: curve[max(curve)] for name, curve in bits.items()}
assert floor - 0.02 < last["mlm"] < floor + 0.1, last
assert joint_bits - 0.02 < last["exlm"] < joint_bits + 0.15, last
assert math.isclose(joint_bits, math.log2(36))
f"floor of MLM {floor:.2f} bits, joint entropy {joint_bits:.2f} bits"

# %% [markdown]
# **Takeaway.** Two bits, the hidden mood, separate the two models. The rest of
# the chapter shows where in the graph these two bits are.
#
# ## Filling the masks
#
# **Question.** What does the model put in the masks? `read_states` runs the model
# once on the row and returns a *reading*: the states with their distributions
# over the vocabulary, the transition matrix, the best path, and the words on it.
# The best path $\mathbf{a}$ visits one state per mask, between [BOS] and [EOS],
# and maximises its transitions $E$ and the likeliest word of each state it
# visits:
#
# $$
# P(\mathbf{a}) = \prod_{i > 0} E_{a_{i-1}, a_i} \;
# \prod_{\text{masks } i} \max_w P_{a_i}(w)
# $$ (eq-best-path)

# %%
TEXT = "the old baker felt [MASK] this morning so his sister [MASK]"
tokenizer = exlm.tokenizer
special = tokenizer.special_ids
row = [special.bos, *tokenizer.encode_with_masks(TEXT), special.eos]
masked_ids_BN = torch.tensor([row], device=scale.device)
reading = read_states(exlm.model, masked_ids_BN)
graph, states = reading.graph, reading.states
print("states:", " ".join(states.labels))
f"best path: {len(graph.path_M)} states of {len(states.labels)}"

# %% [markdown]
# **Check.** All 36 good answers are equally good, so which of them comes out is
# decided by the last digits of the model and may differ on your machine. What
# must not differ: the two words share a mood, and their joint probability is
# about 1/36, that is 5.17 bits.

# %%
sentence = language.sample(1, seed=0)[0]
exact = language.joint(sentence, is_masked)
allowed = {tuple(language.words[w] for w in pair) for pair in exact.word_ids_CM}
filled = tuple(tokenizer.token(i) for i in reading.token_ids_S.tolist())
assert len(allowed) == 36 and filled in allowed, filled
assert abs(-reading.log_joint / math.log(2) - joint_bits) < 0.5

# What MLM fills in, word by word, has no reason to share a mood.
by_itself_SV = language.marginals(sentence, is_masked)
assert (by_itself_SV > 0).sum(axis=1).tolist() == [12, 12]
assert np.allclose(by_itself_SV[by_itself_SV > 0], 1 / 12)
f"{len(allowed)} of {12 * 12} word pairs are possible"

# %% [markdown]
# **Takeaway.** A perfect MLM gives each of the 12 words of either mask 1/12 and
# picks a pair that exists with probability 36/144. The path picks two words that
# belong together.
#
# ## The best path and the best words
#
# **Question.** Are the words of the best path the most probable words? Not
# necessarily. The probability of some words is a sum over *all* paths that spell
# them (the dynamic programme of §4.3), and several middling paths can beat one
# good one. The smallest example has one mask and three states: one says *glad*,
# two say *sorry*.

# %%
first_step = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
log_E_LL = torch.full((5, 5), -torch.inf, dtype=torch.float64)
log_E_LL[0, 1:4] = first_step.log()  # [BOS] leads to the three states,
log_E_LL[1:4, 4] = 0.0  # each of them to [EOS]
words = ["glad", "sorry"]
says = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 1], [1, 1]])
log_says_LW = says.double().log()
graph_of_three = log_E_LL[None], torch.tensor([3]), torch.tensor([5])

log_best_BML = log_says_LW.max(dim=1).values.expand(1, 3, 5)
path_BM, log_path_B = viterbi(log_best_BML, *graph_of_three)
on_path = words[log_says_LW[path_BM[0, 1]].argmax()]
total = {}
for w, word in enumerate(words):
    log_emission_BML = torch.zeros(1, 3, 5, dtype=torch.float64)
    log_emission_BML[0, 1] = log_says_LW[:, w]
    log_p_B = dag_log_likelihood(log_emission_BML, *graph_of_three)
    total[word] = round(log_p_B.exp().item(), 6)
print(f"best path says {on_path}, probability {log_path_B.exp().item():.1f}")
total

# %% [markdown]
# **Check.** The best path says *glad*, with 0.4. The best word is *sorry*, with
# 0.6 by two paths. Finding the best words of many masks is a hard search, so
# `read_states` fills in those of the best path and reports their joint
# probability, the sum over all paths, beside the probability of the path. In our
# trained model the two nearly agree: each pair of words has one path.

# %%
assert on_path == "glad" and max(total, key=total.get) == "sorry"
assert graph.log_path <= reading.log_joint + 1e-5  # float32
share = math.exp(graph.log_path - reading.log_joint)
assert share > 0.97, share

# %% [markdown]
# **Takeaway.** The best path is a lower bound and a convenient guess. The more
# the states specialise, the closer it is to the sum.
#
# ## Joint probabilities
#
# **Question.** Does the graph know all 144 word pairs, possible and impossible?
# We put each pair into the row and ask for $P(\text{pair} \mid \text{context})$,
# by the function that validation uses and by the judge: in float64, every path
# of the graph scored by itself and added up. Two masks with four states each
# leave $\binom{8}{2} = 28$ paths.

# %%
slots = [language.positions[n].choices for n in language.slots]
MOODS = language.latents["mood"]
words_of = [[w for z in MOODS for w in slot[(z,)].split()] for slot in slots]
ids_of = [[tokenizer.encode(w)[0] for w in words] for words in words_of]
pairs = torch.tensor(list(itertools.product(*ids_of)), device=scale.device)

filled_BN = masked_ids_BN.repeat(len(pairs), 1)
is_masked_BN = filled_BN == special.mask
filled_BN[is_masked_BN] = pairs.flatten()
batch = MaskedBatch(masked_ids_BN.expand_as(filled_BN), is_masked_BN, filled_BN)
bits_of = [row_bits(run.model, batch).double().cpu() for run in (exlm, mlm)]
P_exlm, P_mlm = (torch.exp2(-b).view(12, 12) for b in bits_of)

# %% [markdown]
# **Check.** The sum over paths agrees with enumeration to float32, ExLM's
# probabilities with the exact ones of the language to a fraction of 1/36, and the
# pairs that do not exist get almost nothing. MLM gives three quarters of its
# probability to them.

# %%
log_E_LL = graph.log_transition_LL.double()
log_token_LV = states.log_token_LV.double()
all_paths = list(paths(4, len(log_E_LL)))
assert len(all_paths) == math.comb(8, 2) == 28
by_hand = []
for pair in pairs.tolist():
    log_emission_ML = torch.zeros(4, len(log_E_LL), dtype=torch.float64)
    log_emission_ML[1:3] = log_token_LV[:, pair].T
    scores = [path_score(log_emission_ML, log_E_LL, path) for path in all_paths]
    by_hand.append(torch.stack(scores).exp().sum())
torch.testing.assert_close(
    P_exlm.flatten(), torch.stack(by_hand), rtol=1e-3, atol=1e-7
)

# %%
P_exact = torch.zeros(12, 12, dtype=torch.float64)
for pair, p in zip(exact.word_ids_CM, exact.probability_C, strict=True):
    i, j = (words_of[m].index(language.words[w]) for m, w in enumerate(pair))
    P_exact[i, j] = p
is_possible = P_exact > 0
assert (P_exlm - P_exact).abs().max() < 0.012  # of 1/36 = 0.028
assert P_exlm[~is_possible].sum() < 0.05
assert 0.7 < P_mlm[~is_possible].sum() < 0.76

# %% [markdown]
# **Figure.** The same numbers, summed over the three words of each mood. The
# language allows the diagonal only. MLM spreads over all sixteen fields; ExLM
# has the diagonal.

# %% mystnb={"figure": {"caption": "Joint probability of the two masked words, summed over the words of each mood: the language, MLM, and ExLM.", "name": "fig-reading-joint"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 3, figsize=(8.6, 2.7), sharey=True)
tables = {"the language": P_exact, "MLM": P_mlm, "ExLM, k = 4": P_exlm}
for ax, (title, P) in zip(axes, tables.items(), strict=True):
    blocks = P.view(4, 3, 4, 3).sum(dim=(1, 3)).numpy()
    label = "probability" if ax is axes[-1] else ""
    draw_heatmap(ax, blocks, MOODS, MOODS, label, cmap="Blues", limits=(0, 0.25))
    ax.tick_params(labelsize=8)
    _ = ax.set(title=title, xlabel="mood of the second word")
_ = axes[0].set(ylabel="mood of the first word")

# %% [markdown]
# **Takeaway.** ExLM's answer to two masks is a distribution over pairs, and here
# it is the right one. That is what "capturing dependencies" means in numbers.
#
# ## The case study: who says what, and who follows whom
#
# **Question.** How does the graph hold the four moods? Appendix P reports two
# things for its sentence: each state of a mask represents a different choice, and
# the transition matrix links choices that fit each other.
#
# **Check.** For every state we add up the probability of the words of each mood.
# Each state belongs to one mood, the four states of a mask share the four moods
# among them, and a state leads to the state of its own mood. Which clone takes
# which mood is an accident of the start.

# %%
token_LV, E_LL = log_token_LV.exp(), log_E_LL.exp()
mood_LZ = torch.zeros(len(E_LL), 4, dtype=torch.float64)
for owner, ids in enumerate(ids_of, start=1):
    own_L = states.owner_L == owner
    mood_LZ[own_L] = token_LV[own_L][:, ids].view(-1, 4, 3).sum(dim=2)
purity_L, mood_L = mood_LZ.max(dim=1)
of_first, of_second = ((states.owner_L == i).nonzero()[:, 0] for i in (1, 2))
assert purity_L[of_first].min() > 0.95 and purity_L[of_second].min() > 0.95
for of_mask in (of_first, of_second):
    assert sorted(mood_L[of_mask].tolist()) == [0, 1, 2, 3]
for v in of_first:
    (u,) = of_second[mood_L[of_second] == mood_L[v]]
    assert E_LL[v, u] > 0.95, (v, u)
assert (E_LL[0, of_first] - 0.25).abs().max() < 0.06  # equally likely moods

# %% [markdown]
# **Figure.** The transition matrix, as Figure 10 draws it: each state is named by
# its three likeliest words, yellow for the first mask and brown for the second.
# [BOS] opens all four moods alike; every yellow row then has a single dark field,
# below the brown words of its own mood. Nothing leads from one state of a mask to
# another state of the same mask, though the graph would allow it.

# %%
top_LC = top_tokens(states.log_token_LV, 3, special)[0]
labels = list(states.labels)
names = [" ".join(tokenizer.token(w) for w in top) for top in top_LC.tolist()]
names = [
    n.replace(" ", "\n") if "." in u else u
    for u, n in zip(labels, names, strict=True)
]
kinds = [["boundary", "mask", "second", "boundary"][o] for o in states.owner_L]
inside = E_LL[of_first][:, of_first].max()
assert inside < 0.02, inside

# %% mystnb={"figure": {"caption": "Transition matrix and the three likeliest words of each state (the analogue of Figures 7 and 10).", "name": "fig-reading-matrix"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(8, 6))
draw_transition(ax, E_LL.numpy(), names, kinds)

# %% [markdown]
# **Figure.** The same graph as paths, as in Figure 11. Follow a line from left to
# right: each of the four ways through the graph tells a story of one mood.

# %% mystnb={"figure": {"caption": "The graph of the sentence; the width of an edge is its probability (the analogue of Figure 11).", "name": "fig-reading-dag"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(7.4, 3.8))
draw_dag(ax, E_LL.numpy(), states.owner_L.tolist(), names, kinds)

# %% [markdown]
# **Takeaway.** The first two findings of Appendix P hold here: states are moods,
# edges keep the mood. The two bits that MLM cannot express sit in the choice among
# the four edges that leave [BOS], made once for both words.
#
# ## Are later masks less uncertain?
#
# **Question.** The third finding of Appendix P: the states of the first mask have
# evenly spread words, while those of the second put most probability on one; the
# paper says this comes from the direction of the graph. "Less uncertain" can mean
# two things, so we measure both, in bits:
#
# * the entropy $H[P_u]$ of what a state says, averaged over the states of a mask,
#   plainly or weighted by how likely a path passes through each;
# * the entropy of the choice of the next state, given where the path stands.
#
# `path_entropy` computes the weighted ones, by the forward and backward recursions.


# %%
def uncertainty(reading: Reading) -> dict[str, list[float]]:
    """Bits per mask: what its states say, and the step that leads to it."""
    owner_L = reading.states.owner_L
    says_L = entropy_bits(reading.states.log_token_LV.double())
    own = [says_L[owner_L == i].mean().item() for i in range(1, int(owner_L[-1]))]
    weighted = path_entropy(reading)
    return {
        "states, plain mean": own,
        "states, weighted": weighted.word_S.tolist(),
        "choice of the state": weighted.step_S.tolist(),
    }


# %% [markdown]
# **Check.** Two masks are few enough to walk all 28 paths instead. A path has the
# probability of its edges; where it stands, it meets the entropy of a state or of
# a step.

# %%
says_L, step_L = entropy_bits(log_token_LV), entropy_bits(log_E_LL)
total, says_S, step_S = 0.0, torch.zeros(2), torch.zeros(2)
for path in all_paths:
    P_path = math.prod(E_LL[v, u] for v, u in itertools.pairwise(path))
    total += P_path
    says_S = says_S + P_path * says_L[list(path[1:-1])]
    step_S = step_S + P_path * step_L[list(path[:-2])]
found = path_entropy(reading)
torch.testing.assert_close(found.word_S, says_S / total)
torch.testing.assert_close(found.step_S, step_S / total)

# %% [markdown]
# One sentence may be an exception, so we take the mean of 30, which differ in their
# visible words.


# %%
def read_sentence(
    run: LiveRun, language: Grammar, word_ids_N: np.ndarray
) -> Reading:
    """Of a sentence with all slots of the language masked."""
    words = [language.words[w] for w in word_ids_N]
    for slot in language.slots:
        words[slot] = "[MASK]"
    token_ids = run.tokenizer.encode_with_masks(" ".join(words))
    ids = run.tokenizer.special_ids
    row = torch.tensor([ids.bos, *token_ids, ids.eos], device=scale.device)
    return read_states(run.model, row[None])


sentences = language.sample(30, seed=2)
per_sentence = [uncertainty(read_sentence(exlm, language, s)) for s in sentences]
mean = {
    name: np.mean([bits[name] for bits in per_sentence], axis=0)
    for name in per_sentence[0]
}

# %% [markdown]
# **Check.** In this language the states of the second mask are *not* sharper: both
# masks are near $\log_2 3 = 1.58$ bits, three equal words per mood. What differs is
# the choice of the state: two bits for the first mask, none for the second, since
# the mood is settled by then. This is the chain rule at work. The language itself
# has $H(x_1) = \log_2 12$ bits for the first word and $H(x_2 \mid x_1) = \log_2 3$
# for the second; read from right to left, it is the other way round.

# %%
three, twelve, four = math.log2(3), math.log2(12), math.log2(4)
for name in ("states, plain mean", "states, weighted"):
    assert np.abs(mean[name] - three).max() < 0.15, mean
    assert abs(mean[name][0] - mean[name][1]) < 0.04, mean
assert abs(mean["choice of the state"][0] - four) < 0.1, mean
assert mean["choice of the state"][1] < 0.15, mean


def conditional_bits(P: torch.Tensor) -> tuple[float, float]:
    """H(first), H(second | first) of a table of pairs."""
    P = P / P.sum()
    first_bits = entropy_bits(P.sum(dim=1).log()).item()
    return first_bits, entropy_bits(P.flatten().log()).item() - first_bits


exact_bits = conditional_bits(P_exact)
assert np.allclose(exact_bits, [twelve, three])  # reading from the left,
assert np.allclose(conditional_bits(P_exact.T), exact_bits)  # from the right
# The model's own pairs are as uncertain, in both directions.
for P in (P_exlm, P_exlm.T):
    assert np.abs(np.subtract(conditional_bits(P), exact_bits)).max() < 0.2
print("exact: H(x1) = {:.2f} bits, H(x2 | x1) = {:.2f} bits".format(*exact_bits))
for name, (at_first, at_second) in mean.items():
    print(f"{name:20} the masks differ by {abs(at_first - at_second):.1f} bits")

# %% [markdown]
# **A test that can tell.** So where would sharper later states come from, from the
# direction of the graph or from the language? Two small languages are mirror
# images of each other: a mood has four words in the wide slot and one in the
# narrow slot. In `wide-first` the wide slot comes first, in `wide-last` it comes
# second. If direction were the cause, later states would be sharper in both.

# %%
WIDE = {"merry": "merry happy cheerful glad", "grim": "sad gloomy tearful grim"}
NARROW = {"merry": "laughed", "grim": "wept"}


def mirror(name: str, *slots: dict[str, str]) -> Grammar:
    first, second = (
        Position({(mood,): words for mood, words in slot.items()}, ("mood",))
        for slot in slots
    )
    they, felt, and_ = (Position({(): word}) for word in ("they", "felt", "and"))
    sentence = (they, felt, first, and_, they, second)
    return Grammar(name, {"mood": tuple(WIDE)}, np.array([0.5, 0.5]), sentence)


GRAMMARS["wide-first"] = lambda: mirror("wide-first", WIDE, NARROW)
GRAMMARS["wide-last"] = lambda: mirror("wide-last", NARROW, WIDE)
says = {}
for name in ("wide-first", "wide-last"):
    options = ["--data.grammar", name, "--model.boundary", "paper"]
    run = train("exlm", *options, "--train.steps", "150")
    sample = grammar(name).sample(1, seed=0)[0]
    measured = uncertainty(read_sentence(run, grammar(name), sample))
    says[name] = measured["states, weighted"]

# %% [markdown]
# **Check.** The wide slot has two bits per state and the narrow one none, wherever
# they stand. In `wide-last` the states of the *later* mask are the uncertain ones,
# and the language agrees: one bit for the first word, two for the second given it.

# %%
for name, wide in (("wide-first", 0), ("wide-last", 1)):
    assert abs(says[name][wide] - math.log2(4)) < 0.25, says
    assert says[name][1 - wide] < 0.25, says

wide_last = grammar("wide-last")
both = wide_last.joint_entropy_bits(wide_last.mask())
second = wide_last.joint_entropy_bits(wide_last.mask(wide_last.slots[1:]))
assert np.allclose([both - second, second], [1, 2])  # H(x1), H(x2 | x1)

# %% mystnb={"figure": {"caption": "Entropy of what the states say, weighted by the paths, for three languages.", "name": "fig-reading-uncertainty"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 2.8))
bars = {"quartets": mean["states, weighted"]} | says
for mask, color in enumerate(("#f2b134", "#b5793a")):
    heights = [per_mask[mask] for per_mask in bars.values()]
    place = np.arange(3) + 0.4 * mask - 0.2
    ax.bar(
        place,
        heights,
        width=0.38,
        color=color,
        label=("first", "second")[mask] + " mask",
    )
_ = ax.set(
    ylabel="entropy per state (bits)", xticks=range(3), xticklabels=list(bars)
)
ax.grid(axis="x", visible=False)
_ = ax.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.22))

# %% [markdown]
# There is a reason. Given the context, states and words form a hidden Markov
# chain, and such a chain read backwards is again one, with the same words in each
# state. So the direction of the edges alone cannot make later states sharper.
#
# A larger language agrees. `town` has eleven masks and more readings than four
# states can hold. The run below was trained once, with the command it names, and
# `book/case_study.py` kept its weighted entropies, the mean over the sentences of
# `town.sample(40, seed=2)`. We compare them with the exact entropy of each masked
# word given the visible ones. They follow the word, not the place.

# %%
file = Path("../book/results/case-study.json")
record_of = {
    r["config"]["data"]["grammar"]: r for r in json.loads(file.read_text())
}
town = grammar("town")
marginal_SV = town.marginals(town.sample(1, seed=0)[0], town.mask())
word_bits = entropy_bits(torch.from_numpy(marginal_SV).log()).numpy()
state_bits = np.array(record_of["town"]["state_entropy_bits"])
with_word = np.corrcoef(state_bits, word_bits)[0, 1]
with_place = np.corrcoef(state_bits, np.arange(len(state_bits)))[0, 1]
assert record_of["town"]["num_sentences"] == 40
assert with_word > 0.8 and abs(with_place) < 0.5
print(record_of["town"]["command"].replace(" --", " \\\n    --"))
print(f"correlation with the entropy of the word: {with_word:.2f}")
f"correlation with the place in the sentence: {with_place:.2f}"

# %% [markdown]
# **Takeaway.** With the exact language at hand, the third finding splits in two.
# *Given the path so far*, a later mask is less uncertain than it would be by
# itself, because what it shares with earlier ones is already decided. That holds
# here; it is the chain rule, and it holds for any order of reading. *What the
# states say* is not sharper for later masks: it depends on how many words fit the
# place. In the paper's sentence "I'm very [MASK] to see this" may well have fewer
# good words than "This is [MASK]", so that one sentence cannot tell the two
# explanations apart. The mirror images can.
#
# ## Explore it yourself
#
# **Question.** What follows from choosing a word? Fix a word of one mask, and the
# distribution of the other masks follows, exactly:
#
# $$
# P(x_j = t \mid x_i = w) =
# \frac{\sum_{\mathbf{a}} P(\mathbf{a}, x_i = w, x_j = t)}
# {\sum_{\mathbf{a}} P(\mathbf{a}, x_i = w)}
# $$ (eq-conditional)
#
# with sums over all paths $\mathbf{a}$. The explorer computes this in the page, by
# the forward and backward recursions over the graph. Point at a state to see its
# words and where it leads. Click a word to fix it for its mask, or a state to
# demand that the path passes it; click again to release it. Ticks mark where the
# bars stood before.
#
# `read_scene` keeps what there is to see, `explorer` draws it. What you see below
# was recorded from a run of 400 steps, so that the page is the same everywhere;
# replace `recorded` by `scene` to see the model you have just trained.

# %%
scene = read_scene(reading, tokenizer, masked_ids_BN)
recorded = scene_from_json(record_of["quartets"]["scene"])
explorer(recorded)

# %% [markdown]
# **Check.** `conditionals` is the same computation in Python. It agrees with the
# table of pairs we have enumerated, and the model trained above with the recorded
# one, whose command is printed last.

# %%
for i, word in enumerate(words_of[0]):
    given_W = P_exlm[i] / P_exlm[i].sum()
    now = conditionals(scene, {1: word})
    place_2 = [scene.words.index(w) for w in words_of[1]]
    share_W = now.word_SW[1, place_2]
    np.testing.assert_allclose(share_W / share_W.sum(), given_W, atol=1e-3)
    then = conditionals(recorded, {1: word})
    place_2 = [recorded.words.index(w) for w in words_of[1]]
    assert np.abs(then.word_SW[1, place_2] - share_W).max() < 0.1, word
print(record_of["quartets"]["command"].replace(" --", " \\\n    --"))

# %% [markdown]
# **A file.** `save` writes one HTML file that needs no other and no network: open
# it in a browser, or send it to someone.

# %%
with tempfile.TemporaryDirectory() as folder:
    explorer(scene).save(Path(folder) / "explorer.html")
    page = (Path(folder) / "explorer.html").read_text(encoding="utf-8")
assert page.startswith("<!doctype html>") and "http" not in page

# %% [markdown]
# **Takeaway.** One click is worth two bits: fixing the first word leaves three of
# twelve words for the second. With MLM nothing would move.
#
# ## The same from the command line
#
# What this chapter did in Python, two commands do for any run, on text and
# molecules as well:
#
# ```console
# $ python -m exlm_mini.pretrain --recipe toy-pairs --objective exlm \
#     --data.grammar quartets --model.states_per_mask 4 --model.boundary paper \
#     --output runs/quartets
# $ python -m exlm_mini.fill --run runs/quartets --html explorer.html \
#     "the old baker felt [MASK] this morning so his sister [MASK]"
# ```
#
# The second prints the filled text, the best path and its probability, the joint
# probability by all paths, the likeliest words of each state, and the transition
# matrix; with `--json` everything in full. `--html` also writes the explorer, as
# `save` did above. The command reads with the functions used here:

# %%
from exlm_mini.fill import as_json
from exlm_mini.reading.trained import Trained, encode_row, read

run_of = Path("runs/quartets"), exlm.outcome.step, exlm.config, exlm.model
loaded = Trained(*run_of, tokenizer)
row_BN = encode_row(loaded, TEXT)
assert torch.equal(row_BN, masked_ids_BN.cpu())
again = read(loaded, row_BN.to(scale.device))
printed = as_json(loaded, TEXT, row_BN, again, top=3)
assert printed["path"] == [states.labels[u] for u in graph.path_M]
assert abs(printed["joint_bits"] + reading.log_joint / math.log(2)) < 1e-3
sorted(printed)

# %% [markdown]
# ## Summary
#
# * A reading holds states, transitions and the best path; the probability of some
#   words is a sum over all paths, of which the best one is a lower bound.
# * On `quartets` ExLM's joint probabilities are those of the language. Impossible
#   pairs get next to nothing, where MLM must give them three quarters.
# * States are moods and edges keep the mood: the first two findings of Appendix P.
# * The third holds for uncertainty *given the path*, by the chain rule. What states
#   say is as uncertain as the language makes it, first mask or last.
#
# ## Exercises
#
# Predict before you run.
#
# **1.** How many paths lead through $S$ masks with $k$ states each, with one [BOS]
# and one [EOS]? How many of them stay with one state per mask?

# %% tags=["hide-cell"]
for S, k in ((1, 4), (2, 4), (3, 2), (3, 3)):
    owner = [1 + u // k for u in range(k * S)]
    found = list(paths(S + 2, k * S + 2))
    assert len(found) == math.comb(k * S, S)  # any S states, in order
    one_each = [
        p for p in found if [owner[u - 1] for u in p[1:-1]] == list(range(1, S + 1))
    ]
    assert len(one_each) == k**S

# %% [markdown]
# **2.** Fix the *second* mask in the explorer, to *wept*. What do you expect of the
# first mask, although all edges lead forward?

# %% tags=["hide-cell"]
now = conditionals(recorded, {2: "wept"})
sad = [recorded.words.index(w) for w in slots[0][("sad",)].split()]
assert now.word_SW[0, sad].sum() > 0.95  # information flows both ways along a path
assert np.abs(now.word_SW[0, sad] - 1 / 3).max() < 0.05

# %% [markdown]
# **3.** Give the model two states per mask instead of four. What can each state
# stand for, and how many bits should it need? (Hint: which pairs can two parallel
# ways not tell apart?)

# %% tags=["hide-cell"]
two = ["--model.states_per_mask", "2", "--model.boundary", "paper"]
k2 = train(
    "exlm", *QUARTETS, *two, "--train.steps", "120", "--train.validate_every", "60"
)
# Two moods per state: one bit of the mood's two is won, 6 x 6 x 2 pairs are left.
(k2_bits,) = (value for step, value in k2.bits_per_row().items() if step == 120)
assert abs(k2_bits - math.log2(72)) < 0.4, k2_bits
k2_reading = read_states(k2.model, masked_ids_BN)
assert (
    np.abs(
        np.subtract(uncertainty(k2_reading)["states, weighted"], math.log2(6))
    ).max()
    < 0.5  # with one mood, or with all four, it would be a whole bit off
)

# %% [markdown]
# **4.** Take the model's 12 × 12 table of pairs and shuffle its columns. Which of
# the entropies of this chapter change?

# %% tags=["hide-cell"]
order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
assert np.allclose(conditional_bits(P_exlm[:, order]), conditional_bits(P_exlm))
# Names do not matter to entropies: the table links other words, no less tightly.
assert (P_exlm[:, order][~is_possible].sum() > 0.3).item()
