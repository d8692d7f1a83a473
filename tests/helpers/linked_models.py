"""Models with every kind of link, rows to read, and enumerated probabilities of all fillings.

Shapes: B rows, S masks of a row, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from small_models import BOS, EOS, SPECIAL, masked_rows
from torch import Tensor

from exlm_mini.config import ModelConfig
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import log_likelihood
from exlm_mini.reading.decoding import not_offered

V = len(SPECIAL) + 4
OFFERED = [i for i in range(V) if i not in not_offered(SPECIAL)]
CONFIG = ModelConfig(
    width=16, num_heads=2, ffn_width=16, max_positions=64, states_per_mask=2, init_std=0.5
)
LINKED = {
    "gated": CONFIG,
    "one state": replace(CONFIG, states_per_mask=1),
    "three states": replace(CONFIG, states_per_mask=3),
    "sparse": replace(CONFIG, boundary="paper", sparse=True),
    "paper": replace(CONFIG, boundary="paper", transition="paper", clone_embedding_std=1.0),
    "uniform": replace(CONFIG, transition="uniform"),
    "spans": replace(CONFIG, transition="spans"),
    "late": replace(
        CONFIG, boundary="paper", transition="spans", expand_at=1, clone_embedding_std=1.0
    ),
    "chains": replace(CONFIG, boundary="paper", transition="chains"),
}
CTC = {f"ctc {b}": replace(CONFIG, boundary=b, transition="ctc") for b in ("official", "paper")}
CONFIGS = {**LINKED, **CTC}


def exlm(config: ModelConfig = CONFIG) -> ExLM:
    torch.manual_seed(0)
    return ExLM(config, V).double().eval()


def masked_lm() -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(CONFIG, V).double().eval()


def ragged_batch() -> MaskedBatch:
    """Rows with three, one and two masks; in the last row the two masks are neighbours."""
    return masked_rows([BOS, -8, -9, 6, -7, EOS], [BOS, 6, -7, EOS], [BOS, 9, -9, -8, EOS])


def all_fillings(num_masks: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=num_masks)))


@torch.no_grad()
def log_joints(model: ExLM | MaskedLM, row: MaskedBatch, backend: str = "auto") -> Tensor:
    """log P of every filling of a row's masks, as in training; one axis of size V for each mask."""
    num_masks = int(row.is_masked_BN.sum())
    fillings = all_fillings(num_masks)
    rows = MaskedBatch(*(x_1N.repeat(len(fillings), 1) for x_1N in row))
    if isinstance(model, MaskedLM):
        log_token_SV = model(*row[:2]).log_softmax(dim=1)
        log_p = sum(log_token_SV[s][fillings[:, s]] for s in range(num_masks))
    else:
        token_ids_BN = rows.token_ids_BN.masked_scatter(rows.is_masked_BN, fillings)
        scores = model(*rows._replace(token_ids_BN=token_ids_BN))
        log_p = log_likelihood(scores, with_boundaries=False, backend=backend)
    return log_p.view([V] * num_masks)


def of_mask(p: Tensor, mask: int) -> Tensor:
    """Marginal of one mask: a table of all fillings, summed over the other masks."""
    return p.movedim(mask, 0).reshape(V, -1).sum(dim=1)
