"""Preparing a task for a model: what cannot be learned or scored is refused before training."""

import numpy as np
import pytest
from refusals import told
from small_tasks import TASK, molecules

from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.task import Examples, Splits, Task


def with_train(examples):
    return Splits(examples, molecules(4, 1), None, {})


def test_a_vocabulary_of_other_data_is_refused(pretrained):
    strange = Examples([("[Xe][Rn]",)] * 4, np.array([0, 1, 0, 1]))
    told(
        lambda: make_problem(TASK, with_train(strange), pretrained),
        "100.0%", "vocabulary", "[Xe], [Rn]", "--max-unknown",
    )  # fmt: skip
    assert make_problem(TASK, with_train(strange), pretrained, 1.0).train.rows
    assert make_problem(TASK, with_train(molecules(8, 0)), pretrained, 0.0).train.rows


def chains(*columns):
    """Chains of 1, 2, 3, … carbon atoms, one for each answer in these columns."""
    labels_RC = np.array(columns, dtype=float).T
    return Examples([("C" * n,) for n in range(1, 1 + len(labels_RC))], labels_RC)


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "train", "validation", "said"),
    [
        ("numbers", [1, NAN, NAN], [1, 2, 3], "'size' has a value in only 1 of the train rows"),
        (
            "numbers",
            [1, 2, 3],
            [1, NAN, NAN],
            "'size' has a value in only 1 of the validation rows",
        ),
        ("numbers", [7, 7, NAN], [1, 2, 3], "'size' is 7 in all train rows"),
        ("numbers", [1, 2, 3], [NAN, 7, 7], "'size' is 7 in all validation rows"),
        ("numbers", [1e9, 1e9 + 1, 1e9], [1, 2, 3], "'size' is 1e+09 ± 0.471"),
        (
            "labels",
            [NAN, NAN, NAN],
            [0, 1, 1],
            "'size' has a value in only 0 of the train rows",
        ),
        ("labels", [0, 0, NAN], [0, 1, 1], "'size' is 0 in all train rows"),
        ("labels", [0, 1, 1], [1, 1, NAN], "validation rows: none of the 1 task(s) has both"),
    ],
)
def test_answers_that_cannot_be_learned_or_scored_are_refused(
    pretrained, kind, train, validation, said
):
    metric = "r2" if kind == "numbers" else "roc_auc"
    task = Task("how long", kind, ("size",), metric, "smiles")
    splits = Splits(chains(train), chains(validation), None, {})
    told(lambda: make_problem(task, splits, pretrained), "how long", said)


def test_one_class_in_training_is_refused(pretrained):
    task = Task("how long", "classes", ("no", "yes"), "accuracy", "smiles")
    one, both = (Examples([("C",), ("CC",)], np.array(labels)) for labels in ([1, 1], [0, 1]))
    told(
        lambda: make_problem(task, Splits(one, both, None, {}), pretrained), "yes in all train"
    )
    assert make_problem(task, Splits(both, one, None, {}), pretrained)


def test_problems_of_one_table_differ_by_what_their_answers_mean(pretrained):
    splits = Splits(chains([0, 1, 0, 1]), chains([0, 1]), None, {})
    tasks = [
        Task("mine", "labels", ("size",), "roc_auc", "smiles", (), ("size",)),
        Task("mine", "numbers", ("size",), "r2", "smiles", (), ("size",)),
        Task("mine", "numbers", ("length",), "r2", "smiles", (), ("length",)),
    ]
    assert len({make_problem(task, splits, pretrained).sha256 for task in tasks}) == 3
