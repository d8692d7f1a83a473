"""Molecules are read, cleaned as asked, and every change and loss is counted."""

import sys

import pytest

pytest.importorskip("rdkit", reason="rdkit is not installed")

from exlm_mini.config import DataConfig
from exlm_mini.data import shards
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.molecules import Cleaning, clean, embedded_molecules, read_molecule
from exlm_mini.data.shards import hash_of
from exlm_mini.data.tokenizer import train_smiles

ALL = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)


def cleaned(smiles, cleaning=ALL):
    """The cleaned molecules, without those that RDKit cannot read."""
    return [one for text in smiles if (one := clean(text, cleaning)) is not None]


def spellings(smiles, cleaning):
    return [molecule.spelling for molecule in cleaned(smiles, cleaning)]


# ---- reading ----


def sheet(width, height):
    """SMILES of a sheet of six-membered rings, written as one path through all its rows."""
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
        "C" * 1_000_000, "C" + "(C" * 50_000 + ")" * 50_000,
        "C" + "".join(f"%({n})" for n in range(1000, 1200)), sheet(8, 40), "C\ud800", "C\0C", "",
    ],
    ids=[
        "a long chain", "deep parentheses", "open rings", "a sheet", "half a surrogate pair",
        "NUL", "nothing",
    ],
)  # fmt: skip
def test_what_rdkit_would_hang_or_die_of_is_rejected(smiles):
    assert clean(smiles, Cleaning()) is None


def test_large_molecules_are_read():
    peptide = "N[C@@H](Cc1cc([13CH3])ccc1)C(=O)" * 46 + "O"
    assert len(peptide) > 1340 and read_molecule(peptide) is not None
    assert read_molecule("C" * 2000) is not None and read_molecule("C" * 2001) is None
    assert read_molecule(sheet(8, 12)) is not None
    assert read_molecule("[13CH2]" * 201) is not None  # digits in brackets close no ring


@pytest.mark.parametrize("ring", ["C1CC1", "C%10CC%10", "C%(9)CC%(9)"])
def test_a_hundred_rings_are_read_and_no_more(ring):
    assert read_molecule(ring * 100) is not None and read_molecule(ring * 101) is None


def test_the_embedded_molecules_are_real():
    molecules = list(embedded_molecules())
    assert 4_950 < len(cleaned(molecules, Cleaning())) < 5_000
    assert all(text.split() == [text] for text in molecules)  # no number follows


def test_without_rdkit_no_corpus_of_molecules_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(ModuleNotFoundError, match="rdkit"):
        prepare_corpus(DataConfig(kind="smiles"), tmp_path / "c", 1)
    assert not (tmp_path / "c").exists()


# ---- cleaning ----


def test_without_options_molecules_stay_as_they_were():
    raw = ["OCC", "C(O)C", "C[C@@H](N)C(=O)O", "[Na+].[Cl-]", "F/C=C/F", "[13CH4]"]
    assert cleaned(raw, Cleaning()) == [(text, text) for text in raw]


def test_each_option_does_one_thing():
    raw = ["OC(=O)[C@@H](N)C.Cl", "OCC"]
    assert spellings(raw, Cleaning(largest_fragment=True)) == ["C[C@H](N)C(=O)O", "OCC"]
    molecules = cleaned(["OCC", "C(O)C"], Cleaning(canonical=True))
    assert molecules[0].key == molecules[1].key == "CCO"
    assert spellings(raw, Cleaning(strip_stereo=True)) == ["CC(N)C(=O)O.Cl", "OCC"]
    assert spellings(raw, Cleaning(canonical=True)) == ["C[C@H](N)C(=O)O.Cl", "CCO"]
    for marked in ("F/C=C/F", "F\\C=C\\F"):
        assert spellings([marked], Cleaning(strip_stereo=True)) == ["FC=CF"]
    raw = ["[H]/N=C(/N)C", "N=C(N)C", "[2H]/C=C/C", "[H][H]"]  # a mark may need a hydrogen
    assert spellings(raw, ALL) == ["CC(=N)N", "CC(=N)N", "[2H]C=CC", "[H][H]"]
    assert spellings(["C1.C1O"], Cleaning(largest_fragment=True)) == ["C1.C1O"]  # one fragment


def test_the_largest_fragment_is_a_definite_one():
    raw = ["CC.Br", "Br.CC", "CCO.CCN", "CCN.CCO", "[Na+].[Cl-]"]
    assert spellings(raw, ALL) == ["CC", "CC", "CCO", "CCO", "[Cl-]"]
    assert spellings(["CCO.COC", "COC.CCO", "C.[2H][2H]"], ALL) == ["COC", "COC", "C"]
    raw = ["C(CO)CC.CCOCC", "C(O)CCC.C(OCC)C"]  # weights that differ in their last bits
    assert spellings(raw, ALL) == ["CCOCC", "CCOCC"]


def test_all_spellings_of_a_molecule_are_on_one_side_of_the_split():
    texts, ethanol = ["OCC", "C(O)C", "nonsense"], hash_of("CCO", 1)
    made = shards._rows(texts, 1, Cleaning(strip_stereo=True)).to_pydict()
    assert made == {"text": texts, "hash": [ethanol, ethanol, None]}


def test_stereo_marks_go_only_where_a_vocabulary_has_none_of_them():
    for smiles in ("CC/C=C", "CC\\C=C", "C[C@H](O)N", "C[C@@H](O)N"):
        assert not Cleaning.needed_by(train_smiles([smiles])).strip_stereo
    assert Cleaning.needed_by(train_smiles(["CCO"])).strip_stereo


def test_losses_are_silent(capfd):
    assert cleaned(["C[Xx]C", "", "c1ccccc", "CC\nCN", "C |^1:0|", "C(("]) == []
    assert capfd.readouterr() == ("", "")
