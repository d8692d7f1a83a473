"""Decoding without targets: DA-Transformer's greedy, lookahead and best path.

Shapes: B rows, M targets, L states, V vocabulary.

Each state emits its likeliest token, so a decoder only chooses the next state: by the transition
alone (``greedy``), by the transition and the next state's emission (``lookahead``), or by these and
the best continuation to the end (``best_path``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.graphs import Graph, checked


class Decoded(NamedTuple):
    """A path and the tokens along it."""

    token_ids_BM: Tensor
    """int64, -1 beyond the end of a row; M is the length of the longest path."""
    path_BM: Tensor
    """int64, the state that emits each token, -1 beyond the end."""
    log_score_B: Tensor
    """log P(tokens, path) in nats; -inf where the path gets stuck before the last state."""


def greedy(log_token: Tensor, log_transition: Tensor, num_states: Tensor | int) -> Decoded:
    """Follow the likeliest edge from each state.

    Args:
        log_token: (B, L, V), log P_u(w) of every token in each state, any floating dtype.

    Returns:
        Decoded; the path starts in state 0 and ends in the last one. Ties go to the first state.
    """
    graph, token_ids_BL = _graph(log_token, log_transition, num_states)
    return _walk(graph, token_ids_BL, graph.log_edge_BLL)


def lookahead(log_token: Tensor, log_transition: Tensor, num_states: Tensor | int) -> Decoded:
    """From each state, follow the edge that is likeliest together with the token at its end.

    Returns:
        Decoded, as for ``greedy``.
    """
    graph, token_ids_BL = _graph(log_token, log_transition, num_states)
    return _walk(graph, token_ids_BL, graph.log_edge_BLL + graph.log_emission_BML)


def best_path(log_token: Tensor, log_transition: Tensor, num_states: Tensor | int) -> Decoded:
    """The likeliest path, of any length, and its tokens.

    Each further state multiplies the score by two probabilities, so short outputs are preferred.
    For outputs of M tokens, call ``viterbi`` with ``log_token.amax(2)`` as emission of M targets.

    Returns:
        Decoded, as for ``greedy``; -inf only where no path exists.
    """
    graph, token_ids_BL = _graph(log_token, log_transition, num_states)
    log_step_BLL = graph.log_edge_BLL + graph.log_emission_BML
    end_B, (_, L, _) = graph.num_states_B - 1, log_step_BLL.shape
    log_rest_BL = log_step_BLL.new_zeros(log_step_BLL.shape[:2])  # of the best continuation
    for v in range(L - 2, -1, -1):
        best_B = (log_step_BLL[:, v] + log_rest_BL).amax(dim=1)
        log_rest_BL[:, v] = torch.where(v < end_B, best_B, 0.0)
    return _walk(graph, token_ids_BL, log_step_BLL + log_rest_BL.unsqueeze(1))


def _graph(
    log_token: Tensor, log_transition: Tensor, num_states: Tensor | int
) -> tuple[Graph, Tensor]:
    """A graph with a single target, whose emission at each state is that of the state's likeliest
    token; and these likeliest tokens, (B, L)."""
    if log_token.dim() != 3:
        raise ValueError(f"log_token must be (B, L, V), got {tuple(log_token.shape)}")
    log_best_BL, token_ids_BL = log_token.detach().max(dim=2)
    graph = checked(log_best_BL.unsqueeze(1), log_transition.detach(), 1, num_states)
    is_beyond_B1L = ~graph.is_state_BL.unsqueeze(1)
    log_emission_B1L = graph.log_emission_BML.masked_fill(is_beyond_B1L, -torch.inf)
    return graph._replace(log_emission_BML=log_emission_B1L), token_ids_BL


def _walk(graph: Graph, token_ids_BL: Tensor, log_choice_BLL: Tensor) -> Decoded:
    """Walk from state 0 to the last one, always along the largest entry of ``log_choice_BLL``."""
    log_edge_BLL, log_best_BL = graph.log_edge_BLL, graph.log_emission_BML.squeeze(1)
    # A NaN score must not turn a missing edge into a choice.
    next_BL = log_choice_BLL.masked_fill(log_edge_BLL == -torch.inf, -torch.inf).argmax(dim=2)
    row_B = torch.arange(len(next_BL), device=next_BL.device)
    state_B, log_score_B = torch.zeros_like(row_B), log_best_BL[:, 0]
    is_on_B = torch.ones_like(row_B, dtype=torch.bool)
    path = []
    while bool(is_on_B.any()):
        path.append(torch.where(is_on_B, state_B, -1))
        is_on_B = is_on_B & (state_B < graph.num_states_B - 1)
        next_B = next_BL[row_B, state_B]
        log_step_B = log_edge_BLL[row_B, state_B, next_B] + log_best_BL[row_B, next_B]
        log_score_B = torch.where(is_on_B, log_score_B + log_step_B, log_score_B)
        # Where no edge leads on, the row's path ends.
        is_on_B = is_on_B & (log_score_B != -torch.inf)
        state_B = torch.where(is_on_B, next_B, state_B)
    path_BM = torch.stack(path, dim=1) if path else next_BL[:, :0]
    token_ids_BM = token_ids_BL.gather(1, path_BM.clamp(min=0)).masked_fill(path_BM < 0, -1)
    return Decoded(token_ids_BM, path_BM, log_score_B)
