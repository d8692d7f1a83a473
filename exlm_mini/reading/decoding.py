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

from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi
from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.guesses import masks_alone, one_pass, states_alone
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
    """The edges between the states, and the best path."""

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
    """None where the states have no edges: ``MaskedLM`` and ``transition="ctc"``."""


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


def log_joint(scores: StateScores, log_token_BLV: Tensor, target_ids_BM: Tensor) -> Tensor:
    """log P(these tokens in the masks together | context) of each row, (B,), over all paths.

    Args:
        scores: of the row, whatever its targets were.
        log_token_BLV: log P_u(w) of the states, in nats.
        target_ids_BM: int64, those of the boundaries do not count.
    """
    index_BLM = target_ids_BM.unsqueeze(1).expand(-1, log_token_BLV.shape[1], -1)
    log_emission_BML = log_token_BLV.gather(2, index_BLM).transpose(1, 2)
    return log_likelihood(scores._replace(log_emission_BML=log_emission_BML), False)


def best_path(scores: StateScores, log_best_BL: Tensor) -> tuple[Tensor, Tensor]:
    """path_BM and its log-probability, (B,), for the likeliest token of each state.

    Args:
        log_best_BL: log-probability of a state's token.
    """
    # Boundaries cost nothing: their emissions are left out.
    log_best_BML = log_best_BL.unsqueeze(1).expand_as(scores.log_emission_BML)
    log_best_BML = log_best_BML.masked_fill(scores.graph.is_boundary_BM.unsqueeze(2), 0.0)
    return viterbi(log_best_BML, *links_of(scores))


def links_of(scores: StateScores) -> tuple[Tensor, Tensor, Tensor]:
    """The last three arguments of the functions of ``alignment``, for states with edges."""
    assert scores.log_transition_BLL is not None
    return scores.log_transition_BLL, scores.graph.num_targets_B, scores.graph.num_states_B


def log_fit(scores: StateScores) -> Tensor:
    """Log-probability of reaching the last state in one step per target, whatever the tokens, (B,)
    in nats; for states with edges."""
    any_token_BML = torch.zeros_like(scores.log_emission_BML)
    return dag_log_likelihood(any_token_BML, *links_of(scores))


def visits(scores: StateScores) -> Tensor:
    """P(a path visits the state), given the rows' tokens, (B, L); for states with edges."""
    is_boundary_BM1 = scores.graph.is_boundary_BM.unsqueeze(2)
    log_emission_BML = scores.log_emission_BML.masked_fill(is_boundary_BM1, 0.0)
    return posteriors(log_emission_BML, *links_of(scores)).state_BML.sum(dim=1)


@torch.no_grad()
def read_row(
    model: MaskedLM | ExLM, masked_ids_BN: Tensor, chain_share: float = 0.0, num_copies: int = 1
) -> Reading:
    """States, transitions and best filling of one row with masks (Appendix P, Figure 10).

    For ExLM the best path a maximises its transitions and the likeliest token of each state it
    visits for a mask::

        P(a) = product over i > 0 of E[a_{i-1}, a_i] * product over masks i of max_w P_{a_i}(w)

    Its tokens are chosen. Their joint probability, summed over all paths, is at least that of the
    best path. Other tokens may have a larger joint probability; finding them is hard.

    Where masks are independent (``MaskedLM``, ``transition="ctc"``), each gets its likeliest token,
    and the joint is the product.

    Args:
        model: in evaluation mode.
        masked_ids_BN: int64, one row: [BOS], tokens and [MASK]s, [EOS], no padding.
        chain_share: as in ``ExLM.forward``, for a model from the start of training.
        num_copies: k of §3, of every token; 1 but for Repeated MLM.

    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random; call eval()")
    special_ids, is_masked_BN = model.special_ids, masked_ids_BN == model.special_ids.mask
    if not is_masked_BN.any():
        raise UserError("there is no [MASK] to fill in; write [MASK] for each hidden token")
    row = MaskedBatch(masked_ids_BN, is_masked_BN, masked_ids_BN)
    said = one_pass(model, row, chain_share, num_copies)
    log_token_SV = masks_alone(model, said, num_copies)
    token_ids_S = top_tokens(log_token_SV, 1, special_ids)[0][:, 0]
    if not isinstance(said, StateScores):
        log_p_S = log_token_SV.gather(1, token_ids_S.unsqueeze(1))
        return Reading(token_ids_S.cpu(), log_p_S.sum().item(), log_token_SV.cpu(), None, None)
    log_token_BLV = states_alone(model, said)
    graph, links = said.graph, None
    if said.log_transition_BLL is not None:
        best_ids_L = top_tokens(log_token_BLV[0], 1, special_ids)[0][:, 0]
        log_best_BL = log_token_BLV.gather(2, best_ids_L[None, :, None]).squeeze(2)
        path_BM, log_path_B = best_path(said, log_best_BL)
        if log_path_B.item() == -torch.inf:
            raise UserError(
                f"no path through the {len(best_ids_L)} states has a probability above 0: the "
                "model's training went wrong; use another checkpoint"
            )
        token_ids_S = best_ids_L[path_BM[0, 1:-1]]
        log_transition_LL, path_M = said.log_transition_BLL[0].cpu(), path_BM[0].cpu()
        links = Graph(log_transition_LL, path_M, log_path_B.item(), log_fit(said).item())
    target_ids_BM = graph.target_ids_BM.clone()
    target_ids_BM[0, 1:-1] = token_ids_S
    log_p = log_joint(said, log_token_BLV, target_ids_BM).item()
    states = States(graph.owner_BL[0].cpu(), graph.clone_BL[0].cpu(), log_token_BLV[0].cpu())
    return Reading(token_ids_S.cpu(), log_p, log_token_SV.cpu(), states, links)
