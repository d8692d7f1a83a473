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
        --train.epochs 4 --train.learning_rate 5e-4 \\
        --train.dropout 0.1 --train.attention_dropout 0.1
    python -m exlm_lab.finetune --task cola --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 5 --train.learning_rate 5e-4 \\
        --train.dropout 0.1 --train.attention_dropout 0.1
    python -m exlm_lab.finetune --task sst2 --checkpoint RUNS/text-MODEL --data DATA/glue \\
        --output RUNS/tuned-text-MODEL --threads 1 --train.epochs 1 --train.learning_rate 5e-4 \\
        --train.dropout 0.1 --train.attention_dropout 0.1
    python book/downstream_small.py RUNS --data DATA/moleculenet --canonical \\
        --to book/results/downstream-small.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import record_of, write_json
from scipy.stats import ttest_rel

from exlm_lab.downstream.grid import paper_numbers
from exlm_lab.downstream.moleculenet import read_csv
from exlm_lab.downstream.scaffolds import split
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data.cleaning import Cleaning, CleaningCounts, clean
from exlm_mini.data.files import read_bytes, reading
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.run_directory import read_metrics

TASKS = {"smiles": ("bbbp", "bace", "clintox"), "text": ("cola", "sst2")}
"""By what the models were pre-trained on."""
FILES = {"smiles": "DATA/moleculenet", "text": "DATA/glue"}
MODELS = ("exlm", "mlm", "scratch")
PAIRS = (("exlm", "mlm"), ("exlm", "scratch"), ("mlm", "scratch"))
PRINTED = {"smiles": ("Table 1", "SMILES-BERT*"), "text": ("Table 3", "RoBERTa*")}
"""Where the paper has these tasks, and its MLM of equal data and settings there."""
DIGITS = 4
SEEDS = 3
SAME_MOLECULE = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)
"""Two spellings of one molecule, one of them as a salt, count as the same."""


def downstream_record(runs: Path, moleculenet: Path, is_canonical: bool) -> dict[str, Any]:
    """All that the pages say about these runs.

    Args:
        runs: directory of the runs, named as above.
        moleculenet: directory of the CSV files, to count what pre-training has seen.
        is_canonical: see ``molecules_seen``.

    Raises:
        UserError: a run is missing or not finished, or the models are not comparable.
    """
    pretraining, tasks = {}, {}
    for corpus, names in TASKS.items():
        found = {model: pretraining_record(runs, corpus, model) for model in MODELS}
        _check_equal(corpus, found["exlm"], found["mlm"])
        pretraining |= {f"{corpus}-{model}": record for model, record in found.items()}
        tasks |= {task: task_record(runs, corpus, task) for task in names}
    seen = molecules_seen(runs / "pack-smiles", TASKS["smiles"], moleculenet, is_canonical)
    for name, task in tasks.items():
        task["seen_in_pretraining"] = seen.get(name)
    return {
        "about": "Fine-tuned after up to an hour of pre-training; equal data, steps, settings. "
        "scratch: the weights at the start of pre-training. Metrics in percent, sd of the "
        "sample of seeds; differences are taken seed by seed, with a 95% interval (Student's t).",
        "scale": {name: _scale(record) for name, record in pretraining.items()},
        "pretraining": pretraining,
        "tasks": tasks,
    }


# ---- pre-training ----


def pretraining_record(runs: Path, corpus: str, model: str) -> dict[str, Any]:
    """The record of ``book/record.py``, with size, cost and the hash of the rows."""
    run = runs / f"{corpus}-{model}"
    record = record_of(run)
    wanted, found = "exlm" if model == "exlm" else "mlm", record["config"]["objective"]
    if found != wanted:
        raise UserError(f"{run} was trained with --objective {found}, not {wanted}")
    with reading(run / "metrics.jsonl", "restore the file"):
        last = read_metrics(run / "metrics.jsonl")[-1]
        cost = {"tokens": last["tokens"], "seconds": round(last["seconds"], 1)}
    weights = load_pretrained(run, say).checkpoint.tensors["model"]
    pack = Pack.open(Path(str(record["config"]["data"]["pack"]), "train.json"))
    shown = json.loads(json.dumps(record).replace(f"{runs}/", "RUNS/"))
    return shown | {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        **cost,
        "corpus": {"rows": len(pack), "tokens": pack.num_tokens, "sha256": pack.sha256},
    }


def _check_equal(corpus: str, exlm: dict[str, Any], mlm: dict[str, Any]) -> None:
    """ExLM and MLM must have read the same rows, in equally many steps, under one setting."""
    ours, theirs = ({**found, **found["config"]} for found in (exlm, mlm))
    for name in ("seed", "model", "masking", "data", "train", "tokens", "corpus"):
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


def molecules_seen(
    pack: Path, names: Sequence[str], moleculenet: Path, is_canonical: bool
) -> dict[str, dict[str, int]]:
    """How many molecules of each benchmark are among the training rows, stereo marks aside.

    Such a molecule is no secret to the model, though its labels are.

    Args:
        pack: the molecules, as ``prepare`` wrote them.
        names: of the benchmarks.
        moleculenet: directory of their CSV files.
        is_canonical: the rows are as this version of RDKit writes them, so that they are compared
            letter by letter, in seconds; else each is read and written again, in minutes.

    Returns:
        By name ``molecules`` and ``seen`` of all, ``test`` and ``seen_in_test`` of the test part
        of the scaffold split.
    """
    rows, tokenizer = Pack.open(pack / "train.json"), Tokenizer.load(pack / "tokenizer.json")
    ids_BN, lengths_B = rows.gather(range(len(rows)))
    trained = {
        tokenizer.decode(ids_N[1 : length - 1])  # no [BOS], [EOS]
        for ids_N, length in zip(ids_BN.tolist(), lengths_B.tolist(), strict=True)
    }
    if not is_canonical:
        trained = {key for text in trained for key in keys(text)}
    out = {}
    for name in names:
        smiles = read_csv(name, moleculenet).smiles
        seen = {row for row, text in enumerate(smiles) if trained.intersection(keys(text))}
        test = set(split(smiles, "unimol").parts[-1])
        out[name] = {
            "molecules": len(smiles),
            "seen": len(seen),
            "test": len(test),
            "seen_in_test": len(seen & test),
        }
    return out


def keys(smiles: str) -> list[str]:
    """The canonical spelling of a molecule; none if RDKit reads none."""
    return [m.key for m in clean([smiles], SAME_MOLECULE, CleaningCounts())]


# ---- fine-tuning ----


def task_record(runs: Path, corpus: str, task: str) -> dict[str, Any]:
    """What the three models reached on one task.

    Raises:
        UserError: a model has no result or not three seeds of it, or two had other settings.
    """
    shared: dict[str, Any] = {}
    models = {}
    for model in MODELS:
        setting, models[model] = _result(runs / f"tuned-{corpus}-{model}", task)
        for name, value in setting.items():
            if shared.setdefault(name, value) != value:
                raise UserError(
                    f"{task}: {model} and {MODELS[0]} differ in {name}; tune them alike"
                )
    table, mlm = PRINTED[corpus]
    printed = paper_numbers((table,), task)[table]
    return shared | {
        "models": models,
        "differences": {
            f"{a} - {b}": difference(models[a]["seeds"], models[b]["seeds"]) for a, b in PAIRS
        },
        "paper": {"table": table, "ExLM": printed["ExLM"], mlm: printed[mlm]},
        "command": command_of(corpus, task, shared["setting"]),
    }


def _result(directory: Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of one model: what must be equal for all of them, and what it reached."""
    path = directory / "results.json"
    with reading(path, f"fine-tune on {task} first, see --help"):
        result = json.loads(read_bytes(path))["tasks"][task]
        metric, part, notes = result["metric"], result["part"], result["notes"]
        scores = result["parts"][part][metric]["seeds"]
        if not len(scores) == len(result["seeds"]) == SEEDS:
            raise ValueError(f"seeds {result['seeds']} where {SEEDS} are wanted")
        setting = {
            "metric": metric,
            "part": part,
            "split": notes.get("split", "published"),
            "split_sha1": notes.get("split_sha1"),
            "rows": {name: rows["examples"] for name, rows in notes["rows"].items()},
            "seeds": result["seeds"],
            "setting": result["setting"],
        }
        reached = summary(scores) | {
            "validation": _rounded(result["parts"]["validation"][metric]["seeds"]),
            "best_epochs": result["best_epochs"],
            "seconds": round(result["seconds"], 1),
            "versions": result["made_with"],
        }
    return setting, reached


def summary(percent: list[float]) -> dict[str, Any]:
    """Mean and standard deviation of the seeds, and each of them."""
    return {
        "mean": round(statistics.fmean(percent), DIGITS),
        "sd": round(statistics.stdev(percent), DIGITS),
        "seeds": _rounded(percent),
    }


def difference(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Summary of the differences seed by seed, with half the width of their 95% interval (t)."""
    low, high = ttest_rel(ours, theirs).confidence_interval(0.95)
    found = [x - y for x, y in zip(ours, theirs, strict=True)]
    return summary(found) | {"half_width_95": round(float(high - low) / 2, DIGITS)}


def command_of(corpus: str, task: str, setting: dict[str, Any]) -> str:
    """The command of one task: what differs from the defaults is an option."""
    usual = json.loads(json.dumps(asdict(TuneConfig())))
    options = [f" --train.{name} {v}" for name, v in setting.items() if v != usual[name]]
    return (
        f"python -m exlm_lab.finetune --task {task} --checkpoint RUNS/{corpus}-MODEL "
        f"--data {FILES[corpus]}{''.join(options)}"
    )


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, DIGITS) for number in numbers]


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/downstream_small.py", __doc__)
    add = parser.add_argument
    add("runs", type=Path, metavar="RUNS", help="directory of all runs")
    add("--data", required=True, type=Path, help="MoleculeNet's CSV files")
    add("--canonical", action="store_true", help="the rows are canonical SMILES of this RDKit")
    add("--to", required=True, type=Path, help="the .json file to write")

    def run() -> None:
        arguments = parser.parse_args(argv)
        given = (arguments.runs, arguments.data, arguments.canonical)
        write_json(arguments.to, downstream_record(*given))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
