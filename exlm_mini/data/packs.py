"""Cut documents into rows of token ids, and store the rows in packs, which are memory-mapped.

A pack called NAME consists of two or three files in one directory::

    NAME.bin           all rows end to end, little endian; 2 bytes per token, or 4 with a
                       vocabulary above 65,536
    NAME.offsets.bin   only for rows of different lengths: the start of each row, then the end
                       of the last, int64
    NAME.json          shape, vocabulary, counts, and the sha256 of the files above

NAME.json, the side file, is written last, so a pack that has one is complete. Opening a pack
verifies it. Opening and reading need only numpy and torch.

Dimension key: D documents, R rows of a pack, B rows of a batch, N tokens of a row, padding
included.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import REMEDY, read_json, sha256_of, whole_file, write_json
from exlm_mini.data.tokenizer import Tokenizer

if TYPE_CHECKING:  # preparing data needs no torch
    import torch

OFFSET_DTYPE = "<i8"


# ---- rows ----


class Rows(NamedTuple):
    """Some rows or documents, end to end; ``token_ids`` has shape (sum of lengths,)."""

    token_ids: np.ndarray
    lengths_R: np.ndarray


def block_rows(
    documents: Iterable[Rows], special_ids: SpecialIds, block_length: int, counts: Counter[str]
) -> Iterator[Rows]:
    """Join documents with [SEP], cut them into equally long rows, and add [BOS] and [EOS] to each.

    Every block ends with [EOS], so that its graph ends in a boundary state, never in an ordinary
    token. Tokens after the last full block are dropped and counted (``dropped_tokens``).
    """
    content = block_length - 2
    pending = np.empty(0, dtype=np.int64)
    is_first = True
    for token_ids, lengths_D in documents:
        if not len(lengths_D):
            continue
        starts_D = np.cumsum(lengths_D) - lengths_D
        joined = np.insert(token_ids, starts_D, special_ids.sep)
        pending = np.concatenate([pending, joined[1:] if is_first else joined])
        is_first = False
        num_rows = len(pending) // content
        if num_rows:
            yield framed_rows(pending[: num_rows * content].reshape(-1, content), special_ids)
            pending = pending[num_rows * content :]
    counts["dropped_tokens"] += len(pending)


def framed_rows(token_ids_RN: np.ndarray, special_ids: SpecialIds) -> Rows:
    """Frame rows of equal length with [BOS] and [EOS]."""
    framed_RN = np.pad(token_ids_RN, ((0, 0), (1, 1)))
    framed_RN[:, 0] = special_ids.bos
    framed_RN[:, -1] = special_ids.eos
    return Rows(framed_RN.reshape(-1), np.full(len(framed_RN), framed_RN.shape[1]))


def molecule_rows(
    documents: Iterable[Rows], special_ids: SpecialIds, block_length: int, counts: Counter[str]
) -> Iterator[Rows]:
    """One row per molecule, [BOS] ... [EOS]; rows longer than ``block_length`` are dropped
    and counted (``dropped_documents``)."""
    for token_ids, lengths_D in documents:
        is_kept_D = lengths_D + 2 <= block_length
        counts["dropped_documents"] += int((~is_kept_D).sum())
        lengths_R = lengths_D[is_kept_D]
        if not len(lengths_R):
            continue
        ends_R = np.cumsum(lengths_R)
        # Between two molecules, [EOS] of the first comes before [BOS] of the second.
        places = np.stack([ends_R - lengths_R, ends_R], axis=1).reshape(-1)
        symbols = np.tile([special_ids.bos, special_ids.eos], len(lengths_R))
        kept = token_ids[np.repeat(is_kept_D, lengths_D)].astype(np.int64)
        yield Rows(np.insert(kept, places, symbols), lengths_R + 2)


# ---- packs ----


def write_pack(
    path: Path,
    rows: Iterable[Rows],
    *,
    row_length: int | None,
    tokenizer: Tokenizer,
    counts: Counter[str],
) -> int:
    """Write a pack, completely or not at all.

    Args:
        path: the side file, ``DIRECTORY/NAME.json``.
        rows: the rows, read once; reading them may fill ``counts``.
        row_length: length of every row; None if lengths differ.
        tokenizer: the tokenizer of the ids; its [PAD] fills short rows in ``Pack.gather``.
        counts: what happened to the documents, recorded in the side file.

    Returns:
        Number of rows; if it is 0, nothing is written.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    tokens_path, offsets_path = _binary_paths(path)
    # From here on no complete pack has that name until the new one is finished.
    for old in (path, tokens_path, offsets_path):
        old.unlink(missing_ok=True)
    ends = [np.zeros(1, OFFSET_DTYPE)]
    with whole_file(tokens_path) as tokens_file:
        for token_ids, lengths_R in rows:
            assert token_ids.max() < tokenizer.vocab_size
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
        "vocab_size": tokenizer.vocab_size,
        "special_ids": tokenizer.special_ids._asdict(),
        "tokenizer_sha256": tokenizer.sha256,
        "counts": counts,
        "sha256": [sha256_of(file) for file in files],
    }
    write_json(path, content)
    return len(offsets) - 1


def token_dtype(vocab_size: int) -> str:
    """The smallest NumPy dtype that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _binary_paths(path: Path) -> tuple[Path, Path]:
    """The paths NAME.bin and NAME.offsets.bin beside NAME.json."""
    return path.with_suffix(".bin"), path.with_suffix(".offsets.bin")


class Pack:
    """Rows of token ids on disk; opening a pack verifies every byte.

    Attributes:
        path: the side file, NAME.json.
        row_length: tokens in every row, or None if lengths differ.
        num_tokens: number of tokens of all rows together.
        lengths_R: tokens of each row, int64.
        vocab_size: size of the vocabulary; every id is smaller.
        special_ids: ids of the special tokens.
        tokenizer_sha256: hash of the tokenizer.json that the ids belong to.
        sha256: hash of the content (rows and their boundaries), independent of file names.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = read_json(self.path)
        self.row_length: int | None = header["row_length"]
        self.num_tokens: int = header["num_tokens"]
        self.vocab_size: int = header["vocab_size"]
        self.special_ids = SpecialIds(**header["special_ids"])
        self.tokenizer_sha256: str = header["tokenizer_sha256"]
        for file, digest in zip(_binary_paths(self.path), header["sha256"], strict=False):
            if sha256_of(file) != digest:
                raise UserError(f"{file} has changed since it was written; {REMEDY}")
        self.sha256 = hashlib.sha256("".join(header["sha256"]).encode()).hexdigest()
        tokens_path, offsets_path = _binary_paths(self.path)
        self._tokens = np.memmap(tokens_path, token_dtype(self.vocab_size), "r")
        if self.row_length is None:
            self._offsets = np.fromfile(offsets_path, OFFSET_DTYPE)
        else:
            self._offsets = np.arange(header["num_rows"] + 1) * self.row_length
        self.lengths_R = np.diff(self._offsets)

    def __len__(self) -> int:
        """Number of rows, R."""
        return len(self.lengths_R)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the ids, ``tokenizer.json`` in the directory of the pack."""
        return Tokenizer.load(self.path.with_name("tokenizer.json"))

    def spread(self, num_rows: int) -> np.ndarray:
        """Indices of ``num_rows`` evenly spaced rows, or of all if there are fewer; int64, rising.

        The spacing matters because a pack keeps the order of its sources and documents.
        """
        num_rows = min(num_rows, len(self))
        return np.arange(num_rows) * len(self) // num_rows

    def gather(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Gather rows by index from 0, repeats allowed, into one batch ``token_ids_BN``, int64, in
        which short rows are filled with [PAD]."""
        import torch

        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        lengths_B = self.lengths_R[indices]
        column_N = np.arange(lengths_B.max(initial=0))
        is_token_BN = column_N < lengths_B[:, None]
        place_BN = np.where(is_token_BN, self._offsets[indices, None] + column_N, 0)
        token_ids_BN = np.where(is_token_BN, self._tokens[place_BN], self.special_ids.pad)
        return torch.from_numpy(token_ids_BN.astype(np.int64))
