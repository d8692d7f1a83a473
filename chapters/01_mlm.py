# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (chap-mlm)=
# # A masked language model from an empty cell
#
# Hide some words of a sentence, let a network guess them, and repeat: this is
# masked language modelling, the method that ExLM changes. In this chapter you build
# one. You start with an empty cell and end with a trained model.
#
# The sentences come from a toy language whose probabilities are known exactly. So
# we can say in bits what the best possible model would reach, and check that ours
# gets there. At the end you run the package's own training command.
#
# **You will know afterwards** how masking, the encoder, the objective and the
# training loop fit together; what the loss of a masked language model cannot go
# below, and why; and how to start, look into, stop and resume a training run of
# ExLM.
#
# **What it needs.** Under a minute on one CPU core. No GPU, no download.
#
# **Paper.** §2 of {cite}`zheng2025exlm`. Masked language modelling as such is from
# {cite}`devlin2019bert`.

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
import io
import itertools
import json
import math
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# %%
from exlm_mini.config import (
    SPECIAL_TOKENS,
    MaskingConfig,
    ModelConfig,
    SpecialIds,
    TrainConfig,
)
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import Masker, counter_uniform
from exlm_mini.data.tokenizer import word_level
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model import MaskedLM
from exlm_mini.model.objectives import mlm_loss
from exlm_mini.plotting import (
    COLORS,
    draw_curves,
    draw_heatmap,
    draw_tokens,
    use_book_style,
)
from exlm_mini.training.live import chapter_scale

use_book_style()
scale = chapter_scale()
str(scale)

# %% [markdown]
# ## A language whose answers are known
#
# **Question.** What should a model learn here, and how would we know that it has?
#
# Real text has no answer key: nobody knows the true probability of a hidden word.
# So this book starts with an artificial language, `pairs`. A sentence is made in
# two steps. First a hidden variable, the *mood*, is drawn. Then every word is drawn
# by its place, and two of the words look at the mood.

# %%
language = grammar("pairs")
for sentence_N in language.sample(4, seed=1):
    print(language.sentence(sentence_N))

# %% [markdown]
# These are the places of a sentence, with all their words. Within a choice all
# words are equally likely.

# %%
for place, position in enumerate(language.positions):
    for values, words in position.choices.items():
        print(f"{place:2d}", *[f"if {value}:" for value in values], words)

# %% [markdown]
# Five places always hold the same word. Four hold one of three words, whatever the
# rest of the sentence says. The remaining two are what the language is about. They
# are called its **slots**: if he felt happy, his sister smiled; if he felt sad, she
# wept. The mood itself is never written.

# %%
language.latents, language.slots

# %% [markdown]
# **Check.** The language is small enough to write down whole. We form every
# combination of words, ask the grammar for its probability, and keep those that are
# possible.

# %%
words_of = [" ".join(p.choices.values()).split() for p in language.positions]
word_id = {word: i for i, word in enumerate(language.words)}
every_choice = itertools.product(*words_of)
all_ids_SN = np.array([[word_id[w] for w in words] for words in every_choice])
probability_S = np.exp(language.log_probability(all_ids_SN))
sentence_ids_SN = all_ids_SN[probability_S > 0]

assert len(sentence_ids_SN) == 3**4 * 2
assert np.allclose(probability_S[probability_S > 0], 1 / 162)
len(all_ids_SN), len(sentence_ids_SN)

# %% [markdown]
# Half of the combinations are impossible: those in which the two slots do not
# match.
#
# A network reads numbers. The vocabulary begins with six special tokens, then come
# the words. Each sentence stands between [BOS] and [EOS], its beginning and its
# end.

# %%
special = SpecialIds()
vocabulary = [*SPECIAL_TOKENS, *language.words]


def frame(word_ids_SN):
    """Token ids of sentences between [BOS] and [EOS]."""
    token_ids_SN = np.pad(word_ids_SN + len(SPECIAL_TOKENS), ((0, 0), (1, 1)))
    token_ids_SN[:, 0], token_ids_SN[:, -1] = special.bos, special.eos
    return torch.from_numpy(token_ids_SN)


token_ids_SN = frame(sentence_ids_SN)
token_ids_SN[0], len(vocabulary)

# %% [markdown]
# **Check.** The package's tokenizer gives the same ids to the same words.

# %%
tokenizer = word_level(language.words)
assert tokenizer.special_ids == special
assert tokenizer.vocab_size == len(vocabulary)
for word_ids_N, token_ids_N in zip(sentence_ids_SN, token_ids_SN, strict=True):
    token_ids = tokenizer.encode(language.sentence(word_ids_N))
    assert token_ids == token_ids_N[1:-1].tolist()

# %% [markdown]
# **Takeaway.** The whole language is 162 equally likely sentences of 11 words.
# Whatever we ask about it has an exact answer.

# %% [markdown]
# ## Masking
#
# **Question.** Which words are hidden, and what stands in their place?
#
# In the notation of the paper {cite}`zheng2025exlm`: let $\mathbf{X} = [x_1, \dots,
# x_n]$ be a sequence of tokens. A set of places $M$ is drawn, and each token there
# is replaced by the special token [MASK]. The result is the masked input
# $\tilde{\mathbf{X}}$:
#
# $$
# \tilde{x}_i = \begin{cases}
# \text{[MASK]} & \text{if } i \in M, \\ x_i & \text{otherwise.} \end{cases}
# $$ (eq-masking)
#
# The share of hidden tokens is the *mask ratio* $p$. {cite:t}`devlin2019bert` hide
# 15% and now and then write a random word, or the word itself, instead of [MASK].
# The released ExLM command writes [MASK] only, and so do we.
#
# Fifteen percent of 11 words is one or two, and the two slots would rarely be
# hidden together. That case is what this book is about, so here we hide 3 words of
# 11. To choose them, give every place a random number and take the three smallest.
# [BOS] and [EOS] are never hidden.


# %%
def mask_three(token_ids_BN, noise_BN):
    """Put [MASK] at the three places of each row with the smallest noise."""
    boundaries = torch.tensor([special.bos, special.eos])
    is_boundary_BN = torch.isin(token_ids_BN, boundaries)
    order_BN = noise_BN.masked_fill(is_boundary_BN, 2.0).argsort(dim=1)
    is_masked_BN = torch.zeros_like(is_boundary_BN)
    is_masked_BN.scatter_(1, order_BN[:, :3], True)
    return token_ids_BN.masked_fill(is_masked_BN, special.mask), is_masked_BN


# %% [markdown]
# **Counters instead of a random state.** Where does the noise come from? Most
# programs keep a random generator, whose hidden state must be saved with every
# checkpoint and depends on everything drawn before. The package computes the noise
# from four counters: the seed of the run, how often the data were seen (the epoch),
# the number of the sample, and the place in the row. The same counters give the
# same number, on every machine and in any order. A run that was stopped can
# therefore draw its next masks without having stored anything, and the masks do not
# depend on how rows are grouped into batches.

# %%
sample_B = np.arange(5)
noise_BN = counter_uniform(1, 0, sample_B[:, None], np.arange(13)[None, :])
rows_BN = token_ids_SN[::33]
masked_ids_BN, is_masked_BN = mask_three(rows_BN, torch.from_numpy(noise_BN))
masked_ids_BN

# %% [markdown]
# **Check.** `Masker` of the package hides the same words. It also does so when it
# is given two of the rows alone.

# %%
masker = Masker(MaskingConfig(mask_ratio=3 / 11), special, seed=1)
batch = masker(rows_BN, np.zeros_like(sample_B), sample_B, step=0)
assert torch.equal(batch.masked_ids_BN, masked_ids_BN)
assert torch.equal(batch.is_masked_BN, is_masked_BN)

two = masker(rows_BN[3:5], np.zeros(2, dtype=int), sample_B[3:5], step=0)
assert torch.equal(two.masked_ids_BN, masked_ids_BN[3:5])

# %% [markdown]
# **Check.** No word is preferred: over many samples each of the 11 places is hidden
# with probability 3/11. Four standard errors leave room for chance, not for a bug.

# %%
many_B = np.arange(20_000)
many_ids_BN = token_ids_SN[many_B % 162]
many = masker(many_ids_BN, np.zeros_like(many_B), many_B, step=0)
share_N = many.is_masked_BN.double().mean(dim=0)
standard_error = math.sqrt(3 / 11 * 8 / 11 / len(many_B))
assert (share_N[1:-1] - 3 / 11).abs().max() < 4 * standard_error
assert (many.is_masked_BN.sum(dim=1) == 3).all()
assert share_N[0] == share_N[-1] == 0

# %% [markdown]
# **Figure.** {numref}`fig-mlm-rows` shows the five rows as the model sees them.
# Grey boxes are the boundaries, yellow boxes the hidden words.

# %% mystnb={"figure": {"caption": "Five masked rows.", "name": "fig-mlm-rows"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(7.8, 2.4))
for y, row_N in enumerate(masked_ids_BN.tolist()):
    kinds = ["mask" if i == special.mask else "token" for i in row_N]
    kinds[0] = kinds[-1] = "boundary"
    draw_tokens(ax, [vocabulary[i] for i in row_N], kinds, y=-float(y))

# %% [markdown]
# **Takeaway.** Masking turns a sentence into a question with a known answer. No
# labels are needed.

# %% [markdown]
# ## The encoder
#
# **Question.** How does a network read all visible words at once and say something
# about each hidden one?
#
# With a Transformer encoder {cite}`vaswani2017attention`. Every token becomes a
# vector. A few layers then let the vectors exchange information, and at the end
# each vector describes its token in the light of the others. Four small pieces are
# enough.
#
# **Piece 1: where a token stands.** Attention compares vectors and by itself does
# not know their order. Rotary positions {cite}`su2021roformer` turn pairs of
# coordinates by an angle that grows with the place of the token. The product of two
# turned vectors then knows of their places only how far apart they are, and in
# which direction. Here only the first half of the coordinates is turned. ExLM uses
# the second half for its copies of a mask ({ref}`chap-rope`); in this chapter it
# stays as it is.


# %%
def turn_by_place(x_BHNd):
    """Rotate pairs (j, j + d/4) of the first half by place * 10000^(-4j/d)."""
    num_places, head_dim = x_BHNd.shape[2:]
    num_pairs = head_dim // 4
    j = torch.arange(num_pairs, dtype=x_BHNd.dtype, device=x_BHNd.device)
    place_N1 = torch.arange(num_places, device=x_BHNd.device).unsqueeze(1)
    angle_Nj = place_N1 * 10_000.0 ** (-j / num_pairs)
    cos, sin = angle_Nj.cos(), angle_Nj.sin()
    sizes = [num_pairs, num_pairs, head_dim // 2]
    first, second, rest = x_BHNd.split(sizes, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, rest], dim=-1)


# %% [markdown]
# **Piece 2: self-attention.** Each token sends out a *query*, offers a *key* and
# carries a *value*. Where a query fits a key, the value is taken over. Several
# *heads* do this side by side, each with a part of the coordinates.


# %%
class TinyAttention(nn.Module):
    turn = staticmethod(turn_by_place)

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BND):
        x = self.query_key_value(x_BND).unflatten(-1, (3, self.num_heads, -1))
        query_BHNd, key_BHNd, value_BHNd = x.permute(2, 0, 3, 1, 4)
        fit_BHNN = self.turn(query_BHNd) @ self.turn(key_BHNd).transpose(2, 3)
        head_dim = query_BHNd.shape[-1]
        weight_BHNN = (fit_BHNN / math.sqrt(head_dim)).softmax(dim=-1)
        mixed_BHNd = weight_BHNN @ value_BHNd
        return self.output(mixed_BHNd.transpose(1, 2).flatten(2))


# %% [markdown]
# **Piece 3: a layer.** Attention moves information between tokens. A small
# feed-forward network then works on each token by itself. Both *add* to the vector
# instead of replacing it, and both read a normalised copy of it (pre-norm).


# %%
class TinyLayer(nn.Module):
    def __init__(self, width, ffn_width, num_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = TinyAttention(width, num_heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, ffn_width)
        self.ffn_out = nn.Linear(ffn_width, width)

    def forward(self, x_BND):
        x_BND = x_BND + self.attention(self.attention_norm(x_BND))
        return x_BND + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x_BND))))


# %% [markdown]
# **Piece 4: the whole model.** An embedding, the layers, and a *head* that scores
# every word of the vocabulary at the hidden places. The scores compare the vector
# with the embedding of each word, so that one table serves for reading and for
# writing. Before a softmax makes them probabilities, such scores are called logits.


# %%
class TinyMLM(nn.Module):
    def __init__(self, vocab_size, width=64, ffn_width=256, num_heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layers = [TinyLayer(width, ffn_width, num_heads) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, masked_ids_BN, is_masked_BN):
        x_BND = self.embedding(masked_ids_BN)
        for layer in self.layers:
            x_BND = layer(x_BND)
        hidden_SD = self.final_norm(x_BND)[is_masked_BN]
        feature_SD = self.norm(F.gelu(self.dense(hidden_SD)))
        return feature_SD @ self.embedding.weight.T + self.bias


# %% [markdown]
# **Check.** The package's model is called `MaskedLM`. It has the same parameters,
# stored in two parts named `encoder` and `head`. We copy its weights into ours.
# Nothing may be missing or left over, and the logits must agree. Both compute in
# float64 here, so that only a different formula could make a difference.


# %%
def weights_of(model):
    """Parameters of a MaskedLM under the names of TinyMLM."""
    weights = model.state_dict()
    return {name.partition(".")[2]: weights[name] for name in weights}


config = ModelConfig(preset="tiny", dropout=0.0, attention_dropout=0.0)
_ = torch.manual_seed(1)
model = MaskedLM(config, len(vocabulary))
tiny = TinyMLM(len(vocabulary))
_ = tiny.load_state_dict(weights_of(model))  # strict: raises if a name differs

logits_SV = tiny.double()(masked_ids_BN, is_masked_BN)
packaged_SV = model.double()(masked_ids_BN, is_masked_BN)
assert logits_SV.shape == (15, 27)  # 5 rows of 3 masks, 27 vocabulary entries
assert torch.allclose(logits_SV, packaged_SV, rtol=0, atol=1e-12)
sum(p.numel() for p in tiny.parameters())

# %% [markdown]
# From here on we use the package's model. It can do two things more, which this
# chapter does not need: rows of unequal length, filled up with [PAD], and dropout.
#
# **Takeaway.** A masked language model is an embedding, a few layers of attention
# and feed-forward, and a comparison with the embedding. Ours has 106 thousand
# parameters.

# %% [markdown]
# ## The objective
#
# **Question.** What number says how good the guesses are?
#
# For each hidden place $i$ the model gives a distribution $P$ over the vocabulary,
# seeing only $\tilde{\mathbf{X}}$. Training makes the hidden words likely: it
# maximises the probability of each of them. A product of many probabilities is hard
# to handle, so we take the logarithm, which turns it into a sum, and change the
# sign, so that smaller is better. This is the loss of the paper's §2:
#
# $$
# \mathcal{L}_{\text{MLM}} =
# - \sum_{i \in M} \log P(x_i \mid \tilde{x}_1, \dots, \tilde{x}_n)
# $$ (eq-mlm)
#
# Look at what {eq}`eq-mlm` does *not* contain: the words at two hidden places never
# appear in one probability. Each mask is guessed by itself. The rest of this book
# follows from it.
#
# For the optimiser the sum is divided by the number of masks in the batch, so that
# the learning rate need not know how many there are.

# %%
target_ids_S = rows_BN[is_masked_BN]
log_p_SV = packaged_SV.log_softmax(dim=1)
log_p_S = log_p_SV[torch.arange(len(target_ids_S)), target_ids_S]
loss = -log_p_S.mean()

assert torch.allclose(loss, mlm_loss(packaged_SV, target_ids_S), rtol=1e-12)

# %% [markdown]
# **Check.** The model is untrained. Its weights are small, so all logits are near
# zero and every entry of the vocabulary is about equally likely. The loss must then
# be near $\log 27 = 3.30$ nats. A start far from it is a sure sign of a bug.

# %%
assert abs(loss.item() - math.log(len(vocabulary))) < 0.15
assert packaged_SV.std() < 0.3
print(f"untrained {loss.item():.1f} nats, log V = {math.log(27):.1f} nats")

# %% [markdown]
# **Takeaway.** One number per mask: how surprised the model is by the word that was
# there. Natural logarithms measure it in nats, logarithms to base 2 in bits; one
# nat is 1.44 bits.

# %% [markdown]
# ## The floor
#
# **Question.** How low can the loss get?
#
# Not to zero. If the visible words leave three possibilities, no model can do
# better than to give a third to each. Let $P^*$ be the true distribution of a
# hidden word given the visible ones, and $P$ the model's. The expected loss of this
# mask splits in two {cite}`cover2006elements`:
#
# $$
# \mathbb{E}_{P^*}[-\log_2 P] = H[P^*] + \mathrm{KL}(P^* \,\|\, P)
# $$ (eq-gibbs)
#
# The first part is the entropy $H$ of the truth, which no model can change. The
# second, the Kullback-Leibler divergence, is never negative and zero only for $P =
# P^*$. So the **floor** of a masked language model is the sum of the entropies of
# the single hidden words, each given all that is visible. The grammar computes it
# by enumeration. For some sets of hidden places it can be found by hand:

# %%
examples = {
    "'old' alone": (1,),
    "'happy' alone": (4,),
    "both slots": (4, 10),
    "'old', 'baker' and 'this'": (1, 2, 5),
}
floor_of = {
    name: language.marginal_entropy_bits(language.mask(places))
    for name, places in examples.items()
}
for name, bits in floor_of.items():
    print(f"{bits:.3f} bits  {name}")

# %% [markdown]
# **Check.** One of three words costs $\log_2 3 = 1.585$ bits. One slot costs
# nothing as long as the other can be seen. With both slots hidden each is a fair
# coin: 2 bits.

# %%
expected = [math.log2(3), 0.0, 2.0, 2 * math.log2(3)]
assert np.allclose(list(floor_of.values()), expected, rtol=0, atol=1e-12)

# %% [markdown]
# In training any 3 of the 11 words are hidden, each of the 165 choices equally
# often. The floor of training is the mean over all of them.

# %%
triples = itertools.combinations(range(11), 3)
masks = [language.mask(places) for places in triples]
floors = [language.marginal_entropy_bits(mask) for mask in masks]
floor = float(np.mean(floors))
assert len(masks) == math.comb(11, 3)
print(f"floor: {floor:.4f} bits per sentence")

# %% [markdown]
# A model that knew which words a place can hold, but did not look at the other
# words of the sentence, would reach a higher level: for it a slot is always a coin.

# %%
blind = 3 / 11 * language.marginal_entropy_bits(language.mask(range(11)))
assert math.isclose(blind, 3 / 11 * (4 * math.log2(3) + 2 * 1))
print(f"without looking at other words: {blind:.4f} bits per sentence")

# %% [markdown]
# **Measuring against it.** A loss measured on a sample of sentences moves up and
# down with the sample, and can by luck fall below the floor. We can do better.
# There are 162 sentences and 165 masks, all pairs equally likely, so the *expected*
# loss of a model is a plain mean over all 26,730 pairs. By {eq}`eq-gibbs` it cannot
# be below the floor.
#
# Many pairs look the same to the model, because they differ only in what is hidden.
# It needs to see each different input once.

# %%
num_pairs = len(masks) * len(token_ids_SN)
target_ids_PN = token_ids_SN.repeat(len(masks), 1)
is_masked_PN = torch.zeros(num_pairs, 13, dtype=torch.bool)
mask_of_P = np.repeat(masks, len(token_ids_SN), axis=0)
is_masked_PN[:, 1:-1] = torch.from_numpy(mask_of_P)
masked_ids_PN = target_ids_PN.masked_fill(is_masked_PN, special.mask)
input_ids_UN, input_of_P = masked_ids_PN.unique(dim=0, return_inverse=True)
target_ids_PM = target_ids_PN[is_masked_PN].view(-1, 3)
num_pairs, len(input_ids_UN)


# %%
@torch.no_grad()
def predict(model):
    """log_p_UMV: log P of each word at the three masks of each input, nats."""
    parts = input_ids_UN.to(scale.device).split(256)
    logits = [model(part, part == special.mask) for part in parts]
    log_p_SV = torch.cat(logits).double().log_softmax(dim=1)
    return log_p_SV.view(-1, 3, len(vocabulary)).cpu()


def word_bits(log_p_UMV):
    """bits_PM: loss of each pair at each of its three hidden words, bits."""
    log_p_PM = log_p_UMV[input_of_P].gather(2, target_ids_PM.unsqueeze(2))
    return -log_p_PM.squeeze(2) / math.log(2)


# %% [markdown]
# **Check.** The perfect model meets the floor exactly. To get it, count for each
# input which words were hidden there: these shares are $P^*$. They are also what
# the grammar calls its marginals.

# %%
one_hot_PMV = F.one_hot(target_ids_PM, len(vocabulary)).double()
truth_UMV = torch.zeros(len(input_ids_UN), *one_hot_PMV.shape[1:]).double()
_ = truth_UMV.index_add_(0, input_of_P, one_hot_PMV)
truth_UMV /= truth_UMV.sum(dim=2, keepdim=True)
assert math.isclose(word_bits(truth_UMV.log()).sum(dim=1).mean(), floor)

for pair in range(0, num_pairs, 997):
    mask = is_masked_PN[pair, 1:-1].numpy()
    marginal_MW = language.marginals(sentence_ids_SN[pair % 162], mask)
    predicted_MW = truth_UMV[input_of_P[pair], :, len(SPECIAL_TOKENS) :]
    assert np.allclose(predicted_MW, marginal_MW)

# %% [markdown]
# Hidden words come in four kinds, and each kind has its own floor.

# %%
place_PM = is_masked_PN.nonzero()[:, 1].view(-1, 3) - 1
is_slot_PM = torch.isin(place_PM, torch.tensor(language.slots))
free = [place for place, words in enumerate(words_of) if len(words) == 3]
is_free_PM = torch.isin(place_PM, torch.tensor(free))
num_slots_P1 = is_slot_PM.sum(dim=1, keepdim=True)
kinds = {
    "slot, the other hidden": is_slot_PM & (num_slots_P1 == 2),
    "slot, the other visible": is_slot_PM & (num_slots_P1 == 1),
    "free word": is_free_PM,
    "fixed word": ~is_slot_PM & ~is_free_PM,
}
kind_floors = [1, 0, math.log2(3), 0]
truth_bits_PM = word_bits(truth_UMV.log())
for kind_PM, bits in zip(kinds.values(), kind_floors, strict=True):
    assert (truth_bits_PM[kind_PM] - bits).abs().max() < 1e-12

# %% [markdown]
# **Takeaway.** The best possible masked language model has a loss of 1.84 bits per
# sentence here. Anything above is the model's fault, and nothing can be below.

# %% [markdown]
# ## Training
#
# **Question.** Does gradient descent find the perfect model?
#
# The loop is short. Draw sentences, mask them, compute the loss, take its gradient,
# make a step. AdamW makes the steps. The learning rate rises for 50 steps and then
# falls to zero: large steps from random weights would destroy more than they teach,
# and small steps at the end let the probabilities settle.

# %%
steps = scale.pick(400, 2000)
recipe = TrainConfig(
    steps=steps,
    batch_size=128,
    learning_rate=3e-3,
    warmup_steps=50,
)


def rate_at(step):
    """Learning rate of a step, counted from 0."""
    rise = (step + 1) / recipe.warmup_steps
    fall = (recipe.steps - step) / (recipe.steps - recipe.warmup_steps + 1)
    return recipe.learning_rate * min(rise, fall)


# %% [markdown]
# **Check.** The package uses the same schedule.

# %%
from exlm_mini.training.parts import learning_rate, make_optimizer

for step in range(recipe.steps):
    assert math.isclose(rate_at(step), learning_rate(recipe, step))


# %% [markdown]
# Every batch is drawn afresh from the language. (With text one would hold some
# documents back to validate with. Here we measure on the whole language instead.)

# %%
num_rows = recipe.steps * recipe.batch_size
training_ids_SN = frame(language.sample(num_rows, seed=1))


def draw(step):
    """The masked batch of a step."""
    sample_B = np.arange(recipe.batch_size) + step * recipe.batch_size
    return masker(training_ids_SN[sample_B], 0 * sample_B, sample_B, step)


# %% [markdown]
# The exact loss takes a moment to compute, so the loop looks at it at a few steps
# only.


# %%
def train(model, exact_at):
    """Bits per sentence of every batch, and word_bits at some steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=0.01,
    )
    packaged = make_optimizer(model, recipe).defaults  # all weights in one call
    assert packaged == optimizer.defaults | {"fused": packaged["fused"]}
    batch_bits, exact_PM = [], {}
    for step in range(recipe.steps + 1):
        if step in exact_at:
            exact_PM[step] = word_bits(predict(model))
        if step == recipe.steps:
            return batch_bits, exact_PM
        batch = draw(step).to(scale.device)
        logits_SV = model(batch.masked_ids_BN, batch.is_masked_BN)
        loss = mlm_loss(logits_SV, batch.token_ids_BN[batch.is_masked_BN])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate_at(step)
        optimizer.step()
        batch_bits.append(3 * loss.item() / math.log(2))


# %%
_ = torch.manual_seed(1)
model = MaskedLM(config, len(vocabulary)).to(scale.device)
exact_at = [0, 30, 40, 50, 60, 80, 100, 150, 200, recipe.steps]
batch_bits, exact_PM = train(model, exact_at)
exact_bits = {step: b.sum(dim=1).mean().item() for step, b in exact_PM.items()}
print(f"before training: {exact_bits[0]:.0f} bits per sentence")
surplus = exact_bits[recipe.steps] - floor
print(f"after training:  {surplus:.1f} above the floor of {floor:.2f}")

# %% [markdown]
# **Check.** The model begins near $3 \log_2 27 = 14.3$ bits and ends within 0.05
# bits of the floor. At no step was its exact loss below; the tolerance of $10^{-6}$
# is for rounding only. The loss of a single batch, by contrast, is a matter of luck
# and did fall below.

# %%
assert abs(exact_bits[0] - 3 * math.log2(27)) < 0.3
assert 0 < surplus < 0.05
assert all(bits > floor - 1e-6 for bits in exact_bits.values())
assert min(batch_bits) < floor

# %% [markdown]
# **Figure.** In {numref}`fig-mlm-curve` the dots are the exact loss and the thin
# line is the loss of the batches; one step on the vertical axis is a factor of two.
# The loss falls within a hundred steps, passes the dotted line of a model that does
# not look at other words, and then rests on the dashed line of the floor.

# %% mystnb={"figure": {"caption": "The loss falls to the floor and stays there.", "name": "fig-mlm-curve"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
style = {"color": COLORS["mlm"], "lw": 0.6, "alpha": 0.5}
_ = ax.plot(batch_bits, label="each batch", **style)
draw_curves(ax, {"mlm": exact_bits}, {})
lines = {
    f"without looking at other words {blind:.2f}": (blind, "0.4", ":", 4),
    f"floor {floor:.2f}": (floor, COLORS["floor"], "--", -14),
}
for name, (level, color, style, shift) in lines.items():
    _ = ax.axhline(level, color=color, ls=style, lw=1)
    place = {"xytext": (0, shift), "textcoords": "offset points"}
    look = {"ha": "right", "fontsize": 8, "color": color}
    _ = ax.annotate(name, (recipe.steps, level), **place, **look)
ax.set_yscale("log", base=2)
ax.yaxis.set_major_formatter("{x:g}")
_ = ax.set(ylim=(1, 18))

# %% [markdown]
# **Figure.** {numref}`fig-mlm-kinds` shows the same run by kind of word. The fixed
# words come first. A slot whose partner is visible soon costs less than a coin:
# attention has found the partner. Slots with a hidden partner are the last. The
# model must learn when *not* to be sure, and meets this case in only 5% of its
# rows.

# %% mystnb={"figure": {"caption": "What is learnt when. Dashed: floors.", "name": "fig-mlm-kinds"}} tags=["hide-input"]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for (name, kind_PM), bits in zip(kinds.items(), kind_floors, strict=True):
    mean_bits = [bits_PM[kind_PM].mean() for bits_PM in exact_PM.values()]
    (line,) = ax.plot(list(exact_PM), mean_bits, marker="o", ms=3, label=name)
    _ = ax.axhline(bits, color=line.get_color(), ls="--", lw=1)
_ = ax.set(xlabel="training step", ylabel="bits per hidden word")
_ = ax.set_xlim(0, 200)
_ = ax.legend()

# %% [markdown]
# **Check.** The same in numbers: at step 50 the fixed words are closest to their
# floor; by step 80 a slot with a visible partner is cheaper than a coin, and the
# whole loss is below that of a model that does not look at other words; from step
# 100 on no kind is further from its floor than the slots with a hidden partner.


# %%
def surplus_at(step):
    """Bits above the floor of each kind of word."""
    bits = [exact_PM[step][kind_PM].mean().item() for kind_PM in kinds.values()]
    surplus = np.array(bits) - kind_floors
    return dict(zip(kinds, surplus, strict=True))


assert min(surplus_at(50), key=surplus_at(50).get) == "fixed word"
seen = "slot, the other visible"  # its floor is 0
assert surplus_at(50)[seen] > 1 > surplus_at(80)[seen]
assert exact_bits[50] > blind > exact_bits[80]
for step in (100, 150, 200):
    surplus = surplus_at(step)
    assert max(surplus, key=surplus.get) == "slot, the other hidden"
assert math.comb(9, 1) / math.comb(11, 3) < 0.06  # masks that hide both

# %% [markdown]
# **Takeaway.** For a masked language model this language is solved: what remains of
# the loss is the entropy of the language.

# %% [markdown]
# ## What it predicts
#
# **Question.** Does the model know the true probabilities, or only the likeliest
# word?
#
# The loss already tells: by {eq}`eq-gibbs`, what is left above the floor is the
# divergence between the model's distributions and the true ones.

# %%
log_p_UMV = predict(model)
surplus_UMV = truth_UMV * (truth_UMV.log().nan_to_num(neginf=0.0) - log_p_UMV)
divergence_U = surplus_UMV.sum(dim=(1, 2)) / math.log(2)
mean_divergence = divergence_U[input_of_P].mean().item()

assert math.isclose(mean_divergence, exact_bits[recipe.steps] - floor, abs_tol=1e-6)
assert divergence_U.min() > -1e-9

# %% [markdown]
# **Check.** No probability is off by more than 0.1, at any mask of any input. On
# average a predicted distribution differs from the true one by less than 0.02 (half
# the sum of the absolute differences). The rarest question, both slots at once, is
# the least exact.

# %%
difference_UMV = (log_p_UMV.exp() - truth_UMV).abs()
assert difference_UMV.max() < 0.1

distance_PM = 0.5 * difference_UMV.sum(dim=2)[input_of_P]
assert distance_PM.mean() < 0.02
is_both_PM = kinds["slot, the other hidden"]
assert distance_PM[is_both_PM].mean() > distance_PM[~is_both_PM].mean()

# %% [markdown]
# Here are five questions. Each row has three masks; we ask for the one in angle
# brackets.

# %%
questions = [
    "the [MASK] baker felt <[MASK]> this [MASK] so his sister smiled",
    "the [MASK] baker felt sad this [MASK] so his sister <[MASK]>",
    "the [MASK] baker felt <[MASK]> this winter so his sister [MASK]",
    "the [MASK] baker felt [MASK] this winter so his sister <[MASK]>",
    "the <[MASK]> baker felt [MASK] this winter so his sister [MASK]",
]


def ask(text):
    """Predicted and true distribution (2, V) of the mask in angle brackets."""
    asked = text.partition("<")[0].count("[MASK]")  # masks to the left of it
    token_ids = tokenizer.encode_with_masks(text.replace("<[MASK]>", "[MASK]"))
    row_N = torch.tensor([special.bos, *token_ids, special.eos])
    u = (input_ids_UN == row_N).all(dim=1).nonzero().item()
    return torch.stack([log_p_UMV[u, asked].exp(), truth_UMV[u, asked]])


# %% [markdown]
# **Figure.** {numref}`fig-mlm-answers`: left the model, right the truth, for the
# words in question. When the other slot is visible, the answer is certain. When
# both slots are hidden, each is a coin toss, and a coin toss is the right answer.
# The word in the last row depends on nothing.

# %% mystnb={"figure": {"caption": "Predicted and true probabilities.", "name": "fig-mlm-answers"}} tags=["hide-input"]
words = ["happy", "sad", "smiled", "wept", "old", "young", "tall"]
answers_2QV = torch.stack([ask(text) for text in questions], dim=1)
columns = [vocabulary.index(word) for word in words]
labels = [
    "felt <?> ... sister smiled",
    "felt sad ... sister <?>",
    "felt <?> ... sister [MASK]",
    "felt [MASK] ... sister <?>",
    "the <?> baker",
]
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.9), sharey=True)
titles = ("model", "truth")
for ax, values_QV, title in zip(axes, answers_2QV, titles, strict=True):
    shown = values_QV[:, columns].numpy()
    style = {"cmap": "Blues", "limits": (0, 1)}
    draw_heatmap(ax, shown, words, labels, "probability", **style)
    ax.tick_params(axis="x", rotation=45)
    _ = ax.set_title(title)

# %% [markdown]
# **Takeaway.** The model predicts probabilities, and they are right. Where the
# visible words decide, it is certain; where they do not, it says how much they
# leave open.

# %% [markdown]
# ## What it cannot say
#
# **Question.** The model knows the true probability of every hidden word. Can it
# fill a sentence with two hidden slots?
#
# Let us fill in the blanks from the *exact* distributions, so that no one can blame
# the training. Each mask gets its word by itself, as {eq}`eq-mlm` has it.

# %%
rng = np.random.default_rng(0)
sentence_N = sentence_ids_SN[0]
is_slot_N = language.mask()  # both slots hidden
marginal_MW = language.marginals(sentence_N, is_slot_N)
filled_SN = np.tile(sentence_N, (2000, 1))
for place, marginal_W in zip(language.slots, marginal_MW, strict=True):
    filled_SN[:, place] = rng.choice(len(marginal_W), size=2000, p=marginal_W)

is_possible_S = language.log_probability(filled_SN) > -np.inf
for s in range(4):
    verdict = "possible  " if is_possible_S[s] else "IMPOSSIBLE"
    print(verdict, language.sentence(filled_SN[s]))

# %% [markdown]
# **Check.** Half of the filled sentences are impossible in the language: the coins
# are tossed separately, and match half of the time.

# %%
assert abs(is_possible_S.mean() - 0.5) < 4 * math.sqrt(0.25 / 2000)

# %% [markdown]
# The trained model does the same. For its predictions we need no sample: the two
# slots match if they say "happy" and "smiled", or "sad" and "wept".

# %%
p_X2V = log_p_UMV[input_of_P][is_both_PM].exp().view(-1, 2, len(vocabulary))
happy, sad, smiled, wept = (vocabulary.index(word) for word in words[:4])
match_X = p_X2V[:, 0, happy] * p_X2V[:, 1, smiled]
match_X += p_X2V[:, 0, sad] * p_X2V[:, 1, wept]

assert len(match_X) == 9 * 162  # the third mask is at one of 9 places
assert ((match_X - 0.5).abs() < 0.03).all()

# %% [markdown]
# In bits: by themselves the two slots have 1 bit each, 2 together. But they are
# *one* coin, and a model that knew so would need 1 bit for both.

# %%
assert math.isclose(language.marginal_entropy_bits(is_slot_N), 2)
assert math.isclose(language.joint_entropy_bits(is_slot_N), 1)

# %% [markdown]
# **Takeaway.** A masked language model can know everything about each word and
# nothing about how they belong together. More training does not help, for the loss
# is at its floor. What is lost, and how it grows with the number of masks, is the
# subject of {ref}`chap-multimodality`; how ExLM gets it back, of the chapters after
# it.

# %% [markdown]
# ## Run the main job
#
# **Question.** How do I train the real thing?
#
# Everything above, and ExLM itself, is one command. You need Linux, `git`, `make`
# and Python 3.11 or newer. In a terminal:
#
# ```bash
# git clone https://github.com/exlm-book/exlm-book
# cd exlm-book
# make pretrain
# ```
#
# The first call of `make` installs the pinned packages into `.venv`, which takes a
# few minutes. Then it trains a small ExLM on almost 5,000 molecules, in about a
# minute on one quiet CPU core. A GPU is used where there is one. `make` alone lists
# what else there is. If you have no GPU, let `make setup TORCH=cpu` be the very
# first command: it installs a PyTorch that is smaller by gigabytes.
#
# Behind `make pretrain` stands a Python command. Call it by hand for another
# **recipe**:
#
# ```bash
# source .venv/bin/activate
# python -m exlm_mini.pretrain --recipe toy-pairs --output runs/pairs
# ```
#
# | recipe | data | what it trains |
# |---|---|---|
# | `smiles-tiny` | 5,000 molecules | ExLM |
# | `text-tiny` | Python's reference manual | ExLM |
# | `toy-pairs` | this chapter's language | a masked language model, then ExLM |
#
# The other recipes are the paper's own runs, with models of full size.
#
# **Check.** The table and the two commands say what the package does.

# %%
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import RECIPES, recipe_names
from exlm_mini.fill import main as fill
from exlm_mini.pretrain import main as pretrain

makefile = Path("../Makefile").read_text()
assert "-m exlm_mini.pretrain --recipe smiles-tiny $(ARGS)" in makefile
small = {"smiles-tiny": "exlm", "text-tiny": "exlm", "toy-pairs": "mlm+exlm"}
for name, objective in small.items():
    assert parse(["--recipe", name]).config.objective == objective
for name in set(recipe_names()) - set(small):
    assert parse(["--recipe", name]).config.model.shape.width >= 768

# %% [markdown]
# ### Settings
#
# A recipe is a short file of settings:

# %%
lines = (RECIPES / "toy-pairs.yaml").read_text().splitlines()
print("\n".join(line for line in lines if not line.startswith("#")))

# %% [markdown]
# What it leaves out has a default; `--help=all` lists every setting with its unit.
# Any of them can be replaced on the command line, and through `make` too:
#
# ```bash
# python -m exlm_mini.pretrain --recipe toy-pairs --train.steps 40
# make pretrain ARGS="--train.steps 500 --output runs/longer"
# ```
#
# `--objective mlm`, `repeated-mlm` or `exlm` trains another model on the same data.
# The strategy `slots` in this recipe hides both slots, never another word.

# %%
changed = parse(["--recipe", "toy-pairs", "--train.steps", "40"]).config
plain = parse(["--recipe", "toy-pairs"]).config
assert (plain.train.steps, changed.train.steps) == (400, 40)
assert changed.masking == plain.masking and changed.model == plain.model

# %% [markdown]
# A setting that does not exist is refused before anything starts:

# %%
try:
    parse(["--recipe", "toy-pairs", "--train.stepz", "40"])
except UserError as error:
    print(str(error).replace("; ", ";\n"))

# %% [markdown]
# ### What will it cost?
#
# `--dry-run` answers without training. In this page we call the command's `main`
# with the words that stand behind `python -m exlm_mini.pretrain`. It is the same
# function.


# %%
def run(main, words):
    """Call a command: exit code and what it prints; progress is on stderr."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        exit_code = main(words)
    return exit_code, out.getvalue()


exit_code, printed = run(pretrain, ["--recipe", "toy-pairs", "--dry-run"])
assert exit_code == 0
print(printed)

# %% [markdown]
# The first model is the one of this chapter: 106,139 parameters. A row of 13 tokens
# stays as it is for the masked language model and grows to 17 for ExLM: each of its
# two masks and two boundaries becomes two states.

# %%
assert sum(p.numel() for p in model.parameters()) == 106_139
assert f"parameters         {106_139:,}" in printed
assert 13 + 4 * (2 - 1) == 17 and "13 tokens, 17 expanded" in printed

# %% [markdown]
# ### Training, and where the output goes
#
# Now the job itself, cut to 40 steps of each model so that it takes seconds here;
# the whole recipe takes about 20 seconds. While it works, it shows loss, speed, and
# the time that is left.

# %%
folder = tempfile.TemporaryDirectory()
output = Path(folder.name) / "pairs"
command = ["--recipe", "toy-pairs", "--output", str(output)]
command += ["--train.steps", "40", "--train.save_every", "20"]
exit_code, printed = run(pretrain, command)
assert exit_code == 0

# %% [markdown]
# The run is a folder. Without `--output` it is named `runs/`, recipe and time.
#
# | file | content |
# |---|---|
# | `config.yaml` | every setting, also those left at their default |
# | `versions.json` | commit and package versions |
# | `data/` | the tokenizer, and the rows to train on and to validate with |
# | `metrics.jsonl` | loss and validation by step, one JSON object per line |
# | `checkpoints/step-000040/` | weights and optimiser at that step |
#
# The last two of the table lie in `mlm/` and `exlm/` here, for this recipe trains
# two models.
#
# **Check.** The files are there.

# %%
for name in ("config.yaml", "versions.json", "data/tokenizer.json"):
    assert (output / name).exists()
for name in ("mlm", "exlm"):
    for step in ("step-000020", "step-000040"):
        checkpoint = output / name / "checkpoints" / step
        assert (checkpoint / "model.safetensors").exists()

records = (output / "mlm/metrics.jsonl").read_text().splitlines()
list(json.loads(records[-1]))

# %% [markdown]
# When it is done, it prints what was reached beside the exact values: the joint
# entropy, and the floor of a masked language model. After 40 steps neither model is
# there yet. So here is what the whole recipe printed when its results were recorded
# for {ref}`reproduction`:

# %%
bits = json.loads(records[-1])["validation_bits_per_row"]
assert f"mlm reached {bits:.3f} bits" in printed

recorded = json.loads(Path("../book/results/first-runs.json").read_text())
whole = "python -m exlm_mini.pretrain --recipe toy-pairs"
summary = next(run["summary"] for run in recorded if run["command"] == whole)
print(
    "\n".join(line.replace(", validation", ",\n  validation") for line in summary)
)

# %% [markdown]
# **Check.** The masked language model ends at its floor and ExLM at the joint
# entropy, both within 0.01 bits.

# %%
bits_of = {line.rsplit(" ", 2)[0]: float(line.split()[-2]) for line in summary[2:]}
assert abs(bits_of["mlm reached"] - bits_of["MLM floor"]) < 0.01
assert abs(bits_of["exlm reached"] - bits_of["joint entropy"]) < 0.01

# %% [markdown]
# ### Stopping and resuming
#
# Press Ctrl-C once: the run saves a checkpoint after the step and ends. **The same
# command with the same `--output` goes on** where it stopped, also after a crash.
# Since data order, masks and dropout come from counters, the result is the same to
# the last bit (on the same machine: another one may add in another order).
#
# **Check.** We remove the last checkpoint of ExLM, as if the run had died after
# step 20, give the command again, and compare the weights.

# %%
last = output / "exlm/checkpoints/step-000040"
weights = (last / "model.safetensors").read_bytes()
for file in last.iterdir():
    file.unlink()
last.rmdir()

exit_code, _ = run(pretrain, command)
assert exit_code == 0
assert (last / "model.safetensors").read_bytes() == weights

# %% [markdown]
# ### Looking at the trained model
#
# `python -m exlm_mini.fill` fills the masks of a sentence, or of a molecule.
# `--run` names the run to read; without it the newest below `runs/` is taken. The
# second line is for a run that `make pretrain ARGS="--output runs/molecules"` made:
#
# ```bash
# python -m exlm_mini.fill --run runs/pairs \
#     "the old baker felt [MASK] this morning so his sister [MASK]"
# python -m exlm_mini.fill --run runs/molecules "CC(=O)NC1=CC=[MASK]C=C1[MASK]"
# ```
#
# For ExLM it prints the filled text with its probability, what each state would
# emit, how the states are linked, and the best path through them.
# {ref}`chap-reading` explains how to read that. `--json` prints the same for
# programs:

# %%
text = "the old baker felt [MASK] this morning so his sister [MASK]"
exit_code, printed = run(fill, [text, "--run", str(output), "--json"])
answer = json.loads(printed)
assert exit_code == 0
assert (answer["objective"], answer["step"]) == ("exlm", 40)
assert len(answer["masks"]) == 2 and "[MASK]" not in answer["filled"]
folder.cleanup()
list(answer)

# %% [markdown]
# **Takeaway.** `make pretrain` trains, `--dry-run` tells the cost, dotted options
# change settings, the same command resumes, `fill` shows what was learnt.

# %% [markdown]
# ## Summary
#
# * Masking hides some tokens behind [MASK]. Which ones is a function of counters,
#   so that a run can stop and resume.
# * The encoder is an embedding, layers of attention and feed-forward, and a head
#   that scores the vocabulary at each mask. Under sixty lines of it equal the
#   package's model.
# * The loss {eq}`eq-mlm` guesses each mask by itself. An untrained model is at
#   $\log V$.
# * It cannot go below the sum of the entropies of the single hidden words. On the
#   toy language this floor is known, the expected loss is computed without
#   sampling, and the trained model ends within 0.05 bits of it.
# * At the floor every single probability is right, and half of the sentences with
#   both slots filled are impossible.
#
# ## Exercises
#
# Predict first, then run. Each solution is hidden below its exercise.
#
# **1. Cheap and expensive masks.** Of the 165 ways to hide 3 of the 11 words, which
# have the highest floor, and how many have the floor 0?

# %% tags=["hide-cell"]
# Three of the four free words: 3 log2(3) = 4.75 bits, more than both slots with
# one free word (2 + 1.58). The floor is 0 if nothing but fixed words and at most
# one slot is hidden: C(5, 3) + 2 C(5, 2) = 30 ways.
assert math.isclose(max(floors), 3 * math.log2(3))
assert np.isclose(floors, max(floors)).sum() == math.comb(4, 3)
num_zero = np.isclose(floors, 0).sum()
assert num_zero == math.comb(5, 3) + 2 * math.comb(5, 2) == 30

# %% [markdown]
# **2. The mask ratio.** Hide $c$ of the 11 words instead of 3. Is the floor *per
# hidden word* the same for every $c$? Find a formula.

# %% tags=["hide-cell"]
# It grows. A free word costs log2(3) bits whatever else is hidden. A slot costs
# 1 bit if the other slot is hidden too, which has probability (c - 1) / 10.
for c in range(1, 12):
    hidden = map(language.mask, itertools.combinations(range(11), c))
    mean = np.mean([language.marginal_entropy_bits(mask) for mask in hidden])
    assert math.isclose(mean / c, (4 * math.log2(3) + 2 * (c - 1) / 10) / 11)

# %% [markdown]
# **3. Without positions.** Take the rotation out of `TinyAttention` and train. To
# which level does the loss fall? (Hint: the model still sees *which* words are
# missing. No word of this language occurs at two places.)

# %% tags=["hide-cell"]
# All masks of a row now look alike and get the same distribution. The best one is
# the mean of the three true ones, so each word has a third of its probability:
# log2(3) bits more per mask, 3 log2(3) = 4.75 bits per sentence.
_ = torch.manual_seed(1)
lost = TinyMLM(len(vocabulary))
_ = lost.load_state_dict(weights_of(MaskedLM(config, len(vocabulary))))
for layer in lost.layers:
    layer.attention.turn = lambda x_BHNd: x_BHNd
_, lost_PM = train(lost.to(scale.device), [recipe.steps])
level = floor + 3 * math.log2(3)
reached = lost_PM[recipe.steps].sum(dim=1).mean().item()
assert level - 1e-6 < reached < level + 0.2

# %% [markdown]
# **4. More states.** How long does a row of `toy-pairs` become for ExLM with four
# states per mask? Which option asks for that? Check with a dry run.

# %% tags=["hide-cell"]
# Two masks and two boundaries become four states each: 13 + 4 * 3 = 25 tokens.
words = ["--recipe", "toy-pairs", "--model.states_per_mask", "4", "--dry-run"]
exit_code, printed = run(pretrain, words)
assert exit_code == 0 and "13 tokens, 25 expanded" in printed
