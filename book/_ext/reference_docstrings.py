"""The package's docstrings as Sphinx's napoleon wants them.

They are in the style of Google, with two habits it would misread: an attribute is described in a
sentence, which may hold a colon, and ``Returns:`` may name several results.
"""

import itertools
import re

_ATTRIBUTES = ("attribute", "data", "property")
_kept: dict[str, list[str]] = {}


def before_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Set aside what napoleon would misread, and turn named results into a list.

    It takes the words before a colon for a type: in the docstring of an attribute, and in
    ``Returns:``, where ours stand for several results by name.
    """
    if what in _ATTRIBUTES:
        is_alias = lines[:1] != [] and lines[0].startswith("Alias for field number")
        _kept[name] = [] if is_alias else list(lines)
        return
    # "states_per_mask: k." explains a setting; "k." alone would start a list.
    lines[:] = [re.sub(r"^(    \w+: )(\w)\.$", r"\1\\\2.", line) for line in lines]
    if "Returns:" not in lines:
        return
    start = lines.index("Returns:") + 1
    block = list(itertools.takewhile(lambda line: not line or line[0] == " ", lines[start:]))
    heads = [re.fullmatch(r"    (\w+): (.*)", line) for line in block]
    if sum(map(bool, heads)) < 2:
        return
    items = [
        f"    * ``{head[1]}``: {head[2]}" if head else f"  {line}" if line else ""
        for head, line in zip(heads, block, strict=True)
    ]
    lines[start - 1 : start + len(block)] = [":returns:", *items]


def after_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    if what in _ATTRIBUTES:
        lines[:] = _kept.pop(name, lines)
