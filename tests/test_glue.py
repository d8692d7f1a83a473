"""Every GLUE task is read as its files are, and what is wrong with a file is said in one line."""

import sys

import numpy as np
import pytest
from glue_files import ROWS, write, write_task
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.glue import HUB_ID, TASKS, load_glue, read_split

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
@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_a_task_is_read_from_its_published_files(tmp_path, name, suffix):
    write_task(tmp_path, name, suffix=suffix)
    splits = load_glue(name, tmp_path)
    texts, labels = WANTED[name]
    for examples in (splits.train, splits.validation):
        assert examples.texts == texts
        assert examples.labels.tolist() == labels
        assert examples.labels.dtype == (np.float64 if name == "stsb" else np.int64)
    assert splits.test is None
    names = ["validation-mismatched"] if name == "mnli" else []
    assert [other for other, _ in splits.others] == names


@pytest.mark.parametrize("name", TASKS)
def test_a_folder_may_have_the_name_of_the_task(tmp_path, name):
    folder = write_task(tmp_path, name, folder=name)
    for source in (tmp_path, folder):
        splits = load_glue(name, source)
        assert splits.train.texts == WANTED[name][0]


line_text = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r"), min_size=1, max_size=12
)


@given(st.lists(st.tuples(line_text, line_text), min_size=1, max_size=5))
def test_any_text_of_one_line_is_read_as_it_is(tmp_path_factory, pairs):
    rows = [f"{i}\t{a}\t{b}\tentailment" for i, (a, b) in enumerate(pairs)]
    path = tmp_path_factory.mktemp("any") / "dev.tsv"
    write(path, [ROWS["rte"][0], *rows])
    assert read_split("rte", path)[0].texts == pairs


def test_broken_rows_of_qqp_are_left_out_and_counted(tmp_path):
    write_task(tmp_path, "qqp")
    assert load_glue("qqp", tmp_path).notes["left_out"] == {"train": 2, "validation": 2}


def test_a_row_with_other_fields_than_the_header_is_refused_elsewhere(tmp_path):
    path = write(tmp_path / "dev.tsv", [*ROWS["rte"], "2\tcut off"])
    told(lambda: read_split("rte", path), path, "line 4", "2 fields, not 4")
    path = write(tmp_path / "train.tsv", ["gj04\t1\tno mark"])
    told(lambda: read_split("cola", path), path, "line 1", "3 fields, not 4", "source, label")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cola", "gj04\t2\t\tWords."),
        ("sst2", "words\tpositive"),
        ("rte", "2\tA.\tB.\tneutral"),
        ("stsb", "2\tg\tf\t2012\t1\tnone\tnone\tA.\tB.\t5.5"),
        ("stsb", "2\tg\tf\t2012\t1\tnone\tnone\tA.\tB.\tnan"),
        ("stsb", "2\tg\tf\t2012\t1\tnone\tnone\tA.\tB.\t"),
    ],
)
def test_a_label_outside_the_range_is_refused(tmp_path, name, row):
    path = write(tmp_path / "train.tsv", [*ROWS[name], row])
    told(lambda: read_split(name, path), path, f"line {len(ROWS[name]) + 1}", "label")


def test_missing_columns_files_and_folders_are_refused(tmp_path):
    told(lambda: load_glue("colla", tmp_path), "colla", "cola")
    told(lambda: load_glue("cola", tmp_path), tmp_path, "CoLA", "no folder")
    told(lambda: load_glue("cola", tmp_path / "nowhere"), "nowhere", HUB_ID)
    folder = write_task(tmp_path, "rte")
    told(lambda: load_glue("cola", tmp_path), "CoLA", "RTE")
    (folder / "dev.tsv").unlink()
    told(lambda: load_glue("rte", tmp_path), folder, "dev.tsv", "train.tsv")
    path = write(
        folder / "dev.tsv", ["index\tpremise\tsentence2\tlabel", "0\tA\tB\tentailment"]
    )
    told(lambda: load_glue("rte", tmp_path), path, "sentence1", "index, premise")


def test_empty_and_damaged_files_are_refused(tmp_path):
    path = write(tmp_path / "a.tsv", ROWS["rte"][:1])
    told(lambda: read_split("rte", path), path, "no examples")
    path.write_bytes(b"")
    told(lambda: read_split("rte", path), path, "no column")
    path.write_bytes(b"index\tsentence1\tsentence2\tlabel\n0\tcaf\xe9\tB\tentailment\n")
    told(lambda: read_split("rte", path), path, "line 2", "0xe9")
    packed = write(tmp_path / "b.tsv.gz", ROWS["rte"] * 50)
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-20])
    told(lambda: read_split("rte", packed), packed, "damaged")
    packed.write_bytes(b"no gzip")
    told(lambda: read_split("rte", packed), packed, "damaged")


# ---- the hub ----


@pytest.fixture
def hub(monkeypatch):
    """Puts splits in the place of the hub's; none: the hub is out of reach."""
    datasets = pytest.importorskip("datasets")

    def put(splits):
        def load(hub_id, config):
            assert hub_id == HUB_ID and config in TASKS
            if splits is None:
                raise ConnectionError("no network\nat all")
            return {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}

        monkeypatch.setattr(datasets, "load_dataset", load)

    return put


def rte_rows(labels):
    return {
        "sentence1": [f"A {i}." for i in range(len(labels))],
        "sentence2": [f"B {i}." for i in range(len(labels))],
        "label": labels,
        "idx": [10 + i for i in range(len(labels))],
    }


def test_a_task_is_read_from_the_hub(hub):
    hub({"train": rte_rows([0, 1]), "validation": rte_rows([1])})
    splits = load_glue("rte")
    assert splits.train.texts == [("A 0.", "B 0."), ("A 1.", "B 1.")]
    assert splits.train.labels.tolist() == [0, 1]


def test_the_hubs_mnli_has_its_mismatched_halves(hub):
    rows = {"premise": ["P."], "hypothesis": ["H."], "label": [2], "idx": [0]}
    names = ("train", "validation_matched", "validation_mismatched")
    hub(dict.fromkeys(names, rows))
    splits = load_glue("mnli")
    assert splits.validation.texts == [("P.", "H.")]
    assert [(name, e.labels.tolist()) for name, e in splits.others] == [
        ("validation-mismatched", [2])
    ]


def test_what_is_wrong_with_the_hub_is_said(hub, monkeypatch):
    train = rte_rows([0, 1])
    hub({"train": train})
    told(lambda: load_glue("rte"), "no split validation", "train")
    hub({"train": train | {"label": [0, 2]}})
    told(lambda: load_glue("rte"), "rte train row 1", "0 to 1")
    hub({"train": train | {"label": [0, -1]}})  # as the hub writes a secret one
    told(lambda: load_glue("rte"), "rte train row 1", "0 to 1")
    hub({"train": rte_rows([])})
    told(lambda: load_glue("rte"), "no examples")
    hub({"train": {"text": ["A."], "label": [0]}})
    told(lambda: load_glue("rte"), "sentence1", "text, label")
    hub(None)
    told(lambda: load_glue("rte"), HUB_ID, "no network", "directory")
    monkeypatch.setitem(sys.modules, "datasets", None)
    told(lambda: load_glue("rte"), "exlm-mini[text]")


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
    told(lambda: load_glue("qnli", data_dir / "glue"), "QNLI", "train.tsv", "dev.tsv.gz")
