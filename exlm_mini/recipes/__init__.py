"""Recipes: settings of a run in YAML files, by name here or by path anywhere.

The same reader takes a run's ``config.yaml`` and the output of ``--print_config``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import RunConfig, UserError, nearest, run_config_from_dict
from exlm_mini.data.files import read_text, reading
from exlm_mini.recipes import typed_yaml

RECIPES = Path(__file__).parent
OF_THE_COMMAND = {
    "recipe": str | None, "output": str | None, "dry_run": bool, "devices": int | None,
    "throughput": float | None, "debug": bool,
}  # fmt: skip
"""What --print_config prints besides the settings, with its types."""


class Kind(NamedTuple):
    """Recipes of one kind: where the package has them, and what becomes of their settings."""

    folder: Path
    hints: Mapping[str, Any]
    """Names and types of the settings, see ``typed_yaml``."""
    build: Callable[[str, dict[str, Any]], Any]
    """From the name of a recipe and its settings to what ``load_recipe`` returns."""
    prefix: str = ""
    """What the names begin with; it may be left out."""


def _run_config(name: str, settings: dict[str, Any]) -> RunConfig:
    settings = {n: v for n, v in settings.items() if n not in OF_THE_COMMAND}
    return run_config_from_dict({**settings, "recipe": name})


PRETRAINING = Kind(RECIPES, typed_yaml.RUN | OF_THE_COMMAND, _run_config)


def recipe_names(kind: Kind = PRETRAINING) -> list[str]:
    """Recipes of a kind that come with the package."""
    return sorted(f"{kind.prefix}{path.stem}" for path in kind.folder.glob("*.yaml"))


def load_recipe(name: str, kind: Kind = PRETRAINING) -> Any:
    """The settings of a recipe as they stand, by name or by path; needs no jsonargparse.

    Args:
        name: such as ``text-tiny``, or the path of a YAML file.
        kind: of recipe; those of pre-training become a ``RunConfig``.

    Raises:
        UserError: for an unknown recipe, or a file of other things.
    """
    path = recipe_path(name, kind)
    settings = _read_file(path, kind)
    prefix = kind.prefix if path.parent == kind.folder else ""
    with _naming(path):
        return kind.build(f"{prefix}{path.stem}", settings)


def recipe_path(recipe: str, kind: Kind = PRETRAINING) -> Path:
    """The file of a recipe: a name of ours, or a path to one of the user's."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe)
    stem, names = recipe.removeprefix(kind.prefix), recipe_names(kind)
    if f"{kind.prefix}{stem}" not in names:
        raise UserError(f"unknown recipe '{recipe}'; {nearest(f'{kind.prefix}{stem}', names)}")
    return kind.folder / f"{stem}.yaml"


def _read_file(path: Path, kind: Kind = PRETRAINING) -> dict[str, Any]:
    """Settings of a recipe file, a run's ``config.yaml`` or the output of --print_config."""
    text = read_text(path)
    with _naming(path), reading(path):
        return typed_yaml.read_settings(text, kind.hints)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Mistakes in the settings of a recipe name its file."""
    try:
        yield
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
            return plain(run_config_from_dict(typed_yaml.read_settings(text)))
    except UserError as error:
        raise UserError(
            f"the stored config.yaml is damaged ({error}); restore it, or choose another --output"
        ) from None
