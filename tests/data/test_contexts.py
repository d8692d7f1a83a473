"""Entropies of many contexts, against the grammar's own for one, and against enumeration.

Shapes: S sentences, N words, R masked words, V words of the language.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from small_language import MASKS, PROBABILITY, SENTENCES, SMALL, log_probability

from exlm_lab.experiments.toy_contexts import Contexts
from exlm_mini.data.toy_grammars import grammar

TOWN = grammar("town")


def everywhere(is_masked_N: np.ndarray) -> Contexts:
    """Every sentence of the small language, with the same places masked."""
    return Contexts(SMALL, SENTENCES, np.broadcast_to(is_masked_N, SENTENCES.shape))


def town(num_sentences: int = 40, p: float = 0.3, seed: int = 0) -> Contexts:
    is_masked_SN = np.random.default_rng(seed).random((num_sentences, TOWN.length)) < p
    return Contexts(TOWN, TOWN.sample(num_sentences, seed), is_masked_SN)


@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_mean_entropies_are_those_of_the_grammar(mask):
    contexts, is_masked_N = everywhere(MASKS[mask]), MASKS[mask]
    floor = PROBABILITY @ contexts.floor_bits_S
    joint = PROBABILITY @ contexts.joint_bits_S
    assert math.isclose(floor, SMALL.marginal_entropy_bits(is_masked_N), abs_tol=1e-9)
    assert math.isclose(joint, SMALL.joint_entropy_bits(is_masked_N), abs_tol=1e-9)


def test_each_sentence_has_the_marginals_of_its_own_mask():
    contexts = town()
    for s, (word_ids_N, is_masked_N) in enumerate(
        zip(contexts.word_ids_SN, contexts.is_masked_SN, strict=True)
    ):
        want_MV = contexts.language.marginals(word_ids_N, is_masked_N)
        np.testing.assert_allclose(
            contexts.marginal_RV[contexts.row_R == s], want_MV, atol=1e-12
        )


@pytest.mark.parametrize("name", ["pairs", "quartets"])
def test_joint_entropy_is_exact_where_sentences_tell_their_latents(name):
    language = grammar(name)
    word_ids_SN = language.sample(20, 0)
    is_masked_SN = np.random.default_rng(0).random(word_ids_SN.shape) < 0.6
    found_S = Contexts(language, word_ids_SN, is_masked_SN).joint_bits_S
    for found, words, masked in zip(found_S, word_ids_SN, is_masked_SN, strict=True):
        choices = [
            np.unique(language.sample(1000, 0)[:, n]) if masked[n] else words[[n]]
            for n in range(language.length)
        ]
        every_SN = np.array(list(itertools.product(*choices)))
        p_S = np.exp(log_probability(language, every_SN))
        want = scipy.stats.entropy(p_S, base=2)
        assert math.isclose(found, want, abs_tol=1e-9)


def test_surprise_is_the_grammars():
    contexts = town()
    found_S = contexts.surprise_bits(contexts.word_ids_SN)
    for s, (words, masked) in enumerate(
        zip(contexts.word_ids_SN, contexts.is_masked_SN, strict=True)
    ):
        language = contexts.language
        log_p, log_context = (
            log_probability(language, words[None], kept)[0] for kept in (None, ~masked)
        )
        assert math.isclose(found_S[s], (log_context - log_p) / math.log(2), abs_tol=1e-9)


def test_fillings_keep_the_visible_words_and_are_repeatable():
    contexts = town()
    fillings = contexts.sample(5, 1)
    assert fillings.shape == (5, *contexts.word_ids_SN.shape)
    for filling in fillings:
        is_kept_SN = ~contexts.is_masked_SN
        assert (filling[is_kept_SN] == contexts.word_ids_SN[is_kept_SN]).all()
        assert np.isfinite(contexts.surprise_bits(filling)).all()
    assert np.array_equal(contexts.sample(5, 1), fillings)
    assert not np.array_equal(contexts.sample(5, 2), fillings)


def test_fillings_follow_the_joint_distribution():
    # Each sentence that fits the context has its share of the draws, within four standard errors.
    is_masked_N = np.array([True, False, True, False, True])
    context = SENTENCES[0]
    contexts = Contexts(SMALL, context[None], is_masked_N[None])
    drawn = contexts.sample(4000, 0)[:, 0]
    fits = (SENTENCES[:, ~is_masked_N] == context[~is_masked_N]).all(axis=1)
    probability = PROBABILITY[fits] / PROBABILITY[fits].sum()
    for words, p in zip(SENTENCES[fits], probability, strict=True):
        share = (drawn == words).all(axis=1).mean()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 4000)
