"""The transition matrix E: the probability that a path goes from one state to another (§4.2).

Shapes: B rows, L states, M targets, k states of a mask, D width, H heads.
``log_transition_BLL[b, v, u]`` is the log-probability of the edge v -> u. It is -inf unless v < u
and both are states; each row of E that has a successor sums to one.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.config import ModelConfig
from exlm_mini.model.expansion import StateGraph


def edges(graph: StateGraph, sparse: bool = False) -> Tensor:
    """The edges that may exist, is_edge_BLL (bool): the mask M of §4.2.

    Args:
        sparse: forbid edges between clones of one mask (Appendix Q.3).
    """
    is_state_BL = graph.is_state_BL
    L = is_state_BL.shape[1]
    is_forward_LL = torch.ones(L, L, dtype=torch.bool, device=is_state_BL.device).triu(1)
    is_edge_BLL = is_forward_LL & is_state_BL.unsqueeze(1) & is_state_BL.unsqueeze(2)
    if sparse:
        is_edge_BLL = is_edge_BLL & (graph.owner_BL.unsqueeze(1) > graph.owner_BL.unsqueeze(2))
    return is_edge_BLL


def edge_log_softmax(scores_BHLL: Tensor, is_edge_BLL: Tensor) -> Tensor:
    """log softmax over the allowed successors of each state, 0 elsewhere; (B, H, L, L).

    The fill value 0 is finite because a state without successors would otherwise have nan
    gradients. The caller has to mask it.
    """
    is_edge_B1LL = is_edge_BLL.unsqueeze(1)
    has_successor_B1L1 = is_edge_B1LL.any(dim=-1, keepdim=True)
    scores_BHLL = scores_BHLL.masked_fill(~is_edge_B1LL & has_successor_B1L1, -torch.inf)
    return scores_BHLL.log_softmax(dim=-1).masked_fill(~is_edge_B1LL, 0.0)


def _attend(
    query_BHLd: Tensor, key_BHLd: Tensor, is_edge_BLL: Tensor, bonus_LL: Tensor | None = None
) -> Tensor:
    """``edge_log_softmax`` of q kᵀ / sqrt(d) + bonus, in float32 even under autocast."""
    query_BHLd, key_BHLd = _at_least_float32(query_BHLd), _at_least_float32(key_BHLd)
    with torch.autocast(query_BHLd.device.type, enabled=False):
        scores_BHLL = query_BHLd @ key_BHLd.transpose(2, 3) / math.sqrt(query_BHLd.shape[-1])
        if bonus_LL is not None:
            scores_BHLL = scores_BHLL + bonus_LL
        return edge_log_softmax(scores_BHLL, is_edge_BLL)


class PaperTransition(nn.Module):
    """E = softmax(Q Kᵀ / sqrt(D) + M) with Q = H W_Q and K = H W_K (§4.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.shape.width
        self.sparse = config.sparse
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, state_BLD: Tensor, graph: StateGraph) -> Tensor:
        """log_transition_BLL in float32 (float64 for float64 states)."""
        query_B1LD, key_B1LD = (
            linear(state_BLD).unsqueeze(1) for linear in (self.query, self.key)
        )
        is_edge_BLL = edges(graph, self.sparse)
        log_transition_BLL = _attend(query_B1LD, key_B1LD, is_edge_BLL).squeeze(1)
        return log_transition_BLL.masked_fill(~is_edge_BLL, -torch.inf)


def _mixture(
    query_BLD: Tensor,
    key_BLD: Tensor,
    gate_BLH: Tensor,
    is_edge_BLL: Tensor,
    bonus_LL: Tensor | None = None,
) -> Tensor:
    """log of the gated mixture of H softmax matrices; -inf where there is no edge."""
    num_heads = gate_BLH.shape[2]
    query_BHLd, key_BHLd = (
        x_BLD.unflatten(2, (num_heads, -1)).transpose(1, 2) for x_BLD in (query_BLD, key_BLD)
    )
    log_gate_BHL = _at_least_float32(gate_BLH).log_softmax(dim=2).transpose(1, 2)
    log_head_BHLL = _attend(query_BHLd, key_BHLd, is_edge_BLL, bonus_LL)
    log_mixed_BLL = (log_head_BHLL + log_gate_BHL.unsqueeze(3)).logsumexp(dim=1)
    return log_mixed_BLL.masked_fill(~is_edge_BLL, -torch.inf)


class GatedTransition(nn.Module):
    """A mixture of H softmax matrices, gated by the source state; as in the released code.

    Deviation from §4.2, where E is one softmax: head c gives softmax(q_c k_cᵀ / sqrt(D/H)), and
    state v mixes its heads with softmax(W_g x_v). Queries, keys and gates read the state and,
    with ``use_position``, a learned embedding of its place in the expanded sequence. Places beyond
    the longest row of training are never trained, and E breaks down there
    (``book/results/learned-places.json``).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.num_heads = config.shape.width, config.shape.num_heads
        self.sparse = config.sparse
        self.place = nn.Embedding(config.max_positions, width) if config.use_position else None
        num_inputs = 2 * width if config.use_position else width
        self.query = nn.Linear(num_inputs, width)
        self.key = nn.Linear(num_inputs, width)
        self.gate = nn.Linear(num_inputs, self.num_heads)

    def forward(self, state_BLD: Tensor, graph: StateGraph) -> Tensor:
        """log_transition_BLL in float32 (float64 for float64 states)."""
        return _mixture(*self._heads(state_BLD, graph), edges(graph, self.sparse))

    def _heads(self, state_BLD: Tensor, graph: StateGraph) -> tuple[Tensor, Tensor, Tensor]:
        """query_BLD and key_BLD of all heads, and gate_BLH."""
        query_BLD, key_BLD, gate_BLH = (
            self._read(linear, state_BLD, graph) for linear in (self.query, self.key, self.gate)
        )
        return query_BLD, key_BLD, gate_BLH

    def _read(self, linear: nn.Linear, state_BLD: Tensor, graph: StateGraph) -> Tensor:
        """Apply ``linear`` to [state, place], multiplying each place once, not once per state."""
        if self.place is None:
            return linear(state_BLD)
        of_state_XD, of_place_XD = linear.weight.split(state_BLD.shape[-1], dim=1)
        place_PD = self.place.weight
        is_at_hand = graph.place_BL.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_at_hand and graph.place_BL.numel():
            # On a GPU the host would wait for the maximum, and the whole table takes little time.
            place_PD = place_PD[: int(graph.place_BL.max()) + 1]
        place_PX = F.linear(place_PD, of_place_XD, linear.bias)
        return F.linear(state_BLD, of_state_XD) + F.embedding(graph.place_BL, place_PX)


class SpanTransition(GatedTransition):
    r"""E learned within spans of adjacent masks; ours, not in the paper.

    On real data a dense E collapses: one edge from the visible side into a span takes all the
    probability, and the other clones no longer get a gradient. Here a path therefore goes from each
    state only to the next target, so no probability is lost. If v is a clone of target i and u one
    of i + 1:

    * where i and i + 1 are adjacent masks, E[v, u] is that of ``GatedTransition``, normalised over
      the clones of i + 1, with ``chain_bonus`` added to the score of the clone numbered like v;
    * everywhere else, as at the entry of a span, E[v, u] = 1 / k.

    The joint probability is then a product over spans, and for a span of n masks it is

        sum over c_1 .. c_n of 1/k P(y_1 | c_1) prod_i E[c_i-1, c_i] P(y_i | c_i),

    a hidden Markov model whose first state is uniform: each clone has an equal share of the
    gradient at the entry. With bonus 0 and identical clones it is a product over single masks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.chain_bonus = config.chain_bonus

    def forward(self, state_BLD: Tensor, graph: StateGraph) -> Tensor:
        """log_transition_BLL in float32 (float64 for float64 states)."""
        is_edge_BNkk, is_within_BN11 = _next_target_edges(graph), _within_span(graph)
        B, N, k, _ = is_edge_BNkk.shape
        query_BMkD, key_BMkD, gate_BMkH = map(graph.by_target, self._heads(state_BLD, graph))
        log_learned_BNkk = _mixture(
            query_BMkD[:, :-1].flatten(0, 1),
            key_BMkD[:, 1:].flatten(0, 1),
            gate_BMkH[:, :-1].flatten(0, 1),
            is_edge_BNkk.flatten(0, 1),
            self.chain_bonus * torch.eye(k, device=state_BLD.device),
        ).unflatten(0, (B, N))
        log_edge_BNkk = torch.where(
            is_within_BN11, log_learned_BNkk, _equal_shares(is_edge_BNkk, state_BLD)
        )
        return _to_matrix(log_edge_BNkk, is_edge_BNkk, graph)


class FixedTransition(nn.Module):
    """Fixed edges of equal probability, whatever the features; nothing is learned.

    With ``uniform`` (an ablation) every state leads to all clones of the next target, so a mask's
    token is an equal mixture over its k states. With ``chains``, within a span of adjacent masks a
    state leads only to the clone of the same number.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.transition

    def forward(self, state_BLD: Tensor, graph: StateGraph) -> Tensor:
        """log_transition_BLL, whatever the features of the states."""
        is_edge_BNkk = _next_target_edges(graph)
        if self.kind == "chains":
            is_edge_BNkk = _same_clone(is_edge_BNkk, _within_span(graph))
        return _to_matrix(_equal_shares(is_edge_BNkk, state_BLD), is_edge_BNkk, graph)


def parallel_chains(state_BLD: Tensor, graph: StateGraph) -> Tensor:
    """k parallel chains: clone j is followed by clone j of the next target; log E (B, L, L).

    The start leads to each chain with probability 1/k and every chain leads to the end, so the
    model is an equal mixture of k independent models, one per clone. See ``blend``.
    """
    is_edge_BNkk = _next_target_edges(graph)
    step_N = torch.arange(is_edge_BNkk.shape[1], device=is_edge_BNkk.device)
    is_inner_BN = (step_N > 0) & (step_N < (graph.num_targets_B - 2).unsqueeze(1))
    is_edge_BNkk = _same_clone(is_edge_BNkk, is_inner_BN[:, :, None, None])
    return _to_matrix(_equal_shares(is_edge_BNkk, state_BLD), is_edge_BNkk, graph)


def blend(log_transition_BLL: Tensor, log_chain_BLL: Tensor, chain_share: float) -> Tensor:
    """log of (1 - share) E + share * chains, for the start of training.

    Not in the paper. From a random start the transitions settle on one clone per mask before
    the clones have learned to differ, and ExLM becomes no better than MLM. While only the fixed
    chains are used, the clones can differ only in what they emit; then the learned transitions
    fade in.

    At share 1 the learned E would have no gradient and later fade in untrained. Therefore it gets
    the gradient of the chains: the expected number of times that a path takes each edge, from which
    the M-step of EM would estimate E.

    Args:
        log_transition_BLL: the learned log E.
        log_chain_BLL: log E of the chains, from ``parallel_chains``.
        chain_share: weight of the chains, above 0 and at most 1.
    """
    if chain_share == 1:
        taught_BLL = log_transition_BLL.masked_fill(log_chain_BLL == -torch.inf, 0.0)
        return log_chain_BLL + (taught_BLL - taught_BLL.detach())
    is_edge_BLL = (log_transition_BLL != -torch.inf) | (log_chain_BLL != -torch.inf)
    # The gradient of logaddexp is nan for two -inf: use a finite value where there is no edge.
    learned_BLL = log_transition_BLL.masked_fill(~is_edge_BLL, 0.0) + math.log1p(-chain_share)
    blended_BLL = torch.logaddexp(learned_BLL, log_chain_BLL + math.log(chain_share))
    return blended_BLL.masked_fill(~is_edge_BLL, -torch.inf)


# ---- edges to the next target only: N = M - 1 blocks of k x k ----


def _next_target_edges(graph: StateGraph) -> Tensor:
    """Edges to all clones of the next target, of the last only to its last state; is_edge_BNkk."""
    is_own_BMk = graph.is_own_BMk
    target_M = torch.arange(is_own_BMk.shape[1], device=is_own_BMk.device)
    is_last_BM = target_M == (graph.num_targets_B - 1).unsqueeze(1)
    is_end_BMk = graph.state_BMk == (graph.num_states_B - 1)[:, None, None]
    is_entry_BMk = is_own_BMk & (is_end_BMk | ~is_last_BM.unsqueeze(2))
    return is_own_BMk[:, :-1].unsqueeze(3) & is_entry_BMk[:, 1:].unsqueeze(2)


def _within_span(graph: StateGraph) -> Tensor:
    """Whether a target and the next one are adjacent masks; is_within_BN11 (bool)."""
    is_mask_BM = graph.is_mask_BM
    first_place_BM = graph.place_BL.gather(1, graph.state_BMk[:, :, 0])
    is_adjacent_BN = first_place_BM.diff(dim=1) == graph.state_BMk.shape[2]
    return (is_adjacent_BN & is_mask_BM[:, :-1] & is_mask_BM[:, 1:])[:, :, None, None]


def _same_clone(is_edge_BNkk: Tensor, is_chain_BN11: Tensor) -> Tensor:
    """Keep only the edges to the clone of the same number wherever there is a chain."""
    k = is_edge_BNkk.shape[3]
    is_same_kk = torch.eye(k, dtype=torch.bool, device=is_edge_BNkk.device)
    return is_edge_BNkk & (is_same_kk | ~is_chain_BN11)


def _equal_shares(is_edge_BNkk: Tensor, state_BLD: Tensor) -> Tensor:
    """log of equal probabilities over each state's edges, in the dtype of the states."""
    dtype = torch.promote_types(state_BLD.dtype, torch.float32)
    num_edges_BNk1 = is_edge_BNkk.sum(dim=3, keepdim=True).clamp(min=1)
    return -num_edges_BNk1.to(dtype).log().expand(is_edge_BNkk.shape)


def _to_matrix(log_edge_BNkk: Tensor, is_edge_BNkk: Tensor, graph: StateGraph) -> Tensor:
    """log_transition_BLL of these edges, -inf elsewhere."""
    (B, L), state_BMk = graph.place_BL.shape, graph.state_BMk
    row_B111 = torch.arange(B, device=state_BMk.device)[:, None, None, None]
    index_BNkk = (row_B111 * L + state_BMk[:, :-1].unsqueeze(3)) * L
    index_BNkk = index_BNkk + state_BMk[:, 1:].unsqueeze(2)
    # Entries that are not edges go to an extra element at the end.
    index_X = index_BNkk.where(is_edge_BNkk, B * L * L).flatten()
    log_transition_X = log_edge_BNkk.new_full((B * L * L + 1,), -torch.inf)
    log_transition_X = log_transition_X.scatter(0, index_X, log_edge_BNkk.flatten())
    return log_transition_X[:-1].view(B, L, L)


def make_transition(config: ModelConfig) -> nn.Module | None:
    """The transition module named in the settings; None for ``ctc``, which has no edges."""
    match config.transition:
        case "paper":
            return PaperTransition(config)
        case "gated":
            return GatedTransition(config)
        case "spans":
            return SpanTransition(config)
        case "uniform" | "chains":
            return FixedTransition(config)
        case "ctc":
            return None
    assert_never(config.transition)


def _at_least_float32(x: Tensor) -> Tensor:
    """float32 for half precision (the dynamic programme needs it), otherwise unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
