"""Expansion: against a version in plain lists, and back again.

Shapes: B rows, N input tokens, T expanded tokens, L states, M targets.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.config import SpecialIds
from exlm_mini.model.expansion import expand, expand_masks, gather_states

SPECIAL = SpecialIds()
PAD, BOS, EOS, UNK, SEP, MASK = SPECIAL
BOUNDARIES = ("official", "paper")


class Row(NamedTuple):
    """One row before expansion, without padding."""

    tokens: list[int]
    is_masked: list[bool]


class Layout(NamedTuple):
    """What a row should become."""

    ids: list[int]
    positions: list[int]
    clones: list[int]
    places: list[int]
    owners: list[int]
    state_clones: list[int]
    targets: list[int]
    is_boundary: list[bool]


def batch(rows: list[Row], pad_to: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """masked ids, which are masked, and the tokens before masking."""
    N = max(pad_to, *(len(row.tokens) for row in rows))
    token_ids_BN = torch.tensor([row.tokens + [PAD] * (N - len(row.tokens)) for row in rows])
    is_masked_BN = torch.tensor(
        [row.is_masked + [False] * (N - len(row.is_masked)) for row in rows]
    )
    return token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN


def layout(row: Row, k: int, boundary: str) -> Layout:
    """States expansion with lists, token by token (§4.2)."""
    out = Layout([], [], [], [], [], [], [], [])
    last = len(row.tokens) - 1
    for i, (token, is_masked) in enumerate(zip(row.tokens, row.is_masked, strict=True)):
        is_boundary = not is_masked and token in (BOS, EOS)
        if boundary == "paper":
            is_boundary = is_boundary and i in (0, last)
        is_cloned = is_masked or (is_boundary and boundary == "official")
        for clone in range(1, k + 1) if is_cloned else [0]:
            if is_masked or is_boundary:
                out.places.append(len(out.ids))
                out.owners.append(len(out.targets))
                out.state_clones.append(clone)
            out.ids.append(MASK if is_masked else token)
            out.positions.append(i)
            out.clones.append(clone)
        if is_masked or is_boundary:
            out.targets.append(token)
            out.is_boundary.append(is_boundary)
    return out


def padded(values: list, length: int, filler: int = 0) -> list:
    return values + [filler] * (length - len(values))


def assert_laid_out(rows: list[Row], k: int, boundary: str, pad_to: int = 0) -> None:
    inputs = batch(rows, pad_to)
    expanded, graph = expand_masks(*inputs, k, boundary, SPECIAL)
    for ours, before in zip(inputs, batch(rows, pad_to), strict=True):
        assert torch.equal(ours, before)  # not written to
    layouts = [layout(row, k, boundary) for row in rows]
    T = max(len(want.ids) for want in layouts)
    L = max(len(want.places) for want in layouts)
    M = max(len(want.targets) for want in layouts)
    assert expanded.token_ids_BT.shape == (len(rows), T)
    assert graph.place_BL.shape == (len(rows), L)
    assert graph.target_ids_BM.shape == (len(rows), M)
    for b, want in enumerate(layouts):
        assert expanded.token_ids_BT[b].tolist() == padded(want.ids, T, PAD)
        assert expanded.position_BT[b].tolist() == padded(want.positions, T)
        assert expanded.clone_BT[b].tolist() == padded(want.clones, T)
        assert expanded.is_real_BT[b].tolist() == padded([True] * len(want.ids), T, False)
        assert graph.place_BL[b].tolist() == padded(want.places, L)
        assert graph.owner_BL[b].tolist() == padded(want.owners, L)
        assert graph.clone_BL[b].tolist() == padded(want.state_clones, L)
        assert graph.num_states_B[b] == len(want.places)
        assert graph.is_state_BL[b].tolist() == padded([True] * len(want.places), L, False)
        assert graph.target_ids_BM[b].tolist() == padded(want.targets, M, PAD)
        assert graph.is_boundary_BM[b].tolist() == padded(want.is_boundary, M, False)
        assert graph.num_targets_B[b] == len(want.targets)


@st.composite
def drawn_rows(draw) -> list[Row]:
    """Rows [BOS] ... [EOS] with ordinary tokens, separators and inner [EOS], some masked."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        inner = draw(st.lists(st.sampled_from([EOS, SEP, UNK, 6, 7, 8, 9]), max_size=7))
        flags = [draw(st.booleans()) and token != EOS for token in inner]
        rows.append(Row([BOS, *inner, EOS], [False, *flags, False]))
    return rows


EXAMPLE = [
    Row([BOS, 10, 11, 12, EOS], [False, True, False, True, False]),
    Row([BOS, 13, EOS], [False, False, False]),
    Row([BOS, 14, 15, 16, 17, EOS], [False, True, True, True, True, False]),
]


def test_the_example_of_the_paper_reads_as_expected():
    # [BOS] [MASK] b [MASK] [EOS] with two states per mask
    expanded, graph = expand_masks(*batch(EXAMPLE[:1]), 2, "paper", SPECIAL)
    assert expanded.token_ids_BT.tolist() == [[BOS, MASK, MASK, 11, MASK, MASK, EOS]]
    assert expanded.position_BT.tolist() == [[0, 1, 1, 2, 3, 3, 4]]
    assert expanded.clone_BT.tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    assert graph.place_BL.tolist() == [[0, 1, 2, 4, 5, 6]]
    assert graph.owner_BL.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert graph.target_ids_BM.tolist() == [[BOS, 10, 12, EOS]]
    assert graph.is_boundary_BM.tolist() == [[True, False, False, True]]


@given(
    drawn_rows(), st.integers(1, 4), st.sampled_from(BOUNDARIES), st.sampled_from([0, 11, 20])
)
def test_expansion_equals_the_plain_version(rows, k, boundary, pad_to):
    assert_laid_out(rows, k, boundary, pad_to)


def test_a_row_without_any_state_has_none():
    row = [Row([10, 11], [False, False]), Row([BOS, 10, EOS], [False, True, False])]
    _, graph = expand_masks(*batch(row), 2, "official", SPECIAL)
    assert graph.num_states_B.tolist() == [0, 6] and graph.num_targets_B.tolist() == [0, 3]
    assert not graph.is_state_BL[0].any()


def test_special_ids_of_other_vocabularies_work():
    special = SpecialIds(pad=1, bos=0, eos=2, unk=3, sep=2, mask=20)
    token_ids_BN = torch.tensor([[0, 10, 11, 2, 1, 1]])
    is_masked_BN = torch.tensor([[False, True, False, False, False, False]])
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, 20)
    expanded, graph = expand_masks(
        masked_ids_BN, is_masked_BN, token_ids_BN, 2, "paper", special
    )
    assert expanded.token_ids_BT.tolist() == [[0, 20, 20, 11, 2]]
    assert graph.target_ids_BM.tolist() == [[0, 10, 2]]


def test_any_numbers_of_copies_may_be_asked_for():
    token_ids_BN = torch.tensor([[10, 11, 12, PAD], [13, 14, 15, 16]])
    copies_BN = torch.tensor([[1, 3, 2, 9], [2, 1, 1, 1]])
    is_expanded_BN = torch.tensor([[False, True, False, True], [True, False, False, False]])
    expanded = expand(token_ids_BN, copies_BN, is_expanded_BN, PAD)
    assert expanded.token_ids_BT.tolist() == [
        [10, 11, 11, 11, 12, 12],
        [13, 13, 14, 15, 16, PAD],
    ]
    assert expanded.position_BT.tolist() == [[0, 1, 1, 1, 2, 2], [0, 0, 1, 2, 3, 0]]
    assert expanded.clone_BT.tolist() == [[0, 1, 2, 3, 0, 0], [1, 2, 0, 0, 0, 0]]
    assert expanded.is_real_BT.tolist() == [[True] * 6, [True] * 5 + [False]]


def test_inputs_are_not_written_to():
    inputs = batch(EXAMPLE)
    before = [t.clone() for t in inputs]
    for boundary in BOUNDARIES:
        expand_masks(*inputs, 3, boundary, SPECIAL)
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))


def test_states_are_gathered_from_their_places():
    expanded, graph = expand_masks(*batch(EXAMPLE), 2, "paper", SPECIAL)
    B, T = expanded.token_ids_BT.shape
    hidden_BTD = torch.arange(1.0, B * T + 1).view(B, T, 1).expand(B, T, 3)
    state_BLD = gather_states(hidden_BTD, graph)
    for b in range(B):
        L = int(graph.num_states_B[b])
        assert torch.equal(state_BLD[b, :L], hidden_BTD[b, graph.place_BL[b, :L]])
        assert not state_BLD[b, L:].any()


@pytest.mark.parametrize("tokens", [[10, 11, EOS], [BOS, 10, 11], [BOS, EOS, 10]])
def test_rows_without_boundaries_are_refused_where_the_paper_needs_them(tokens):
    rows = [EXAMPLE[0], Row(tokens, [False] * 3)]
    with pytest.raises(ValueError, match=r"row 1 must start with \[BOS\] and end with \[EOS\]"):
        expand_masks(*batch(rows), 2, "paper", SPECIAL)
    expand_masks(*batch(rows), 2, "official", SPECIAL)
