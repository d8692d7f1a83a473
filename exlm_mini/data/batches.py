"""The batches of each step, a pure function of (seed, step), so resuming needs no saved state.

Shapes: R rows of a pack, B rows of a batch, N tokens of a row.

The rows do not depend on the number of processes either: process r of W works on the micro-batches
numbered ``micro * W + r`` within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.packs import Pack

BUCKET_BATCHES = 64
"""Number of batches in a window, within which rows of unequal length are sorted by length."""

VALIDATION_EPOCH = 1 << 40
"""Epoch number from which validation masks are drawn; training never reaches it."""


def epoch_order(lengths_R: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Order in which one epoch visits the rows, each of them once.

    Rows of unequal length (molecules) are bucketed: the random order is cut into windows of
    ``BUCKET_BATCHES`` batches, each window is sorted by length, and its batches are shuffled,
    so a batch holds rows of similar length and little padding. The rows that complete the last
    batch of the previous epoch, and those left over for the first batch of the next epoch, stay in
    random order.

    Returns:
        int64 permutation of 0..R-1.
    """
    random = np.random.default_rng([seed, epoch])
    order_R = random.permutation(len(lengths_R))
    if lengths_R.min() == lengths_R.max():
        return order_R
    begin = min(-epoch * len(order_R) % batch_size, len(order_R))
    end = len(order_R) - (len(order_R) - begin) % batch_size
    pieces = [order_R[:begin]]
    window = BUCKET_BATCHES * batch_size
    for start in range(begin, end, window):
        rows = order_R[start : min(start + window, end)]
        rows = rows[np.argsort(lengths_R[rows], kind="stable")]
        batches = rows.reshape(-1, batch_size)
        pieces.append(random.permutation(batches).reshape(-1))
    return np.concatenate([*pieces, order_R[end:]])


class TrainingBatches:
    """Masked training batches of a pack, looked up by step.

    A batch may hold the last rows of one epoch and the first rows of the next.

    Args:
        batch_size: rows per step, over all processes.
        micro_size: rows per micro-batch; None gives each process a single micro-batch.
    """

    def __init__(
        self,
        pack: Pack,
        masker: Masker,
        batch_size: int,
        seed: int,
        micro_size: int | None = None,
    ) -> None:
        self.pack, self.masker, self.batch_size, self.seed = pack, masker, batch_size, seed
        self.micro_size = micro_size
        self._order = lru_cache(maxsize=2)(
            lambda epoch: epoch_order(pack.lengths_R, batch_size, seed, epoch)
        )

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers and epochs of a step's samples, each (B,)."""
        sample_B = step * self.batch_size + np.arange(self.batch_size)
        epoch_B, place_B = np.divmod(sample_B, len(self.pack))
        row_B = np.empty_like(place_B)
        for epoch in np.unique(epoch_B):
            of_epoch = epoch_B == epoch
            row_B[of_epoch] = self._order(int(epoch))[place_B[of_epoch]]
        return row_B, epoch_B

    def parts(self, step: int, rank: int = 0, world_size: int = 1) -> list[MaskedBatch]:
        """The micro-batches of a step that process ``rank`` works on, on the CPU."""
        size = self.micro_size or self.batch_size // world_size
        row_B, epoch_B = self.rows(step)
        starts = range(rank * size, self.batch_size, world_size * size)
        own = (slice(start, start + size) for start in starts)
        return [
            _masked(self.pack, self.masker, row_B[rows], epoch_B[rows], step) for rows in own
        ]


class TokenBatches:
    """Masked batches with about the same number of tokens each, looked up by step (Table 7).

    Rows are sorted by length, longest first, with rows of equal length in random order. Each
    micro-batch takes as many rows as fit, padding included, and the micro-batches are shuffled, as
    with fairseq's ``--max-tokens``. The sorted lengths are the same in every epoch, and so is the
    number of micro-batches; a step can find its micro-batches without visiting earlier steps.

    Args:
        num_tokens: largest size of a micro-batch, in tokens before expansion: its number of rows
            times the length of the longest.
        num_parts: micro-batches per step, over all processes.
    """

    def __init__(
        self, pack: Pack, masker: Masker, num_tokens: int, num_parts: int, seed: int
    ) -> None:
        self.pack, self.masker, self.num_parts, self.seed = pack, masker, num_parts, seed
        falling_R = np.sort(pack.lengths_R)[::-1]
        if falling_R[0] > num_tokens:
            raise UserError(
                f"the longest row has {falling_R[0]} tokens, more than the {num_tokens} of a "
                "micro-batch; raise train.micro_batch_tokens (or train.batch_tokens)"
            )
        starts = [0]
        while starts[-1] < len(falling_R):
            starts.append(starts[-1] + num_tokens // int(falling_R[starts[-1]]))
        self.starts = np.minimum(starts, len(falling_R))
        """Index of each micro-batch's first row in the sorted order; the last entry is R."""
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw one epoch: its rows by falling length, and the order of its micro-batches."""
        random = np.random.default_rng([self.seed, epoch])
        row_R = random.permutation(len(self.pack))
        row_R = row_R[np.argsort(-self.pack.lengths_R[row_R], kind="stable")]
        return row_R, random.permutation(len(self.starts) - 1)

    def rows(self, part: int) -> tuple[np.ndarray, int]:
        """Row numbers (B,) and epoch of micro-batch ``part``, counted from the start of the run."""
        epoch, place = divmod(part, len(self.starts) - 1)
        row_R, order = self._order(epoch)
        start, end = self.starts[order[place] : order[place] + 2]
        return row_R[start:end], epoch

    def parts(self, step: int, rank: int = 0, world_size: int = 1) -> list[MaskedBatch]:
        """The micro-batches of a step that process ``rank`` works on, on the CPU."""
        own = range(rank, self.num_parts, world_size)
        rows = (self.rows(step * self.num_parts + micro) for micro in own)
        return [_masked(self.pack, self.masker, *some, step) for some in rows]


def validation_batches(
    pack: Pack,
    masker: Masker,
    num_rows: int,
    batch_size: int,
    numbers: Iterable[int] | None = None,
) -> Iterator[MaskedBatch]:
    """Masked batches of ``num_rows`` rows in order of length; every call draws the same masks.

    Args:
        num_rows: number of rows, which ``Pack.spread`` chooses.
        batch_size: rows per batch; the last batch may have fewer.
        numbers: which batches to make, counted from 0; None makes all of them.
    """
    row_R = pack.spread(num_rows)
    row_R = row_R[np.argsort(pack.lengths_R[row_R], kind="stable")]
    for number in range(-(-len(row_R) // batch_size)) if numbers is None else numbers:
        row_B = row_R[number * batch_size : (number + 1) * batch_size]
        # With the row number as the step, the number of masks is rounded for each row separately:
        # one draw for all rows would favour one seed over another.
        yield _masked(pack, masker, row_B, VALIDATION_EPOCH, row_B)


def _masked(
    pack: Pack,
    masker: Masker,
    row_B: np.ndarray,
    epoch_B: np.ndarray | int,
    step: np.ndarray | int,
) -> MaskedBatch:
    """Mask some rows of a pack; ``epoch_B`` may be a single epoch for all of them."""
    return masker(pack.gather(row_B), np.broadcast_to(epoch_B, row_B.shape), row_B, step)
