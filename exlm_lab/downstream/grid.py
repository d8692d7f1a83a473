"""Which settings and seeds to try for a task, which setting is best, and what the paper reports.

A fine-tuning recipe lists the values to try for each task (Tables 6, 8 and 11).
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
"""Values to try for one task, by the name of a setting in ``TuneConfig``."""


@settings()
class Tuning:
    """A fine-tuning recipe: settings and seeds for some tasks, and how to summarise the seeds."""

    name: str
    spaces: dict[str, Space]
    """Values to try for each task, by its name."""
    seeds: tuple[Seed, ...] = ()
    report: Report = "mean"
    changed: tuple[str, ...] = ()
    """Names of the settings that were given on the command line and override the recipe's."""


def combinations(space: Space, base: TuneConfig) -> list[TuneConfig]:
    """All different combinations of the values in a space; settings it does not name stay as in
    ``base``."""
    every = itertools.product(*space.values())
    settings = (replace(base, **dict(zip(space, own, strict=True))) for own in every)
    return list(dict.fromkeys(settings))


def check_seeds(name: str, seeds: tuple[int, ...]) -> None:
    """Refuse an empty list of seeds, and duplicates."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{name} is {list(seeds)}; give at least one seed, and none twice")


def _tuning(name: str, said: dict[str, Any]) -> Tuning:
    """Build a ``Tuning`` from the content of a recipe."""
    whole = {key: said.pop(key) for key in ("seeds", "report") if key in said}
    for task in said:
        check_task(task)
    spaces = {task: values or {} for task, values in said.items()}
    recipe = Tuning(Path(name).stem, spaces=spaces, **whole)
    check_seeds("seeds", recipe.seeds)
    for space in recipe.spaces.values():
        combinations(space, TuneConfig())  # raises if a value is invalid
    return recipe


TUNING = Kind(RECIPES, _tuning, "finetune/")
"""The kind of recipe that ``load_recipe`` turns into a ``Tuning``."""


def key(config: TuneConfig) -> str:
    """A short name for a setting: the values the paper's tables vary, and a hash of all values."""
    return (
        f"lr{config.learning_rate:g}-b{config.batch_size}-e{config.epochs}"
        f"-w{config.warmup_share:g}-{seal_of(asdict(config))[:8]}"
    )


def setting_of(record: dict[str, Any]) -> TuneConfig:
    """The settings of a run, from its record."""
    return TuneConfig(**record["config"])


def best_setting(records: list[dict[str, Any]], task: Task) -> TuneConfig:
    """The setting whose run scored best on the validation rows, the first one on a tie."""
    done = [record for record in records if "diverged" not in record]
    if not done:
        raise UserError(f"{task.name}: every run diverged; lower --train.learning_rate")
    return setting_of(max(done, key=lambda r: r["metrics"]["validation"][task.metric]))


def paper_numbers(tables: tuple[str, ...], task: str) -> dict[str, dict[str, float]]:
    """The paper's results for a task, from some of its tables: ``{table: {row: percent}}``."""
    printed = json.loads(PAPER.read_text(encoding="utf-8"))
    numbers = {
        table: {row: values[task] for row, values in printed[table].items() if task in values}
        for table in tables
    }
    return {table: rows for table, rows in numbers.items() if rows}
