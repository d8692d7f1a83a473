"""Eight tasks of GLUE, from the benchmark's own files or from the hub (§5.2, Appendix M).

A directory holds a folder per task, as published: ``CoLA/train.tsv`` and ``CoLA/dev.tsv``
(``cola/`` and ``.tsv.gz`` are accepted too). Quotation marks in these files are ordinary
characters, and each line is a row.

Validation is the benchmark's dev set, whose results the paper prints (Table 3). The test sets,
whose labels are secret, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.task import Examples, Splits, Task, find_column, find_file, load_hub
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import open_decompressed

HUB_ID = "nyu-mll/glue"
LARGEST_SCORE = 5.0
"""STS-B scores similarity from 0 to 5."""
_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("cola", "classes", ("unacceptable", "acceptable"), "matthews", "text"),
        Task("sst2", "classes", ("negative", "positive"), "accuracy", "text"),
        Task("mrpc", "classes", ("not_equivalent", "equivalent"), "accuracy", "text"),
        Task("stsb", "number", (), "spearman", "text"),
        Task("qqp", "classes", ("not_duplicate", "duplicate"), "accuracy", "text"),
        Task("mnli", "classes", ("entailment", "neutral", "contradiction"), "accuracy", "text"),
        Task("qnli", "classes", _ENTAILMENT, "accuracy", "text"),
        Task("rte", "classes", _ENTAILMENT, "accuracy", "text"),
    )
}
"""The tasks by name, with the metrics of Appendix M and the order of classes of the hub."""


class Layout(NamedTuple):
    """The columns of a task in its files."""

    label: str
    """``label`` on the hub."""
    texts: tuple[str, ...]
    hub_texts: tuple[str, ...]


_ONE, _PAIR = ("sentence",), ("sentence1", "sentence2")
_QUESTION, _QUESTIONS = ("question", "sentence"), ("question1", "question2")
LAYOUTS = {
    "cola": Layout("label", _ONE, _ONE),
    "sst2": Layout("label", _ONE, _ONE),
    "mrpc": Layout("Quality", ("#1 String", "#2 String"), _PAIR),
    "stsb": Layout("score", _PAIR, _PAIR),
    "qqp": Layout("is_duplicate", _QUESTIONS, _QUESTIONS),
    "mnli": Layout("gold_label", _PAIR, ("premise", "hypothesis")),
    "qnli": Layout("label", _QUESTION, _QUESTION),
    "rte": Layout("label", _PAIR, _PAIR),
}
HEADERS = {"cola": ["source", "label", "mark", "sentence"]}
"""For files without a header."""
BROKEN = ("qqp",)
"""Tasks whose files have lines with too few fields, which are dropped."""


def load_glue(name: str, source: Path | None = None) -> Splits:
    """The examples of a task.

    Args:
        name: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte.
        source: the benchmark's directory, or the task's folder in it; None: the hub.

    Returns:
        train and validation; no test. MNLI's validation is the matched half, ``others`` holds
        ``validation-mismatched``. ``notes`` counts the dropped rows per split.

    Raises:
        UserError: for a missing file or column, a label outside the range, an empty split.
    """
    halves = ("-matched", "-mismatched") if name == "mnli" else ("",)
    names = ["train", *(f"validation{half}" for half in halves)]
    found = {}
    if source is None:
        hub, columns = load_hub(HUB_ID, name), LAYOUTS[name].hub_texts
        for split in names:
            where = f"{HUB_ID} {name} {split}"
            with reading(where):
                table = hub[split.replace("-", "_")].to_pandas()
                found[split] = _examples(name, where, table, columns, "label"), 0
    else:
        folder = _folder(name, source)
        for split in names:
            file = split.replace("validation", "dev").replace("-", "_")
            found[split] = read_split(name, find_file(folder, f"{file}.tsv"))
    left_out = {split: num for split, (_, num) in found.items() if num}
    train, validation, *others = (examples for examples, _ in found.values())
    notes = {"source": str(source or HUB_ID), "left_out": left_out}
    return Splits(train, validation, None, notes, tuple(zip(names[2:], others, strict=True)))


def read_split(name: str, path: Path) -> tuple[Examples, int]:
    """One file of a task, and the number of its rows that were dropped.

    Raises:
        UserError: as ``load_glue``.
    """
    import pandas

    layout = LAYOUTS[name]
    with reading(path):
        with open_decompressed(path) as stream:
            lines = stream.read().decode("utf-8-sig").split("\n")
        # Not by pandas: nothing is quoted, and rows with missing fields must not pass.
        rows = [line.removesuffix("\r").split("\t") for line in lines if line.strip()]
        header = HEADERS.get(name) or rows.pop(0)
        whole = [row for row in rows if len(row) == len(header)]
        if len(whole) < len(rows) and name not in BROKEN:
            odd = next(row for row in rows if len(row) != len(header))
            raise ValueError(f"{len(odd)} fields, not {len(header)}, in {' '.join(odd)[:80]}")
        table = pandas.DataFrame(whole, columns=header)
        examples = _examples(name, str(path), table, layout.texts, layout.label)
        return examples, len(rows) - len(whole)


def _examples(
    name: str, where: str, table: Any, texts: tuple[str, ...], label: str
) -> Examples:
    """Examples from columns of a data frame."""
    import pandas

    task, header = TASKS[name], [str(column) for column in table]
    places = [find_column(where, header, column) for column in texts]
    rows = list(table.iloc[:, places].itertuples(index=False, name=None))
    labels = table.iloc[:, find_column(where, header, label)]
    # Some files write the class as a word, others and the hub as its number.
    number_of = {word: number for number, word in enumerate(task.classes)}
    numbers = labels.map(lambda value: number_of.get(value, value))
    labels_R = pandas.to_numeric(numbers, errors="coerce")
    if task.kind == "number":
        is_known_R = labels_R.between(0, LARGEST_SCORE)
    else:
        is_known_R = labels_R.isin(range(len(task.classes)))
    if not is_known_R.all():
        row = int(is_known_R.argmin())
        raise UserError(
            f"{where} row {row} (from 0): '{str(labels[row])[:40]}' is no label of {name}; "
            "mend it, or get the file again"
        )
    if not rows:
        raise ValueError("no examples")
    kind = np.float64 if task.kind == "number" else np.int64
    return Examples(rows, labels_R.to_numpy(kind))


def _folder(name: str, directory: Path) -> Path:
    """The folder of a task, however its name is written."""
    with reading(directory):
        folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name.lower().replace("-", "").replace("_", "") == name:
            return folder
    found = ", ".join(path.name for path in folders[1:][:20]) or "no folder"
    raise UserError(f"{directory} holds no folder of {name}; it holds: {found}")
