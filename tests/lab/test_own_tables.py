"""A user's table: formats, kinds of targets, which rows are left out and which tables refused."""

import csv
import datetime
import gzip
import json
import lzma

import numpy as np
import pandas
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_tables import SMILES, asked, frame_of, load
from refusals import told

from exlm_lab.downstream.tables import chunks, read_table, table_writer
from exlm_lab.downstream.targets import encode

pytest.importorskip("rdkit", reason="rdkit is not installed")
FORMATS = [f"{suffix}{more}" for suffix in (".csv", ".jsonl", ".parquet")
           for more in ("", ".gz", ".xz")]  # fmt: skip


def write(frame, path):
    inner = path.name.partition(".")[2].partition(".")[0]
    data = {
        "csv": lambda: frame.to_csv(index=False, lineterminator="\r\n").encode(),
        "jsonl": lambda: frame.to_json(orient="records", lines=True).encode(),
        "parquet": frame.to_parquet,
    }[inner]()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


# ---- files ----


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_task(tmp_path, suffix):
    values = [None if n == 3 else n / 4 for n in range(40)]
    path = write(frame_of(pIC50=values, Name=["a, b"] * 40), tmp_path / f"t{suffix}")
    task, splits = load(read_table(path), asked("pIC50"))
    assert (task.kind, task.classes, task.metric) == ("numbers", ("pIC50",), "r2")
    assert splits.notes["rejected"] == [{"row": 3, "why": "it has no answer"}]
    found = {
        text: label
        for part in splits[:3]
        for (text,), (label,) in zip(part.texts, part.labels.tolist(), strict=True)
    }
    assert found == {s: v for s, v in zip(SMILES, values, strict=True) if v is not None}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_table_is_written_as_it_was_read_piece_by_piece(tmp_path, suffix):
    frame = frame_of(
        n=range(40), name=['a "b", c\n', "a\rb"] * 20, half=[0.1 * n for n in range(40)]
    )
    path = write(frame, tmp_path / f"t{suffix}")
    output = copied(path, tmp_path / f"out{suffix}")
    pandas.testing.assert_frame_equal(read_table(output), read_table(path))
    empty = write(frame[:0], tmp_path / f"e{suffix}")
    header = [] if suffix == ".jsonl" else [*frame]
    for one in (empty, copied(empty, tmp_path / f"none{suffix}")):
        assert [*read_table(one)] == header


def copied(path, output):
    with table_writer(output) as add:
        for piece in chunks(path, 7):
            assert len(piece) <= 7
            add(piece)
        assert not output.exists()
    return output


def test_a_column_of_a_parquet_may_begin_with_nothing(tmp_path):
    notes = [None] * 39 + ["late"]
    path = write(frame_of(note=notes), tmp_path / "t.csv")
    output = read_table(copied(path, tmp_path / "out.parquet"))
    assert output["note"].fillna("").tolist() == [note or "" for note in notes]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_lines_keep_their_digits_and_need_not_have_all_columns(tmp_path, suffix):
    half = "\ud800"  # half of a surrogate pair, which CSV cannot hold
    rows = [{"a": "C", "k": 1.23456789e-12}] * 9 + [{"late": half}, {"k": None, "a": ""}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = read_table(copied(path, tmp_path / f"out{suffix}"))
    assert [*output] == ["a", "k", "late"]
    expected = [[row.get(name) or "" for name in output] for row in rows]
    if suffix in (".csv", ".tsv"):
        expected = [[str(cell).replace(half, r"\ud800") for cell in row] for row in expected]
    assert output.fillna("").to_numpy().tolist() == expected


def test_pandas_reads_what_is_written_of_every_type(tmp_path):
    frame = pandas.DataFrame({"word": pandas.Categorical(["a", "b"]), "list": [[1], None]})
    frame["day"] = pandas.array(
        [datetime.date(2026, 1, 1), None], pandas.ArrowDtype(pyarrow.date32())
    )
    path = write(frame.set_index("day"), tmp_path / "t.parquet")  # a column of the file, too
    words = pandas.read_parquet(copied(path, tmp_path / "o.parquet"))["word"]
    assert words.tolist() == ["a", "b"]
    lines = read_table(copied(path, tmp_path / "o.jsonl")).to_dict("records")
    assert lines[0] == {"word": "a", "list": [1], "day": "2026-01-01"}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_lists_are_written_whole(tmp_path, suffix):
    cells = {"numbers": [list(range(2000)), None], "facts": [{"é": 1.5}, None], "a": ["[", "b"]}
    path = write(pandas.DataFrame(cells), tmp_path / "t.parquet")
    output = read_table(copied(path, tmp_path / f"out{suffix}"))
    for name in ("numbers", "facts"):
        assert json.loads(output[name][0]) == cells[name][0] and not output[name][1]
    assert [*output["a"]] == cells["a"]


@pytest.mark.parametrize(
    ("suffix", "header", "row", "parts"),
    [
        (".jsonl", ["a", "a"], [1, 2], ("two columns named 'a'",)),
        (".parquet", ["a"], ["x"], ("'a' in rows 0 to 0", "the type of its first rows")),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, suffix, header, row, parts):
    output = tmp_path / f"o{suffix}"

    def run():
        with table_writer(output) as add:
            for cells in ([1] * len(row), row):
                add(pandas.DataFrame([cells], columns=header, dtype=object))

    told(run, output, *parts)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("t.csv", 'a,b\n"1,2\n', ("t.csv",)),
        ("t.jsonl", "{}\n{", ("t.jsonl", "row 1 (from 0)")),
        ("t.parquet", "PAR1 and no more", ("t.parquet",)),
        ("t.txt", "a", ("is not a table", ".csv, .tsv, .jsonl, .parquet")),
        ("t.csv.gz", "a,b", ("t.csv.gz",)),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, text, parts):
    path = tmp_path / name
    path.write_text(text)
    told(lambda: read_table(path), path, *parts)


def test_a_cell_may_hold_a_book(tmp_path):
    csv.field_size_limit(2**17)  # Python's default
    path = write(frame_of(book=["word " * 2**15] * 40), tmp_path / "t.csv")
    assert len(read_table(path)["book"][0]) == 5 * 2**15


# ---- targets ----

CELLS = {
    "labels": st.sampled_from(["0", "1", "0.0", " 1 ", "", None]),
    "numbers": st.one_of(st.floats(-9, 9).map(str), st.just(""), st.just(None), st.just("7")),
    "classes": st.sampled_from(["red", "green", "blue", "", None]),
}


@given(st.data(), st.sampled_from(list(CELLS)))
def test_cells_come_back_as_written_and_say_their_kind(data, kind):
    anchor = {"labels": ["0", "1"], "numbers": ["2.5", "7"], "classes": ["red", "blue"] * 3}
    cells = data.draw(st.lists(CELLS[kind], max_size=30)) + anchor[kind]
    task, labels_RC, reasons = encode(
        [("t", 0)], np.array(cells, dtype=object)[:, None], asked("x")
    )
    assert task.kind == kind
    words = ["" if cell is None else cell.strip() for cell in cells]
    if kind == "classes":
        assert task.classes == tuple(sorted(set(words) - {""}))
        expected = [task.classes.index(word) if word else np.nan for word in words]
    else:
        expected = [float(word) if word else np.nan for word in words]
    np.testing.assert_array_equal(labels_RC[:, 0], expected)
    assert set(reasons) == {row for row, word in enumerate(words) if not word}


@pytest.mark.parametrize(
    ("cells", "kind", "expected", "classes"),
    [
        ([0, 1] * 5, None, "labels", ("x",)),
        ([True, False] * 5, None, "labels", ("x",)),
        ([1, 2, 10] * 4, None, "numbers", ("x",)),
        (["1", "2.0", "1.0", "10"] * 3, "classes", "classes", ("1", "2", "10")),
        (["TRUE", "FALSE"] * 5, None, "labels", ("x",)),
        (["yes", "no", "#N/A"] * 5, None, "classes", ("no", "yes")),
        (["0", "1", "NA"] * 5, None, "labels", ("x",)),
        (["1.5", "2", "nan", "None"] * 5, None, "numbers", ("x",)),
        (["low", "high", "none"] * 5, None, "classes", ("high", "low", "none")),
        (["1", "2", "none"] * 5, "classes", "classes", ("1", "2", "none")),
        (["0", "1", "<NA>"] * 5, "classes", "labels", ("x",)),
        (["2020_01", "2020_02"] * 5, None, "classes", ("2020_01", "2020_02")),
        (["1", "2", "low"] * 5, "classes", "classes", ("1", "2", "low")),
        ([0, 1] * 5, "classes", "labels", ("x",)),
        ([0, 1] * 5, "numbers", "numbers", ("x",)),
        (["yes", "no"] * 5, None, "classes", ("no", "yes")),
    ],
)
def test_a_target_is_what_its_cells_are_or_what_is_asked_for(cells, kind, expected, classes):
    task, *_ = encode([("t", 0)], np.array(cells, dtype=object)[:, None], asked("x", kind=kind))
    assert (task.kind, task.classes) == (expected, classes)


def test_accents_are_the_same_however_they_are_coded():
    gefühl, schön = ("Gefu\u0308hl", "scho\u0308n")
    frame = frame_of(**{gefühl: [schön, "schön", "hässlich", "hässlich"] * 10})
    task, *_ = load(frame, asked("Gefühl"))
    assert task.classes == ("hässlich", "schön")


def test_few_wrong_cells_are_left_out_and_named_many_are_refused():
    cells = np.array([*map(str, range(2, 39)), "n/a", "low", "inf"], dtype=object)[:, None]
    _, labels_RC, reasons = encode([("t", 0)], cells, asked("x"))
    assert reasons == {
        37: "it has no answer",
        38: "'x' is 'low', not a number below 1e+30 or an empty cell",
        39: "'x' is 'inf', not a number below 1e+30 or an empty cell",
    }  # fmt: skip
    assert np.isnan(labels_RC[37:]).all() and labels_RC[36] == 38
    cells[:10] = "strange"
    told(
        lambda: encode([("t", 0)], cells, asked("x", kind="numbers")),
        "t row 0",
        "13 rows in all are wrong",
    )


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"x": [""] * 40}, ("x holds no answers",)),
        ({"x": [f"id{n}" for n in range(40)]}, ("40 different words", "names")),
        (
            {"x": ["a", "b"] * 20, "y": [0, 1] * 20},
            ("'x' holds classes", "in a separate command"),
        ),
        ({"x": [1, 2] * 20, "y": [""] * 40}, ("y holds no answers",)),
        ({"x": [[1]] * 40}, ("holds lists",)),
        ({"x": ["1e40", "2"] * 20}, ("row 0", "'1e40'", "below 1e+30")),
        ({"x": ["0.1", ""] * 20}, ("'x' holds only '0.1'",)),
        ({"x": ["yes", ""] * 20}, ("'x' holds only 'yes'",)),
        ({"x": ["1,5", "-2", "0", "NA"] * 10}, ("'x' holds '1,5'", "decimal point")),
        ({"x": ["1,000.5", "2", "3", "4"] * 10}, ("'x' holds '1,000.5'", "thousands")),
        ({"x": ["−1", "−2", "3", ""] * 10}, ("'x' holds '−1'", "a hyphen as minus")),
        ({"x": ["5", "6", "7", ">10"] * 10}, ("numbers and '>10' in 10 rows", "--kind")),
    ],
)
def test_targets_that_make_no_task_are_refused(columns, parts):
    told(lambda: load(frame_of(**columns), asked(*columns)), "mine.csv", *parts)


@pytest.mark.parametrize(
    ("kind_of", "kind", "is_number"),
    [(None, "mixed", [True, False]), ("numbers", "numbers", [True, True])],
)
def test_several_targets_keep_what_is_missing(kind_of, kind, is_number):
    first = [None if n % 3 else n / 2 for n in range(40)]
    second = [n // 2 % 2 if n % 2 else None for n in range(40)]
    task, splits = load(frame_of(a=first, b=second), asked("a", "b", kind=kind_of))
    assert task.kind == kind and task.classes == ("a", "b")
    assert task.is_number.tolist() == is_number
    labels_RC = np.concatenate([part.labels for part in splits[:3]])
    num_empty = sum(a is None and b is None for a, b in zip(first, second, strict=True))
    assert len(labels_RC) == 40 - num_empty == 40 - len(splits.notes["rejected"])
    assert (~np.isnan(labels_RC)).sum() == 14 + 20


# ---- rows ----


def test_rows_that_cannot_be_read_are_named_and_left_out():
    bad = {1: "C1CC(", 5: "", 9: None, 11: "CC |^1:0|"}
    smiles = [bad.get(row, text) for row, text in enumerate(SMILES)]
    frame = pandas.DataFrame({"smiles": smiles, "x": [0, 1] * 20})
    _, splits = load(frame, asked("x"))
    rejected = {note["row"]: note["why"] for note in splits.notes["rejected"]}
    assert rejected.keys() == bad.keys() and "C1CC(" in rejected[1]
    assert sum(splits.notes["sizes"]) == 36


def test_a_row_whose_other_answer_can_be_used_loses_a_cell():
    frame = frame_of(x=[*map(str, range(39)), "low"], y=[0, 1] * 20)
    _, splits = load(frame, asked("x", "y"))
    (cell,) = splits.notes["cells_left_out"]
    assert cell["row"] == 39 and not splits.notes["rejected"]
    assert sum(splits.notes["sizes"]) == 40


def test_pairs_need_both_texts():
    frame = pandas.DataFrame(
        {"a": ["one", ""] + ["two"] * 18, "b": ["x y"] * 20, "c": [0, 1] * 10}
    )
    _, splits = load(frame, asked("c", columns=("a", "b"), input="text"))
    assert splits.train.texts[0] in [("one", "x y"), ("two", "x y")]
    assert [note["row"] for note in splits.notes["rejected"]] == [1]


def test_wrong_cells_are_counted_among_those_that_hold_something():
    frame = frame_of(pIC50=[None] * 30 + [*range(8), "x", "y"])
    told(
        lambda: load(frame, asked("pIC50", kind="numbers")), "row 38", "2 rows in all are wrong"
    )
