"""Users' entries, cells of a table or items of a list, as texts that a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.molecules import Cleaning, clean
from exlm_mini.data.text import document

MOST_UNKNOWN = 0.5
"""Largest share of [UNK] among the tokens of a text that counts as read."""
NUM_TOLD = 10
"""Unreadable entries named one by one; the others are only counted."""


def listed(entries: Any) -> list[Any]:
    """The entries of a list; one text may come without a list."""
    is_list = isinstance(entries, Iterable) and not isinstance(entries, str)
    return list(entries) if is_list else [entries]


def readable(
    values: Iterable[Any], kind: str, cleaning: Cleaning | None = None
) -> tuple[list[str], dict[int, str]]:
    """The texts or molecules in some entries.

    Args:
        values: entries; None and nan are missing.
        kind: smiles, or anything else for text.
        cleaning: of molecules; with one, what RDKit does not read is unreadable.

    Returns:
        texts: one for each entry; empty where it is unreadable.
        reasons: by the place of an unreadable entry, why.
    """
    texts, reasons = [], {}
    for place, value in enumerate(values):
        text = ""
        try:
            if isinstance(value, str):
                text = document(value, kind, "it")
            if not text:
                raise UserError("it is empty" if isinstance(value, str) else "it is no text")
            if kind == "smiles" and cleaning is not None:
                molecule = clean(text, cleaning)
                if molecule is None:
                    raise UserError(f"RDKit reads no molecule in {text!r}")
                text = molecule.spelling
        except UserError as error:
            # Without its remedy; the entry, which it shows in quotes, may hold a semicolon.
            text, reasons[place] = "", re.sub(r"; [\w ]+$", "", str(error))
        texts.append(text)
    return texts, reasons


def tell(
    reasons: Mapping[int, str],
    where: str,
    end: str,
    report: Callable[[str], None],
    first: int = 0,
) -> None:
    """A line for each unreadable entry, up to ``NUM_TOLD``, and one for the others.

    Args:
        reasons: by place, see ``readable``.
        where: what a place is counted in, such as "row {}".
        end: what becomes of these entries.
        report: receives the lines.
        first: number of the first place.
    """
    for place, reason in sorted(reasons.items())[:NUM_TOLD]:
        report(f"{where.format(first + place)}: {reason}; {end}")
    if (more := len(reasons) - NUM_TOLD) > 0:
        report(f"{more:,} more are unreadable")
