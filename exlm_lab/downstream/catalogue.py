"""All tasks by name, and how to load them."""

from __future__ import annotations

from pathlib import Path

from exlm_lab.downstream import glue, inference, moleculenet, patterns, sections, squad
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.tokenizer import Tokenizer

MOLECULES = (*moleculenet.BENCHMARKS, patterns.NAME)
EMBEDDED = {inference.NAME: inference.load, sections.NAME: sections.load}
EMBEDDED_OF = {"smiles": patterns.NAME, "text": sections.NAME, "toy": inference.NAME}
"""By kind of data, the task that needs no file."""


def task_names() -> list[str]:
    """All tasks, by their names on the command line."""
    return [*glue.TASKS, squad.TASK.name, *MOLECULES, *EMBEDDED]


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
    if name in glue.TASKS:
        return glue.load_glue(name, data)
    if name in moleculenet.BENCHMARKS:
        return moleculenet.load(name, data, reading, reading.cleaning(tokenizer))
    if data is not None:
        raise UserError(f"{name} is embedded in the package and reads no --data; drop it")
    if name in EMBEDDED:
        return EMBEDDED[name]()
    return patterns.load(reading, reading.cleaning(tokenizer))
