"""Rows of downstream examples: framing, cutting, batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm_lab.downstream.inputs import (
    encode_examples,
    evaluation_batches,
    longest_first,
    padded,
)
from exlm_mini.config import SpecialIds
from exlm_mini.data.masking import repeat_tokens
from exlm_mini.data.tokenizer import word_level
from exlm_mini.model.expansion import expand_masks
from exlm_mini.reading.pretrained import Layout

SPECIAL = SpecialIds()
WORDS = word_level(["a", "b", "c", "d"])


def words(row):
    return [WORDS.token(int(i)) for i in row]


def test_a_sentence_and_a_pair_are_framed_as_roberta_frames_them():
    rows = encode_examples([("a b",), ("a", "c d")], WORDS, Layout(SPECIAL, 64))[0]
    assert words(rows[0]) == ["[BOS]", "a", "b", "[EOS]"]
    assert words(rows[1]) == ["[BOS]", "a", "[EOS]", "[EOS]", "c", "d", "[EOS]"]


def cut_one_by_one(lengths, room):
    """The rule in so many words: from the longer one, from the second of equals."""
    lengths = list(lengths)
    while sum(lengths) > room:
        lengths[-1 if lengths[-1] >= lengths[0] else 0] -= 1
    return lengths


@pytest.mark.parametrize("room", [2, 5, 8, 11])
def test_the_longest_text_is_cut_first(room):
    for lengths in [[n] for n in range(12)] + [[a, b] for a in range(12) for b in range(12)]:
        assert longest_first(lengths, room) == cut_one_by_one(lengths, room)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([(1, 4), (3, 1), (1, 1)]),
    st.integers(30, 60),
)
def test_no_row_passes_the_positions_once_it_is_expanded(pairs, copies, max_positions):
    num_copies, boundary_copies = copies
    layout = Layout(SPECIAL, max_positions, num_copies, boundary_copies)
    texts = [("a " * first, "b " * second) for first, second in pairs]
    rows, notes = encode_examples(texts, WORDS, layout)
    ids_BN = padded(rows, SPECIAL.pad)
    nothing_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
    if num_copies > 1:
        longest = repeat_tokens(ids_BN, num_copies).shape[1]
    else:
        boundary = "official" if boundary_copies > 1 else "paper"
        expanded, _ = expand_masks(
            ids_BN, nothing_BN, ids_BN, boundary_copies, boundary, SPECIAL
        )
        longest = expanded.token_ids_BT.shape[1]
    assert longest <= max_positions
    num_cut = [sum(pair) - (len(row) - 4) for row, pair in zip(rows, pairs, strict=True)]
    assert notes["tokens_cut"] == sum(num_cut)
    assert notes["truncated"] == sum(n > 0 for n in num_cut)
    assert (notes["examples"], notes["longest"]) == (len(pairs), ids_BN.shape[1])


def test_unknown_tokens_are_counted_before_any_is_cut():
    _, notes = encode_examples([("x y a z",)], WORDS, Layout(SPECIAL, 4))
    assert notes["unknown_share"] == 0.75 and notes["tokens_cut"] == 2


def test_evaluation_begins_with_the_longest_rows():
    batches = evaluation_batches(np.array([3, 9, 5, 1]), 3)
    assert [batch.tolist() for batch in batches] == [[1, 2, 0], [3]]
