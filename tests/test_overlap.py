"""Which molecules of a benchmark pre-training has seen."""

import pytest
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_lab.downstream.moleculenet import find_csv, read_csv
from exlm_lab.downstream.overlap import overlap_with


def test_a_molecule_is_found_in_any_spelling(tmp_path):
    corpus = tmp_path / "corpus.smi"
    corpus.write_text("OCC 1\nC[Xx] 2\nNCC.Cl 3\nC[C@@H](N)O 4\nc1ccccc1 5\n")
    benchmark = ["CCO", "CCC", "bad", "CCN", "C[C@H](N)O", "OCC", "C1=CC=CC=C1"]
    overlap = overlap_with(benchmark, [str(corpus)])
    assert overlap.rows == [0, 3, 4, 5, 6]
    assert overlap.num_read == 5


def test_a_clean_corpus_is_compared_by_the_letter(tmp_path):
    corpus = tmp_path / "corpus.smi"
    clean = [Chem.CanonSmiles(s) for s in ("CCO", "CC(N)O", "c1ccccc1")]
    corpus.write_text("\n".join([*clean, "OCCC"]) + "\n")
    benchmark = ["OCC", "C[C@H](N)O", "C1=CC=CC=C1.[Na+]", "CCCO"]
    assert overlap_with(benchmark, [str(corpus)], is_clean=True).rows == [0, 1, 2]
    assert overlap_with(benchmark, [str(corpus)]).rows == [0, 1, 2, 3]
    assert overlap_with([], [str(corpus)], is_clean=True) == ([], 4)


def test_a_missing_corpus_is_told(tmp_path):
    path = str(tmp_path / "corpus.smi")
    told(lambda: overlap_with(["CCO"], [path]), path)


@pytest.mark.slow
def test_a_third_of_bace_is_in_a_public_corpus(data_dir):
    table = read_csv("bace", find_csv("bace", data_dir / "moleculenet"))
    corpus = data_dir / "smiles" / "chembl_pubchem.smi.xz"
    overlap = overlap_with(table.smiles, [str(corpus)], is_clean=True)
    assert overlap.num_read == 1_138_289
    assert len(overlap.rows) == 527
