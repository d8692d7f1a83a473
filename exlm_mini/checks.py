"""What a user may not ask for: the error, and the rules that settings keep to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake of the user, told in one line that names the value and the remedy.

    Commands print the line and end with exit code 2; a traceback is for our own mistakes. What it
    quotes may be anything: it is written on one line, and cut where it is long.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        text = re.sub(r"(\S{100})\S{200,}(\S{20})", r"\1...\2", text)
        super().__init__(text if len(text) <= 1000 else f"{text[:600]} ... {text[-300:]}")


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


LARGEST = 1e30
"""Beyond, a step of training is more than single precision holds."""
AT_LEAST_1 = Rule(lambda number: number >= 1, "be at least 1")
NOT_NEGATIVE = Rule(
    lambda number: 0 <= number < LARGEST, f"not be negative, and be below {LARGEST:g}"
)
POSITIVE = Rule(lambda number: 0 < number < LARGEST, f"be positive, and below {LARGEST:g}")
BELOW_1 = Rule(lambda number: 0 <= number < 1, "lie in [0, 1)")
LAYERS = Rule(lambda number: 1 <= number <= 1000, "lie between 1 and 1,000")
SHARE = Rule(lambda number: 0 <= number <= 1, "lie in [0, 1]")
MOST_THREADS = 1024
"""Or processes: a system that cannot start as many ends the program."""
VOCABULARY = Rule(lambda number: 1 <= number <= 2**22, "be at least 1, and at most 4194304")
"""Whoever learns one takes memory for all of it at once."""
THREADS = Rule(
    lambda number: 1 <= number <= MOST_THREADS, f"be at least 1, and at most {MOST_THREADS}"
)


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


def check_integers(settings: Mapping[str, object], group: str = "") -> None:
    """Refuse whole numbers beyond what counts, shapes and seeds are held in.

    Args:
        settings: values by name; what is no whole number is passed over.
        group: what stands before the names on the command line.

    Raises:
        UserError: for a seed outside 0 to 2**63, and any other number outside int32.
    """
    for name, value in settings.items():
        is_seed = name.endswith(("seed", "seeds"))
        least, bits = (0, 63) if is_seed else (-(2**31), 31)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and not least <= number < 2**bits:
                below = "not be negative, and " if is_seed else ""
                raise UserError(f"{group}{name} is {number}; it must {below}be below 2**{bits}")


def check_fields(group: str, settings: object) -> None:
    """Refuse a value that is not in its field's list, and whole numbers as ``check_integers``.

    Only the command line checks types.

    Raises:
        UserError: with the values nearest to it.
    """
    hints = get_type_hints(type(settings))
    check_integers({name: getattr(settings, name) for name in hints}, group)
    for name, hint in hints.items():
        value, choices = getattr(settings, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise UserError(f"{group}{name} is '{value}'; {nearest(str(value), choices)}")
