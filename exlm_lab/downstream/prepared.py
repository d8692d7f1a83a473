"""A task made ready for one model: its rows, what the loss needs, and how answers are judged.

A task that cannot be trained on or scored is refused here, before any training.

Shapes: R rows, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream import squad
from exlm_lab.downstream.catalogue import load_task
from exlm_lab.downstream.inputs import FRAME, encode_examples
from exlm_lab.downstream.metrics import evaluate
from exlm_lab.downstream.settings import MAX_UNKNOWN, ReadingConfig, TuneConfig
from exlm_lab.downstream.spans import Window, choose_answers, target, windows
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config.checks import UserError, on_one_line
from exlm_mini.reading.trained import Trained

WINDOW_LENGTH, WINDOW_OVERLAP, MAX_QUESTION = 384, 128, 64
"""SQuAD's windows, their overlap and the longest question, in tokens: BERT's values, reduced where
the model has fewer positions."""

MOST_ROUNDED = 0.01
"""Largest step between float32 values at the mean of a number, in its standard deviations."""
PROBLEM_TYPES: dict[str | None, str] = {
    "classes": "single_label_classification",
    "labels": "multi_label_classification",
    "numbers": "regression",
    "mixed": "regression",
}
"""transformers' names for kinds of tasks; it has none for ``mixed``, and returns logits for it."""


class Part(NamedTuple):
    """Some rows of a task, with their labels and how to score them."""

    rows: list[np.ndarray]
    """R arrays of int32 ids with boundaries, not padded."""
    labels: np.ndarray
    """The label of each row: a class; numbers, standardised by ``Problem.center`` and ``spread``,
    or yes-no answers, nan where missing; or the start and end of a span."""
    judge: Callable[[list[np.ndarray]], dict[str, float]]
    """Computes the metrics from the head's output, one array per row."""
    examples: Examples | None = None
    """The texts and answers of the rows; None if the rows are windows of a text."""


class Problem(NamedTuple):
    """A task made ready for one model."""

    task: Task
    train: Part
    parts: dict[str, Part]
    """Rows to score, by name; ``validation`` is among them."""
    notes: dict[str, Any]
    """What a reader of the results must know, JSON-serialisable."""
    sha256: str
    """Hash of all rows, labels and their meaning, so that results on different data never mix."""
    center: np.ndarray | float = 0.0
    """Mean of each number over the training rows, (C,); 0 for anything else."""
    spread: np.ndarray | float = 1.0
    """Standard deviation of each number over the training rows, (C,); 1 for anything else."""

    @property
    def meaning(self) -> dict[str, Any]:
        """The entries of transformers' ``config.json`` that say what the head's outputs mean."""
        if self.task.kind == "span":
            return {}
        names = dict(enumerate(self.task.classes))
        return {
            "id2label": names,
            "label2id": {name: i for i, name in names.items()},
            "problem_type": PROBLEM_TYPES[self.task.kind],
        }

    def examples(self, part: Part) -> list[dict[str, Any]]:
        """One dict per row, with the inputs and labels that transformers models take."""
        kind, labels = self.task.kind, part.labels
        if kind == "span":
            columns = {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
        else:
            columns = {"labels": labels.astype(np.int64 if kind == "classes" else np.float32)}
        return [
            {"input_ids": row, **{name: column[n] for name, column in columns.items()}}
            for n, row in enumerate(part.rows)
        ]


ANOTHER_OUTPUT = (
    'choose another --output ("problem" means the rows, the targets and --kind, as this version '
    "reads them)"
)


def identity_of(
    pretrained: Trained, problem: Problem, config: TuneConfig, seed: int
) -> dict[str, Any]:
    """What identifies a run in its directory and its record, JSON-serialisable."""
    return {
        "config": asdict(config) | {"adam_betas": list(config.adam_betas)},
        "seed": seed,
        "pretrained_sha256": pretrained.sha256,
        "problem_sha256": problem.sha256,
    }


def load_problem(
    name: str,
    data: Path | None,
    reading: ReadingConfig,
    pretrained: Trained,
    max_unknown: float = MAX_UNKNOWN,
) -> Problem:
    """Load a task by name and make it ready; see ``load_task`` and ``make_problem``."""
    if name == squad.TASK.name:
        return make_span_problem(squad.load_squad(data), pretrained, max_unknown)
    task, splits = load_task(name, data, reading, pretrained.tokenizer)
    return make_problem(task, splits, pretrained, max_unknown)


def make_problem(
    task: Task, splits: Splits, pretrained: Trained, max_unknown: float = MAX_UNKNOWN
) -> Problem:
    """Make a task ready for a model; tasks of spans need ``make_span_problem`` instead."""
    named = {"train": splits.train, "validation": splits.validation}
    if splits.test is not None:
        named["test"] = splits.test
    named |= dict(splits.others)
    center: Any = 0.0
    spread: Any = 1.0
    if task.kind != "classes":
        _check_known(task, named)
    elif len(different := {*splits.train.labels.tolist()}) == 1:
        raise UserError(
            f"{task.name}: the answer is {task.classes[different.pop()]} in all train rows; "
            "give more rows, or choose another --data.split"
        )
    if task.is_number.any():
        labels_RC = splits.train.labels
        center = np.where(task.is_number, np.nanmean(labels_RC, 0), 0.0)
        spread = np.where(task.is_number, np.nanstd(labels_RC, 0), 1.0)
        _check_spread(task, center, spread)
    parts, notes = {}, {**splits.notes, "rows": {}}
    for name, examples in named.items():
        rows, notes["rows"][name] = encode_examples(
            examples.texts, pretrained.tokenizer, pretrained.config
        )
        parts[name] = _part(task, rows, examples, center, spread)
        if name != "train":
            # Rows on which no prediction can be scored are refused before any training.
            try:
                parts[name].judge([np.zeros(len(task.classes))] * len(rows))
            except UserError as error:
                raise UserError(f"{task.name}, {name} rows: {error}") from None
    share = notes["rows"]["train"]["unknown_share"]
    _check_unknown(task, splits.train.texts, share, max_unknown, pretrained)
    digest = _sha256(task, ((part.rows, named[name].labels) for name, part in parts.items()))
    train = parts.pop("train")
    return Problem(task, train, parts, notes, digest, center, spread)


def _part(
    task: Task, rows: list[np.ndarray], examples: Examples, center: Any, spread: Any
) -> Part:
    """Rows with numbers standardised for training; metrics are in the numbers' own units."""

    def judge(scores: list[np.ndarray]) -> dict[str, float]:
        scores_RC = np.stack(scores).astype(np.float64)
        return evaluate(task, center + spread * scores_RC, examples.labels)

    labels = examples.labels
    if task.is_number.any():
        labels = (labels - center) / spread
    return Part(rows, labels, judge, examples)


def make_span_problem(
    data: squad.Squad, pretrained: Trained, max_unknown: float = MAX_UNKNOWN
) -> Problem:
    """Make SQuAD ready for a model, with a row for every window of every question.

    Evaluation chooses one answer per question from all its windows and scores it as the official
    script does; ``best_f1`` and ``best_exact`` use the best threshold for "no answer".
    """
    length = min(WINDOW_LENGTH, pretrained.config.longest_text(2))
    max_question = min(MAX_QUESTION, (length - 2 * FRAME) // 3)
    overlap = min(WINDOW_OVERLAP, (length - 2 * FRAME - max_question) // 2)
    notes: dict[str, Any] = {"rows": {}, "windows": {"length": length, "overlap": overlap}}
    parts = {}
    for name, (questions, num_left_out) in data._asdict().items():
        own, rows = windows(questions, pretrained.tokenizer, length, overlap, max_question)
        notes["rows"][name] = {**rows, "left_out": num_left_out}
        labels = np.array([target(questions[window.question], window) for window in own])
        judge = partial(_judge_spans, questions, own)
        parts[name] = Part([window.token_ids_N for window in own], labels, judge)
    texts: list[tuple[str, ...]] = [(q.question, q.context) for q in data.train[0]]
    share = notes["rows"]["train"]["unknown_share"]
    _check_unknown(squad.TASK, texts, share, max_unknown, pretrained)
    digest = _sha256(squad.TASK, ((part.rows, part.labels) for part in parts.values()))
    return Problem(squad.TASK, parts.pop("train"), parts, notes, digest)


def _judge_spans(
    questions: list[squad.Question], own: list[Window], scores: list[np.ndarray]
) -> dict[str, float]:
    answers = choose_answers(questions, own, scores)
    score = squad.score_predictions(questions, *answers, na_prob_threshold=0.5)
    return {name: percent / 100 for name, percent in score.items()}


def _check_known(task: Task, named: dict[str, Examples]) -> None:
    """Refuse targets that cannot be learned, and numbers that cannot be scored in a part."""
    remedy = "leave it out, give more rows, or choose another --data.split"
    for part, examples in named.items():
        for name, is_number, labels_R in zip(
            task.classes, task.is_number, examples.labels.T, strict=True
        ):
            known = labels_R[~np.isnan(labels_R)]
            needed = 2 if is_number else int(part == "train")
            if len(known) < needed:
                raise UserError(
                    f"{task.name}: '{name}' has a value in only {len(known)} of the {part} rows "
                    f"and needs at least {needed}; {remedy}"
                )
            is_only = part == "train" and len(task.classes) == 1
            if (is_number or is_only) and np.ptp(known) == 0:
                raise UserError(
                    f"{task.name}: '{name}' is {known[0]:g} in all {part} rows; {remedy}"
                )


def _check_spread(task: Task, center_C: np.ndarray, spread_C: np.ndarray) -> None:
    """Refuse numbers that are too close together for float32."""
    step_C = np.abs(center_C) * np.finfo(np.float32).eps
    for c in np.flatnonzero(step_C > MOST_ROUNDED * spread_C):
        raise UserError(
            f"{task.name}: '{task.classes[c]}' is {center_C[c]:.9g} ± {spread_C[c]:.3g}, too "
            "close together for float32 (seven digits); subtract a constant, such as the mean"
        )


def _check_unknown(
    task: Task, texts: list[tuple[str, ...]], share: float, most: float, pretrained: Trained
) -> None:
    """Refuse training texts that the vocabulary of the model was not made for."""
    tokenizer = pretrained.tokenizer
    if share <= (0.0 if task.input == "toy" else most):
        return
    some = [text for example in texts[:1000] for text in example]
    lost = Counter(piece for text in some for piece in tokenizer.unknown_pieces(text))
    shown = ", ".join(on_one_line(piece)[:20] for piece, _ in lost.most_common(5))
    raise UserError(
        f"{task.name}: {share:.1%} of the training tokens are not in the vocabulary of "
        f"{pretrained.path}, such as {shown}; give a checkpoint whose tokenizer was made for such "
        "data, or allow more with --max-unknown"
    )


def _sha256(task: Task, parts: Iterable[tuple[list[np.ndarray], np.ndarray]]) -> str:
    """Hash the rows and labels of some parts, with the task's kind and names."""
    digest = hashlib.sha256(
        repr((task.kind, task.classes, task.columns, task.targets)).encode()
    )
    for rows, labels in parts:
        digest.update(f"{len(rows)} {labels.shape}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(4, "little") + row.tobytes())
        digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()
