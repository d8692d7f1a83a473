"""Results of fine-tuning: ``results.json``, and a table with the paper's numbers beside ours."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_lab.downstream.grid import Tuning, paper_numbers, setting_of
from exlm_lab.downstream.runs import Result
from exlm_mini.data.files import read_json, write_atomically, write_json
from exlm_mini.reading.trained import Trained

RESULTS = "results.json"
TABLE = "table.md"
PAPER_TABLES = {
    "table-6": ("Table 2", "Table 4", "Table 13", "Figure 3", "Figure 8"),
    "table-8": ("Table 1",),
    "table-11": ("Table 3",),
}
"""The tables and figures to compare with each recipe, as we read the paper; those at equal data and
settings first."""
PAPER_MLM = {"table-6": "Vanilla MLM", "table-8": "SMILES-BERT*", "table-11": "RoBERTa*"}
"""The row of these tables with the MLM of equal data and settings, by recipe."""
BESIDE = {"qqp": "f1", "mrpc": "f1", "stsb": "pearson", "squad_v2": "best_exact"}
"""The metric to show below a task's main metric, by task."""
NAMES = {
    "rmse": "RMSE", "mae": "MAE", "r2": "R²", "roc_auc": "ROC AUC", "f1": "F1",
    "pearson": "Pearson", "spearman": "Spearman", "matthews": "Matthews",
}  # fmt: skip
"""Names of metrics in the printed tables, where they differ."""
ERRORS = ("rmse", "mae")
"""Metrics in the unit of what is predicted; all others are shares."""
PRINTED_BESIDE = {"mnli": "mnli-mismatched", "squad_v2": "squad_v2-exact"}
"""The name in ``paper.json`` of a task's second result in the paper."""


def task_record(result: Result, recipe: Tuning, made_with: dict[str, Any]) -> dict[str, Any]:
    """The record of one task for ``results.json``; ``scores`` has every metric of every seed."""
    runs = [run for run in result.runs if "diverged" not in run]
    parts = runs[0]["metrics"]
    # Keyed, since a run of the search may also be among the reported ones: it counts once.
    every = {(setting_of(run), run["seed"]): run for run in [*result.searched, *result.runs]}
    return {
        "recipe": recipe.name,
        "report": recipe.report,
        "changed": list(recipe.changed),
        "setting": asdict(result.config),
        "metric": result.task.metric,
        # Without a test set the validation rows are reported, as in Table 3.
        "part": "test" if "test" in parts else "validation",
        "scores": {
            part: {name: [run["metrics"][part][name] for run in runs] for name in metrics}
            for part, metrics in parts.items()
        },
        "seeds": [run["seed"] for run in runs],
        "diverged_seeds": [run["seed"] for run in result.runs if "diverged" in run],
        "best_epochs": [run["best_epoch"] for run in runs],
        "seconds": sum(run.get("seconds", 0.0) for run in every.values()),
        "parameters": runs[0]["parameters"],
        "notes": result.notes,
        "baselines": result.baselines,
        "made_with": made_with,
    }


def earlier_records(
    output: Path, pretrained: Trained, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Records that earlier commands left in ``results.json``; none if they are of another model."""
    path = output / RESULTS
    if not path.exists():
        return {}
    whole = read_json(path, "delete it and it will be rewritten from the runs in cells/")
    if whole["checkpoint"]["sha256"] == pretrained.sha256:
        return whole["tasks"]
    report(
        f"{path} holds results of another model; it is overwritten, which drops "
        f"{', '.join(whole['tasks'])}"
    )
    return {}


def write_results(
    output: Path, pretrained: Trained, records: dict[str, dict[str, Any]]
) -> list[str]:
    """Write the records of tasks to ``results.json`` and ``table.md``; return the table's lines."""
    model = pretrained.config
    whole = {
        "checkpoint": {
            "path": str(pretrained.path),
            "sha256": pretrained.sha256,
            "step": pretrained.step,
            "objective": model.objective,
            "config": json.loads(json.dumps(asdict(model))),
        },
        "tasks": records,
    }
    write_json(output / RESULTS, whole)
    lines = shown(whole)
    heading = f"# {pretrained.path}", ""
    write_atomically(output / TABLE, ("\n".join([*heading, *lines]) + "\n").encode())
    return lines


def shown(results: dict[str, Any]) -> list[str]:
    """The lines that present ``results.json``: its tables, notes for their reader, and the cost."""
    lines = [f"{name}: {'; '.join(notes(r))}" for name, r in results["tasks"].items()]
    return [*table(results), "", *lines, "", cost(results)]


def in_percent(values: list[float], report: str) -> str:
    """Median or mean over seeds in percent, with the sample standard deviation."""
    return _summary([100 * value for value in values], report, 1)


def _summary(values: list[float], report: str, digits: int) -> str:
    center = statistics.median if report == "median" else statistics.fmean
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{center(values):.{digits}f}{spread}"


def table(results: dict[str, Any]) -> list[str]:
    """``results.json`` as lines of Markdown tables: one for each task from a table of the user's
    own, and one for all tasks of the paper."""
    records = results["tasks"]
    tables = [_beside_baselines(record) for record in records.values() if record["baselines"]]
    if of_paper := {task: r for task, r in records.items() if not r["baselines"]}:
        tables.append(_beside_paper(of_paper))
    return "\n\n".join(map("\n".join, tables)).split("\n")


def _beside_baselines(record: dict[str, Any]) -> list[str]:
    """A row for the fine-tuned model and for each baseline, the best first."""
    scores = record["scores"][record["part"]]
    shown = [name for name in scores if name != "num_tasks"]
    everyone = {"fine-tuned": scores} | {
        name: {metric: [one[metric] for one in runs] for metric in shown}
        for name, runs in record["baselines"].items()
    }
    best_first = sorted(
        everyone, key=lambda name: -statistics.fmean(everyone[name][record["metric"]])
    )
    rows = [
        (
            name,
            *(_in_units(everyone[name][metric], metric, record["report"]) for metric in shown),
        )
        for name in best_first
    ]
    titles = [_title(metric, record["notes"].get("classes", ())) for metric in shown]
    return markdown_table([("model", *titles), *rows])


def _title(metric: str, classes: Sequence[str] = ()) -> str:
    """The printed name of a metric; that of F1 includes its class, the second of two."""
    name, *target = metric.split(" ", 1)
    if name == "f1" and len(classes) == 2:
        target = [f"of {classes[1]}"]
    return " ".join([NAMES.get(name, name), *target])


def _in_units(values: list[float], metric: str, report: str) -> str:
    """The summary over seeds, of errors with three significant digits, of shares with three
    decimals."""
    size = abs(statistics.fmean(values)) or 1
    is_error = metric.partition(" ")[0] in ERRORS
    digits = max(0, 2 - math.floor(math.log10(size))) if is_error else 3
    return _summary(values, report, digits)


def _beside_paper(tasks: dict[str, Any]) -> list[str]:
    """A row for each task and metric: our result, and those of MLM and ExLM in each of the paper's
    tables. Empty columns are dropped."""
    rows = [("task", "metric, %", "rows", "score", "seeds", "paper: MLM", "paper: ExLM")]
    for task, record in tasks.items():
        metric, part, scores = record["metric"], record["part"], record["scores"]
        lines = [(task, metric, part, task)]
        beside = [BESIDE[task]] if task in BESIDE else []
        lines += [("", name, part, PRINTED_BESIDE.get(task, "")) for name in beside]
        more = [name for name in scores if name not in ("validation", "test")]
        lines += [("", metric, name, PRINTED_BESIDE.get(task, "")) for name in more]
        for name, metric, part, printed in lines:
            reached = in_percent(scores[part][metric], record["report"])
            papers = paper_numbers(PAPER_TABLES.get(record["recipe"], ()), printed)
            mlm, exlm = (
                ", ".join(
                    f"{own[row]} ({table})" for table, own in papers.items() if row in own
                )
                for row in (PAPER_MLM.get(record["recipe"], ""), "ExLM")
            )
            rows.append((name, _title(metric), part, reached, _over(record), mlm, exlm))
    filled = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return markdown_table([tuple(row[i] for i in filled) for row in rows])


def _over(record: dict[str, Any]) -> str:
    """Which summary over how many seeds, such as "mean of 3"."""
    return f"{record['report']} of {len(record['seeds'])}"


def markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def data_notes(known: dict[str, Any]) -> list[str]:
    """Notes on the rows of a task, from ``Problem.notes``."""
    rows = known["rows"]
    lines = ["rows " + ", ".join(f"{part} {n['examples']:,}" for part, n in rows.items())]
    if sha1s := known.get("split_sha1"):
        hashes = (f"{part} {sha1[:8]}" for part, sha1 in sha1s.items())
        lines.append(f"split {known['split']} {', '.join(hashes)}")
    if "validation" in known:
        lines.append(f"validation rows drawn {known['validation']}")
    counts = {
        "rows cut to fit the model": sum(n["truncated"] for n in rows.values()),
        "cells left out": len(known.get("cells_left_out", ())),
        "scored rows whose text is also in training": sum(
            known.get("also_in_train", {}).values()
        ),
        "molecules that lost stereo marks": known.get("stereo_removed"),
    }
    lines += [f"{what}: {count:,}" for what, count in counts.items() if count]
    if rejected := known.get("rejected"):
        first = rejected[0]
        lines.append(
            f"rows left out: {len(rejected):,}, first row {first['row']} ({first['why']})"
        )
    if any(n["unknown_share"] for n in rows.values()):
        shares = [f"{part} {n['unknown_share']:.2%}" for part, n in rows.items()]
        lines.append(f"tokens that are [UNK]: {', '.join(shares)}")
    return lines


def notes(record: dict[str, Any]) -> list[str]:
    """Notes on a task for the reader of the table."""
    lines = data_notes(record["notes"])
    if "num_tasks" in record["scores"][record["part"]]:
        lines.append(
            f"labels in the mean: {record['scores'][record['part']]['num_tasks'][0]:.0f}"
        )
    if diverged := record["diverged_seeds"]:
        lines.append(f"seeds that diverged and were left out: {len(diverged)}")
    if record["baselines"]:
        lines.append(f"scores are on the {record['part']} rows, {_over(record)}")
    if record["changed"]:
        lines.append(f"settings that differ from the recipe: {', '.join(record['changed'])}")
    if record["part"] == "validation":
        lines.append("epoch and setting were chosen on the same rows that are reported")
    return lines


def cost(results: dict[str, Any]) -> str:
    """A line on what our results cost: parameters, steps and time, from ``results.json``."""
    checkpoint, tasks = results["checkpoint"], results["tasks"].values()
    parameters = max(record["parameters"] for record in tasks)
    seconds = sum(record["seconds"] for record in tasks)
    devices = sorted({record["made_with"]["device"] for record in tasks})
    return (
        f"ours: {checkpoint['objective']}, {parameters:,} parameters, pre-trained for "
        f"{checkpoint['step']:,} steps; fine-tuned in {seconds:,.0f} s on {', '.join(devices)}"
    )
