"""Make ready on a CPU what the studies on a GPU need, in one directory to carry there. ::

    python -m exlm_mini.prepare --source molecules.smi.xz --data.kind smiles \\
        --data.block_length 160 --data.vocab_size 369 --output corpora/smiles
    python -m exlm_mini.prepare --source books.txt.xz --data.kind text \\
        --data.block_length 128 --data.vocab_size 8192 --output corpora/text
    python book/gpu/carry.py --smiles corpora/smiles --moleculenet DIR --text corpora/text \\
        --glue DIR
    python book/gpu/carry.py --reduced          embedded data and tasks: a trial in seconds

The packs are compressed; tasks are split, cleaned and cut into tokens, with the settings of Table 8
for molecules, and for text the last of each list of Table 11 (the paper searches the whole grid).
The directory's size is printed, and refused above --most-mib. The molecules of each benchmark that
the pre-training rows hold are counted: for that these must be canonical SMILES of single fragments
without stereo marks.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # so that nothing needs to be installed

import numpy as np  # noqa: E402
from carried import FORMAT, PACKS  # noqa: E402

from exlm_lab.downstream.catalogue import ReadingConfig, load_task, task_names  # noqa: E402
from exlm_lab.downstream.encoded import EncodedPart, EncodedTask, save_encoded_task  # noqa: E402
from exlm_lab.downstream.grid import Space, load_tuning  # noqa: E402
from exlm_lab.downstream.inputs import framed  # noqa: E402
from exlm_lab.downstream.overlap import KEY  # noqa: E402
from exlm_lab.downstream.prepared import encode_task  # noqa: E402
from exlm_lab.downstream.settings import TuneConfig  # noqa: E402
from exlm_mini.config import DataConfig, ModelConfig, RunConfig, UserError  # noqa: E402
from exlm_mini.data.cleaning import CleaningCounts, clean  # noqa: E402
from exlm_mini.data.corpus import Corpus, open_corpus, prepare_corpus  # noqa: E402
from exlm_mini.data.files import write_json  # noqa: E402
from exlm_mini.data.packs import Pack  # noqa: E402
from exlm_mini.data.tokenizer import Tokenizer  # noqa: E402
from exlm_mini.options import command_parser  # noqa: E402
from exlm_mini.reading.pretrained import Pretrained  # noqa: E402
from exlm_mini.training.console import exit_code  # noqa: E402

MOST_MIB = 60.0
REDUCED_ROWS = 96
"""Of each part of a task in a trial."""
ROWS_AT_ONCE = 4096
Tell = Callable[[str], None]


class Kind(NamedTuple):
    """What differs between the two studies."""

    states_per_mask: int
    max_positions: int
    recipe: str
    tasks: tuple[str, ...]
    reduced_task: str
    changed: tuple[str, ...]
    """What of the paper's table is not as there."""


KINDS = {
    "smiles": Kind(
        2, 512, "table-8", ("bbbp", "bace", "clintox", "sider", "tox21"), "embedded-molecules", ()
    ),
    "text": Kind(
        4,
        512,
        "table-11",
        ("cola", "rte", "mrpc", "sst2", "stsb"),
        "sections",
        ("one setting of the grid", "mean over the seeds"),
    ),
}  # fmt: skip


def carry(
    kind: str, corpus: Corpus, data: Path | None, folder: Path, tell: Tell, most_rows: int = 0
) -> None:
    """Write the folder of one study.

    Args:
        kind: key of ``KINDS``.
        corpus: what to pre-train on.
        data: directory of the benchmarks; none: the embedded task.
        folder: which becomes ``carried/STUDY``.
        tell: takes a line for each thing that is done.
        most_rows: of each part of a task, drawn at random; 0: all.

    Raises:
        UserError: for data that cannot be read or do not fit.
    """
    about = KINDS[kind]
    names = about.tasks if data is not None else (about.reduced_task,)
    recipe = load_tuning(about.recipe if data is not None else "tiny", task_names())
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    model = ModelConfig(
        states_per_mask=about.states_per_mask, max_positions=about.max_positions
    )
    untrained = Pretrained(
        corpus.tokenizer_path.parent, None, RunConfig(model=model), tokenizer, "none"
    )
    (folder / "tasks").mkdir(parents=True)
    tasks, molecules = {}, {}
    for name in names:
        task, splits = load_task(name, data, ReadingConfig(), tokenizer)
        encoded = encode_task(task, splits, untrained)
        if kind == "smiles":
            parts = [splits.train, splits.validation, *([splits.test] if splits.test else [])]
            smiles = [text for part in parts for (text,) in part.texts]
            molecules[name] = _plain_rows(smiles, tokenizer)
        if most_rows:
            encoded = _some_rows(encoded, most_rows)
        made_for = {"tokenizer_sha256": tokenizer.sha256}
        save_encoded_task(folder / "tasks" / f"{name}.safetensors", encoded, made_for)
        # Of a grid the last setting: each list's last value.
        tasks[name] = asdict(recipe.spaces.get(name, Space()).settings(TuneConfig())[-1])
        tell(f"{kind}: {name}, {sum(len(p.rows) for p in encoded.parts.values()):,} rows")
    for name, pack in zip(PACKS, (corpus.train, corpus.validation), strict=True):
        _compress(pack, folder, name)
        tell(f"{kind}: {name}, {len(pack):,} rows, {pack.num_tokens:,} tokens")
    overlap = _overlap(molecules, corpus)
    about = _description(kind, corpus, tokenizer, recipe.name, tasks, overlap)
    write_json(folder / "study.json", about)


def _description(
    kind: str, corpus: Corpus, tokenizer: Tokenizer, recipe: str, tasks: dict, overlap: dict
) -> dict[str, Any]:
    about, pack = KINDS[kind], corpus.train
    longest = int(max(pack.lengths_R.max(), corpus.validation.lengths_R.max()))
    return {
        "format": FORMAT,
        "kind": kind,
        "tokens": pack.num_tokens,
        "rows": len(pack),
        "sources": pack.source,
        "row_length": pack.row_length,
        "block_length": longest,
        "vocab_size": pack.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "states_per_mask": about.states_per_mask,
        "max_positions": about.max_positions,
        "mask_ratio": 0.15,
        "recipe": recipe,
        "report": "mean-sd",
        "changed": list(about.changed),
        "tasks": tasks,
        "overlap": overlap,
    }


def _compress(pack: Pack, folder: Path, name: str) -> None:
    """The files of a pack, the binary ones by xz."""
    shutil.copyfile(pack.path, folder / f"{name}.json")
    for suffix in (".bin", ".offsets.bin"):
        source = pack.path.with_suffix(suffix)
        if source.exists():
            with (
                open(source, "rb") as plain,
                lzma.open(folder / f"{name}{suffix}.xz", "wb") as packed,
            ):
                shutil.copyfileobj(plain, packed, 1 << 20)


def _plain_rows(smiles: list[str], tokenizer: Tokenizer) -> list[bytes]:
    """Molecules as the corpus would spell them; those that RDKit rejects are left out."""
    keys = [found.key for found in clean(smiles, KEY, seed=0, counts=CleaningCounts())]
    rows = [framed([ids], tokenizer.special_ids) for ids in tokenizer.encode_batch(keys)]
    return [row.tobytes() for row in rows]


def _overlap(molecules: dict[str, list[bytes]], corpus: Corpus) -> dict[str, dict[str, int]]:
    """Of each benchmark how many molecules it has, and how many stand in a row of the corpus."""
    wanted, seen = {row for rows in molecules.values() for row in rows}, set()
    for pack in (corpus.train, corpus.validation) if wanted else ():
        for start in range(0, len(pack), ROWS_AT_ONCE):
            token_ids_BN, lengths_B = pack.gather(
                np.arange(start, min(start + ROWS_AT_ONCE, len(pack)))
            )
            ids_BN = token_ids_BN.numpy().astype(np.int32)
            rows = (
                row[:n].tobytes() for row, n in zip(ids_BN, lengths_B.tolist(), strict=True)
            )
            seen.update(row for row in rows if row in wanted)
    return {
        name: {"molecules": len(rows), "shared": sum(row in seen for row in rows)}
        for name, rows in molecules.items()
    }


def _some_rows(encoded: EncodedTask, most: int) -> EncodedTask:
    """A task with fewer examples, drawn at random, always the same."""
    parts = {}
    for name, (rows, labels, ids) in encoded.parts.items():
        chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
        parts[name] = EncodedPart(
            [rows[i] for i in chosen], labels[chosen], [ids[i] for i in chosen]
        )
    told = encoded.notes["rows"]
    told = {name: {**told[name], "examples": len(part.rows)} for name, part in parts.items()}
    return encoded._replace(parts=parts, notes={**encoded.notes, "rows": told})


# ---- the command ----


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python book/gpu/carry.py", __doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path("carried"), metavar="DIR", help="default carried")
    add("--smiles", type=Path, metavar="DIR", help="a prepared corpus of molecules")
    add("--moleculenet", type=Path, metavar="DIR", help="MoleculeNet's files")
    add("--text", type=Path, metavar="DIR", help="a prepared corpus of text")
    add("--glue", type=Path, metavar="DIR", help="GLUE's folders")
    add("--reduced", action="store_true", help="embedded data and tasks, a few rows of each")
    add("--most-mib", type=float, default=MOST_MIB, metavar="X", help=f"default {MOST_MIB:g}")
    return parser


def run(arguments: argparse.Namespace, tell: Tell) -> None:
    """Make the directory; nothing is left of it unless all of it could be made."""
    output: Path = arguments.output
    asked = {"smiles": arguments.moleculenet, "text": arguments.glue}
    given = {kind: getattr(arguments, kind) for kind in KINDS}
    for kind, option in (("smiles", "moleculenet"), ("text", "glue")):
        if (given[kind] is None) != (asked[kind] is None):
            raise UserError(f"--{kind} and --{option} belong together; give both")
        if asked[kind] is not None and not asked[kind].is_dir():
            raise UserError(
                f"--{option} {asked[kind]} is no directory; give the one that holds its files"
            )
    if not arguments.most_mib > 0:
        raise UserError(f"--most-mib is {arguments.most_mib:g}; it must be above 0")
    wanted = [kind for kind in KINDS if arguments.reduced or given[kind] is not None]
    if not wanted:
        raise UserError("nothing to carry; give --smiles, --text or --reduced")
    if output.exists():
        raise UserError(f"{output} is there already; remove it, or choose another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=output.parent, prefix=".carry-")
    except OSError as error:
        raise UserError(
            f"cannot make {output} ({error.strerror}); choose another --output"
        ) from None
    with folder as name:
        draft = Path(name) / "draft"
        for kind in wanted:
            if arguments.reduced:
                corpus = _reduced_corpus(kind, Path(name) / kind)
                carry(kind, corpus, None, draft / kind, tell, REDUCED_ROWS)
            else:
                corpus = open_corpus(given[kind], DataConfig(kind=kind))
                carry(kind, corpus, asked[kind], draft / kind, tell)
        sizes = {k: sum(f.stat().st_size for f in (draft / k).rglob("*")) for k in wanted}
        mib = sum(sizes.values()) / 2**20
        if mib > arguments.most_mib:
            raise UserError(
                f"{mib:.1f} MiB are more than --most-mib {arguments.most_mib:g}; carry the two "
                "studies one after the other, or give smaller corpora"
            )
        draft.rename(output)
    for kind, size in sizes.items():
        tell(f"{kind}: {size / 2**20:.1f} MiB")
    tell(f"{output}: {mib:.1f} MiB")


def _reduced_corpus(kind: str, folder: Path) -> Corpus:
    """A few hundred rows of embedded data."""
    sizes = {"smiles": (400, 80), "text": (60, 32)}
    most, length = sizes[kind]
    data = DataConfig(kind=kind, max_documents=most, block_length=length, vocab_size=400)
    return prepare_corpus(data, folder, seed=1)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    return exit_code(
        lambda: run(_parser().parse_args(argv), lambda line: print(line, flush=True))
    )


if __name__ == "__main__":
    sys.exit(main())
