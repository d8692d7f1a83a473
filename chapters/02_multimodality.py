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
# The masked language model of {ref}`the last chapter <chap-mlm>` predicts every
# hidden word as well as anyone can. Yet when it fills both slots of a sentence,
# half of what it writes is nonsense: someone "felt happy", and his sister "wept".
# More training does not help. This chapter says how many bits are lost in this
# way, and why every model that guesses each word by itself loses them.
#
# You compute exactly how uncertain the hidden words of a toy language are one by
# one, and how uncertain they are together. The difference is what ExLM
# {cite}`zheng2025exlm` is after.
#
# **You will know afterwards** what the paper means by *multimodality* inside one
# token and between tokens, what the best possible masked language model (MLM)
# pays for it, and why the cure needs several states for each mask.
#
# **What it needs.** {ref}`The last chapter <chap-mlm>`, and under a minute on one
# CPU core. The toy languages and the training loop come from the package.
#
# **Paper.** §3.3, §4.1 and Appendix A.

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
import seaborn as sns
import torch
from drawings import draw_curves, draw_heatmap
from live import chapter_scale, train_live
from torch.nn import functional as F

from exlm_mini.config import SPECIAL_TOKENS, SpecialIds
from exlm_mini.config.options import parse
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()
scale = chapter_scale()
print(scale)

# %% [markdown]
# ## One word, many answers
#
# `town` is a language with sentences of 22 words. For each, four hidden variables
# are drawn: a topic, a mood, a number and a tense. Then a word is drawn for each
# place; at eleven places the draw depends on one or two variables.

# %%
town = grammar("town")
text = (
    "today these gloomy sailors from the harbour near the old bridge are wearily "
    "carrying some ropes before the storm with their cousins"
)
sentence_N = np.array([town.words.index(word) for word in text.split()])
place = {word: n for n, word in enumerate(text.split())}

# %% [markdown]
# Hide "ropes". What do the other words say about it? Bayes' rule answers in two
# steps. The visible words tell which values of the variables are likely; call a
# joint value of the four $z$ and the visible words $c$:
#
# $$
# P(z \mid c) \propto P(z) \prod_{n\ \text{visible}} P(x_n \mid z).
# $$
#
# Then $z$ tells which word to expect: $P(x_i \mid c) = \sum_z P(z \mid c)\, P(x_i
# \mid z)$. The language gives the prior $P(z)$ and a table of $P(\text{word} \mid
# z)$ for each of its `N` places (`Z` values of $z$, `V` words).


# %%
def posterior_Z(language, sentence_N, hidden):
    """P(z | visible words)."""
    p_Z = language.prior.reshape(-1)
    for n in range(language.length):
        if n not in hidden:
            p_Z = p_Z * language.word_probability_NZV[n][:, sentence_N[n]]
    return p_Z / p_Z.sum()


def marginal_V(language, sentence_N, hidden, slot):
    """P(word at the slot | visible words)."""
    p_Z = posterior_Z(language, sentence_N, hidden)
    return p_Z @ language.word_probability_NZV[slot]


ROPES = place["ropes"]
p_V = marginal_V(town, sentence_N, {ROPES}, ROPES)
print(*(f"{town.words[v]} {p_V[v]:.2f}" for v in np.flatnonzero(p_V)), sep="\n")

# %% [markdown]
# Four words fit equally well, and no model can know which one it was. The
# **entropy** of a distribution measures its uncertainty
# {cite}`cover2006elements`, in bits,
#
# $$H(x) = -\sum_v P(x = v) \log_2 P(x = v),$$
#
# and $2^{H}$ can be read as a number of equally likely answers.


# %%
def bits(p):
    """Entropy of a distribution, in bits."""
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


round(bits(p_V), 2)

# %% [markdown]
# {numref}`fig-one-slot` hides more and more of the context. From left to right,
# the place of "ropes" has the answers of a harbour, those of every topic in which
# people carry things, all, and all a little more evenly.

# %% mystnb={"figure": {"caption": "The word at the place of \"ropes\" in four contexts: exact probabilities, with the entropy above each column.", "name": "fig-one-slot"}} tags=["hide-input"]
hidden, columns = {ROPES}, []
contexts = {
    "this\nword": (),
    "+ sailors,\nharbour": ("sailors", "harbour"),
    "+\ncarrying": ("carrying",),
    "all\n11": tuple(text.split()[n] for n in town.slots),
}
for more in contexts.values():
    hidden |= {place[word] for word in more}
    columns.append(marginal_V(town, sentence_N, hidden, ROPES))
possible = np.flatnonzero(columns[-1])
fig, ax = plt.subplots(figsize=(5, 5.4))
table = np.array(columns)[:, possible].T
words = [town.words[v] for v in possible]
style = {"number_format": None, "cmap": "Blues", "limits": (0, 0.3)}
draw_heatmap(ax, table, list(contexts), words, "probability", **style)
ax.set_xlabel("hidden")
ax.tick_params(axis="x", labelsize=9)
for x, column_V in enumerate(columns):
    H = bits(column_V)
    _ = ax.text(
        x + 0.5, -0.3, f"{H:.1f} bits", ha="center", va="bottom", fontsize=9
    )

# %% mystnb={"code_prompt_show": "Checked: the package has the same distributions, and the entropy rises in every step"} tags=["hide-cell", "check"]
theirs_V = town.marginals(sentence_N, town.mask((ROPES,)))[0]
assert np.allclose(p_V, theirs_V, rtol=0, atol=1e-12)
every = town.marginals(sentence_N, town.mask())[town.slots.index(ROPES)]
assert np.allclose(columns[-1], every, rtol=0, atol=1e-12)
entropies = [bits(column_V) for column_V in columns]
assert entropies == sorted(entropies) and entropies[-1] > 2 * entropies[0]

# %% [markdown]
# The paper calls this *intra-token multimodality* (§4.1). An MLM can express it
# well: its output is a distribution over the vocabulary.
#
# ## Two words that belong together
#
# Now hide two words. In `fours` there is one variable, a mood with four values,
# and each mood determines the word in each of two slots. The other words say
# nothing about it. Given the mood the two words are independent, so the joint
# distribution is a sum over moods:
#
# $$
# \begin{aligned}
# P(x_1, &x_2 \mid c) \\
# &= \sum_z P(z \mid c)\, P(x_1 \mid z)\, P(x_2 \mid z).
# \end{aligned}
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
# column has the right sum, but three quarters of the probability lies on pairs
# that no one ever says.

# %% mystnb={"figure": {"caption": "Two hidden words of `fours`. Left: how they occur together. Right: the product of their true distributions.", "name": "fig-joint-product"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.2), sharey=True)
rows, cols = np.flatnonzero(p_Z @ first_ZV), np.flatnonzero(p_Z @ second_ZV)
names = ([fours.words[v] for v in cols], [fours.words[v] for v in rows])
for ax, table_VV, title in zip(
    axes, (joint_VV, product_VV), ("together", "one by one"), strict=True
):
    sns.heatmap(
        table_VV[np.ix_(rows, cols)],
        ax=ax,
        annot=np.vectorize(lambda p: f"1/{1 / p:.0f}" if p else "0")(
            table_VV[np.ix_(rows, cols)]
        ),
        fmt="",
        annot_kws={"fontsize": 12},
        cmap="Blues",
        vmin=0,
        vmax=0.4,
        cbar=False,
        linewidths=0.5,
        xticklabels=names[0],
        yticklabels=names[1],
    )
    ax.set_title(title)
    ax.tick_params(axis="y", rotation=0)
    plt.setp(ax.get_xticklabels(), rotation=40, ha="right", rotation_mode="anchor")

# %% [markdown]
# Each word can be predicted as well as possible while the pair is nonsense. The
# paper calls this *inter-token multimodality*. The name comes from machine
# translation that writes all words at once {cite}`gu2018nat`.
#
# ## How many bits is that?
#
# Let $x_1, \dots, x_M$ be the hidden words, and $c$ the visible ones. The
# uncertainty of the words one by one is the sum of their **marginal entropies**
# $H(x_i \mid c)$. Their uncertainty together is the **joint entropy** $H(x_1,
# \dots, x_M \mid c)$. Entropies given $c$ are averages over contexts. The
# difference is the **total correlation** {cite}`watanabe1960correlation`,
#
# $$
# \begin{aligned}
# \mathrm{TC} &= \sum_{i=1}^{M} H(x_i \mid c) \\
# &\quad - H(x_1, \dots, x_M \mid c),
# \end{aligned}
# $$
#
# which for two words is their mutual information. To compute the joint entropy,
# list the combinations of hidden words slot by slot and keep those that are
# possible (`C`).


# %%
def entropies_in(language, sentence_N, hidden):
    """Sum of the marginal entropies, and joint entropy, in this context."""
    marginal = sum(
        bits(marginal_V(language, sentence_N, hidden, n)) for n in hidden
    )
    p_Z = posterior_Z(language, sentence_N, hidden)
    p_CZ = p_Z[None]
    for n in hidden:
        table_ZV = language.word_probability_NZV[n]
        p_CZ = np.einsum("cz,zv->cvz", p_CZ, table_ZV).reshape(-1, len(p_Z))
        p_CZ = p_CZ[p_CZ.any(axis=1)]
    return marginal, bits(p_CZ.sum(axis=1))


facts = {}
for name in ("pairs", "fours", "quartets"):
    language = grammar(name)
    context_N = language.sample(1, seed=0)[0]
    facts[name] = entropies_in(language, context_N, language.slots)
    print(name, np.round(facts[name], 2), "bits")

# %% [markdown]
# In these languages the visible words say nothing about the mood, so one context
# is as good as the average. (`quartets` has four moods, each with three words in
# each slot.) In `town`, contexts differ. The package averages over all of them,
# and it agrees with your values for the other three:

# %%
facts["town"] = (
    town.marginal_entropy_bits(town.mask()),
    town.joint_entropy_bits(town.mask()),
)
table = pd.DataFrame(facts, index=["one by one", "together"]).T
table["total correlation"] = table["one by one"] - table["together"]
table.round(2)

# %% mystnb={"code_prompt_show": "Checked: the package's entropies are the same, also averaged over 300 contexts of town with four words hidden"} tags=["hide-cell", "check"]
for name in ("pairs", "fours", "quartets"):
    language = grammar(name)
    mine = facts[name]
    assert math.isclose(mine[0], language.marginal_entropy_bits(language.mask()))
    assert math.isclose(mine[1], language.joint_entropy_bits(language.mask()))
number_slots = [place[word] for word in ("these", "sailors", "are", "their")]
means = [entropies_in(town, s_N, number_slots) for s_N in town.sample(300, seed=1)]
error = np.std(means, axis=0) / math.sqrt(300)
is_masked_N = town.mask(tuple(number_slots))
exact = (
    town.marginal_entropy_bits(is_masked_N),
    town.joint_entropy_bits(is_masked_N),
)
assert (np.abs(np.mean(means, axis=0) - exact) < 4 * error).all()
assert (
    1 / 3 < table["total correlation"]["town"] / table["one by one"]["town"] < 0.35
)

# %% [markdown]
# What the mood decides in two places is paid for twice if the places are
# predicted one by one. In `town`, with its eleven linked words hidden, a third of
# all bits is such double payment. (With 15% of the words hidden at random, as BERT
# does it, about three of 22, hardly any is: 0.02 bits, {ref}`chap-findings`.)
#
# ## The best that word-by-word guessing can do
#
# Could a cleverer MLM pay less? Let a model see $c$ and give each hidden word a
# distribution $q_i$ of its own. Whatever these distributions are,
#
# $$
# \begin{aligned}
# \mathbb{E}\Big[-\log_2 &\prod_{i=1}^{M} q_i(x_i \mid c)\Big]
# = \sum_{i=1}^{M} H(x_i \mid c) \\
# &+ \sum_{i=1}^{M} \mathbb{E}_c\big[\mathrm{KL}(P(x_i \mid c) \,\|\, q_i)\big] \\
# &\ge \sum_{i=1}^{M} H(x_i \mid c),
# \end{aligned}
# $$
#
# with equality exactly if every $q_i$ is the true marginal.
#
# *Proof.* The logarithm of the product is a sum with one term for each hidden
# word, and the mean of each term depends on the truth only through the marginal
# of its word. By the split of the expected loss in {ref}`the last chapter
# <chap-mlm>` this mean is $H(x_i \mid c)$ plus a Kullback–Leibler divergence,
# which is never negative. ∎
#
# So the sum of the marginal entropies is the **floor** of an MLM, and it lies
# above the joint entropy by the total correlation. The proof does not mention the
# size of the network, the data or the training.

# %% mystnb={"code_prompt_show": "Checked: of 2,000 random products, from almost exact to pure noise, none is below the floor of 4 bits; the true marginals reach it"} tags=["hide-cell", "check"]
floor, together = facts["fours"]
rng = np.random.default_rng(0)
reached = []
for noise in 10 ** rng.uniform(-3, 0, size=2000):
    random_2V = rng.dirichlet(np.ones(len(fours.words)), size=2)
    q_V = (1 - noise) * (p_Z @ first_ZV) + noise * random_2V[0]
    r_V = (1 - noise) * (p_Z @ second_ZV) + noise * random_2V[1]
    reached.append(-(joint_VV * np.log2(np.outer(q_V, r_V))).sum())
assert floor < min(reached) < floor + 0.01
seen = joint_VV > 0
assert math.isclose(-(joint_VV[seen] * np.log2(product_VV[seen])).sum(), floor)

# %% [markdown]
# ## A trained MLM ends on its floor
#
# The package trains an MLM on `quartets`, with both slots hidden in every
# sentence; the model is the one you wrote in {ref}`the last chapter <chap-mlm>`.


# %%
def train_mlm(*options):
    steps = scale.pick("400", "2000")
    fixed = ["--recipe", "toy-pairs", "--objective", "mlm", "--train.steps", steps]
    fixed += ["--data.num_sentences", "16384", "--train.validation_rows", "512"]
    return train_live(parse([*fixed, *options]).config, scale)


run = train_mlm("--data.grammar", "quartets", "--train.validate_every", "25")

# %% mystnb={"figure": {"caption": "An MLM during training, on 512 held-out sentences of `quartets`.", "name": "fig-mlm-floor"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5.4, 3.2))
floor, together = facts["quartets"]
draw_curves(ax, {"mlm": run.bits_per_row()}, {"floor": floor, "joint": together})
ax.get_legend().remove()
_ = ax.set(ylim=(together - 0.4, floor + 1.6))

# %% [markdown]
# {numref}`fig-mlm-floor` shows bits on held-out sentences. To get the expected
# bits without chance, ask the model about *every* sentence of the language.


# %%
@torch.no_grad()
def hidden_bits(model, word_ids_BN, hidden):
    """-log2 P of each hidden word, guessed by itself, (B, M)."""
    ids_BN = torch.from_numpy(word_ids_BN) + len(SPECIAL_TOKENS)
    ids_BN = F.pad(ids_BN, (1, 1), value=SpecialIds().bos)
    ids_BN[:, -1] = SpecialIds().eos
    is_masked_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
    is_masked_BN[:, [n + 1 for n in hidden]] = True
    masked_BN = ids_BN.masked_fill(is_masked_BN, SpecialIds().mask)
    logits_SV = model(masked_BN.to(scale.device), is_masked_BN.to(scale.device))
    log_p_SV = logits_SV.cpu().double().log_softmax(dim=1)
    log_p_S = log_p_SV.gather(1, ids_BN[is_masked_BN][:, None])
    return -log_p_S.view(-1, len(hidden)) / math.log(2)


quartets = grammar("quartets")
every_BN = np.unique(quartets.sample(60_000, seed=3), axis=0)
reached = hidden_bits(run.model, every_BN, quartets.slots).sum(dim=1).mean()
print(f"{len(every_BN)} sentences: {reached:.1f} bits; floor {floor:.2f}")

# %% mystnb={"code_prompt_show": "Checked: every sentence is listed, and the model is above the floor by less than 0.05 bits"} tags=["hide-cell", "check"]
assert math.isclose(np.exp(quartets.log_probability(every_BN)).sum(), 1)
assert 0 < reached - floor < 0.05

# %% [markdown]
# ## The same weights, asked twice
#
# Is the network too small to know that the words belong together? By the chain
# rule, $P(x_1, x_2 \mid c)$ is $P(x_1 \mid c)$ times $P(x_2 \mid c, x_1)$. So let
# the network guess the first slot, tell it the answer, and let it guess the
# second. We train once more, on `pairs` with half of all words hidden at random,
# so that the model meets sentences with one slot hidden and with both.

# %%
half = ["--masking.strategy", "bernoulli", "--masking.mask_ratio", "0.5"]
model = train_mlm(*half, "--train.validate_every", "400").model
pairs = grammar("pairs")
every_BN = np.unique(pairs.sample(10_000, seed=3), axis=0)
both_2 = hidden_bits(model, every_BN, pairs.slots).mean(dim=0)
second = hidden_bits(model, every_BN, pairs.slots[1:]).mean()
one_go, two_steps = both_2.sum(), both_2[0] + second
print(f"in one go {one_go:.1f} bits, in two steps {two_steps:.1f} bits")

# %% mystnb={"code_prompt_show": "Checked: the first is within 0.05 bits of the floor, the second within 0.05 bits of the joint entropy"} tags=["hide-cell", "check"]
assert 0 < one_go - facts["pairs"][0] < 0.05
assert 0 < two_steps - facts["pairs"][1] < 0.05

# %% [markdown]
# The same weights reach the floor in one go and the joint entropy in two steps.
# The network knows the dependency; a product of separate predictions cannot
# express it. But the chain needs one pass for each hidden word; pre-training has
# only one in total.
#
# ## One pass with several stories
#
# One pass can be enough if the model may tell several stories. Let it output $k$
# products instead of one, and a weight for each:
#
# $$
# \begin{aligned}
# Q(x_1, &\dots, x_M \mid c) \\
# &= \sum_{z=1}^{k} w_z \prod_{i=1}^{M} q_{z,i}(x_i \mid c).
# \end{aligned}
# $$
#
# One product may say happy and smiled, another one sad and wept. How good are $k$
# products for `fours`? Assign each mood to one of them, in all possible ways, and
# keep the best.


# %%
def mixture_bits(p_Z, group_Z):
    """Bits of a mixture with one product for each group of moods."""
    joint_VV = np.einsum("z,zv,zw->vw", p_Z, first_ZV, second_ZV)
    q_VV = np.zeros_like(joint_VV)
    for group in set(group_Z):
        part_Z = p_Z * (np.array(group_Z) == group)
        q_VV += np.outer(part_Z @ first_ZV, part_Z @ second_ZV) / part_Z.sum()
    seen = joint_VV > 0
    return float(-(joint_VV[seen] * np.log2(q_VV[seen])).sum())


def best_mixture(p_Z, k):
    return min(mixture_bits(p_Z, g) for g in itertools.product(range(k), repeat=4))


{k: round(best_mixture(p_Z, k), 2) for k in (1, 2, 3, 4, 5)}

# %% [markdown]
# One product is an MLM and stays on the floor of 4 bits. Four products, as many
# as there are moods, reach the joint entropy, and a fifth adds nothing.
#
# ```{admonition} k products get at most (M − 1) log₂ k bits below the floor
# :class: dropdown
# For every $z$, $Q(x) = Q(x, z) / Q(z \mid x)$. Draw $x$ from the truth and $z$
# from $Q(z \mid x)$, and take the mean of $-\log_2$ of both sides:
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
# &= \sum_i H(x_i) + I(x; z) \\
# &\quad - \sum_i I(x_i; z).
# \end{aligned}
# $$
#
# Since $I(x_i; z) \le I(x; z)$ and $I(x; z) \le H(z) \le \log_2 k$, this mean is at
# most $(M - 1) \log_2 k$ below the floor. For two words and $k = 2$ or 4 this is 1
# or 2 bits: the mixtures above are the best there are.
# ```

# %% mystnb={"code_prompt_show": "Checked: 4, 3 and 2 bits for 1, 2 and 4 products, and the bound holds"} tags=["hide-cell", "check"]
floor, together = facts["fours"]
best = {k: best_mixture(p_Z, k) for k in (1, 2, 3, 4, 5)}
assert np.allclose(
    [best[1], best[2], best[4], best[5]], [floor, 3, together, together]
)
assert all(best[k] > floor - math.log2(k) - 1e-9 for k in best)
assert math.prod(map(len, town.latents.values())) == 72

# %% [markdown]
# But each new variable multiplies the number of products: `town` already has 72
# values of $z$, and no output layer has room for those of real text. ExLM gives
# each mask $k$ states, each with its own distribution over words, and links the
# states of one mask to those of later ones. A path through the links picks one
# state for each hidden word, which makes one product. So ExLM is a mixture of
# products, too, with *paths* as components: up to $k^M$ paths that take one state
# from each mask, at the price of $k M$ states. {ref}`chap-expansion` makes the
# states, {ref}`chap-training` the links.
#
# ## The more is hidden, the more is lost
#
# {numref}`fig-ratio-bits` hides each of the eight linked words among the first 14
# of `town` with probability $p$, and takes the exact mean over all $2^8$ cases.
# As $p$ grows, every word becomes more uncertain: the paper's Figure 5 finds the
# same rise in the entropy of trained models. And the share of dependencies grows:
# here they are worth 3% of an MLM's bits at $p = 15\%$, and 23% at 78.9%, the
# highest ratio in the paper's experiment.

# %% mystnb={"figure": {"caption": "Bits per hidden word of `town` as more is hidden, exact. The space between the curves is the total correlation.", "name": "fig-ratio-bits"}} tags=["hide-input"]
from exlm_mini.data.toy import Grammar

opening = Grammar("opening", town.latents, town.prior, town.positions[:14])
hidden_sets = [
    s for m in range(9) for s in itertools.combinations(opening.slots, m)
]
joint_of = {s: opening.joint_entropy_bits(opening.mask(s)) for s in hidden_sets}


def floor_of(s):
    """By the chain rule: H(x_i | c) = H(s | c) - H(s without i | c, x_i)."""
    shown = (tuple(n for n in s if n != i) for i in s)
    return sum(joint_of[s] - joint_of[rest] for rest in shown)


def at_ratio(p):
    """Mean floor and joint entropy, over the mean number of hidden words."""
    weight = np.array([p ** len(s) * (1 - p) ** (8 - len(s)) for s in hidden_sets])
    values = np.array([(floor_of(s), joint_of[s]) for s in hidden_sets])
    return weight @ values / (8 * p)


ratios = (0.01, 0.05, 0.15, 0.25, 0.387, 0.5, 0.622, 0.7, 0.789, 0.9, 1.0)
floor_R, joint_R = np.array([at_ratio(p) for p in ratios]).T
fig, ax = plt.subplots(figsize=(5.4, 3.4))
ax.fill_between(ratios, joint_R, floor_R, color="0.9")
ax.plot(ratios, floor_R, "o-", ms=4, color=COLORS["floor"])
ax.plot(ratios, joint_R, "s-", ms=4, color=COLORS["joint"])
ax.text(0.5, floor_R[5] + 0.06, "one by one", color=COLORS["floor"], ha="right")
ax.text(0.52, joint_R[5] - 0.06, "together", color=COLORS["joint"], va="top")
_ = ax.set(xlabel="mask ratio p", ylabel="bits per hidden word", ylim=(0, None))

# %% mystnb={"code_prompt_show": "Checked: the shares of 3% and 23%, the rise, and that one more hidden word never lowers the total correlation"} tags=["hide-cell", "check"]
lost = dict(zip(ratios, (floor_R - joint_R) / floor_R, strict=True))
assert round(lost[0.15], 2) == 0.03 and round(lost[0.789], 2) == 0.23
assert all((np.diff(rising) > 0).all() for rising in (floor_R, joint_R))
assert list(lost.values()) == sorted(lost.values())
for s in hidden_sets[::50]:
    assert math.isclose(floor_of(s), opening.marginal_entropy_bits(opening.mask(s)))
for s in hidden_sets:
    for new in set(opening.slots) - set(s):
        more = tuple(sorted({*s, new}))
        assert floor_of(more) - joint_of[more] > floor_of(s) - joint_of[s] - 1e-9

# %% [markdown]
# A higher ratio also puts more [MASK] symbols into the input, though. The next
# chapter, {ref}`chap-repeated`, separates the two.
#
# ## What others have repaired
#
# A mask does two things to a sentence (§1 of the paper): it puts in a symbol that
# no real text has, an *unreal token*, and it takes a word out, which leaves
# *corrupted semantics*. Most work on [MASK] is about the first. BERT leaves the
# symbol out at a fifth of the chosen words {cite}`devlin2019bert`. ELECTRA lets a
# small MLM fill the masks and trains the main model to spot what was replaced
# {cite}`clark2020electra`. MAE-LM keeps [MASK] out of the encoder
# {cite}`meng2024maelm`, and Mask More and Mask Later adds it at a later layer
# {cite}`liao2022maskmore`. Token dropping lets tokens skip the middle layers
# {cite}`hou2022dropping`, and {cite:t}`zhong2023dropping` win back the meaning
# that this loses *beyond* masking. (Appendix A speaks of dropping [MASK] tokens;
# the method drops tokens with a low loss, whatever they are.) What masking itself
# takes out is still missing, and that is where the paper starts.
#
# ## Exercises

# %% mystnb={"code_prompt_show": "The judges of the exercises"} tags=["hide-cell"]
from dataclasses import replace

from exlm_mini.data.toy import Position


def compare(mine, want):
    """Whether an answer is there and right, or what is wrong."""
    if mine is None:
        return "not yet"
    return "right" if np.allclose(mine, want) else f"wrong: not {mine}"


def judge_lopsided(answer):
    """Against the package, on `fours` with another prior."""
    lopsided = replace(fours, prior=np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8]))
    is_masked_N = lopsided.mask()
    one_by_one = lopsided.marginal_entropy_bits(is_masked_N)
    return compare(answer(), (one_by_one, lopsided.joint_entropy_bits(is_masked_N)))


def judge_chorus(answer):
    """Against languages with M slots that one mood drives."""
    for M in (1, 2, 3, 5):
        places = tuple(
            Position({(m,): f"{m}{i}" for m in "abcd"}, ("mood",)) for i in range(M)
        )
        chorus = Grammar(
            "chorus", {"mood": tuple("abcd")}, np.full(4, 1 / 4), places
        )
        modes = chorus.num_modes(chorus.sample(1, seed=0)[0], chorus.mask())
        one_by_one = chorus.marginal_entropy_bits(chorus.mask())
        want = one_by_one, chorus.joint_entropy_bits(chorus.mask()), modes
        if (verdict := compare(answer(M), want)) != "right":
            return verdict if answer(M) is None else f"{verdict} for M = {M}"
    return "right"


def judge_even(answer):
    """Do three products win log2(3) bits at these probabilities of the moods?"""
    if answer() is None:
        return "not yet"
    p_Z = np.array(answer())
    if p_Z.shape != (4,) or p_Z.min() <= 0 or not math.isclose(p_Z.sum(), 1):
        return "wrong: want four positive numbers that sum to 1"
    gain = 2 * bits(p_Z) - best_mixture(p_Z, 3)
    if math.isclose(gain, math.log2(3)):
        return "right"
    return f"wrong: they win {gain:.3f} of {math.log2(3):.3f} bits"


assert judge_lopsided(lambda: (4, 2)) != "right"
assert judge_chorus(lambda M: (4, 2, 4)) != "right"
assert judge_even(lambda: [1 / 4] * 4) != "right"

# %% [markdown]
# **1. A lopsided mood.** In `fours`, let the moods have probability 1/2, 1/4, 1/8
# and 1/8. What are the sum of the marginal entropies and the joint entropy?


# %%
def lopsided():
    """(one by one, together), in bits."""
    # your turn


print(judge_lopsided(lopsided))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def lopsided_solution():
    # Each slot reveals the mood and has its entropy; together they have it once.
    mood = 1 / 2 * 1 + 1 / 4 * 2 + 2 * 1 / 8 * 3
    return 2 * mood, mood


print(judge_lopsided(lopsided_solution))
assert judge_lopsided(lopsided_solution) == "right"

# %% [markdown]
# **2. More slots.** A sentence has $M$ slots, all driven by one mood with four
# equally likely values, one word each. How do the floor and the joint entropy
# grow with $M$, and how many products does a mixture need?


# %%
def chorus(M):
    """(floor, joint entropy, products)."""
    # your turn


print(judge_chorus(chorus))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def chorus_solution(M):
    # Each slot has 2 bits by itself, all of them together have the mood's 2 bits,
    # and one product for each mood is enough. The total correlation is 2 (M - 1).
    return 2 * M, 2, 4


print(judge_chorus(chorus_solution))
assert judge_chorus(chorus_solution) == "right"

# %% [markdown]
# **3. Three products.** With four equally likely moods, three products win 1.5
# bits, and the bound is $\log_2 3 = 1.58$. For which probabilities of the moods
# do they win exactly $\log_2 3$?


# %%
def even_moods():
    """Four probabilities."""
    # your turn


print(judge_even(even_moods))


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def even_solution():
    # The bound needs equally likely components: two moods that share one weigh as
    # much as each of the others.
    return 1 / 3, 1 / 3, 1 / 6, 1 / 6


print(judge_even(even_solution))
assert judge_even(even_solution) == "right"
