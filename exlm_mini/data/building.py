"""The files of a corpus, made shard by shard; what was killed goes on where it stopped.

Four passes, each over shards (``shards``) that are kept with their sha256 until the end:

1. read and clean the documents;
2. choose the side of each by a hash of its content, learn the tokenizer from the training side;
3. turn documents into token ids;
4. mix the sources by tokens and cut rows: the two packs. Rows are grouped by source, and none
   joins two; training draws them in random order.

Passes 1 and 3 run in several processes. The packs depend neither on their number, nor on the size
of a shard, nor on how often the work was stopped. Sentences of a toy grammar are drawn in one go.

Dimension key: S sources or sentences, V words, N tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import sha256_of, write_json
from exlm_mini.data.memory import check_bytes
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.pipeline import NUM_BUCKETS, Passes, Shard, Stage
from exlm_mini.data.request import Preparation, settings_of
from exlm_mini.data.rows import Counts, Documents, Rows, block_rows, framed_rows, molecule_rows
from exlm_mini.data.shards import load_shard
from exlm_mini.data.tokenizer import Tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.data.vocabulary import given_tokenizer
from exlm_mini.data.workers import Workers

FORMAT = "exlm-mini corpus"
VERSION = 1
NUM_VALIDATION_SENTENCES = 4096


class _Made(NamedTuple):
    """What goes into a pack; the last two are filled while the rows are read."""

    name: str
    rows: Iterable[Rows]
    counts: Counts
    provenance: dict[str, Any] | None = None


def build_corpus(
    wanted: Preparation,
    folder: Path,
    directory: Path,
    num_workers: int,
    report: Callable[[str], None],
    progress: Callable[[Stage], None],
) -> None:
    """Write all files of a corpus into an empty directory.

    Args:
        wanted: what to make.
        folder: for shards; what an earlier call left there is used.
        directory: where to.
        num_workers: processes.
        report: receives one line per thing worth knowing.
        progress: called after every shard.

    Raises:
        UserError: if a source is unfit, or either pack would be empty.
    """
    if wanted.data.kind == "toy":
        tokenizer, made = _toy_packs(wanted.data, wanted.seed)
        files = {}
        source = f"toy grammar {wanted.data.grammar}"
        row_length: int | None = grammar(wanted.data.grammar).length + 2
    else:
        passes = Passes(wanted, folder, report, progress)
        with Workers(num_workers) as workers:
            passes.read(workers)
            passes.split()
            passes.learn_tokenizer()
            passes.encode(workers)
        tokenizer, made, files = passes.tokenizer, _document_packs(passes), _files(passes)
        source = ", ".join(source.name for source in passes.sources)
        row_length = wanted.data.block_length if wanted.data.kind == "text" else None
    report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    tokenizer.save(directory / "tokenizer.json")
    packs = {}
    for name, rows, counts, provenance in made:
        num_rows = write_pack(
            directory / f"{name}.json",
            rows,
            row_length=row_length,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            source=source,
            counts=counts,
            provenance=provenance,
        )
        if num_rows == 0:
            raise UserError(_why_empty(wanted.data, name, source, counts))
        told = f"{name}: {num_rows:,} rows, {counts.tokens:,} tokens"
        if counts.dropped_documents:
            told += f"; dropped: {counts.dropped_documents:,} of {counts.documents:,}, too long"
        report(told)
        packs[name] = Pack.open(directory / f"{name}.json").sha256
    data = json.loads(json.dumps(asdict(wanted.data)))
    content = {"format": FORMAT, "version": VERSION, "data": data, "seed": wanted.seed}
    content |= {"sources": files, "packs": packs}
    if wanted.sources:
        content["preparation"] = settings_of(wanted)
    write_json(directory / "corpus.json", content)


def _toy_packs(data: DataConfig, seed: int) -> tuple[Tokenizer, Iterable[_Made]]:
    """Sentences of a grammar; training and validation are independent draws."""
    language = grammar(data.grammar)
    tokenizer = given_tokenizer(data) or word_level(language.words)
    words = tokenizer.encode_batch(language.words)
    for word, ids in zip(language.words, words, strict=True):
        if len(ids) != 1 or ids[0] == tokenizer.special_ids.unk:
            raise UserError(
                f"{data.tokenizer} lacks the word '{word}' of grammar {data.grammar}; set "
                "data.tokenizer to none to make one"
            )
    token_ids_V = np.array(words).reshape(-1)
    # A uniform number, the word and the token of each place.
    needed = 3 * 8 * data.num_sentences * (language.length + 2)
    check_bytes(f"data.num_sentences {data.num_sentences:,}", {"give fewer": needed})
    made: list[_Made] = []
    sizes = {"train": data.num_sentences, "validation": NUM_VALIDATION_SENTENCES}
    for stream, (name, num_sentences) in enumerate(sizes.items()):
        token_ids_SN = token_ids_V[language.sample(num_sentences, (seed, stream))]
        counts = Counts(documents=num_sentences, tokens=token_ids_SN.size)
        made.append(_Made(name, [framed_rows(token_ids_SN, tokenizer.special_ids)], counts))
    return tokenizer, made


def _document_packs(passes: Passes) -> Iterator[_Made]:
    """The two packs."""
    buckets_S = passes.buckets("tokens")
    for name in ("train", "validation"):
        counts = Counts()
        provenance = _provenance(passes, buckets_S)
        rows = _rows(passes, buckets_S, name == "validation", counts, provenance)
        yield _Made(name, rows, counts, provenance if passes.wanted.sources else None)


def _rows(
    passes: Passes,
    buckets_S: list[int],
    is_validation: bool,
    counts: Counts,
    provenance: dict[str, Any],
) -> Iterator[Rows]:
    """Rows of one pack, source by source; tells ``provenance`` which rows are whose."""
    data, special_ids = passes.wanted.data, passes.tokenizer.special_ids
    cut = molecule_rows if data.kind == "smiles" else block_rows
    start = 0
    for part, num_buckets, facts in zip(
        passes.parts, buckets_S, provenance["sources"], strict=True
    ):
        own, stop = Counts(), start
        documents = _documents(passes, part, num_buckets, is_validation, own)
        for rows in cut(documents, special_ids, data.block_length, own):
            stop += len(rows.lengths_R)
            yield rows
        for name, value in asdict(own).items():
            setattr(counts, name, getattr(counts, name) + value)
        facts |= {"rows": [start, stop], "counts": asdict(own)}
        start = stop


def _documents(
    passes: Passes, part: list[Shard], num_buckets: int, is_validation: bool, counts: Counts
) -> Iterator[Documents]:
    """The documents of a source that go into a pack, shard by shard."""
    for place, _ in part:
        is_chosen_D = passes.is_chosen(place, num_buckets, is_validation)
        token_ids, lengths_D, unknown_D = load_shard(
            place.file("tokens"), "token_ids", "lengths_D", "num_unknown_D"
        )
        counts.documents += int(is_chosen_D.sum())
        counts.tokens += int(lengths_D[is_chosen_D].sum())
        counts.unknown_tokens += int(unknown_D[is_chosen_D].sum())
        yield Documents(token_ids[np.repeat(is_chosen_D, lengths_D)], lengths_D[is_chosen_D])


def _provenance(passes: Passes, buckets_S: list[int]) -> dict[str, Any]:
    """Where the rows of a pack come from and what was done to them, for its side file."""
    weights = passes.wanted.weights or [None] * len(buckets_S)
    rows = zip(passes.sources, passes.parts, passes.cleaning, buckets_S, weights, strict=True)
    sources = [
        {
            "name": source.name,
            **source.facts,
            "documents_read": sum(shard.record["num_read"] for shard in part),
            **({"cleaning": asdict(counts)} if passes.wanted.data.kind == "smiles" else {}),
            "weight": weight,
            "share_used": num_buckets / NUM_BUCKETS,
        }
        for source, part, counts, num_buckets, weight in rows
    ]
    settings = settings_of(passes.wanted)
    return {"sources": sources, "settings": settings, "versions": passes.versions}


def _files(passes: Passes) -> dict[str, str]:
    """sha256 of the local files that the corpus is made of."""
    files: dict[str, str] = {}
    for source in passes.sources:
        files |= source.facts.get("sha256", {})
    if given := passes.wanted.data.tokenizer:
        files[given] = sha256_of(Path(given))
    return files


def _why_empty(data: DataConfig, name: str, source: str, counts: Counts) -> str:
    if data.kind == "smiles":
        return (
            f"{source}: all {counts.documents:,} {name} molecules are longer than "
            f"data.block_length {data.block_length}; raise it"
        )
    remedy = "raise data.validation_share, " if name == "validation" else ""
    return (
        f"{source} is too short: its {name} documents have {counts.dropped_tokens:,} tokens, a "
        f"row of data.block_length {data.block_length} needs {data.block_length - 2:,}; "
        f"{remedy}lower data.block_length or give more text"
    )
