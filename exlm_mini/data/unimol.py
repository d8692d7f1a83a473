"""Read molecules from Uni-Mol's LMDB files, whose values are pickles, without executing them.

A pickle is a program that may call any function by its name. Here every name resolves to an empty
stand-in, so no code from the file runs; arrays and RDKit's molecules come back as stand-ins.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading


class _StandIn:
    """Accepts any arguments and state, and keeps nothing."""

    def __new__(cls, *arguments: object) -> _StandIn:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _StandIn


def load_restricted(content: bytes) -> Any:
    """The dicts, lists, strings and numbers of a pickle, with stand-ins for anything else.

    Raises:
        Exception: if the pickle is damaged; it may be of nearly any type.
    """
    return _Unpickler(io.BytesIO(content)).load()


def lmdb_rows(path: Path) -> Iterator[Any]:
    """Yield every entry, in LMDB's order; a damaged page within the file makes LMDB crash.

    Args:
        path: a single file, as Uni-Mol writes it with ``subdir=False``.
    """
    import lmdb

    with (
        reading(path, errors=lmdb.Error),
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        length = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if path.stat().st_size < length:  # a missing page would kill the process
            raise EOFError(f"it is truncated: {length:,} bytes are expected")
        for key, value in transaction.cursor():
            try:
                yield load_restricted(value)
            except Exception as error:  # a damaged pickle raises nearly anything
                raise UserError(
                    f"{path} entry {key[:40]!r} is damaged or is not a Uni-Mol entry ({error}); "
                    "none of its code was run; leave the file out"
                ) from None
