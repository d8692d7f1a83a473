"""The guess of ExLM for each masked token by itself, which accuracy counts.

Shapes: B rows, M targets, L states, k states of a mask, D width, V vocabulary.

An MLM guesses the likeliest token of each mask. ExLM has several distributions per mask, its
states, and is trained on the joint probability of all masks; its guess for one mask is the
likeliest token after summing over everything else: all paths, and all tokens in the other masks
(Appendix P, before any token is known).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exlm_mini.alignment.api import posteriors
from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.model.expansion import StateGraph


@torch.no_grad()
def guess_targets(
    token_logits: Callable[[Tensor], Tensor],
    state_BLD: Tensor,
    log_transition_BLL: Tensor | None,
    graph: StateGraph,
    unk: int,
) -> Tensor:
    """The likeliest token of each target by itself, before any token is known.

    Each state is weighted by the probability that a path visits it at the target, for any tokens::

        guess_i = argmax over w of the sum over u of P(state u emits target i) P_u(w)

    Without transitions (``ctc``) each mask uses the CTC of its own states. Rows are processed one
    by one, so there are never more than L x V probabilities in memory.

    Args:
        token_logits: from hidden states (L, D) to logits (L, V).
        state_BLD: of the graph.
        log_transition_BLL: log E[v, u]; none for ``ctc``.
        graph: of the states; its targets are not read.
        unk: id of the unknown token, the blank of ``ctc``.

    Returns:
        guess_ids_BM, int64; meaningless beyond ``num_targets_B`` and in rows without a path.
    """
    guess_ids_BM = torch.zeros_like(graph.target_ids_BM)
    weight_BML = None
    if log_transition_BLL is not None:
        B, L, _ = log_transition_BLL.shape
        no_emission_BML = log_transition_BLL.new_zeros(B, guess_ids_BM.shape[1], L)
        weight_BML = posteriors(
            no_emission_BML, log_transition_BLL, graph.num_targets_B, graph.num_states_B
        ).state_BML
    counts = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
    for b, (m, n) in enumerate(counts):
        log_token_LV = token_logits(state_BLD[b, :n]).float().log_softmax(dim=1)
        if weight_BML is None:
            score_MV = ctc_token_log_probs(log_token_LV, graph.owner_BL[b, :n], m, unk)
        else:
            # In the encoder's precision, close tokens would tie.
            with torch.autocast(log_token_LV.device.type, enabled=False):
                score_MV = weight_BML[b, :m, :n].float() @ log_token_LV.exp()
        guess_ids_BM[b, :m] = score_MV.argmax(dim=1)
    return guess_ids_BM


def ctc_token_log_probs(
    log_token_LV: Tensor, owner_L: Tensor, num_targets: int, unk: int
) -> Tensor:
    """log-probability of every token under the CTC of each target's own states.

    Args:
        log_token_LV: log P_u(w) of the states of one row, in nats.
        owner_L: int64, the target a state is a clone of.
        num_targets: of the row.
        unk: id of the unknown token, the blank as in training.

    Returns:
        log_token_MV in nats.
    """
    is_blank_V = torch.arange(log_token_LV.shape[1], device=owner_L.device) == unk
    log_token_MV = []
    for i in range(num_targets):
        log_token_Vk = log_token_LV[owner_L == i].t()
        log_blank_Vk = log_token_Vk[[unk]].expand_as(log_token_Vk)
        log_token_MV.append(run_log_likelihood(log_token_Vk, log_blank_Vk, is_blank_V))
    return torch.stack(log_token_MV)
