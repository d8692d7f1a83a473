"""Which documents of several sources make a pack: sources are mixed by tokens.

A source of which only a share is wanted gives its first buckets of documents: a sample by hash,
the same whatever the order of the documents and the cut into shards. Nothing is repeated; the
scarcest source, measured by its weight, is used whole.

Rows of a pack are grouped by source: a row never joins two sources, and training draws rows in
random order.

Dimension key: S sources, D documents of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from exlm_mini.data.rows import Counts, Documents
from exlm_mini.data.shards import NUM_BUCKETS, Place, load_shard


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
