"""The uncertainty of predictions: Appendix E, and the case study of Appendix P.

Shapes: B rows, N tokens of a repeated row, M tokens of the row before, k copies, S masked
positions of a batch, R fully masked tokens of a batch, V vocabulary; of a reading (Appendix P)
S masks, M targets (S + 2), L states.

In Repeated MLM a masked copy is not yet a lost word, because other copies may be visible. So
Appendix E measures *fully masked* tokens only, those with every copy masked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import posteriors
from exlm_mini.reading.decoding import Reading


class PathEntropy(NamedTuple):
    """The uncertainty of a reading's graph at each mask, in bits; float64."""

    word_S: Tensor
    """Of the word, given the state that emits it."""
    step_S: Tensor
    """Of the step to the next state, given the state before the mask."""


def entropy_bits(log_p: Tensor) -> Tensor:
    """Entropy of distributions over the last dimension (Appendix E), in bits.

    Args:
        log_p: natural logs of probabilities that sum to one over the last dimension; ``-inf``
            where a token is impossible.

    Returns:
        The shape without the last dimension, same dtype; 0 for a certain token.
    """
    return torch.special.entr(log_p.exp()).sum(dim=-1) / math.log(2)


def fully_masked(is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """The tokens whose copies are all masked (§3.1).

    Args:
        is_masked_BN: bool, rows as made by ``repeat_tokens``: copies of a token are adjacent.
        num_copies: k.

    Returns:
        is_lost_BM, bool (B, N / k); with one copy the mask itself.

    Raises:
        ValueError: if a row is not a whole number of tokens.
    """
    N = is_masked_BN.shape[1]
    if num_copies < 1 or N % num_copies:
        raise ValueError(f"rows of {N} positions do not hold {num_copies} copies of each token")
    return is_masked_BN.unflatten(1, (-1, num_copies)).all(dim=2)


def repeated_entropy_bits(log_p_SV: Tensor, is_masked_BN: Tensor, num_copies: int) -> Tensor:
    """H_token of Appendix E.1: a model's uncertainty about tokens without a visible copy.

    ``H_token = 1/k * sum over copies j of H[P(x_j)]``, for tokens with all k copies masked.

    Args:
        log_p_SV: log-probabilities in nats at the masked positions (not logits), row by row
            from left to right, as ``MaskedLM.forward`` orders its logits.
        is_masked_BN: bool, as for ``fully_masked``.
        num_copies: k; with 1 this is the entropy at every masked position.

    Returns:
        entropy_R in bits, one per fully masked token, row by row from left to right; empty if
        there is none. Its mean is a cell of Figure 5.

    Raises:
        ValueError: as ``fully_masked``.
    """
    is_lost_BM = fully_masked(is_masked_BN, num_copies)
    is_counted_BN = is_lost_BM.repeat_interleave(num_copies, dim=1)
    log_p_XV = log_p_SV[is_counted_BN[is_masked_BN]]
    return entropy_bits(log_p_XV).view(-1, num_copies).mean(dim=1)


def path_entropy(reading: Reading) -> PathEntropy:
    """Splits the uncertainty of a case study into that of states and that of steps.

    Appendix P compares states by eye. A state that no path visits does not matter, so here states
    are weighted by the probability that a path visits them, before any word is known::

        word[i] = sum over u of P(mask i is emitted by u) * H[P_u]
        step[i] = sum over v of P(the target before mask i is emitted by v) * H[E_v]

    P is the posterior given one step per target; E_v is a whole row of the transition matrix, so
    ``step`` includes edges that would skip a mask.

    Args:
        reading: of ``read_row``, with a graph.

    Returns:
        One value per mask each, in the order of the masks.

    Raises:
        ValueError: if the states of the reading are not linked.
    """
    if reading.states is None or reading.graph is None:
        raise ValueError("this reading has no paths: its states are not linked")
    log_transition_LL = reading.graph.log_transition_LL.double()
    M, L = len(reading.graph.path_M), len(log_transition_LL)
    any_word_BML = torch.zeros(1, M, L, dtype=torch.float64)
    counts = torch.tensor([M]), torch.tensor([L])
    state_ML = posteriors(any_word_BML, log_transition_LL[None], *counts).state_BML[0]
    return PathEntropy(
        word_S=state_ML[1:-1] @ entropy_bits(reading.states.log_token_LV.double()),
        step_S=state_ML[:-2] @ entropy_bits(log_transition_LL),
    )
