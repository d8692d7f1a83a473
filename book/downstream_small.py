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
    python book/downstream_small.py RUNS --data DATA/moleculenet --canonical \\
        --to book/results/downstream-small.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from molecules_seen import molecules_seen
from record import record_of, write_json
from tuned_record import MODELS, task_record

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data.files import reading
from exlm_mini.data.packs import Pack
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.console import exit_code, say
from exlm_mini.training.run_directory import read_metrics

TASKS = {"smiles": ("bbbp", "bace", "clintox"), "text": ("cola", "sst2")}
"""By what the models were pre-trained on."""


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
    pack = runs / "pack-smiles"
    seen = molecules_seen(pack, TASKS["smiles"], moleculenet, is_canonical)
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


def pretraining_record(runs: Path, corpus: str, model: str) -> dict[str, Any]:
    """The record of ``book/record.py``, with size, cost and the hash of the rows."""
    run = runs / f"{corpus}-{model}"
    record = record_of(run)
    wanted, found = "exlm" if model == "exlm" else "mlm", record["config"]["objective"]
    if found != wanted:
        raise UserError(f"{run} was trained with --objective {found}, not {wanted}")
    source = record["config"]["data"]["pack"]
    if source is None:
        raise UserError(f"{run} was trained without --data.pack; see --help for its command")
    with reading(run / "metrics.jsonl", "restore the file"):
        last = read_metrics(run / "metrics.jsonl")[-1]
        cost = {"tokens": last["tokens"], "seconds": round(last["seconds"], 1)}
    weights = load_pretrained(run, say).checkpoint.tensors["model"]
    pack = Pack.open(Path(source) / "train.json")
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
