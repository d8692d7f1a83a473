"""Molecules as SMILES: an embedded data set, reading with RDKit, and cleaning.

The paper's molecules seem to be single fragments without stereo marks: the published dictionary of
SMI-Editor, by the same first author, has as many symbols as the paper's vocabulary and no stereo
marks. Raw collections are not. Every step of the cleaning is optional.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exlm_mini.data.text import file_documents, smiles_in

if TYPE_CHECKING:
    from exlm_mini.data.tokenizer import Tokenizer

MAX_CHARACTERS = 2000
MAX_RINGS = 100


def embedded_molecules() -> Iterable[str]:
    """The 5,000 compounds of the National Cancer Institute that come with RDKit."""
    from rdkit import RDConfig

    path = Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi"
    return (line.split()[0] for line in file_documents(path, "smiles"))


def read_molecule(smiles: str, *options: Any) -> Any:
    """Read a molecule with RDKit; None if that fails, finds no atom, or would take too long.

    RDKit overflows its stack at some ten thousand nested parentheses, and its search for rings and
    alternating bonds takes minutes if a hundred rings share atoms. Within our limits the worst
    case we found takes four seconds. The largest molecule in our data, a peptide in SIDER, has
    1,340 characters and 46 rings.

    Args:
        options: ``Chem.SmilesParserParams`` in place of RDKit's default, if any.
    """
    from rdkit import Chem, rdBase

    if len(smiles) > MAX_CHARACTERS or not smiles.isascii():
        return None
    # Each ring has two marks; numbers in brackets are not marks.
    marks = re.findall(r"\[[^]]*\]|(%\(\d+\)|%\d\d|\d)", smiles)
    if sum(map(bool, marks)) > 2 * MAX_RINGS:
        return None
    with rdBase.BlockLogs():  # RDKit would explain each rejection on stderr
        molecule = Chem.MolFromSmiles(smiles, *options)
    return molecule if molecule is not None and molecule.GetNumAtoms() else None


def require_rdkit() -> None:
    """Fail early if RDKit is missing."""
    from rdkit import Chem  # noqa: F401


# ---- cleaning ----


@dataclass(frozen=True)
class Cleaning:
    """Changes made to every molecule, in this order."""

    largest_fragment: bool = False
    """Keep the fragment with the most heavy atoms (then weight); removes salts and solvents."""
    strip_stereo: bool = False
    """Remove the stereo marks @, @@, / and the backslash."""
    canonical: bool = False
    """Write RDKit's canonical SMILES; otherwise an unchanged molecule keeps its spelling."""

    @classmethod
    def needed_by(cls, tokenizer: Tokenizer) -> Cleaning:
        """What a tokenizer needs: stereo marks are removed if its vocabulary has none of them."""
        marks = ("[C@H]", "[C@@H]", "/", "\\")
        return cls(strip_stereo=all(tokenizer.unknown_pieces(mark) for mark in marks))


class Molecule(NamedTuple):
    """A cleaned molecule."""

    key: str
    """Decides the side of the split: the canonical SMILES, which all spellings share, or, without
    cleaning, the SMILES as read."""
    spelling: str


def clean(entry: str, cleaning: Cleaning) -> Molecule | None:
    """Clean one molecule; None if RDKit reads no atom in it, or it is too large. ``entry`` is its
    SMILES, perhaps followed by a name (see ``smiles_in``)."""
    from rdkit import Chem

    text = smiles_in(entry)
    molecule = None if text is None else read_molecule(text)
    if text is None or molecule is None:
        return None
    if cleaning == Cleaning():
        return Molecule(text, text)
    is_changed = False
    if cleaning.largest_fragment and "." in text:
        fragments = Chem.GetMolFrags(molecule, asMols=True)
        if len(fragments) > 1:
            molecule, is_changed = max(fragments, key=_size), True
    if cleaning.strip_stereo and any(mark in text for mark in "@/\\"):
        Chem.RemoveStereochemistry(molecule)
        molecule = Chem.RemoveHs(molecule)  # those that a mark had kept, as in [H]/N=C(/N)C
        is_changed = True
    key = Chem.MolToSmiles(molecule)
    return Molecule(key, key if is_changed or cleaning.canonical else text)


def _size(fragment: Any) -> tuple[int, float, str]:
    """Sort key of fragments: heavy atoms, then weight; the SMILES breaks ties. The last bits of a
    weight depend on the order of the atoms."""
    from rdkit import Chem
    from rdkit.Chem.Descriptors import MolWt  # type: ignore[attr-defined]  # created on import

    weight = round(MolWt(fragment), 3)
    return fragment.GetNumHeavyAtoms(), weight, Chem.MolToSmiles(fragment)
