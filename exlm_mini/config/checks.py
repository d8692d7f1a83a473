"""Settings classes that check their values, and the errors that report a mistake.

``settings`` turns a class into one whose values pydantic converts to the types of the fields and
checks against their bounds. A field may carry an ``Effect``, which says what it changes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

# ---- mistakes of the user ----


class UserError(ValueError):
    """A mistake of the user, in one line that names the value and the remedy.

    Commands print the line and exit with code 2; a traceback means a bug of ours. The message may
    quote anything, so it is put on one line and shortened if it is long.
    """

    def __init__(self, message: str) -> None:
        text = re.sub(r"(\S{100})\S{200,}(\S{20})", r"\1...\2", on_one_line(message))
        super().__init__(text if len(text) <= 1000 else f"{text[:600]} ... {text[-300:]}")


JOINERS = "\u200c\u200d"
"""Zero-width characters that shape letters and emoji; not printable, but kept in messages."""


def on_one_line(text: str) -> str:
    """Escape line ends and other unprintable characters of a text, except ``JOINERS``."""
    return "".join(c if c.isprintable() or c in JOINERS else ascii(c)[1:-1] for c in text)


EXTRAS = {
    "datasets": "text", "pyarrow": "text", "tokenizers": "text", "rdkit": "chem",
    "lmdb": "unimol",
    "yaml": "train", "matplotlib": "plot", "seaborn": "plot", "pandas": "text",
    "scipy": "tasks", "sklearn": "tasks", "transformers": "hf", "tensorboard": "watch",
}  # fmt: skip
"""Modules that are imported on demand, each with the extra of this package that installs it."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The message for a missing library that an extra installs; None for any other library."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    extra = f"exlm-mini[{EXTRAS[name]}] @ git+https://github.com/exlm-book/exlm-book"
    return f"this needs the package {name}; pip install '{extra}', or [all] for every extra"


@contextmanager
def naming_extras() -> Iterator[None]:
    """Context manager for code outside the commands that imports one of ``EXTRAS``.

    Raises:
        ModuleNotFoundError: if the library is missing, with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (line := missing_extra(error)) is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None


NEAR = 0.75
"""Least similarity of a mistyped name; that of ``predict`` and ``pretrain`` is only 0.53."""


def nearest(
    name: str, known: Iterable[str], otherwise: str | None = None, sign: str = ""
) -> str:
    """A clause that suggests the known name nearest to a mistyped one, with ``sign`` before it.

    The last part of a dotted name counts too: ``steps`` is near ``train.steps``. If no name is
    near, the clause is ``otherwise``, or a list of all known names.
    """
    known, last = list(known), name.rpartition(".")[2]
    words = {word.lower(): one for one in known for word in (one.rpartition(".")[2], one)}
    for asked in dict.fromkeys([name.lower(), last.lower()]):
        for close in difflib.get_close_matches(asked, words, 1, NEAR):
            return f"did you mean {sign}{words[close]}?"
    return otherwise or f"known: {', '.join(known)}"


# ---- the types of settings ----

Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
"""An integer of at least 0."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A random seed; NumPy accepts no larger one."""
Threads = Annotated[int, Field(ge=1, le=1024)]
"""A number of CPU threads or processes; a system that cannot start so many kills the program."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Between = Annotated[float, Field(gt=0, lt=1)]
"""A number between 0 and 1, both excluded."""


class Effect(Enum):
    """What a setting changes, for settings that change no weight of the model."""

    NOTHING = "no weight, and nothing that is measured"
    COURSE = "no weight, but what a run measures, how long it takes or when it gives up"


RARE = "a setting that only --help=all shows"

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def settings(group: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass that converts and checks its values when it is built.

    Strings become numbers and lists become tuples, so YAML and the command line need no types. A
    value that cannot be converted, or an unknown name, raises ``UserError``.

    Args:
        group: prefix of the fields on the command line, such as ``train.``.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def decorate(plain: type[T]) -> type[T]:
        kind: Any = dataclass(frozen=True, config=config)(plain)
        build = kind.__init__

        @wraps(build)
        def checked(self: T, *values: Any, **named: Any) -> None:
            try:
                build(self, *values, **named)
            except ValidationError as error:
                raise mistake_in(error, group, kind) from None

        kind.__init__ = checked
        return kind

    return decorate


def fields_of(kind: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and pydantic's description of every setting of a class and of its groups."""
    for name, field in kind.__pydantic_fields__.items():
        if is_dataclass(field.annotation):
            yield from fields_of(field.annotation, f"{group}{name}.")
        else:
            yield f"{group}{name}", field


def mistake_in(error: ValidationError, group: str = "", kind: type | None = None) -> UserError:
    """Turn pydantic's error into a one-line ``UserError`` about the first mistake in it.

    Args:
        group: prefix of the names of settings in the message.
        kind: the class that was being built; for an unknown name, one of its names is suggested.
    """
    first = error.errors(include_url=False)[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        return cause
    name = group + ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument" and kind is not None:
        known = [full for full, _ in fields_of(kind, group)]
        if name in known:
            group, _, key = name.rpartition(".")
            return UserError(f"a file gives {name} as {key} below {group}:; write it so")
        groups = {full.rpartition(".")[0] for full in known}
        known += sorted(groups - {group[:-1]})
        beside = [full for full in known if full.rpartition(".")[0] == name.rpartition(".")[0]]
        known_here = f"known: {', '.join(beside)}"
        return UserError(f"unknown setting {name}; {nearest(name, known, known_here)}")
    value, expected = first["input"], first["msg"].replace("Input should", "it should")
    if first["type"] == "dataclass_type":
        expected = "it should be a group of settings"
    shown = "empty" if value is None else f"a {type(value).__name__}"
    if isinstance(value, str | int | float):
        shown = repr(value)
    return UserError(f"{name} is {shown}; {expected}")
