"""Molecules are checked one by one; too many bad ones stop the run."""

import pytest
from deadly import KILLER, SLEEPER
from deadly import read_molecule as deadly_read
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from exlm_mini.config import DataConfig
from exlm_mini.data import cleaning, workers
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.english import embedded_english
from exlm_mini.data.smiles import embedded_molecules, read_molecule
from exlm_mini.data.text import file_documents
from exlm_mini.data.tokenizer import train_smiles


def read(smiles):
    """Molecules as they are kept when nothing is to be cleaned, and what was counted."""
    counts = CleaningCounts()
    return [m.spellings[0] for m in clean(smiles, Cleaning(), 1, counts)], counts


def corpus_of(tmp_path, report=lambda line: None, **settings):
    data = DataConfig(kind="smiles", **({"max_unknown": 1.0} | settings))
    return prepare_corpus(data, tmp_path / "c", 1, report)


def smiles_file(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"files": (str(path),)}


def test_too_many_rejected_stop_the_run(tmp_path):
    some = smiles_file(tmp_path / "a.smi", "CCO 1", "C[Xx]C 2", "CC 3", "CCC 4")
    line = told(lambda: corpus_of(tmp_path, **some), "a.smi", "1 of 4", "'C[Xx]C'", "25.00%")
    assert "raise data.max_rejected" in line
    counts = [pack.counts for pack in corpus_of(tmp_path, max_rejected=0.25, **some)[:2]]
    assert sum(count.documents for count in counts) == 3


def test_a_novel_among_molecules_is_no_molecules(tmp_path):
    novel = smiles_file(tmp_path / "a.txt", *["It was the best of times."] * 50, "CCO")
    told(lambda: corpus_of(tmp_path, **novel), "a.txt holds no molecules", "data.kind text")


def test_molecules_read_as_text_are_noticed(tmp_path):
    def lines_about(documents, name):
        (tmp_path / name).write_text("\n".join(documents))
        lines: list[str] = []
        data = DataConfig(kind="text", files=(str(tmp_path / name),), vocab_size=300)
        prepare_corpus(data, tmp_path / f"{name}.corpus", 1, lines.append)
        return [line for line in lines if "data.kind smiles" in line]

    assert len(lines_about([*embedded_molecules()][:1000], "a.smi")) == 1
    assert lines_about(embedded_english(), "manual.txt") == []
    assert lines_about(["1984", "(42)", "C3PO", "yes", "no"] * 50, "words.txt") == []


def test_a_limit_counts_molecules_read(tmp_path):
    lines = ["smiles,name", "CCO ethanol,a", "CC,b", "C[Xx]C,c"]
    some = smiles_file(tmp_path / "a.csv", *lines)
    assert len(corpus_of(tmp_path, max_documents=2, **some).train) == 1


def test_molecules_that_rdkit_dies_of_are_rejected_and_told(tmp_path, monkeypatch):
    lines = []
    some = smiles_file(
        tmp_path / "a.smi", "CCO", "C[Xx]C", f"{KILLER} name", "CC", SLEEPER, "C"
    )
    monkeypatch.setattr(cleaning, "read_molecule", deadly_read)
    monkeypatch.setattr(workers, "MAX_SECONDS", 1)
    told(lambda: corpus_of(tmp_path, **some), "3 of 6", "50.00%", KILLER)
    corpus_of(tmp_path, lines.append, max_rejected=1.0, **some)
    assert [line.partition(", is left out")[0] for line in lines if "left out" in line] == [
        f"{tmp_path / 'a.smi'}: molecule 3, {KILLER!r}",
        f"{tmp_path / 'a.smi'}: molecule 5, {SLEEPER!r}",
    ]


def test_the_column_of_molecules_is_called_smiles(tmp_path):
    some = smiles_file(tmp_path / "a.csv", "SMILES,label", "CCO,1", "CC,2")
    told(lambda: corpus_of(tmp_path, **some), "a.csv", "'smiles'", "SMILES, label")
    assert len(corpus_of(tmp_path, column="SMILES", **some).train) == 1


def test_the_embedded_molecules_are_real():
    smiles, counts = read(embedded_molecules())
    assert 4_900 < len(smiles) < 5_000 and counts.rejected < 50
    assert counts.read == len(smiles) + counts.rejected


def test_every_embedded_molecule_survives_the_tokenizer():
    smiles = list(embedded_molecules())
    tokenizer = train_smiles(smiles)
    assert tokenizer.vocab_size < 150
    encoded = tokenizer.encode_batch(smiles)
    assert [tokenizer.decode(ids) for ids in encoded] == smiles


def test_real_labels_come_from_a_table(data_dir):
    path = data_dir / "moleculenet" / "tox21.csv.gz"
    smiles, counts = read(file_documents(path, "smiles"))
    assert len(smiles) == 7823 and counts.rejected == 8  # aluminium salts of odd valence


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
    kept, counts = read([smiles, "CCO"])
    assert kept == ["CCO"]
    assert (counts.read, counts.rejected, counts.rejected_examples) == (2, 1, [smiles[:80]])


def test_large_molecules_are_read():
    peptide = "N[C@@H](Cc1cc([13CH3])ccc1)C(=O)" * 46 + "O"
    assert len(peptide) > 1340 and read_molecule(peptide) is not None
    assert read_molecule("C" * 2000) is not None
    assert read_molecule(sheet(8, 12)) is not None
