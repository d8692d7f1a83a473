"""MoleculeNet's seven classification sets, as the paper runs them (§5.1, Appendix L, Table 9).

Every set is a table: one molecule a row, one column of yes-no answers a label, empty where nothing
was measured. Files come as their publishers spell them (``bace.csv``, ``BBBP.csv``,
``toxcast_data.csv``, also ``.gz`` and ``.xz``), from the hub, or as Uni-Mol's LMDB files, which are
split already: ``unimol-released``.

A split goes by the molecules as published. They are cleaned after that, in the same way as the
molecules a model was trained on: the vocabulary of the paper has no stereo marks, MoleculeNet does.

All sets are answered by one logit a label, BACE and BBBP too, for which Uni-Mol has two logits and
a softmax: the same family of answers, with one direction of the weights more.

Shapes: R rows, C labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from exlm_lab.downstream.molecule_tables import (
    BENCHMARKS,
    RELEASED,
    Table,
    find_csv,
    read_csv,
    read_hub,
    read_released,
)
from exlm_lab.downstream.scaffolds import PARTS, RULES, Split, split
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config import UserError, nearest
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.smiles import require_rdkit

METRIC = "roc_auc"


def load(
    name: str,
    data: str | Path | None = None,
    rule: str = "unimol",
    seed: int = 0,
    cleaning: Cleaning | None = None,
    report: Callable[[int, int], object] | None = None,
) -> tuple[Task, Splits]:
    """A set of MoleculeNet, split and cleaned.

    Args:
        name: key of ``BENCHMARKS``.
        data: the file, or the directory that holds it; none: the hub.
        rule: ``unimol``, ``deepchem``, ``random``, or ``unimol-released`` for Uni-Mol's
            ``train.lmdb``, ``valid.lmdb`` and ``test.lmdb`` in the directory or in one of its
            name there.
        seed: of ``random``.
        cleaning: what is done to each molecule after the split, without variants; none: nothing.
        report: told (rows read, rows in all) now and then.

    Raises:
        UserError: for an unknown set or rule, a missing or damaged file, columns that are not
            those of the set, a label that is none of 0, 1 and empty, a label without any value,
            or an empty part.
    """
    if name not in BENCHMARKS:
        raise UserError(f"the molecule set '{name}' is not known; {nearest(name, BENCHMARKS)}")
    if rule not in (*RULES, RELEASED):
        raise UserError(f"the split '{rule}' is not known; {nearest(rule, (*RULES, RELEASED))}")
    require_rdkit()
    if rule == RELEASED:
        if data is None:
            raise UserError(
                f"the split {RELEASED} is read from files; give the directory with train.lmdb"
            )
        table, rows = read_released(name, Path(data))
    else:
        table = read_hub(name) if data is None else read_csv(name, find_csv(name, Path(data)))
        rows = split(table.smiles, rule, seed, report)
    splits = splits_of(table, rows, rule, cleaning or Cleaning())
    splits.notes["paper_sizes"] = list(BENCHMARKS[name].sizes)
    if rule == RELEASED:
        splits.notes["molecules_sha1"] = {
            part: molecules_sha1(table.smiles[i] for i in indices)
            for part, indices in zip(PARTS, rows.parts, strict=True)
        }
    return Task(name, "labels", table.names, METRIC, "smiles"), splits


def splits_of(table: Table, rows: Split, rule: str, cleaning: Cleaning) -> Splits:
    """The examples of a split table, with what a reader of the numbers must know in its notes.

    Raises:
        UserError: for a label without any value, or an empty part.
    """
    from rdkit import rdBase

    is_empty_C = np.isnan(table.labels_RC).all(axis=0)
    if is_empty_C.any():
        label = table.names[int(np.argmax(is_empty_C))]
        raise UserError(
            f"{table.source}: the label '{label}' has no value in any row; remove the column"
        )
    for part, indices in zip(PARTS, rows.parts, strict=True):
        if not indices:
            raise UserError(
                f"{table.source}: the {part} part of the split {rule} is empty "
                f"({len(table.smiles)} rows, RDKit rejects {len(rows.rejected)}); give more rows"
            )
    counts = CleaningCounts()
    parts = [_examples(table, indices, cleaning, counts) for indices in rows.parts]
    notes = {
        "source": table.source,
        "rows": len(table.smiles),
        "rejected": [{"row": row, "smiles": table.smiles[row]} for row in rows.rejected],
        "split": rule,
        "split_sha1": rows.sha1(),
        "sizes": [len(indices) for indices in rows.parts],
        "scaffolds": rows.num_scaffolds,
        "rdkit": rdBase.rdkitVersion,
        "stereo": "strip" if cleaning.strip_stereo else "keep",
        "canonical": cleaning.canonical,
        "stereo_removed": counts.stereo_removed,
        "fragments_removed": counts.fragments_removed,
        "labels": {
            part: label_counts(examples.labels)
            for part, examples in zip(PARTS, parts, strict=True)
        },
    }
    return Splits(*parts, notes)


def label_counts(labels_RC: np.ndarray) -> dict[str, int]:
    """How many answers there are, how many are yes, and how many labels have both."""
    has_yes_C, has_no_C = (labels_RC == 1).any(axis=0), (labels_RC == 0).any(axis=0)
    return {
        "labelled": int((~np.isnan(labels_RC)).sum()),
        "positive": int((labels_RC == 1).sum()),
        "labels_with_both_classes": int((has_yes_C & has_no_C).sum()),
    }


def _examples(
    table: Table, rows: Sequence[int], cleaning: Cleaning, counts: CleaningCounts
) -> Examples:
    smiles = [table.smiles[row] for row in rows]
    if cleaning != Cleaning():
        # The split left out what RDKit rejects, so that one molecule comes for each row.
        smiles = [m.spellings[0] for m in clean(smiles, cleaning, seed=0, counts=counts)]
    return Examples([(s,) for s in smiles], table.labels_RC[rows], [str(row) for row in rows])


def molecules_sha1(smiles: Iterable[str]) -> str:
    """sha1 over canonical SMILES, sorted, one a line: the same for two files of one part.

    Row numbers mean nothing in files that were split before; a molecule has one canonical
    spelling in one version of RDKit.
    """
    from rdkit import Chem

    lines = sorted(Chem.CanonSmiles(text) for text in smiles)
    return hashlib.sha1("\n".join(lines).encode()).hexdigest()
