"""The tables of MoleculeNet: as CSV files, from the hub, or as Uni-Mol's files, split already.

Shapes: R rows, C labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_lab.downstream.files import read_lines
from exlm_lab.downstream.scaffolds import Split, molecules
from exlm_mini.config import UserError
from exlm_mini.data.text import COMPRESSIONS, NUM_COLUMNS_SHOWN, csv_rows
from exlm_mini.data.unimol import lmdb_rows, numbers

RELEASED = "unimol-released"
SMILES_COLUMNS = ("smiles", "SMILES", "mol")
NOT_LABELS = {"mol_id", "name", "num", "CID", "Model", "pIC50"}
LABELS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "": math.nan}


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
HUB_PREFIX = "scikit-fingerprints/MoleculeNet_"


class Table(NamedTuple):
    """A set as published."""

    source: str
    smiles: list[str]
    names: tuple[str, ...]
    """The C labels."""
    labels_RC: np.ndarray
    """float64; nan is missing."""


def find_csv(name: str, data: Path) -> Path:
    """The file of a set: ``data`` itself, or the one in it that is called after the set."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise UserError(f"cannot read {data} (no such file or directory); check --data")
    stems = {f"{stem}.csv" for stem in (name, f"{name}_data")}
    wanted = stems | {stem + suffix for stem in stems for suffix in COMPRESSIONS}
    found = sorted(path for path in data.iterdir() if path.name.lower() in wanted)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{data} holds {names}; give one of them with --data")
    raise UserError(f"{data} holds no {name}.csv (also .gz, .xz); give the file with --data")


def read_csv(name: str, path: Path) -> Table:
    """A set from its CSV file.

    Raises:
        UserError: see ``moleculenet.load``.
    """
    lines = csv_rows(path, read_lines(path))
    header = next(lines, [])
    return _table(name, str(path), header, lines)


def read_hub(name: str) -> Table:
    """A set from the hub; in a table of text, as the CSV files are."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"reading {name} from the hub needs datasets; pip install 'exlm-mini[text]', or give "
            "its CSV file with --data"
        ) from None
    source = HUB_PREFIX + BENCHMARKS[name].hub
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(source, split="train")
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load the hub data set {source} ({reason}); check the network, or give the "
            "CSV file with --data"
        ) from None
    rows = (["" if v is None or v != v else str(v) for v in row.values()] for row in table)
    return _table(name, source, list(table.column_names), rows)


def _table(name: str, source: str, header: list[str], rows: Iterable[list[str]]) -> Table:
    """Cells of text as a set."""
    smiles_column = next((c for c in SMILES_COLUMNS if c in header), None)
    if smiles_column is None:
        raise UserError(
            f"{source} has no column {' or '.join(SMILES_COLUMNS)}; found: {_shown(header)}"
        )
    names = _label_columns(name, source, header, smiles_column)
    at_smiles, at_labels = header.index(smiles_column), [header.index(n) for n in names]
    smiles, labels = [], []
    for row, cells in enumerate(rows):
        smiles.append(cells[at_smiles].strip())
        try:
            labels.append([LABELS[cells[i].strip()] for i in at_labels])
        except KeyError:
            column = next(n for n, i in zip(names, at_labels, strict=True)
                          if cells[i].strip() not in LABELS)  # fmt: skip
            value = cells[header.index(column)][:40]
            raise UserError(
                f"{source} row {row} (from 0), column '{column}': {value!r} is no label; write "
                "0, 1, or nothing where it is missing"
            ) from None
    if not smiles:
        raise UserError(f"{source} has no rows below its header; give a file with molecules")
    return Table(source, smiles, names, np.array(labels, dtype=np.float64))


def _label_columns(
    name: str, source: str, header: list[str], smiles_column: str
) -> tuple[str, ...]:
    benchmark = BENCHMARKS[name]
    if benchmark.label in header:
        return (benchmark.label,)
    names = tuple(n for n in header if n != smiles_column and n not in NOT_LABELS)
    if len(names) != benchmark.num_labels or len(set(names)) < len(names):
        raise UserError(
            f"{source}: {name} has {benchmark.num_labels} label column(s), found {len(names)}: "
            f"{_shown(names)}; give the file of {name}"
        )
    return names


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(" ".join(name.split())[:40] for name in names[:NUM_COLUMNS_SHOWN])
    return (shown or "none") + (", ..." if len(names) > NUM_COLUMNS_SHOWN else "")


def read_released(name: str, data: Path) -> tuple[Table, Split]:
    """A set from Uni-Mol's split LMDB files, whose pickles are read without being run.

    Its rows are numbered through the three files. A negative target is a missing one, as it is in
    Uni-Mol's loss.

    Raises:
        UserError: see ``moleculenet.load``.
    """
    folder = data / name if (data / name).is_dir() else data
    smiles: list[str] = []
    labels: list[list[float]] = []
    parts = []
    for stem in ("train", "valid", "test"):
        start, path = len(smiles), folder / f"{stem}.lmdb"
        if not path.is_file():
            raise UserError(
                f"{path} is missing; the split {RELEASED} needs train.lmdb, valid.lmdb and "
                "test.lmdb of one set in --data"
            )
        for where, entry in lmdb_rows(path):
            if not isinstance(entry.get("smi"), str) or "target" not in entry:
                raise UserError(
                    f"{where} lacks 'smi' or 'target', found: {_shown([*map(str, entry)])}; "
                    "give the files Uni-Mol released for fine-tuning"
                )
            smiles.append(entry["smi"])
            labels.append(_targets(name, where, entry["target"]))
        parts.append(range(start, len(smiles)))
    rejected = [i for i, molecule in enumerate(molecules(smiles)) if molecule is None]
    rows = Split(*([i for i in part if i not in rejected] for part in parts), rejected, None)
    num_labels = BENCHMARKS[name].num_labels
    names = tuple(f"{name} {c}" for c in range(num_labels))  # the files do not name them
    labels_RC = np.array(labels, dtype=np.float64).reshape(-1, num_labels)
    return Table(str(folder), smiles, names, labels_RC), rows


def _targets(name: str, where: str, target: object) -> list[float]:
    try:
        values = numbers(target)
    except UserError as error:
        raise UserError(f"{where}: its target cannot be read ({error}); leave it out") from None
    values = [math.nan if value < 0 else value for value in values]
    wrong = [value for value in values if value not in (0, 1) and not math.isnan(value)]
    if wrong:
        raise UserError(f"{where}: the target {wrong[0]:g} is no label; it must be 0, 1 or < 0")
    if len(values) != BENCHMARKS[name].num_labels:
        raise UserError(
            f"{where} has {len(values)} targets, {name} has {BENCHMARKS[name].num_labels}; give "
            f"the files of {name}"
        )
    return values
