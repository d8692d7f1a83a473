"""A task made ready for one model: its rows, what the loss needs, and how answers are judged.

Shapes: R rows, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream import squad
from exlm_lab.downstream.answers import score_predictions
from exlm_lab.downstream.catalogue import ReadingConfig, load_task
from exlm_lab.downstream.checks import MAX_UNKNOWN, check_input, check_scorable, check_unknown
from exlm_lab.downstream.inputs import EncodedRows, encode_examples
from exlm_lab.downstream.metrics import evaluate, libraries
from exlm_lab.downstream.spans import (
    Answers,
    BestSpans,
    EncodedQuestion,
    best_spans,
    choose_answers,
    encode_question,
)
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config import UserError
from exlm_mini.reading.pretrained import Pretrained

WINDOW_LENGTH, WINDOW_STRIDE, MAX_QUESTION = 384, 128, 64
"""Of SQuAD's windows, in tokens: BERT's; smaller where the model has fewer positions."""
WINDOWS_AT_ONCE = 256
DEV_SHARE_HELD_OUT = 0.2
"""Of the articles, to validate with where SQuAD's dev set is all there is."""
DEV_ALONE = "articles of the dev set, not the published split"


class Part(NamedTuple):
    """Some rows of a task. ``Scores`` below are one array per row, as the head gives them."""

    rows: list[np.ndarray]
    """R times int32 ids with boundaries, not padded."""
    labels: np.ndarray
    """What ``heads.loss_sum`` takes, R rows; empty where they are secret."""
    judge: Callable[[list[np.ndarray]], dict[str, float]] | None
    """From scores to metrics; none where labels are secret."""
    answers: Callable[[list[np.ndarray]], list[tuple[str, Any]]]
    """From scores to what is predicted, in the order of the examples: the id of each, and the name
    of a class, a number, a list of probabilities, or a text."""


class Problem(NamedTuple):
    """A task for one model."""

    task: Task
    num_outputs: int
    """Of the classification head."""
    train: Part
    parts: dict[str, Part]
    """Rows to score, by name; ``validation`` is among them."""
    notes: dict[str, Any]
    """What a reader of the numbers must know; JSON-able."""
    sha256: str
    """Of all rows and labels, so that results of different data are not mixed."""


def load_problem(
    name: str,
    data: Path | None,
    reading: ReadingConfig,
    pretrained: Pretrained,
    max_unknown: float = MAX_UNKNOWN,
) -> Problem:
    """A task by name, made ready for a model; arguments as for ``load_task``, ``make_problem``."""
    if name == squad.TASK.name:
        return make_span_problem(*_read_squad(data), pretrained, max_unknown)
    task, splits = load_task(name, data, reading, pretrained.tokenizer)
    return make_problem(task, splits, pretrained, max_unknown)


def make_problem(
    task: Task, splits: Splits, pretrained: Pretrained, max_unknown: float = MAX_UNKNOWN
) -> Problem:
    """A task of sentences, pairs or molecules made ready for one model; not for spans.

    Numbers are brought to [0, 1] for the head, as fairseq's recipe divides STS-B's by 5, and back
    in answers.

    Args:
        task: what kind of answer is wanted.
        splits: its examples.
        pretrained: whose vocabulary and length they must fit.
        max_unknown: largest share of [UNK] among the training tokens.

    Raises:
        UserError: a model of other input, a vocabulary of other data, an empty split, a label
            nobody has, numbers that are all the same, rows that cannot be scored, or that cannot
            fit, or nothing to score them with.
    """
    libraries()  # told before anything is trained
    check_input(task, pretrained)
    named = {"train": splits.train, "validation": splits.validation}
    if splits.test is not None:
        named["test"] = splits.test
    named |= dict(splits.others)
    encoded = {}
    for name, examples in named.items():
        if not examples.texts:
            raise UserError(f"{task.name}: the split {name} is empty; give data with examples")
        if name in ("train", "validation") and not len(examples.labels):
            raise UserError(
                f"{task.name}: the split {name} has no labels; give data with labels"
            )
        encoded[name] = encode_examples(examples.texts, pretrained.tokenizer, pretrained.layout)
    share = encoded["train"].unknown_share
    check_unknown(task, splits.train.texts, share, max_unknown, pretrained)
    notes = {**splits.notes, "rows": {name: row_notes(e) for name, e in encoded.items()}}
    if task.kind == "labels":
        missing = np.isnan(splits.train.labels).all(axis=0)
        if missing.all():
            raise UserError(
                f"{task.name}: no training example has any label; give data with labels"
            )
        notes["labels_never_trained"] = [task.classes[i] for i in np.flatnonzero(missing)]
    for name, examples in named.items():
        if name != "train":
            check_scorable(task, name, examples.labels)
    digest = sha256_of((encoded[name].rows, part.labels) for name, part in named.items())
    low, high = _range(task, splits.train)
    parts = {
        name: _part(task, encoded[name].rows, examples, low, high)
        for name, examples in named.items()
    }
    num_outputs = 1 if task.kind == "number" else len(task.classes)
    return Problem(task, num_outputs, parts.pop("train"), parts, notes, digest)


def _read_squad(data: Path | None) -> tuple[squad.Squad, str]:
    """SQuAD, and which split that is; where the dev set is alone a part of it trains."""
    if data is not None:
        train, dev = squad.find_files(data, is_train_optional=True)
        if train is None:
            dataset = squad.load_dataset(dev)
            return squad.split_articles(dataset, DEV_SHARE_HELD_OUT, seed=0), DEV_ALONE
    return squad.load_squad(data or squad.HUB_ID), "published"


def make_span_problem(
    data: squad.Squad, split: str, pretrained: Pretrained, max_unknown: float = MAX_UNKNOWN
) -> Problem:
    """SQuAD for one model: a row for every window of every question.

    Validation chooses an answer per question from all its windows and scores it as the official
    script does; ``best_f1`` and ``best_exact`` are at the best threshold for "no answer".

    Args:
        data: training and dev set.
        split: what these are, for the notes.
        pretrained: a model of text.
        max_unknown: largest share of [UNK] among the training tokens.

    Raises:
        UserError: a model of other input, a vocabulary of other data, or too few positions.
    """
    check_input(squad.TASK, pretrained)
    layout = pretrained.layout
    length = min(WINDOW_LENGTH, layout.room(2) + 4)
    max_question = min(MAX_QUESTION, (length - 4) // 3)
    stride = max(1, min(WINDOW_STRIDE, (length - 4 - max_question) // 2))
    notes: dict[str, Any] = {"split": split, "rows": {}}
    notes["windows"] = {"length": length, "stride": stride}
    parts = {}
    for name, dataset in (("train", data.train), ("validation", data.validation)):
        questions, num_left_out = squad.read_questions(dataset)
        if not questions:
            raise UserError(f"squad_v2: the split {name} has no questions; give other files")
        encoded = [
            encode_question(q, pretrained.tokenizer, length, stride, max_question)
            for q in questions
        ]
        told = _told_of_questions(encoded)
        if name == "train":
            texts = [(q.question, q.context) for q in questions]
            check_unknown(squad.TASK, texts, told["unknown_share"], max_unknown, pretrained)
        told["unknown_share"] = round(told["unknown_share"], 6)
        notes["rows"][name] = {**told, "left_out": num_left_out}
        parts[name] = _span_part(dataset, questions, encoded)
    digest = sha256_of((part.rows, part.labels) for part in parts.values())
    return Problem(squad.TASK, 2, parts.pop("train"), parts, notes, digest)


def _told_of_questions(encoded: list[EncodedQuestion]) -> dict[str, Any]:
    """What the notes say of the rows of a part."""
    rows = [window.token_ids_N for entry in encoded for window in entry.windows]
    num_cut = [entry.num_cut for entry in encoded]
    num_tokens = sum(entry.num_tokens for entry in encoded)
    return {
        "examples": len(encoded),
        "windows": len(rows),
        "longest": max(len(row) for row in rows),
        "truncated": sum(n > 0 for n in num_cut),
        "tokens_cut": sum(num_cut),
        "unknown_share": sum(entry.num_unknown for entry in encoded) / max(num_tokens, 1),
    }


def _span_part(
    dataset: dict, questions: list[squad.Question], encoded: list[EncodedQuestion]
) -> Part:
    """The windows of a part, and how the answers chosen from them are scored."""
    windows = [window for entry in encoded for window in entry.windows]
    labels = np.array([pair for entry in encoded for pair in entry.targets])

    def answered(scores: list[np.ndarray]) -> Answers:
        return choose_answers(questions, encoded, _best_spans(scores, windows))

    def judge(scores: list[np.ndarray]) -> dict[str, float]:
        found = answered(scores)
        score = score_predictions(dataset, found.texts, found.na_probs, 0.5)
        return {n: score[n] / 100 for n in ("exact", "f1", "best_exact", "best_f1")}

    def answers(scores: list[np.ndarray]) -> list[tuple[str, Any]]:
        found = answered(scores)
        score = score_predictions(dataset, found.texts, found.na_probs)
        return list(found.at(score["best_f1_thresh"]).items())

    return Part([window.token_ids_N for window in windows], labels, judge, answers)


def _best_spans(scores: list[np.ndarray], windows: list) -> BestSpans:
    """The best span of every window, some windows at a time."""
    found = []
    for start in range(0, len(windows), WINDOWS_AT_ONCE):
        some = scores[start : start + WINDOWS_AT_ONCE]
        logits_B2N = torch.zeros(len(some), 2, max(row.shape[1] for row in some))
        for i, row in enumerate(some):
            logits_B2N[i, :, : row.shape[1]] = torch.from_numpy(row)
        start_BN, end_BN = logits_B2N.unbind(dim=1)
        found.append(best_spans(start_BN, end_BN, windows[start : start + WINDOWS_AT_ONCE]))
    parts: list[Tensor] = [torch.cat(column) for column in zip(*found, strict=True)]
    return BestSpans(*parts)


def row_notes(encoded: EncodedRows) -> dict[str, Any]:
    """What happened to the rows of a split on their way into the model."""
    return {
        "examples": len(encoded.rows),
        "longest": max(len(row) for row in encoded.rows),
        "truncated": encoded.num_truncated,
        "tokens_cut": encoded.num_cut,
        "unknown_share": round(encoded.unknown_share, 6),
    }


def sha256_of(parts: Iterable[tuple[list[np.ndarray], np.ndarray]]) -> str:
    """One hash over the rows and labels of some parts."""
    digest = hashlib.sha256()
    for rows, labels in parts:
        digest.update(f"{len(rows)} {labels.shape}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(4, "little") + row.tobytes())
        digest.update(np.ascontiguousarray(labels))
    return digest.hexdigest()


def _range(task: Task, train: Examples) -> tuple[float, float]:
    """Lowest and highest number of the training labels."""
    if task.kind != "number":
        return 0.0, 1.0
    low, high = float(train.labels.min()), float(train.labels.max())
    if low == high:
        raise UserError(f"{task.name}: every training label is {low:g}; give other data")
    return low, high


def _part(
    task: Task, rows: list[np.ndarray], examples: Examples, low: float, high: float
) -> Part:
    has_labels = len(examples.labels) > 0
    labels = examples.labels

    def numbers(scores: list[np.ndarray]) -> np.ndarray:
        scores_RC = np.stack(scores).astype(np.float64)
        return low + (high - low) * scores_RC if task.kind == "number" else scores_RC

    def judge(scores: list[np.ndarray]) -> dict[str, float]:
        return evaluate(task, numbers(scores), examples.labels)

    def answers(scores: list[np.ndarray]) -> list[tuple[str, Any]]:
        scores_RC = numbers(scores)
        if task.kind == "classes":
            found: list[Any] = [task.classes[i] for i in scores_RC.argmax(axis=1)]
        elif task.kind == "number":
            found = scores_RC[:, 0].tolist()
        else:
            found = (1 / (1 + np.exp(-scores_RC))).round(6).tolist()
        return list(zip(examples.ids, found, strict=True))

    if task.kind == "number" and has_labels:
        labels = (labels - low) / (high - low)
    return Part(rows, labels, judge if has_labels else None, answers)
