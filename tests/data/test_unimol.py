"""Pickles are read without being run."""

import os
import pickle

import numpy as np
import pytest
from corpus_files import write_lmdb
from refusals import told

from exlm_mini.data.text import file_documents
from exlm_mini.data.unimol import load_restricted

lmdb = pytest.importorskip("lmdb")


def entry(smiles):
    """A molecule as Uni-Mol stores it."""
    return {
        "smi": smiles,
        "atoms": ["C", "O"],
        "coordinates": [np.zeros((2, 3), np.float32), np.ones((2, 3), np.float64)],
        "target": np.array([1.5]),
        "scalar": np.float32(2),
        "id": 7,
    }


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def read(path, column=None):
    return list(file_documents(path, "smiles", column))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_and_arrays_are_passed_over(protocol):
    row = load_restricted(pickle.dumps(entry("CCO"), protocol=protocol))
    assert (row["smi"], row["atoms"], row["id"]) == ("CCO", ["C", "O"], 7)
    assert not isinstance(row["target"], np.ndarray)


def test_a_molecule_of_rdkit_is_passed_over():
    chem = pytest.importorskip("rdkit.Chem")
    row = load_restricted(pickle.dumps({"smi": "CCO", "mol": chem.MolFromSmiles("CCO")}))
    assert row["smi"] == "CCO" and not isinstance(row["mol"], chem.Mol)


def hostile(mark):
    """Hostile pickles; most of them would create the file ``mark`` if they were run."""
    open_it = f"__import__('pathlib').Path({str(mark)!r}).write_text('run')"
    values = [
        Runs(os.system, f"touch {mark}"),
        Runs(eval, open_it),
        Runs(np.save, str(mark), 1),
    ]
    return [
        *(pickle.dumps({"smi": value}, protocol=p) for value in values for p in (2, 4, 5)),
        # A dotted name, and a nested pickle.
        b"\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93\x8c\x05touch\x85R.",
        b"cpickle\nloads\n(S'x'\ntR.",
        b"\x80\x02\x82\x01.",  # a code of the extension registry
        b"Pid\n.",  # a persistent id
    ]


def test_a_hostile_entry_is_told_in_one_line_and_not_run(tmp_path):
    mark = tmp_path / "mark"
    for number, content in enumerate(hostile(mark)):
        path = write_lmdb(tmp_path / f"{number}.lmdb", [entry("CCO"), content])
        documents = file_documents(path, "smiles")
        assert next(documents) == "CCO"
        told(lambda some=documents: next(some), path)
        assert not mark.exists(), content


def test_molecules_of_an_lmdb_come_in_its_order_or_are_told(tmp_path):
    path = write_lmdb(tmp_path / "a.lmdb", [entry(f"{'C' * n}O") for n in range(1, 4)])
    assert read(path) == ["CO", "CCO", "CCCO"]
    told(lambda: read(path, "smiles"), path, "'smiles'", "smi, atoms")
    told(
        lambda: read(write_lmdb(tmp_path / "b.lmdb", [["CCO"]])),
        "b.lmdb",
        "row 0 (from 0)",
        "['CCO']",
    )
    (tmp_path / "c.lmdb").write_bytes(b"no database" * 1000)
    told(lambda: read(tmp_path / "c.lmdb"), "c.lmdb", "cannot read")
    (tmp_path / "d.lmdb").write_bytes(path.read_bytes()[:8192])  # must not crash the process
    told(lambda: read(tmp_path / "d.lmdb"), "d.lmdb", "truncated")
