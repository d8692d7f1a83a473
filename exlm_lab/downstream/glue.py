"""Eight tasks of GLUE, from the hub or from a folder laid out like it (§5.2, Appendix M).

A folder holds one per task, as the hub's repository does: ``rte/train-00000-of-00001.parquet`` and
``rte/validation-00000-of-00001.parquet``.

Validation is the benchmark's dev set, whose results the paper prints (Table 3). The test sets,
whose labels are secret, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exlm_lab.downstream.task import Examples, Splits, Task, find_column, load_hub
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading

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
TEXTS: dict[str, tuple[str, ...]] = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
}
"""Their columns, beside ``label``."""


def load_glue(name: str, source: Path | None = None) -> Splits:
    """The examples of a task.

    Returns:
        train and validation; no test. MNLI's validation is the matched half, ``others`` holds
        ``validation-mismatched``.
    """
    halves = ("-matched", "-mismatched") if name == "mnli" else ("",)
    names = ["train", *(f"validation{half}" for half in halves)]
    parts = []
    for split in names:
        file = split.replace("-", "_")
        if source is None:
            where = f"{HUB_ID} {name} {split}"
            hub = load_hub(HUB_ID, name)
            with reading(where):
                table = hub[file].to_pandas()
            parts.append(_examples(name, where, table))
        else:
            parts.append(_read(name, _folder(name, source), file))
    train, validation, *others = parts
    notes = {"source": str(source or HUB_ID)}
    return Splits(train, validation, None, notes, tuple(zip(names[2:], others, strict=True)))


def _read(name: str, folder: Path, split: str) -> Examples:
    """The examples of a split, in the order of its files."""
    import pandas

    paths = sorted(folder.glob(f"{split}-*.parquet"))
    if not paths:
        known = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise UserError(f"{folder} holds no {split}-*.parquet; it holds: {known}")
    with reading(folder):
        table = pandas.concat(map(pandas.read_parquet, paths), ignore_index=True)
    return _examples(name, f"{folder} {split}", table)


def _examples(name: str, where: str, table: Any) -> Examples:
    """Examples from a data frame."""
    import pandas

    task, header = TASKS[name], [str(column) for column in table]
    places = [find_column(where, header, column) for column in TEXTS[name]]
    rows = list(table.iloc[:, places].itertuples(index=False, name=None))
    labels = table.iloc[:, find_column(where, header, "label")]
    labels_R = pandas.to_numeric(labels, errors="coerce")
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
        raise UserError(f"{where} holds no examples; get the file again")
    return Examples(rows, labels_R.to_numpy(np.float64 if task.kind == "number" else np.int64))


def _folder(name: str, directory: Path) -> Path:
    """The folder of a task, however its name is written."""
    with reading(directory):
        folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name.lower().replace("-", "").replace("_", "") == name:
            return folder
    known = ", ".join(path.name for path in folders[1:][:20]) or "no folder"
    raise UserError(f"{directory} holds no folder of {name}; it holds: {known}")
