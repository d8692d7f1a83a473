"""Packs of rows made up by a test."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.data.batches import TrainingBatches
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.packs import Pack, Rows, write_pack


class SomeTokenizer(NamedTuple):
    """What a pack needs of one."""

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
    """Write some rows; ``row_length`` says that all have it."""
    write_pack(
        path,
        [Rows(np.concatenate(rows), np.array([len(row) for row in rows]))],
        row_length=row_length,
        tokenizer=SomeTokenizer(vocab_size, special_ids),
        counts=Counter(),
    )
    return Pack(path)


def whole(batches: TrainingBatches, step: int) -> MaskedBatch:
    """All rows of a step of ``TrainingBatches`` as one batch."""
    (batch,) = TrainingBatches(
        batches.pack, batches.masker, batches.batch_size, batches.seed
    ).parts(step)
    return batch
