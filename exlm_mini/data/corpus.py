"""A corpus: two packs made from documents, one for training and one for validation.

A prepared corpus is a directory with these files::

    tokenizer.json      the tokenizer of both packs
    train.*             pack of the training rows (see packs for its files)
    validation.*        pack of the held-out rows
    corpus.json         settings, versions, sources and hashes of the packs, written last
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini import __version__
from exlm_mini.config import SPECIAL_TOKENS, DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import dotted, plain
from exlm_mini.data.files import REMEDY, read_json, seal_of, sha256_of, write_json
from exlm_mini.data.molecules import Cleaning, require_rdkit
from exlm_mini.data.packs import Pack, framed_rows, write_pack
from exlm_mini.data.pipeline import PACKS, build_packs
from exlm_mini.data.shards import Job
from exlm_mini.data.sources import check_sources, files_of_copy, hub_set, open_sources
from exlm_mini.data.tokenizer import given_tokenizer, word_level
from exlm_mini.data.toy_grammars import grammar

SHARDS = ".shards"
"""Folder for the working files of an unfinished corpus."""
NUM_VALIDATION_SENTENCES = 4096


class Corpus(NamedTuple):
    """A prepared corpus, opened and verified."""

    train: Pack
    validation: Pack
    tokenizer_path: Path
    kind: str
    """Kind of data: toy, text or smiles."""


def prepare_corpus(
    data: DataConfig,
    directory: str | Path,
    seed: int,
    report: Callable[[str], None] = lambda line: None,
    *,
    cleaning: Cleaning | None = None,
    num_workers: int = 1,
) -> Corpus:
    """Open ``data.pack`` if it is set; otherwise make, resume or open the corpus in ``directory``.

    If a call fails, the finished shards are kept, and the same call resumes from them. A toy row is
    one sentence between [BOS] and [EOS], whatever ``data.block_length`` is.

    Args:
        directory: new, empty, or left by an earlier call; only one process may use it at a time.
        seed: for the split, and for drawing sentences from a grammar.
        report: called with one-line messages about the corpus.
        cleaning: how to clean molecules; None leaves them as they are.
        num_workers: number of processes that clean molecules; the packs do not depend on it.
    """
    if data.pack is not None:
        return open_corpus(data.pack, data)
    directory, cleaning = Path(directory), cleaning or Cleaning()
    if data.kind != "smiles" and cleaning != Cleaning():
        raise UserError(
            f"data.kind is {data.kind}, but only molecules can be cleaned; drop the cleaning "
            "options"
        )
    settings = dotted({"seed": seed, "data": plain(data), "cleaning": plain(cleaning)})
    if (directory / "corpus.json").exists():
        _check_same(directory, settings, data)
        report(f"{directory} already holds this corpus")
    else:
        check_sources(data)
        if data.kind == "smiles":
            require_rdkit()
        sources = open_sources(data)
        files = {unit.name: unit.fingerprint for source in sources for unit in source.units}
        for hub in filter(None, map(hub_set, data.source)):
            files |= {str(path): sha256_of(path) for path in files_of_copy(hub.id)}
        if tokenizer := given_tokenizer(data):
            files[str(data.tokenizer)] = tokenizer.sha256
        content = {"settings": settings, "versions": _versions(data.kind), "files": files}
        folder = _working_folder(directory, seal_of(content)[:16])
        if data.kind == "toy":
            records = []
            _write_toy(data, seed, directory)
        else:
            job = Job(data, seed, cleaning, num_workers, folder, report)
            records = build_packs(job, sources, directory)
        packs = {name: Pack(directory / f"{name}.json").sha256 for name in PACKS}
        write_json(directory / "corpus.json", {**content, "sources": records, "packs": packs})
    shutil.rmtree(directory / SHARDS, ignore_errors=True)
    return open_corpus(directory, data)


def open_corpus(directory: str | Path, data: DataConfig) -> Corpus:
    """Open a prepared corpus and verify its files; needs only numpy and torch.

    Args:
        data: its ``kind``, and for toy its ``grammar``, must be those of the corpus.
    """
    directory = Path(directory)
    path = directory / "corpus.json"
    if not path.exists():
        raise UserError(
            f"{directory} holds no corpus; make one there with python -m exlm_mini.prepare (the "
            "recipe's file, or that of its base, begins with it), or give another directory"
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
                f"{pack.path}, {tokenizer_path} and {path} do not belong to the same corpus; "
                f"{REMEDY}"
            )
    return Corpus(train, validation, tokenizer_path, data.kind)


def _versions(kind: str) -> dict[str, str]:
    """Versions of the software that the packs of a kind depend on."""
    libraries = ("numpy", "tokenizers", "rdkit")[: 3 if kind == "smiles" else 2]
    own = {"exlm_mini": __version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in libraries}


def _write_toy(data: DataConfig, seed: int, directory: Path) -> None:
    """Write the packs of a grammar, whose sentences are drawn independently."""
    language = grammar(data.grammar)
    tokenizer = word_level(language.words)
    tokenizer.save(directory / "tokenizer.json")
    sizes = (data.num_sentences, NUM_VALIDATION_SENTENCES)
    for stream, (name, num_sentences) in enumerate(zip(PACKS, sizes, strict=True)):
        sentences = language.sample(num_sentences, (seed, stream))
        token_ids = sentences + len(SPECIAL_TOKENS)  # the ids of words follow those
        write_pack(
            directory / f"{name}.json",
            [framed_rows(token_ids, tokenizer.special_ids)],
            row_length=language.length + 2,
            tokenizer=tokenizer,
            counts=Counter(documents=num_sentences, tokens=token_ids.size),
        )


# ---- the directory ----


def _working_folder(directory: Path, seal: str) -> Path:
    """Make the directory and its folder for the shards of the corpus with this seal; remove shards
    of other seals, and refuse a directory that holds other files."""
    directory.mkdir(parents=True, exist_ok=True)
    foreign = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if foreign and not (directory / SHARDS).is_dir():
        raise UserError(
            f"{directory} holds {foreign[0]} but no corpus.json; choose another directory"
        )
    for partial in directory.glob("*.partial"):  # left by a run that was killed
        partial.unlink()
    folder = directory / SHARDS / seal
    folder.mkdir(parents=True, exist_ok=True)
    for other in set(folder.parent.iterdir()) - {folder}:
        shutil.rmtree(other)
    return folder


def _check_same(directory: Path, settings: dict[str, Any], data: DataConfig) -> None:
    """Check that a corpus was made with these settings, and that its sources have not changed."""
    stored = read_json(directory / "corpus.json")
    for name, value in settings.items():
        if stored["settings"].get(name) != value:
            raise UserError(
                f"{directory} holds a corpus prepared with {name} {stored['settings'].get(name)}, "
                f"not {value}; choose another directory or remove this one"
            )
    copies = (files_of_copy(hub.id) for hub in filter(None, map(hub_set, data.source)))
    new = {str(path): None for path in chain.from_iterable(copies)}
    for path, digest in (new | stored["files"]).items():
        # A source may be missing by now, but a changed one would otherwise go unnoticed.
        if Path(path).is_file() and sha256_of(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since {directory} was prepared from it; choose another "
                "directory or remove this one"
            )
