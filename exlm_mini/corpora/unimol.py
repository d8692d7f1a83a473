"""Molecules of Uni-Mol's LMDB files, whose values are pickles, read without running them.

A pickle is a program that may call any function. This reader knows one list of names, those
that numpy arrays are stored with, and gives each of them a stand-in that does nothing; any other
name stops the reading. So no code of the file runs, and arrays (coordinates) cost nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path

from ..config import UserError
from .text import NUM_COLUMNS_SHOWN

SUFFIX = ".lmdb"
DEFAULT_COLUMN = "smi"

_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray",
                  "numpy.core.numeric", "numpy._core.numeric")  # fmt: skip
_NUMPY_NAMES = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")
ALLOWED = {(module, name) for module in _NUMPY_MODULES for name in _NUMPY_NAMES} | {
    ("_codecs", "encode")  # how protocol 2 stores bytes
}
"""Names a pickle may mention; none of them is looked up."""


class _StandIn:
    """Takes whatever an array would take, and keeps nothing."""

    def __new__(cls, *_: object) -> _StandIn:
        return object.__new__(cls)

    def __setstate__(self, _: object) -> None:
        pass


class _RefusedError(Exception):
    """A name that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) in ALLOWED:
            return _StandIn
        raise _RefusedError(f"it asks for {module}.{name}")


def load_restricted(content: bytes) -> object:
    """What a pickle holds: dicts, lists, strings, numbers; stand-ins where arrays were.

    Raises:
        UserError: if it is no pickle, or mentions any name but those of arrays.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except _RefusedError as error:
        raise UserError(f"its pickle is refused ({_one_line(error)})") from None
    except Exception as error:  # a damaged pickle may raise nearly anything
        reason = _one_line(error) or type(error).__name__
        raise UserError(f"its pickle is damaged ({reason})") from None


def lmdb_documents(path: Path, column: str | None) -> Iterator[str]:
    """One key of every entry, in the order of LMDB.

    Args:
        path: the file; Uni-Mol opens its own with ``subdir=False``.
        column: the key; none: ``smi``.

    Raises:
        UserError: if the package lmdb is missing, the file is none, or an entry is refused.
    """
    try:
        import lmdb
    except ImportError:
        raise UserError(f"reading {path} needs lmdb; pip install 'exlm-mini[chem]'") from None
    column = column or DEFAULT_COLUMN
    if not path.is_file():
        raise UserError(f"cannot read {path} (it is no file); give the .lmdb file itself")
    try:
        with (
            lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False
            ) as environment,
            environment.begin() as transaction,
        ):
            for key, value in transaction.cursor():
                yield _text(f"{path} entry {key[:40]!r}", value, column)
    except lmdb.Error as error:
        raise UserError(
            f"{path} is no readable LMDB file ({_one_line(error)}); copy or download it again"
        ) from None


def num_entries(path: Path) -> int | None:
    """Entries of an LMDB file; none if that cannot be told here."""
    try:
        import lmdb

        with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
            return environment.stat()["entries"]
    except Exception:  # whoever reads the file will tell what is wrong
        return None


def _text(where: str, value: bytes, column: str) -> str:
    """The text an entry holds."""
    try:
        row = load_restricted(value)
    except UserError as error:
        raise UserError(
            f"{where}: {error}; nothing of it was run; leave the file out"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, not a dict; leave the file out")
    text = row.get(column)
    if not isinstance(text, str):
        names = ", ".join(str(name)[:40] for name in list(row)[:NUM_COLUMNS_SHOWN])
        raise UserError(
            f"{where} has no text '{column}'; set data.column to one of: {' '.join(names.split())}"
        )
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
