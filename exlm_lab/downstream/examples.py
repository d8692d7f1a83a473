"""Turn a table into the examples of a task: their texts or molecules, answers and split.

A row whose text or molecule is unreadable, or which has no answer, is left out and reported with
the reason. Rows are counted from 0, without the header.

Shapes: R rows, X columns of texts and targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from exlm_lab.downstream.scaffolds import PARTS, RULES, index_sha1, random_parts, split
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.targets import Tables, encode, place
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.molecules import Cleaning, clean
from exlm_mini.data.text import find_column, folded
from exlm_mini.reading.entries import readable

PART_OF_WORD = {
    **{part: part for part in PARTS}, "training": "train",
    **dict.fromkeys(("valid", "val", "dev"), "validation"),
}  # fmt: skip
"""The part that each word means in the column that ``data.split`` names."""
AS_IT_IS = Cleaning()


def load_table(
    source: str,
    parts: dict[str, Any],
    task: Task,
    how: ReadingConfig,
    cleaning: Cleaning = AS_IT_IS,
    files: Mapping[str, object] | None = None,
) -> tuple[Task, Splits]:
    """Read the examples of a task from a table, and complete the task with what its cells say.

    Args:
        source: the table's name in messages.
        parts: data frames by name: ``train``, which is split if it is the only one; ``validation``,
            held out from ``train`` if missing; ``test``; and others, which are scored too.
        task: the task; its column names match the table's whatever their case and outer blanks.
        how: how to split the table.
        cleaning: how to clean molecules, once they are split.
        files: the file of each part; without them, rows are numbered across all parts.
    """
    ends = np.cumsum([0, *map(len, parts.values())]).tolist()
    tables = [(source, 0)] * len(parts)
    if files is not None:
        tables = [(str(files[part]), first) for part, first in zip(parts, ends, strict=False)]
    task, cells_RX = _columns(source, tables, parts, task)
    num_texts = len(task.columns)
    task, labels, left_out = encode(tables, cells_RX[:, num_texts:], task)
    texts = []
    for cells_R in cells_RX[:, :num_texts].T:
        column, reasons = readable(cells_R, task.input, AS_IT_IS)
        left_out |= reasons
        texts.append(column)
    is_known_R = ~np.isnan(labels).all(axis=1)
    rows = [int(n) for n in np.flatnonzero(is_known_R) if all(column[n] for column in texts)]
    if not rows:
        first = min(left_out)
        raise UserError(
            f"{source}: no row has both a text and an answer; row {first} (from 0): "
            f"{left_out[first]}"
        )
    if task.kind == "classes":
        labels = np.nan_to_num(labels[:, 0], nan=-1).astype(np.int64)
    chosen, of_split = _split(source, parts, rows, texts[0], how, task.input)
    examples = {}
    for name, part in chosen.items():
        if not part:
            raise UserError(
                f"{source}: the {name} part of the split {of_split['split']} is empty "
                f"({len(cells_RX):,} rows, {len(cells_RX) - len(rows):,} left out); give more "
                "rows, or another split"
            )
        spelled = [[column[row] for row in part] for column in texts]
        if task.input == "smiles" and cleaning != AS_IT_IS:
            spelled = [readable(column, task.input, cleaning)[0] for column in spelled]
        examples[name] = Examples(list(zip(*spelled, strict=True)), labels[part])
    used, seen_before = {*rows}, _also_in_train(examples, task.input)
    faults: list[dict[str, Any]] = [{"row": n, "why": left_out[n]} for n in sorted(left_out)]
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
        **({"also_in_train": seen_before} if seen_before else {}),
        **of_split,
    }
    if task.input == "smiles":
        read = [column[row] for column in texts for part in chosen.values() for row in part]
        notes |= _of_molecules(read, cleaning)
    others = tuple((name, own) for name, own in examples.items() if name not in PARTS)
    splits = Splits(
        examples["train"], examples["validation"], examples.get("test"), notes, others
    )
    return task, splits


def _columns(
    source: str, tables: Tables, parts: dict[str, Any], task: Task
) -> tuple[Task, np.ndarray]:
    """The task with its columns named as in the table, and the cells_RX of these columns."""
    names = [*task.columns, *task.targets]
    places = [
        [find_column(table, frame, name) for name in names]
        for (table, _), frame in zip(tables, parts.values(), strict=True)
    ]
    if again := [
        n for n, own in zip(names, places[0], strict=True) if places[0].count(own) > 1
    ]:
        raise UserError(f"{source}: '{again[0]}' is named twice; name each column once")
    cells_RX = np.concatenate(
        [
            frame.iloc[:, own].to_numpy(object)
            for frame, own in zip(parts.values(), places, strict=True)
        ]
    )
    if not len(cells_RX):
        raise UserError(f"{source} has 0 rows; give another file")
    names = [str(parts["train"].columns[place]).strip() for place in places[0]]
    texts, targets = names[: len(task.columns)], names[len(task.columns) :]
    return task._replace(columns=tuple(texts), targets=tuple(targets)), cells_RX


def _also_in_train(examples: dict[str, Examples], input: str) -> dict[str, int]:
    """Number of rows in each other part whose texts, in any order, also occur in training;
    molecules are compared by their canonical SMILES."""
    keys = {
        name: [frozenset(_key(text, input) for text in texts) for texts in part.texts]
        for name, part in examples.items()
    }
    seen = {*keys["train"]}
    counts = {name: sum(key in seen for key in own) for name, own in keys.items()}
    return {name: count for name, count in counts.items() if count and name != "train"}


def _key(text: str, input: str) -> str:
    molecule = clean(text, Cleaning(canonical=True)) if input == "smiles" else None
    return text if molecule is None else molecule.key


def _of_molecules(read: list[str], cleaning: Cleaning) -> dict[str, Any]:
    """Notes on what the results on molecules depend on: RDKit's version and the cleaning."""
    from rdkit import rdBase

    num_marked = sum(any(mark in text for mark in "@/\\") for text in read)
    return {
        "rdkit": rdBase.rdkitVersion,
        "cleaning": asdict(cleaning),
        "stereo_removed": cleaning.strip_stereo * num_marked,
    }


def _split(
    source: str,
    parts: dict[str, Any],
    rows: list[int],
    texts: list[str],
    how: ReadingConfig,
    input: str,
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Row numbers of each part, and notes on the split."""
    rule = how.split or ("scaffold" if input == "smiles" else "random")
    num_scaffolds = None
    if rule in RULES and rule != "random" and input != "smiles":
        raise UserError(
            f"{source}: --data.split {rule} is for molecules, and this model reads {input}; give "
            "--data.split random, or a column"
        )
    if len(parts) > 1:
        if how.split is not None:
            raise UserError(
                f"{source}: the {' and '.join([*parts][1:])} rows come from separate files, so "
                f"--data.split {how.split} does not apply; drop it"
            )
        rule, ends = "files", np.cumsum([0, *map(len, parts.values())])
        bounds = zip(parts, ends, ends[1:], strict=False)
        chosen = {
            name: [row for row in rows if start <= row < end] for name, start, end in bounds
        }
    elif rule == "random":
        chosen = dict(zip(PARTS, random_parts(rows, how.split_seed), strict=True))
    elif rule in RULES:
        own = split([texts[row] for row in rows], rule)
        if 2 * len(own.train) < len(rows):
            raise UserError(
                f"{source}: most of the {len(rows):,} molecules have the same scaffold, which a "
                "split by scaffolds keeps together; give --data.split random, or a column"
            )
        num_scaffolds = own.num_scaffolds
        in_parts = ([rows[i] for i in part] for part in own.parts)
        chosen = dict(zip(PARTS, in_parts, strict=True))
    else:
        chosen = _by_column(source, parts["train"], rows, rule)
    notes = {"split": rule} if rule == "files" else {"split": rule, "scaffolds": num_scaffolds}
    if not chosen.get("validation") and "validation" not in parts:
        more, last, held_out = random_parts(chosen.pop("train"), how.split_seed)
        chosen = {"train": more + last, **chosen, "validation": held_out}
        notes["validation"] = "at random from the training rows"
    return chosen, notes


def _by_column(source: str, frame: Any, rows: list[int], name: str) -> dict[str, list[int]]:
    """Row numbers of each part, as the words in a column assign them."""
    if folded(name) not in map(folded, frame):
        raise UserError(
            f"data.split is '{name}', which is not a column of {source}; "
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
