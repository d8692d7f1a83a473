# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-longer-rows)=
# # What the longer rows cost
#
# ExLM's encoder reads every [MASK] $k$ times ({ref}`chap-expansion`). This chapter
# counts what that costs a training step. It explains why, with $k = 4$, a step
# costs 1.7 times as much as an MLM's and not four times, and how to lower the cost.
# It also says why the package masks a fixed number of tokens in each row, and
# describes two defects of the released code.
#
# **You will know afterwards** which part of the model the extra operations go to.
#
# **It takes** 25 minutes and ten seconds of one CPU core; nothing is trained.
# **Paper:** §4.2, Appendix Q.2, Tables 4 and 12.

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

from exlm_mini.plot.style import COLORS, use_book_style

use_book_style()

# %%
from collections import namedtuple

import numpy as np
import torch

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.model import ExLM
from exlm_mini.model.answers import log_likelihood
from exlm_mini.model.expansion import expand_masks

_ = torch.set_num_threads(1)
PAD, BOS, EOS, _, _, MASK = SpecialIds()

# %% [markdown]
# ## How long the rows get
#
# A row of $N$ tokens with $m$ masks has $T$ tokens after expansion and $L$
# states. In the paper [BOS] and [EOS] are one state each; the released code
# clones them $k$ times, too, and predicts them like words:
#
# $$
# \begin{aligned}
# \text{paper:}\quad T &= N + (k-1)\,m, \\ L &= k\,m + 2, \\[3pt]
# \text{official:}\quad T &= N + (k-1)(m+2), \\ L &= k\,(m+2).
# \end{aligned}
# $$ (eq-lengths)


# %%
def lengths(N, m, k, boundary="official"):
    """T and L of a row of N tokens with m masks, one [BOS] and one [EOS]."""
    if boundary == "official":
        return N + (k - 1) * (m + 2), k * (m + 2)
    return N + (k - 1) * m, k * m + 2


lengths(512, 77, 4, "paper"), lengths(512, 77, 4, "official")

# %% [markdown]
# ## Two defects of the released code
#
# This book does not copy two defects of the released code ({ref}`reproduction`
# lists them with their tests). In a batch, that code fills the end of a shorter row
# not with padding but with copies of the row's last token, which are attended to
# like real ones; the loss of a sentence then depends on the sentences beside it.
# And its graph ends in the last *position* of the expanded row instead of the last
# state. If a block of text does not end in [EOS], that position holds a visible
# word, and the last target has to be predicted there.

# %% mystnb={"code_prompt_show": "Checked: the lengths; in our model a row scores the same alone and beside a longer row; with the released filling its states change; over 4,000 steps the package masks 18 or 19 of 126 tokens"} tags=["hide-cell", "check"]
rows = [BOS, 6, 7, 8, 9, 10, EOS], [BOS, 6, 10, EOS, PAD, PAD, PAD]
token_ids_BN = torch.tensor(rows)
is_masked_BN = (token_ids_BN == 8) | (token_ids_BN == 10)
masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, MASK)
pair = masked_ids_BN, is_masked_BN, token_ids_BN
for boundary in ("paper", "official"):
    expanded, graph = expand_masks(*pair, 2, boundary, SpecialIds())
    T_B, L_B = lengths(torch.tensor([7, 4]), torch.tensor([2, 1]), 2, boundary)
    assert torch.equal(expanded.is_real_BT.sum(1), T_B)
    assert torch.equal(graph.num_states_B, L_B)

_ = torch.manual_seed(0)
model = ExLM(ModelConfig(states_per_mask=2), 90, SpecialIds()).eval()
with torch.no_grad():
    beside = log_likelihood(model(*pair))[1]
    alone = log_likelihood(model(*(t[1:, :4] for t in pair)))[0]
    real_BT = expand_masks(*pair, 2, "official", SpecialIds())[0]
    is_filled_BT = ~real_BT.is_real_BT
    filled_ids_BT = real_BT.token_ids_BT.masked_fill(is_filled_BT, EOS)
    filled_BT = filled_ids_BT, *real_BT[1:3], torch.ones_like(is_filled_BT)
    change_TD = (model.encoder(*filled_BT) - model.encoder(*real_BT))[1]
assert torch.isclose(beside, alone, rtol=1e-4)
assert change_TD[0].abs().max() > 1e-3
no_end = [t[:1, :-1] for t in pair]
expanded, graph = expand_masks(*no_end, 2, "official", SpecialIds())
assert expanded.token_ids_BT[0, graph.place_BL[0, -1]] == MASK

from exlm_mini.data.masking import num_masks

masks = [int(num_masks(0.15, torch.tensor([126]), 1, step)) for step in range(4000)]
assert set(masks) == {18, 19}
assert abs(np.mean(masks) - 0.15 * 126) < 4 * 0.3 / 4000**0.5

# %% [markdown]
# ## Why the default masks a fixed number
#
# If each token is masked independently with probability $p$, the number of masks
# varies from row to row, and by {eq}`eq-lengths` the lengths vary $k - 1$ times
# as much. A batch is as long as its longest row. Here is the share that is
# padding, for blocks of $N = 128$ tokens, $p = 0.15$ and $k = 4$:

# %%
chance = np.random.default_rng(1)
for rows in (8, 32, 128):
    m_XB = chance.binomial(126, 0.15, size=(2000, rows))
    T_XB, _ = lengths(128, m_XB, k=4)
    padding = 1 - T_XB.mean() / T_XB.max(axis=1).mean()
    print(f"{rows:3} rows in a batch: {padding:.0%} padding")

# %% [markdown]
# By default the package therefore masks the same number of tokens in every row:
# $p$ times the length, rounded up or down at random once per step, so that the
# mean ratio is $p$. A run meets only two lengths, which also suits a compiler that
# specialises a model to its shapes.
#
# ## Operations of a step
#
# Divide {eq}`eq-lengths` by $N$: the encoder reads about $1 + p\,(k-1)$ times as
# many tokens, which is 1.45 for $p = 0.15$ and $k = 4$. But attention grows with
# the square of the length, the vocabulary head has $k$ states to score for each
# mask, and the transition matrix comes on top. We count it all, in multiply-adds,
# for the model size that the paper trains.

# %%
Size = namedtuple("Size", "layers D F H V")
base = Size(layers=12, D=768, F=3072, H=12, V=50_265)  # BERT-base


def encoder_operations(T, size):
    """Projections, attention and feed-forward network of every layer."""
    layers, D, F, *_ = size
    return layers * (4 * T * D * D + 2 * T * T * D + 2 * T * D * F)


def head_operations(S, size):
    """A dense layer and all words of the vocabulary, for S hidden states."""
    return S * (size.D * size.D + size.D * size.V)


def link_operations(L, M, size):
    """E from H heads and their gates; the emissions of M targets."""
    return L * (2 * size.D**2 + size.D * size.H) + L * L * size.D + M * L * size.D


# %% [markdown]
# The sum over all paths itself has no matrix products and hardly counts. The
# backward pass needs twice the products of the forward pass in both models, so
# the ratio of two forward passes is the ratio of two training steps.


# %%
def mlm_operations(N, m, size):
    return encoder_operations(N, size) + head_operations(m, size)


def exlm_operations(N, m, k, size, expand_at=0):
    T, L = lengths(N, m, k)
    lower = size._replace(layers=expand_at)  # layers on N tokens; none in the paper
    upper = size._replace(layers=size.layers - expand_at)
    encoder = encoder_operations(N, lower) + encoder_operations(T, upper)
    return encoder + head_operations(L, size) + link_operations(L, m + 2, size)


N, m = 512, round(0.15 * 512)
ratio = exlm_operations(N, m, 4, base) / mlm_operations(N, m, base)
print(f"ExLM, k = 4: {ratio:.1f} times an MLM")

# %% [markdown]
# The paper measured time: 104.2 GPU hours against 54.7 (Table 12), a ratio of
# 1.9. Our count gives 1.7 when only states are scored and 2.1 when every position
# is, as in the released code. (With rows of 128 tokens, which {ref}`chap-full-runs`
# finds more likely for Table 12, it gives the same.) Most of the difference between
# the two is the vocabulary head, 50,265 products of width 768 per position, spent
# on positions that predict nothing.
#
# Of the operations that ExLM adds to the MLM's, 72% are the encoder's, which reads
# longer rows, 26% those of the vocabulary head, which scores four states for each
# mask, and 1% those of transitions and emissions.

# %% mystnb={"code_prompt_show": "Checked: PyTorch counts as many operations while both models run, to the last digit; 1.7 and 2.1, the paper's 1.9 between them, and nine tenths of the difference in the head; the same for 128 tokens; where the added operations go"} tags=["hide-cell", "check"]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exlm_mini.model import MaskedLM


def counted(model, batch):
    """Multiply-adds of one pass; the counter cannot see fused attention."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        model(*batch)
    return counter.get_total_flops() // 2


tiny = Size(layers=2, D=64, F=256, H=4, V=500)
rng = torch.Generator().manual_seed(4)
ids_BN = torch.randint(6, 90, (3, 66), generator=rng)
ids_BN[:, 0], ids_BN[:, -1] = BOS, EOS
is_hidden_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
is_hidden_BN[:, 1:18:2] = True
batch = ids_BN.masked_fill(is_hidden_BN, MASK), is_hidden_BN, ids_BN
mlm = MaskedLM(ModelConfig(), 500).eval()
assert counted(mlm, batch[:2]) == 3 * mlm_operations(66, 9, tiny)
# Places of states have embeddings too, projected once for the whole batch.
places = lengths(66, 9, 4)[0] * (2 * tiny.D + tiny.H) * tiny.D
for expand_at in (0, 1):
    exlm = ExLM(ModelConfig(expand_at=expand_at), 500).eval()
    want = 3 * exlm_operations(66, 9, 4, tiny, expand_at) + places
    assert counted(exlm, batch) == want

T, L = lengths(N, m, 4)
mlm_cost = mlm_operations(N, m, base)
released = encoder_operations(T, base) + head_operations(T, base)
released += link_operations(T, m + 2, base) + T * (2 * base.D + base.H) * base.D
released = released / mlm_cost
assert round(ratio, 1) == 1.7 and round(released, 1) == 2.1
assert ratio < 104.2 / 54.7 < released
assert head_operations(T - L, base) / mlm_cost > 0.9 * (released - ratio)
short = 128, round(0.15 * 128)
short_ratio = exlm_operations(*short, 4, base) / mlm_operations(*short, base)
assert round(short_ratio, 1) == round(ratio, 1)
added = exlm_operations(N, m, 4, base) - mlm_cost
of_encoder = encoder_operations(T, base) - encoder_operations(N, base)
of_links = link_operations(L, m + 2, base)
shares = [round(x / added, 2) for x in (of_encoder, of_links)]
assert shares == [0.72, 0.01] and round(1 - sum(shares), 2) in (0.26, 0.27)

# %% [markdown]
# In {numref}`fig-cost` the cost is nearly linear in $k$, and the mask ratio sets
# the slope. The higher ratio, 38.7%, is the other one in the paper's Table 4.

# %% mystnb={"figure": {"caption": "Operations of a training step of ExLM relative to an MLM of the same mask ratio p: BERT-base, rows of 512 tokens. The black dot is the paper's ratio of GPU hours.", "name": "fig-cost"}, "image": {"alt": "Three rising lines from 1 at k = 1. At k = 8 the one for 38.7 percent ends at 5.3, for 15 percent at 2.7, and expanded after 9 layers at 1.75. The paper's 1.9 lies just above the middle one."}} tags=["remove-input"]
ks = np.arange(1, 9)
fig, ax = plt.subplots(figsize=(3.6, 3.4))
for name, p, expand_at, style in (
    ("p = 38.7%", 0.387, 0, dict(color=COLORS["second"])),
    ("p = 15%", 0.15, 0, dict(color=COLORS["exlm"])),
    (
        "p = 15%,\nexpanded\nafter 9",
        0.15,
        9,
        dict(color=COLORS["exlm"], ls="--"),
    ),
):
    m_p = round(p * N)
    cost_k = [exlm_operations(N, m_p, k, base, expand_at) for k in ks.tolist()]
    cost_k = np.array(cost_k) / mlm_operations(N, m_p, base)
    ax.plot(ks, cost_k, marker="o", ms=3, **style)
    ax.text(8.2, cost_k[-1], name, color=style["color"], va="center", fontsize=8)
ax.plot(4, 104.2 / 54.7, "o", color="black", ms=6, zorder=5)
ax.text(4, 2.05, "paper", ha="center", va="bottom", fontsize=9)
_ = ax.set(
    xlabel="states per mask, k",
    ylabel="times an MLM",
    xlim=(0.8, 11.4),
    ylim=(0.8, 5.6),
)
_ = ax.set_xticks(range(1, 9))

# %% [markdown]
# ## Expanding later
#
# The clones of a [MASK] enter the encoder as $k$ equal vectors, and every layer
# processes all of them. The package can expand later, which the paper does not:
# with `model.expand_at` $= e$ the $e$ lowest layers read the row of $N$ tokens,
# then the hidden state at each [MASK] is copied to its $k$ clones, and the layers
# above tell these apart. `exlm_operations` above already takes this argument.

# %%
for expand_at in (0, 6, 9):
    times = exlm_operations(N, m, 4, base, expand_at) / mlm_operations(N, m, base)
    print(f"expanded after {expand_at} of 12 layers: {times:.1f} times an MLM")

# %% [markdown]
# With expansion after 9 layers, the extra cost that remains is mostly the
# vocabulary head, which scores four states for each mask wherever they come from.
# Whether a model expanded late learns as well is a separate question; in the
# study's languages ten seeds show no clear loss ({ref}`chap-findings`).
#
# ## Earlier models with more states than words
#
# More states than words, and a way of choosing among them, come from translation
# models that write all words of a sentence at once and meet the same problem:
# several translations are right, and mixing their words is wrong
# {cite}`gu2018nat`. CTC {cite}`graves2006ctc` lets many states spell fewer
# symbols by dropping repeats and blanks. The DA-Transformer
# {cite}`huang2022datransformer` gives its decoder several times as many states as
# the source has words, and links them into a graph. ExLM takes over this graph.
# What is new is where the states stand: in the sentence, in place of the [MASK],
# so that the encoder sees them together with the words around them.
#
# ## Exercises
#
# Replace the `...`; the judge says whether the answer is right.


# %% mystnb={"code_prompt_show": "The judges"} tags=["hide-cell"]
def verdict(answer, is_right, otherwise):
    return "not yet" if answer is None else "right" if is_right else otherwise


def told(verdicts):
    """Print one verdict for several cases: the first that is not right."""
    wrong = [verdict for verdict in verdicts if verdict != "right"]
    print(wrong[0] if wrong else "right")
    return not wrong


def judge_states(function):
    """Compare with the package's count for a block of three sentences."""
    verdicts = []
    for k, boundary in ((2, "official"), (4, "paper"), (4, "official")):
        row = [BOS, 9, MASK, EOS, 8, MASK, MASK, EOS, MASK, EOS]
        ids_BN = torch.tensor([row])
        batch = ids_BN, ids_BN == MASK, ids_BN
        _, its_graph = expand_masks(*batch, k, boundary, SpecialIds())
        want, answer = int(its_graph.num_states_B), function(10, 4, 3, k, boundary)
        case = f"k = {k}, {boundary}: {want} states, not {answer}"
        verdicts.append(verdict(answer, answer == want, case))
    return told(verdicts)


def judge_largest(function):
    """Compare with the largest k found by counting."""

    def times(p, k):
        m = round(p * 512)
        return exlm_operations(512, m, k, base) / mlm_operations(512, m, base)

    fits = [k for k in range(1, 9) if times(0.387, k) <= times(0.15, 4)]
    answer = function()
    return told(
        [verdict(answer, answer == max(fits), f"{answer} is not the largest")]
    )


assert not judge_states(lambda N, m, num_eos, k, boundary: k * m)

# %% [markdown]
# **1. Three sentences in a block.** A block of text packs several sentences, each
# followed by an [EOS]. The released code clones every one of them; in the paper's
# reading only the last is a state, and the others are ordinary tokens. How many
# states does a block of $N$ tokens have, with $m$ masks and `num_eos` sentences?


# %%
def num_states(N, m, num_eos, k, boundary): ...  # your turn


_ = judge_states(num_states)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def num_states(N, m, num_eos, k, boundary):
    # Official: [BOS] and every [EOS] expand like masks. Paper: two single ends.
    return k * (m + 1 + num_eos) if boundary == "official" else k * m + 2


assert judge_states(num_states)

# %% [markdown]
# **2. More masks, fewer states.** The paper also trains with $p = 38.7\%$. What
# is the largest $k$ there that costs no more than $k = 4$ at 15%, each relative
# to the MLM of the same $p$? Predict it from $1 + p\,(k-1)$, then count.


# %%
def largest_k(): ...  # your turn


_ = judge_largest(largest_k)


# %% mystnb={"code_prompt_show": "Solution"} tags=["hide-cell"]
def largest_k():
    def times(p, k):
        m = round(p * 512)
        return exlm_operations(512, m, k, base) / mlm_operations(512, m, base)

    # Counting tokens alone, 0.387 (k - 1) <= 0.45 also gives k = 2.
    return max(k for k in range(1, 9) if times(0.387, k) <= times(0.15, 4))


assert judge_largest(largest_k)
