"""Windows show every token, targets name the answer's tokens, and the best span is the best."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.inputs import padded
from exlm_lab.downstream.spans import (
    BestSpans,
    best_spans,
    choose_answers,
    encode_question,
    windows,
)
from exlm_lab.downstream.squad import (
    Question,
    load_dataset,
    normalize_answer,
    read_questions,
    score_predictions,
)
from exlm_mini.config import SpecialIds
from exlm_mini.data.tokenizer import train_byte_level_bpe

FRAME = 4  # [BOS], two [EOS] between the two texts, [EOS]
SENTENCE = "The cat sat on a mat in Rome. Where the café’s naïve dog lay, a beagle, none knew."


@st.composite
def cuts(draw):
    """(question length, context length, max_length, stride) that leave room."""
    num_question = draw(st.integers(0, 5))
    room = draw(st.integers(1, 12))
    stride = draw(st.integers(1, room))
    return num_question, draw(st.integers(0, 40)), num_question + FRAME + room, stride


def cut(num_question, num_context, max_length, stride):
    question = list(range(1000, 1000 + num_question))
    return windows(question, list(range(100, 100 + num_context)), max_length, stride)


@given(cuts())
def test_windows_frame_the_question_and_a_piece(shape):
    num_question, _, max_length, stride = shape
    special = SpecialIds()
    for number, window in enumerate(cut(*shape)):
        row = window.token_ids_N.tolist()
        assert len(row) <= max_length
        begin, end = window.context_column, len(row) - 1
        head = [special.bos, *range(1000, 1000 + num_question), special.eos, special.eos]
        assert row[:begin] == head and row[end] == special.eos
        assert window.first_token == number * stride
        first = 100 + window.first_token
        assert row[begin:end] == list(range(first, first + end - begin))
        assert len(window.is_clearest) == end - begin


@given(cuts())
def test_every_token_is_clearest_in_one_window_that_shows_most_around_it(shape):
    num_context, room = shape[1], shape[2] - FRAME - shape[0]
    owners = {token: [] for token in range(num_context)}
    around = {token: [] for token in range(num_context)}
    for window in cut(*shape):
        length = len(window.is_clearest)
        for place, is_clearest in enumerate(window.is_clearest):
            token = window.first_token + place
            measure = min(place, length - 1 - place)
            around[token].append(measure)
            if is_clearest:
                owners[token].append(measure)
    assert all(len(own) == 1 for own in owners.values())
    assert all(owners[token] == [max(around[token])] for token in owners)
    assert len(cut(*shape)) == 1 or num_context > room


@pytest.mark.parametrize(("max_length", "stride"), [(5, 1), (10, 6), (10, 0)])
def test_windows_that_would_lose_tokens_are_a_mistake(max_length, stride):
    with pytest.raises(ValueError, match="stride"):
        windows([7], [8] * 30, max_length, stride)


# ---- characters and tokens ----


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([SENTENCE] * 3, 320)


@given(st.data())
def test_targets_hold_the_answer_and_no_token_more_or_point_at_the_first(tokenizer, data):
    begin = data.draw(st.integers(0, len(SENTENCE) - 1))
    end = data.draw(st.integers(begin + 1, len(SENTENCE)))
    question = Question("what", "What?", SENTENCE, (SENTENCE[begin:end],), (begin, end))
    encoded = encode_question(question, tokenizer, 24, 6)
    # A letter of several bytes may be several tokens.
    holding = {
        t for t, (a, b) in enumerate(encoded.offsets) if set(range(a, b)) & {*range(begin, end)}
    }
    for window, (first, last) in zip(encoded.windows, encoded.targets, strict=True):
        shift = window.first_token - window.context_column
        piece = range(window.first_token, window.first_token + len(window.is_clearest))
        if holding <= {*piece}:
            assert {*range(first + shift, last + shift + 1)} == holding
        else:
            assert (first, last) == (0, 0)


def test_a_question_is_encoded_with_its_answer(tokenizer):
    span = (SENTENCE.index("café"), SENTENCE.index("’s"))
    question = Question("what", "What lay where? " * 9, SENTENCE, ("café",), span)
    encoded = encode_question(question, tokenizer, max_length=24, stride=6, max_question=5)
    assert encoded.num_cut == len(tokenizer.encode(question.question)) - 5
    assert len(encoded.windows) > 2
    shown = [target for target in encoded.targets if target != (0, 0)]
    assert 0 < len(shown) < len(encoded.windows)
    for window, (first, last) in zip(encoded.windows, encoded.targets, strict=True):
        if (first, last) != (0, 0):
            answer = tokenizer.decode(window.token_ids_N[first : last + 1])
            assert answer.strip() == "café"
    none = question._replace(span=None, answers=())
    unanswerable = encode_question(none, tokenizer, 24, 6, 5)
    assert set(unanswerable.targets) == {(0, 0)}


# ---- the best span ----


@given(cuts(), st.integers(1, 6), st.integers(0, 2**20))
def test_the_best_span_is_the_best_of_all(shape, max_answer_length, seed):
    batch = cut(*shape)
    N = max(len(window.token_ids_N) for window in batch) + 1  # padding behind all of them
    generator = torch.Generator().manual_seed(seed)
    start_BN = torch.randn(len(batch), N, generator=generator)
    end_BN = torch.randn(len(batch), N, generator=generator)
    best = best_spans(start_BN, end_BN, batch, max_answer_length)
    assert torch.equal(best.null_score_B, start_BN[:, 0] + end_BN[:, 0])
    for row, window in enumerate(batch):
        begin, length = window.context_column, len(window.is_clearest)
        scores = {
            (begin + i, begin + j): (start_BN[row, begin + i] + end_BN[row, begin + j]).item()
            for i in range(length) if window.is_clearest[i]
            for j in range(i, min(length, i + max_answer_length))
        }  # fmt: skip
        if not scores:
            assert best.score_B[row] == -torch.inf
            continue
        chosen = (best.first_B[row].item(), best.last_B[row].item())
        assert scores[chosen] == max(scores.values()) == best.score_B[row].item()


def joined(parts):
    return BestSpans(*(torch.cat(column) for column in zip(*parts, strict=True)))


def perfect_logits(encoded, sureness):
    """Logits of a model that knows the target of every window."""
    rows = padded([window.token_ids_N for window in encoded.windows], pad=0)
    start_BN, end_BN = torch.zeros(rows.shape), torch.zeros(rows.shape)
    for row, (first, last) in enumerate(encoded.targets):
        start_BN[row, first] += sureness
        end_BN[row, last] += sureness
    return start_BN, end_BN


def test_a_model_that_knows_the_targets_answers_all(tokenizer):
    texts = ("cat", "a mat", "Rome", "beagle")
    questions = [
        Question(text, "What?", SENTENCE, (text,), (s := SENTENCE.index(text), s + len(text)))
        for text in texts
    ] + [Question("none", "Why?", SENTENCE, (), None)]
    encoded = [encode_question(q, tokenizer, 26, 7) for q in questions]
    best = joined([best_spans(*perfect_logits(e, 9.0), e.windows) for e in encoded])
    answers = choose_answers(questions, encoded, best)
    assert {id: text for id, text in answers.texts.items() if id != "none"} == {
        text: text for text in texts
    }
    assert all(answers.na_probs[text] < 0.001 for text in texts)
    assert answers.na_probs["none"] > 0.999
    assert answers.at(0.5) == {text: text for text in texts} | {"none": ""}


def test_no_answer_is_as_likely_as_where_it_is_least_likely(tokenizer):
    question = Question("q", "What?", SENTENCE, (), None)
    encoded = encode_question(question, tokenizer, 20, 3)
    num_windows = len(encoded.windows)
    assert num_windows > 2
    column = encoded.windows[0].context_column
    first_B = torch.full((num_windows,), column)
    score_B = torch.arange(num_windows, dtype=torch.float)
    null_score_B = torch.full((num_windows,), 50.0)
    null_score_B[0] = num_windows - 1 + 2.0
    best = BestSpans(first_B, first_B, score_B, null_score_B)
    answers = choose_answers([question], [encoded], best)
    assert answers.na_probs["q"] == pytest.approx(1 / (1 + np.exp(-2.0)))
    begin, end = encoded.offsets[encoded.windows[-1].first_token]
    assert answers.texts["q"] == SENTENCE[begin:end].strip()


def test_a_paragraph_without_tokens_has_no_answer(tokenizer):
    question = Question("q", "What?", "", (), None)
    encoded = encode_question(question, tokenizer, 26, 7)
    logits_BN = torch.zeros(1, len(encoded.windows[0].token_ids_N))
    answers = choose_answers(
        [question], [encoded], best_spans(logits_BN, logits_BN, encoded.windows)
    )
    assert answers == ({"q": ""}, {"q": 1.0})


def test_logits_that_are_no_numbers_are_refused(tokenizer):
    question = Question("q", "What?", SENTENCE, (), None)
    encoded = encode_question(question, tokenizer, 60, 7)
    start_BN, end_BN = perfect_logits(encoded, torch.nan)
    best = best_spans(start_BN, end_BN, encoded.windows)
    told(lambda: choose_answers([question], [encoded], best), "question q", "learning rate")


def test_answers_of_the_real_dev_set_survive_the_way_there_and_back(data_dir):
    dev = load_dataset(data_dir / "squad2" / "dev-v2.0.json.gz")
    questions, _ = read_questions(dev)
    sample = random.Random(1).sample(questions, 300)
    learnt = train_byte_level_bpe(dict.fromkeys(q.context for q in sample), 2000)
    encoded = [encode_question(q, learnt, max_length=160, stride=50) for q in sample]
    best = joined(
        [best_spans(*perfect_logits(e, 9.0), e.windows, max_answer_length=100) for e in encoded]
    )
    answers = choose_answers(sample, encoded, best)
    for question in sample:
        if question.span:  # tokens may hold more than the answer, never less
            assert question.answers[0] in answers.texts[question.id]
    kept = [normalize_answer(q.answers[0]) == normalize_answer(answers.texts[q.id])
            for q in sample if q.span]  # fmt: skip
    assert np.mean(kept) > 0.95
    scores = score_predictions(sample, answers.texts, answers.na_probs, na_prob_threshold=0.5)
    assert scores["NoAns_exact"] == 100 and scores["HasAns_f1"] > 97
