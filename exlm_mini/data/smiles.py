"""Molecules as SMILES strings, each one checked by RDKit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import DataConfig, UserError
from exlm_mini.data.text import load_documents
from exlm_mini.data.workers import MAX_SECONDS, in_child

NUM_REJECTED_SHOWN = 3
MAX_CHARACTERS = 2000
MAX_RINGS = 100


class Molecules(NamedTuple):
    """What RDKit accepts and what it does not, in the order read."""

    smiles: list[str]
    rejected: list[str]

    def describe_rejected(self) -> str:
        """How many were rejected, with the first few."""
        num_read = len(self.smiles) + len(self.rejected)
        shown = ", ".join(repr(s[:80]) for s in self.rejected[:NUM_REJECTED_SHOWN])
        more = ", ..." if len(self.rejected) > NUM_REJECTED_SHOWN else ""
        names = f": {shown}{more}" if shown else ""
        return f"RDKit rejects {len(self.rejected):,} of {num_read:,} molecules{names}"


def load_molecules(
    data: DataConfig, report: Callable[[str], None] = lambda line: None
) -> Molecules:
    """The molecules of the given files, the hub data set, or the embedded ones.

    Args:
        data: sources; ``max_documents`` counts molecules read, ``max_rejected`` is the largest
            share RDKit may reject.
        report: receives a line for every molecule that RDKit dies of, or hangs on.

    Raises:
        UserError: if a source cannot be read, RDKit is missing, or too many are rejected.
    """
    if data.files or data.hub:
        require_rdkit()
        lines: Iterable[str] = load_documents(data, default_column="smiles")
    else:
        lines = islice(embedded_molecules(), data.max_documents)
    source = ", ".join(data.files) or data.hub or "the embedded molecules"
    # Tables may hold "CCO ethanol" too; RDKit would take the name along.
    texts = [line.split(maxsplit=1)[0] for line in lines]
    parts, lost = in_child(validate, texts)
    for i in lost:
        report(describe_lost(source, i, texts[i]))
    molecules = Molecules(
        [text for part in parts for text in part.smiles],
        [texts[i] for i in lost] + [text for part in parts for text in part.rejected],
    )
    num_read = len(molecules.smiles) + len(molecules.rejected)
    if len(molecules.rejected) > data.max_rejected * num_read:
        share = len(molecules.rejected) / num_read
        raise UserError(
            f"{source}: {molecules.describe_rejected()} ({share:.2%}, data.max_rejected is "
            f"{data.max_rejected:.2%}); mend or remove them, or raise data.max_rejected"
        )
    return molecules


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
            f"this RDKit came without {path}; give molecules with data.files, or pip install "
            "'exlm-mini[chem]'"
        )
    return load_documents(
        DataConfig(kind="smiles", files=(str(path),)), default_column="smiles"
    )


def describe_lost(source: str, index: int, smiles: str) -> str:
    """What is said of a molecule that a child was lost on; ``index`` counts those of a source."""
    return (
        f"{source}: molecule {index + 1:,}, {smiles[:80]!r}, is left out: RDKit dies of it, or "
        f"takes more than {MAX_SECONDS} s"
    )


def validate(smiles: Iterable[str]) -> Molecules:
    """Sort SMILES into those RDKit can read as a molecule of at least one atom and the others."""
    accepted: list[str] = []
    rejected: list[str] = []
    for text in smiles:
        (rejected if read_molecule(text) is None else accepted).append(text)
    return Molecules(accepted, rejected)


def read_molecule(smiles: str, *options: Any) -> Any:
    """RDKit's molecule of at least one atom; none if it reads none, or would take too long.

    Its stack ends with some ten thousand nested parentheses, and its search for rings and for
    alternating bonds takes minutes where some hundred rings share atoms. Within the limits the
    worst that we found takes four seconds; the largest molecule of our data, a peptide of SIDER,
    has 1,340 characters and 46 rings. What the limits do not foresee is left to ``in_child``.

    Args:
        smiles: one molecule.
        options: ``Chem.SmilesParserParams``, if any.
    """
    from rdkit import Chem, rdBase

    if len(smiles) > MAX_CHARACTERS or not smiles.isascii():
        return None
    if len(smiles) > 2 * MAX_RINGS:  # else they cannot be more
        # Both ends of a ring are written; numbers in brackets are none of them.
        marks = re.findall(r"\[[^]]*\]|(%\(\d+\)|%\d\d|\d)", smiles)
        if sum(map(bool, marks)) > 2 * MAX_RINGS:
            return None
    with rdBase.BlockLogs():  # it explains each rejection on stderr
        molecule = Chem.MolFromSmiles(smiles, *options)
    return molecule if molecule is not None and molecule.GetNumAtoms() else None


def require_rdkit() -> None:
    """Stop with the remedy where RDKit is missing."""
    try:
        from rdkit import Chem  # noqa: F401
    except ImportError:
        raise UserError(
            "molecules need RDKit, which checks them; pip install 'exlm-mini[chem]'"
        ) from None
