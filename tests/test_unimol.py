"""Pickles are read without being run."""

import io
import os
import pickle
import subprocess

import numpy as np
import pytest
from refusals import told

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data import lmdb_pages
from exlm_mini.data.corpus import prepare
from exlm_mini.data.request import Preparation
from exlm_mini.data.unimol import lmdb_documents, load_restricted


def entry(smiles):
    """As Uni-Mol stores a molecule."""
    return {
        "smi": smiles,
        "atoms": ["C", "O"],
        "coordinates": [np.zeros((2, 3), np.float32), np.ones((2, 3), np.float64)],
        "target": np.array([1.5]),
        "scalar": np.float32(2),
        "id": 7,
    }


class Runs:
    """Pickled, it makes a call when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def write(path, values):
    lmdb = pytest.importorskip("lmdb")
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, value in enumerate(values):
            content = value if isinstance(value, bytes) else pickle.dumps(value, protocol=5)
            transaction.put(str(i).encode(), content)
    return path


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
    """Pickles that leave a file behind when they run, by many ways."""
    open_it = f"__import__('pathlib').Path({str(mark)!r}).write_text('run')"
    values = [
        Runs(os.system, f"touch {mark}"),
        Runs(eval, open_it),
        Runs(subprocess.check_output, ["touch", str(mark)]),
        Runs(os.mkdir, str(mark)),
        Runs(np.save, str(mark), 1),
        Runs(io.FileIO, str(mark), "w"),
    ]
    pickles = [pickle.dumps({"smi": value}, protocol=p) for value in values for p in (2, 4, 5)]
    # A dotted name inside an allowed module, and the way through a nested pickle.
    pickles.append(b"\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93\x8c\x05touch\x85R.")
    pickles.append(b"cnumpy\nload\n(S'x'\nI01\ntR.")
    pickles.append(b"cpickle\nloads\n(S'x'\ntR.")
    pickles.append(b"\x80\x02\x82\x01.")  # a code of the extension registry
    pickles.append(b"Pid\n.")  # a persistent id
    return pickles


def test_a_hostile_entry_is_told_in_one_line_and_not_run(tmp_path):
    mark = tmp_path / "mark"
    for number, content in enumerate(hostile(mark)):
        path = write(tmp_path / f"{number}.lmdb", [entry("CCO"), content])
        documents = lmdb_documents(path, None)
        assert next(documents) == "CCO"
        told(lambda some=documents: next(some), path, "entry b'1'", "nothing of it was run")
        assert not mark.exists(), content


def test_molecules_of_an_lmdb_come_in_its_order(tmp_path):
    path = write(tmp_path / "a.lmdb", [entry(f"{'C' * n}O") for n in range(1, 4)])
    assert list(lmdb_documents(path, None)) == ["CO", "CCO", "CCCO"]


def test_what_is_wrong_with_an_lmdb_is_told(tmp_path):
    path = write(tmp_path / "a.lmdb", [entry("CCO")])
    told(lambda: list(lmdb_documents(path, "smiles")), path, "'smiles'", "smi, atoms")
    path = write(tmp_path / "b.lmdb", [["CCO"]])
    told(lambda: list(lmdb_documents(path, None)), path, "list, not a dict")
    empty = Preparation(
        DataConfig(kind="smiles"), sources=((str(write(tmp_path / "e.lmdb", [])),),)
    )
    told(lambda: prepare(empty, tmp_path / "c"), "e.lmdb", "no documents")
    (tmp_path / "c.lmdb").write_bytes(b"no database" * 1000)
    told(lambda: list(lmdb_documents(tmp_path / "c.lmdb", None)), "c.lmdb", "no LMDB")


@pytest.mark.parametrize("sizes", [(), (40,) * 3000, (1, 1900, 3000, 100_000) * 30], ids=len)
def test_entries_are_those_the_library_wrote(sizes, tmp_path):
    """Also where some were deleted since, which leaves free pages."""
    lmdb, rng, want = pytest.importorskip("lmdb"), np.random.default_rng(0), {}
    with lmdb.open(str(tmp_path / "a"), subdir=False, map_size=1 << 28) as environment:
        with environment.begin(write=True) as transaction:
            for size in sizes:
                key = str(rng.integers(10**9)).encode()
                want[key] = rng.bytes(size)
                transaction.put(key, want[key])
        with environment.begin(write=True) as transaction:
            for key in list(want)[::7]:
                transaction.delete(key)
                del want[key]
    assert list(lmdb_pages.entries(tmp_path / "a")) == sorted(want.items())


def test_a_damaged_lmdb_is_told_or_read(tmp_path, monkeypatch):
    values = [b"x" * size for size in (40, 3000, 9000) * 40]
    whole = write(tmp_path / "a.lmdb", values).read_bytes()
    rng, num_told, damaged = np.random.default_rng(0), 0, tmp_path / "b.lmdb"
    for turn in range(200):
        content = bytearray(whole)
        if turn % 4 == 0:
            del content[rng.integers(len(content)) :]
        else:
            page = rng.choice([0, 1, rng.integers(len(whole) // 4096)])
            for at in page * 4096 + rng.integers(160, size=turn % 4):
                content[at] = rng.choice([0, 255, rng.integers(256)])
        damaged.write_bytes(content)
        try:
            list(lmdb_pages.entries(damaged))
        except UserError as error:
            assert str(error).startswith(str(damaged)) and str(error).isprintable()
            num_told += 1
    assert num_told > 50
    monkeypatch.setattr(lmdb_pages, "MAX_RECORD_BYTES", 8999)
    told(lambda: list(lmdb_pages.entries(tmp_path / "a.lmdb")), "a.lmdb", "9,000 bytes")
