"""SQuAD 2.0: questions about a paragraph, some without an answer, and their official score.

The score reproduces the benchmark's script, evaluate-v2.0.py, so that it is comparable with
published numbers: answers are compared in lower case, without punctuation, articles and
superfluous blanks, exactly (EM) or by their common words (F1); the best of a question's gold
answers counts. For a question without an answer only an empty prediction is right.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.task import Task, load_hub, named_entry
from exlm_lab.ledger import Shape, parsed
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import document, open_decompressed

HUB_ID = "rajpurkar/squad_v2"
TASK = Task("squad_v2", "span", (), "best_f1", "text")
FILES = ("train-v2.0.json", "dev-v2.0.json")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Question(NamedTuple):
    """A question with its paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Gold answers, without white space around them; empty if the question has none."""
    span: tuple[int, int] | None
    """Start and end (excluded) of the first gold answer in the context; None without one."""


class _Answers(Shape):
    text: list[str]
    answer_start: list[int]


class _Row(Shape):
    """A question as the hub has it."""

    id: str
    question: str
    context: str
    answers: _Answers


class Squad(NamedTuple):
    """The two parts, each as ``read_questions`` returns it."""

    train: tuple[list[Question], int]
    validation: tuple[list[Question], int]


# ---- reading ----


def load_squad(source: Path | None = None) -> Squad:
    """Load the data set from its two files in a directory, plain or compressed, or from the hub."""
    if source is None:
        hub = load_hub(HUB_ID)
        where = f"the hub data set {HUB_ID}"
        with reading(where):
            parts = [list(hub[part]) for part in ("train", "validation")]
        return Squad(*(read_questions(rows, where) for rows in parts))
    return Squad(*(read_file(named_entry(source, name)) for name in FILES))


def read_file(path: Path) -> tuple[list[Question], int]:
    """Read the questions of one file in the official JSON format; see ``read_questions``."""
    with reading(path, errors=TypeError), open_decompressed(path) as stream:
        rows = [
            {
                "id": asked["id"],
                "question": asked["question"],
                "context": paragraph["context"],
                "answers": {
                    name: [answer[name] for answer in asked["answers"]]
                    for name in ("text", "answer_start")
                },
            }
            for article in json.load(stream)["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    return read_questions(rows, str(path))


def read_questions(
    rows: Iterable[Mapping[str, Any]], source: str
) -> tuple[list[Question], int]:
    """Read the questions in rows of the hub's format, in their order.

    Some published offsets are a few characters off, so the span is the nearest occurrence of the
    answer. White space around questions and answers is stripped, and blank answers are left out. A
    question whose answer does not occur in its paragraph is dropped.

    Returns:
        questions: those with a span and those without an answer; at least one.
        num_left_out: questions whose first answer does not occur, or whose answers are all blank.
    """
    questions, num_left_out = [], 0
    for content in rows:
        row = parsed(_Row, content, f"{source} question {content.get('id')}")
        id, context, answers = row.id, row.context, row.answers
        text = document(row.question, "text", f"{source} question {id}: its text")
        golds: list[str] = []
        span = None
        for answer, start in zip(answers.text, answers.answer_start, strict=True):
            if bare := document(answer, "text", f"{source} question {id}: an answer"):
                if not golds:
                    num_blanks = len(answer) - len(answer.lstrip())
                    span = _nearest(context, bare, start + num_blanks)
                golds.append(bare)
        if answers.text and span is None:
            num_left_out += 1
        else:
            questions.append(Question(id, text, context, tuple(golds), span))
    if not questions:
        raise UserError(f"{source} has no question that can be used; give another file")
    return questions, num_left_out


def _nearest(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """Start and end of the occurrence of an answer that begins nearest to ``start``."""
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", context)]
    if not starts:
        return None
    nearest = min(starts, key=lambda place: abs(place - start))
    return nearest, nearest + len(answer)


# ---- scoring ----


def score_predictions(
    questions: Iterable[Question],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    na_prob_threshold: float = 1.0,
) -> dict[str, float]:
    """The official score of answers to some questions, in percent.

    Args:
        questions: with their gold answers.
        predictions: question id -> answer; empty for no answer.
        na_probs: question id -> probability that it has no answer; None means 0 for all. The best
            thresholds depend only on the order of these numbers.
        na_prob_threshold: an answer whose probability in ``na_probs`` is above it counts as empty.

    Returns:
        ``exact`` and ``f1``; with ``na_probs`` also ``best_exact`` and ``best_f1`` at the best
        threshold, chosen on the same questions, as in published results.
    """
    questions, out = list(questions), {}
    for name, compare in (("exact", exact_match), ("f1", f1_of_words)):
        answered, empty = {}, {}
        for question in questions:
            golds = [text for text in question.answers if normalize_answer(text)] or [""]
            id = question.id
            answered[id] = float(max(compare(gold, predictions[id]) for gold in golds))
            empty[id] = float(not question.answers)
        probs = dict.fromkeys(answered, 0.0) if na_probs is None else na_probs
        counted = answered | {id: empty[id] for id in answered if probs[id] > na_prob_threshold}
        out[name] = 100.0 * sum(counted.values()) / len(questions)
        if na_probs is not None:
            # Scores with no question answered, then with one more at a time, surest first.
            order = sorted(answered, key=na_probs.__getitem__)
            gains = (
                -float(bool(predictions[id])) if empty[id] else answered[id] for id in order
            )
            sums = itertools.accumulate(gains, initial=sum(empty.values()))
            out[f"best_{name}"] = 100.0 * max(sums) / len(questions)
    return out


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> int:
    """1 if the two are the same once normalised, else 0."""
    return int(normalize_answer(gold) == normalize_answer(predicted))


def f1_of_words(gold: str, predicted: str) -> float:
    """F1 of the words of two answers: the harmonic mean of precision and recall."""
    gold_words, words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    if not gold_words or not words:
        return float(gold_words == words)
    num_same = sum((Counter(gold_words) & Counter(words)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(words), num_same / len(gold_words)
    return 2 * precision * recall / (precision + recall)
