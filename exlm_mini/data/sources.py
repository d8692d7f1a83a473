"""Sources of documents: local files, the hub, and data that come with Python and RDKit.

A source consists of units (a local file, or a file of a hub data set), each read from start to
end. A unit has a fingerprint, which shows whether the shards made from it are up to date.

The hub is streamed, so the raw data are not stored. Entries of named data sets follow their cards
and file lists; licences are what the cards state, not advice.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.english import embedded_english
from exlm_mini.data.files import sha256_of
from exlm_mini.data.smiles import embedded_molecules
from exlm_mini.data.text import (
    DEFAULT_COLUMNS,
    SUFFIXES,
    check_column,
    document_text,
    file_documents,
    suffix_of,
)
from exlm_mini.data.unimol import SUFFIX as LMDB_SUFFIX
from exlm_mini.data.unimol import lmdb_documents

EMBEDDED = {
    "text": ("the embedded English", embedded_english),
    "smiles": ("the embedded molecules", embedded_molecules),
}
HUB_PREFIX = "hub:"
NUM_ROWS_BATCH = 1000


@dataclass(frozen=True)
class HubSet:
    """A data set of the Hugging Face hub."""

    id: str
    config: str | None = None
    split: str = "train"
    column: str | None = None
    """None: the default column of the kind."""
    kind: str | None = None
    """text or smiles; None: either."""
    licence: str = "not known here; see the card of the data set"
    num_documents: float = 0
    num_text_bytes: float = 0
    """Approximate size of the column; 0 if unknown."""
    rows_per_document: int | None = None
    """Rows are pieces; this many make one document."""
    heading: str | None = None
    """Rows are lines; a line that matches begins a document."""
    caveat: str | None = None
    """Why a user has to confirm it with --accept."""


NAMED = {
    "wikipedia": HubSet(
        "wikimedia/wikipedia", "20231101.en", kind="text",
        licence="CC BY-SA 3.0 and GFDL",
        num_documents=6_400_000, num_text_bytes=20_000_000_000,
    ),
    "bookcorpus": HubSet(
        "rojagtap/bookcorpus", kind="text",
        licence="none stated; the authors licensed nothing",
        num_documents=74_004_228 // 1000, num_text_bytes=4_900_000_000,
        rows_per_document=1000,  # rows are sentences, and where a book ends is not marked
        caveat="BookCorpus has no licence: its authors were not asked, and the original was "
        "withdrawn. The rows are lower-cased sentences",
    ),
    "wikitext-2": HubSet(
        "Salesforce/wikitext", "wikitext-2-raw-v1", kind="text",
        licence="CC BY-SA 3.0 and GFDL", num_documents=600, num_text_bytes=11_000_000,
        heading=r"^ ?= [^=](.*[^=])? = ?$",
    ),
    "wikitext-103": HubSet(
        "Salesforce/wikitext", "wikitext-103-raw-v1", kind="text",
        licence="CC BY-SA 3.0 and GFDL", num_documents=28_500, num_text_bytes=540_000_000,
        heading=r"^ ?= [^=](.*[^=])? = ?$",
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
    fingerprint: Callable[[], str]
    """Changes with the content; reads a whole local file."""
    documents: Callable[[], Iterable[str]]


class Source(NamedTuple):
    """A source with its units; ``facts`` go into the side files, with the ``sha256`` of files."""

    name: str
    units: list[Unit]
    facts: dict[str, Any]


def _named_or_hub(word: str) -> HubSet | None:
    """A data set by its short name, or as ``hub:ID[,CONFIG[,SPLIT[,COLUMN]]]``."""
    if not word.startswith(HUB_PREFIX):
        return NAMED.get(word)
    id, *rest = word.removeprefix(HUB_PREFIX).split(",")
    if not id or len(rest) > 3:
        raise UserError(f"'{word}' is no hub source; write hub:ID,CONFIG,SPLIT,COLUMN")
    config, split, column = [part or None for part in [*rest, "", "", ""][:3]]
    return HubSet(id, config, split or "train", column)


def kind_of(words: Iterable[str]) -> str | None:
    """The kind of a source if it is known: by the entry of a named set or the suffix of a file."""
    for word in words:
        if word in NAMED:
            return NAMED[word].kind
        if not word.startswith(HUB_PREFIX) and {".smi", LMDB_SUFFIX} & set(Path(word).suffixes):
            return "smiles"
    return None


def check_source(words: tuple[str, ...], kind: str, accepted: Iterable[str]) -> None:
    """Refuse an impossible source before anything is read.

    Args:
        words: a name, a hub id, or paths.
        kind: text or smiles.
        accepted: names of the sets whose caveat the user accepts.

    Raises:
        UserError: for an unknown name or suffix, a missing file, a set of the other kind, or a
            caveat that was not accepted.
    """
    hub = _named_or_hub(words[0])
    if hub is None:
        for word in words:
            _check_file(word)
        return
    if len(words) > 1:
        raise UserError(
            f"the source {' '.join(words)} mixes a data set with others; give each its own --source"
        )
    if hub.kind not in (None, kind):
        raise UserError(
            f"{words[0]} holds {hub.kind}, data.kind is {kind}; prepare each kind by itself"
        )
    if hub.caveat and words[0] not in accepted:
        raise UserError(f"{hub.caveat}; to use it all the same, add --accept {words[0]}")


def _check_file(word: str) -> None:
    known = (*SUFFIXES, LMDB_SUFFIX)
    suffix = suffix_of(Path(word))
    if suffix not in known:
        raise UserError(
            f"the source '{word}' is no named data set and has no known suffix; "
            f"{nearest(suffix or word, [*NAMED, *known])}"
        )
    if not Path(word).is_file():
        raise UserError(f"cannot read {word} (no such file); check --source")


def open_source(words: tuple[str, ...], data: DataConfig) -> Source:
    """Open a source.

    Args:
        words: as for ``check_source``; none: the files, hub data set or embedded data of ``data``.
        data: ``kind``, and the column of tables.
    """
    if words and (hub := _named_or_hub(words[0])):
        return _hub_source(words[0], hub, data)
    if words or data.files:
        return _local_source(words or data.files, data)
    if data.hub:
        return _hub_source(data.hub, HubSet(data.hub, data.hub_config, data.hub_split), data)
    name, documents = EMBEDDED[data.kind]
    return Source(name, [Unit(name, lambda: name, documents)], {})


# ---- local files ----


def _local_source(words: tuple[str, ...], data: DataConfig) -> Source:
    facts = {"files": list(words), "licence": "that of the files", "sha256": {}}
    units = [
        Unit(word, partial(sha256_of, Path(word)), partial(_documents, Path(word), data))
        for word in words
    ]
    return Source(", ".join(words), units, facts)


def _documents(path: Path, data: DataConfig) -> Iterator[str]:
    if path.suffix.lower() == LMDB_SUFFIX:
        return lmdb_documents(path, data.column)
    return file_documents(path, data.kind, data.column)


# ---- the hub ----


def _hub_source(word: str, hub: HubSet, data: DataConfig) -> Source:
    with _reaching(hub.id):
        facts: dict[str, Any] = {
            "hub": hub.id,
            "config": hub.config,
            "split": hub.split,
            "column": hub.column or data.column or DEFAULT_COLUMNS[data.kind],
            "revision": _revision(hub.id),
            "licence": hub.licence,
        }
        facts["num_units"] = _stream(facts).num_shards
    units = [
        Unit(
            f"{word} part {i + 1} of {facts['num_units']}",
            partial(_fingerprint, facts, i),
            partial(_hub_documents, hub, facts, i),
        )
        for i in range(facts["num_units"])
    ]
    return Source(word, units, facts)


def _fingerprint(facts: dict, unit: int) -> str:
    parts = [facts[name] for name in ("hub", "config", "split", "column", "revision")]
    return hashlib.sha256(repr([*parts, unit]).encode()).hexdigest()


def _revision(id: str) -> str:
    """The commit of a data set; for a local copy a hash of its files' names and sizes."""
    if Path(id).is_dir():
        files = sorted(path for path in Path(id).rglob("*") if path.is_file())
        listing = [(str(path.relative_to(id)), path.stat().st_size) for path in files]
        return "local " + hashlib.sha256(repr(listing).encode()).hexdigest()[:16]
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(id).sha)


def _stream(facts: dict) -> Any:
    """The data set as a stream; reads no rows yet."""
    import datasets

    return datasets.load_dataset(
        facts["hub"],
        facts["config"],
        split=facts["split"],
        revision=None if facts["revision"].startswith("local ") else facts["revision"],
        streaming=True,
    )


def _hub_documents(hub: HubSet, facts: dict, unit: int) -> Iterator[str]:
    """Documents of one unit; never none."""
    source, column = f"hub data set {facts['hub']}", facts["column"]
    with _reaching(hub.id):
        stream = _stream(facts)
        if stream.column_names is not None:
            check_column(source, column, stream.column_names)
            stream = stream.select_columns([column])
        batches = iter(stream.shard(facts["num_units"], unit).iter(batch_size=NUM_ROWS_BATCH))
    yield from _grouped(_texts(batches, hub.id, column), hub)


def _texts(batches: Iterator[dict], id: str, column: str) -> Iterator[str]:
    """One column of a stream."""
    while True:
        with _reaching(id):
            batch = next(batches, None)
        if batch is None:
            return
        check_column(f"hub data set {id}", column, list(batch))
        for value in batch[column]:
            yield document_text(f"hub data set {id}", column, value)


def _grouped(rows: Iterator[str], hub: HubSet) -> Iterator[str]:
    """Documents made of rows: each row, a fixed number of rows, or from heading to heading."""
    if hub.rows_per_document:
        while group := list(islice(rows, hub.rows_per_document)):
            yield "\n".join(row.strip() for row in group if row.strip())
    elif hub.heading:
        heading = re.compile(hub.heading)
        document: list[str] = []
        for row in (row.rstrip() for row in rows):
            if heading.match(row) and document:
                yield "\n".join(document)
                document = []
            if row:
                document.append(row)
        yield "\n".join(document)
    else:
        yield from rows


@contextlib.contextmanager
def _reaching(id: str) -> Iterator[None]:
    """Context of access to the hub, whose libraries raise a dozen unrelated types of errors."""
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
        raise UserError(
            f"cannot read the hub data set {id} ({reason}); check its name, configuration and "
            "split, and the network; the same command goes on"
        ) from error
