"""Documents cut into rows of token ids, between [BOS] and [EOS].

Dimension key: D documents, R rows, N tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds


class Rows(NamedTuple):
    """Some rows or documents, end to end: ``token_ids`` of shape (sum of lengths,)."""

    token_ids: np.ndarray
    lengths_R: np.ndarray


@dataclass
class Counts:
    """What happened to the documents; filled while they are cut into rows."""

    documents: int = 0
    tokens: int = 0
    """Of the documents, before they are cut."""
    unknown_tokens: int = 0
    dropped_documents: int = 0
    """Longer than a row (molecules)."""
    dropped_tokens: int = 0
    """Behind the last full block (text)."""

    def add(self, other: Counts) -> None:
        """Add those of another part of the documents."""
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


def block_rows(
    documents: Iterable[Rows], special_ids: SpecialIds, block_length: int, counts: Counts
) -> Iterator[Rows]:
    """Text as rows of equal length: documents joined by [SEP], cut, and framed by [BOS] and [EOS].

    Every block ends with [EOS], so that its graph ends in a boundary state, never in an ordinary
    token. Tokens after the last full block are dropped and counted.
    """
    content = block_length - 2
    pending = np.empty(0, dtype=np.int64)
    is_first = True
    for token_ids, lengths_D in documents:
        if not len(lengths_D):
            continue
        starts_D = np.cumsum(lengths_D) - lengths_D
        joined = np.insert(token_ids, starts_D, special_ids.sep)
        pending = np.concatenate([pending, joined[1:] if is_first else joined])
        is_first = False
        num_rows = len(pending) // content
        if num_rows:
            yield framed_rows(pending[: num_rows * content].reshape(-1, content), special_ids)
            pending = pending[num_rows * content :]
    counts.dropped_tokens += len(pending)


def framed_rows(token_ids_RN: np.ndarray, special_ids: SpecialIds) -> Rows:
    """Rows of one length, framed by [BOS] and [EOS]."""
    framed_RN = np.pad(token_ids_RN, ((0, 0), (1, 1)))
    framed_RN[:, 0] = special_ids.bos
    framed_RN[:, -1] = special_ids.eos
    return Rows(framed_RN.reshape(-1), np.full(len(framed_RN), framed_RN.shape[1]))


def molecule_rows(
    documents: Iterable[Rows], special_ids: SpecialIds, block_length: int, counts: Counts
) -> Iterator[Rows]:
    """One row per molecule, [BOS] ... [EOS]; longer ones than ``block_length`` are dropped."""
    for token_ids, lengths_D in documents:
        is_kept_D = lengths_D + 2 <= block_length
        counts.dropped_documents += int((~is_kept_D).sum())
        lengths_R = lengths_D[is_kept_D]
        if not len(lengths_R):
            continue
        ends_R = np.cumsum(lengths_R)
        # Between two molecules, [EOS] of the first comes before [BOS] of the second.
        places = np.stack([ends_R - lengths_R, ends_R], axis=1).reshape(-1)
        symbols = np.tile([special_ids.bos, special_ids.eos], len(lengths_R))
        kept = token_ids[np.repeat(is_kept_D, lengths_D)].astype(np.int64)
        yield Rows(np.insert(kept, places, symbols), lengths_R + 2)
