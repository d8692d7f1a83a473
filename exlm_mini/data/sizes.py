"""How much a source holds, before it is read: from its head, its index, or its card."""

from __future__ import annotations

import tempfile
import zlib
from lzma import LZMADecompressor
from pathlib import Path
from typing import NamedTuple

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.lmdb_pages import num_entries
from exlm_mini.data.sources import HUB_PREFIX, NAMED
from exlm_mini.data.text import COMPRESSIONS, DEFAULT_COLUMNS, file_documents
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.unimol import SUFFIX as LMDB_SUFFIX

HEAD_BYTES = 1 << 20
BYTES_PER_TOKEN = {"text": 4.3, "smiles": 1.05}
"""Where no tokenizer is given: English in byte-level BPE of some 30,000 tokens; SMILES."""
BYTES_PER_MOLECULE = 45


class Size(NamedTuple):
    """Estimates; none where nothing is known."""

    documents: float | None
    text_bytes: float | None
    tokens: float | None

    def __add__(self, other: tuple) -> Size:
        pairs = zip(self, other, strict=True)
        return Size(*(None if None in pair else sum(pair) for pair in pairs))


def size_of(words: tuple[str, ...], data: DataConfig) -> Size:
    """About how much a source holds; never raises for what reading it would tell better."""
    per_token = BYTES_PER_TOKEN[data.kind]
    if words[0] in NAMED:
        named = NAMED[words[0]]
        size = Size(
            named.num_documents, named.num_text_bytes, (named.num_text_bytes or 0) / per_token
        )
    elif words[0].startswith(HUB_PREFIX):
        size = Size(None, None, None)
    else:
        size = Size(0, 0, 0)
        for word in words:
            size += _file_size(Path(word), data)
    limit = data.max_documents
    if limit is None or size.documents is None or size.documents <= limit:
        return size
    return Size(*(part and part * limit / size.documents for part in size))


def _file_size(path: Path, data: DataConfig) -> Size:
    per_token = BYTES_PER_TOKEN[data.kind]
    try:
        if path.suffix.lower() == LMDB_SUFFIX:
            entries = num_entries(path)
            num_bytes = entries * BYTES_PER_MOLECULE
            return Size(entries, num_bytes, num_bytes / per_token)
        if ".parquet" in path.suffixes[-2:]:
            return _parquet_size(path, data)
        documents, head_bytes, whole_bytes = _head(path, data)
    except Exception:  # an estimate stands in nobody's way; the reader will say what is wrong
        return Size(None, None, None)
    scale = whole_bytes / head_bytes
    text_bytes = sum(len(text.encode()) for text in documents) * scale
    tokens = text_bytes / per_token
    if data.tokenizer is not None:
        encoded = Tokenizer.load(data.tokenizer).encode_batch(documents)
        tokens = sum(map(len, encoded)) * scale
    return Size(len(documents) * scale, text_bytes, tokens)


def _head(path: Path, data: DataConfig) -> tuple[list[str], int, float]:
    """Documents at the start of a file, the bytes they took, and those of the whole file."""
    compressed = path.suffix.lower() in COMPRESSIONS
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    num_raw, whole_bytes = len(head), float(path.stat().st_size)
    if compressed:
        is_xz = path.suffix.lower() == ".xz"
        decompressor = LZMADecompressor() if is_xz else zlib.decompressobj(zlib.MAX_WBITS | 16)
        head = decompressor.decompress(head)
        whole_bytes *= len(head) / num_raw
    if num_raw == HEAD_BYTES:  # the last line may be cut
        head = head[: head.rfind(b"\n") + 1]
    if not head:
        raise UserError(f"{path} has no line end in its first megabyte")
    name = Path(path.stem if compressed else path.name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"head{name.suffix.lower()}"
        copy.write_bytes(head)
        documents = list(file_documents(copy, data.kind, data.column))
    return documents, len(head), max(whole_bytes, len(head))


def _parquet_size(path: Path, data: DataConfig) -> Size:
    """From the index at the end of the file."""
    import pyarrow.parquet

    index = pyarrow.parquet.ParquetFile(path).metadata
    column = data.column or DEFAULT_COLUMNS[data.kind]
    chunks = [index.row_group(g) for g in range(index.num_row_groups)]
    text_bytes = sum(
        group.column(c).total_uncompressed_size
        for group in chunks
        for c in range(group.num_columns)
        if group.column(c).path_in_schema == column
    )
    return Size(index.num_rows, text_bytes, text_bytes / BYTES_PER_TOKEN[data.kind])
