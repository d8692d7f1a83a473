"""Training objectives: masked language modelling (§2) and states alignment (§4.3).

Shapes: B rows, M targets, L states, k states of a mask, S masked tokens of a whole batch,
V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from exlm_mini.alignment import dag_log_likelihood
from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.model.expansion import StateGraph


class StateScores(NamedTuple):
    """The output of ExLM: everything the alignment needs."""

    log_emission_BML: Tensor
    """log P_u(y_i), in nats."""
    log_transition_BLL: Tensor | None
    """log E[v, u]; None without edges (``ctc``)."""
    log_blank_BL: Tensor | None
    """``ctc`` only: log-probability of the blank at each state."""
    is_blank_BM: Tensor | None
    """``ctc`` only: bool, targets that are the blank itself."""
    graph: StateGraph
    is_scored_BM: Tensor
    """bool, targets whose emission counts; false at padding and at unscored boundaries."""
    state_BLD: Tensor
    """The hidden states of the graph, which ``ExLM.token_logits`` reads."""


@record_function("head")
def mlm_loss(token_logits_SV: Tensor, target_ids_S: Tensor) -> Tensor:
    """L_MLM: mean of -log P(x_i | context) over the masked tokens of the batch (§2).

    Args:
        token_logits_SV: logits at the masked positions.
        target_ids_S: int64, the hidden tokens.

    Returns:
        Scalar in nats per masked token; 0 for a batch in which nothing is masked.
    """
    dtype = torch.promote_types(token_logits_SV.dtype, torch.float32)
    total = F.cross_entropy(token_logits_SV.to(dtype), target_ids_S, reduction="sum")
    return total / max(len(target_ids_S), 1)


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
    if scores.log_transition_BLL is None:
        return (_ctc_log_likelihood(scores) * is_counted_BM).sum(dim=1)
    return dag_log_likelihood(
        scores.log_emission_BML.masked_fill(~is_counted_BM.unsqueeze(2), 0.0),
        scores.log_transition_BLL,
        scores.graph.num_targets_B,
        scores.graph.num_states_B,
        backend,
    )


def _ctc_log_likelihood(scores: StateScores) -> Tensor:
    """CTC of each target over its own k states, (B, M); meaningless where unscored."""
    graph = scores.graph
    # Only where states are not linked.
    assert scores.log_blank_BL is not None and scores.is_blank_BM is not None
    log_target_BMk = scores.log_emission_BML.gather(2, graph.state_BMk)
    log_blank_BML = scores.log_blank_BL.unsqueeze(1).expand_as(scores.log_emission_BML)
    return run_log_likelihood(
        log_target_BMk, log_blank_BML.gather(2, graph.state_BMk), scores.is_blank_BM
    )


def states_alignment_loss(
    log_likelihood_B: Tensor,
    num_scored_B: Tensor,
    on_no_path: Literal["raise", "skip"] = "raise",
) -> Tensor:
    """L_SA = -log f_{M,L}, per target (§4.3).

    Deviation from §4.3, after the released code: each row's loss is divided by its number of
    targets, then rows are averaged. The released code counts a row without a path as loss 0;
    here such a row raises an error or is left out of the mean.

    Args:
        log_likelihood_B: in nats, from ``log_likelihood``.
        num_scored_B: int64, scored targets of each row.
        on_no_path: ``raise``, or ``skip`` rows whose log-likelihood is -inf.

    Returns:
        Scalar in nats per target; 0 when every row is skipped.

    """
    has_path_B = log_likelihood_B != -torch.inf
    if on_no_path == "raise" and not bool(has_path_B.all()):
        rows = (~has_path_B).nonzero().flatten().tolist()
        raise ValueError(f"no path through the graph spells the targets of row(s) {rows}")
    loss_B = -log_likelihood_B.masked_fill(~has_path_B, 0.0)
    num_scored_B = num_scored_B.clamp(min=1)
    return (loss_B / num_scored_B).sum() / has_path_B.sum().clamp(min=1)


def nats_to_bits(nats: Tensor) -> Tensor:
    """Divide by log 2."""
    return nats / math.log(2)
