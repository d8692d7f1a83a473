"""The loss for other people's models: what they pass, and what they get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import assert_all_same

from exlm_mini.alignment import (
    dag_log_likelihood,
    dag_loss,
    posteriors,
    torch_dag_loss,
    viterbi,
)
from exlm_mini.alignment.check import random_graph


def graph_of(dtype=torch.float64, num_targets=(4, 2, 5), num_states=(9, 6, 12)):
    """Scores that want a gradient, and counts by name."""
    graph = random_graph(3, num_targets, num_states).to(dtype)
    scores = [scores.requires_grad_() for scores in graph[:2]]
    return scores, dict(zip(("num_targets", "num_states"), graph[2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_it_is_the_negative_log_likelihood_whatever_integers_count(dtype):
    """Also under the names of DA-Transformer, in its order."""
    scores, counts = graph_of()
    expected = -dag_log_likelihood(*scores, *counts.values())
    expected = [expected, *torch.autograd.grad(expected.sum(), scores)]
    counts = {name: count.to(dtype) for name, count in counts.items()}
    for loss_B in (
        dag_loss(*scores, **counts),
        -torch_dag_loss(*scores, counts["num_states"], counts["num_targets"]),
    ):
        assert_all_same([loss_B, *torch.autograd.grad(loss_B.sum(), scores)], expected, 1e-12)


@pytest.mark.parametrize("reach", [1, 3])
def test_edges_by_how_far_they_reach_are_those_of_a_matrix_with_a_band(reach):
    (emission, _), counts = graph_of()
    L = emission.shape[2]
    banded = torch.randn(3, L, reach, dtype=torch.float64).log_softmax(2).requires_grad_()
    dense = torch.full((3, L, L), -torch.inf, dtype=torch.float64)
    for t in range(reach):
        dense.diagonal(1 + t, 1, 2).copy_(banded.detach()[:, : L - 1 - t, t])
    dense.requires_grad_()
    loss, expected = (dag_loss(emission, edges, **counts) for edges in (banded, dense))
    torch.testing.assert_close(loss, expected)
    is_finite = expected.isfinite()
    loss[is_finite].sum().backward()
    expected[is_finite].sum().backward()
    for t in range(reach):
        ours, theirs = banded.grad[:, : L - 1 - t, t], dense.grad.diagonal(1 + t, 1, 2)
        torch.testing.assert_close(ours, theirs)
        assert not banded.grad[:, L - 1 - t :, t].any()


@pytest.mark.parametrize("as_count", [int, np.int64, torch.tensor])
def test_one_number_counts_for_all_rows(as_count):
    """In the loss, under the names of DA-Transformer, and in every function of a graph."""
    scores, counts = graph_of(num_targets=(4, 4), num_states=(9, 9))
    one = [as_count(number) for number in (4, 9)]
    for function in (
        lambda targets, states: dag_loss(*scores, num_targets=targets, num_states=states),
        lambda targets, states: torch_dag_loss(*scores, states, targets),
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


@pytest.mark.parametrize("reach", [None, 4])
def test_it_compiles_into_one_graph(reach):
    (emission, transition), counts = graph_of(torch.float32)
    if reach is not None:
        transition = transition.detach()[:, :, :reach].clone().requires_grad_()
    scores = (emission, transition)
    compiled = torch.compile(dag_loss, backend="aot_eager", fullgraph=True)
    loss_B, expected_B = compiled(*scores, **counts), dag_loss(*scores, **counts)
    torch.testing.assert_close(loss_B, expected_B)
    ours, theirs = (torch.autograd.grad(x.sum(), scores) for x in (loss_B, expected_B))
    torch.testing.assert_close(ours, theirs)
