"""MoleculeNet: reading the published files, splits and their notes, counts of the real sets."""

import json

import numpy as np
import pytest
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.moleculenet import BENCHMARKS, read
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.targets import encode
from exlm_mini.data.molecules import Cleaning

MOLECULES = [
    "CCO", "CCC", "CCN", "CCCl", "CCBr", "CCF", "CC=O", "c1ccccc1", "c1ccncc1", "C[C@H](N)O",
]  # fmt: skip
ACETATE = "CC(=O)[O-].[Na+]"
RANDOM = ReadingConfig(split="random")


def load(name, data=None, how=RANDOM, *cleaning):
    return load_table(*read(name, data), how, *cleaning)


def bace(folder, rows=None, header="smiles,Class", name="bace.csv"):
    """Write a small BACE file, in which every second molecule binds, and return its path."""
    rows = [f"{s},{i % 2}" for i, s in enumerate(MOLECULES)] if rows is None else rows
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def answers_of(name, data=None):
    """The labels of a data set, (R, C), with nan for missing ones."""
    source, parts, task = read(name, data)
    return encode([(source, 0)], parts["train"][[*task.targets]].to_numpy(object), task)[1]


def test_a_set_is_split_and_labelled(tmp_path):
    bace(tmp_path)
    task, splits = load("bace", tmp_path, ReadingConfig())
    assert task == (
        "bace", "labels", ("Class",), "roc_auc", "smiles", ("smiles",), ("Class",), (),
    )  # fmt: skip
    parts = splits.train, splits.validation, splits.test
    assert [len(part.texts) for part in parts] == splits.notes["sizes"] == [8, 1, 1]
    for part in parts:
        for (smiles,), (label,) in zip(part.texts, part.labels, strict=True):
            assert label == MOLECULES.index(smiles) % 2
        assert part.labels.dtype == np.float64
    assert splits.notes == json.loads(json.dumps(splits.notes))


@pytest.mark.parametrize(
    ("name", "header", "row", "labels"),
    [
        ("bace", "mol,CID,Class,Model,pIC50,MW", "CCO,BACE_1,1,Train,9.1,431.5", ["Class"]),
        ("bace", "name,name,class,mol", "a,b,1,CCO", ["Class"]),  # a name twice, but not needed
        ("bace", "SMILES,label", "CCO,1", ["label"]),
        ("bbbp", "num,name,p_np,smiles", '1,"Propanolol, a salt",1,CCO', ["p_np"]),
        ("clintox", "SMILES,FDA_APPROVED,CT_TOX", "CCO,1,", ["FDA_APPROVED", "CT_TOX"]),
        ("muv", ",".join([*(f"MUV-{i}" for i in range(17)), "mol_id", "smiles"]),
         "1" + "," * 17 + "CID2999678,CCO", [f"MUV-{i}" for i in range(17)]),
    ],
)  # fmt: skip
def test_labels_are_told_from_other_columns(tmp_path, name, header, row, labels):
    path = tmp_path / f"{name}.csv"
    path.write_text(f"{header}\n{row}\n\n")
    _, parts, task = read(name, path)
    assert len(parts["train"]) == 1 and list(task.targets) == labels
    told(lambda: read(name, tmp_path / "other"), tmp_path / "other")


def test_stereo_is_kept_or_stripped_as_asked_after_the_split(tmp_path):
    left, right = "C[C@H](N)C1C[C@H]1O", "C[C@H](N)C1C[C@@H]1O"
    molecules = [left, right, *(f"{'C' * n}O" for n in range(1, 18)), "OCCO", ACETATE]
    bace(tmp_path, [f"{s},{i % 2}" for i, s in enumerate(molecules)])
    _, kept = load("bace", tmp_path)
    cleaning = Cleaning(strip_stereo=True, canonical=True, largest_fragment=True)
    _, stripped = load("bace", tmp_path, RANDOM, cleaning)
    assert kept.notes["split_sha1"] == stripped.notes["split_sha1"]
    assert (kept.notes["stereo_removed"], stripped.notes["stereo_removed"]) == (0, 2)
    for before, after in zip(kept[:3], stripped[:3], strict=True):
        np.testing.assert_array_equal(before.labels, after.labels)
        for (raw,), (cleaned,) in zip(before.texts, after.texts, strict=True):
            assert raw in molecules
            assert not set("@/\\.") & set(cleaned)
            assert cleaned == Chem.CanonSmiles(cleaned)


def test_a_table_of_another_set_is_refused(tmp_path):
    told(lambda: load("bace", tmp_path), tmp_path, "holds no bace.csv")
    path = bace(tmp_path, ["CCO,1,1"], "smiles,a,b")
    told(lambda: load("bace", path), path, "has 1 label column(s)", "this file has 2", "a, b")


def test_the_hub_is_read_as_its_files_are(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name):
        assert name == "scikit-fingerprints/MoleculeNet_ClinTox"
        columns = {"SMILES": MOLECULES, "FDA_APPROVED": [0, 1] * 5,
                   "CT_TOX": [None, 1.0, 0.0, float("nan"), None] * 2}  # fmt: skip
        return {"train": datasets.Dataset.from_dict(columns)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task, splits = load("clintox")
    assert task.classes == ("FDA_APPROVED", "CT_TOX") and len(splits.train.texts) == 8
    expected_CR = [[0, 1] * 5, [np.nan, 1, 0, np.nan, np.nan] * 2]
    np.testing.assert_array_equal(answers_of("clintox").T, expected_CR)


# ---- the files of the field ----


@pytest.mark.parametrize(
    ("name", "num_rows", "labelled", "positive"),
    [
        ("bace", 1513, 1513, 691),
        ("bbbp", 2039, 2039, 1560),
        ("clintox", 1478, 2956, 1496),
        ("tox21", 7831, 77946, 5862),
        ("sider", 1427, 38529, 21868),
        pytest.param("toxcast", 8576, 1533660, 126651, marks=pytest.mark.slow),
        pytest.param("muv", 93087, 249886, 489, marks=pytest.mark.slow),
    ],
)
def test_real_tables_have_the_published_counts(data_dir, name, num_rows, labelled, positive):
    labels_RC = answers_of(name, data_dir / "moleculenet")
    assert labels_RC.shape == (num_rows, BENCHMARKS[name].num_labels)
    assert np.isfinite(labels_RC).sum() == labelled
    assert (labels_RC == 1).sum() == positive
