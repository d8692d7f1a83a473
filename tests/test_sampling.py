"""Sampled paths: by enumeration, by the posteriors, and what must not change them.

Shapes: B rows, M targets, L states, S samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from exlm_mini.alignment.cases import CASES, Graph, fill_padding, judge, random_graph
from exlm_mini.alignment.enumeration import path_score, paths
from exlm_mini.alignment.sampling import sample_paths
from exlm_mini.alignment.vectorized import log_likelihood

RAGGED = CASES["ragged"]


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def shares(graph: Graph, b: int) -> dict[tuple[int, ...], float]:
    """The posterior probability of every path of row b that has one, by enumeration."""
    row = graph.row(b)
    every = list(paths(int(row.num_targets_B), int(row.num_states_B)))
    score = [float(path_score(row[0][0], row[1][0], path)) for path in every]
    peak = max((s for s in score if s > -math.inf), default=0.0)
    weight = [math.exp(s - peak) for s in score]
    total = math.fsum(weight)
    return {path: w / total for path, w in zip(every, weight, strict=True) if w > 0}


def assert_drawn_from(drawn: list[Hashable], probability: dict[Hashable, float]) -> None:
    """Pearson's statistic stays where chance leaves it, 6 times in a million aside."""
    count = Counter(drawn)
    assert count.keys() <= probability.keys()
    # Outcomes too rare for the normal approximation are counted together.
    rare = {x for x, p in probability.items() if p * len(drawn) < 5}
    bins = [(count[x], p * len(drawn)) for x, p in probability.items() if x not in rare]
    bins.append((sum(count[x] for x in rare), len(drawn) * sum(probability[x] for x in rare)))
    statistic = sum((n - e) ** 2 / max(e, 1.0) for n, e in bins)
    freedom, t = len(bins), 12.0
    # Laurent and Massart (2000), equation 4.3: exceeded with probability at most exp(-t).
    assert statistic <= freedom + 2 * math.sqrt(freedom * t) + 2 * t


@pytest.mark.parametrize(
    "name",
    [
        "ragged",
        "more_targets_than_states",
        "33_states",
        "many_targets",
        "sparse",
        "very_sparse",
        "huge_scores",
        "very_negative_scores",
        "huge_spread",
        "one_likely_edge",
        "impossible_state",
        "ties",
        "two_tied_paths",
        "all_ones",
    ],
)
def test_a_path_is_drawn_as_often_as_it_is_likely(name):
    graph = CASES[name]
    path_BSM = sample_paths(*graph, 4000, generator())
    for b, path_SM in enumerate(path_BSM):
        if probability := shares(graph, b):
            drawn = [tuple(path) for path in path_SM[:, : graph.num_targets_B[b]].tolist()]
            assert_drawn_from(drawn, probability)


@pytest.mark.parametrize("name", CASES)
def test_every_draw_is_a_path_of_the_graph(name):
    graph = CASES[name]
    path_BSM = sample_paths(*graph, 20, generator())
    B, M, _ = graph.log_emission_BML.shape
    assert path_BSM.shape == (B, 20, M) and path_BSM.dtype == torch.int64
    has_path_B = judge(name).log_likelihood_B != -torch.inf
    for b in range(B):
        m, n = int(graph.num_targets_B[b]), int(graph.num_states_B[b])
        assert (path_BSM[b, :, m:] == -1).all()
        for path in path_BSM[b, :, :m].tolist():
            if not has_path_B[b]:
                assert set(path) == {-1}
                continue
            assert path[0] == 0 and path[-1] == n - 1
            assert all(v < u for v, u in pairwise(path))
            assert path_score(graph[0][b], graph[1][b], tuple(path)) > -torch.inf


def test_states_are_visited_as_often_as_the_posterior_says():
    graph = random_graph(1, [12, 9], [40, 30], density=0.7)
    log_emission_BML = graph.log_emission_BML.clone().requires_grad_()
    log_likelihood_B = log_likelihood(log_emission_BML, *graph[1:])
    (state_BML,) = torch.autograd.grad(log_likelihood_B.sum(), log_emission_BML)
    num_samples = 5000
    path_BSM = sample_paths(*graph, num_samples, generator())
    visits_BMSL = path_BSM.transpose(1, 2).unsqueeze(3) == torch.arange(40)
    frequency_BML = visits_BMSL.double().mean(dim=2)
    # Five standard errors, and one visit for states hardly ever seen.
    error_BML = (state_BML * (1 - state_BML) / num_samples).clamp(min=0).sqrt()
    assert ((frequency_BML - state_BML).abs() <= 5 * error_BML + 1 / num_samples).all()


def test_rows_are_drawn_independently():
    graph = random_graph(2, [3, 3], [5, 5])
    twins = Graph(*(t[:1].expand_as(t) for t in graph))
    probability = shares(twins, 0)
    first, second = (
        list(map(tuple, p)) for p in sample_paths(*twins, 4000, generator()).tolist()
    )
    pairs = {(x, y): p * q for x, p in probability.items() for y, q in probability.items()}
    assert_drawn_from(list(zip(first, second, strict=True)), pairs)
    # And so is each sample from the one before.
    assert_drawn_from(list(zip(first[::2], first[1::2], strict=True)), pairs)


def test_the_only_path_is_always_drawn():
    graph = CASES["as_many_targets_as_states"]
    path_BSM = sample_paths(*graph, 50, generator())
    assert (path_BSM[0] == torch.arange(6)).all()
    assert (path_BSM[1] == torch.tensor([0, 1, 2, 3, -1, -1])).all()


def test_a_generator_decides_the_paths():
    first, again = (sample_paths(*RAGGED, 30, generator(3)) for _ in range(2))
    assert torch.equal(first, again)
    used = generator(3)
    sample_paths(*RAGGED, 30, used)
    assert not torch.equal(first, sample_paths(*RAGGED, 30, used))


def test_without_generator_the_global_seed_decides():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = sample_paths(*RAGGED, 30)
        torch.manual_seed(3)
        assert torch.equal(first, sample_paths(*RAGGED, 30))
        assert not torch.equal(first, sample_paths(*RAGGED, 30))


@pytest.mark.parametrize("name", ["ragged", "sparse", "no_path_through_missing_edges"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_padding_changes_nothing(name, value):
    expected = sample_paths(*CASES[name], 30, generator())
    filled = fill_padding(CASES[name], value)
    assert torch.equal(sample_paths(*filled, 30, generator()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_low_precision_are_added_up_in_float64(dtype):
    graph = RAGGED.row(0)
    log_emission_BML = graph.log_emission_BML.clone()
    log_emission_BML[0, -1, -1] = 1e8  # in float32 all other scores would vanish beside it
    low = graph._replace(log_emission_BML=log_emission_BML).to(dtype)
    drawn = [tuple(path) for path in sample_paths(*low, 4000, generator())[0].tolist()]
    assert_drawn_from(drawn, shares(low.to(torch.float64), 0))


def test_scores_that_need_a_gradient_are_read_and_left_alone():
    scores = [t.clone().requires_grad_() for t in RAGGED[:2]]
    path_BSM = sample_paths(*scores, *RAGGED[2:], 30, generator())
    assert torch.equal(path_BSM, sample_paths(*RAGGED, 30, generator()))
    assert torch.equal(scores[0], RAGGED[0]) and torch.equal(scores[1], RAGGED[1])


def test_no_sample_is_an_empty_answer():
    assert sample_paths(*RAGGED, 0).shape == (5, 0, 5)


def spoilt(value: float) -> Tensor:
    """The emission of RAGGED with one read entry replaced in rows 1 and 4."""
    log_emission_BML = RAGGED.log_emission_BML.clone()
    log_emission_BML[1, 1, 5] = log_emission_BML[4, 2, 3] = value
    return log_emission_BML


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_named(value):
    with pytest.raises(ValueError, match=r"rows \[1, 4\] have likelihood nan or infinity"):
        sample_paths(spoilt(value), *RAGGED[1:], 2)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="num_samples must be at least 0, got -1"):
        sample_paths(*RAGGED, -1)
    with pytest.raises(ValueError, match="float64"):
        sample_paths(RAGGED[0].float(), *RAGGED[1:], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_from_the_same_distribution():
    graph = RAGGED.to(device="cuda")
    path_BSM = sample_paths(*graph, 4000, generator(device="cuda"))
    assert path_BSM.device.type == "cuda"
    assert torch.equal(path_BSM, sample_paths(*graph, 4000, generator(device="cuda")))
    for b, path_SM in enumerate(path_BSM.cpu()):
        drawn = [tuple(path) for path in path_SM[:, : RAGGED.num_targets_B[b]].tolist()]
        assert_drawn_from(drawn, shares(RAGGED, b))
