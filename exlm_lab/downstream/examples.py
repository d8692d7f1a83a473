"""From a table to the examples of a task: what its targets say, and how its rows are split.

What a target is follows from its cells unless the task says it:

===========  =====================================================================
``labels``   0, 1, or nothing where the answer is missing; several columns may be
``numbers``  numbers, or nothing; several columns may be
``mixed``    some columns of each of these two
``classes``  words, or numbers if classification is asked for; one column
===========  =====================================================================

A row is left out, and named with the reason, if its text or molecule is unreadable, or if it has no
answer. Rows are counted from 0, without the header.

Shapes: R rows, C targets.
"""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from exlm_lab.downstream.scaffolds import PARTS, RULES, index_sha1, random_parts, split
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Examples, Kind, Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.molecules import Cleaning
from exlm_mini.data.text import find_column, folded
from exlm_mini.reading.entries import readable

MOST_WRONG = 0.1
"""Of the cells of a target; with more of them wrong, the column is another."""
LARGEST = 1e30
"""Of a number; models are of float32, which ends at 3e38."""
NO_WORDS = {"#N/A", "#NA", "#VALUE!", "#REF!", "#DIV/0!", "#NUM!", "#NAME?", "#NULL!"}
"""What a spreadsheet writes where it has no value."""
METRICS: dict[Kind, str] = {
    "labels": "roc_auc", "numbers": "r2", "mixed": "score", "classes": "accuracy",
}  # fmt: skip
PART_OF_WORD = {
    **{part: part for part in PARTS}, "training": "train",
    **dict.fromkeys(("valid", "val", "dev"), "validation"),
}  # fmt: skip
"""What a column that splits a table may hold."""
AS_IT_IS = Cleaning()
Tables = list[tuple[str, int]]
"""The tables that rows come from, by name, and which row is the first of each."""


# ---- targets ----

_DECIMAL_COMMA = re.compile(r"[-+−]?\d+,\d+")


def place(tables: Tables, row: int) -> tuple[str, int]:
    """The table that holds a row, and the row's number there."""
    return next((name, row - first) for name, first in reversed(tables) if first <= row)


def encode(
    tables: Tables, cells_RC: np.ndarray, task: Task
) -> tuple[Task, np.ndarray, dict[int, str]]:
    """The answers in the cells of the targets.

    Returns:
        task: with what the cells say of it.
        labels_RC: float64; nan is missing, or wrong.
        reasons: by row, what is wrong with it.
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
        raise UserError(
            f"{tables[0][0]}: '{task.targets[kinds.index('classes')]}' holds classes; several "
            "targets are numbers, or 0 and 1: give it a command of its own"
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


def _encode(
    tables: Tables, target: str, cells_R: np.ndarray, task: Task, reasons: dict[int, str]
) -> tuple[Kind, tuple[str, ...], np.ndarray]:
    """Kind, classes and labels_R of one target; what is wrong with a row goes to ``reasons``."""
    import pandas

    source = tables[0][0]
    try:
        indices, different = pandas.factorize(cells_R)  # a set has millions of cells
    except TypeError:
        raise UserError(
            f"{source}: {target} holds lists or objects; name another column"
        ) from None
    words = [unicodedata.normalize("NFC", str(cell)).strip() for cell in different]
    words = ["" if word in NO_WORDS else word for word in words]
    times = np.bincount(indices[indices >= 0], minlength=len(words))
    numbers = np.array([_number(word) for word in words])
    is_there = np.array([bool(word) for word in words], dtype=bool)
    if not is_there.any():
        raise UserError(f"{source}: {target} holds no answer; name another")
    is_number = np.isfinite(numbers)
    is_numeric = times[is_number].sum() >= (1 - MOST_WRONG) * times[is_there].sum()
    has_comma = np.array([bool(_DECIMAL_COMMA.fullmatch(word)) for word in words])
    is_all_numeric = (
        times[is_number | has_comma].sum() >= (1 - MOST_WRONG) * times[is_there].sum()
    )
    if task.kind in (None, "numbers") and is_all_numeric and not is_numeric:
        raise UserError(
            f"{source}: '{target}' holds '{words[has_comma.argmax()]}'; write decimals with a "
            "point and thousands without a mark, or, if it is a word, give --kind classification"
        )
    is_yes_no = is_numeric and bool(np.isin(numbers[is_number], (0, 1)).all())
    kind, classes = task.kind, task.classes
    if kind is None:
        kind = "labels" if is_yes_no else "numbers" if is_numeric else "classes"
    elif kind == "classes" and is_yes_no and not classes:
        kind = "labels"
    if kind == "classes" and not classes:
        if is_numeric:  # 1 and 1.0 are one class
            words = [
                f"{number:.15g}" if math.isfinite(number) else word
                for number, word in zip(numbers, words, strict=True)
            ]
        classes = tuple(sorted({*words} - {""}, key=lambda word: (_number(word), word)))
        numbers = np.array([classes.index(w) if w else np.nan for w in words], float)
    if len(only := classes or {*words} - {""}) == 1 and kind != "labels":
        raise UserError(f"{source}: '{target}' holds only '{min(only)}'; name another column")
    if kind != "numbers":
        is_number = np.isin(numbers, range(len(classes) if kind == "classes" else 2))
    codes = np.where(is_number & (np.abs(numbers) < LARGEST), numbers, np.inf)
    codes = np.append(np.where(is_there, codes, np.nan), np.nan)  # -1 is None or nan
    labels_R = codes[indices]
    what = {"labels": "0, 1 or nothing", "numbers": f"a number below {LARGEST} or nothing"}
    expected = what.get(kind, f"one of 0 to {len(classes) - 1}")
    wrong = {
        int(row): f"'{target}' is '{str(cells_R[row])[:40]}', not {expected}"
        for row in np.flatnonzero(np.isinf(labels_R))
    }
    if len(wrong) > MOST_WRONG * (~np.isnan(labels_R)).sum():
        row, why = next(iter(wrong.items()))
        raise UserError(
            f"{' row '.join(map(str, place(tables, row)))} (from 0): {why}, and {len(wrong):,} "
            "rows are like it; name another column, or mend it"
        )
    if len(classes) > max(2, np.isfinite(labels_R).sum() / 2):
        raise UserError(
            f"{source}: '{target}' holds {len(classes):,} different words in {len(labels_R):,} "
            "rows, a name rather than a class; name another column"
        )
    labels_R[np.isinf(labels_R)] = np.nan
    reasons |= wrong
    return kind, classes, labels_R


def _number(word: str) -> float:
    """The number in a cell; inf where there is none."""
    with contextlib.suppress(ValueError):
        value = float({"true": "1", "false": "0"}.get(word.casefold(), word))
        if math.isfinite(value):
            return value
    return math.inf


# ---- splitting ----


def load_table(
    source: str,
    parts: dict[str, Any],
    task: Task,
    how: ReadingConfig,
    cleaning: Cleaning = AS_IT_IS,
    files: Mapping[str, object] | None = None,
) -> tuple[Task, Splits]:
    """The examples in a table, and what is known of their task then.

    Args:
        source: its name in messages.
        parts: data frames by name: ``train``, which is split if it is alone; ``validation``, held
            out from it if there is none; ``test``; and others that are scored.
        task: neither case nor blanks around the names of its columns count.
        how: the split.
        cleaning: of molecules, after the split.
        files: that the parts were read from; without them rows are counted through all parts.
    """
    ends = np.cumsum([0, *map(len, parts.values())]).tolist()
    tables = [(source, 0)] * len(parts)
    if files is not None:
        tables = [(str(files[part]), first) for part, first in zip(parts, ends, strict=False)]
    names = [*task.columns, *task.targets]
    places = [
        [find_column(table, frame, name) for name in names]
        for (table, _), frame in zip(tables, parts.values(), strict=True)
    ]
    if again := [
        n for n, own in zip(names, places[0], strict=True) if places[0].count(own) > 1
    ]:
        raise UserError(f"{source}: '{again[0]}' is named twice; name each column once")
    pieces = [
        frame.iloc[:, own].to_numpy(object)
        for frame, own in zip(parts.values(), places, strict=True)
    ]
    names = [str(parts["train"].columns[place]).strip() for place in places[0]]
    cells_RX, num_texts = np.concatenate(pieces), len(task.columns)
    if not len(cells_RX):
        raise UserError(f"{source} has 0 rows; give another file")
    task = task._replace(columns=tuple(names[:num_texts]), targets=tuple(names[num_texts:]))
    task, labels, left_out = encode(tables, cells_RX[:, num_texts:], task)
    texts = []
    is_smiles = task.input == "smiles"
    for cells_R in cells_RX[:, :num_texts].T:
        column, reasons = readable(cells_R, task.input, AS_IT_IS if is_smiles else None)
        left_out |= reasons
        texts.append(column)
    is_known_R = ~np.isnan(labels).all(axis=1)
    rows = [int(n) for n in np.flatnonzero(is_known_R) if all(column[n] for column in texts)]
    if not rows:
        first = min(left_out)
        raise UserError(
            f"{source}: no row has a text and an answer; row {first} (from 0): {left_out[first]}"
        )
    chosen, notes = _split(source, parts, rows, texts[0], how, task.input)
    if task.kind == "classes":
        labels = np.nan_to_num(labels[:, 0], nan=-1).astype(np.int64)
    faults: list[dict[str, Any]] = [{"row": n, "why": left_out[n]} for n in sorted(left_out)]
    used = {*rows}
    rejected, emptied = ([f for f in faults if (f["row"] in used) == own] for own in (0, 1))
    if files is not None:
        for fault in faults:
            fault["table"], fault["row"] = place(tables, fault["row"])
    notes = {
        "source": source,
        "rows": len(cells_RX),
        "rejected": rejected,
        **({"cells_left_out": emptied} if emptied else {}),
        **({"classes": task.classes} if task.kind == "classes" else {}),
        "split_sha1": {name: index_sha1(own) for name, own in chosen.items()},
        "sizes": [len(part) for part in chosen.values()],
        **notes,
    }
    if is_smiles:
        from rdkit import rdBase

        notes |= {"rdkit": rdBase.rdkitVersion, "cleaning": asdict(cleaning)}
        read = [column[row] for column in texts for part in chosen.values() for row in part]
        num_marked = sum(any(mark in text for mark in "@/\\") for text in read)
        notes["stereo_removed"] = cleaning.strip_stereo * num_marked
    examples = {}
    for name, part in chosen.items():
        if not part:
            raise UserError(
                f"{source}: the {name} part of the split {notes['split']} is empty "
                f"({len(cells_RX):,} rows, {len(cells_RX) - len(rows):,} left out); give more "
                "rows, or another split"
            )
        spelled = [[column[row] for row in part] for column in texts]
        if is_smiles and cleaning != AS_IT_IS:
            spelled = [readable(column, task.input, cleaning)[0] for column in spelled]
        examples[name] = Examples(list(zip(*spelled, strict=True)), labels[part])
    others = tuple((name, own) for name, own in examples.items() if name not in PARTS)
    splits = Splits(
        examples["train"], examples["validation"], examples.get("test"), notes, others
    )
    return task, splits


def _split(
    source: str,
    parts: dict[str, Any],
    rows: list[int],
    texts: list[str],
    how: ReadingConfig,
    input: str,
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Row numbers of each part, and notes on the split."""
    rule, num_scaffolds = how.rule(input), None
    if len(parts) > 1:
        rule, ends = "files", np.cumsum([0, *map(len, parts.values())])
        bounds = zip(parts, ends, ends[1:], strict=False)
        chosen = {
            name: [row for row in rows if start <= row < end] for name, start, end in bounds
        }
    elif rule == "random":
        chosen = dict(zip(PARTS, random_parts(rows, how.split_seed), strict=True))
    elif rule in RULES:
        own = split([texts[row] for row in rows], rule)
        num_scaffolds = own.num_scaffolds
        in_parts = ([rows[i] for i in part] for part in own.parts)
        chosen = dict(zip(PARTS, in_parts, strict=True))
    else:
        chosen = _by_column(source, parts["train"], rows, rule)
    notes = {"split": rule} if rule == "files" else {"split": rule, "scaffolds": num_scaffolds}
    if not chosen.get("validation") and "validation" not in parts:
        more, last, held_out = random_parts(chosen.pop("train"), how.split_seed)
        chosen = {"train": more + last, **chosen, "validation": held_out}
    return chosen, notes


def _by_column(source: str, frame: Any, rows: list[int], name: str) -> dict[str, list[int]]:
    """Row numbers of the parts by what a column says."""
    if folded(name) not in map(folded, frame):
        raise UserError(
            f"data.split is '{name}', no column of {source}; "
            f"{nearest(name, [*RULES, *map(str, frame)])}"
        )
    cells = frame.iloc[:, find_column(source, frame, name)]
    words = {row: folded(cells.iloc[row]) for row in rows}
    if strange := sorted(set(words.values()) - PART_OF_WORD.keys()):
        raise UserError(
            f"{source}: '{name}' holds '{strange[0][:40]}'; write train, validation or test"
        )
    parts = {part: [row for row in rows if PART_OF_WORD[words[row]] == part] for part in PARTS}
    return {part: own for part, own in parts.items() if own or part == "train"}
