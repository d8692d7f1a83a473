"""A downstream task: examples in three splits, a kind of answer, a metric.

Examples come from a table (see ``tables``), from a benchmark's published files, or from the hub.

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
"""Kind of answer. ``classes``: one of C; ``numbers``: C measured values; ``labels``: C yes-no
answers; ``mixed``: some of both; ``span``: a piece of the text, or none. Values and yes-no answers
may be missing."""


class Examples(NamedTuple):
    """The examples of one split."""

    texts: list[tuple[str, ...]]
    """R tuples of one text or molecule, or of a pair."""
    labels: np.ndarray
    """int64 (R,) for classes, else float64 (R, C), with nan where an answer is missing."""


class Splits(NamedTuple):
    """The examples of a task, and notes that a reader of its numbers should know."""

    train: Examples
    validation: Examples
    test: Examples | None
    notes: dict[str, Any]
    """Hashes of the split, rows left out and why, …; JSON-serialisable."""
    others: tuple[tuple[str, Examples], ...] = ()
    """Further scored parts by name: MNLI's mismatched halves."""


class Task(NamedTuple):
    """A downstream task. Its table may decide what it leaves open; see ``targets.encode``."""

    name: str
    kind: Kind | None
    """Kind of answer; None until the table's cells decide it."""
    classes: tuple[str, ...]
    """Names of the classes, labels or numbers; empty for spans, or until the table is read."""
    metric: str
    """The metric that chooses between runs, a key of what ``metrics.evaluate`` returns; empty if
    it depends on a kind that is still open."""
    input: str
    """Kind of data: text, smiles or toy."""
    columns: tuple[str, ...] = ()
    """Names of the table's columns with the texts: one, or two for pairs."""
    targets: tuple[str, ...] = ()
    """Names of the table's columns with the answers."""
    numbers: tuple[str, ...] = ()
    """Those of ``targets`` that are numbers; needed if others are not."""

    @property
    def is_number(self) -> np.ndarray:
        """Whether each of ``classes`` is a number, (C,)."""
        return np.isin(self.classes, self.classes if self.kind == "numbers" else self.numbers)


def named_entry(directory: Path, *names: str) -> Path:
    """The first of these files or folders that a directory holds, plain or compressed; case, dashes
    and underscores in names are ignored."""
    with reading(directory):
        there = {bare(path.name): path for path in sorted(directory.iterdir())}
    for name in names:
        for suffix in ("", *COMPRESSIONS):
            if path := there.get(bare(name + suffix)):
                return path
    names_there = ", ".join(path.name for path in [*there.values()][:20]) or "nothing"
    raise UserError(f"{directory} holds no {' or '.join(names)}; it holds: {names_there}")


def bare(name: str) -> str:
    """A name in lower case, without dashes and underscores."""
    return re.sub("[-_]", "", name).lower()


def load_hub(name: str, *config: str) -> Any:
    """Load all splits of a data set from the hub."""
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
