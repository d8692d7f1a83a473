"""Two studies on one GPU: molecules and text, ExLM against MLM, then downstream tasks (§5.1, §5.2).

For each seed three models are pre-trained on the same rows: ``exlm``, ``mlm`` for as many steps,
and ``mlm-equal-cost`` for as many as take MLM as long as ExLM took, by the medians of a step of the
two runs before. Each is fine-tuned on every task that was carried along. Everything goes on where
it was stopped: training from its checkpoint, fine-tuning from the runs that are finished.

Needs torch, numpy and safetensors.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from carried import Study, open_study
from evidence_file import Result
from measurements import Item, Setting, TimeIsUp
from study_sizes import LEAST_STEPS, Sizes

from exlm_lab.benchmarks.training import train
from exlm_lab.downstream.grid import Result as TaskResult
from exlm_lab.downstream.grid import StoppedError, TunedRun, Tuning, TuningRuns
from exlm_lab.downstream.prepared import Problem, problem_of
from exlm_lab.downstream.results import notes, scale, table, task_record, write_results
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import (
    DataConfig,
    MaskingConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    UserError,
)
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.console import ProgressLine, say
from exlm_mini.training.loop import Trainer
from exlm_mini.training.parts import versions
from exlm_mini.training.provenance import commit
from exlm_mini.training.run_directory import RunDirectory, read_metrics, settle_config

MODELS = ("exlm", "mlm", "mlm-equal-cost")
FREE_SIZES = ("pretrain_seeds",)
"""What may be asked for later without changing what is there."""
SAVES = 10
"""Checkpoints of a pre-training run: a kill loses a tenth of it at most."""


class Run(NamedTuple):
    """One pre-training run of a study."""

    setting: Setting
    study: Study
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model} seed {self.seed}"

    @property
    def path(self) -> Path:
        return self.setting.work / self.study.path.name / f"{self.model}-seed-{self.seed}"


def study_items(name: str, setting: Setting) -> Iterator[Item]:
    """Everything of one study, in the order in which it must be done.

    Args:
        name: ``smiles`` or ``text``, a folder of what was carried.
        setting: with ``carried``, where it lies; without it there is one item, which says so.

    Raises:
        UserError: the folder is not there, the file holds a study of other sizes, or the sizes do
            not go together, or the folder for unfinished runs cannot be made.
    """
    if setting.carried is None:
        reason = "needs --carried DIR, which python book/gpu/carry.py makes"
        yield Item("carried", partial(dict, skipped=reason))
        return
    study, sizes = open_study(setting.carried, name), setting.sizes
    _check_sizes(setting, name)
    # Sizes that do not go together are told before anything is done.
    config_of(study, sizes, "exlm", LEAST_STEPS, seed=1, device=str(setting.device))
    _make_folder(setting.work)
    yield Item("plan", partial(_plan, setting, study))
    for seed in sizes.pretrain_seeds:
        runs = [Run(setting, study, model, seed) for model in MODELS]
        for run in runs:
            yield Item(f"pretrain {run.name}", partial(_pretrain, run))
        for task in study.tasks:
            for run in runs:
                yield Item(f"finetune {run.name} {task}", partial(_finetune, run, task))
        yield Item(f"tables seed {seed}", partial(_tables, runs))


def _make_folder(work: Path) -> None:
    """Nothing could be kept without it."""
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder --work {work} ({error.strerror}); choose another"
        ) from None


def _check_sizes(setting: Setting, name: str) -> None:
    """Results of models of different sizes do not stand in one file."""
    plan = setting.stored(name, "plan")
    asked = json.loads(json.dumps(asdict(setting.sizes)))
    for key, value in (plan or {}).get("sizes", {}).items():
        if key not in FREE_SIZES and asked[key] != value:
            raise UserError(
                f"the section {name} was made with {key}={value}, not {asked[key]}; add --study "
                f"{key}={value}, or choose another --output and --work"
            )


# ---- pre-training ----


def _plan(setting: Setting, study: Study) -> Result:
    """How many steps ExLM makes: as given, or as many as fit into the time."""
    sizes, found = setting.sizes, {}
    steps = sizes.steps
    if not steps:
        config = config_of(study, sizes, "exlm", 1000, seed=1, device=str(setting.device))
        speed = train(config, accumulate=1)
        found = {"ms_per_step_before": 1000 * statistics.median(speed.seconds)}
        steps = max(LEAST_STEPS, round(sizes.seconds / statistics.median(speed.seconds)))
    about = {name: study.about[name] for name in ("tokens", "rows", "sources", "overlap")}
    return {
        "told": f"{steps:,} steps of {sizes.batch_tokens:,} tokens",
        "steps": steps,
        "sizes": json.loads(json.dumps(asdict(sizes))),
        "data": about,
        **found,
    }


def config_of(
    study: Study, sizes: Sizes, objective: str, steps: int, seed: int, device: str
) -> RunConfig:
    """The settings of a pre-training run.

    Args:
        study: says what the rows are, and how many states a mask has.
        sizes: of the model and of its training.
        objective: exlm or mlm.
        steps: of the optimiser.
        seed: of the run.
        device: cpu, cuda or cuda:N.
    """
    about, length = study.about, study.about["row_length"]
    batch = {"batch_tokens": sizes.batch_tokens}
    if length is not None:
        batch = {"batch_size": max(1, sizes.batch_tokens // length)}
    every = max(2, steps // SAVES)
    return RunConfig(
        recipe=f"evidence-{about['kind']}",
        objective=objective,
        model=ModelConfig(
            num_layers=sizes.layers,
            width=sizes.width,
            ffn_width=4 * sizes.width,
            num_heads=sizes.heads,
            max_positions=about["max_positions"],
            states_per_mask=about["states_per_mask"],
            dropout=0.1,
            attention_dropout=0.1,
        ),
        masking=MaskingConfig(mask_ratio=about["mask_ratio"]),
        data=DataConfig(
            kind=about["kind"],
            block_length=about["block_length"],
            vocab_size=about["vocab_size"],
        ),
        train=TrainConfig(
            **batch,
            steps=steps,
            learning_rate=sizes.learning_rate,
            warmup_steps=round(sizes.warmup_share * steps),
            clip_norm=1.0,
            compile=sizes.compile,
            save_every=every,
            validate_every=every,
            validation_rows=sizes.validation_rows,
            # Lines without a validation too: of those is the time of a step.
            log_every=min(10, every // 2),
            device=device,
        ),
        seed=seed,
    )


def _pretrain(run: Run) -> Result:
    """Train a model to its last step; what its log says."""
    config = _config(run)
    train_pack, validation_pack = run.study.packs(
        run.setting.work / run.study.path.name / "packs"
    )
    if run.setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.setting.device)
    plain = json.loads(json.dumps(asdict(config)))
    with RunDirectory(run.path, say):
        settle_config(run.path, json.dumps(plain), plain, json.loads)
        trainer = Trainer(config, train_pack, validation_pack, run.path, report=say)
        with ProgressLine(run.name, config.train.steps) as line:
            outcome = trainer.run(line.show, run.setting.is_time_up)
    if not outcome.is_complete:
        raise TimeIsUp(f"{run.name} is at step {outcome.step:,} of {config.train.steps:,}")
    lines = read_metrics(run.path / "metrics.jsonl")
    last = lines[-1]
    bits = "validation_bits_per_mask"
    return {
        "told": f"{last[bits]:.3f} bits/mask after {outcome.step:,} steps, {last['seconds']:.0f} s",
        "steps": outcome.step,
        "tokens": last["tokens"],
        "training_seconds": last["seconds"],
        "ms_per_step": 1000 * _seconds_per_step(lines),
        "num_parameters": outcome.num_parameters,
        "skipped_steps": outcome.skipped_steps,
        "bits_per_mask": last[bits],
        "bits_per_row": last["validation_bits_per_row"],
        "curve": [[line["step"], line[bits]] for line in lines if bits in line],
        "precision": trainer.config.train.precision,
        "peak_mib": _peak_mib(run),
    }


def _config(run: Run) -> RunConfig:
    """Settings of a run; MLM at equal cost makes more steps, by the steps of the two others."""
    setting, name = run.setting, run.study.path.name
    steps = _stored(setting, name, "plan")["steps"]
    if run.model == "mlm-equal-cost":
        exlm, mlm = (
            _stored(setting, name, f"pretrain {model} seed {run.seed}")["ms_per_step"]
            for model in ("exlm", "mlm")
        )
        steps = max(LEAST_STEPS // 2, round(steps * exlm / mlm))
    objective = "exlm" if run.model == "exlm" else "mlm"
    device = str(setting.device)
    return config_of(run.study, setting.sizes, objective, steps, run.seed, device)


def _stored(setting: Setting, section: str, key: str) -> Result:
    found = setting.stored(section, key)
    if found is None:
        raise UserError(f"'{key}' comes first and is missing; the lines above say why")
    return found


def _seconds_per_step(lines: list[dict[str, Any]]) -> float:
    """Median over the lines of a log that are not about a validation."""
    found = [
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
        for a, b in pairwise(lines)
        if b["seconds"] > a["seconds"] and "validation_bits_per_mask" not in b
    ]
    return statistics.median(found)


def _peak_mib(run: Run) -> float | None:
    device = run.setting.device
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


# ---- fine-tuning ----


def _recipe(study: Study, sizes: Sizes) -> Tuning:
    """The paper's table, so that its numbers stand beside ours; and what is not as in it."""
    changed = list(study.about["changed"])
    if sizes.most_epochs:
        changed.append(f"at most {sizes.most_epochs} epochs")
    about = study.about
    return Tuning(about["recipe"], about["report"], sizes.tune_seeds, {}, tuple(changed))


@cache
def _problem(path: Path, name: str) -> Problem:
    return problem_of(open_study(path.parent, path.name).task(name))


def _finetune(run: Run, task: str) -> Result:
    """All seeds of a task from one pre-trained model."""
    setting, sizes = run.setting, run.setting.sizes
    if not (run.path / "checkpoints").is_dir():
        _pretrain(run)  # of another machine, or cleared away
    pretrained = load_pretrained(run.path, say, with_tokenizer=False)
    problem = _problem(run.study.path, task)
    config = TuneConfig(**run.study.about["tasks"][task])
    if sizes.most_epochs:
        config = replace(config, epochs=min(config.epochs, sizes.most_epochs))
    output = run.path / "finetuned"
    ledger = TuningRuns(output, pretrained, str(setting.device), report=say)
    cells: list[TunedRun] = []
    for seed in sizes.tune_seeds:
        if setting.is_time_up():
            raise TimeIsUp(f"{task} from {run.name} has {len(cells)} of its seeds")
        try:
            cells.append(ledger.cell(problem, config, seed, should_stop=setting.is_time_up))
        except StoppedError:
            raise TimeIsUp(f"{task} from {run.name} stopped in seed {seed}") from None
    recipe = _recipe(run.study, sizes)
    record = task_record(TaskResult(problem.task, config, cells, [], problem.notes), recipe)
    made_with = {**versions(setting.device), "commit": commit()}
    write_results(output, pretrained, {task: record}, recipe, made_with)
    reached = record["reported"]
    return {
        "told": f"{record['metric']} {reached['value']:.1f} on {record['part']}",
        "record": record,
    }


def _tables(runs: list[Run]) -> Result:
    """What the models of one seed reached, the paper's numbers beside it."""
    lines = []
    for run in runs:
        file = run.path / "finetuned" / "results.json"
        whole = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"tasks": {}}
        if missing := [task for task in run.study.tasks if task not in whole["tasks"]]:
            raise UserError(f"{run.name} lacks {', '.join(missing)}; the lines above say why")
        tasks = {task: whole["tasks"][task] for task in run.study.tasks}
        shown = {**whole, "tasks": tasks}
        lines += [f"{run.name}:", "", *table(shown), "", *scale(whole), ""]
    lines += notes(tasks)
    if overlap := runs[0].study.about["overlap"]:
        shared = [f"{name} {n['shared']} of {n['molecules']}" for name, n in overlap.items()]
        lines.append(f"molecules that pre-training saw, unlabelled: {', '.join(shared)}")
    return {"told": f"{len(runs)} tables", "lines": lines}
