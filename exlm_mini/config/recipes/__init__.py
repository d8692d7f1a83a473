"""Recipes: YAML files with the settings of a run, found by name in this package or by path.

The same reader reads a run's ``config.yaml``. It leaves every value a string, and the setting
decides its type; YAML itself would guess a type from the spelling and read ``010`` as eight,
``1:30`` as ninety and ``no`` as false.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError, nearest

RECIPES = Path(__file__).parent


class Kind(NamedTuple):
    """A kind of recipe: where its files are, and what is built from their settings."""

    folder: Path
    build: Callable[[str, dict[str, Any]], Any]
    """Makes what ``load_recipe`` returns from the name of a recipe and the content of its file."""
    prefix: str = ""
    """Prefix of the recipes' names; users may leave it out."""


PRETRAINING = Kind(RECIPES, lambda name, found: RunConfig(**{**found, "recipe": name}))


def recipe_names(kind: Kind = PRETRAINING) -> list[str]:
    """Names of the recipes of a kind that come with the package."""
    return sorted(f"{kind.prefix}{path.stem}" for path in kind.folder.glob("*.yaml"))


def load_recipe(name: str, kind: Kind = PRETRAINING) -> Any:
    """The settings of a recipe, by name or by path.

    Args:
        name: a name such as ``text-tiny``, or the path of a YAML file. The file may name another
            recipe as its ``base``, whose settings apply where the file itself gives none.
        kind: kind of recipe; a recipe for pre-training becomes a ``RunConfig``.
    """
    path, prefix = _find(name, kind)
    try:
        return kind.build(f"{prefix}{path.stem}", _with_base(path, kind))
    except UserError as error:
        raise UserError(f"the recipe {path}: {error}; correct the file") from error


def _find(name: str, kind: Kind, folder: Path = Path()) -> tuple[Path, str]:
    """The file of a recipe, and the prefix of its name; a relative path starts at ``folder``."""
    path, prefix = folder / name, ""
    if path.suffix not in (".yaml", ".yml"):
        names, prefix = recipe_names(kind), kind.prefix
        stem = name.removeprefix(prefix)
        if prefix + stem not in names:
            known = nearest(prefix + stem, names)
            raise UserError(
                f"unknown recipe '{name}', which is not the path of a .yaml file either; {known}"
            )
        path = kind.folder / f"{stem}.yaml"
    return path, prefix


def _with_base(path: Path, kind: Kind, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge the settings of a recipe over those of its base.

    ``above`` lists the recipes that are based on this one, to notice a cycle."""
    settings, above = read_settings(path), (*above, path.resolve())
    if isinstance(data := settings.get("data"), dict):
        settings["data"] = naming_one_corpus(data)
    if (base := settings.pop("base", None)) is None:
        return settings
    below = _find(str(base), kind, path.parent)[0].resolve()
    if below in above:
        raise UserError(f"{below} is based on itself, directly or through its base")
    try:
        return _over(_with_base(below, kind, above), settings)
    except UserError as error:
        raise UserError(f"its base {below}: {error}") from error


def _over(below: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Merge nested settings; where both have a value, that of ``settings`` wins."""
    both = dict(below)
    for name, value in settings.items():
        is_group = isinstance(value, dict) and isinstance(below.get(name), dict)
        both[name] = _over(below[name], value) if is_group else value
    return both


def naming_one_corpus(data: dict[str, Any]) -> dict[str, Any]:
    """Settings of ``data``, completed so that they replace the corpus of the settings below them:
    sources replace a pack, and a pack replaces sources."""
    pack, source = data.get("pack"), data.get("source")
    if pack and source:
        raise UserError(
            f"data.source would not be read beside data.pack {pack}; drop one of them"
        )
    if pack:
        return {"source": (), **data}
    return {"pack": None, **data} if "source" in data else data


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a YAML file: nested dicts and lists of strings, None for null."""
    import yaml

    def value(node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            for n, (key, _) in enumerate(node.value):
                if key.value in names[:n]:
                    line = key.start_mark.line + 1
                    raise UserError(f"line {line} gives {key.value} a second time; keep one")
            return {str(key.value): value(inner) for key, inner in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [value(inner) for inner in node.value]
        return None if node.style is None and node.value in ("", "~", "null") else node.value

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.BaseLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UserError("it must hold settings by name, like the config.yaml of a run")
        return value(root)
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}); give an existing path"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(str(error)) from None


def stored_config(path: Path) -> RunConfig:
    """The settings in the ``config.yaml`` of a run; missing ones get their default."""
    try:
        return RunConfig(**read_settings(path))
    except UserError as error:
        raise UserError(
            f"the stored {path} is damaged ({error}); restore it, or choose another --output"
        ) from None


def replaced(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """A copy of a configuration with some settings replaced, given by dotted name."""
    nested = asdict(config)
    for name, value in settings.items():
        group, _, key = name.rpartition(".")
        (nested[group] if group else nested)[key] = value
    return RunConfig(**nested)


def plain(config: Any) -> dict[str, Any]:
    """Settings of any class as nested dicts of values that YAML and JSON can hold."""
    return json.loads(json.dumps(asdict(config)))


def dotted(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Flatten nested settings into one dict by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{group}{key}.")
        else:
            flat[f"{group}{key}"] = value
    return flat
