"""The exact entropies of the small language against enumeration, sampling and arithmetic."""

import math

import numpy as np
import pytest
from small_language import MASKS, PROBABILITY, SENTENCES, SMALL, log_probability

from exlm_mini.data.toy_grammars import LADDER, grammar


def group(columns: np.ndarray) -> dict[tuple, float]:
    """Probability of each combination of words at some positions."""
    out: dict[tuple, float] = {}
    for words, probability in zip(map(tuple, columns), PROBABILITY, strict=True):
        out[words] = out.get(words, 0.0) + probability
    return out


def bits(distribution) -> float:
    return -sum(p * math.log2(p) for p in distribution if p > 0)


def test_the_whole_language_has_probability_one():
    assert SMALL.slots == (0, 2, 4)  # a free word is no slot, even with unequal weights
    assert math.isclose(PROBABILITY.sum(), 1)
    np.testing.assert_allclose(np.exp(log_probability(SMALL, SENTENCES)), PROBABILITY)


@pytest.mark.parametrize("is_masked", MASKS)
def test_entropies_equal_brute_force(is_masked):
    context = bits(group(SENTENCES[:, ~is_masked]).values())
    joint = bits(PROBABILITY) - context
    marginal = 0.0
    for n in np.flatnonzero(is_masked):
        is_kept = ~is_masked
        is_kept[n] = True
        marginal += bits(group(SENTENCES[:, is_kept]).values()) - context
    assert math.isclose(SMALL.joint_entropy_bits(is_masked), joint, abs_tol=1e-9)
    assert math.isclose(SMALL.marginal_entropy_bits(is_masked), marginal, abs_tol=1e-9)


@pytest.mark.parametrize("is_masked", MASKS)
def test_predictions_equal_brute_force(is_masked):
    masked = np.flatnonzero(is_masked)
    for sentence in SENTENCES[::7]:
        same = (SENTENCES[:, ~is_masked] == sentence[~is_masked]).all(axis=1)
        weight = PROBABILITY[same] / PROBABILITY[same].sum()
        want = np.zeros((len(masked), len(SMALL.words)))
        for row, n in enumerate(masked):
            np.add.at(want[row], SENTENCES[same][:, n], weight)
        np.testing.assert_allclose(SMALL.marginals(sentence, is_masked), want, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "marginal", "joint"),
    [
        ("pairs", 2, 1),
        ("pairs-of-four", 4, 3),
        ("fours", 4, 2),
        ("quartets", 2 * math.log2(12), 2 + 2 * math.log2(3)),
        ("shifts", 2 * math.log2(3), math.log2(3)),
        *((f"ladder-{bits}", 10, 10 - bits) for bits in LADDER),
    ],
)
def test_all_slots_masked_give_the_known_floors(name, marginal, joint):
    language = grammar(name)
    is_masked = language.mask()
    assert math.isclose(language.marginal_entropy_bits(is_masked), marginal, abs_tol=1e-9)
    assert math.isclose(language.joint_entropy_bits(is_masked), joint, abs_tol=1e-9)


def test_sampled_sentences_have_the_stated_frequencies():
    num = 50_000
    sentences = SMALL.sample(num, seed=1)
    seen, counts = np.unique(sentences, axis=0, return_counts=True)
    found = dict(zip(map(tuple, seen), counts, strict=True))
    assert set(found) <= set(map(tuple, SENTENCES))
    for words, probability in zip(map(tuple, SENTENCES), PROBABILITY, strict=True):
        error = math.sqrt(num * probability * (1 - probability))
        assert abs(found.get(words, 0) - num * probability) <= 4 * error


def test_a_sample_is_a_function_of_its_seed():
    town = grammar("town")
    assert (town.sample(50, 7) == town.sample(50, 7)).all()
    assert (town.sample(50, 7)[:20] == town.sample(20, 7)).all()
    assert (town.sample(50, 7) != town.sample(50, 8)).any()
    assert (town.sample(50, (7, 1)) != town.sample(50, (7, 0))).any()


def test_an_impossible_sentence_is_refused():
    pairs = grammar("pairs")
    nonsense = np.zeros(pairs.length, dtype=np.int64)
    with pytest.raises(ValueError, match="no sentence of the grammar pairs"):
        pairs.marginals(nonsense, pairs.mask())
