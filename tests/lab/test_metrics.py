"""Each metric agrees with its definition, and what cannot be scored is left out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm_lab.downstream import metrics
from exlm_lab.downstream.baselines import baselines
from exlm_lab.downstream.task import Examples, Task

pytest.importorskip("sklearn")
pytest.importorskip("scipy")

TWO = Task("cola", "classes", ("no", "yes"), "matthews", "text")
THREE = Task("mnli", "classes", ("a", "b", "c"), "accuracy", "text")
NUMBER = Task("stsb", "numbers", ("label",), "spearman", "text")
TWO_NUMBERS = Task("mine", "numbers", ("logS", "logP"), "r2", "smiles")
MIXED = Task("mine", "mixed", ("logS", "toxic"), "score", "smiles", numbers=("logS",))
MANY = Task("tox21", "labels", ("p", "q", "r"), "roc_auc", "smiles")

answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


def logits(predicted):
    return np.eye(1 + max(1, predicted.max()))[predicted]


def counts(predicted, labels):
    """True and false positives, false and true negatives."""
    pairs = list(zip(predicted.tolist(), labels.tolist(), strict=True))
    return (pairs.count(pair) for pair in [(1, 1), (1, 0), (0, 1), (0, 0)])


@given(answers)
def test_two_classes_are_scored_by_the_four_counts(drawn):
    predicted, labels = np.array(drawn, dtype=np.int64).T
    tp, fp, fn, tn = counts(predicted, labels)
    scores = metrics.evaluate(TWO, logits(predicted), labels)
    root = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert scores["accuracy"] == pytest.approx((tp + tn) / len(drawn))
    assert scores["f1"] == pytest.approx(2 * tp / max(1, 2 * tp + fp + fn))
    assert scores["matthews"] == pytest.approx((tp * tn - fp * fn) / root if root else 0)


def test_a_classifier_of_two_has_the_roc_curve_of_its_margin():
    scores = np.array([[0.0, 1.0], [5.0, 5.5], [2.0, 1.0], [0.0, -3.0]])
    out = metrics.evaluate(TWO, scores, np.array([1, 0, 1, 0]))
    # margins 1, 0.5, -1, -3: the yes answers beat the no answers in 3 of 4 pairs
    assert out["roc_auc"] == pytest.approx(0.75)


def test_missing_labels_are_left_out_and_one_class_tasks_skipped():
    nan = np.nan
    labels = np.array([[1, 1, nan], [0, 1, nan], [nan, 1, 0], [1, 1, 1], [0, nan, 1]])
    scores = np.array([[3.0, 0, 9], [1, 0, 9], [9, 0, 2], [0, 0, 1], [2, 0, 3]])
    out = metrics.evaluate(MANY, scores, labels)
    # Scores of yes beat those of no in 2 of 4 pairs in the first column (3, 0 against 1, 2) and
    # in 1 of 2 in the third (1, 3 against 2); in the second every answer is yes.
    assert out == {"roc_auc": pytest.approx((0.5 + 0.5) / 2), "num_tasks": 2.0}


def test_three_classes_have_an_accuracy_alone():
    scores = np.array([[9.0, 1, 2], [1, 2, 9], [1, 9, 2], [9, 1, 1]])
    assert metrics.evaluate(THREE, scores, np.array([0, 2, 1, 1])) == {"accuracy": 0.75}


def test_correlations_are_those_of_numbers_and_of_ranks():
    labels = np.array([0.0, 1.0, 2.0, 3.0, 5.0])[:, None]
    cubed = labels**3
    out = metrics.evaluate(NUMBER, cubed, labels)
    assert out["spearman"] == pytest.approx(1)
    assert out["pearson"] == pytest.approx(np.corrcoef(cubed.T, labels.T)[0, 1])
    out = metrics.evaluate(NUMBER, -labels, labels)
    assert out["pearson"] == pytest.approx(-1) and out["spearman"] == pytest.approx(-1)


def test_errors_are_in_units_and_missing_numbers_do_not_count():
    nan = np.nan
    labels = np.array([[1.0, nan], [2.0, 10.0], [3.0, 30.0], [nan, 50.0]])
    scores = np.array([[1.0, 9.0], [2.0, 10.0], [6.0, 20.0], [9.0, 60.0]])
    first = metrics.evaluate(NUMBER, scores[:, :1], labels[:, :1])
    assert first["rmse"] == pytest.approx(3**0.5) and first["mae"] == pytest.approx(1)
    assert first["r2"] == pytest.approx(1 - 9 / 2)
    assert metrics.evaluate(NUMBER, scores[:3, :1], np.full((3, 1), 0.1))["r2"] == 0.0
    both = metrics.evaluate(TWO_NUMBERS, scores, labels)
    assert both["rmse logS"] == first["rmse"]
    assert both["rmse logP"] == pytest.approx((200 / 3) ** 0.5)
    assert both["r2"] == pytest.approx((first["r2"] + 1 - 200 / 800) / 2)
    assert both["r2 logS"] == first["r2"]


def test_numbers_and_yes_no_answers_are_scored_each_by_its_own_measure():
    labels = np.array([[1.0, 0.0], [2.0, 1.0], [3.0, np.nan], [np.nan, 1.0]])
    scores = np.array([[1.0, -1.0], [2.0, 2.0], [6.0, 9.0], [9.0, -2.0]])
    out = metrics.evaluate(MIXED, scores, labels)
    first = metrics.evaluate(NUMBER, scores[:, :1], labels[:, :1])
    # scores 2, -2 of yes beat -1 of no in 1 of 2 pairs
    assert out == {
        "rmse logS": first["rmse"], "r2 logS": first["r2"], "roc_auc toxic": 0.5,
        "score": pytest.approx((first["r2"] + 0.5) / 2),
    }  # fmt: skip
    labels[0, 1] = 1.0  # with yes alone there is no ROC curve
    del out["roc_auc toxic"]
    assert metrics.evaluate(MIXED, scores, labels) == out | {"score": first["r2"]}


@pytest.mark.parametrize(("value", "num_rows"), [(-3.5, 2), (0.0, 9)])
def test_a_constant_prediction_scores_nothing(value, num_rows):
    labels = np.arange(num_rows, dtype=np.float64)[:, None]
    out = metrics.evaluate(NUMBER, np.full((num_rows, 1), value), labels)
    assert out["pearson"] == out["spearman"] == 0.0
    always_yes = np.tile([0.0, 1.0], (num_rows, 1))
    assert metrics.evaluate(TWO, always_yes, np.arange(num_rows) % 2)["matthews"] == 0.0


# ---- baselines ----


@pytest.mark.parametrize("input", ["smiles", "text"])
def test_baselines_that_learn_of_one_class_always_say_it(input):
    task = Task("mine", "classes", ("no", "yes"), "accuracy", input)
    train = Examples([("CCO",), ("CCN",)], np.array([1, 1]))
    test = Examples([("CCO",), ("CCC",), ("CO",)], np.array([0, 1, 1]))
    for each in baselines(task, train, test, (1,)).values():
        assert [one["accuracy"] for one in each] == [2 / 3]


def test_words_need_no_blanks_between_them():
    task = Task("mine", "classes", ("no", "yes"), "accuracy", "text")
    rows = [(f"这部电影很{'好坏'[n % 2]}看{chr(0x4E00 + n)}",) for n in range(24)]
    labels = np.arange(24) % 2
    train, test = (Examples(rows[part], labels[part]) for part in (slice(18), slice(18, 24)))
    assert baselines(task, train, test, ())["TF-IDF"][0]["accuracy"] == 1
