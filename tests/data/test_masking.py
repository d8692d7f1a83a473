"""Masking: counter noise, counts, shares and independence, each within four standard errors.

Shapes: B rows, N tokens of a row, k copies of a token. Noise is a function of counters, so a
statistic that holds once holds always.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.config import MaskingConfig, SpecialIds
from exlm_mini.data.masking import (
    Masker,
    choose_fixed_count,
    counter_uniform,
    geometric_lengths,
    num_masks,
    repeat_tokens,
    span_noise,
)
from exlm_mini.data.units import Units

SPECIAL = SpecialIds()
STRATEGIES = [
    ("fixed_count",), ("bernoulli",), ("spans", 2, 3), ("spans", 2, 3, "geometric"), ("units",),
]  # fmt: skip
WITH_COPIES = [
    (strategy, n) for strategy in STRATEGIES for n in (1, 3) if n == 1 or strategy != ("units",)
]
# From Figure 4: copies, mask ratio, and share of tokens that lose every copy.
FIGURE_4 = [
    (1, 0.0225, 0.0225), (1, 0.15, 0.15), (1, 0.387, 0.387), (1, 0.622, 0.622),
    (1, 0.789, 0.789), (2, 0.15, 0.0225), (2, 0.387, 0.15), (2, 0.622, 0.387),
    (2, 0.789, 0.622), (4, 0.387, 0.0225), (4, 0.622, 0.15), (4, 0.789, 0.387),
    (8, 0.622, 0.0225), (8, 0.789, 0.15),
]  # fmt: skip


def rows(num_rows: int, num_tokens: int, pad_to: int | None = None) -> Tensor:
    """[BOS], ordinary tokens with a [SEP] among them, [EOS] and perhaps padding."""
    token_ids_BN = torch.full((num_rows, pad_to or num_tokens + 2), SPECIAL.pad)
    token_ids_BN[:, 0] = SPECIAL.bos
    token_ids_BN[:, 1 : num_tokens + 1] = 10 + torch.arange(num_tokens) % 50
    token_ids_BN[:, 2] = SPECIAL.sep
    token_ids_BN[:, num_tokens + 1] = SPECIAL.eos
    return token_ids_BN


def masker_of(strategy: tuple, ratio: float, seed: int, num_copies: int = 1) -> Masker:
    """A masker; for the strategy ``units``, units are branches of four tokens and single tokens."""
    units = None
    if strategy == ("units",):
        units = Units(lambda ids: "".join("(CC)C"[i % 5] for i in ids), 60, SPECIAL, True)
    return Masker(MaskingConfig(ratio, *strategy), SPECIAL, seed, num_copies, units=units)


def counters(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Epoch 0 and samples 0, 1, 2, ..."""
    return np.zeros(num_rows, dtype=np.int64), np.arange(num_rows)


def within_four_sigma(found: float, mean: float, variance: float) -> bool:
    return abs(found - mean) <= 4 * math.sqrt(variance) + 1e-12


# ---- counter noise ----


def test_noise_is_the_published_generator():
    # First output of Vigna's splitmix64.c from state 0: 0xE220A8397B1DCDAF.
    assert float(counter_uniform(0)) == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


@pytest.mark.parametrize("axis", range(4))
def test_noise_of_neighbouring_counters_is_independent(axis):
    grid = np.ix_(*[np.arange(20)] * 4)  # seed, epoch, sample, position
    noise = counter_uniform(*grid)
    assert len(np.unique(noise)) == noise.size
    left = noise.take(range(19), axis).reshape(-1)
    right = noise.take(range(1, 20), axis).reshape(-1)
    product = ((left - 0.5) * (right - 0.5)).mean()
    assert within_four_sigma(product, 0, 1 / (144 * len(left)))
    # The pairs are not only uncorrelated, they also fill the unit square evenly.
    cells = (left * 16).astype(int) * 16 + (right * 16).astype(int)
    count_K = np.bincount(cells, minlength=256)
    chi_square = ((count_K - len(left) / 256) ** 2 / (len(left) / 256)).sum()
    assert within_four_sigma(chi_square, 255, 2 * 255)


def test_the_order_and_the_number_of_counters_matter():
    assert float(counter_uniform(1, 2)) != float(counter_uniform(2, 1))
    assert float(counter_uniform(1)) != float(counter_uniform(1, 0))
    assert float(counter_uniform(0, 1)) != float(counter_uniform(1))


# ---- a fixed number per row ----


def test_the_number_of_masks_is_the_expected_one_rounded_alike_in_all_rows_of_a_step():
    """Rounding is up or down at random, but a row with tokens to hide gets at least one mask."""
    lengths_B, num_steps = torch.tensor([0, 1, 2, 7, 20, 30, 30, 50]), 1000
    for ratio in (0.15, 0.25):
        count_SB, other_SB = (
            torch.stack([num_masks(ratio, lengths_B, seed, step) for step in range(num_steps)])
            for seed in (5, 6)
        )
        expected_B = ratio * lengths_B
        low_B = torch.maximum(expected_B.floor(), lengths_B.clamp(max=1))
        assert ((count_SB == low_B) | (count_SB == expected_B.ceil())).all()
        assert torch.equal(count_SB[:, 5], count_SB[:, 6]) and not count_SB.equal(other_SB)
        for mean, expected in zip(
            count_SB[:, 4:].double().mean(0), expected_B[4:], strict=True
        ):
            share = float(expected - expected.floor())
            assert within_four_sigma(
                float(mean), float(expected), share * (1 - share) / num_steps
            )
    assert max(int(num_masks(0.999, torch.tensor([3]), 0, step)) for step in range(50)) <= 3
    # Validation passes one step for each row.
    each_S = num_masks(0.15, lengths_B[5], 5, np.arange(num_steps))
    assert torch.equal(
        each_S,
        torch.stack([num_masks(0.15, lengths_B[5], 5, step) for step in range(num_steps)]),
    )


@pytest.mark.parametrize(("strategy", "num_copies"), WITH_COPIES)
def test_masks_hide_ordinary_tokens_alone(strategy, num_copies):
    token_ids_BN = rows(40, 20, pad_to=30)
    masker = masker_of(strategy, 0.6, 0, num_copies)
    masked_ids_BN, is_masked_BN, repeated_ids_BN = masker(token_ids_BN, *counters(40), step=0)
    assert torch.equal(token_ids_BN, rows(40, 20, pad_to=30))  # the input is unchanged
    assert masked_ids_BN.dtype == repeated_ids_BN.dtype == torch.int64
    assert is_masked_BN.dtype == torch.bool
    assert torch.equal(repeated_ids_BN, repeat_tokens(token_ids_BN, num_copies))
    hidden = set(repeated_ids_BN[is_masked_BN].tolist())
    assert hidden.isdisjoint({SPECIAL.pad, SPECIAL.bos, SPECIAL.eos})
    assert SPECIAL.sep in hidden
    assert torch.equal(masked_ids_BN == SPECIAL.mask, is_masked_BN)
    assert torch.equal(masked_ids_BN[~is_masked_BN], repeated_ids_BN[~is_masked_BN])


@given(st.data())
def test_of_equal_noise_the_earlier_position_is_chosen(data):
    """The choice equals that of a stable sort by noise, whatever the counts of the rows."""
    B, N = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 1000))
    noise_BN = torch.from_numpy(
        np.floor(4 * counter_uniform(seed, *np.ix_(*map(range, (B, N))))) / 4
    )
    is_maskable_BN = noise_BN.roll(1, dims=1) < data.draw(st.sampled_from([0.3, 0.6, 1.0]))
    count_B = torch.tensor(data.draw(st.lists(st.integers(0, N + 2), min_size=B, max_size=B)))
    order_BN = noise_BN.masked_fill(~is_maskable_BN, 2.0).argsort(dim=1, stable=True)
    is_first_BN = torch.arange(N) < count_B.unsqueeze(1)
    expected_BN = torch.zeros_like(is_maskable_BN).scatter_(1, order_BN, is_first_BN)
    chosen_BN = choose_fixed_count(noise_BN, is_maskable_BN, count_B)
    assert torch.equal(chosen_BN, expected_BN & is_maskable_BN)


# ---- spans ----


@given(st.data())
def test_each_token_takes_the_smallest_noise_of_the_spans_that_cover_it(data):
    N = data.draw(st.integers(1, 12))
    lists = st.lists(st.integers(0, 9), min_size=N, max_size=N)
    noise_N, length_N = (torch.tensor(data.draw(lists)) for _ in range(2))
    is_maskable_N = torch.tensor(data.draw(st.lists(st.booleans(), min_size=N, max_size=N)))
    noise_N, length_N = noise_N / 10, length_N.clamp(min=1)
    ours_N = span_noise(noise_N[None], is_maskable_N[None], length_N[None])[0]
    for n in range(N):
        covering = [
            float(noise_N[start])
            for start in range(n + 1)
            if is_maskable_N[start] and start + int(length_N[start]) > n
        ]
        assert ours_N[n] == min(covering, default=2.0)


@pytest.mark.parametrize("law", ["fixed", "geometric"])
def test_spans_of_one_token_are_single_masks(law):
    spans, single = (
        masker_of(strategy, 0.3, 4)(rows(20, 30), *counters(20), step=0).is_masked_BN
        for strategy in (("spans", 2, 1, law), ("fixed_count",))
    )
    assert torch.equal(spans, single)


def test_geometric_lengths_have_the_shares_of_spanbert():
    uniform_X = (np.arange(100_000) + 0.5) / 100_000
    length_X = geometric_lengths(uniform_X, 5)
    assert abs(length_X.mean() - 3.8) < 0.01 and length_X.max() == 10
    share_X = np.bincount(length_X)[1:] / len(uniform_X)
    assert np.allclose(share_X[1:] / share_X[:-1], 0.8, atol=1e-3)


# ---- what masks depend on ----


@pytest.mark.parametrize(("strategy", "num_copies"), WITH_COPIES)
def test_masks_do_not_depend_on_the_grouping_into_batches(strategy, num_copies):
    masker = masker_of(strategy, 0.4, 9, num_copies)
    epoch_B, sample_B = np.array([0, 0, 1, 2, 2, 7]), np.array([4, 5, 4, 0, 1, 123456])
    together = masker(rows(6, 20), epoch_B, sample_B, step=3)
    width = together.is_masked_BN.shape[1]
    for group in ([5, 0, 2], [1], [4, 3]):
        # Padding to another length does not matter either.
        part = masker(rows(len(group), 20, pad_to=31), epoch_B[group], sample_B[group], step=3)
        for ours, whole in zip(part, together, strict=True):
            assert torch.equal(ours[:, :width], whole[group])
        assert not part.is_masked_BN[:, width:].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_counter_changes_the_masks(strategy):
    token_ids_BN = rows(4, 30)

    def masks(seed: int = 1, epoch: int = 0, first: int = 0) -> Tensor:
        epoch_B, sample_B = np.full(4, epoch), first + np.arange(4)
        masker = masker_of(strategy, 0.4, seed)
        return masker(token_ids_BN, epoch_B, sample_B, 0).is_masked_BN

    assert torch.equal(masks(), masks())
    for other in (masks(seed=2), masks(epoch=1), masks(first=4)):
        assert not (other == masks()).all(1).any()
    assert (masks()[1:] != masks()[:1]).any(1).all()


def test_the_length_of_a_span_does_not_depend_on_its_noise():
    config = MaskingConfig(0.05, "spans", span_length=3, span_law="geometric")
    token_ids_BN = torch.full((20, 2000), 10)
    is_masked_BN = Masker(config, SPECIAL, 4)(token_ids_BN, *counters(20), 0).is_masked_BN
    starts_BN = is_masked_BN & ~is_masked_BN.roll(1, dims=1)
    # The mean length is 2.4, and some spans touch.
    assert 2.2 < int(is_masked_BN.sum()) / int(starts_BN.sum()) < 3.2


# ---- independent draws and Repeated MLM ----


@pytest.mark.parametrize(("k", "p", "figure"), FIGURE_4)
def test_the_share_of_lost_tokens_is_that_of_figure_4(k, p, figure):
    N = 40_000
    masker = Masker(MaskingConfig(p, "bernoulli"), SPECIAL, 4, num_copies=k)
    is_masked_BN = masker(rows(400, 100), *counters(400), step=0).is_masked_BN
    is_masked_Nk = is_masked_BN[:, k:-k].reshape(N, k)
    lost = is_masked_Nk.all(dim=1).double().mean().item()
    assert abs(p**k - figure) < 1e-3  # ratios in the figure are rounded
    assert within_four_sigma(lost, p**k, p**k * (1 - p**k) / N)
    # The share of [MASK] in the input does not depend on k.
    share = is_masked_Nk.double().mean().item()
    assert within_four_sigma(share, p, p * (1 - p) / (N * k))


# ---- slots ----


def test_slots_are_masked_and_nothing_else():
    masker = Masker(MaskingConfig(strategy="slots"), SPECIAL, 0, slots=(3, 5))
    is_masked_BN = masker(rows(4, 8), *counters(4), step=0).is_masked_BN
    expected_N = torch.zeros(10, dtype=torch.bool)
    expected_N[[3, 5]] = True
    assert torch.equal(is_masked_BN, expected_N.expand(4, 10))
