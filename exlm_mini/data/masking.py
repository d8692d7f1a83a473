"""Masking: which tokens a model must predict (§2), and Repeated MLM's copies (§3.1).

Shapes: B rows, N input tokens, k copies of a token.

All noise is a pure function of counters (seed, epoch, sample, position): masks need no generator
state, they do not depend on how rows are grouped into batches, and a resumed run draws the same
ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from exlm_mini.config import MaskingConfig, SpecialIds
from exlm_mini.data.units import Units

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class MaskedBatch(NamedTuple):
    """Rows with some tokens hidden.

    ``masked_ids_BN`` (int64) holds the [MASK] id where ``is_masked_BN`` (bool) is true and the
    token elsewhere; ``token_ids_BN`` (int64) holds the tokens before masking.
    """

    masked_ids_BN: Tensor
    is_masked_BN: Tensor
    token_ids_BN: Tensor

    def to(self, device: torch.device) -> MaskedBatch:
        """The same batch on another device."""
        return MaskedBatch(*(t.to(device, non_blocking=True) for t in self))


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """The finaliser of the SplitMix64 generator, in place: a bijection of 64-bit integers."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def counter_uniform(*counters: int | np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) that depend on the counters alone.

    Args:
        counters: non-negative integers or integer arrays that broadcast against each other,
            such as seed, epoch, sample and position. Their order matters.

    Returns:
        float64 of the broadcast shape, 53 random bits each.
    """
    state = np.zeros((1,), dtype=np.uint64)  # one axis: numpy warns when scalars wrap around
    for counter in counters:
        state = _splitmix64((state ^ np.asarray(counter, dtype=np.uint64)) + _GOLDEN_GAMMA)
    shape = np.broadcast_shapes(*(np.shape(c) for c in counters))
    return ((state >> np.uint64(11)) * 2.0**-53).reshape(shape)


def num_masks(
    mask_ratio: float, num_maskable_B: Tensor, seed: int, step: int | np.ndarray
) -> Tensor:
    """Number of masks per row: ``p n`` rounded up or down at random, with mean ``p n``, at least 1.

    The rounding is drawn from (seed, step), the same for every row of an optimiser step, so
    rows of equal length expand to equal length and batches keep static shapes.

    Args:
        mask_ratio: p, the share of maskable tokens to mask.
        num_maskable_B: n, int64, the number of tokens of each row that may be masked.
        step: counter from which the rounding is drawn, one for all rows or one per row.

    Returns:
        int64 (B,), never more than ``num_maskable_B``.
    """
    threshold_B = torch.from_numpy(counter_uniform(seed, step))
    wanted_B = torch.floor(num_maskable_B.double() * mask_ratio + threshold_B).long()
    return torch.minimum(wanted_B.clamp(min=1), num_maskable_B)


def choose_fixed_count(noise_BN: Tensor, is_maskable_BN: Tensor, count_B: Tensor) -> Tensor:
    """The ``count_B`` maskable positions of each row with the smallest noise; bool (B, N).

    Ties are broken by position, so that the choice is unique.
    """
    order_BN = noise_BN.masked_fill(~is_maskable_BN, 2.0).argsort(dim=1, stable=True)
    rank_BN = order_BN.argsort(dim=1)
    return is_maskable_BN & (rank_BN < count_B.unsqueeze(1))


def span_noise(noise_BN: Tensor, is_maskable_BN: Tensor, length_BN: Tensor) -> Tensor:
    """Noise that makes ``choose_fixed_count`` hide spans instead of single tokens; (B, N).

    Every maskable token may start a span, and a token takes the smallest noise of the spans that
    cover it. So spans are hidden in the order of the noise at their starts; the last is cut off
    once the number of masks is reached. Spans may touch, overlap, or be cut off by the row's end.

    Args:
        noise_BN: noise in [0, 1) of the span that starts at each position.
        is_maskable_BN: bool.
        length_BN: int64, length in tokens of the span that starts at each position; 1 everywhere
            hides single tokens.
    """
    start_BN = noise_BN.masked_fill(~is_maskable_BN, 2.0)
    spans_BN = start_BN.clone()
    for offset in range(1, int(length_BN.max())):
        reaches_BN = start_BN.masked_fill(length_BN <= offset, 2.0)[:, :-offset]
        spans_BN[:, offset:] = torch.minimum(spans_BN[:, offset:], reaches_BN)
    return spans_BN


def unit_noise(
    units_B: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
    seed: int,
    epoch_B: np.ndarray,
    sample_B: np.ndarray,
) -> Tensor:
    """Noise that makes ``choose_fixed_count`` hide units, by the rule of ``span_noise``; (B, N).

    Args:
        units_B: units of each row, as the positions of their tokens; every token is in at least
            one unit.
        num_tokens: N.
        seed, epoch_B, sample_B: counters from which the noise of a unit is drawn, together with
            its first and last position.
    """
    row_U = np.repeat(np.arange(len(units_B)), [len(units) for units in units_B])
    units_U = [unit for units in units_B for unit in units]
    size_U = [len(unit) for unit in units_U]
    end_U = np.cumsum(size_U)
    place_X = np.concatenate(units_U)
    ends_U = place_X[end_U - size_U], place_X[end_U - 1]
    noise_U = counter_uniform(seed, epoch_B[row_U], sample_B[row_U], *ends_U)
    noise_BN = np.full((len(units_B), num_tokens), 2.0)
    covered_X = np.repeat(row_U, size_U), place_X
    np.minimum.at(noise_BN, covered_X, np.repeat(noise_U, size_U))
    return torch.from_numpy(noise_BN)


def geometric_lengths(uniform_BN: np.ndarray, mean: int) -> np.ndarray:
    """Draw lengths n from 1 to twice the mean, with P(n) proportional to (1 - 1/mean)^n; int64.

    SpanBERT (Joshi et al. 2020, §3.1) uses a mean of 5, which the cut at 10 lowers to 3.8.
    """
    weight_X = (1 - 1 / mean) ** np.arange(2 * mean)
    return 1 + np.searchsorted(weight_X.cumsum() / weight_X.sum(), uniform_BN, side="right")


def repeat_tokens(token_ids_BN: Tensor, num_copies: int) -> Tensor:
    """Repeat every token ``num_copies`` times, for Repeated MLM (§3.1).

    ``[a b c]`` becomes ``[a a b b c c]`` for two copies; shape (B, N * num_copies).
    """
    return token_ids_BN.repeat_interleave(num_copies, dim=1)


def is_inner(token_ids_BN: Tensor, special_ids: SpecialIds) -> Tensor:
    """Which tokens belong to the text: neither padding nor [BOS] nor [EOS]; bool, any shape."""
    frame = [special_ids.pad, special_ids.bos, special_ids.eos]
    return ~torch.isin(token_ids_BN, token_ids_BN.new_tensor(frame))


@dataclass(frozen=True)
class Masker:
    """Hides tokens of a batch according to the masking settings.

    Every hidden token becomes [MASK]; none is kept or replaced by a random one, as in the released
    command.
    Padding, [BOS] and [EOS] are never masked; [SEP] is a token like any other.
    """

    masking: MaskingConfig
    special_ids: SpecialIds
    seed: int
    num_copies: int = 1
    """Copies of each token, masked independently of each other; above 1 for Repeated MLM."""
    slots: tuple[int, ...] = ()
    """Positions masked by the strategy ``slots``, counted from 0 at [BOS]."""
    units: Units | None = None
    """Finds the tokens that the strategy ``units`` hides together. Units with more tokens than the
    row has masks are not used, so the first unit drawn is always hidden whole."""

    def __call__(
        self,
        token_ids_BN: Tensor,
        epoch_B: np.ndarray,
        sample_B: np.ndarray,
        step: int | np.ndarray,
    ) -> MaskedBatch:
        """Mask one batch.

        Args:
            token_ids_BN: int64 on the CPU, padded with the pad id.
            epoch_B, sample_B: epoch and number of each row, from which its masks are drawn.
            step: optimiser step, from which the rounding of the number of masks is drawn; see
                ``num_masks``.

        Returns:
            The batch; N is multiplied by ``num_copies``.
        """
        if self.num_copies > 1:
            token_ids_BN = repeat_tokens(token_ids_BN, self.num_copies)
        is_maskable_BN = is_inner(token_ids_BN, self.special_ids)
        is_masked_BN = self.choose(token_ids_BN, is_maskable_BN, epoch_B, sample_B, step)
        masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, self.special_ids.mask)
        return MaskedBatch(masked_ids_BN, is_masked_BN, token_ids_BN)

    def choose(
        self,
        token_ids_BN: Tensor,
        is_maskable_BN: Tensor,
        epoch_B: np.ndarray,
        sample_B: np.ndarray,
        step: int | np.ndarray,
    ) -> Tensor:
        """Positions to mask among the maskable ones, bool (B, N); arguments as for ``__call__``."""
        if self.masking.strategy == "slots":
            is_slot_N = torch.zeros(is_maskable_BN.shape[1], dtype=torch.bool)
            is_slot_N[list(self.slots)] = True
            return is_maskable_BN & is_slot_N
        count_B = num_masks(self.masking.mask_ratio, is_maskable_BN.sum(1), self.seed, step)
        if self.masking.strategy == "units":
            assert self.units is not None
            rows = zip(token_ids_BN.tolist(), count_B.tolist(), strict=True)
            units_B = [self.units(row, count) for row, count in rows]
            noise_BN = unit_noise(units_B, token_ids_BN.shape[1], self.seed, epoch_B, sample_B)
            return choose_fixed_count(noise_BN, is_maskable_BN, count_B)
        position_N = np.arange(is_maskable_BN.shape[1])
        counters = (self.seed, epoch_B[:, None], sample_B[:, None], position_N[None, :])
        noise_BN = torch.from_numpy(counter_uniform(*counters))
        if self.masking.strategy == "bernoulli":
            return is_maskable_BN & (noise_BN < self.masking.mask_ratio)
        if self.masking.strategy == "spans":
            length_BN = np.full(noise_BN.shape, self.masking.span_length)
            if self.masking.span_law == "geometric":
                length_BN = geometric_lengths(counter_uniform(*counters, 1), length_BN[0, 0])
            noise_BN = span_noise(noise_BN, is_maskable_BN, torch.from_numpy(length_BN))
        elif self.masking.strategy != "fixed_count":
            assert_never(self.masking.strategy)
        return choose_fixed_count(noise_BN, is_maskable_BN, count_B)
