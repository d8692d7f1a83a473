"""Files of settings in YAML, every value read as the type of its setting says.

YAML guesses types from spelling: to its readers ``010`` is eight, ``1:30`` ninety, ``no`` false and
``2024-01-01`` no text; of two equal keys the last one wins, and a few lines of anchors unfold to
gigabytes. Here a value is text until its setting says what it must be, so that a file means what it
seems to mean, and what has no plain meaning is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from exlm_mini.config import RunConfig, UserError, nearest, without_sharding

RUN = get_type_hints(RunConfig)
OLD = {"train.sharding": str}
"""Settings that are no more, in files of runs that had them."""
MAX_CHARACTERS = 100_000
NULLS = frozenset({"", "~", "null", "Null", "NULL"})
"""What YAML writes for none."""

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False}
_BOOLEANS["FALSE"] = False
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DEPTH = 3  # groups, settings, lists


class _Word(NamedTuple):
    """A scalar as it stands in the file."""

    text: str
    is_plain: bool
    """Without quotes."""


def read_settings(text: str, hints: Mapping[str, Any] = RUN) -> dict[str, Any]:
    """The settings a file names, each of its type.

    Args:
        text: YAML: groups of settings, ``model:`` with ``width: 64`` indented below it.
        hints: names and types of the settings; a dataclass is a group of them.

    Returns:
        Nested dicts as for ``run_config_from_dict``, lists as tuples; nothing that is not in the
        file. The values are of the right type, not yet of the right size.

    Raises:
        UserError: not YAML, an unknown setting, one given twice, a value of another type, or a
            part of YAML that settings do not need: anchors, tags, several documents.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"it has {len(text):,} characters; settings take a few thousand")
    tree = _tree(text)
    if not isinstance(tree, dict):
        raise UserError("it holds no settings; see --print_config for the form")
    return without_sharding(_group(tree, hints, ""))


def _tree(text: str) -> Any:
    """Dicts, lists and words; None for an empty file."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        loader.get_event()
        if loader.check_event(yaml.StreamEndEvent):
            return None
        loader.get_event()
        tree = _branch(loader, _DEPTH)
        loader.get_event()
        if not loader.check_event(yaml.StreamEndEvent):
            raise UserError("it holds several documents; keep one")
        return tree
    except yaml.YAMLError as error:  # the line is in the later ones of its message
        raise UserError(_shown(" ".join(str(error).split()), 200)) from None


def _branch(loader: Any, depth: int) -> Any:
    """The node that begins with the next event."""
    import yaml

    event = loader.get_event()
    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise UserError(f"line {line} has an anchor or alias; write the value out")
    if event.tag not in (None, "!"):
        raise UserError(f"line {line} has the tag {_shown(event.tag)}; leave it out")
    if isinstance(event, yaml.ScalarEvent):
        return _Word(event.value, event.style is None)
    if depth == 0:
        raise UserError(f"line {line} is nested too deep for a setting")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not loader.check_event(yaml.SequenceEndEvent):
            items.append(_branch(loader, depth - 1))
        loader.get_event()
        return items
    pairs: dict[str, Any] = {}
    while not loader.check_event(yaml.MappingEndEvent):
        line = loader.peek_event().start_mark.line + 1
        key = _branch(loader, depth - 1)
        if not isinstance(key, _Word):
            raise UserError(f"line {line} needs the name of a setting before its colon")
        if key.text in pairs:
            raise UserError(f"line {line} gives {_shown(key.text)} a second time; keep one")
        pairs[key.text] = _branch(loader, depth - 1)
    loader.get_event()
    return pairs


def _group(tree: Any, hints: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The settings of one group."""
    if not isinstance(tree, dict):
        raise UserError(f"{group[:-1]} must hold settings, not {_told(tree)}")
    found = {}
    for key, item in tree.items():
        name = f"{group}{key}"
        if key not in hints and name not in OLD:
            known = [f"{group}{other}" for other in hints]
            raise UserError(f"unknown setting {_shown(name)}; {nearest(name, known)}")
        hint = hints.get(key, OLD.get(name))
        if is_dataclass(hint):
            found[key] = _group(item, get_type_hints(hint), f"{name}.")
        else:
            found[key] = _value(item, hint, name)
    return found


def _value(item: Any, hint: Any, name: str) -> Any:
    """One value, of the type of its setting."""
    options = get_args(hint)
    if NoneType in options:
        if isinstance(item, _Word) and item.is_plain and item.text in NULLS:
            return None
        (hint,) = (option for option in options if option is not NoneType)
    if get_origin(hint) is tuple:
        return _items(item, get_args(hint), name)
    is_choice = get_origin(hint) is Literal
    kind = str if is_choice else hint
    found = _READERS[kind](item) if isinstance(item, _Word) else None
    if is_choice and found not in options:
        raise UserError(f"{name} is {_told(item)}; {nearest(found or '', options)}")
    if found is None:
        raise UserError(f"{name} is {_told(item)}; it must be of type {kind.__name__}")
    return found


def _items(item: Any, hints: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """A list, of one type and any length or of a type for each place."""
    if not isinstance(item, list):
        raise UserError(f"{name} is {_told(item)}; it must be a list, such as [a, b]")
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(item)
    if len(item) != len(hints):
        raise UserError(f"{name} has {len(item)} values; it must have {len(hints)}")
    return tuple(_value(part, hint, name) for part, hint in zip(item, hints, strict=True))


def _text(word: _Word) -> str | None:
    # Unquoted nothing and null are none in YAML, which is not a text.
    return None if word.is_plain and word.text in NULLS else word.text


def _boolean(word: _Word) -> bool | None:
    return _BOOLEANS.get(word.text) if word.is_plain else None


def _integer(word: _Word) -> int | None:
    is_number = word.is_plain and _INTEGER.fullmatch(word.text)
    number = int(word.text) if is_number else 2**63
    return number if abs(number) < 2**63 else None


def _number(word: _Word) -> float | None:
    is_number = word.is_plain and _NUMBER.fullmatch(word.text)
    number = float(word.text) if is_number else math.inf
    return number if math.isfinite(number) else None


_READERS = {str: _text, bool: _boolean, int: _integer, float: _number}


def _told(item: Any) -> str:
    """A value in a message."""
    if isinstance(item, _Word):
        return f"'{_shown(item.text)}'" if item.text else "empty"
    return "a list" if isinstance(item, list) else "a group of settings"


def _shown(text: str, length: int = 60) -> str:
    """Text of a file on one line, whatever is in it."""
    short = text if len(text) <= length else f"{text[:length]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
