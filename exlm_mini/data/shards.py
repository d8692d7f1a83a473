"""Parts of a corpus on their way to a pack, each whole on the disk or not there.

A shard is a run of documents of one unit of a source, cut by size alone, so that the same shards
come of any number of processes. It is written twice: as cleaned documents, and as token ids. ::

    s0-u0003-00012.documents.npz    text, one entry of the arrays per document
    s0-u0003-00012.documents.json   sha256 of the file above, and what it was made of and with
    s0-u0003-00012.tokens.npz       the same documents as token ids
    s0-u0003-00012.tokens.json

The .json is written last. A shard whose file does not match its record is made again.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.files import (
    fingerprint,
    read_json,
    sha256_of,
    whole_file,
    write_json,
)
from exlm_mini.data.tokenizer import Tokenizer

NUM_DOCUMENTS_BATCH = 1000
NUM_UNKNOWN_KEPT = 100


class Place(NamedTuple):
    """Identifies a shard and its files."""

    folder: Path
    source: int
    unit: int
    number: int

    def file(self, stage: str) -> Path:
        """The arrays of a stage, ``documents`` or ``tokens``."""
        name = f"s{self.source}-u{self.unit:04d}-{self.number:05d}"
        return self.folder / f"{name}.{stage}.npz"

    def load(self, stage: str, *names: str) -> list[np.ndarray]:
        """Arrays of a stage, by name."""
        with np.load(self.file(stage), allow_pickle=False) as arrays:
            return [arrays[name] for name in names]

    def texts(self) -> list[str]:
        """The documents."""
        text, lengths_D = self.load("documents", "text", "lengths_D")
        content, ends = text.tobytes(), np.cumsum(lengths_D)
        return [content[end - n : end].decode() for end, n in zip(ends, lengths_D, strict=True)]


def hash_of(text: str, seed: int) -> int:
    """A 64-bit hash of a document's content, which decides its side of the split and its bucket."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest)


def write_shard(path: Path, arrays: dict[str, Any], record: dict[str, Any]) -> dict:
    """Write the arrays of a shard, then its record; returns the record.

    Raises:
        UserError: if the disk is full; then nothing of the shard remains.
    """
    stream = io.BytesIO()
    # Text compresses to less than half; ids compress less and are read again within minutes.
    (np.savez_compressed if "text" in arrays else np.savez)(stream, **arrays)
    with whole_file(path) as file:
        file.write(stream.getbuffer())
    record = {**record, **fingerprint(path)}
    write_json(path.with_suffix(".json"), record)
    return record


def finished_shard(path: Path, want: dict[str, Any]) -> dict | None:
    """The record of a shard that is intact and was made from ``want``; otherwise None."""
    record = read_if_sound(path.with_suffix(".json"))
    is_mine = want.items() <= record.items() and path.is_file()
    return record if is_mine and sha256_of(path) == record.get("sha256") else None


def read_if_sound(path: Path) -> dict:
    """A JSON file of an earlier start; empty if it is missing or damaged, as it can be redone."""
    try:
        return read_json(path)
    except UserError:
        return {}


# ---- the work of one shard ----


def make_documents(
    place: Place,
    want: dict[str, Any],
    documents: list[str],
    seed: int,
    cleaning: Cleaning | None,
) -> dict:
    """Clean, hash and write documents, unless that was done before; returns the record.

    Args:
        place: of the shard.
        want: what the shard is made from, for ``finished_shard``.
        documents: as read.
        seed: of the hashes; all spellings of a cleaned molecule have the same hash.
        cleaning: of molecules; None: the documents are text.
    """
    if record := finished_shard(place.file("documents"), want):
        return record
    counts = CleaningCounts()
    texts, hashes = [], []
    if cleaning is None:
        texts = [text.encode() for text in documents]
        hashes = [hash_of(text, seed) for text in documents]
    else:
        for key, spelling in clean(documents, cleaning, counts):
            texts.append(spelling.encode())
            hashes.append(hash_of(key, seed))
    arrays = {
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "lengths_D": np.array([len(text) for text in texts], dtype=np.int64),
        "hash_D": np.array(hashes, dtype=np.uint64),
    }
    record = {**want, "num_read": len(documents), "cleaning": asdict(counts)}
    return write_shard(place.file("documents"), arrays, record)


def make_tokens(place: Place, want: dict[str, Any], tokenizer_path: Path) -> dict:
    """Tokenize a shard and write the ids, unless that was done before; returns the record."""
    if record := finished_shard(place.file("tokens"), want):
        return record
    tokenizer = _tokenizer(tokenizer_path, want["tokenizer"])
    texts = place.texts()
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    ids_D: list[np.ndarray] = []
    for start in range(0, len(texts), NUM_DOCUMENTS_BATCH):
        batch = tokenizer.encode_batch(texts[start : start + NUM_DOCUMENTS_BATCH])
        ids_D += [np.array(token_ids, dtype=dtype) for token_ids in batch]
    unknown_D = [int((token_ids == tokenizer.special_ids.unk).sum()) for token_ids in ids_D]
    arrays = {
        "token_ids": np.concatenate([np.empty(0, dtype), *ids_D]),
        "lengths_D": np.array([len(token_ids) for token_ids in ids_D], dtype=np.int64),
        "num_unknown_D": np.array(unknown_D, dtype=np.int64),
    }
    pieces: Counter[str] = Counter()
    for i in np.flatnonzero(unknown_D):
        pieces.update(tokenizer.unknown_pieces(texts[i]))
    record = {**want, "unknown": dict(pieces.most_common(NUM_UNKNOWN_KEPT))}
    record |= {"num_tokens": len(arrays["token_ids"]), "num_unknown": sum(unknown_D)}
    return write_shard(place.file("tokens"), arrays, record)


@lru_cache(maxsize=1)
def _tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Loads a tokenizer once per process and ``sha256``."""
    return Tokenizer.load(path)
