"""All tasks by name, and how to load them."""

from __future__ import annotations

from pathlib import Path

from exlm_lab.downstream import glue, inference, moleculenet, patterns, squad
from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.tokenizer import Tokenizer

EMBEDDED = {"smiles": patterns.NAME, "toy": inference.NAME}
"""The task that needs no file, by kind of data."""
INPUT_OF = {
    **dict.fromkeys((*glue.TASKS, squad.TASK.name), "text"),
    **dict.fromkeys((*moleculenet.BENCHMARKS, patterns.NAME), "smiles"),
    inference.NAME: "toy",
}
"""The kind of data each task reads, by the task's name on the command line."""


def check_task(name: str) -> None:
    """Refuse a name that no task has."""
    if name not in INPUT_OF:
        raise UserError(f"unknown task '{name}'; {nearest(name, INPUT_OF)}")


def load_task(
    name: str, data: Path | None, reading: ReadingConfig, tokenizer: Tokenizer
) -> tuple[Task, Splits]:
    """Load a task of ``INPUT_OF`` and its examples; not SQuAD, which has no ``Examples``."""
    if data is not None and name in EMBEDDED.values():
        raise UserError(f"{name} is embedded in the package and reads no --data; drop it")
    if name == inference.NAME:
        return inference.load()
    read = patterns.read if name == patterns.NAME else moleculenet.read
    if name in glue.TASKS:
        read = glue.read
    return load_table(*read(name, data), reading, reading.cleaning(tokenizer))
