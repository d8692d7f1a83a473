"""Molecules of Uni-Mol's LMDB files, whose values are pickles, read without running them.

A pickle is a program that may call any function. This reader accepts one list of names, those
that numpy arrays and RDKit's molecules are stored with, and puts an empty stand-in in their place;
any other name stops the reading. So no code of the file runs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exlm_mini.data.files import reading
from exlm_mini.data.lmdb_pages import entries
from exlm_mini.data.text import check_column, document_text

SUFFIX = ".lmdb"
DEFAULT_COLUMN = "smi"

_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray",
                  "numpy.core.numeric", "numpy._core.numeric")  # fmt: skip
_NUMPY_NAMES = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")
ALLOWED = {(module, name) for module in _NUMPY_MODULES for name in _NUMPY_NAMES} | {
    ("_codecs", "encode"),  # how protocol 2 stores bytes
    ("rdkit.Chem.rdchem", "Mol"),
}
"""Names a pickle may mention; none of them is looked up."""


class _StandIn:
    """Takes whatever an array would take, and keeps nothing of it."""

    def __new__(cls, *arguments: object) -> _StandIn:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


_STAND_INS = {(module, name): type(name, (_StandIn,), {}) for module, name in ALLOWED}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) in ALLOWED:
            return _STAND_INS[module, name]
        raise pickle.UnpicklingError(f"refused: it asks for {module}.{name}")


def load_restricted(content: bytes) -> Any:
    """What a pickle holds: dicts, lists, strings, numbers; stand-ins where arrays were.

    Raises:
        Exception: of nearly any kind, if it is damaged, or mentions any name but those of arrays.
    """
    return _Unpickler(io.BytesIO(content)).load()


def lmdb_documents(path: Path, column: str | None) -> Iterator[str]:
    """One key of every entry, in the order of LMDB.

    Args:
        path: the file; Uni-Mol opens its own with ``subdir=False``.
        column: the key; none: ``smi``.

    Raises:
        UserError: if the file is none, or an entry is refused.
    """
    column = column or DEFAULT_COLUMN
    for where, row in lmdb_rows(path):
        check_column(where, column, [name for name in row if isinstance(name, str)])
        yield document_text(where, column, row[column])


def lmdb_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Every entry with how messages call it, in the order of LMDB.

    Raises:
        UserError: as ``lmdb_documents``.
    """
    for key, value in entries(path):
        where = f"{path} entry {key[:40]!r}"
        with reading(where, "nothing of it was run; leave the file out"):
            row = load_restricted(value)
            if not isinstance(row, dict):
                raise TypeError(f"{type(row).__name__}, not a dict")
        yield where, row
