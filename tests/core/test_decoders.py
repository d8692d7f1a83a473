"""Decoding without targets, against its definition and against all paths of a small graph.

Shapes: B rows, L states, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_mini.alignment import best_path, greedy, lookahead
from exlm_mini.alignment.check import random_graph

GRAPHS = {
    "seed": st.integers(0, 2**31),
    "num_states": st.lists(st.integers(1, 8), min_size=1, max_size=3),
    "density": st.sampled_from([0.3, 0.8, 1.0]),
}


def drawn(seed, num_states, density):
    """Random log_token_BLV and log_transition_BLL, with NaN in padding, and num_states_B."""
    graph = random_graph(seed, [1] * len(num_states), num_states, density)
    rng = torch.Generator().manual_seed(seed)
    B, L = len(num_states), max(num_states)
    log_token_BLV = torch.randn(B, L, 5, generator=rng, dtype=torch.float64).log_softmax(2)
    is_beyond_BL = torch.arange(L) >= graph.num_states_B.unsqueeze(1)
    return (
        log_token_BLV.masked_fill(is_beyond_BL.unsqueeze(2), math.nan),
        graph.log_transition_BLL.masked_fill(is_beyond_BL.unsqueeze(1), math.nan),
        graph.num_states_B,
    )


def scores_of_paths(log_token_LV, log_transition_LL, L):
    """log P(path, likeliest tokens on it) of every path, whatever its length."""
    log_best, log_edge = log_token_LV.amax(1).tolist(), log_transition_LL.tolist()
    inner = range(1, L - 1)
    paths = [(0,)] if L == 1 else [
        (0, *chosen, L - 1) for n in range(L - 1) for chosen in combinations(inner, n)
    ]  # fmt: skip
    return {
        path: math.fsum(log_best[u] for u in path)
        + math.fsum(log_edge[v][u] for v, u in pairwise(path))
        for path in paths
    }


@pytest.mark.parametrize("decode", [best_path, greedy, lookahead])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_wrong_score_of_a_token_ends_the_walk_with_a_score_that_shows_it(decode, wrong):
    log_token_BLV, log_transition_BLL, _ = drawn(0, [6], 1.0)
    for state in range(6):
        bad_BLV = log_token_BLV.clone()
        bad_BLV[0, state, 1] = wrong
        decoded = decode(bad_BLV, log_transition_BLL, 6)
        is_met = state in decoded.path_BM[0].tolist()
        assert bool(decoded.log_score_B.isfinite()) == (not is_met)
        assert is_met or decode is greedy


@given(**GRAPHS)
@settings(max_examples=60)
def test_the_best_path_is_the_best_of_all_and_the_others_are_paths(seed, num_states, density):
    arguments = drawn(seed, num_states, density)
    for decode in (best_path, greedy, lookahead):
        decoded = decode(*arguments)
        for b, L in enumerate(num_states):
            scored = scores_of_paths(arguments[0][b], arguments[1][b], L)
            path = tuple(u for u in decoded.path_BM[b].tolist() if u >= 0)
            score = decoded.log_score_B[b].item()
            assert score == pytest.approx(scored.get(path, -math.inf), abs=1e-9)
            best = max(scored.values())
            assert score <= best + 1e-9
            if decode is best_path:
                assert score == pytest.approx(best, abs=1e-9)
            likeliest = arguments[0][b, list(path)].argmax(1).tolist()
            rest = decoded.path_BM.shape[1] - len(path)
            assert decoded.token_ids_BM[b].tolist() == likeliest + [-1] * rest


@given(**GRAPHS)
@settings(max_examples=60)
def test_each_step_is_the_likeliest_alone_or_with_its_token(seed, num_states, density):
    log_token_BLV, log_transition_BLL, counts = drawn(seed, num_states, density)
    for decode, weight in ((greedy, 0.0), (lookahead, 1.0)):
        path_BM = decode(log_token_BLV, log_transition_BLL, counts).path_BM
        for b, L in enumerate(num_states):
            log_best = log_token_BLV[b].amax(1).tolist()
            state, path = 0, [0]
            while state < L - 1:
                score = {
                    u: log_transition_BLL[b, state, u].item() + weight * log_best[u]
                    for u in range(state + 1, L)
                }
                state = max(score, key=score.__getitem__)
                if score[state] == -math.inf:
                    break
                path.append(state)
            assert path_BM[b, : len(path)].tolist() == path
            assert (path_BM[b, len(path) :] == -1).all()


@pytest.mark.parametrize("decode", [greedy, lookahead, best_path])
def test_edges_by_reach_half_precision_and_no_rows(decode):
    log_token_BLV, log_transition_BLL, _ = drawn(2, [6, 6], 1.0)
    is_far_LL = torch.ones(6, 6, dtype=torch.bool).triu(3)
    dense_BLL = log_transition_BLL.masked_fill(is_far_LL, -torch.inf)
    padded_BLX = torch.nn.functional.pad(dense_BLL, (0, 2), value=-torch.inf)
    banded_BLT = torch.stack([padded_BLX[:, v, v + 1 : v + 3] for v in range(6)], dim=1)
    for ours, same in zip(
        decode(log_token_BLV, banded_BLT, 6), decode(log_token_BLV, dense_BLL, 6), strict=True
    ):
        assert torch.equal(ours, same)
    low = decode(log_token_BLV.bfloat16(), dense_BLL.bfloat16(), 6)
    assert low.log_score_B.dtype == torch.float32
    nothing = decode(log_token_BLV[:0], dense_BLL[:0], 6)
    assert nothing.path_BM.shape == nothing.token_ids_BM.shape == (0, 0)
    with pytest.raises(ValueError, match=r"log_token must be \(B, L, V\)"):
        decode(log_token_BLV[0], dense_BLL, 6)
