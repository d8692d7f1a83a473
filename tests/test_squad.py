"""SQuAD is scored as its official script scores it, and read with what is wrong with it said."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.squad import (
    HUB_ID,
    exact_match,
    f1_of_words,
    load_dataset,
    load_squad,
    normalize_answer,
    read_questions,
    score_predictions,
    split_articles,
)

CONTEXT = "The cat sat on a mat in Rome. The dog, a beagle, lay in Rome too."


def question(id, *answers):
    found = [{"text": text, "answer_start": CONTEXT.find(text)} for text in answers]
    return {"id": id, "question": f"{id}?", "answers": found, "is_impossible": not answers}


def dataset(*questions):
    paragraph = {"context": CONTEXT, "qas": list(questions)}
    return {"version": "v2.0", "data": [{"title": "Pets", "paragraphs": [paragraph]}]}


PETS = dataset(
    question("where", "on a mat", "mat"), question("which", "a beagle"), question("why")
)
QUESTIONS, _ = read_questions(PETS)


def asked(*questions):
    return read_questions(dataset(*questions))[0]


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
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes
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


@given(st.text("ab ", max_size=9), st.text("ab ", max_size=9))
def test_f1_is_symmetric_and_one_for_equal_answers(gold, predicted):
    assert f1_of_words(gold, predicted) == pytest.approx(f1_of_words(predicted, gold))
    if exact_match(gold, predicted):
        assert f1_of_words(gold, predicted) == 1


# ---- scores ----


def test_the_best_gold_answer_counts():
    predictions = {"where": "Mat.", "which": "the beagle lay", "why": ""}
    f1_which = 2 * 0.5 * 1 / 1.5
    assert score_predictions(QUESTIONS, predictions) == {
        "exact": pytest.approx(200 / 3),
        "f1": pytest.approx(100 * (2 + f1_which) / 3),
        "total": 3,
        "HasAns_exact": 50.0,
        "HasAns_f1": pytest.approx(50 * (1 + f1_which)),
        "HasAns_total": 2,
        "NoAns_exact": 100.0,
        "NoAns_f1": 100.0,
        "NoAns_total": 1,
    }


def test_an_answer_to_a_question_without_one_is_wrong():
    scores = score_predictions(QUESTIONS, {"where": "mat", "which": "", "why": "Rome"})
    assert scores["HasAns_exact"] == 50 and scores["NoAns_f1"] == 0
    # A prediction of articles alone is empty once normalised, and so is such a gold answer.
    scores = score_predictions(QUESTIONS, {"where": "mat", "which": "", "why": "The"})
    assert scores["NoAns_exact"] == 100
    only_articles = asked(question("what", "The"))
    assert score_predictions(only_articles, {"what": ""})["HasAns_exact"] == 100
    assert score_predictions(only_articles, {"what": "cat"})["HasAns_f1"] == 0


def test_questions_without_a_prediction_are_left_out_and_counted():
    scores = score_predictions(QUESTIONS, {"where": "mat", "unknown": "x"})
    assert scores["total"] == 1 and scores["exact"] == 100 and scores["missing"] == 2
    assert "NoAns_total" not in scores


def test_the_threshold_turns_answers_into_none():
    predictions = {"where": "mat", "which": "beagle", "why": "Rome"}
    na_probs = {"where": 0.1, "which": 0.6, "why": 0.9}
    all_kept = score_predictions(QUESTIONS, predictions, na_probs)
    assert all_kept["exact"] == pytest.approx(200 / 3)
    some = score_predictions(QUESTIONS, predictions, na_probs, na_prob_threshold=0.6)
    assert some["exact"] == 100
    none = score_predictions(QUESTIONS, predictions, na_probs, na_prob_threshold=0.0)
    assert none["HasAns_exact"] == 0 and none["NoAns_exact"] == 100
    for scores in (all_kept, some, none):  # the best is sought over all thresholds
        assert scores["best_exact"] == 100 and scores["best_exact_thresh"] == 0.6


ids = st.lists(st.integers(), unique=True, min_size=1, max_size=12).map(
    lambda numbers: [str(n) for n in numbers]
)


@given(st.data(), ids)
def test_the_best_threshold_is_the_best_of_all(data, names):
    rows = [question(id, *data.draw(st.sampled_from([(), ("a beagle",)]))) for id in names]
    predictions = {id: data.draw(st.sampled_from(["", "beagle", "mat"])) for id in names}
    # Different numbers: where several are equal the script looks between them.
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
        lowest = min(t for t in tried if tried[t][name] == pytest.approx(best))
        assert out[f"best_{name}_thresh"] == lowest


def test_bert_is_scored_as_published(data_dir):
    folder = data_dir / "squad2"
    with gzip.open(folder / "pred_bert.json.gz") as stream:
        predictions = json.load(stream)
    expected = json.loads((folder / "expected_scores.json").read_text())["expected"]["bert"]
    questions, _ = read_questions(load_dataset(folder / "dev-v2.0.json.gz"))
    scores = score_predictions(questions, predictions)
    assert scores == pytest.approx(expected, rel=1e-12)
    assert (round(scores["exact"], 2), round(scores["f1"], 2)) == (78.74, 81.78)


# ---- reading ----


def test_questions_have_their_span_in_the_paragraph():
    assert [q.id for q in QUESTIONS] == ["where", "which", "why"]
    where, _, why = QUESTIONS
    assert where.answers == ("on a mat", "mat") and CONTEXT[slice(*where.span)] == "on a mat"
    assert why.answers == () and why.span is None


def test_an_offset_that_is_off_is_set_right():
    pets = dataset(question("city", "Rome"), question("lost", "Rome"))
    city, lost = pets["data"][0]["paragraphs"][0]["qas"]
    second = CONTEXT.rfind("Rome")
    city["answers"][0]["answer_start"] = second - 2
    lost["answers"][0]["text"] = "Paris"
    questions, num_left_out = read_questions(pets)
    assert questions[0].span == (second, second + 4)
    assert len(questions) == 1 and num_left_out == 1


def test_files_are_found_by_version(tmp_path):
    first = dataset(*PETS["data"][0]["paragraphs"][0]["qas"][:2])  # SQuAD 1.1: answers to all
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps(first))
    assert load_squad(tmp_path).train == read_questions(first)
    (tmp_path / "train-v2.0.json").write_text(json.dumps(PETS))
    packed = gzip.compress(json.dumps(dataset(question("why"))).encode())
    (tmp_path / "dev-v2.0.json.gz").write_bytes(packed)
    for source in (tmp_path, tmp_path / "train-v2.0.json"):  # the newer where both are there
        squad = load_squad(source)
        assert squad.train[0] == QUESTIONS and [q.id for q in squad.validation[0]] == ["why"]
    assert load_squad(tmp_path / "dev-v1.1.json").train == read_questions(first)
    (tmp_path / "mine.json").write_text(json.dumps(PETS))
    told(lambda: load_squad(tmp_path / "mine.json"), "mine.json", "dev-v2.0.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "JSONDecodeError"),
        ('{"data": []}', "no question"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": "q7"}]}]}]}', "KeyError"),
        (json.dumps(PETS).replace('"why?"', "7"), "why"),
    ],
)
def test_files_that_are_not_squads_are_refused(tmp_path, text, part):
    path = tmp_path / "dev-v2.0.json"
    path.write_text(text)
    told(lambda: load_squad(tmp_path), path, part)


def test_rows_of_the_hub_are_the_same_questions(monkeypatch):
    rows = [
        {
            "id": q["id"], "title": "Pets", "context": CONTEXT, "question": q["question"],
            "answers": {key: [a[key] for a in q["answers"]] for key in ("text", "answer_start")},
        }
        for q in PETS["data"][0]["paragraphs"][0]["qas"]
    ]  # fmt: skip
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda hub: {"train": rows, "validation": rows[2:]}
    )
    assert load_squad() == ((QUESTIONS, 0), (QUESTIONS[2:], 0), "published")
    monkeypatch.setattr(datasets, "load_dataset", lambda hub: {}["train"])
    told(load_squad, HUB_ID, "--data")


@pytest.mark.parametrize(("share", "num"), [(0.01, 1), (0.3, 3), (0.99, 9)])
def test_no_article_falls_on_both_sides_of_a_split(share, num):
    articles = [{"title": str(i), "paragraphs": []} for i in range(10)]
    parts = split_articles({"data": articles}, share, seed=1)
    titles = [[a["title"] for a in part["data"]] for part in parts]
    assert sorted(titles[0] + titles[1]) == sorted(a["title"] for a in articles)
    assert len(titles[1]) == num
    assert split_articles({"data": articles}, share, seed=1) == parts
    told(lambda: split_articles({"data": articles[:1]}, share, seed=1), "1 article")


def test_the_real_files_hold_the_official_numbers(data_dir):
    dev = load_dataset(data_dir / "squad2" / "dev-v2.0.json.gz")
    questions, num_left_out = read_questions(dev)
    assert len(questions) == 11_873 and num_left_out == 0
    assert sum(q.span is None for q in questions) == 5_945
    assert all(q.context[slice(*q.span)] == q.answers[0] for q in questions if q.span)
    older = load_dataset(data_dir / "squad2" / "dev-v1.1-extra13.json.gz")
    assert len(read_questions(older)[0]) == 4_557
