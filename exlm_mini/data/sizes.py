"""Estimated size of a source, from its card or the size of its files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from exlm_mini.config import DataConfig
from exlm_mini.data.sources import HUB_PREFIX, NAMED

BYTES_PER_TOKEN = {"text": 4.3, "smiles": 1.05}
"""English in byte-level BPE with some 30,000 tokens; SMILES."""
GROWTH = {".gz": 3, ".xz": 4, ".parquet": 2, ".lmdb": 0.01}
"""Bytes of text per byte of a file; Uni-Mol's files hold conformations beside the SMILES."""


class Size(NamedTuple):
    """Estimates; None if unknown."""

    documents: float | None
    text_bytes: float | None
    tokens: float | None

    def __add__(self, other: tuple) -> Size:
        pairs = zip(self, other, strict=True)
        return Size(*(None if None in pair else sum(pair) for pair in pairs))


def size_of(words: tuple[str, ...], data: DataConfig) -> Size:
    """Estimate the size of a source.

    Args:
        words: as for ``sources.check_source``.
        data: ``kind``, and ``max_documents`` if the number of documents is known.
    """
    if words[0].startswith(HUB_PREFIX):
        return Size(None, None, None)
    documents: float | None = None
    if words[0] in NAMED:
        documents, text_bytes = NAMED[words[0]].num_documents, NAMED[words[0]].num_text_bytes
        share = min(1.0, (data.max_documents or documents) / documents)
        documents, text_bytes = documents * share, text_bytes * share
    else:
        files = [Path(word) for word in words]
        text_bytes = sum(path.stat().st_size * GROWTH.get(path.suffix, 1) for path in files)
    return Size(documents, text_bytes, text_bytes / BYTES_PER_TOKEN[data.kind])
