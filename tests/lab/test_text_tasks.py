"""The embedded text tasks: labels follow from their definition, and what they allow is known."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from exlm_lab.downstream import inference, sections
from exlm_mini.data.toy import Grammar, Position
from exlm_mini.data.toy_grammars import grammar

# ---- inference on the small language ----

TOWN = grammar("town")
LATENTS = list(itertools.product(*TOWN.latents.values()))


def tiny(shared: str = "") -> Grammar:
    """Two topics and two moods, each told by one word; ``shared`` words fit both moods."""
    return Grammar(
        "tiny",
        {"topic": ("sea", "land"), "mood": ("glad", "grim")},
        np.array([[0.4, 0.1], [0.3, 0.2]]),
        (
            Position({("sea",): "boat", ("land",): "cart"}, ("topic",)),
            Position({("glad",): f"sings {shared}", ("grim",): f"weeps {shared}"}, ("mood",)),
        ),
    )


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
    rounds = iter([([0, 1], [0, 2]), ([1], [3]), ([3], [4])])  # 0 0 and 1 2; 1 3; 3 4

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


def posterior(language: Grammar, word_ids_SN: np.ndarray) -> np.ndarray:
    """P(words | latents), (S, Z), by the grammar's own probabilities."""
    Z = language.prior.size
    columns = []
    for z in range(Z):
        is_z = np.arange(Z).reshape(language.prior.shape) == z
        known = replace(language, prior=is_z.astype(float))
        columns.append(np.exp(known.log_probability(word_ids_SN)))
    return np.stack(columns, axis=1)


def test_the_ceiling_is_what_a_perfect_reader_reaches(drawn):
    num = 420
    labels = np.arange(num) % 3
    premise_RN, hypothesis_RN = inference.draw_pairs(TOWN, labels, (7, 0))
    pairs_CZZ = inference.latent_pairs(TOWN)
    premise_RZ, hypothesis_RZ = (posterior(TOWN, ids) for ids in (premise_RN, hypothesis_RN))
    class_RC = np.einsum("rz,czy,ry->rc", premise_RZ, pairs_CZZ, hypothesis_RZ, optimize=True)
    exact = drawn[1].notes["best_accuracy"]
    reached = (class_RC.argmax(axis=1) == labels).mean()
    assert abs(reached - exact) < 4 * (exact * (1 - exact) / num) ** 0.5


def test_the_ceiling_counts_the_words_that_fit_both_moods():
    # "hums" is as likely as the telling word: one of the two moods is hidden in 3 pairs of 4.
    # Then entailment or contradiction is guessed by the moods' probabilities given the topic.
    assert inference.ceiling(tiny()) == pytest.approx(1)  # where no word does
    language = tiny(shared="hums")
    assert inference.evidence(language).shape == (6, 4)
    exact = 0.0
    prior = language.prior
    words = [("hums", 0.5), ("own", 0.5)]
    for t in range(2):
        mood = prior[t] / prior[t].sum()
        weight = {}
        for m1, (w1, p1), m2, (w2, p2) in itertools.product((0, 1), words, (0, 1), words):
            same = m1 == m2  # the hypothesis has the mood of the premise, or the only other one
            seen = (w1 if w1 == "hums" else m1, w2 if w2 == "hums" else m2)
            weight.setdefault(seen, [0.0, 0.0])[same] += prior[t].sum() * mood[m1] * p1 * p2
        exact += sum(map(max, weight.values())) / 3
    exact += 1 / 3  # another topic is always seen
    assert inference.ceiling(language) == pytest.approx(exact)


# ---- sections of the manual ----


@pytest.fixture(scope="module")
def manual():
    return sections.load(seed=0)


def test_passages_share_no_sentence_and_are_no_longer_than_they_must():
    found = sections.passages_by_section()
    for passage in itertools.chain.from_iterable(found.values()):
        *before, _ = passage.split("\n")
        assert len(passage.split()) >= sections.NUM_WORDS > len(" ".join(before).split())
    sentences = [s for ps in found.values() for p in ps for s in p.split("\n")]
    assert len(set(sentences)) == len(sentences) > 1000
    assert all(heading not in p.split("\n") for heading, ps in found.items() for p in ps)


def test_classes_are_the_sections_with_enough_passages(manual):
    task, splits = manual
    found = sections.passages_by_section()
    assert list(task.classes) == sorted(task.classes) and len(task.classes) >= 5
    total = np.zeros(len(task.classes), dtype=int)
    by_split = [np.bincount(examples.labels) for examples in splits[:3]]
    for examples, counts in zip(splits[:3], by_split, strict=True):
        assert (counts > 0).all()  # every class in every split
        total += counts
        for (passage,), label in zip(examples.texts, examples.labels, strict=True):
            assert passage in found[task.classes[label]]
    assert total.tolist() == [len(found[heading]) for heading in task.classes]
    for counts in by_split[1:]:
        assert counts.tolist() == [round(num / 5) for num in total]
    assert min(total) >= sections.MIN_PASSAGES
    others = set(found) - set(task.classes)
    assert all(len(found[heading]) < sections.MIN_PASSAGES for heading in others)
