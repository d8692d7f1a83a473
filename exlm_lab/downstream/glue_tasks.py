"""What the eight tasks of GLUE are, and how the benchmark and the hub lay them out (§5.2)."""

from __future__ import annotations

from typing import NamedTuple

from exlm_lab.downstream.task import Task
from exlm_mini.config import UserError, nearest

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

LARGEST_SCORE = 5.0
"""STS-B scores similarity from 0 to 5."""


class Layout(NamedTuple):
    """How the files of a task are laid out."""

    folder: str
    texts: tuple[str, ...]
    label: str
    written: tuple[str, ...]
    """The classes as the label column and the submissions write them."""
    hub_texts: tuple[str, ...]
    id: str = "index"
    header: tuple[str, ...] | None = None
    """Columns of train and dev where the files do not name them; test always has a header."""
    may_be_broken: bool = False
    """Whether train and dev hold lines with too few or too many fields, to be left out."""


_PAIR = ("sentence1", "sentence2")
_DIGITS = ("0", "1")
LAYOUTS = {
    "cola": Layout("CoLA", ("sentence",), "label", _DIGITS, ("sentence",),
                   header=("source", "label", "mark", "sentence")),
    "sst2": Layout("SST-2", ("sentence",), "label", _DIGITS, ("sentence",)),
    "mrpc": Layout("MRPC", ("#1 String", "#2 String"), "Quality", _DIGITS, _PAIR),
    "stsb": Layout("STS-B", _PAIR, "score", (), _PAIR),
    "qqp": Layout("QQP", ("question1", "question2"), "is_duplicate", _DIGITS,
                   ("question1", "question2"), id="id", may_be_broken=True),
    "mnli": Layout("MNLI", _PAIR, "gold_label", TASKS["mnli"].classes,
                   ("premise", "hypothesis")),
    "qnli": Layout("QNLI", ("question", "sentence"), "label", _ENTAILMENT,
                   ("question", "sentence")),
    "rte": Layout("RTE", _PAIR, "label", _ENTAILMENT, _PAIR),
}  # fmt: skip
"""By task."""


def task_named(name: str) -> Task:
    """The task of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in TASKS:
        raise UserError(f"GLUE has no task '{name}' here; {nearest(name, TASKS)}")
    return TASKS[name]
