"""What a downstream task is: examples in three splits, a kind of answer, a metric.

Shapes: R examples, C classes or tasks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["classes", "number", "labels", "span"]
"""``classes``: one of C; ``number``: a score; ``labels``: C yes-no answers, some of them missing;
``span``: a piece of the text, or none."""


class Examples(NamedTuple):
    """One split."""

    texts: list[tuple[str, ...]]
    """R times one sentence or molecule, or a pair."""
    labels: np.ndarray
    """int64 (R,) for classes, float64 (R,) for a number, float64 (R, C) for labels (nan is
    missing)."""
    ids: list[str]
    """R times what the benchmark calls the example, for predictions that are handed in."""


class Splits(NamedTuple):
    """The examples of a task. Notes tell what a reader of the numbers must know."""

    train: Examples
    validation: Examples
    test: Examples | None
    notes: dict[str, Any]
    """JSON-able: hashes of the split, rows left out and why, …"""
    others: tuple[tuple[str, Examples], ...] = ()
    """What is scored beside these, by name: MNLI's mismatched halves."""


class Task(NamedTuple):
    """A task by name."""

    name: str
    kind: Kind
    classes: tuple[str, ...]
    """Names of the classes or of the labels; empty for a number and for spans."""
    metric: str
    """The one that chooses between runs: a key of what ``metrics.evaluate`` returns."""
    input: Literal["text", "smiles", "toy"]
