"""A table of forty molecules, and functions that make tasks of it and read it."""

import pandas

from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Task

SMILES = ["C" * n + ring for n in range(1, 11) for ring in ("C1CC1", "c1ccccc1", "O", "N")]


def asked(*targets, kind=None, columns=("SMILES",), input="smiles"):
    return Task("mine", kind, (), "", input, columns, targets)


def frame_of(**columns):
    return pandas.DataFrame({"SMILES": SMILES, **columns})


def load(frame, task, split="random", **parts):
    return load_table("mine.csv", {"train": frame, **parts}, task, ReadingConfig(split=split))
