"""Recipes: settings of a run in YAML files, by name here or by path anywhere.

The same reader takes a run's ``config.yaml`` and the output of ``--print_config``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig, UserError, nearest, run_config_from_dict
from exlm_mini.data.files import read_text, reading
from exlm_mini.recipes.typed_yaml import read_settings

RECIPES = Path(__file__).parent
OF_THE_COMMAND = {
    "recipe": str | None, "output": str | None, "dry_run": bool, "devices": int | None,
    "throughput": float | None, "debug": bool,
}  # fmt: skip
"""What --print_config prints besides the settings, with its types."""


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str) -> RunConfig:
    """The settings of a recipe as they stand, by name or by path; needs no jsonargparse.

    Raises:
        UserError: for an unknown recipe, or a file of other things.
    """
    path = recipe_path(name)
    settings = {n: v for n, v in _read_file(path).items() if n not in OF_THE_COMMAND}
    return run_config_from_dict({**settings, "recipe": path.stem})


def recipe_path(recipe: str) -> Path:
    """The file of a recipe: a name of ours, or a path to one of the user's."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe)
    if recipe not in recipe_names():
        raise UserError(f"unknown recipe '{recipe}'; {nearest(recipe, recipe_names())}")
    return RECIPES / f"{recipe}.yaml"


def _read_file(path: Path) -> dict[str, Any]:
    """Settings of a recipe file, a run's ``config.yaml`` or the output of --print_config."""
    text = read_text(path)
    try:
        with reading(path):
            return read_settings(text, OF_THE_COMMAND)
    except UserError as error:
        raise UserError(f"the recipe {path}: {error}; correct the file") from None
    except ImportError:
        raise UserError("reading a recipe needs PyYAML; run: pip install PyYAML") from None


def settings_of(path: Path) -> dict[str, Any]:
    """Dotted settings of a file, such as an option can hold.

    Raises:
        UserError: if it is no such file, or holds an unknown setting or a wrong value.
    """
    settings = _read_file(path)
    settings.pop("recipe", None)
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    for name, value in flat.items():
        for word in value if isinstance(value, tuple) else (value,):
            if isinstance(word, str) and not word.isprintable():
                raise UserError(
                    f"the recipe {path}: {name} cannot be the text {word[:60]!a}; choose another"
                )
    return flat


def plain(config: RunConfig) -> dict[str, Any]:
    """Settings as YAML knows them."""
    return json.loads(json.dumps(asdict(config)))


def parse_stored(text: str) -> dict[str, Any]:
    """Settings of a stored ``config.yaml``, missing ones at their default."""
    try:
        with reading("it"):
            return plain(run_config_from_dict(read_settings(text)))
    except UserError as error:
        raise UserError(
            f"the stored config.yaml is damaged ({error}); restore it, or choose another --output"
        ) from None
