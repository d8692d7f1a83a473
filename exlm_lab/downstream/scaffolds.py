"""Which molecules train, validate and test: the scaffold splits of the field, and a random one.

A scaffold is what remains of a molecule when its side chains are cut off: its rings and what
links them (Bemis and Murcko); molecules without rings share the empty one. A scaffold split keeps
molecules of one scaffold on one side, so that the test asks for frames never seen in training.
The rule has two variants in the field, which agree on the sizes of the splits and differ widely in
what they hold:

============  ===================================================================================
``unimol``    stereo marks count as part of a scaffold: the rule of GEM, to which Uni-Mol's author
              refers and whose split the paper uses (§5.1). Uni-Mol's code holds no splitter, so
              that its files follow this variant is inferred, see ``moleculenet`` for the files
``deepchem``  stereo marks do not count
``random``    no scaffolds: rows in a seeded order
============  ===================================================================================

Every split has a hash of its row numbers, so that two results can be told to be of one split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from exlm_mini.data.smiles import read_molecule, require_rdkit

RULES = ("unimol", "deepchem", "random")
PARTS = ("train", "validation", "test")


class Split(NamedTuple):
    """Row numbers, counted from 0, in the order in which the rule gives them."""

    train: list[int]
    validation: list[int]
    test: list[int]
    rejected: list[int]
    """Rows RDKit does not read as a molecule of at least one atom; they are in no part."""
    num_scaffolds: int | None
    """Different ones among all rows; none for a random split."""

    @property
    def parts(self) -> tuple[list[int], list[int], list[int]]:
        """train, validation, test."""
        return self.train, self.validation, self.test

    def sha1(self) -> dict[str, str]:
        """The hash of each part."""
        return {name: index_sha1(part) for name, part in zip(PARTS, self.parts, strict=True)}


def split(smiles: Sequence[str], rule: str = "unimol", seed: int = 0) -> Split:
    """Divide molecules by a rule: eight tenths train, one validates, one tests.

    The scaffold rules sort the groups by (size, first row), both falling, and give each to the
    first of train and validation that it still fits into, else to test.

    Args:
        smiles: one molecule a row, as the benchmark spells it.
        rule: one of ``RULES``.
        seed: of ``random``; the others have nothing to draw.

    Raises:
        UserError: if RDKit is missing.
    """
    require_rdkit()
    accepted, rejected = [], []
    groups: dict[str, list[int]] = {}
    for row, molecule in enumerate(molecules(smiles)):
        if molecule is None:
            rejected.append(row)
            continue
        accepted.append(row)
        if rule != "random":
            groups.setdefault(scaffold(molecule, rule == "unimol"), []).append(row)
    num_rows = len(accepted)
    if rule == "random":
        random.Random(seed).shuffle(accepted)
        eight, nine = num_rows * 8 // 10, num_rows * 9 // 10
        parts = accepted[:eight], accepted[eight:nine], accepted[nine:]
        return Split(*parts, rejected, None)
    split = Split([], [], [], rejected, len(groups))
    for group in sorted(groups.values(), key=lambda rows: (len(rows), rows[0]), reverse=True):
        if 10 * (len(split.train) + len(group)) <= 8 * num_rows:
            split.train.extend(group)
        elif 10 * (len(split.train) + len(split.validation) + len(group)) <= 9 * num_rows:
            split.validation.extend(group)
        else:
            split.test.extend(group)
    return split


def molecules(smiles: Iterable[str]) -> Iterator[Any]:
    """RDKit's molecule of each row; none where it reads no molecule of at least one atom."""
    return map(read_molecule, smiles)


def scaffold(molecule: Any, is_chiral: bool) -> str:
    """SMILES of the rings of an RDKit molecule and their links; empty without rings."""
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return MurckoScaffoldSmiles(mol=molecule, includeChirality=is_chiral)


def index_sha1(rows: Iterable[int]) -> str:
    """sha1 over row numbers joined by commas, in the order given."""
    return hashlib.sha1(",".join(map(str, rows)).encode()).hexdigest()
