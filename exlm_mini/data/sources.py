"""Sources of documents: local files, hub data sets, and data that come with Python and RDKit.

A source is read in units, each from start to end: a local file, or one file of a data set. A unit
has a fingerprint that changes with its content.

Hub data sets are streamed, so their files are not stored. The entries of ``NAMED`` follow the cards
and file lists of the data sets; a licence is what the card states, not legal advice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.english import embedded_english
from exlm_mini.data.files import check_file, reading, sha256_of
from exlm_mini.data.molecules import embedded_molecules
from exlm_mini.data.text import COMPRESSIONS, SUFFIXES, column_of, file_documents, suffix_of

EMBEDDED: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "text": ("the embedded English", embedded_english),
    "smiles": ("the embedded molecules", embedded_molecules),
}
HUB_PREFIX = "hub:"


@dataclass(frozen=True)
class HubSet:
    """A data set of the Hugging Face hub."""

    id: str
    config: str | None = None
    split: str = "train"
    kind: str | None = None
    """text or smiles; None if it may be either."""
    licence: str = "not known here; see the card of the data set"
    num_documents: float | None = None
    num_text_bytes: float | None = None
    """Approximate size of the column that is read."""
    rows_per_document: int = 1


NAMED = {
    "wikipedia": HubSet(
        "wikimedia/wikipedia", "20231101.en", kind="text",
        licence="CC BY-SA 3.0 and GFDL",
        num_documents=6_400_000, num_text_bytes=20_000_000_000,
    ),
    # Whoever writes this name consents; nothing else asks for consent.
    "bookcorpus-unlicensed": HubSet(
        "rojagtap/bookcorpus", kind="text",
        licence="none: its authors were not asked, and the original was withdrawn",
        num_documents=74_004_228 // 1000, num_text_bytes=4_900_000_000,
        rows_per_document=1000,  # rows are lower-cased sentences; ends of books are not marked
    ),
    "zinc": HubSet(
        "sagawa/ZINC-canonicalized", kind="smiles",
        licence="apache-2.0; ZINC: share small parts",
        num_documents=20_693_269, num_text_bytes=930_000_000,
    ),
}  # fmt: skip
"""Data sets by short name. Sizes are rounded, for estimates only."""


class Unit(NamedTuple):
    """A part of a source, read from start to end."""

    name: str
    fingerprint: str
    """A string that changes with the content."""
    documents: Callable[[], Iterable[str]]


class Source(NamedTuple):
    """A source with its units; no row mixes documents of two sources."""

    name: str
    units: list[Unit]
    facts: dict[str, Any]
    """Licence and revision, for the record of the corpus."""


def hub_set(word: str) -> HubSet | None:
    """The data set named by a short name or ``hub:ID[,CONFIG[,SPLIT]]``; None if it is a file."""
    if not word.startswith(HUB_PREFIX):
        return NAMED.get(word)
    id, *rest = word.removeprefix(HUB_PREFIX).split(",")
    if not id or len(rest) > 2:
        raise UserError(f"'{word}' is not a hub source; write hub:ID,CONFIG,SPLIT")
    config, split = [*rest, "", ""][:2]
    return HubSet(id, config or None, split or "train")


def kind_of(words: Iterable[str]) -> str | None:
    """Kind of data implied by the first data set or file that implies one; None if none does."""
    for word in words:
        hub = hub_set(word)
        is_of_molecules = hub is None and suffix_of(Path(word)) in (".smi", ".lmdb")
        if kind := "smiles" if is_of_molecules else hub and hub.kind:
            return kind
    return None


def check_sources(data: DataConfig) -> None:
    """Check that every ``source`` is known, exists and is of this ``kind``, before any is read."""
    for word in data.source:
        suffix, kind = suffix_of(Path(word)), kind_of([word])
        if hub_set(word) is None and suffix not in SUFFIXES:
            raise UserError(
                f"the source '{word}' is neither a named data set nor a file with a known suffix; "
                f"{nearest(suffix or word, [*NAMED, *SUFFIXES])}"
            )
        if hub_set(word) is None:
            check_file(Path(word))
        if kind not in (None, data.kind):
            raise UserError(
                f"{word} holds {kind}, but data.kind is {data.kind}; set data.kind to {kind}, or "
                f"use a recipe for {kind}"
            )


def open_sources(data: DataConfig) -> list[Source]:
    """Open the sources of a corpus, after ``check_sources``; consecutive files make one source.

    Args:
        data: its ``source`` (empty for the embedded data), ``kind`` and, for tables, ``column``.
    """
    if not data.source:
        embedded = [EMBEDDED[data.kind]] if data.kind in EMBEDDED else []
        return [Source(name, [Unit(name, name, documents)], {}) for name, documents in embedded]
    sources = []
    for is_hub, words in groupby(data.source, key=lambda word: hub_set(word) is not None):
        group = list(words)
        sources += [_hub_source(w, data) for w in group] if is_hub else [_files(group, data)]
    return sources


def _files(words: list[str], data: DataConfig) -> Source:
    units = [
        Unit(
            word,
            sha256_of(Path(word)),
            partial(file_documents, Path(word), data.kind, data.column),
        )
        for word in words
    ]
    return Source(", ".join(words), units, {"licence": "that of the files"})


class Size(NamedTuple):
    """Estimated size of a source; None where it is unknown."""

    documents: float | None
    text_bytes: float | None
    tokens: float | None


BYTES_PER_TOKEN = {"text": 4.3, "smiles": 1.05}
"""Estimates for English in byte-level BPE with some 30,000 tokens, and for SMILES."""
GROWTH = {".parquet": 2, ".lmdb": 0.01}
"""Bytes of text per byte of a file; Uni-Mol's files hold conformations besides the SMILES."""
SAMPLE_BYTES = 4_000_000
"""Bytes to decompress at the beginning of a file, to estimate the rest."""


def size_of(word: str, data: DataConfig) -> Size:
    """Estimated size of an entry of ``data.source``, from a data set's card or the size of a file.

    Args:
        data: its ``kind``, and its ``max_documents`` if the number of documents is known.
    """
    hub = hub_set(word)
    if hub is None:
        num_bytes = _text_bytes(Path(word))
        return Size(None, num_bytes, num_bytes / BYTES_PER_TOKEN[data.kind])
    if hub.num_documents is None or hub.num_text_bytes is None:
        return Size(None, None, None)
    share = min(1.0, (data.max_documents or hub.num_documents) / hub.num_documents)
    num_bytes = hub.num_text_bytes * share
    return Size(hub.num_documents * share, num_bytes, num_bytes / BYTES_PER_TOKEN[data.kind])


def _text_bytes(path: Path) -> float:
    """Estimated bytes of text in a file."""
    growth = GROWTH.get(suffix_of(path), 1.0)
    if opens := COMPRESSIONS.get(path.suffix.lower()):
        with reading(path), open(path, "rb") as file, opens(file) as stream:
            growth *= len(stream.read(SAMPLE_BYTES)) / max(file.tell(), 1)
    return path.stat().st_size * growth


# ---- the hub ----


def _hub_source(word: str, data: DataConfig) -> Source:
    hub = hub_set(word)
    assert hub is not None
    column = data.column or data.kind
    with _reaching(hub.id):
        revision = _revision(hub.id)
        stream = _stream(hub, revision)
        num_units = stream.num_shards
    units = []
    for i in range(num_units):
        content = repr([hub.id, hub.config, hub.split, column, revision, i])
        documents = partial(_hub_documents, hub, revision, column, i)
        units.append(Unit(f"{word} part {i + 1} of {num_units}", content, documents))
    return Source(word, units, {"licence": hub.licence, "revision": revision})


def _reaching(id: str) -> AbstractContextManager[None]:
    """Context manager for access to the hub, whose libraries raise a dozen kinds of errors."""
    remedy = (
        "check its name, configuration and split, and the network; then run the same command "
        "again to resume"
    )
    return reading(f"the hub data set {id}", remedy, Exception)


def files_of_copy(id: str) -> list[Path]:
    """The files of a data set whose ID is a local directory, except those hidden at its top level,
    such as ``.cache``; empty for a data set on the hub."""
    files = (path for path in Path(id).rglob("*") if path.is_file())
    return sorted(path for path in files if not str(path.relative_to(id)).startswith("."))


def _revision(id: str) -> str:
    """The commit of a data set; for a local copy a hash of its files' names and sizes."""
    if Path(id).is_dir():
        sizes = [(str(p.relative_to(id)), p.stat().st_size) for p in files_of_copy(id)]
        return "local " + hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(id).sha)


def _stream(hub: HubSet, revision: str) -> Any:
    """Open the data set as a stream, without reading any rows yet."""
    import datasets

    if (Path(hub.id) / "state.json").is_file():
        return datasets.load_from_disk(hub.id).to_iterable_dataset()
    commit = None if revision.startswith("local ") else revision
    return datasets.load_dataset(
        hub.id, hub.config, split=hub.split, revision=commit, streaming=True
    )


def _hub_documents(hub: HubSet, revision: str, column: str, unit: int) -> Iterator[str]:
    """Documents of one unit."""
    rows = column_of(_hub_rows(hub, revision, column, unit), f"hub data set {hub.id}", column)
    while some := list(islice(rows, hub.rows_per_document)):
        yield "\n".join(filter(None, some))


def _hub_rows(hub: HubSet, revision: str, column: str, unit: int) -> Iterator[dict[str, Any]]:
    with _reaching(hub.id):
        stream = _stream(hub, revision)
        alike = [name for name in stream.column_names or () if name.lower() == column.lower()]
        stream = stream.select_columns(alike) if alike else stream  # skip columns of images
        yield from stream.shard(stream.num_shards, unit)
