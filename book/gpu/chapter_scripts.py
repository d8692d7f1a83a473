"""The chapters as plain scripts on a GPU, and how what they print differs from the book's."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from evidence_file import Result
from measurements import Item, Setting, TimeIsUp

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
MOST_SECONDS = 480.0
"""Below the minutes of a piece, so that a chapter that is begun first gets all of it."""
QUICK_CHAPTERS = ("05",)
"""Numbers of those that show in seconds that everything runs."""
MOST_DIFFERENCES = 40
"""Pairs of lines that are kept."""
CLOSE = 0.02
"""Numbers that differ by less, as a share, count as the same."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_MISSING = ("ModuleNotFoundError", "ImportError", "is missing; pip install", "pip install '")


def chapter_scripts(setting: Setting) -> Iterator[Item]:
    """One item for each chapter, with ``EXLM_SCALE=gpu`` on a GPU."""
    for notebook in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb")):
        source = notebook.with_suffix(".py")
        if setting.device.type != "cuda" and not setting.is_quick:
            yield Item(source.stem, partial(dict, skipped="the device is no GPU"))
        elif not setting.is_quick or source.stem[:2] in QUICK_CHAPTERS:
            yield Item(source.stem, partial(run_chapter, source, setting))


def run_chapter(source: Path, setting: Setting) -> Result:
    """Run a chapter's code and compare what it prints with the notebook's.

    Args:
        source: the chapter, a script.
        setting: device and time.

    Returns:
        ``passed`` if all of its assertions held, with the differences; or ``skipped``, where a
        library is missing or the time did not suffice.

    Raises:
        TimeIsUp: less time is left than a chapter may take, and it was not enough.
    """
    limit = min(MOST_SECONDS, setting.seconds_left())
    scale = "gpu" if setting.device.type == "cuda" else "cpu"
    environment = os.environ | {
        "EXLM_SCALE": scale,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": f"{CHAPTERS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(
        [sys.executable, source.name], cwd=source.parent, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=max(limit, 1.0))
    except subprocess.TimeoutExpired:
        if limit < MOST_SECONDS:
            raise TimeIsUp(f"{source.stem} was not done after {limit:.0f} s") from None
        return {"skipped": f"not done after {limit:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
    last = (err.strip().splitlines() or [""])[-1]
    if process.returncode and any(word in last for word in _MISSING):
        return {"skipped": last[:300]}
    found = compared(printed(source.with_suffix(".ipynb")), out.splitlines())
    result = {"passed": process.returncode == 0, "scale": scale, **found}
    if process.returncode:
        result["failures"] = [last[:300], *err.strip().splitlines()[-20:]]
        result["told"] = f"FAILED {last[:200]}"
    return result


def printed(notebook: Path) -> list[str]:
    """The lines that a chapter's cells printed when it was last executed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    streams = [output for output in outputs if output.get("name") == "stdout"]
    return "".join("".join(output["text"]) for output in streams).splitlines()


def compared(before: list[str], now: list[str]) -> Result:
    """Two lists of lines, compared loosely: first by their words, then by their numbers.

    Args:
        before: as the book has them.
        now: as they were printed here.

    Returns:
        How many lines are the ``same``, have ``other_numbers`` or ``other_words`` (or stand on
        one side alone), the first of these as pairs, and ``told``.
    """
    words = [
        [_NUMBER.sub("#", " ".join(line.split())) for line in lines] for lines in (before, now)
    ]
    same, numbers, others, pairs = 0, 0, 0, []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        if kind != "equal":
            others += max(b - a, d - c)
            pairs.append(["\n".join(before[a:b])[:500], "\n".join(now[c:d])[:500]])
            continue
        for old, new in zip(before[a:b], now[c:d], strict=True):
            if _is_close(old, new):
                same += 1
            else:
                numbers += 1
                pairs.append([old[:200], new[:200]])
    return {
        "same": same,
        "other_numbers": numbers,
        "other_words": others,
        "differences": pairs[:MOST_DIFFERENCES],
        "told": f"{same} lines as in the book, {numbers} with other numbers, {others} others",
    }


def _is_close(old: str, new: str) -> bool:
    """Whether all numbers of two lines of the same words are about the same."""
    values = [
        [float(text.replace(",", "")) for text in _NUMBER.findall(line)] for line in (old, new)
    ]
    return all(
        math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-9) for a, b in zip(*values, strict=True)
    )
