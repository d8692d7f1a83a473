"""Turn documents into two packs: clean, split, train a tokenizer, encode, cut into rows.

Each step is a function of its arguments; large intermediate results are kept on the disk, see
``shards``. The packs depend neither on the number of processes nor on interruptions. Rows are
grouped by source, and no row mixes two sources; training draws rows in random order.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import write_atomically
from exlm_mini.data.packs import Rows, block_rows, molecule_rows, write_pack
from exlm_mini.data.shards import (
    Job,
    documents,
    hashes,
    rejected_in,
    shards_of,
    table_of,
)
from exlm_mini.data.sources import Source
from exlm_mini.data.tokenizer import (
    Tokenizer,
    given_tokenizer,
    train_byte_level_bpe,
    train_smiles,
)

PACKS = ("train", "validation")
LESSON_BYTES = 500_000_000
"""Approximate limit on the bytes of text that a tokenizer is trained on."""
NUM_BUCKETS = 1 << 16
"""Number of buckets into which documents are hashed; the first buckets are a sample that does not
depend on the order of the documents."""
NUM_ENCODED = 10_000
"""Number of documents encoded at a time."""
SECONDS_WITHOUT_BAR = 10
NUM_SHOWN = 5
"""Number of rejected molecules or unknown pieces quoted in a message."""
NUM_PIECES = 1000
"""Number of unknown pieces among which a message finds the most frequent."""


def build_packs(job: Job, sources: list[Source], directory: Path) -> list[dict[str, Any]]:
    """Write the tokenizer and the packs of a corpus into a directory.

    Returns:
        A record of each source: its facts, and how many documents were read and rejected.
    """
    data, names = job.data, ", ".join(source.name for source in sources)
    records, shards_of_source = [], []
    for number, source in enumerate(sources):
        shards_of_source.append(list(_shown(shards_of(job, number, source), "reading")))
        records.append(_record(job, source, shards_of_source[-1]))
    shards = list(chain.from_iterable(shards_of_source))
    bound = held_out_bound(
        np.concatenate([hashes(shard) for shard in shards]), data.validation_share
    )
    tokenizer = _tokenizer_for(job, shards, bound)
    tokenizer.save(directory / "tokenizer.json")
    cut = molecule_rows if data.kind == "smiles" else block_rows
    total: Counter[str] = Counter()
    for name in PACKS:
        counts: Counter[str] = Counter()
        sides = (
            _side(some, tokenizer, bound, name == "validation", counts)
            for some in shards_of_source
        )
        num_rows = write_pack(
            directory / f"{name}.json",
            chain.from_iterable(
                cut(side, tokenizer.special_ids, data.block_length, counts) for side in sides
            ),
            row_length=data.block_length if data.kind == "text" else None,
            tokenizer=tokenizer,
            counts=counts,
        )
        if num_rows == 0:
            raise UserError(_why_empty(data, name, names, counts))
        line = f"{name}: {num_rows:,} rows"
        if dropped := counts["dropped_documents"]:
            line += (
                f"; dropped {dropped:,} of {counts['documents']:,} because they are too long"
            )
        job.report(line)
        total += counts
    share = total["unknown_tokens"] / total["tokens"]
    if share > data.max_unknown:
        raise UserError(f"{names}: {_why_unknown(data, shards, tokenizer, share)}")
    return records


def _shown(shards: Iterable[Path], step: str) -> Iterable[Path]:
    """Iterate over the shards of a step, with a progress bar if it takes long."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(shards, step, unit="shard", delay=SECONDS_WITHOUT_BAR, mininterval=1)


def _record(job: Job, source: Source, shards: list[Path]) -> dict[str, Any]:
    """Count the documents of a source read and rejected; an error if too many are rejected."""
    num_read = sum(len(table_of(shard)) for shard in shards)
    if not num_read:
        raise UserError(f"{source.name} holds no documents; leave it out")
    line = f"read {num_read:,} documents from {source.name}"
    if num_rejected := sum(table_of(shard)["hash"].null_count for shard in shards):
        some = islice(chain.from_iterable(map(rejected_in, shards)), NUM_SHOWN)
        line += f"; rejects {num_rejected:,} (RDKit cannot read them, or too large), such as "
        line += ", ".join(repr(text[:80]) for text in some)
    limit, share = job.data.max_rejected, num_rejected / num_read
    if share > limit:
        raise UserError(
            f"{line} ({share:.2%}, data.max_rejected is {limit:.2%}); fix or remove them, or "
            "raise data.max_rejected; if this is ordinary text, set data.kind to text"
        )
    job.report(line)
    counts = {"documents_read": num_read, "rejected": num_rejected}
    return {"name": source.name, **source.facts, **counts}


def held_out_bound(hashes: np.ndarray, validation_share: float) -> np.uint64:
    """Largest hash of a held-out document; each side of the split gets at least one document."""
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise UserError(
            f"the data hold {len(distinct)} different document(s); at least 2 are needed, one "
            "for training and one for validation (blank lines separate documents in a .txt file)"
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
        learn = train_smiles if job.data.kind == "smiles" else train_byte_level_bpe
        tokenizer = learn(_lessons(shards, bound), job.data.vocab_size)
    write_atomically(path, tokenizer.definition)
    job.report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _lessons(shards: list[Path], bound: np.uint64) -> Iterator[str]:
    """Training documents for a tokenizer: all, or a sample of about ``LESSON_BYTES``, by hash."""
    share = LESSON_BYTES / sum(shard.stat().st_size for shard in shards)
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
    retrain = "" if data.tokenizer is None else "set data.tokenizer to none, or "
    return (
        f"{share:.2%} of the tokens are [UNK] (data.max_unknown is {data.max_unknown:.2%}), most "
        f"often {', '.join(repr(piece[:40]) for piece, _ in pieces)}; {retrain}"
        "raise data.vocab_size or data.max_unknown"
    )


# ---- packs ----


def _side(
    shards: list[Path],
    tokenizer: Tokenizer,
    bound: np.uint64,
    is_validation: bool,
    counts: Counter[str],
) -> Iterator[Rows]:
    """Encode the documents of a source that belong to one pack, a batch at a time."""
    for shard in _shown(shards, "encoding"):
        table = documents(shard)
        is_mine_D = (table["hash"].to_numpy() <= bound) == is_validation
        for batch in table.filter(is_mine_D).to_batches(NUM_ENCODED):
            ids_D = tokenizer.encode_batch(batch["text"].to_pylist())
            token_ids = np.fromiter(chain.from_iterable(ids_D), np.int64)
            counts["documents"] += len(ids_D)
            counts["tokens"] += len(token_ids)
            counts["unknown_tokens"] += int((token_ids == tokenizer.special_ids.unk).sum())
            yield Rows(token_ids, np.fromiter(map(len, ids_D), np.int64))


def _why_empty(data: DataConfig, name: str, source: str, counts: Counter[str]) -> str:
    why = "all its molecules are longer; raise data.block_length"
    if data.kind == "text":
        why = f"it has only {counts['tokens']:,} tokens; "
        why += "lower data.block_length, or change data.validation_share"
    return f"{source} yields no {name} row with data.block_length {data.block_length}: {why}"
