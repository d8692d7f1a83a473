"""Rows of downstream examples: special tokens, truncation and batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.inputs import (
    encode_examples,
    evaluation_batches,
    padded,
)
from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, SpecialIds
from exlm_mini.data.masking import repeat_tokens
from exlm_mini.data.tokenizer import word_level
from exlm_mini.model.expansion import expand_masks

SPECIAL = SpecialIds()
WORDS = word_level(["a", "b", "c", "d"])


def run(max_positions, num_copies=1, boundary_copies=1):
    """Settings of a pre-training run with these sizes."""
    objective = "exlm" if num_copies == 1 else "repeated-mlm"
    model = ModelConfig(max_positions=max_positions, states_per_mask=boundary_copies)
    masking = MaskingConfig(strategy="bernoulli", num_copies=num_copies)
    return RunConfig(objective=objective, model=model, masking=masking)


def words(row):
    return [WORDS.token(int(i)) for i in row]


def test_a_sentence_and_a_pair_are_framed_as_roberta_frames_them():
    config = run(64)
    (single,), (pair,) = (
        encode_examples([texts], WORDS, config)[0] for texts in (("a b",), ("a", "c d"))
    )
    assert words(single) == ["[BOS]", "a", "b", "[EOS]"]
    assert words(pair) == ["[BOS]", "a", "[EOS]", "[EOS]", "c", "d", "[EOS]"]


@pytest.mark.parametrize("room", [2, 5, 8, 11])
def test_the_longer_text_is_cut_first(room):
    lengths = [(a, b) for a in range(12) for b in range(12)]
    texts = [("a " * first, "b " * second) for first, second in lengths]
    for (first, second), row in zip(
        lengths, encode_examples(texts, WORDS, run(room + 4))[0], strict=True
    ):
        kept = words(row).count("a"), words(row).count("b")
        assert sum(kept) == min(first + second, room)
        for own, own_kept, other in ((first, kept[0], kept[1]), (second, kept[1], kept[0])):
            assert own_kept == own or own_kept >= other - 1


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([(1, 4), (3, 1), (1, 1)]),
    st.integers(30, 60),
)
def test_no_row_passes_the_positions_once_it_is_expanded(pairs, copies, max_positions):
    num_copies, boundary_copies = copies
    config = run(max_positions, num_copies, boundary_copies)
    texts = [("a " * first, "b " * second) for first, second in pairs]
    rows, notes = encode_examples(texts, WORDS, config)
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
    assert notes["truncated"] == sum(n > 0 for n in num_cut)
    assert (notes["examples"], notes["longest"]) == (len(pairs), ids_BN.shape[1])


def test_positions_that_leave_no_token_to_a_text_of_a_pair_are_refused():
    pair = [("a", "b")]
    assert words(encode_examples(pair, WORDS, run(6))[0][0]).count("[EOS]") == 3
    told(lambda: encode_examples(pair, WORDS, run(5)), "room for only 5 tokens")


def test_unknown_tokens_are_counted_before_any_is_cut():
    _, notes = encode_examples([("x y a z",)], WORDS, run(4))
    assert notes["unknown_share"] == 0.75 and notes["truncated"] == 1


def test_evaluation_begins_with_the_longest_rows():
    batches = evaluation_batches(np.array([3, 9, 5, 1]), 3)
    assert [batch.tolist() for batch in batches] == [[1, 2, 0], [3]]
