"""How many molecules of the benchmarks stand in the rows of a prepared corpus.

``book/downstream_small.py`` records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exlm_lab.downstream.moleculenet import read_csv
from exlm_lab.downstream.scaffolds import split
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer

SAME_MOLECULE = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)
"""Two spellings of one molecule, one of them as a salt, count as the same."""


def molecules_seen(
    pack: Path, names: Sequence[str], moleculenet: Path, is_canonical: bool
) -> dict[str, dict[str, int]]:
    """How many molecules of each benchmark are among the training rows, stereo marks aside.

    Such a molecule is no secret to the model, though its labels are.

    Args:
        pack: the molecules, as ``prepare`` wrote them.
        names: of the benchmarks.
        moleculenet: directory of their CSV files.
        is_canonical: the rows are as this version of RDKit writes them, so that they are compared
            letter by letter, in seconds; else each is read and written again, in minutes.

    Returns:
        By name ``molecules`` and ``seen`` of all, ``test`` and ``seen_in_test`` of the test part
        of the scaffold split.
    """
    rows, tokenizer = Pack.open(pack / "train.json"), Tokenizer.load(pack / "tokenizer.json")
    ids_BN, lengths_B = rows.gather(range(len(rows)))
    trained = {
        tokenizer.decode(ids_N[1 : length - 1])  # no [BOS], [EOS]
        for ids_N, length in zip(ids_BN.tolist(), lengths_B.tolist(), strict=True)
    }
    if not is_canonical:
        trained = {key for text in trained for key in keys(text)}
    out = {}
    for name in names:
        smiles = read_csv(name, moleculenet).smiles
        seen = {row for row, text in enumerate(smiles) if trained.intersection(keys(text))}
        test = set(split(smiles, "unimol").parts[-1])
        out[name] = {
            "molecules": len(smiles),
            "seen": len(seen),
            "test": len(test),
            "seen_in_test": len(seen & test),
        }
    return out


def keys(smiles: str) -> list[str]:
    """The canonical spelling of a molecule; none if RDKit reads none."""
    return [m.key for m in clean([smiles], SAME_MOLECULE, seed=0, counts=CleaningCounts())]
