"""Every GLUE task is read as its files are, and what is wrong with a file is said in one line."""

from functools import partial

import numpy as np
import pytest
from glue_files import ROWS, write, write_task
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.glue import HUB_ID, LAYOUTS, TASKS, load_glue, read_split

WANTED = {
    "cola": ([("The sailors rode.",), ('Sailors the "rode.',)], [1, 0]),
    "sst2": ([("a charming journey . ",), ("flat ",)], [1, 0]),
    "mrpc": ([("He said so.", '"He said so.'), ("A bank.", "A shop.")], [1, 0]),
    "stsb": ([("A man.", "A boy."), ("A dog.", "The dog.")], [3.8, 5.0]),
    "qqp": ([("How is it?", "How was it?"), ('Why "so"?', "Why?")], [0, 1]),
    "mnli": ([("It rains.", "It is dry."), ("He ate.", "He was there.")], [2, 0]),
    "qnli": ([("When?", "In 1970."), ("Where?", "In 1970.")], [0, 1]),
    "rte": ([("No one came.", "Some came."), ("Three came.", "Some came.")], [1, 0]),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_from_its_published_files(tmp_path, name):
    write_task(tmp_path / "plain", name)
    packed = write_task(tmp_path / "packed", name, folder=name, suffix=".tsv.gz")
    texts, labels = WANTED[name]
    for path in write_task(tmp_path / "windows", name).iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    for source in (*(tmp_path / way for way in ("plain", "packed", "windows")), packed):
        splits = load_glue(name, source)
        for examples in (splits.train, splits.validation):
            assert examples.texts == texts
            assert examples.labels.tolist() == labels
            assert examples.labels.dtype == (np.float64 if name == "stsb" else np.int64)
        names = ["validation-mismatched"] if name == "mnli" else []
        assert splits.test is None and [other for other, _ in splits.others] == names
        broken = {"train": 2, "validation": 2} if name == "qqp" else {}
        assert splits.notes["left_out"] == broken


line_text = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r"), min_size=1, max_size=12
)


@settings(max_examples=20)
@given(st.lists(st.tuples(line_text, line_text), min_size=1, max_size=5))
def test_any_text_of_one_line_is_read_as_it_is(tmp_path_factory, pairs):
    rows = [f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(pairs)]
    path = tmp_path_factory.mktemp("any") / "dev.tsv"
    write(path, [ROWS["rte"][0], *rows])
    assert read_split("rte", path)[0].texts == pairs


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("cola", "gj04\t2\t\tWords.", "'2'"),
        ("rte", "2\tA.\tB.\tneutral", "'neutral'"),
        ("stsb", "2\tg\tf\t2012\t1\tnone\tnone\tA.\tB.\t5.5", "'5.5'"),
        ("rte", "2\tcut off", "2 fields, not 4"),
    ],
)
def test_a_row_that_cannot_be_is_refused(tmp_path, name, row, part):
    path = write(tmp_path / "train.tsv", [*ROWS[name], row])
    told(lambda: read_split(name, path), path, part)


def test_missing_and_damaged_files_are_told_by_name(tmp_path):
    told(lambda: load_glue("cola", tmp_path), tmp_path, "cola", "no folder")
    folder = write_task(tmp_path, "rte")
    (folder / "dev.tsv").unlink()
    told(lambda: load_glue("rte", tmp_path), folder, "dev.tsv", "train.tsv")
    for content, part in (
        (b"index\tpremise\tsentence2\tlabel\n0\tA\tB\tentailment\n", "sentence1"),
        (b"index\tsentence1\tsentence2\tlabel\n", "no examples"),
        (b"index\tsentence1\tsentence2\tlabel\n0\tcaf\xe9\tB\tentailment\n", "0xe9"),
    ):
        (folder / "dev.tsv").write_bytes(content)
        told(lambda: load_glue("rte", tmp_path), folder / "dev.tsv", part)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "cola"])
def test_a_column_is_known_in_any_case_and_refused_twice(tmp_path, name):
    header, *rows = ROWS[name]
    path = tmp_path / "dev.tsv"

    def read(*lines):
        return read_split(name, write(path, lines))[0]

    plain, found = read(header, *rows), read(header.upper().replace("\t", " \t"), *rows)
    assert found.texts == plain.texts and found.labels.tolist() == plain.labels.tolist()
    for column in (*LAYOUTS[name].texts, LAYOUTS[name].label):
        for own in (column, column.upper()):
            odd = [f"{header}\t{own}", *(f"{row}\t0" for row in rows)]
            told(partial(read, *odd), path, f"'{column}' 2 times", "keep one")
        other = header.replace(column, "other")
        told(partial(read, other, *rows), path, f"no column '{column}'", "rename")


# ---- the hub ----


def test_a_task_is_read_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    names = ("train", "validation_matched", "validation_mismatched")
    rows = {"premise": ["P.", "Q."], "hypothesis": ["H.", "I."], "label": [2, 0], "idx": [5, 6]}

    def load(hub_id, config):
        assert (hub_id, config) == (HUB_ID, "mnli")
        return {name: datasets.Dataset.from_dict(rows) for name in names}

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = load_glue("mnli")
    ((other, mismatched),) = splits.others
    assert other == "validation-mismatched"
    for examples in (splits.train, splits.validation, mismatched):
        assert examples.texts == [("P.", "H."), ("Q.", "I.")]
        assert examples.labels.tolist() == [2, 0]
    rows["label"] = [0, -1]  # as the hub writes a secret one
    told(lambda: load_glue("mnli"), "mnli train row 1", "-1")


# ---- the real files ----

ROW_COUNTS = {
    "cola": (8551, 1043), "sst2": (67349, 872), "stsb": (5749, 1500), "rte": (2490, 277),
    "mrpc": (3668, 408),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_COUNTS)
def test_the_real_files_have_the_published_sizes(data_dir, name):
    splits = load_glue(name, data_dir / "glue")
    assert (len(splits.train.texts), len(splits.validation.texts)) == ROW_COUNTS[name]
    assert splits.notes["left_out"] == {}
    assert all(all(text.strip() for text in row) for row in splits.train.texts)


def test_the_real_labels_are_as_published(data_dir):
    rte = load_glue("rte", data_dir / "glue")
    assert np.bincount(rte.train.labels).tolist() == [1249, 1241]
    assert np.bincount(rte.validation.labels).tolist() == [146, 131]
    qnli, num_left_out = read_split("qnli", data_dir / "glue" / "QNLI" / "dev.tsv.gz")
    assert np.bincount(qnli.labels).tolist() == [2702, 2761] and num_left_out == 0
