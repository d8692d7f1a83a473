"""A corpus: two packs made from documents, one for training and one for validation.

A prepared corpus is a directory with these files::

    tokenizer.json      the tokenizer of both packs
    train.*             pack of the training rows (files as in ``packs``)
    validation.*        pack of the held-out rows
    corpus.json         its settings, sources, versions and packs, moved there last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.files import REMEDY, read_json, sha256_of, write_json
from exlm_mini.data.memory import check_bytes
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.pipeline import Job, build_packs, versions, working_folder
from exlm_mini.data.rows import Counts, framed_rows
from exlm_mini.data.smiles import require_rdkit
from exlm_mini.data.sources import check_sources, open_sources
from exlm_mini.data.tokenizer import given_tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar

SHARDS = ".shards"
"""Working files of an unfinished corpus."""
PACKS = ("train", "validation")
NUM_VALIDATION_SENTENCES = 4096


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
    """The corpus of a run: ``data.pack``, or what ``prepare`` makes of its settings.

    A toy row is a sentence between [BOS] and [EOS] and ignores ``data.block_length``.
    """
    if data.pack is not None:
        return open_corpus(data.pack, data)
    return prepare(data, directory, seed, report=report)


def prepare(
    data: DataConfig,
    directory: str | Path,
    seed: int = 1,
    *,
    cleaning: Cleaning | None = None,
    accepted: Collection[str] = (),
    num_workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[str, float], None] = lambda step, num_bytes: None,
) -> Corpus:
    """Make a corpus in a directory, resume making it, or open it if it is finished.

    Finished shards are kept when it fails, and the same call resumes from them.

    Args:
        data: what to read and how to cut it.
        directory: empty, or left by an earlier call; for one process at a time.
        seed: of the split, and of sentences drawn from a grammar.
        cleaning: of molecules; None: as they are.
        accepted: named sets whose caveat the user accepts.
        num_workers: processes; the packs do not depend on it.
        report: receives lines about the corpus.
        progress: receives the name of a step, and the bytes of text of each shard it has finished.
    """
    directory, cleaning = Path(directory), cleaning or Cleaning()
    if data.kind != "smiles" and cleaning != Cleaning():
        raise UserError(
            f"data.kind is {data.kind}; only molecules are cleaned, leave the options of cleaning "
            "out"
        )
    settings = _settings(data, seed, cleaning)
    shards = directory / SHARDS
    if (directory / "corpus.json").exists():
        _check_same(directory, settings)
        corpus = open_corpus(directory, data)
        shutil.rmtree(
            shards, ignore_errors=True
        )  # left by a run that was killed at the very end
        report(f"{directory} already holds this corpus: {len(corpus.train):,} training rows")
        return corpus
    check_sources(data, accepted)
    if data.kind == "smiles":
        require_rdkit()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory)
        made = shards / "corpus"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        if data.kind == "toy":
            sources: list[dict[str, Any]] = []
            _write_toy(data, seed, made)
        else:
            opened = open_sources(data, accepted)
            folder = working_folder(data, seed, cleaning, opened, shards / "arrow")
            job = Job(data, seed, cleaning, num_workers, folder, report, progress)
            sources = build_packs(job, opened, made)
        files = {path: digest for one in sources for path, digest in one["sha256"].items()}
        if data.tokenizer:
            files[data.tokenizer] = sha256_of(Path(data.tokenizer))
        write_json(
            made / "corpus.json",
            {
                "settings": settings,
                "sources": sources,
                "files": files,
                "versions": versions(data.kind),
                "packs": {name: Pack(made / f"{name}.json").sha256 for name in PACKS},
            },
        )
        for name in PACKS:  # moved here by a killed run with other settings
            (directory / f"{name}.offsets.bin").unlink(missing_ok=True)
        # corpus.json last: a directory with it is complete.
        for file in sorted(made.iterdir(), key=lambda path: path.name == "corpus.json"):
            os.replace(file, directory / file.name)
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or directory} ({error.strerror}); make room or "
            "choose another directory; the same command goes on"
        ) from None
    corpus = open_corpus(directory, data)
    shutil.rmtree(shards)
    return corpus


def open_corpus(directory: str | Path, data: DataConfig) -> Corpus:
    """Open a prepared corpus and verify its files; needs only numpy and torch.

    Args:
        directory: as given to ``prepare_corpus``.
        data: ``kind``, and for toy the grammar, must be those of the corpus.
    """
    directory = Path(directory)
    path = directory / "corpus.json"
    stored = _read_corpus(path)
    for name in ("data.kind", "data.grammar") if data.kind == "toy" else ("data.kind",):
        was, value = stored["settings"][name], getattr(data, name.removeprefix("data."))
        if was != value:
            raise UserError(
                f"{directory} was prepared with {name} {was}, not {value}; set {name} to match "
                "or open another corpus"
            )
    train, validation = (Pack(directory / f"{name}.json") for name in PACKS)
    tokenizer_path = directory / "tokenizer.json"
    digest = sha256_of(tokenizer_path)
    for pack in (train, validation):
        if pack.tokenizer_sha256 != digest:
            raise UserError(
                f"{tokenizer_path} is not the tokenizer of {pack.path} (sha256 differs); {REMEDY}"
            )
        if stored["packs"][pack.path.stem] != pack.sha256:
            raise UserError(f"{pack.path} is not the pack that {path} names; {REMEDY}")
    return Corpus(train, validation, tokenizer_path, data.kind)


def _write_toy(data: DataConfig, seed: int, directory: Path) -> None:
    """The packs of a grammar, whose sentences are drawn independently."""
    language = grammar(data.grammar)
    tokenizer = given_tokenizer(data) or word_level(language.words)
    words = tokenizer.encode_batch(language.words)
    for word, ids in zip(language.words, words, strict=True):
        if len(ids) != 1 or ids[0] == tokenizer.special_ids.unk:
            raise UserError(
                f"{data.tokenizer} lacks the word '{word}' of grammar {data.grammar}; set "
                "data.tokenizer to none to make one"
            )
    # A uniform number, a word and a token per place.
    needed = 3 * 8 * data.num_sentences * (language.length + 2)
    check_bytes(f"data.num_sentences {data.num_sentences:,}", {"give fewer": needed})
    tokenizer.save(directory / "tokenizer.json")
    sizes = (data.num_sentences, NUM_VALIDATION_SENTENCES)
    for stream, (name, num_sentences) in enumerate(zip(PACKS, sizes, strict=True)):
        sentences = language.sample(num_sentences, (seed, stream))
        token_ids = np.array(words).reshape(-1)[sentences]
        write_pack(
            directory / f"{name}.json",
            [framed_rows(token_ids, tokenizer.special_ids)],
            row_length=language.length + 2,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            source=f"toy grammar {data.grammar}",
            counts=Counts(documents=num_sentences, tokens=token_ids.size),
        )


# ---- the directory ----


def _settings(data: DataConfig, seed: int, cleaning: Cleaning) -> dict[str, Any]:
    """Everything asked for, under dotted names, as JSON has it."""
    groups = {"data": asdict(data), "cleaning": asdict(cleaning)}
    plain = {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}
    return json.loads(json.dumps({"seed": seed, **plain}))


def _read_corpus(path: Path) -> dict:
    if not path.exists():
        raise UserError(
            f"{path.parent} holds no corpus; make one there with python -m exlm_mini.prepare, or "
            "give another directory"
        )
    return read_json(path)


def _refuse_strangers(directory: Path) -> None:
    """Refuse a directory with files that are not ours."""
    foreign = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if foreign and not (directory / SHARDS).is_dir():  # otherwise a killed run moved them there
        raise UserError(
            f"{directory} holds {foreign[0]} but no corpus.json; choose another directory"
        )


def _check_same(directory: Path, settings: dict[str, Any]) -> None:
    """Check that a corpus was made with these settings, from files as they are now."""
    stored = _read_corpus(directory / "corpus.json")
    for name, value in settings.items():
        if stored["settings"].get(name) != value:
            raise UserError(
                f"{directory} holds a corpus prepared with {name} {stored['settings'].get(name)}, "
                f"not {value}; choose another directory or remove this one"
            )
    for path, digest in stored["files"].items():
        # A source may be gone, but one that has changed would go unnoticed.
        if Path(path).is_file() and sha256_of(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since {directory} was prepared from it; choose another "
                "directory or remove this one"
            )
