"""All tasks by name, and how to load them."""

from __future__ import annotations

from pathlib import Path

from exlm_lab.downstream import glue, inference, moleculenet, patterns, squad
from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.tokenizer import Tokenizer

MOLECULES = (*moleculenet.BENCHMARKS, patterns.NAME)
EMBEDDED_OF = {"smiles": patterns.NAME, "toy": inference.NAME}
"""By kind of data, the task that needs no file."""


def task_names() -> list[str]:
    """All tasks, by their names on the command line."""
    return [*glue.TASKS, squad.TASK.name, *MOLECULES, inference.NAME]


def input_of(name: str) -> str:
    """The kind of data of a task: text, smiles or toy."""
    if name not in task_names():
        raise UserError(f"unknown task '{name}'; {nearest(name, task_names())}")
    if name == inference.NAME:
        return "toy"
    return "smiles" if name in MOLECULES else "text"


def load_task(
    name: str, data: Path | None, reading: ReadingConfig, tokenizer: Tokenizer
) -> tuple[Task, Splits]:
    """A task of ``task_names`` and its examples, except for SQuAD, which has no ``Examples``."""
    if data is not None and name in EMBEDDED_OF.values():
        raise UserError(f"{name} is embedded in the package and reads no --data; drop it")
    if name == inference.NAME:
        return inference.load()
    read = patterns.read if name == patterns.NAME else moleculenet.read
    if name in glue.TASKS:
        read = glue.read
    return load_table(*read(name, data), reading, reading.cleaning(tokenizer))
