"""Every GLUE task is read as the hub lays it out; what is wrong with a file is said in one line."""

import numpy as np
import pytest
from glue_files import table, write_task
from refusals import told

from exlm_lab.downstream.glue import HUB_ID, TASKS, TEXTS, load_glue


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_from_a_folder_laid_out_like_the_hub(tmp_path, name):
    write_task(tmp_path / "all", name)
    own = write_task(tmp_path, name, folder=name.upper())
    for source in (tmp_path / "all", own):
        splits = load_glue(name, source)
        others = [examples for _, examples in splits.others]
        for examples in (splits.train, splits.validation, *others):
            assert examples.texts == [*zip(*(table(name)[c] for c in TEXTS[name]), strict=True)]
            assert examples.labels.tolist() == table(name)["label"].tolist()
            assert examples.labels.dtype == (np.float64 if name == "stsb" else np.int64)
        halves = ["validation-mismatched"] if name == "mnli" else []
        assert splits.test is None and [other for other, _ in splits.others] == halves


def test_a_task_is_read_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(hub_id, config):
        assert (hub_id, config) == (HUB_ID, "mnli")
        names = ("train", "validation_matched", "validation_mismatched")
        return {name: datasets.Dataset.from_pandas(table("mnli")) for name in names}

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = load_glue("mnli")
    assert splits.validation.labels.tolist() == splits.others[0][1].labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("name", "label"), [("cola", 2), ("rte", -1), ("stsb", 5.5), ("mnli", 3)]
)
def test_a_label_that_cannot_be_is_refused(tmp_path, name, label):
    folder = write_task(tmp_path, name)
    rows = table(name)
    rows.loc[1, "label"] = label
    rows.to_parquet(folder / "train-00000-of-00001.parquet")
    told(lambda: load_glue(name, tmp_path), folder, "train row 1", str(label))


@pytest.mark.parametrize("column", [*TEXTS["rte"], "label"])
def test_a_column_is_known_in_any_case_and_missed_by_name(tmp_path, column):
    folder = write_task(tmp_path, "rte")
    path = folder / "train-00000-of-00001.parquet"
    table("rte").rename(columns={column: f" {column.upper()}"}).to_parquet(path)
    assert load_glue("rte", tmp_path).train.labels.tolist() == [1, 0]
    table("rte").rename(columns={column: "other"}).to_parquet(path)
    told(lambda: load_glue("rte", tmp_path), folder, f"no column '{column}'", "rename")


def test_missing_and_damaged_files_are_told_by_name(tmp_path):
    told(lambda: load_glue("cola", tmp_path), tmp_path, "cola", "no folder")
    folder = write_task(tmp_path, "rte")
    (folder / "validation-00000-of-00001.parquet").unlink()
    told(lambda: load_glue("rte", tmp_path), folder, "validation")
    (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    told(lambda: load_glue("rte", tmp_path), folder)
