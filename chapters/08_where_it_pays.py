# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-reading)=
# # Where it pays: real molecules and text
#
# A trained ExLM holds more than the words it fills in. Its states and the edges
# between them say which words it considers, which of them go together, and how
# sure it is. Here you read all of that out of a model with the functions that you
# have written, and test one finding of the paper's case study. Then you leave the
# small languages. On real molecules one number, measured before any ExLM is
# trained, says how much the hidden symbols tell about each other. The chapter ends
# with where ExLM is ahead of a masked language model today, and where not.
#
# **It takes** 25 minutes and half a minute of one CPU core. **Paper:** §5.3 and
# Appendix P of {cite}`zheng2025exlm`.

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
from drawings import draw_tables

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()

# %%
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from exlm_so_far import (
    AidedExLM,
    best_path,
    every_row,
    gamma_and_xi,
    hide,
    train,
    vocabulary,
)

from exlm_mini.data.toy_grammars import grammar
from exlm_mini.reading.explorer import Explorer
from exlm_mini.reading.scene import scene_from_json

_ = torch.set_num_threads(1)

# %% [markdown]
# ## A graph to explore
#
# In the language `quartets` a hidden mood, one of four, chooses both masked words,
# each out of three; nothing else in the sentence reveals the mood. So 36 of the 144
# pairs of words are possible. The best possible masked language model gives all 144
# the same probability and needs $2 \log_2 12 = 7.17$ bits; the best possible model
# needs $\log_2 36 = 5.17$. The graph below was recorded from an ExLM with four
# states for each mask, trained for 400 steps; it needs
# {recorded}`case-study exlm row` bits. Click a word to fix it for its mask, or a
# state to make all paths go through it; click again to release it. Ticks mark where
# the bars stood before.

# %%
records = json.loads(Path("../book/results/case-study.json").read_text())
(record,) = (
    r for r in records if r["config"]["objective"] == "exlm" and "scene" in r
)
scene = scene_from_json(record["scene"])
Explorer(scene)

# %% [markdown]
# With the first word fixed, three of twelve words are left for the second, which
# saves two bits. With a masked language model the other mask's bars would not move.
#
# ## Reading it yourself
#
# The record holds what one pass through the model gives: for each state $u$ a
# distribution over words, $\mathbf{P}_u$, and the transition matrix $\mathbf{E}$.
# To fill the masks, let each state say its likeliest word, and take your
# `best_path`. To find out what the second mask says when the first one says *sad*,
# call your `gamma_and_xi`: at the first mask with the probability that each state
# says *sad*, at the second with 1, since any word will do.

# %% tags=["nbval-ignore-output"]
P_LV, E_LL = torch.tensor(scene.token_LW), torch.tensor(scene.transition_LL)
P_LV, E_LL = P_LV.double(), E_LL.double()
ends = torch.eye(len(E_LL), dtype=torch.float64)[[0, -1]]
any_word_L = torch.ones(len(E_LL), dtype=torch.float64)
for u in range(1, 9):
    top = [scene.words[w] for w in P_LV[u].topk(3).indices.tolist()]
    print(f"state {scene.labels[u]}:", *top)

likeliest_L = P_LV.max(dim=1).values
path, p = best_path(torch.stack([ends[0], likeliest_L, likeliest_L, ends[1]]), E_LL)
filled = [scene.words[P_LV[u].argmax()] for u in path[1:3]]
print(record["text"].replace("[MASK]", "{}").format(*filled))
print(f"with probability {p:.3f} along the best path")

says_sad_L = P_LV[:, scene.words.index("sad")]
gamma_ML, _ = gamma_and_xi(
    torch.stack([ends[0], says_sad_L, any_word_L, ends[1]]), E_LL
)
second_V = gamma_ML[2] @ P_LV
top = [
    (scene.words[w], second_V[w].item()) for w in second_V.topk(4).indices.tolist()
]
print("after sad:", *(f"{word} {p:.2f}" for word, p in top))

# %% [markdown]
# Every state says words of one mood, and edges lead to states of the same mood.
# These are the first two findings of the paper's Appendix P: states represent
# different choices, and transitions join the choices that fit together.
# {numref}`fig-reading-joint` shows the probabilities of all pairs, $P(x, y) =
# \sum_{v,u} \mathbf{E}_{0,v} P_v(x)\, \mathbf{E}_{v,u} P_u(y)\, \mathbf{E}_{u,9}$
# (states 0 and 9 are [BOS] and [EOS]), summed over the three words of each mood.
# The best possible masked language model gives 1/16 to every entry.

# %% mystnb={"figure": {"caption": "Joint probability of the moods of the two masked words: the language, and what ExLM makes of it.", "name": "fig-reading-joint"}, "image": {"alt": "Two tables of four by four moods with 0.25 on the diagonal. The language has zeros elsewhere, ExLM values of at most 0.01."}} tags=["remove-input"]
language = grammar("quartets")
MOODS = language.latents["mood"]
choices = [language.positions[n].choices for n in language.slots]
of_mood = [[c[(z,)].split() for z in MOODS] for c in choices]
ids = [
    [scene.words.index(word) for words in slot for word in words]
    for slot in of_mood
]
joint_VV = (E_LL[0][:, None] * P_LV).T @ E_LL @ (P_LV * E_LL[:, -1:])
P_exlm = joint_VV[ids[0]][:, ids[1]].view(4, 3, 4, 3).sum(dim=(1, 3)).numpy()
tables = {"language": np.eye(4) / 4, "ExLM": P_exlm}
draw_tables(tables, MOODS, MOODS, is_stacked=True)

# %% [markdown]
# ## Are later masks less uncertain?
#
# The third finding of Appendix P is that the states of the first mask spread
# their probability over several words and those of the second put most of it on
# one. The paper puts this down to the direction of the graph. A fair test needs
# two languages that are mirror images. A mood has four words in the *wide* slot
# and one in the *narrow* slot; in `wide-first` the wide slot comes first, in
# `wide-last` second. If direction were the cause, the second mask would be
# sharper in both. Train your own model on each, and average the entropy of what
# each state says, weighted by its share $\gamma$ of the paths.


# %% tags=["nbval-ignore-output"]
from exlm_mini.data.toy import Grammar, Position

# All words within a string are equally likely.
WIDE = {"merry": "merry happy cheerful glad", "grim": "sad gloomy tearful grim"}
NARROW = {"merry": "laughed", "grim": "wept"}


def mirror(first, second):
    """Language: they felt (first) and they (second), with words for each mood."""
    they, felt, and_ = (Position({(): word}) for word in ("they", "felt", "and"))
    slots = [
        Position({(z,): w for z, w in s.items()}, ("mood",))
        for s in (first, second)
    ]
    sentence = (they, felt, slots[0], and_, they, slots[1])
    return Grammar("mirror", {"mood": tuple(WIDE)}, np.array([0.5, 0.5]), sentence)


@torch.no_grad()
def bits_of_states(model, masked_BN):
    """Entropy of what the states of each mask say, averaged over paths."""
    state_BLD, _, j_BL, is_real_BL = model.states(masked_BN[:1])
    E_LL = model.log_E(state_BLD, j_BL, is_real_BL)[0].exp()
    P_LV = model.head(state_BLD, model.encoder.embedding.weight)[0].exp()
    ends, any_word_L = torch.eye(len(E_LL))[[0, -1]], torch.ones(len(E_LL))
    shares_ML, _ = gamma_and_xi(
        torch.stack([ends[0], *2 * [any_word_L], ends[1]]), E_LL
    )
    return (
        shares_ML[1:3] @ torch.special.entr(P_LV).sum(dim=1) / math.log(2)
    ).tolist()


mirrored = {}
for name, order in (("wide-first", (WIDE, NARROW)), ("wide-last", (NARROW, WIDE))):
    language = mirror(*order)
    row_BN = every_row(language)
    _ = torch.manual_seed(2)
    model = AidedExLM(len(vocabulary(language)))
    rows = hide(row_BN, [3, 6]), row_BN
    curve = train(model, lambda rows=rows: rows, steps=300)
    mirrored[name] = bits_of_states(model, rows[0])
    print(f"{name:10} {curve[300]:.2f} bits,", end=" ")
    print("a state says {:.2f}, {:.2f} bits".format(*mirrored[name]))

# %% mystnb={"code_prompt_show": "Checked: each state of the scene has one mood, the filled words share it; the wide slot has 2 bits and the narrow one 0, first or last, and both models reach 3 bits"} tags=["hide-cell", "check"]
from exlm_mini.reading.scene import conditionals

for u in range(1, 9):
    in_slot = P_LV[u][ids[0] if u < 5 else ids[1]].view(4, 3).sum(dim=1)
    assert in_slot.max() > 0.9, u
moods = [
    next(z for z, words in zip(MOODS, slot, strict=True) if word in words)
    for slot, word in zip(of_mood, filled, strict=True)
]
assert moods[0] == moods[1] and P_exlm.diagonal().sum() > 0.9
theirs_W = conditionals(scene, {1: "sad"}).word_SW[1]
np.testing.assert_allclose(theirs_W, second_V / second_V.sum(), atol=2e-3)
assert (theirs_W[ids[1]] > 0.1).sum() == 3
for name, wide in (("wide-first", 0), ("wide-last", 1)):
    assert abs(mirrored[name][wide] - 2) < 0.25, mirrored
    assert mirrored[name][1 - wide] < 0.25, mirrored

# %% [markdown]
# The wide slot has about two bits per state and the narrow one hardly any, wherever
# they stand: the entropy belongs to the slot, not to its place. The reason: given
# the context, states and words form a hidden Markov model. Read backwards it is
# one, too, with other edges but the same words in each state, so how much a state
# leaves open cannot depend on the direction of the edges. What *is* less uncertain
# at a later mask is the choice of the state, given the path so far, because the
# mood is settled by then. That is the chain rule, and it holds in any order of
# reading.
#
# ## How much there is to save on molecules
#
# Now real data. Molecules are written as SMILES strings, whose symbols depend on
# each other: a ring that opens must close, a branch must end. A masked language
# model can be asked for the hidden symbols of a molecule *at once*, each by itself,
# or *in turn*, each given the true symbols before it. By the chain rule of
# {ref}`chap-multimodality` the difference in bits, the **prize**, is what the
# hidden symbols tell about each other, as far as this model knows it. Edges are
# meant to save it. Here it is for recorded MLMs of 8,000 steps, one with the masks
# of the paper, and the mean of three with masks in spans:

# %% tags=["remove-input"]
pilot = json.loads(Path("../book/results/links-pilot.json").read_text())
# "joint" is the bits at once: for an MLM it is just the sum over the masks.
trunks = {trunk["name"]: trunk for trunk in pilot["trunks"]}
print("bits per molecule                  at once  in turn   prize")
for name, seeds in (
    ("15%, single symbols", ["random"]),
    ("30% in spans of three", [1, 2, 3]),
):
    once, turn = (
        np.mean([trunks[s][m] for s in seeds]) for m in ("joint", "in_turn")
    )
    print(f"{name:35}{once:7.2f}{turn:9.2f}{once - turn:8.2f}")

# %% [markdown]
# With single symbols masked, as the paper does with the tokens of text, there is
# next to nothing to save: the neighbours of a hidden symbol are mostly visible.
# Hide twice as many, in spans, and the prize is many times as large: eight times in
# these models, six times in the planned runs ({ref}`chap-findings`). (Of its
# molecules the paper says that 15% of "fragments" are dropped, and no more.)
#
# ## Where ExLM is ahead: spans
#
# Having bits to save is not enough: training has to find them. Two things may be in
# the way.
#
# - Where a span of masks is entered, one edge takes all the probability, and the
#   other states get no gradient: the edge that leads is reinforced, as in
#   {ref}`chap-symmetric-start`.
#   So the package's `SpanTransition` enters every span in equal shares, and learns
#   only the edges inside it. Edges from one span to another are given up.
# - At first $k$ states share the gradient of one, and a step with them costs more.
#   So a masked language model is trained first, and then it *grows*: every mask
#   splits into four states, after three of four layers. Whether growing helps is
#   undecided: trained as an ExLM from the start at the same cost, the model with
#   edges within spans ends 0.09 ± 0.29 bits higher (95% interval). Its links win
#   twice as much, but it predicts single symbols worse by about as many bits.
#
# The settings come from a {ref}`pilot <plan-changes>`, which tried some fifteen for
# ExLM and three for the MLM, on held-out molecules of the same corpus.
#
# To see which part matters ({ref}`plan-links`), for each seed one MLM is trained
# for 20,000 steps, and five models go on from it, each for the cost of 8,000 steps
# of the MLM. Four of them have four states for each mask, and differ in the edges
# between these states. For each model, `at once` again adds up the bits of the
# hidden symbols, each by itself, `together` takes them together, by the sum over
# all paths, and *links win* is the difference:

# %% tags=["remove-input"]
from exlm_lab.experiments.records import runs

results = Path("../book/results")
links = runs("links", results)
ARMS = {
    "mlm": "MLM",
    "uniform": "states without edges",
    "gated": "edges as published",
    "chains": "chains within spans",
    "exlm": "edges within spans",
}
print("bits, mean of seeds     seeds  at once  together  links win  states used")
for arm, label in ARMS.items():
    of = links.loc[arm]
    each, together = of["at_once_bits"].mean(), of["together_bits"].mean()
    used = 1.0 if arm == "mlm" else of["clones_used"].mean()
    print(f"{label:24}{len(of):5d}{each:9.2f}{together:10.2f}", end="")
    print(f"{each - together:11.2f}{used:13.2f}")

# %% mystnb={"figure": {"caption": "Bits of the hidden symbols of a molecule against the cost of training, five seeds. After 20,000 steps each MLM goes on as an MLM or as an ExLM. Asked in turn, the MLM gets the whole prize, but needs one pass for each symbol; the others need one for all.", "name": "fig-pays"}, "image": {"alt": "From 10.5 bits the MLM asked at once falls to 10.2, and ExLM to 9.6 to 10.1, with one seed apart from the others. The MLM asked in turn falls from 7.7 to 7.4."}} tags=["remove-input"]
fig, ax = plt.subplots(figsize=(3.6, 3.4))
lines = {
    "MLM, one pass": ("mlm", "at_once_bits", "at_once_bits", "-"),
    "ExLM, one pass": ("exlm", "at_once_bits", "together_bits", "-"),
    "MLM, in turn": ("mlm", "in_turn_bits", "in_turn_bits", "--"),
}
for label, (arm, before, after, style) in lines.items():
    trunk_S, end_S = links.loc["trunk"][before], links.loc[arm][after]
    y_S2 = pd.concat([trunk_S, end_S], axis=1, join="inner").dropna()
    style = {"ls": style, "marker": "o", "ms": 3, "color": COLORS[arm]}
    _ = ax.plot([20, 28], y_S2.T, **style, label=label)
_ = ax.set(xlabel="cost, in 1,000 steps of the MLM", ylabel="bits per molecule")
_ = ax.set(xticks=[20, 28], xlim=(18.5, 29.5), ylim=(7, 11.2))
handles, labels = ax.get_legend_handles_labels()
unique = dict(zip(labels, handles, strict=True))
_ = ax.legend(unique.values(), unique, fontsize=8)

# %% [markdown]
# Without edges each hidden symbol is predicted by an equal mixture of its four
# states; no path skips a mask, as it may in the exercise of
# {ref}`chap-one-notebook`. Such states end where the MLM does, or a little behind
# it. So does the model with the published transition matrix, which leaves all but
# one state of each mask unused. (Unlike the edges within spans, it has no bonus of
# 6 nats for the clone of the same number, and it is trained without the fixed
# chains of {ref}`chap-symmetric-start`.) Fixed chains save 0.2 bits, learned edges
# more: with these, ExLM ends below the MLM of equal cost in every seed, by half a
# bit out of ten on average ({numref}`fig-pays`). That is a sixth of the prize,
# which is 2.8 bits after this longer training. Links win 0.72 bits, but 0.26 of
# them are lost again: a step of ExLM costs more, so it got fewer of them, and it
# predicts single symbols worse. The MLM has not converged either: it gained 0.3
# bits in the last 8,000 steps. All five planned seeds are done; {ref}`all-sweeps`
# has the verdicts.
#
# What does half a bit change? Let both models fill in 1,024 molecules, and count
# those that the chemistry library RDKit can read, and those that are restored
# exactly. *One pass* fills along the best path; *best of 16 paths* draws sixteen
# more in the same pass and keeps the filling that is most probable over all paths.
# An MLM has no paths to choose from.

# %% tags=["remove-input"]
WAYS = {
    "one pass": "at_once",
    "best of 16 paths": "at_once_best_of_16",
    "in turn": "in_turn",
}
for of in ("readable", "exact"):
    print(f"{of + ', %':24}" + "".join(f"{way:>18}" for way in WAYS))
    for arm in ("mlm", "exlm"):
        shares = [links.loc[arm, f"{of}_{way}"].mean() for way in WAYS.values()]
        print(f"{ARMS[arm]:24}" + "".join(f"{100 * n:18.1f}" for n in shares))

# %% mystnb={"code_prompt_show": "Checked: the prize with single symbols masked is about an eighth of that with spans; in every seed ExLM is a quarter of a bit below MLM or more, and learned edges within spans are the best of the five; what training from the start loses; which states are in use; in turn more molecules can be read; how often each is exactly right; the one run of the recipe; what a second pass saves"} tags=["hide-cell", "check"]
prizes = {name: trunk["joint"] - trunk["in_turn"] for name, trunk in trunks.items()}
of_spans = np.mean([prizes[n] for n in (1, 2, 3)])  # the pilot's seeds
assert 7.5 < of_spans / prizes["random"] < 9.5
together, used = links["together_bits"], links["clones_used"]
won = together["mlm"] - together["exlm"]
assert len(won) == 5 and won.between(0.25, 0.6).all() and 0.45 < won.mean() < 0.55
from_the_start = together["exlm-scratch"] - together["exlm"]
assert len(from_the_start) == 5 and round(from_the_start.mean(), 2) == 0.09
assert round(2.776 * from_the_start.sem(), 2) == 0.29  # Student's t for five seeds
for arm in ("gated", "uniform"):
    late = together[f"{arm}-scratch"]
    assert len(late) == 5 and (late > together[arm]).all()
    assert (late > together["mlm"]).all()
assert abs((together["chains-scratch"] - together["chains"]).mean()) < 0.05
win = links["links_win_bits"].groupby("cell").mean()
assert 1.8 < win["exlm-scratch"] / win["exlm"] < 2.1
assert 5.5 < links["prize_bits"]["mlm"].mean() / won.mean() < 6.5
assert all(len(together[arm]) == 5 for arm in ARMS)
assert round((together["trunk"] - together["mlm"]).mean(), 1) == 0.3
for arm in ("uniform", "gated"):
    assert (together[arm] - together["mlm"]).between(-0.1, 0.3).all()
for better, worse in (("exlm", "chains"), ("chains", "mlm")):
    assert (together[worse] > together[better]).all()
    assert together[worse].mean() - together[better].mean() > 0.15
assert round((together["mlm"] - together["chains"]).mean(), 1) == 0.2
assert used["gated"].max() < 1.1
assert used["exlm"].min() > 3.8 and used["uniform"].min() > 3.9
for seed in won.index:
    mlm, exlm = (links.loc[(arm, seed)] for arm in ("mlm", "exlm"))
    once, best = mlm["readable_at_once"], exlm["readable_at_once_best_of_16"]
    assert once < best < exlm["readable_in_turn"] < mlm["readable_in_turn"]
right = {way: links[f"exact_{way}"] for way in WAYS.values()}
one_pass, best = (right[w]["exlm"] - right[w]["mlm"] for w in list(right)[:2])
assert -0.02 < one_pass.mean() < -0.004 and 0.004 < best.mean() < 0.02
assert right["in_turn"]["mlm"].mean() > right["in_turn"]["exlm"].mean()
assert round(links["prize_bits"]["mlm"].mean(), 1) == 2.8
means = links.loc["exlm"].mean(numeric_only=True)
assert round(means["at_once_bits"] - means["together_bits"], 2) == 0.72
assert round(means["at_once_bits"] - together["mlm"].mean(), 2) == 0.26
one_run = {run["rate"]: run["joint"] for run in pilot["one_run"]["runs"]}
recipe = [bits for rate, bits in one_run.items() if rate.endswith(": the recipe")]
assert len(recipe) == 2 and 0.4 < recipe[1] - recipe[0] < 0.5
saved = []
for mlm, exlm in zip(*[iter(pilot["passes"]["runs"])] * 2, strict=True):
    assert mlm["two_passes"] < exlm["two_passes"] < exlm["joint"] < mlm["joint"]
    assert mlm["joint"] == mlm["at_once"]
    saved += [mlm["at_once"] - exlm["joint"], mlm["at_once"] - mlm["two_passes"]]
assert [round(bits, 1) for bits in saved] == [0.5, 1.8, 2.6, 15.0]
for name, ratio in (("links", 1.4), ("links-english", 1.6)):
    costs = runs(name, results)["cost_ratio_floor"]["exlm-cost"]
    assert costs.round(1).eq(ratio).all()
fillings = [run["fillings"] for run in pilot["passes"]["runs"][:2]]
mlm, exlm = (some["in two passes"][0] for some in fillings)
assert exlm < mlm and fillings[1]["at once, best of 16"][0] < mlm

# %% [markdown]
# In one pass more of ExLM's molecules can be read. Along the best path it restores
# a molecule exactly a little less often than the MLM, with the best of 16 a little
# more often; the plan made no claim about this. Asked in turn both do better, and
# the MLM best, but that takes a pass for every hidden symbol, about eight per
# molecule.
#
# It need not be eight. In *two passes* a model is asked for every other symbol of a
# span first, and then, given those, for the rest. The table shows what that saves.
# It was measured outside the plan, for molecules and for English (novels, to which
# we come in a moment) on one ExLM of the recipe below and one MLM of equal cost; on
# English the two have different seeds. (These are other held-out rows than above,
# so the bits of the two tables cannot be compared.)

# %% tags=["remove-input"]
print("bits per row  at once  together  two passes  in turn")
for run in pilot["passes"]["runs"]:
    each, together, two, turn = (
        run[way] for way in ("at_once", "joint", "two_passes", "left_to_right")
    )
    together = f"{together:10.2f}" if run["model"] == "ExLM" else 10 * " "
    print(f"{run['data']:10}{run['model']:4}{each:7.2f}{together}", end="")
    print(f"{two:12.2f}{turn:9.2f}")

# %% [markdown]
# A second pass saves the MLM 1.8 bits on molecules and 15 on English; in one pass
# ExLM is only 0.5 and 2.6 bits ahead of it. So with two passes the MLM is ahead, in
# readable molecules too. They cost twice as much as one, while a pass of this ExLM
# costs 1.4 times as much as the MLM's (on English 1.6 times, both in operations).
# So ExLM is for uses that can afford only one pass; if you can afford two, take an
# MLM.
#
# On your own machine the recipe `smiles-spans` trains an MLM and grows it in one
# run, of about 15 minutes on an idle core. Measured once, with one seed, it ended
# nearly half a bit below an MLM of equal cost on the molecules used here, of ChEMBL
# and PubChem. The commands below use molecules of ZINC; `--source my.smi` takes
# your own file instead:
#
# ```bash
# python -m exlm_mini.prepare --source zinc --data.kind smiles --largest-fragment \
#     --strip-stereo --canonical --data.block_length 44 --data.max_rejected 0.05 \
#     --output corpora/small-molecules
# python -m exlm_mini.pretrain --recipe smiles-spans
# ```
#
# (edges-on-real-text)=
# ## Edges on real text
#
# What has an edge to say on real data? The model `english` comes with the package:
# an MLM trained on novels, with hidden spans, that has grown in the same way. Its
# 2,000 tokens are common words, and pieces of rarer ones. Hide two tokens:

# %% tags=["nbval-ignore-output"]
import exlm_mini

english = exlm_mini.load("english")
gone = "He took off his [MASK][MASK] and sat down by the fire."
english.explore(gone)

# %% [markdown]
# Tokens that begin a word are marked ␣. State 1.2 says how words begin, and its
# edge leads to 2.1, which says how they end. States 1.3 and 1.4 say whole words and
# lead to 2.3, which mostly says a comma. Click on ␣p: the comma, 39% before, drops
# to 3%. For ␣head it rises to 50%. To a masked language model the comma is as
# likely after a piece of a word as after a whole one. This model is small and knows
# little of what words mean, but its edges know how they are put together.
#
# ## Where it is not ahead
#
# With 15% of single tokens masked, ExLM is ahead on no real data that we tried. If
# it is trained from the start, an MLM of equal cost is ahead in every seed: by so
# little on molecules (0.03 ± 0.06 bits per symbol) that it may be chance, and by
# far on English that is no novel but Python's reference manual:

# %% tags=["remove-input"]
molecules, texts = (runs(name, results) for name in ("molecules", "ablations"))
masked_at_random = {
    "molecules": (molecules.loc["mlm++"], molecules.loc["exlm"]),
    "Python's manual": (texts.loc["english-mlm++"], texts.loc["english-exlm"]),
}
print("bits per hidden token  MLM   ExLM  states used")
for name, (mlm, exlm) in masked_at_random.items():
    bits = "".join(f"{of['bits_per_mask'].mean():7.2f}" for of in (mlm, exlm))
    k = exlm["model.states_per_mask"].iloc[0]
    print(f"{name:19}{bits}{exlm['clones_used'].mean():8.2f} of {k}")

# %% mystnb={"code_prompt_show": "Checked: in all seeds, five on molecules and three on Python's manual, MLM of equal cost is ahead and links win less than a hundredth of a bit per row; all five on novels; what the second mask says after each word"} tags=["hide-cell", "check"]
for mlm, exlm in masked_at_random.values():
    assert (mlm["bits_per_mask"] < exlm["bits_per_mask"]).all()
    assert (exlm["linked_bits"].abs() < 0.01).all()
    assert exlm["clones_used"].max() < 1.4
mlm, exlm = masked_at_random["molecules"]
behind = exlm["bits_per_mask"] - mlm["bits_per_mask"]
assert round(behind.mean(), 2) == 0.03
assert round(2.776 * behind.sem(), 2) == 0.06  # t for 95% and five seeds
assert [len(exlm) for _, exlm in masked_at_random.values()] == [5, 3]
for seed in range(1, 6):
    novels = runs("links-english", results).xs(seed, level="seed")
    assert round(novels["prize_bits"]["mlm"]) == 19
    assert 94 < (of_mlm := novels["together_bits"]["mlm"]) < 95.5
    assert 2.5 < of_mlm - novels["together_bits"]["exlm"] < 3.5
    assert novels["clones_used"]["exlm"] > 3.5
reading = english.fill(gone).reading
of_mask = [(reading.states.owner_L == mask).nonzero().squeeze(1) for mask in (1, 2)]
P_LV = reading.states.log_token_LV.exp()
E_LL = reading.graph.log_transition_LL.exp()
enter_k = E_LL[reading.graph.path_M[0], of_mask[0]]
edge_kk = E_LL[of_mask[0]][:, of_mask[1]]
(comma,) = english.tokenizer.encode_with_masks(",")
assert 0.35 < reading.log_token_SV[1, comma].exp() < 0.45
for word, low, high in ((" p", 0.02, 0.035), (" head", 0.48, 0.54)):
    (token,) = english.tokenizer.encode_with_masks(word)
    share_k = (enter_k * P_LV[of_mask[0], token]) @ edge_kk
    assert low < share_k @ P_LV[of_mask[1], comma] / share_k.sum() < high
assert edge_kk[1, 0] > 0.99 and edge_kk[2:, 2].min() > 0.99

# %% [markdown]
# On both, most paths use the same one state of each mask, so the edges have nothing
# to choose from: links win less than a hundredth of a bit per row. ExLM's extra
# cost is then wasted. Grown out of an MLM, on small molecules, it uses all four
# states, but links win only a hundredth of a bit, and whether it is worse than the
# MLM is undecided ({ref}`chap-findings`). On Python's manual the MLM is half a bit
# ahead after as many steps ({ref}`chap-symmetric-start`), and at equal cost it gets
# almost twice as many; since training was short, that makes a large difference. On
# novels, with spans of three tokens hidden, a row of 48 tokens has a prize of 19
# bits of 95. There a grown ExLM does use its edges: in each of five {ref}`planned
# <plan-links>` seeds it needs about 3 bits less than the MLM of equal cost.
#
# So look at the prize first. Where hidden tokens tell little about each other, a
# masked language model is the better choice. Where they tell much, ExLM can save a
# part of it in one pass, if its states have vectors of their own and each of them
# is as likely as the others to begin a span.
#
# ## Exercise: one state for each mask
#
# Train `AidedExLM` with `k=1` on `wide-first`. **Predict** the bits that it ends
# at, and the two entropies of `bits_of_states`. Run it, then open the solution.

# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
language = mirror(WIDE, NARROW)
row_BN = every_row(language)
rows = hide(row_BN, [3, 6]), row_BN
_ = torch.manual_seed(2)
single = AidedExLM(len(vocabulary(language)), k=1)
curve = train(single, lambda: rows, steps=300)
# It is a masked language model: 3 bits for eight words, 1 bit for two words.
assert abs(curve[300] - 4) < 0.1
assert np.allclose(bits_of_states(single, rows[0]), (3, 1), atol=0.1)
