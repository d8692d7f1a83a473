"""Transitions: against the formulas written out, and mixtures against mixtures by hand.

Shapes: B rows, L states, M targets, D width, H heads.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from exlm_mini.alignment import dag_log_likelihood
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.model.encoder import initialise
from exlm_mini.model.expansion import StateGraph, expand_masks
from exlm_mini.model.transition import (
    GatedTransition,
    UniformTransition,
    blend,
    edges,
    make_transition,
    parallel_chains,
)

PAD, BOS, EOS, UNK, SEP, MASK = SpecialIds()
WIDTH, HEADS = 16, 4
LEARNED = [
    ("paper", False, False), ("paper", True, False), ("gated", False, True),
    ("gated", True, True), ("gated", False, False),
]  # fmt: skip


def make_graph(k: int = 3, boundary: str = "official") -> StateGraph:
    """Rows with 2, 0 and 4 masks, with ordinary tokens between some of them."""
    token_ids_BN = torch.tensor(
        [[BOS, 7, 8, 9, EOS, PAD, PAD], [BOS, 7, EOS] + [PAD] * 4, [BOS, 7, 8, 9, 10, 11, EOS]]
    )
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, [1, 3]] = True
    is_masked_BN[2, [1, 2, 3, 5]] = True
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, MASK)
    return expand_masks(masked_ids_BN, is_masked_BN, token_ids_BN, k, boundary, SpecialIds())[1]


def make_module(
    transition: str,
    sparse: bool = False,
    use_position: bool = True,
    std: float = 0.5,
    k: int = 3,
) -> nn.Module:
    torch.manual_seed(0)
    module = make_transition(
        ModelConfig(
            width=WIDTH, num_heads=HEADS, max_positions=40, transition=transition,
            sparse=sparse, use_position=use_position, states_per_mask=k,
        )
    ).double()  # fmt: skip
    initialise(module, std)
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.normal_(part.bias, std=std)
    return module


def make_states(graph: StateGraph) -> Tensor:
    B, L = graph.place_BL.shape
    rng = torch.Generator().manual_seed(1)
    state_BLD = torch.randn(B, L, WIDTH, generator=rng, dtype=torch.float64)
    return state_BLD * graph.is_state_BL.unsqueeze(2)


def successors(graph: StateGraph, b: int, v: int, sparse: bool) -> list[int]:
    """States an edge may lead to, by the words of §4.2 and Appendix Q.3."""
    owner_L, num_states = graph.owner_BL[b].tolist(), int(graph.num_states_B[b])
    if v >= num_states:
        return []
    return [u for u in range(v + 1, num_states) if not sparse or owner_L[u] != owner_L[v]]


def softmax(scores: list[Tensor]) -> list[Tensor]:
    exponentials = [score.exp() for score in scores]
    return [e / sum(exponentials) for e in exponentials]


def transition_by_hand(
    module: nn.Module, state_BLD: Tensor, graph: StateGraph, sparse: bool
) -> Tensor:
    """E entry by entry, as probabilities."""
    B, L, _ = state_BLD.shape
    probability_BLL = torch.zeros(B, L, L, dtype=torch.float64)
    for b in range(B):
        x_LX = state_BLD[b]
        if isinstance(module, GatedTransition) and module.place is not None:
            x_LX = torch.cat([x_LX, module.place.weight[graph.place_BL[b]]], dim=1)
        is_gated = isinstance(module, GatedTransition)
        num_heads = HEADS if is_gated else 1
        d = WIDTH // num_heads
        for v in range(L):
            options = successors(graph, b, v, sparse)
            gates = softmax(list(module.gate(x_LX[v]))) if is_gated else [torch.tensor(1.0)]
            for head in range(num_heads if options else 0):
                part = slice(head * d, (head + 1) * d)
                query_d = module.query(x_LX[v])[part]
                scores = [query_d @ module.key(x_LX[u])[part] / math.sqrt(d) for u in options]
                for u, share in zip(options, softmax(scores), strict=True):
                    probability_BLL[b, v, u] += gates[head] * share
    return probability_BLL


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize(("transition", "sparse", "use_position"), LEARNED)
def test_transition_equals_its_formula(transition, sparse, use_position, boundary):
    graph = make_graph(boundary=boundary)
    state_BLD = make_states(graph)
    module = make_module(transition, sparse, use_position)
    log_transition_BLL = module(state_BLD, graph)
    expected = transition_by_hand(module, state_BLD, graph, sparse)
    assert_same(log_transition_BLL.exp(), expected)
    assert torch.equal(log_transition_BLL == -torch.inf, expected == 0)
    # Where a state has a successor, its row sums to one.
    assert_same(expected.sum(2), (expected != 0).any(2).double(), 1e-12)


@pytest.mark.parametrize(("transition", "sparse", "use_position"), LEARNED)
def test_gradients_are_finite_and_equal_finite_differences(transition, sparse, use_position):
    graph = make_graph(k=2)
    module = make_module(transition, sparse, use_position)
    is_edge_BLL = edges(graph, sparse)

    def finite_entries(state_BLD: Tensor, *_: Tensor) -> Tensor:
        return module(state_BLD, graph)[is_edge_BLL]

    state_BLD = make_states(graph).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):  # no nan on the way either
        loss = (finite_entries(state_BLD) * torch.linspace(-1, 1, int(is_edge_BLL.sum()))).sum()
        loss.backward()
    # Padding takes no part.
    assert not state_BLD.grad[~graph.is_state_BL].any()
    inputs = state_BLD.detach().requires_grad_(), *module.parameters()
    assert torch.autograd.gradcheck(finite_entries, inputs, fast_mode=True)


@pytest.mark.parametrize(("transition", "sparse", "use_position"), [LEARNED[0], LEARNED[3]])
def test_autocast_leaves_the_softmax_in_float32(transition, sparse, use_position):
    graph = make_graph()
    state_BLD = make_states(graph).float()
    module = make_module(transition, sparse, use_position).float()
    exact_BLL = module(state_BLD, graph)
    with torch.autocast("cpu", torch.bfloat16):
        low_BLL = module(state_BLD, graph)
    assert low_BLL.dtype == torch.float32
    is_edge_BLL = edges(graph, sparse)
    assert torch.equal(low_BLL != -torch.inf, is_edge_BLL)
    assert 1e-6 < (low_BLL.exp() - exact_BLL.exp()).abs().max() < 0.05
    total_BL = low_BLL.exp().sum(2)
    assert (total_BL[is_edge_BLL.any(2)] - 1).abs().max() < 1e-5


# ---- no dependencies, and chains ----


def make_emission(graph: StateGraph) -> Tensor:
    B, M, L = *graph.target_ids_BM.shape, graph.place_BL.shape[1]
    rng = torch.Generator().manual_seed(2)
    return torch.randn(B, M, L, generator=rng, dtype=torch.float64) - 2


def states_of(graph: StateGraph, b: int, target: int) -> list[int]:
    owner_L = graph.owner_BL[b, : int(graph.num_states_B[b])].tolist()
    return [u for u, owner in enumerate(owner_L) if owner == target]


def likelihood(log_emission_BML: Tensor, log_transition_BLL: Tensor, graph: StateGraph):
    return dag_log_likelihood(
        log_emission_BML, log_transition_BLL, graph.num_targets_B, graph.num_states_B
    )


@pytest.mark.parametrize("make", [UniformTransition(), parallel_chains])
@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize("k", [1, 3])
def test_fixed_transitions_are_mixtures_per_mask_or_of_k_models(k, boundary, make):
    graph = make_graph(k, boundary)
    log_emission_BML = make_emission(graph)
    ours_B = likelihood(log_emission_BML, make(make_states(graph), graph), graph)
    for b, M in enumerate(graph.num_targets_B.tolist()):
        # The first state stands for [BOS], the last for [EOS], k states for each mask.
        last = int(graph.num_states_B[b]) - 1
        ends = log_emission_BML[b, 0, 0] + log_emission_BML[b, M - 1, last]
        own = [log_emission_BML[b, i, states_of(graph, b, i)] for i in range(1, M - 1)]
        own_Mk = torch.stack(own) if own else torch.zeros(0, k, dtype=torch.float64)
        if make is parallel_chains:
            expected = own_Mk.sum(0).exp().mean().log()
        else:
            expected = own_Mk.exp().mean(1).log().sum()
        assert_same(ours_B[b], ends + expected)


@pytest.mark.parametrize("make", [UniformTransition(), parallel_chains])
@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_fixed_transitions_are_forward_edges_between_states(make, boundary):
    graph = make_graph(3, boundary)
    log_transition_BLL = make(make_states(graph), graph)
    is_edge_BLL = log_transition_BLL != -torch.inf
    assert not (is_edge_BLL & ~edges(graph, sparse=True)).any()
    total_BL = log_transition_BLL.exp().sum(2)
    assert_same(total_BL, is_edge_BLL.any(2).double(), 1e-12)


# ---- spans of masks that touch ----

SPAN_OF_TARGET = {0: [{1}, {2}], 2: [{1, 2, 3}, {4}]}
"""Of two rows of ``make_graph``: which targets are masks side by side."""


@pytest.mark.parametrize("boundary", ["official", "paper"])
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


def learned_by_hand(module, state_BLD, graph, b: int, v: int, after: list[int]) -> Tensor:
    """The gated mixture over some states, with the bonus for the clone of the same number."""
    x_LX = state_BLD[b]
    if module.place is not None:
        x_LX = torch.cat([x_LX, module.place.weight[graph.place_BL[b]]], dim=1)
    query_Hd = module.query(x_LX[v]).unflatten(0, (HEADS, -1))
    key_UHd = module.key(x_LX[after]).unflatten(1, (HEADS, -1))
    is_same_U = graph.clone_BL[b, after] == graph.clone_BL[b, v]
    score_UH = (key_UHd * query_Hd).sum(2) / math.sqrt(WIDTH // HEADS)
    share_UH = (score_UH + module.chain_bonus * is_same_U.unsqueeze(1)).softmax(0)
    return share_UH @ module.gate(x_LX[v]).softmax(0)


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize("k", [1, 3])
def test_chains_are_a_mixture_of_k_models_in_each_span(k, boundary):
    graph = make_graph(k, boundary)
    log_emission_BML, chains = make_emission(graph), make_module("chains", k=k)
    ours_B = likelihood(log_emission_BML, chains(make_states(graph), graph), graph)
    for b, spans in SPAN_OF_TARGET.items():
        M, last = int(graph.num_targets_B[b]), int(graph.num_states_B[b]) - 1
        expected = log_emission_BML[b, 0, 0] + log_emission_BML[b, M - 1, last]
        for span in spans:
            own = [log_emission_BML[b, i, states_of(graph, b, i)] for i in span]
            expected = expected + torch.stack(own).sum(0).exp().mean().log()
        assert_same(ours_B[b], expected)


def test_a_large_bonus_leaves_the_chains():
    graph = make_graph()
    state_BLD, spans = make_states(graph), make_module("spans")
    spans.chain_bonus = 60.0
    assert_same(spans(state_BLD, graph).exp(), make_module("chains")(state_BLD, graph).exp())


# ---- blend ----


def blended(chain_share: float, sparse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Blend, learned transitions and chains of one graph."""
    graph = make_graph()
    state_BLD = make_states(graph)
    learned_BLL = make_module("gated", sparse)(state_BLD, graph)
    chain_BLL = parallel_chains(state_BLD, graph)
    return blend(learned_BLL, chain_BLL, chain_share), learned_BLL, chain_BLL


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_blend_interpolates_probabilities(share, sparse):
    blended_BLL, learned_BLL, chain_BLL = blended(share, sparse)
    expected_BLL = (1 - share) * learned_BLL.exp() + share * chain_BLL.exp()
    assert_same(blended_BLL.exp(), expected_BLL)
    assert torch.equal(blended_BLL == -torch.inf, expected_BLL == 0)
    # A state that both lead on from still shares out probability one.
    total_BL = blended_BLL.exp().sum(2)
    is_both_BL = (chain_BLL != -torch.inf).any(2)
    assert is_both_BL.any()
    assert_same(total_BL[is_both_BL], torch.ones_like(total_BL[is_both_BL]))


def test_chains_alone_stay_as_they_are_and_their_gradient_goes_to_the_learned_transitions():
    graph = make_graph()
    _, learned_BLL, chain_BLL = blended(0.5)
    learned_BLL, chain_BLL = (x.detach().requires_grad_() for x in (learned_BLL, chain_BLL))
    ours = blend(learned_BLL, chain_BLL.detach(), 1.0)
    assert torch.equal(ours, chain_BLL)
    likelihood(make_emission(graph), ours, graph).sum().backward()
    likelihood(make_emission(graph), chain_BLL, graph).sum().backward()
    assert learned_BLL.grad.any()
    assert_same(learned_BLL.grad, chain_BLL.grad)


def test_blend_has_finite_gradients():
    # Learned and chain edges, alone and together, and nowhere an edge: all four.
    learned_LL = torch.tensor([-torch.inf, -0.3, -torch.inf, -1.2], dtype=torch.float64)
    chain_LL = torch.tensor([-torch.inf, -torch.inf, -0.7, -0.1], dtype=torch.float64)
    learned_LL.requires_grad_()
    ours = blend(learned_LL, chain_LL, 0.25)
    assert (ours == -torch.inf).tolist() == [True, False, False, False]
    ours[ours != -torch.inf].sum().backward()
    mixed = 0.75 * math.exp(-1.2) / (0.75 * math.exp(-1.2) + 0.25 * math.exp(-0.1))
    assert_same(learned_LL.grad, torch.tensor([0.0, 1.0, 0.0, mixed], dtype=torch.float64))
