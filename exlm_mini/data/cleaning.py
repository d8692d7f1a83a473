"""Cleaning of molecules: one fragment, no stereochemistry, one spelling.

The 19 million molecules of the paper are single fragments without stereo marks, in canonical
SMILES; raw collections are not. Every change is optional and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any, NamedTuple

from exlm_mini.data.smiles import read_molecule
from exlm_mini.data.text import smiles_in


@dataclass(frozen=True)
class Cleaning:
    """Changes to every molecule, in this order."""

    largest_fragment: bool = False
    """Keep the fragment with most heavy atoms (then weight), which removes salts and solvents."""
    strip_stereo: bool = False
    """Remove @, @@, / and the backslash."""
    canonical: bool = False
    """Write RDKit's canonical SMILES; otherwise an unchanged molecule keeps its spelling."""


class Change(IntFlag):
    """What was done to a molecule."""

    FRAGMENTS_REMOVED = 1
    STEREO_REMOVED = 2
    RESPELLED = 4
    """For any reason."""


class Molecule(NamedTuple):
    """A cleaned molecule."""

    key: str
    """Decides the split: canonical SMILES, the same for all spellings; without cleaning, the
    SMILES as read."""
    spelling: str
    changes: Change


def clean(entry: str, cleaning: Cleaning) -> Molecule | None:
    """One molecule, cleaned; None if RDKit reads no atom in it, or it is too large.

    Args:
        entry: its SMILES, perhaps with a name (see ``smiles_in``).
        cleaning: what to do.
    """
    from rdkit import Chem

    text = smiles_in(entry)
    molecule = None if text is None else read_molecule(text)
    if text is None or molecule is None:
        return None
    changes = Change(0)
    if cleaning == Cleaning():
        return Molecule(text, text, changes)
    if cleaning.largest_fragment and "." in text:
        fragments = Chem.GetMolFrags(molecule, asMols=True)
        if len(fragments) > 1:
            molecule = max(fragments, key=_size)
            changes |= Change.FRAGMENTS_REMOVED
    if cleaning.strip_stereo and any(mark in text for mark in "@/\\"):
        Chem.RemoveStereochemistry(molecule)
        changes |= Change.STEREO_REMOVED
    key = Chem.MolToSmiles(molecule)
    spelling = key if changes or cleaning.canonical else text
    return Molecule(key, spelling, changes | Change.RESPELLED * (spelling != text))


def _size(fragment: Any) -> tuple[int, float, str]:
    """Heavy atoms, then weight; the SMILES breaks ties."""
    from rdkit import Chem
    from rdkit.Chem.Descriptors import MolWt  # type: ignore[attr-defined]  # made as it is loaded

    return fragment.GetNumHeavyAtoms(), MolWt(fragment), Chem.MolToSmiles(fragment)
