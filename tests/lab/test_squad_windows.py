"""Windows cover the paragraph, targets point at the answer, the best span scores highest."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm_lab.downstream.prepared import make_span_problem
from exlm_lab.downstream.spans import best_span, choose_answers, target, windows
from exlm_lab.downstream.squad import Question, Squad, read_file, score_predictions
from exlm_mini.config import ModelConfig, RunConfig
from exlm_mini.data.tokenizer import train_byte_level_bpe

SENTENCE = "The cat sat on a mat in Rome. Where the café’s naïve dog lay, a beagle, none knew."
TOKENIZER = train_byte_level_bpe([SENTENCE] * 3, 320)
SPECIAL = TOKENIZER.special_ids
ENDS = [n for n, letter in enumerate(SENTENCE) if not letter.isspace()]
ANSWERS = [(first, last + 1) for first in ENDS for last in ENDS if first <= last]


def asked(text, *span):
    answers = (SENTENCE[slice(*span)],) if span else ()
    return Question("q", text, SENTENCE, answers, span or None)


def cut(question, length=24, overlap=6, max_question=64):
    return windows([question], TOKENIZER, length, overlap, max_question)


@given(st.integers(20, 40), st.integers(0, 8), st.integers(1, 4))
def test_windows_frame_the_question_and_pieces_that_overlap(length, overlap, max_question):
    own, notes = cut(asked("What was it?"), length, overlap, max_question)
    question = TOKENIZER.encode("What was it?")[:max_question]
    head = [SPECIAL.bos, *question, SPECIAL.eos, SPECIAL.eos]
    paragraph = []
    for window in own:
        row = window.token_ids_N.tolist()
        assert len(row) <= length and (window is own[-1] or len(row) == length)
        assert row[: len(head)] == head and row[-1] == SPECIAL.eos
        assert np.flatnonzero(window.is_context_N).tolist() == [*range(len(head), len(row) - 1)]
        paragraph += row[len(head) : -1][overlap * bool(paragraph) :]
    assert paragraph == TOKENIZER.encode(SENTENCE)
    assert (notes["examples"], notes["windows"]) == (1, len(own))
    assert notes["truncated"] == 1


@given(st.sampled_from(ANSWERS))
def test_a_target_is_the_tokens_of_the_whole_answer_or_the_first(span):
    begin, end = span
    question = asked("What?", *span)
    for window in cut(question)[0]:
        first, last = target(question, window)
        shown = window.offsets_N2[window.is_context_N]
        holding = {
            n
            for n in np.flatnonzero(window.is_context_N)
            if max(begin, window.offsets_N2[n, 0]) < min(end, window.offsets_N2[n, 1])
        }
        if shown[0, 0] <= begin and end <= shown[-1, 1]:
            assert {*range(first, last + 1)} == holding
        else:
            assert (first, last) == (0, 0)


@pytest.mark.parametrize(
    ("positions", "length", "overlap", "num_asked"),
    [(512, 384, 128, 64), (300, 300, 116, 64), (190, 190, 62, 62), (40, 40, 12, 12)],
)
def test_windows_are_berts_and_smaller_where_the_model_is(
    positions, length, overlap, num_asked
):
    long = Question("q", "Why? " * 89 + "Why?", SENTENCE * 30, (), None)
    config = RunConfig(objective="mlm", model=ModelConfig(max_positions=positions))
    model = SimpleNamespace(config=config, tokenizer=TOKENIZER)
    problem = make_span_problem(Squad(([long], 0), ([long], 3)), model, max_unknown=1.0)
    assert problem.notes["windows"] == {"length": length, "overlap": overlap}
    rows = problem.notes["rows"]["validation"]
    assert (rows["longest"], rows["truncated"], rows["left_out"]) == (length, 1, 3)
    first = problem.parts["validation"].rows[0].tolist()
    assert first.index(SPECIAL.eos) == 1 + num_asked


@given(st.integers(1, 6), st.integers(0, 2**20))
def test_the_best_span_is_the_best_of_all(max_tokens, seed):
    rng = np.random.default_rng(seed)
    for window in cut(asked("What?"))[0]:
        score_2N = rng.normal(size=(2, len(window.token_ids_N))).astype(np.float32)
        columns = np.flatnonzero(window.is_context_N)
        scores = {
            (i, j): score_2N[0, i] + score_2N[1, j]
            for i in columns
            for j in columns
            if i <= j < i + max_tokens
        }
        score, *span = best_span(score_2N, window, max_tokens)
        assert scores[tuple(span)] == max(scores.values()) == score


def perfect_scores(questions, own, sureness):
    """The scores of a model that always finds the target of a window."""
    for window in own:
        first, last = target(questions[window.question], window)
        score_2N = np.zeros((2, len(window.token_ids_N)), dtype=np.float32)
        score_2N[0, first] = score_2N[1, last] = sureness
        yield score_2N


@pytest.mark.parametrize("sureness", [9.0, 5000.0])
def test_a_model_that_finds_the_targets_answers_all(sureness):
    texts = ("cat", "a mat", "Rome", "beagle", "café")
    spans = [(SENTENCE.index(text), SENTENCE.index(text) + len(text)) for text in texts]
    questions = [
        asked("What?", *span)._replace(id=t) for t, span in zip(texts, spans, strict=True)
    ]
    questions.append(asked("Why? " * 9)._replace(id="none"))
    questions.append(Question("nothing", "What?", "", (), None))  # a paragraph without tokens
    own, _ = windows(questions, TOKENIZER, 26, 7, max_question=5)
    assert sum(window.question == 0 for window in own) > 1
    answers, na_probs = choose_answers(questions, own, perfect_scores(questions, own, sureness))
    assert all(answers[text] == text and na_probs[text] < 0.001 for text in texts)
    assert na_probs["none"] > 0.999 and (answers["nothing"], na_probs["nothing"]) == ("", 1.0)


def test_no_answer_is_as_likely_as_where_it_is_least_likely():
    own, _ = cut(asked("What?"), 20, 3)
    assert len(own) > 2
    scores = []
    for number, window in enumerate(own):
        score_2N = np.full((2, len(window.token_ids_N)), -99.0, dtype=np.float32)
        first = int(window.is_context_N.argmax())
        score_2N[:, first] = number / 2
        score_2N[:, 0] = 25.0 if number else (len(own) - 1) / 2 + 1
        scores.append(score_2N)
    texts, na_probs = choose_answers([asked("What?")], own, scores)
    assert na_probs["q"] == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert texts["q"] == SENTENCE[slice(*window.offsets_N2[first])]


@pytest.mark.slow
def test_answers_of_the_real_dev_set_survive_the_way_there_and_back(data_dir):
    questions, _ = read_file(data_dir / "squad2" / "dev-v2.0.json.gz")
    sample = random.Random(1).sample(questions, 80)
    learnt = train_byte_level_bpe(dict.fromkeys(q.context for q in sample), 2000)
    own, _ = windows(sample, learnt, 160, 60, 64)
    answers, na_probs = choose_answers(sample, own, perfect_scores(sample, own, 9.0), 100)
    for question in sample:
        if question.span:  # tokens may hold more than the answer, never less
            assert question.answers[0] in answers[question.id]
    scores = score_predictions(sample, answers, na_probs, na_prob_threshold=0.5)
    assert scores["exact"] > 90 and scores["f1"] > 98
