"""Three-way inference on a small language: a stand-in for MNLI that needs no download (§5.2).

An example is a pair of sentences from the grammar ``town``. Its class depends on two latents of
each sentence, its topic (whom the sentence is about) and its mood (what it says of them):

==============  ==============================================================
entailment      same topic, same mood
contradiction   same topic, another mood
neutral         another topic, any mood
==============  ==============================================================

Number and tense do not matter, and each sentence draws its own words, so sentences that agree may
share no informative word. Three words show the mood, but each may happen to be one that fits all
moods ("young", "often", "rain"); if all three are, even a perfect reader can only guess.

Shapes: Z joint values of the latents, C classes, R pairs, S sentences, N words.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.data.toy import Grammar
from exlm_mini.data.toy_grammars import grammar

NAME = "toy-inference"
GRAMMAR = "town"
CLASSES = ("entailment", "neutral", "contradiction")
ENTAILMENT, NEUTRAL, CONTRADICTION = range(len(CLASSES))
NUM_EXAMPLES = {"train": 6000, "validation": 600, "test": 3000}
"""Pairs per split; each a multiple of the number of classes."""


def load(seed: int = 0) -> tuple[Task, Splits]:
    """Draw the task from the grammar.

    Returns:
        task: the task, with three classes.
        splits: its examples, in balanced classes; no sentence occurs twice, even across splits.
    """
    language = grammar(GRAMMAR)
    sizes = NUM_EXAMPLES.values()
    labels_R = np.concatenate([np.arange(n) % len(CLASSES) for n in sizes])
    texts = _distinct_pairs(language, labels_R, seed)
    ends = np.cumsum([*sizes])
    train, valid, test = (
        Examples(texts[end - n : end], labels_R[end - n : end])
        for n, end in zip(sizes, ends, strict=True)
    )
    task = Task(NAME, "classes", CLASSES, "accuracy", "toy")
    return task, Splits(train, valid, test, {"grammar": GRAMMAR})


def relations(language: Grammar) -> np.ndarray:
    """relation_ZZ, int64: the class of a pair, by the latents of its premise and hypothesis."""
    values_of = dict(zip(language.latents, np.indices(language.prior.shape), strict=True))
    is_same = {
        name: np.equal.outer(values_of[name].ravel(), values_of[name].ravel())
        for name in ("topic", "mood")
    }
    agreeing_ZZ = np.where(is_same["mood"], ENTAILMENT, CONTRADICTION)
    return np.where(is_same["topic"], agreeing_ZZ, NEUTRAL)


def latent_pairs(language: Grammar) -> np.ndarray:
    """P(latents of the premise, latents of the hypothesis | class), (C, Z, Z).

    For every class the premise is an ordinary sentence of the language; the hypothesis is drawn
    from the sentences that are in this relation to it.
    """
    prior_Z = language.prior.reshape(-1)
    relation_ZZ = relations(language)
    pairs = []
    for label in range(len(CLASSES)):
        weight_ZZ = np.where(relation_ZZ == label, prior_Z, 0.0)
        pairs.append(prior_Z[:, None] * weight_ZZ / weight_ZZ.sum(axis=1, keepdims=True))
    return np.array(pairs)


def draw_pairs(
    language: Grammar, labels_R: np.ndarray, seed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a pair of sentences for each of the given classes.

    Returns:
        premise_RN: word ids, int64.
        hypothesis_RN: the same.
    """
    rng = np.random.default_rng(seed)
    pairs_CZZ = latent_pairs(language)
    Z = pairs_CZZ.shape[1]
    premise_R, hypothesis_R = np.empty_like(labels_R), np.empty_like(labels_R)
    for label in range(len(CLASSES)):
        (rows,) = np.nonzero(labels_R == label)
        drawn = rng.choice(Z * Z, size=len(rows), p=pairs_CZZ[label].reshape(-1))
        premise_R[rows], hypothesis_R[rows] = np.divmod(drawn, Z)
    latents_S = np.concatenate([premise_R, hypothesis_R])
    word_ids_SN = np.empty((len(latents_S), language.length), dtype=np.int64)
    for z in np.unique(latents_S):
        (rows,) = np.nonzero(latents_S == z)
        is_z = np.arange(Z).reshape(language.prior.shape) == z
        known = replace(language, prior=is_z.astype(np.float64))
        word_ids_SN[rows] = known.sample(len(rows), (*seed, int(z)))
    return word_ids_SN[: len(labels_R)], word_ids_SN[len(labels_R) :]


def _distinct_pairs(
    language: Grammar, labels_R: np.ndarray, seed: int
) -> list[tuple[str, ...]]:
    """Draw pairs as text; a pair that repeats an earlier sentence is drawn again."""
    texts: list[tuple[str, ...]] = [()] * len(labels_R)
    seen: set[str] = set()
    round = 0
    while rows := [r for r, pair in enumerate(texts) if not pair]:
        drawn = draw_pairs(language, labels_R[rows], (seed, round))
        for r, *pair in zip(rows, *drawn, strict=True):
            premise, hypothesis = map(language.sentence, pair)
            if len({premise, hypothesis} - seen) == 2:
                seen |= {premise, hypothesis}
                texts[r] = (premise, hypothesis)
        round += 1
    return texts
