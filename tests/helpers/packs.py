"""Writes packs with rows that a test made up."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.data.batches import TrainingBatches
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.packs import Pack, Rows, write_pack


class SomeTokenizer(NamedTuple):
    """The attributes of a tokenizer that a pack needs."""

    vocab_size: int
    special_ids: SpecialIds = SpecialIds()
    sha256: str = "none"


def pack_of(
    path: Path,
    rows: list[list[int]],
    vocab_size: int,
    row_length: int | None = None,
    special_ids: SpecialIds = SpecialIds(),
) -> Pack:
    """Write rows as a pack and open it; ``row_length``, if given, is the length of every row."""
    write_pack(
        path,
        [Rows(np.concatenate(rows), np.array([len(row) for row in rows]))],
        row_length=row_length,
        tokenizer=SomeTokenizer(vocab_size, special_ids),
        counts=Counter(),
    )
    return Pack(path)


def whole(batches: TrainingBatches, step: int) -> MaskedBatch:
    """All rows of a step of ``batches`` as one batch, whatever the size of its micro-batches."""
    (batch,) = TrainingBatches(
        batches.pack, batches.masker, batches.batch_size, batches.seed
    ).parts(step)
    return batch
