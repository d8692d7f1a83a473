"""Eight tasks of GLUE, from the hub or from a folder laid out like it (§5.2, Appendix M).

A folder holds one per task, as the hub's repository does: ``rte/train-00000-of-00001.parquet`` and
``rte/validation-00000-of-00001.parquet``.

Validation is the benchmark's dev set, whose results the paper prints (Table 3). The test sets,
whose labels are secret, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exlm_lab.downstream.layouts import Layout, load_table
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.tables import read_table
from exlm_lab.downstream.task import Kind, Splits, Task, load_hub
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading

HUB_ID = "nyu-mll/glue"
_ENTAILMENT = ("entailment", "not_entailment")


def _task(name: str, columns: str, metric: str, *classes: str) -> Layout:
    kind: Kind = "classes" if classes else "numbers"
    texts = tuple((column,) for column in columns.split())
    return Layout(name, "text", texts, ("label",), kind, classes, metric)


TASKS: dict[str, Layout] = {
    task.name: task
    for task in (
        _task("cola", "sentence", "matthews", "unacceptable", "acceptable"),
        _task("sst2", "sentence", "accuracy", "negative", "positive"),
        _task("mrpc", "sentence1 sentence2", "accuracy", "not_equivalent", "equivalent"),
        _task("stsb", "sentence1 sentence2", "spearman"),
        _task("qqp", "question1 question2", "accuracy", "not_duplicate", "duplicate"),
        _task("mnli", "premise hypothesis", "accuracy", *_ENTAILMENT[:1], "neutral",
              "contradiction"),
        _task("qnli", "question sentence", "accuracy", *_ENTAILMENT),
        _task("rte", "sentence1 sentence2", "accuracy", *_ENTAILMENT),
    )
}  # fmt: skip
"""The tasks by name, with the metrics of Appendix M and the order of classes of the hub."""


def load_glue(name: str, source: Path | None = None) -> tuple[Task, Splits]:
    """A task and its examples.

    Returns:
        train and validation; no test. MNLI's validation is the matched half, ``others`` holds
        ``validation-mismatched``.
    """
    names = {"train": "train", "validation": "validation"}
    if name == "mnli":
        halves = "validation_matched", "validation_mismatched"
        names |= dict(zip(("validation", "validation-mismatched"), halves, strict=True))
    if source is None:
        hub, where = load_hub(HUB_ID, name), f"{HUB_ID} {name}"
        with reading(where):
            parts = {part: hub[file].to_pandas() for part, file in names.items()}
    else:
        folder = _folder(name, source)
        where, parts = str(folder), {part: _read(folder, file) for part, file in names.items()}
    return load_table(where, parts, TASKS[name], ReadingConfig())


def _read(folder: Path, split: str) -> Any:
    """The data frame of a split, in the order of its files."""
    import pandas

    paths = sorted(folder.glob(f"{split}-*.parquet"))
    if not paths:
        known = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise UserError(f"{folder} holds no {split}-*.parquet; it holds: {known}")
    return pandas.concat(map(read_table, paths), ignore_index=True)


def _folder(name: str, directory: Path) -> Path:
    """The folder of a task, however its name is written."""
    with reading(directory):
        folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name.lower().replace("-", "").replace("_", "") == name:
            return folder
    known = ", ".join(path.name for path in folders[1:][:20]) or "no folder"
    raise UserError(f"{directory} holds no folder of {name}; it holds: {known}")
