"""Packs of rows made up by a test."""

from pathlib import Path

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Rows


def pack_of(
    path: Path, rows: list[list[int]], vocab_size: int, row_length: int | None = None
) -> Pack:
    """Write some rows; ``row_length`` says that all have it."""
    write_pack(
        path,
        [Rows(np.concatenate(rows), np.array([len(row) for row in rows]))],
        row_length=row_length,
        vocab_size=vocab_size,
        special_ids=SpecialIds(),
        tokenizer_sha256="none",
        source="test",
        counts=Counts(),
    )
    return Pack(path)
