"""Splits of molecules: the two scaffold splits in common use, and a random split.

The scaffold of a molecule is what remains without its side chains: its rings and what links them
(Bemis and Murcko); molecules without rings share the empty scaffold. A scaffold split keeps
molecules of one scaffold together, so the test set has scaffolds that training has not seen. The
two variants give splits of the same sizes but of widely different content:

============  ===================================================================================
``scaffold``  stereo marks are part of a scaffold, as in GEM, to which Uni-Mol's author refers;
              the paper uses Uni-Mol's split (§5.1). Uni-Mol's code has no splitter, so we only
              infer that its files follow this variant. Records may call it ``unimol``
``deepchem``  stereo marks are ignored
``random``    no scaffolds: rows in a seeded order
============  ===================================================================================

Each part is recorded with a hash of its row numbers, which shows whether two results are of the
same split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from exlm_mini.data.molecules import read_molecule

RULES = ("scaffold", "deepchem", "random")
PARTS = ("train", "validation", "test")


class Split(NamedTuple):
    """Row numbers, counted from 0, in the order of the rule."""

    train: list[int]
    validation: list[int]
    test: list[int]
    rejected: list[int]
    """Rows that RDKit cannot read as a molecule with at least one atom; in no part."""
    num_scaffolds: int
    """Number of different scaffolds."""

    @property
    def parts(self) -> tuple[list[int], list[int], list[int]]:
        """train, validation, test."""
        return self.train, self.validation, self.test


def split(smiles: Iterable[str], rule: str = "scaffold") -> Split:
    """Split molecules by their scaffolds: 80% for training, 10% for validation, 10% for testing.

    Both rules sort the groups of one scaffold by (size, first row), both descending. Each group
    goes to train if it still fits there, else to validation if it fits, else to test.
    """
    rejected = []
    groups: dict[str, list[int]] = {}
    for row, molecule in enumerate(map(read_molecule, smiles)):
        if molecule is None:
            rejected.append(row)
        else:
            groups.setdefault(scaffold(molecule, rule == "scaffold"), []).append(row)
    num_rows = sum(map(len, groups.values()))
    split = Split([], [], [], rejected, len(groups))
    for group in sorted(groups.values(), key=lambda rows: (len(rows), rows[0]), reverse=True):
        if 10 * (len(split.train) + len(group)) <= 8 * num_rows:
            split.train.extend(group)
        elif 10 * (len(split.train) + len(split.validation) + len(group)) <= 9 * num_rows:
            split.validation.extend(group)
        else:
            split.test.extend(group)
    return split


def random_parts(rows: Iterable[int], seed: int) -> tuple[list[int], list[int], list[int]]:
    """Rows in a seeded order, cut into 80%, 10% and 10%."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    eight, nine = len(order) * 8 // 10, len(order) * 9 // 10
    return order[:eight], order[eight:nine], order[nine:]


def scaffold(molecule: Any, is_chiral: bool) -> str:
    """SMILES of the rings of an RDKit molecule and their links; empty without rings."""
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return MurckoScaffoldSmiles(mol=molecule, includeChirality=is_chiral)


def index_sha1(rows: Iterable[int]) -> str:
    """sha1 over row numbers joined by commas, in the order given."""
    return hashlib.sha1(",".join(map(str, rows)).encode()).hexdigest()
