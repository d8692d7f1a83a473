"""Molecules of Uni-Mol's LMDB files, whose values are pickles, read without running them.

A pickle is a program that may call any function. This reader accepts one list of names, those
that numpy arrays and RDKit's molecules are stored with, and gives each of them a stand-in that
only keeps what it is given; any other name stops the reading. So no code of the file runs. The
numbers of an array are read from its stand-in, where they are asked for.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
    """Takes whatever an array would take, and does nothing with it."""

    arguments: tuple = ()
    state: object = None

    def __new__(cls, *arguments: object) -> _StandIn:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state


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


def numbers(value: Any) -> list[float]:
    """The numbers of a value that ``load_restricted`` gave, one after the other; none is nan.

    Args:
        value: a number, none, a list or tuple of such, or what stands in for an array or scalar
            of numpy, of numbers or of Python objects.

    Raises:
        Exception: of nearly any kind, if it holds anything else.
    """
    if value is None:
        return [float("nan")]
    if isinstance(value, bool | int | float):
        return [float(value)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    match type(value).__name__:  # what numpy stores arrays by: see ALLOWED
        case "_reconstruct":
            _, _, dtype, _, content = value.state
        case "_frombuffer":
            content, dtype, _, _ = value.arguments
        case "scalar":
            dtype, content = value.arguments
        case name:
            raise TypeError(f"no numbers but a {name}")
    if isinstance(content, list):  # an array of Python objects
        return numbers(content)
    if isinstance(content, _StandIn):  # bytes as protocol 2 has them
        content = content.arguments[0].encode("latin1")
    (code, *_), (_, byte_order, *_) = dtype.arguments, dtype.state
    if not re.fullmatch(r"[biuf][1248]", code):
        raise TypeError(f"an array of {code}")
    return np.frombuffer(content, np.dtype(byte_order + code)).astype(np.float64).tolist()


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
