"""Pickles are read without being run."""

import io
import os
import pickle
import pickletools
import subprocess

import numpy as np
import pytest
from refusals import told

from exlm_mini.config.checks import UserError
from exlm_mini.data import lmdb_pages
from exlm_mini.data.lmdb_pages import num_entries
from exlm_mini.data.unimol import lmdb_documents, load_restricted, numbers


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
    """Pickled, it calls whatever it is told to when it is loaded."""

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


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, [float("nan")]),
        (True, [1]),
        ((1, [2.5, None]), [1, 2.5, float("nan")]),
        (np.array([1.5, -1.0]), [1.5, -1]),
        (np.array([[1, 0], [0, 1]], dtype=np.int8), [1, 0, 0, 1]),
        (np.array([1, 2], dtype=">i4"), [1, 2]),
        (np.array([True, False]), [1, 0]),
        (np.array([1.0, None, 0], dtype=object), [1, float("nan"), 0]),
        (np.float32(2.5), [2.5]),
        ([np.float64(1), np.array([0])], [1, 0]),
    ],
)
def test_numbers_of_arrays_are_read_where_asked_for(value, wanted, protocol):
    read = numbers(load_restricted(pickle.dumps(value, protocol=protocol)))
    np.testing.assert_array_equal(read, wanted)


@pytest.mark.parametrize(
    "value", ["1", {"a": 1}, np.array(["1"]), np.array([1j]), [object], np.dtype("f8"), b"1"]
)
def test_what_is_no_number_is_told(value):
    if value == [object]:  # a class is refused before
        told(lambda: load_restricted(pickle.dumps(value)), "refused")
    else:
        told(lambda: numbers(load_restricted(pickle.dumps(value))), "holds no numbers")


def test_numbers_that_cannot_be_are_told():
    endless = [1]
    endless.append(endless)
    for value in (endless, 10**400):
        told(lambda value=value: numbers(load_restricted(pickle.dumps(value))), "no numbers")
    # Arrays as no numpy writes them: without a type, without content, of half a number.
    for content in (
        b"cnumpy\ndtype\n(I1\ntR.",
        b"cnumpy._core.multiarray\nscalar\n(tR.",
        b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(tR(I3\nS'<'\ntbS'abc'\ntR.",
        b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(S'f8'\ntR(I3\nS'<'\ntbC\x03abctR.",
    ):
        told(lambda content=content: numbers(load_restricted(content)), "no numbers")


def test_a_molecule_of_rdkit_is_passed_over():
    chem = pytest.importorskip("rdkit.Chem")
    row = load_restricted(pickle.dumps({"smi": "CCO", "mol": chem.MolFromSmiles("CCO")}))
    assert row["smi"] == "CCO" and not isinstance(row["mol"], chem.Mol)


def hostile(tmp_path):
    """Pickles that leave a file behind when they run, by many ways."""
    mark = tmp_path / "mark"
    open_it = f"__import__('pathlib').Path({str(mark)!r}).write_text('run')"
    values = [
        Runs(os.system, f"touch {mark}"),
        Runs(eval, open_it),
        Runs(exec, open_it),
        Runs(subprocess.check_output, ["touch", str(mark)]),
        Runs(open, str(mark), "w"),
        Runs(os.mkdir, str(mark)),
        Runs(np.fromfile, str(mark)),
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
    return mark, pickles


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path):
    mark, pickles = hostile(tmp_path)
    assert len(pickles) > 30
    for content in pickles:
        told(lambda content=content: load_restricted(content), "pickle is")
        assert not mark.exists(), pickletools.dis(content)
    told(lambda: load_restricted(pickles[0]), "refused", "system")


def test_a_hostile_entry_is_told_in_one_line(tmp_path):
    mark, pickles = hostile(tmp_path)
    path = write(tmp_path / "a.lmdb", [entry("CCO"), pickles[0]])
    documents = lmdb_documents(path, None)
    assert next(documents) == "CCO"
    told(lambda: next(documents), path, "entry b'1'", "refused", "nothing of it was run")
    assert not mark.exists()


def test_damaged_pickles_are_told(tmp_path):
    rng = np.random.default_rng(0)
    whole = pickle.dumps(entry("CC(=O)Oc1ccccc1C(=O)O"), protocol=5)
    told(lambda: load_restricted(whole[:-5]), "damaged")
    told(lambda: load_restricted(b""), "damaged")
    for _ in range(300):
        content = bytearray(whole)
        content[rng.integers(len(content))] = rng.integers(256)
        try:
            load_restricted(bytes(content))
        except ValueError as error:
            assert "\n" not in str(error)


def test_molecules_of_an_lmdb_come_in_its_order(tmp_path):
    path = write(tmp_path / "a.lmdb", [entry(f"{'C' * n}O") for n in range(1, 4)])
    assert list(lmdb_documents(path, None)) == ["CO", "CCO", "CCCO"]
    assert num_entries(path) == 3


def test_what_is_wrong_with_an_lmdb_is_told(tmp_path):
    path = write(tmp_path / "a.lmdb", [entry("CCO")])
    told(lambda: list(lmdb_documents(path, "smiles")), path, "no text 'smiles'", "smi, atoms")
    path = write(tmp_path / "b.lmdb", [["CCO"]])
    told(lambda: list(lmdb_documents(path, None)), path, "list, not a dict")
    (tmp_path / "c.lmdb").write_bytes(b"no database" * 1000)
    for read in (num_entries, lambda path: list(lmdb_documents(path, None))):
        told(lambda read=read: read(tmp_path / "c.lmdb"), "c.lmdb", "no LMDB")
        told(lambda read=read: read(tmp_path / "d.lmdb"), "d.lmdb", "No such file")


@pytest.mark.parametrize(
    "sizes", [(), (5,), (40,) * 3000, (1, 1900, 2100, 3000, 100_000) * 60], ids=len
)
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
    assert num_entries(tmp_path / "a") == len(want)


def test_a_damaged_lmdb_is_told_or_read(tmp_path, monkeypatch):
    values = [b"x" * size for size in (40, 3000, 9000) * 40]
    whole = write(tmp_path / "a.lmdb", values).read_bytes()
    rng, num_told, damaged = np.random.default_rng(0), 0, tmp_path / "b.lmdb"
    for turn in range(400):
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
    assert num_told > 100
    monkeypatch.setattr(lmdb_pages, "MAX_RECORD_BYTES", 8999)
    told(lambda: list(lmdb_pages.entries(tmp_path / "a.lmdb")), "a.lmdb", "9,000 bytes")
