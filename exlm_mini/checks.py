"""What a user may not ask for: the error, and the rules that settings keep to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake of the user, told in one line that names the value and the remedy.

    Commands print the line and end with exit code 2; a traceback is for our own mistakes.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that offers the known names closest to a mistyped one."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


class Rule(NamedTuple):
    """What numbers must keep to."""

    fits: Callable[[float], bool]
    """False for nan."""
    words: str
    """What a number must do, for the message."""


AT_LEAST_1 = Rule(lambda number: number >= 1, "be at least 1")
NOT_NEGATIVE = Rule(lambda number: number >= 0, "not be negative")
POSITIVE = Rule(lambda number: number > 0, "be positive")
BELOW_1 = Rule(lambda number: 0 <= number < 1, "lie in [0, 1)")
SHARE = Rule(lambda number: 0 <= number <= 1, "lie in [0, 1]")


def check_numbers(group: str, settings: object, rule: Rule, *names: str) -> None:
    """Refuse numbers that break a rule; none stands for a default and is passed over.

    Args:
        group: what stands before the names on the command line, such as ``train.``.
        settings: has the numbers as attributes.
        rule: that they must keep to.
        names: of the numbers.

    Raises:
        UserError: naming the first that breaks it.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not rule.fits(value):
            raise UserError(f"{group}{name} is {value}; it must {rule.words}")


def check_choices(group: str, settings: object) -> None:
    """Refuse a value that is not in its field's list; only the command line checks types.

    Raises:
        UserError: with the values nearest to it.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value, choices = getattr(settings, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise UserError(f"{group}{name} is '{value}'; {nearest(str(value), choices)}")
