"""The package's docstrings in the form that Sphinx's napoleon reads.

They are in the style of Google, with two habits it would misread: an attribute is described in a
sentence, which may hold a colon, and ``Returns:`` may name results or hold a colon. Signatures and
values are shown as far as a reader can use them.
"""

import itertools
import re
from enum import Enum

from docutils import nodes
from sphinx import addnodes

_ATTRIBUTES = ("attribute", "data", "property")
_LONGEST_VALUE = 80
_OBJECT = re.compile(r"<(?:class '(?:\w+\.)*(\w+)'|(?:built-in )?function (?:\w+\.)*(\w+))>")
"""A type or a function as Python writes it where it has no name to show."""
_NAMELESS = re.compile(r"<factory>|<function (?:\w+\.)*<lambda>>")
_kept: dict[str, list[str]] = {}


def before_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Set aside what napoleon would misread, and turn several named results into a list.

    It takes the words before a colon for a type: in the docstring of an attribute, and in
    ``Returns:``, where ours stand for several results by name.
    """
    lines[:] = _options_as_code("\n".join(lines)).split("\n")
    if what in _ATTRIBUTES:
        is_alias = lines[0].startswith("Alias for field number")
        _kept[name] = [] if is_alias else list(lines)
        return
    # "states_per_mask: k." explains a setting; "k." alone would start a list.
    lines[:] = [re.sub(r"^(    \w+: )(\w)\.$", r"\1\\\2.", line) for line in lines]
    if "Returns:" not in lines:
        return
    start = lines.index("Returns:") + 1
    block = list(itertools.takewhile(lambda line: not line or line[0] == " ", lines[start:]))
    heads = [re.fullmatch(r"    (\w+): (.*)", line) for line in block]
    if not any(heads[:1]):  # a colon within a sentence names no result
        heads = [None] * len(block)
    mark = "* " if sum(map(bool, heads)) > 1 else ""
    indent = " " * len(mark)
    items = [
        f"    {mark}``{head[1]}``: {head[2]}" if head else f"    {indent}{line.strip()}"
        for head, line in zip(heads, block, strict=True)
    ]
    lines[start - 1 : start + len(block)] = [":returns:", *items]


def _options_as_code(text: str) -> str:
    """Mark options of commands as literal; of their two hyphens Sphinx would make a dash."""
    passed_over = r"^ [^\n]*|``.*?``"  # what is indented, and literal already
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
    """The signature with names of types and functions, and an ellipsis where there is no name."""
    if what == "class" and signature == "(*args, **kwargs)":
        return "()", returned  # the base class of PyTorch, whose modules take what they like
    if what == "class" and issubclass(obj, Enum):
        return "", returned
    if signature:
        signature = _OBJECT.sub(lambda found: found[1] or found[2], signature)
        signature = _NAMELESS.sub("...", signature).replace("lambda :", "lambda:")
    return signature, returned


def drop_unreadable_values(app, doctree) -> None:
    """Leave out long values of constants, those with nameless objects, and pydantic's types."""
    for shown in list(doctree.findall(addnodes.desc_annotation)):
        value = shown.astext().strip()
        is_unreadable = len(value) > _LONGEST_VALUE or re.search(r"<\w+ ", value)
        if value.startswith("=") and is_unreadable:
            shown.parent.remove(shown)
    for alias in list(doctree.findall(nodes.paragraph)):
        if alias.astext().startswith("alias of Annotated["):
            alias.parent.remove(alias)
