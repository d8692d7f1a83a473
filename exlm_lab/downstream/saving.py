"""What a fine-tuning run leaves on disk: checkpoints while it trains, and its model at the end."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from exlm_lab.downstream.prepared import Problem
from exlm_mini.config.checks import UserError
from exlm_mini.hf import tokenizer_for
from exlm_mini.reading.runs import fine_tuning
from exlm_mini.reading.trained import Trained
from exlm_mini.training.beside_weights import AUTO_MAPS


def intact_checkpoint(directory: Path, digests: Mapping[str, str]) -> str | None:
    """The last checkpoint in a run's directory, or None.

    Checkpoints whose saving or removal was cut off are deleted. Raises ``UserError`` if the last or
    the best checkpoint has changed since it was saved.
    """
    for checkpoint in directory.glob("checkpoint-*"):
        if checkpoint.name not in digests:
            shutil.rmtree(checkpoint)
    last = get_last_checkpoint(str(directory))
    if last is None:
        return None
    _check_digest(Path(last), digests)
    state = TrainerState.load_from_json(str(Path(last) / "trainer_state.json"))
    best = Path(state.best_model_checkpoint or last).name
    for checkpoint in directory.glob("checkpoint-*"):
        if checkpoint.name == best:
            _check_digest(checkpoint, digests)
        elif checkpoint != Path(last):
            shutil.rmtree(checkpoint)
    return last


def _check_digest(checkpoint: Path, digests: Mapping[str, str]) -> None:
    if digest_of(checkpoint) != digests[checkpoint.name]:
        raise UserError(
            f"{checkpoint} is damaged: its sha256 does not match; restore it from a copy, or "
            f"delete {checkpoint.parent} and the run will be repeated"
        )


def digest_of(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def save_model(
    directory: Path, model: Any, pretrained: Trained, problem: Problem, run: str, reached: float
) -> None:
    """Save a model of ``fine_tune`` for transformers and ``predict``, unless one of another run is
    there that reached as much on the validation rows. ``run`` names task, setting and seed."""
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
    # The weights were written with access for their owner only.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)
    tokenizer = tokenizer_for(pretrained.tokenizer, pretrained.config.longest_text(num_columns))
    cleaning = problem.notes.get("cleaning", {})
    tokenizer.init_kwargs |= {
        "auto_map": dict(AUTO_MAPS["tokenizer_config.json"]),
        **({"cleaning": cleaning} if any(cleaning.values()) else {}),
    }
    tokenizer.save_pretrained(directory)
