"""Windows show every token, targets name the answer's tokens, and the best span is the best."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm_lab.downstream.prepared import make_span_problem
from exlm_lab.downstream.spans import best_span, choose_answers, encode_question, windows
from exlm_lab.downstream.squad import Question, Squad, read_file, score_predictions
from exlm_mini.config import SpecialIds
from exlm_mini.data.tokenizer import train_byte_level_bpe
from exlm_mini.reading.pretrained import Layout

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
    # A letter of several bytes may be several tokens, and blanks belong to the token behind them.
    letters = {place for place in range(begin, end) if not SENTENCE[place].isspace()}
    holding = {t for t, (a, b) in enumerate(encoded.offsets) if letters & {*range(a, b)}}
    for window, (first, last) in zip(encoded.windows, encoded.targets, strict=True):
        shift = window.first_token - window.context_column
        piece = range(window.first_token, window.first_token + len(window.is_clearest))
        if holding and holding <= {*piece}:
            assert {*range(first + shift, last + shift + 1)} == holding
        else:
            assert (first, last) == (0, 0)


BLANKS = (" ", "   ", "\t", "\n", "\r\n", "\u00a0", "\u2003", " \u00a0\n\t ")


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize(
    "answer", ["cat", "The cat", "on a mat", "Rome.", "café’s naïve", "knew."]
)
def test_white_space_around_an_answer_is_no_part_of_its_target(tokenizer, answer, blank):
    context = blank + SENTENCE.replace(answer, blank + answer + blank) + blank
    begin = context.index(answer)
    spans = [
        (begin - before * len(blank), begin + len(answer) + behind * len(blank))
        for before, behind in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    encoded = [
        encode_question(Question("q", "What?", context, (answer,), span), tokenizer, 200, 50)
        for span in spans
    ]
    for entry in encoded:
        ((first, last),) = entry.targets
        shift = entry.windows[0].context_column
        found = context[entry.offsets[first - shift][0] : entry.offsets[last - shift][1]]
        assert found.strip() == answer
    assert len({entry.targets[0] for entry in encoded}) == 1


@pytest.mark.parametrize("blank", BLANKS)
def test_white_space_around_a_question_is_no_part_of_it(tokenizer, blank):
    def ids(text):
        encoded = encode_question(Question("q", text, SENTENCE, (), None), tokenizer, 200, 50)
        assert encoded.num_cut == 0
        return encoded.windows[0].token_ids_N.tolist()

    inner = "Where  did the cat sit?"
    assert ids(400 * blank + inner) == ids(inner + 400 * blank) == ids(inner)
    assert ids("Where  did") != ids("Where did")  # inside every character counts


@pytest.mark.parametrize(
    ("positions", "length", "stride", "num_asked"),
    [(512, 384, 128, 64), (300, 300, 116, 64), (190, 190, 62, 62), (40, 40, 12, 12)],
)
def test_windows_are_berts_and_smaller_where_the_model_is(
    tokenizer, positions, length, stride, num_asked
):
    asked = Question("q", "Why? " * 89 + "Why?", SENTENCE * 30, (), None)
    model = SimpleNamespace(layout=Layout(SpecialIds(), positions), tokenizer=tokenizer)
    problem = make_span_problem(Squad(([asked], 0), ([asked], 3)), model, max_unknown=1.0)
    assert problem.notes["windows"] == {"length": length, "stride": stride}
    told = problem.notes["rows"]["validation"]
    assert (told["longest"], told["truncated"], told["left_out"]) == (length, 1, 3)
    assert told["tokens_cut"] == len(tokenizer.encode(asked.question)) - num_asked


# ---- the best span ----


@given(cuts(), st.integers(1, 6), st.integers(0, 2**20))
def test_the_best_span_is_the_best_of_all(shape, max_answer_length, seed):
    rng = np.random.default_rng(seed)
    for window in cut(*shape):
        score_2N = rng.normal(size=(2, len(window.token_ids_N))).astype(np.float32)
        best = best_span(score_2N, window, max_answer_length)
        assert best.null_score == score_2N[0, 0] + score_2N[1, 0]
        begin, length = window.context_column, len(window.is_clearest)
        scores = {
            (begin + i, begin + j): score_2N[0, begin + i] + score_2N[1, begin + j]
            for i in range(length) if window.is_clearest[i]
            for j in range(i, min(length, i + max_answer_length))
        }  # fmt: skip
        if scores:
            assert scores[best.first, best.last] == max(scores.values()) == best.score
        else:
            assert best.score == -np.inf


def perfect_scores(encoded, sureness):
    """Those of a model that always finds the target of a window."""
    for entry in encoded:
        for window, (first, last) in zip(entry.windows, entry.targets, strict=True):
            score_2N = np.zeros((2, len(window.token_ids_N)), dtype=np.float32)
            score_2N[0, first] = score_2N[1, last] = sureness
            yield score_2N


@pytest.mark.parametrize("sureness", [9.0, 5000.0])
def test_a_model_that_finds_the_targets_answers_all(tokenizer, sureness):
    texts = ("cat", "a mat", "Rome", "beagle", "café")
    questions = [
        Question(text, "What?", SENTENCE, (text,), (s := SENTENCE.index(text), s + len(text)))
        for text in texts
    ] + [Question("none", "Why? " * 9, SENTENCE, (), None)]
    encoded = [encode_question(q, tokenizer, 26, 7, max_question=5) for q in questions]
    assert encoded[0].num_cut == 0 and len(encoded[0].windows) > 1
    assert encoded[-1].num_cut == len(tokenizer.encode(("Why? " * 9).strip())) - 5
    answers, na_probs = choose_answers(questions, encoded, perfect_scores(encoded, sureness))
    assert all(answers[text] == text and na_probs[text] < 0.001 for text in texts)
    assert na_probs["none"] > 0.999


def test_no_answer_is_as_likely_as_where_it_is_least_likely(tokenizer):
    question = Question("q", "What?", SENTENCE, (), None)
    encoded = encode_question(question, tokenizer, 20, 3)
    num_windows = len(encoded.windows)
    assert num_windows > 2
    scores = []
    for number, window in enumerate(encoded.windows):
        score_2N = np.full((2, len(window.token_ids_N)), -99.0, dtype=np.float32)
        clearest = window.context_column + int(window.is_clearest.argmax())
        score_2N[:, clearest] = number / 2
        score_2N[:, 0] = 25.0 if number else (num_windows - 1) / 2 + 1
        scores.append(score_2N)
    texts, na_probs = choose_answers([question], [encoded], scores)
    assert na_probs["q"] == pytest.approx(1 / (1 + np.exp(-2.0)))
    begin, end = encoded.offsets[window.first_token + clearest - window.context_column]
    assert texts["q"] == SENTENCE[begin:end].strip()


def test_a_paragraph_without_tokens_has_no_answer(tokenizer):
    question = Question("q", "What?", "", (), None)
    encoded = [encode_question(question, tokenizer, 26, 7)]
    answers = choose_answers([question], encoded, perfect_scores(encoded, 0.0))
    assert answers == ({"q": ""}, {"q": 1.0})


@pytest.mark.slow
def test_answers_of_the_real_dev_set_survive_the_way_there_and_back(data_dir):
    questions, _ = read_file(data_dir / "squad2" / "dev-v2.0.json.gz")
    sample = random.Random(1).sample(questions, 80)
    learnt = train_byte_level_bpe(dict.fromkeys(q.context for q in sample), 2000)
    encoded = [encode_question(q, learnt, max_length=160, stride=50) for q in sample]
    answers, na_probs = choose_answers(sample, encoded, perfect_scores(encoded, 9.0), 100)
    for question in sample:
        if question.span:  # tokens may hold more than the answer, never less
            assert question.answers[0] in answers[question.id]
    scores = score_predictions(sample, answers, na_probs, na_prob_threshold=0.5)
    assert scores["NoAns_exact"] == 100 and scores["HasAns_f1"] > 97
