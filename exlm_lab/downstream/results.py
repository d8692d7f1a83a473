"""What fine-tuning reached: ``results.json`` and a table, the paper's numbers beside ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_lab.downstream.grid import (
    PAPER,
    PAPER_TABLES,
    Result,
    Tuning,
    is_diverged,
    key,
    paper_numbers,
    reached,
    setting_of,
    summary,
)
from exlm_mini.config import UserError
from exlm_mini.data.files import read_bytes, reading, write_atomically
from exlm_mini.reading.pretrained import Pretrained

RESULTS = "results.json"
TABLE = "table.md"
LABELS_NAMED = 5
"""Of those no training row has; the others are counted."""
SHOWN = {
    "table-6": ("Table 2", "Vanilla MLM", "ExLM"),
    "table-8": ("Table 1", "SMILES-BERT*", "ExLM"),
    "table-11": ("Table 3", "RoBERTa*", "ExLM"),
}
"""Recipe: the paper's table with equal data and settings, its MLM and its ExLM."""

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
    """Everything about one task, JSON-able; metrics in percent."""
    metric, cells = result.task.metric, [cell for cell in result.cells if not is_diverged(cell)]
    diverged = [cell["seed"] for cell in result.cells if is_diverged(cell)]
    if not cells:
        raise UserError(f"{result.task.name}: every run diverged; lower --train.learning_rate")
    parts = {
        part: {
            name: summary([cell["metrics"][part][name] for cell in cells], recipe.report)
            for name in metrics
            if name != "num_tasks"
        }
        for part, metrics in cells[0]["metrics"].items()
    }
    # Where the labels of the test are secret the validation rows are reported, as in Table 3.
    reported = "test" if "test" in parts else "validation"
    num_tasks = cells[0]["metrics"][reported].get("num_tasks")
    name, printed = result.task.name, PAPER_TABLES.get(recipe.name, ())
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
        "diverged_seeds": diverged,
        "best_epochs": [cell["best_epoch"] for cell in cells],
        "seconds": sum(record.get("seconds", 0.0) for record in runs.values()),
        "device": cells[0]["device"],
        "parameters": cells[0]["parameters"],
        "problem_sha256": cells[0]["problem_sha256"],
        "searched": [_search_record(cell, metric) for cell in result.searched],
        "notes": result.notes,
        "paper": paper_numbers(printed, name),
        "paper_beside": paper_numbers(printed, PRINTED_BESIDE.get(name, "")),
    }


def _search_record(cell: dict[str, Any], metric: str) -> dict[str, Any]:
    share = None if is_diverged(cell) else 100 * reached(cell, "validation", metric)
    return {"setting": key(setting_of(cell)), "seed": cell["seed"], "validation": share}


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
    path = output / RESULTS
    known = check_results(output, pretrained)
    known |= {
        name: {**record, "recipe": recipe.name, "made_with": made_with}
        for name, record in tasks.items()
    }
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
    write_atomically(path, (json.dumps(whole, indent=1) + "\n").encode())
    lines = [f"# {pretrained.path}", "", *table(whole), "", *notes(known), "", *scale(whole)]
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
        checkpoint, tasks = found["checkpoint"], dict(found["tasks"])
        sha256 = checkpoint["sha256"]
        table(found), notes(tasks), scale(found)  # what cannot be shown is damaged
    if sha256 != pretrained.sha256:
        raise UserError(
            f"{output} holds results of {checkpoint.get('path')}, which has other weights; choose "
            "another --output"
        )
    return tasks


def table(results: dict[str, Any]) -> list[str]:
    """The results as lines of a Markdown table.

    The paper's MLM stands beside them, and what the paper trained as this model was trained;
    ``results.json`` has its other rows. A column without any number is left out.

    Args:
        results: what ``results.json`` holds.
    """
    columns = _paper_rows(results)
    wanted = list(columns.values())
    rows = [("task", "metric, %", "rows", "reached", "over", *columns)]
    for name, record in results["tasks"].items():
        metric, part = record["metric"], record["part"]
        over = f"{_rule(record['reported']['rule'])} of {len(record['reported']['seeds'])}"
        reached = _shown(record["reported"])
        rows.append((name, metric, part, reached, over, *_paper(record, "paper", wanted)))
        if beside := BESIDE.get(name):
            other = _shown(record["parts"][part][beside])
            printed = _paper(record, "paper_beside", wanted)
            rows.append(("", beside, part, other, over, *printed))
        for other, metrics in record["parts"].items():
            if other not in ("validation", "test"):
                printed = _paper(record, "paper_beside", wanted)
                rows.append(("", metric, other, _shown(metrics[metric]), over, *printed))
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return markdown_table([tuple(row[i] for i in kept) for row in rows])


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


def notes(tasks: dict[str, dict[str, Any]]) -> list[str]:
    """What a reader of the table must know, one line each."""
    lines = []
    for name, record in tasks.items():
        found = record["notes"]
        told = [f"{part} {n['examples']:,}" for part, n in found["rows"].items()]
        told = [f"rows {', '.join(told)}"]
        if hashes := found.get("split_sha1"):
            told.append(
                f"split {found['split']} "
                + ", ".join(f"{part} {digest[:8]}" for part, digest in hashes.items())
            )
        elif "split" in found:
            told.append(f"split {found['split']}")
        cut = sum(n["truncated"] for n in found["rows"].values())
        if cut:
            told.append(f"{_counted(cut, 'row')} cut to fit the model")
        unknown = {part: n["unknown_share"] for part, n in found["rows"].items()}
        if any(unknown.values()):
            shares = ", ".join(f"{part} {share:.2%}" for part, share in unknown.items())
            told.append(f"tokens that are [UNK]: {shares}")
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
            more = len(untrained) - LABELS_NAMED
            told.append(
                f"no training row has {_counted(len(untrained), 'label')}: "
                + ", ".join(untrained[:LABELS_NAMED])
                + (f" and {more} more" if more > 0 else "")
            )
        if record["diverged_seeds"]:
            told.append(f"seeds {record['diverged_seeds']} diverged and are left out")
        if record["changed"]:
            told.append(f"not the recipe's: {', '.join(record['changed'])}")
        if record["part"] == "validation":
            told.append("epoch and setting are chosen on the rows that are reported")
        lines.append(f"{name}: {'; '.join(told)}")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _rule(rule: str) -> str:
    return "mean" if rule == "mean-sd" else rule


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
    for name in sorted({SHOWN[r["recipe"]][0] for r in tasks.values() if r["recipe"] in SHOWN}):
        lines.append(f"{name} of the paper: {printed[name]}")
    return lines


def _shown(found: dict[str, Any]) -> str:
    spread = "" if found["sd"] is None else f" ± {found['sd']:.1f}"
    return f"{found['value']:.1f}{spread}"


def _paper_rows(results: dict[str, Any]) -> dict[str, str]:
    """Head of a column: a row of the paper, or MLM and ExLM, whose rows have names by table."""
    checkpoint = results["checkpoint"]
    rows = {"paper: MLM": "MLM"}
    if checkpoint["objective"] == "exlm":
        rows["paper: ExLM"] = "ExLM"
    elif checkpoint["objective"] == "repeated-mlm":
        masking = checkpoint["config"]["masking"]
        cell = f"p={100 * masking['mask_ratio']:.3g}%, k={masking['num_copies']}"
        rows[f"paper: Repeated MLM, {cell}"] = cell
    return rows


def _paper(record: dict[str, Any], place: str, rows: list[str]) -> list[str]:
    """The paper's numbers with equal data and settings of its own; empty where it has none.

    Figures 3 and 8 show the same models and disagree about MNLI: both stand there.
    """
    _, mlm, exlm = SHOWN.get(record["recipe"], ("", "", ""))
    names = [{"MLM": mlm, "ExLM": exlm}.get(row, row) for row in rows]
    printed = record[place].items()
    return [
        ", ".join(f"{found[name]} ({table})" for table, found in printed if name in found)
        for name in names
    ]
