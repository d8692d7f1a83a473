"""The predictions of a model for a masked batch.

Shapes: B rows, N tokens of a row, M targets and L states of a row, S masked tokens of all rows, k
copies or states of a mask, V vocabulary.

``MaskedLM`` predicts one distribution for each mask (``MaskScores``), ExLM a graph of states
(``StateScores``). Both provide the training loss, the joint probability of all masked tokens of a
row, and the marginal distribution of each mask, before any token is known. For ExLM the marginal is
the sum over everything else, that is all paths and all tokens in the other masks (ours: Appendix
P shows the words of single states)::

    P(y_i = w) = sum over u of P(state u emits target i) P_u(w)

Without transitions (``ctc``), a mask has the CTC distribution of its own states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from exlm_mini.alignment import dag_log_likelihood, posteriors, viterbi
from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.model.expansion import StateGraph
from exlm_mini.model.objectives import mlm_loss, states_alignment_loss


class Scored(NamedTuple):
    """The training loss of a batch, and counts."""

    loss: Tensor
    """Nats per target, scalar."""
    num_without_path: int = 0
    """Rows that have no path and are left out of the loss; only for ExLM."""
    num_correct: Tensor | None = None
    """Masked tokens guessed correctly, int64 scalar; None for ExLM, where counting costs more."""


@dataclass(frozen=True)
class MaskScores:
    """The predictions of ``MaskedLM``: a distribution for each mask."""

    token_logits_SV: Tensor
    """Row by row from left to right; with k copies, k consecutive entries for each mask."""
    is_masked_BN: Tensor
    target_ids_S: Tensor
    """int64, the true tokens."""
    num_copies: int = 1
    """Number of copies k of each mask, whose probabilities are averaged."""

    def scored(self) -> Scored:
        """The training loss: the mean over masks."""
        target_ids_S = self.target_ids_S.repeat_interleave(self.num_copies)
        num_correct = (self.token_logits_SV.detach().argmax(dim=1) == target_ids_S).sum()
        return Scored(mlm_loss(self.token_logits_SV, target_ids_S), 0, num_correct)

    @cached_property
    def log_token_SV(self) -> Tensor:
        """log P of every token at each mask, in nats."""
        log_token_SV = log_softmax(self.token_logits_SV)
        if self.num_copies == 1:
            return log_token_SV
        log_token_SkV = log_token_SV.unflatten(0, (-1, self.num_copies))
        return log_token_SkV.logsumexp(dim=1) - math.log(self.num_copies)

    def guesses(self) -> Tensor:
        """guess_ids_S, int64: the likeliest token at each mask, or at each copy of it."""
        return self.token_logits_SV.argmax(dim=1)

    def log_joint(self, token_ids_S: Tensor | None = None) -> Tensor:
        """Joint log-probability of each row's masked tokens, or of ``token_ids_S`` in their place:
        the sum over the masks, (B,), float64."""
        token_ids_S = self.target_ids_S if token_ids_S is None else token_ids_S
        log_p_S = self.log_token_SV.gather(1, token_ids_S.unsqueeze(1)).squeeze(1).double()
        zeros_B = log_p_S.new_zeros(len(self.is_masked_BN))
        return zeros_B.index_add(0, self.is_masked_BN.nonzero()[:, 0], log_p_S)


@dataclass(frozen=True)
class StateScores:
    """The predictions of ExLM: a graph of states, its edges, and what the states emit."""

    log_emission_BML: Tensor
    """log P_u(y_i), in nats."""
    log_transition_BLL: Tensor | None
    """log E[v, u]; None if there are no edges (``ctc``)."""
    log_blank_BL: Tensor | None
    """``ctc`` only: log-probability of the blank, the unknown token, at each state."""
    graph: StateGraph
    is_scored_BM: Tensor
    """bool, targets whose emission counts; false at padding and at unscored boundaries."""
    state_BLD: Tensor
    """Hidden states of the graph, from which ``model`` computes log P_u of all other tokens."""
    model: Any

    @property
    def is_linked(self) -> bool:
        """Whether the states have edges."""
        return self.log_transition_BLL is not None

    @property
    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        """The last three arguments of the functions in ``alignment``; only for linked states."""
        assert self.log_transition_BLL is not None
        graph = self.graph  # a row of padding alone has neither targets nor states
        num_targets_B, num_states_B = graph.num_targets_B.clamp(1), graph.num_states_B.clamp(1)
        return self.log_transition_BLL, num_targets_B, num_states_B

    def double(self) -> StateScores:
        """A copy with emissions and transitions in float64."""
        log_transition_BLL = self.log_transition_BLL
        if log_transition_BLL is not None:
            log_transition_BLL = log_transition_BLL.double()
        log_emission_BML = self.log_emission_BML.double()
        return replace(
            self, log_emission_BML=log_emission_BML, log_transition_BLL=log_transition_BLL
        )

    @cached_property
    def has_mask_B(self) -> Tensor:
        """Which rows contain a mask. The others have only a path from [BOS] to [EOS], which says
        nothing about their tokens."""
        return self.graph.is_mask_BM.any(dim=1)

    def scored(self) -> Scored:
        """The training loss: the mean over rows with masks."""
        log_likelihood_B = log_likelihood(self)
        is_lost_B = self.has_mask_B & (log_likelihood_B == -torch.inf)
        loss = states_alignment_loss(
            log_likelihood_B.masked_fill(~self.has_mask_B, -torch.inf),
            self.is_scored_BM.sum(dim=1),
        )
        return Scored(loss, int(is_lost_B.sum()))

    @cached_property
    def log_token_BLV(self) -> Tensor:
        """log P_u(w) of every token in each state, in nats."""
        log_token_BLV = log_softmax(self.model.token_logits(self.state_BLD))
        return log_token_BLV.to(self.log_emission_BML.dtype)

    @cached_property
    def log_token_SV(self) -> Tensor:
        """Marginal log P of every token at each mask, in nats, row by row from left to right;
        detached, and -inf in a row without a path. With ``ctc``, of a token together with as many
        tokens as there are masks: the probabilities sum to less than one."""
        return torch.cat(list(self._masks_of_rows(torch.float64)))

    def guesses(self) -> Tensor:
        """guess_ids_S, int64: the likeliest token at each mask, by its marginal distribution."""
        # Row by row, so that at most L x V probabilities are in memory.
        return torch.cat(
            [row_SV.argmax(dim=1) for row_SV in self._masks_of_rows(torch.float32)]
        )

    def log_joint(self, token_ids_S: Tensor | None = None) -> Tensor:
        """Joint log-probability of each row's masked tokens, or of ``token_ids_S`` in their place:
        the sum over all paths, (B,); 0 for a row without masks."""
        if token_ids_S is None:
            log_joint_B = log_likelihood(self, with_boundaries=False)
            return log_joint_B.masked_fill(~self.has_mask_B, 0.0)
        graph = self.graph
        target_ids_BM = graph.target_ids_BM.masked_scatter(graph.is_mask_BM, token_ids_S)
        index_BLM = target_ids_BM.unsqueeze(1).expand(-1, self.log_token_BLV.shape[1], -1)
        log_emission_BML = self.log_token_BLV.gather(2, index_BLM).transpose(1, 2)
        graph = graph._replace(target_ids_BM=target_ids_BM)
        return replace(self, log_emission_BML=log_emission_BML, graph=graph).log_joint()

    def best_path(self, log_best_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest path if each state emits one given token: path_BM and log_score_B.

        Args:
            log_best_BL: log-probability of each state's token, such as its likeliest one.
        """
        # Boundaries cost nothing: their emissions are left out.
        log_best_BML = log_best_BL.unsqueeze(1).expand_as(self.log_emission_BML)
        is_boundary_BM1 = self.graph.is_boundary_BM.unsqueeze(2)
        return viterbi(log_best_BML.masked_fill(is_boundary_BM1, 0.0), *self.links)

    def log_fit(self) -> Tensor:
        """Log-probability that a path of one state per target ends in the last state, whatever the
        tokens, (B,) in nats."""
        return dag_log_likelihood(torch.zeros_like(self.log_emission_BML), *self.links)

    def visits(self) -> Tensor:
        """Posterior probability that a path visits each state, given the rows' tokens, (B, L)."""
        is_boundary_BM1 = self.graph.is_boundary_BM.unsqueeze(2)
        log_emission_BML = self.log_emission_BML.masked_fill(is_boundary_BM1, 0.0)
        return posteriors(log_emission_BML, *self.links).state_BML.sum(dim=1)

    @torch.no_grad()
    def _masks_of_rows(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield log_token_SV row by row; the mixture over states is computed in ``dtype``."""
        graph, weight_BML = self.graph, None
        if self.log_transition_BLL is not None:
            any_token_BML = torch.zeros_like(self.log_emission_BML, dtype=dtype)
            links = (self.log_transition_BLL.to(dtype), *self.links[1:])
            weight_BML = posteriors(any_token_BML, *links).state_BML
        sizes = zip(graph.num_targets_B.tolist(), graph.num_states_B.tolist(), strict=True)
        for b, (m, n) in enumerate(sizes):
            log_token_LV = log_softmax(self.model.token_logits(self.state_BLD[b, :n]))
            if weight_BML is None:
                unk = self.model.special_ids.unk
                log_token_MV = ctc_token_log_probs(log_token_LV, graph.owner_BL[b, :n], m, unk)
            else:
                # In the encoder's lower precision, tokens of similar probability would tie.
                with torch.autocast(log_token_LV.device.type, enabled=False):
                    token_MV = weight_BML[b, :m, :n] @ log_token_LV.to(dtype).exp()
                log_token_MV = token_MV.log().to(log_token_LV.dtype)
            yield log_token_MV[~graph.is_boundary_BM[b, :m]]


@record_function("dynamic programme")
def log_likelihood(
    scores: StateScores, with_boundaries: bool = True, backend: str = "auto"
) -> Tensor:
    """log P(Y | X') of each row under the model's graph.

    Args:
        with_boundaries: include the emissions of [BOS] and [EOS], as in training with
            ``boundary="official"``. Without them the sum over all paths is the joint probability
            of the masked tokens alone.

    Returns:
        log_likelihood_B in nats; -inf where no path fits.
    """
    is_counted_BM = scores.is_scored_BM
    if not with_boundaries:
        is_counted_BM = is_counted_BM & ~scores.graph.is_boundary_BM
    if not scores.is_linked:
        return (_ctc_log_likelihood(scores) * is_counted_BM).sum(dim=1)
    log_emission_BML = scores.log_emission_BML.masked_fill(~is_counted_BM.unsqueeze(2), 0.0)
    return dag_log_likelihood(log_emission_BML, *scores.links, backend)


def _ctc_log_likelihood(scores: StateScores) -> Tensor:
    """CTC log-probability of each target over its own k states, (B, M); meaningless where
    unscored."""
    graph = scores.graph
    assert scores.log_blank_BL is not None  # only called for ctc
    log_target_BMk = scores.log_emission_BML.gather(2, graph.state_BMk)
    log_blank_BML = scores.log_blank_BL.unsqueeze(1).expand_as(scores.log_emission_BML)
    is_blank_BM = graph.target_ids_BM == scores.model.special_ids.unk
    return run_log_likelihood(
        log_target_BMk, log_blank_BML.gather(2, graph.state_BMk), is_blank_BM
    )


def log_softmax(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def ctc_token_log_probs(
    log_token_LV: Tensor, owner_L: Tensor, num_targets: int, unk: int
) -> Tensor:
    """log-probability of every token under the CTC of each target's own states, (M, V) in nats.

    Args:
        log_token_LV: log P_u(w) of the states of one row, in nats.
        owner_L: int64, the target that each state is a clone of.
        unk: id of the unknown token, the blank as in training.
    """
    is_blank_V = torch.arange(log_token_LV.shape[1], device=owner_L.device) == unk
    log_token_MV = []
    for i in range(num_targets):
        log_token_Vk = log_token_LV[owner_L == i].t()
        log_blank_Vk = log_token_Vk[[unk]].expand_as(log_token_Vk)
        log_token_MV.append(run_log_likelihood(log_token_Vk, log_blank_Vk, is_blank_V))
    return torch.stack(log_token_MV) if log_token_MV else log_token_LV[:0]
