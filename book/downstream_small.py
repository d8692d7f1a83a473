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

    python -m exlm_mini.finetune --task bbbp bace clintox --checkpoint RUNS/smiles-MODEL \\
        --data DATA/moleculenet --output RUNS/tuned-smiles-MODEL --threads 1 \\
        --train.epochs 4 --train.learning_rate 5e-4
    python -m exlm_mini.finetune --task cola --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 5 --train.learning_rate 5e-4
    python -m exlm_mini.finetune --task sst2 --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 1 --train.learning_rate 5e-4
    python book/downstream_small.py RUNS --moleculenet DATA/moleculenet --canonical \\
        --to book/results/downstream-small.json

``--only text`` or ``--only smiles`` takes the runs of one kind anew and keeps the other as the file
has it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import Parser, record_of
from scipy.stats import t

from exlm_mini.config import UserError
from exlm_mini.corpora.packing import Pack
from exlm_mini.durable import write_atomically
from exlm_mini.finetuning_config import TuneConfig
from exlm_mini.grid import PAPER
from exlm_mini.pretrained import load_pretrained
from exlm_mini.run_directory import read_metrics
from exlm_mini.tasks.moleculenet import find_csv, read_csv
from exlm_mini.tasks.scaffolds import split
from exlm_mini.tasks.seen import overlap_with
from exlm_mini.tokenization import Tokenizer

TASKS = {"smiles": ("bbbp", "bace", "clintox"), "text": ("cola", "sst2")}
"""By what the models were pre-trained on."""
FILES = {"smiles": "DATA/moleculenet", "text": "DATA/glue"}
MODELS = ("exlm", "mlm", "scratch")
PAIRS = (("exlm", "mlm"), ("exlm", "scratch"), ("mlm", "scratch"))
PRINTED = {
    "smiles": ("Table 1", "SMILES-BERT*", "ExLM"),
    "text": ("Table 3", "RoBERTa*", "ExLM"),
}
"""Where the paper has these tasks: its MLM of equal data and settings, and ExLM."""
DIGITS = 4
SEEDS = 3
ROWS_AT_ONCE = 4096


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
        is_canonical: see ``seen_in_pretraining``.
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
            seen = seen_in_pretraining(runs / "pack-smiles", moleculenet, is_canonical)
        for task in names:
            record = task_record(runs, corpus, task)
            tasks[task] = record | {"seen_in_pretraining": seen.get(task)}
    return {
        "about": "Fine-tuned after up to an hour of pre-training; equal data, steps, settings. "
        "scratch: the weights at the start of pre-training. Metrics in percent, sd of the "
        "sample of seeds; differences are taken seed by seed, with a 95 % interval (Student's t).",
        "scale": {name: _scale(record) for name, record in pretraining.items()},
        "pretraining": pretraining,
        "tasks": tasks,
    }


# ---- pre-training ----


def pretraining_record(runs: Path, name: str) -> dict[str, Any]:
    """The record of ``book/record.py``, with size, cost and the hash of the rows."""
    run = runs / name
    record = record_of(run)
    last = read_metrics(run / "metrics.jsonl")[-1]
    weights = load_pretrained(run, _say).checkpoint.tensors["model"]
    pack = Pack.open(Path(record["config"]["data"]["pack"]) / "train.json")
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


# ---- fine-tuning ----


def task_record(runs: Path, corpus: str, task: str) -> dict[str, Any]:
    """What the three models reached on one task.

    Raises:
        UserError: a model has no result or not three seeds of it, or two had other settings.
    """
    found = {model: _result(runs / f"tuned-{corpus}-{model}", task) for model in MODELS}
    first = found[MODELS[0]]
    for model, result in found.items():
        for name in ("setting", "seeds", "metric", "part"):
            if result[name] != first[name]:
                raise UserError(
                    f"{task}: {model} and {MODELS[0]} differ in {name}; tune them alike"
                )
        if result["notes"].get("split_sha1") != first["notes"].get("split_sha1"):
            raise UserError(f"{task}: {model} and {MODELS[0]} differ in their rows")
        if len(result["seeds"]) != SEEDS:
            raise UserError(f"{task}: {model} has seeds {result['seeds']}; {SEEDS} are wanted")
    metric, part = first["metric"], first["part"]
    scores = {model: result["parts"][part][metric]["seeds"] for model, result in found.items()}
    table, mlm, exlm = PRINTED[corpus]
    printed = json.loads(PAPER.read_text(encoding="utf-8"))[table]
    return {
        "metric": metric,
        "part": part,
        "split": first["notes"].get("split", "published"),
        "split_sha1": first["notes"].get("split_sha1"),
        "rows": {name: rows["examples"] for name, rows in first["notes"]["rows"].items()},
        "seeds": first["seeds"],
        "models": {
            model: summary(scores[model])
            | {
                "validation": _rounded(result["parts"]["validation"][metric]["seeds"]),
                "best_epochs": result["best_epochs"],
                "seconds": round(result["seconds"], 1),
            }
            for model, result in found.items()
        },
        "differences": {f"{a} - {b}": difference(scores[a], scores[b]) for a, b in PAIRS},
        "paper": {"table": table, "ExLM": printed[exlm][task], mlm: printed[mlm][task]},
        "setting": first["setting"],
        "command": command_of(corpus, task, first["setting"]),
        "versions": first["made_with"],
    }


def summary(percent: list[float]) -> dict[str, Any]:
    """Mean and standard deviation of the seeds, and each of them."""
    return {
        "mean": round(statistics.fmean(percent), DIGITS),
        "sd": round(statistics.stdev(percent), DIGITS),
        "seeds": _rounded(percent),
    }


def difference(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Summary of the differences seed by seed, with half the width of their 95 % interval (t)."""
    found = [x - y for x, y in zip(ours, theirs, strict=True)]
    width = t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return summary(found) | {"half_width_95": round(float(width), DIGITS)}


def command_of(corpus: str, task: str, setting: dict[str, Any]) -> str:
    """The command of one task: what differs from the defaults is an option."""
    usual = json.loads(json.dumps(asdict(TuneConfig())))
    options = [f"--train.{name} {v}" for name, v in setting.items() if v != usual[name]]
    return " ".join(
        [
            f"python -m exlm_mini.finetune --task {task} --checkpoint RUNS/{corpus}-MODEL",
            f"--data {FILES[corpus]}",
            *options,
        ]
    )


def _result(directory: Path, task: str) -> dict[str, Any]:
    path = directory / "results.json"
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path} ({error}); fine-tune first, see --help") from None
    if task not in tasks:
        raise UserError(f"{path} has no {task}, only {', '.join(tasks)}; fine-tune on it")
    return tasks[task]


def _earlier(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if set(record["tasks"]) == {task for names in TASKS.values() for task in names}:
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is no whole record to keep a part of; leave --only away")


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, DIGITS) for number in numbers]


# ---- what pre-training has seen ----


def seen_in_pretraining(
    pack: Path, moleculenet: Path, is_canonical: bool
) -> dict[str, dict[str, int]]:
    """How many molecules of each benchmark are among the training rows, stereo marks aside.

    Args:
        pack: the molecules, as ``prepare`` wrote them.
        moleculenet: directory of the benchmarks' CSV files.
        is_canonical: the rows are as this version of RDKit writes them, so that they are compared
            letter by letter, in seconds; else each is read and written again, in minutes.

    Returns:
        By task ``molecules`` and ``seen`` of all, ``test`` and ``seen_in_test`` of the test part
        of the scaffold split.
    """
    rows, tokenizer = Pack.open(pack / "train.json"), Tokenizer.load(pack / "tokenizer.json")
    tables = {name: read_csv(name, find_csv(name, moleculenet)) for name in TASKS["smiles"]}
    smiles = [text for table in tables.values() for text in table.smiles]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "rows.smi"
        with open(corpus, "w", encoding="utf-8") as file:
            for start in range(0, len(rows), ROWS_AT_ONCE):
                chosen = range(start, min(start + ROWS_AT_ONCE, len(rows)))
                ids_BN, lengths_B = rows.gather(chosen)
                for ids_N, length in zip(ids_BN.tolist(), lengths_B.tolist(), strict=True):
                    file.write(
                        tokenizer.decode(ids_N[1 : length - 1]) + "\n"
                    )  # no [BOS], [EOS]
        seen = set(overlap_with(smiles, [str(corpus)], is_canonical).rows)
    out, start = {}, 0
    for name, table in tables.items():
        test = split(table.smiles, "unimol").parts[-1]
        own = {row - start for row in seen if start <= row < start + len(table.smiles)}
        out[name] = {
            "molecules": len(table.smiles),
            "seen": len(own),
            "test": len(test),
            "seen_in_test": len(own & set(test)),
        }
        start += len(table.smiles)
    return out


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Write the record; 0 done, 2 a mistake of the user, told in one line."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = Parser(
        prog="python book/downstream_small.py",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory of all runs")
    parser.add_argument("--moleculenet", type=Path, help="its CSV files")
    parser.add_argument(
        "--canonical", action="store_true", help="the rows are canonical SMILES of this RDKit"
    )
    parser.add_argument("--only", choices=tuple(TASKS), help="and keep the rest of the file")
    parser.add_argument("--to", required=True, type=Path, help="the .json file to write")
    try:
        arguments = parser.parse_args(argv)
        corpora = [arguments.only] if arguments.only else list(TASKS)
        if "smiles" in corpora and arguments.moleculenet is None:
            raise UserError("the molecules need --moleculenet, or leave them with --only text")
        kept = _earlier(arguments.to) if arguments.only else None
        record = downstream_record(
            arguments.runs, arguments.moleculenet, arguments.canonical, corpora, kept
        )
        write_atomically(
            arguments.to, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {error.filename} ({error.strerror})", file=sys.stderr)
        return 2
    for name, task in record["tasks"].items():
        reached = ", ".join(
            f"{m} {s['mean']:.1f} ± {s['sd']:.1f}" for m, s in task["models"].items()
        )
        print(f"{name}: {reached}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
