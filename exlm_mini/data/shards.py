"""Shards of a corpus on their way to its packs: Arrow files, made with ``datasets``.

A shard is a run of documents of one unit of a source, cut by size alone. It is written twice, as
cleaned documents and as token ids. A file gets its name when it is complete, so a call that was
killed is repeated and finds what was finished.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import whole_file, write_atomically
from exlm_mini.data.molecules import Change, Cleaning, Molecule, clean, looks_like_smiles
from exlm_mini.data.packs import Rows, token_dtype
from exlm_mini.data.sources import Source
from exlm_mini.data.tokenizer import Tokenizer

SHARD_BYTES = 4_000_000
"""Text of a shard; a kill loses the work on one."""
NUM_ENCODED = 1000
"""Documents that are encoded at a time."""


class Job(NamedTuple):
    """What the steps have in common."""

    data: DataConfig
    seed: int
    cleaning: Cleaning
    num_workers: int
    folder: Path
    """Of the shards."""
    report: Callable[[str], None]
    """Receives lines about the corpus."""


def shards_of(job: Job, number: int, source: Source) -> Iterator[Path]:
    """The cleaned documents of a source. A unit is read unless all its shards are there."""
    limit = job.data.max_documents
    for index, unit in enumerate(source.units):
        stem = f"{number:03d}-{index:05d}"
        finished = job.folder / f"{stem}.finished"
        if finished.exists():
            shards: Iterable[Path] = sorted(job.folder.glob(f"{stem}-*.arrow"))
        else:
            shards = _read(job, unit.name, islice(unit.documents(), limit), finished)
        for shard in shards:
            yield shard
            if limit is not None:
                limit -= len(table_of(shard))


def _read(job: Job, unit: str, texts: Iterable[str], finished: Path) -> Iterator[Path]:
    """Make the shards of a unit that are not there yet."""
    for place, some in enumerate(_cut(texts)):
        if job.data.kind == "text" and looks_like_smiles(some[:200]):
            job.report(
                f"{unit} looks like molecules, and is read as text; to read them as molecules, "
                "take a recipe of molecules or data.kind smiles"
            )
        shard = finished.with_name(f"{finished.stem}-{place:05d}.arrow")
        if not shard.exists():
            write_table(shard, _cleaned(job, some))
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


def _cleaned(job: Job, texts: list[str]) -> Any:
    """The table of a shard: ``text``, ``hash`` and ``changes`` of each document."""
    import datasets
    import multiprocess

    datasets.disable_progress_bars()
    _look_after_workers()
    is_text = job.data.kind == "text"
    try:
        result = datasets.Dataset.from_dict({"text": texts}).with_format("arrow").map(
            _rows,
            batched=True,
            fn_kwargs={"seed": job.seed, "cleaning": None if is_text else job.cleaning},
            num_proc=None if is_text or job.num_workers == 1 else job.num_workers,
            # Its files would be taken for another corpus of the same name, and fail on a full disk.
            keep_in_memory=True,
            new_fingerprint="cleaned",
        )  # fmt: skip
    except multiprocess.TimeoutError as error:  # waiting for the processes, after an interrupt
        raise (error.__context__ or error) from None
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise UserError(
            "a worker process died, perhaps for want of memory; the same command goes on (with "
            "fewer --workers)"
        ) from None
    return result.data.table


def _rows(table: Any, seed: int, cleaning: Cleaning | None) -> Any:
    """The rows of some documents; a rejected molecule stays as it was read."""
    import pyarrow as pa

    rows = [
        Molecule(text, text, Change(0))
        if cleaning is None
        else clean(text, cleaning) or Molecule(text, text, Change.REJECTED)
        for text in table["text"].to_pylist()
    ]
    return pa.table(
        {
            "text": pa.array([row.spelling for row in rows], pa.large_string()),
            "hash": np.array([hash_of(row.key, seed) for row in rows], np.uint64),
            "changes": np.array([row.changes for row in rows], np.uint8),
        }
    )


def hash_of(text: str, seed: int) -> int:
    """A 64-bit hash of a document's content, which decides its side of the split and its bucket."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest)


@cache
def _look_after_workers() -> None:
    """Call ``_begin_worker`` in every process that ``datasets`` starts."""
    import multiprocess

    multiprocess.util.register_after_fork(_begin_worker, lambda begin: begin())


def _begin_worker() -> None:
    """A worker dies with its parent, which decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    # PR_SET_PDEATHSIG would kill it with the thread of the pool that started it.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- shards on disk ----


def documents(shard: Path, are_rejected: bool = False) -> Any:
    """The documents of a shard that are kept, or the others: ``text``, ``hash``, ``changes``."""
    table = table_of(shard)
    return table.filter((table["changes"].to_numpy() == Change.REJECTED) == are_rejected)


def hashes(shard: Path) -> np.ndarray:
    """Of the documents that are kept, (D,)."""
    # Not in the numpy format of datasets, which makes int64 of uint64.
    return documents(shard)["hash"].to_numpy()


def encode(shard: Path, tokenizer: Tokenizer) -> None:
    """Write the token ids of a shard beside it, unless they are there."""
    import pyarrow as pa

    path = shard.with_suffix(".ids")
    if path.exists():
        return
    texts = (part["text"].to_pylist() for part in documents(shard).to_batches(NUM_ENCODED))
    ids_D = list(chain.from_iterable(map(tokenizer.encode_batch, texts)))
    offsets = np.cumsum([0, *map(len, ids_D)], dtype=np.int32)
    dtype = token_dtype(tokenizer.vocab_size)
    token_ids = np.fromiter(chain.from_iterable(ids_D), dtype, offsets[-1])
    write_table(path, pa.table({"ids": pa.ListArray.from_arrays(offsets, token_ids)}))


def ids_of(shard: Path) -> Rows:
    """The token ids of all documents of a shard."""
    lists = table_of(shard.with_suffix(".ids"))["ids"].combine_chunks()
    return Rows(lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy()))


def write_table(path: Path, table: Any) -> None:
    """Write a file that is complete once it has its name."""
    import pyarrow as pa

    with whole_file(path) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def table_of(path: Path) -> Any:
    """The rows of a file, memory-mapped."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
