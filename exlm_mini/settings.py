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
from exlm_mini.outside import read_text, reading
from exlm_mini.settings_file import read_settings

RECIPES = Path(__file__).parent / "recipes"
OF_THE_COMMAND = {
    "recipe": str | None, "output": str | None, "dry_run": bool, "devices": int | None,
    "throughput": str | None, "debug": bool,
}  # fmt: skip
"""What --print_config prints besides the settings, with its types."""


class Request(NamedTuple):
    """What the command line asked for."""

    config: RunConfig
    output: Path
    is_dry_run: bool
    num_devices: int = 1
    """Of the run that --dry-run counts for."""
    throughput: str | None = None
    """With --dry-run: tokens per second of a device, or a run or a file to read it from."""


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` and ``--print_config`` print and exit.

    Raises:
        UserError: for an unknown recipe or setting, or a value that cannot be.
    """
    recipes, rest = _take("--recipe", argv)
    path = _recipe_path(recipes[-1]) if recipes else None
    files, rest = _take("--settings", rest)
    if any(option in rest for option in ("-h", "--help")):
        _parser().print_help()
        sys.exit(0)
    # As defaults, so that options replace what files say; the recipe's own file comes first.
    defaults: dict[str, Any] = {}
    for file in ([path] if path else []) + [Path(file) for file in files]:
        defaults |= _settings_of(file)
    parser = _parser()
    _set_defaults(parser, defaults)
    settings = parser.parse_args(_join_files(rest)).as_dict()
    output, is_dry_run = settings.pop("output"), settings.pop("dry_run")
    settings.pop("settings")
    settings.pop("debug")
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


def load_recipe(name: str) -> RunConfig:
    """The settings of a recipe as they stand, by name or by path; needs no jsonargparse.

    Raises:
        UserError: for an unknown recipe, or a file of other things.
    """
    path = _recipe_path(name)
    settings = {n: v for n, v in _read_file(path).items() if n not in OF_THE_COMMAND}
    return run_config_from_dict({**settings, "recipe": path.stem})


def _take(option: str, argv: list[str]) -> tuple[list[str], list[str]]:
    """The values of an option, and the other arguments."""
    found, rest, values = [], [], iter(argv)
    for value in values:
        if value == option:
            found.append(next(values, ""))
        elif value.startswith(f"{option}="):
            found.append(value.partition("=")[2])
        else:
            rest.append(value)
    return found, rest


def _recipe_path(recipe: str) -> Path:
    """The file of a recipe: a name of ours, or a path to one of the user's."""
    if recipe.endswith((".yaml", ".yml")):
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
        allow_abbrev=False,
    )
    parser.add_class_arguments(RunConfig, None, skip={"recipe"})
    # These two are taken out of the arguments before they are parsed; here for --help, and the
    # second because the parser has --print_config only with it.
    parser.add_argument("--recipe", help="one of the above, or a path to a .yaml of settings")
    parser.add_argument("--settings", action=ActionConfigFile, help="a YAML file of settings")
    parser.add_argument("--output", help="run directory; default runs/<recipe>-<time>")
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, tokens and memory, and stop"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback behind a mistake"
    )
    parser.add_argument(
        "--devices", type=int, help="with --dry-run: devices to spread a batch over"
    )
    parser.add_argument(
        "--throughput",
        type=str,
        help="with --dry-run: measured tokens per second of one device, or what to read it from: "
        "the directory of a run, or a file of bench train --json; gives the hours",
    )
    return parser


def _set_defaults(parser: Any, defaults: dict[str, Any]) -> None:
    """Take over what files say; the parser reads texts once more, and must find the same."""
    parser.set_defaults(defaults)
    held = parser.parse_args([])
    for name, value in defaults.items():
        if held[name] != value:
            raise UserError(
                f"{name} cannot be the text {value!a}, which an option would take for "
                f"{held[name]!a}; choose another, without quotes for none"
            )


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
    options = [
        *_known_settings(),
        "output",
        "dry-run",
        "devices",
        "throughput",
        "recipe",
        "debug",
    ]
    options += ["settings", "print_config"]
    if unknown := re.search(r"unrecognized arguments: --([^ =]+)", message):
        return f"unknown option --{unknown[1]}; {nearest(unknown[1], options)}"
    if extra := re.search(r"unrecognized arguments: (\S+)", message):
        hint = (
            f"did you mean --recipe {extra[1]}?"
            if extra[1] in recipe_names()
            else "settings are given as --name value"
        )
        return f"unknown argument {extra[1]!a}; {hint}"
    if group := re.search(r'key "(\w+)": Unable to load config "([^"]*)"', message):
        return f"--{group[1]} {group[2]} is no YAML file of settings; give one, or drop it"
    if pair := re.search(r'key "([\w.]+)": .*class \'tuple\'>. Got value: (.*)', message):
        return f"{pair[1]} is '{pair[2]}'; it must be a list such as [0.9,0.98]"
    if choice := re.search(r'key "([\w.]+)": .*Literal\[(.+)\]\. Got value: (.*)', message):
        return f"{choice[1]} is {choice[3]}; it must be one of {choice[2]}".replace("'", "")
    if value := re.search(r'key "([\w.]+)": Expected an? (.+)\. Got value: (.*)', message):
        kind = re.sub(r"<class '(\w+)'>", r"\1", value[2])
        return f"{value[1]} is '{value[3]}'; it must be of type {kind}"
    return message


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


def _settings_of(path: Path) -> dict[str, Any]:
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
