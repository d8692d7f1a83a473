"""All tasks by name, and how to load them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from exlm_lab.downstream import glue, inference, moleculenet, patterns, sections, squad
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.config.checks import Seed, UserError, nearest, settings
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.tokenizer import Tokenizer

MOLECULES = (*moleculenet.BENCHMARKS, patterns.NAME)
EMBEDDED = {inference.NAME: inference.load, sections.NAME: sections.load}
EMBEDDED_OF = {"smiles": patterns.NAME, "text": sections.NAME, "toy": inference.NAME}
"""By kind of data, the task that needs no file."""
STEREO_ATOMS = ("[C@H]", "[C@@H]")


@settings("data.")
class ReadingConfig:
    """How molecules are split and spelled; ignored for text."""

    split: Literal["unimol", "deepchem", "random"] = "unimol"
    """How molecules are divided."""
    split_seed: Seed = 0
    """Of the random split."""
    canonical: bool = False
    """Write RDKit's canonical SMILES."""

    def cleaning(self, tokenizer: Tokenizer) -> Cleaning:
        """The cleaning of each molecule; removes stereo marks if the vocabulary has none."""
        is_stripped = all(tokenizer.unknown_pieces(atom) for atom in STEREO_ATOMS)
        return Cleaning(strip_stereo=is_stripped, canonical=self.canonical)


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
        return glue.TASKS[name], glue.load_glue(name, data)
    if name in moleculenet.BENCHMARKS:
        how = reading.split, reading.split_seed, reading.cleaning(tokenizer)
        return moleculenet.load(name, data, *how)
    if data is not None:
        raise UserError(f"{name} is embedded in the package and reads no --data; drop it")
    if name in EMBEDDED:
        return EMBEDDED[name]()
    return patterns.load(reading.split, reading.split_seed, reading.cleaning(tokenizer))
