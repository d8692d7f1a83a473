"""Record fine-tuning at small scale: ExLM, MLM, and a model that was not pre-trained.

The molecules are canonical SMILES without stereo marks, here 160,000 lines of ChEMBL, ExCAPE and
PubChem, drawn by ``shuf --random-source=<(yes) | head -n 160000``; the text is eleven textbooks of
OpenStax and 36 books of Standard Ebooks. DATA holds ``moleculenet/`` and ``glue/`` as the
benchmarks publish them. MODEL is mlm and exlm; scratch is mlm with
``--train.steps 1 --train.learning_rate 1e-9 --train.warmup_steps 0``. ::

    python -m exlm_mini.prepare --source molecules.smi --data.kind smiles \\
        --data.block_length 128 --output RUNS/pack-smiles
    python -m exlm_mini.prepare --source openstax.txt.xz --source ebooks.txt.xz \\
        --data.vocab_size 6000 --data.block_length 64 --output RUNS/pack-text
    python -m exlm_mini.pretrain --recipe smiles-tiny --objective MODEL --seed 1 \\
        --model.num_layers 3 --model.width 96 --model.ffn_width 384 \\
        --data.pack RUNS/pack-smiles --train.steps 10000 --train.batch_size 32 \\
        --train.learning_rate 2e-3 --train.warmup_steps 500 --train.validate_every 1000 \\
        --train.save_every 1000 --train.keep_last 1 --train.validation_rows 512 \\
        --output RUNS/smiles-MODEL
    python -m exlm_mini.pretrain --recipe text-tiny --objective MODEL --seed 1 \\
        --model.num_layers 3 --model.width 96 --model.ffn_width 384 --model.init_std 0.1 \\
        --data.pack RUNS/pack-text --train.steps 10000 --train.batch_size 32 \\
        --train.learning_rate 2e-3 --train.warmup_steps 500 --train.validate_every 1000 \\
        --train.save_every 1000 --train.keep_last 1 --train.validation_rows 512 \\
        --output RUNS/text-MODEL

Then for MODEL mlm, exlm and scratch::

    python -m exlm_lab.finetune --task bbbp bace clintox --checkpoint RUNS/smiles-MODEL \\
        --data DATA/moleculenet --output RUNS/tuned-smiles-MODEL --threads 1 \\
        --train.epochs 4 --train.learning_rate 5e-4
    python -m exlm_lab.finetune --task cola --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 5 --train.learning_rate 5e-4
    python -m exlm_lab.finetune --task sst2 --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 1 --train.learning_rate 5e-4
    python book/downstream_small.py RUNS --moleculenet DATA/moleculenet --canonical \\
        --to book/results/downstream-small.json

``--only text`` or ``--only smiles`` takes the runs of one kind anew and keeps the other as the file
has it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from molecules_seen import molecules_seen
from record import read_json, record_of, write_json
from tuned_record import MODELS, task_record

from exlm_lab.downstream.moleculenet import find_csv
from exlm_mini.config import UserError
from exlm_mini.data.packs import Pack
from exlm_mini.options import command_parser
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.run_directory import read_metrics

TASKS = {"smiles": ("bbbp", "bace", "clintox"), "text": ("cola", "sst2")}
"""By what the models were pre-trained on."""


def downstream_record(
    runs: Path,
    moleculenet: Path | None,
    is_canonical: bool,
    corpora: Collection[str] = tuple(TASKS),
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All that the pages say about these runs.

    Args:
        runs: directory of the runs, named as above.
        moleculenet: directory of the CSV files, to count what pre-training has seen; needed for
            ``smiles`` only.
        is_canonical: see ``molecules_seen``.
        corpora: what to take from ``runs``, of ``TASKS``.
        kept: an earlier record, for the others.

    Raises:
        UserError: a run is missing or not finished, or the models are not comparable.
    """
    pretraining, tasks = {}, {}
    for corpus, names in TASKS.items():
        runs_of_corpus = [f"{corpus}-{model}" for model in MODELS]
        if corpus not in corpora:
            pretraining |= {name: kept["pretraining"][name] for name in runs_of_corpus}
            tasks |= {task: kept["tasks"][task] for task in names}
            continue
        pretraining |= {name: pretraining_record(runs, name) for name in runs_of_corpus}
        _check_equal(corpus, pretraining)
        seen = {}
        if corpus == "smiles":
            seen = molecules_seen(runs / "pack-smiles", names, moleculenet, is_canonical)
        for task in names:
            record = task_record(runs, corpus, task)
            tasks[task] = record | {"seen_in_pretraining": seen.get(task)}
    return {
        "about": "Fine-tuned after up to an hour of pre-training; equal data, steps, settings. "
        "scratch: the weights at the start of pre-training. Metrics in percent, sd of the "
        "sample of seeds; differences are taken seed by seed, with a 95% interval (Student's t).",
        "scale": {name: _scale(record) for name, record in pretraining.items()},
        "pretraining": pretraining,
        "tasks": tasks,
    }


# ---- pre-training ----


def pretraining_record(runs: Path, name: str) -> dict[str, Any]:
    """The record of ``book/record.py``, with size, cost and the hash of the rows."""
    run = runs / name
    record = record_of(run)
    wanted = "exlm" if name.endswith("-exlm") else "mlm"
    if record["config"]["objective"] != wanted:
        raise UserError(
            f"{run} was trained with --objective {record['config']['objective']}, not {wanted}"
        )
    last = read_metrics(run / "metrics.jsonl")[-1]
    for cost in ("tokens", "seconds"):
        if not isinstance(last.get(cost), int | float):
            raise UserError(f"{run / 'metrics.jsonl'} ends without {cost}; restore the file")
    source = record["config"]["data"]["pack"]
    if source is None:
        raise UserError(f"{run} was trained without --data.pack; see --help for its command")
    weights = load_pretrained(run, say).checkpoint.tensors["model"]
    pack = Pack.open(Path(source) / "train.json")
    shown = json.loads(json.dumps(record).replace(f"{runs}/", "RUNS/"))
    return shown | {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "tokens": last["tokens"],
        "seconds": round(last["seconds"], 1),
        "corpus": {"rows": len(pack), "tokens": pack.num_tokens, "sha256": pack.sha256},
    }


def _check_equal(corpus: str, pretraining: dict[str, dict[str, Any]]) -> None:
    """ExLM and MLM must have read the same rows, in equally many steps, under one setting."""
    ours, theirs = (pretraining[f"{corpus}-{model}"] for model in ("exlm", "mlm"))
    for name in ("seed", "model", "masking", "data", "train"):
        if ours["config"][name] != theirs["config"][name]:
            raise UserError(
                f"{corpus}-exlm and {corpus}-mlm differ in {name}; train them alike"
            )
    for name in ("tokens", "corpus"):
        if ours[name] != theirs[name]:
            raise UserError(
                f"{corpus}-exlm and {corpus}-mlm differ in {name}; train them alike"
            )


def _scale(record: dict[str, Any]) -> str:
    steps, batch_size = (record["config"]["train"][name] for name in ("steps", "batch_size"))
    return (
        f"{record['parameters']:,} parameters, {record['tokens']:,} tokens in {steps:,} steps of "
        f"{batch_size} rows, {record['seconds'] / 60:.1f} minutes on one core of a "
        f"{record['versions']['device'].upper()}"
    )


# ---- the command ----


def _earlier(path: Path) -> dict[str, Any] | None:
    """The record that is there already; none if there is no file.

    Raises:
        UserError: it holds something else, or cannot be written.
    """
    if path.suffix != ".json":
        raise UserError(f"--to is {path}; the record is kept in a .json file")
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(
                f"there is no folder {path.parent}; make it, or choose another --to"
            )
        return None
    record = read_json(path, "choose another --to")
    if not isinstance(record, dict) or not {"scale", "pretraining", "tasks"} <= record.keys():
        raise UserError(f"{path} holds something else than this record; choose another --to")
    return record


def _is_whole(record: Any) -> bool:
    """Whether a part of it can be kept."""
    runs = {f"{corpus}-{model}" for corpus in TASKS for model in MODELS}
    tasks = {task for names in TASKS.values() for task in names}
    try:
        for found in record["pretraining"].values():
            _scale(found)
        for found in record["tasks"].values():
            _reached(found)
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
    return set(record["pretraining"]) == runs and set(record["tasks"]) == tasks


def _check_benchmarks(moleculenet: Path) -> None:
    """All their files must be there."""
    try:
        for name in TASKS["smiles"]:
            find_csv(name, moleculenet)
    except UserError as error:
        raise UserError(str(error).replace("--data", "--moleculenet")) from None


def run(arguments: argparse.Namespace) -> None:
    """Write the record."""
    corpora = [arguments.only] if arguments.only else list(TASKS)
    if "smiles" in corpora and arguments.moleculenet is None:
        raise UserError("the molecules need --moleculenet, or leave them with --only text")
    if "smiles" in corpora:
        _check_benchmarks(arguments.moleculenet)
    kept = _earlier(arguments.to)  # before any run is read
    if arguments.only and not _is_whole(kept):
        raise UserError(
            f"{arguments.to} is no whole record to keep a part of; leave --only away"
        )
    record = downstream_record(
        arguments.runs, arguments.moleculenet, arguments.canonical, corpora, kept
    )
    write_json(arguments.to, record)
    for name, task in record["tasks"].items():
        print(f"{name}: {_reached(task)}")


def _reached(task: dict[str, Any]) -> str:
    return ", ".join(
        f"{model} {found['mean']:.1f} ± {found['sd']:.1f}"
        for model, found in task["models"].items()
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/downstream_small.py", __doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory of all runs")
    parser.add_argument("--moleculenet", type=Path, help="its CSV files")
    parser.add_argument(
        "--canonical", action="store_true", help="the rows are canonical SMILES of this RDKit"
    )
    parser.add_argument("--only", choices=tuple(TASKS), help="and keep the rest of the file")
    parser.add_argument("--to", required=True, type=Path, help="the .json file to write")
    return exit_code(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
