"""A task of ids comes back from its file as it was, and learns as it would have.

Shapes: R rows, C outputs.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from refusals import told

from exlm_lab.downstream.encoded import (
    EncodedPart,
    EncodedTask,
    load_encoded_task,
    save_encoded_task,
)
from exlm_lab.downstream.prepared import problem_of
from exlm_lab.downstream.task import Task

LABELS = {
    "classes": np.array([0, 1, 1]),
    "number": np.array([1.0, 3.0, 2.0]),
    "labels": np.array([[0.0, np.nan], [1.0, 1.0], [np.nan, 0.0]]),
}


def part(labels, first: int = 5) -> EncodedPart:
    rows = [np.array([1, *range(first, first + n), 2], dtype=np.int32) for n in (1, 3, 2)]
    return EncodedPart(rows, labels, ["a", "b", "c"])


def task_of(kind: str) -> EncodedTask:
    metric = {"classes": "accuracy", "number": "pearson", "labels": "roc_auc"}[kind]
    classes = () if kind == "number" else ("no", "yes")
    parts = {"train": part(LABELS[kind]), "validation": part(LABELS[kind], 7)}
    parts["test"] = part(np.empty(0), 9)  # its labels are secret
    return EncodedTask(
        Task("mine", kind, classes, metric, "text"), parts, {"rows": {"train": 3}}
    )


@pytest.mark.parametrize("kind", LABELS)
def test_a_task_comes_back_from_its_file(kind, tmp_path):
    before = task_of(kind)
    save_encoded_task(tmp_path / "a.safetensors", before, {"tokenizer_sha256": "x"})
    after, made_for = load_encoded_task(tmp_path / "a.safetensors")
    assert made_for == {"tokenizer_sha256": "x"}
    assert after.task == before.task and after.notes == before.notes
    assert after.sha256 == before.sha256
    assert list(after.parts) == list(before.parts)
    for name, expected in before.parts.items():
        found = after.parts[name]
        assert found.ids == expected.ids and found.labels.dtype == expected.labels.dtype
        np.testing.assert_array_equal(found.labels, expected.labels)
        for row, wanted in zip(found.rows, expected.rows, strict=True):
            assert row.dtype == wanted.dtype
            np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("kind", LABELS)
def test_a_carried_task_is_the_same_problem(kind, tmp_path):
    save_encoded_task(tmp_path / "a.safetensors", task_of(kind), {})
    ours = problem_of(task_of(kind))
    theirs = problem_of(load_encoded_task(tmp_path / "a.safetensors")[0])
    assert theirs.sha256 == ours.sha256 and theirs.num_outputs == ours.num_outputs
    np.testing.assert_array_equal(theirs.train.labels, ours.train.labels)
    scores = [np.array([0.3, -0.1])[: ours.num_outputs] * i for i in (1, 3, -2)]
    for name in ("validation", "test"):
        mine, carried = ours.parts[name], theirs.parts[name]
        assert carried.answers(scores) == mine.answers(scores)
        assert (carried.judge is None) == (mine.judge is None) == (name == "test")
    assert theirs.parts["validation"].judge(scores) == ours.parts["validation"].judge(scores)


def test_numbers_are_learned_between_0_and_1():
    assert problem_of(task_of("number")).train.labels.tolist() == [0, 1, 0.5]


def test_a_changed_row_is_noticed(tmp_path):
    file = tmp_path / "a.safetensors"
    save_encoded_task(file, task_of("classes"), {})
    with safetensors.safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["train.ids"][1] += 1
    safetensors.torch.save_file(tensors, file, metadata)
    told(
        lambda: load_encoded_task(file), str(file), "sha256 differs", "prepare the tasks again"
    )


@pytest.mark.parametrize("content", [b"", b"words", None])
def test_what_is_no_carried_task_is_refused(content, tmp_path):
    file = tmp_path / "a.safetensors"
    if content is not None:
        file.write_bytes(content)
        told(lambda: load_encoded_task(file), str(file), "prepare the tasks again")
    told(lambda: load_encoded_task(tmp_path / "b"), "No such file", tmp_path / "b", "again")


def test_a_file_of_other_tensors_is_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    about = {"about": json.dumps({"format": "exlm-mini encoded task 0"})}
    for metadata in (None, about):
        safetensors.torch.save_file({"x": torch.zeros(2)}, file, metadata)
        told(lambda: load_encoded_task(file), str(file), "no encoded task")
