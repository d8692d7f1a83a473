"""What pre-training has seen of a benchmark: its symbols, and its very molecules.

A symbol outside the vocabulary reaches the model as [UNK]; stereo marks are the usual case. A
molecule that was in the pre-training corpus is no secret to the model, though its labels are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..config import DataConfig
from ..corpora.cleaning import Cleaning, CleaningCounts, clean
from ..corpora.smiles import require_rdkit
from ..corpora.text import load_documents
from ..tokenization import Tokenizer

CHOICES = {
    "as it is": Cleaning(),
    "no stereo": Cleaning(strip_stereo=True),
    "no stereo, canonical": Cleaning(strip_stereo=True, canonical=True),
    "no stereo, canonical, largest fragment": Cleaning(
        largest_fragment=True, strip_stereo=True, canonical=True
    ),
}
KEY = CHOICES["no stereo, canonical, largest fragment"]
"""Two spellings of one molecule, one of them as a salt, count as the same."""


class UnknownShares(NamedTuple):
    """How much of a benchmark a vocabulary does not hold."""

    tokens: float
    """Share of all tokens that become [UNK]."""
    molecules: float
    """Share of molecules with such a token."""


def unknown_shares(smiles: Sequence[str], tokenizer: Tokenizer) -> dict[str, UnknownShares]:
    """The share of [UNK] under each way to clean the molecules.

    Args:
        smiles: molecules RDKit reads, as the benchmark spells them.
        tokenizer: of the pre-trained model.

    Returns:
        One entry for each key of ``CHOICES``.
    """
    require_rdkit()
    out = {}
    for choice, cleaning in CHOICES.items():
        cleaned = clean(smiles, cleaning, seed=0, counts=CleaningCounts())
        rows = tokenizer.encode_batch([molecule.spellings[0] for molecule in cleaned])
        unknown = [row.count(tokenizer.special_ids.unk) for row in rows]
        out[choice] = UnknownShares(
            sum(unknown) / sum(map(len, rows)), sum(map(bool, unknown)) / len(rows)
        )
    return out


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
    corpus = load_documents(
        DataConfig(kind="smiles", files=tuple(files)), default_column="smiles"
    )
    found, num_read = set(), 0
    for text in corpus:
        num_read += 1
        for key in [text] if is_clean else _keys([text]):
            found.update(rows_of_key.get(key, ()))
    return Overlap(sorted(found), num_read)


def _keys(smiles: Iterable[str]) -> Iterable[str]:
    """Canonical SMILES of the molecules RDKit reads."""
    return (molecule.key for molecule in clean(smiles, KEY, seed=0, counts=CleaningCounts()))
