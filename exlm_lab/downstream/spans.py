"""From a question and its paragraph to windows of tokens, and from logits to an answer.

A window is the pair of the question and a piece of the paragraph, framed as ``inputs`` frames
every pair. A paragraph that is too long is cut into overlapping pieces. The model gives each
position two logits: that the answer begins there, and that it ends there; "no answer" is the
span of the first position, [BOS] (Devlin et al. 2018, §4.3). A token that lies in several
windows may begin an answer only in the one that shows most of its surroundings.

Shapes: B windows, N positions, T tokens of the paragraph or of a piece, A lengths of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from exlm_lab.downstream.inputs import framed
from exlm_lab.downstream.squad import Question
from exlm_mini.config import SpecialIds
from exlm_mini.data.tokenizer import Tokenizer


class Window(NamedTuple):
    """A question with a piece of its paragraph."""

    token_ids_N: np.ndarray
    """int32, as ``inputs.framed`` gives them."""
    context_column: int
    """Where in the window the piece begins."""
    first_token: int
    """Which token of the paragraph that is."""
    is_clearest: np.ndarray
    """bool, per token of the piece: no other window shows more around it."""


class EncodedQuestion(NamedTuple):
    """All windows of a question."""

    windows: list[Window]
    offsets: list[tuple[int, int]]
    """Characters of each token of the paragraph, end excluded."""
    targets: list[tuple[int, int]]
    """First and last column of the answer, per window; (0, 0) if it is not there as a whole."""
    num_cut: int
    """Tokens of the question beyond the limit, left out."""
    num_tokens: int
    """Of question and paragraph, before any was cut, each once however many windows show it."""
    num_unknown: int
    """Of these, how many are [UNK]."""


class BestSpan(NamedTuple):
    """The likeliest answer of a window, and the score of "no answer"."""

    first: int
    """Column in the window."""
    last: int
    score: float
    """Sum of the two logits; -inf where no span is allowed."""
    null_score: float


# ---- to windows ----


def encode_question(
    question: Question,
    tokenizer: Tokenizer,
    max_length: int,
    stride: int,
    max_question: int = 64,
) -> EncodedQuestion:
    """Windows and targets of a question, of which ``max_question`` tokens are kept.

    White space around the question or the answer is not part of it.
    """
    question_ids = tokenizer.encode(question.question.strip())
    context_ids, offsets = tokenizer.encode_with_offsets(question.context)
    cut = windows(
        question_ids[:max_question], context_ids, max_length, stride, tokenizer.special_ids
    )
    targets = [(0, 0)] * len(cut)
    begin, end = question.span or (0, 0)
    # A letter of several bytes may be several tokens; a blank is often part of the next token.
    inside = [
        token
        for token, (start, stop) in enumerate(offsets)
        if question.context[max(start, begin) : min(stop, end)].strip()
    ]
    for row, window in enumerate(cut if inside else ()):
        first, last = inside[0] - window.first_token, inside[-1] - window.first_token
        if first >= 0 and last < len(window.is_clearest):
            targets[row] = window.context_column + first, window.context_column + last
    unk = tokenizer.special_ids.unk
    return EncodedQuestion(
        cut,
        offsets,
        targets,
        num_cut=max(0, len(question_ids) - max_question),
        num_tokens=len(question_ids) + len(context_ids),
        num_unknown=question_ids.count(unk) + context_ids.count(unk),
    )


def windows(
    question_ids: list[int],
    context_ids: list[int],
    max_length: int,
    stride: int,
    special_ids: SpecialIds = SpecialIds(),
) -> list[Window]:
    """Every window of a question, in the order of the paragraph; at least one.

    How clearly a window shows a token is the smaller of the numbers of tokens to the left and to
    the right in the window; of equals the earlier window counts.

    Args:
        question_ids: tokens of the question.
        context_ids: tokens of the paragraph.
        max_length: tokens of a window at most, before the model expands any.
        stride: tokens from the beginning of a piece to that of the next.
        special_ids: of the vocabulary.

    Raises:
        ValueError: if the question leaves no room, or the stride would jump over tokens.
    """
    T = len(context_ids)
    column = len(question_ids) + 3  # [BOS], the question, two [EOS]
    room = max_length - column - 1  # the last [EOS] comes behind
    if not 1 <= stride <= room:
        raise ValueError(f"a stride of {stride} over windows with room for {room} tokens")
    num_pieces = 1 + max(0, math.ceil((T - room) / stride))
    starts_B1 = stride * np.arange(num_pieces)[:, None]
    ends_B1 = np.minimum(starts_B1 + room, T)
    around_BT = np.minimum(np.arange(T) - starts_B1, ends_B1 - 1 - np.arange(T))
    owner_T = around_BT.argmax(axis=0)  # the first of equals; negative where it is not shown
    return [
        Window(
            framed([question_ids, context_ids[start:end]], special_ids),
            column,
            start,
            owner_T[start:end] == row,
        )
        for row, (start, end) in enumerate(np.hstack([starts_B1, ends_B1]).tolist())
    ]


# ---- from logits ----


def best_span(score_2N: np.ndarray, window: Window, max_answer_length: int = 30) -> BestSpan:
    """The likeliest span of a window: the largest sum of two logits.

    Args:
        score_2N: that an answer begins at a position, and that it ends there, float.
        window: its positions; a span lies in the paragraph and begins with a token that is
            clearest in this window.
        max_answer_length: tokens of an answer at most, A.
    """
    begin = window.context_column
    null_score = float(score_2N[0, 0] + score_2N[1, 0])
    if not window.is_clearest.any():
        return BestSpan(0, 0, -math.inf, null_score)
    start_T, end_T = score_2N[:, begin : begin + len(window.is_clearest)]
    start_T = np.where(window.is_clearest, start_T, -np.inf)
    end_T = np.pad(end_T, (0, max_answer_length - 1), constant_values=-np.inf)
    # Column a of row n: the span that begins at n and ends a tokens behind.
    score_TA = start_T[:, None] + sliding_window_view(end_T, max_answer_length)
    first, length = map(int, np.unravel_index(score_TA.argmax(), score_TA.shape))
    return BestSpan(
        begin + first, begin + first + length, float(score_TA[first, length]), null_score
    )


def choose_answers(
    questions: Sequence[Question],
    encoded: Sequence[EncodedQuestion],
    scores: Iterable[np.ndarray],
    max_answer_length: int = 30,
) -> tuple[dict[str, str], dict[str, float]]:
    """One answer per question, from the best of its windows, for ``squad.score_predictions``.

    "No answer" is as likely as in the window where it is least likely: in all others the answer
    may simply not be shown.

    Args:
        questions: in the order of ``encoded``.
        encoded: their windows.
        scores: of every window (2, N), see ``best_span``; those of the first question first.
        max_answer_length: tokens of an answer at most.

    Returns:
        texts: by question id, the likeliest span, however likely it is that there is none.
        na_probs: the logistic function of the score of "no answer" less that of the span.
    """
    texts, na_probs, left = {}, {}, iter(scores)
    for question, entry in zip(questions, encoded, strict=True):
        best = [best_span(next(left), window, max_answer_length) for window in entry.windows]
        span, window = max(
            zip(best, entry.windows, strict=True), key=lambda pair: pair[0].score
        )
        texts[question.id] = ""
        if span.score > -math.inf:
            shift = window.first_token - window.context_column
            begin, end = (
                entry.offsets[span.first + shift][0],
                entry.offsets[span.last + shift][1],
            )
            texts[question.id] = question.context[begin:end].strip()
        difference = min(other.null_score for other in best) - span.score
        na_probs[question.id] = 1.0 / (1.0 + math.exp(min(-difference, 700.0)))
    return texts, na_probs
