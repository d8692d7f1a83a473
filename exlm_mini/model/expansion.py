"""States expansion: each [MASK] becomes k states, and the states become a graph (§4.2).

Shapes: B rows, N input tokens, T expanded tokens, L states, M targets, S masks
of a whole batch, k states of a mask.

The dynamic programme runs over the states alone, so this stage also records where each state is in
the expanded sequence and which targets the graph must spell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.config import SpecialIds


class Expanded(NamedTuple):
    """An expanded batch; padding has token id ``pad``, position 0 and clone 0."""

    token_ids_BT: Tensor
    """int64, ordinary tokens and the copies of [MASK] (and of the boundaries)."""
    position_BT: Tensor
    """int64, index of the original token; all clones share it."""
    clone_BT: Tensor
    """int64, 1..k for a clone, 0 for an ordinary token."""
    is_real_BT: Tensor
    """bool, false at padding."""


class StateGraph(NamedTuple):
    """The states of each row, in order, and the targets a path through them must emit."""

    place_BL: Tensor
    """int64, place of each state in the expanded sequence; 0 beyond ``num_states_B``."""
    owner_BL: Tensor
    """int64, index (0..M-1) of the target that each state is a clone of; 0 beyond the states."""
    clone_BL: Tensor
    """int64, clone index 1..k of each state; 0 for an unexpanded boundary and beyond."""
    num_states_B: Tensor
    """int64, number of states of each row."""
    state_BMk: Tensor
    """int64, the states of each target in order; 0 where ``is_own_BMk`` is false."""
    is_own_BMk: Tensor
    """bool, false beyond a target's own states; an unexpanded boundary has only one."""
    target_ids_BM: Tensor
    """int64, true tokens of the targets, in order; ``pad`` beyond ``num_targets_B``."""
    is_boundary_BM: Tensor
    """bool, true where the target is a [BOS] or [EOS], not a masked token."""
    num_targets_B: Tensor
    """int64, number of targets of each row."""

    @property
    def is_state_BL(self) -> Tensor:
        """bool, false at padding."""
        place_L = torch.arange(self.place_BL.shape[1], device=self.place_BL.device)
        return place_L < self.num_states_B.unsqueeze(1)

    @property
    def is_target_BM(self) -> Tensor:
        """bool, false at padding."""
        return self.is_own_BMk[:, :, 0]

    @property
    def is_mask_BM(self) -> Tensor:
        """bool, true where the target is a masked token; S in total."""
        return self.is_target_BM & ~self.is_boundary_BM

    def by_target(self, value_BLX: Tensor) -> Tensor:
        """Gather the states' values by target: value_BMkX, arbitrary where not ``is_own_BMk``."""
        B, M, k = self.state_BMk.shape
        others = value_BLX.shape[2:]
        index_BKX = self.state_BMk.view(B, M * k, *(1 for _ in others)).expand(-1, -1, *others)
        return value_BLX.gather(1, index_BKX).unflatten(1, (M, k))

    def of_masks(self, value_BLX: Tensor) -> Tensor:
        """Gather the states' values by mask, row by row: value_SkX."""
        return self.by_target(value_BLX)[self.is_mask_BM]


def expand(
    token_ids_BN: Tensor, copies_BN: Tensor, is_expanded_BN: Tensor, pad: int
) -> Expanded:
    """Repeat each token, its clones next to each other (§4.2, X').

    Args:
        token_ids_BN: int64, padded on the right with ``pad``.
        copies_BN: int64, copies of each token; 1 for ordinary tokens.
        is_expanded_BN: bool, true where copies are numbered clones (i, 1..k) and not the
            ordinary token (i, 0).
        pad: id of padding, which is removed and added again on the right.

    Returns:
        The expanded batch, T as long as the longest expanded row.
    """
    copies_BN = copies_BN.masked_fill(token_ids_BN == pad, 0)
    end_BN = copies_BN.cumsum(dim=1)
    length_B = end_BN[:, -1]
    T = int(length_B.max())
    place_BT = (
        torch.arange(T, device=token_ids_BN.device).expand(len(token_ids_BN), T).contiguous()
    )
    # A place belongs to the first token whose copies end beyond it.
    source_BT = torch.searchsorted(end_BN, place_BT, right=True).clamp(max=end_BN.shape[1] - 1)
    start_BT = (end_BN - copies_BN).gather(1, source_BT)
    is_real_BT = place_BT < length_B.unsqueeze(1)
    clone_BT = (place_BT - start_BT + 1) * is_expanded_BN.gather(1, source_BT)
    return Expanded(
        token_ids_BN.gather(1, source_BT).masked_fill(~is_real_BT, pad),
        source_BT.masked_fill(~is_real_BT, 0),
        clone_BT.masked_fill(~is_real_BT, 0),
        is_real_BT,
    )


def _leading(is_chosen_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the chosen columns, left-aligned, and their number in each row."""
    count_B = is_chosen_BX.sum(dim=1)
    order_BX = torch.argsort(~is_chosen_BX, dim=1, stable=True)
    return order_BX[:, : max(int(count_B.max()), 1)], count_B


def expand_masks(
    masked_ids_BN: Tensor,
    is_masked_BN: Tensor,
    token_ids_BN: Tensor,
    states_per_mask: int,
    boundary: str,
    special_ids: SpecialIds,
) -> tuple[Expanded, StateGraph]:
    """Expand a masked batch and lay out its state graph (§4.2, Appendix P).

    ``boundary="official"`` follows the released code: [BOS] and every [EOS] are cloned k times
    like a mask and are targets too; a path runs from the first [BOS] clone to the last state.
    ``boundary="paper"`` follows Appendix P: [BOS] and [EOS] are one state each, never cloned; they
    are the first and the last target, but are not scored.

    Deviation from the released code: the graph ends in the last *state*. There it ends in the
    last position, which may be an ordinary token or, in a batch, a copied one.

    Returns:
        The expanded batch and its graph. A row without any state has ``num_states_B == 0``.

    Raises:
        ValueError: with ``boundary="paper"``, for a row that does not start with [BOS] and end
            with [EOS].
    """
    is_boundary_BN = (masked_ids_BN == special_ids.bos) | (masked_ids_BN == special_ids.eos)
    if boundary == "paper":
        is_boundary_BN = _outer_boundary(masked_ids_BN, is_boundary_BN, special_ids)
        is_expanded_BN = is_masked_BN
    else:
        is_expanded_BN = is_masked_BN | is_boundary_BN
    is_target_BN = is_masked_BN | is_boundary_BN
    copies_BN = torch.where(is_expanded_BN, states_per_mask, 1)
    expanded = expand(masked_ids_BN, copies_BN, is_expanded_BN, special_ids.pad)

    target_place_BM, num_targets_B = _leading(is_target_BN)
    M = target_place_BM.shape[1]
    is_target_BM = torch.arange(M, device=masked_ids_BN.device) < num_targets_B.unsqueeze(1)
    rank_BN = is_target_BN.cumsum(dim=1) - 1
    is_state_BT = is_target_BN.gather(1, expanded.position_BT) & expanded.is_real_BT
    place_BL, num_states_B = _leading(is_state_BT)
    is_state_BL = is_state_BT.gather(1, place_BL)
    owner_BL = rank_BN.gather(1, expanded.position_BT.gather(1, place_BL))
    clone_k = torch.arange(states_per_mask, device=masked_ids_BN.device)
    num_own_BM = copies_BN.gather(1, target_place_BM).masked_fill(~is_target_BM, 0)
    is_own_BMk = clone_k < num_own_BM.unsqueeze(2)
    state_BMk = (num_own_BM.cumsum(dim=1) - num_own_BM).unsqueeze(2) + clone_k
    graph = StateGraph(
        place_BL.masked_fill(~is_state_BL, 0),
        owner_BL.masked_fill(~is_state_BL, 0),
        expanded.clone_BT.gather(1, place_BL).masked_fill(~is_state_BL, 0),
        num_states_B,
        state_BMk.masked_fill(~is_own_BMk, 0),
        is_own_BMk,
        token_ids_BN.gather(1, target_place_BM).masked_fill(~is_target_BM, special_ids.pad),
        is_boundary_BN.gather(1, target_place_BM),
        num_targets_B,
    )
    return expanded, graph


def _outer_boundary(ids_BN: Tensor, is_boundary_BN: Tensor, special_ids: SpecialIds) -> Tensor:
    """Keep only the first and the last real token of each row, which must be [BOS] and [EOS]."""
    last_B1 = ((ids_BN != special_ids.pad).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    ends_B1 = ids_BN.gather(1, last_B1)
    is_fit_B = (ids_BN[:, 0] == special_ids.bos) & (ends_B1[:, 0] == special_ids.eos)
    if not bool(is_fit_B.all()):
        row = int((~is_fit_B).nonzero()[0])
        raise ValueError(
            f"row {row} must start with [BOS] and end with [EOS] for boundary='paper'"
        )
    index_N = torch.arange(ids_BN.shape[1], device=ids_BN.device)
    return is_boundary_BN & ((index_N == 0) | (index_N == last_B1))


def gather_states(hidden_BTD: Tensor, graph: StateGraph) -> Tensor:
    """The hidden states that belong to the graph, (B, L, D); zeros beyond ``num_states_B``."""
    index_BLD = graph.place_BL.unsqueeze(2).expand(-1, -1, hidden_BTD.shape[2])
    return hidden_BTD.gather(1, index_BLD) * graph.is_state_BL.unsqueeze(2)
