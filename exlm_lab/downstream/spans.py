"""Turn a question and its paragraph into windows of tokens, and the logits into an answer.

A window is a pair of the question and a piece of the paragraph, with the same boundaries as every
pair in ``inputs``. A paragraph that is too long is cut into overlapping pieces. The model gives
each position two logits, one for the answer to begin there and one for it to end there; "no
answer" is the span of the first position, [BOS] (Devlin et al. 2018, §4.3).

Shapes: N positions of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.squad import Question
from exlm_mini.data.tokenizer import Tokenizer

MOST_TOKENS = 30
"""Longest answer, in tokens."""


class Window(NamedTuple):
    """A question with a piece of its paragraph."""

    question: int
    """Index of the question."""
    token_ids_N: np.ndarray
    """Token ids, int32."""
    is_context_N: np.ndarray
    """Whether each token belongs to the paragraph."""
    offsets_N2: np.ndarray
    """Start and end (excluded) of each paragraph token, in characters of the paragraph."""


def windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    max_length: int,
    overlap: int,
    max_question: int,
) -> tuple[list[Window], dict[str, Any]]:
    """Cut every question and its paragraph into windows.

    Args:
        questions: at least one.
        max_length: most tokens in a window, before the model expands any.
        overlap: tokens that a piece shares with the next.
        max_question: most tokens to keep of a question.

    Returns:
        windows: at least one per question, in the order of the questions and their paragraphs.
        notes: the number of questions and of windows, the length of the longest window, how many
            questions were cut, and the share of [UNK] among all tokens.
    """
    from exlm_mini.hf.tokenizer import tokenizer_for  # importing transformers takes seconds

    encode = tokenizer_for(tokenizer)
    asked = [question.question for question in questions]
    ends = encode(asked, add_special_tokens=False, return_offsets_mapping=True)
    long = [n for n, own in enumerate(ends["offset_mapping"]) if len(own) > max_question]
    for n in long:
        asked[n] = asked[n][: ends["offset_mapping"][n][max_question - 1][1]]
    encoded = encode(
        asked, [question.context for question in questions], truncation="only_second",
        max_length=max_length, stride=overlap,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    cut = [
        Window(
            number,
            np.array(encoded["input_ids"][row], dtype=np.int32),
            np.array([part == 1 for part in encoded.sequence_ids(row)]),
            np.array(encoded["offset_mapping"][row]),
        )
        for row, number in enumerate(encoded["overflow_to_sample_mapping"])
    ]
    num_unknown = sum((w.token_ids_N == tokenizer.special_ids.unk).sum() for w in cut)
    return cut, {
        "examples": len(questions),
        "windows": len(cut),
        "longest": max(len(window.token_ids_N) for window in cut),
        "truncated": len(long),
        "unknown_share": round(float(num_unknown) / sum(len(w.token_ids_N) for w in cut), 6),
    }


def target(question: Question, window: Window) -> tuple[int, int]:
    """First and last position of the answer; (0, 0) if the window does not hold all of it."""
    if question.span is None:
        return 0, 0
    (begin, end), (start_N, stop_N) = question.span, window.offsets_N2.T
    is_inside_N = window.is_context_N & (np.maximum(start_N, begin) < np.minimum(stop_N, end))
    columns = np.flatnonzero(is_inside_N)
    if not len(columns) or start_N[columns[0]] > begin or stop_N[columns[-1]] < end:
        return 0, 0
    return int(columns[0]), int(columns[-1])


def best_span(
    score_2N: np.ndarray, window: Window, max_tokens: int = MOST_TOKENS
) -> tuple[float, int, int]:
    """The likeliest span of a window's paragraph, the one with the largest sum of its two logits.

    Returns:
        The sum, -inf if there is no span, and the first and last position.
    """
    start_N, end_N = np.where(window.is_context_N, score_2N, -np.inf)
    N = len(start_N)
    is_span_NN = np.triu(np.tri(N, N, max_tokens - 1, dtype=bool))
    score_NN = np.where(is_span_NN, start_N[:, None] + end_N, -np.inf)
    first, last = map(int, np.unravel_index(score_NN.argmax(), score_NN.shape))
    return float(score_NN[first, last]), first, last


def choose_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    scores: Iterable[np.ndarray],
    max_tokens: int = MOST_TOKENS,
) -> tuple[dict[str, str], dict[str, float]]:
    """One answer per question, from the best of its windows, for ``squad.score_predictions``.

    "No answer" gets its lowest score among the question's windows, since a window with a higher one
    may simply not show the answer.

    Returns:
        texts: the likeliest span by question id, even if "no answer" is likelier.
        na_probs: the logistic function of the score of "no answer" less that of the span.
    """
    texts: dict[str, str] = {}
    best: dict[str, float] = {}
    null: dict[str, float] = {}
    for window, score_2N in zip(windows, scores, strict=True):
        question = questions[window.question]
        score, first, last = best_span(score_2N, window, max_tokens)
        null[question.id] = min(null.get(question.id, math.inf), float(score_2N[:, 0].sum()))
        if question.id not in best or score > best[question.id]:
            begin, end = window.offsets_N2[first, 0], window.offsets_N2[last, 1]
            best[question.id] = score
            texts[question.id] = question.context[begin:end] if score > -math.inf else ""
    return texts, {id: 1.0 / (1.0 + math.exp(min(best[id] - null[id], 700.0))) for id in texts}
