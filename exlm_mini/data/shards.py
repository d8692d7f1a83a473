"""Shards, the intermediate files between sources and packs: cleaned documents in Arrow format.

A shard holds consecutive documents of one unit of a source, cut by size alone. A file gets its name
only once it is complete, so repeating a call that was killed finds the shards it had finished.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import whole_file, write_atomically
from exlm_mini.data.molecules import Cleaning, Molecule, clean
from exlm_mini.data.sources import Source, Unit

SHARD_BYTES = 4_000_000
"""Approximate size of the text in a shard; a killed call loses the work on one shard."""
NUM_AT_ONCE = 1000
"""Number of documents that a process cleans at a time."""


class Job(NamedTuple):
    """Arguments that all steps of preparing a corpus share."""

    data: DataConfig
    seed: int
    cleaning: Cleaning
    num_workers: int
    folder: Path
    """Folder of the shards."""
    report: Callable[[str], None]
    """Called with one-line messages about the corpus."""


def shards_of(job: Job, number: int, source: Source) -> Iterator[Path]:
    """Yield the shards of a source, in order; a unit is read only if it lacks a shard."""
    limit = job.data.max_documents
    for index, unit in enumerate(source.units):
        finished = job.folder / f"{number:03d}-{index:05d}.finished"
        if finished.exists():
            shards: Iterable[Path] = sorted(job.folder.glob(f"{finished.stem}-*.arrow"))
        else:
            shards = _read(job, unit, limit, finished)
        for shard in shards:
            yield shard
            if limit is not None:
                limit -= len(table_of(shard))


def _read(job: Job, unit: Unit, limit: int | None, finished: Path) -> Iterator[Path]:
    """Yield the shards of a unit, making those that are missing."""
    import pyarrow as pa

    is_text = job.data.kind == "text"
    clean_rows = partial(_rows, seed=job.seed, cleaning=None if is_text else job.cleaning)
    with _each(1 if is_text else job.num_workers) as each:
        for place, texts in enumerate(_cut(islice(unit.documents(), limit))):
            shard = finished.with_name(f"{finished.stem}-{place:05d}.arrow")
            if not shard.exists():
                some = (texts[i : i + NUM_AT_ONCE] for i in range(0, len(texts), NUM_AT_ONCE))
                write_table(shard, pa.concat_tables(each(clean_rows, some)))
            yield shard
    write_atomically(finished, b"")


def _cut(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in order, in lists of about ``SHARD_BYTES`` of text."""
    texts, num_bytes = [], 0
    for document in filter(None, map(str.strip, documents)):
        texts.append(document)
        num_bytes += len(document)
        if num_bytes >= SHARD_BYTES:
            yield texts
            texts, num_bytes = [], 0
    if texts:
        yield texts


# ---- cleaning ----


@contextmanager
def _each(num_workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Context manager that yields a ``map`` over this many processes."""
    if num_workers == 1:
        yield map
        return
    try:
        with ProcessPoolExecutor(num_workers, initializer=_begin_worker) as pool:
            yield pool.map
    except BrokenProcessPool:
        raise UserError(
            "a worker process died, perhaps because memory ran out; run the same command again to "
            "resume (with fewer --workers)"
        ) from None


def _begin_worker() -> None:
    """Make a worker end with its parent, and leave the handling of Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _rows(texts: list[str], seed: int, cleaning: Cleaning | None) -> Any:
    """Table with the ``text`` and ``hash`` of documents; a rejected molecule has no hash."""
    import pyarrow as pa

    rows = [
        Molecule(text, text) if cleaning is None else clean(text, cleaning) for text in texts
    ]
    spellings = [
        text if row is None else row.spelling for text, row in zip(texts, rows, strict=True)
    ]
    hashes = [None if row is None else hash_of(row.key, seed) for row in rows]
    return pa.table(
        {"text": pa.array(spellings, pa.large_string()), "hash": pa.array(hashes, pa.uint64())}
    )


def hash_of(text: str, seed: int) -> int:
    """A 64-bit hash of a document's content, which decides its side of the split and its bucket."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest)


# ---- shards on disk ----


def documents(shard: Path) -> Any:
    """Table with the ``text`` and ``hash`` of a shard's documents, without rejected molecules."""
    table = table_of(shard)
    return table.filter(table["hash"].is_valid())


def hashes(shard: Path) -> np.ndarray:
    """Hashes of a shard's documents, without rejected molecules; uint64 (D,)."""
    return documents(shard)["hash"].to_numpy()


def rejected_in(shard: Path) -> list[str]:
    """The molecules of a shard that RDKit rejects."""
    table = table_of(shard)
    return table["text"].filter(table["hash"].is_null()).to_pylist()


def write_table(path: Path, table: Any) -> None:
    """Write an Arrow file, which gets its name only once it is complete."""
    import pyarrow as pa

    with whole_file(path) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def table_of(path: Path) -> Any:
    """The table in an Arrow file, memory-mapped."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
