"""Small languages with a known distribution, so that the paper's claims can be measured in bits.

A sentence is drawn in two steps: a few latent variables (mood, topic, number, ...) from a joint
prior, then each word independently given the latents. Two words driven by the same latent
depend on each other once the latent is forgotten; this is the dependency between masked tokens
(§4.1, "inter-token multimodality") that a model predicting each [MASK] on its own cannot
express. For any set of masked positions the grammar gives exactly

* the floor of a masked language model, the sum of the marginal entropies H(x_i | visible);
* the floor of a model that captures dependencies, the joint entropy H(x_masked | visible);
* their difference, the total correlation: what ExLM can gain over MLM.

Everything is exact by enumeration over the latents. Enumeration over *words* is kept small by
one observation: words of a position whose likelihoods are proportional to each other (as
functions of the latents) carry the same evidence. They form a class; given its class, a word
depends on nothing else, so H(words) = H(classes) + sum over positions of H(word | class), and
only class combinations are enumerated. A word that no latent drives has a single class.

Dimension key: S sentences, N words of a sentence, Z joint values of the latents, W words of one
position, V words of the language, C combinations, M masked positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Position:
    """One position in the sentence: its possible words for each value of its latents.

    ``choices`` maps the values of ``latents`` to equally likely words, separated by spaces; a word
    written twice is twice as likely. A position without latents has the single key ``()``.
    """

    choices: Mapping[tuple[str, ...], str]
    latents: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Grammar:
    """A language whose sentences have one length and exactly known probabilities.

    Args:
        name: name of the language in commands and recipes.
        latents: name of each latent variable -> its values.
        prior: joint probability of the latents, one axis per latent in the order of
            ``latents``.
        positions: the positions of the sentence, left to right.
    """

    name: str
    latents: Mapping[str, tuple[str, ...]]
    prior: np.ndarray
    positions: tuple[Position, ...]

    # ---- what the language looks like ----

    @property
    def length(self) -> int:
        """Words per sentence, N."""
        return len(self.positions)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, in order of first appearance; a word id is an index into it."""
        choices = [text for position in self.positions for text in position.choices.values()]
        return tuple(dict.fromkeys(" ".join(choices).split()))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Positions whose word depends on a latent, counted from 0 among the words."""
        return tuple(
            n for n in range(self.length) if self._classes[n].likelihood_ZK.shape[1] > 1
        )

    def sentence(self, word_ids_N: np.ndarray) -> str:
        """The words of one sentence, separated by spaces."""
        return " ".join(self.words[i] for i in word_ids_N)

    def mask(self, positions: tuple[int, ...] | None = None) -> np.ndarray:
        """``is_masked_N`` with the given positions masked; None masks all slots."""
        is_masked_N = np.zeros(self.length, dtype=bool)
        is_masked_N[list(self.slots if positions is None else positions)] = True
        return is_masked_N

    def sample(self, num_sentences: int, seed: int | tuple[int, ...]) -> np.ndarray:
        """Draw sentences independently.

        Returns:
            word ids (S, N), int64; a pure function of ``seed``. A larger sample begins with any
            smaller one of the same seed.
        """
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        uniform_SN = rng.random((num_sentences, 1 + self.length))
        latent_S = _draw(np.cumsum(self._prior_Z), uniform_SN[:, 0])
        word_ids_SN = np.empty((num_sentences, self.length), dtype=np.int64)
        for n, (ids_W, probability_ZW) in enumerate(self._tables):
            cumulative_ZW = np.cumsum(probability_ZW, axis=1)
            word_ids_SN[:, n] = ids_W[_draw(cumulative_ZW[latent_S], uniform_SN[:, n + 1])]
        return word_ids_SN

    # ---- probabilities of sentences ----

    def marginals(self, sentence_N: np.ndarray, is_masked_N: np.ndarray) -> np.ndarray:
        """The predictions of a perfect masked language model: each masked word on its own.

        Args:
            sentence_N: word ids; masked words are not read.
            is_masked_N: bool.

        Returns:
            (M, V): the distribution of each masked word given the visible ones, in order of
            position.
        """
        posterior_Z = self._posterior(sentence_N, is_masked_N)
        return posterior_Z @ self.word_probability_NZV[is_masked_N]

    # ---- entropies, averaged over contexts ----

    def joint_entropy_bits(self, is_masked_N: np.ndarray) -> float:
        """H(masked words | visible words) in bits: the floor if dependencies are modelled."""
        everything = self._entropy_bits(np.ones_like(is_masked_N))
        return everything - self._entropy_bits(~is_masked_N)

    def marginal_entropy_bits(self, is_masked_N: np.ndarray) -> float:
        """Sum over masked positions of H(x_i | visible words) in bits: the floor of MLM."""
        context = self._entropy_bits(~is_masked_N)
        place_N = np.arange(self.length)
        known = (~is_masked_N | (place_N == n) for n in np.flatnonzero(is_masked_N))
        return sum((self._entropy_bits(is_kept_N) - context for is_kept_N in known), 0.0)

    # ---- tables ----

    @cached_property
    def word_probability_NZV(self) -> np.ndarray:
        """P(word | latents) at every position, over the whole vocabulary; the latents run in the
        order of ``prior``."""
        table_NZV = np.zeros((self.length, self._prior_Z.size, len(self.words)))
        for n, (ids_W, probability_ZW) in enumerate(self._tables):
            table_NZV[n][:, ids_W] = probability_ZW
        return table_NZV

    @cached_property
    def _prior_Z(self) -> np.ndarray:
        return self.prior.reshape(-1)

    @cached_property
    def _tables(self) -> tuple[_Table, ...]:
        word_ids = {word: i for i, word in enumerate(self.words)}
        return tuple(self._table(position, word_ids) for position in self.positions)

    def _table(self, position: Position, word_ids: dict[str, int]) -> _Table:
        choices = {key: choice.split() for key, choice in position.choices.items()}
        words = list(dict.fromkeys(itertools.chain.from_iterable(choices.values())))
        rows = []
        for values in itertools.product(*self.latents.values()):  # in the order of the prior
            value_of = dict(zip(self.latents, values, strict=True))
            choice = choices[tuple(value_of[name] for name in position.latents)]
            rows.append([choice.count(word) / len(choice) for word in words])
        return _Table(np.array([word_ids[word] for word in words]), np.array(rows))

    @cached_property
    def _classes(self) -> tuple[_Classes, ...]:
        return tuple(_classes(table.probability_ZW, self._prior_Z) for table in self._tables)

    # ---- steps of the computations above ----

    def _posterior(self, sentence_N: np.ndarray, is_masked_N: np.ndarray) -> np.ndarray:
        """P(latents | visible words), (Z,)."""
        weight_Z = self._prior_Z
        for n in np.flatnonzero(~is_masked_N):
            weight_Z = weight_Z * self.word_probability_NZV[n, :, sentence_N[n]]
        if not weight_Z.any():
            raise ValueError(f"the visible words fit no sentence of the grammar {self.name}")
        return weight_Z / weight_Z.sum()

    def _entropy_bits(self, is_kept_N: np.ndarray) -> float:
        """Entropy of the words at the kept positions, in bits."""
        kept = [self._classes[n] for n in np.flatnonzero(is_kept_N)]
        driven = [c.likelihood_ZK for c in kept if c.likelihood_ZK.shape[1] > 1]
        weight_CZ = self._prior_Z[None]
        for likelihood_ZK in driven:  # combinations of nonzero weight, position by position
            weight_CKZ = weight_CZ[:, None, :] * likelihood_ZK.T
            weight_CZ = weight_CKZ[weight_CKZ.any(axis=2)]
        return _entropy_bits(weight_CZ.sum(axis=1)) + sum(c.word_given_class_bits for c in kept)


class _Table(NamedTuple):
    """The words a position can hold and their probability given the latents."""

    word_ids_W: np.ndarray
    probability_ZW: np.ndarray


class _Classes(NamedTuple):
    """The K classes of one position; the words of a class carry the same evidence."""

    likelihood_ZK: np.ndarray
    word_given_class_bits: float


def _classes(probability_ZW: np.ndarray, prior_Z: np.ndarray) -> _Classes:
    """Group the words whose likelihoods are proportional, and find the entropy within groups."""
    possible_Z = prior_Z > 0
    groups: dict[bytes, list[int]] = {}
    for w, likelihood_Z in enumerate(probability_ZW.T):
        shape_Z = likelihood_Z[possible_Z]
        if shape_Z.any():
            # Rounding joins equal ratios that differ in the last bits. Unequal ones are much
            # further apart, as a grammar has few words per choice.
            key = np.round(shape_Z / shape_Z.max(), 9).tobytes()
            groups.setdefault(key, []).append(w)
    members = list(groups.values())
    likelihood_ZK = np.stack([probability_ZW[:, w].sum(axis=1) for w in members], axis=1)
    probability_W = prior_Z @ probability_ZW
    bits = sum(
        probability_W[w].sum() * _entropy_bits(probability_W[w] / probability_W[w].sum())
        for w in members
    )
    return _Classes(likelihood_ZK, float(bits))


def _entropy_bits(probability: np.ndarray) -> float:
    """Entropy of a distribution in bits, with 0 log 0 = 0."""
    positive = probability[probability > 0]
    return float(-(positive * np.log2(positive)).sum())


def _draw(cumulative: np.ndarray, uniform_S: np.ndarray) -> np.ndarray:
    """The outcome that each uniform number in [0, 1) selects; ``cumulative`` is (..., W)."""
    # The last bound, 1, is left out: rounding may put it below a uniform number close to 1.
    return (uniform_S[:, None] >= cumulative[..., :-1]).sum(axis=1)
