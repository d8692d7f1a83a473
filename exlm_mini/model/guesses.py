"""A model's distribution for each masked token by itself, before any token is known.

Shapes: B rows, S masks of all rows, M targets and L states of a row, k copies or states of a mask,
V vocabulary.

A masked language model has one distribution for each mask, or one for each of its copies, whose
mean counts. ExLM has several, its states, and is trained on the joint probability of all masks;
one mask by itself is what remains after summing over everything else: all paths, and all tokens in
the other masks (Appendix P)::

    P(y_i = w) = sum over u of P(state u emits target i) P_u(w)

Without transitions (``ctc``) a mask has the CTC of its own states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exlm_mini.alignment.api import posteriors
from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.data.masking import MaskedBatch, repeat_tokens
from exlm_mini.model.exlm import ExLM, MaskedLM
from exlm_mini.model.objectives import StateScores


def one_pass(
    model: MaskedLM | ExLM, batch: MaskedBatch, chain_share: float = 0.0, num_copies: int = 1
) -> Tensor | StateScores:
    """The output of either kind of model for a batch.

    Args:
        num_copies: of every token, for a ``MaskedLM`` whose batch is not repeated yet.
    """
    if isinstance(model, ExLM):
        return model(*batch, chain_share)
    return model(*(repeat_tokens(part_BN, num_copies) for part_BN in batch[:2]))


def log_softmax(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def states_alone(model: Any, scores: StateScores) -> Tensor:
    """log P_u(w) of every token in each state of an ExLM: log_token_BLV in nats."""
    return log_softmax(model.token_logits(scores.state_BLD))


def masks_alone(
    model: MaskedLM | ExLM, said: Tensor | StateScores, num_copies: int = 1
) -> Tensor:
    """log P of every token in each mask by itself.

    Returns:
        log_token_SV in nats, row by row from left to right; for ExLM detached, and -inf in a row
        without a path.
    """
    if isinstance(said, StateScores):
        return torch.cat(list(_rows_alone(model, said, torch.float64)))
    log_token_SkV = log_softmax(said).unflatten(0, (-1, num_copies))
    return log_token_SkV.logsumexp(dim=1) - math.log(num_copies)


def guess_masks(model: MaskedLM | ExLM, said: Tensor | StateScores) -> Tensor:
    """guess_ids_S, int64: the likeliest token of each mask by itself, which accuracy counts.

    Args:
        said: from ``one_pass``; the copies of a repeated mask guess one by one.
    """
    if isinstance(said, StateScores):
        # Never more than L x V probabilities in memory.
        rows = _rows_alone(model, said, torch.float32)
        return torch.cat([log_token_SV.argmax(dim=1) for log_token_SV in rows])
    return said.argmax(dim=1)


@torch.no_grad()
def _rows_alone(model: Any, scores: StateScores, dtype: torch.dtype) -> Iterator[Tensor]:
    """log_token_SV of the masks of each row; ``dtype`` is that of the mixture."""
    graph, weight_BML = scores.graph, None
    counts = graph.num_targets_B, graph.num_states_B
    if scores.log_transition_BLL is not None:
        any_token_BML = torch.zeros_like(scores.log_emission_BML, dtype=dtype)
        log_transition_BLL = scores.log_transition_BLL.to(dtype)
        weight_BML = posteriors(any_token_BML, log_transition_BLL, *counts).state_BML
    for b, (m, n) in enumerate(zip(*(count_B.tolist() for count_B in counts), strict=True)):
        log_token_LV = log_softmax(model.token_logits(scores.state_BLD[b, :n]))
        if weight_BML is None:
            unk = model.special_ids.unk
            log_token_MV = ctc_token_log_probs(log_token_LV, graph.owner_BL[b, :n], m, unk)
        else:
            # In the encoder's precision, close tokens would tie.
            with torch.autocast(log_token_LV.device.type, enabled=False):
                token_MV = weight_BML[b, :m, :n] @ log_token_LV.to(dtype).exp()
            log_token_MV = token_MV.log().to(log_token_LV.dtype)
        yield log_token_MV[~graph.is_boundary_BM[b, :m]]


def ctc_token_log_probs(
    log_token_LV: Tensor, owner_L: Tensor, num_targets: int, unk: int
) -> Tensor:
    """log-probability of every token under the CTC of each target's own states, (M, V) in nats.

    Args:
        log_token_LV: log P_u(w) of the states of one row, in nats.
        owner_L: int64, the target a state is a clone of.
        unk: id of the unknown token, the blank as in training.
    """
    is_blank_V = torch.arange(log_token_LV.shape[1], device=owner_L.device) == unk
    log_token_MV = []
    for i in range(num_targets):
        log_token_Vk = log_token_LV[owner_L == i].t()
        log_blank_Vk = log_token_Vk[[unk]].expand_as(log_token_Vk)
        log_token_MV.append(run_log_likelihood(log_token_Vk, log_blank_Vk, is_blank_V))
    return torch.stack(log_token_MV)
