"""From shards of several sources to two packs: sources mixed by tokens, rows cut.

A source of which only a share is wanted gives its first buckets of documents: a sample by hash,
the same whatever the order of the documents and the cut into shards. Nothing is repeated; the
scarcest source, measured by its weight, is used whole.

Rows of a pack are grouped by source: a row never joins two sources, and training draws rows in
random order. ``text_rows`` and ``smiles_rows`` give what ``rows.block_rows`` and
``rows.molecule_rows`` give, without a step of Python per token.

Dimension key: S sources, D documents of a shard, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.data.rows import Counts, Rows, framed_rows
from exlm_mini.data.shards import NUM_BUCKETS, Place, load_shard


class Documents(NamedTuple):
    """Some documents, end to end."""

    token_ids: np.ndarray
    lengths_D: np.ndarray


def bucket_totals(
    places: Iterable[Place], stage: str = "tokens", is_validation: bool = False
) -> np.ndarray:
    """Lengths (tokens, or bytes of ``documents``) of one side of a source, by bucket."""
    total = np.zeros(NUM_BUCKETS)
    for place in places:
        lengths_D, side_D, bucket_D = load_shard(
            place.file(stage), "lengths_D", "is_validation_D", "bucket_D"
        )
        weights = lengths_D * (side_D == is_validation)
        total += np.bincount(bucket_D, weights, NUM_BUCKETS)
    return total


def bucket_bound(totals: np.ndarray, wanted: float) -> int:
    """How many of the first buckets hold as much as is wanted; all if that is all there is."""
    if wanted >= totals.sum():
        return len(totals)
    return int((np.cumsum(totals) >= wanted).argmax()) + 1


def wanted_tokens(tokens_S: list[float], weights_S: list[float]) -> list[float]:
    """The most tokens of each source that stand in the ratio of the weights.

    >>> wanted_tokens([900, 400], [3, 1])
    [900.0, 300.0]
    """
    scale = min(tokens / weight for tokens, weight in zip(tokens_S, weights_S, strict=True))
    return [float(weight * scale) for weight in weights_S]


def chosen(
    places: Iterable[Place], is_validation: bool, bound: int, counts: Counts
) -> Iterator[Documents]:
    """The documents of one side in the first ``bound`` buckets, shard by shard."""
    for place in places:
        token_ids, lengths_D, unknown_D, side_D, bucket_D = load_shard(
            place.file("tokens"),
            "token_ids", "lengths_D", "num_unknown_D", "is_validation_D", "bucket_D",
        )  # fmt: skip
        is_chosen_D = (side_D == is_validation) & (bucket_D < bound)
        counts.documents += int(is_chosen_D.sum())
        counts.tokens += int(lengths_D[is_chosen_D].sum())
        counts.unknown_tokens += int(unknown_D[is_chosen_D].sum())
        yield Documents(token_ids[np.repeat(is_chosen_D, lengths_D)], lengths_D[is_chosen_D])


def text_rows(
    shards: Iterable[Documents], special_ids: SpecialIds, block_length: int, counts: Counts
) -> Iterator[Rows]:
    """``rows.block_rows`` of all documents of the shards."""
    content = block_length - 2
    pending = np.empty(0, dtype=np.int64)
    is_first = True
    for token_ids, lengths_D in shards:
        if not len(lengths_D):
            continue
        starts_D = np.cumsum(lengths_D) - lengths_D
        joined = np.insert(token_ids, starts_D, special_ids.sep)
        pending = np.concatenate([pending, joined[1:] if is_first else joined])
        is_first = False
        num_rows = len(pending) // content
        if num_rows:
            inner = pending[: num_rows * content].reshape(num_rows, content)
            yield framed_rows(inner, special_ids)
            pending = pending[num_rows * content :]
    counts.dropped_tokens += len(pending)


def smiles_rows(
    shards: Iterable[Documents], special_ids: SpecialIds, block_length: int, counts: Counts
) -> Iterator[Rows]:
    """``rows.molecule_rows`` of all documents of the shards."""
    for token_ids, lengths_D in shards:
        is_kept_D = lengths_D + 2 <= block_length
        counts.dropped_documents += int((~is_kept_D).sum())
        lengths_R = lengths_D[is_kept_D] + 2
        if not len(lengths_R):
            continue
        ends_R = np.cumsum(lengths_R)
        is_symbol = np.ones(ends_R[-1], dtype=bool)
        rows = np.empty(ends_R[-1], dtype=np.int64)
        for places_R, special in (
            (ends_R - lengths_R, special_ids.bos), (ends_R - 1, special_ids.eos)
        ):  # fmt: skip
            is_symbol[places_R] = False
            rows[places_R] = special
        rows[is_symbol] = token_ids[np.repeat(is_kept_D, lengths_D)]
        yield Rows(rows, lengths_R)
