"""A corpus of any size, made shard by shard; a run that was killed goes on where it stopped.

Four passes, each over shards (``shards``) that are kept with their sha256 until the end:

1. read, clean, choose the side of every document by a keyed hash of its text;
2. learn the tokenizer, from training documents only;
3. turn documents into token ids;
4. mix the sources by tokens and cut rows (``mixing``): the two packs.

Passes 1 and 3 run in several processes. The packs depend neither on their number, nor on the size
of a shard, nor on how often the work was stopped. ``prepare_corpus`` does the same in memory for
small data, but splits by rank, so its packs differ.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_mini.config import DataConfig, UserError
from exlm_mini.data.building import write_description
from exlm_mini.data.cleaning import CleaningCounts
from exlm_mini.data.corpus import Corpus, open_corpus
from exlm_mini.data.files import read_json, write_json
from exlm_mini.data.mixing import (
    bucket_bound,
    bucket_totals,
    chosen,
    wanted_tokens,
)
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.request import Preparation, settings_of
from exlm_mini.data.rows import Counts, Rows, block_rows, molecule_rows
from exlm_mini.data.shards import NUM_BUCKETS, Place
from exlm_mini.data.sources import Source, open_source
from exlm_mini.data.stages import Passes, Shard, Stage, read_if_sound
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.data.workers import Workers

SHARDS = "shards"
PARTIAL = "corpus.partial"


def prepare(
    wanted: Preparation,
    directory: Path,
    num_workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[Stage], None] = lambda stage: None,
) -> Corpus:
    """Make a corpus in a directory, or go on making it, or open the one that is there.

    Args:
        wanted: what to make.
        directory: where; empty, or left by an earlier call. One process at a time.
        num_workers: processes; the packs do not depend on it.
        report: receives one line per thing worth knowing.
        progress: called after every shard.

    Raises:
        UserError: for whatever is wrong with a source, the directory or the disk. Finished
            shards stay, and the same call goes on from them.
    """
    directory = Path(directory)
    if (directory / "corpus.json").exists():
        return _reopen(wanted, directory, report)
    shards = directory / SHARDS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory)
        shards.mkdir(exist_ok=True)
        sources = _open_sources(wanted, shards)
        with Workers(num_workers) as workers:
            passes = Passes(wanted, shards, sources, workers, report, progress)
            parts = [list(passes.documents(number)) for number in range(len(sources))]
            cleaning = passes.check_documents(parts)
            tokenizer = passes.learn_tokenizer(parts)
            passes.encode(parts, tokenizer)
        partial = directory / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write(passes, partial, parts, tokenizer, cleaning)
        # corpus.json last: a directory that has it has everything.
        for file in sorted(partial.iterdir(), key=lambda path: path.name == "corpus.json"):
            os.replace(file, directory / file.name)
        partial.rmdir()
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or directory} ({error.strerror}); make room or "
            "mend it; the same command goes on"
        ) from None
    corpus = open_corpus(directory, wanted.data)
    shutil.rmtree(shards)
    return corpus


# ---- the directory ----


def _refuse_strangers(directory: Path) -> None:
    """Never write among files that are not known to be ours."""
    if (directory / SHARDS).is_dir():
        return
    foreign = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if foreign:
        raise UserError(
            f"{directory} holds {foreign[0]} but no corpus; choose another --output"
        )


def _reopen(wanted: Preparation, directory: Path, report: Callable[[str], None]) -> Corpus:
    """The finished corpus of a directory, if it is the one asked for."""
    stored = read_json(directory / "corpus.json").get("preparation")
    if not isinstance(stored, dict):
        raise UserError(f"{directory} holds another corpus; choose another --output")
    now = settings_of(wanted)
    for name, value in now.items():
        if stored.get(name) != value:
            raise UserError(
                f"{directory} holds a corpus prepared with {name} {stored.get(name)}, not "
                f"{value}; choose another --output or remove this one"
            )
    corpus = open_corpus(directory, wanted.data)
    for left in (SHARDS, PARTIAL):  # by a run that was stopped at its very end
        shutil.rmtree(directory / left, ignore_errors=True)
    report(f"{directory} already holds this corpus: {len(corpus.train):,} training rows")
    return corpus


def _open_sources(wanted: Preparation, shards: Path) -> list[Source]:
    """All sources; a hub data set stays at the revision of the first start."""
    path = shards / "sources.json"
    resolved = read_if_sound(path).get("facts", {})
    sources = [
        open_source(words, wanted.data, resolved.get(" ".join(words)))
        for words in wanted.sources
    ]
    facts = {source.name: source.facts for source in sources if "hub" in source.facts}
    write_json(path, {"facts": facts})
    return sources


# ---- the packs ----


def _write(
    passes: Passes,
    directory: Path,
    parts: list[list[Shard]],
    tokenizer: Tokenizer,
    cleaning: list[CleaningCounts],
) -> None:
    """Pass 4: all files of the corpus."""
    wanted, data = passes.wanted, passes.wanted.data
    tokenizer.save(directory / "tokenizer.json")
    places = [[shard.place for shard in part] for part in parts]
    bounds = _bounds(wanted, passes.sources, places)
    packs, files = {}, {}
    for name in ("train", "validation"):
        is_validation, counts = name == "validation", Counts()
        provenance = _provenance(passes, parts, cleaning, bounds)
        num_rows = write_pack(
            directory / f"{name}.json",
            _rows(wanted, places, bounds, is_validation, tokenizer, counts, provenance),
            row_length=data.block_length if data.kind == "text" else None,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            source=", ".join(source.name for source in passes.sources),
            counts=counts,
            provenance=provenance,
        )
        if num_rows == 0:
            raise UserError(_why_empty(name, counts, data))
        dropped = f"{counts.dropped_documents:,} documents too long, " * (data.kind == "smiles")
        passes.report(
            f"{name}: {num_rows:,} rows, {counts.tokens:,} tokens of {counts.documents:,} "
            f"documents; dropped: {dropped}{counts.dropped_tokens:,} tokens behind the last row"
        )
        packs[name] = Pack.open(directory / f"{name}.json").sha256
    for source in passes.sources:
        files |= source.facts["sha256"]
    write_description(
        directory,
        {"data": json.loads(json.dumps(asdict(data))), "seed": wanted.seed},
        sources=files,
        packs=packs,
        preparation=settings_of(wanted),
    )


def _bounds(wanted: Preparation, sources: list[Source], places: list[list[Place]]) -> list[int]:
    """How many buckets of each source are used."""
    if not wanted.weights:
        return [NUM_BUCKETS] * len(places)
    totals = [bucket_totals(part) for part in places]
    sizes = [float(total.sum()) for total in totals]
    targets = wanted_tokens(sizes, list(wanted.weights))
    for source, size in zip(sources, sizes, strict=True):
        if not size:
            raise UserError(f"{source.name} has no training tokens; leave it out")
    return [bucket_bound(t, want) for t, want in zip(totals, targets, strict=True)]


def _rows(
    wanted: Preparation,
    places: list[list[Place]],
    bounds: list[int],
    is_validation: bool,
    tokenizer: Tokenizer,
    counts: Counts,
    provenance: dict[str, Any],
) -> Iterator[Rows]:
    """Rows of one pack, source by source; tells ``provenance`` which rows are whose."""
    cut = molecule_rows if wanted.data.kind == "smiles" else block_rows
    start = 0
    for part, bound, facts in zip(places, bounds, provenance["sources"], strict=True):
        own, stop = Counts(), start
        documents = chosen(part, is_validation, bound, own)
        for rows in cut(documents, tokenizer.special_ids, wanted.data.block_length, own):
            stop += len(rows.lengths_R)
            yield rows
        for name, value in asdict(own).items():
            setattr(counts, name, getattr(counts, name) + value)
        facts |= {"rows": [start, stop], "counts": asdict(own)}
        start = stop


def _provenance(
    passes: Passes, parts: list[list[Shard]], cleaning: list[CleaningCounts], bounds: list[int]
) -> dict[str, Any]:
    """Where the rows of a pack come from and what was done to them, for its side file."""
    weights = passes.wanted.weights or [None] * len(bounds)
    rows = zip(passes.sources, parts, cleaning, bounds, weights, strict=True)
    sources = [
        {
            "name": source.name,
            **source.facts,
            "documents_read": sum(shard.record["num_read"] for shard in part),
            **({"cleaning": asdict(counts)} if passes.wanted.data.kind == "smiles" else {}),
            "weight": weight,
            "share_used": bound / NUM_BUCKETS,
        }
        for source, part, counts, bound, weight in rows
    ]
    return {
        "sources": sources,
        "settings": settings_of(passes.wanted),
        "versions": passes.versions,
    }


def _why_empty(name: str, counts: Counts, data: DataConfig) -> str:
    if not counts.documents:
        return (
            f"no document falls on the {name} side; give more documents, or change "
            "data.validation_share or seed"
        )
    if data.kind == "smiles":
        return (
            f"all {counts.documents:,} {name} molecules are longer than data.block_length "
            f"{data.block_length}; raise it"
        )
    return (
        f"the {name} documents have {counts.tokens:,} tokens, a row of data.block_length "
        f"{data.block_length} needs {data.block_length - 2:,}; lower it, give more text, or "
        "change data.validation_share"
    )
