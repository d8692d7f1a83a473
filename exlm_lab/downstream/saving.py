"""What a fine-tuning run leaves on the disk: checkpoints while it goes on, its model at the end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from exlm_lab.downstream.prepared import Problem
from exlm_mini.export import AUTO_MAPS, REMOTE_CODE
from exlm_mini.hf import tokenizer_for
from exlm_mini.reading.runs import fine_tuning
from exlm_mini.reading.trained import Trained


def last_checkpoint(directory: Path) -> str | None:
    """The last checkpoint in a run's directory that is whole: its state is written last."""
    checkpoints = directory.glob("checkpoint-*")
    for checkpoint in sorted(checkpoints, key=lambda path: int(path.name[11:]), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            return str(checkpoint)
    return None


def save_model(
    directory: Path, model: Any, pretrained: Trained, problem: Problem, run: str, reached: float
) -> None:
    """Save a fine-tuned model for transformers and ``predict``, unless a better one is there.

    Args:
        directory: made if missing.
        model: of ``fine_tune``.
        pretrained: its start, with the tokenizer.
        problem: its task.
        run: task, setting and seed.
        reached: the task's metric on the validation rows.
    """
    there = fine_tuning(directory)
    if there and there["validation"] >= reached and there["run"] != run:
        return
    task = problem.task
    directory.mkdir(parents=True, exist_ok=True)
    num_columns = max(1, len(problem.train.examples.texts[0]) if problem.train.examples else 2)
    model.config.fine_tuning = {
        "task": task.name,
        "kind": task.kind,
        "input": task.input,
        "columns": task.columns or ["text", "text_pair"][:num_columns],
        "targets": task.targets or ["label"],
        "numbers": [n for n, is_it in zip(task.classes, task.is_number, strict=True) if is_it],
        "run": run,
        "validation": reached,
        "metric": task.metric,
        "pretrained_sha256": pretrained.sha256,
        "problem_sha256": problem.sha256,
    }
    model.config.auto_map = dict(AUTO_MAPS["config.json"])
    model.save_pretrained(directory)
    # Weights are written for their owner alone.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)
    tokenizer = tokenizer_for(pretrained.tokenizer, pretrained.config.longest_text(num_columns))
    cleaning = problem.notes.get("cleaning", {})
    tokenizer.init_kwargs |= {
        "auto_map": dict(AUTO_MAPS["tokenizer_config.json"]),
        **({"cleaning": cleaning} if any(cleaning.values()) else {}),
    }
    tokenizer.save_pretrained(directory)
    (directory / "modeling_exlm.py").write_text(REMOTE_CODE)
