"""Shards of a corpus on their way to its packs: Arrow files, made with ``datasets``.

A shard is a run of documents of one unit of a source, cut by size alone. It is written twice, as
cleaned documents and as token ids. A file gets its name when it is complete, so a call that was
killed is repeated and finds what was finished.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Change, Cleaning, Molecule, clean
from exlm_mini.data.files import whole_file, write_atomically
from exlm_mini.data.rows import Rows
from exlm_mini.data.smiles import looks_like_smiles
from exlm_mini.data.sources import Source
from exlm_mini.data.tokenizer import Tokenizer

SHARD_BYTES = 4_000_000
"""Text of a shard; a kill loses the work on one."""


class Job(NamedTuple):
    """What the steps have in common."""

    data: DataConfig
    seed: int
    cleaning: Cleaning
    num_workers: int
    folder: Path
    """Of the Arrow files."""
    report: Callable[[str], None]
    """Receives lines about the corpus."""
    progress: Callable[[str, float], None]
    """Receives the name of a step, and the bytes of text of each shard that it has finished."""


class Shard(NamedTuple):
    """Some cleaned documents of a unit: ``text``, ``hash`` and ``changes``."""

    path: Path
    num_read: int
    """Documents before RDKit rejected some."""

    def texts(self) -> Any:
        """The documents, memory-mapped."""
        return _table(self.path)["text"]

    def text_bytes(self) -> np.ndarray:
        """Their sizes, (D,)."""
        import pyarrow.compute

        return pyarrow.compute.binary_length(self.texts()).to_numpy()

    def column(self, name: str) -> np.ndarray:
        """``hash`` or ``changes``, (D,)."""
        # Not in the numpy format of datasets, which makes int64 of uint64.
        return _table(self.path)[name].to_numpy()


def documents_of(job: Job, number: str, source: Source) -> Iterator[Shard]:
    """The cleaned documents of a source. A unit is read unless all its shards are there."""
    limit = job.data.max_documents
    for index, unit in enumerate(source.units):
        finished = job.folder / f"{number}-{index:05d}.json"
        if finished.exists():
            lengths = json.loads(finished.read_text())
            shards = [Shard(_path(finished, i), n) for i, n in enumerate(lengths)]
        else:
            shards = []
            for texts in _cut(islice(unit.documents(), limit)):
                shards.append(Shard(_path(finished, len(shards)), len(texts)))
                _make_documents(job, unit.name, shards[-1].path, texts)
            write_atomically(finished, json.dumps([one.num_read for one in shards]).encode())
        yield from shards
        if limit is not None:
            limit -= sum(shard.num_read for shard in shards)


def _path(finished: Path, number: int) -> Path:
    return finished.with_name(f"{finished.stem}-{number:05d}.arrow")


def _make_documents(job: Job, unit: str, path: Path, texts: list[str]) -> None:
    from datasets import Dataset

    is_text = job.data.kind == "text"
    if is_text and looks_like_smiles(texts[:200]):
        job.report(
            f"{unit} looks like molecules, and is read as text; to read them as molecules, take a "
            "recipe of molecules or data.kind smiles"
        )
    _make(
        path, Dataset.from_dict({"text": texts}), _cleaned, 1 if is_text else job.num_workers,
        seed=job.seed, cleaning=None if is_text else job.cleaning,
    )  # fmt: skip
    job.progress("reading", sum(map(len, texts)))


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


def _cleaned(table: Any, seed: int, cleaning: Cleaning | None) -> Any:
    """Documents with their hashes and what was done to them; rejected molecules are left out."""
    import pyarrow as pa

    texts = table["text"].to_pylist()
    if cleaning is None:
        rows = [Molecule(text, text, Change(0)) for text in texts]
    else:
        rows = [row for text in texts if (row := clean(text, cleaning)) is not None]
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


def encoded(job: Job, shard: Shard) -> Path:
    """The file with the token ids of a shard, row by row."""
    from datasets import Dataset

    path, tokenizer = shard.path.with_suffix(".ids.arrow"), job.folder / "tokenizer.json"
    documents = Dataset.from_file(str(shard.path)).select_columns(["text"])
    _make(path, documents, _as_ids, 1, tokenizer_path=tokenizer)
    job.progress("encoding", int(shard.text_bytes().sum()))
    return path


def _as_ids(table: Any, tokenizer_path: Path) -> Any:
    import pyarrow as pa

    tokenizer = _tokenizer(tokenizer_path)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    ids_D = tokenizer.encode_batch(table["text"].to_pylist())
    offsets = np.cumsum([0, *map(len, ids_D)], dtype=np.int32)
    token_ids = np.fromiter(chain.from_iterable(ids_D), dtype, offsets[-1])
    return pa.table({"ids": pa.ListArray.from_arrays(offsets, token_ids)})


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def ids_of(path: Path) -> Rows:
    """The token ids of all documents of a shard."""
    lists = _table(path)["ids"].combine_chunks()
    return Rows(lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy()))


# ---- Arrow files ----


def _make(path: Path, data: Any, function: Callable, num_workers: int, **fixed: Any) -> None:
    """Write the rows of a function of Arrow tables, unless the file exists.

    Args:
        path: of the file.
        data: a ``datasets.Dataset``.
        function: takes a table and ``fixed``.
        num_workers: processes.
    """
    import datasets
    import multiprocess
    import pyarrow as pa

    if path.exists():
        return
    datasets.disable_progress_bars()
    _look_after_workers()
    try:
        result = data.with_format("arrow").map(
            function,
            batched=True,
            remove_columns=data.column_names,
            fn_kwargs=fixed,
            num_proc=num_workers if num_workers > 1 else None,
            # Its files would be taken for another corpus of the same name, and fail on a full disk.
            keep_in_memory=True,
            new_fingerprint=path.stem,
        )
    except multiprocess.TimeoutError as error:  # waiting for the processes, after an interrupt
        raise (error.__context__ or error) from None
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise UserError(
            "a worker process died, perhaps for want of memory; the same command goes on (with "
            "fewer --workers)"
        ) from None
    table = result.data.table
    with whole_file(path) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


@cache
def _look_after_workers() -> None:
    """Call ``_begin_worker`` in every process that ``datasets`` starts."""
    import multiprocess

    multiprocess.util.register_after_fork(_begin_worker, lambda begin: begin())


def _begin_worker() -> None:
    """A worker dies with its parent, which decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _table(path: Path) -> Any:
    """The rows of a file, memory-mapped."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
