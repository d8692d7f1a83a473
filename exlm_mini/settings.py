"""From a recipe and dotted options to the settings of a run, and to ``config.yaml`` and back.

A recipe is a YAML file of settings, one of the package's by name or the user's by path.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from exlm_mini.config import RunConfig, UserError, nearest, run_config_from_dict

RECIPES = Path(__file__).parent / "recipes"


class Request(NamedTuple):
    """What the command line asked for."""

    config: RunConfig
    output: Path
    is_dry_run: bool
    num_devices: int = 1
    """Of the run that --dry-run counts for."""
    throughput: str | None = None
    """With --dry-run: tokens per second of a device, or a run to read it from."""


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` and ``--print_config`` print and exit.

    Raises:
        UserError: for an unknown recipe or setting, or a value that cannot be.
    """
    recipe, rest = _take_recipe(argv)
    path = _recipe_path(recipe)
    parser = _parser()
    if any(option in rest for option in ("-h", "--help")):
        parser.print_help()
        sys.exit(0)
    # The recipe's own file comes first, so that options replace what it says.
    arguments = ["--settings", json.dumps(_settings_of(path))] if path else []
    namespace = parser.parse_args([*arguments, *_join_files(rest)])
    settings = namespace.as_dict()
    output, is_dry_run = settings.pop("output"), settings.pop("dry_run")
    settings.pop("settings")
    num_devices, throughput = settings.pop("devices"), settings.pop("throughput")
    for name, value in (("devices", num_devices), ("throughput", throughput)):
        if value is not None and not is_dry_run:
            raise UserError(f"--{name} {value} is for --dry-run alone; drop it")
    config = run_config_from_dict({**settings, "recipe": path.stem if path else "none"})
    if output is None:
        output = Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Request(
        config, Path(output), is_dry_run, 1 if num_devices is None else num_devices, throughput
    )


def _take_recipe(argv: list[str]) -> tuple[str | None, list[str]]:
    """The value of --recipe and the other arguments."""
    recipe, rest, values = None, [], iter(argv)
    for value in values:
        if value == "--recipe":
            recipe = next(values, "")
        elif value.startswith("--recipe="):
            recipe = value.partition("=")[2]
        else:
            rest.append(value)
    return recipe, rest


def _recipe_path(recipe: str | None) -> Path | None:
    """The file of a recipe: a name of ours, or a path to one of the user's."""
    if recipe is None:
        return None
    if recipe.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise UserError(f"there is no recipe file {recipe}; give an existing path")
        return Path(recipe)
    if recipe not in recipe_names():
        raise UserError(f"unknown recipe '{recipe}'; {nearest(recipe, recipe_names())}")
    return RECIPES / f"{recipe}.yaml"


def _join_files(argv: list[str]) -> list[str]:
    """Let ``--data.files a b`` take several plain paths."""
    joined: list[str] = []
    values = list(argv)
    while values:
        value = values.pop(0)
        name, has_value, first = value.partition("=")
        if name != "--data.files" or first.startswith("["):
            joined.append(value)
            continue
        files = [first] if has_value else []
        while values and not values[0].startswith("--"):
            files.append(values.pop(0))
        if not files:
            raise UserError("--data.files names no file; give paths, or leave the option out")
        if len(files) == 1 and files[0].startswith("["):
            joined.append(f"--data.files={files[0]}")
        else:
            joined.append(f"--data.files={json.dumps(files)}")
    return joined


def _parser() -> Any:
    """The jsonargparse parser; its errors become ``UserError``."""
    from jsonargparse import (
        ActionConfigFile,
        ArgumentParser,
        DefaultHelpFormatter,
        set_parsing_settings,
    )

    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise UserError(_one_line(message)) from None

    class HelpFormatter(DefaultHelpFormatter):
        def _fill_text(self, text: str, width: int, indent: str) -> str:
            # The names of recipes have hyphens, and a name must stay one word.
            return textwrap.fill(text, width, break_on_hyphens=False)

    parser = Parser(
        prog="python -m exlm_mini.pretrain",
        usage="%(prog)s --recipe NAME [--output DIR] [--dry-run] [--key.subkey VALUE ...]",
        description=f"Train a model. Recipes: {', '.join(recipe_names())}.",
        formatter_class=HelpFormatter,
    )
    parser.add_class_arguments(RunConfig, None, skip={"recipe"})
    # Taken out of the arguments before they are parsed; here for --help.
    parser.add_argument("--recipe", help="one of the above, or a path to a .yaml of settings")
    parser.add_argument("--settings", action=ActionConfigFile, help="a YAML file of settings")
    parser.add_argument("--output", help="run directory; default runs/<recipe>-<time>")
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, tokens and memory, and stop"
    )
    parser.add_argument(
        "--devices", type=int, help="with --dry-run: devices to spread a batch over"
    )
    parser.add_argument(
        "--throughput",
        type=str,
        help="with --dry-run: measured tokens per second of one device, or the directory of a "
        "run to read it from; gives the hours",
    )
    return parser


def _known_settings(kind: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    default = kind()
    for field in fields(kind):
        value = getattr(default, field.name)
        if is_dataclass(value):
            yield from _known_settings(type(value), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _one_line(message: str) -> str:
    """The parser's message on one line, with the nearest settings for a mistyped one."""
    message = " ".join(message.split())
    options = [*_known_settings(), "output", "dry-run", "devices", "throughput", "recipe"]
    options += ["settings", "print_config"]
    if unknown := re.search(r"unrecognized arguments: --([^ =]+)", message):
        return f"unknown option --{unknown[1]}; {nearest(unknown[1], options)}"
    if choice := re.search(r'key "([\w.]+)": .*Literal\[(.+)\]\. Got value: (.*)', message):
        return f"{choice[1]} is {choice[3]}; it must be one of {choice[2]}".replace("'", "")
    if value := re.search(r'key "([\w.]+)": Expected an? (.+)\. Got value: (.*)', message):
        kind = re.sub(r"<class '(\w+)'>", r"\1", value[2])
        return f"{value[1]} is '{value[3]}'; it must be of type {kind}"
    return message


def _settings_of(path: Path) -> dict[str, Any]:
    """Settings of a recipe file, a run's ``config.yaml`` or the output of --print_config.

    Raises:
        UserError: if it is not YAML or holds an unknown setting.
    """
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read the recipe {path}: {reason}; correct the file") from None
    if not isinstance(settings, dict):
        raise UserError(f"the recipe {path} holds no settings; see --print_config for the form")
    known = [*_known_settings(), "output", "dry_run", "devices", "throughput"]
    groups = {name.partition(".")[0] for name in known if "." in name}
    for key, value in settings.items():
        if key in groups and not isinstance(value, dict):
            raise UserError(f"the recipe {path}: {key} must hold settings, not {value!r}")
        names = [f"{key}.{inner}" for inner in value] if key in groups else [str(key)]
        for name in names:
            if name not in known:
                raise UserError(
                    f"the recipe {path} has an unknown setting {name}; {nearest(name, known)}"
                )
    return {key: value for key, value in settings.items() if key != "recipe"}


def plain(config: RunConfig) -> dict[str, Any]:
    """Settings as YAML knows them."""
    return json.loads(json.dumps(asdict(config)))


def parse_stored(text: str) -> dict[str, Any]:
    """Settings of a stored ``config.yaml``, missing ones at their default."""
    import yaml

    try:
        settings = yaml.safe_load(text)
        return plain(run_config_from_dict(settings))
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise UserError(
            f"the stored config.yaml is damaged ({' '.join(str(error).split())}); restore it, or "
            "choose another --output"
        ) from None
