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
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.files import find_file, load_hub
from exlm_lab.downstream.scaffolds import PARTS, Split, molecules, split
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.files import reading
from exlm_mini.data.smiles import require_rdkit
from exlm_mini.data.text import csv_rows, open_decompressed
from exlm_mini.data.unimol import lmdb_rows, numbers

METRIC = "roc_auc"
RELEASED = "unimol-released"
SMILES_COLUMNS = ("smiles", "SMILES", "mol")
NOT_LABELS = {"mol_id", "name", "num", "CID", "Model", "pIC50"}
HUB_PREFIX = "scikit-fingerprints/MoleculeNet_"


AS_IT_IS = Cleaning()


class Benchmark(NamedTuple):
    """What is known of a set without its file."""

    hub: str
    num_labels: int
    sizes: tuple[int, int, int]
    """Table 9 of the paper: train, validation, test."""
    label: str | None = None
    """The column to take where a file has others too, such as descriptors."""


BENCHMARKS = {
    "bace": Benchmark("BACE", 1, (1210, 151, 151), "Class"),
    "bbbp": Benchmark("BBBP", 1, (1631, 204, 204), "p_np"),
    "clintox": Benchmark("ClinTox", 2, (1182, 148, 148)),
    "tox21": Benchmark("Tox21", 12, (6264, 783, 783)),
    "toxcast": Benchmark("ToxCast", 617, (6860, 858, 858)),
    "sider": Benchmark("SIDER", 27, (1141, 143, 143)),
    "muv": Benchmark("MUV", 17, (74469, 9309, 9309)),
}


class Table(NamedTuple):
    """A set as published."""

    source: str
    smiles: list[str]
    names: tuple[str, ...]
    """The C labels."""
    labels_RC: np.ndarray
    """float64; nan is missing."""


def load(
    name: str,
    data: Path | None = None,
    rule: str = "unimol",
    seed: int = 0,
    cleaning: Cleaning = AS_IT_IS,
) -> tuple[Task, Splits]:
    """A set of MoleculeNet, split and cleaned.

    Args:
        name: key of ``BENCHMARKS``.
        data: the file, or the directory that holds it; none: the hub.
        rule: one of ``scaffolds.RULES``, or ``unimol-released`` for Uni-Mol's ``train.lmdb``,
            ``valid.lmdb`` and ``test.lmdb`` in the directory or in one of its name there.
        seed: of ``random``.
        cleaning: what is done to each molecule after the split, without variants.

    Raises:
        UserError: for a missing or damaged file, columns that are not those of the set, a label
            that is none of 0, 1 and empty, a label without any value, or an empty part.
    """
    require_rdkit()
    more: dict[str, Any] = {"paper_sizes": list(BENCHMARKS[name].sizes)}
    if rule == RELEASED:
        if data is None:
            raise UserError(f"the split {RELEASED} is read from files; give them with --data")
        table, rows = read_released(name, data)
        more["molecules_sha1"] = {
            part: molecules_sha1(table.smiles[i] for i in indices)
            for part, indices in zip(PARTS, rows.parts, strict=True)
        }
    else:
        table = read_hub(name) if data is None else read_csv(name, data)
        rows = split(table.smiles, rule, seed)
    splits = splits_of(table, rows, rule, cleaning)
    splits.notes.update(more)
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
    counts, parts = CleaningCounts(), []
    for part, indices in zip(PARTS, rows.parts, strict=True):
        if not indices:
            raise UserError(
                f"{table.source}: the {part} part of the split {rule} is empty "
                f"({len(table.smiles)} rows, RDKit rejects {len(rows.rejected)}); give more rows"
            )
        smiles = [table.smiles[row] for row in indices]
        if cleaning != AS_IT_IS:
            # The split left out what RDKit rejects, so that one molecule comes for each row.
            smiles = [m.spellings[0] for m in clean(smiles, cleaning, seed=0, counts=counts)]
        texts: list[tuple[str, ...]] = [(s,) for s in smiles]
        ids = [str(row) for row in indices]
        parts.append(Examples(texts, table.labels_RC[indices], ids))
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
    return Splits(parts[0], parts[1], parts[2], notes)


def label_counts(labels_RC: np.ndarray) -> dict[str, int]:
    """How many answers there are, how many are yes, and how many labels have both."""
    has_yes_C, has_no_C = (labels_RC == 1).any(axis=0), (labels_RC == 0).any(axis=0)
    return {
        "labelled": int((~np.isnan(labels_RC)).sum()),
        "positive": int((labels_RC == 1).sum()),
        "labels_with_both_classes": int((has_yes_C & has_no_C).sum()),
    }


def molecules_sha1(smiles: Iterable[str]) -> str:
    """sha1 over canonical SMILES, sorted, one a line: the same for two files of one part.

    Row numbers mean nothing in files that were split before; a molecule has one canonical
    spelling in one version of RDKit.
    """
    from rdkit import Chem

    lines = sorted(Chem.CanonSmiles(text) for text in smiles)
    return hashlib.sha1("\n".join(lines).encode()).hexdigest()


# ---- files ----


def read_csv(name: str, data: Path) -> Table:
    """A set from its CSV file, or from the directory that holds one called after the set.

    Raises:
        UserError: see ``load``.
    """
    import pandas

    path = data if data.is_file() else find_file(data, f"{name}.csv", f"{name}_data.csv")
    with reading(path), open_decompressed(path) as stream:
        # pandas' own reader takes a row that was cut off for one of missing answers.
        header, *rows = csv_rows(path, io.TextIOWrapper(stream, "utf-8-sig", newline=""))
        return _table(name, str(path), pandas.DataFrame(rows, None, header, object))


def read_hub(name: str) -> Table:
    """A set from the hub."""
    source = HUB_PREFIX + BENCHMARKS[name].hub
    hub = load_hub(source)
    with reading(source):
        return _table(name, source, hub["train"].to_pandas())


def _table(name: str, source: str, cells: Any) -> Table:
    """A table of pandas as a set; a label is a number, or empty."""
    smiles = next((column for column in SMILES_COLUMNS if column in cells), "smiles")
    names = [label for label in cells if label != smiles and label not in NOT_LABELS]
    if BENCHMARKS[name].label in names:
        names = [BENCHMARKS[name].label]
    answers_RC = cells[names].to_numpy(object)
    labels_RC = np.where(answers_RC == "", np.nan, answers_RC).astype(np.float64)
    texts = cells[smiles].fillna("").str.strip().tolist()
    return _checked(name, Table(source, texts, tuple(names), labels_RC))


def read_released(name: str, data: Path) -> tuple[Table, Split]:
    """A set from Uni-Mol's split LMDB files, whose pickles are read without being run.

    Its rows are numbered through the three files. A negative target is a missing one, as it is in
    Uni-Mol's loss.

    Raises:
        UserError: see ``load``.
    """
    folder = data / name if (data / name).is_dir() else data
    smiles: list[str] = []
    labels, parts = [], []
    for stem in ("train", "valid", "test"):
        start = len(smiles)
        for where, entry in lmdb_rows(find_file(folder, f"{stem}.lmdb")):
            with reading(where):
                smiles.append("" + entry["smi"])
                labels.append(numbers(entry["target"]))
        parts.append(range(start, len(smiles)))
    rejected = {i for i, molecule in enumerate(molecules(smiles)) if molecule is None}
    train, validation, test = ([i for i in part if i not in rejected] for part in parts)
    rows = Split(train, validation, test, sorted(rejected), None)
    names = tuple(
        f"{name} {c}" for c in range(BENCHMARKS[name].num_labels)
    )  # the files have none
    with reading(folder):
        labels_RC = np.array(labels, dtype=np.float64).reshape(len(smiles), -1)
    labels_RC[labels_RC < 0] = np.nan
    return _checked(name, Table(str(folder), smiles, names, labels_RC)), rows


def _checked(name: str, table: Table) -> Table:
    """The same, if it can be the set of that name."""
    num_labels = table.labels_RC.shape[1]
    if num_labels != BENCHMARKS[name].num_labels or not table.smiles:
        raise UserError(
            f"{table.source}: {name} has {BENCHMARKS[name].num_labels} label column(s), found "
            f"{num_labels}, and {len(table.smiles)} rows: {', '.join(table.names)[:300]}; give "
            f"the file of {name}"
        )
    is_wrong_RC = ~np.isnan(table.labels_RC) & ~np.isin(table.labels_RC, (0, 1))
    if is_wrong_RC.any():
        row, c = np.argwhere(is_wrong_RC)[0]
        raise UserError(
            f"{table.source} row {row} (from 0), '{table.names[c]}': "
            f"{table.labels_RC[row, c]:g} is no label; write 0, 1, or nothing where it is missing"
        )
    return table
