"""Molecules in Uni-Mol's LMDB files, whose values are pickles, read without executing them.

A pickle is a program that may call any function. This reader accepts only the names that numpy
arrays and RDKit's molecules are stored with and replaces them by an empty stand-in; any other
name is an error. So no code from the file runs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading

_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray",
                  "numpy.core.numeric", "numpy._core.numeric")  # fmt: skip
_NUMPY_NAMES = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")
ALLOWED = {(module, name) for module in _NUMPY_MODULES for name in _NUMPY_NAMES} | {
    ("_codecs", "encode"),  # how protocol 2 stores bytes
    ("rdkit.Chem.rdchem", "Mol"),
}
"""Names that a pickle may mention; none of them is imported."""


class _StandIn:
    """Accepts any arguments and state, and keeps nothing."""

    def __new__(cls, *arguments: object) -> _StandIn:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) in ALLOWED:
            return _StandIn
        raise pickle.UnpicklingError(f"refused: it asks for {module}.{name}")


def load_restricted(content: bytes) -> Any:
    """The dicts, lists, strings and numbers of a pickle, with stand-ins for arrays.

    Raises:
        Exception: of nearly any type, if it is damaged or mentions another name.
    """
    return _Unpickler(io.BytesIO(content)).load()


def lmdb_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Every entry with its name for messages, in the order of LMDB.

    Args:
        path: a single file, as Uni-Mol writes with ``subdir=False``.
    """
    import lmdb

    with (
        reading(path, errors=lmdb.Error),
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        for key, value in transaction.cursor():
            where = f"{path} entry {key[:40]!r}"
            try:
                row = load_restricted(value)
            except Exception as error:  # a damaged pickle raises nearly anything
                raise UserError(
                    f"{where} is damaged or of another kind ({error}); nothing of it was run; "
                    "leave the file out"
                ) from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{where} is {type(row).__name__}, not a dict; leave the file out"
                )
            yield where, row
