r"""``python -m exlm_mini.prepare``: corpora of any size to packs that ``pretrain`` reads. ::

    python -m exlm_mini.prepare --source wikipedia \
        --data.vocab_size 32000 --data.block_length 512
    python -m exlm_mini.prepare --source news/*.parquet --source books.txt.xz
    python -m exlm_mini.prepare --source zinc --largest-fragment --canonical

    python -m exlm_mini.pretrain --recipe text-tiny \
        --data.pack corpora/wikipedia

A source is the short name of a data set of the Hugging Face hub, hub:ID,CONFIG,SPLIT,COLUMN (the
last three may be left out), or files: .txt .smi .csv .jsonl .parquet, each also .gz or .xz, and
Uni-Mol's .lmdb. The work is done in shards, by several processes; the same command goes on where
it was stopped, and its packs are the same bytes. The working files, in OUTPUT/.shards, need about
as much room as the text and are removed at the end.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from exlm_mini.config import DataConfig
from exlm_mini.config.checks import THREADS, UserError, check_numbers
from exlm_mini.config.options import given, settings_parser
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.corpus import prepare
from exlm_mini.data.request import MEGABYTE, Preparation
from exlm_mini.data.sizes import Size, size_of
from exlm_mini.data.sources import NAMED, kind_of
from exlm_mini.training.console import ProgressLine, exit_code, say
from exlm_mini.training.run_directory import locked_directory

OTHERS = {"files", "hub", "hub_config", "hub_split", "pack", "grammar", "num_sentences"}
"""Settings of ``DataConfig`` that are no options here."""


def _parser() -> Any:
    sets = "\n".join(f"    {name:13}{hub.id}: {hub.licence}" for name, hub in NAMED.items())
    text = f"{__doc__}\nData sets by name, with the licence on their card:\n{sets}"
    skip = {f"data.{name}" for name in OTHERS}
    parser = settings_parser("python -m exlm_mini.prepare", text, {"data": DataConfig}, skip)
    add = parser.add_argument
    add("--source", nargs="+", action="append", default=[], metavar="X",
        help="where from: NAME, hub:ID or files; again for another source")  # fmt: skip
    add("--output", metavar="DIR", help="default corpora/<first source>")
    add("--dry-run", action="store_true", help="print sizes, read no more")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes; default: one per core")  # fmt: skip
    add("--accept", action="append", default=[], metavar="NAME",
        help="use a data set in spite of its licence caveat")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="of the split; default 1")
    add("--shard-megabytes", type=float, default=Preparation.shard_megabytes, metavar="X",
        help="text of a shard, what a kill may lose per process; default 4")  # fmt: skip
    add = parser.add_argument_group("molecules").add_argument
    add("--largest-fragment", action="store_true", help="drop the other ones")
    add("--strip-stereo", action="store_true", help="remove stereo marks")
    add("--canonical", action="store_true", help="write canonical SMILES")
    return parser


def _wanted(arguments: Any) -> Preparation:
    """What the options ask for, checked."""
    if not arguments.source:
        raise UserError("there is nothing to prepare; name a --source")
    known = {kind for words in arguments.source if (kind := kind_of(words))}
    usual = {"kind": "smiles" if known == {"smiles"} else "text"}
    data = DataConfig(**usual | given(arguments).get("data", {}))
    if data.kind == "toy":
        raise UserError("data.kind toy is not read from anywhere; pretrain draws it by itself")
    return Preparation(
        data=data,
        sources=tuple(tuple(words) for words in arguments.source),
        cleaning=Cleaning(
            arguments.largest_fragment, arguments.strip_stereo, arguments.canonical
        ),
        accepted=tuple(arguments.accept),
        seed=arguments.seed,
        shard_megabytes=arguments.shard_megabytes,
    )


def _output(arguments: Any) -> Path:
    if arguments.output:
        return Path(arguments.output)
    first = arguments.source[0][0].removeprefix("hub:").partition(",")[0]
    return Path("corpora") / Path(first).name.partition(".")[0]


def dry_run(wanted: Preparation, output: Path, num_workers: int) -> None:
    """Print what would be read; nothing is written, nothing is downloaded."""
    total = Size(0, 0, 0)
    for words in wanted.sources:
        size = size_of(words, wanted.data)
        total += size
        print(f"source  {' '.join(words[:3])}{' ...' if len(words) > 3 else ''}")
        if words[0] in NAMED:
            hub = NAMED[words[0]]
            print(f"        {hub.id}, {hub.config or 'its only configuration'}, {hub.split}")
            print(f"        licence: {hub.licence}")
        megabytes = None if size.text_bytes is None else size.text_bytes / MEGABYTE
        print(f"        {_about(size.documents)} documents, {_about(megabytes)} MB of text")
    print(f"tokens  {_about(total.tokens)}")
    print(f"output  {output}, by {num_workers} processes")


def _about(number: float | None) -> str:
    """Two digits, without an exponent or a useless ``.0``."""
    if number is None:
        return "an unknown number of"
    return "about " + f"{float(f'{number:.2g}'):,.6f}".rstrip("0").rstrip(".")


def _show(
    lines: dict[str, ProgressLine], megabytes: float, name: str, num_bytes: float
) -> None:
    """Show one more shard of a pass, of about so many megabytes of text in all."""
    line = lines.setdefault(name, ProgressLine(name, max(1, round(megabytes)), "MB"))
    if done := round(num_bytes / MEGABYTE):
        line.steps = max(line.steps, done + 1)  # the size was an estimate
        line.tell(done, "text")


def run(wanted: Preparation, output: Path, num_workers: int) -> None:
    """Make the corpus and say where it is."""
    sizes = [size_of(words, wanted.data).text_bytes or 0 for words in wanted.sources]
    progress = partial(_show, {}, sum(sizes) / MEGABYTE)
    with locked_directory(output, say):
        corpus = prepare(wanted, output, num_workers, say, progress)
    for pack in (corpus.train, corpus.validation):
        print(
            f"{pack.path.stem}: {len(pack):,} rows, {pack.num_tokens:,} tokens, {pack.sha256}"
        )
    print(
        f"to train on it: python -m exlm_mini.pretrain --data.kind {corpus.kind} "
        f"--data.pack {output} ..."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted and ready to go on."""

    def command() -> None:
        arguments: Any = _parser().parse_args(argv)
        check_numbers("--", arguments, THREADS, "workers")
        make = dry_run if arguments.dry_run else run
        make(_wanted(arguments), _output(arguments), arguments.workers)

    return exit_code(command, interrupted="interrupted; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
