# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-repeated)=
# # Repeated MLM
#
# Masking does two things to a sentence. It puts a token into the input that no
# real text contains, and it takes a word away. More masks mean more of both, so
# plain masking cannot tell which of the two hurts a model. The paper
# {cite}`zheng2025exlm` separates them with a simple device: write each word
# several times, *then* mask the copies. A [MASK] that stands beside a visible
# copy of its word is only an unreal token. A word is lost when all its copies are
# masked.
#
# In this chapter you write Repeated MLM, derive how many words it loses, and
# follow the paper's experiment, whose answer (the lost words do the damage) is
# the reason for building ExLM. Then you repeat it on a small scale: three models
# trained on this page, whose best possible score is known exactly, and 42
# recorded ones.
#
# **You will know afterwards** what the experiment compares, what it has shown at
# which scale, and what is still open.
#
# **What it needs.** A minute on one CPU core, no GPU. The chapter covers §3 and
# Appendices B, C, E, F and G of the paper.

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
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from drawings import draw_tokens
from live import chapter_scale
from scipy import stats
from torch.nn import functional as F

from exlm_mini.config import SPECIAL_TOKENS, ModelConfig, SpecialIds
from exlm_mini.model import MaskedLM
from exlm_mini.plot.style import use_book_style

use_book_style()
_, BOS, EOS, *_, MASK = SpecialIds()
_ = chapter_scale()

# %% [markdown]
# ## One dial, two harms
#
# We need sentences whose words tell something about each other. In this small
# language each word depends on a topic, a number or a tense, or on two of them:

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the language"}
from exlm_mini.data.toy import Grammar, Position

LATENTS = {
    "topic": ("sea", "farm", "school", "stage"),
    "number": ("one", "many"),
    "tense": ("now", "then"),
}


def word(driven_by, **choices):
    """A place in the sentence whose word depends on the named variables."""
    keyed = {tuple(key.split("_")): words for key, words in choices.items()}
    return Position(keyed, tuple(driven_by.split()))


people = dict(sea="sailor", farm="farmer", school="teacher", stage="singer")
nouns = {f"{topic}_one": noun for topic, noun in people.items()}
nouns |= {f"{topic}_many": f"{noun}s" for topic, noun in people.items()}
verbs = dict(one_now="is", many_now="are", one_then="was", many_then="were")
doing = dict(
    sea="mending carrying",
    farm="feeding carrying",
    school="reading learning",
    stage="singing learning",
)
places = (
    word("tense", now="today", then="yesterday"),
    word("number", one="this the", many="these the"),
    word("topic number", **nouns),
    word("number tense", **verbs),
    word("topic", **doing),
    word("topic", sea="ropes", farm="horses", school="poems", stage="songs"),
)
language = Grammar("agreement", LATENTS, np.full((4, 2, 2), 1 / 16), places)
N = language.length
for word_ids_N in language.sample(3, seed=0):
    print(language.sentence(word_ids_N))

# %% [markdown]
# Word ids come after those of the six special tokens, and a row is a sentence
# between [BOS] and [EOS].

# %%
NAMES = [*SPECIAL_TOKENS, *language.words]


def sentences(num_rows, seed):
    """Token ids (num_rows, N + 2)."""
    ids_BN = torch.from_numpy(language.sample(num_rows, seed)) + len(SPECIAL_TOKENS)
    return F.pad(F.pad(ids_BN, (1, 0), value=BOS), (0, 1), value=EOS)


sentences(1, seed=0)

# %% [markdown]
# In plain masking, the mask ratio $p$ sets two things at once. It is the share of
# [MASK] in the input, the *unreal tokens*, which a model meets in training and
# never again. It is also the share of words that are missing, which the paper
# calls *corrupted semantics*. Repeated MLM takes two functions:


# %%
def repeat(ids_BN, k):
    """Each token k times in a row: [a b] becomes [a a b b]."""
    return ids_BN.repeat_interleave(k, dim=1)


def mask(ids_BN, p, rng):
    """Hide each token with probability p, but never [BOS] and [EOS]."""
    is_masked_BN = torch.rand(ids_BN.shape, generator=rng) < p
    is_masked_BN &= ids_BN >= len(SPECIAL_TOKENS)
    return ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN


# %% [markdown]
# A word is lost if every copy is masked ($k$ is the number of copies in this
# chapter; from the next one on it is the number of states of a [MASK]):


# %%
def lost_words(is_masked_BN, k):
    """Which words have lost all k copies, (B, N / k)."""
    return is_masked_BN.unflatten(1, (-1, k)).all(dim=2)


# %% [markdown]
# {numref}`fig-repeated-rows` applies all three to a sentence. Two thirds of both
# masked rows are [MASK], but the first has lost four words, the second two.

# %% mystnb={"figure": {"caption": "A sentence, masked with p = 62%: once as it is (k = 1), and once after repetition (k = 2, in two lines). Brown: all copies of the word are masked, so it is lost. Yellow: a [MASK] beside a visible copy.", "name": "fig-repeated-rows"}} tags=["hide-input"]
fig, axes = plt.subplots(4, 1, figsize=(5.6, 2.7))
sentence_1N = sentences(40, seed=0)[13:14]


def draw_row(ax, ids_N, kinds):
    """Boxes that fill the width."""
    draw_tokens(ax, [NAMES[i] for i in ids_N], kinds)
    ax.set(xlim=(-0.5, len(ids_N) - 0.5), ylim=(-0.32, 0.32))


draw_row(axes[0], sentence_1N[0, 1:-1], ["token"] * N)
counts = []
for k, rows_k, seed in ((1, axes[1:2], 0), (2, axes[2:], 23)):
    masked_1N, is_masked_1N = mask(
        repeat(sentence_1N, k), 0.622, torch.Generator().manual_seed(seed)
    )
    inner = slice(k, -k)
    is_lost_M = lost_words(is_masked_1N[:, inner], k)[0]
    counts.append((int(is_masked_1N.sum()), int(is_lost_M.sum())))
    kinds = [
        ("second" if lost else "mask") if m else "token"
        for m, lost in zip(
            is_masked_1N[0, inner], is_lost_M.repeat_interleave(k), strict=True
        )
    ]
    for part, ax in enumerate(rows_k):
        half = slice(part * N, (part + 1) * N)
        draw_row(ax, masked_1N[0, inner][half], kinds[half])
for ax, title in zip(axes, ("the sentence", "k = 1", "k = 2"), strict=False):
    ax.set_title(title, loc="left", fontsize=9, pad=2)

# %% mystnb={"code_prompt_show": "Checked: 4 of 6 masked and 4 words lost; 8 of 12 masked and 2 words lost"} tags=["hide-cell", "check"]
assert counts == [(4, 4), (8, 2)]

# %% [markdown]
# ## How many words are lost
#
# The copies of a word are masked independently of each other, each with
# probability $p$, so all $k$ of them are masked with probability $p^k$. The share
# $s$ of lost words among $N$ is the mean of $N$ independent yes-or-no draws;
# Appendix C gives its mean and variance:
#
# $$
# \mathbb{E}[s] = p^k, \qquad \operatorname{Var}(s) = \frac{p^k (1 - p^k)}{N} .
# $$ (eq-lost)
#
# On 20,000 sentences:

# %%
rng = torch.Generator().manual_seed(0)
many_BN = sentences(20_000, seed=1)[:, 1:-1]
print("k   [MASK]   lost    p^k")
for k in (1, 2, 4, 8):
    _, is_masked_BN = mask(repeat(many_BN, k), 0.789, rng)
    lost = lost_words(is_masked_BN, k).double().mean()
    print(f"{k}   {is_masked_BN.double().mean():.3f}   {lost:.3f}   {0.789**k:.3f}")

# %% [markdown]
# The number of copies changes the share of lost words and leaves the share of
# [MASK] alone. The package has the same functions, with its own source of noise:

# %% mystnb={"code_prompt_show": "Checked: repetition, lost words, their mean and their variance agree with the package"} tags=["hide-cell", "check"]
from exlm_lab.experiments.entropy import fully_masked
from exlm_mini.data.masking import (
    corrupted_share,
    corrupted_share_moments,
    repeat_tokens,
)

p = 0.789
for k in (1, 2, 4, 8):
    assert torch.equal(repeat(many_BN, k), repeat_tokens(many_BN, k))
    _, is_masked_BN = mask(repeat(many_BN, k), p, rng)
    is_lost_BM = lost_words(is_masked_BN, k)
    assert torch.equal(is_lost_BM, fully_masked(is_masked_BN, k))
    share = corrupted_share(is_masked_BN.reshape(-1, k))
    assert math.isclose(share, is_lost_BM.double().mean())
    mean, variance = corrupted_share_moments(p, k, is_lost_BM.numel())
    assert math.isclose(mean, p**k) and abs(share - mean) < 4 * math.sqrt(variance)
    share_B = is_lost_BM.double().mean(dim=1)  # of single sentences
    _, variance = corrupted_share_moments(p, k, N)
    assert abs(share_B.var() / variance - 1) < 0.1

# %% [markdown]
# ## Fourteen models on two dials
#
# The paper trains BERT-sized models with 1, 2, 4 and 8 copies and five mask
# ratios, 2.25%, 15%, 38.7%, 62.2% and 78.9%. The odd ratios have a reason: each
# is the square root of the one before. Doubling $k$ squares $p^k$, so many models
# lose *the same* share of words. {numref}`fig-two-dials` shows all 14 as points
# in a plane: how much [MASK] is in the input, and how much is lost.

# %% mystnb={"figure": {"caption": "The paper's 14 models: share of [MASK] in the input and share of lost words. Plain MLM (k = 1) moves along the diagonal. Along a horizontal line only the unreal tokens change, along a vertical line only the lost words.", "name": "fig-two-dials"}} tags=["hide-input"]
RATIOS = [0.15 ** (2.0 ** (1 - j)) for j in range(5)]
COPIES = (1, 2, 4, 8)
PERCENT = ["2.25", "15", "38.7", "62.2", "78.9"]
LOOK = {
    k: dict(color=f"C{c}", marker=marker)
    for k, c, marker in zip(COPIES, (0, 1, 2, 4), "osD^", strict=True)
}
fig, ax = plt.subplots(figsize=(5, 3.7))
for j in range(5):
    across = [RATIOS[i] for i in range(j, min(j + 4, 5))]
    ax.plot(across, [RATIOS[j]] * len(across), color="0.75", lw=1.5, zorder=1)
    down = [RATIOS[i] for i in range(max(0, j - 3), j + 1)]
    ax.plot([RATIOS[j]] * len(down), down, color="0.75", lw=1.5, zorder=1)
for r, k in enumerate(COPIES):
    shares = [p**k for p in RATIOS[r:]]
    ax.plot(RATIOS[r:], shares, ls="", ms=8, label=f"k = {k}", zorder=2, **LOOK[k])
ax.set_xticks(RATIOS, labels=["", *PERCENT[1:]])
ax.set_yticks(RATIOS, labels=PERCENT)
ax.grid(False)
ax.set(xlabel="share of [MASK], p (%)", ylabel="share of lost words, $p^k$ (%)")
ax.set(xlim=(-0.02, 0.84), ylim=(-0.04, 0.84))
_ = ax.legend(loc="upper left")

# %% [markdown]
# These shares match the paper's Figure 4 to every printed digit if the ratios are
# not rounded (with the printed ones, four cells would differ in the last digit).
# Six cells of the grid stay empty because they lose "less than 0.05%" (§3.2).
# Taken literally, that rule would keep 17 cells: three of the six lose 0.0506%.

# %% mystnb={"code_prompt_show": "Checked: the 14 printed shares, the four that rounding would change, and the 17 cells"} tags=["hide-cell", "check"]
printed = [[None] * r + PERCENT[: 5 - r] for r in range(4)]
rounded = (0.0225, 0.15, 0.387, 0.622, 0.789)
cells = [
    (k, j, text)
    for k, row in zip(COPIES, printed, strict=True)
    for j, text in enumerate(row)
]
filled = [cell for cell in cells if cell[2] is not None]
assert all(f"{100 * RATIOS[j] ** k:.3g}" == text for k, j, text in filled)
assert sum(f"{100 * rounded[j] ** k:.3g}" != text for k, j, text in filled) == 4
assert sum(RATIOS[j] ** k >= 0.0005 for k, j, _ in cells) == 17
assert [c for c in cells if round(100 * RATIOS[c[1]] ** c[0], 2) > 0.05] == filled
assert len(filled) == 14

# %% [markdown]
# ## What the paper found
#
# Walk along the horizontal line of 15% and then up the last column. In the first
# four rows only the unreal tokens change, in the last four only the lost words:
#
# | [MASK] | lost | MNLI (%) | entropy (bits) |
# |---|---|---|---|
# | 15% | 15% | 83.6 | 2.78 |
# | 38.7% | 15% | 83.1 | 2.30 |
# | 62.2% | 15% | 83.2 | 1.77 |
# | 78.9% | 15% | 82.8 | 1.76 |
# | 78.9% | 38.7% | 82.6 | 3.35 |
# | 78.9% | 62.2% | 81.3 | 5.48 |
# | 78.9% | 78.9% | 79.6 | 7.26 |
#
# The accuracy after fine-tuning (Figure 3) falls by 0.8 points while [MASK] grows
# from 15% to 78.9%, and by 3.2 while the lost words do. The entropy of the
# predictions (Figure 5), the model's uncertainty about a lost word, falls by one
# bit in the first part and rises by more than five in the second. On the four
# tasks of Appendix F, accuracy varies 1.5 to 4 times as much in the second part.

# %% mystnb={"figure": {"caption": "The paper's Figures 3 and 5, against the share of lost words; one line for each number of copies.", "name": "fig-paper-curves"}} tags=["hide-input"]
from exlm_lab.experiments.paper import printed_grid

mnli = printed_grid("Figure 3", "mnli")
bits = printed_grid("Figure 5", "entropy, bits")
fig, axes = plt.subplots(1, 2, figsize=(6.2, 2.9))
for ax, grid, name in zip(
    axes, (mnli, bits), ("MNLI accuracy (%)", "entropy (bits)"), strict=True
):
    for k in COPIES:
        its = sorted(
            (100 * p**k, value) for (p, j), value in grid.items() if j == k
        )
        ax.plot(*zip(*its, strict=True), ms=5, lw=1, label=f"k = {k}", **LOOK[k])
    ax.set(xlabel="lost words (%)", ylabel=name)
_ = fig.legend(
    *axes[0].get_legend_handles_labels(), loc="outside upper center", ncol=4
)

# %% mystnb={"code_prompt_show": "Checked: the sums of this section, from the paper's printed numbers"} tags=["hide-cell", "check"]
line = [(0.15, 1), (0.387, 2), (0.622, 4), (0.789, 8)]
column = [(0.789, k) for k in (8, 4, 2, 1)]
assert [mnli[c] for c in line] == [83.6, 83.1, 83.2, 82.8]
assert [mnli[c] for c in column] == [82.8, 82.6, 81.3, 79.6]
assert [bits[c] for c in line] == [2.78, 2.30, 1.77, 1.76]
assert [bits[c] for c in column] == [1.76, 3.35, 5.48, 7.26]
factors = []
for task in ("mnli", "qnli", "qqp", "rte"):
    grid = printed_grid("Figure 8", task)
    spans = [np.ptp([grid[c] for c in cells]) for cells in (column, line)]
    factors.append(spans[0] / spans[1])
assert min(factors) > 1.45 and max(factors) < 4.05
for k in COPIES:  # the best share
    best = max((c for c in mnli if c[1] == k), key=mnli.get)
    assert 0.14 < best[0] ** k < 0.4

# %% [markdown]
# {numref}`fig-paper-curves` shows all 14. The entropies rise along every line, and
# the accuracies are highest where 15% to 39% of the words are lost: losing
# almost nothing makes the task too easy to learn from (§3.3). The accuracies are
# means of three fine-tunings; they are printed without uncertainty, and the paper
# mentions no model trained more than once.
#
# ## Whose uncertainty counts
#
# Entropies of models with different $k$ can only be compared on equal tasks. Most
# masked positions of a repeated sentence have a visible copy of their word
# nearby, and there a model only has to copy. The paper therefore counts only lost
# words, and averages over the copies of each (Appendix E). Computed from the
# log-probabilities at the $S$ masked positions of a batch:


# %%
def entropy_bits(log_p_SV):
    return torch.special.entr(log_p_SV.exp()).sum(dim=-1) / math.log(2)


def entropy_of_lost(log_p_SV, is_masked_BN, k):
    """Entropy in bits of every lost word, the mean over its k copies."""
    bits_BN = torch.zeros(is_masked_BN.shape)
    bits_BN[is_masked_BN] = entropy_bits(log_p_SV)
    bits_BM = bits_BN.unflatten(1, (-1, k)).mean(dim=2)
    return bits_BM[lost_words(is_masked_BN, k)]


# %% mystnb={"code_prompt_show": "Checked: equal to a loop over the lost words, on random predictions"} tags=["hide-cell", "check"]
for k in (1, 2, 4):
    is_masked_BN = torch.rand(50, 12 * k, generator=rng) < 0.7
    log_p_SV = torch.randn(int(is_masked_BN.sum()), 9, generator=rng).log_softmax(1)
    ours = entropy_of_lost(log_p_SV, is_masked_BN, k)
    number_BN = is_masked_BN.flatten().cumsum(0).view_as(is_masked_BN) - 1
    theirs = []
    for b, i in lost_words(is_masked_BN, k).nonzero():
        copies = log_p_SV[number_BN[b, i * k : i * k + k]]
        theirs.append(entropy_bits(copies).mean())
    torch.testing.assert_close(ours, torch.stack(theirs))

# %% [markdown]
# What would a perfect model reach? It sees the words that have a copy left;
# further copies add nothing, and which copies are masked says nothing about the
# words. Each word is lost with probability $s = p^k$, so the mean entropy of a
# lost word depends on $p$ and $k$ *only through* $s$:
#
# $$
# \begin{aligned}
# & \bar H(s) = \frac{1}{N s} \sum_{m} s^{|m|} (1-s)^{N-|m|} \\
# & \quad \cdot \sum_{i \in m} H(x_i \mid \text{words outside } m) .
# \end{aligned}
# $$
#
# The sum runs over all sets $m$ of lost words. Our language has 64 such sets,
# each with exactly known entropies.

# %%
lost_sets = [np.array(m) for m in itertools.product([False, True], repeat=N)]
floor_bits = [language.marginal_entropy_bits(m) for m in lost_sets]


def perfect_entropy(s):
    """Mean entropy in bits of a lost word, for a perfect model."""
    chance = [s ** m.sum() * (1 - s) ** (N - m.sum()) for m in lost_sets]
    return np.dot(chance, floor_bits) / (N * s)


print(*(f"{perfect_entropy(s):.2f}" for s in (0.15, 0.387, 0.622, 0.789)))

# %% mystnb={"code_prompt_show": "Checked: with two copies, going through all 4,096 ways to mask a sentence gives the same mean"} tags=["hide-cell", "check"]
bits_of = {tuple(m): bits for m, bits in zip(lost_sets, floor_bits, strict=True)}


def by_enumeration(p, k=2):
    """Bits of the lost words, and how many words are lost: means over all masks."""
    total = num_lost = 0.0
    for copies in itertools.product([False, True], repeat=N * k):
        chance = p ** sum(copies) * (1 - p) ** (N * k - sum(copies))
        is_lost_N = np.reshape(copies, (N, k)).all(axis=1)
        total += chance * bits_of[tuple(is_lost_N)]
        num_lost += chance * is_lost_N.sum()
    return total, num_lost


for p in (0.387, 0.789):
    total, num_lost = by_enumeration(p)
    assert math.isclose(total / num_lost, perfect_entropy(p**2), rel_tol=1e-9)

# %% [markdown]
# So for a perfect model [MASK] costs nothing, and the four entropies on the
# paper's line of 15% would be equal. But they fall by a bit. Something other than
# the language differs along the line; one candidate is training. A model with $k$
# copies predicts $pkN$ positions per text, 42 times as many at $k = 8$, $p =
# 78.9\%$ as at $k = 1$, $p = 15\%$, in the same number of steps.
#
# ## Three models
#
# Three models suffice to turn each dial once. Each is the MLM of
# {ref}`chap-one-notebook`, unchanged; only its input is repeated.


# %%
def train(p, k, num_steps=300, num_rows=64):
    """A small MLM on sentences repeated k times."""
    _ = torch.manual_seed(1)
    rng = torch.Generator().manual_seed(1)
    settings = ModelConfig(dropout=0.0, attention_dropout=0.0, init_std=0.125)
    model = MaskedLM(settings, len(NAMES))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    batches = sentences(num_steps * num_rows, seed=1).split(num_rows)
    for step, ids_BN in enumerate(batches):
        rate = 3e-3 * min(1, (step + 1) / 30, (num_steps - step) / 100)
        optimizer.param_groups[0]["lr"] = rate
        masked_ids_BN, is_masked_BN = mask(repeat(ids_BN, k), p, rng)
        logits_SV = model(masked_ids_BN, is_masked_BN)
        loss = F.cross_entropy(logits_SV, repeat(ids_BN, k)[is_masked_BN])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# %%
@torch.no_grad()
def measure(model, p, k):
    """Entropy of lost words, and of all masked positions, on unseen sentences."""
    ids_BN = repeat(sentences(1024, seed=99), k)
    masked_ids_BN, is_masked_BN = mask(ids_BN, p, torch.Generator().manual_seed(2))
    log_p_SV = model(masked_ids_BN, is_masked_BN).log_softmax(dim=1)
    lost_bits = entropy_of_lost(log_p_SV, is_masked_BN, k).mean()
    return lost_bits.item(), entropy_bits(log_p_SV).mean().item()


cells = [(0.15, 1), (0.622, 4), (0.622, 1)]
(low, _), (many, unfiltered), (high, _) = [measure(train(*c), *c) for c in cells]

# %% mystnb={"figure": {"caption": "Entropy of a lost word: three trained models (points) and a perfect model (line).", "name": "fig-three-models"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5, 3))
share = np.linspace(0.01, 1, 100)
ax.plot(100 * share, [perfect_entropy(s) for s in share], color="0.3")
ax.text(83, perfect_entropy(0.9) - 0.32, "perfect model", color="0.3", fontsize=9)
for (p, k), value, shift in zip(
    cells, (low, many, high), (22, -16, 8), strict=True
):
    ax.plot(100 * p**k, value, ms=8, **LOOK[k])
    ax.annotate(
        f"{100 * p:.0f}% [MASK], k = {k}",
        (100 * p**k, value),
        xytext=(6, shift),
        textcoords="offset points",
        fontsize=9,
        ha="right" if value == high else "left",
        bbox={"fc": "white", "ec": "none", "pad": 1},
    )
_ = ax.set(xlabel="share of lost words (%)", ylabel="entropy (bits)", ylim=(0, 2))

# %% [markdown]
# When [MASK] grows from 15% to 62% at an equal lost share, the entropy changes by
# less than 0.2 bits. When the lost share grows from 15% to 62% at equal [MASK], it
# rises by more than half a bit. The points lie a little above the line, because
# training was short. Taken over *all* masked positions, the entropy of the model
# with four copies would be less than half as large, but only because copying is
# easy. The loss of a training run has the same flaw: with more copies it is lower
# (Appendix G), whatever the model knows about lost words.

# %% mystnb={"code_prompt_show": "Checked: the first change is below 0.2 bits, the second above 0.5; all points lie within 0.3 of the line; over all masked positions, less than half"} tags=["hide-cell", "check"]
assert abs(many - low) < 0.2 and high - many > 0.5
assert unfiltered < 0.5 * many
for (p, k), value in zip(cells, (low, many, high), strict=True):
    assert abs(value - perfect_entropy(p**k)) < 0.3

# %% [markdown]
# ## Forty-two models
#
# Does the lost share also decide what a model is *good for*? All 14 cells were
# trained with three seeds each on `town`, a language of longer sentences (sweep
# `repeated-mlm`, {ref}`all-sweeps`). Each model was then fine-tuned on a
# task modelled on MNLI. A second measure leaves the model as it is: a linear
# probe reads the sentence's hidden variables from its states.

# %%
from exlm_lab.experiments.records import runs

COLUMNS = {
    "masking.mask_ratio": "p",
    "masking.num_copies": "k",
    "seed": "seed",
    "downstream": "accuracy (%)",
    "probe_accuracy": "probe (%)",
    "entropy_bits": "entropy (bits)",
    "excess_bits": "excess (bits)",
}
town = runs("repeated-mlm", Path("../book/results")).query("input == 'toy'")
sweep = town.reset_index()[[*COLUMNS]].rename(columns=COLUMNS)
sweep.insert(2, "share", (sweep.p**sweep.k).round(2))
sweep["probe (%)"] *= 100

# %% [markdown]
# *Excess* is the number of bits by which a model misses the exact optimum for a
# lost word. As the paper does, we turn one dial from its smallest to its largest
# value while the other is held, and take the mean over all lines of the plane,
# without the cells that lose 2.25%, where the task is too easy. The book calls a
# change decided if the 95% interval over the seeds excludes zero ({ref}`plan`).


# %%
def changes(metric, dial, held):
    """Last minus first along a dial, averaged over lines; one number per seed."""
    cells = sweep[sweep.share > 0.1].sort_values(dial)
    ends = cells.groupby(["seed", held])[metric].agg(["first", "last", "size"])
    ends = ends[ends["size"] > 1]
    return (ends["last"] - ends["first"]).groupby("seed").mean()


def verdict(differences):
    """Mean and half the width of its 95% interval."""
    half = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    mean = differences.mean()
    return f"{mean:+.2f} ± {half:.2f} " + (
        "decided" if abs(mean) > half else "open"
    )


table = {
    metric: {
        "more lost words": verdict(changes(metric, "share", "p")),
        "more [MASK]": verdict(changes(metric, "p", "share")),
    }
    for metric in sweep.columns[4:]
}
pd.DataFrame(table).T

# %% mystnb={"figure": {"caption": "The 14 cells on the small language, a point for each of three seeds; the dashed lines are chance (left) and the exact optimum (right).", "name": "fig-sweep"}} tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(6.2, 2.9))
for ax, metric in zip(axes, ("accuracy (%)", "entropy (bits)"), strict=True):
    for k, its in sweep.groupby("k"):
        style = dict(ls="", ms=5, alpha=0.8, label=f"k = {k}")
        ax.plot(100 * its.p**its.k, its[metric], **style, **LOOK[k])
    ax.set(xlabel="lost words (%)", ylabel=metric)
chance = 100 * town["downstream.majority"].iloc[0]
axes[0].axhline(chance, color="0.3", ls="--")
# Every run measures the optimum on sentences of its own.
lost = (100 * town["masking.mask_ratio"] ** town["masking.num_copies"]).round()
best = town["optimum_entropy_bits"].groupby(lost).mean()
axes[1].plot(best.index, best, color="0.3", ls="--")
_ = fig.legend(
    *axes[0].get_legend_handles_labels(), loc="outside upper center", ncol=4
)

# %% [markdown]
# For the entropy, the paper's answer holds here from 15% on: it rises with the lost
# share, and no effect of [MASK] is decided. For what a model is good for, neither
# dial has a decided effect, by accuracy or by probe. The accuracies differ more
# between seeds than between cells, because fine-tuning a model this small either
# takes off or stays at chance. (By ranks instead of values, the probe does fall
# with the lost share: −0.60 ± 0.33.)
#
# The last row is a warning. After equal numbers of steps, models with more [MASK]
# at the same lost share are further from their optimum, probably because they must
# also learn to copy. An accuracy then compares models that are trained to different
# degrees. One experiment of the study therefore ends each run at an equal degree
# of competence. There, in ten seeds, lost words cost the probe, and masks beside a
# visible copy do not ({ref}`chap-findings`).

# %% mystnb={"code_prompt_show": "Checked: the table by the package's own functions, and what the text says about it"} tags=["hide-cell", "check"]
from exlm_lab.experiments.correlations import (
    effect_of_mask_ratio,
    effect_of_share,
    rank_correlation,
)

share, ratio, ranks = [], [], []
for _, of_seed in sweep.groupby("seed"):
    pairs = list(zip(of_seed.p, of_seed.k, strict=True))
    grids = {
        metric: dict(zip(pairs, of_seed[metric], strict=True))
        for metric in ("entropy (bits)", "probe (%)")
    }
    share.append(effect_of_share(grids["entropy (bits)"]))
    ratio.append(effect_of_mask_ratio(grids["entropy (bits)"]))
    ranks.append(rank_correlation(grids["probe (%)"]))
assert np.allclose(share, changes("entropy (bits)", "share", "p"))
assert np.allclose(ratio, changes("entropy (bits)", "p", "share"))
assert verdict(np.array(ranks)) == "-0.60 ± 0.33 decided"
words = {
    name: [text.split()[-1] for text in row.values()] for name, row in table.items()
}
assert words["entropy (bits)"] == ["decided", "open"]
assert words["accuracy (%)"] == words["probe (%)"] == ["open", "open"]
assert words["excess (bits)"] == ["decided", "decided"]
assert table["excess (bits)"]["more [MASK]"].startswith("+")
between = sweep.groupby(["p", "k"])["accuracy (%)"]
assert between.std().mean() > between.mean().std()

# %% [markdown]
# ## Where this stands
#
# That [MASK] is an unreal token was known from BERT on, and ELECTRA
# {cite}`clark2020electra` and MAE-LM {cite}`meng2024maelm` keep it away from the
# encoder. How far $p$ may be raised was studied too {cite}`wettig2023mask`
# {cite}`liao2022maskmore`; raising it changes both harms together. Repeated MLM
# separates them. If the lost words are what hurts, the remedy must act where
# several words fit what is left. ExLM does so with several states per [MASK], which
# {ref}`chap-expansion` builds.
#
# ## Exercises
#
# Replace the `...`; the judge below it says whether the answer is right. A
# solution is folded under each.


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the judges"}
def judge(function, cases):
    """Call a function on several cases and compare."""
    for arguments, want in cases:
        answer = function(*arguments)
        if answer is None:
            print("not yet")
            return False
        if not math.isclose(answer, want, rel_tol=1e-6):
            print(f"{arguments}: {answer:.4f} is not right")
            return False
    print("right")
    return True


def judge_ratio(function):
    return judge(
        function, [((p**k, k), p) for p in (0.15, 0.888) for k in (1, 2, 16)]
    )


def judge_fixed(function):
    """By going through all choices of positions."""
    cases = []
    for num_masked in (2, 5, 9):
        choices = list(itertools.combinations(range(2 * N), num_masked))
        lost = [
            sum({2 * n, 2 * n + 1} <= set(choice) for n in range(N))
            for choice in choices
        ]
        cases.append(((N, num_masked), np.mean(lost) / N))
    return judge(function, cases)


def judge_loss(function):
    """By going through all masks of two copies, and one copy."""
    cases = [((p, 1), perfect_entropy(p)) for p in (0.15, 0.622)]
    for p in (0.387, 0.789):
        total, _ = by_enumeration(p)
        cases.append(((p, 2), 2 * total / (2 * N * p)))
    return judge(function, cases)


# %% [markdown]
# **1. Sixteen copies.** At which mask ratio do $k$ copies lose a share $s$ of the
# words? How many [MASK] does an input with $k = 16$ and $s = 15\%$ hold for every
# lost word?


# %%
def mask_ratio(s, k): ...  # your turn


_ = judge_ratio(mask_ratio)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def mask_ratio(s, k):
    return s ** (1 / k)


assert judge_ratio(mask_ratio)
# 95 [MASK] for every lost word; plain masking has one.
assert round(16 * mask_ratio(0.15, 16) / 0.15) == 95

# %% [markdown]
# **2. A fixed number of masks.** Suppose that exactly $m$ of the $2N$ copies of a
# sentence ($k = 2$) are masked, drawn at random. What share of the words is lost?
# Is it more or less than with independent masks of the same ratio?


# %%
def lost_share(N, m): ...  # your turn


_ = judge_fixed(lost_share)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def lost_share(N, m):
    # One copy is masked with m / 2N; its twin is one of the 2N - 1 others.
    return m / (2 * N) * (m - 1) / (2 * N - 1)


assert judge_fixed(lost_share)
# Less. The package therefore always draws Repeated MLM's masks independently.
assert lost_share(6, 5) < (5 / 12) ** 2

# %% [markdown]
# **3. The loss of a perfect model.** What loss, in bits per *masked position*,
# does a perfect Repeated MLM reach at $(p, k)$? You may use `perfect_entropy`.
# Does it rise or fall along the line of 15% lost words?


# %%
def perfect_loss(p, k): ...  # your turn


_ = judge_loss(perfect_loss)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def perfect_loss(p, k):
    # A masked position belongs to a lost word if the other copies are masked, too;
    # at all others the word can be copied.
    return p ** (k - 1) * perfect_entropy(p**k)


assert judge_loss(perfect_loss)
# It falls, although the lost words are as uncertain everywhere on the line.
along = [perfect_loss(p, k) for p, k in zip(RATIOS[1:], COPIES, strict=True)]
assert (np.diff(along) < 0).all()
