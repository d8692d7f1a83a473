"""From a question and its paragraph to windows of tokens, and from logits to an answer.

A window is the pair of the question and a piece of the paragraph, framed as ``inputs`` frames
every pair. A paragraph that is too long is cut into overlapping pieces. The model gives each
position two logits: that the answer begins there, and that it ends there; "no answer" is the
span of the first position, [BOS] (Devlin et al. 2018, §4.3). A token that lies in several
windows may begin an answer only in the one that shows most of its surroundings.

Shapes: B windows, N positions, T tokens of the paragraph, A lengths of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream.inputs import framed
from exlm_lab.downstream.squad import Question
from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
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


class BestSpans(NamedTuple):
    """The likeliest answer of each window, and the score of "no answer"."""

    first_B: Tensor
    """Column, int64."""
    last_B: Tensor
    score_B: Tensor
    """Sum of the two logits; -inf where no span is allowed."""
    null_score_B: Tensor


class Answers(NamedTuple):
    """Answers by question id, for ``squad.score_predictions``."""

    texts: dict[str, str]
    """The likeliest span, however likely it is that there is none."""
    na_probs: dict[str, float]
    """Logistic function of the score of "no answer" less that of the span."""

    def at(self, threshold: float) -> dict[str, str]:
        """Answers to hand in: empty where ``na_probs`` lie above a threshold."""
        probs = self.na_probs
        return {id: "" if probs[id] > threshold else t for id, t in self.texts.items()}


# ---- to windows ----


def encode_question(
    question: Question,
    tokenizer: Tokenizer,
    max_length: int,
    stride: int,
    max_question: int = 64,
) -> EncodedQuestion:
    """Windows and targets of a question, of which ``max_question`` tokens are kept."""
    question_ids = tokenizer.encode(question.question)
    context_ids, offsets = tokenizer.encode_with_offsets(question.context)
    cut = windows(
        question_ids[:max_question], context_ids, max_length, stride, tokenizer.special_ids
    )
    targets = [(0, 0)] * len(cut)
    if question.span is not None:
        begin, end = question.span
        # A letter of several bytes may be several tokens.
        inside = [t for t, (start, stop) in enumerate(offsets) if start < end and stop > begin]
        for row, window in enumerate(cut):
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


def best_spans(
    start_logits_BN: Tensor,
    end_logits_BN: Tensor,
    batch: Sequence[Window],
    max_answer_length: int = 30,
) -> BestSpans:
    """The likeliest span of each window: the largest sum of two logits.

    Args:
        start_logits_BN: that an answer begins at a position, float.
        end_logits_BN: that it ends there, its last token.
        batch: the B windows; positions behind a shorter one are padding and not read.
        max_answer_length: tokens of an answer at most, A.

    Returns:
        spans inside the paragraph whose first token is clearest in this window.
    """
    is_start_BN = torch.zeros(start_logits_BN.shape, dtype=torch.bool)
    is_end_BN = torch.zeros_like(is_start_BN)
    for row, window in enumerate(batch):
        begin = window.context_column
        end = begin + len(window.is_clearest)
        is_start_BN[row, begin:end] = torch.from_numpy(window.is_clearest)
        is_end_BN[row, begin:end] = True
    start_BN = start_logits_BN.masked_fill(~is_start_BN, -torch.inf)
    end_BN = end_logits_BN.masked_fill(~is_end_BN, -torch.inf)
    # Column n of row a holds the logit of an end a tokens behind n.
    padded_BN = torch.nn.functional.pad(end_BN, (0, max_answer_length - 1), value=-torch.inf)
    score_BNA = start_BN.unsqueeze(2) + padded_BN.unfold(1, max_answer_length, 1)
    score_B, place_B = score_BNA.flatten(1).max(dim=1)
    first_B = place_B // max_answer_length
    null_score_B = start_logits_BN[:, 0] + end_logits_BN[:, 0]
    return BestSpans(first_B, first_B + place_B % max_answer_length, score_B, null_score_B)


def choose_answers(
    questions: Sequence[Question], encoded: Sequence[EncodedQuestion], best: BestSpans
) -> Answers:
    """One answer per question, from the best of its windows.

    "No answer" is as likely as in the window where it is least likely: in all others the answer
    may simply not be shown.

    Args:
        questions: in the order of ``encoded``.
        encoded: their windows.
        best: of all windows, those of the first question first.

    Raises:
        UserError: if a logit was not a number.
    """
    texts, na_probs, row = {}, {}, 0
    score, null_score = best.score_B.tolist(), best.null_score_B.tolist()
    for question, entry in zip(questions, encoded, strict=True):
        rows = range(row, row + len(entry.windows))
        row = rows.stop
        if any(math.isnan(score[r] + null_score[r]) for r in rows):
            raise UserError(
                f"squad_v2: the logits of question {question.id} are no numbers; the model "
                "diverged, lower the learning rate"
            )
        chosen = max(rows, key=score.__getitem__)
        texts[question.id] = ""
        if score[chosen] > -math.inf:
            window = entry.windows[chosen - rows.start]
            shift = window.first_token - window.context_column
            begin = entry.offsets[int(best.first_B[chosen]) + shift][0]
            end = entry.offsets[int(best.last_B[chosen]) + shift][1]
            texts[question.id] = question.context[begin:end].strip()
        difference = min(null_score[r] for r in rows) - score[chosen]
        na_probs[question.id] = 1.0 / (1.0 + math.exp(min(-difference, 700.0)))
    return Answers(texts, na_probs)
