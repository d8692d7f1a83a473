"""The official score of SQuAD 2.0.

It repeats the arithmetic of the benchmark's script, evaluate-v2.0.py, so that its numbers can be
set beside published ones: an answer and a gold answer are compared after lower case, without
punctuation, articles and superfluous blanks; exactly (EM) or by the words they share (F1); the
best of a question's gold answers counts. A question that has no answer is right if the prediction
is empty, and wrong otherwise.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from exlm_mini.config import UserError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


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
    for _, row in rows_of(dataset, "the data set"):
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


def rows_of(dataset: object, source: str) -> Iterator[tuple[dict, dict]]:
    """(paragraph, question) in the order of the file, with what scoring needs of them.

    Args:
        dataset: the official JSON.
        source: how messages call it.

    Raises:
        UserError: if a part is missing.
    """
    for article in part_of(dataset, "data", list, source):
        for paragraph in part_of(article, "paragraphs", list, source):
            for row in part_of(paragraph, "qas", list, source):
                where = f"{source} question {part_of(row, 'id', str, source)}"
                for answer in part_of(row, "answers", list, where):
                    part_of(answer, "text", str, where)
                yield paragraph, row


def part_of(holder: object, name: str, kind: type, where: str) -> Any:
    """A part of the official JSON, of the type it must have.

    Raises:
        UserError: if it is not there.
    """
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        found = ", ".join(map(str, holder))[:200] if isinstance(holder, dict) else ""
        raise UserError(
            f"{where}: there is no {kind.__name__} '{name}' (found: {found or 'nothing'}); give "
            "the official SQuAD JSON"
        )
    return value
