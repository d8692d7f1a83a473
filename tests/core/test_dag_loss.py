"""The loss for other people's models: what they pass, and what they get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import assert_all_same

from exlm_mini.alignment import dag_log_likelihood, dag_loss, posteriors, viterbi
from exlm_mini.alignment.check import random_graph


def graph_of(dtype=torch.float64, num_targets=(4, 2, 5), num_states=(9, 6, 12)):
    """Scores that want a gradient, and counts by name."""
    graph = random_graph(3, num_targets, num_states).to(dtype)
    scores = [scores.requires_grad_() for scores in graph[:2]]
    return scores, dict(zip(("num_targets", "num_states"), graph[2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_it_is_the_negative_log_likelihood_whatever_integers_count(dtype):
    scores, counts = graph_of()
    expected = -dag_log_likelihood(*scores, *counts.values())
    expected = [expected, *torch.autograd.grad(expected.sum(), scores)]
    counts = {name: count.to(dtype) for name, count in counts.items()}
    loss_B = dag_loss(*scores, **counts)
    assert_all_same([loss_B, *torch.autograd.grad(loss_B.sum(), scores)], expected, 1e-12)


@pytest.mark.parametrize("as_count", [int, np.int64, torch.tensor])
def test_one_number_counts_for_all_rows(as_count):
    scores, counts = graph_of(num_targets=(4, 4), num_states=(9, 9))
    one = [as_count(number) for number in (4, 9)]
    for function in (
        lambda targets, states: dag_loss(*scores, num_targets=targets, num_states=states),
        lambda *both: dag_log_likelihood(*scores, *both),
        lambda *both: viterbi(*scores, *both)[0],
        lambda *both: posteriors(*scores, *both).edge_BLL,
    ):
        assert torch.equal(function(*one), function(*counts.values()))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (13, "must lie in 1..12, got 13"),
        (0, "must lie in 1..12, got 0"),
        ([1, 12, 13], "must lie in 1..12, got [1, 12, 13]"),
        ([1, 0, 2], "must lie in 1..12, got [1, 0, 2]"),
        (9.0, "one integer or int64 (3,), got torch.float32 ()"),
        (True, "one integer or int64 (3,), got torch.bool ()"),
        ([9, 6], "one integer or int64 (3,), got torch.int64 (2,)"),
    ],
)
def test_a_count_that_is_none_is_refused_by_its_name(count, words):
    scores, counts = graph_of()
    for function in (dag_loss, dag_log_likelihood, posteriors, viterbi):
        for name in counts:
            most = 12 if name == "num_states" else 5
            with pytest.raises(ValueError) as caught:
                function(*scores, **{**counts, name: count})
            assert name in str(caught.value)
            assert words.replace("1..12", f"1..{most}") in str(caught.value)


def test_it_compiles_into_one_graph():
    scores, counts = graph_of(torch.float32)
    compiled = torch.compile(dag_loss, backend="aot_eager", fullgraph=True)
    loss_B, expected_B = compiled(*scores, **counts), dag_loss(*scores, **counts)
    torch.testing.assert_close(loss_B, expected_B)
    ours, theirs = (torch.autograd.grad(x.sum(), scores) for x in (loss_B, expected_B))
    torch.testing.assert_close(ours, theirs)
