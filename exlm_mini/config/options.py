"""Command-line options, with help made from docstrings and mistakes reported in one line.

Commands that take settings use ``settings_parser``, the others ``command_parser``. ``parse`` reads
the command line of ``pretrain``.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.config.checks import RARE, Count, Positive, UserError, mistake_in, nearest
from exlm_mini.config.recipes import load_recipe, naming_one_corpus, recipe_names, replaced


class Debugging(argparse.Action):
    """Whether ``--debug`` was given."""

    is_on = False

    def __call__(self, *_: object) -> None:
        Debugging.is_on = True


class Parser(argparse.ArgumentParser):
    """Reports a wrong option as a one-line ``UserError`` instead of argparse's usage text."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # argparse's own pattern takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-\d*\.?\d+(e[-+]?\d+)?$", re.IGNORECASE)
        self.add_argument(
            "--debug", action=Debugging, nargs=0, dest=argparse.SUPPRESS,
            help="show the full traceback of an error",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a one-line ``UserError``."""
        message = " ".join(message.split())
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            kind = "option" if unknown[1].startswith("-") else "argument"
            name = unknown[1].lstrip("-").partition("=")[0]
            known = [option.lstrip("-") for option in self._option_string_actions]
            if unknown[1] == "--" or (unknown[1].startswith("-") and name in known):
                raise UserError("options after -- are not read; drop the --")
            remedy = nearest(name, known, "see --help", sign="--")
            raise UserError(f"unknown {kind} {unknown[1]}; {remedy}")
        takes_several = any(action.nargs == "+" for action in self._actions)
        if takes_several and message.startswith("the following arguments are required"):
            message += "; give arguments before options, which may take several values"
        raise UserError(f"{message}; see --help") from None


class _Formatter(argparse.HelpFormatter):
    """Wraps help to the terminal's width, except for indented lines, which are examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part
            if re.search(r"^ ", part, re.M)
            else textwrap.fill(part, width, break_on_hyphens=False)
            for part in paragraphs
        )


def command_parser(command: str, text: str, **more: Any) -> Parser:
    """A parser with help, but no options of the command's own yet.

    Args:
        command: what a user types, such as ``python -m exlm_mini.fill``.
        text: docstring of the command's module. Its first line, without the command's name, becomes
            the description; the other lines end the help, stripped of reStructuredText marks.
    """
    first, _, rest = text.partition("\n")
    first = first.removesuffix(" ::")
    return Parser(
        prog=command,
        description=(first.partition("``: ")[2] or first).replace("``", ""),
        epilog=rest.replace(" ::", "::").replace("::", ":").replace("``", ""),
        formatter_class=partial(_Formatter, max_help_position=30),
        allow_abbrev=False,
        **more,
    )


# ---- settings ----


class _Help(argparse.Action):
    """``--help`` shows what most runs need, ``--help=all`` every setting."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> NoReturn:
        for action in parser._actions if value is None else ():
            if getattr(action, "is_rare", False):
                action.help = argparse.SUPPRESS
        parser.print_help()
        sys.exit(0)


FINITE = ConfigDict(allow_inf_nan=False)


def of(hint: Any) -> Callable[[str], Any]:
    """An argparse ``type`` that checks a value against a type hint, for options beside settings."""

    def read(word: str) -> Any:
        try:
            return TypeAdapter(hint, config=FINITE).validate_python(word)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"it{mistake_in(error)}") from None

    return read


def settings_parser(
    command: str, text: str, groups: Mapping[str, Any], skip: Collection[str] = ()
) -> Parser:
    """A ``command_parser`` with an option for every setting of some classes.

    ``given`` extracts the settings that a user gave from the namespace that the parser returns.

    Args:
        groups: settings classes by the prefix of their options; an empty prefix for options
            without a dot.
        skip: dotted names of settings that get no option.
    """
    usage = "%(prog)s [--option VALUE ...]"
    parser = command_parser(command, text, usage=usage, add_help=False)
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", metavar="all",
        help="show this help; --help=all shows all settings",
    )  # fmt: skip
    for group, kind in groups.items():
        shown = parser.add_argument_group(kind.__doc__.strip().rstrip("."))
        for name, setting in kind.__pydantic_fields__.items():
            full = f"{group}.{name}" if group else name
            if full in skip or is_dataclass(setting.annotation):
                continue
            option = _option(setting)
            action: Any = shown.add_argument(f"--{full}", dest=f"given.{full}", **option)
            action.is_rare = RARE in setting.metadata
    return parser


def given(found: argparse.Namespace, group: str = "") -> dict[str, Any]:
    """The settings that a user gave, as strings by dotted name, from the namespace of a
    ``settings_parser``; only those of ``group``, such as ``data.``, without that prefix."""
    prefix = f"given.{group}"
    nothing: dict[str, Any] = {"null": None, "none": None, "['null']": [], "['none']": []}
    return {
        name.removeprefix(prefix): nothing.get(str(value), value)
        for name, value in vars(found).items()
        if name.startswith(prefix)
    }


def _option(setting: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for one setting, made from pydantic's description of it."""
    kind, default = setting.annotation, setting.default
    option: dict[str, Any] = {"default": argparse.SUPPRESS}
    notes = []
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        kind, *others = get_args(kind)
        option["nargs"] = "+" if Ellipsis in others else 1 + len(others)
        option["action"] = "extend" if Ellipsis in others else "store"
        default = " ".join(map(str, default)) or None
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        notes, kind = [", ".join(get_args(kind))], str
    if default is not None:  # otherwise the docstring explains the default
        notes.append(f"default {str(default).lower() if kind is bool else default}")
    metavar = {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kind]
    text = " ".join(setting.description.split()).rstrip(".")
    text += f" ({'; '.join(notes)})" * bool(notes)
    return option | {"metavar": metavar, "help": text.replace("%", "%%")}


# ---- pretrain ----


class Request(NamedTuple):
    """What the command line asked for."""

    config: RunConfig
    options: argparse.Namespace
    """Options that are not settings, such as ``--dry-run``."""


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` prints and exits."""
    found = _parser().parse_args(argv)
    for name in ("devices", "throughput"):
        value = getattr(found, name)
        if value is not None and not found.dry_run:
            raise UserError(f"--{name} {value} works only with --dry-run; drop it")
    if found.minutes is not None and found.dry_run:
        raise UserError(
            f"--train.minutes {found.minutes:g} needs timed steps, but --dry-run trains none; "
            "drop one of the two"
        )
    for name in ("train.steps", "train.warmup_steps"):
        if found.minutes is not None and name in given(found):
            raise UserError(f"--train.minutes sets {name}, too; drop one of the two")
    recipe = RunConfig(recipe="none") if found.recipe is None else load_recipe(found.recipe)
    start = getattr(found, "from")
    # A run that starts from a trained MLM does not need the recipe's own first stage.
    before = {} if start is None else {"train.start_from": start, "train.grow_at": 0.0}
    data = naming_one_corpus(given(found, "data."))
    asked = given(found) | {f"data.{name}": value for name, value in data.items()}
    return Request(replaced(recipe, before | asked), found)


def _parser() -> Parser:
    text = f"Train a model.\nRecipes: {', '.join(recipe_names())}."
    groups = {"": RunConfig, "model": ModelConfig, "masking": MaskingConfig}
    groups |= {"data": DataConfig, "train": TrainConfig}
    parser = settings_parser("python -m exlm_mini.pretrain", text, groups, {"recipe"})
    add = parser.add_argument
    add("--recipe", metavar="NAME", help="a recipe listed below, or the path of a .yaml")
    add(
        "--output", type=Path, metavar="DIR", help="where to save; default runs/<recipe>-<time>"
    )
    add("--from", metavar="DIR", help="a trained MLM to start from (train.start_from)")
    add("--dry-run", action="store_true", help="only print parameters, tokens and memory")
    add(
        "--devices",
        type=of(Count),
        metavar="N",
        help="with --dry-run: devices that share a batch",
    )
    add(
        "--throughput",
        type=of(Positive),
        metavar="X",
        help="with --dry-run: tokens/s of one device",
    )
    add(
        "--train.minutes",
        type=of(Annotated[float, Field(gt=0, le=1e6)]),
        metavar="X",
        dest="minutes",
        help="duration in minutes, in place of --train.steps",
    )
    return parser
