"""Molecules as SMILES strings: the embedded ones, and reading one with RDKit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.text import file_documents

MAX_CHARACTERS = 2000
MAX_RINGS = 100
_ONE_MOLECULE = re.compile(r"(?=.*[\d()=#\[])(?=.*[CNOcno])[A-Za-z\d@+\-\[\]()=#$%/\\.:*~]{3,}")


def embedded_molecules() -> Iterable[str]:
    """The 5,000 compounds of the National Cancer Institute that come with RDKit.

    Raises:
        UserError: if RDKit or its data directory is missing.
    """
    require_rdkit()
    from rdkit import RDConfig

    path = Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi"
    if not path.exists():
        raise UserError(
            f"this RDKit came without {path}; give molecules with data.source, or pip install "
            "'exlm-mini[chem]'"
        )
    return file_documents(path, "smiles")


def looks_like_smiles(texts: Iterable[str]) -> bool:
    """Whether nearly every line is one word made of a molecule's symbols, rings or brackets."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    likely = sum(bool(_ONE_MOLECULE.fullmatch(line)) for line in lines)
    return likely > 0.9 * len(lines) > 0


def read_molecule(smiles: str, *options: Any) -> Any:
    """RDKit's molecule with at least one atom; None if there is none, or it would take too long.

    RDKit overflows its stack at some ten thousand nested parentheses, and its search for rings and
    alternating bonds takes minutes if a hundred rings share atoms. Within our limits the worst
    case we found takes four seconds. The largest molecule in our data, a peptide of SIDER, has
    1,340 characters and 46 rings.

    Args:
        smiles: one molecule.
        options: ``Chem.SmilesParserParams``, if any.
    """
    from rdkit import Chem, rdBase

    if len(smiles) > MAX_CHARACTERS or not smiles.isascii():
        return None
    if len(smiles) > 2 * MAX_RINGS:  # otherwise there cannot be more
        # Each ring has two marks; numbers in brackets are not marks.
        marks = re.findall(r"\[[^]]*\]|(%\(\d+\)|%\d\d|\d)", smiles)
        if sum(map(bool, marks)) > 2 * MAX_RINGS:
            return None
    with rdBase.BlockLogs():  # it would explain each rejection on stderr
        molecule = Chem.MolFromSmiles(smiles, *options)
    return molecule if molecule is not None and molecule.GetNumAtoms() else None


def require_rdkit() -> None:
    """Fail early if RDKit is missing."""
    from rdkit import Chem  # noqa: F401
