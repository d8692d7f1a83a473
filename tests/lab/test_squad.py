"""SQuAD is scored as by its official script, and errors in its files are reported."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import told
from squad_files import CONTEXT, PETS, ROWS, dataset, question

from exlm_lab.downstream.squad import (
    HUB_ID,
    f1_of_words,
    load_squad,
    normalize_answer,
    read_file,
    read_questions,
    score_predictions,
)


def of_hub(row):
    """A question in the format of the hub."""
    answers = {key: [a[key] for a in row["answers"]] for key in ("text", "answer_start")}
    return {**row, "context": CONTEXT, "answers": answers}


def read(*rows):
    return read_questions([of_hub(row) for row in rows], "train.json")


QUESTIONS, _ = read(*ROWS)


def asked(*rows):
    return read(*rows)[0]


# ---- normalisation and the two comparisons ----


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat!", "cat"),
        ("an a the", ""),
        ("U.S.A.", "usa"),
        ("a-priori theory", "apriori theory"),
        ("\tnew\nline ", "new line"),
        ("café", "café"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation is removed
        ("", ""),
    ],
)
def test_answers_are_normalised_as_the_script_does(text, normal):
    assert normalize_answer(text) == normal


def test_f1_counts_shared_words_with_their_number():
    assert f1_of_words("the big red dog", "red dog") == pytest.approx(0.8)
    assert f1_of_words("dog dog cat", "dog dog dog") == pytest.approx(2 / 3)
    assert f1_of_words("dog", "cat") == 0
    assert f1_of_words("", "") == 1
    assert f1_of_words("", "dog") == f1_of_words("dog", "") == 0


# ---- scores ----


def test_the_best_gold_answer_counts():
    predictions = {"where": "Mat.", "which": "the beagle lay", "why": ""}
    f1_which = 2 * 0.5 * 1 / 1.5
    assert score_predictions(QUESTIONS, predictions) == {
        "exact": pytest.approx(200 / 3), "f1": pytest.approx(100 * (2 + f1_which) / 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("golds", "predicted", "f1"),
    [
        ((), "Rome", 0), ((), "", 100), ((), "The", 100),  # empty once normalised
        (("The",), "", 100), (("The",), "cat", 0),
        (("The", "cat"), "", 0),  # an empty gold answer counts only without others
    ],
)  # fmt: skip
def test_only_an_empty_prediction_answers_a_question_without_an_answer(golds, predicted, f1):
    assert score_predictions(asked(question("q", *golds)), {"q": predicted})["f1"] == f1


def test_the_threshold_turns_answers_into_none():
    predictions = {"where": "mat", "which": "beagle", "why": "Rome"}
    na_probs = {"where": 0.1, "which": 0.6, "why": 0.9}
    for threshold, exact in ((1.0, 200 / 3), (0.6, 100), (0.0, 100 / 3)):
        scores = score_predictions(QUESTIONS, predictions, na_probs, threshold)
        assert scores["exact"] == pytest.approx(exact)
        assert scores["best_exact"] == 100  # at the best of all thresholds


ids = st.lists(st.integers(), unique=True, min_size=1, max_size=12).map(
    lambda numbers: [str(n) for n in numbers]
)


@given(st.data(), ids)
def test_the_best_threshold_is_the_best_of_all(data, names):
    rows = [question(id, *data.draw(st.sampled_from([(), ("a beagle",)]))) for id in names]
    predictions = {id: data.draw(st.sampled_from(["", "beagle", "mat"])) for id in names}
    # Distinct numbers: among equal ones the script also tries cuts that no threshold makes.
    order = data.draw(st.permutations(range(len(names))))
    na_probs = {id: (1 + place) / 100 for id, place in zip(names, order, strict=True)}
    pets = asked(*rows)
    out = score_predictions(pets, predictions, na_probs)
    tried = {
        t: score_predictions(pets, predictions, na_probs, na_prob_threshold=t)
        for t in (0.0, *na_probs.values())
    }
    for name in ("exact", "f1"):
        best = max(scores[name] for scores in tried.values())
        assert out[f"best_{name}"] == pytest.approx(best)


def test_bert_is_scored_as_published(data_dir):
    folder = data_dir / "squad2"
    with gzip.open(folder / "pred_bert.json.gz") as stream:
        predictions = json.load(stream)
    expected = json.loads((folder / "expected_scores.json").read_text())["expected"]["bert"]
    questions, num_left_out = read_file(folder / "dev-v2.0.json.gz")
    assert len(questions) == 11_873 and num_left_out == 0
    assert sum(q.span is None for q in questions) == 5_945
    assert all(q.context[slice(*q.span)] == q.answers[0] for q in questions if q.span)
    for prefix, some in (
        ("", questions),
        ("HasAns_", [q for q in questions if q.answers]),
        ("NoAns_", [q for q in questions if not q.answers]),
    ):
        assert len(some) == expected[f"{prefix}total"]
        for name, score in score_predictions(some, predictions).items():
            assert score == pytest.approx(expected[prefix + name], rel=1e-12)
    assert (round(expected["exact"], 2), round(expected["f1"], 2)) == (78.74, 81.78)


# ---- reading ----


def test_an_offset_that_is_off_is_set_right():
    city, lost = question("city", "Rome"), question("lost", "Rome")
    second = CONTEXT.rfind("Rome")
    city["answers"][0]["answer_start"] = second - 2
    lost["answers"][0]["text"] = "Paris"
    (kept,), num_left_out = read(city, lost)
    assert kept.span == (second, second + 4) and num_left_out == 1


def test_the_two_files_of_a_directory_are_read(tmp_path):
    (tmp_path / "train-v2.0.json").write_text(json.dumps(PETS))
    packed = gzip.compress(json.dumps(dataset(question("why"))).encode())
    (tmp_path / "dev-v2.0.json.gz").write_bytes(packed)
    train, validation = load_squad(tmp_path)
    assert train == (QUESTIONS, 0) and [q.id for q in validation[0]] == ["why"]
    where, _, why = QUESTIONS
    assert where.answers == ("on a mat", "mat") and CONTEXT[slice(*where.span)] == "on a mat"
    assert why.answers == () and why.span is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"data": 7}', "not iterable"),
        ('{"data": []}', "no question"),
        (json.dumps(PETS).replace('"why?"', "7"), "question is 7; it should be a valid string"),
    ],
)
def test_files_that_are_not_squads_are_refused(tmp_path, text, part):
    path = tmp_path / "train-v2.0.json"
    path.write_text(text)
    told(lambda: load_squad(tmp_path), path, part)


@pytest.mark.parametrize("blank", [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003\n"])
def test_white_space_around_answers_and_questions_is_no_part_of_them(blank):
    start = CONTEXT.rfind("Rome")
    where = question("city", "Rome") | {"question": f"{blank}Which   city?{blank}"}
    found = {"text": f"{blank}Rome{blank}", "answer_start": start - len(blank)}
    where["answers"] = [{"text": blank, "answer_start": 0}, found, found]
    only_blank = question("blank", blank, blank + blank)
    (asked_for,), num_left_out = read(where, only_blank)
    assert num_left_out == 1
    assert asked_for.question == "Which   city?" and asked_for.answers == ("Rome", "Rome")
    assert asked_for.span == (start, start + 4)


@pytest.mark.parametrize("value", [None, 7, float("nan"), ["Rome"], "\ud800"])
@pytest.mark.parametrize("place", ["question", "answer"])
def test_what_is_no_text_is_told_with_its_question(value, place):
    row = question("q7", "Rome")
    if place == "question":
        row["question"] = value
    else:
        row["answers"][0]["text"] = value
    told(lambda: read(row), "train.json question q7")


def test_rows_of_the_hub_are_the_same_questions(monkeypatch):
    rows = [of_hub(row) for row in ROWS]
    rows[0]["question"] = f" {rows[0]['question']}\n"
    rows[0]["answers"]["text"] = [f"{text} " for text in rows[0]["answers"]["text"]]
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda hub: {"train": rows, "validation": rows[2:]}
    )
    assert load_squad() == ((QUESTIONS, 0), (QUESTIONS[2:], 0))
    monkeypatch.setattr(datasets, "load_dataset", lambda hub: {}["train"])
    told(load_squad, HUB_ID, "--data")
