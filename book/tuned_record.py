"""What the models of ``book/downstream_small.py`` reached on a task, as their files say."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import read_json
from scipy.stats import t

from exlm_lab.downstream.grid import PAPER
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import UserError

FILES = {"smiles": "DATA/moleculenet", "text": "DATA/glue"}
MODELS = ("exlm", "mlm", "scratch")
PAIRS = (("exlm", "mlm"), ("exlm", "scratch"), ("mlm", "scratch"))
PRINTED = {
    "smiles": ("Table 1", "SMILES-BERT*", "ExLM"),
    "text": ("Table 3", "RoBERTa*", "ExLM"),
}
"""Where the paper has these tasks: its MLM of equal data and settings, and ExLM."""
READ = {
    "metric": str, "part": str, "parts": dict, "seeds": list, "best_epochs": list,
    "seconds": (int, float), "setting": dict, "notes": dict, "made_with": dict,
}  # fmt: skip
"""What is taken from the results of a task."""
DIGITS = 4
SEEDS = 3


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
    """Summary of the differences seed by seed, with half the width of their 95% interval (t)."""
    found = [x - y for x, y in zip(ours, theirs, strict=True)]
    width = t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return summary(found) | {"half_width_95": round(float(width), DIGITS)}


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


def _result(directory: Path, task: str) -> dict[str, Any]:
    path = directory / "results.json"
    whole = read_json(path, "fine-tune first, see --help")
    tasks = whole.get("tasks") if isinstance(whole, dict) else None
    if not isinstance(tasks, dict):
        raise UserError(f"{path} holds no results of fine-tuning; fine-tune first, see --help")
    if task not in tasks:
        found = ", ".join(tasks) or "nothing"
        raise UserError(f"{path} has no {task}, only {found}; fine-tune on it")
    result = tasks[task]
    try:
        is_whole = all(isinstance(result[name], kind) for name, kind in READ.items())
        for part in ("validation", result["part"]):
            scores = result["parts"][part][result["metric"]]["seeds"]
            is_whole &= len(scores) == len(result["seeds"]) and math.isfinite(sum(scores))
        is_whole &= all("examples" in rows for rows in result["notes"]["rows"].values())
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: the results of {task} are damaged; fine-tune on it anew")
    return result


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, DIGITS) for number in numbers]
