"""From documents to two packs, one to train on and one to validate with.

A prepared corpus is these files of a directory::

    tokenizer.json      what turns text into the ids of the packs
    train.*             pack of the training rows (``packing`` says which files)
    validation.*        pack of the held-out rows
    corpus.json         the settings it was made with, moved there last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import DataConfig, UserError
from ..tokenization import Tokenizer, train_byte_level_bpe, train_smiles, word_level
from .grammars import grammar
from .packing import (
    REMEDY,
    Counts,
    Pack,
    Rows,
    block_rows,
    framed_rows,
    molecule_rows,
    read_json,
    write_json,
    write_pack,
)
from .smiles import load_molecules
from .text import text_documents

FORMAT = "exlm-mini corpus"
VERSION = 1
TOKENIZER_KINDS = {"toy": "words", "text": "text", "smiles": "smiles"}
EMBEDDED = {"text": "the embedded English", "smiles": "the embedded molecules"}
NUM_VALIDATION_SENTENCES = 4096
NUM_DOCUMENTS_BATCH = 1000
NUM_UNKNOWN_SHOWN = 5


class Corpus(NamedTuple):
    """A prepared corpus, open and verified."""

    train: Pack
    validation: Pack
    tokenizer_path: Path
    kind: str
    """Of the data: toy, text or smiles."""


def prepare_corpus(
    data: DataConfig,
    directory: str | Path,
    seed: int,
    report: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """The corpus of some settings, built into ``directory`` or reopened from there.

    Documents are held in memory (about the size of the text) and split before anything is
    learnt from them: the tokenizer sees training documents only. A toy row is a sentence
    between [BOS] and [EOS], whatever ``data.block_length``. One process at a time may prepare a
    directory.

    Args:
        data: what to read and how to cut it; with ``data.pack`` that corpus is opened instead.
        directory: where to; made if need be.
        seed: of the split, and of the toy sentences. Everything else is deterministic.
        report: receives one line per step.

    Raises:
        UserError: if a source is unfit, the directory holds another corpus, a file has changed
            since it was written, or either pack would be empty.
    """
    if data.pack is not None:
        return open_corpus(data.pack, data)
    directory = Path(directory)
    settings = {"data": json.loads(json.dumps(asdict(data))), "seed": seed}
    if (directory / "corpus.json").exists():
        _check_settings(directory, settings)
        corpus = open_corpus(directory, data)
        report(f"reopened the corpus in {directory}: {len(corpus.train):,} training rows")
        return corpus
    partial = directory / "corpus.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not partial.exists():
            _refuse_strangers(directory)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise _unwritable(directory, error) from None
    try:
        _build(data, partial, settings, report)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(directory, error) from None
        raise
    # corpus.json last: a directory that has it has everything. Until corpus.partial is gone,
    # what lies here is known to be ours.
    for file in sorted(partial.iterdir(), key=lambda path: path.name == "corpus.json"):
        os.replace(file, directory / file.name)
    partial.rmdir()
    return open_corpus(directory, data)


def open_corpus(directory: str | Path, data: DataConfig) -> Corpus:
    """Open a corpus prepared before and verify its files; only numpy and torch are needed.

    Args:
        directory: as given to ``prepare_corpus``.
        data: ``kind``, and for toy the grammar, must be those of the corpus.

    Raises:
        UserError: if it is incomplete, has changed, or is of another kind.
    """
    directory = Path(directory)
    path = directory / "corpus.json"
    stored = _read_corpus(path)
    for name in ("kind", "grammar") if data.kind == "toy" else ("kind",):
        if stored["data"].get(name) != getattr(data, name):
            raise UserError(
                f"{directory} was prepared with data.{name} {_shown(stored['data'].get(name))}, "
                f"not {getattr(data, name)}; set data.{name} to match or open another corpus"
            )
    packs = [Pack.open(directory / f"{name}.json") for name in ("train", "validation")]
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise UserError(f"{tokenizer_path} is missing; {REMEDY}")
    digest = _sha256(tokenizer_path)
    for pack, name in zip(packs, ("train", "validation"), strict=True):
        if pack.tokenizer_sha256 != digest:
            raise UserError(
                f"{tokenizer_path} is not the tokenizer of {pack.path} (sha256 differs); "
                f"{REMEDY}"
            )
        if stored["packs"].get(name) != pack.sha256:
            raise UserError(f"{pack.path} is not the pack that {path} names; {REMEDY}")
    return Corpus(*packs, tokenizer_path, data.kind)


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


# ---- building ----


class _Part(NamedTuple):
    """Rows of one pack, to be written; ``counts`` and ``unknown`` fill as they are read."""

    rows: Iterable[Rows]
    counts: Counts
    unknown: Counter[str]


def _build(
    data: DataConfig, directory: Path, settings: dict, report: Callable[[str], None]
) -> None:
    """Write all files of a corpus into an empty directory."""
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
    packs = {name: Pack.open(directory / f"{name}.json").sha256 for name in parts}
    write_json(
        directory / "corpus.json",
        {
            "format": FORMAT,
            "version": VERSION,
            **settings,
            "sources": {path: _sha256(Path(path)) for path in _local_sources(settings)},
            "packs": packs,
        },
    )


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
        molecules = load_molecules(data)
        report(molecules.describe_rejected())
        documents = molecules.smiles
    else:
        documents = list(text_documents(data))
    report(f"read {len(documents):,} documents from {source}")
    train, held_out = split_documents(documents, data.validation_share, seed)
    if tokenizer is None:
        learn = train_smiles if data.kind == "smiles" else train_byte_level_bpe
        tokenizer = learn(train, data.vocab_size)
    cut = molecule_rows if data.kind == "smiles" else block_rows
    parts = {}
    for name, side in (("train", train), ("validation", held_out)):
        counts, unknown = Counts(), Counter()
        encoded = _encoded(side, tokenizer, counts, unknown)
        rows = cut(encoded, tokenizer.special_ids, data.block_length, counts)
        parts[name] = _Part(rows, counts, unknown)
    return tokenizer, parts


def _encoded(
    documents: list[str], tokenizer: Tokenizer, counts: Counts, unknown: Counter[str]
) -> Iterator[list[int]]:
    """Ids of each document, in order; what has no id is counted."""
    for start in range(0, len(documents), NUM_DOCUMENTS_BATCH):
        batch = documents[start : start + NUM_DOCUMENTS_BATCH]
        for document, token_ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            counts.documents += 1
            counts.tokens += len(token_ids)
            num_unknown = token_ids.count(tokenizer.special_ids.unk)
            if num_unknown:
                counts.unknown_tokens += num_unknown
                unknown.update(tokenizer.unknown_pieces(document))
            yield token_ids


def given_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of ``data.tokenizer``, if there is one."""
    if data.tokenizer is None:
        return None
    tokenizer = Tokenizer.load(data.tokenizer)
    want = TOKENIZER_KINDS[data.kind]
    if tokenizer.kind != want:
        raise UserError(
            f"{data.tokenizer} is a tokenizer of kind {tokenizer.kind}, data.kind {data.kind} "
            f"needs {want}; give another or none to train one"
        )
    return tokenizer


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
    # repr keeps the message on one line, whatever the piece; ties come in a fixed order.
    ranked = sorted(pieces.items(), key=lambda entry: (-entry[1], entry[0]))[:NUM_UNKNOWN_SHOWN]
    shown = ", ".join(f"{piece[:40]!r} {count:,} times" for piece, count in ranked)
    raise UserError(
        f"{source}: {num_unknown / num_tokens:.2%} of the tokens are [UNK] (data.max_unknown "
        f"is {data.max_unknown:.2%}), most often {shown}; set data.tokenizer to none or raise "
        "data.vocab_size or data.max_unknown"
    )


# ---- the directory ----


def _read_corpus(path: Path) -> dict:
    if not path.exists():
        raise UserError(
            f"{path.parent} holds no corpus; make one there with python -m exlm_mini.prepare, or "
            "give another directory"
        )
    stored = read_json(path)
    is_sound = (
        stored.get("format") == FORMAT
        and stored.get("version") == VERSION
        and all(isinstance(stored.get(name), dict) for name in ("data", "sources", "packs"))
    )
    if not is_sound:
        raise UserError(f"{path} does not describe a corpus of version {VERSION}; {REMEDY}")
    return stored


def _check_settings(directory: Path, settings: dict) -> None:
    """The corpus in a directory was made with these settings, from files as they are now."""
    stored = _read_corpus(directory / "corpus.json")
    was = {"seed": stored.get("seed")} | {f"data.{k}": v for k, v in stored["data"].items()}
    now = {"seed": settings["seed"]} | {f"data.{k}": v for k, v in settings["data"].items()}
    for name in now:
        if name not in was or was[name] != now[name]:
            raise UserError(
                f"{directory} holds a corpus prepared with {name} {_shown(was.get(name))}, not "
                f"{now[name]}; choose another directory or remove this one"
            )
    for path, digest in stored["sources"].items():
        # A source that is gone does no harm; one that changed would go unnoticed.
        if Path(path).is_file() and _sha256(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since {directory} was prepared from it; choose another "
                "directory or remove this one"
            )


def _shown(value: object) -> str:
    """A stored value as part of one line, whatever it is."""
    return " ".join(str(value).split())[:80]


def _refuse_strangers(directory: Path) -> None:
    """Never overwrite files that are not known to be ours."""
    for name in (
        "tokenizer.json",
        "train.bin",
        "train.json",
        "validation.bin",
        "validation.json",
    ):
        if (directory / name).exists():
            raise UserError(
                f"{directory} holds {name} but no corpus.json; choose another directory"
            )


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to {directory} ({error.strerror}); make room or choose another directory"
    )


def _local_sources(settings: dict) -> list[str]:
    """Files the corpus depends on."""
    tokenizer = settings["data"]["tokenizer"]
    return [*settings["data"]["files"], *([tokenizer] if tokenizer else [])]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
