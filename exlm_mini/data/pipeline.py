"""From sources to token ids: the first three passes over a corpus, shard by shard.

Finished shards (see ``shards``) are not made again.

Dimension key: S sources, D documents of a shard.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini import __version__
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import CleaningCounts
from exlm_mini.data.files import seal_of, sha256_of, write_json
from exlm_mini.data.request import MEGABYTE, Preparation
from exlm_mini.data.shards import (
    Place,
    finished_shard,
    make_documents,
    make_tokens,
    read_if_sound,
)
from exlm_mini.data.smiles import looks_like_smiles, require_rdkit
from exlm_mini.data.sources import Source, Unit, open_source
from exlm_mini.data.tokenizer import (
    Tokenizer,
    given_tokenizer,
    train_byte_level_bpe,
    train_smiles,
)
from exlm_mini.data.workers import Workers

LESSON_BYTES = 500 * MEGABYTE
"""Most text that a tokenizer is trained on."""
NUM_BUCKETS = 1 << 16
"""Buckets of documents by hash; the first buckets are a sample that does not depend on order."""
LIBRARIES = {"text": ("numpy", "tokenizers"), "smiles": ("numpy", "rdkit", "tokenizers")}
NUM_UNKNOWN_SHOWN = 5


Progress = Callable[[str, float], None]
"""Called at the start of a pass and after each shard: name of the pass, bytes of text so far."""


class Shard(NamedTuple):
    """A finished shard: its files, and the record of its documents."""

    place: Place
    record: dict[str, Any]


class Passes:
    """The passes over text or molecules, in order."""

    def __init__(
        self,
        wanted: Preparation,
        folder: Path,
        report: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self.wanted, self.folder = wanted, folder
        self.report, self.progress = report, progress
        # Report a missing package or tokenizer before hours of reading.
        self.given = given_tokenizer(wanted.data)
        if wanted.data.kind == "smiles":
            require_rdkit()
        self.versions = versions(wanted.data.kind)
        self.made_with = seal_of(
            {
                "kind": wanted.data.kind,
                "cleaning": asdict(wanted.cleaning),
                "seed": wanted.seed,
                "column": wanted.data.column,
                "shard_megabytes": wanted.shard_megabytes,
                "versions": self.versions,
            }
        )
        self.sources = [open_source(words, wanted.data) for words in wanted.sources or [()]]
        self.parts: list[list[Shard]] = []
        """The shards of each source, in order."""
        self.cleaning: list[CleaningCounts] = []

    # ---- pass 1 ----

    def read(self, workers: Workers) -> None:
        """Read and clean all documents; stop if too many molecules are rejected."""
        self._begin("reading")
        for number, source in enumerate(self.sources):
            shards: list[Shard] = []
            limit = self.wanted.data.max_documents
            for index, unit in enumerate(source.units):
                if limit == 0:
                    break
                fingerprint = unit.fingerprint()
                if "sha256" in source.facts:
                    source.facts["sha256"][unit.name] = fingerprint
                want = {"unit": fingerprint, "made_with": self.made_with, "limit": limit}
                made = self._read_unit(workers, (number, index), unit, want)
                if limit is not None:
                    limit -= sum(shard.record["num_read"] for shard in made)
                shards += made
            self.parts.append(shards)
            self.cleaning.append(self._check(source, shards))

    def _read_unit(
        self, workers: Workers, number: tuple[int, int], unit: Unit, want: dict[str, Any]
    ) -> list[Shard]:
        """The shards of one unit, which is read only if one of them is missing."""
        path = self.folder / "s{}-u{:04d}.unit.json".format(*number)
        stored = read_if_sound(path)
        if want.items() <= stored.items():
            places = [Place(self.folder, *number, i) for i in range(stored["num_shards"])]
            found = [finished_shard(place.file("documents"), want) for place in places]
            records = list(filter(None, found))
            if len(records) == len(places):
                for record in records:
                    self._count(record)
                return list(map(Shard, places, records))
        places, records = [], []

        def tasks() -> Iterator[tuple]:
            size = self.wanted.shard_megabytes * MEGABYTE
            cleaning = self.wanted.cleaning if self.wanted.data.kind == "smiles" else None
            for i, texts in enumerate(_cut(islice(unit.documents(), want["limit"]), size)):
                if i == 0 and cleaning is None and looks_like_smiles(texts[:200]):
                    self.report(
                        f"{unit.name} looks like molecules, and is read as text; to read them as "
                        "molecules, take a recipe of molecules or data.kind smiles"
                    )
                places.append(Place(self.folder, *number, i))
                mine = {**want, "text_bytes": sum(map(len, texts))}
                yield places[i], mine, texts, self.wanted.seed, cleaning

        for record in workers.run(make_documents, tasks()):
            records.append(record)
            self._count(record)
        write_json(path, {**want, "num_shards": len(records)})
        return list(map(Shard, places, records))

    def _check(self, source: Source, shards: list[Shard]) -> CleaningCounts:
        """Counts of cleaning a source; raises an error if RDKit rejects too many molecules."""
        counts = CleaningCounts()
        for _, record in shards:
            counts.add(record["cleaning"])
        num_read = sum(record["num_read"] for _, record in shards)
        if not num_read:
            raise UserError(f"{source.name} holds no documents; leave it out")
        self.report(f"read {num_read:,} documents from {source.name}")
        if self.wanted.data.kind == "smiles":
            self.report(f"{source.name}: {counts.describe()}")
        limit = self.wanted.data.max_rejected
        if counts.rejected > limit * num_read:
            raise UserError(
                f"{source.name}: RDKit rejects {counts.rejected:,} of {num_read:,} molecules "
                f"({counts.rejected / num_read:.2%}, data.max_rejected is {limit:.2%}), such as "
                f"{', '.join(map(repr, counts.rejected_examples))}; mend or remove them, or "
                "raise data.max_rejected; text is read with data.kind text"
            )
        return counts

    # ---- pass 2 ----

    def split(self) -> None:
        """Hold out the documents with the lowest hashes, so that equal ones stay together."""
        hashes = [p.load("documents", "hash_D")[0] for p, _ in chain.from_iterable(self.parts)]
        share = self.wanted.data.validation_share
        self.bound = held_out_bound(np.concatenate(hashes), share)

    def learn_tokenizer(self) -> None:
        """Take the given tokenizer, the one trained earlier, or train one."""
        path, side = self.folder / "tokenizer.json", self.folder / "tokenizer.side.json"
        if self.given is not None:
            self.tokenizer = self.given
            self.given.save(path)
            return
        want = seal_of(
            {
                "documents": [[s.record["sha256"] for s in part] for part in self.parts],
                "bound": str(self.bound),
                "vocab_size": self.wanted.data.vocab_size,
            }
        )
        stored = read_if_sound(side)
        is_mine = stored.get("want") == want and path.exists()
        if is_mine and stored.get("sha256") == sha256_of(path):
            self.tokenizer = Tokenizer.load(path)
            return
        self.report("learning the tokenizer from the training documents")
        learn = train_smiles if self.wanted.data.kind == "smiles" else train_byte_level_bpe
        self.tokenizer = learn(self._lessons(), self.wanted.data.vocab_size)
        self.tokenizer.save(path)
        write_json(side, {"want": want, "sha256": self.tokenizer.sha256})

    def _lessons(self) -> Iterator[str]:
        """Training documents for the tokenizer, the same share of each source."""
        totals_S = [self._bucket_bytes(part) for part in self.parts]
        share = min(1.0, LESSON_BYTES / max(sum(total.sum() for total in totals_S), 1.0))
        for part, total in zip(self.parts, totals_S, strict=True):
            num_buckets = bucket_bound(total, total.sum() * share)
            for place, _ in part:
                (hash_D,) = place.load("documents", "hash_D")
                is_lesson_D = (hash_D > self.bound) & (hash_D % NUM_BUCKETS < num_buckets)
                texts = place.texts()
                yield from (texts[i] for i in np.flatnonzero(is_lesson_D))

    def _bucket_bytes(self, part: list[Shard]) -> np.ndarray:
        """Bytes of training text per bucket of a source."""
        total = np.zeros(NUM_BUCKETS)
        for place, _ in part:
            hash_D, lengths_D = place.load("documents", "hash_D", "lengths_D")
            bucket_D = (hash_D % NUM_BUCKETS).astype(np.int64)
            total += np.bincount(bucket_D, lengths_D * (hash_D > self.bound), NUM_BUCKETS)
        return total

    # ---- pass 3 ----

    def encode(self, workers: Workers) -> None:
        """Tokenize every shard; stop if too many tokens are unknown."""
        self._begin("encoding")
        num_tokens, num_unknown, pieces = 0, 0, Counter[str]()
        path = self.folder / "tokenizer.json"
        made_of = (
            (
                place,
                {
                    "documents": record["sha256"],
                    "tokenizer": self.tokenizer.sha256,
                    "text_bytes": record["text_bytes"],
                },
                path,
            )
            for place, record in chain.from_iterable(self.parts)
        )
        for record in workers.run(make_tokens, made_of):
            pieces.update(record["unknown"])
            num_tokens += record["num_tokens"]
            num_unknown += record["num_unknown"]
            self._count(record)
        limit = self.wanted.data.max_unknown
        if num_unknown > limit * num_tokens:
            names = ", ".join(source.name for source in self.sources)
            # repr keeps any piece on one line.
            most = pieces.most_common(NUM_UNKNOWN_SHOWN)
            shown = ", ".join(f"{piece[:40]!r} {count:,} times" for piece, count in most)
            raise UserError(
                f"{names}: {num_unknown / num_tokens:.2%} of the tokens are [UNK] "
                f"(data.max_unknown is {limit:.2%}), most often {shown}; set "
                "data.tokenizer to none, or raise data.vocab_size or data.max_unknown"
            )

    # ---- progress ----

    def _begin(self, name: str) -> None:
        self.name, self.done = name, 0.0
        self.progress(name, 0.0)

    def _count(self, record: dict) -> None:
        self.done += record["text_bytes"]
        self.progress(self.name, self.done)


def held_out_bound(hashes: np.ndarray, validation_share: float) -> np.uint64:
    """The largest hash of a held-out document; each side gets at least one document.

    Raises:
        UserError: if there are fewer than two different documents.
    """
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise UserError(
            f"the data hold {len(distinct)} different document(s); at least 2 are needed, one "
            "to train on and one to validate with (blank lines divide a .txt file)"
        )
    num_held_out = min(max(1, round(validation_share * len(distinct))), len(distinct) - 1)
    return distinct[num_held_out - 1]


def bucket_bound(totals: np.ndarray, wanted: float) -> int:
    """Number of first buckets that hold the wanted total, or all buckets."""
    if wanted >= totals.sum():
        return len(totals)
    return int((np.cumsum(totals) >= wanted).argmax()) + 1


def versions(kind: str) -> dict[str, str]:
    """Versions of the software that the packs of a kind depend on."""
    found = {"exlm_mini": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in LIBRARIES[kind]}


def _cut(documents: Iterable[str], size: float) -> Iterator[list[str]]:
    """Documents in order, in lists of about ``size`` bytes of text."""
    texts, num_bytes = [], 0
    for document in filter(None, map(str.strip, documents)):
        texts.append(document)
        num_bytes += len(document)
        if num_bytes >= size:
            yield texts
            texts, num_bytes = [], 0
    if texts:
        yield texts
