"""From documents to two packs, one to train on and one to validate with.

A prepared corpus is these files of a directory::

    tokenizer.json      what turns text into the ids of the packs
    train.*             pack of the training rows (``packs`` says which files)
    validation.*        pack of the held-out rows
    corpus.json         the settings it was made with, moved there last
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from exlm_mini.config import DataConfig, UserError
from exlm_mini.data.building import FORMAT, VERSION, build_corpus
from exlm_mini.data.files import REMEDY, read_json, sha256_of
from exlm_mini.data.packs import Pack

FILES = (
    *("tokenizer.json", "train.bin", "train.offsets.bin", "train.json"),
    *("validation.bin", "validation.offsets.bin", "validation.json"),
)
"""Of a corpus, but for corpus.json."""


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
    partial = directory / "corpus.partial"
    settings = {"data": json.loads(json.dumps(asdict(data))), "seed": seed}
    if (directory / "corpus.json").exists():
        _check_settings(directory, settings)
        corpus = open_corpus(directory, data)
        with contextlib.suppress(OSError):
            partial.rmdir()  # left by a run that was killed at its very end
        report(f"reopened the corpus in {directory}: {len(corpus.train):,} training rows")
        return corpus
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if partial.exists():  # killed before, perhaps while files were moved: they are ours
            for path in (*(directory / name for name in FILES), *partial.iterdir()):
                path.unlink(missing_ok=True)
        elif strangers := [name for name in FILES if (directory / name).exists()]:
            raise UserError(
                f"{directory} holds {strangers[0]} but no corpus.json; choose another directory"
            )
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from None
    try:
        build_corpus(data, partial, settings, report)
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
    digest = sha256_of(tokenizer_path)
    for pack, name in zip(packs, ("train", "validation"), strict=True):
        if pack.tokenizer_sha256 != digest:
            raise UserError(
                f"{tokenizer_path} is not the tokenizer of {pack.path} (sha256 differs); "
                f"{REMEDY}"
            )
        if stored["packs"].get(name) != pack.sha256:
            raise UserError(f"{pack.path} is not the pack that {path} names; {REMEDY}")
    return Corpus(*packs, tokenizer_path, data.kind)


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
        if Path(path).is_file() and sha256_of(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since {directory} was prepared from it; choose another "
                "directory or remove this one"
            )


def _shown(value: object) -> str:
    """A stored value as part of one line, whatever it is."""
    return " ".join(str(value).split())[:80]


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to {directory} ({error.strerror}); make room or choose another directory"
    )
