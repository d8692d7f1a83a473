"""Reading a trained model: how it fills the masks of a row, and by which path (Appendix P).

Shapes: B rows (always one), N input tokens, T expanded tokens, L states, M targets (the masks
between [BOS] and [EOS]), S masks (M - 2), k states or copies per mask, D width, V vocabulary.

The states of ExLM form a graph. A path starts in the first state, ends in the last and visits one
state per target, so one per mask in between, which emits a token. Summed over all paths, this
gives the probability that training maximises, apart from the emissions of the boundaries. Other
paths reach the last state in more or fewer steps, so the probabilities of all fillings sum to the
probability of one step per target, not to one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_mini.alignment import dag_log_likelihood, marginal_token_log_probs, viterbi
from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import repeat_tokens
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.guesses import ctc_token_log_probs
from exlm_mini.model.objectives import StateScores, log_likelihood


class States(NamedTuple):
    """The states of one row, in order."""

    owner_L: Tensor
    """int64, target a state is a clone of: 0 for [BOS], 1..S for the masks, S + 1 for [EOS]."""
    clone_L: Tensor
    """int64, 1..k; 0 for a boundary that is not expanded."""
    log_token_LV: Tensor
    """log P_u(w) over the whole vocabulary, in nats."""

    @property
    def labels(self) -> list[str]:
        """``1.2`` for the second clone of the first mask, ``BOS`` or ``BOS.1``, ``EOS``, ..."""
        names = {0: "BOS", int(self.owner_L[-1]): "EOS"}
        pairs = zip(self.owner_L.tolist(), self.clone_L.tolist(), strict=True)
        return [names.get(o, str(o)) + (f".{clone}" if clone else "") for o, clone in pairs]


class Graph(NamedTuple):
    """The links between the states, and the best path."""

    log_transition_LL: Tensor
    """log E[v, u] in nats, -inf where there is no edge."""
    path_M: Tensor
    """int64, states of the best path; the first and the last belong to the boundaries."""
    log_path: float
    """Transitions and mask tokens of the best path, in nats."""
    log_fit: float
    """Log-probability of reaching the last state in one step per target, in nats."""


class Reading(NamedTuple):
    """What a model predicts for the masks of one row; all tensors on the CPU."""

    token_ids_S: Tensor
    """int64, the tokens chosen for the masks."""
    log_joint: float
    """log P(chosen tokens | context) in nats; for ExLM summed over all paths."""
    log_token_SV: Tensor
    """log-probability of each vocabulary entry for each mask by itself, in nats."""
    states: States | None
    """None for ``MaskedLM``."""
    graph: Graph | None
    """None where the states are not linked: ``MaskedLM`` and ``transition="ctc"``."""


def not_offered(special_ids: SpecialIds) -> list[int]:
    """Ids that are never filled in: [PAD], [BOS], [EOS], [UNK] and [MASK] are not text.

    [SEP] may be: it separates documents in a block, and training hides it like any other token.
    Probabilities are the model's, without renormalisation.
    """
    return [i for name, i in special_ids._asdict().items() if name != "sep"]


def top_tokens(
    log_token_XV: Tensor, count: int, special_ids: SpecialIds
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row that may be filled in; ties go by vocabulary id.

    Args:
        log_token_XV: in nats.
        count: of tokens, at most; a small vocabulary has fewer.
        special_ids: see ``not_offered``.

    Returns:
        token_ids_XC and probability_XC, likeliest first.
    """
    left_out = not_offered(special_ids)
    offered_XV = log_token_XV.clone()
    offered_XV[:, left_out] = -torch.inf
    # topk does not specify the order of ties.
    log_token_XV, token_ids_XV = offered_XV.sort(dim=1, descending=True, stable=True)
    count = min(count, offered_XV.shape[1] - len(set(left_out)))
    return token_ids_XV[:, :count], log_token_XV[:, :count].exp()


def log_softmax(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def masks_of_copies(token_logits_XV: Tensor, num_copies: int) -> Tensor:
    """log_token_SV of each mask by itself: the mean of the distributions of its copies.

    Args:
        token_logits_XV: of a ``MaskedLM``; copies of a mask are adjacent.
        num_copies: of every token.
    """
    log_token_SkV = log_softmax(token_logits_XV).unflatten(0, (-1, num_copies))
    return log_token_SkV.exp().mean(dim=1).log()


def masks_of_states(scores: StateScores, log_token_BLV: Tensor, unk: int) -> Tensor:
    """log_token_SV of each mask by itself, before any token is known, row by row.

    A mixture of the states' distributions, weighted by the probability that a path visits them at
    the mask; without links (``ctc``) the CTC of the mask's states.

    Args:
        scores: from ``ExLM.score``.
        log_token_BLV: log P_u(w) of the states, in nats.
        unk: id of the unknown token, the blank of ``ctc``.
    """
    graph = scores.graph
    counts = graph.num_targets_B, graph.num_states_B
    if scores.log_transition_BLL is None:
        rows = [
            ctc_token_log_probs(log_token_BLV[b, :n], graph.owner_BL[b, :n], m, unk)
            for b, (m, n) in enumerate(zip(*(c.tolist() for c in counts), strict=True))
        ]
        log_token_BMV = pad_sequence(rows, batch_first=True)
    else:
        any_token_BML = torch.zeros_like(scores.log_emission_BML)
        log_token_BMV = marginal_token_log_probs(
            log_token_BLV, any_token_BML, scores.log_transition_BLL, *counts
        )
    target_M = torch.arange(graph.target_ids_BM.shape[1], device=graph.num_targets_B.device)
    is_target_BM = target_M < graph.num_targets_B.unsqueeze(1)
    return log_token_BMV[is_target_BM & ~graph.is_boundary_BM]


@torch.no_grad()
def read_states(model: ExLM, masked_ids_BN: Tensor, chain_share: float = 0.0) -> Reading:
    """States, transitions and best filling of one row with masks (Appendix P, Figure 10).

    The best path a maximises its transitions and the likeliest token of each state it visits
    for a mask::

        P(a) = product over i > 0 of E[a_{i-1}, a_i] * product over masks i of max_w P_{a_i}(w)

    Its tokens are chosen. Their joint probability, summed over all paths, is at least that of the
    best path. Other tokens may have a larger joint probability; finding them is hard.

    Without a graph (``transition="ctc"``) masks are independent: each gets its likeliest token
    under the CTC of its own states, and the joint is the product.

    Args:
        model: in evaluation mode.
        masked_ids_BN: int64, one row: [BOS], tokens and [MASK]s, [EOS], no padding.
        chain_share: as in ``ExLM.forward``, for a model from the start of training.

    Returns:
        The reading.

    Raises:
        UserError: if the row has no mask, or no path has a probability above 0.
        ValueError: if it is not one row framed by [BOS] and [EOS], is too long after expansion,
            or the model is in training mode.
    """
    is_masked_BN = _check_row(model, masked_ids_BN)
    hidden_BTD, graph = model.encode(masked_ids_BN, is_masked_BN, masked_ids_BN)
    state_BLD = model.states(hidden_BTD, graph)
    scores = model.score(state_BLD, graph, chain_share)
    log_token_BLV = log_softmax(model.token_logits(state_BLD))
    states = States(graph.owner_BL[0].cpu(), graph.clone_BL[0].cpu(), log_token_BLV[0].cpu())
    log_token_SV = masks_of_states(scores, log_token_BLV, model.special_ids.unk)
    if scores.log_transition_BLL is None:
        links, token_ids_S = None, top_tokens(log_token_SV, 1, model.special_ids)[0][:, 0]
    else:
        links, token_ids_S = _follow(scores, log_token_BLV, model.special_ids)
    # With the chosen tokens as targets, the function of training sums over the paths.
    target_ids_M = graph.target_ids_BM[0].clone()
    target_ids_M[1:-1] = token_ids_S
    filled = scores._replace(log_emission_BML=log_token_BLV[:, :, target_ids_M].transpose(1, 2))
    log_joint = log_likelihood(filled, with_boundaries=False).item()
    return Reading(token_ids_S.cpu(), log_joint, log_token_SV.cpu(), states, links)


@torch.no_grad()
def read_masked_lm(model: MaskedLM, masked_ids_BN: Tensor, num_copies: int = 1) -> Reading:
    """Tokens of each mask under a masked language model, which predicts them independently.

    For Repeated MLM every token is repeated ``num_copies`` times, as in training; the distribution
    of a mask is the mean over its copies.

    Args:
        model: in evaluation mode.
        masked_ids_BN: as for ``read_states``.
        num_copies: k of §3; 1 for a plain masked language model.

    Returns:
        The reading, without states; the joint is the product over the masks.

    Raises:
        UserError, ValueError: as for ``read_states``.
    """
    is_masked_BN = _check_row(model, masked_ids_BN)
    token_logits_XV = model(
        repeat_tokens(masked_ids_BN, num_copies), repeat_tokens(is_masked_BN, num_copies)
    )
    log_token_SV = masks_of_copies(token_logits_XV, num_copies).cpu()
    token_ids_S = top_tokens(log_token_SV, 1, model.special_ids)[0][:, 0]
    log_joint = log_token_SV.gather(1, token_ids_S.unsqueeze(1)).sum().item()
    return Reading(token_ids_S, log_joint, log_token_SV, None, None)


def _follow(
    scores: StateScores, log_token_BLV: Tensor, special_ids: SpecialIds
) -> tuple[Graph, Tensor]:
    """The links of the states, and token_ids_S of the best path."""
    log_transition_BLL = scores.log_transition_BLL
    assert log_transition_BLL is not None  # otherwise there is no path
    counts = (scores.graph.num_targets_B, scores.graph.num_states_B)
    best_ids_L = top_tokens(log_token_BLV[0], 1, special_ids)[0][:, 0]
    log_best_L = log_token_BLV[0].gather(1, best_ids_L.unsqueeze(1)).squeeze(1)
    # Boundaries cost nothing: their emissions are left out.
    log_best_BML = log_best_L.expand_as(scores.log_emission_BML).masked_fill(
        scores.graph.is_boundary_BM.unsqueeze(2), 0.0
    )
    path_BM, log_path_B = viterbi(log_best_BML, log_transition_BLL, *counts)
    if log_path_B.item() == -torch.inf:
        raise UserError(
            f"no path through the {int(counts[1])} states has a probability above 0: the "
            "model's training went wrong; use another checkpoint"
        )
    any_token_BML = torch.zeros_like(log_best_BML)
    log_fit = dag_log_likelihood(any_token_BML, log_transition_BLL, *counts).item()
    path_M = path_BM[0]
    links = Graph(log_transition_BLL[0].cpu(), path_M.cpu(), log_path_B.item(), log_fit)
    return links, best_ids_L[path_M[1:-1]]


def _check_row(model: ExLM | MaskedLM, masked_ids_BN: Tensor) -> Tensor:
    """is_masked_BN of a row that can be read."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random; call eval()")
    special = model.special_ids
    if masked_ids_BN.dim() != 2 or len(masked_ids_BN) != 1:
        raise ValueError(f"want one row (1, N), got {tuple(masked_ids_BN.shape)}")
    row_N = masked_ids_BN[0].tolist()
    is_framed = row_N[:1] == [special.bos] and row_N[-1:] == [special.eos]
    if not is_framed or {special.pad, special.bos, special.eos} & set(row_N[1:-1]):
        raise ValueError(
            f"want [BOS], tokens, [EOS] and no other of these, or padding, got {row_N}"
        )
    is_masked_BN = masked_ids_BN == special.mask
    if not is_masked_BN.any():
        raise UserError("there is no [MASK] to fill in; write [MASK] for each hidden token")
    return is_masked_BN
