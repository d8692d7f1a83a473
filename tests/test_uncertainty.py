"""Divergence of clones and calibration, in closed form and by brute force.

Shapes: k distributions, R predictions, V words.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from exlm_lab.experiments.uncertainty import (
    calibration_error,
    divergence_bits,
    effective_number,
    pairwise_divergence_bits,
)


def random_p(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(dim=-1)


# ---- divergence ----


@given(st.integers(2, 5), st.integers(2, 7), st.integers(0, 99))
def test_pairwise_divergence_is_the_mean_of_scipys(k, V, seed):
    p_3kV = random_p(3, k, V, seed=seed)
    for found, p_kV in zip(pairwise_divergence_bits(p_3kV), p_3kV.numpy(), strict=True):
        pairs = [jensenshannon(p, q, base=2) ** 2 for p, q in itertools.combinations(p_kV, 2)]
        assert found.item() == pytest.approx(np.mean(pairs), abs=1e-12)


@given(st.integers(1, 5), st.integers(2, 7), st.integers(0, 99))
def test_divergence_is_what_a_word_tells_of_its_clone(k, V, seed):
    # Mutual information of clone and word, from their joint distribution.
    p_kV, weight_k = random_p(k, V, seed=seed), random_p(k, seed=seed + 100)
    joint_kV = weight_k.unsqueeze(1) * p_kV
    product_kV = weight_k.unsqueeze(1) * joint_kV.sum(dim=0)
    information = (joint_kV * (joint_kV / product_kV).log2()).sum().item()
    assert divergence_bits(p_kV, 7 * weight_k).item() == pytest.approx(information, abs=1e-12)
    assert information <= math.log2(effective_number(weight_k).item()) + 1e-12


def test_equal_weights_of_two_give_the_pairwise_divergence():
    p_kV = random_p(4, 2, 6)
    found = divergence_bits(p_kV, torch.ones(4, 2, dtype=torch.float64))
    torch.testing.assert_close(found, pairwise_divergence_bits(p_kV))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_clones_without_a_common_word_are_one_bit_apart(k):
    p_kV = torch.eye(k, dtype=torch.float64)
    assert pairwise_divergence_bits(p_kV).item() == pytest.approx(1)
    assert divergence_bits(p_kV, torch.ones(k)).item() == pytest.approx(math.log2(k))


def test_one_clone_has_no_pair():
    with pytest.raises(ValueError, match="1 distribution has no pair"):
        pairwise_divergence_bits(random_p(1, 4))


@pytest.mark.parametrize(
    ("weight", "number"),
    [([1, 0, 0], 1), ([2, 2, 0, 0], 2), ([1, 1, 1, 1], 4), ([1, 3], 4 / 3**0.75)],
)
def test_effective_number_in_closed_form(weight, number):
    assert effective_number(torch.tensor(weight).double()).item() == pytest.approx(number)


# ---- calibration ----


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 99))
def test_the_error_is_that_of_bins_of_equal_size(R, num_bins, seed):
    confidence_R, chance_R = (
        random_p(R, 3, seed=seed)[:, 0],
        random_p(R, 3, seed=seed + 1)[:, 0],
    )
    order_R = np.argsort(confidence_R.numpy(), kind="stable")
    bins = np.array_split(order_R, min(num_bins, R))
    gaps = [(confidence_R[bin].mean() - chance_R[bin].mean()).abs() * len(bin) for bin in bins]
    found = calibration_error(confidence_R, chance_R, num_bins)
    assert found == pytest.approx(sum(gaps).item() / R)


def test_predictions_that_come_true_as_often_as_they_say_are_calibrated():
    confidence_R = random_p(500, 4).amax(dim=1)
    assert calibration_error(confidence_R, confidence_R) == 0
    # One that is right always, and half as sure, is off by a half.
    assert calibration_error(torch.full((40,), 0.5), torch.ones(40)) == pytest.approx(0.5)


def test_calibration_does_not_depend_on_the_order():
    confidence_R, chance_R = random_p(100, 4).amax(dim=1), random_p(100, 2, seed=1)[:, 0]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert calibration_error(confidence_R, chance_R) == pytest.approx(
        calibration_error(confidence_R[order], chance_R[order])
    )
