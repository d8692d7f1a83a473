"""Which molecules of a benchmark pre-training has seen.

Such a molecule is no secret to the model, though its labels are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.smiles import require_rdkit
from exlm_mini.data.text import file_documents

KEY = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)
"""Two spellings of one molecule, one of them as a salt, count as the same."""


class Overlap(NamedTuple):
    """Molecules of a benchmark that a corpus holds."""

    rows: list[int]
    """Which ones, counted from 0, in order."""
    num_read: int
    """Molecules of the corpus."""


def overlap_with(
    smiles: Sequence[str], files: Sequence[str], is_clean: bool = False
) -> Overlap:
    """Which molecules of a benchmark occur in a pre-training corpus, stereo chemistry aside.

    The corpus is streamed: memory goes with the benchmark alone.

    Args:
        smiles: the benchmark; what RDKit does not read is in no corpus.
        files: of the corpus, one molecule a line or a table with a column ``smiles``.
        is_clean: the corpus holds canonical single fragments without stereo marks, written by
            this version of RDKit, and is compared letter by letter; else each of its molecules
            is cleaned first, some thousand a second.

    Raises:
        UserError: if a file cannot be read, or RDKit is missing.
    """
    require_rdkit()
    rows_of_key: dict[str, list[int]] = {}
    for row, text in enumerate(smiles):
        for key in _keys([text]):
            rows_of_key.setdefault(key, []).append(row)
    corpus = chain.from_iterable(file_documents(Path(name), "smiles") for name in files)
    found, num_read = set(), 0
    for text in corpus:
        num_read += 1
        for key in [text] if is_clean else _keys([text]):
            found.update(rows_of_key.get(key, ()))
    return Overlap(sorted(found), num_read)


def _keys(smiles: Iterable[str]) -> Iterable[str]:
    """Canonical SMILES of the molecules RDKit reads."""
    return (molecule.key for molecule in clean(smiles, KEY, seed=0, counts=CleaningCounts()))
