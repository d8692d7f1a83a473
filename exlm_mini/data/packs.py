"""Rows of token ids in a memory map, with a side file that describes them.

A pack NAME is two or three files of one directory::

    NAME.bin           all rows end to end, little endian; 2 bytes per token, or 4 with a
                       vocabulary above 65,536
    NAME.offsets.bin   only for rows of different lengths: the start of each row, then the end
                       of the last, int64
    NAME.json          shape, vocabulary, source, counts, size and sha256 of the files above

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
from exlm_mini.data.files import (
    REMEDY,
    fingerprint,
    read_json,
    reading,
    whole_file,
    write_json,
)
from exlm_mini.data.rows import Counts, Rows
from exlm_mini.data.tokenizer import Tokenizer

if TYPE_CHECKING:  # preparing data needs no torch
    import torch

OFFSET_DTYPE = "<i8"


# ---- writing ----


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
        UserError: if the disk is full.
        ValueError: if an id or a length is out of range.
    """
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    tokens_path, offsets_path = _binary_paths(path)
    # From here on no complete pack has that name until the new one is finished.
    for old in (path, tokens_path, offsets_path):
        old.unlink(missing_ok=True)
    num_rows = num_tokens = 0
    ends = [np.zeros(1, dtype=OFFSET_DTYPE)]
    with whole_file(tokens_path) as tokens_file:
        for token_ids, lengths_R in rows:
            _check_rows(token_ids, lengths_R, row_length, vocab_size)
            tokens_file.write(token_ids.astype(dtype).data)
            if row_length is None:
                ends.append((num_tokens + np.cumsum(lengths_R)).astype(OFFSET_DTYPE))
            num_rows += len(lengths_R)
            num_tokens += len(token_ids)
    if num_rows == 0:
        tokens_path.unlink()
        return 0
    files = {"tokens": fingerprint(tokens_path)}
    if row_length is None:
        with whole_file(offsets_path) as offsets_file:
            offsets_file.write(np.concatenate(ends).data)
        files["offsets"] = fingerprint(offsets_path)
    write_json(
        path,
        {
            "dtype": dtype,
            "num_rows": num_rows,
            "num_tokens": num_tokens,
            "row_length": row_length,
            "vocab_size": vocab_size,
            "special_ids": special_ids._asdict(),
            "tokenizer_sha256": tokenizer_sha256,
            "source": source,
            "counts": asdict(counts),
            "files": files,
        },
    )
    return num_rows


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


def _binary_paths(path: Path) -> tuple[Path, Path]:
    """(NAME.bin, NAME.offsets.bin) of NAME.json."""
    return path.with_suffix(".bin"), path.with_suffix(".offsets.bin")


# ---- reading ----


class Pack:
    """Rows of token ids on disk; ``Pack.open`` makes one.

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

    def __init__(
        self, path: Path, header: dict, tokens: np.ndarray, offsets: np.ndarray | None
    ):
        self.path = path
        self.row_length: int | None = header["row_length"]
        self.num_tokens: int = header["num_tokens"]
        self.vocab_size: int = header["vocab_size"]
        self.special_ids = SpecialIds(**header["special_ids"])
        self.tokenizer_sha256: str = header["tokenizer_sha256"]
        self.source: str = header["source"]
        self.counts = Counts(**header["counts"])
        digests = [file["sha256"] for file in header["files"].values()]
        self.sha256 = hashlib.sha256("".join(digests).encode()).hexdigest()
        self._num_rows: int = header["num_rows"]
        self._tokens = tokens
        self._offsets = offsets
        if offsets is None:
            self.lengths_R = np.broadcast_to(np.int64(self.row_length), (self._num_rows,))
        else:
            self.lengths_R = np.diff(offsets)

    @classmethod
    def open(cls, path: str | Path) -> Pack:
        """Open a pack by its side file and verify every byte of it.

        Raises:
            UserError: if a file is missing or does not match the side file.
        """
        path = Path(path)
        header = read_json(path)
        num_tokens, files = header["num_tokens"], header["files"]
        tokens_path, offsets_path = _binary_paths(path)
        tokens = _mapped(tokens_path, files["tokens"], header["dtype"], num_tokens)
        largest = int(tokens.max())
        if largest >= header["vocab_size"]:
            raise UserError(
                f"{tokens_path} holds the id {largest}, the vocabulary has "
                f"{header['vocab_size']}; {REMEDY}"
            )
        if header["row_length"] is not None:
            return cls(path, header, tokens, None)
        offsets = _mapped(offsets_path, files["offsets"], OFFSET_DTYPE, header["num_rows"] + 1)
        if offsets[0] != 0 or offsets[-1] != num_tokens or not (np.diff(offsets) > 0).all():
            raise UserError(f"{offsets_path} does not rise from 0 to {num_tokens}; {REMEDY}")
        return cls(path, header, tokens, np.asarray(offsets))

    def __len__(self) -> int:
        """Number of rows, R."""
        return self._num_rows

    def __repr__(self) -> str:
        return f"Pack({self.path}: {len(self):,} rows, {self.num_tokens:,} tokens)"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, from beside the side file.

        Raises:
            UserError: if it cannot be read.
        """
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
        if self._offsets is None:
            token_ids_BN = self._tokens.reshape(len(self), -1)[indices].astype(np.int64)
        else:
            column_N = np.arange(lengths_B.max(initial=0))
            is_token_BN = column_N < lengths_B[:, None]
            place_BN = np.where(is_token_BN, self._offsets[indices, None] + column_N, 0)
            token_ids_BN = np.where(
                is_token_BN, self._tokens[place_BN].astype(np.int64), self.special_ids.pad
            )
        return torch.from_numpy(token_ids_BN), torch.from_numpy(lengths_B.copy())


def _mapped(path: Path, file: dict, dtype: str, num_values: int) -> np.ndarray:
    """A file as a memory map, after checking its size and sha256."""
    num_bytes = num_values * np.dtype(dtype).itemsize
    with reading(path, REMEDY):
        if path.stat().st_size != num_bytes:
            raise ValueError(f"not of {num_bytes:,} bytes")
        if fingerprint(path) != file:
            raise ValueError("its sha256 has changed")
    return np.memmap(path, dtype=dtype, mode="r")
