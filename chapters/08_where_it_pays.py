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
# A trained ExLM holds more than the words it fills in. Its states and the edges
# between them say which words it considers, which of them go together, and how
# sure it is. In this chapter you read all of that out of a trained model: the
# likeliest words of each state, the best path, the distribution of each mask, and
# the joint distribution of several masks. You do this on a small language whose
# true distribution is known, so every number can be compared with the truth. Then
# you explore the graph by hand, and put one finding of the paper's case study to
# the test.
#
# **You will know afterwards** what a state has learned, what the best path
# promises and what it does not, and whether later masks are less uncertain than
# earlier ones.
#
# **What it needs.** Under a minute on one CPU core. No GPU, no download. It
# covers §5.3 (case study) and Appendix P of {cite}`zheng2025exlm`.

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
import json
import math
from pathlib import Path

import numpy as np
import torch
from live import chapter_scale, train_live

from exlm_mini.config.options import parse
from exlm_mini.data.toy_grammars import grammar

scale = chapter_scale()

# %% [markdown]
# ## A model worth reading
#
# The paper reads "This is [MASK], and I'm very [MASK] to see this." Our language
# `quartets` has a sentence of that kind: a hidden mood, one of four, chooses both
# masked words, each out of three, and nothing else in the sentence tells the
# mood. So of $12 \times 12$ pairs of words, which a masked language model (MLM)
# cannot tell apart, 36 are possible, all equally likely. We train an ExLM with $k
# = 4$ states per mask and, as in Appendix P, one node each for [BOS] and [EOS].


# %%
def train(*options):
    """An ExLM of the recipe toy-pairs, with these options."""
    recipe = ["--recipe", "toy-pairs", "--objective", "exlm"]
    boundary = ["--model.boundary", "paper"]
    return train_live(parse([*recipe, *boundary, *options]).config, scale)


quartets = ["--data.grammar", "quartets", "--model.states_per_mask", "4"]
run = train(*quartets, "--train.steps", str(scale.pick(300, 800)))
language, tokenizer = grammar("quartets"), run.tokenizer
TEXT = "the old baker felt [MASK] this morning so his sister [MASK]"

# %% [markdown]
# One pass through the model gives everything there is to read: for each state $u$
# a distribution over the vocabulary, $\mathbf{P}_u$, and the transition matrix
# $\mathbf{E}$, whose entry $E_{v,u}$ is the probability of going from state $v$
# to state $u$.


# %%
@torch.no_grad()
def read(run, text):
    """P (L, V), E (L, L), and which mask each state belongs to, of one row."""
    special = run.tokenizer.special_ids
    ids = [special.bos, *run.tokenizer.encode_with_masks(text), special.eos]
    row_BN = torch.tensor([ids], device=scale.device)
    hidden_BTD, graph = run.model.encode(row_BN, row_BN == special.mask, row_BN)
    state_BLD = run.model.states(hidden_BTD, graph)
    P_BLV = run.model.token_logits(state_BLD).softmax(dim=-1)
    E_BLL = run.model.score(state_BLD, graph).log_transition_BLL.exp()
    return P_BLV[0].double().cpu(), E_BLL[0].double().cpu(), graph.owner_BL[0].cpu()


P_LV, E_LL, owner_L = read(run, TEXT)
owner_L.tolist()

# %% [markdown]
# State 0 is [BOS], state 9 is [EOS], and the four states of each mask lie
# between. Name every state by its three likeliest words and draw the matrix:

# %%
top_L3 = P_LV.topk(3, dim=1).indices
names = ["\n".join(tokenizer.token(w) for w in top) for top in top_L3.tolist()]
names[0], names[-1] = "BOS", "EOS"

# The words of each slot, three for each mood.
MOODS, slots = language.latents["mood"], language.slots
slots = [language.positions[n].choices for n in slots]
words_of = [[w for z in MOODS for w in slot[(z,)].split()] for slot in slots]
ids_of = [[tokenizer.encode(w)[0] for w in words] for words in words_of]

# %% mystnb={"figure": {"caption": "The transition matrix: rows hand over to columns. Rows name a state by its three likeliest words, columns by the likeliest (the analogue of Figures 7 and 10). Yellow: states of the first mask; brown: of the second. White below the diagonal: no edge leads back.", "name": "fig-reading-matrix"}} tags=["hide-input"]
import matplotlib.pyplot as plt
import seaborn as sns
from drawings import draw_dag

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
kinds = ["boundary", *["mask"] * 4, *["second"] * 4, "boundary"]
fig, ax = plt.subplots(figsize=(5, 5.8))
shown = E_LL[:-1, 1:].numpy()
sns.heatmap(
    shown,
    ax=ax,
    mask=np.tril(np.ones_like(shown, dtype=bool), -1),
    annot=np.where(shown < 0.1, "", np.char.mod("%.2f", shown)),
    annot_kws={"fontsize": 8},
    fmt="",
    cmap="Blues",
    vmin=0,
    vmax=1,
    linewidths=0.5,
    xticklabels=[name.split("\n")[0] for name in names[1:]],
    yticklabels=names[:-1],
    cbar=False,
)
ax.tick_params(axis="x", rotation=90, length=0)
ax.tick_params(axis="y", rotation=0, length=0)
for axis, own in ((ax.xaxis, kinds[1:]), (ax.yaxis, kinds[:-1])):
    for text, kind in zip(axis.get_ticklabels(), own, strict=True):
        ground = {"boxstyle": "round,pad=0.25", "facecolor": COLORS[kind], "lw": 0}
        text.set(fontsize=8.5, color="black", bbox=ground)
ax.set(xlabel="to state", ylabel="from state")
ax.grid(visible=False)

# %% [markdown]
# Every state belongs to one mood, the four states of a mask share the four moods
# among them, and each yellow row has one dark field: in the brown column of its
# own mood. [BOS] enters all four about equally often. These are the first two
# findings of Appendix P: states represent different choices, and transitions link
# the choices that fit. No path stays inside a mask, though the graph would allow
# it. Which state takes which mood is an accident of the start and may differ on
# your machine.

# %% mystnb={"figure": {"caption": "The same graph drawn as paths (the analogue of Figure 11). The width of an edge is its probability.", "name": "fig-reading-dag"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5.4, 3.6))
draw_dag(ax, E_LL.numpy(), owner_L.tolist(), names, kinds)

# %% mystnb={"code_prompt_show": "Checked: each state has over 95% of its probability in one mood, and leads to that mood with over 95%"} tags=["hide-cell", "check"]
of_first, of_second = torch.arange(1, 5), torch.arange(5, 9)
mood_LZ = torch.zeros(10, 4, dtype=torch.float64)
for own_L, ids in zip((of_first, of_second), ids_of, strict=True):
    assert owner_L[own_L].unique().numel() == 1
    mood_LZ[own_L] = P_LV[own_L][:, ids].view(-1, 4, 3).sum(dim=2)
    assert sorted(mood_LZ[own_L].argmax(dim=1).tolist()) == [0, 1, 2, 3]
mood_L = mood_LZ.argmax(dim=1)
assert mood_LZ[1:9].max(dim=1).values.min() > 0.95
for v in of_first:
    (u,) = of_second[mood_L[of_second] == mood_L[v]]
    assert E_LL[v, u] > 0.95, (v, u)
assert (E_LL[0, of_first] - 0.25).abs().max() < 0.06
assert E_LL[of_first][:, of_first].max() < 0.02

# %% [markdown]
# ## The best path
#
# To fill the masks, follow one path. The best one maximises the product of its
# transitions and the likeliest word's probability at each state it visits:
#
# $$
# \begin{aligned}
# P(\mathbf{a}) = {} & \prod_{i > 0} E_{a_{i-1}, a_i} \\
# & \prod_{\text{masks } i} \max_w P_{a_i}(w)
# \end{aligned}
# $$ (eq-best-path)
#
# To find it, replace the sum over all paths of {ref}`chap-dag-naive` by a
# maximum, and remember for each state where the best path to it came from. This
# is Viterbi's algorithm.


# %%
def best_path(P_LV, E_LL, num_masks):
    """States of the best path from the first to the last, and its probability."""
    reach_L, came_from = torch.zeros(len(E_LL)).double(), []
    reach_L[0] = 1  # the best way to stand in each state after i masks
    for _ in range(num_masks):
        reach_L, from_L = (reach_L[:, None] * E_LL).max(dim=0)
        reach_L = reach_L * P_LV.max(dim=1).values
        came_from.append(from_L)
    probability, last = (reach_L * E_LL[:, -1]).max(dim=0)
    path = [last.item()]
    for from_L in reversed(came_from):
        path.insert(0, from_L[path[0]].item())
    return [*path, len(E_LL) - 1], probability.item()


path, probability = best_path(P_LV, E_LL, num_masks=2)
filled = [tokenizer.token(P_LV[u].argmax().item()) for u in path[1:-1]]
print(f"{len(path)} states, {len(filled)} words")

# %% [markdown]
# All 36 possible pairs are equally good, so small inaccuracies of the model
# decide which of them you get in `filled`. What must hold is that the two words
# share a mood. Filling each mask by itself gives no such guarantee: three of four
# pairs chosen that way do not exist.
#
# ## Summing over paths
#
# The probability of two words is a sum over *all* paths that spell them. With two
# masks a path goes [BOS] → $v$ → $u$ → [EOS], and the sum over $v$ and $u$ is a
# product of matrices:
#
# $$
# \begin{aligned}
# P(x, y) = \sum_{v, u}\; & E_{\text{BOS}, v}\, P_v(x) \\
# & E_{v,u}\, P_u(y)\, E_{u,\text{EOS}}
# \end{aligned}
# $$ (eq-two-masks)

# %%
joint_VV = (E_LL[0][:, None] * P_LV).T @ E_LL @ (P_LV * E_LL[:, -1:])
P_exlm = joint_VV[ids_of[0]][:, ids_of[1]]  # the 12 x 12 words of the slots
tuple(P_exlm.shape)

# %% [markdown]
# The language gives the true table. It also gives what the best possible MLM
# would say, one that knows the distribution of each mask exactly and multiplies
# them.

# %% tags=["hide-input"]
sentence = language.sample(1, seed=0)[0]
exact = language.joint(sentence, language.mask())
P_exact = torch.zeros(12, 12, dtype=torch.float64)
for pair, p in zip(exact.word_ids_CM, exact.probability_C, strict=True):
    i, j = (words_of[m].index(language.words[w]) for m, w in enumerate(pair))
    P_exact[i, j] = p
P_mlm = P_exact.sum(dim=1)[:, None] * P_exact.sum(dim=0)
is_possible = P_exact > 0
tables = {"language": P_exact, "best MLM": P_mlm, "ExLM": P_exlm}

# %% mystnb={"figure": {"caption": "Joint probability of the two masked words, summed over the three words of each mood. The language, and what ExLM makes of it; the best MLM gives 1/16 to every field.", "name": "fig-reading-joint"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(5.6, 2.7), sharey=True)
for ax, title in zip(axes, ("language", "ExLM"), strict=True):
    blocks = tables[title].view(4, 3, 4, 3).sum(dim=(1, 3)).numpy()
    sns.heatmap(
        blocks,
        ax=ax,
        annot=True,
        fmt=".2f",
        annot_kws={"fontsize": 8},
        cmap="Blues",
        vmin=0,
        vmax=0.25,
        linewidths=0.5,
        xticklabels=MOODS,
        yticklabels=MOODS,
        cbar=False,
    )
    ax.tick_params(labelsize=8, rotation=0)
    ax.set_title(title)
    ax.set_xlabel("mood of the second word", fontsize=9)
_ = axes[0].set_ylabel("mood of the first word", fontsize=9)

# %% mystnb={"code_prompt_show": "Checked: impossible pairs get 3/4 of the best MLM's probability, and less than 5% of ExLM's"} tags=["hide-cell", "check"]
assert len(exact.probability_C) == 36 and np.allclose(exact.probability_C, 1 / 36)
assert torch.isclose(P_mlm[~is_possible].sum(), torch.tensor(0.75).double())
assert P_exlm[~is_possible].sum() < 0.05
assert (P_exlm - P_exact).abs().max() < 0.012  # of 1/36 = 0.028
i, j = (words_of[m].index(word) for m, word in enumerate(filled))
assert is_possible[i, j]
share = probability / P_exlm[i, j]  # of the best path in the sum over all
assert 0.97 < share <= 1 + 1e-6

# %% [markdown]
# In the trained graph every possible pair has, in effect, one path, and the best
# path carries nearly all of the probability of its words. In general it does not,
# and then the words of the best path need not be the best words. The smallest
# example has one mask and three states, of which one says *glad* and two say
# *sorry*:

# %%
words, says = ["glad", "sorry"], torch.eye(2).double()[[0, 0, 1, 1, 0]]
three_LL = torch.zeros(5, 5).double()
three_LL[0, 1:4] = torch.tensor([0.4, 0.3, 0.3])
three_LL[1:4, 4] = 1
(_, best, _), p = best_path(says, three_LL, num_masks=1)
sum_W = (three_LL[0] * three_LL[:, 4]) @ says
print(f"the best path says {words[says[best].argmax()]}: {p:.1f}")
print(f"the best word is {words[sum_W.argmax()]}: {sum_W.max():.1f}")

# %% [markdown]
# Finding the best words of many masks is a hard search, so `exlm_mini.fill` gives
# those of the best path, with both the path's probability and that of the words,
# summed over all paths.
#
# ## One mask at a time
#
# What does the model say about one mask by itself? Through which state does a
# path pass at mask $i$? Forward sums say how likely a path is in state $u$ after
# $i$ steps, backward sums how likely it reaches [EOS] from there with one step
# per remaining mask. Their product, normalised, is the share $\gamma_{i,u}$ of
# paths that give mask $i$ to state $u$ while no word is known; the mask's
# distribution mixes the states' distributions by these shares.


# %%
def shares(E_LL, num_masks):
    """gamma (M, L): to which state a path gives each mask."""
    forward, backward = [E_LL[0]], [E_LL[:, -1]]
    for _ in range(num_masks - 1):
        forward.append(forward[-1] @ E_LL)
        backward.insert(0, E_LL @ backward[0])
    both_ML = torch.stack(forward) * torch.stack(backward)
    return both_ML / both_ML.sum(dim=1, keepdim=True)


gamma_ML = shares(E_LL, num_masks=2)
mask_MV = gamma_ML @ P_LV

# %% [markdown]
# Now let the package judge. `read_row` is what `exlm_mini.fill` calls; it must
# find the same states, the same path, the same joint probability of the filled
# words, and the same distribution of each mask.

# %% mystnb={"code_prompt_show": "Checked: states, best path, joint probability and marginals equal those of the package"} tags=["hide-cell", "check"]
from exlm_mini.alignment.enumeration import paths
from exlm_mini.reading.decoding import read_row

row_BN = torch.tensor([[1, *tokenizer.encode_with_masks(TEXT), 2]])  # [BOS], [EOS]
reading = read_row(run.model, row_BN.to(scale.device))
torch.testing.assert_close(P_LV, reading.states.log_token_LV.double().exp())
torch.testing.assert_close(E_LL, reading.graph.log_transition_LL.double().exp())
assert path == reading.graph.path_M.tolist()
assert filled == [tokenizer.token(i) for i in reading.token_ids_S.tolist()]
assert math.isclose(probability, math.exp(reading.graph.log_path), rel_tol=1e-3)
assert math.isclose(P_exlm[i, j], math.exp(reading.log_joint), rel_tol=1e-3)
torch.testing.assert_close(mask_MV, reading.log_token_SV.double().exp())

# And every sum is the sum over the 28 paths, one by one.
total, by_mask = 0.0, torch.zeros(2, 10).double()
table = torch.zeros(12, 12).double()
for a in paths(4, 10):
    weight = math.prod(E_LL[v, u].item() for v, u in itertools.pairwise(a))
    total += weight
    by_mask[[0, 1], list(a[1:-1])] += weight
    table += weight * torch.outer(P_LV[a[1]][ids_of[0]], P_LV[a[2]][ids_of[1]])
torch.testing.assert_close(by_mask / total, gamma_ML)
torch.testing.assert_close(table, P_exlm)

# %% [markdown]
# ```console
# $ python -m exlm_mini.fill --run runs/quartets --html explorer.html \
#     "the old baker felt [MASK] this morning so his sister [MASK]"
# ```
#
# The command prints all this for any run, on text or molecules, and `--html`
# writes the explorer of the next section to a file.
#
# ## Filling masks together
#
# Fix a word of one mask, and the distribution of the others follows:
#
# $$
# P(y \mid x) = \frac{P(x, y)}{\sum_{y'} P(x, y')}
# $$ (eq-conditional)
#
# with sums over all paths as in eq. {eq}`eq-two-masks`. In the explorer, point at
# a state to see its words and where it leads. Click a word to fix it for its
# mask, or a state to make all paths go through it; click again to release it.
# Ticks mark where the bars stood before. The scene was recorded from a run of 400
# steps, so that the page is the same everywhere; `read_scene(reading, …)` makes
# one from the model you have just trained.

# %%
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import conditionals, read_scene, scene_from_json

file = Path("../book/results/case-study.json")
records = {r["config"]["data"]["grammar"]: r for r in json.loads(file.read_text())}
recorded = scene_from_json(records["quartets"]["scene"])
explorer(recorded)

# %% [markdown]
# One click is worth two bits: with the first word fixed, three of twelve words
# are left for the second. With an MLM the other mask's bars would not move.

# %% mystnb={"code_prompt_show": "Checked: the explorer's numbers are the rows of your table, to 0.001"} tags=["hide-cell", "check"]
scene = read_scene(reading, tokenizer, row_BN)
for i, word in enumerate(words_of[0]):
    given_W = P_exlm[i] / P_exlm[i].sum()
    now = conditionals(scene, {1: word})
    share_W = now.word_SW[1, [scene.words.index(w) for w in words_of[1]]]
    np.testing.assert_allclose(share_W / share_W.sum(), given_W, atol=1e-3)
    then = conditionals(recorded, {1: word})
    then_W = then.word_SW[1, [recorded.words.index(w) for w in words_of[1]]]
    assert np.abs(then_W - share_W).max() < 0.1, word
    assert (given_W > 0.1).sum() == 3

# %% [markdown]
# ## And on English?
#
# A small ExLM of English comes with the package: 1.5 million parameters, trained
# for 41 minutes on one CPU core with 36 books. Here is a sentence like the
# paper's.

# %%
import exlm_mini

SENTENCE = "This is [MASK], and I'm very [MASK]."
english = exlm_mini.load("english")
live = english.explore(SENTENCE)
file = english.run / "scene.json"  # the same, recorded
explorer(scene_from_json(file.read_text()))

# %% [markdown]
# Only some of the words fit, and when you fix one, the bars of the other mask
# stand still: nearly all paths use one state of each mask, and this model has
# become an MLM. Words masked at random in real text mostly lie far apart and
# depend little on each other, so its links may have had little to learn from.
# Or one state took all paths before the others had become different, as on
# molecules, where symbols do depend on each other ({ref}`chap-findings`). We do
# not know which.

# %% mystnb={"code_prompt_show": "Checked: one state of each mask has over 99% of the paths, and fixing a word moves no other by 0.001"} tags=["hide-cell", "check"]
stored = scene_from_json(file.read_text())
for scene_of in (live.scene, stored):
    first, second = (
        conditionals(scene_of, chosen).word_SW[1]
        for chosen in ({}, {1: scene_of.words[scene_of.offered[0][0]]})
    )
    assert np.abs(first - second).max() < 0.001
    assert conditionals(scene_of, {}).state_SL.max(axis=1).min() > 0.99
said = [
    dict(zip(s.words, conditionals(s, {}).word_SW.T, strict=True))
    for s in (live.scene, stored)
]
both = said[0].keys() & said[1].keys()
assert len(both) > 0.8 * len(said[1])
assert all(np.allclose(said[0][w], said[1][w], atol=1e-3) for w in both)

# %% [markdown]
# ## Are later masks less uncertain?
#
# The third finding of Appendix P is that the states of the first mask spread
# their probability over several words and those of the second put most of it on
# one. The paper puts this down to the direction of the graph. Measure it by the
# entropy $H[P_u]$ of what a state says, averaged with the shares $\gamma_{i,u}$.


# %%
def state_bits(P_LV, E_LL, num_masks):
    """Entropy of what the states of each mask say, in bits."""
    entropy_L = -torch.xlogy(P_LV, P_LV).sum(dim=1) / math.log(2)
    return shares(E_LL, num_masks) @ entropy_L


bits_M = state_bits(P_LV, E_LL, num_masks=2)
print(f"the two masks differ by {abs(bits_M[0] - bits_M[1]):.1f} bits")

# %% [markdown]
# In this language there is no such difference; both are near $\log_2 3 = 1.58$
# bits, three equal words per mood. But here both slots have three words. A fair
# test needs two languages that are mirror images. A mood has four words in the
# *wide* slot and one in the *narrow* slot; in `wide-first` the wide slot comes
# first, in `wide-last` it comes second. If direction were the cause, the second
# mask would be sharper in both.

# %% mystnb={"code_prompt_show": "The two languages"} tags=["hide-input"]
from exlm_mini.data.toy import Grammar, Position
from exlm_mini.data.toy_grammars import GRAMMARS

WIDE = {"merry": "merry happy cheerful glad", "grim": "sad gloomy tearful grim"}
NARROW = {"merry": "laughed", "grim": "wept"}


def mirror(name, first, second):
    """they felt (first) and they (second)."""
    slots = [
        Position({(z,): w for z, w in s.items()}, ("mood",))
        for s in (first, second)
    ]
    they, felt, and_ = (Position({(): word}) for word in ("they", "felt", "and"))
    sentence = (they, felt, slots[0], and_, they, slots[1])
    return Grammar(name, {"mood": tuple(WIDE)}, np.array([0.5, 0.5]), sentence)


GRAMMARS["wide-first"] = lambda: mirror("wide-first", WIDE, NARROW)
GRAMMARS["wide-last"] = lambda: mirror("wide-last", NARROW, WIDE)

# %%
bits_of = {"quartets": bits_M}
for name in ("wide-first", "wide-last"):
    mirrored = train("--data.grammar", name, "--train.steps", "150")
    P, E, _ = read(mirrored, "they felt [MASK] and they [MASK]")
    bits_of[name] = state_bits(P, E, num_masks=2)

# %% mystnb={"figure": {"caption": "Entropy of what the states of a mask say, in three languages.", "name": "fig-reading-uncertainty"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5.2, 2.6))
for mask, color in enumerate((COLORS["mask"], COLORS["second"])):
    heights = [per_mask[mask] for per_mask in bits_of.values()]
    label = ("first", "second")[mask] + " mask"
    ax.bar(np.arange(3) + 0.4 * mask - 0.2, heights, 0.38, color=color, label=label)
ax.set(ylabel="bits per state", xticks=range(3), xticklabels=list(bits_of))
ax.grid(axis="x", visible=False)
_ = fig.legend(loc="outside upper center", ncols=2, fontsize=9)

# %% mystnb={"code_prompt_show": "Checked: the wide slot has 2 bits and the narrow one 0, first or last, to 0.25 bits"} tags=["hide-cell", "check"]
from exlm_lab.experiments.entropy import entropy_bits

assert (bits_M - math.log2(3)).abs().max() < 0.15
assert abs(bits_M[0] - bits_M[1]) < 0.04
step_L = -torch.xlogy(E_LL, E_LL).sum(dim=1) / math.log(2)  # paths begin in state 0
assert abs(step_L[0] - 2) < 0.1 and shares(E_LL, 2)[0] @ step_L < 0.15
for name, wide in (("wide-first", 0), ("wide-last", 1)):
    assert abs(bits_of[name][wide] - 2) < 0.25, bits_of
    assert bits_of[name][1 - wide] < 0.25, bits_of
# A larger language, eleven masks: entropy follows the word, not its place.
town = grammar("town")
marginal_SV = town.marginals(town.sample(1, seed=0)[0], town.mask())
word_bits = entropy_bits(torch.from_numpy(marginal_SV).log()).numpy()
stored = np.array(records["town"]["state_entropy_bits"])
with_word = np.corrcoef(stored, word_bits)[0, 1]
with_place = np.corrcoef(stored, np.arange(len(stored)))[0, 1]
assert len(stored) == 11 and round(with_word, 2) == 0.85
assert round(with_place, 2) == -0.18

# %% [markdown]
# The wide slot has about two bits per state and the narrow one hardly any,
# wherever they stand. A recorded run on the larger language `town`, with eleven
# masks, agrees: the entropy of its states correlates with the exact entropy of
# the masked word (0.85), but hardly with its place in the sentence (−0.18).
# There is a reason. Given the context, states and words form a hidden Markov
# chain, and such a chain read backwards is again one, with the same words in
# each state: what a graph can express does not favour later states. That
# training does not, either, is shown here by one short run of each language
# only.
#
# What *is* less uncertain at a later mask is the choice of the state, given the
# path so far: two bits at the first mask of `quartets`, none at the second,
# because the mood is settled by then. That is the chain rule, and it holds in any
# order of reading. In the paper's sentence "I'm very [MASK] to see this" may well
# have fewer good words than "This is [MASK]", so one sentence cannot tell the two
# explanations apart. The mirror images can.
#
# ## Exercises
#
# **1. How many paths** lead from [BOS] to [EOS] through $S$ masks with $k$ states
# each, if a path visits $S$ states and may stay inside a mask?


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-input"]
def judge_count(num_paths):
    """Compare with a list of all paths."""
    for S, k in ((1, 4), (2, 4), (3, 2), (3, 3)):
        found = num_paths(S, k)
        if found is None:
            return "not yet"
        if found != len(list(paths(S + 2, k * S + 2))):
            return f"S = {S}, k = {k}: not {found}"
    return "right"


# %%
def num_paths(S, k):
    """Paths through S masks with k states each."""  # your turn


print(judge_count(num_paths))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def num_paths(S, k):
    """Paths through S masks with k states each."""
    return math.comb(k * S, S)  # any S states, in their order


assert judge_count(num_paths) == "right"

# %% [markdown]
# **2. Information flows both ways.** All edges lead forward. Fix the *second*
# word to *wept*: what follows for the first mask? Predict it, try it in the
# explorer, then compute the 12 probabilities from `P_exlm`.


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-input"]
def judge_first(first_given):
    """Compare with the explorer's own computation."""
    for word in ("wept", words_of[1][0]):
        found = first_given(P_exlm, words_of[1].index(word))
        if found is None:
            return "not yet"
        exact_W = conditionals(scene, {2: word}).word_SW[0]
        exact_W = exact_W[[scene.words.index(w) for w in words_of[0]]]
        if not np.allclose(found, exact_W / exact_W.sum(), atol=2e-3):
            return "not these"
    return "right"


# %%
def first_given(P, j):
    """P(first word | second word is the j-th), (12,)."""  # your turn


print(judge_first(first_given))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def first_given(P, j):
    """P(first word | second word is the j-th), (12,)."""
    return P[:, j] / P[:, j].sum()


assert judge_first(first_given) == "right"
sad = [words_of[0].index(w) for w in slots[0][("sad",)].split()]
assert first_given(P_exlm, words_of[1].index("wept"))[sad].sum() > 0.95

# %% [markdown]
# **3. Read the chain backwards.** Write a graph for the same states that chooses
# the second mask's state first: a start distribution over $u$ and transitions
# from $u$ to $v$, such that the probability of every pair of words is unchanged.
# States keep their words. (Divide `P_exlm` by its sum over all words, so that
# both are distributions.)


# %% mystnb={"code_prompt_show": "The judge"} tags=["hide-input"]
def judge_backwards(backwards):
    """The same joint distribution, from the other end."""
    found = backwards(E_LL, gamma_ML)
    if found is None:
        return "not yet"
    start_L, back_LL = found
    if not torch.allclose(start_L.sum(), torch.tensor(1.0).double()):
        return "the start is no distribution"
    rows = back_LL.sum(dim=1)[start_L > 0]
    if not torch.allclose(rows, torch.ones_like(rows)):
        return "rows of the transitions do not sum to one"
    table = (start_L[:, None] * P_LV).T @ back_LL @ P_LV
    if not torch.allclose(table.T, joint_VV / joint_VV.sum(), atol=1e-9):
        return "other pairs of words"
    return "right"


# %%
def backwards(E_LL, gamma_ML):
    """Start (L,) over the second mask's states, and transitions (L, L) back."""
    # your turn


print(judge_backwards(backwards))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def backwards(E_LL, gamma_ML):
    """Start (L,) over the second mask's states, and transitions (L, L) back."""
    weight_LL = E_LL[0][:, None] * E_LL * E_LL[:, -1]  # of the path v -> u
    back_LL = weight_LL.T / weight_LL.sum(dim=0)[:, None].clamp(min=1e-300)
    return gamma_ML[1], back_LL


assert judge_backwards(backwards) == "right"
