"""SQuAD 2.0: questions about a paragraph, some without an answer, and their official score.

The score reproduces the benchmark's script, evaluate-v2.0.py, so that it is comparable with
published numbers: answers are compared in lower case, without punctuation, articles and
superfluous blanks, exactly (EM) or by their common words (F1); the best of a question's gold
answers counts. For a question without an answer only an empty prediction is right.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.task import Task, find_file, load_hub
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


class Squad(NamedTuple):
    """The two parts, each as ``read_questions`` gives it."""

    train: tuple[list[Question], int]
    validation: tuple[list[Question], int]


# ---- reading ----


def load_squad(source: Path | None = None) -> Squad:
    """The data set, from a directory with its two files, plain or compressed, or from the hub."""
    if source is None:
        hub = load_hub(HUB_ID)
        where = f"the hub data set {HUB_ID}"
        with reading(where):
            return Squad(*(_questions(hub[part], where) for part in ("train", "validation")))
    return Squad(*(read_file(find_file(source, name)) for name in FILES))


def read_file(path: Path) -> tuple[list[Question], int]:
    """The questions of one file of the official JSON, at least one; see ``read_questions``."""
    with reading(path):
        with open_decompressed(path) as stream:
            dataset = json.load(stream, object_pairs_hook=_Row)
        # A lone surrogate cannot be encoded.
        json.dumps(dataset, ensure_ascii=False).encode()
        questions, num_left_out = read_questions(dataset, str(path))
        if not questions:
            raise ValueError("no question with its answer")
        return questions, num_left_out


class _Row(dict[str, Any]):
    """An object of JSON; neither case nor white space around its names counts."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__((name.strip().casefold(), value) for name, value in pairs)
        if len(self) < len(pairs):
            names = ", ".join(name for name, _ in pairs)
            raise ValueError(f"a name twice in one object: {names}")

    def __missing__(self, name: str) -> None:
        raise ValueError(f"no '{name}' beside {', '.join(self)}")


def read_questions(
    dataset: Mapping[str, Any], source: str = "the data set"
) -> tuple[list[Question], int]:
    """The questions of the official JSON, in its order.

    Some published offsets are a few characters off, so the span is the nearest occurrence of the
    answer. White space around a question or an answer is left out, and so is an answer of nothing
    else. A question whose answer does not occur in its paragraph is dropped.

    Args:
        dataset: what the file holds.
        source: its name, for messages.

    Returns:
        questions: those with a span and those without an answer.
        num_left_out: questions whose first answer does not occur, or whose answers are all blank.
    """
    return _questions(
        (
            {
                **{name: row[name] for name in ("id", "question")},
                "context": paragraph["context"],
                "answers": {
                    name: [answer[name] for answer in row["answers"]]
                    for name in ("text", "answer_start")
                },
            }
            for article in dataset["data"]
            for paragraph in article["paragraphs"]
            for row in paragraph["qas"]
        ),
        source,
    )


def _questions(rows: Iterable[Mapping[str, Any]], source: str) -> tuple[list[Question], int]:
    """The same for rows in the format of the hub."""
    questions, num_left_out = [], 0
    for row in rows:
        id, context, found = row["id"], row["context"], row["answers"]
        if not isinstance(id, str) or not isinstance(context, str):
            raise TypeError(f"the id or the paragraph of question {id} is no text")
        text = document(row["question"], "text", f"{source} question {id}: its text")
        answers: list[str] = []
        span = None
        for answer, start in zip(found["text"], found["answer_start"], strict=True):
            if bare := document(answer, "text", f"{source} question {id}: an answer"):
                if not answers:
                    num_blanks = len(answer) - len(answer.lstrip())
                    span = _nearest(context, bare, start + num_blanks)
                answers.append(bare)
        if len(found["text"]) and span is None:
            num_left_out += 1
        else:
            questions.append(Question(id, text, context, tuple(answers), span))
    return questions, num_left_out


def _nearest(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """The occurrence of an answer that begins nearest to a character."""
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", context)]
    if not starts:
        return None
    nearest = min(starts, key=lambda found: abs(found - start))
    return nearest, nearest + len(answer)


# ---- scoring ----


def score_predictions(
    questions: Iterable[Question],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    na_prob_threshold: float = 1.0,
) -> dict[str, float]:
    """The official score of answers to all of some questions, in percent.

    Args:
        questions: with their gold answers.
        predictions: question id -> answer; empty for no answer.
        na_probs: question id -> probability that it has no answer; None: 0 for all. The best
            thresholds depend on the order of these numbers alone.
        na_prob_threshold: an answer whose ``na_probs`` lie above it counts as empty.

    Returns:
        ``exact``, ``f1`` and ``total``; the same prefixed with ``HasAns_`` and ``NoAns_`` for
        questions with and without an answer, if there are any; with ``na_probs`` also
        ``best_exact``, ``best_f1`` and their ``_thresh``: the score at the best threshold, chosen
        on the same questions, as in published results.
    """
    has_answer = {}
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for question in questions:
        has_answer[question.id] = bool(question.answers)
        golds = [text for text in question.answers if normalize_answer(text)] or [""]
        for name, compare in (("exact", exact_match), ("f1", f1_of_words)):
            raw[name][question.id] = max(
                compare(gold, predictions[question.id]) for gold in golds
            )
    probs = dict.fromkeys(has_answer, 0.0) if na_probs is None else na_probs
    out = {}
    for prefix, groups in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        ids = [id for id, is_answerable in has_answer.items() if is_answerable in groups]
        if not ids:
            continue
        for name, scores in raw.items():
            kept = (
                scores[id] if probs[id] <= na_prob_threshold else float(not has_answer[id])
                for id in ids
            )
            out[f"{prefix}{name}"] = 100.0 * sum(kept) / len(ids)
        out[f"{prefix}total"] = len(ids)
    if na_probs is not None:
        for name, scores in raw.items():
            best, threshold = _best_threshold(predictions, scores, na_probs, has_answer)
            out |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return out


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> int:
    """1 if the two are the same once normalised, else 0."""
    return int(normalize_answer(gold) == normalize_answer(predicted))


def f1_of_words(gold: str, predicted: str) -> float:
    """Harmonic mean of the shares of words that two answers have in common."""
    gold_words, words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    if not gold_words or not words:
        return float(gold_words == words)
    num_same = sum((Counter(gold_words) & Counter(words)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(words), num_same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def _best_threshold(
    predictions: Mapping[str, str],
    scores: dict[str, float],
    na_probs: Mapping[str, float],
    has_answer: dict[str, bool],
) -> tuple[float, float]:
    """The best score over all thresholds, and the lowest threshold that gives it.

    Starts with no question answered, then answers them one by one, the most certain first.
    """
    score = best = float(sum(not answerable for answerable in has_answer.values()))
    threshold = 0.0
    for id in sorted(na_probs, key=na_probs.__getitem__):
        if has_answer[id]:
            score += scores[id]
        elif predictions[id]:
            score -= 1
        if score > best:
            best, threshold = score, na_probs[id]
    return 100.0 * best / len(scores), threshold
