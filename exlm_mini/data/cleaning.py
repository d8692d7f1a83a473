"""Cleaning of molecules: one fragment, no stereochemistry, one spelling.

The 19 million molecules of the paper are single fragments without stereo marks, in canonical
SMILES; raw collections are not. Every change is optional and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exlm_mini.data.smiles import read_molecule
from exlm_mini.data.text import smiles_in

NUM_REJECTED_SHOWN = 3


@dataclass(frozen=True)
class Cleaning:
    """Changes to every molecule, in this order."""

    largest_fragment: bool = False
    """Keep the fragment with most heavy atoms (then weight), which removes salts and solvents."""
    strip_stereo: bool = False
    """Remove @, @@, / and the backslash."""
    canonical: bool = False
    """Write RDKit's canonical SMILES; otherwise an unchanged molecule keeps its spelling."""


@dataclass
class CleaningCounts:
    """What happened to the molecules."""

    read: int = 0
    rejected: int = 0
    """Dropped, because RDKit reads no atom in it, or it is too large."""
    fragments_removed: int = 0
    """Molecules that lost fragments."""
    stereo_removed: int = 0
    """Molecules that lost stereo marks."""
    respelled: int = 0
    """Molecules whose spelling changed, for any reason."""
    rejected_examples: list[str] = field(default_factory=list)
    """The first few rejected."""

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another part of the data, as ``asdict`` gives them."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)
        del self.rejected_examples[NUM_REJECTED_SHOWN:]

    def describe(self) -> str:
        """What was done, in one line, with the first rejected molecule."""
        such = (
            f" (such as {self.rejected_examples[0][:30]!r})" if self.rejected_examples else ""
        )
        done = {
            "lost fragments": self.fragments_removed,
            "lost stereo marks": self.stereo_removed,
            "respelled": self.respelled,
        }
        told = [f"RDKit rejects {self.rejected:,} of {self.read:,} molecules{such}"]
        told += [f"{number:,} {what}" for what, number in done.items() if number]
        return "; ".join(told)


class Molecule(NamedTuple):
    """A cleaned molecule."""

    key: str
    """Decides the split: canonical SMILES, the same for all spellings; without cleaning the
    SMILES as read."""
    spelling: str


def clean(
    smiles: Iterable[str], cleaning: Cleaning, counts: CleaningCounts
) -> Iterator[Molecule]:
    """Clean molecules, dropping those that RDKit rejects.

    Args:
        smiles: one molecule each, perhaps with a name (see ``smiles_in``).
        cleaning: what to do.
        counts: updated on the way.
    """
    from rdkit import Chem

    for entry in smiles:
        counts.read += 1
        text = smiles_in(entry)
        molecule = None if text is None else read_molecule(text)
        if text is None or molecule is None:
            counts.rejected += 1
            if len(counts.rejected_examples) < NUM_REJECTED_SHOWN:
                counts.rejected_examples.append(entry[:80])
            continue
        if cleaning == Cleaning():
            yield Molecule(text, text)
            continue
        is_changed = False
        if cleaning.largest_fragment and "." in text:
            fragments = Chem.GetMolFrags(molecule, asMols=True)
            if len(fragments) > 1:
                molecule = max(fragments, key=_size)
                counts.fragments_removed += 1
                is_changed = True
        if cleaning.strip_stereo and any(mark in text for mark in "@/\\"):
            Chem.RemoveStereochemistry(molecule)
            counts.stereo_removed += 1
            is_changed = True
        key = Chem.MolToSmiles(molecule)
        spelling = key if is_changed or cleaning.canonical else text
        counts.respelled += spelling != text
        yield Molecule(key, spelling)


def _size(fragment: Any) -> tuple[int, float, str]:
    """Heavy atoms, then weight; the SMILES breaks ties."""
    from rdkit import Chem
    from rdkit.Chem.Descriptors import MolWt  # type: ignore[attr-defined]  # made as it is loaded

    return fragment.GetNumHeavyAtoms(), MolWt(fragment), Chem.MolToSmiles(fragment)
