"""A task made ready for one model: its rows, what the loss needs, and how answers are judged.

What cannot be trained or scored is refused here, before anything is trained.

Shapes: R rows, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from exlm_lab.downstream import squad
from exlm_lab.downstream.catalogue import ReadingConfig, load_task
from exlm_lab.downstream.inputs import encode_examples
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
from exlm_mini.config.checks import UserError
from exlm_mini.data.tokenizer import on_one_line
from exlm_mini.reading.pretrained import Pretrained

WINDOW_LENGTH, WINDOW_STRIDE, MAX_QUESTION = 384, 128, 64
"""Of SQuAD's windows, in tokens: BERT's; smaller where the model has fewer positions."""
WINDOWS_AT_ONCE = 256
MAX_UNKNOWN = 0.1
"""Of all tokens of the training texts: with more, the vocabulary is that of another corpus."""
EXAMPLES_LOOKED_AT = 1000
"""To say which pieces of text a vocabulary lacks."""
AROMATIC = ("c", "n")
"""What a vocabulary of Kekulé spelling, with explicit double bonds in its rings, never has."""


class Part(NamedTuple):
    """Some rows of a task. ``Scores`` below are one array per row, as the head gives them."""

    rows: list[np.ndarray]
    """R times int32 ids with boundaries, not padded."""
    labels: np.ndarray
    """What ``heads.loss_sum`` takes, R rows."""
    judge: Callable[[list[np.ndarray]], dict[str, float]]
    """From scores to metrics."""
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
    libraries()
    if name == squad.TASK.name:
        return make_span_problem(squad.load_squad(data), pretrained, max_unknown)
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
        pretrained: whose vocabulary and length they must fit; trained on what the task consists of.
        max_unknown: largest share of [UNK] among the training tokens.

    Raises:
        UserError: a vocabulary of other data, numbers that are all the same, rows that cannot be
            scored, or that cannot fit.
    """
    named = {"train": splits.train, "validation": splits.validation}
    if splits.test is not None:
        named["test"] = splits.test
    named |= dict(splits.others)
    rows, notes = {}, {**splits.notes, "rows": {}}
    for name, examples in named.items():
        rows[name], notes["rows"][name] = encode_examples(
            examples.texts, pretrained.tokenizer, pretrained.layout
        )
        if name != "train":
            _check_scorable(task, name, examples.labels)
    share = notes["rows"]["train"]["unknown_share"]
    _check_unknown(task, splits.train.texts, share, max_unknown, pretrained)
    low, high = 0.0, 1.0
    if task.kind == "labels":
        missing = np.isnan(splits.train.labels).all(axis=0)
        notes["labels_never_trained"] = [task.classes[i] for i in np.flatnonzero(missing)]
    if task.kind == "number":
        low, high = float(splits.train.labels.min()), float(splits.train.labels.max())
        if low == high:
            raise UserError(f"{task.name}: every training label is {low:g}; give other data")
    parts = {name: _part(task, rows[name], named[name], low, high) for name in named}
    digest = _sha256((rows[name], named[name].labels) for name in named)
    num_outputs = 1 if task.kind == "number" else len(task.classes)
    return Problem(task, num_outputs, parts.pop("train"), parts, notes, digest)


def _part(
    task: Task, rows: list[np.ndarray], examples: Examples, low: float, high: float
) -> Part:
    """Rows whose numbers are judged in the units of the task."""

    def numbers(scores: list[np.ndarray]) -> np.ndarray:
        scores_RC = np.stack(scores).astype(np.float64)
        return low + (high - low) * scores_RC if task.kind == "number" else scores_RC

    def answers(scores: list[np.ndarray]) -> list[tuple[str, Any]]:
        scores_RC = numbers(scores)
        if task.kind == "classes":
            found: list[Any] = [task.classes[i] for i in scores_RC.argmax(axis=1)]
        elif task.kind == "number":
            found = scores_RC[:, 0].tolist()
        else:
            found = (1 / (1 + np.exp(-scores_RC))).round(6).tolist()
        return list(zip(examples.ids, found, strict=True))

    labels = examples.labels
    return Part(
        rows,
        (labels - low) / (high - low) if task.kind == "number" else labels,
        lambda scores: evaluate(task, numbers(scores), labels),
        answers,
    )


def make_span_problem(
    data: squad.Squad, pretrained: Pretrained, max_unknown: float = MAX_UNKNOWN
) -> Problem:
    """SQuAD for one model: a row for every window of every question.

    Validation chooses an answer per question from all its windows and scores it as the official
    script does; ``best_f1`` and ``best_exact`` are at the best threshold for "no answer".

    Args:
        data: training and dev set.
        pretrained: a model of text.
        max_unknown: largest share of [UNK] among the training tokens.

    Raises:
        UserError: a vocabulary of other data, or too few positions.
    """
    length = min(WINDOW_LENGTH, pretrained.layout.room(2) + 4)
    max_question = min(MAX_QUESTION, (length - 4) // 3)
    stride = max(1, min(WINDOW_STRIDE, (length - 4 - max_question) // 2))
    notes: dict[str, Any] = {"split": data.split, "rows": {}}
    notes["windows"] = {"length": length, "stride": stride}
    parts = {}
    for name in ("train", "validation"):
        questions, num_left_out = getattr(data, name)
        if not questions:
            raise UserError(f"squad_v2: the split {name} has no questions; give other files")
        encoded = [
            encode_question(q, pretrained.tokenizer, length, stride, max_question)
            for q in questions
        ]
        parts[name] = part = _span_part(questions, encoded)
        num_tokens = sum(entry.num_tokens for entry in encoded)
        share = sum(entry.num_unknown for entry in encoded) / max(num_tokens, 1)
        notes["rows"][name] = {
            "examples": len(encoded),
            "windows": len(part.rows),
            "longest": max(len(row) for row in part.rows),
            "truncated": sum(entry.num_cut > 0 for entry in encoded),
            "tokens_cut": sum(entry.num_cut for entry in encoded),
            "unknown_share": round(share, 6),
            "left_out": num_left_out,
        }
        if name == "train":
            texts: list[tuple[str, ...]] = [(q.question, q.context) for q in questions]
            _check_unknown(squad.TASK, texts, share, max_unknown, pretrained)
    digest = _sha256((part.rows, part.labels) for part in parts.values())
    return Problem(squad.TASK, 2, parts.pop("train"), parts, notes, digest)


def _span_part(questions: list[squad.Question], encoded: list[EncodedQuestion]) -> Part:
    """The windows of a part, and how the answers chosen from them are scored."""
    windows = [window for entry in encoded for window in entry.windows]
    labels = np.array([pair for entry in encoded for pair in entry.targets])

    def answered(scores: list[np.ndarray]) -> Answers:
        found = []
        for start in range(0, len(windows), WINDOWS_AT_ONCE):
            some = [torch.from_numpy(row).T for row in scores[start : start + WINDOWS_AT_ONCE]]
            logits_BN2 = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            batch = windows[start : start + WINDOWS_AT_ONCE]
            found.append(best_spans(logits_BN2[..., 0], logits_BN2[..., 1], batch))
        best = BestSpans(*(torch.cat(column) for column in zip(*found, strict=True)))
        return choose_answers(questions, encoded, best)

    def judge(scores: list[np.ndarray]) -> dict[str, float]:
        found = answered(scores)
        score = squad.score_predictions(questions, found.texts, found.na_probs, 0.5)
        return {n: score[n] / 100 for n in ("exact", "f1", "best_exact", "best_f1")}

    def answers(scores: list[np.ndarray]) -> list[tuple[str, Any]]:
        found = answered(scores)
        score = squad.score_predictions(questions, found.texts, found.na_probs)
        return list(found.at(score["best_f1_thresh"]).items())

    return Part([window.token_ids_N for window in windows], labels, judge, answers)


def _check_unknown(
    task: Task, texts: list[tuple[str, ...]], share: float, most: float, pretrained: Pretrained
) -> None:
    """Refuse training texts that the vocabulary of the model was not made for."""
    tokenizer = pretrained.tokenizer
    if share <= (0.0 if task.input == "toy" else most):
        return
    some = [text for example in texts[:EXAMPLES_LOOKED_AT] for text in example]
    lost = Counter(piece for text in some for piece in tokenizer.unknown_pieces(text))
    shown = ", ".join(on_one_line(piece)[:20] for piece, _ in lost.most_common(5))
    is_kekule = task.input == "smiles" and all(map(tokenizer.unknown_pieces, AROMATIC))
    if is_kekule and lost.keys() & {*AROMATIC}:
        shown += (
            "; it was learned from Kekulé spelling, without aromatic c and n, and these molecules "
            "are aromatic"
        )
    raise UserError(
        f"{task.name}: {share:.1%} of the training tokens are not in the vocabulary of "
        f"{pretrained.path}, such as {shown}; give a checkpoint whose tokenizer was made for such "
        "data, or allow more with --max-unknown"
    )


def _check_scorable(task: Task, part: str, labels: np.ndarray) -> None:
    """Refuse rows that have no ROC curve, whatever is predicted for them."""
    if task.kind == "labels" and not ((labels == 1).any(0) & (labels == 0).any(0)).any():
        raise UserError(
            f"{task.name}: no label has both a yes and a no among the {len(labels)} rows of the "
            f"part {part}, so there is no ROC curve to score; choose another --data.split, or "
            "give data with both answers"
        )


def _sha256(parts: Iterable[tuple[list[np.ndarray], np.ndarray]]) -> str:
    """One hash over the rows and labels of some parts."""
    digest = hashlib.sha256()
    for rows, labels in parts:
        digest.update(f"{len(rows)} {labels.shape}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(4, "little") + row.tobytes())
        digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()
