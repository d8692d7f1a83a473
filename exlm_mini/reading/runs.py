"""Where models are found: the shipped ones by name, and the newest run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

SHIPPED = {
    name: Path(__file__).with_name("shipped") / name
    for name in ("molecules", "molecules-spans", "english")
}
"""Small models that come with the package, by name; each has a card."""


def newest_run(runs: Path) -> Path | None:
    """The run in a directory that saved a checkpoint last; None if no run has one."""
    saved = [path.parents[1] for path in runs.glob("*/checkpoints/step-*")]
    return max(saved, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, default=None)


def fine_tuning(path: Path) -> dict[str, Any] | None:
    """What a fine-tuned model says of its task in ``config.json``; None if this is none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((path / "config.json").read_bytes()).get("fine_tuning")
    return None


def shipped_for(text: str) -> str:
    """The name of the shipped model for a text: SMILES have no spaces."""
    return "english" if " " in text.strip() else "molecules"
