"""Entries of an LMDB file, read page by page.

The ``lmdb`` library maps the file into memory and trusts it: a missing or wrong page kills the
process. Here every page is read and every number checked. Supported are files written on 64-bit
little-endian machines, with one unnamed database.

Source: the structures at the top of mdb.c of LMDB 0.9 (``MDB_page``, ``MDB_meta``, ``MDB_node``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from exlm_mini.data.files import open_regular, reading

MAX_RECORD_BYTES = 1 << 26
"""A molecule with its conformations takes a few thousand."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_EMPTY = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4  # kinds of page
_HEADER, _NODE = 16, 8  # bytes
_ELSEWHERE = 1  # flag of a node whose value has pages of its own


class _Meta(NamedTuple):
    """One of the two roots of a file."""

    transaction: int
    """The root with the larger number is current."""
    page_size: int
    depth: int
    num_entries: int
    root: int


def entries(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of an LMDB file, in the order of the keys.

    Raises:
        UserError: if it is not an LMDB file, is damaged, or has a value that is too large.
    """
    with reading(path), open_regular(path) as stream:
        file, found = stream.fileno(), 0
        first = _read_meta(file, 0)
        meta = max(first, _read_meta(file, first.page_size))
        # By the size of the file, not by its header: free pages at its end are never written.
        seen = bytearray(os.fstat(file).st_size // meta.page_size)
        if meta.root != _EMPTY:
            for entry in _below(file, meta, seen, meta.root, meta.depth):
                found += 1
                yield entry
        if found != meta.num_entries:
            raise ValueError(f"{found:,} entries instead of {meta.num_entries:,}")


def _read_meta(file: int, offset: int) -> _Meta:
    data = _bytes_at(file, offset, 152)
    magic, version = struct.unpack_from("<II", data, 16)
    (page_size,), (depth,) = (
        struct.unpack_from("<I", data, 40),
        struct.unpack_from("<H", data, 94),
    )
    num_entries, root, _, transaction = struct.unpack_from("<4Q", data, 120)
    if (magic, version) != (_MAGIC, _VERSION) or page_size not in (2**n for n in range(8, 17)):
        raise ValueError(f"no LMDB file of version {_VERSION}")
    return _Meta(transaction, page_size, depth, num_entries, root)


def _below(
    file: int, meta: _Meta, seen: bytearray, number: int, depth: int
) -> Iterator[tuple[bytes, bytes]]:
    """Entries of a page and of the pages below it; a leaf has depth 1."""
    page, kind, lower = _page(file, meta, number)
    if kind != (_LEAF if depth == 1 else _BRANCH) or lower > meta.page_size or seen[number]:
        raise ValueError(f"page {number} is out of place")
    seen[number] = True
    for at in struct.unpack_from(f"<{(lower - _HEADER) // 2}H", page, _HEADER):
        low, high, flags, key_size = struct.unpack_from("<4H", page, at)
        start, size = at + _NODE + key_size, low | high << 16
        if depth > 1:
            yield from _below(file, meta, seen, size | flags << 32, depth - 1)
            continue
        key, value = page[at + _NODE : start], page[start : start + size]
        if flags not in (0, _ELSEWHERE) or size > MAX_RECORD_BYTES:
            raise ValueError(f"the entry {key[:40]!r} of {size:,} bytes is no plain value")
        if flags == _ELSEWHERE:
            (first,) = struct.unpack_from("<Q", page, start)
            if _page(file, meta, first)[1] != _OVERFLOW:
                raise ValueError(f"page {first} is out of place")
            value = _bytes_at(file, first * meta.page_size + _HEADER, size)
        if len(value) != size:
            raise ValueError(f"the entry {key[:40]!r} is cut off")
        yield key, value


def _page(file: int, meta: _Meta, number: int) -> tuple[bytes, int, int]:
    """A page, its kind, and the end of its list of nodes."""
    page = _bytes_at(file, number * meta.page_size, meta.page_size)
    own, kind, lower = struct.unpack_from("<Q2xHH", page)
    if own != number:
        raise ValueError(f"page {number} says it is {own}")
    return page, kind, lower


def _bytes_at(file: int, offset: int, size: int) -> bytes:
    data = os.pread(file, size, offset)
    if len(data) != size:
        raise ValueError(f"it ends before byte {offset + size:,}")
    return data
