"""A downstream task: examples in three splits, a kind of answer, a metric.

Examples come from a table, see ``tables``; from a benchmark's published files, or from the hub.

Shapes: R examples, C classes, labels or numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import COMPRESSIONS

Kind = Literal["classes", "numbers", "labels", "mixed", "span"]
"""``classes``: one of C; ``numbers`` and ``labels``: C measured values or yes-no answers, some
missing; ``mixed``: some of both; ``span``: a piece of the text, or none."""


class Examples(NamedTuple):
    """One split."""

    texts: list[tuple[str, ...]]
    """R sentences, molecules or pairs."""
    labels: np.ndarray
    """int64 (R,) for classes, else float64 (R, C), in which nan is missing."""


class Splits(NamedTuple):
    """The examples of a task, and notes that a reader of its numbers should know."""

    train: Examples
    validation: Examples
    test: Examples | None
    notes: dict[str, Any]
    """JSON-able: hashes of the split, rows left out and why, …"""
    others: tuple[tuple[str, Examples], ...] = ()
    """Further scored parts by name: MNLI's mismatched halves."""


class Task(NamedTuple):
    """A task by name."""

    name: str
    kind: Kind | None
    """None until its table is read, whose cells say it."""
    classes: tuple[str, ...]
    """Names of the classes, or of the labels or numbers; empty for spans, or as ``kind``."""
    metric: str
    """The metric that chooses between runs: a key of the result of ``metrics.evaluate``; empty
    until its table is read, where the kind says it."""
    input: str
    """text, smiles or toy."""
    columns: tuple[str, ...] = ()
    """Of its texts, in a table: one, or a pair."""
    targets: tuple[str, ...] = ()
    """Columns of its answers, in a table."""
    numbers: tuple[str, ...] = ()
    """Of ``targets``, those that are numbers, where others are not."""

    @property
    def is_number(self) -> np.ndarray:
        """Of each of ``classes``, whether it is a number, (C,)."""
        return np.isin(self.classes, self.classes if self.kind == "numbers" else self.numbers)


def named_entry(directory: Path, *names: str) -> Path:
    """The first of these files or folders in a directory, plain or compressed; neither case nor
    dashes count."""
    with reading(directory):
        there = {bare(path.name): path for path in sorted(directory.iterdir())}
    for name in names:
        for suffix in ("", *COMPRESSIONS):
            if path := there.get(bare(name + suffix)):
                return path
    names_there = ", ".join(path.name for path in [*there.values()][:20]) or "nothing"
    raise UserError(f"{directory} holds no {' or '.join(names)}; it holds: {names_there}")


def bare(name: str) -> str:
    """A name without case and dashes."""
    return re.sub("[-_]", "", name).lower()


def load_hub(name: str, *config: str) -> Any:
    """All splits of a data set of the hub."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, *config)
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load the hub data set {name} ({reason}); check the network, or give the "
            "benchmark's files with --data"
        ) from error
