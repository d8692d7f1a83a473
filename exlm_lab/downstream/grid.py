"""Which settings and seeds are tried for a task, which is best, and what the paper prints.

A recipe says for each task which values to try (Tables 6, 8 and 11).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from exlm_lab.downstream.catalogue import check_task
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Task
from exlm_mini.config.checks import Seed, UserError, settings
from exlm_mini.config.recipes import Kind
from exlm_mini.data.files import seal_of

RECIPES = Path(__file__).parents[1] / "recipes" / "finetune"
PAPER = RECIPES / "paper.json"

Report = Literal["median", "mean"]

Space = dict[str, Annotated[list[Any], Field(min_length=1)]]
"""Values to try for one task, by setting (``TuneConfig`` says of what)."""


@settings()
class Tuning:
    """Settings and seeds for some tasks, and how their results are put together: a recipe."""

    name: str
    spaces: dict[str, Space]
    """By task."""
    seeds: tuple[Seed, ...] = ()
    report: Report = "mean"
    changed: tuple[str, ...] = ()
    """Settings that were given in place of the recipe's."""


def combinations(space: Space, base: TuneConfig) -> list[TuneConfig]:
    """All settings of a space; what it does not name stays as in ``base``."""
    every = itertools.product(*space.values())
    return [replace(base, **dict(zip(space, own, strict=True))) for own in every]


def check_seeds(name: str, seeds: tuple[int, ...]) -> None:
    """Refuse seeds that are none, or some of them equal."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{name} is {list(seeds)}; give different ones")


def _tuning(name: str, said: dict[str, Any]) -> Tuning:
    """What the settings of a recipe ask for."""
    whole = {key: said.pop(key) for key in ("seeds", "report") if key in said}
    for task in said:
        check_task(task)
    spaces = {task: values or {} for task, values in said.items()}
    recipe = Tuning(Path(name).stem, spaces=spaces, **whole)
    check_seeds("seeds", recipe.seeds)
    for space in recipe.spaces.values():
        combinations(space, TuneConfig())  # refuses what cannot be
    return recipe


TUNING = Kind(RECIPES, _tuning, "finetune/")
"""Recipes that ``load_recipe`` makes a ``Tuning`` of."""


def key(config: TuneConfig) -> str:
    """A short name of a setting: what the paper's tables vary, and a hash of the whole."""
    return (
        f"lr{config.learning_rate:g}-b{config.batch_size}-e{config.epochs}"
        f"-w{config.warmup_share:g}-{seal_of(asdict(config))[:8]}"
    )


def setting_of(record: dict[str, Any]) -> TuneConfig:
    """The settings of a run."""
    return TuneConfig(**record["config"])


def best_setting(records: list[dict[str, Any]], task: Task) -> TuneConfig:
    """The setting whose run has the highest metric on the validation rows, of equals the first."""
    done = [record for record in records if "diverged" not in record]
    if not done:
        raise UserError(f"{task.name}: every run diverged; lower --train.learning_rate")
    return setting_of(max(done, key=lambda r: r["metrics"]["validation"][task.metric]))


def paper_numbers(tables: tuple[str, ...], task: str) -> dict[str, dict[str, float]]:
    """What the paper prints for a task: ``{table: {row: percent}}``."""
    printed = json.loads(PAPER.read_text(encoding="utf-8"))
    numbers = {
        table: {row: values[task] for row, values in printed[table].items() if task in values}
        for table in tables
    }
    return {table: rows for table, rows in numbers.items() if rows}
