"""Molecules are checked one by one; too many bad ones stop the run."""

import sys
import time

import pytest
from deadly import KILLER, SLEEPER
from deadly import read_molecule as deadly_read
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from exlm_mini.config import DataConfig
from exlm_mini.data import smiles, workers
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.smiles import embedded_molecules, load_molecules, read_molecule, validate
from exlm_mini.data.tokenizer import train_smiles


def settings(path, **more):
    return DataConfig(kind="smiles", files=(str(path),), **more)


def test_bad_and_empty_molecules_are_rejected():
    molecules = validate(["CCO", "C[Xx]C", "", "c1ccccc", "C(C)(C)(C)(C)C", "O"])
    assert molecules.smiles == ["CCO", "O"]
    assert molecules.rejected == ["C[Xx]C", "", "c1ccccc", "C(C)(C)(C)(C)C"]
    assert molecules.describe_rejected() == (
        "RDKit rejects 4 of 6 molecules: 'C[Xx]C', '', 'c1ccccc', ..."
    )


def test_rejections_are_silent(capfd):
    validate(["C[Xx]C", "c1ccccc", "C(C)(C)(C)(C)C"])
    assert capfd.readouterr() == ("", "")


def test_molecules_stay_as_they_were_written():
    raw = ["OCC", "C(O)C", "C[C@@H](N)C(=O)O", "F\\C=C\\F", "[13CH4]"]
    assert validate(raw).smiles == raw


def test_too_many_rejected_stop_the_run(tmp_path):
    path = tmp_path / "a.smi"
    path.write_text("CCO 1\nC[Xx]C 2\nCC 3\nCCC 4\n")
    message = told(lambda: load_molecules(settings(path)), path, "1 of 4", "'C[Xx]C'", "25.00%")
    assert "raise data.max_rejected" in message
    molecules = load_molecules(settings(path, max_rejected=0.25))
    assert molecules.smiles == ["CCO", "CC", "CCC"]


def test_a_limit_counts_molecules_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("smiles,name\nCCO ethanol,a\nC[Xx]C,b\nCC,c\n")
    molecules = load_molecules(settings(path, max_documents=2, max_rejected=1.0))
    assert (molecules.smiles, molecules.rejected) == (["CCO"], ["C[Xx]C"])


def test_molecules_that_rdkit_dies_of_are_rejected_and_told(tmp_path, monkeypatch):
    path, lines = tmp_path / "a.smi", []
    path.write_text(f"CCO\nC[Xx]C\n{KILLER} name\nCC\n{SLEEPER}\nC\n")
    monkeypatch.setattr(smiles, "read_molecule", deadly_read)
    monkeypatch.setattr(workers, "MAX_SECONDS", 1)
    molecules = load_molecules(settings(path, max_rejected=1.0), lines.append)
    assert molecules == (["CCO", "CC", "C"], [KILLER, SLEEPER, "C[Xx]C"])
    assert [line.partition(", is left out")[0] for line in lines] == [
        f"{path}: molecule 3, {KILLER!r}", f"{path}: molecule 5, {SLEEPER!r}"
    ]  # fmt: skip
    told(lambda: load_molecules(settings(path)), "3 of 6", "50.00%", KILLER)


def test_the_column_of_molecules_is_called_smiles(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("SMILES,label\nCCO,1\n")
    told(lambda: load_molecules(settings(path)), path, "'smiles'", "SMILES, label")
    assert load_molecules(settings(path, column="SMILES")).smiles == ["CCO"]


def test_the_embedded_molecules_are_real():
    start = time.perf_counter()
    molecules = load_molecules(DataConfig(kind="smiles"))
    rate = len(molecules.smiles) / (time.perf_counter() - start)
    assert 4_900 < len(molecules.smiles) < 5_000
    assert len(molecules.rejected) < 50
    assert rate > 1000  # measured: tens of thousands a second
    assert len(load_molecules(DataConfig(kind="smiles", max_documents=10)).smiles) == 10


def test_every_embedded_molecule_survives_the_tokenizer():
    smiles = list(embedded_molecules())
    tokenizer = train_smiles(smiles)
    assert tokenizer.vocab_size < 150
    encoded = tokenizer.encode_batch(smiles)
    assert [tokenizer.decode(ids) for ids in encoded] == smiles


def test_without_rdkit_the_remedy_is_an_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.smi"
    path.write_text("CCO\n")
    monkeypatch.setitem(sys.modules, "rdkit", None)
    for data in (settings(path), DataConfig(kind="smiles")):
        told(lambda data=data: load_molecules(data), "RDKit", "pip install 'exlm-mini[chem]'")


def test_real_molecules_survive_the_tokenizer(data_dir):
    path = data_dir / "smiles" / "zinc250k.smi.xz"
    molecules = load_molecules(settings(path, max_documents=500))
    assert len(molecules.smiles) == 500 and not molecules.rejected
    tokenizer = train_smiles(molecules.smiles)
    encoded = tokenizer.encode_batch(molecules.smiles)
    assert [tokenizer.decode(ids) for ids in encoded] == molecules.smiles


def test_real_labels_come_from_a_table(data_dir):
    path = data_dir / "moleculenet" / "tox21.csv.gz"
    molecules = load_molecules(settings(path))
    assert len(molecules.smiles) == 7823
    assert len(molecules.rejected) == 8  # aluminium salts of odd valence


def sheet(width, height):
    """Six-membered rings side by side, written as one path through all rows."""
    place, marks = {}, {}
    for row in range(height):
        for column in range(width)[:: 1 if row % 2 == 0 else -1]:
            place[row, column] = len(place)
    for number, (row, column) in enumerate((r, c) for r, c in place if (r + c) % 2 == 0):
        ends = place[row, column], place.get((row + 1, column))
        if ends[1] is not None and ends[1] - ends[0] > 1:
            for end in ends:
                marks[end] = f"%({100 + number % 900})"
    return "".join(f"c{marks.get(i, '')}" for i in range(len(place)))


@pytest.mark.parametrize(
    "smiles",
    [
        "C" * 1_000_000, "C" + "(C" * 50_000 + ")" * 50_000, "C=C" * 100_000, "[" * 100_000,
        "C" + "".join(f"%({n})" for n in range(1000, 6000)), sheet(8, 40), "C\ud800", "C\0C", "",
    ],
    ids=[
        "a long chain", "deep parentheses", "a polyene", "brackets", "open rings", "a sheet",
        "half a surrogate pair", "NUL", "nothing",
    ],
)  # fmt: skip
def test_what_rdkit_would_hang_or_die_of_is_rejected(smiles):
    assert validate([smiles, "CCO"]) == (["CCO"], [smiles])
    counts = CleaningCounts()
    assert [m.key for m in clean([smiles, "CCO"], Cleaning(), 1, counts)] == ["CCO"]
    assert (counts.read, counts.rejected, counts.rejected_examples) == (2, 1, [smiles[:80]])


def test_large_molecules_are_read():
    peptide = "N[C@@H](Cc1cc([13CH3])ccc1)C(=O)" * 46 + "O"
    assert len(peptide) > 1340 and read_molecule(peptide) is not None
    assert read_molecule("C" * 2000) is not None
    assert read_molecule(sheet(8, 12)) is not None
