"""The options of a command: help from its docstring, mistakes in one line.

``pretrain`` takes its settings from a recipe and from dotted options, see ``parse``; the other
commands have a ``command_parser``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from exlm_mini.config import RunConfig, UserError, nearest, run_config_from_dict
from exlm_mini.recipes import recipe_names, recipe_path, settings_of
from exlm_mini.training.console import Debugging


class _Debug(argparse.Action):
    def __call__(self, *_: object) -> None:
        Debugging.is_on = True


class Parser(argparse.ArgumentParser):
    """An option that cannot be is a ``UserError``, not argparse's several lines."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.add_argument(
            "--debug", action=_Debug, nargs=0, dest=argparse.SUPPRESS,
            help="show the traceback behind a mistake",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


class GuessingParser(Parser):
    """For commands of many options: one that is unknown is answered with those like it."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The options; ``--help`` prints and exits.

        Raises:
            UserError: for an unknown option, or a value that cannot be.
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option.lstrip("-") for option in self._option_string_actions]
            name = unknown[0].lstrip("-").partition("=")[0]
            raise UserError(f"unknown option {unknown[0]}; {nearest(name, known)}")
        return found


def command_parser(command: str, text: str, kind: type[Parser] = Parser) -> Parser:
    """A parser without options yet.

    Args:
        command: as typed, such as ``python -m exlm_mini.fill``.
        text: docstring of its module. The first line is what it does, behind the command's name
            if that stands there; the other lines end the help, without the marks that the pages of
            the book need.
        kind: of parser.
    """
    first, _, rest = text.partition("\n")
    first = first.removesuffix(" ::")
    return kind(
        prog=command,
        description=(first.partition("``: ")[2] or first).replace("``", ""),
        epilog=rest.replace(" ::", "::").replace("::", ":").replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# ---- the settings of pretrain ----


class Request(NamedTuple):
    """What the command line asked for."""

    config: RunConfig
    output: Path
    is_dry_run: bool
    num_devices: int = 1
    """Of the run that --dry-run counts for."""
    throughput: float | None = None
    """With --dry-run: tokens per second of a device."""


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` and ``--print_config`` print and exit.

    Raises:
        UserError: for an unknown recipe or setting, or a value that cannot be.
    """
    recipes, rest = _take("--recipe", argv)
    path = recipe_path(recipes[-1]) if recipes else None
    files, rest = _take("--settings", rest)
    if any(option in rest for option in ("-h", "--help")):
        _parser().print_help()
        sys.exit(0)
    # As defaults, so that options replace what files say; the recipe's own file comes first.
    defaults: dict[str, Any] = {}
    for file in ([path] if path else []) + [Path(file) for file in files]:
        defaults |= settings_of(file)
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
    if throughput is not None and not 0 < throughput < math.inf:
        raise UserError(f"--throughput is {throughput}; it must be positive tokens per second")
    config = run_config_from_dict({**settings, "recipe": path.stem if path else "none"})
    if output is None:
        output = Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Request(
        config, Path(output), is_dry_run, 1 if num_devices is None else num_devices, throughput
    )


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
        type=float,
        help="with --dry-run: measured tokens per second of one device; gives the hours",
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
