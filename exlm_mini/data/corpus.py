"""A corpus: two packs made from documents, one for training and one for validation.

A prepared corpus is a directory with these files::

    tokenizer.json      the tokenizer of both packs
    train.*             pack of the training rows (files as in packs)
    validation.*        pack of the held-out rows
    corpus.json         its settings, sources, versions and packs, written last
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_mini import __version__
from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import REMEDY, read_json, seal_of, sha256_of, write_json
from exlm_mini.data.molecules import Cleaning, require_rdkit
from exlm_mini.data.packs import Counts, Pack, framed_rows, write_pack
from exlm_mini.data.pipeline import PACKS, build_packs
from exlm_mini.data.shards import Job
from exlm_mini.data.sources import check_sources, open_sources
from exlm_mini.data.tokenizer import given_tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar

SHARDS = ".shards"
"""Working files of an unfinished corpus."""
NUM_VALIDATION_SENTENCES = 4096
LIBRARIES = {
    "toy": ("numpy", "tokenizers"),
    "text": ("numpy", "tokenizers"),
    "smiles": ("numpy", "rdkit", "tokenizers"),
}
"""Libraries that the packs of a kind depend on."""


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
        corpus = open_corpus(data.pack, data)
        row_length = corpus.train.row_length
        if data.kind == "text" and row_length != data.block_length:
            report(
                f"{data.pack} has rows of {row_length} tokens; data.block_length "
                f"{data.block_length} is not used"
            )
        return corpus
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
    """
    directory, cleaning = Path(directory), cleaning or Cleaning()
    if data.kind != "smiles" and cleaning != Cleaning():
        raise UserError(
            f"data.kind is {data.kind}; only molecules are cleaned, leave the options of cleaning "
            "out"
        )
    settings = _settings(data, seed, cleaning)
    if (directory / "corpus.json").exists():
        _check_same(directory, settings)
        corpus = open_corpus(directory, data)
        report(f"{directory} already holds this corpus: {len(corpus.train):,} training rows")
    else:
        check_sources(data, accepted)
        if data.kind == "smiles":
            require_rdkit()
        _begin(directory)
        content: dict[str, Any] = {"settings": settings, "sources": []}
        content["versions"] = versions(data.kind)
        if data.kind == "toy":
            _write_toy(data, seed, directory)
        else:
            sources = open_sources(data)
            units = [[unit.fingerprint for unit in source.units] for source in sources]
            folder = _working_folder(directory / SHARDS, data, content, units)
            job = Job(data, seed, cleaning, num_workers, folder, report)
            content["sources"] = build_packs(job, sources, directory)
        _finish(directory, data, content)
        corpus = open_corpus(directory, data)
    shutil.rmtree(directory / SHARDS, ignore_errors=True)
    return corpus


def open_corpus(directory: str | Path, data: DataConfig) -> Corpus:
    """Open a prepared corpus and verify its files; needs only numpy and torch.

    Args:
        data: ``kind``, and for toy the grammar, must be those of the corpus.
    """
    directory = Path(directory)
    path = directory / "corpus.json"
    if not path.exists():
        raise UserError(
            f"{directory} holds no corpus; make one there with python -m exlm_mini.prepare, or "
            "give another directory"
        )
    stored = read_json(path)
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
        if pack.tokenizer_sha256 != digest or stored["packs"][pack.path.stem] != pack.sha256:
            raise UserError(
                f"{pack.path}, {tokenizer_path} and {path} are not of one corpus; {REMEDY}"
            )
    return Corpus(train, validation, tokenizer_path, data.kind)


def versions(kind: str) -> dict[str, str]:
    """Versions of the software that the packs of a kind depend on."""
    own = {"exlm_mini": __version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in LIBRARIES[kind]}


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
    tokenizer.save(directory / "tokenizer.json")
    sizes = (data.num_sentences, NUM_VALIDATION_SENTENCES)
    for stream, (name, num_sentences) in enumerate(zip(PACKS, sizes, strict=True)):
        sentences = language.sample(num_sentences, (seed, stream))
        token_ids = np.array(words).reshape(-1)[sentences]
        write_pack(
            directory / f"{name}.json",
            [framed_rows(token_ids, tokenizer.special_ids)],
            row_length=language.length + 2,
            tokenizer=tokenizer,
            source=f"toy grammar {data.grammar}",
            counts=Counts(documents=num_sentences, tokens=token_ids.size),
        )


# ---- the directory ----


def _settings(data: DataConfig, seed: int, cleaning: Cleaning) -> dict[str, Any]:
    """Everything asked for, under dotted names, as JSON has it."""
    groups = {"data": asdict(data), "cleaning": asdict(cleaning)}
    plain = {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}
    return json.loads(json.dumps({"seed": seed, **plain}))


def _begin(directory: Path) -> None:
    """Make the directory; one with files that are not ours is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    foreign = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if foreign and not (directory / SHARDS).is_dir():
        raise UserError(
            f"{directory} holds {foreign[0]} but no corpus.json; choose another directory"
        )
    (directory / SHARDS).mkdir(exist_ok=True)
    for partial in directory.glob("*.partial"):  # left by a run that was killed
        partial.unlink()


def _working_folder(
    parent: Path, data: DataConfig, content: dict[str, Any], units: list[list[str]]
) -> Path:
    """The folder for the shards of a corpus; those of another corpus are removed.

    Its name is a seal of everything that the shards depend on.
    """
    tokenizer = given_tokenizer(data)
    sha256 = tokenizer and tokenizer.sha256
    folder = parent / seal_of({**content, "units": units, "tokenizer": sha256})[:16]
    for other in set(parent.iterdir()) - {folder}:
        shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    return folder


def _finish(directory: Path, data: DataConfig, content: dict[str, Any]) -> None:
    """Write corpus.json: a directory with one is complete."""
    files = {
        path: digest for one in content["sources"] for path, digest in one["sha256"].items()
    }
    if data.tokenizer:
        files[data.tokenizer] = sha256_of(Path(data.tokenizer))
    packs = {name: Pack(directory / f"{name}.json").sha256 for name in PACKS}
    write_json(directory / "corpus.json", {**content, "files": files, "packs": packs})


def _check_same(directory: Path, settings: dict[str, Any]) -> None:
    """Check that a corpus was made with these settings, from files as they are now."""
    stored = read_json(directory / "corpus.json")
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
