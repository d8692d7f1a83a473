"""Writes files of the kinds that a corpus is made from."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from exlm_mini.data.toy_grammars import grammar


def write_text(path: Path, num_documents: int = 200, seed: int = 0) -> str:
    """Write documents of one line, about 130 bytes each; returns the path."""
    rng, words = np.random.default_rng(seed), grammar("pairs").words
    path.write_text("\n".join(" ".join(rng.choice(words, 30)) for _ in range(num_documents)))
    return str(path)


def write_hub_copy(folder: Path, texts: list[str]) -> str:
    """Write a data set of three Parquet files, as from the hub; returns its name as a source."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for part in range(3):
        rows = texts[part::3]
        table = pyarrow.table({"text": rows, "id": list(range(len(rows)))})
        parquet.write_table(table, folder / f"train-{part:05d}-of-00003.parquet")
    return f"hub:{folder}"


def write_lmdb(path, values):
    """Write values as Uni-Mol does: bytes as they are, all others pickled."""
    import lmdb

    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, value in enumerate(values):
            content = value if isinstance(value, bytes) else pickle.dumps(value, protocol=5)
            transaction.put(str(i).encode(), content)
    return path
