"""Every GLUE task is read in the hub's layout; errors in a file are reported in one line."""

import numpy as np
import pytest
from glue_files import table, write_task
from refusals import told

from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.glue import HUB_ID, TASKS, read
from exlm_lab.downstream.settings import ReadingConfig


def load_glue(name, source=None):
    return load_table(*read(name, source), ReadingConfig())


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_from_a_folder_laid_out_like_the_hub(tmp_path, name):
    write_task(tmp_path / "all", name)
    own = write_task(tmp_path, name, folder=name.upper())
    for source in (tmp_path / "all", own):
        task, splits = load_glue(name, source)
        assert (task.name, task.metric) == (name, TASKS[name].metric)
        others = [examples for _, examples in splits.others]
        for examples in (splits.train, splits.validation, *others):
            columns = [table(name)[column] for column in TASKS[name].columns]
            assert examples.texts == [*zip(*columns, strict=True)]
            assert examples.labels.ravel().tolist() == table(name)["label"].tolist()
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
    _, splits = load_glue("mnli")
    assert splits.validation.labels.tolist() == splits.others[0][1].labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("name", "label"), [("cola", 2), ("rte", -1), ("stsb", float("inf")), ("mnli", 3)]
)
def test_a_label_that_cannot_be_is_refused(tmp_path, name, label):
    folder = write_task(tmp_path, name)
    rows = table(name)
    rows.loc[1, "label"] = label
    rows.to_parquet(folder / "train-00000-of-00001.parquet")
    told(lambda: load_glue(name, tmp_path), folder, "row 1 (from 0)", str(label))


def test_a_missing_file_is_told_by_name(tmp_path):
    told(lambda: load_glue("cola", tmp_path), tmp_path, "holds no cola")
    folder = write_task(tmp_path, "rte")
    (folder / "validation-00000-of-00001.parquet").unlink()
    told(lambda: load_glue("rte", tmp_path), folder, "validation")
