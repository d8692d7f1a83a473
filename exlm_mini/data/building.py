"""Builds the files of a corpus shard by shard; a killed build resumes where it stopped.

There are four passes over shards (see ``shards``), which are kept with their sha256 until the end:

1. read and clean the documents;
2. split them by a hash of their content, train the tokenizer on the training documents;
3. tokenize them;
4. cut rows and write the two packs. Rows are grouped by source and never mix two sources;
   training draws them in random order.

Passes 1 and 3 use several processes. The packs depend neither on their number, nor on the size of
a shard, nor on interruptions. Sentences of a toy grammar are drawn in one go.

Dimension key: S sources or sentences, V words, N tokens of a row, D documents of a shard.
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
from exlm_mini.data.pipeline import Passes, Progress, Shard
from exlm_mini.data.request import Preparation
from exlm_mini.data.rows import Counts, Rows, block_rows, framed_rows, molecule_rows
from exlm_mini.data.tokenizer import Tokenizer, given_tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.data.workers import Workers

FORMAT = "exlm-mini corpus"
VERSION = 1
NUM_VALIDATION_SENTENCES = 4096


class _Contents(NamedTuple):
    """Contents of a pack; the last two are filled while the rows are read."""

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
    progress: Progress,
) -> None:
    """Write all files of a corpus into an empty directory.

    Shards are kept in ``folder``, and those of an earlier call are used. The other arguments are
    those of ``corpus.prepare``.

    Raises:
        UserError: if a source is unfit, or either pack would be empty.
    """
    files: dict[str, str] = {}
    if wanted.data.kind == "toy":
        tokenizer, both = _toy_packs(wanted.data, wanted.seed)
        source = f"toy grammar {wanted.data.grammar}"
        row_length: int | None = grammar(wanted.data.grammar).length + 2
    else:
        passes = Passes(wanted, folder, report, progress)
        with Workers(num_workers) as workers:
            passes.read(workers)
            passes.split()
            passes.learn_tokenizer()
            passes.encode(workers)
        tokenizer, both = passes.tokenizer, _document_packs(passes)
        source = ", ".join(source.name for source in passes.sources)
        row_length = wanted.data.block_length if wanted.data.kind == "text" else None
        for one in passes.sources:
            files |= one.facts.get("sha256", {})
        if given := wanted.data.tokenizer:
            files[given] = sha256_of(Path(given))
    report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    tokenizer.save(directory / "tokenizer.json")
    packs = {}
    for name, rows, counts, provenance in both:
        path = directory / f"{name}.json"
        num_rows = write_pack(
            path,
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
        packs[name] = Pack.open(path).sha256
    data = json.loads(json.dumps(asdict(wanted.data)))
    content = {"format": FORMAT, "version": VERSION, "data": data, "seed": wanted.seed}
    content |= {"sources": files, "packs": packs}
    if wanted.sources:
        content["preparation"] = wanted.settings()
    write_json(directory / "corpus.json", content)


def _toy_packs(data: DataConfig, seed: int) -> tuple[Tokenizer, Iterable[_Contents]]:
    """Sentences of a grammar; training and validation are drawn independently."""
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
    # A uniform number, a word and a token per place.
    needed = 3 * 8 * data.num_sentences * (language.length + 2)
    check_bytes(f"data.num_sentences {data.num_sentences:,}", {"give fewer": needed})
    both = []
    sizes = {"train": data.num_sentences, "validation": NUM_VALIDATION_SENTENCES}
    for stream, (name, num_sentences) in enumerate(sizes.items()):
        token_ids_SN = token_ids_V[language.sample(num_sentences, (seed, stream))]
        counts = Counts(documents=num_sentences, tokens=token_ids_SN.size)
        both.append(_Contents(name, [framed_rows(token_ids_SN, tokenizer.special_ids)], counts))
    return tokenizer, both


def _document_packs(passes: Passes) -> Iterator[_Contents]:
    """The two packs; their ``provenance`` says which rows come from which source."""
    wanted = passes.wanted
    for name in ("train", "validation"):
        counts = Counts()
        sources = [
            {
                "name": source.name,
                **source.facts,
                "documents_read": sum(shard.record["num_read"] for shard in part),
                **({"cleaning": asdict(cleaned)} if wanted.data.kind == "smiles" else {}),
            }
            for source, part, cleaned in zip(
                passes.sources, passes.parts, passes.cleaning, strict=True
            )
        ]
        provenance = {
            "sources": sources,
            "settings": wanted.settings(),
            "versions": passes.versions,
        }
        rows = _rows(passes, name == "validation", counts, sources)
        yield _Contents(name, rows, counts, provenance if wanted.sources else None)


def _rows(
    passes: Passes, is_validation: bool, counts: Counts, sources: list[dict[str, Any]]
) -> Iterator[Rows]:
    """Rows of one pack, source by source; adds the range of rows to each of ``sources``."""
    data, special_ids = passes.wanted.data, passes.tokenizer.special_ids
    cut = molecule_rows if data.kind == "smiles" else block_rows
    start = 0
    for part, facts in zip(passes.parts, sources, strict=True):
        own, stop = Counts(), start
        documents = _documents(passes, part, is_validation, own)
        for rows in cut(documents, special_ids, data.block_length, own):
            stop += len(rows.lengths_R)
            yield rows
        for name, value in asdict(own).items():
            setattr(counts, name, getattr(counts, name) + value)
        facts |= {"rows": [start, stop], "counts": asdict(own)}
        start = stop


def _documents(
    passes: Passes, part: list[Shard], is_validation: bool, counts: Counts
) -> Iterator[Rows]:
    """The documents of a source that belong to a pack, shard by shard."""
    for place, _ in part:
        (hash_D,) = place.load("documents", "hash_D")
        is_chosen_D = (hash_D <= passes.bound) == is_validation
        token_ids, lengths_D, unknown_D = place.load(
            "tokens", "token_ids", "lengths_D", "num_unknown_D"
        )
        counts.documents += int(is_chosen_D.sum())
        counts.tokens += int(lengths_D[is_chosen_D].sum())
        counts.unknown_tokens += int(unknown_D[is_chosen_D].sum())
        yield Rows(token_ids[np.repeat(is_chosen_D, lengths_D)], lengths_D[is_chosen_D])


def _why_empty(data: DataConfig, name: str, source: str, counts: Counts) -> str:
    if data.kind == "smiles":
        return (
            f"{source}: all {counts.documents:,} {name} molecules are longer than "
            f"data.block_length {data.block_length}; raise it"
        )
    return (
        f"{source} is too short: its {name} documents have {counts.dropped_tokens:,} tokens, a "
        f"row of data.block_length {data.block_length} needs {data.block_length - 2:,}; lower "
        "data.block_length, give more text, or change data.validation_share"
    )
