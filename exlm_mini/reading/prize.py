"""What the hidden tokens of a row tell about each other, and how much of it a model uses, in bits.

Four numbers count a model's bits for the hidden tokens of held-out rows:

* *at once*: each mask by itself, from the visible tokens alone, summed over the masks;
* *in turn*: one mask after the other, each from the visible tokens and the true tokens of the
  masks before it, by a pass of the encoder for each (the chain rule);
* *joint*: all masks together, in one pass; for ExLM the sum over all paths;
* the **prize**, at once less in turn: the most that edges can save. Where masks are independent
  given the rest it is 0.

*Links win* is at once less joint. It is no gain in itself: clones may predict single masks worse
than an MLM of equal cost does, so models are compared by the joint.

Shapes: B rows, N tokens, S masked tokens of a batch, M targets, L states, k states per mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_mini.alignment import posteriors
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.masking import MaskedBatch, Masker, counter_uniform
from exlm_mini.data.packs import Pack
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.guesses import masks_alone, one_pass
from exlm_mini.model.objectives import StateScores, log_likelihood, nats_to_bits
from exlm_mini.reading.decoding import links_of

ROWS_AT_ONCE = 32


class Prize(NamedTuple):
    """Bits a row, means over rows; see the top of the file."""

    num_rows: int
    at_once: float
    left_to_right: float
    """In turn, from left to right."""
    any_order: float
    """In turn, in random orders; their mean."""
    joint: float
    clones_used: float | None
    """2 to the entropy of the share of paths through each clone, from 1 to k; None for an MLM and
    for states without edges."""

    @property
    def prize(self) -> float:
        """Bits saved by asking in turn, from left to right."""
        return self.at_once - self.left_to_right

    @property
    def links_win(self) -> float:
        """Bits saved by answering together; 0 for an MLM."""
        return self.at_once - self.joint

    def describe(self, states_per_mask: int) -> str:
        """The line at the end of pre-training."""
        clones = ""
        if self.clones_used is not None:
            clones = f"; {self.clones_used:.2f} of {states_per_mask} clones used"
        links = "" if states_per_mask == 1 else f"links win {self.links_win:.2f} of "
        return f"{self.joint:.2f} bits a row ({links}a prize of {self.prize:.2f}{clones})"


@torch.no_grad()
def measure_prize(
    model: MaskedLM | ExLM,
    pack: Pack,
    masker: Masker,
    num_rows: int = 128,
    num_orders: int = 2,
    chain_share: float = 0.0,
) -> Prize:
    """Measure some held-out rows, always the same with the same masks and orders.

    Args:
        model: on any device; not of Repeated MLM.
        pack: of held-out rows.
        num_rows: at most this many. Every row is read once for each of its masks.
        num_orders: random orders of the masks.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    sums_4, use_k, count = torch.zeros(4, dtype=torch.float64), None, 0
    for batch in validation_batches(pack, masker, num_rows, ROWS_AT_ONCE):
        sample_B1 = np.arange(count, count + len(batch.token_ids_BN))[:, None]
        position_1N = np.arange(batch.token_ids_BN.shape[1])[None]
        orders = [
            torch.from_numpy(counter_uniform(order, sample_B1, position_1N)).to(device)
            for order in range(num_orders)
        ]
        batch = batch.to(device)
        left_BN = torch.from_numpy(position_1N).to(device).expand(batch.token_ids_BN.shape)
        turns = [
            in_turn(model, batch, order_BN, chain_share) for order_BN in (left_BN, *orders)
        ]
        alone_S, joint_B, own_use_k = at_once(model, batch, chain_share)
        any_order = torch.stack([turn_B.sum() for turn_B in turns[1:]]).mean()
        parts = (alone_S.sum(), turns[0].sum(), any_order, joint_B.sum())
        sums_4 += torch.stack([part.double().cpu() for part in parts])
        if own_use_k is not None:
            use_k = own_use_k if use_k is None else use_k + own_use_k
        count += len(batch.token_ids_BN)
    model.train(was_training)
    clones_used = None
    if use_k is not None:
        share_k = use_k / use_k.sum()
        clones_used = math.exp(-float(torch.xlogy(share_k, share_k).sum()))
    at_once_bits, left_to_right, any_order, joint = (sums_4 / count).tolist()
    return Prize(count, at_once_bits, left_to_right, any_order, joint, clones_used)


def at_once(
    model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bits of the hidden tokens in one pass.

    Returns:
        bits of each hidden token by itself, (S,), row by row; of each row's together, (B,); and
        how many paths go through each clone, given the tokens, (k,), if states are linked.
    """
    said = one_pass(model, batch, chain_share)
    target_ids_S1 = batch.token_ids_BN[batch.is_masked_BN].unsqueeze(1)
    log_p_S = masks_alone(model, said).gather(1, target_ids_S1).squeeze(1)
    bits_S = nats_to_bits(-log_p_S.double())
    if not isinstance(said, StateScores):
        row_S = batch.is_masked_BN.nonzero()[:, 0]
        zeros_B = bits_S.new_zeros(len(batch.token_ids_BN))
        return bits_S, zeros_B.index_add(0, row_S, bits_S), None
    joint_B = nats_to_bits(-log_likelihood(said, with_boundaries=False).double())
    if said.log_transition_BLL is None:
        return bits_S, joint_B, None
    graph = said.graph
    is_boundary_BM1 = graph.is_boundary_BM.unsqueeze(2)
    log_emission_BML = said.log_emission_BML.masked_fill(is_boundary_BM1, 0.0)
    visits_BL = posteriors(log_emission_BML, *links_of(said)).state_BML.sum(1)
    return bits_S, joint_B, graph.of_masks(visits_BL).double().cpu().sum(0)


def in_turn(
    model: MaskedLM | ExLM, batch: MaskedBatch, order_BN: Tensor, chain_share: float = 0.0
) -> Tensor:
    """Bits of each row's hidden tokens by the chain rule, (B,), float64.

    Args:
        order_BN: of the masks of a row, the smallest number is asked first.
    """
    masked_ids_BN, is_masked_BN, token_ids_BN = batch
    order_BN = order_BN.double().masked_fill(~is_masked_BN, torch.inf)
    rank_BN = order_BN.argsort(dim=1, stable=True).argsort(dim=1)
    bits_B = torch.zeros(len(token_ids_BN), dtype=torch.float64, device=token_ids_BN.device)
    for turn in range(int(is_masked_BN.sum(dim=1).max())):
        is_left_BN = is_masked_BN & (rank_BN >= turn)
        has_B = is_left_BN.any(dim=1)
        known_ids_BN = torch.where(is_left_BN, masked_ids_BN, token_ids_BN)
        part = MaskedBatch(known_ids_BN[has_B], is_left_BN[has_B], token_ids_BN[has_B])
        bits_S = at_once(model, part, chain_share)[0]
        bits_B[has_B] += bits_S[(rank_BN == turn)[has_B][is_left_BN[has_B]]]
    return bits_B
