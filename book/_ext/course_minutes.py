"""Minutes to read, to run and to solve each chapter, counted in its notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
WORDS_A_MINUTE = 170
MINUTES_A_LINE = 7 / 60
"""Of code that a page shows."""
MINUTES_AN_EXERCISE = 7
SOLUTION = {"code_prompt_show": "Solution"}
"""What marks the cell of one."""
FOLDED = ("hide", "remove")
_DROPDOWN = re.compile(r"(?s)(:{3,}|`{3,})\{\w+\}[^\n]*\n:class: dropdown.*?\n\1")
_RUN = re.compile(r"\*\*It takes\*\* .*?,? and (.*?) of (?:one|a) CPU")


def _code(source: str) -> int:
    """Lines of code that are neither blank nor comments."""
    return len(re.findall(r"(?m)^\s*[^\s#]", source))


def minutes(notebook: Path) -> tuple[int, str, int]:
    """To read what is not folded, to run on one CPU core in the chapter's own words, to solve."""
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
    """A row of cells for each chapter."""
    for notebook in sorted(CHAPTERS.glob("[0-9]*.ipynb")):
        to_read, run, to_solve = minutes(notebook)
        yield [f"{{doc}}`/chapters/{notebook.stem}`", str(to_read), run, str(to_solve)]
