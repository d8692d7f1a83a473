"""Expansion against a version in plain lists, and gathering its states.

Shapes: B rows, N input tokens, T expanded tokens, L states, M targets.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import BOS, EOS, MASK, PAD, SEP, SPECIAL, UNK, masked_rows
from torch import Tensor

from exlm_mini.model.expansion import expand_masks, gather_states

BOUNDARIES = ("official", "paper")


class Layout(NamedTuple):
    """The expected expansion of a row."""

    ids: list[int]
    positions: list[int]
    clones: list[int]
    places: list[int]
    owners: list[int]
    state_clones: list[int]
    targets: list[int]
    is_boundary: list[bool]


def layout(row: list[int], k: int, boundary: str) -> Layout:
    """States expansion (§4.2) with lists, token by token; a negative token is masked."""
    out = Layout([], [], [], [], [], [], [], [])
    for i, token in enumerate(row):
        is_masked, is_boundary = token < 0, token in (BOS, EOS)
        if boundary == "paper":
            is_boundary = is_boundary and i in (0, len(row) - 1)
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
            out.targets.append(abs(token))
            out.is_boundary.append(is_boundary)
    return out


def assert_padded(ours_BX: Tensor, expected: list[list], filler: int = 0) -> None:
    """Assert that ``ours_BX`` holds the expected rows, padded to the longest."""
    X = max(1, *map(len, expected))
    assert ours_BX.tolist() == [row + [filler] * (X - len(row)) for row in expected]


tokens = st.sampled_from([BOS, EOS, SEP, UNK, 6, 7, 8, -SEP, -UNK, -6, -7, -8])


@given(
    st.lists(st.lists(tokens, min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(BOUNDARIES),
    st.sampled_from([0, 12, 20]),
)
def test_expansion_equals_the_plain_version(rows, k, boundary, pad_to):
    """Rows mix ordinary tokens, separators and boundaries, masked or not; some have no state."""
    rows = [[BOS, *row, EOS] for row in rows] if boundary == "paper" else rows
    inputs = masked_rows(*rows, pad_to=pad_to)
    expanded, graph = expand_masks(*inputs, k, boundary, SPECIAL)
    for ours, before in zip(inputs, masked_rows(*rows, pad_to=pad_to), strict=True):
        assert torch.equal(ours, before)  # the input is unchanged
    expected = Layout(*zip(*(layout(row, k, boundary) for row in rows), strict=True))
    assert_padded(expanded.token_ids_BT, expected.ids, PAD)
    assert_padded(expanded.position_BT, expected.positions)
    assert_padded(expanded.clone_BT, expected.clones)
    assert_padded(expanded.is_real_BT, [[True] * len(ids) for ids in expected.ids], False)
    assert_padded(graph.place_BL, expected.places)
    assert_padded(graph.owner_BL, expected.owners)
    assert_padded(graph.clone_BL, expected.state_clones)
    assert_padded(graph.is_state_BL, [[True] * len(row) for row in expected.places], False)
    assert_padded(graph.target_ids_BM, expected.targets, PAD)
    assert_padded(graph.is_boundary_BM, expected.is_boundary, False)
    assert graph.num_states_B.tolist() == [len(row) for row in expected.places]
    assert graph.num_targets_B.tolist() == [len(row) for row in expected.targets]
    # States are gathered from their places.
    place_T = torch.arange(1, expanded.token_ids_BT.shape[1] + 1)
    state_BLD = gather_states(place_T[None, :, None].expand(len(rows), -1, 3), graph)
    expected_BL = (graph.place_BL + 1) * graph.is_state_BL
    assert torch.equal(state_BLD, expected_BL.unsqueeze(2).expand_as(state_BLD))


@pytest.mark.parametrize("tokens", [[10, 11, EOS], [BOS, 10, 11], [BOS, EOS, 10], []])
def test_rows_without_boundaries_are_refused_where_the_paper_needs_them(tokens):
    batch = masked_rows([BOS, -10, 11, EOS], tokens)
    with pytest.raises(ValueError, match=r"row 1 must start with \[BOS\] and end with \[EOS\]"):
        expand_masks(*batch, 2, "paper", SPECIAL)
    expand_masks(*batch, 2, "official", SPECIAL)
