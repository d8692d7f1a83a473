"""Eight tasks of GLUE, from the hub or from a folder with the same layout (§5.2, Appendix M).

The folder has one subfolder per task, as the hub's repository does, with files such as
``rte/train-00000-of-00001.parquet`` and ``rte/validation-00000-of-00001.parquet``.

The validation rows are the benchmark's dev set, on which the paper reports (Table 3). The test
sets, whose labels are secret, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exlm_lab.downstream.tables import read_table
from exlm_lab.downstream.task import Task, bare, load_hub, named_entry
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading

HUB_ID = "nyu-mll/glue"
_ENTAILMENT = ("entailment", "not_entailment")


def _task(name: str, columns: str, metric: str, *classes: str) -> Task:
    kind: Any = "classes" if classes else "numbers"
    return Task(name, kind, classes, metric, "text", tuple(columns.split()), ("label",))


TASKS: dict[str, Task] = {
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
"""The tasks by name, with the metrics of Appendix M and the classes in the hub's order."""


def read(name: str, data: Path | None = None) -> tuple[str, dict[str, Any], Task]:
    """Read a task from a folder, or from the hub: its source, data frames by part, and the task.

    The parts are ``train`` and ``validation``; there is no test. For MNLI, ``validation`` is the
    matched half of the dev set and ``validation-mismatched`` the other half.
    """
    files = {"train": "train", "validation": "validation"}
    if name == "mnli":
        files["validation"] = "validation_matched"
        files["validation-mismatched"] = "validation_mismatched"
    if data is None:
        hub, source = load_hub(HUB_ID, name), f"{HUB_ID} {name}"
        with reading(source):
            parts = {part: hub[file].to_pandas() for part, file in files.items()}
        return source, parts, TASKS[name]
    folder = data if bare(data.name) == name else named_entry(data, name)
    return str(folder), {part: _part(folder, f) for part, f in files.items()}, TASKS[name]


def _part(folder: Path, split: str) -> Any:
    """The data frame of a split, whose files are joined in the order of their names."""
    import pandas

    paths = sorted(folder.glob(f"{split}-*.parquet"))
    if not paths:
        raise UserError(f"{folder} holds no {split}-*.parquet; use the files from the hub")
    return pandas.concat(map(read_table, paths), ignore_index=True)
