"""One loader for every source; whatever is wrong with a file is told in one line."""

import gzip
import json
import lzma
import sys
from itertools import islice

import pytest
from refusals import told

from exlm_mini.data import text
from exlm_mini.data.english import embedded_english
from exlm_mini.data.text import file_documents

CHAPTERS = "First line.\nSecond line.\n\n  \nA new chapter.\n"


def read(path, **settings):
    """All documents of a file."""
    return list(file_documents(path, **({"kind": "text"} | settings)))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- formats ----


def test_blank_lines_end_documents(tmp_path):
    path = write(tmp_path / "a.txt", CHAPTERS)
    assert read(path) == ["First line.\nSecond line.", "A new chapter."]


def test_without_blank_lines_every_line_is_a_document(tmp_path):
    path = write(tmp_path / "a.txt", "\none\ntwo\r\nthree\n\n")
    assert read(path) == ["one", "two", "three"]


def test_the_search_for_a_blank_line_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "NUM_LINES_SEARCHED", 3)
    assert read(write(tmp_path / "a.txt", "a\nb\nc\nd\n\ne")) == ["a", "b", "c", "d", "e"]
    assert read(write(tmp_path / "b.txt", "a\n\nc\nd\n\ne")) == ["a", "c\nd", "e"]


def test_lines_end_at_newlines_only(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\u2028still one\x0bstill\ntwo\x1cstill")
    assert read(path) == ["one\u2028still one\x0bstill", "two\x1cstill"]


def test_a_smi_line_begins_with_its_molecule(tmp_path):
    path = write(tmp_path / "a.smi", "CCO ethanol\n\nC[C@H](N)C\t7\n")
    assert read(path) == ["CCO", "C[C@H](N)C"]
    assert read(write(tmp_path / "a.txt", "CCO 1\n\nCC 2"), kind="smiles") == ["CCO", "CC"]


def test_one_column_of_a_csv(tmp_path):
    path = write(tmp_path / "a.csv", 'id,text\n1,"one, ""two""\nthree"\n2,four\n3,\n\n')
    assert read(path) == ['one, "two"\nthree', "four"]
    assert read(path, column="id") == ["1", "2", "3"]


def test_a_csv_field_may_be_a_book(tmp_path):
    assert read(write(tmp_path / "a.csv", "text\n" + "a" * 200_000)) == ["a" * 200_000]


def test_one_key_of_a_jsonl(tmp_path):
    rows = [{"text": "one\ntwo", "n": 1}, {"text": None}, {"text": "drei ü"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(path) == ["one\ntwo", "drei ü"]


def test_one_column_of_a_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["one", None, " two "], "n": [1, 2, 3]})
    parquet.write_table(table, path)
    assert read(path) == ["one", "two"]
    packed = write(tmp_path / "b.parquet.gz", gzip.compress(path.read_bytes()))
    assert read(packed) == ["one", "two"]
    told(lambda: read(path, column="body"), path, "'body'", "text, n")
    told(lambda: read(path, column="n"), path, "int, not text")
    damaged = write(tmp_path / "c.parquet", path.read_bytes()[:-20])
    told(lambda: read(damaged), damaged, "is damaged", "again")
    junk = write(tmp_path / "d.parquet", b"hello")
    told(lambda: read(junk), junk, "is damaged")


@pytest.mark.parametrize("kind", ["date32", "timestamp", "duration", "binary", "text"])
def test_a_parquet_column_of_another_kind_is_told(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    if kind in ("binary", "text"):
        content = pyarrow.array([b"\xff\xfe", b"fine"])
        if kind == "text":  # declared as UTF-8, and none
            content = pyarrow.Array.from_buffers(pyarrow.string(), 2, content.buffers())
    else:
        unit = () if kind == "date32" else ("us",)
        content = pyarrow.array([5, 2**30], getattr(pyarrow, kind)(*unit))
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": content}), path)
    told(lambda: read(path), path)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_any_format_may_be_compressed(tmp_path, suffix, compress):
    path = write(tmp_path / f"a.TXT{suffix}", compress(CHAPTERS.encode()))
    assert len(read(path)) == 2
    path = write(tmp_path / f"a.csv{suffix}", compress(b"text\none\n"))
    assert read(path) == ["one"]


# ---- what may be wrong with a file ----


def test_a_file_must_be_there_and_hold_something(tmp_path):
    told(lambda: read(tmp_path / "no.txt"), tmp_path / "no.txt", "No such file")
    empty = write(tmp_path / "empty.txt", "")
    told(lambda: read(empty), empty, "no documents", "give")
    blank = write(tmp_path / "blank.txt", " \n\n")
    told(lambda: read(blank), blank, "no documents", "give")
    header = write(tmp_path / "header.csv", "text\n")
    told(lambda: read(header), header, "no documents")
    nothing = write(tmp_path / "nothing.txt.gz", gzip.compress(b""))
    told(lambda: read(nothing), nothing, "no documents")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    told(lambda: read(folder), folder, "Is a directory")


@pytest.mark.parametrize("name", ["a.text", "a.tx.gz", "a.json", "a", "a.tsv.xz"])
def test_an_unknown_suffix_offers_the_known(tmp_path, name):
    path = write(tmp_path / name, "hello")
    told(lambda: read(path), path, "unknown suffix", ".txt" if "t" in name else ".json")


def test_bytes_that_are_not_text_are_placed(tmp_path):
    binary = write(tmp_path / "a.txt", b"fine\nno\x00t")
    told(lambda: read(binary), binary, "binary", "byte 7", "UTF-8")
    latin = write(tmp_path / "b.txt", "fine\ncafé".encode("latin-1"))
    told(lambda: read(latin), latin, "not UTF-8", "0xe9 at position 8", "iconv")
    packed = write(tmp_path / "c.txt.xz", lzma.compress(b"x\n" * 50_000 + b"\xfc"))
    told(lambda: read(packed), packed, "not UTF-8", "position 100000")


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_a_damaged_archive_is_told(tmp_path, suffix, compress):
    whole = compress(bytes(range(32, 127)) * 5000)
    cut = write(tmp_path / f"cut.txt{suffix}", whole[: len(whole) // 2])
    told(lambda: read(cut), cut, "is damaged", "again")
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 0xFF
    flipped = write(tmp_path / f"flipped.txt{suffix}", bytes(middle))
    told(lambda: read(flipped), flipped, "is damaged")
    plain = write(tmp_path / f"plain.txt{suffix}", b"not compressed")
    told(lambda: read(plain), plain, "is damaged")


def test_a_missing_column_lists_those_there(tmp_path):
    table = write(tmp_path / "a.csv", "id,body\n1,hello\n")
    told(lambda: read(table), table, "'text'", "id, body", "data.column")
    wide = write(tmp_path / "b.csv", '"two\nlines",' + ",".join(map(str, range(500))) + "\n")
    assert len(told(lambda: read(wide), wide, "two lines, 0, 1", "18, ...")) < 300
    lines = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"body": "b"}\n')
    told(lambda: read(lines), f"{lines} line 2", "'text'", "body", "data.column")


def test_what_is_too_long_to_encode_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LONGEST", 1000)
    long = "x" * 1001
    told(lambda: read(write(tmp_path / "a.txt", long)), "a.txt", "1,000")
    told(lambda: read(write(tmp_path / "a.txt.gz", gzip.compress(long.encode()))), "1,000")
    told(lambda: read(write(tmp_path / "b.txt", "a\n\n" + "b\n" * 501)), "b.txt", "1,000")
    told(
        lambda: read(write(tmp_path / "a.csv", f'text\n"{"x" * 990}\n{"y" * 20}"')),
        "a.csv",
        "field",
    )
    assert read(write(tmp_path / "c.txt", long[1:])) == [long[1:]]


def test_a_bad_line_is_numbered(tmp_path):
    lines = write(tmp_path / "a.jsonl", '{"text": "a"}\n\n{"text": }\n')
    told(lambda: read(lines), f"{lines} line 3", "JSONDecodeError")
    lines = write(tmp_path / "b.jsonl", '["a"]\n')
    told(lambda: read(lines), f"{lines} line 1", "not a JSON object")
    lines = write(tmp_path / "c.jsonl", '{"text": 5}\n')
    told(lambda: read(lines), f"{lines} line 1", "int, not text", "data.column")
    lines = write(tmp_path / "d.jsonl", '{"text": "a\\ud800"}\n')
    told(lambda: read(lines), f"{lines} line 1", "surrogate", "character 1")
    lines = write(tmp_path / "f.jsonl", '{"text": ' + "9" * 5000 + "}\n")
    told(lambda: read(lines), f"{lines} line 1", "4300 digits")
    lines = write(tmp_path / "e.jsonl", "[" * 100_000)
    told(lambda: read(lines), f"{lines} line 1", "RecursionError")
    table = write(tmp_path / "a.csv", "id,text\n1,a\n2,b,c\n")
    told(lambda: read(table), f"{table} line 3", "3 fields", "quote")
    table = write(tmp_path / "b.csv", 'text\n"never closed\n')
    told(lambda: read(table), f"{table} line", "no CSV", "mend")


# ---- the embedded text ----


def test_the_embedded_english_is_whole_and_without_repeats():
    documents = list(embedded_english())
    assert len(documents) > 100
    assert len(set(documents)) == len(documents)
    assert 40_000 < sum(len(document.split()) for document in documents) < 120_000
    assert all(document == document.strip() for document in documents)
    lines = [line for document in documents for line in document.split("\n")]
    assert not any(len(line) > 3 and set(line) <= set("*=-~^") for line in lines)
    long_lines = [line for line in lines if len(line) > 200]
    assert len(set(long_lines)) == len(long_lines) > 300
    prose = 'The "if" statement is used for conditional execution:'
    assert sum(prose in document for document in documents) == 1


def test_a_wrapped_paragraph_becomes_one_line():
    (document,) = (d for d in embedded_english() if d.startswith("Lambdas\n"))
    assert "used to create anonymous functions." in document
    assert "\ndef <lambda>(parameters):\n    return expression\n" in document


def test_without_pydoc_data_the_remedy_is_a_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    told(lambda: list(embedded_english()), "pydoc_data", "data.files")


# ---- real files ----


def test_chapters_of_a_real_book_are_documents(data_dir):
    path = data_dir / "text" / "openstax.txt.xz"
    chapters = list(islice(file_documents(path, "text"), 30))
    assert len(chapters) == 30
    assert chapters[0].startswith("What is Government?\nLearning Objectives\n")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        assert chapters[0] == "".join(iter(lines.readline, "\n")).strip()
