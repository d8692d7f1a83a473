"""How settings are checked, and how a mistake is reported.

Besides its type, a field of a settings class may carry marks: a ``Rule`` that its numbers must obey
and an ``Effect`` that says what it changes. A broken rule raises ``UserError``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

# ---- marks of a setting besides its type ----


class Effect(Enum):
    """What a setting changes. By design, the first two leave every weight as it is."""

    NOTHING = "no weight, and nothing that is measured"
    COURSE = "no weight, but what a run measures, how long it takes or when it gives up"
    SPEED = "how fast a token is worked on"


RARE = "a setting that only --help=all shows"


@cache
def schema(kind: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The settings of a class: type and marks, such as a ``Rule``, an ``Effect`` or ``RARE``."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: (get_args(hint)[0], hint.__metadata__)
        if get_origin(hint) is Annotated
        else (hint, ())
        for name, hint in hints.items()
    }


# ---- what a user may not ask for ----


class UserError(ValueError):
    """A mistake of the user, in one line that names the value and the remedy.

    Commands print the line and exit with code 2; a traceback means a bug of ours. The message may
    quote anything, so it is forced onto one line and shortened where it is long.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        text = re.sub(r"(\S{100})\S{200,}(\S{20})", r"\1...\2", text)
        super().__init__(text if len(text) <= 1000 else f"{text[:600]} ... {text[-300:]}")


EXTRAS = {
    "datasets": "text", "pyarrow": "text", "tokenizers": "text", "rdkit": "chem", "lmdb": "unimol",
    "docstring_parser": "train", "jsonargparse": "train", "yaml": "train",
    "matplotlib": "plot", "seaborn": "plot", "pandas": "tasks", "scipy": "tasks",
    "sklearn": "tasks", "transformers": "hf", "tensorboard": "watch",
}  # fmt: skip
"""The extra that installs a module; these modules are imported on demand."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The line for a library that an extra installs; None if it is another one."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return f"this needs the package {name}; pip install 'exlm-mini[{EXTRAS[name]}]'"


@contextmanager
def naming_extras() -> Iterator[None]:
    """Context of what needs such a library, outside the commands.

    Raises:
        ModuleNotFoundError: for one that is missing, with the line that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (line := missing_extra(error)) is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None


NEAR = 0.75
"""Likeness of a typing mistake; predict and pretrain have 0.53."""


def _likeness(name: str, known: str) -> float:
    """Share of the letters that two names have in common, in order; 1 if they are the same.

    Of dotted names the last parts may be alike: --steps is near --train.steps.
    """
    pairs = [(name, known), (name.rpartition(".")[2], known.rpartition(".")[2])]
    return max(difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)


def nearest(
    name: str, known: Iterable[str], otherwise: str | None = None, sign: str = ""
) -> str:
    """A clause that suggests the known names near a mistyped one, each after ``sign``.

    If none is near: ``otherwise``, or a list of all known names.
    """
    known = list(known)
    likeness = {one: _likeness(name, one) for one in known}
    close = sorted(
        (one for one in known if likeness[one] >= NEAR), key=lambda one: -likeness[one]
    )
    if close := close[:3]:
        return f"did you mean {' or '.join(sign + one for one in close)}?"
    return otherwise or f"known: {', '.join(known)}"


class Rule(NamedTuple):
    """A condition on numbers."""

    fits: Callable[[float], bool]
    """False for nan."""
    words: str
    """The condition for the message, which continues \"it must\"."""


LARGEST = 1e30
"""A training step with larger numbers overflows single precision."""
AT_LEAST_1 = Rule(lambda number: number >= 1, "be at least 1")
NOT_NEGATIVE = Rule(
    lambda number: 0 <= number < LARGEST, f"not be negative, and be below {LARGEST:g}"
)
POSITIVE = Rule(lambda number: 0 < number < LARGEST, f"be positive, and below {LARGEST:g}")
BELOW_1 = Rule(lambda number: 0 <= number < 1, "lie in [0, 1)")
LAYERS = Rule(lambda number: 1 <= number <= 1000, "lie between 1 and 1,000")
SHARE = Rule(lambda number: 0 <= number <= 1, "lie in [0, 1]")
BETWEEN = Rule(lambda number: 0 < number < 1, "lie strictly between 0 and 1")
HALF = Rule(
    lambda number: 0 <= number <= 0.5, "lie in [0, 0.5], so that the chains are gone at the end"
)
ROW = Rule(lambda number: number >= 3, "be at least 3: [BOS], one token and [EOS]")
TWO_PARTS = Rule(lambda number: number >= 2, "be at least 2, to train on and to validate")
MOST_THREADS = 1024
"""Of threads or processes; a system that cannot start so many kills the program."""
VOCABULARY = Rule(lambda number: 1 <= number <= 2**22, "be at least 1, and at most 4194304")
"""Training a tokenizer allocates its whole vocabulary at once."""
THREADS = Rule(
    lambda number: 1 <= number <= MOST_THREADS, f"be at least 1, and at most {MOST_THREADS}"
)


def check_numbers(group: str, settings: object, rule: Rule, *names: str) -> None:
    """Refuse numbers, or tuples of numbers, that break a rule; None means a default and passes.

    ``group`` is the prefix of these attributes on the command line, such as ``train.``.

    Raises:
        UserError: naming the first that breaks it.
    """
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if value is not None and not all(map(rule.fits, numbers)):
            raise UserError(f"{group}{name} is {value}; it must {rule.words}")


def check_integers(settings: Mapping[str, object], group: str = "") -> None:
    """Refuse integers, by name, that do not fit into the types of counts, shapes and seeds.

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


def check_fields(group: str, settings: Any) -> None:
    """Check every field against its choices and rules, and integers with ``check_integers``.

    Types are checked where settings are read, see ``recipes.typed``.

    Raises:
        UserError: with the nearest choices, or the rule.
    """
    for name, (hint, marks) in schema(settings.__class__).items():
        value, choices = getattr(settings, name), get_args(hint)
        check_integers({name: value}, group)
        if get_origin(hint) is Literal and value not in choices:
            raise UserError(f"{group}{name} is '{value}'; {nearest(str(value), choices)}")
        for rule in marks:
            if isinstance(rule, Rule):
                check_numbers(group, settings, rule, name)
