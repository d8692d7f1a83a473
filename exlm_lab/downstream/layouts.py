"""From a table to a task: what its columns are, what its targets say, and how its rows are split.

What a target is follows from its cells unless the layout says it:

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

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.scaffolds import PARTS, RULES, index_sha1, random_parts, split
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.tables import find_column
from exlm_lab.downstream.task import Examples, Kind, Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.molecules import Cleaning
from exlm_mini.reading.entries import readable

MOST_WRONG = 0.1
"""Of the cells of a target; with more of them wrong, the column is another."""
METRICS: dict[Kind, str] = {
    "labels": "roc_auc", "numbers": "r2", "mixed": "score", "classes": "accuracy",
}  # fmt: skip
WORDS_OF_PART = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test"},
}
"""What a column that splits a table may hold."""
AS_IT_IS = Cleaning()


class Layout(NamedTuple):
    """The columns of a table that make a task; neither case nor blanks around a name count."""

    name: str
    """Of the task."""
    input: str
    """smiles or text."""
    columns: tuple[tuple[str, ...], ...]
    """One text, or a pair; for each the names it goes by."""
    targets: tuple[str, ...]
    kind: Kind | None = None
    """None: by the cells."""
    classes: tuple[str, ...] = ()
    """The words for 0, 1, ...; without them the words are those in the table."""
    metric: str = ""
    """See ``Task``; empty: by kind."""


# ---- targets ----


class _Answers(NamedTuple):
    """The answers in some columns."""

    kind: Kind
    classes: tuple[str, ...]
    numbers: tuple[str, ...]
    """See ``Task``."""
    labels: np.ndarray
    """float64 (R, C); nan is missing, or wrong."""
    reasons: dict[int, str]
    """By row, what is wrong with it."""


def encode(source: str, cells_RC: np.ndarray, layout: Layout) -> _Answers:
    """The answers in the cells of the targets."""
    reasons: dict[int, str] = {}
    columns = zip(layout.targets, cells_RC.T, strict=True)
    kinds, classes, labels = zip(
        *(_encode(source, *column, layout, reasons) for column in columns), strict=True
    )
    kind: Kind = kinds[0] if len(set(kinds)) == 1 else "mixed"
    if "classes" in kinds and len(kinds) > 1:
        raise UserError(
            f"{source}: '{layout.targets[kinds.index('classes')]}' holds classes; several targets "
            "are numbers, or 0 and 1: give it a command of its own"
        )
    labels_RC = np.stack(labels, axis=1)
    for empty in np.flatnonzero(np.isnan(labels_RC).all(axis=1)):
        reasons.setdefault(int(empty), "it has no answer")
    names = classes[0] if kind == "classes" else layout.targets
    numbers = tuple(t for t, k in zip(layout.targets, kinds, strict=True) if k == "numbers")
    return _Answers(kind, names, numbers, labels_RC, reasons)


def _encode(
    source: str, target: str, cells_R: np.ndarray, layout: Layout, reasons: dict[int, str]
) -> tuple[Kind, tuple[str, ...], np.ndarray]:
    """Kind, classes and labels_R of one target; what is wrong with a row goes to ``reasons``."""
    import pandas

    try:
        indices, different = pandas.factorize(cells_R)  # a set has millions of cells
    except TypeError:
        raise UserError(
            f"{source}: {target} holds lists or objects; name another column"
        ) from None
    words = ["" if _is_missing(cell) else str(cell).strip() for cell in different]
    times = np.bincount(indices[indices >= 0], minlength=len(words))
    numbers = np.array([_number(word) for word in words])
    is_there = np.array([bool(word) for word in words], dtype=bool)
    if not is_there.any():
        raise UserError(f"{source}: {target} holds no answer; name another")
    is_number = np.isfinite(numbers)
    is_numeric = times[is_number].sum() >= (1 - MOST_WRONG) * times[is_there].sum()
    is_yes_no = is_numeric and bool(np.isin(numbers[is_number], (0, 1)).all())
    kind, classes = layout.kind, layout.classes
    if kind is None:
        kind = "labels" if is_yes_no else "numbers" if is_numeric else "classes"
    elif kind == "classes" and is_yes_no and not classes:
        kind = "labels"
    if kind == "classes" and not classes:
        there = [word for word, is_one in zip(words, is_there, strict=True) if is_one]
        classes = tuple(sorted(set(there), key=lambda word: (_number(word), word)))
        numbers = np.array([classes.index(w) if w else np.nan for w in words], float)
    if kind != "numbers":
        is_number = np.isin(numbers, range(len(classes) if kind == "classes" else 2))
    codes = np.where(is_number, numbers, np.inf)
    codes = np.append(np.where(is_there, codes, np.nan), np.nan)  # -1 is None or nan
    labels_R = codes[indices]
    what = {"labels": "0, 1 or nothing", "numbers": "a number or nothing"}
    expected = what.get(kind, f"one of 0 to {len(classes) - 1}")
    wrong = {
        int(row): f"'{target}' is '{str(cells_R[row])[:40]}', not {expected}"
        for row in np.flatnonzero(np.isinf(labels_R))
    }
    if len(wrong) > MOST_WRONG * (~np.isnan(labels_R)).sum():
        first, why = next(iter(wrong.items()))
        raise UserError(
            f"{source} row {first} (from 0): {why}, and {len(wrong):,} rows are like it; name "
            "another column, or mend it"
        )
    if len(classes) > max(2, np.isfinite(labels_R).sum() / 2):
        raise UserError(
            f"{source}: '{target}' holds {len(classes):,} different words in {len(labels_R):,} "
            "rows, a name rather than a class; name another column"
        )
    labels_R[np.isinf(labels_R)] = np.nan
    reasons |= wrong
    return kind, classes, labels_R


def _is_missing(cell: Any) -> bool:
    return cell is None or type(cell).__name__ == "NAType" or cell != cell


def _number(word: str) -> float:
    """The number in a cell; inf where there is none."""
    try:
        value = {"True": 1.0, "False": 0.0}.get(word)
        value = float(word) if value is None else value
    except ValueError:
        return math.inf
    return value if math.isfinite(value) else math.inf


# ---- splitting ----


def load_table(
    source: str,
    parts: dict[str, Any],
    layout: Layout,
    how: ReadingConfig,
    cleaning: Cleaning = AS_IT_IS,
) -> tuple[Task, Splits]:
    """The task in a table.

    Args:
        source: its name in messages.
        parts: data frames by name: ``train``, which is split if it is alone; ``validation``, held
            out from it if there is none; ``test``; and others that are scored.
        layout: of the columns.
        how: the split.
        cleaning: of molecules, after the split.
    """
    columns, cells_RC, names = _columns(source, parts, layout)
    layout = layout._replace(targets=names[len(columns) :])
    if not len(cells_RC):
        raise UserError(f"{source} has 0 rows; give another file")
    answers = encode(source, cells_RC, layout)
    texts, left_out = [], dict(answers.reasons)
    for column in columns:
        is_smiles = layout.input == "smiles"
        own, reasons = readable(column, layout.input, AS_IT_IS if is_smiles else None)
        left_out |= reasons
        texts.append(own)
    is_known_R = ~np.isnan(answers.labels).all(axis=1)
    rows = [n for n in range(len(cells_RC)) if is_known_R[n] and all(own[n] for own in texts)]
    chosen, notes = _parts(source, parts, rows, texts[0], how, layout.input)
    labels = answers.labels
    if answers.kind == "classes":
        labels = np.nan_to_num(labels[:, 0], nan=-1).astype(np.int64)
    notes = {
        "source": source,
        "rows": len(cells_RC),
        "rejected": [{"row": row, "why": left_out[row]} for row in sorted(left_out)],
        "split_sha1": {name: index_sha1(own) for name, own in chosen.items()},
        "sizes": [len(part) for part in chosen.values()],
        **notes,
    }
    if layout.input == "smiles":
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
                f"({len(cells_RC):,} rows, {len(cells_RC) - len(rows):,} left out); give more "
                "rows, or another split"
            )
        spelled = [[column[row] for row in part] for column in texts]
        if cleaning != AS_IT_IS:
            spelled = [readable(column, layout.input, cleaning)[0] for column in spelled]
        examples[name] = Examples(list(zip(*spelled, strict=True)), labels[part])
    metric = layout.metric or METRICS[answers.kind]
    what = layout.name, answers.kind, answers.classes, metric, layout.input
    others = tuple((name, own) for name, own in examples.items() if name not in PARTS)
    splits = Splits(
        examples["train"], examples["validation"], examples.get("test"), notes, others
    )
    return Task(*what, names[: len(texts)], layout.targets, answers.numbers), splits


def _columns(
    source: str, parts: dict[str, Any], layout: Layout
) -> tuple[list[list[Any]], np.ndarray, tuple[str, ...]]:
    """The columns of texts, the cells of the targets, and the names of all in the first part."""
    wanted = [*layout.columns, *((target,) for target in layout.targets)]
    found = []
    names: tuple[str, ...] = ()
    for frame in parts.values():
        places = [find_column(source, frame, *known) for known in wanted]
        names = names or tuple(str(frame.columns[place]).strip() for place in places)
        found.append(frame.iloc[:, places].to_numpy(object))
    cells = np.concatenate(found)
    num_texts = len(layout.columns)
    return [list(column) for column in cells.T[:num_texts]], cells[:, num_texts:], names


def _parts(
    source: str,
    parts: dict[str, Any],
    rows: list[int],
    texts: list[str],
    how: ReadingConfig,
    input: str,
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Row numbers of each part, and notes on the split."""
    if len(parts) > 1:
        ends = np.cumsum([len(part) for part in parts.values()])
        starts = [0, *ends[:-1]]
        chosen = {
            name: [row for row in rows if start <= row < end]
            for name, start, end in zip(parts, starts, ends, strict=True)
        }
        notes: dict[str, Any] = {"split": "files"}
    else:
        rule = how.rule(input)
        chosen, num_scaffolds = _split(source, parts["train"], rows, texts, rule, how)
        notes = {"split": rule, "scaffolds": num_scaffolds}
    if not chosen.get("validation"):
        more, last, held_out = random_parts(chosen.pop("train"), how.split_seed)
        chosen = {"train": more + last, **chosen, "validation": held_out}
    return chosen, notes


def _split(
    source: str, frame: Any, rows: list[int], texts: list[str], rule: str, how: ReadingConfig
) -> tuple[dict[str, list[int]], int | None]:
    """Row numbers of the parts by a rule, or by what a column says; and how many scaffolds."""
    if rule == "random":
        return dict(zip(PARTS, random_parts(rows, how.split_seed), strict=True)), None
    if rule in RULES:
        own = split([texts[row] for row in rows], rule)
        in_parts = ([rows[i] for i in part] for part in own.parts)
        return dict(zip(PARTS, in_parts, strict=True)), own.num_scaffolds
    if rule.strip().casefold() not in (str(name).strip().casefold() for name in frame):
        raise UserError(
            f"data.split is '{rule}', no column of {source}; "
            f"{nearest(rule, [*RULES, *map(str, frame)])}"
        )
    cells = frame.iloc[:, find_column(source, frame, rule)]
    words = [str(cells.iloc[row]).strip().casefold() for row in rows]
    parts = {
        name: [row for row, word in zip(rows, words, strict=True) if word in known]
        for name, known in WORDS_OF_PART.items()
    }
    strange = sorted(set(words).difference(*WORDS_OF_PART.values()))
    if strange:
        raise UserError(
            f"{source}: '{rule}' holds '{strange[0][:40]}'; write train, validation or test"
        )
    return {name: own for name, own in parts.items() if own or name == "train"}, None
