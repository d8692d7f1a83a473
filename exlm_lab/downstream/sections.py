"""The section of the manual that a passage comes from: a text task on the embedded English (§5.2).

A passage is a few consecutive sentences, without the heading of their section. Sentences that occur
twice in the manual ("For example:") are dropped, because they could be in two splits: no sentence
of the test set is in the training set. A model pre-trained on the embedded English has seen the
passages, but not their sections.

The text is that of the running Python, so passages differ a little between its versions.
"""

from __future__ import annotations

import platform
import re
from collections import Counter

import numpy as np

from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config.checks import UserError
from exlm_mini.data.english import embedded_english

NAME = "sections"
NUM_WORDS = 20
"""A passage ends with the sentence that reaches this many words."""
MIN_PASSAGES = 15
"""Sections with fewer are dropped."""
HELD_OUT_SHARE = 0.2
"""Share of each section's passages for validation, and the same for the test."""

_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"“*(])")


def load(seed: int = 0) -> tuple[Task, Splits]:
    """The task: the class is the heading of the section.

    Returns:
        task: the classes in alphabetical order.
        splits: passages as text. ``notes`` has ``majority_accuracy``, the test accuracy of always
            guessing the largest section of the training set.
    """
    passages = passages_by_section()
    classes = tuple(sorted(h for h, own in passages.items() if len(own) >= MIN_PASSAGES))
    if len(classes) < 2:
        raise UserError(
            f"the manual of Python {platform.python_version()} has {len(classes)} section(s) of "
            f"at least {MIN_PASSAGES} passages, too few to tell apart; use another task"
        )
    texts = [(passage,) for heading in classes for passage in passages[heading]]
    sizes = [len(passages[heading]) for heading in classes]
    labels_R = np.repeat(np.arange(len(classes)), sizes)
    rng, parts = np.random.default_rng(seed), []
    for size in sizes:
        num_held_out = round(HELD_OUT_SHARE * size)
        names = ["validation", "test"] * num_held_out
        parts += rng.permutation(names + ["train"] * (size - len(names))).tolist()
    train, validation, test = (
        Examples([texts[i] for i in rows], labels_R[rows])
        for rows in (
            np.flatnonzero(np.array(parts) == n) for n in ("train", "validation", "test")
        )
    )
    majority = np.bincount(train.labels).argmax()
    notes = {
        "python": platform.python_version(),
        "majority_accuracy": float(np.mean(test.labels == majority)),
    }
    task = Task(NAME, "classes", classes, "accuracy", "text")
    return task, Splits(train, validation, test, notes)


def passages_by_section() -> dict[str, list[str]]:
    """Passages of every section of the manual, by heading, in order.

    No sentence occurs in two of them. The last few sentences of a section, if too short for a
    passage, are dropped.
    """
    sentences: dict[str, list[str]] = {}
    for section in embedded_english():
        heading, *paragraphs = section.split("\n")
        own = sentences.setdefault(heading, [])
        own += [s.strip() for text in paragraphs for s in _SENTENCE_END.split(text)]
    times = Counter(s for own in sentences.values() for s in own)
    return {
        heading: _passages([s for s in own if s and times[s] == 1])
        for heading, own in sentences.items()
    }


def _passages(sentences: list[str]) -> list[str]:
    passages, current = [], []
    for sentence in sentences:
        current.append(sentence)
        if sum(len(s.split()) for s in current) >= NUM_WORDS:
            passages.append("\n".join(current))
            current = []
    return passages
