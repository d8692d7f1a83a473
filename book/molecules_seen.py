"""How many molecules of the benchmarks stand in the rows of a prepared corpus.

``book/downstream_small.py`` records it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from exlm_lab.downstream.moleculenet import find_csv, read_csv
from exlm_lab.downstream.overlap import overlap_with
from exlm_lab.downstream.scaffolds import split
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer


def molecules_seen(
    pack: Path, names: Sequence[str], moleculenet: Path, is_canonical: bool
) -> dict[str, dict[str, int]]:
    """How many molecules of each benchmark are among the training rows, stereo marks aside.

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
    tables = {name: read_csv(name, find_csv(name, moleculenet)) for name in names}
    rows, tokenizer = Pack.open(pack / "train.json"), Tokenizer.load(pack / "tokenizer.json")
    ids_BN, lengths_B = rows.gather(range(len(rows)))
    texts = [
        tokenizer.decode(ids_N[1 : length - 1])  # no [BOS], [EOS]
        for ids_N, length in zip(ids_BN.tolist(), lengths_B.tolist(), strict=True)
    ]
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "rows.smi"
        corpus.write_text("\n".join(texts))
        for name, table in tables.items():
            seen = set(overlap_with(table.smiles, [str(corpus)], is_canonical).rows)
            test = set(split(table.smiles, "unimol").parts[-1])
            out[name] = {
                "molecules": len(table.smiles),
                "seen": len(seen),
                "test": len(test),
                "seen_in_test": len(seen & test),
            }
    return out
