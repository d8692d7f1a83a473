"""What the hidden tokens of a row tell about each other, and how much of it a model uses, in bits.

Five numbers count a model's bits for the hidden tokens of held-out rows:

* *at once*: each mask by itself, from the visible tokens alone, summed over the masks;
* *in turn*: one mask after the other, each from the visible tokens and the true tokens of the
  masks before it, with one pass of the encoder per mask (the chain rule);
* *joint*: all masks together, in one pass; for ExLM the sum over all paths;
* *in two passes*: every other mask of each run of masks first, then the rest, given the true tokens
  of the first pass;
* the **prize**, *at once* minus *in turn*: what the hidden tokens tell about each other, as far as
  this model knows it. It is 0 where masks are independent given the visible tokens.

*Links win* is *at once* minus *joint*. It is not a gain in itself: clones may predict single masks
worse than an MLM of equal cost does, so models are compared by *joint*.

Shapes: B rows, N tokens, S masked tokens of a batch, M targets, L states, k states per mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.data.batches import validation_batches
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.packs import Pack
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import MaskScores, StateScores
from exlm_mini.model.objectives import nats_to_bits

ROWS_AT_ONCE = 32


class Prize(NamedTuple):
    """Mean bits per row; the top of this module defines the terms."""

    num_rows: int
    at_once: float
    left_to_right: float
    """*In turn*, from left to right."""
    two_passes: float
    joint: float
    clones_used: float | None
    """How many clones of a mask are in use, from 1 to k: 2 to the power of the entropy, in bits, of
    the shares of paths through each clone. None for an MLM and for states without edges."""

    @property
    def prize(self) -> float:
        """Bits saved by predicting in turn, from left to right, rather than at once."""
        return self.at_once - self.left_to_right

    @property
    def links_win(self) -> float:
        """Bits saved by predicting all masks jointly rather than each by itself; 0 for an MLM."""
        return self.at_once - self.joint

    def describe(self, states_per_mask: int) -> str:
        """The results in one line, as printed at the end of pre-training."""
        clones = ""
        if self.clones_used is not None:
            clones = f"; {self.clones_used:.2f} of {states_per_mask} clones used"
        links = "" if states_per_mask == 1 else f"links win {self.links_win:.2f}, "
        second = f"a second pass {self.at_once - self.two_passes:.2f} of a prize of"
        return f"{self.joint:.2f} bits a row ({links}{second} {self.prize:.2f}{clones})"


@torch.no_grad()
def measure_prize(
    model: MaskedLM | ExLM,
    pack: Pack,
    masker: Masker,
    num_rows: int = 128,
    chain_share: float = 0.0,
) -> Prize:
    """Measure the bits of some held-out rows; rows and masks are the same at every call.

    Args:
        model: on any device; not a Repeated MLM.
        num_rows: largest number of rows. Every row is read once for each of its masks.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    sums_4, use_k, count = torch.zeros(4, dtype=torch.float64), None, 0
    for batch in validation_batches(pack, masker, num_rows, ROWS_AT_ONCE):
        batch = batch.to(device)
        is_masked_BN = batch.is_masked_BN
        left_to_right, two_passes = (
            in_turn(model, batch, turns(is_masked_BN), chain_share).sum()
            for turns in (from_left, every_other)
        )
        alone_S, joint_B, own_use_k = at_once(model, batch, chain_share)
        parts = (alone_S.sum(), left_to_right, two_passes, joint_B.sum())
        sums_4 += torch.stack([part.double().cpu() for part in parts])
        if own_use_k is not None:
            use_k = own_use_k if use_k is None else use_k + own_use_k
        count += len(batch.token_ids_BN)
    model.train(was_training)
    clones_used = None
    if use_k is not None:
        share_k = use_k / use_k.sum()
        clones_used = math.exp(-float(torch.xlogy(share_k, share_k).sum()))
    means = dict(zip(Prize._fields[1:5], (sums_4 / count).tolist(), strict=True))
    return Prize(num_rows=count, clones_used=clones_used, **means)


def at_once(
    model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bits of the hidden tokens, all from one pass.

    Returns:
        Bits of each hidden token by itself, (S,), row by row; bits of each row's hidden tokens
        together, (B,); and the expected number of paths through each clone, given the tokens, (k,),
        or None if there are no edges.
    """
    said, use_k = model.answer(batch, chain_share), None
    if isinstance(said, StateScores) and said.is_linked:
        use_k = said.graph.of_masks(said.visits()).double().cpu().sum(0)
    return _bits_alone(said, batch), nats_to_bits(-said.log_joint().double()), use_k


def _bits_alone(said: MaskScores | StateScores, batch: MaskedBatch) -> Tensor:
    """bits_S: bits of each hidden token by itself."""
    target_ids_S1 = batch.token_ids_BN[batch.is_masked_BN].unsqueeze(1)
    return nats_to_bits(-said.log_token_SV.gather(1, target_ids_S1).squeeze(1).double())


def in_turn(
    model: MaskedLM | ExLM, batch: MaskedBatch, turn_BN: Tensor, chain_share: float = 0.0
) -> Tensor:
    """Bits of each row's hidden tokens, (B,), float64, each token given those of earlier turns.

    Args:
        turn_BN: int64, the turn of each mask, from 0; masks of the same turn are predicted at once.
    """
    masked_ids_BN, is_masked_BN, token_ids_BN = batch
    bits_B = torch.zeros(len(token_ids_BN), dtype=torch.float64, device=token_ids_BN.device)
    for turn in range(num_turns(is_masked_BN, turn_BN)):
        is_left_BN = is_masked_BN & (turn_BN >= turn)
        has_B = is_left_BN.any(dim=1)
        known_ids_BN = torch.where(is_left_BN, masked_ids_BN, token_ids_BN)
        part = MaskedBatch(known_ids_BN[has_B], is_left_BN[has_B], token_ids_BN[has_B])
        bits_S = _bits_alone(model.answer(part, chain_share), part)
        is_now_S = (turn_BN == turn)[is_left_BN]
        row_S = is_left_BN.nonzero()[:, 0]
        bits_B.index_add_(0, row_S[is_now_S], bits_S[is_now_S])
    return bits_B


def from_left(is_masked_BN: Tensor) -> Tensor:
    """The turn of each mask, one after the other from left to right, int64 (B, N)."""
    return is_masked_BN.long().cumsum(dim=1) - 1


def every_other(is_masked_BN: Tensor) -> Tensor:
    """The turn of each mask in two passes, int64 (B, N): 0, 1, 0, ... along each run of masks."""
    count_BN = is_masked_BN.long().cumsum(dim=1)
    before_BN = count_BN.masked_fill(is_masked_BN, 0).cummax(dim=1).values
    return (count_BN - before_BN - 1) % 2


def num_turns(is_masked_BN: Tensor, turn_BN: Tensor) -> int:
    """Number of turns until no mask is left."""
    return int(turn_BN.masked_fill(~is_masked_BN, -1).max()) + 1
