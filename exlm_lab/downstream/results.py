"""What fine-tuning reached: ``results.json`` and a table, the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from exlm_lab.downstream.grid import (
    PAPER,
    Tuning,
    is_diverged,
    key,
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
LABELS_NAMED = 5
"""Of those no training row has; the others are counted."""
PAPER_TABLES = {
    "table-6": ("Table 2", "Table 4", "Table 13", "Figure 3", "Figure 8"),
    "table-8": ("Table 1",),
    "table-11": ("Table 3",),
}
"""Recipe: what it made in the paper, the table with equal data and settings first."""
PAPER_ROWS = {
    "table-6": {"MLM": "Vanilla MLM"},
    "table-8": {"MLM": "SMILES-BERT*"},
    "table-11": {"MLM": "RoBERTa*"},
}
"""Recipe: how its table calls the MLM of equal data and settings."""
BESIDE = {"qqp": "f1", "mrpc": "f1", "stsb": "pearson", "squad_v2": "best_exact"}
"""Metrics that are shown below the one that counts."""
PRINTED_BESIDE = {"mnli": "mnli-mismatched", "squad_v2": "squad_v2-exact"}
"""What the paper prints of a task besides its metric, as ``paper.json`` calls it."""
ACCURACIES = {
    "majority_accuracy": "always the largest class:",
    "best_accuracy": "the most anyone can reach:",
}
"""Notes of the embedded tasks that say what an accuracy is worth."""


def task_record(result: Result, recipe: Tuning) -> dict[str, Any]:
    """Everything about one task, JSON-able; metrics in percent.

    Raises:
        UserError: if every run diverged.
    """
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
    # Where there is no test the validation rows are reported, as in Table 3.
    reported = "test" if "test" in parts else "validation"
    num_tasks = cells[0]["metrics"][reported].get("num_tasks")
    printed = PAPER_TABLES.get(recipe.name, ())
    # The seed a search was made with is among the seeds that are reported.
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
        "device": cells[0]["device"],
        "parameters": cells[0]["parameters"],
        "problem_sha256": cells[0]["problem_sha256"],
        "searched": [
            {
                "setting": key(setting_of(cell)),
                "seed": cell["seed"],
                "validation": None
                if is_diverged(cell)
                else 100 * cell["metrics"]["validation"][metric],
            }
            for cell in result.searched
        ],
        "notes": result.notes,
        "paper": paper_numbers(printed, name),
        "paper_beside": paper_numbers(printed, PRINTED_BESIDE.get(name, "")),
    }


def write_results(
    output: Path,
    pretrained: Pretrained,
    tasks: dict[str, dict[str, Any]],
    recipe: Tuning,
    made_with: dict[str, Any],
) -> dict[str, Any]:
    """Add tasks to ``results.json`` and ``table.md`` of a directory; all that the former holds now.

    Raises:
        UserError: if the file is damaged, or of another checkpoint.
    """
    known = check_results(output, pretrained)
    for name, record in tasks.items():
        known[name] = {**record, "recipe": recipe.name, "made_with": made_with}
    model = pretrained.config
    whole = {
        "checkpoint": {
            "path": str(pretrained.path),
            "sha256": pretrained.sha256,
            "step": pretrained.checkpoint.step,
            "objective": model.objective,
            "config": json.loads(json.dumps(asdict(model))),
        },
        "tasks": known,
    }
    write_atomically(output / RESULTS, (json.dumps(whole, indent=1) + "\n").encode())
    lines = [f"# {pretrained.path}", "", *shown(whole)]
    write_atomically(output / TABLE, ("\n".join(lines) + "\n").encode())
    return whole


def check_results(output: Path, pretrained: Pretrained) -> dict[str, dict[str, Any]]:
    """The tasks ``results.json`` of a directory holds already; none if there is no such file.

    Raises:
        UserError: if the file is damaged, or of another checkpoint.
    """
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
    """A table, what a reader of it must know, and what the numbers cost, line by line.

    Args:
        results: what ``results.json`` holds.
    """
    lines = [f"{name}: {'; '.join(notes(r))}" for name, r in results["tasks"].items()]
    return [*table(results), "", *lines, "", *scale(results)]


def table(results: dict[str, Any]) -> list[str]:
    """The results as lines of a Markdown table.

    The paper's MLM stands beside them, and what the paper trained as this model was trained;
    ``results.json`` has its other rows. A column without any number is left out.

    Args:
        results: what ``results.json`` holds.
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
            printed = [row_of(record, place) for row_of in columns.values()]
            rows.append((*head, f"{found['value']:.1f}{spread}", over, *printed))
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return markdown_table([tuple(row[i] for i in kept) for row in rows])


def _paper_columns(checkpoint: dict[str, Any]) -> dict[str, Callable[[dict, str], str]]:
    """Head of a column, and what the paper prints there for the record of a task."""
    rows = {"paper: MLM": "MLM"}
    if checkpoint["objective"] == "exlm":
        rows["paper: ExLM"] = "ExLM"
    elif checkpoint["objective"] == "repeated-mlm":
        masking = checkpoint["config"]["masking"]
        cell = f"p={100 * masking['mask_ratio']:.3g}%, k={masking['num_copies']}"
        rows[f"paper: Repeated MLM, {cell}"] = cell

    def printed(row: str, record: dict[str, Any], place: str) -> str:
        # Figures 3 and 8 show the same models and disagree about MNLI: both stand there.
        name = PAPER_ROWS.get(record["recipe"], {}).get(row, row)
        found = [(table, rows[name]) for table, rows in record[place].items() if name in rows]
        return ", ".join(f"{value} ({table})" for table, value in found)

    return {head: partial(printed, row) for head, row in rows.items()}


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
    """What a reader of the table must know of a task."""
    found, rows = record["notes"], record["notes"]["rows"]
    told = ["rows " + ", ".join(f"{part} {n['examples']:,}" for part, n in rows.items())]
    if "split" in found:
        hashes = [
            f"{part} {digest[:8]}" for part, digest in found.get("split_sha1", {}).items()
        ]
        told.append(f"split {found['split']} {', '.join(hashes)}".rstrip())
    if cut := sum(n["truncated"] for n in rows.values()):
        told.append(f"{_counted(cut, 'row')} cut to fit the model")
    if any(n["unknown_share"] for n in rows.values()):
        shares = [f"{part} {n['unknown_share']:.2%}" for part, n in rows.items()]
        told.append(f"tokens that are [UNK]: {', '.join(shares)}")
    if found.get("rejected"):
        told.append(f"{_counted(len(found['rejected']), 'row')} RDKit rejects left out")
    if left_out := found.get("left_out"):
        told.append(f"rows left out {left_out}")
    if num_changed := found.get("stereo_removed"):
        told.append(f"stereo marks removed from {_counted(num_changed, 'molecule')}")
    for note, meaning in ACCURACIES.items():
        if note in found:
            told.append(f"{meaning} {100 * found[note]:.1f}")
    if record["labels_counted"] is not None:
        told.append(f"{_counted(record['labels_counted'], 'label')} counted")
    if untrained := found.get("labels_never_trained"):
        more = f" and {len(untrained) - LABELS_NAMED} more" * (len(untrained) > LABELS_NAMED)
        named = ", ".join(untrained[:LABELS_NAMED]) + more
        told.append(f"no training row has {_counted(len(untrained), 'label')}: {named}")
    if record["diverged_seeds"]:
        told.append(f"seeds {record['diverged_seeds']} diverged and are left out")
    if record["changed"]:
        told.append(f"not the recipe's: {', '.join(record['changed'])}")
    if record["part"] == "validation":
        told.append("epoch and setting are chosen on the rows that are reported")
    return told


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def scale(results: dict[str, Any]) -> list[str]:
    """What our numbers cost and the paper's, one line each.

    Args:
        results: what ``results.json`` holds.
    """
    checkpoint, tasks = results["checkpoint"], results["tasks"]
    parameters = max(record["parameters"] for record in tasks.values())
    seconds = sum(record["seconds"] for record in tasks.values())
    devices = sorted({record["made_with"]["device"] for record in tasks.values()})
    lines = [
        f"ours: {checkpoint['objective']}, {parameters:,} parameters, pre-trained for "
        f"{checkpoint['step']:,} steps; fine-tuned in {seconds:,.0f} s on {', '.join(devices)}"
    ]
    printed = json.loads(PAPER.read_text(encoding="utf-8"))["scale"]
    recipes = {record["recipe"] for record in tasks.values()} & PAPER_TABLES.keys()
    for name in sorted(PAPER_TABLES[recipe][0] for recipe in recipes):
        lines.append(f"{name} of the paper: {printed[name]}")
    return lines
