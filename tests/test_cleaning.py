"""Molecules are cleaned as asked, and every change and loss is counted."""

import pytest
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean

ALL = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)


def cleaned(smiles, cleaning, seed=1):
    counts = CleaningCounts()
    return list(clean(smiles, cleaning, seed, counts)), counts


def spellings(smiles, cleaning):
    molecules, _ = cleaned(smiles, cleaning)
    return [spelling for molecule in molecules for spelling in molecule.spellings]


def test_without_options_molecules_stay_as_they_were():
    raw = ["OCC", "C(O)C", "C[C@@H](N)C(=O)O", "[Na+].[Cl-]", "F/C=C/F", "[13CH4]"]
    molecules, counts = cleaned(raw, Cleaning())
    assert [m.spellings for m in molecules] == [[s] for s in raw]
    assert [m.key for m in molecules] == raw
    assert counts == CleaningCounts(read=6)


def test_each_option_does_one_thing():
    raw = ["OC(=O)[C@@H](N)C.Cl", "OCC"]
    assert spellings(raw, Cleaning(largest_fragment=True)) == ["C[C@H](N)C(=O)O", "OCC"]
    molecules, _ = cleaned(["OCC", "C(O)C"], Cleaning(canonical=True))
    assert molecules[0].key == molecules[1].key == "CCO"
    assert spellings(raw, Cleaning(strip_stereo=True)) == ["CC(N)C(=O)O.Cl", "OCC"]
    assert spellings(raw, Cleaning(canonical=True)) == ["C[C@H](N)C(=O)O.Cl", "CCO"]
    assert spellings(["F/C=C\\F"], Cleaning(strip_stereo=True)) == ["FC=CF"]


def test_the_largest_fragment_is_a_definite_one():
    raw = ["CC.Br", "Br.CC", "CCO.CCN", "CCN.CCO", "[Na+].[Cl-]"]
    assert spellings(raw, ALL) == ["CC", "CC", "CCO", "CCO", "[Cl-]"]


def test_losses_and_changes_are_counted():
    raw = ["C[Xx]C", "", "c1ccccc", "CCO.Cl", "C[C@@H](N)O", "OCC", "CC", "C(("]
    molecules, counts = cleaned(raw, ALL)
    assert len(molecules) == 4
    assert (counts.read, counts.rejected) == (8, 4)
    assert (counts.fragments_removed, counts.stereo_removed, counts.respelled) == (1, 1, 3)
    assert counts.rejected_examples == ["C[Xx]C", "", "c1ccccc"]
    total = CleaningCounts()
    total.add(counts)
    total.add(counts)
    assert (total.read, total.rejected) == (16, 8) and len(total.rejected_examples) == 3


def test_rejections_are_silent(capfd):
    cleaned(["C[Xx]C", "c1ccccc", "C(C)(C)(C)(C)C"], ALL)
    assert capfd.readouterr() == ("", "")


def test_random_spellings_are_of_the_same_molecule_and_repeat_with_the_seed():
    raw = ["CC(=O)Oc1ccccc1C(=O)O", "C", "CCO"]
    many = Cleaning(num_variants=8)
    molecules, counts = cleaned(raw, many)
    for molecule in molecules:
        assert len(set(molecule.spellings)) == len(molecule.spellings) <= 8
        assert {Chem.CanonSmiles(s) for s in molecule.spellings} == {molecule.key}
    assert len(molecules[0].spellings) > 4
    assert molecules[1].spellings == ["C"]
    assert counts.variants == sum(len(m.spellings) for m in molecules)
    assert cleaned(raw, many)[0] == molecules
    assert cleaned(reversed(raw), many)[0] == molecules[::-1]  # whatever the order
    assert cleaned(raw, many, seed=2)[0] != molecules


def test_a_silly_number_of_variants_is_told():
    told(lambda: Cleaning(num_variants=-1), "-1", "[0, 1000]")


def test_a_clean_collection_is_left_alone(data_dir):
    import lzma
    from itertools import islice

    with lzma.open(data_dir / "smiles" / "chembl_pubchem.smi.xz", "rt") as lines:
        smiles = [line.strip() for line in islice(lines, 0, 60_000, 60)]
    molecules, counts = cleaned(smiles, ALL)
    assert counts.rejected == counts.fragments_removed == counts.stereo_removed == 0
    assert counts.respelled < 20  # another version of RDKit may write a few otherwise
    assert len(molecules) == 1000
