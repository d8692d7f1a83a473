"""Recipes: settings of a run in YAML files, by name here or by path anywhere.

The same reader takes a run's ``config.yaml``. A value gets the type of its setting; YAML itself
would guess the type from the spelling and read ``010`` as eight, ``1:30`` as ninety and ``no`` as
false.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.files import read_text, reading

RECIPES = Path(__file__).parent
_hints = functools.cache(get_type_hints)  # hundreds of records are read at once
RUN = _hints(RunConfig)
OF_THE_COMMAND = {
    "recipe": str | None, "output": str | None, "dry_run": bool, "debug": bool,
    "devices": int | None, "throughput": float | None,
}  # fmt: skip
"""Other keys that files of earlier versions may hold, with their types; ignored."""
MAX_CHARACTERS = 100_000
"""In a file; settings take a few thousand."""


class Kind(NamedTuple):
    """One kind of recipes: where they are, and what is built from their settings."""

    folder: Path
    hints: Mapping[str, Any]
    """Names and types of the settings, see ``typed``."""
    build: Callable[[str, dict[str, Any]], Any]
    """From the name of a recipe and its settings to what ``load_recipe`` returns."""
    prefix: str = ""
    """How the names begin; users may leave it out."""


def _run_config(name: str, settings: dict[str, Any]) -> RunConfig:
    settings = {n: v for n, v in settings.items() if n not in OF_THE_COMMAND}
    return run_config_from_dict({**settings, "recipe": name})


PRETRAINING = Kind(RECIPES, RUN | OF_THE_COMMAND, _run_config)


def recipe_names(kind: Kind = PRETRAINING) -> list[str]:
    """Names of the recipes of a kind that come with the package."""
    return sorted(f"{kind.prefix}{path.stem}" for path in kind.folder.glob("*.yaml"))


def load_recipe(name: str, kind: Kind = PRETRAINING) -> Any:
    """The settings of a recipe, by name or by path; needs no jsonargparse.

    Args:
        name: such as ``text-tiny``, or the path of a YAML file.
        kind: of recipe; those of pre-training become a ``RunConfig``.

    Raises:
        UserError: for an unknown recipe, or a file that is not one.
    """
    path = recipe_path(name, kind)
    settings = settings_of(path, kind)
    prefix = kind.prefix if path.parent == kind.folder else ""
    with _naming(path):
        return kind.build(f"{prefix}{path.stem}", settings)


def recipe_path(recipe: str, kind: Kind = PRETRAINING) -> Path:
    """The file of a recipe, from the name of one of ours or the path of the user's own."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe)
    stem, names = recipe.removeprefix(kind.prefix), recipe_names(kind)
    if f"{kind.prefix}{stem}" not in names:
        raise UserError(f"unknown recipe '{recipe}'; {nearest(f'{kind.prefix}{stem}', names)}")
    return kind.folder / f"{stem}.yaml"


def settings_of(path: Path, kind: Kind = PRETRAINING) -> dict[str, Any]:
    """The settings in a recipe or in a run's ``config.yaml``, see ``typed``.

    Raises:
        UserError: if the file cannot be read, or has an unknown setting or a value of a wrong type.
    """
    text = read_text(path)
    with _naming(path), reading(path):
        return typed(read_yaml(text), kind.hints)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the name of the file to mistakes in a recipe."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the recipe {path}: {error}; correct the file") from None


def plain(config: Any) -> dict[str, Any]:
    """Settings of any class as plain values of YAML and JSON."""
    return json.loads(json.dumps(asdict(config)))


def dotted(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; tuples become lists, because YAML has no tuples."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{group}{key}.")
        else:
            flat[f"{group}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def parse_stored(text: str) -> dict[str, Any]:
    """Settings of a stored ``config.yaml``; missing ones get their default."""
    try:
        with reading("it"):
            return plain(run_config_from_dict(read_yaml(text)))
    except UserError as error:
        raise UserError(
            f"the stored config.yaml is damaged ({error}); restore it, or choose another --output"
        ) from None


def run_config_from_dict(settings: dict[str, Any]) -> RunConfig:
    """Rebuild settings from ``dataclasses.asdict``, JSON or YAML; missing ones default.

    Raises:
        UserError: as ``typed``, and for values that cannot work.
    """
    return build(RunConfig, settings)


def build(kind: type, settings: dict[str, Any], group: str = "") -> Any:
    """The same for any class of settings."""
    hints = _hints(kind)
    values = typed(settings, hints, group)
    groups = {n: build(hints[n], values[n], f"{n}.") for n in values if is_dataclass(hints[n])}
    return kind(**values | groups)


# ---- YAML, and the types of its values ----


def read_yaml(text: str) -> Any:
    """YAML as nested dicts and lists of strings, and None for null.

    Raises:
        UserError: if it is not YAML, gives a name twice, or uses an alias.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [pair for pair in pairs if pair[0] == "tag:yaml.org,2002:null"]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise UserError(f"line {line} has an alias; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            for n, (key, _) in enumerate(node.value):
                if key.value in names[:n]:
                    line = key.start_mark.line + 1
                    raise UserError(f"line {line} gives {key.value} a second time; keep one")
            return super().construct_mapping(node, deep)

    if len(text) > MAX_CHARACTERS:
        raise UserError(f"it has {len(text):,} characters; settings take a few thousand")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:  # the line is in the later ones of its message
        raise UserError(" ".join(str(error).split())) from None


def typed(settings: Any, hints: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Convert settings from YAML, JSON or Python to their types; lists become tuples.

    Args:
        settings: values by name, groups as dicts. A string is read as JSON where the setting is
            a number or a boolean.
        hints: the known names and their types; a dataclass is a group.
        group: prefix of the names in messages, such as ``train.``.

    Returns:
        The converted settings, groups as dicts. Their sizes are not checked yet.

    Raises:
        UserError: for an unknown name, with the nearest known ones, or a value of a wrong type.
    """
    if not isinstance(settings, dict):
        raise UserError(
            f"{group[:-1] or 'it'} must hold settings by name, as the config.yaml of a run"
        )
    found = {}
    for key, value in (settings if group else _without_sharding(settings)).items():
        name = f"{group}{key}"
        if key not in hints:
            known = [f"{group}{other}" for other in hints]
            raise UserError(f"unknown setting {name}; {nearest(name, known)}")
        if is_dataclass(hints[key]):
            found[key] = typed(value, _hints(hints[key]), f"{name}.")
        else:
            found[key] = _typed(value, hints[key], name)
    return found


def _without_sharding(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without ``train.sharding``, which earlier versions stored.

    Raises:
        UserError: if the model was sharded.
    """
    train = settings.get("train")
    if not isinstance(train, dict) or "sharding" not in train:
        return settings
    if train["sharding"] != "none":
        raise UserError(
            f"train.sharding is {train['sharding']}, and every process now holds the whole model; "
            "take the setting out, the checkpoints are of the same form"
        )
    return {**settings, "train": {k: v for k, v in train.items() if k != "sharding"}}


def _typed(value: Any, hint: Any, name: str) -> Any:
    """One value, converted to the type of its setting."""
    kind, options, given = hint, get_args(hint), value
    if NoneType in options:
        if value is None:
            return None
        kind, options = options[0], get_args(options[0])
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple):
            kinds = options[:1] * len(value) if Ellipsis in options else options
            if len(kinds) == len(value):
                return tuple(map(_typed, value, kinds, [name] * len(kinds)))
    elif get_origin(kind) is Literal:
        if value in options:
            return value
    else:
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, str) and kind is not str:
                value = json.loads(value)
            if kind is float and type(value) is int:
                value = float(value)
        if isinstance(value, kind) and isinstance(value, bool) is (kind is bool):
            return value
    raise UserError(mismatch(name, given, hint))


def mismatch(name: str, value: Any, hint: Any) -> str:
    """The message about a value that is not of the type of its setting."""
    shown = "empty" if value is None else f"a {type(value).__name__}"
    if isinstance(value, str | int | float):
        shown = f"'{value}'"
    kind = get_args(hint)[0] if NoneType in get_args(hint) else hint
    if get_origin(kind) is Literal:
        return f"{name} is {shown}; {nearest(str(value), get_args(kind))}"
    words = "a list such as [a,b]" if get_origin(kind) is tuple else f"of type {kind.__name__}"
    return f"{name} is {shown}; it must be {words}{'' if kind is hint else ', or null'}"
