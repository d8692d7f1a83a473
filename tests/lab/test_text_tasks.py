"""Inference on the small language: labels follow from their definition."""

import itertools

import numpy as np
import pytest

from exlm_lab.downstream import inference
from exlm_mini.data.toy_grammars import grammar

TOWN = grammar("town")
LATENTS = list(itertools.product(*TOWN.latents.values()))


@pytest.fixture(scope="module")
def drawn():
    return inference.load(seed=3)


def test_every_split_is_balanced_and_no_sentence_occurs_twice(drawn):
    task, splits = drawn
    sentences = []
    for examples, num in zip(splits[:3], (6000, 600, 3000), strict=True):
        assert np.bincount(examples.labels).tolist() == [num // 3] * 3
        assert len(examples.texts) == num
        sentences += [text for pair in examples.texts for text in pair]
    assert len(set(sentences)) == len(sentences)
    assert (task.kind, task.input) == ("classes", "toy")
    assert set(" ".join(sentences).split()) <= set(TOWN.words)
    assert inference.draw_pairs(TOWN, examples.labels[:3], (4, 0))[0].tolist() != (
        inference.draw_pairs(TOWN, examples.labels[:3], (3, 0))[0].tolist()
    )


def test_a_pair_that_repeats_a_sentence_is_drawn_again(monkeypatch):
    word_ids_SN = TOWN.sample(5, 1)
    text = [TOWN.sentence(word_ids_N) for word_ids_N in word_ids_SN]
    rounds = iter([([0, 1], [0, 2]), ([1], [3]), ([3], [4])])  # 0 0 and 1 2; then 1 3; then 3 4

    def drawn(language, labels_R, seed):
        premise, hypothesis = next(rounds)
        assert len(labels_R) == len(premise)
        return word_ids_SN[premise], word_ids_SN[hypothesis]

    monkeypatch.setattr(inference, "draw_pairs", drawn)
    pairs = inference._distinct_pairs(TOWN, np.array([0, 1]), seed=0)
    assert pairs == [(text[3], text[4]), (text[1], text[2])]


def test_relations_follow_from_topic_and_mood():
    relation_ZZ = inference.relations(TOWN)
    names = list(TOWN.latents)
    topic, mood = names.index("topic"), names.index("mood")
    for (a, first), (b, second) in itertools.product(enumerate(LATENTS), repeat=2):
        if first[topic] != second[topic]:
            want = "neutral"
        else:
            want = "entailment" if first[mood] == second[mood] else "contradiction"
        assert inference.CLASSES[relation_ZZ[a, b]] == want


def test_the_premise_tells_nothing_and_pairs_stand_in_their_relation():
    prior_Z = TOWN.prior.reshape(-1)
    for label, pairs_ZZ in enumerate(inference.latent_pairs(TOWN)):
        np.testing.assert_allclose(pairs_ZZ.sum(axis=1), prior_Z, atol=1e-15)
        assert (pairs_ZZ[inference.relations(TOWN) != label] == 0).all()
