"""What the models of ``book/downstream_small.py`` reached on a task, as their files say."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy.stats import ttest_rel

from exlm_lab.downstream.grid import paper_numbers
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import read_bytes, reading

FILES = {"smiles": "DATA/moleculenet", "text": "DATA/glue"}
MODELS = ("exlm", "mlm", "scratch")
PAIRS = (("exlm", "mlm"), ("exlm", "scratch"), ("mlm", "scratch"))
PRINTED = {"smiles": ("Table 1", "SMILES-BERT*"), "text": ("Table 3", "RoBERTa*")}
"""Where the paper has these tasks, and its MLM of equal data and settings there."""
DIGITS = 4
SEEDS = 3


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
    options = [f"--train.{name} {v}" for name, v in setting.items() if v != usual[name]]
    return " ".join(
        [
            f"python -m exlm_lab.finetune --task {task} --checkpoint RUNS/{corpus}-MODEL",
            f"--data {FILES[corpus]}",
            *options,
        ]
    )


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, DIGITS) for number in numbers]
