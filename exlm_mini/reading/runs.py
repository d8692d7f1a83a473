"""Where models are found: the shipped ones by name, and the newest run."""

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
"""Small models that come with the package, by name; each has a card."""
REMEDY = "give the --output of a pre-training run that has saved one"


def model_directory(path: Path) -> Path:
    """The directory of a model, which may be the name of a shipped one.

    Commands look here before they import PyTorch.
    """
    if path.exists():
        return path
    if str(path) in SHIPPED:
        return SHIPPED[str(path)]
    remedy = nearest(str(path), SHIPPED, REMEDY)
    raise UserError(f"there is no checkpoint in {path}; {remedy}")


def newest_run(runs: Path) -> Path | None:
    """The run in a directory that saved a checkpoint last; None if no run has one."""
    saved = [path.parents[1] for path in runs.glob("*/checkpoints/step-*")]
    return max(saved, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, default=None)


def fine_tuning(path: Path) -> dict[str, Any] | None:
    """What a fine-tuned model says of its task in ``config.json``; None if this is none."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads((path / "config.json").read_bytes()).get("fine_tuning")
    return None


def task_of(path: Path) -> dict[str, Any]:
    """``fine_tuning`` of a directory that must hold a fine-tuned model."""
    if (task := fine_tuning(path)) is None:
        raise UserError(
            f"{path} holds no fine-tuned model; give the --output of exlm finetune, or a task's "
            "directory in it"
        )
    return task


def shipped_for(text: str) -> str:
    """The name of the shipped model for a text: SMILES have no spaces."""
    return "english" if " " in text.strip() else "molecules"
