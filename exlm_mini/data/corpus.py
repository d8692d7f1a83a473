"""A corpus: two packs made from documents, one for training and one for validation.

A prepared corpus is a directory with these files::

    tokenizer.json      the tokenizer of both packs
    train.*             pack of the training rows (files as in ``packs``)
    validation.*        pack of the held-out rows
    corpus.json         the settings it was made with, moved there last
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.building import FORMAT, VERSION, build_corpus
from exlm_mini.data.files import REMEDY, read_json, sha256_of
from exlm_mini.data.packs import Pack
from exlm_mini.data.pipeline import Progress
from exlm_mini.data.request import Preparation

SHARDS = ".shards"
"""Working files of an unfinished corpus."""
FILES = (
    *("tokenizer.json", "train.bin", "train.offsets.bin", "train.json"),
    *("validation.bin", "validation.offsets.bin", "validation.json"),
)
"""The files of a corpus, except for corpus.json."""


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

    Raises:
        UserError: as ``prepare`` and ``open_corpus``.
    """
    if data.pack is not None:
        return open_corpus(data.pack, data)
    return prepare(Preparation(data, seed=seed), directory, report=report)


def prepare(
    wanted: Preparation,
    directory: str | Path,
    num_workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda name, done: None,
) -> Corpus:
    """Make a corpus in a directory, resume making it, or open it if it is finished.

    Args:
        wanted: what to make.
        directory: empty, or left by an earlier call; for one process at a time.
        num_workers: processes; the packs do not depend on it.
        report: receives lines about the corpus.
        progress: called at the start of a pass and after each shard.

    Raises:
        UserError: for anything wrong with a source, the directory or the disk, for another corpus
            in the directory, or a file that has changed since. Finished shards are kept, and the
            same call resumes from them.
    """
    directory = Path(directory)
    shards = directory / SHARDS
    if (directory / "corpus.json").exists():
        _check_settings(directory, wanted)
        corpus = open_corpus(directory, wanted.data)
        # Left by a run that was killed at the very end.
        shutil.rmtree(shards, ignore_errors=True)
        rows = f"{len(corpus.train):,} training rows"
        report(f"{directory} already holds this corpus: {rows}")
        return corpus
    made = shards / "corpus"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        build_corpus(wanted, shards, made, num_workers, report, progress)
        for name in FILES:  # moved here by a killed run with other settings
            (directory / name).unlink(missing_ok=True)
        # corpus.json last: a directory with it is complete.
        for file in sorted(made.iterdir(), key=lambda path: path.name == "corpus.json"):
            os.replace(file, directory / file.name)
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or directory} ({error.strerror}); make room or "
            "choose another directory; the same command goes on"
        ) from None
    corpus = open_corpus(directory, wanted.data)
    shutil.rmtree(shards)
    return corpus


def open_corpus(directory: str | Path, data: DataConfig) -> Corpus:
    """Open a prepared corpus and verify its files; needs only numpy and torch.

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
                f"{directory} was prepared with data.{name} {stored['data'].get(name)}, "
                f"not {getattr(data, name)}; set data.{name} to match or open another corpus"
            )
    packs = {name: Pack.open(directory / f"{name}.json") for name in ("train", "validation")}
    tokenizer_path = directory / "tokenizer.json"
    digest = sha256_of(tokenizer_path)
    for name, pack in packs.items():
        if pack.tokenizer_sha256 != digest:
            raise UserError(
                f"{tokenizer_path} is not the tokenizer of {pack.path} (sha256 differs); "
                f"{REMEDY}"
            )
        if stored["packs"].get(name) != pack.sha256:
            raise UserError(f"{pack.path} is not the pack that {path} names; {REMEDY}")
    return Corpus(packs["train"], packs["validation"], tokenizer_path, data.kind)


# ---- the directory ----


def _read_corpus(path: Path) -> dict:
    if not path.exists():
        raise UserError(
            f"{path.parent} holds no corpus; make one there with python -m exlm_mini.prepare, or "
            "give another directory"
        )
    stored = read_json(path)
    kinds = {type(stored.get(name)) for name in ("data", "sources", "packs")}
    if (stored.get("format"), stored.get("version"), kinds) != (FORMAT, VERSION, {dict}):
        raise UserError(f"{path} does not describe a corpus of version {VERSION}; {REMEDY}")
    return stored


def _refuse_strangers(directory: Path) -> None:
    """Refuse a directory with files that are not ours."""
    foreign = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if foreign and not (directory / SHARDS).is_dir():  # otherwise a killed run moved them there
        raise UserError(
            f"{directory} holds {foreign[0]} but no corpus.json; choose another directory"
        )


def _check_settings(directory: Path, wanted: Preparation) -> None:
    """Check that a corpus was made with these settings, from files as they are now."""
    stored = _read_corpus(directory / "corpus.json")
    was = {"seed": stored.get("seed")} | {f"data.{k}": v for k, v in stored["data"].items()}
    was |= stored.get("preparation", {})
    for name, value in wanted.settings().items():
        if name not in was or was[name] != value:
            raise UserError(
                f"{directory} holds a corpus prepared with {name} {was.get(name)}, not "
                f"{value}; choose another directory or remove this one"
            )
    for path, digest in stored["sources"].items():
        # A source may be gone, but one that has changed would go unnoticed.
        if Path(path).is_file() and sha256_of(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since {directory} was prepared from it; choose another "
                "directory or remove this one"
            )
