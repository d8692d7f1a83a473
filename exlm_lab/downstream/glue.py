"""Eight tasks of GLUE, from the benchmark's own files or from the hub (§5.2, Appendix M).

A directory holds a folder per task, as the benchmark publishes it: ``CoLA/train.tsv`` and
``CoLA/dev.tsv`` (``cola/`` will do, and so will ``.tsv.gz``). A quotation mark in these files is a
character like any other, and a line is one row.

Validation is the benchmark's dev set, whose results the paper prints (Table 3). The test sets,
whose labels are secret, are not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.files import find_file, read_lines
from exlm_lab.downstream.task import Examples, Splits, Task
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
    """The classes as the label column writes them."""
    hub_texts: tuple[str, ...]
    header: tuple[str, ...] | None = None
    """Columns where the files do not name them."""
    may_be_broken: bool = False
    """Whether there are lines with too few or too many fields, to be left out."""


_PAIR = ("sentence1", "sentence2")
_DIGITS = ("0", "1")
LAYOUTS = {
    "cola": Layout("CoLA", ("sentence",), "label", _DIGITS, ("sentence",),
                   header=("source", "label", "mark", "sentence")),
    "sst2": Layout("SST-2", ("sentence",), "label", _DIGITS, ("sentence",)),
    "mrpc": Layout("MRPC", ("#1 String", "#2 String"), "Quality", _DIGITS, _PAIR),
    "stsb": Layout("STS-B", _PAIR, "score", (), _PAIR),
    "qqp": Layout("QQP", ("question1", "question2"), "is_duplicate", _DIGITS,
                   ("question1", "question2"), may_be_broken=True),
    "mnli": Layout("MNLI", _PAIR, "gold_label", TASKS["mnli"].classes,
                   ("premise", "hypothesis")),
    "qnli": Layout("QNLI", ("question", "sentence"), "label", _ENTAILMENT,
                   ("question", "sentence")),
    "rte": Layout("RTE", _PAIR, "label", _ENTAILMENT, _PAIR),
}  # fmt: skip
"""By task."""

HUB_ID = "nyu-mll/glue"


def load_glue(name: str, source: str | Path = HUB_ID) -> Splits:
    """The examples of a task.

    Args:
        name: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte.
        source: the benchmark's directory, or the task's folder in it; else the hub id.

    Returns:
        train and validation; no test. MNLI's validation is the matched half, ``others`` holds
        ``validation-mismatched``. ``notes`` counts the rows left out per split.

    Raises:
        UserError: for an unknown task, a missing file or column, a label outside the range, an
            empty split; one line that names file, line and remedy.
    """
    if name not in TASKS:
        raise UserError(f"GLUE has no task '{name}' here; {nearest(name, TASKS)}")
    halves = ("-matched", "-mismatched") if name == "mnli" else ("",)
    names = ["train", *(f"validation{half}" for half in halves)]
    if str(source) == HUB_ID:
        hub = _load_hub(name)
        found = {split: _from_hub(name, split.replace("-", "_"), hub) for split in names}
    elif Path(source).is_dir():
        folder = _folder(name, Path(source))
        files = {s: s.replace("validation", "dev").replace("-", "_") + ".tsv" for s in names}
        found = {s: read_split(name, find_file(folder, file)) for s, file in files.items()}
    else:
        raise UserError(f"{source} is no directory; give GLUE's, or the hub id {HUB_ID}")
    left_out = {split: num for split, (_, num) in found.items() if num}
    train, validation, *others = (examples for examples, _ in found.values())
    notes = {"source": str(source), "left_out": left_out}
    return Splits(train, validation, None, notes, tuple(zip(names[2:], others, strict=True)))


def read_split(name: str, path: str | Path) -> tuple[Examples, int]:
    """One file of a task, and how many of its rows were left out.

    Args:
        name: the task.
        path: a .tsv, .tsv.gz or .tsv.xz file.

    Raises:
        UserError: as ``load_glue``.
    """
    layout, path, num_left_out = LAYOUTS[name], Path(path), 0
    lines = enumerate(read_lines(path), start=1)
    header = layout.header or tuple(next(lines, (0, ""))[1].split("\t"))
    _check_columns(str(path), (*layout.texts, layout.label), header)

    def rows() -> Iterator[tuple[str, tuple[str, ...], str]]:
        nonlocal num_left_out
        for number, line in lines:
            if not line.strip():
                continue
            fields = line.split("\t")
            if len(fields) == len(header):
                row = dict(zip(header, fields, strict=True))
                texts = tuple(row[column] for column in layout.texts)
                yield f"{path} line {number}", texts, row[layout.label]
            elif layout.may_be_broken:
                num_left_out += 1
            else:
                raise UserError(
                    f"{path} line {number} has {len(fields)} fields, not {len(header)} "
                    f"({', '.join(header)[:200]}); copy or download the file again"
                )

    return _examples(name, str(path), rows()), num_left_out


def _from_hub(name: str, split: str, hub: Mapping[str, Any]) -> tuple[Examples, int]:
    """A split of the hub, whose labels are numbers."""
    where = f"{HUB_ID} {name} {split}"
    if split not in hub:
        raise UserError(f"{HUB_ID} has no split {split} of {name}; it has: {', '.join(hub)}")
    columns = (*LAYOUTS[name].hub_texts, "label")
    _check_columns(where, columns, hub[split].column_names)
    *texts, labels = (hub[split][column] for column in columns)
    rows = enumerate(zip(zip(*texts, strict=True), labels, strict=True))
    return _examples(name, where, ((f"{where} row {i}", *row) for i, row in rows)), 0


def _examples(
    name: str, where: str, rows: Iterable[tuple[str, tuple[str, ...], str | float]]
) -> Examples:
    """Examples of (where it stands, texts, label as written); the ids count them."""
    task, texts, labels = TASKS[name], [], []
    largest = LARGEST_SCORE if task.kind == "number" else len(task.classes) - 1
    classes = LAYOUTS[name].written
    for place, text, value in rows:
        label = _number(value, classes)
        if not 0 <= label <= largest:  # nan is not either
            known = " or ".join(classes) if isinstance(value, str) and classes else ""
            raise UserError(
                f"{place}: the label is '{str(value)[:40]}', not "
                f"{known or f'a number from 0 to {largest:g}'}; mend it, or get the file again"
            )
        texts.append(text)
        labels.append(label)
    if not texts:
        raise UserError(f"{where} holds no examples of {name}; copy or download it again")
    kind = np.float64 if task.kind == "number" else np.int64
    return Examples(texts, np.array(labels, dtype=kind), [str(i) for i in range(len(texts))])


def _number(value: str | float, classes: tuple[str, ...]) -> float:
    """A label as a class index or a score; nan if it is neither."""
    if isinstance(value, str) and classes:
        return classes.index(value) if value in classes else np.nan
    with contextlib.suppress(ValueError):
        return float(value)
    return np.nan


def _check_columns(where: str, wanted: Iterable[str], found: Iterable[str]) -> None:
    for column in wanted:
        if column not in found:
            raise UserError(
                f"{where} has no column '{column}'; its columns are: {', '.join(found)[:300]}"
            )


def _folder(name: str, directory: Path) -> Path:
    """The folder of a task, whichever way its name is written."""
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name.lower().replace("-", "").replace("_", "") == name:
            return folder
    found = ", ".join(path.name for path in folders[1:][:20]) or "no folder"
    raise UserError(
        f"{directory} holds no folder {LAYOUTS[name].folder} (or {name}); it holds: {found}"
    )


def _load_hub(name: str) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"reading {HUB_ID} needs datasets; pip install 'exlm-mini[text]', or give GLUE's "
            "directory"
        ) from None
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(HUB_ID, name)
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load {name} of {HUB_ID} ({reason}); check the network, or give GLUE's "
            "directory"
        ) from None
