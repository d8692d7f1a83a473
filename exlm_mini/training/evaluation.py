"""How well a model predicts held-out rows: bits, and the share of tokens guessed right.

Shapes: B rows, N tokens of a row, S masked tokens of a batch, Q batches.
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
from exlm_mini.model.objectives import nats_to_bits
from exlm_mini.training.processes import Engine

MOST_ROWS = 64
"""Rows of a validation batch where memory is not short."""


class Evaluation(NamedTuple):
    """Result of a validation; for ExLM, bits come from the joint probability of a row's masks."""

    bits: float
    """Sum of -log2 P(masked tokens | context), boundary emissions left out."""
    num_masks: int
    num_rows: int
    num_without_path: int
    """Rows without a path, which no other number includes."""
    num_correct: int
    """Masked tokens guessed right: each mask by itself, as its likeliest token (for ExLM see
    ``StateScores.guesses``)."""

    @property
    def is_finite(self) -> bool:
        """False if the bits are not finite, or no row has a path."""
        return math.isfinite(self.bits) and not (self.num_without_path and not self.num_rows)

    @property
    def bits_per_mask(self) -> float:
        return self.bits / max(self.num_masks, 1)

    @property
    def bits_per_row(self) -> float:
        return self.bits / max(self.num_rows, 1)

    @property
    def perplexity(self) -> float:
        """2 to the bits per mask."""
        return 2.0**self.bits_per_mask if self.bits_per_mask < 1024 else math.inf

    @property
    def mask_accuracy(self) -> float:
        """Share of the masked tokens that were guessed right."""
        return self.num_correct / max(self.num_masks, 1)


@torch.no_grad()
def row_bits_and_correct(
    model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-log2 P(masked tokens | context) of each row, (B,), and the number guessed right, int64.

    For MLM the bits are a sum over independent predictions; for ExLM they are of the joint
    probability, summed over all paths, without the emissions of the boundaries, and inf where no
    path fits. Each mask is guessed by itself, from the context alone, as its likeliest token; for
    ExLM, probabilities are first summed over all paths and all tokens in the other masks.
    """
    said, row_S = model.answer(batch, chain_share), batch.is_masked_BN.nonzero()[:, 0]
    is_correct_S = said.guesses() == batch.token_ids_BN[batch.is_masked_BN]
    correct_B = row_S.new_zeros(len(batch.token_ids_BN)).index_add(
        0, row_S, is_correct_S.long()
    )
    return nats_to_bits(-said.log_joint()), correct_B


def evaluate(
    model: MaskedLM | ExLM,
    pack: Pack,
    masker: Masker,
    num_rows: int,
    engine: Engine,
    chain_share: float = 0.0,
    batch_rows: int = MOST_ROWS,
) -> Evaluation:
    """Bits and guesses on ``num_rows`` held-out rows: at each call the same rows and masks.

    Whole batches are distributed over the processes and their results added in a fixed order, so
    the result is the same, to the last bit, for any number of processes.
    """
    was_training = model.training
    model.eval()
    num_batches = -(-min(num_rows, len(pack)) // batch_rows)
    mine = range(engine.rank, num_batches, engine.world_size)
    batches = validation_batches(pack, masker, num_rows, batch_rows, mine)
    sums_Q5 = torch.zeros(num_batches, 5, dtype=torch.float64)
    for number, batch in zip(mine, batches, strict=True):
        bits_B, correct_B = row_bits_and_correct(model, batch.to(engine.device), chain_share)
        bits_B, correct_B = bits_B.double().cpu(), correct_B.cpu()
        has_path_B = bits_B != torch.inf
        sums_Q5[number, 0] = bits_B[has_path_B].sum()
        sums_Q5[number, 1] = batch.is_masked_BN[has_path_B].sum()
        sums_Q5[number, 2] = has_path_B.sum()
        sums_Q5[number, 3] = (~has_path_B).sum()
        sums_Q5[number, 4] = correct_B[has_path_B].sum()
    model.train(was_training)
    bits, *counts = map(sum, engine.add_up(sums_Q5).T.tolist())
    return Evaluation(bits, *map(int, counts))
