# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-multimodality)=
# # Why one slot has many right answers
#
# A masked language model (MLM) hides words and asks for them back. This chapter
# is about what cannot be asked back. You will read who has tried to repair what
# about [MASK], look at the exact distribution of hidden words in a language small
# enough to know everything about it, and measure in bits what a model loses that
# predicts each hidden word on its own. You will prove that no such model can pass
# a certain floor, and then train one and watch it land there.
#
# **You will know** the two harms of [MASK] and which method repairs which, what
# the paper means by *multimodality* inside one token and between tokens, and why
# the cure needs several states per mask and links between them.
#
# **It needs** the chapter on MLM ({ref}`chap-mlm`) and under a minute on a
# CPU; no GPU. It covers §3.3, §4.1 and Appendix A of the paper
# {cite}`zheng2025exlm`.

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
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from exlm_mini.config import SPECIAL_TOKENS, SpecialIds
from exlm_mini.config.options import parse
from exlm_mini.data.toy import Grammar, Position
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.plotting import COLORS, draw_curves, draw_heatmap, use_book_style
from exlm_mini.reading.entropy import entropy_bits
from exlm_mini.training.live import chapter_scale, train_live

use_book_style()
rng = np.random.default_rng(0)
scale = chapter_scale()
str(scale)

# %% [markdown]
# ## Two harms, and who repairs which
#
# Putting [MASK] into a sentence does two things to it (§1 of the paper):
#
# - **unreal tokens**: the input holds a symbol that no real text has, so the
#   model is trained on inputs that differ from those it is used on;
# - **corrupted semantics**: the hidden words are gone, so the rest may mean
#   several things.
#
# Appendix A reviews the work on [MASK]. Sorted by harm it reads like this;
# "untouched" means that the method does not aim at that harm.
#
# | method | unreal tokens | corrupted semantics |
# |---|---|---|
# | BERT's 80/10/10 {cite}`devlin2019bert` | fewer | untouched |
# | ELECTRA {cite}`clark2020electra` | gone | untouched |
# | MAE-LM {cite}`meng2024maelm` | gone from the encoder | untouched |
# | Mask More and Mask Later {cite}`liao2022maskmore` | gone at first | more |
# | masking 40% {cite}`wettig2023mask` | more | more |
# | token dropping {cite}`hou2022dropping` | not its aim: speed | adds to it |
# | ScTD {cite}`zhong2023dropping` | not its aim | repairs what dropping added |
# | ExLM {cite}`zheng2025exlm` | stay, $k$ per mask | **its aim** |
#
# - **BERT** replaces 80% of the chosen tokens by [MASK] and 10% by a random
#   token; 10% it leaves alone. All of them are predicted.
# - **ELECTRA** lets a small MLM fill the masks, and the main model says for every
#   token whether it was replaced. The main model never sees a [MASK]. But the
#   filler knows only the visible words, so what it writes holds no news of the
#   hidden ones.
# - **MAE-LM** keeps [MASK] out of the encoder; a shallow decoder gets the masked
#   positions. Its authors show that an MLM reserves part of its dimensions for
#   [MASK] alone, and that real tokens miss them.
# - **Mask More and Mask Later** adds the [MASK] tokens at a later layer, which
#   costs nothing on GLUE and saves computation, and masks up to half of the
#   tokens.
# - **Wettig et al.** find that 15% is no law: 40% is better for large models. A
#   higher ratio corrupts more and predicts more, and the two pull in opposite
#   directions.
# - **Token dropping** lets tokens found unimportant skip the middle layers.
#   **Zhong et al.** show that this loses meaning and costs accuracy on tasks that
#   need much of it, such as RTE, and train against that loss (ScTD).
#
# Two sentences of Appendix A matter most. The works on [MASK] itself look at
# unreal tokens only. Zhong et al. do look at lost meaning, but at what dropping
# loses *beyond* masking, not at what masking loses, so their result says nothing
# on MLM in general. The appendix speaks of dropping [MASK] tokens; the method
# drops tokens with a low loss, whatever they are. Corrupted semantics caused by
# masking is the gap that the paper fills.
#
# **Question.** How much of each harm does 80/10/10 repair?

# %%
num_tokens, mask_ratio, vocab_size, mask_id = 400_000, 0.15, 1000, -1
token_ids_N = rng.integers(vocab_size, size=num_tokens)
is_chosen_N = rng.random(num_tokens) < mask_ratio
die_N = rng.random(num_tokens)

plain_N = np.where(is_chosen_N, mask_id, token_ids_N)
bert_N = plain_N.copy()
is_random_N = is_chosen_N & (die_N >= 0.8) & (die_N < 0.9)
bert_N[is_random_N] = rng.integers(vocab_size, size=is_random_N.sum())
bert_N[is_chosen_N & (die_N >= 0.9)] = token_ids_N[is_chosen_N & (die_N >= 0.9)]

inputs = {"[MASK] only": plain_N, "BERT's 80/10/10": bert_N}
harms = pd.DataFrame(
    {
        "unreal tokens, %": {
            n: 100 * (x == mask_id).mean() for n, x in inputs.items()
        },
        "words gone, %": {
            n: 100 * (x != token_ids_N).mean() for n, x in inputs.items()
        },
    }
)
harms.round(1)

# %% [markdown]
# **Check.** It removes a fifth of the unreal tokens and a tenth of the losses (a
# random token is the old one only once in a vocabulary). Four standard errors
# leave room for chance.

# %%
expected = {
    "[MASK] only": (0.15, 0.15),
    "BERT's 80/10/10": (0.15 * 0.8, 0.15 * (0.8 + 0.1 * (1 - 1 / vocab_size))),
}
for name, shares in expected.items():
    for measured, p in zip(harms.loc[name] / 100, shares, strict=True):
        assert abs(measured - p) < 4 * math.sqrt(p * (1 - p) / num_tokens), (
            name,
            p,
        )

# %% [markdown]
# **Takeaway.** The known repairs change how a hole looks. The hole stays. The
# rest of the chapter looks into it.

# %% [markdown]
# ## One slot, many answers
#
# **Question.** What does a context say about one hidden word?
#
# `town` is a language whose sentences have 22 words and are driven by four hidden
# variables: a topic, a mood, a number and a tense. It is drawn word by word from
# known probabilities, so Bayes' rule gives the exact distribution of any hidden
# word given the visible ones. `Grammar.marginals` computes it.

# %%
town = grammar("town")
text = (
    "today these gloomy sailors from the harbour near the old bridge are wearily "
    "carrying some ropes before the storm with their cousins"
)
sentence_N = np.array([town.words.index(word) for word in text.split()])
ROPES = text.split().index("ropes")


def posterior_V(language, sentence_N, masked, slot):
    """Distribution of the word at ``slot`` with the positions ``masked`` hidden."""
    row = sorted(masked).index(slot)
    return language.marginals(sentence_N, language.mask(tuple(masked)))[row]


alone_V = posterior_V(town, sentence_N, (ROPES,), ROPES)
{town.words[v]: round(float(alone_V[v]), 2) for v in np.flatnonzero(alone_V)}

# %% [markdown]
# **Check.** Is this what counting would find? To have enough to count we hide
# everything but the word "harbour" and compare with 200,000 sentences.

# %%
HARBOUR = text.split().index("harbour")
hidden = [n for n in range(town.length) if n != HARBOUR]
exact_V = posterior_V(town, sentence_N, hidden, ROPES)

samples_SN = town.sample(200_000, seed=1)
samples_SN = samples_SN[samples_SN[:, HARBOUR] == sentence_N[HARBOUR]]
counted_V = np.bincount(samples_SN[:, ROPES], minlength=len(town.words))
error_V = np.sqrt(exact_V * (1 - exact_V) / len(samples_SN))
assert (np.abs(counted_V / len(samples_SN) - exact_V) <= 4.5 * error_V).all()
len(samples_SN)

# %% [markdown]
# Four words fit equally well, and no model can know which one it was. The number
# to describe this is the **entropy** {cite}`cover2006elements`, in bits,
#
# $$H(x) = -\sum_v P(x = v) \log_2 P(x = v),$$ (eq-slot-entropy)
#
# and $2^{H}$ reads as "as open as so many equally likely answers".


# %%
def bits(probability):
    """Entropy of one distribution, in bits."""
    positive = probability[probability > 0]
    return float(-(positive * np.log2(positive)).sum())


assert bits(alone_V) == 2
# The package has the same function for tensors of log-probabilities.
assert math.isclose(bits(exact_V), entropy_bits(torch.tensor(exact_V).log()).item())

# %% [markdown]
# **Figure.** ({numref}`fig-one-slot`) From top to bottom more of the context is
# hidden. The word at the place of "ropes" becomes more and more open: a harbour
# has four answers; one carries things at three places; then all six topics come
# in.

# %% mystnb={"figure": {"caption": "One slot of `town`: the exact distribution of the word at the place of \"ropes\" in four contexts, with its entropy.", "name": "fig-one-slot"}} tags=["hide-input"]
place = {word: n for n, word in enumerate(text.split())}
masked = [ROPES]
rows, labels = [], []
for label, words in {
    "only this word": (),
    "+ sailors, harbour": ("sailors", "harbour"),
    "+ carrying": ("carrying",),
    "all 11 linked words": tuple(text.split()[n] for n in town.slots),
}.items():
    masked = sorted({*masked, *(place[word] for word in words)})
    rows.append(posterior_V(town, sentence_N, masked, ROPES))
    H = bits(rows[-1])
    labels.append(f"{label}\n{H:.2f} bits, like {2**H:.1f} answers")
possible = np.flatnonzero(rows[-1])
fig, ax = plt.subplots(figsize=(8.2, 2.7))
draw_heatmap(
    ax,
    np.array(rows)[:, possible],
    [town.words[v] for v in possible],
    labels,
    "probability",
    number_format=None,
    cmap="Blues",
    limits=(0, 0.3),
)
_ = ax.tick_params(axis="x", rotation=60)

# %% [markdown]
# **Check.** Hiding more never makes a word more certain on average over
# sentences; in this sentence it holds row by row.

# %%
entropies = [bits(row) for row in rows]
assert entropies == sorted(entropies) and entropies[-1] > 2 * entropies[0]
[round(H, 2) for H in entropies]

# %% [markdown]
# **Takeaway.** A slot has many right answers, and the more of the context is
# hidden the more it has. The paper calls this *intra-token multimodality* (§4.1).
# An MLM has no trouble to express it: its output is a distribution over the
# vocabulary.

# %% [markdown]
# ## Two slots: answers that belong together
#
# **Question.** And if two words are hidden?
#
# The smaller languages have one sentence frame and one hidden variable, the mood.
# In `fours` it has four values, and each decides one word in each of two slots
# far apart.

# %%
fours = grammar("fours")
both_N = fours.mask()  # hides the two slots
example_N = fours.sample(1, seed=0)[0]
words = fours.sentence(example_N).split()
" ".join("[MASK]" if hidden else w for w, hidden in zip(words, both_N, strict=True))


# %%
def tables(language, sentence_N, first, second, masked):
    """Joint distribution of two hidden words, and the product of their marginals.

    Returns:
        joint_AB, product_AB and the words of rows and columns.
    """
    is_masked_N = language.mask(masked)
    joint = language.joint(sentence_N, is_masked_N)
    a, b = (list(joint.positions_M).index(n) for n in (first, second))
    rows, a_C = np.unique(joint.word_ids_CM[:, a], return_inverse=True)
    columns, b_C = np.unique(joint.word_ids_CM[:, b], return_inverse=True)
    joint_AB = np.zeros((len(rows), len(columns)))
    np.add.at(joint_AB, (a_C, b_C), joint.probability_C)
    marginal_MV = language.marginals(sentence_N, is_masked_N)
    product_AB = np.outer(marginal_MV[a][rows], marginal_MV[b][columns])
    spelled = [[language.words[v] for v in ids] for ids in (rows, columns)]
    return joint_AB, product_AB, *spelled


first, second = fours.slots
joint_AB, product_AB, first_words, second_words = tables(
    fours, example_N, first, second, fours.slots
)
assert (joint_AB == np.eye(4) / 4).all() and (product_AB == 1 / 16).all()
first_words, second_words

# %% [markdown]
# **Figure.** ({numref}`fig-joint-product`) Left the truth: four pairs of words,
# 1/4 each. Right what a model says that gives each slot its true distribution but
# treats the slots one by one: all sixteen pairs, 1/16 each. Someone "felt happy"
# and then "wept".

# %% mystnb={"figure": {"caption": "Two hidden words of `fours`: their joint distribution (left) and the product of the two true marginals (right).", "name": "fig-joint-product"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(8.2, 2.8))
for ax, table, title in zip(
    axes, (joint_AB, product_AB), ("joint", "product of marginals"), strict=True
):
    draw_heatmap(
        ax,
        table,
        second_words,
        first_words,
        "probability",
        number_format=".3g",
        cmap="Blues",
        limits=(0, 0.3),
    )
    ax.set(title=title, xlabel="second slot", ylabel="first slot")
    ax.tick_params(axis="x", rotation=30)

# %% [markdown]
# **Check.** Three quarters of what the product predicts cannot be said in the
# language. Filling both slots independently and asking the grammar gives the same
# share.

# %%
impossible = product_AB[joint_AB == 0].sum()
assert impossible == 0.75

num_fills = 4000
fills_SN = np.repeat(example_N[None], num_fills, axis=0)
for slot, p_V in zip(fours.slots, fours.marginals(example_N, both_N), strict=True):
    fills_SN[:, slot] = rng.choice(len(fours.words), size=num_fills, p=p_V)
nonsense = np.isneginf(fours.log_probability(fills_SN)).mean()
assert abs(nonsense - impossible) < 4 * math.sqrt(0.75 * 0.25 / num_fills)

# %% [markdown]
# In `town` things are less tidy. The number of the subject shows in four words;
# we hide them all and look at the determiner and the pronoun. "the" goes with
# both numbers, so it excludes nothing ({numref}`fig-town-pair`).

# %% mystnb={"figure": {"caption": "Determiner and pronoun of a sentence of `town` with the four words hidden that show the number.", "name": "fig-town-pair"}} tags=["hide-input"]
number_words = tuple(place[w] for w in ("these", "sailors", "are", "their"))
town_joint_AB, town_product_AB, determiners, pronouns = tables(
    town, sentence_N, number_words[0], number_words[-1], number_words
)
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.0))
for ax, table, title in zip(
    axes,
    (town_joint_AB, town_product_AB),
    ("joint", "product of marginals"),
    strict=True,
):
    draw_heatmap(
        ax,
        table,
        pronouns,
        determiners,
        "probability",
        cmap="Blues",
        limits=(0, 0.25),
    )
    ax.set(title=title, xlabel="pronoun", ylabel="determiner")

# %%
assert town_joint_AB[determiners.index("these"), pronouns.index("his")] == 0
assert (town_joint_AB[determiners.index("the")] > 0).all()
assert (town_product_AB > 0).all()
# Both tables have the same margins: slot by slot the product is right.
assert np.allclose(town_joint_AB.sum(axis=0), town_product_AB.sum(axis=0))
assert np.allclose(town_joint_AB.sum(axis=1), town_product_AB.sum(axis=1))
f"{town_product_AB[town_joint_AB == 0].sum():.0%} of the product is impossible"

# %% [markdown]
# **Takeaway.** Each slot can be predicted perfectly and the pair still be
# nonsense. The paper calls this *inter-token multimodality*: the meaning of one
# hidden word depends on another hidden word. Non-autoregressive translation met
# it first and gave it the name {cite}`gu2018nat`. ELECTRA's filler draws its
# tokens in this way too.

# %% [markdown]
# ## How many bits is that?
#
# **Question.** How much does a model lose that knows only the marginals?
#
# Let $x_1, \dots, x_M$ be the hidden words ($M$ of them) and $c$ the visible
# ones. All entropies below are given $c$ and averaged over contexts. The **joint
# entropy** $H(x_1, \dots, x_M \mid c)$ is how open the hidden words are together.
# The sum of the **marginal entropies** $H(x_i \mid c)$ is how open they are when
# looked at one by one. Their difference is the **total correlation**
# {cite}`watanabe1960correlation`:
#
# $$\mathrm{TC} = \sum_{i=1}^{M} H(x_i \mid c)
# - H(x_1, \dots, x_M \mid c).$$ (eq-total-correlation)
#
# For two words it is their mutual information. `Grammar` computes all three
# exactly. `num_modes` counts the readings that a context allows, where words that
# tell the same about the hidden variables count once.

# %%
LANGUAGES = ["pairs", "pairs-of-four", "fours", "quartets", "town"]
facts = []
for name in LANGUAGES:
    language = grammar(name)
    is_masked_N = language.mask()
    facts.append(
        {
            "language": name,
            "hidden words": len(language.slots),
            "modes": language.num_modes(language.sample(1, seed=0)[0], is_masked_N),
            "sum of marginals": language.marginal_entropy_bits(is_masked_N),
            "joint": language.joint_entropy_bits(is_masked_N),
        }
    )
facts = pd.DataFrame(facts).set_index("language")
facts["total correlation"] = facts["sum of marginals"] - facts["joint"]
facts.round(2)

# %% [markdown]
# **Check.** In the four small languages the numbers can be written down: with $m$
# moods and $w$ words per slot, one slot has $m w$ equally likely words, and a
# pair is chosen by a mood and two words. And in any one context the averages must
# come out of the tables themselves.

# %%
for name, (m, w) in {
    "pairs": (2, 1),
    "pairs-of-four": (2, 2),
    "fours": (4, 1),
    "quartets": (4, 3),
}.items():
    row, language = facts.loc[name], grammar(name)
    assert math.isclose(row["sum of marginals"], 2 * math.log2(m * w))
    assert math.isclose(row["joint"], math.log2(m) + 2 * math.log2(w))
    assert math.isclose(row["total correlation"], math.log2(m))
    assert row["modes"] == m
    for context_N in language.sample(5, seed=2):
        joint = language.joint(context_N, language.mask())
        marginal_MV = language.marginals(context_N, language.mask())
        assert math.isclose(joint.entropy_bits, row["joint"])
        assert math.isclose(sum(map(bits, marginal_MV)), row["sum of marginals"])

# %% [markdown]
# **Figure.** ({numref}`fig-bits`) Per hidden word, a full bar is the marginal
# entropy; its right part is the share of the total correlation, the left part
# what remains when all hidden words are predicted together.

# %% mystnb={"figure": {"caption": "Marginal and joint entropy of the five languages with all linked words hidden, per hidden word.", "name": "fig-bits"}} tags=["hide-input"]
per_word = facts[["joint", "total correlation"]].div(facts["hidden words"], axis=0)
fig, ax = plt.subplots(figsize=(6.4, 2.4))
ax.barh(
    per_word.index, per_word["joint"], color=COLORS["joint"], label="joint entropy"
)
ax.barh(
    per_word.index,
    per_word["total correlation"],
    left=per_word["joint"],
    color=COLORS["floor"],
    label="total correlation",
)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="bits per hidden word")
_ = ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

# %% [markdown]
# **Takeaway.** What a mood decides in two places is paid for twice when the
# places are predicted one by one. In `town` a third of all bits are such double
# payments.

# %%
lost = facts["total correlation"] / facts["sum of marginals"]
assert 1 / 3 < lost["town"] < 0.35
f"{lost['town']:.1%}"

# %% [markdown]
# ## The floor no MLM can pass
#
# **Question.** Could a cleverer MLM do better than the sum of marginals?
#
# **Theorem.** Let a model see the context $c$ and give each hidden word its own
# distribution, so that $Q(x_1, \dots, x_M \mid c) = \prod_i q_i(x_i \mid c)$.
# Then
#
# $$\begin{aligned}
# \mathbb{E}\left[-\log_2 Q(x_1, \dots, x_M \mid c)\right]
# &= \sum_{i=1}^{M} H(x_i \mid c) \\
# &\quad + \sum_{i=1}^{M} \mathbb{E}_c\!\left[
#   \mathrm{KL}\big(P(x_i \mid c) \,\|\, q_i(x_i \mid c)\big)\right] \\
# &\ge \sum_{i=1}^{M} H(x_i \mid c),
# \end{aligned}$$ (eq-mlm-floor)
#
# with equality exactly if every $q_i$ is the true marginal in every context.
#
# *Proof.* The logarithm of a product is a sum, so the left side is a sum of one
# term for each hidden word, and that term knows the truth only through the
# marginal of this word. Split it:
#
# $$-\log_2 q_i(x_i \mid c) = -\log_2 P(x_i \mid c)
# + \log_2 \frac{P(x_i \mid c)}{q_i(x_i \mid c)}.$$
#
# The mean of the first part is $H(x_i \mid c)$. The mean of the second is a
# Kullback–Leibler divergence, which is never negative, and zero only if $q_i = P$
# {cite}`cover2006elements`. ∎
#
# Put the true marginals in and subtract the joint entropy from both sides: the
# gap that remains is
#
# $$\mathbb{E}_c\!\left[\mathrm{KL}\big(P(x_1, \dots, x_M \mid c)
#   \,\|\, \textstyle\prod_i P(x_i \mid c)\big)\right]
# = \mathrm{TC}.$$ (eq-floor-gap)
#
# Nothing in the proof depends on the size of the network, on the data or on
# training. It uses only that the words are predicted independently *given the
# context*.
#
# **Check.** We attack {eq}`eq-mlm-floor` with random products. Each is a mix of
# the true marginals and noise, from almost true to all noise, scored on the joint
# table, which knows nothing of marginals. Besides the four small languages,
# `town` with the words of its number hidden takes part.


# %%
def product_bits(joint, q_MV):
    """Expected -log2 of the hidden words under a product of distributions."""
    m = np.arange(len(joint.positions_M))
    log2_q_C = np.log2(q_MV[m, joint.word_ids_CM]).sum(axis=1)
    return float(-(joint.probability_C * log2_q_C).sum())


def divergence(p, q):
    """KL(p || q) in bits."""
    return float((p[p > 0] * np.log2(p[p > 0] / q[p > 0])).sum())


cases = [(grammar(name), grammar(name).slots) for name in LANGUAGES[:4]]
cases.append((town, number_words))
attacks, num_attacks = [], 400
for language, masked in cases:
    context_N = sentence_N if language is town else language.sample(1, seed=0)[0]
    joint = language.joint(context_N, language.mask(masked))
    p_MV = language.marginals(context_N, language.mask(masked))
    floor = sum(map(bits, p_MV))
    assert math.isclose(product_bits(joint, np.where(p_MV > 0, p_MV, 1)), floor)
    for noise in 10 ** rng.uniform(-3, 0, size=num_attacks):
        random_MV = rng.dirichlet(np.full(p_MV.shape[1], 0.5), size=len(p_MV))
        q_MV = (1 - noise) * p_MV + noise * random_MV
        reached = product_bits(joint, q_MV)
        excess = sum(divergence(p, q) for p, q in zip(p_MV, q_MV, strict=True))
        attacks.append((language.name, noise, reached - floor))
        # 1e-9: sums of some hundred float64 terms
        assert reached > floor and abs(reached - floor - excess) < 1e-9
    product_C = p_MV[np.arange(len(masked)), joint.word_ids_CM].prod(axis=1)
    assert math.isclose(
        divergence(joint.probability_C, product_C), floor - joint.entropy_bits
    )
attacks = pd.DataFrame(attacks, columns=["language", "noise", "excess"])
len(attacks)

# %% [markdown]
# **Figure.** ({numref}`fig-attacks`) Two thousand models, none at or below 0. The
# closer to the true marginals, the closer to the floor.

# %% mystnb={"figure": {"caption": "Bits above the floor of random product models, from nearly true marginals (left) to pure noise (right).", "name": "fig-attacks"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6.4, 3.0))
for name, group in attacks.groupby("language", sort=False):
    ax.plot(group["noise"], group["excess"], ".", ms=3, label=name)
ax.set(
    xscale="log",
    yscale="log",
    xlabel="share of noise in the model",
    ylabel="bits above the floor",
)
_ = ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=3)

# %% [markdown]
# **Takeaway.** The loss of an MLM has a floor that is known before training, and
# the floor lies above the joint entropy by exactly the total correlation. Only a
# model of dependencies can win those bits.

# %% [markdown]
# ## A trained MLM lands on the floor
#
# **Question.** Does a real network, trained by gradient descent, end there?
#
# We train the package's MLM on `pairs` (floor 2 bits, joint entropy 1 bit) and on
# `quartets` (7.17 and 5.17). Both slots are hidden in every sentence.


# %%
def train_mlm(*options):
    """An MLM trained now, with the recipe ``toy-pairs`` and these options."""
    steps = scale.pick("400", "2000")
    recipe = ["--recipe", "toy-pairs", "--objective", "mlm", "--train.steps", steps]
    small = ["--data.num_sentences", "16384", "--train.validation_rows", "512"]
    every = ["--train.validate_every", "25"]
    return train_live(parse([*recipe, *small, *every, *options]).config, scale)


runs = {name: train_mlm("--data.grammar", name) for name in ("pairs", "quartets")}

# %% [markdown]
# **Check.** We do not trust a validation set with this: the languages are small
# enough to take *every* sentence with its probability, so the expected bits of
# the trained network are exact.


# %%
def every_sentence(language):
    """All sentences of a small language and their probabilities."""
    sentences_SN = np.unique(language.sample(60_000, seed=3), axis=0)
    probability_S = np.exp(language.log_probability(sentences_SN))
    assert math.isclose(probability_S.sum(), 1)  # none is missing
    return sentences_SN, probability_S


@torch.no_grad()
def predict(model, sentences_SN, is_masked_N):
    """What an MLM gives to each word at each hidden place: log2 q, (S, M, V)."""
    ids = SpecialIds()
    hidden_SN = np.where(is_masked_N, ids.mask, sentences_SN + len(SPECIAL_TOKENS))
    rows_SN = np.pad(hidden_SN, ((0, 0), (1, 1)), constant_values=ids.eos)
    rows_SN[:, 0] = ids.bos
    rows_SN = torch.tensor(rows_SN, device=scale.device)
    logits_XV = model(rows_SN, rows_SN == ids.mask).float().cpu()
    log2_q_XV = logits_XV.log_softmax(dim=1).double().numpy() / math.log(2)
    return log2_q_XV.reshape(len(sentences_SN), is_masked_N.sum(), -1)[
        ..., len(SPECIAL_TOKENS) :
    ]


def bits_of_truth(log2_q_SMV, sentences_SN, is_masked_N):
    """-log2 of the words that were hidden, (S, M)."""
    truth_SM = sentences_SN[:, is_masked_N]
    return -np.take_along_axis(log2_q_SMV, truth_SM[..., None], axis=2)[..., 0]


# %%
results = []
for name, run in runs.items():
    language = grammar(name)
    is_masked_N = language.mask()
    sentences_SN, probability_S = every_sentence(language)
    log2_q_SMV = predict(run.model, sentences_SN, is_masked_N)
    truth_SM = bits_of_truth(log2_q_SMV, sentences_SN, is_masked_N)
    reached = probability_S @ truth_SM.sum(axis=1)
    excess = 0.0
    for s_N, p, log2_q_MV in zip(
        sentences_SN, probability_S, log2_q_SMV, strict=True
    ):
        true_MV = language.marginals(s_N, is_masked_N)
        excess += p * divergence(true_MV.ravel(), np.exp2(log2_q_MV).ravel())
    floor = facts.loc[name, "sum of marginals"]
    assert 0 < reached - floor < 0.05  # above, and close
    assert abs(reached - floor - excess) < 1e-4  # float32 logits
    results.append(
        (name, f"{facts.loc[name, 'joint']:.2f}", f"{floor:.2f}", f"{reached:.1f}")
    )
pd.DataFrame(results, columns=["language", "joint", "floor", "MLM, trained"])

# %% [markdown]
# The second assert is {eq}`eq-mlm-floor` again, now for a network: what it is
# above the floor is the distance between its predictions and the true marginals,
# and nothing else.
#
# **Figure.** ({numref}`fig-mlm-floor`) Validation bits during training. Both
# curves come down to the floor and stay; the joint entropy below is out of reach.

# %% mystnb={"figure": {"caption": "An MLM during training, on `pairs` (left) and `quartets` (right). Points are measured on 512 held-out sentences.", "name": "fig-mlm-floor"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.0))
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    floor, joint_bits = facts.loc[name, ["sum of marginals", "joint"]]
    levels = {"floor": floor, "joint entropy": joint_bits}
    draw_curves(ax, {"mlm": run.bits_per_row()}, levels)
    ax.set(title=name, ylim=(joint_bits - 0.4, floor + 0.9))

# %% [markdown]
# **Takeaway.** The floor is not a matter of patience. A tiny network reaches it
# in a few hundred steps, and from there no step can lead further down.

# %% [markdown]
# ## What is missing is the dependency, not capacity
#
# **Question.** Is the joint entropy out of reach for the network, or for the way
# it is asked?
#
# By the chain rule $P(x_1, \dots, x_M \mid c) = \prod_i P(x_i \mid c, x_1, \dots,
# x_{i-1})$. So let an oracle predict the first slot, be told the answer, predict
# the second, and so on. Each step is one marginal, with the earlier words
# visible.


# %%
def chain_bits(language, sentence_N, masked):
    """-log2 of the hidden words, predicted one by one in this order."""
    total = 0.0
    for i, slot in enumerate(masked):
        p_V = posterior_V(language, sentence_N, masked[i:], slot)
        total -= math.log2(p_V[sentence_N[slot]])
    return total


# %% [markdown]
# **Check.** Sentence by sentence this is the joint probability, in every language
# and also when the last slot comes first.

# %%
for name in LANGUAGES:
    language = grammar(name)
    sentences_SN = language.sample(20, seed=4)
    exact_S = -language.log_conditional(sentences_SN, language.mask()) / math.log(2)
    for order in (language.slots, language.slots[::-1]):
        chained_S = [chain_bits(language, s, order) for s in sentences_SN]
        assert np.allclose(chained_S, exact_S, rtol=0, atol=1e-9)

# %% [markdown]
# A network can do the same. We train one more MLM on `pairs`, the same size and
# as many steps, but with half of all words hidden at random, so that it meets
# sentences with one slot hidden and with both. Then we ask it twice: for both
# slots in one go, and in two steps.

# %%
patient = train_mlm(
    "--masking.strategy",
    "bernoulli",
    "--masking.mask_ratio",
    "0.5",
    "--train.validate_every",
    "400",
)
pairs = grammar("pairs")
sentences_SN, probability_S = every_sentence(pairs)
both_N, second_N = pairs.mask(), pairs.mask(pairs.slots[1:])


def asked(is_masked_N):
    """Expected bits of each hidden slot, exact over the language."""
    log2_q_SMV = predict(patient.model, sentences_SN, is_masked_N)
    return probability_S @ bits_of_truth(log2_q_SMV, sentences_SN, is_masked_N)


in_one_go = asked(both_N).sum()
in_two_steps = asked(both_N)[0] + asked(second_N)[0]
assert 2 < in_one_go < 2.05
assert 1 < in_two_steps < 1.05
f"one go {in_one_go:.1f} bits, two steps {in_two_steps:.1f} bits"

# %% [markdown]
# **Takeaway.** The same weights are at the floor in one go and at the joint
# entropy in two steps. Nothing is wrong with the network; a product of
# independent predictions has no place for what it knows. The chain has its price,
# one pass per hidden word. Pre-training has a single pass for all of them, and
# its loss is the product's.

# %% [markdown]
# ## A mixture of products: as many components as modes
#
# **Question.** Can one pass be enough?
#
# Let the model output $k$ products instead of one, and a weight for each:
#
# $$Q(x_1, \dots, x_M \mid c)
# = \sum_{z=1}^{k} w_z \prod_{i=1}^{M}
# q_{z,i}(x_i \mid c).$$ (eq-mixture-of-products)
#
# Each component may tell one story: all happy, or all sad. How good is the best
# mixture of $k$ components for the two slots of `fours`? A mixture that gives
# every mood to one component is found by trying all ways to do so.


# %%
def table_bits(joint_AB, q_AB):
    """Expected -log2 of a pair under a table of probabilities."""
    seen = joint_AB > 0
    return float(-(joint_AB[seen] * np.log2(q_AB[seen])).sum())


def grouped_bits(joint_AB, group_A):
    """Bits of the mixture with one component per group of first words."""
    q_AB = np.zeros_like(joint_AB)
    for z in set(group_A):
        part_AB = np.where(np.array(group_A)[:, None] == z, joint_AB, 0)
        q_AB += np.outer(part_AB.sum(axis=1), part_AB.sum(axis=0)) / part_AB.sum()
    return table_bits(joint_AB, q_AB)


ks = (1, 2, 3, 4, 5)
best = {
    k: min(grouped_bits(joint_AB, g) for g in itertools.product(range(k), repeat=4))
    for k in ks
}
best

# %% [markdown]
# A mixture may also share a mood between components. The EM algorithm looks for
# any mixture; we start it at 64 random places and keep the best.


# %%
def em_bits(joint_AB, k, num_starts=64, num_steps=200):
    """Bits of the best mixture of k products that EM finds."""
    A, B = joint_AB.shape
    w_RZ = np.full((num_starts, k), 1 / k)
    a_RZA = rng.dirichlet(np.ones(A), size=(num_starts, k))
    b_RZB = rng.dirichlet(np.ones(B), size=(num_starts, k))
    tiny = 1e-300  # a component may die out
    for _ in range(num_steps):
        q_RZAB = np.einsum("rz,rza,rzb->rzab", w_RZ, a_RZA, b_RZB)
        count_RZAB = joint_AB * q_RZAB / (q_RZAB.sum(axis=1, keepdims=True) + tiny)
        w_RZ = count_RZAB.sum(axis=(2, 3))
        a_RZA = count_RZAB.sum(axis=3) / (w_RZ[..., None] + tiny)
        b_RZB = count_RZAB.sum(axis=2) / (w_RZ[..., None] + tiny)
    q_RAB = np.einsum("rz,rza,rzb->rab", w_RZ, a_RZA, b_RZB)
    return min(table_bits(joint_AB, q_AB) for q_AB in q_RAB)


searched = {k: em_bits(joint_AB, k) for k in ks}
{k: round(found, 3) for k, found in searched.items()}

# %% [markdown]
# **Check.** One component is an MLM and ends at its floor. Four components, as
# many as there are modes, reach the joint entropy, and a fifth adds nothing. EM
# finds nothing better than whole moods. For two and four components nothing
# better exists, since $k$ components win at most $(M - 1) \log_2 k$ bits on the
# floor.
#
# ```{admonition} Why k components win at most (M − 1) log₂ k bits
# :class: dropdown
# For every $z$, $Q(x) = Q(x, z) / Q(z \mid x)$. Draw $x$ from the truth and $z$
# from $Q(z \mid x)$ and take the mean of $-\log_2$ of both sides:
#
# $$\mathbb{E}[-\log_2 Q(x)] = \mathbb{E}[-\log_2 w_z]
# + \sum_i \mathbb{E}[-\log_2 q_{z,i}(x_i)] - H(z \mid x).$$
#
# The first two parts are cross-entropies, at least $H(z)$ and $H(x_i \mid z)$.
# With the mutual information $I$ this makes
#
# $$\mathbb{E}[-\log_2 Q(x)] \ge \sum_i H(x_i \mid z) + I(x; z)
# = \sum_i H(x_i) - \sum_i I(x_i; z) + I(x; z).$$
#
# Since $I(x_i; z) \le I(x; z) \le H(z) \le \log_2 k$, the gain on the floor is at
# most $(M - 1) \log_2 k$.
# ```

# %%
floor, joint_bits = facts.loc["fours", ["sum of marginals", "joint"]]
assert math.isclose(best[1], floor) and math.isclose(searched[1], floor)
assert math.isclose(best[4], joint_bits) and math.isclose(best[5], joint_bits)
for k in ks:
    assert abs(searched[k] - best[k]) < 1e-3  # EM stops a little early
    assert (
        min(searched[k], best[k]) > floor - math.log2(k) - 1e-9
    )  # the bound, M = 2

# %% [markdown]
# **Figure.** ({numref}`fig-mixture`) Bits of the best mixture of $k$ products.
# With two and four components the moods split evenly and the bound is met.

# %% mystnb={"figure": {"caption": "The best mixture of k products on the two slots of `fours`.", "name": "fig-mixture"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6, 3.2))
smooth = np.linspace(1, 4, 50)
ax.plot(smooth, floor - np.log2(smooth), color="0.6", ls=":", label="bound")
ax.plot(ks, list(best.values()), color="black", marker="o", label="whole moods")
ax.plot(ks, list(searched.values()), "x", ms=9, color=COLORS["second"], label="EM")
for name, level in {"floor": floor, "joint": joint_bits}.items():
    ax.axhline(level, color=COLORS[name], ls="--", lw=1)
    ax.text(5, level + 0.05, name, color=COLORS[name], ha="right", va="bottom")
ax.set(
    xticks=ks, xlabel="components k", ylabel="bits per sentence", ylim=(1.8, 4.4)
)
_ = ax.legend(loc="upper right", bbox_to_anchor=(1, 0.88))

# %% [markdown]
# What counts is modes, not words: `quartets` has nine times as many pairs and
# needs four components too.

# %%
quartets = grammar("quartets")
quartet_AB = tables(
    quartets, quartets.sample(1, seed=0)[0], *quartets.slots, quartets.slots
)[0]
assert quartet_AB.shape == (12, 12)
for k in (1, 2, 4):
    assert abs(em_bits(quartet_AB, k) - best[k] - 2 * math.log2(3)) < 1e-3

# %% [markdown]
# **Takeaway.** One pass is enough if the output can tell several stories. But
# `town` has 18,304 modes, and 18,304 products are no output layer. ExLM gives
# each mask $k$ states, each with its own distribution over words, and links
# states of one mask to states of the next. A path through the links picks a state
# per hidden word, and that is one product. So ExLM is a mixture of products too,
# with *paths* as components: $k$ separate chains of states are the mixture above,
# and with all links there are $k^M$ paths that take one state per mask, at the
# price of $k M$ states. {ref}`chap-expansion` makes the states,
# {ref}`chap-training` the links.

# %% [markdown]
# ## The more is hidden, the worse
#
# **Question.** How does all this depend on the mask ratio?
#
# We take the first 14 words of `town`; 8 of them depend on hidden variables.
# There are $2^8$ ways to hide some of the 8, few enough to take all. The joint
# entropy of each comes from the grammar. The marginal entropies follow by the
# chain rule: $H(x_i \mid c) = H(\text{hidden} \mid c) - H(\text{hidden without }
# i \mid c, x_i)$.

# %%
opening = Grammar("opening", town.latents, town.prior, town.positions[:14])
slots = opening.slots
hidden_sets = [s for m in range(9) for s in itertools.combinations(slots, m)]
joint_of = {s: opening.joint_entropy_bits(opening.mask(s)) for s in hidden_sets}


def without(hidden, slot):
    """The hidden places with one of them shown."""
    return tuple(n for n in hidden if n != slot)


marginal_of = {
    s: {n: joint_of[s] - joint_of[without(s, n)] for n in s} for s in hidden_sets
}
floor_of = {s: sum(marginal_of[s].values()) for s in hidden_sets}
len(hidden_sets)

# %% [markdown]
# **Check.** The package's own sums agree. And hiding one more word never helps:
# every other hidden word becomes more open or stays, so the total correlation
# never falls.

# %%
for s in hidden_sets[::50]:
    assert math.isclose(floor_of[s], opening.marginal_entropy_bits(opening.mask(s)))

for s in hidden_sets:
    for new in set(slots) - set(s):
        more = tuple(sorted({*s, new}))
        assert all(marginal_of[more][n] > marginal_of[s][n] - 1e-9 for n in s)
        assert floor_of[more] - joint_of[more] > floor_of[s] - joint_of[s] - 1e-9

# %% [markdown]
# A mask ratio $p$ hides each of the 8 words with probability $p$, independently.
# The mean over all sets with these weights is again exact.


# %%
def at_ratio(p, value_of):
    """Mean of a number per set of hidden words, per word hidden on average."""
    weight = {s: p ** len(s) * (1 - p) ** (8 - len(s)) for s in hidden_sets}
    return sum(weight[s] * value_of[s] for s in hidden_sets) / (8 * p)


paper_ratios = (0.0225, 0.15, 0.387, 0.622, 0.789)  # those of Figure 3
ratios = np.array(sorted({*np.linspace(0.01, 1, 34), *paper_ratios}))
floor_R = np.array([at_ratio(p, floor_of) for p in ratios])
joint_R = np.array([at_ratio(p, joint_of) for p in ratios])
lost_R = (floor_R - joint_R) / floor_R
share_at = dict(zip(ratios, lost_R, strict=True))
assert round(share_at[0.15], 2) == 0.03 and round(share_at[0.789], 2) == 0.23
assert (np.diff(floor_R) > 0).all() and (np.diff(joint_R) > 0).all()
assert (np.diff(lost_R) > 0).all()
pd.DataFrame(
    {"floor": floor_R, "joint": joint_R, "share lost": lost_R},
    index=pd.Index(ratios.round(4), name="mask ratio"),
).loc[list(paper_ratios)].round(2)

# %% [markdown]
# **Figure.** ({numref}`fig-ratio-bits`) Left: bits per hidden word; the gap
# between the curves is the total correlation. Right: the share of the MLM's bits
# that a model of dependencies could save. Dots are the mask ratios of the paper's
# experiment.

# %% mystnb={"figure": {"caption": "Eight words of `town` under a growing mask ratio, exact. Left: bits per hidden word. Right: the total correlation as a share of the floor.", "name": "fig-ratio-bits"}} tags=["hide-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.0))
is_paper_R = np.isin(ratios, paper_ratios)
left.fill_between(ratios, joint_R, floor_R, color=COLORS["floor"], alpha=0.12)
for curve_R, name, label in (
    (floor_R, "floor", "floor of MLM"),
    (joint_R, "joint", "joint entropy"),
):
    left.plot(ratios, curve_R, color=COLORS[name], label=label)
    left.plot(
        ratios[is_paper_R], curve_R[is_paper_R], "o", ms=5, color=COLORS[name]
    )
right.plot(ratios, 100 * lost_R, color="black")
right.plot(ratios[is_paper_R], 100 * lost_R[is_paper_R], "ko", ms=5)
left.set(xlabel="mask ratio p", ylabel="bits per hidden word", ylim=(0, None))
left.legend(loc="lower right")
_ = right.set(
    xlabel="mask ratio p", ylabel="total correlation, % of floor", ylim=(0, None)
)

# %% [markdown]
# **Takeaway.** Hiding more words makes each of them more open (the paper's Figure
# 5 shows the same rise in the entropy of trained models) and moves a growing
# share of it into dependencies. Here it is exact, and it is a property of the
# language, not of a model. The number of [MASK] symbols rises along the same
# axis, though; the next chapter ({ref}`chap-repeated`) takes the two apart. Mind
# the sizes: at 15% the dependencies are worth 3% of the bits here, at 78.9% 23%.

# %% [markdown]
# ## Summary
#
# - Earlier work repairs the unreal token. The missing words stay missing.
# - A slot has many right answers (entropy), and answers of different slots belong
#   together (total correlation).
# - A model that predicts hidden words independently given the context pays at
#   least the sum of the marginal entropies: the true marginals reach it, nothing
#   passes it.
# - The gap to the joint entropy is the total correlation, and it never falls when
#   one more word is hidden.
# - To win it, a model needs a place for dependencies: several passes, or one pass
#   with several stories. ExLM takes the second way.

# %% [markdown]
# ## Exercises
#
# Predict first, then run.
#
# **1. A lopsided mood.** In `fours`, let the moods have probability 1/2, 1/4, 1/8
# and 1/8. What are the joint entropy, the floor and the total correlation?

# %% tags=["hide-cell"]
lopsided = replace(fours, prior=np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8]))
# Each slot spells the mood and has its entropy: 1/2·1 + 1/4·2 + 2·1/8·3 = 1.75.
assert math.isclose(lopsided.joint_entropy_bits(fours.mask()), 1.75)
assert math.isclose(lopsided.marginal_entropy_bits(fours.mask()), 3.5)
assert math.isclose(lopsided.total_correlation_bits(fours.mask()), 1.75)

# %% [markdown]
# **2. More slots.** A sentence of $M$ slots, all driven by one mood with four
# values, one word each. How do floor, joint entropy and total correlation grow
# with $M$? How many components does a mixture need?

# %% tags=["hide-cell"]
for M in (1, 2, 3, 5):
    slot_positions = tuple(
        Position({(m,): f"{m}{i}" for m in "abcd"}, ("mood",)) for i in range(M)
    )
    chorus = Grammar(
        "chorus", {"mood": tuple("abcd")}, np.full(4, 1 / 4), slot_positions
    )
    assert math.isclose(chorus.marginal_entropy_bits(chorus.mask()), 2 * M)
    assert math.isclose(chorus.joint_entropy_bits(chorus.mask()), 2)
    assert chorus.num_modes(chorus.sample(1, seed=0)[0], chorus.mask()) == 4
# The total correlation is 2 (M - 1) bits. The bound (M - 1) log2 k is met at k = 4.

# %% [markdown]
# **3. Overconfidence.** An MLM knows the true marginals of the four number words
# of `town` but sharpens them: $q_i \propto P_i^{1/T}$. Can it get nearer to the
# joint entropy with some temperature $T$ below 1, since it then puts its money on
# fewer pairs?

# %% tags=["hide-cell"]
p_MV = town.marginals(sentence_N, town.mask(number_words))
joint = town.joint(sentence_N, town.mask(number_words))
by_temperature = {}
for T in (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0):
    q_MV = p_MV ** (1 / T)
    q_MV = q_MV / q_MV.sum(axis=1, keepdims=True)
    by_temperature[T] = product_bits(joint, np.where(q_MV > 0, q_MV, 1))
# No: a sharpened product is a product. The theorem holds, with equality at T = 1.
assert min(by_temperature, key=by_temperature.get) == 1.0

# %% [markdown]
# **4. Three components.** With $k = 3$ the best mixture for `fours` has 2.5 bits,
# and the bound says $4 - \log_2 3 \approx 2.42$. Which moods share a component?
# What would the four probabilities have to be for three components to win
# *exactly* $\log_2 3$ bits?

# %% tags=["hide-cell"]
groups = {
    g: grouped_bits(joint_AB, g) for g in itertools.product(range(3), repeat=4)
}
winner = min(groups, key=groups.get)
assert sorted(np.bincount(winner, minlength=3)) == [1, 1, 2]  # any two share
# Equality needs equally likely components: two moods together weigh as much as one.
even = np.diag([1 / 3, 1 / 3, 1 / 6, 1 / 6])
even_floor = 2 * bits(np.diag(even))
assert math.isclose(even_floor - grouped_bits(even, (0, 1, 2, 2)), math.log2(3))
