"""Real English without a download: Python's reference manual."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator


def embedded_english() -> Iterator[str]:
    """Python's reference manual, which comes with every CPython: about 50,000 words.

    A document is a section: its heading, then one paragraph per line; code and grammar rules
    keep their line breaks. Sections that appear under two topics are used once. The text differs a
    little between Python versions.
    """
    from pydoc_data.topics import topics

    yield from dict.fromkeys(s for name in sorted(topics) for s in _sections(topics[name]))


def _sections(topic: str) -> Iterator[str]:
    """Cut a topic of the manual at its underlined headings."""
    section: list[str] = []
    for paragraph in topic.split("\n\n"):
        lines = [line for line in textwrap.dedent(paragraph).split("\n") if line.strip()]
        is_ruling = [set(line) <= set("*=-~^") for line in lines]
        if is_ruling == [False, True] and section:  # a heading
            yield "\n".join(section)
            section = []
        lines = [line for line, drop in zip(lines, is_ruling, strict=True) if not drop]
        if lines:
            section.append(_unwrapped(lines))
    yield "\n".join(section)


def _unwrapped(lines: list[str]) -> str:
    """Join lines of prose, but not with a term above them; keep code, whose lines are short."""
    is_below_term = len(lines) > 2 and all(line.startswith("   ") for line in lines[1:])
    term, body = (lines[:1], lines[1:]) if is_below_term else ([], lines)
    if all(len(line) >= 40 for line in body[:-1]):
        body = [" ".join(map(str.strip, body))]
    return "\n".join([*term, *body]).rstrip()
