"""Eight tasks of GLUE, from the benchmark's own files or from the hub (§5.2, Appendix M).

A directory holds a folder per task, as the benchmark publishes it: ``CoLA/train.tsv``,
``CoLA/dev.tsv`` and, for answers to hand in, ``CoLA/test.tsv`` (``cola/`` will do, and so will
``.tsv.gz``). A quotation mark in these files is a character like any other, and a line is one
row.

Validation is the benchmark's dev set, whose results the paper prints (Table 3); the labels of
the test sets are secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.files import find_file, read_lines
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config import UserError, nearest
from exlm_mini.data.files import write_atomically

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

HUB_ID = "nyu-mll/glue"

_SUBMISSIONS = {name: f"{layout.folder}.tsv" for name, layout in LAYOUTS.items()} | {
    "mnli": "MNLI-m.tsv",
    "mnli-mismatched": "MNLI-mm.tsv",
}


def task_named(name: str) -> Task:
    """The task of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in TASKS:
        raise UserError(f"GLUE has no task '{name}' here; {nearest(name, TASKS)}")
    return TASKS[name]


def load_glue(name: str, source: str | Path = HUB_ID) -> Splits:
    """The examples of a task.

    Args:
        name: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte.
        source: the benchmark's directory, or the task's folder in it; else the hub id.

    Returns:
        train, validation, and test where it is there, its labels empty. MNLI's are the matched
        halves; ``others`` holds ``validation-mismatched`` and ``test-mismatched``. ``notes``
        counts the rows left out per split.

    Raises:
        UserError: for an unknown task, a missing file or column, a label outside the range, an
            empty split; one line that names file, line and remedy.
    """
    task_named(name)
    if str(source) == HUB_ID:
        read = _hub_reader(name)
    elif Path(source).is_dir():
        read = _directory_reader(name, Path(source))
    else:
        raise UserError(f"{source} is no directory; give GLUE's, or the hub id {HUB_ID}")
    halves = ("-matched", "-mismatched") if name == "mnli" else ("",)
    left_out: dict[str, int] = {}
    splits: dict[str, Examples | None] = {}
    for split in ("train", *(f"{s}{h}" for s in ("validation", "test") for h in halves)):
        splits[split], left_out[split] = read(split)
    others = tuple(
        (split, examples)
        for split, examples in splits.items()
        if split.endswith("-mismatched") and examples is not None
    )
    notes = {"source": str(source), "left_out": {s: n for s, n in left_out.items() if n}}
    chosen = (splits["train"], splits[f"validation{halves[0]}"], splits[f"test{halves[0]}"])
    return Splits(*chosen, notes, others)


def read_split(name: str, path: str | Path, is_test: bool = False) -> tuple[Examples, int]:
    """One file of a task, and how many of its rows were left out.

    Args:
        name: the task.
        path: a .tsv, .tsv.gz or .tsv.xz file.
        is_test: whether it is the test set, which has no labels.

    Returns:
        examples: ids are the benchmark's own, else rows counted from 0.
        num_left_out: broken rows; only QQP's train and dev may have any.

    Raises:
        UserError: as ``load_glue``.
    """
    task, layout, path = task_named(name), LAYOUTS[name], Path(path)
    texts, labels, ids, num_left_out = [], [], [], 0
    lines = enumerate(read_lines(path), start=1)
    header = layout.header if not is_test else None
    if header is None:
        header = tuple(next(lines, (0, ""))[1].split("\t"))
    columns = layout.texts if is_test else (*layout.texts, layout.label)
    for column in columns:
        if column not in header:
            raise UserError(
                f"{path} has no column '{column}'; its columns are: {', '.join(header)[:300]}"
            )
    for number, line in lines:
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            if layout.may_be_broken and not is_test:
                num_left_out += 1
                continue
            raise UserError(
                f"{path} line {number} has {len(fields)} fields, not {len(header)} "
                f"({', '.join(header)[:200]}); copy or download the file again"
            )
        row = dict(zip(header, fields, strict=True))
        texts.append(tuple(row[column] for column in layout.texts))
        ids.append(row.get(layout.id, str(len(ids))))
        if not is_test:
            labels.append(_label(task, layout.written, row[layout.label], path, number))
    if not texts:
        raise UserError(f"{path} holds no examples of {name}; copy or download it again")
    return Examples(texts, _as_array(task, labels), ids), num_left_out


def require_test(name: str, directory: str | Path) -> None:
    """Refuse a directory without the test set whose answers are to be handed in.

    Raises:
        UserError: naming the file.
    """
    folder = _folder(name, Path(directory))
    for half in ("_matched", "_mismatched") if name == "mnli" else ("",):
        try:
            find_file(folder, f"test{half}.tsv")
        except UserError as error:
            raise UserError(f"{error}; add it, or drop --submission") from None


def write_submission(
    name: str, predictions: np.ndarray, directory: str | Path, is_mismatched: bool = False
) -> Path:
    """Answers to a test set, as the benchmark's server takes them.

    Args:
        name: the task.
        predictions: in the order of the test set: class indices (R,), or the scores of STS-B,
            which are cut to its range.
        directory: where to; the server knows a task by the name of its file.
        is_mismatched: MNLI's second test set.

    Returns:
        The file written, such as ``directory/MNLI-mm.tsv``.

    Raises:
        UserError: if the file cannot be written or a score is not finite.
        ValueError: if a prediction is no class of the task, or the task has no second test set.
    """
    task, written = task_named(name), LAYOUTS[name].written
    if is_mismatched and name != "mnli":
        raise ValueError(f"{name} has one test set; only mnli has a mismatched one")
    predictions = np.asarray(predictions)
    if task.kind == "number":
        if not np.isfinite(predictions).all():
            raise UserError(f"{name}: a predicted score is not finite; the model diverged")
        answers = [f"{score:.3f}" for score in predictions.clip(0, LARGEST_SCORE).reshape(-1)]
    else:
        is_index = predictions.ndim == 1 and predictions.dtype.kind in "iu"
        if not is_index or not np.isin(predictions, range(len(written))).all():
            raise ValueError(f"want class indices (R,) from 0 to {len(written) - 1}")
        answers = [written[index] for index in predictions]
    rows = [f"{index}\t{answer}\n" for index, answer in enumerate(answers)]
    path = Path(directory) / _SUBMISSIONS["mnli-mismatched" if is_mismatched else name]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, ("index\tprediction\n" + "".join(rows)).encode())
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose another directory"
        ) from None
    return path


_Read = Callable[[str], tuple[Examples | None, int]]
"""Reads a split by name: its examples, none if there is no such test set, and the rows left out."""

# ---- a directory ----


def _directory_reader(name: str, directory: Path) -> _Read:
    folder = _folder(name, directory)

    def read(split: str) -> tuple[Examples | None, int]:
        file = split.replace("validation", "dev").replace("-", "_") + ".tsv"
        is_test = split.startswith("test")  # who hands nothing in needs none
        path = find_file(folder, file, is_optional=is_test)
        return read_split(name, path, is_test) if path else (None, 0)

    return read


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


def _label(task: Task, written: tuple[str, ...], value: str, path: Path, number: int) -> float:
    """A label as a class index or a score."""
    if task.kind == "number":
        try:
            score = float(value)
        except ValueError:
            score = np.nan
        if not 0 <= score <= LARGEST_SCORE:  # nan is not either
            raise UserError(
                f"{path} line {number}: the score is '{value[:40]}', not a number from 0 to "
                f"{LARGEST_SCORE:g}; mend the line"
            )
        return score
    if value not in written:
        raise UserError(
            f"{path} line {number}: the label is '{value[:40]}', not {' or '.join(written)}; "
            "mend the line"
        )
    return written.index(value)


def _as_array(task: Task, labels: list[float]) -> np.ndarray:
    return np.array(labels, dtype=np.float64 if task.kind == "number" else np.int64)


# ---- the hub ----


def _hub_reader(name: str) -> _Read:
    splits = _load_hub(name)

    def read(split: str) -> tuple[Examples | None, int]:
        key = split.replace("-", "_")
        if key not in splits and split.startswith("test"):
            return None, 0
        if key not in splits:
            found = ", ".join(splits)
            raise UserError(f"{HUB_ID} has no split {key} of {name}; it has: {found}")
        return _from_rows(name, f"{HUB_ID} {name} {key}", splits[key]), 0

    return read


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


def _from_rows(name: str, where: str, rows: Any) -> Examples:
    """A split of the hub, whose labels are numbers; -1 stands for a secret one."""
    task, layout = TASKS[name], LAYOUTS[name]
    for column in (*layout.hub_texts, "label"):
        if column not in rows.column_names:
            raise UserError(
                f"{where} has no column '{column}'; its columns are: "
                f"{', '.join(rows.column_names)[:300]}"
            )
    if not len(rows):
        raise UserError(f"{where} holds no examples")
    labels = _as_array(task, rows["label"])
    if (labels == -1).all():
        labels = _as_array(task, [])
    largest = LARGEST_SCORE if task.kind == "number" else len(task.classes) - 1
    is_bad = ~((labels >= 0) & (labels <= largest))
    if is_bad.any():
        row = int(is_bad.argmax())
        raise UserError(
            f"{where} row {row}: the label is {labels[row]:g}, not from 0 to {largest:g}"
        )
    texts = list(zip(*(rows[column] for column in layout.hub_texts), strict=True))
    has_ids = "idx" in rows.column_names
    ids = [str(i) for i in (rows["idx"] if has_ids else range(len(rows)))]
    return Examples(texts, labels, ids)
