"""Hooks for Sphinx that bring the package's docstrings into the form that napoleon reads.

The docstrings are in Google style, with two habits that napoleon would misread: an attribute is
described in a sentence, which may hold a colon, and ``Returns:`` may name several results or hold a
colon. The hooks also remove what a reader cannot use from signatures and values.
"""

import itertools
import re
from enum import Enum

from docutils import nodes
from sphinx import addnodes

_ATTRIBUTES = ("attribute", "data", "property")
_LONGEST_VALUE = 80
_OBJECT = re.compile(r"<(?:class '(?:\w+\.)*(\w+)'|(?:built-in )?function (?:\w+\.)*(\w+))>")
"""The repr of a class or function, as Python shows it in signatures."""
_NAMELESS = re.compile(r"<factory>|<function (?:\w+\.)*<lambda>>")
_kept: dict[str, list[str]] = {}


def before_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Set aside what napoleon would misread, and turn several named results into a list.

    Napoleon takes the words before a colon for a type. In our docstrings of attributes they are
    part of a sentence, and in ``Returns:`` they are the names of results.
    """
    lines[:] = _options_as_code("\n".join(lines)).split("\n")
    if what in _ATTRIBUTES:
        is_alias = lines[0].startswith("Alias for field number")
        _kept[name] = [] if is_alias else list(lines)
        return
    # In "states_per_mask: k." the description "k." would be taken for the start of a list.
    lines[:] = [re.sub(r"^(    \w+: )(\w)\.$", r"\1\\\2.", line) for line in lines]
    if "Returns:" not in lines:
        return
    start = lines.index("Returns:") + 1
    block = list(itertools.takewhile(lambda line: not line or line[0] == " ", lines[start:]))
    heads = [re.fullmatch(r"    (\w+): (.*)", line) for line in block]
    if not any(heads[:1]):  # the colon belongs to a sentence and names no result
        heads = [None] * len(block)
    mark = "* " if sum(map(bool, heads)) > 1 else ""
    indent = " " * len(mark)
    items = [
        f"    {mark}``{head[1]}``: {head[2]}" if head else f"    {indent}{line.strip()}"
        for head, line in zip(heads, block, strict=True)
    ]
    lines[start - 1 : start + len(block)] = [":returns:", *items]


def _options_as_code(text: str) -> str:
    """Mark options of commands as literal; Sphinx would turn their two hyphens into a dash."""
    passed_over = r"^ [^\n]*|``.*?``"  # indented lines, and what is literal already
    option = r"(?<![\w-])(--[a-z][\w.-]*\w)"
    return re.sub(
        f"{passed_over}|{option}",
        lambda found: f"``{found[1]}``" if found[1] else found[0],
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def after_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    if what in _ATTRIBUTES:
        lines[:] = [re.sub(r"^(\w)\.$", r"\\\1.", line) for line in _kept.pop(name, lines)]


def plain_signature(app, what, name, obj, options, signature, returned):
    """Show types and functions in a signature by name, or as an ellipsis if they have none."""
    if what == "class" and signature == "(*args, **kwargs)":
        return "()", returned  # inherited from PyTorch's base class, which takes any arguments
    if what == "class" and issubclass(obj, Enum):
        return "", returned
    if signature:
        signature = _OBJECT.sub(lambda found: found[1] or found[2], signature)
        signature = _NAMELESS.sub("...", signature).replace("lambda :", "lambda:")
    return signature, returned


def drop_unreadable_values(app, doctree) -> None:
    """Drop values of constants that are long or show nameless objects, and aliases of pydantic."""
    for shown in list(doctree.findall(addnodes.desc_annotation)):
        value = shown.astext().strip()
        is_unreadable = len(value) > _LONGEST_VALUE or re.search(r"<\w+ ", value)
        if value.startswith("=") and is_unreadable:
            shown.parent.remove(shown)
    for alias in list(doctree.findall(nodes.paragraph)):
        if alias.astext().startswith("alias of Annotated["):
            alias.parent.remove(alias)
