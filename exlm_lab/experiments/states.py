"""A batch of masked rows as ExLM reads it: its states, and what they say about each mask.

Shapes: B rows, M targets, L states, k states per mask, R masks of all rows, V vocabulary.

``decoding`` reads one row to fill it in; this reads many to take averages over their masks. Masks
are numbered row by row, from left to right, as ``MaskedLM`` orders its predictions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, posteriors
from exlm_mini.alignment.graphs import checked
from exlm_mini.alignment.vectorized import log_to_come
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM
from exlm_mini.model.guesses import ctc_token_log_probs
from exlm_mini.model.objectives import StateScores, log_likelihood, nats_to_bits
from exlm_mini.reading.entropy import entropy_bits


class RowReading(NamedTuple):
    """The states of some rows, and the scores of the words the rows really have."""

    log_token_BLV: Tensor
    """log P_u(w) in nats, float64; of no meaning beyond the states of a row."""
    scores: StateScores
    state_BML: Tensor | None
    """P(state u emits target i) before any word is known, float64; none for ``ctc``."""
    unk: int
    """Id of the unknown token, the blank of ``ctc``."""

    @property
    def is_mask_BM(self) -> Tensor:
        """Which targets are masks, not boundaries or padding; as many in all as there are R."""
        graph = self.scores.graph
        target_M = torch.arange(graph.target_ids_BM.shape[1], device=graph.owner_BL.device)
        return (target_M < graph.num_targets_B.unsqueeze(1)) & ~graph.is_boundary_BM

    def log_joint(self, token_ids_R: Tensor) -> Tensor:
        """log P(tokens in the masks | context) of each row, summed over paths; (B,) in nats."""
        graph = self.scores.graph
        target_ids_BM = graph.target_ids_BM.masked_scatter(self.is_mask_BM, token_ids_R)
        is_blank_BM = None if self.scores.is_blank_BM is None else target_ids_BM == self.unk
        filled = self.scores._replace(
            log_emission_BML=_emission(self.log_token_BLV, target_ids_BM),
            is_blank_BM=is_blank_BM,
            graph=graph._replace(target_ids_BM=target_ids_BM),
        )
        return log_likelihood(filled, with_boundaries=False)

    def mask_token_log_probs(self) -> Tensor:
        """log P(token | context) of each mask by itself, no word being known; (R, V) in nats.

        The states' distributions, mixed by how likely a path emits the mask in each (Appendix P);
        float64. ``ctc`` spreads part of its probability over several tokens in one mask: that
        part is left out, and the rest scaled to sum to one.
        """
        if self.state_BML is None:
            return self._ctc_token_log_probs()
        token_BMV = self.state_BML @ self.log_token_BLV.exp()
        return token_BMV[self.is_mask_BM].log()

    def length_bits(self) -> Tensor:
        """-log2 P(as many words as masks) of each row, before any word is known; (B,).

        Raises:
            ValueError: for ``ctc``, whose states are not linked.
        """
        graph, log_transition_BLL = self.scores.graph, self.scores.log_transition_BLL
        if log_transition_BLL is None:
            raise ValueError("there are no paths: the states of ctc are not linked")
        any_token_BML = torch.zeros_like(self.scores.log_emission_BML)
        counts = graph.num_targets_B, graph.num_states_B
        return nats_to_bits(-dag_log_likelihood(any_token_BML, log_transition_BLL, *counts))

    def state_entropy_bits(self) -> Tensor:
        """Entropy of the word of each mask once its state is known, in bits; (R,).

        ``sum over u of P(state u emits the mask) H[P_u]``, before any word is known; with
        ``ctc`` the plain mean over the states of the mask. Never more than the entropy of
        ``mask_token_log_probs``, but for ``ctc``.
        """
        graph = self.scores.graph
        entropy_BL = entropy_bits(self.log_token_BLV).masked_fill(~graph.is_state_BL, 0.0)
        if self.state_BML is None:
            return (
                entropy_BL.gather(1, self._own_BMk.flatten(1))
                .view(self._own_BMk.shape)
                .mean(dim=2)[self.is_mask_BM]
            )
        return (self.state_BML @ entropy_BL.unsqueeze(2)).squeeze(2)[self.is_mask_BM]

    @property
    def visits(self) -> Visits:
        """What paths visit, given the words of the rows.

        Raises:
            ValueError: for ``ctc``, whose states are not linked.
        """
        graph, log_transition_BLL = self.scores.graph, self.scores.log_transition_BLL
        if log_transition_BLL is None:
            raise ValueError("there are no paths: the states of ctc are not linked")
        log_emission_BML = self.scores.log_emission_BML.masked_fill(
            ~self.is_mask_BM.unsqueeze(2), 0.0
        )
        return path_visits(
            log_emission_BML,
            log_transition_BLL,
            graph.owner_BL,
            graph.num_targets_B,
            graph.num_states_B,
        )

    def of_masks(self, value_BLX: Tensor) -> Tensor:
        """Values of states, sorted by mask and clone: (R, k, ...)."""
        is_mask_BM = self.is_mask_BM
        row_R = is_mask_BM.nonzero()[:, :1]
        return value_BLX[row_R, self._own_BMk[is_mask_BM]]

    @property
    def _own_BMk(self) -> Tensor:
        """The states of each mask; of no meaning for other targets."""
        graph, k = self.scores.graph, self.scores.states_per_mask
        M, L = graph.target_ids_BM.shape[1], graph.owner_BL.shape[1]
        target_M1 = torch.arange(M, device=graph.owner_BL.device).unsqueeze(1)
        # Beyond the states of a row owner_BL is 0: push those behind every target.
        owner_BL = graph.owner_BL.masked_fill(~graph.is_state_BL, M)
        first_BM = (owner_BL.unsqueeze(1) < target_M1).sum(dim=2)
        clone_k = torch.arange(k, device=first_BM.device)
        return (first_BM.unsqueeze(2) + clone_k).clamp(max=L - 1)

    def _ctc_token_log_probs(self) -> Tensor:
        graph, found = self.scores.graph, []
        counts = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
        for b, (m, n) in enumerate(counts):
            log_token_MV = ctc_token_log_probs(
                self.log_token_BLV[b, :n], graph.owner_BL[b, :n], m, self.unk
            )
            found.append(log_token_MV[self.is_mask_BM[b, :m]])
        return torch.cat(found).log_softmax(dim=1)


@torch.no_grad()
def read_rows(model: ExLM, batch: MaskedBatch) -> RowReading:
    """States, transitions and emissions of some rows.

    Args:
        model: in evaluation mode.
        batch: on the device of the model. Memory is taken for the probability of every token at
            every state: B x L x V numbers.

    Raises:
        ValueError: if the model is in training mode, where dropout is random.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random; call eval()")
    hidden_BTD, graph = model.encode(*batch)
    state_BLD = model.states(hidden_BTD, graph)
    log_token_BLV = model.token_logits(state_BLD).double().log_softmax(dim=2)
    log_emission_BML = _emission(log_token_BLV, graph.target_ids_BM)
    is_ctc, unk = model.transition is None, model.special_ids.unk
    state_BML = log_transition_BLL = None
    if model.transition is not None:
        log_transition_BLL = model.transition(state_BLD, graph).double()
        # Nothing is known about any target: each has emission log 1 in every state.
        any_token_BML = torch.zeros_like(log_emission_BML, dtype=torch.float64)
        counts = graph.num_targets_B, graph.num_states_B
        state_BML = posteriors(any_token_BML, log_transition_BLL, *counts).state_BML
    scores = StateScores(
        log_emission_BML=log_emission_BML,
        log_transition_BLL=log_transition_BLL,
        log_blank_BL=log_token_BLV[:, :, unk] if is_ctc else None,
        is_blank_BM=graph.target_ids_BM == unk if is_ctc else None,
        graph=graph,
        is_scored_BM=graph.target_ids_BM != model.special_ids.pad,
        states_per_mask=model.config.states_per_mask,
    )
    return RowReading(log_token_BLV, scores, state_BML, unk)


def _emission(log_token_BLV: Tensor, target_ids_BM: Tensor) -> Tensor:
    """log P_u(y_i), (B, M, L)."""
    B, L, _ = log_token_BLV.shape
    index_BLM = target_ids_BM.unsqueeze(1).expand(B, L, -1)
    return log_token_BLV.gather(2, index_BLM).transpose(1, 2)


class Visits(NamedTuple):
    """What paths visit, given the emissions; float64, 0 at padding and in rows without a path."""

    state_BL: Tensor
    """P(a path passes the state)."""
    once_BM: Tensor
    """P(a path passes at least one state of the target)."""
    twice_BM: Tensor
    """P(a path passes at least two states of the target)."""


@torch.no_grad()
def path_visits(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    owner_BL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Visits:
    """Exact probabilities that a path visits states, and the states of each target.

    The chain of a posterior path (see ``log_to_come``) is pushed forward. The states of a
    target are neighbours, so a path meets them one after the other: it has met two of them when the
    step after the first stays with the same target.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``; an emission of 0 everywhere asks before any token is known.
        owner_BL: int64, the target each state is a clone of, rising along a row.

    Returns:
        The probabilities.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    if owner_BL.shape != log_transition_BLL.shape[:2]:
        raise ValueError(
            f"want the owner of {tuple(log_transition_BLL.shape[:2])} states, got "
            f"{tuple(owner_BL.shape)}"
        )
    log_to_come_MBL, log_edge_BLL = log_to_come(*graph)
    M, B, L = log_to_come_MBL.shape
    state_L = torch.arange(L, device=owner_BL.device)
    is_own_BLL = owner_BL.unsqueeze(2) == owner_BL.unsqueeze(1)
    at_BL = (log_to_come_MBL[0, :, :1].isfinite() & (state_L == 0)).double()
    first_BL = at_BL  # also at a state, and no state of its target was met before
    state_BL, first_ever_BL, second_BL = (
        at_BL.clone(),
        first_BL.clone(),
        torch.zeros_like(at_BL),
    )
    for i in range(1, M):
        # What a path may yet do from a state is what entering it is worth, emission aside.
        log_beta_BL = log_to_come_MBL[i - 1] - log_emission_BML[:, i - 1]
        is_live_BL = (at_BL > 0) & (i < num_targets_B).unsqueeze(1)
        step_BLL = _steps(log_edge_BLL, log_to_come_MBL[i], log_beta_BL, is_live_BL)
        second_BL += (first_BL.unsqueeze(1) @ (step_BLL * is_own_BLL)).squeeze(1)
        first_BL = (at_BL.unsqueeze(1) @ (step_BLL * ~is_own_BLL)).squeeze(1)
        at_BL = (at_BL.unsqueeze(1) @ step_BLL).squeeze(1)
        state_BL += at_BL
        first_ever_BL += first_BL
    of_target_2BM = at_BL.new_zeros(2, B, M)
    of_target_2BM[0].scatter_add_(1, owner_BL, first_ever_BL)
    of_target_2BM[1].scatter_add_(1, owner_BL, second_BL)
    return Visits(state_BL, *of_target_2BM)


def _steps(
    log_edge_BLL: Tensor, log_to_come_BL: Tensor, log_beta_BL: Tensor, is_live_BL: Tensor
) -> Tensor:
    """P(next state | state) of the chain, 0 from where it does not go on."""
    log_step_BLL = log_edge_BLL + log_to_come_BL.unsqueeze(1)
    log_step_BLL -= log_beta_BL.masked_fill(~is_live_BL, 0.0).unsqueeze(2)
    return log_step_BLL.masked_fill_(~is_live_BL.unsqueeze(2), -torch.inf).exp_()
