"""Estimates from each chapter's notebook how long it takes to read, to run and to solve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
WORDS_A_MINUTE = 170
MINUTES_A_LINE = 7 / 60
"""Reading time of a line of code that the page shows."""
MINUTES_AN_EXERCISE = 7
SOLUTION = {"code_prompt_show": "Solution"}
"""Metadata that marks a cell as the solution of an exercise."""
FOLDED = ("hide", "remove")
_DROPDOWN = re.compile(r"(?s)(:{3,}|`{3,})\{\w+\}[^\n]*\n:class: dropdown.*?\n\1")
_RUN = re.compile(r"\*\*It takes\*\* .*?,? and (.*?) of (?:one|a) CPU")


def _code(source: str) -> int:
    """Lines of code that are neither blank nor comments."""
    return len(re.findall(r"(?m)^\s*[^\s#]", source))


def minutes(notebook: Path) -> tuple[int, str, int]:
    """The time a chapter takes: to read what is not folded, to run it, to solve its exercises.

    The first and the last are in minutes; the second is the chapter's own statement of its time on
    one CPU core, empty if it makes none.
    """
    words, lines, to_solve, text = 0, 0, 0, ""
    for cell in json.loads(notebook.read_text())["cells"]:
        source, metadata = "".join(cell["source"]), cell["metadata"]
        if cell["cell_type"] == "markdown":
            text += _DROPDOWN.sub("", source) + "\n\n"
        elif metadata.get("mystnb") == SOLUTION:
            to_solve += MINUTES_AN_EXERCISE
        elif not any(tag.startswith(FOLDED) for tag in metadata.get("tags", [])):
            lines += _code(source)
    words = len(text.split())
    run = _RUN.search(" ".join(text.split()))
    to_read = round(words / WORDS_A_MINUTE + lines * MINUTES_A_LINE)
    return to_read, run[1] if run else "", to_solve


def rows() -> Iterator[list[str]]:
    """A table row for each chapter: a link to it and its three times."""
    for notebook in sorted(CHAPTERS.glob("[0-9]*.ipynb")):
        to_read, run, to_solve = minutes(notebook)
        yield [f"{{doc}}`/chapters/{notebook.stem}`", str(to_read), run, str(to_solve)]
