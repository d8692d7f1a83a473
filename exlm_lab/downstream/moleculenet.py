"""MoleculeNet's seven classification sets, as the paper runs them (§5.1, Appendix L, Table 9).

Every set is a table: one row per molecule, one column of yes-no answers per label, empty where
nothing was measured. Files are named as published (``bace.csv``, ``BBBP.csv``,
``toxcast_data.csv``, also ``.gz`` and ``.xz``), or come from the hub.

Molecules are split as published, and then cleaned like those the model was trained on: the paper's
vocabulary has no stereo marks, MoleculeNet has.

Every label has one logit, also for BACE and BBBP, where Uni-Mol has two and a softmax: the same
family of answers, with one redundant direction of the weights.

Shapes: R rows, C labels.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.scaffolds import PARTS, Split, split
from exlm_lab.downstream.task import Examples, Splits, Task, find_column, find_file, load_hub
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Change, Cleaning, clean
from exlm_mini.data.files import reading
from exlm_mini.data.text import document, open_decompressed

METRIC = "roc_auc"
SMILES_COLUMNS = ("smiles", "mol")
NOT_LABELS = {"mol_id", "name", "num", "cid", "model", "pic50"}
"""In lower case."""
HUB_PREFIX = "scikit-fingerprints/MoleculeNet_"

AS_IT_IS = Cleaning()


class Benchmark(NamedTuple):
    """Facts about a set."""

    hub: str
    num_labels: int
    sizes: tuple[int, int, int]
    """Table 9 of the paper: train, validation, test."""
    label: str | None = None
    """The label's column if the file has other columns, such as descriptors."""


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
    """A set of MoleculeNet, split and cleaned."""
    table = read_hub(name) if data is None else read_csv(name, data)
    splits = splits_of(table, split(table.smiles, rule, seed), rule, cleaning)
    splits.notes["paper_sizes"] = list(BENCHMARKS[name].sizes)
    return Task(name, "labels", table.names, METRIC, "smiles"), splits


def splits_of(table: Table, rows: Split, rule: str, cleaning: Cleaning) -> Splits:
    """The examples of a split table, with notes for the reader of its numbers."""
    from rdkit import rdBase

    num_stereo, parts = 0, []
    for part, indices in zip(PARTS, rows.parts, strict=True):
        if not indices:
            raise UserError(
                f"{table.source}: the {part} part of the split {rule} is empty "
                f"({len(table.smiles)} rows, RDKit rejects {len(rows.rejected)}); give more rows"
            )
        smiles = [table.smiles[row] for row in indices]
        if cleaning != AS_IT_IS:
            # The split excludes what RDKit rejects, so there is one molecule per row.
            molecules = [m for text in smiles if (m := clean(text, cleaning)) is not None]
            smiles = [molecule.spelling for molecule in molecules]
            num_stereo += sum(Change.STEREO_REMOVED in one.changes for one in molecules)
        texts: list[tuple[str, ...]] = [(s,) for s in smiles]
        parts.append(Examples(texts, table.labels_RC[indices]))
    notes = {
        "source": table.source,
        "rows": len(table.smiles),
        "rejected": [{"row": row, "smiles": table.smiles[row]} for row in rows.rejected],
        "split": rule,
        "split_sha1": rows.sha1(),
        "sizes": [len(indices) for indices in rows.parts],
        "scaffolds": rows.num_scaffolds,
        "rdkit": rdBase.rdkitVersion,
        "canonical": cleaning.canonical,
        "stereo_removed": num_stereo,
    }
    return Splits(parts[0], parts[1], parts[2], notes)


# ---- files ----


def read_csv(name: str, data: Path) -> Table:
    """A set from its CSV file, or from a directory with a file named after the set."""
    import pandas

    path = data if data.is_file() else find_file(data, f"{name}.csv", f"{name}_data.csv")
    with (
        reading(path, errors=csv.Error),
        open_decompressed(path) as stream,
        io.TextIOWrapper(stream, "utf-8-sig", newline="") as lines,
    ):
        header, *rows = filter(None, csv.reader(lines, strict=True))
    # pandas' own reader would accept a truncated row as one with missing answers.
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise UserError(
                f"{path} row {number} has {len(row)} fields, the header {len(header)}; mend it"
            )
    return _table(name, str(path), pandas.DataFrame(rows, None, header, object))


def read_hub(name: str) -> Table:
    """A set from the hub."""
    source = HUB_PREFIX + BENCHMARKS[name].hub
    hub = load_hub(source)
    with reading(source):
        table = hub["train"].to_pandas()
    return _table(name, source, table)


def _table(name: str, source: str, cells: Any) -> Table:
    """A set from a data frame; labels are 0, 1, or empty."""
    import pandas

    benchmark, header = BENCHMARKS[name], [str(column) for column in cells]
    column = find_column(source, header, *SMILES_COLUMNS)
    labels = [
        own
        for place, own in enumerate(header)
        if place != column and own.strip().casefold() not in NOT_LABELS
    ]
    if (benchmark.label or "").casefold() in (own.strip().casefold() for own in labels):
        labels = [str(benchmark.label)]
    places = [find_column(source, header, label) for label in labels]
    if len(places) != benchmark.num_labels or cells.empty:
        raise UserError(
            f"{source}: {name} has {benchmark.num_labels} label column(s), found {len(places)}, "
            f"and {len(cells)} rows: {', '.join(labels)[:300]}; give the file of {name}"
        )
    answers_RC = cells.iloc[:, places].to_numpy(object)
    # A set has millions of cells, and few different ones; None and nan have the index -1.
    indices, different = pandas.factorize(answers_RC.ravel())
    labels_RC = np.array([*map(_label, different), np.nan])[indices].reshape(answers_RC.shape)
    is_wrong_RC = ~np.isnan(labels_RC) & ~np.isin(labels_RC, (0, 1))
    if is_wrong_RC.any():
        row, c = np.argwhere(is_wrong_RC)[0]
        raise UserError(
            f"{source} row {row} (from 0), '{labels[c]}': '{answers_RC[row, c]}' is no label; "
            "write 0, 1, or nothing where it is missing"
        )
    smiles = [
        "" if pandas.isna(cell) else document(cell, "smiles", f"{source} row {row} (from 0)")
        for row, cell in enumerate(cells.iloc[:, column])
    ]
    return Table(source, smiles, tuple(labels), labels_RC)


def _label(answer: Any) -> float:
    """0, 1, nan where it is missing, and another number for all that is no label."""
    text = answer.strip() if isinstance(answer, str) else answer
    try:
        return np.nan if text == "" else float(text)
    except (TypeError, ValueError):
        return np.inf
