"""The targets of a table: the kind of each, and its answers as numbers.

The kind of the targets follows from their cells unless the task sets it:

===========  =====================================================================
``labels``   0, 1, or nothing where the answer is missing; one or more columns
``numbers``  numbers, or nothing; one or more columns
``mixed``    some columns of each of these two
``classes``  words, or numbers if classification is asked for; one column
===========  =====================================================================

Shapes: R rows, C targets, D different words in a column.
"""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from typing import NamedTuple

import numpy as np

from exlm_lab.downstream.task import Kind, Task
from exlm_mini.config.checks import UserError

MOST_WRONG = 0.1
"""Largest share of wrong cells in a target; with more, the column is probably the wrong one."""
LARGEST = 1e30
"""Numbers must be smaller than this; models use float32, which ends at 3e38."""
NO_WORDS = {"#N/A", "#NA", "#VALUE!", "#REF!", "#DIV/0!", "#NUM!", "#NAME?", "#NULL!"}
"""What a spreadsheet writes where it has no value."""
NO_NUMBERS = {"na", "<na>", "n/a", "nan", "null", "none"}
"""What programs write where a number is missing; in a column of words it may be a class."""
METRICS: dict[Kind, str] = {
    "labels": "roc_auc", "numbers": "r2", "mixed": "score", "classes": "accuracy",
}  # fmt: skip
Tables = list[tuple[str, int]]
"""The names of the tables that rows come from, each with the number of its first row."""

_NUMBER_IN_PRINT = re.compile(r"[-+−]?\d+(,\d+)*(\.\d+)?")


def place(tables: Tables, row: int) -> tuple[str, int]:
    """The table that holds a row, and the row's number there."""
    return next((name, row - first) for name, first in reversed(tables) if first <= row)


def encode(
    tables: Tables, cells_RC: np.ndarray, task: Task
) -> tuple[Task, np.ndarray, dict[int, str]]:
    """Read the answers from the cells of the targets.

    Returns:
        task: the task, completed with the kind, classes, numbers and metric the cells imply.
        labels_RC: float64; nan where an answer is missing or wrong.
        reasons: what is wrong with a row, by the row's number.
    """
    reasons: dict[int, str] = {}
    kinds, classes, labels = zip(
        *(
            _encode(tables, target, cells_R, task, reasons)
            for target, cells_R in zip(task.targets, cells_RC.T, strict=True)
        ),
        strict=True,
    )
    kind: Kind = kinds[0] if len(set(kinds)) == 1 else "mixed"
    if "classes" in kinds and len(kinds) > 1:
        name = task.targets[kinds.index("classes")]
        raise UserError(
            f"{tables[0][0]}: '{name}' holds classes, but with several targets each must hold "
            f"numbers, or 0 and 1; fine-tune on '{name}' in a separate command"
        )
    labels_RC = np.stack(labels, axis=1)
    for empty in np.flatnonzero(np.isnan(labels_RC).all(axis=1)):
        reasons.setdefault(int(empty), "it has no answer")
    task = task._replace(
        kind=kind,
        classes=classes[0] if kind == "classes" else task.targets,
        numbers=tuple(t for t, k in zip(task.targets, kinds, strict=True) if k == "numbers"),
        metric=task.metric or METRICS[kind],
    )
    return task, labels_RC, reasons


class _Column(NamedTuple):
    """A target's cells, as indices of its different words: of millions of cells, few differ."""

    of: str
    """The target's table and name, for messages."""
    words: list[str]
    """The D different words; an empty one is a missing value."""
    numbers_D: np.ndarray
    """The words as numbers; inf for a word that is not a number."""
    times_D: np.ndarray
    """Number of rows with each word."""
    words_R: np.ndarray
    """Index of the word in each row; -1 for None or nan."""

    @property
    def is_printed_D(self) -> np.ndarray:
        """Whether each word is a number only as people print it: with commas or a minus sign."""
        is_such = [bool(_NUMBER_IN_PRINT.fullmatch(word)) for word in self.words]
        return np.array(is_such) & ~np.isfinite(self.numbers_D)

    def are_most(self, is_such_D: np.ndarray) -> bool:
        """Whether nearly all cells that are not empty hold one of the words marked."""
        is_there_D = np.array([bool(word) for word in self.words])
        least = (1 - MOST_WRONG) * self.times_D[is_there_D].sum()
        return bool(self.times_D[is_such_D].sum() >= least)


def _encode(
    tables: Tables, target: str, cells_R: np.ndarray, task: Task, reasons: dict[int, str]
) -> tuple[Kind, tuple[str, ...], np.ndarray]:
    """Kind, classes and labels_R of one target; adds what is wrong with rows to ``reasons``."""
    column = _without_missing(_read(tables[0][0], target, cells_R), task.kind)
    kind, classes, codes_D = _kind(column, task), task.classes, column.numbers_D
    if kind == "classes" and not classes:
        classes, codes_D = _classes(column)
    different = classes or {*column.words} - {""}
    if len(different) == 1 and kind != "labels":
        raise UserError(f"{column.of} holds only '{min(different)}'; name another column")
    if kind == "numbers":
        is_answer_D = np.abs(codes_D) < LARGEST
        expected = f"a number below {LARGEST} or an empty cell"
    elif kind == "labels":
        is_answer_D = np.isin(codes_D, (0, 1))
        expected = "0, 1 or an empty cell"
    else:
        is_answer_D = np.isin(codes_D, range(len(classes)))
        expected = f"a class from 0 to {len(classes) - 1}"
    is_missing_D = np.array([not word for word in column.words])
    codes_D = np.where(is_missing_D, np.nan, np.where(is_answer_D, codes_D, np.inf))
    labels_R = np.append(codes_D, np.nan)[column.words_R]
    wrong = {
        int(row): f"'{target}' is '{str(cells_R[row])[:40]}', not {expected}"
        for row in np.flatnonzero(np.isinf(labels_R))
    }
    if len(wrong) > MOST_WRONG * (~np.isnan(labels_R)).sum():
        row, why = next(iter(wrong.items()))
        raise UserError(
            f"{' row '.join(map(str, place(tables, row)))} (from 0): {why}, and {len(wrong):,} "
            "rows in all are wrong; name another column, or correct the cells"
        )
    if len(classes) > max(2, np.isfinite(labels_R).sum() / 2):
        raise UserError(
            f"{column.of} holds {len(classes):,} different words in {len(labels_R):,} "
            "rows, which look like names rather than classes; name another column"
        )
    reasons |= wrong
    return kind, classes, np.where(np.isinf(labels_R), np.nan, labels_R)


def _read(source: str, target: str, cells_R: np.ndarray) -> _Column:
    import pandas

    try:
        words_R, different = pandas.factorize(cells_R)
    except TypeError:
        raise UserError(
            f"{source}: {target} holds lists or objects; name another column"
        ) from None
    words = [unicodedata.normalize("NFC", str(cell)).strip() for cell in different]
    words = ["" if word in NO_WORDS else word for word in words]
    if not any(words):
        raise UserError(f"{source}: {target} holds no answers; name another column")
    times_D = np.bincount(words_R[words_R >= 0], minlength=len(words))
    numbers_D = np.array([_number(word) for word in words])
    return _Column(f"{source}: '{target}'", words, numbers_D, times_D, words_R)


def _without_missing(column: _Column, kind: Kind | None) -> _Column:
    """Treat words like "nan" as missing in a column of numbers; a class may have such a name."""
    words = ["" if word.casefold() in NO_NUMBERS else word for word in column.words]
    is_number_D, numbers = np.isfinite(column.numbers_D), column._replace(words=words)
    if not any(words) or not numbers.are_most(is_number_D | column.is_printed_D):
        return column
    is_yes_no = np.isin(column.numbers_D[is_number_D], (0, 1)).all()
    return column if kind == "classes" and not is_yes_no else numbers


def _number(word: str) -> float:
    """The number that a word spells, or inf."""
    if "_" in word:  # Python's own way to write thousands
        return math.inf
    with contextlib.suppress(ValueError):
        value = float({"true": "1", "false": "0"}.get(word.casefold(), word))
        if math.isfinite(value):
            return value
    return math.inf


def _kind(column: _Column, task: Task) -> Kind:
    """The kind of one target: the task's, if set, else what the cells suggest; but 0 and 1 are
    ``labels`` even for a classification, unless it names its classes."""
    is_number_D = np.isfinite(column.numbers_D)
    is_numeric = column.are_most(is_number_D)
    is_printed_D, is_missing_D = column.is_printed_D, np.array([not w for w in column.words])
    is_meant_numeric = task.kind in (None, "numbers")
    if is_meant_numeric and not is_numeric and column.are_most(is_number_D | is_printed_D):
        raise UserError(
            f"{column.of} holds '{column.words[is_printed_D.argmax()]}'; write numbers with a "
            "decimal point, a hyphen as minus and no thousands separator, or, if these are words, "
            "give --kind classification"
        )
    other_D = ~is_number_D & ~is_missing_D
    times_D = column.times_D
    if (
        task.kind is None
        and not is_numeric
        and times_D[is_number_D].sum() > times_D[other_D].sum()
    ):
        raise UserError(
            f"{column.of} holds numbers and '{column.words[other_D.argmax()]}' in "
            f"{times_D[other_D].sum():,} rows with words; correct these, or give --kind "
            "classification"
        )
    is_yes_no = is_numeric and bool(np.isin(column.numbers_D[is_number_D], (0, 1)).all())
    if is_yes_no and (task.kind is None or (task.kind == "classes" and not task.classes)):
        return "labels"
    return task.kind or ("numbers" if is_numeric else "classes")


def _classes(column: _Column) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes in a column, and the index of each word's class; nan for an empty word."""
    words = column.words
    if column.are_most(np.isfinite(column.numbers_D)):  # 1 and 1.0 are one class
        words = [
            f"{number:.15g}" if math.isfinite(number) else word
            for number, word in zip(column.numbers_D, words, strict=True)
        ]
    classes = tuple(sorted({*words} - {""}, key=lambda word: (_number(word), word)))
    return classes, np.array([classes.index(w) if w else np.nan for w in words], float)
