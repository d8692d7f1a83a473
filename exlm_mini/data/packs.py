"""Rows of token ids in a memory map, with a side file that describes them.

A pack NAME is two or three files of one directory::

    NAME.bin           all rows end to end, little endian; 2 bytes per token, or 4 with a
                       vocabulary above 65,536
    NAME.offsets.bin   only for rows of different lengths: the start of each row, then the end
                       of the last, int64
    NAME.json          shape, vocabulary, source, counts, and the sha256 of the files above

The side file is written last, so a pack with one is complete; a pack is verified when it is opened.
Opening and reading need only numpy and torch.

Dimension key: R rows of a pack, B rows of a batch, N tokens of a row, padding included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import REMEDY, read_json, sha256_of, whole_file, write_json
from exlm_mini.data.rows import Counts, Rows
from exlm_mini.data.tokenizer import Tokenizer

if TYPE_CHECKING:  # preparing data needs no torch
    import torch

OFFSET_DTYPE = "<i8"


def write_pack(
    path: Path,
    rows: Iterable[Rows],
    *,
    row_length: int | None,
    vocab_size: int,
    special_ids: SpecialIds,
    tokenizer_sha256: str,
    source: str,
    counts: Counts,
) -> int:
    """Write a pack, completely or not at all.

    Args:
        path: the side file, ``DIRECTORY/NAME.json``.
        rows: read once; may fill ``counts`` on the way.
        row_length: length of every row; None: rows differ.
        vocab_size: every id is below.
        special_ids: of the tokenizer; ``pad`` fills short rows in ``Pack.gather``.
        tokenizer_sha256: of the tokenizer.json the ids belong to.
        source: of the rows, for the side file.
        counts: for the side file.

    Returns:
        Number of rows; if it is 0, nothing is written.

    Raises:
        ValueError: if an id or a length is out of range.
    """
    dtype = _dtype(vocab_size)
    tokens_path, offsets_path = _binary_paths(path)
    # From here on no complete pack has that name until the new one is finished.
    for old in (path, tokens_path, offsets_path):
        old.unlink(missing_ok=True)
    ends = [np.zeros(1, OFFSET_DTYPE)]
    with whole_file(tokens_path) as tokens_file:
        for token_ids, lengths_R in rows:
            _check_rows(token_ids, lengths_R, row_length, vocab_size)
            tokens_file.write(token_ids.astype(dtype).data)
            ends.append(ends[-1][-1] + np.cumsum(lengths_R, dtype=OFFSET_DTYPE))
    offsets = np.concatenate(ends)
    if len(offsets) == 1:
        tokens_path.unlink()
        return 0
    files = [tokens_path]
    if row_length is None:
        with whole_file(offsets_path) as offsets_file:
            offsets_file.write(offsets.data)
        files.append(offsets_path)
    content = {
        "num_rows": len(offsets) - 1,
        "num_tokens": int(offsets[-1]),
        "row_length": row_length,
        "vocab_size": vocab_size,
        "special_ids": special_ids._asdict(),
        "tokenizer_sha256": tokenizer_sha256,
        "source": source,
        "counts": asdict(counts),
        "sha256": [sha256_of(file) for file in files],
    }
    write_json(path, content)
    return len(offsets) - 1


def _check_rows(
    token_ids: np.ndarray, lengths_R: np.ndarray, row_length: int | None, vocab_size: int
) -> None:
    if lengths_R.sum() != len(token_ids) or (lengths_R < 1).any():
        raise ValueError(f"rows of {lengths_R.sum()} tokens came with {len(token_ids)} ids")
    if row_length is not None and (lengths_R != row_length).any():
        raise ValueError(f"want rows of {row_length} tokens, got {np.unique(lengths_R)}")
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(
            f"ids must lie in [0, {vocab_size}), got {token_ids.min()} to {token_ids.max()}"
        )


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _binary_paths(path: Path) -> tuple[Path, Path]:
    """(NAME.bin, NAME.offsets.bin) of NAME.json."""
    return path.with_suffix(".bin"), path.with_suffix(".offsets.bin")


class Pack:
    """Rows of token ids on disk; every byte is verified as it is opened.

    Attributes:
        path: the side file.
        row_length: tokens of every row, or None if rows differ.
        num_tokens: of all rows together.
        lengths_R: tokens of each row, int64.
        vocab_size: every id is below.
        special_ids: ids of the special tokens.
        tokenizer_sha256: of the tokenizer.json the ids belong to.
        source: of the rows.
        counts: what happened to the documents.
        sha256: of the content, rows and boundaries, independent of names of files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = read_json(self.path)
        self.row_length: int | None = header["row_length"]
        self.num_tokens: int = header["num_tokens"]
        self.vocab_size: int = header["vocab_size"]
        self.special_ids = SpecialIds(**header["special_ids"])
        self.tokenizer_sha256: str = header["tokenizer_sha256"]
        self.source: str = header["source"]
        self.counts = Counts(**header["counts"])
        self._num_rows: int = header["num_rows"]
        for file, digest in zip(_binary_paths(self.path), header["sha256"], strict=False):
            if sha256_of(file) != digest:
                raise UserError(f"{file} has changed since it was written; {REMEDY}")
        self.sha256 = hashlib.sha256("".join(header["sha256"]).encode()).hexdigest()
        tokens_path, offsets_path = _binary_paths(self.path)
        self._tokens = np.memmap(tokens_path, _dtype(self.vocab_size), "r")
        if self.row_length is None:
            self._offsets = np.fromfile(offsets_path, OFFSET_DTYPE)
            self.lengths_R = np.diff(self._offsets)
        else:
            self.lengths_R = np.broadcast_to(np.int64(self.row_length), (self._num_rows,))

    def __len__(self) -> int:
        """Number of rows, R."""
        return self._num_rows

    def __repr__(self) -> str:
        return f"Pack({self.path}: {len(self):,} rows, {self.num_tokens:,} tokens)"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, from beside the side file."""
        return Tokenizer.load(self.path.with_name("tokenizer.json"))

    def gather(
        self, indices: Sequence[int] | np.ndarray | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows as one batch.

        Args:
            indices: row numbers from 0, repeats allowed.

        Returns:
            token_ids_BN, int64, short rows filled with [PAD]; lengths_B, int64.

        Raises:
            IndexError: if there is no such row.
        """
        import torch

        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(
                f"rows {indices.min()} to {indices.max()} of a pack of {len(self)} rows"
            )
        lengths_B = self.lengths_R[indices]
        if self.row_length is not None:
            token_ids_BN = self._tokens.reshape(len(self), -1)[indices].astype(np.int64)
        else:
            column_N = np.arange(lengths_B.max(initial=0))
            is_token_BN = column_N < lengths_B[:, None]
            place_BN = np.where(is_token_BN, self._offsets[indices, None] + column_N, 0)
            token_ids_BN = np.where(
                is_token_BN, self._tokens[place_BN].astype(np.int64), self.special_ids.pad
            )
        return torch.from_numpy(token_ids_BN), torch.from_numpy(lengths_B.copy())
