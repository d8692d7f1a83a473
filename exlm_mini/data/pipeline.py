"""From documents to two packs: clean, split, learn a tokenizer, encode, cut rows.

Each step is a function from values to values; the large ones are kept on the disk, see ``shards``.
The packs depend neither on the number of processes nor on interruptions. Rows are grouped by source
and never mix two; training draws them in random order.

Dimension key: D documents of a shard.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini import __version__
from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Change, Cleaning, clean
from exlm_mini.data.files import seal_of, write_atomically
from exlm_mini.data.packs import write_pack
from exlm_mini.data.rows import Counts, Rows, block_rows, molecule_rows
from exlm_mini.data.shards import Job, Shard, documents_of, encoded, ids_of
from exlm_mini.data.sources import Source
from exlm_mini.data.tokenizer import (
    Tokenizer,
    given_tokenizer,
    train_byte_level_bpe,
    train_smiles,
)

LESSON_BYTES = 500_000_000
"""Most text that a tokenizer is trained on, about."""
NUM_BUCKETS = 1 << 16
"""Buckets of documents by hash; the first buckets are a sample that does not depend on order."""
LIBRARIES = {
    "toy": ("numpy", "tokenizers"),
    "text": ("numpy", "tokenizers"),
    "smiles": ("numpy", "rdkit", "tokenizers"),
}
NUM_SHOWN = 5
"""Rejected molecules or unknown pieces in a message."""
NUM_PIECES = 1000
"""Unknown pieces of which the most frequent are shown."""


class Part(NamedTuple):
    """A source on its way to the packs."""

    record: dict[str, Any]
    """What became of its documents."""
    shards: list[Shard]
    ids: list[Path]
    """Files with the token ids of each shard."""


def build_packs(job: Job, sources: list[Source], directory: Path) -> list[dict[str, Any]]:
    """Write the tokenizer and the packs of a corpus into an empty directory.

    Returns:
        A record of each source: its facts, what was cleaned, and its rows in each pack.
    """
    shards_of = [
        list(documents_of(job, f"{number:03d}", source))
        for number, source in enumerate(sources)
    ]
    records = [_checked(job, *pair) for pair in zip(sources, shards_of, strict=True)]
    shards = list(chain(*shards_of))
    hashes = [shard.column("hash") for shard in shards]
    bound = held_out_bound(np.concatenate(hashes), job.data.validation_share)
    tokenizer = _tokenizer_for(job, shards, bound)
    tokenizer.save(directory / "tokenizer.json")
    parts = [
        Part(record, shards, [encoded(job, shard) for shard in shards])
        for record, shards in zip(records, shards_of, strict=True)
    ]
    name_of_all = ", ".join(source.name for source in sources)
    _check_unknown(job.data, tokenizer, parts, name_of_all)
    for name in ("train", "validation"):
        counts = Counts()
        num_rows = write_pack(
            directory / f"{name}.json",
            _rows(job.data, name, parts, tokenizer, bound, counts),
            row_length=job.data.block_length if job.data.kind == "text" else None,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            source=name_of_all,
            counts=counts,
        )
        if num_rows == 0:
            raise UserError(_why_empty(job.data, name, name_of_all, counts))
        line = f"{name}: {num_rows:,} rows, {counts.tokens:,} tokens"
        if counts.dropped_documents:
            line += f"; dropped: {counts.dropped_documents:,} of {counts.documents:,}, too long"
        job.report(line)
    return records


def working_folder(
    data: DataConfig, seed: int, cleaning: Cleaning, sources: list[Source], parent: Path
) -> Path:
    """The folder for the Arrow files of a corpus; those of another corpus are removed.

    Its name is a seal of everything that the files depend on, because ``datasets`` takes a file by
    its name alone.
    """
    given = given_tokenizer(data)
    seal = seal_of(
        {
            "data": json.loads(json.dumps(asdict(data))),
            "seed": seed,
            "cleaning": asdict(cleaning),
            "units": [[unit.fingerprint for unit in source.units] for source in sources],
            "tokenizer": given and given.sha256,
            "versions": versions(data.kind),
        }
    )
    folder = parent / seal[:16]
    for other in set(parent.iterdir()) - {folder} if parent.exists() else ():
        shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def versions(kind: str) -> dict[str, str]:
    """Versions of the software that the packs of a kind depend on."""
    found = {"exlm_mini": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in LIBRARIES[kind]}


def _checked(job: Job, source: Source, shards: list[Shard]) -> dict[str, Any]:
    """What was read of a source; raises an error if RDKit rejects too many molecules."""
    num_read = sum(shard.num_read for shard in shards)
    if not num_read:
        raise UserError(f"{source.name} holds no documents; leave it out")
    job.report(f"read {num_read:,} documents from {source.name}")
    record = {"name": source.name, **source.facts, "documents_read": num_read}
    if job.data.kind != "smiles":
        return record
    changes = np.concatenate([shard.column("changes") for shard in shards])
    done = {"rejected": num_read - len(changes)}
    done |= {str(one.name).lower(): int((changes & one > 0).sum()) for one in Change}
    words = [f"{n:,} {name.replace('_', ' ')}" for name, n in done.items() if n]
    job.report(f"{source.name}: of {num_read:,} molecules {', '.join(words) or 'all are kept'}")
    limit, share = job.data.max_rejected, done["rejected"] / num_read
    if share > limit:
        texts = chain.from_iterable(unit.documents() for unit in source.units)
        rejected = (text for text in texts if clean(text, job.cleaning) is None)
        raise UserError(
            f"{source.name}: RDKit rejects {done['rejected']:,} of {num_read:,} molecules "
            f"({share:.2%}, data.max_rejected is {limit:.2%}), such as "
            f"{', '.join(repr(text[:80]) for text in islice(rejected, NUM_SHOWN))}; mend or remove "
            "them, or raise data.max_rejected; text is read with data.kind text"
        )
    return {**record, "cleaning": done}


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


def _tokenizer_for(job: Job, shards: list[Shard], bound: np.uint64) -> Tokenizer:
    """The given tokenizer, or one trained on a sample of the training documents."""
    path, tokenizer = job.folder / "tokenizer.json", given_tokenizer(job.data)
    if path.exists():
        return Tokenizer.load(path)
    if tokenizer is None:
        job.report("learning the tokenizer from the training documents")
        sizes = [shard.text_bytes()[shard.column("hash") > bound] for shard in shards]
        share = LESSON_BYTES / max(sum(int(size_D.sum()) for size_D in sizes), 1)
        learn = train_smiles if job.data.kind == "smiles" else train_byte_level_bpe
        tokenizer = learn(_lessons(shards, bound, share), job.data.vocab_size)
    write_atomically(path, tokenizer.definition)
    job.report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _lessons(shards: list[Shard], bound: np.uint64, share: float) -> Iterator[str]:
    """About that share of the training documents, drawn by their hashes."""
    for shard in shards:
        hash_D = shard.column("hash")
        is_lesson_D = (hash_D > bound) & (hash_D % NUM_BUCKETS < share * NUM_BUCKETS)
        yield from shard.texts().filter(is_lesson_D).to_pylist()


def _check_unknown(
    data: DataConfig, tokenizer: Tokenizer, parts: list[Part], source: str
) -> None:
    """Raise an error if too many tokens are unknown."""
    num_tokens = num_unknown = 0
    for path in chain.from_iterable(part.ids for part in parts):
        is_unknown = ids_of(path).token_ids == tokenizer.special_ids.unk
        num_tokens += len(is_unknown)
        num_unknown += int(is_unknown.sum())
    if num_unknown <= data.max_unknown * num_tokens:
        return
    texts = (
        text
        for shard in chain.from_iterable(part.shards for part in parts)
        for text in shard.texts().to_pylist()
    )
    unknown = (piece for text in texts for piece in tokenizer.unknown_pieces(text))
    pieces = Counter(islice(unknown, NUM_PIECES)).most_common(NUM_SHOWN)
    shown = ", ".join(repr(piece[:40]) for piece, _ in pieces)
    raise UserError(
        f"{source}: {num_unknown / num_tokens:.2%} of the tokens are [UNK] (data.max_unknown is "
        f"{data.max_unknown:.2%}), most often {shown}; set data.tokenizer to none, or raise "
        "data.vocab_size or data.max_unknown"
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
        documents = _side(part, tokenizer.special_ids.unk, bound, name == "validation", counts)
        for rows in cut(documents, tokenizer.special_ids, data.block_length, counts):
            num_rows += len(rows.lengths_R)
            yield rows
        part.record[name] = {"rows": [start, num_rows], **asdict(counts)}
        total.add(counts)


def _side(
    part: Part, unknown_id: int, bound: np.uint64, is_validation: bool, counts: Counts
) -> Iterator[Rows]:
    """The documents of a source that belong to a pack, shard by shard."""
    for shard, path in zip(part.shards, part.ids, strict=True):
        is_mine_D = (shard.column("hash") <= bound) == is_validation
        token_ids, lengths_D = ids_of(path)
        token_ids, lengths_D = token_ids[np.repeat(is_mine_D, lengths_D)], lengths_D[is_mine_D]
        counts.documents += len(lengths_D)
        counts.tokens += len(token_ids)
        counts.unknown_tokens += int((token_ids == unknown_id).sum())
        yield Rows(token_ids, lengths_D)


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
