"""Documents cut into rows of token ids, between [BOS] and [EOS].

Dimension key: R rows, N tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds

NUM_TOKENS_CHUNK = 1 << 20


class Rows(NamedTuple):
    """Some rows, end to end: ``token_ids`` of shape (sum of lengths,)."""

    token_ids: np.ndarray
    lengths_R: np.ndarray


@dataclass
class Counts:
    """What became of the documents; filled while they are cut into rows."""

    documents: int = 0
    tokens: int = 0
    """Of the documents, before they are cut."""
    unknown_tokens: int = 0
    dropped_documents: int = 0
    """Longer than a row (molecules)."""
    dropped_tokens: int = 0
    """Behind the last full block (text)."""


def block_rows(
    documents: Iterable[Sequence[int]],
    special_ids: SpecialIds,
    block_length: int,
    counts: Counts,
) -> Iterator[Rows]:
    """Text as rows of one length: documents joined by [SEP], cut, put in [BOS] ... [EOS].

    Every block ends in [EOS], so that the graph of a block ends in a boundary state, never in
    an ordinary token. The tokens behind the last full block are dropped and counted; no row at
    all comes of less than ``block_length - 2`` tokens.
    """
    content = block_length - 2
    pending: list[int] = []
    for i, token_ids in enumerate(documents):
        if i:
            pending.append(special_ids.sep)
        pending.extend(token_ids)
        if len(pending) >= max(content, NUM_TOKENS_CHUNK):
            yield _blocks(pending, content, special_ids)
            del pending[: len(pending) // content * content]
    if len(pending) >= content:
        yield _blocks(pending, content, special_ids)
    counts.dropped_tokens += len(pending) % content


def _blocks(token_ids: list[int], content: int, special_ids: SpecialIds) -> Rows:
    """All full blocks at the front of ``token_ids``."""
    num_rows = len(token_ids) // content
    inner = np.array(token_ids[: num_rows * content], dtype=np.int64)
    return framed_rows(inner.reshape(num_rows, content), special_ids)


def framed_rows(token_ids_RN: np.ndarray, special_ids: SpecialIds) -> Rows:
    """Rows of one length put between [BOS] and [EOS]."""
    framed_RN = np.pad(token_ids_RN, ((0, 0), (1, 1)))
    framed_RN[:, 0] = special_ids.bos
    framed_RN[:, -1] = special_ids.eos
    return Rows(framed_RN.reshape(-1), np.full(len(framed_RN), framed_RN.shape[1]))


def molecule_rows(
    molecules: Iterable[Sequence[int]],
    special_ids: SpecialIds,
    block_length: int,
    counts: Counts,
) -> Iterator[Rows]:
    """One row per molecule, [BOS] ... [EOS]; longer ones than ``block_length`` are dropped."""
    pending: list[int] = []
    lengths: list[int] = []
    for token_ids in molecules:
        length = len(token_ids) + 2
        if length > block_length:
            counts.dropped_documents += 1
            continue
        pending += (special_ids.bos, *token_ids, special_ids.eos)
        lengths.append(length)
        if len(pending) >= NUM_TOKENS_CHUNK:
            yield Rows(np.array(pending), np.array(lengths))
            pending, lengths = [], []
    if lengths:
        yield Rows(np.array(pending), np.array(lengths))
