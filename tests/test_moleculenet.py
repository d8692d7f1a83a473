"""MoleculeNet: tables as published, labels checked, splits that say what they are."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_lab.downstream.moleculenet import BENCHMARKS, load, read_csv, read_hub
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.smiles import embedded_molecules

MOLECULES = [
    "CCO", "CCC", "CCN", "CCCl", "CCBr", "CCF", "CC=O", "c1ccccc1", "c1ccncc1", "C[C@H](N)O",
]  # fmt: skip
ACETATE = "CC(=O)[O-].[Na+]"


def bace(folder, rows=None, header="smiles,Class", name="bace.csv"):
    """A small BACE; every second molecule binds."""
    rows = [f"{s},{i % 2}" for i, s in enumerate(MOLECULES)] if rows is None else rows
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


# ---- what is read ----


def test_a_set_is_split_and_labelled(tmp_path):
    bace(tmp_path)
    task, splits = load("bace", tmp_path)
    assert (task.name, task.kind, task.classes, task.input) == (
        "bace", "labels", ("Class",), "smiles",
    )  # fmt: skip
    parts = splits.train, splits.validation, splits.test
    assert [len(part.texts) for part in parts] == splits.notes["sizes"] == [8, 1, 1]
    for part in parts:
        for (smiles,), (label,) in zip(part.texts, part.labels, strict=True):
            assert label == MOLECULES.index(smiles) % 2
        assert part.labels.dtype == np.float64
    assert splits.notes["paper_sizes"] == [1210, 151, 151]
    assert splits.notes == json.loads(json.dumps(splits.notes))


@pytest.mark.parametrize(
    ("name", "header", "row", "labels"),
    [
        ("bace", "mol,CID,Class,Model,pIC50,MW", "CCO,BACE_1,1,Train,9.1,431.5", ["Class"]),
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
    table = read_csv(name, path)
    assert (table.smiles, list(table.names)) == (["CCO"], labels)
    assert table.labels_RC.shape == (1, len(labels)) and table.labels_RC[0, 0] == 1
    assert np.isnan(table.labels_RC[0, 1:]).all()


@given(
    st.lists(
        st.lists(st.sampled_from(["0", "1", "0.0", "1.0", ""]), min_size=2, max_size=2),
        min_size=1,
    )
)
def test_labels_come_back_as_written(tmp_path_factory, cells):
    rows, header = [f"CCO,{a},{b}" for a, b in cells], "smiles,FDA_APPROVED,CT_TOX"
    path = bace(tmp_path_factory.mktemp("clintox"), rows, header)
    labels_RC = read_csv("clintox", path).labels_RC
    wanted_RC = np.array([[float(cell or "nan") for cell in row] for row in cells])
    np.testing.assert_array_equal(labels_RC, wanted_RC)


def test_rows_rdkit_rejects_are_listed(tmp_path):
    smiles = [*MOLECULES[:3], "C[Xx]", *MOLECULES[3:], ""]
    bace(tmp_path, [f"{s},{i % 2}" for i, s in enumerate(smiles)])
    _, splits = load("bace", tmp_path)
    assert splits.notes["rejected"] == [
        {"row": 3, "smiles": "C[Xx]"},
        {"row": 11, "smiles": ""},
    ]
    assert splits.notes["rows"] == 12 and sum(splits.notes["sizes"]) == 10
    assert ("C[Xx]",) not in splits.train.texts


@pytest.mark.parametrize(
    "cell",
    [
        "{}  ", "\t{}", "{}\u00a0", "{}\r", "{} CN{{}}", "{} a name of four", "{}\tCN", "{} |r|",
        "{} |$;;R1$|", "{} |(1.5,0,;)|", "{} |r| name", "{} C/C=C\\\\@",
    ],
)  # fmt: skip
@pytest.mark.parametrize("canonical", [False, True])
def test_what_stands_around_a_smiles_is_no_part_of_the_molecule(tmp_path, cell, canonical):
    molecules = [
        f"C[C@H](N)O.{smiles}" if i % 3 else smiles
        for i, smiles in enumerate(itertools.islice(embedded_molecules(), 60))
    ]
    cleaning = Cleaning(strip_stereo=True, canonical=canonical)

    def read(shape, rule):
        rows = [f'"{shape.format(s)}",{i % 2}' for i, s in enumerate(molecules)]
        task, splits = load("bace", bace(tmp_path, rows), rule, cleaning=cleaning)
        return task, [part.texts for part in splits[:3]], splits.notes

    for rule in ("unimol", "deepchem", "random"):
        assert read(cell, rule) == read("{}", rule)


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("bbbp", "NUM,Name,P_NP,Smiles", "1,n,{},CCO"),
        ("bbbp", " num , name , p_np , smiles ", "1,n,{},CCO"),
        ("bace", "MOL,cid,class,MODEL,PIC50,mw,MW", "CCO,1,{},Train,9.1,4,4"),
        ("bace", "name,name,class,mol", "a,b,{},CCO"),  # twice, and not of use
    ],
)
def test_a_column_is_known_in_any_case(tmp_path, name, header, row):
    path = tmp_path / f"{name}.csv"
    path.write_text(
        "\n".join([header, *(row.format(label) for label in ("1", " ", "0.0", ""))])
    )
    table = read_csv(name, path)
    assert table.smiles == ["CCO"] * 4 and table.names == (BENCHMARKS[name].label,)
    np.testing.assert_array_equal(table.labels_RC, [[1], [np.nan], [0], [np.nan]])


# ---- cleaning comes after the split ----


def test_stereo_is_kept_or_stripped_as_asked(tmp_path):
    left, right = "C[C@H](N)C1C[C@H]1O", "C[C@H](N)C1C[C@@H]1O"
    molecules = [left, right, *(f"{'C' * n}O" for n in range(1, 18)), "OCCO", ACETATE]
    bace(tmp_path, [f"{s},{i % 2}" for i, s in enumerate(molecules)])
    _, kept = load("bace", tmp_path, "random")
    cleaning = Cleaning(strip_stereo=True, canonical=True, largest_fragment=True)
    _, stripped = load("bace", tmp_path, "random", cleaning=cleaning)
    assert kept.notes["split_sha1"] == stripped.notes["split_sha1"]
    assert (kept.notes["stereo_removed"], stripped.notes["stereo_removed"]) == (0, 2)
    for before, after in zip(kept[:3], stripped[:3], strict=True):
        np.testing.assert_array_equal(before.labels, after.labels)
        for (raw,), (cleaned,) in zip(before.texts, after.texts, strict=True):
            assert raw in molecules
            assert not set("@/\\.") & set(cleaned)
            assert cleaned == Chem.CanonSmiles(cleaned)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("header", "rows", "parts"),
    [
        ("structure,Class", ["CCO,1"], ("smiles",)),
        ("smiles,a,b", ["CCO,1,1"], ("has 1 label column(s), found 2", "a, b")),
        ("smiles,Class", ["CCO,1", "CCO"], ("1 fields",)),
        ("smiles,Class", [], ("0 rows",)),
        ("smiles,Class", ["CCO,1", "CCC,2"], ("row 1 (from 0)", "'Class'", "'2' is no label")),
        (
            "smiles,Class",
            ["CCO,1", "CCC,NA"],
            ("row 1 (from 0)", "'NA' is no label", "nothing"),
        ),
        ("smiles,Class", ["CCO,True", "CCC,1"], ("row 0 (from 0)", "'True' is no label")),
        ("smiles,Class", ["CCO,inf", "CCC,1"], ("row 0 (from 0)", "'inf' is no label")),
        ("smiles,Class,Class", ["CCO,1,0"], ("'Class' 2 times", "keep one")),
        ("smiles,Class,CLASS", ["CCO,1,0"], ("'Class' 2 times", "'CLASS'", "keep one")),
        ("smiles,SMILES,Class", ["CCO,CCO,0"], ("'smiles' 2 times", "'SMILES'", "keep one")),
        ("mol,Mol,Class", ["CCO,CCO,0"], ("'mol' 2 times",)),
        ("id,Class", ["CCO,0"], ("no column 'smiles'", "id, Class", "rename")),
        ("smiles,Class", ["CCO,1", '"CCC\nCCO",0'], ("row 1 (from 0)",)),
        ("smiles,Class", ["CCO,1", "CCC |^1:0|,0"], ("row 1 (from 0)", "|^1:0|")),
        ("smiles,Class", ["CCO,1", "CCC,0"], ("the train part", "is empty", "2 rows")),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path, header, rows, parts):
    told(lambda: load("bace", tmp_path), tmp_path, "holds no bace.csv")
    path = bace(tmp_path, rows, header)
    told(lambda: load("bace", path), path, *parts)


# ---- the hub ----


def test_the_hub_is_read_as_its_files_are(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name):
        assert name == "scikit-fingerprints/MoleculeNet_ClinTox"
        columns = {"SMILES": MOLECULES, "FDA_APPROVED": [0, 1] * 5,
                   "CT_TOX": [None, 1.0, 0.0, float("nan"), None] * 2}  # fmt: skip
        return {"train": datasets.Dataset.from_dict(columns)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task, splits = load("clintox", rule="random")
    assert task.classes == ("FDA_APPROVED", "CT_TOX")
    labels = {
        MOLECULES.index(smiles): tuple(label)
        for part in (splits.train, splits.validation, splits.test)
        for (smiles,), label in zip(part.texts, part.labels.tolist(), strict=True)
    }
    assert labels[1] == (1, 1) and labels[2] == (0, 0)
    assert np.isnan(labels[0][1]) and np.isnan(labels[3][1])


def test_rows_of_the_hub_are_told_by_their_number(monkeypatch):
    datasets = pytest.importorskip("datasets")
    columns = {"SMILES": [*MOLECULES, "CCO name", None], "Class": [True, False] * 6}

    def load_dataset(name):
        return {"train": datasets.Dataset.from_dict(columns)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = read_hub("bace")
    assert table.smiles == [*MOLECULES, "CCO", ""] and table.labels_RC.sum() == 6
    columns["SMILES"] = list(range(12))
    told(lambda: read_hub("bace"), "MoleculeNet_BACE row 0", "no text")


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
    table = read_csv(name, data_dir / "moleculenet")
    assert len(table.smiles) == num_rows
    assert len(table.names) == BENCHMARKS[name].num_labels
    assert np.isfinite(table.labels_RC).sum() == labelled
    assert (table.labels_RC == 1).sum() == positive


def test_real_bbbp_has_the_sizes_of_table_9(data_dir):
    _, splits = load("bbbp", data_dir / "moleculenet")
    assert splits.notes["sizes"] == splits.notes["paper_sizes"] == [1631, 204, 204]
    shares = [part.labels.mean() for part in (splits.train, splits.validation, splits.test)]
    assert [round(share, 4) for share in shares] == [0.8394, 0.4069, 0.5294]
