r"""``python -m exlm_mini.prepare``: turn corpora of any size into packs for ``pretrain``. ::

    python -m exlm_mini.prepare --source wikipedia \
        --data.vocab_size 32000 --data.block_length 512
    python -m exlm_mini.prepare --source news/*.parquet --source books.txt.xz
    python -m exlm_mini.prepare --source zinc --largest-fragment --canonical

    python -m exlm_mini.pretrain --recipe text-tiny \
        --data.pack corpora/wikipedia

A source is the short name of a data set on the Hugging Face hub, hub:ID,CONFIG,SPLIT (CONFIG and
SPLIT are optional), or files: .txt .smi .csv .tsv .jsonl .parquet, each also as .gz or .xz, and
Uni-Mol's .lmdb. A command that was stopped resumes when it is run again, and writes the same packs,
byte for byte. Until it ends, working files in OUTPUT/.shards take about as much space as the text.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import Seed, Threads, UserError
from exlm_mini.config.options import given, of, settings_parser
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.molecules import Cleaning
from exlm_mini.data.sources import NAMED, check_sources, hub_set, kind_of, size_of
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.run_directory import locked_directory

MEGABYTE = 1_000_000
OTHERS = {"source", "pack", "grammar", "num_sentences"}
"""Settings of ``DataConfig`` that are not ``--data`` options of this command."""


def _parser() -> Any:
    sets = "\n".join(f"    {name:23}{hub.id}: {hub.licence}" for name, hub in NAMED.items())
    text = f"{__doc__}\nData sets by name, with the licence on their card:\n{sets}"
    skip = {f"data.{name}" for name in OTHERS}
    parser = settings_parser("python -m exlm_mini.prepare", text, {"data": DataConfig}, skip)
    add = parser.add_argument
    add("--source", nargs="+", action="extend", default=[], metavar="X",
        help="what to read: NAME, hub:ID or files; consecutive files form one source")  # fmt: skip
    add("--output", metavar="DIR", help="where to save; default corpora/<first source>")
    add("--dry-run", action="store_true", help="only print the sizes; read no documents")
    add("--workers", type=of(Threads), default=len(os.sched_getaffinity(0)), metavar="N",
        help="number of processes; default: one per core")  # fmt: skip
    add("--seed", type=of(Seed), default=1, metavar="N",
        help="seed of the train/validation split; default 1")  # fmt: skip
    add = parser.add_argument_group("molecules").add_argument
    add("--largest-fragment", action="store_true",
        help="keep only the largest fragment of each molecule")  # fmt: skip
    add("--strip-stereo", action="store_true", help="remove stereo marks")
    add("--canonical", action="store_true", help="write canonical SMILES")
    return parser


def _data(arguments: Any) -> DataConfig:
    """The data settings that the options ask for, with the sources checked."""
    if not arguments.source:
        raise UserError("there is nothing to prepare; give a --source")
    usual = {"kind": kind_of(arguments.source) or "text", "source": tuple(arguments.source)}
    settings = usual | given(arguments, "data.")
    if settings["kind"] == "toy":
        raise UserError(
            "data.kind toy needs no preparation; pretrain draws its sentences itself"
        )
    data = DataConfig(**settings)
    check_sources(data)
    return data


def _output(arguments: Any) -> Path:
    if arguments.output:
        return Path(arguments.output)
    first = arguments.source[0].removeprefix("hub:").partition(",")[0]
    return Path("corpora") / Path(first).name.partition(".")[0]


def dry_run(data: DataConfig, arguments: Any) -> None:
    """Print what would be read; nothing is written or downloaded."""
    tokens: float | None = 0
    for word in data.source:
        size, hub = size_of(word, data), hub_set(word)
        tokens = None if None in (tokens, size.tokens) else tokens + size.tokens  # type: ignore
        print(f"source  {word}")
        if hub is not None:
            print(f"        {hub.id}, {hub.config or 'its only configuration'}, {hub.split}")
            print(f"        licence: {hub.licence}")
        megabytes = None if size.text_bytes is None else size.text_bytes / MEGABYTE
        print(f"        {_about(size.documents)} documents, {_about(megabytes)} MB of text")
    print(f"tokens  {'unknown' if tokens is None else _about(tokens)}")
    print(f"output  {_output(arguments)}, by {arguments.workers} processes")


def _about(number: float | None) -> str:
    """About how much: two significant digits, without an exponent or a useless ``.0``."""
    if number is None:
        return "an unknown number of"
    return "about " + f"{float(f'{number:.2g}'):,.6f}".rstrip("0").rstrip(".")


def run(data: DataConfig, arguments: Any) -> None:
    """Prepare the corpus, then print its packs and the command that trains on it."""
    output = _output(arguments)
    cleaning = Cleaning(arguments.largest_fragment, arguments.strip_stereo, arguments.canonical)
    with locked_directory(output, say):
        corpus = prepare_corpus(
            data, output, arguments.seed, say, cleaning=cleaning, num_workers=arguments.workers
        )  # fmt: skip
    for pack in (corpus.train, corpus.validation):
        print(
            f"{pack.path.stem}: {len(pack):,} rows, {pack.num_tokens:,} tokens, {pack.sha256}"
        )
    print(
        f"to train on it: python -m exlm_mini.pretrain --data.kind {corpus.kind} "
        f"--data.pack {shlex.quote(str(output))} ..."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done), 2 (user error) or 130 (interrupted, ready to resume)."""

    def command() -> None:
        arguments: Any = _parser().parse_args(argv)
        (dry_run if arguments.dry_run else run)(_data(arguments), arguments)

    return exit_code(command, interrupted="interrupted; run the same command again to resume")


if __name__ == "__main__":
    sys.exit(main())
