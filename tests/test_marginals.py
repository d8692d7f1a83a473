"""Tokens by themselves: against the joint probability of every filling of a tiny vocabulary.

Shapes: B rows, M targets, L states, V vocabulary.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import CASES, all_ones_graph, fill_padding
from hard_graphs import judge, with_score
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same, drawn
from torch import Tensor

from exlm_mini.alignment import posteriors
from exlm_mini.alignment.check import Graph, random_graph
from exlm_mini.alignment.enumeration import log_likelihood
from exlm_mini.alignment.marginals import marginal_token_log_probs

V = 3
RAGGED = CASES["ragged"]


def token_log_probs(graph: Graph) -> Tensor:
    """Random log P_u(w) of every state, (B, L, V)."""
    B, _, L = graph.log_emission_BML.shape
    return (2 * drawn(B, L, V, seed=5).detach()).log_softmax(dim=2)


def emission_of(known: list[int | None], log_prob_LV: Tensor) -> Tensor:
    """log P_u(y_i) (1, M, L) of one row: 0 where a target is not known."""
    nothing_L = torch.zeros_like(log_prob_LV[:, 0])
    return torch.stack([nothing_L if w is None else log_prob_LV[:, w] for w in known])[None]


def log_joints(row: Graph, log_prob_LV: Tensor) -> Tensor:
    """log P(filling, path of this length) of a row, one axis of V for each target."""
    M = int(row.num_targets_B)
    log_joint = [
        log_likelihood(emission_of(list(filling), log_prob_LV), *row[1:])
        for filling in itertools.product(range(V), repeat=M)
    ]
    return torch.cat(log_joint).view([V] * M)


def log_shares(log_joint: Tensor, i: int) -> Tensor:
    """Summed over all other targets and divided by the whole: log P(y_i = w), (V,)."""
    log_sum_V = log_joint.movedim(i, 0).reshape(log_joint.shape[i], -1).logsumexp(dim=1)
    return log_sum_V - log_joint.flatten().logsumexp(dim=0)


@given(
    seed=st.integers(0, 2**31),
    known=st.lists(st.sampled_from([None, None, 0, 1, 2]), min_size=1, max_size=4),
    num_more=st.integers(-1, 5),
    density=st.sampled_from([0.3, 0.7, 1.0]),
)
@settings(max_examples=25)
def test_given_other_tokens_marginals_are_ratios_of_joints(seed, known, num_more, density):
    """Before any token is known, they are sums over all fillings."""
    M = len(known)
    graph = random_graph(seed, [M], [max(1, M + num_more)], density)
    log_prob_BLV = token_log_probs(graph)
    log_joint = log_joints(graph, log_prob_BLV[0])
    log_joint = log_joint[tuple(slice(None) if w is None else slice(w, w + 1) for w in known)]
    log_emission_BML = emission_of(known, log_prob_BLV[0])
    ours_MV = marginal_token_log_probs(log_prob_BLV, log_emission_BML, *graph[1:])[0]
    has_path = bool((log_joint != -torch.inf).any())
    for i, w in enumerate(known):
        if not has_path:
            assert (ours_MV[i] == -torch.inf).all()
        elif w is None:
            assert_same(ours_MV[i], log_shares(log_joint, i), 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_known_target_is_drawn_once_more_from_its_state(name):
    """So that the probabilities of tokens sum to one where there is a path."""
    graph, verdict = CASES[name], judge(name)
    log_prob_BLV = token_log_probs(graph)
    ours_BMV = marginal_token_log_probs(log_prob_BLV, *graph)
    state_BML = posteriors(*graph, "vectorized").state_BML
    assert_same(ours_BMV.exp(), state_BML @ log_prob_BLV.exp())
    is_target_BM = torch.arange(state_BML.shape[1]) < graph.num_targets_B.unsqueeze(1)
    is_read_BM = is_target_BM & (verdict.log_likelihood_B != -torch.inf).unsqueeze(1)
    assert torch.equal((ours_BMV != -torch.inf).all(2), is_read_BM)


@pytest.mark.parametrize("nats", [1.0, 100.0, 10_000.0])
def test_a_token_of_unlikely_states_keeps_its_digits(nats):
    """Three states can emit the middle target; token 1 is of the two unlikely ones alone."""
    graph = all_ones_graph([3], [5])
    log_transition_BLL = graph.log_transition_BLL.clone()
    log_transition_BLL[0, 0, 2:4] = -nats
    certain, rare = [0.0, -math.inf], [-nats, -0.5]
    log_prob_BLV = torch.tensor([[certain, certain, rare, rare, certain]]).double()
    ours_MV = marginal_token_log_probs(
        log_prob_BLV, graph.log_emission_BML, log_transition_BLL, *graph[2:]
    )[0]
    log_total = math.log1p(2 * math.exp(-nats))
    first = math.log1p(2 * math.exp(-2 * nats)) - log_total
    second = math.log(2) - nats - 0.5 - log_total
    assert ours_MV[1].tolist() == pytest.approx([first, second], rel=1e-12)
    assert ours_MV[[0, 2]].tolist() == [certain] * 2


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_scores_of_any_size_are_mixed(shift):
    """Not probabilities any more, but a sum is a sum: every token gains what its states do."""
    log_prob_BLV = token_log_probs(RAGGED)
    ours_BMV = marginal_token_log_probs(log_prob_BLV + shift, *CASES["huge_scores"])
    expected_BMV = marginal_token_log_probs(log_prob_BLV, *RAGGED)
    assert_same(ours_BMV, expected_BMV + shift, 1e-7)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_padding_changes_nothing(value):
    log_prob_BLV = token_log_probs(RAGGED)
    expected_BMV = marginal_token_log_probs(log_prob_BLV, *RAGGED)
    is_beyond_BL = torch.arange(8) >= RAGGED.num_states_B.unsqueeze(1)
    filled_BLV = log_prob_BLV.masked_fill(is_beyond_BL.unsqueeze(2), value)
    ours_BMV = marginal_token_log_probs(filled_BLV, *fill_padding(RAGGED, value))
    assert torch.equal(ours_BMV, expected_BMV)


@pytest.mark.parametrize("name", ["ragged", "one_target_many_states"])
def test_what_is_no_number_is_seen_in_its_row_alone(name):
    graph = CASES[name]
    log_prob_BLV = token_log_probs(graph)
    expected_BMV = marginal_token_log_probs(log_prob_BLV, *graph)
    spoilt = with_score(graph, "log_emission_BML", (2, 0, 0), math.nan)
    ours_BMV = marginal_token_log_probs(log_prob_BLV, *spoilt)
    others = [b for b in range(len(ours_BMV)) if b != 2]
    assert torch.equal(ours_BMV[others], expected_BMV[others])
    assert ours_BMV[2, : graph.num_targets_B[2]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_token_probabilities(dtype):
    log_prob_BLV = token_log_probs(RAGGED).to(dtype)
    low = RAGGED.to(dtype)
    ours_BMV = marginal_token_log_probs(log_prob_BLV, *low)
    exact_BMV = marginal_token_log_probs(log_prob_BLV.double(), *low.to(torch.float64))
    assert torch.equal(ours_BMV, exact_BMV.to(dtype))


def test_arguments_that_do_not_fit_are_named():
    log_prob_BLV = token_log_probs(RAGGED)
    with pytest.raises(ValueError, match=r"\(5, 8, V\) .*\(5, 5, 8\), got \(5, 7, 3\)"):
        marginal_token_log_probs(log_prob_BLV[:, :7], *RAGGED)
    with pytest.raises(ValueError, match="float32"):
        marginal_token_log_probs(log_prob_BLV, RAGGED[0].float(), *RAGGED[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_numbers():
    log_prob_BLV = token_log_probs(RAGGED)
    ours_BMV = marginal_token_log_probs(log_prob_BLV.cuda(), *RAGGED.to(device="cuda"))
    assert_same(ours_BMV.cpu(), marginal_token_log_probs(log_prob_BLV, *RAGGED))
