"""Results of fine-tuning: ``results.json``, and a table with the paper's numbers beside ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_lab.downstream.grid import (
    PAPER,
    Tuning,
    is_diverged,
    paper_numbers,
    setting_of,
    summary,
)
from exlm_lab.downstream.runs import Result
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import read_bytes, reading, write_atomically
from exlm_mini.reading.pretrained import Pretrained

RESULTS = "results.json"
TABLE = "table.md"
PAPER_TABLES = {
    "table-6": ("Table 2", "Table 4", "Table 13", "Figure 3", "Figure 8"),
    "table-8": ("Table 1",),
    "table-11": ("Table 3",),
}
"""By recipe, the paper's tables and figures made with it; equal data and settings first."""
PAPER_MLM = {"table-6": "Vanilla MLM", "table-8": "SMILES-BERT*", "table-11": "RoBERTa*"}
"""By recipe, the row of the MLM with equal data and settings."""
BESIDE = {"qqp": "f1", "mrpc": "f1", "stsb": "pearson", "squad_v2": "best_exact"}
"""Metrics that are shown below the main metric."""
PRINTED_BESIDE = {"mnli": "mnli-mismatched", "squad_v2": "squad_v2-exact"}
"""Further printed results of a task, by their names in ``paper.json``."""
ACCURACIES = {
    "majority_accuracy": "always the largest class:",
    "best_accuracy": "the most anyone can reach:",
}
"""Notes of the embedded tasks that put an accuracy into perspective."""


def task_record(result: Result, recipe: Tuning) -> dict[str, Any]:
    """Everything about one task, JSON-able; metrics in percent."""
    name, metric = result.task.name, result.task.metric
    cells = [cell for cell in result.cells if not is_diverged(cell)]
    if not cells:
        raise UserError(f"{name}: every run diverged; lower --train.learning_rate")
    parts = {
        part: {
            name: summary([cell["metrics"][part][name] for cell in cells], recipe.report)
            for name in metrics
            if name != "num_tasks"
        }
        for part, metrics in cells[0]["metrics"].items()
    }
    # Without a test set the validation rows are reported, as in Table 3.
    reported = "test" if "test" in parts else "validation"
    num_tasks = cells[0]["metrics"][reported].get("num_tasks")
    printed = PAPER_TABLES.get(recipe.name, ())
    # The seed of the search is also one of the reported seeds.
    runs = {(setting_of(c), c["seed"]): c for c in [*result.searched, *result.cells]}
    return {
        "metric": metric,
        "part": reported,
        "reported": parts[reported][metric],
        "parts": parts,
        "labels_counted": None if num_tasks is None else int(num_tasks),
        "setting": asdict(result.config),
        "changed": list(recipe.changed),
        "seeds": [cell["seed"] for cell in cells],
        "diverged_seeds": [cell["seed"] for cell in result.cells if is_diverged(cell)],
        "best_epochs": [cell["best_epoch"] for cell in cells],
        "seconds": sum(record.get("seconds", 0.0) for record in runs.values()),
        "parameters": cells[0]["parameters"],
        "notes": result.notes,
        "paper": paper_numbers(printed, name),
        "paper_beside": paper_numbers(printed, PRINTED_BESIDE.get(name, "")),
    }


def write_results(
    output: Path,
    pretrained: Pretrained,
    task: str,
    record: dict[str, Any],
    recipe: Tuning,
    made_with: dict[str, Any],
) -> dict[str, Any]:
    """Add a task to ``results.json`` and ``table.md``; returns the contents of ``results.json``."""
    tasks = check_results(output, pretrained)
    tasks[task] = {**record, "recipe": recipe.name, "made_with": made_with}
    model = pretrained.config
    whole = {
        "checkpoint": {
            "path": str(pretrained.path),
            "sha256": pretrained.sha256,
            "step": pretrained.checkpoint.step,
            "objective": model.objective,
            "config": json.loads(json.dumps(asdict(model))),
        },
        "tasks": tasks,
    }
    write_atomically(output / RESULTS, (json.dumps(whole, indent=1) + "\n").encode())
    lines = [f"# {pretrained.path}", "", *shown(whole)]
    write_atomically(output / TABLE, ("\n".join(lines) + "\n").encode())
    return whole


def check_results(output: Path, pretrained: Pretrained) -> dict[str, dict[str, Any]]:
    """The tasks in ``results.json`` of a directory; none if there is no such file."""
    path = output / RESULTS
    if not path.exists():
        return {}
    with reading(path, "delete it, and it is written again"):
        found = json.loads(read_bytes(path))
        sha256, tasks = found["checkpoint"]["sha256"], dict(found["tasks"])
        shown(found)  # what cannot be shown is damaged
    if sha256 != pretrained.sha256:
        raise UserError(
            f"{output} holds results of a checkpoint of other weights; choose another --output"
        )
    return tasks


def shown(results: dict[str, Any]) -> list[str]:
    """The table of ``results.json``, notes for its reader, and costs."""
    lines = [f"{name}: {'; '.join(notes(r))}" for name, r in results["tasks"].items()]
    return [*table(results), "", *lines, "", *scale(results)]


def table(results: dict[str, Any]) -> list[str]:
    """``results.json`` as lines of a Markdown table.

    Beside it are the paper's MLM and the paper's model that was trained like this one;
    ``results.json`` has the paper's other rows. Empty columns are dropped.
    """
    columns = _paper_columns(results["checkpoint"])
    rows = [("task", "metric, %", "rows", "reached", "over", *columns)]
    for name, record in results["tasks"].items():
        metric, part, parts = record["metric"], record["part"], record["parts"]
        told = [(name, metric, part, record["reported"], "paper")]
        if beside := BESIDE.get(name):
            told.append(("", beside, part, parts[part][beside], "paper_beside"))
        others = [other for other in parts if other not in ("validation", "test")]
        told += [("", metric, other, parts[other][metric], "paper_beside") for other in others]
        for *head, found, place in told:
            spread = "" if found["sd"] is None else f" ± {found['sd']:.1f}"
            rule = record["reported"]["rule"].removesuffix("-sd")
            over = f"{rule} of {len(record['reported']['seeds'])}"
            printed = [_printed(row, record, place) for row in columns.values()]
            rows.append((*head, f"{found['value']:.1f}{spread}", over, *printed))
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return markdown_table([tuple(row[i] for i in kept) for row in rows])


def _paper_columns(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Title of each column, and the row of the paper's tables that it shows."""
    rows = {"paper: MLM": "MLM"}
    if checkpoint["objective"] == "exlm":
        rows["paper: ExLM"] = "ExLM"
    elif checkpoint["objective"] == "repeated-mlm":
        masking = checkpoint["config"]["masking"]
        cell = f"p={100 * masking['mask_ratio']:.3g}%, k={masking['num_copies']}"
        rows[f"paper: Repeated MLM, {cell}"] = cell
    return rows


def _printed(row: str, record: dict[str, Any], place: str) -> str:
    """What the paper prints for a task, from each of its tables."""
    # Figures 3 and 8 show the same models and disagree about MNLI, so both are shown.
    name = row if row != "MLM" else PAPER_MLM.get(record["recipe"], row)
    found = [(table, rows[name]) for table, rows in record[place].items() if name in rows]
    return ", ".join(f"{value} ({table})" for table, value in found)


def markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table whose columns are as wide as their widest cell.

    Args:
        rows: the head first; all of one length.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def notes(record: dict[str, Any]) -> list[str]:
    """Notes on a task for the reader of the table."""
    found, rows = record["notes"], record["notes"]["rows"]
    told = ["rows " + ", ".join(f"{part} {n['examples']:,}" for part, n in rows.items())]
    if sha1s := found.get("split_sha1"):
        hashes = (f"{part} {sha1[:8]}" for part, sha1 in sha1s.items())
        told.append(f"split {found['split']} {', '.join(hashes)}")
    counts = {
        "rows cut to fit the model": sum(n["truncated"] for n in rows.values()),
        "rows RDKit rejects left out": len(found.get("rejected", ())),
        "broken rows left out": sum(found.get("left_out", {}).values()),
        "molecules lost stereo marks": found.get("stereo_removed"),
        "labels counted": record["labels_counted"],
        "seeds diverged and left out": len(record["diverged_seeds"]),
    }
    told += [f"{what}: {count:,}" for what, count in counts.items() if count]
    if any(n["unknown_share"] for n in rows.values()):
        shares = [f"{part} {n['unknown_share']:.2%}" for part, n in rows.items()]
        told.append(f"tokens that are [UNK]: {', '.join(shares)}")
    for note, meaning in ACCURACIES.items():
        if note in found:
            told.append(f"{meaning} {100 * found[note]:.1f}")
    if record["changed"]:
        told.append(f"not the recipe's: {', '.join(record['changed'])}")
    if record["part"] == "validation":
        told.append("epoch and setting are chosen on the rows that are reported")
    return told


def scale(results: dict[str, Any]) -> list[str]:
    """The cost of our numbers and of the paper's, one line each, from ``results.json``."""
    checkpoint, tasks = results["checkpoint"], results["tasks"].values()
    parameters = max(record["parameters"] for record in tasks)
    seconds = sum(record["seconds"] for record in tasks)
    devices = sorted({record["made_with"]["device"] for record in tasks})
    lines = [
        f"ours: {checkpoint['objective']}, {parameters:,} parameters, pre-trained for "
        f"{checkpoint['step']:,} steps; fine-tuned in {seconds:,.0f} s on {', '.join(devices)}"
    ]
    printed = json.loads(PAPER.read_text(encoding="utf-8"))["scale"]
    names = {PAPER_TABLES[r["recipe"]][0] for r in tasks if r["recipe"] in PAPER_TABLES}
    return lines + [f"{name} of the paper: {printed[name]}" for name in sorted(names)]
