"""Find models: shipped ones by name, the newest run, and the task of a fine-tuned model."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError, nearest

SHIPPED = {
    name: Path(__file__).with_name("shipped") / name
    for name in ("molecules", "molecules-spans", "english")
}
"""Directories of the small models that come with the package, by name; each has a model card."""
REMEDY = "give the --output of a pre-training run that has saved one"


def model_directory(path: Path) -> Path:
    """The directory of a model, given its path or the name of a shipped model.

    Commands call this before they import PyTorch.
    """
    if path.exists():
        return path
    if str(path) in SHIPPED:
        return SHIPPED[str(path)]
    remedy = nearest(str(path), SHIPPED, REMEDY)
    raise UserError(f"there is no checkpoint in {path}; {remedy}")


def newest_run(runs: Path) -> Path | None:
    """Of the runs in a directory, the last to save a checkpoint; None if no run has one."""
    saved = [path.parents[1] for path in runs.glob("*/checkpoints/step-*")]
    return max(saved, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, default=None)


def fine_tuning(path: Path) -> dict[str, Any] | None:
    """A fine-tuned model's task, from its ``config.json``; None if there is no such model."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads((path / "config.json").read_bytes()).get("fine_tuning")
    return None


def task_of(path: Path) -> dict[str, Any]:
    """Like ``fine_tuning``, but raises ``UserError`` if there is no fine-tuned model."""
    if (task := fine_tuning(path)) is None:
        raise UserError(
            f"{path} holds no fine-tuned model; give the --output of exlm finetune, or a task's "
            "directory in it"
        )
    return task


def shipped_for(text: str) -> str:
    """The name of the shipped model that suits a text; one without spaces is taken for a SMILES."""
    return "english" if " " in text.strip() else "molecules"
