"""Transitions against their formulas written out, and mixtures against mixtures by hand.

Shapes: B rows, L states, M targets, D width, H heads.
"""

from __future__ import annotations

import math

import pytest
import torch
from small_models import (
    BOS,
    EOS,
    SPECIAL,
    assert_all_same,
    assert_same,
    drawn,
    gradients,
    masked_rows,
)
from torch import Tensor, nn

from exlm_mini.alignment import dag_log_likelihood
from exlm_mini.config import ModelConfig
from exlm_mini.model.encoder import initialise
from exlm_mini.model.expansion import StateGraph, expand_masks
from exlm_mini.model.transition import (
    GatedTransition,
    blend,
    edges,
    make_transition,
    parallel_chains,
)

WIDTH, HEADS = 16, 4
LEARNED = [
    ("paper", False, False), ("paper", True, False), ("gated", False, True),
    ("gated", True, True), ("gated", False, False),
]  # fmt: skip
BOUNDARIES = pytest.mark.parametrize("boundary", ["official", "paper"])
BATCH = masked_rows([BOS, -7, 8, -9, EOS], [BOS, 7, EOS], [BOS, -7, -8, -9, 10, -11, EOS])
SPAN_OF_TARGET = {0: [{1}, {2}], 1: [], 2: [{1, 2, 3}, {4}]}
"""For each row of ``BATCH``, the targets of each run of adjacent masks."""


def make_graph(k: int = 3, boundary: str = "official") -> StateGraph:
    return expand_masks(*BATCH, k, boundary, SPECIAL)[1]


def make_module(
    transition: str, sparse: bool = False, use_position: bool = True, k: int = 3
) -> nn.Module:
    torch.manual_seed(0)
    module = make_transition(
        ModelConfig(
            width=WIDTH, num_heads=HEADS, max_positions=40, transition=transition,
            sparse=sparse, use_position=use_position, states_per_mask=k,
        )
    ).double()  # fmt: skip
    initialise(module, 0.5)
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.normal_(part.bias, std=0.5)
    return module


def make_states(graph: StateGraph) -> Tensor:
    state_BLD = drawn(*graph.place_BL.shape, WIDTH, seed=1).detach()
    return state_BLD * graph.is_state_BL.unsqueeze(2)


def learned_by_hand(
    module: nn.Module, state_BLD: Tensor, graph: StateGraph, b: int, v: int, after: list[int]
) -> Tensor:
    """Probabilities from v to ``after``; a bonus, if any, favours the clone of the same number."""
    x_LX, is_gated = state_BLD[b], isinstance(module, GatedTransition)
    if is_gated and module.place is not None:
        x_LX = torch.cat([x_LX, module.place.weight[graph.place_BL[b]]], dim=1)
    num_heads = HEADS if is_gated else 1
    query_Hd = module.query(x_LX[v]).unflatten(0, (num_heads, -1))
    key_UHd = module.key(x_LX[after]).unflatten(1, (num_heads, -1))
    is_same_U = graph.clone_BL[b, after] == graph.clone_BL[b, v]
    score_UH = (key_UHd * query_Hd).sum(2) / math.sqrt(WIDTH // num_heads)
    weight_UH = (score_UH + getattr(module, "chain_bonus", 0) * is_same_U.unsqueeze(1)).exp()
    share_UH = weight_UH / weight_UH.sum(0)
    return share_UH @ module.gate(x_LX[v]).softmax(0) if is_gated else share_UH[:, 0]


@BOUNDARIES
@pytest.mark.parametrize(("transition", "sparse", "use_position"), LEARNED)
def test_transition_equals_its_formula(transition, sparse, use_position, boundary):
    """E is compared row by row, over the successors that §4.2 and Appendix Q.3 allow."""
    graph = make_graph(boundary=boundary)
    state_BLD = make_states(graph).requires_grad_()
    module = make_module(transition, sparse, use_position)
    ours_BLL = module(state_BLD, graph)
    expected_BLL = torch.zeros_like(ours_BLL)
    for b, L in enumerate(graph.num_states_B.tolist()):
        owner_L = graph.owner_BL[b].tolist()
        for v in range(L):
            after = [u for u in range(v + 1, L) if not sparse or owner_L[u] != owner_L[v]]
            expected_BLL[b, v, after] = learned_by_hand(module, state_BLD, graph, b, v, after)
    assert_same(ours_BLL.exp(), expected_BLL)
    is_edge_BLL = ours_BLL != -torch.inf
    assert torch.equal(is_edge_BLL, expected_BLL > 0)
    inputs = [state_BLD, *module.parameters()]
    expected = gradients(expected_BLL[is_edge_BLL].log(), inputs)
    with torch.autograd.set_detect_anomaly(True):  # no step on the way may give nan
        assert_all_same(gradients(ours_BLL[is_edge_BLL], inputs), expected)


# ---- no dependencies, and chains ----


def states_of(graph: StateGraph, b: int, target: int) -> list[int]:
    owner_L = graph.owner_BL[b, : int(graph.num_states_B[b])].tolist()
    return [u for u, owner in enumerate(owner_L) if owner == target]


def likelihood(log_emission_BML: Tensor, log_transition_BLL: Tensor, graph: StateGraph):
    return dag_log_likelihood(
        log_emission_BML, log_transition_BLL, graph.num_targets_B, graph.num_states_B
    )


def make_emission(graph: StateGraph) -> Tensor:
    B, M, L = *graph.target_ids_BM.shape, graph.place_BL.shape[1]
    return drawn(B, M, L, seed=2).detach() - 2


def fixed(name: str, graph: StateGraph, k: int) -> Tensor:
    """log_transition_BLL of the fixed transitions of this name."""
    if name == "chains of a row":
        return parallel_chains(make_states(graph), graph)
    return make_module({"uniform": name}.get(name, "chains"), k=k)(make_states(graph), graph)


@pytest.mark.parametrize("name", ["uniform", "chains of a row", "chains of spans"])
@BOUNDARIES
@pytest.mark.parametrize("k", [1, 3])
def test_fixed_transitions_are_mixtures_of_k_models_of_a_mask_a_row_or_a_span(
    k, boundary, name
):
    graph = make_graph(k, boundary)
    log_emission_BML, log_transition_BLL = make_emission(graph), fixed(name, graph, k)
    ours_B = likelihood(log_emission_BML, log_transition_BLL, graph)
    for b, M in enumerate(graph.num_targets_B.tolist()):
        # The first state is that of [BOS], the last that of [EOS], and each mask has k states.
        last, inner = int(graph.num_states_B[b]) - 1, range(1, M - 1)
        expected = log_emission_BML[b, 0, 0] + log_emission_BML[b, M - 1, last]
        groups = {"uniform": [[i] for i in inner], "chains of spans": SPAN_OF_TARGET[b]}
        for group in groups.get(name, [inner] if inner else []):
            own = [log_emission_BML[b, i, states_of(graph, b, i)] for i in group]
            expected = expected + torch.stack(own).sum(0).exp().mean().log()
        assert_same(ours_B[b], expected)
    is_edge_BLL = log_transition_BLL != -torch.inf
    assert not (is_edge_BLL & ~edges(graph, sparse=True)).any()
    total_BL = log_transition_BLL.exp().sum(2)
    assert_same(total_BL, is_edge_BLL.any(2).double(), 1e-12)


# ---- spans of adjacent masks ----


@BOUNDARIES
@pytest.mark.parametrize("use_position", [True, False])
def test_edges_are_learned_within_a_span_and_shared_equally_elsewhere(use_position, boundary):
    graph = make_graph(3, boundary)
    state_BLD = make_states(graph)
    module = make_module("spans", use_position=use_position)
    ours_BLL = module(state_BLD, graph).exp()
    for b, spans in SPAN_OF_TARGET.items():
        last = int(graph.num_targets_B[b]) - 1
        for v in range(int(graph.num_states_B[b])):
            i = int(graph.owner_BL[b, v])
            after = states_of(graph, b, i + 1)[-1 if i + 1 == last else 0 :]
            expected_L = torch.zeros_like(ours_BLL[b, v])
            if any({i, i + 1} <= span for span in spans):
                expected_L[after] = learned_by_hand(module, state_BLD, graph, b, v, after)
            elif after:
                expected_L[after] = 1 / len(after)
            assert_same(ours_BLL[b, v], expected_L)


# ---- blend ----


def blended(chain_share: float, sparse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The blend, the learned transitions and the chains of a graph."""
    graph = make_graph()
    state_BLD = make_states(graph)
    learned_BLL = make_module("gated", sparse)(state_BLD, graph).detach().requires_grad_()
    chain_BLL = parallel_chains(state_BLD, graph)
    return blend(learned_BLL, chain_BLL, chain_share), learned_BLL, chain_BLL


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_blend_interpolates_probabilities(share, sparse):
    blended_BLL, learned_BLL, chain_BLL = blended(share, sparse)
    expected_BLL = (1 - share) * learned_BLL.exp() + share * chain_BLL.exp()
    assert_same(blended_BLL.exp(), expected_BLL)
    assert torch.equal(blended_BLL == -torch.inf, expected_BLL == 0)
    # The gradient of the sum of the logs is finite, and equals the learned share of each edge.
    blended_BLL[blended_BLL != -torch.inf].sum().backward()
    expected = (1 - share) * learned_BLL.exp() / expected_BLL
    assert_same(learned_BLL.grad, expected.nan_to_num(nan=0.0))


def test_chains_alone_stay_as_they_are_and_their_gradient_goes_to_the_learned_transitions():
    graph = make_graph()
    ours, learned_BLL, chain_BLL = blended(1.0)
    assert torch.equal(ours, chain_BLL)
    likelihood(make_emission(graph), ours, graph).sum().backward()
    chain_BLL.requires_grad_()
    likelihood(make_emission(graph), chain_BLL, graph).sum().backward()
    assert learned_BLL.grad.any()
    assert_same(learned_BLL.grad, chain_BLL.grad)
