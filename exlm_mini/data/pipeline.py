"""From documents to two packs: clean, split, learn a tokenizer, encode, cut rows.

Each step is a function from values to values; the large ones are kept on the disk, see ``shards``.
The packs depend neither on the number of processes nor on interruptions. Rows are grouped by source
and never mix two; training draws them in random order.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import write_atomically
from exlm_mini.data.molecules import Change
from exlm_mini.data.packs import Counts, Rows, block_rows, molecule_rows, write_pack
from exlm_mini.data.shards import SHARD_BYTES, Job, documents, hashes, shards_of, table_of
from exlm_mini.data.sources import Source
from exlm_mini.data.tokenizer import (
    Tokenizer,
    given_tokenizer,
    train_byte_level_bpe,
    train_smiles,
)

PACKS = ("train", "validation")
LESSON_BYTES = 500_000_000
"""Most bytes of text that a tokenizer is trained on, approximately."""
NUM_BUCKETS = 1 << 16
"""Buckets of documents by hash; the first buckets are a sample that does not depend on order."""
NUM_ENCODED = 10_000
"""Documents that are encoded at a time."""
SECONDS_WITHOUT_BAR = 10
NUM_SHOWN = 5
"""Rejected molecules or unknown pieces in a message."""
NUM_PIECES = 1000
"""Unknown pieces of which the most frequent are shown."""


class Part(NamedTuple):
    """A source on its way to the packs."""

    record: dict[str, Any]
    """What became of its documents."""
    shards: list[Path]


def build_packs(job: Job, sources: list[Source], directory: Path) -> list[dict[str, Any]]:
    """Write the tokenizer and the packs of a corpus into a directory.

    Returns:
        A record of each source: its facts, what was cleaned, and its rows in each pack.
    """
    parts = [_read(job, number, source) for number, source in enumerate(sources)]
    shards = list(chain.from_iterable(part.shards for part in parts))
    bound = held_out_bound(
        np.concatenate([hashes(shard) for shard in shards]), job.data.validation_share
    )
    tokenizer = _tokenizer_for(job, shards, bound)
    tokenizer.save(directory / "tokenizer.json")
    name_of_all = ", ".join(source.name for source in sources)
    num_unknown = num_tokens = 0
    for name in PACKS:
        counts = Counts()
        num_rows = write_pack(
            directory / f"{name}.json",
            _rows(job.data, name, parts, tokenizer, bound, counts),
            row_length=job.data.block_length if job.data.kind == "text" else None,
            tokenizer=tokenizer,
            source=name_of_all,
            counts=counts,
        )
        if num_rows == 0:
            raise UserError(_why_empty(job.data, name, name_of_all, counts))
        line = f"{name}: {num_rows:,} rows, {counts.tokens:,} tokens"
        if counts.dropped_documents:
            line += f"; dropped: {counts.dropped_documents:,} of {counts.documents:,}, too long"
        job.report(line)
        num_unknown += counts.unknown_tokens
        num_tokens += counts.tokens
    if num_unknown > job.data.max_unknown * num_tokens:
        why = _why_unknown(job.data, shards, tokenizer, num_unknown / num_tokens)
        raise UserError(f"{name_of_all}: {why}")
    return [part.record for part in parts]


def _shown(shards: Iterable[Path], step: str) -> Iterable[Path]:
    """Shards of a step, whose progress is shown if it takes long, in megabytes of text."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(
        shards, step, unit="MB", unit_scale=SHARD_BYTES // 1_000_000,
        delay=SECONDS_WITHOUT_BAR, mininterval=1,
    )  # fmt: skip


def _read(job: Job, number: int, source: Source) -> Part:
    """The cleaned documents of a source; raises an error if RDKit rejects too many molecules."""
    shards = list(_shown(shards_of(job, number, source), "reading"))
    num_read = sum(len(table_of(shard)) for shard in shards)
    if not num_read:
        raise UserError(f"{source.name} holds no documents; leave it out")
    job.report(f"read {num_read:,} documents from {source.name}")
    record = {"name": source.name, **source.facts, "documents_read": num_read}
    if job.data.kind != "smiles":
        return Part(record, shards)
    changes = np.concatenate([table_of(shard)["changes"].to_numpy() for shard in shards])
    done = {str(one.name).lower(): int((changes & one > 0).sum()) for one in Change}
    words = [f"{n:,} {name.replace('_', ' ')}" for name, n in done.items() if n]
    job.report(f"{source.name}: of {num_read:,} molecules {', '.join(words) or 'all are kept'}")
    limit, share = job.data.max_rejected, done["rejected"] / num_read
    if share > limit:
        rejected = (documents(shard, are_rejected=True)["text"].to_pylist() for shard in shards)
        some = ", ".join(repr(text[:80]) for text in islice(chain(*rejected), NUM_SHOWN))
        raise UserError(
            f"{source.name}: RDKit rejects {done['rejected']:,} of {num_read:,} molecules "
            f"({share:.2%}, data.max_rejected is {limit:.2%}), such as {some}; mend or remove "
            "them, or raise data.max_rejected; text is read with data.kind text"
        )
    return Part({**record, "cleaning": done}, shards)


def held_out_bound(hashes: np.ndarray, validation_share: float) -> np.uint64:
    """The largest hash of a held-out document; each side gets at least one."""
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise UserError(
            f"the data hold {len(distinct)} different document(s); at least 2 are needed, one "
            "to train on and one to validate with (blank lines divide a .txt file)"
        )
    num_held_out = min(max(1, round(validation_share * len(distinct))), len(distinct) - 1)
    return distinct[num_held_out - 1]


def _tokenizer_for(job: Job, shards: list[Path], bound: np.uint64) -> Tokenizer:
    """The given tokenizer, or one trained on a sample of the training documents."""
    path, tokenizer = job.folder / "tokenizer.json", given_tokenizer(job.data)
    if path.exists():
        return Tokenizer.load(path)
    if tokenizer is None:
        job.report("learning the tokenizer from the training documents")
        share = LESSON_BYTES / max(sum(_lesson_bytes(shard, bound) for shard in shards), 1)
        learn = train_smiles if job.data.kind == "smiles" else train_byte_level_bpe
        tokenizer = learn(_lessons(shards, bound, share), job.data.vocab_size)
    write_atomically(path, tokenizer.definition)
    job.report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _lesson_bytes(shard: Path, bound: np.uint64) -> int:
    """Text of the training documents."""
    import pyarrow.compute

    texts = documents(shard)["text"].filter(hashes(shard) > bound)
    return pyarrow.compute.sum(pyarrow.compute.binary_length(texts)).as_py() or 0


def _lessons(shards: list[Path], bound: np.uint64, share: float) -> Iterator[str]:
    """About that share of the training documents, drawn by their hashes."""
    for shard in shards:
        hash_D = hashes(shard)
        is_lesson_D = (hash_D > bound) & (hash_D % NUM_BUCKETS < share * NUM_BUCKETS)
        yield from documents(shard)["text"].filter(is_lesson_D).to_pylist()


def _why_unknown(
    data: DataConfig, shards: list[Path], tokenizer: Tokenizer, share: float
) -> str:
    texts = chain.from_iterable(documents(shard)["text"].to_pylist() for shard in shards)
    unknown = (piece for text in texts for piece in tokenizer.unknown_pieces(text))
    pieces = Counter(islice(unknown, NUM_PIECES)).most_common(NUM_SHOWN)
    return (
        f"{share:.2%} of the tokens are [UNK] (data.max_unknown is {data.max_unknown:.2%}), most "
        f"often {', '.join(repr(piece[:40]) for piece, _ in pieces)}; set data.tokenizer to none, "
        "or raise data.vocab_size or data.max_unknown"
    )


# ---- packs ----


def _rows(
    data: DataConfig, name: str, parts: list[Part], tokenizer: Tokenizer, bound: np.uint64,
    total: Counts,
) -> Iterator[Rows]:  # fmt: skip
    """Rows of one pack, source by source; counts them in ``total`` and in the records."""
    cut = molecule_rows if data.kind == "smiles" else block_rows
    num_rows = 0
    for part in parts:
        counts, start = Counts(), num_rows
        side = _side(part, tokenizer, bound, name == "validation", counts)
        for rows in cut(side, tokenizer.special_ids, data.block_length, counts):
            num_rows += len(rows.lengths_R)
            yield rows
        part.record[name] = {"rows": [start, num_rows], **asdict(counts)}
        total.add(counts)


def _side(
    part: Part, tokenizer: Tokenizer, bound: np.uint64, is_validation: bool, counts: Counts
) -> Iterator[Rows]:
    """The documents of a source that belong to a pack, a batch at a time."""
    for shard in _shown(part.shards, "encoding"):
        table = documents(shard)
        is_mine_D = (table["hash"].to_numpy() <= bound) == is_validation
        for batch in table.filter(is_mine_D).to_batches(NUM_ENCODED):
            ids_D = tokenizer.encode_batch(batch["text"].to_pylist())
            token_ids = np.fromiter(chain.from_iterable(ids_D), np.int64)
            counts.documents += len(ids_D)
            counts.tokens += len(token_ids)
            counts.unknown_tokens += int((token_ids == tokenizer.special_ids.unk).sum())
            yield Rows(token_ids, np.fromiter(map(len, ids_D), np.int64))


def _why_empty(data: DataConfig, name: str, source: str, counts: Counts) -> str:
    why = "all its molecules are longer; raise it"
    if data.kind == "text":
        why = (
            f"it is too short, with {counts.tokens:,} tokens; lower it, give more text, or change "
            "data.validation_share"
        )
    return f"{source} gives no {name} row of data.block_length {data.block_length}: {why}"
