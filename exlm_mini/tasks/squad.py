"""SQuAD 2.0: questions about a paragraph, some without an answer, and their official score.

The scorer repeats the arithmetic of the benchmark's script, evaluate-v2.0.py, so that its
numbers can be set beside published ones: an answer and a gold answer are compared after lower
case, without punctuation, articles and superfluous blanks; exactly (EM) or by the words they
share (F1); the best of a question's gold answers counts. A question that has no answer is right
if the prediction is empty, and wrong otherwise.

SQuAD 1.1 has the same files, with an answer to every question.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import UserError
from .files import find_file, read_json
from .task import Task

HUB_ID = "rajpurkar/squad_v2"

TASK = Task("squad_v2", "span", (), "best_f1", "text")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Question(NamedTuple):
    """A question with its paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Gold answers; none if the question has no answer."""
    span: tuple[int, int] | None
    """Characters of the first gold answer in the context, end excluded; none without one."""


class Squad(NamedTuple):
    """The two splits, as official JSON; ``read_questions`` gives their questions."""

    train: dict
    validation: dict


# ---- reading ----


def load_squad(source: str | Path = HUB_ID) -> Squad:
    """The data set, from a directory with its two files or from the hub.

    Args:
        source: a directory with ``train-v2.0.json`` and ``dev-v2.0.json`` (or ``-v1.1``), each
            plain or compressed; else the hub id. Version 2.0 is read where both are there.

    Raises:
        UserError: if a file is missing or is not SQuAD's.
    """
    if str(source) == HUB_ID:
        return _from_hub()
    source = Path(source)
    if not source.is_dir():
        raise UserError(f"{source} is no directory; give SQuAD's, or the hub id {HUB_ID}")
    dev = {v: find_file(source, f"dev-{v}.json", is_optional=True) for v in ("v2.0", "v1.1")}
    version = "v1.1" if dev["v1.1"] and not dev["v2.0"] else "v2.0"
    files = [find_file(source, f"{split}-{version}.json") for split in ("train", "dev")]
    return Squad(*map(load_dataset, files))


def load_dataset(path: str | Path) -> dict:
    """The official JSON of one file, which holds at least one question.

    Raises:
        UserError: if the file cannot be read, or a part of it is missing.
    """
    dataset = read_json(Path(path))
    num_questions = sum(1 for _ in _rows(dataset, str(path)))
    if not num_questions:
        raise UserError(f"{path} holds no question; copy or download it again")
    return dataset


def read_questions(dataset: dict, source: str = "the data set") -> tuple[list[Question], int]:
    """The questions of a data set, in its order.

    Now and then a published offset is a few characters off; the span is then the occurrence of
    the answer that lies nearest. An answer that does not occur in its paragraph gives no span,
    and the question is left out.

    Args:
        dataset: the official JSON, as ``load_dataset`` reads it.
        source: how messages call it.

    Returns:
        questions: those with a span and those without an answer.
        num_left_out: questions whose first answer does not occur.

    Raises:
        UserError: if a part of a question is missing.
    """
    questions, num_left_out = [], 0
    for paragraph, row in _rows(dataset, source):
        where = f"{source} question {row['id']}"
        context = _part(paragraph, "context", str, where)
        answers = tuple(answer["text"] for answer in row["answers"])
        span = None
        if answers:
            start = _part(row["answers"][0], "answer_start", int, where)
            span = _nearest(context, answers[0], start)
            if span is None:
                num_left_out += 1
                continue
        text = _part(row, "question", str, where)
        questions.append(Question(row["id"], text, context, answers, span))
    return questions, num_left_out


def from_rows(rows: Any) -> dict:
    """The official JSON of rows as the hub has them.

    Args:
        rows: one a question: ``id``, ``title``, ``context``, ``question`` and ``answers``, a
            dict of the lists ``text`` and ``answer_start``.

    Returns:
        articles and paragraphs in the order of their first question.
    """
    articles: dict[str, dict[str, list]] = {}
    for row in rows:
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(
                row["answers"]["text"], row["answers"]["answer_start"], strict=True
            )
        ]
        question = {"id": row["id"], "question": row["question"], "answers": answers}
        question["is_impossible"] = not answers
        paragraphs = articles.setdefault(row["title"], {})
        paragraphs.setdefault(row["context"], []).append(question)
    return {
        "version": "v2.0",
        "data": [
            {
                "title": title,
                "paragraphs": [{"context": c, "qas": q} for c, q in paragraphs.items()],
            }
            for title, paragraphs in articles.items()
        ],
    }


def split_articles(dataset: dict, validation_share: float, seed: int) -> Squad:
    """Two parts of one file, no article in both, for where only the dev set is at hand.

    Args:
        dataset: the official JSON.
        validation_share: of the articles, at least one of them.
        seed: of the choice.

    Raises:
        UserError: if there are fewer than two articles.
    """
    articles = dataset["data"]
    if len(articles) < 2:
        raise UserError(
            f"the data set has {len(articles)} article(s); 2 are needed to split it"
        )
    order = np.random.default_rng(seed).permutation(len(articles))
    num_held_out = min(max(1, round(validation_share * len(articles))), len(articles) - 1)
    held_out = set(order[:num_held_out].tolist())
    parts = ([], [])
    for index, article in enumerate(articles):
        parts[index in held_out].append(article)
    return Squad(*({**dataset, "data": part} for part in parts))


# ---- scoring ----


def score_predictions(
    dataset: dict,
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    na_prob_threshold: float = 1.0,
) -> dict[str, float]:
    """The official score of some answers, in percent.

    As in the official script, a question without a prediction is not scored, and the averages
    are over those that are; the script then fails at the averages of its two groups, where this
    one goes on and reports the number as ``missing``.

    Args:
        dataset: the official JSON.
        predictions: question id -> answer; empty: it has none. Unknown ids are not read.
        na_probs: question id -> probability that it has no answer; none: 0 for all. The best
            thresholds use the order of these numbers alone.
        na_prob_threshold: an answer whose ``na_probs`` lie above it counts as empty.

    Returns:
        ``exact``, ``f1`` and ``total``; the same with ``HasAns_`` and ``NoAns_`` in front over
        the questions that have an answer and that have none, where there are any; with
        ``na_probs`` also ``best_exact``, ``best_f1`` and their ``_thresh``: the score at the
        threshold that would have been best, chosen on these very questions as published
        results do; ``missing`` where a question has no prediction.

    Raises:
        UserError: if no question has a prediction, a prediction is not text, or ``na_probs``
            lack a question that has one.
    """
    exact, f1, has_answer = _raw_scores(dataset, predictions)
    if not exact:
        raise UserError(
            f"none of the {len(has_answer)} questions has a prediction; predictions must be "
            "keyed by question id"
        )
    probs = dict.fromkeys(exact, 0.0) if na_probs is None else na_probs
    for id in exact:
        if id not in probs:
            raise UserError(f"na_probs lack the question {id}, which has a prediction")
    kept_exact, kept_f1 = (
        {id: s if probs[id] <= na_prob_threshold else float(not has_answer[id])
         for id, s in scores.items()}
        for scores in (exact, f1)
    )  # fmt: skip
    out = _averages("", kept_exact, kept_f1, list(exact))
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        ids = [id for id in exact if has_answer[id] == wanted]
        if ids:
            out |= _averages(prefix, kept_exact, kept_f1, ids)
    if na_probs is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(predictions, scores, na_probs, has_answer)
            out |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    if len(exact) < len(has_answer):
        out["missing"] = len(has_answer) - len(exact)
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


def _raw_scores(
    dataset: dict, predictions: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, float], dict[str, bool]]:
    """Scores by question id without any threshold, and which questions have an answer."""
    exact, f1, has_answer = {}, {}, {}
    for _, row in _rows(dataset, "the data set"):
        id = row["id"]
        has_answer[id] = bool(row["answers"])
        if id not in predictions:
            continue
        predicted = predictions[id]
        if not isinstance(predicted, str):
            raise UserError(f"the prediction of {id} is {type(predicted).__name__}, not text")
        texts = [answer["text"] for answer in row["answers"]]
        golds = [text for text in texts if normalize_answer(text)] or [""]
        exact[id] = max(exact_match(gold, predicted) for gold in golds)
        f1[id] = max(f1_of_words(gold, predicted) for gold in golds)
    return exact, f1, has_answer


def _averages(prefix: str, exact: dict, f1: dict, ids: list[str]) -> dict[str, float]:
    return {
        f"{prefix}exact": 100.0 * sum(exact[id] for id in ids) / len(ids),
        f"{prefix}f1": 100.0 * sum(f1[id] for id in ids) / len(ids),
        f"{prefix}total": len(ids),
    }


def _best_threshold(
    predictions: Mapping[str, str],
    scores: dict[str, float],
    na_probs: Mapping[str, float],
    has_answer: dict[str, bool],
) -> tuple[float, float]:
    """The best score over all thresholds, and the lowest threshold that gives it.

    Starts with no question answered and answers them one by one, the surest first.
    """
    score = best = sum(not answerable for answerable in has_answer.values())
    threshold = 0.0
    for id in sorted(na_probs, key=na_probs.__getitem__):
        if id not in scores:
            continue
        if has_answer[id]:
            score += scores[id]
        elif predictions[id]:
            score -= 1
        if score > best:
            best, threshold = score, na_probs[id]
    return 100.0 * best / len(scores), threshold


# ---- the official JSON ----


def _rows(dataset: object, source: str) -> Iterator[tuple[dict, dict]]:
    """(paragraph, question) in the order of the file, with what scoring needs of them."""
    for article in _part(dataset, "data", list, source):
        for paragraph in _part(article, "paragraphs", list, source):
            for row in _part(paragraph, "qas", list, source):
                where = f"{source} question {_part(row, 'id', str, source)}"
                for answer in _part(row, "answers", list, where):
                    _part(answer, "text", str, where)
                yield paragraph, row


def _part(holder: object, name: str, kind: type, where: str) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        found = ", ".join(map(str, holder))[:200] if isinstance(holder, dict) else ""
        raise UserError(
            f"{where}: there is no {kind.__name__} '{name}' (found: {found or 'nothing'}); give "
            "the official SQuAD JSON"
        )
    return value


def _nearest(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """The occurrence of an answer that begins nearest to a character."""
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", context)]
    if not starts or not answer:
        return None
    nearest = min(starts, key=lambda found: abs(found - start))
    return nearest, nearest + len(answer)


def _from_hub() -> Squad:
    """Both splits of the hub, their rows gathered into paragraphs."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"reading {HUB_ID} needs datasets; pip install 'exlm-mini[text]', or give SQuAD's "
            "directory"
        ) from None
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(HUB_ID)
        return Squad(*(from_rows(splits[name]) for name in ("train", "validation")))
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load {HUB_ID} ({reason}); check the network, or give SQuAD's directory"
        ) from None
