"""The first three passes of a preparation: documents, tokenizer, token ids; shard by shard.

Passes 1 and 3 run in several processes. A shard that is found finished is not made again.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini import __version__
from exlm_mini.config import UserError
from exlm_mini.data.cleaning import CleaningCounts
from exlm_mini.data.files import read_json, seal_of, sha256_of, write_json
from exlm_mini.data.mixing import bucket_bound, bucket_totals, wanted_tokens
from exlm_mini.data.request import MEGABYTE, Preparation
from exlm_mini.data.shards import (
    Place,
    Split,
    finished_shard,
    load_shard,
    make_documents,
    make_tokens,
    texts_of,
)
from exlm_mini.data.smiles import describe_lost, require_rdkit
from exlm_mini.data.sources import Source, Unit
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.vocabulary import given_tokenizer, learn_tokenizer, most_often
from exlm_mini.data.workers import Workers

LIBRARIES = {"text": ("numpy", "tokenizers"), "smiles": ("numpy", "rdkit", "tokenizers")}


class Stage(NamedTuple):
    """How far a pass is; told once before its first shard."""

    name: str
    done: float
    """Bytes of text so far, those of shards found finished included."""
    found: float
    """Bytes of shards found finished."""
    tokens: int
    """Made so far; 0 while documents are read."""


class Shard(NamedTuple):
    """A finished shard: where it lies, and what its side file says."""

    place: Place
    record: dict[str, Any]


class Passes:
    """The passes over the shards of one preparation."""

    def __init__(
        self,
        wanted: Preparation,
        shards: Path,
        sources: list[Source],
        workers: Workers,
        report: Callable[[str], None],
        progress: Callable[[Stage], None],
    ) -> None:
        self.wanted, self.shards, self.sources = wanted, shards, sources
        self.workers, self.report, self.progress = workers, report, progress
        self.versions = versions(wanted.data.kind)
        made_with = {
            "kind": wanted.data.kind,
            "cleaning": asdict(wanted.cleaning),
            "split": [wanted.data.validation_share, wanted.seed],
            "column": wanted.data.column,
            "shard_megabytes": wanted.shard_megabytes,
            "versions": self.versions,
        }
        self._made_with = seal_of(made_with)
        self._done = self._found = 0.0
        # What is missing is told before hours of reading.
        self._given = given_tokenizer(wanted.data)
        if wanted.data.kind == "smiles":
            require_rdkit()

    def documents(self, number: int) -> Iterator[Shard]:
        """Pass 1 for one source: its shards, made or found finished, in order."""
        self._count("reading", 0)
        source, limit = self.sources[number], self.wanted.data.max_documents
        for index, unit in enumerate(source.units):
            if limit == 0:
                return
            want = {"unit": unit.fingerprint(), "made_with": self._made_with}
            want |= {"limit": "none" if limit is None else str(limit)}
            source.facts.setdefault("sha256", {})
            if "hub" not in source.facts:
                source.facts["sha256"][unit.name] = want["unit"]
            records = self._finished_unit(number, index, want)
            if records is None:
                records = self._make_unit(number, index, unit, want, limit)
            if limit is not None:
                limit -= sum(record["num_read"] for record in records.values())
            for i in sorted(records):
                yield Shard(Place(self.shards, number, index, i), records[i])

    def _finished_unit(self, number: int, index: int, want: dict) -> dict[int, dict] | None:
        """Records of a unit of which every shard is on the disk."""
        stored = read_if_sound(self._unit_path(number, index))
        if {name: stored.get(name) for name in want} != want:
            return None
        places = [Place(self.shards, number, index, i) for i in range(stored["num_shards"])]
        found = [finished_shard(place.file("documents"), want) for place in places]
        if None in found:
            return None
        for record in found:
            self._count("reading", record["text_bytes"], is_found=True)
        return dict(enumerate(found))

    def _make_unit(
        self, number: int, index: int, unit: Unit, want: dict, limit: int | None
    ) -> dict[int, dict]:
        """Read a unit; shards that are finished already are passed over."""
        wanted, records = self.wanted, {}
        is_molecules = wanted.data.kind == "smiles"
        split = Split(wanted.data.validation_share, wanted.seed)

        def tasks() -> Iterator[tuple]:
            size = wanted.shard_megabytes * MEGABYTE
            for i, texts in enumerate(_cut(islice(unit.documents(), limit), size)):
                place = Place(self.shards, number, index, i)
                record = finished_shard(place.file("documents"), want)
                if record is None:
                    mine = {**want, "number": i, "text_bytes": _num_bytes(texts)}
                    yield place, mine, texts, split, wanted.cleaning if is_molecules else None
                else:
                    records[i] = record
                    self._count("reading", record["text_bytes"], is_found=True)

        for record in self.workers.run(make_documents, tasks()):
            records[record["number"]] = record
            self._count("reading", record["text_bytes"])
        write_json(self._unit_path(number, index), {**want, "num_shards": len(records)})
        return records

    def _unit_path(self, number: int, index: int) -> Path:
        return self.shards / f"s{number}-u{index:04d}.unit.json"

    def check_documents(self, parts: list[list[Shard]]) -> list[CleaningCounts]:
        """What cleaning did to each source; too many rejected molecules stop the work."""
        all_counts = []
        for source, part in zip(self.sources, parts, strict=True):
            counts, num_before = CleaningCounts(), Counter()
            for shard in part:
                unit = source.units[shard.place.unit].name
                for index, text in shard.record["lost"]:
                    self.report(describe_lost(unit, num_before[unit] + index, text))
                counts.add(shard.record["cleaning"])
                num_before[unit] += shard.record["num_read"]
            num_read = num_before.total()
            if not num_read:
                raise UserError(f"{source.name} holds no documents; leave it out")
            self.report(f"{source.name}: {num_read:,} documents in {len(part):,} shards")
            if self.wanted.data.kind == "smiles":
                self.report(f"{source.name}: {_describe(counts)}")
            limit = self.wanted.data.max_rejected
            if counts.rejected > limit * num_read:
                raise UserError(
                    f"{source.name}: RDKit rejects {counts.rejected:,} of {num_read:,} molecules "
                    f"({counts.rejected / num_read:.2%}, data.max_rejected is {limit:.2%}), such "
                    f"as {', '.join(map(repr, counts.rejected_examples))}; mend them, or raise "
                    "data.max_rejected and go on"
                )
            all_counts.append(counts)
        return all_counts

    def learn_tokenizer(self, parts: list[list[Shard]]) -> Tokenizer:
        """Pass 2: the given tokenizer, the one learnt before, or a new one."""
        if self._given is not None:
            self._given.save(self.shards / "tokenizer.json")
            return self._given
        path, side = self.shards / "tokenizer.json", self.shards / "tokenizer.side.json"
        want = seal_of(
            {
                "documents": [[shard.record["sha256"] for shard in part] for part in parts],
                "vocab_size": self.wanted.data.vocab_size,
                "tokenizer_megabytes": self.wanted.tokenizer_megabytes,
                "weights": self.wanted.weights,
            }
        )
        stored = read_if_sound(side)
        is_mine = stored.get("want") == want and path.exists()
        if is_mine and stored.get("sha256") == sha256_of(path):
            return Tokenizer.load(path)
        self.report("learning the tokenizer from the training documents")
        tokenizer = learn_tokenizer(self.wanted.data, self._lessons(parts))
        tokenizer.save(path)
        write_json(side, {"want": want, "sha256": tokenizer.sha256})
        return tokenizer

    def _lessons(self, parts: list[list[Shard]]) -> Iterator[str]:
        """Training documents, a sample by hash where there are more than asked for."""
        places = [[shard.place for shard in part] for part in parts]
        totals = [bucket_totals(part, "documents") for part in places]
        sizes = [float(total.sum()) for total in totals]
        scale = self.wanted.tokenizer_megabytes * MEGABYTE
        if self.wanted.weights:
            sizes = wanted_tokens(sizes, list(self.wanted.weights))
        scale /= max(sum(sizes), 1.0)
        for part, total, size in zip(places, totals, sizes, strict=True):
            bound = bucket_bound(total, min(scale, 1.0) * size)
            for place in part:
                side_D, bucket_D = load_shard(
                    place.file("documents"), "is_validation_D", "bucket_D"
                )
                is_lesson_D = ~side_D & (bucket_D < bound)
                for text, is_lesson in zip(texts_of(place), is_lesson_D, strict=True):
                    if is_lesson:
                        yield text

    def encode(self, parts: list[list[Shard]], tokenizer: Tokenizer) -> None:
        """Pass 3: token ids of every shard; too many unknown ones stop the work."""
        self._done = self._found = 0.0
        self._count("encoding", 0)
        pieces: Counter[str] = Counter()
        path, num_tokens = self.shards / "tokenizer.json", 0

        def tasks() -> Iterator[tuple]:
            nonlocal num_tokens
            for place, record in (shard for part in parts for shard in part):
                want = {
                    "documents": record["sha256"],
                    "tokenizer": tokenizer.sha256,
                    "text_bytes": record["text_bytes"],
                }
                found = finished_shard(place.file("tokens"), want)
                if found is None:
                    yield place, want, path
                else:
                    pieces.update(found["unknown"])
                    num_tokens += found["num_tokens"]
                    self._count("encoding", found["text_bytes"], num_tokens, is_found=True)

        for record in self.workers.run(make_tokens, tasks()):
            pieces.update(record["unknown"])
            num_tokens += record["num_tokens"]
            self._count("encoding", record["text_bytes"], num_tokens)
        self._check_unknown(pieces, parts)

    def _check_unknown(self, pieces: Counter[str], parts: list[list[Shard]]) -> None:
        """Stop when the vocabulary does not fit the data."""
        num_unknown = num_tokens = 0
        for shard in (shard for part in parts for shard in part):
            unknown_D, lengths_D = load_shard(
                shard.place.file("tokens"), "num_unknown_D", "lengths_D"
            )
            num_unknown += int(unknown_D.sum())
            num_tokens += int(lengths_D.sum())
        limit = self.wanted.data.max_unknown
        if num_unknown <= limit * num_tokens:
            return
        raise UserError(
            f"{num_unknown / num_tokens:.2%} of the tokens are [UNK] (data.max_unknown is "
            f"{limit:.2%}), most often {most_often(pieces)}; set data.tokenizer to none, or raise "
            "data.vocab_size or data.max_unknown and go on"
        )

    def _count(self, name: str, size: float, tokens: int = 0, is_found: bool = False) -> None:
        self._done += size
        self._found += size * is_found
        self.progress(Stage(name, self._done, self._found, tokens))


def read_if_sound(path: Path) -> dict:
    """A JSON file of an earlier start; empty if it is missing or damaged, for it can be redone."""
    try:
        return read_json(path)
    except UserError:
        return {}


def _cut(documents: Iterator[str], size: float) -> Iterator[list[str]]:
    """Documents in order, in lists of about ``size`` bytes of text."""
    texts, num_bytes = [], 0
    for document in (text.strip() for text in documents):
        if not document:
            continue
        texts.append(document)
        num_bytes += len(document)
        if num_bytes >= size:
            yield texts
            texts, num_bytes = [], 0
    if texts:
        yield texts


def _num_bytes(texts: list[str]) -> int:
    return sum(map(len, texts))


def versions(kind: str) -> dict[str, str]:
    """What the packs of a kind are made with; "absent" where a library is not installed."""
    found = {"exlm_mini": __version__, "python": platform.python_version()}
    for name in LIBRARIES[kind]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _describe(counts: CleaningCounts) -> str:
    examples = ", ".join(map(repr, counts.rejected_examples))
    shown = f" (such as {examples})" if examples else ""
    return (
        f"RDKit rejects {counts.rejected:,} of {counts.read:,} molecules{shown}; "
        f"{counts.fragments_removed:,} lost fragments, {counts.stereo_removed:,} stereo marks, "
        f"{counts.respelled:,} respelled, {counts.variants:,} random spellings written"
    )
