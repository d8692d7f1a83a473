"""The parser of a command: help from its docstring, mistakes in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from exlm_mini.config import UserError, nearest
from exlm_mini.console import Debugging


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
