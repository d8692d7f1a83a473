"""One loader for every source; whatever is wrong with a file is reported in one line."""

import gzip
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.tables import read_table
from exlm_mini.data import text
from exlm_mini.data.english import embedded_english
from exlm_mini.data.text import document, file_documents, smiles_in

CHAPTERS = "First line.\nSecond line.\n\n  \nA new chapter.\n"
BOTH = ["First line.\nSecond line.", "A new chapter."]


def read(path, **settings):
    """All documents of a file."""
    return list(file_documents(path, **({"kind": "text"} | settings)))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


# ---- what a line, a cell or an entry holds ----

BLANKS = st.text(" \t\r\n\v\f\x85\xa0\u2003\u2028\u3000", max_size=4)
NAMES = st.sampled_from(
    ["", "paracetamol", "CN12", "2 names", "|r|", "|c:0|", "|$;;R1$|", "|(1,2,;^3:4,5,),&1:1|"]
)
SMILES = "C[C@H](N)C(=O)O"


@given(BLANKS, st.sampled_from(" \t\xa0"), NAMES, BLANKS)
def test_a_molecule_is_its_smiles_whatever_is_around_it(before, gap, name, after):
    behind = gap + name if name else ""
    assert document(f"{before}{SMILES}{behind}{after}", "smiles", "row 1") == SMILES


@given(BLANKS, st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"])), BLANKS)
def test_a_text_is_what_stands_between_its_outer_blanks(before, text, after):
    inner = f"a {text}\n\t b"
    assert document(f"{before}{inner}{after}", "text", "row 1") == inner


@pytest.mark.parametrize(
    "entry",
    ["CCO\nCCN", "CC\u2028CN a", "C [MASK]C", "C |^1:0|", "C |$;a;b$,^2:0|", "CN |C:0.1|"],
)
def test_what_is_not_one_smiles_is_refused(entry):
    assert smiles_in(entry) is None
    told(lambda: document(entry, "smiles", "row 7"), "row 7", "only the SMILES")


def test_the_labels_of_atoms_say_nothing_of_bonds():
    assert smiles_in("CC |$a,C:1;b$,r|") == "CC"
    assert smiles_in("CC |$a;b$,C:1.0|") is None


@pytest.mark.parametrize("kind", ["text", "smiles"])
@pytest.mark.parametrize("value", [None, float("nan"), 3, b"CCO", ["CCO"], "a\udc80"])
def test_what_is_no_text_is_refused_by_its_place(kind, value):
    told(lambda: document(value, kind, "row 7"), "row 7", repr(value).partition("\\")[0])


# ---- formats ----


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", CHAPTERS, BOTH),
        ("b.txt", "\none\ntwo\r\nthree\n\n", ["one", "two", "three"]),
        ("c.txt", "\ufeffone\u2028\x0bone\ntwo\x1ctwo", ["one\u2028\x0bone", "two\x1ctwo"]),
        ("e.txt", "\ufeffone\n\ufefftwo\n", ["one", "\ufefftwo"]),
        ("a.csv", 'id,text\n1,"one, ""2""\nthree"\n2,four\n3,\n\n', ['one, "2"\nthree', "four"]),
        ("c.csv", "id, Text \r1,one\r2,two\r", ["one", "two"]),
        ("d.txt", "one\rtwo\r\rthree\r", ["one\ntwo", "three"]),
        ("d.csv", " \nid,text\n1,one\n  \n2,two\n \n", ["one", "two"]),
        ("e.csv", "\n", []),
        ("b.csv", "text\n" + "a" * 200_000, ["a" * 200_000]),
        ("a.jsonl", '{"n": 1}\n{"text": "one\\n2"}\n{"text": null}\n', ["one\n2"]),
        ("b.jsonl", '{"Text": "a"}\n{"text": "b"}\n{"n": 1}\n{"TEXT ": "c"}\n', ["a", "b", "c"]),
        ("a.TXT.gz", gzip.compress(CHAPTERS.encode(), mtime=0), BOTH),
        ("a.csv.xz", lzma.compress(b"text\none\n"), ["one"]),
    ],
)  # fmt: skip
def test_documents_of_each_format(tmp_path, name, content, documents):
    assert read(write(tmp_path / name, content)) == documents


def test_molecules_and_other_columns_are_read_where_asked_for(tmp_path):
    for name in ("a.txt", "a.smi"):
        assert read(write(tmp_path / name, "CCO 1\n\nCC\t2"), kind="smiles") == [
            "CCO 1",
            "CC\t2",
        ]
    assert read(write(tmp_path / "a.csv", "id,text\n1,a\n2,b\n"), column="id") == ["1", "2"]
    either = write(tmp_path / "b.csv", "ID,SMILES,Text,text\n01,CCO,a,b\n")
    for column, expected in ((None, "CCO"), ("id", "01"), ("Text", "a"), ("text", "b")):
        assert read(either, kind="smiles", column=column) == [expected]
    told(lambda: read(either, column="TEXT"), either, "'TEXT' 2 times", "'Text'", "exact name")


def test_the_search_for_a_blank_line_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "NUM_LINES_SEARCHED", 3)
    assert read(write(tmp_path / "a.txt", "a\nb\nc\nd\n\ne")) == ["a", "b", "c", "d", "e"]
    assert read(write(tmp_path / "b.txt", "a\n\nc\nd\n\ne")) == ["a", "c\nd", "e"]


def test_the_search_for_a_column_is_bounded(monkeypatch):
    monkeypatch.setattr(text, "NUM_ROWS_BATCH", 3)
    rows = iter([{"n": 1}, {"n": 2}, {"m": 3}, {"text": "four"}])
    told(lambda: list(text.column_of(rows, "table", "text")), "table", "'text'", "n, m")
    assert next(rows) == {"text": "four"}


def test_one_column_of_a_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = {"text": ["one", None, " two "], "n": [1, 2, 3], "raw": [b"\xff", b"a", b"b"]}
    parquet.write_table(pyarrow.table(table), path)
    assert read(path) == ["one", "two"]
    told(lambda: read(path, column="body"), path, "'body'", "text, n")
    for column, value in (("n", "1"), ("raw", "b'")):
        told(lambda column=column: read(path, column=column), f"{path} row 0", f"is {value}")
    twice = tmp_path / "b.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), twice)
    told(lambda: read(twice), twice, "'text' 2 times")
    damaged = write(tmp_path / "c.parquet", path.read_bytes()[:-20])
    told(lambda: read(damaged), damaged, "cannot read", "again")


# ---- what may be wrong with a file ----


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("latin.txt", b"fine\ncaf\xe9", ["line 2", "0xe9", "iconv"]),
        ("packed.txt.xz", lzma.compress(b"x\n" * 50_000 + b"\xfc"), ["line 50001", "0xfc"]),
        ("cut.txt.gz", gzip.compress(b"word " * 9999, mtime=0)[:-20], ["cannot read", "again"]),
        ("cut.txt.xz", lzma.compress(bytes(range(32, 127)) * 500)[:-30], ["cannot read", "again"]),
        ("plain.txt.gz", b"not compressed", ["cannot read"]),
        ("junk.parquet", b"hello", ["cannot read"]),
        ("a.csv", "id,body\n1,hello\n", ["'text'", "id, body", "data.column"]),
        ("b.csv", "id,text\n1,a\n2,b,c\n", ["row 1 (from 0)", "3 fields", "fix that row"]),
        ("twice.csv", "text,text\n1,2\n", ["'text' 2 times", "keep one"]),
        ("short.csv", "id,text\n1,a\n2\n", ["row 1 (from 0)", "1 fields", "the header has 2"]),
        ("c.csv", 'text\na\n"never closed\nb\n', ["row 1 (from 0)", "quotation mark", "double"]),
        ("a.tsv", 'id\ttext\n1\t"a" b\n', ["row 0 (from 0)", "quotation mark", "double"]),
        ("d.csv", b"text\ncaf\xe9\n", ["line 2", "0xe9", "iconv"]),
        ("e.csv", "text\na\n".encode("utf-16"), ["line 1", "iconv"]),
        ("a.jsonl", '{"text": "a"}\n\n{"text": }\n', ["row 1 (from 0)", "fix that row"]),
        ("deep.jsonl", "[" * 100_000, ["row 0 (from 0)", "fix that row"]),
        ("b.jsonl", '{"body": "b"}\n', ["'text'", "body", "data.column"]),
        ("c.jsonl", "[1]\n", ["row 0 (from 0)", "not a JSON object"]),
        ("d.jsonl", '{"text": 5}\n', ["row 0 (from 0), column 'text'", "is 5, which is not text"]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 15 else "",
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told(tmp_path, name, content, parts):
    path = write(tmp_path / name, content)
    told(lambda: read(path), path, *parts)


def test_what_is_no_file_is_told(tmp_path):
    told(lambda: read(tmp_path / "no.txt"), tmp_path / "no.txt", "No such file")
    (tmp_path / "folder.txt").mkdir()
    told(lambda: read(tmp_path / "folder.txt"), "folder.txt", "Is a directory")


# ---- the embedded text ----


def test_the_embedded_english_is_whole_and_without_repeats():
    documents = list(embedded_english())
    assert len(documents) > 100
    assert len(set(documents)) == len(documents)
    assert 40_000 < sum(len(document.split()) for document in documents) < 120_000
    lines = [line for document in documents for line in document.split("\n")]
    assert not any(len(line) > 3 and set(line) <= set("*=-~^") for line in lines)
    prose = 'The "if" statement is used for conditional execution:'
    assert sum(prose in document for document in documents) == 1
    (document,) = (d for d in documents if d.startswith("Lambdas\n"))
    assert "used to create anonymous functions." in document  # the manual breaks this line
    assert "\ndef <lambda>(parameters):\n    return expression\n" in document


def test_a_row_of_empty_fields_is_a_row_and_a_blank_line_is_none(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n,\n\n1,2\n")
    assert read_table(path).to_numpy().tolist() == [["", ""], ["1", "2"]]


@pytest.mark.parametrize(("name", "mark"), [("t.tsv", "\t"), ("t.csv", "\t"), ("t.csv", ";")])
def test_columns_may_be_separated_by_tabs_or_semicolons(tmp_path, name, mark):
    path = tmp_path / name
    for name in ("x", '"a, b; c\t, d;"', "IC50, nM" if path.suffix == ".tsv" else "y"):
        path.write_text(f'\nsmiles{mark}{name}\n"C,C"{mark}"1,5"\nCO{mark}2\n')
        expected = {"smiles": ["C,C", "CO"], name.strip('"'): ["1,5", "2"]}
        assert read_table(path).to_dict("list") == expected
        assert list(file_documents(path, "smiles")) == ["C,C", "CO"]
