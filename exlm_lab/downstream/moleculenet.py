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
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_lab.downstream.files import read_lines
from exlm_lab.downstream.scaffolds import PARTS, RULES, Split, molecules, split
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config import UserError, nearest
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.smiles import require_rdkit
from exlm_mini.data.text import COMPRESSIONS, NUM_COLUMNS_SHOWN, csv_rows
from exlm_mini.data.unimol import lmdb_rows, numbers

METRIC = "roc_auc"
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


# ---- files ----


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
        UserError: see ``load``.
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
        UserError: see ``load``.
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
