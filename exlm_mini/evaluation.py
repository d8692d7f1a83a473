"""How well a model predicts held-out rows, in bits.

Shapes: B rows, N tokens of a row, S masked tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.batches import validation_batches
from exlm_mini.corpora.packing import Pack
from exlm_mini.masking import MaskedBatch, Masker
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.objectives import log_likelihood, nats_to_bits

VALIDATION_BATCH_ROWS = 64


class Evaluation(NamedTuple):
    """How well held-out rows are predicted; joint probability of a row's masks for ExLM."""

    bits: float
    """Sum of -log2 P(masked tokens | context), boundary emissions left out."""
    num_masks: int
    num_rows: int
    num_without_path: int
    """Rows no path could spell; they are in no other number."""

    @property
    def bits_per_mask(self) -> float:
        return self.bits / max(self.num_masks, 1)

    @property
    def bits_per_row(self) -> float:
        return self.bits / max(self.num_rows, 1)


@torch.no_grad()
def row_bits(model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0) -> Tensor:
    """-log2 P(masked tokens | context) of each row, (B,), float32; inf where no path fits.

    The sum of independent predictions for MLM; for ExLM the joint probability, summed over all
    paths, with the emissions of the boundaries left out.
    """
    if isinstance(model, ExLM):
        return nats_to_bits(-log_likelihood(model(*batch, chain_share), with_boundaries=False))
    token_logits_SV = model(batch.masked_ids_BN, batch.is_masked_BN)
    log_p_SV = token_logits_SV.float().log_softmax(dim=1)
    log_p_S = log_p_SV.gather(1, batch.token_ids_BN[batch.is_masked_BN].unsqueeze(1)).squeeze(1)
    row_S = batch.is_masked_BN.nonzero()[:, 0]
    zeros_B = torch.zeros(len(batch.token_ids_BN), device=log_p_S.device)
    return nats_to_bits(-zeros_B.index_add(0, row_S, log_p_S))


def evaluate(
    model: MaskedLM | ExLM,
    pack: Pack,
    masker: Masker,
    num_rows: int,
    device: torch.device,
    chain_share: float = 0.0,
) -> Evaluation:
    """Bits of the first ``num_rows`` held-out rows, always under the same masks."""
    was_training = model.training
    model.eval()
    bits, num_masks, counted, without_path = 0.0, 0, 0, 0
    for batch in validation_batches(pack, masker, num_rows, VALIDATION_BATCH_ROWS):
        bits_B = row_bits(model, batch.to(device), chain_share).double().cpu()
        has_path_B = bits_B != torch.inf
        bits += bits_B[has_path_B].sum().item()
        num_masks += int(batch.is_masked_BN[has_path_B].sum())
        counted += int(has_path_B.sum())
        without_path += int((~has_path_B).sum())
    model.train(was_training)
    return Evaluation(bits, num_masks, counted, without_path)
