"""The files of a corpus that fits in memory: documents split, a tokenizer learnt, rows packed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exlm_mini.config import DataConfig, UserError
from exlm_mini.data.files import sha256_of, write_json
from exlm_mini.data.memory import check_bytes
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Documents, Rows, block_rows, framed_rows, molecule_rows
from exlm_mini.data.smiles import load_molecules
from exlm_mini.data.text import text_documents
from exlm_mini.data.tokenizer import Tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.data.vocabulary import given_tokenizer, learn_tokenizer, most_often

FORMAT = "exlm-mini corpus"
VERSION = 1
EMBEDDED = {"text": "the embedded English", "smiles": "the embedded molecules"}
NUM_VALIDATION_SENTENCES = 4096
NUM_DOCUMENTS_BATCH = 1000


class _Part(NamedTuple):
    """Rows of one pack, to be written; ``counts`` and ``unknown`` fill as they are read."""

    rows: Iterable[Rows]
    counts: Counts
    unknown: Counter[str]


def build_corpus(
    data: DataConfig, directory: Path, settings: dict, report: Callable[[str], None]
) -> None:
    """Write all files of a corpus into an empty directory.

    Args:
        data: what to read and how to cut it.
        directory: where to.
        settings: ``data`` as JSON knows it and ``seed``, for corpus.json.
        report: receives one line per step.

    Raises:
        UserError: if a source is unfit, or either pack would be empty.
    """
    seed = settings["seed"]
    if data.kind == "toy":
        source = f"toy grammar {data.grammar}"
        tokenizer, parts, row_length = _toy_parts(data, seed)
    else:
        source = ", ".join(data.files) or data.hub or EMBEDDED[data.kind]
        tokenizer, parts = _document_parts(data, source, seed, report)
        row_length = data.block_length if data.kind == "text" else None
    report(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    tokenizer.save(directory / "tokenizer.json")
    for name, part in parts.items():
        num_rows = write_pack(
            directory / f"{name}.json",
            part.rows,
            row_length=row_length,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            source=source,
            counts=part.counts,
        )
        if num_rows == 0:
            raise UserError(_why_empty(data, name, source, part.counts))
        report(f"{name}: {num_rows:,} rows from {part.counts.documents:,} documents")
    _check_unknown(data, source, parts.values())
    write_description(
        directory,
        settings,
        sources={path: sha256_of(Path(path)) for path in _local_sources(settings)},
        packs={name: Pack.open(directory / f"{name}.json").sha256 for name in parts},
    )


def write_description(directory: Path, settings: dict, **facts: dict) -> None:
    """Write corpus.json: the settings of a corpus, its ``sources``, ``packs`` and other facts."""
    content = {"format": FORMAT, "version": VERSION, **settings, **facts}
    write_json(directory / "corpus.json", content)


def _toy_parts(data: DataConfig, seed: int) -> tuple[Tokenizer, dict[str, _Part], int]:
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
    parts = {}
    sizes = {"train": data.num_sentences, "validation": NUM_VALIDATION_SENTENCES}
    # A uniform number, the word and the token of each place.
    needed = 3 * 8 * data.num_sentences * (language.length + 2)
    check_bytes(f"data.num_sentences {data.num_sentences:,}", {"give fewer": needed})
    for stream, (name, num_sentences) in enumerate(sizes.items()):
        token_ids_SN = token_ids_V[language.sample(num_sentences, (seed, stream))]
        counts = Counts(documents=num_sentences, tokens=token_ids_SN.size)
        parts[name] = _Part(
            [framed_rows(token_ids_SN, tokenizer.special_ids)], counts, Counter()
        )
    return tokenizer, parts, language.length + 2


def _document_parts(
    data: DataConfig, source: str, seed: int, report: Callable[[str], None]
) -> tuple[Tokenizer, dict[str, _Part]]:
    """Text or molecules: read, split, learn the vocabulary on the training side, cut."""
    tokenizer = given_tokenizer(data)
    if data.kind == "smiles":
        molecules = load_molecules(data, report)
        report(molecules.describe_rejected())
        documents = molecules.smiles
    else:
        documents = list(text_documents(data))
    report(f"read {len(documents):,} documents from {source}")
    train, held_out = split_documents(documents, data.validation_share, seed)
    if tokenizer is None:
        tokenizer = learn_tokenizer(data, train)
    cut = molecule_rows if data.kind == "smiles" else block_rows
    parts = {}
    for name, side in (("train", train), ("validation", held_out)):
        counts, unknown = Counts(), Counter()
        encoded = _encoded(side, tokenizer, counts, unknown)
        rows = cut(encoded, tokenizer.special_ids, data.block_length, counts)
        parts[name] = _Part(rows, counts, unknown)
    return tokenizer, parts


def split_documents(
    documents: list[str], validation_share: float, seed: int
) -> tuple[list[str], list[str]]:
    """Hold out a share of the documents, chosen by a keyed hash of their text.

    Equal documents fall on the same side, so that none is trained on and validated with; the
    order of the documents does not matter.

    Returns:
        training and validation documents, each in the order given; neither is empty.

    Raises:
        UserError: if there are fewer than two different documents.
    """
    key = str(seed).encode()
    hash_of = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest())
        for text in documents
    ]
    distinct = np.unique(np.array(hash_of, dtype=np.uint64))
    if len(distinct) < 2:
        raise UserError(
            f"the data hold {len(distinct)} different document(s); at least 2 are needed, one "
            "to train on and one to validate with (blank lines divide a .txt file)"
        )
    num_held_out = min(max(1, round(validation_share * len(distinct))), len(distinct) - 1)
    bound = int(distinct[num_held_out - 1])
    train = [text for text, hashed in zip(documents, hash_of, strict=True) if hashed > bound]
    held_out = [
        text for text, hashed in zip(documents, hash_of, strict=True) if hashed <= bound
    ]
    return train, held_out


def _encoded(
    documents: list[str], tokenizer: Tokenizer, counts: Counts, unknown: Counter[str]
) -> Iterator[Documents]:
    """Ids of the documents, in order; what has no id is counted."""
    for start in range(0, len(documents), NUM_DOCUMENTS_BATCH):
        batch = documents[start : start + NUM_DOCUMENTS_BATCH]
        encoded = tokenizer.encode_batch(batch)
        for document, token_ids in zip(batch, encoded, strict=True):
            num_unknown = token_ids.count(tokenizer.special_ids.unk)
            if num_unknown:
                counts.unknown_tokens += num_unknown
                unknown.update(tokenizer.unknown_pieces(document))
        lengths_D = np.array(list(map(len, encoded)), dtype=np.int64)
        counts.documents += len(batch)
        counts.tokens += int(lengths_D.sum())
        yield Documents(np.array(list(chain.from_iterable(encoded)), np.int64), lengths_D)


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


def _check_unknown(data: DataConfig, source: str, parts: Iterable[_Part]) -> None:
    """Stop when the vocabulary does not fit the data."""
    parts = list(parts)
    num_tokens = sum(part.counts.tokens for part in parts)
    num_unknown = sum(part.counts.unknown_tokens for part in parts)
    if num_unknown <= data.max_unknown * num_tokens:
        return
    pieces = sum((part.unknown for part in parts), Counter())
    raise UserError(
        f"{source}: {num_unknown / num_tokens:.2%} of the tokens are [UNK] (data.max_unknown "
        f"is {data.max_unknown:.2%}), most often {most_often(pieces)}; set "
        "data.tokenizer to none or raise data.vocab_size or data.max_unknown"
    )


def _local_sources(settings: dict) -> list[str]:
    """Files the corpus depends on."""
    tokenizer = settings["data"]["tokenizer"]
    return [*settings["data"]["files"], *([tokenizer] if tokenizer else [])]
