"""What pre-training has seen: symbols and molecules."""

import pytest
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_mini.tasks.molecule_tables import find_csv, read_csv
from exlm_mini.tasks.seen import CHOICES, overlap_with, unknown_shares
from exlm_mini.tokenization import train_smiles

SYMBOLS = ["C", "N", "O", "c", "(", ")", "=", "1"]


def test_unknown_symbols_are_counted_under_each_choice():
    tokenizer = train_smiles(SYMBOLS)
    shares = unknown_shares(["C[C@H](N)O", "CCO", "C1=CC=CC=C1.Cl", "CCCl"], tokenizer)
    assert list(shares) == list(CHOICES)
    tokens = {choice: share.tokens for choice, share in shares.items()}
    assert tokens["as it is"] == pytest.approx((1 + 2 + 1) / (6 + 3 + 13 + 3))
    assert tokens["no stereo"] == pytest.approx((0 + 2 + 1) / (6 + 3 + 13 + 3))
    assert tokens["no stereo, canonical"] == pytest.approx((0 + 2 + 1) / (6 + 3 + 10 + 3))
    last = shares["no stereo, canonical, largest fragment"]
    assert last.tokens == pytest.approx(1 / (6 + 3 + 8 + 3))
    assert [share.molecules for share in shares.values()] == [0.75, 0.5, 0.5, 0.25]


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


def test_the_vocabulary_of_the_paper_lacks_stereo_marks(data_dir):
    symbols = [
        line.split()[0]
        for line in (data_dir / "smiles" / "smi_dict_token.txt").read_text().splitlines()[4:]
    ]
    tokenizer = train_smiles(s for s in symbols if not s.startswith("madeupword"))
    table = read_csv("bace", find_csv("bace", data_dir / "moleculenet"))
    shares = unknown_shares(table.smiles, tokenizer)
    raw, stripped = shares["as it is"], shares["no stereo"]
    assert (round(100 * raw.tokens, 1), round(100 * raw.molecules, 1)) == (1.1, 26.5)
    assert stripped.tokens < raw.tokens / 10


@pytest.mark.slow
def test_a_third_of_bace_is_in_a_public_corpus(data_dir):
    table = read_csv("bace", find_csv("bace", data_dir / "moleculenet"))
    corpus = data_dir / "smiles" / "chembl_pubchem.smi.xz"
    overlap = overlap_with(table.smiles, [str(corpus)], is_clean=True)
    assert overlap.num_read == 1_138_289
    assert len(overlap.rows) == 527
