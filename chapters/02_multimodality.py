# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-multimodality)=
# # What a masked model cannot say
#
# The masked language model of {ref}`the first chapter <chap-one-notebook>` stops at
# two bits where one is possible. This chapter shows how many bits are lost in this
# way, and why every model that guesses each word by itself loses them. You compute
# exactly how uncertain the hidden words of a toy language are each by itself, and
# how uncertain together. The difference is what ExLM {cite}`zheng2025exlm` can
# save; at the end you see how paths through a graph do so.
#
# **It takes** half an hour and under a minute of one CPU core. **Paper:** §2, §3.3,
# §4.1 and Appendix A.

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
from drawings import draw_dag, draw_heatmap, draw_tables

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
_ = torch.set_num_threads(1)

# %%
import itertools
import math

import numpy as np
import torch
from exlm_so_far import MASK, MLM, every_row, hide, initialise, train, vocabulary

from exlm_mini.data.toy_grammars import grammar

# %% [markdown]
# ## One word, many answers
#
# `town` is a language with sentences of 22 words. For each sentence four hidden
# variables are drawn: a topic, a mood, a number (one or many) and a tense. Then a
# word is drawn for each place; at eleven places, the *slots*, the draw depends on
# one or two variables. Hide "ropes" in the sentence below. What do the other words
# say about it? The answer takes two steps. The visible words tell which values $z$
# of the variables are likely (Bayes' rule), and each $z$ tells which word to
# expect. The package has $P(z)$ as `prior`, and $P(\text{word} \mid z)$ at each
# place as `word_probability_NZV`.

# %%
town = grammar("town")
text = (
    "today these gloomy sailors from the harbour near the old bridge are wearily "
    "carrying some ropes before the storm with their cousins"
)
sentence_N = np.array([town.words.index(word) for word in text.split()])
place = {word: n for n, word in enumerate(text.split())}


def posterior_Z(language, sentence_N, hidden):
    """P(z | visible words), by Bayes' rule."""
    p_Z = language.prior.reshape(-1)
    for n in range(language.length):
        if n not in hidden:
            p_Z = p_Z * language.word_probability_NZV[n][:, sentence_N[n]]
    return p_Z / p_Z.sum()


def marginal_V(language, sentence_N, hidden, slot):
    """P(word at the slot | visible words)."""
    p_Z = posterior_Z(language, sentence_N, hidden)
    return p_Z @ language.word_probability_NZV[slot]


ropes = place["ropes"]
p_V = marginal_V(town, sentence_N, {ropes}, ropes)
print(*(f"{town.words[v]} {p_V[v]:.2f}" for v in np.flatnonzero(p_V)), sep=", ")

# %% [markdown]
# Four words fit equally well, and no model can know which one it was. The
# **entropy** of a distribution, $H(x) = -\sum_v P(x = v) \log_2 P(x = v)$, measures
# its uncertainty in bits {cite}`cover2006elements`; $2^{H}$ can be read as a number
# of equally likely answers.


# %%
def entropy(p):
    """Entropy of a distribution, in bits."""
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


print(f"{entropy(p_V):.2f} bits")

# %% [markdown]
# {numref}`fig-one-slot` hides more and more of the context. From left to right, the
# place of "ropes" allows the words of a harbour, then those of every topic that
# goes with *carrying*, then all twenty, and finally these more evenly. With $c$ for
# the visible words, the two functions above compute
#
# $$
# \begin{aligned}
# P(z \mid c) &\propto P(z) \prod_{n\ \text{visible}} P(x_n \mid z), \\
# P(x_i \mid c) &= \sum_z P(z \mid c)\, P(x_i \mid z).
# \end{aligned}
# $$

# %% mystnb={"figure": {"caption": "The word at the place of \"ropes\" in four contexts: exact probabilities, with the entropy in bits above each column.", "name": "fig-one-slot"}, "image": {"alt": "Four columns of probabilities. With only this word hidden four words are possible, with all eleven dependent words hidden twenty."}} tags=["remove-input"]
hidden, columns = {ropes}, []
contexts = {
    "this": (),
    "+ sailors,\nharbour": ("sailors", "harbour"),
    "+ verb": ("carrying",),
    "all 11": tuple(text.split()[n] for n in town.slots),
}
for more in contexts.values():
    hidden |= {place[word] for word in more}
    columns.append(marginal_V(town, sentence_N, hidden, ropes))
possible = np.flatnonzero(columns[-1])
fig, ax = plt.subplots(figsize=(3.6, 4.6))
words = [town.words[v] for v in possible]
style = {"number_format": None, "cmap": "Blues", "limits": (0, 0.3)}
table = np.array(columns)[:, possible].T
draw_heatmap(ax, table, list(contexts), words, "probability", **style)
ax.set_xlabel("hidden")
ax.tick_params(labelsize=8)
ax.tick_params(axis="x", rotation=0)
for x, column_V in enumerate(columns):
    style = {"ha": "center", "va": "bottom", "fontsize": 9}
    _ = ax.text(x + 0.5, -0.3, f"{entropy(column_V):.1f}", **style)

# %% [markdown]
# The paper calls such doubt about one word *intra-token multimodality* (§4.1). A
# masked language model (MLM) can express it well: its output is a distribution over
# the vocabulary.
#
# ## Two words that belong together
#
# Now hide two words. In `fours` there is one variable, a mood with four values, and
# each mood determines the word in each of two slots. The other words say nothing
# about the mood, and given the mood the two words are independent, so their joint
# distribution is
#
# $$
# P(x_1, x_2 \mid c) = \sum_z P(z \mid c)\, P(x_1 \mid z)\, P(x_2 \mid z) .
# $$

# %%
fours = grammar("fours")
p_Z = posterior_Z(fours, fours.sample(1, seed=0)[0], fours.slots)
first_ZV, second_ZV = fours.word_probability_NZV[list(fours.slots)]
joint_VV = np.einsum("z,zv,zw->vw", p_Z, first_ZV, second_ZV)
product_VV = np.outer(p_Z @ first_ZV, p_Z @ second_ZV)
print(f"{product_VV[joint_VV == 0].sum():.0%} of the product is impossible")

# %% [markdown]
# `product_VV` is what an MLM says at its very best: the product of the true
# distributions of the two words ({numref}`fig-joint-product`). Each row and each
# column has the right sum, but three quarters of the probability lies on pairs that
# no one ever says. The paper calls this *inter-token multimodality*;
# *multimodality* is a term from translation models that write all words at once
# {cite}`gu2018nat`.

# %% mystnb={"figure": {"caption": "Two hidden words of `fours`. Above: how they occur together. Below: the product of their true distributions.", "name": "fig-joint-product"}, "image": {"alt": "Two tables of four by four. Together, each word of the first slot goes with one of the second, with probability 0.25. Each by itself, all sixteen pairs have 0.06."}} tags=["remove-input"]
rows, cols = np.flatnonzero(p_Z @ first_ZV), np.flatnonzero(p_Z @ second_ZV)
tables = {"together": joint_VV, "each by itself": product_VV}
tables = {title: table_VV[np.ix_(rows, cols)] for title, table_VV in tables.items()}
names = [[fours.words[v] for v in some] for some in (rows, cols)]
draw_tables(tables, *names, is_stacked=True)

# %% [markdown]
# ## How many bits is that?
#
# Let $x_1, \dots, x_m$ be the hidden words, and $c$ the visible ones. The
# uncertainty of the words each by itself is the sum of their **marginal entropies**
# $H(x_i \mid c)$. Their uncertainty together is the **joint entropy**
# $H(x_1, \dots, x_m \mid c)$. The difference is the **total correlation**
# {cite}`watanabe1960correlation`,
#
# $$
# \mathrm{TC} = \sum_{i=1}^{m} H(x_i \mid c) - H(x_1, \dots, x_m \mid c),
# $$
#
# which for two words is their mutual information. All of it follows from the table
# of the joint distribution: the sums of its rows and of its columns are the two
# marginals. A third small language, `quartets`, is like `fours`, but each of its
# four moods allows three words in either slot: $2 \log_2 12 = 7.17$ bits each by
# itself, $\log_2 (4 \cdot 9) = 5.17$ together. In these three languages every
# context gives the same entropies; for `town`, the package averages over all
# contexts.


# %%
def entropies_of_two(language):
    """Sum of the marginal entropies, and joint entropy, of two hidden words."""
    p_Z = posterior_Z(language, language.sample(1, seed=0)[0], language.slots)
    first_ZV, second_ZV = language.word_probability_NZV[list(language.slots)]
    joint_VV = np.einsum("z,zv,zw->vw", p_Z, first_ZV, second_ZV)
    apart = entropy(joint_VV.sum(axis=1)) + entropy(joint_VV.sum(axis=0))
    return apart, entropy(joint_VV)


facts = {n: entropies_of_two(grammar(n)) for n in ("pairs", "fours", "quartets")}
facts["town"] = (
    town.marginal_entropy_bits(town.mask()),
    town.joint_entropy_bits(town.mask()),
)
print("          each by itself  together  difference")
for name, (apart, together) in facts.items():
    print(f"{name:9}{apart:15.2f}{together:10.2f}{apart - together:12.2f}")

# %% mystnb={"code_prompt_show": "Checked: the package has the same distributions and entropies, and the entropy rises in every step of the figure"} tags=["hide-cell", "check"]
theirs_V = town.marginals(sentence_N, town.mask((ropes,)))[0]
assert np.allclose(p_V, theirs_V, rtol=0, atol=1e-12)
every = town.marginals(sentence_N, town.mask())[town.slots.index(ropes)]
assert np.allclose(columns[-1], every, rtol=0, atol=1e-12)
entropies = [entropy(column_V) for column_V in columns]
assert entropies == sorted(entropies) and entropies[-1] > 2 * entropies[0]
for name in ("pairs", "fours", "quartets"):
    language = grammar(name)
    exact = language.marginal_entropy_bits(language.mask())
    assert np.allclose(
        facts[name], (exact, language.joint_entropy_bits(language.mask()))
    )
assert 1 / 3 < 1 - facts["town"][1] / facts["town"][0] < 0.35

# %% [markdown]
# A model that predicts each word by itself pays for what words share once for every
# word that carries it; a model that predicts them together pays for it once. In
# `town`, with all eleven slots hidden, a third of an MLM's bits is such a surplus.
#
# ## The best that independent guesses can do
#
# Could a cleverer MLM need fewer bits? Let a model see $c$ and give each hidden
# word a distribution $q_i$ of its own. The negative logarithm of their product is a
# sum with one term for each hidden word, and the mean of each term is
# $H(x_i \mid c)$ plus a Kullback–Leibler divergence {cite}`cover2006elements`,
# which is never negative:
#
# $$
# \begin{aligned}
# \mathbb{E}\Big[-\log_2 &\prod_{i=1}^{m} q_i(x_i \mid c)\Big]
# = \sum_{i=1}^{m} H(x_i \mid c) \\
# &+ \sum_{i=1}^{m} \mathbb{E}_c\big[\mathrm{KL}(P(x_i \mid c) \,\|\, q_i)\big]
# \ge \sum_{i=1}^{m} H(x_i \mid c).
# \end{aligned}
# $$ (eq-gibbs)
#
# So the sum of the marginal entropies is the **floor** of an MLM, and it lies above
# the joint entropy by the total correlation. The proof does not mention the size of
# the network, the data or the training.
#
# ## The same weights, asked twice
#
# Is the network too small to know that the words belong together? Train the MLM of
# the first chapter on `pairs` and hide each of the two slots with probability one
# half, so that the model meets sentences with one slot hidden and with both. Then
# let it guess the first slot, tell it the answer, and let it guess the second. By
# the chain rule, $P(x_1, x_2 \mid c)$ is $P(x_1 \mid c)$ times
# $P(x_2 \mid c, x_1)$.

# %% tags=["nbval-ignore-output"]
pairs = grammar("pairs")
WORDS = vocabulary(pairs)
sentence_BN = every_row(pairs)
first, second = (1 + n for n in pairs.slots)
draw = torch.Generator().manual_seed(1)


def half_hidden():
    is_hidden_BN = torch.zeros_like(sentence_BN, dtype=torch.bool)
    is_hidden_BN[:, [first, second]] = (
        torch.rand(len(sentence_BN), 2, generator=draw) < 0.5
    )
    return sentence_BN.masked_fill(is_hidden_BN, MASK), sentence_BN


@torch.no_grad()
def word_bits(model, masked_BN, place):
    """Mean over all sentences of -log2 P(the word at this place)."""
    log_word_BV = model.log_words(masked_BN)[:, place]
    log_p_B1 = log_word_BV.gather(1, sentence_BN[:, [place]])
    return -log_p_B1.mean().item() / math.log(2)


_ = torch.manual_seed(1)
mlm = MLM(len(WORDS))
initialise(mlm)
_ = train(mlm, half_hidden, steps=300)
both = hide(sentence_BN, [first, second])
first_bits = word_bits(mlm, both, first)
in_one_go = first_bits + word_bits(mlm, both, second)
in_two_steps = first_bits + word_bits(mlm, hide(sentence_BN, [second]), second)
print(f"in one go {in_one_go:.3f} bits, in two steps {in_two_steps:.3f} bits")

# %% [markdown]
# The same weights reach the floor in one go and the joint entropy in two steps. The
# network knows the dependency; a product of separate predictions cannot express it.
# Let it write, with each mask drawing its word by itself:

# %% tags=["nbval-ignore-output"]
with torch.no_grad():
    p_MV = mlm.log_words(both[:1])[0, [first, second]].exp()
pick = torch.Generator().manual_seed(9)
for a, b in torch.multinomial(p_MV, 8, True, generator=pick).T.tolist():
    is_said = (WORDS[a], WORDS[b]) in (("happy", "smiled"), ("sad", "wept"))
    verdict = "possible" if is_said else "impossible"
    print(f"he felt {WORDS[a]:5} ... his sister {WORDS[b]:6} {verdict}")

# %% mystnb={"code_prompt_show": "Checked: within 0.05 bits of floor and joint entropy; half of what the model writes is impossible"} tags=["hide-cell", "check"]
assert 0 < in_one_go - facts["pairs"][0] < 0.05
assert 0 < in_two_steps - facts["pairs"][1] < 0.05
happy, sad, smiled, wept = map(WORDS.index, ["happy", "sad", "smiled", "wept"])
possible = p_MV[0, happy] * p_MV[1, smiled] + p_MV[0, sad] * p_MV[1, wept]
assert abs(possible - 0.5) < 0.05

# %% [markdown]
# The chain rule, however, needs one pass per hidden word; pre-training has one pass
# for all.
#
# ## One pass with several stories
#
# One pass can be enough if the model may tell several *stories*, one for each
# reading of the sentence. Let it output $k$ products instead of one, each with a
# weight:
#
# $$
# Q(x_1, \dots, x_m \mid c)
# = \sum_{z=1}^{k} w_z \prod_{i=1}^{m} q_{z,i}(x_i \mid c).
# $$
#
# One product may say *happy* and *smiled*, another *sad* and *wept*. How good are
# $k$ products for `fours`? Assign each mood to one of them, in every way, and keep
# the best.


# %%
def mixture_bits(group_Z):
    """Bits of a mixture with one product for each group of moods."""
    q_VV = np.zeros_like(joint_VV)
    for group in set(group_Z):
        part_Z = p_Z * (np.array(group_Z) == group)
        q_VV += np.outer(part_Z @ first_ZV, part_Z @ second_ZV) / part_Z.sum()
    seen = joint_VV > 0
    return float(-(joint_VV[seen] * np.log2(q_VV[seen])).sum())


for k in (1, 2, 3, 4, 5):
    best = min(map(mixture_bits, itertools.product(range(k), repeat=4)))
    print(f"k = {k}: {best:.2f} bits")

# %% [markdown]
# One product is an MLM and stays at the floor of 4 bits. Four products, as many as
# there are moods, reach the joint entropy, and a fifth adds nothing. In general,
# $k$ products get at most $(m - 1) \log_2 k$ bits below the floor.
#
# ```{admonition} Proof of the bound
# :class: dropdown
# Everything here is given $c$. For every $z$, $Q(x) = Q(x, z) / Q(z \mid x)$. Draw
# $x$ from the truth and $z$ from $Q(z \mid x)$, and take the mean of $-\log_2$ of
# both sides:
#
# $$
# \begin{aligned}
# \mathbb{E}[&-\log_2 Q(x)] \\
# &= \mathbb{E}[-\log_2 w_z] - H(z \mid x) \\
# &\quad + \sum_i \mathbb{E}[-\log_2 q_{z,i}(x_i)].
# \end{aligned}
# $$
#
# The two means are cross-entropies, hence at least $H(z)$ and $H(x_i \mid z)$.
# With the mutual information $I$ this gives
#
# $$
# \begin{aligned}
# \mathbb{E}[&-\log_2 Q(x)] \\
# &\ge I(x; z) + \sum_i H(x_i \mid z) \\
# &= \sum_i H(x_i) + I(x; z) - \sum_i I(x_i; z).
# \end{aligned}
# $$
#
# Since $I(x_i; z) \le I(x; z)$ and $I(x; z) \le H(z) \le \log_2 k$, this mean is at
# most $(m - 1) \log_2 k$ below the floor.
# ```
#
# ## From stories to paths
#
# Such a mixture has a limit: each new variable multiplies the number of products.
# `town` has 72 values of $z$, and no output layer has room for those of real text.
# {numref}`fig-stories` shows ExLM's way out. Give each mask $k$ *states*, each with
# its own distribution over words. Two stories are two rows of states. Now let a
# state lead to *any* state of the next mask: every path through the graph is a
# story, a product like those above, and $k m$ states tell $k^m$ of them. The
# numbers on the edges say how likely each path is, and can forbid those that make
# no sense. Choosing an edge carries at most $\log_2 k$ bits, as choosing a product
# does; but a product is chosen once for all masks, and a path chooses anew at every
# step.

# %% mystnb={"figure": {"caption": "Three masks with two states each. Above: a mixture of two stories. Below: the same six states as a graph, with eight paths. The number on an edge is its probability, given the state it leaves. Here the first word influences the second but not the third.", "name": "fig-stories"}, "image": {"alt": "Above, two separate chains, happy smiled sang and sad wept sighed. Below, edges lead from every state to both states of the next mask: from happy to smiled with 0.9, to wept with 0.1, and then on to either with 0.5."}} tags=["remove-input"]
labels = ["BOS", "happy", "sad", "smiled", "wept", "sang", "sighed", "EOS"]
kinds = ["boundary", "mask", "mask", "second", "second", "mask", "mask", "boundary"]
owner = np.array([0, 1, 1, 2, 2, 3, 3, 4])
is_next = owner[:, None] + 1 == owner
is_same = (np.arange(8)[:, None] % 2 == np.arange(8) % 2) | (owner == 4)
is_same[0] = True
fig, axes = plt.subplots(2, 1, figsize=(3.6, 3.8))
for ax, is_edge in zip(axes, (is_next & is_same, is_next), strict=True):
    E = is_edge / np.maximum(is_edge.sum(axis=1, keepdims=True), 1)
    if ax is axes[1]:
        E[1:3, 3:5] = [[0.9, 0.1], [0.1, 0.9]]
    draw_dag(ax, E, owner.tolist(), labels, kinds)

# %% [markdown]
# ## Dependence grows with the mask ratio
#
# {numref}`fig-ratio-bits` looks at the first 14 words of `town` alone, of which
# eight are slots. Each slot is hidden with probability $p$, and the mean over all
# $2^8$ cases is exact. As $p$ grows, every word becomes more uncertain, and the
# hidden words share more. The surplus is 3% of an MLM's bits at $p = 15\%$ (less if
# all 22 words were in view), and 23% at 78.9%, the highest ratio in the paper. A
# higher ratio also puts more [MASK] symbols into the input. {ref}`chap-repeated`
# separates the two effects, and says where 78.9% comes from.

# %% mystnb={"figure": {"caption": "Bits per hidden word of `town` as more is hidden, exact. The space between the curves is the total correlation.", "name": "fig-ratio-bits"}, "image": {"alt": "Two rising curves over the mask ratio, each by itself above together; the space between them widens to more than a quarter."}} tags=["remove-input"]
from exlm_mini.data.toy import Grammar

opening = Grammar("opening", town.latents, town.prior, town.positions[:14])
hidden_sets = [
    s for m in range(9) for s in itertools.combinations(opening.slots, m)
]
joint_of = {s: opening.joint_entropy_bits(opening.mask(s)) for s in hidden_sets}


def floor_of(s):
    """Sum of H(x_i | c) = H(s | c) - H(s without i | c, x_i), by the chain rule."""
    shown = (tuple(n for n in s if n != i) for i in s)
    return sum(joint_of[s] - joint_of[rest] for rest in shown)


def at_ratio(p):
    """Mean floor and joint entropy, divided by the mean number of hidden words."""
    weight = np.array([p ** len(s) * (1 - p) ** (8 - len(s)) for s in hidden_sets])
    values = np.array([(floor_of(s), joint_of[s]) for s in hidden_sets])
    return weight @ values / (8 * p)


ratios = (0.01, 0.05, 0.15, 0.25, 0.387, 0.5, 0.622, 0.7, 0.789, 0.9, 1.0)
floor_R, joint_R = np.array([at_ratio(p) for p in ratios]).T
fig, ax = plt.subplots(figsize=(3.6, 2.8))
ax.fill_between(ratios, joint_R, floor_R, color="0.9")
ax.plot(ratios, floor_R, "o-", ms=4, color=COLORS["floor"])
ax.plot(ratios, joint_R, "s-", ms=4, color=COLORS["joint"])
ax.text(0.5, floor_R[5] + 0.12, "each by itself", color=COLORS["floor"], ha="right")
ax.text(0.52, joint_R[5] - 0.06, "together", color=COLORS["joint"], va="top")
_ = ax.set(xlabel="mask ratio p", ylabel="bits per hidden word", ylim=(0, None))

# %% mystnb={"code_prompt_show": "Checked: the mixtures, the bound, 72 values of z, and the shares of 3% and 23%"} tags=["hide-cell", "check"]
best = {
    k: min(map(mixture_bits, itertools.product(range(k), repeat=4)))
    for k in (1, 2, 3, 4, 5)
}
floor, together = facts["fours"]
assert np.allclose(list(best.values()), [floor, 3, 2.5, together, together])
assert all(best[k] > floor - math.log2(k) - 1e-9 for k in best)
assert math.prod(map(len, town.latents.values())) == 72
lost = dict(zip(ratios, (floor_R - joint_R) / floor_R, strict=True))
assert round(lost[0.15], 2) == 0.03 and round(lost[0.789], 2) == 0.23
assert list(lost.values()) == sorted(lost.values())

# %% [markdown]
# ```{admonition} What others have repaired
# :class: dropdown
# Most work on [MASK] is about the symbol itself, which no real text has. BERT does
# without it at a fifth of the chosen words {cite}`devlin2019bert`. ELECTRA lets a
# small MLM fill the masks and trains the main model to spot what was replaced
# {cite}`clark2020electra`. MAE-LM keeps [MASK] out of the encoder
# {cite}`meng2024maelm`, and Mask More and Mask Later adds it at a later layer
# {cite}`liao2022maskmore`. Token dropping lets tokens skip the middle layers
# {cite}`hou2022dropping`, and {cite:t}`zhong2023dropping` recover meaning that
# dropping tokens loses on top of masking. What masking itself takes away is still
# missing, and that is where the paper starts.
# ```
#
# ## Exercise: take the positions away
#
# Let the MLM see *which* words are visible but not where anything stands: $i = 0$
# for every token. Both slots of `pairs` are hidden. **Predict** where the loss
# comes to rest: at 2 bits as before, at 3, or at 4? Subclass `MLM`, train it for
# 150 steps, then open the solution.


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
class NoPlaces(MLM):
    """An MLM that puts every token at position 0."""

    def log_words(self, masked_BN):
        nowhere_BN = torch.zeros_like(masked_BN)
        return self.encoder.log_words(
            self.encoder(masked_BN, nowhere_BN, nowhere_BN)
        )


_ = torch.manual_seed(1)
lost_model = NoPlaces(len(WORDS))
initialise(lost_model)
curve = train(lost_model, lambda: (both, sentence_BN))
# All masks of a row look alike and get one distribution, at best the mean of the
# two true ones: a quarter for each of four words, 2 bits for each mask.
assert 4 - 1e-3 < curve[150] < 4.1
