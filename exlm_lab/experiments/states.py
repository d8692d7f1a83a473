"""States of a batch of masked rows, and their predictions for each mask.

Shapes: B rows, M targets, L states, k states per mask, R masks of all rows, V vocabulary.

``decoding`` reads one row to fill it; this module reads many, for averages over their masks.
Masks are numbered row by row, from left to right, like the predictions of ``MaskedLM``.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, posteriors
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM
from exlm_mini.model.guesses import ctc_token_log_probs
from exlm_mini.model.objectives import StateScores, log_likelihood, nats_to_bits


class RowReading(NamedTuple):
    """The states of some rows, and the scores of their actual words."""

    log_token_BLV: Tensor
    """log P_u(w) in nats, float64; meaningless beyond the states of a row."""
    scores: StateScores
    state_BML: Tensor | None
    """P(state u emits target i) before any word is known, float64; none for ``ctc``."""
    unk: int
    """Id of the unknown token, the blank of ``ctc``."""

    @property
    def is_mask_BM(self) -> Tensor:
        """True for targets that are masks, not boundaries or padding; R in total."""
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
        """log P(token | context) of each mask by itself, before any word is known; (R, V) in nats.

        A mixture of the states' distributions, weighted by the probability that a path emits the
        mask there (Appendix P); float64. ``ctc`` gives part of its probability to several tokens in
        one mask: that part is dropped and the rest renormalised.
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

    def visits(self) -> Tensor:
        """P(a path visits the state), given the rows' words; (B, L), float64.

        Raises:
            ValueError: for ``ctc``, whose states are not linked.
        """
        graph, log_transition_BLL = self.scores.graph, self.scores.log_transition_BLL
        if log_transition_BLL is None:
            raise ValueError("there are no paths: the states of ctc are not linked")
        is_known_BM1 = self.is_mask_BM.unsqueeze(2)
        log_emission_BML = self.scores.log_emission_BML.masked_fill(~is_known_BM1, 0.0)
        counts = graph.num_targets_B, graph.num_states_B
        return posteriors(log_emission_BML, log_transition_BLL, *counts).state_BML.sum(dim=1)

    def of_masks(self, value_BLX: Tensor) -> Tensor:
        """Values of states, sorted by mask and clone: (R, k, ...)."""
        # Beyond the states of a row the owner is 0, which is [BOS], not a mask.
        is_of_mask_BL = self.is_mask_BM.gather(1, self.scores.graph.owner_BL)
        return value_BLX[is_of_mask_BL].unflatten(0, (-1, self.scores.states_per_mask))

    def _ctc_token_log_probs(self) -> Tensor:
        graph, log_p = self.scores.graph, []
        counts = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
        for b, (m, n) in enumerate(counts):
            log_token_MV = ctc_token_log_probs(
                self.log_token_BLV[b, :n], graph.owner_BL[b, :n], m, self.unk
            )
            log_p.append(log_token_MV[self.is_mask_BM[b, :m]])
        return torch.cat(log_p).log_softmax(dim=1)


@torch.no_grad()
def read_rows(model: ExLM, batch: MaskedBatch) -> RowReading:
    """States, transitions and emissions of some rows.

    Args:
        model: in evaluation mode.
        batch: on the device of the model. Needs memory for B x L x V numbers.

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
        # Unknown targets have emission log 1 in every state.
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
        state_BLD=state_BLD,
    )
    return RowReading(log_token_BLV, scores, state_BML, unk)


def _emission(log_token_BLV: Tensor, target_ids_BM: Tensor) -> Tensor:
    """log P_u(y_i), (B, M, L)."""
    B, L, _ = log_token_BLV.shape
    index_BLM = target_ids_BM.unsqueeze(1).expand(B, L, -1)
    return log_token_BLV.gather(2, index_BLM).transpose(1, 2)


def pairwise_divergence_bits(p_kV: Tensor) -> Tensor:
    """Mean Jensen-Shannon divergence over all pairs of k distributions, in bits.

    0 if the clones of a mask have the same distribution, 1 if no two share a word.

    Args:
        p_kV: probabilities, (..., k, V), k at least 2.

    Returns:
        The leading shape, same dtype.
    """
    entropy_k = _entropy_bits(p_kV)
    gains = [
        _entropy_bits((p_kV[..., i, :] + p_kV[..., j, :]) / 2)
        - (entropy_k[..., i] + entropy_k[..., j]) / 2
        for i, j in itertools.combinations(range(p_kV.shape[-2]), 2)
    ]
    return torch.stack(gains).mean(dim=0).clamp(min=0.0)  # below 0 only by rounding


def _entropy_bits(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(dim=-1) / math.log(2)
