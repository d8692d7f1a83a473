"""Reading a trained model: how it fills the masks of a row, and by which path (Appendix P).

Shapes: B rows (always one), N input tokens, T expanded tokens, L states, M targets (the masks
between [BOS] and [EOS]), S masks (M - 2), k states or copies per mask, D width, V vocabulary.

The states of ExLM form a graph. A path starts in the first state, ends in the last and visits one
state per target; in between, one state per mask emits a token. The probability summed over all
paths is what training maximises, apart from the emissions of [BOS] and [EOS]. Since other paths
reach the last state in more or fewer steps, the probabilities of all fillings do not sum to one,
but to the probability of taking one step per target.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import StateScores


class States(NamedTuple):
    """The states of one row, in order."""

    owner_L: Tensor
    """int64, target that a state is a clone of: 0 for [BOS], 1..S for masks, S + 1 for [EOS]."""
    clone_L: Tensor
    """int64, number of the clone, 1..k; 0 for a [BOS] or [EOS] that is not expanded."""
    log_token_LV: Tensor
    """log P_u(w) over the whole vocabulary, in nats."""

    @property
    def labels(self) -> list[str]:
        """Names: ``1.2`` for the second clone of mask 1, ``BOS`` or ``BOS.1``, ``EOS``, ..."""
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
    """Log-probability of the transitions and mask tokens of the best path, in nats."""
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
    """The states of ExLM; None for ``MaskedLM``."""
    graph: Graph | None
    """The edges of the states; None for ``MaskedLM`` and ``transition="ctc"``, which have none."""


def not_offered(special_ids: SpecialIds) -> list[int]:
    """Ids that are never filled in: [PAD], [BOS], [EOS], [UNK] and [MASK] are not text.

    [SEP] may be filled in: it separates documents in a row, and training hides it like any other
    token. Probabilities stay those of the model; they are not renormalised without these ids.
    """
    return [i for name, i in special_ids._asdict().items() if name != "sep"]


def top_tokens(
    log_token_XV: Tensor, count: int, special_ids: SpecialIds
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row that may be filled in; ties go to smaller ids.

    Args:
        log_token_XV: log-probabilities, in nats.
        count: number of tokens, C; fewer if the vocabulary is smaller.

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


@torch.no_grad()
def read_row(
    model: MaskedLM | ExLM, masked_ids_BN: Tensor, chain_share: float = 0.0, num_copies: int = 1
) -> Reading:
    """States, transitions and best filling of one row with masks (Appendix P, Figure 10).

    For ExLM the best path a maximises the product of its transitions and of the probability of the
    likeliest token in each state it visits for a mask::

        P(a) = product over i > 0 of E[a_{i-1}, a_i] * product over masks i of max_w P_{a_i}(w)

    The tokens of this path are chosen. Their joint probability, summed over all paths, is at least
    that of the best path. Other tokens may have a larger joint probability; finding them is hard.

    Where masks are independent (``MaskedLM``, ``transition="ctc"``), each gets its likeliest token,
    and the joint probability is the product of theirs.

    Args:
        model: in evaluation mode.
        masked_ids_BN: int64, one row: [BOS], tokens and [MASK]s, [EOS], no padding.
        chain_share: as in ``ExLM.forward``; above 0 for a model from early in its training.
        num_copies: copies of every token, k of §3; 1 except for Repeated MLM.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random; call eval()")
    special_ids, is_masked_BN = model.special_ids, masked_ids_BN == model.special_ids.mask
    if not is_masked_BN.any():
        raise UserError("there is no [MASK] to fill in; write [MASK] for each hidden token")
    row = MaskedBatch(masked_ids_BN, is_masked_BN, masked_ids_BN)
    said, states, links = model.answer(row, chain_share, num_copies), None, None
    log_token_SV = said.log_token_SV
    token_ids_S = top_tokens(log_token_SV, 1, special_ids)[0][:, 0]
    if isinstance(said, StateScores):
        graph, log_token_LV = said.graph, said.log_token_BLV[0]
        states = States(graph.owner_BL[0].cpu(), graph.clone_BL[0].cpu(), log_token_LV.cpu())
        if said.log_transition_BLL is not None:
            best_ids_L = top_tokens(log_token_LV, 1, special_ids)[0][:, 0]
            log_best_BL = log_token_LV.gather(1, best_ids_L.unsqueeze(1)).T
            path_BM, log_path_B = said.best_path(log_best_BL)
            if log_path_B.item() == -torch.inf:
                raise UserError(
                    f"no path through the {len(best_ids_L)} states has a probability above 0, so "
                    "the model's training went wrong; use another checkpoint"
                )
            token_ids_S = best_ids_L[path_BM[0, graph.is_mask_BM[0]]]
            log_transition_LL, path_M = said.log_transition_BLL[0].cpu(), path_BM[0].cpu()
            log_path, log_fit = log_path_B.item(), said.log_fit().item()
            links = Graph(log_transition_LL, path_M, log_path, log_fit)
    log_joint = said.log_joint(token_ids_S).item()
    return Reading(token_ids_S.cpu(), log_joint, log_token_SV.cpu(), states, links)
