"""Exact distributions of the toy language for many masked sentences, each with its own masks.

``Grammar`` enumerates words for one set of masked positions. In a batch every row has its own
set, so here everything is derived from ``P(latents | visible words)``: given the latents, words are
independent of each other.

Dimension key: S sentences, N words of a sentence, R masked words of all sentences, Z joint values
of the latents, V words of the language, F fillings of the masks of a sentence.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from scipy.special import entr

from exlm_mini.data.toy import Grammar


class Contexts:
    """Sentences of a grammar with some words hidden; ``word_ids_SN`` has the hidden words, too.

    Masked words are numbered sentence by sentence, from left to right.
    """

    def __init__(
        self, language: Grammar, word_ids_SN: np.ndarray, is_masked_SN: np.ndarray
    ) -> None:
        self.language, self.word_ids_SN, self.is_masked_SN = language, word_ids_SN, is_masked_SN
        self.row_R, self.position_R = np.nonzero(is_masked_SN)
        prior_Z = language.prior.reshape(-1)
        self._visible_SZ = self._likelihood(word_ids_SN, ~is_masked_SN) * prior_Z
        self._all_SZ = self._visible_SZ * self._likelihood(word_ids_SN, is_masked_SN)

    @cached_property
    def latent_SZ(self) -> np.ndarray:
        """P(latents | visible words)."""
        return self._visible_SZ / self._visible_SZ.sum(axis=1, keepdims=True)

    @cached_property
    def marginal_RV(self) -> np.ndarray:
        """P(masked word | visible words), each masked word by itself."""
        marginal_RV = np.empty((len(self.row_R), len(self.language.words)))
        for n, word_probability_ZV in enumerate(self.language.word_probability_NZV):
            is_here_R = self.position_R == n
            marginal_RV[is_here_R] = self.latent_SZ[self.row_R[is_here_R]] @ word_probability_ZV
        return marginal_RV

    @cached_property
    def marginal_bits_R(self) -> np.ndarray:
        """H(masked word | these visible words) in bits: the loss of a perfect MLM."""
        return _entropy_bits(self.marginal_RV)

    @cached_property
    def place_bits_R(self) -> np.ndarray:
        """H(masked word) in bits when only its position is known."""
        prior_Z = self.language.prior.reshape(-1)
        return _entropy_bits(prior_Z @ self.language.word_probability_NZV)[self.position_R]

    @cached_property
    def floor_bits_S(self) -> np.ndarray:
        """Sum of ``marginal_bits_R`` over the masks of each sentence: the floor of MLM."""
        return np.bincount(self.row_R, self.marginal_bits_R, minlength=len(self.word_ids_SN))

    @cached_property
    def joint_bits_S(self) -> np.ndarray:
        """H(masked words | these visible words) in bits, estimated with little noise.

        The entropy of words and latents, minus that of the latents given all words::

            H(x | visible) = H(z | visible) + sum over masks i of H(x_i | z) - H(z | x, visible)

        The first two terms are exact. The last is evaluated at the sentence's actual words, so it
        is unbiased over sentences drawn from the grammar; if sentences determine their latents it
        is 0, and the result is exact.
        """
        word_given_latents_NZ = _entropy_bits(self.language.word_probability_NZV)
        given_latents_SZ = self.is_masked_SN @ word_given_latents_NZ
        latent_SZ = self._all_SZ / self._all_SZ.sum(axis=1, keepdims=True)
        return (
            _entropy_bits(self.latent_SZ)
            + (self.latent_SZ * given_latents_SZ).sum(axis=1)
            - _entropy_bits(latent_SZ)
        )

    def sample(self, num_fillings: int, seed: int | tuple[int, ...]) -> np.ndarray:
        """Draw fillings from P(masked words | visible words), all masks of a sentence together.

        Returns:
            word_ids_FSN, with the visible words unchanged.
        """
        rng = np.random.default_rng(seed)
        table_NZV = self.language.word_probability_NZV
        word_ids_FSN = np.tile(self.word_ids_SN, (num_fillings, 1, 1))
        for word_ids_SN in word_ids_FSN:
            latent_S = _draw(self.latent_SZ, rng)
            word_ids_SN[self.row_R, self.position_R] = _draw(
                table_NZV[self.position_R, latent_S[self.row_R]], rng
            )
        return word_ids_FSN

    def surprise_bits(self, word_ids_SN: np.ndarray) -> np.ndarray:
        """-log2 P(masked words | visible words) for a given filling of the masks, (S,)."""
        filled_SZ = self.latent_SZ * self._likelihood(word_ids_SN, self.is_masked_SN)
        with np.errstate(divide="ignore"):
            return -np.log2(filled_SZ.sum(axis=1))

    def _likelihood(self, word_ids_SN: np.ndarray, is_counted_SN: np.ndarray) -> np.ndarray:
        """P(counted words | latents), (S, Z)."""
        likelihood_SZ = np.ones((len(word_ids_SN), self.language.prior.size))
        for n, table_ZV in enumerate(self.language.word_probability_NZV):
            rows = is_counted_SN[:, n]
            likelihood_SZ[rows] *= table_ZV.T[word_ids_SN[rows, n]]
        return likelihood_SZ


def _entropy_bits(probability: np.ndarray) -> np.ndarray:
    """Entropy over the last axis."""
    return entr(probability).sum(axis=-1) / np.log(2)


def _draw(probability_SX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One outcome drawn from each row's distribution, (S,)."""
    cumulative_SX = probability_SX.cumsum(axis=1)
    threshold_S1 = rng.random((len(cumulative_SX), 1)) * cumulative_SX[:, -1:]
    return (cumulative_SX <= threshold_S1).sum(axis=1)
