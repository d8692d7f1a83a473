"""Turn users' entries, cells of a table or items of a list, into texts that a model can read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.molecules import Cleaning, clean
from exlm_mini.data.text import document

MOST_UNKNOWN = 0.5
"""Largest share of [UNK] among the tokens of a text that still counts as readable."""
NUM_TOLD = 10
"""Number of unreadable entries reported one by one; any others are only counted."""


def listed(entries: Any) -> list[Any]:
    """The entries as a list; a single text needs no list."""
    is_list = isinstance(entries, Iterable) and not isinstance(entries, str)
    return list(entries) if is_list else [entries]


def readable(
    values: Iterable[Any], kind: str, cleaning: Cleaning | None = None
) -> tuple[list[str], dict[int, str]]:
    """Read the texts or molecules in some entries.

    Args:
        values: the entries; None and nan count as missing.
        kind: smiles, or anything else for text.
        cleaning: how to clean molecules. If given, a SMILES that RDKit rejects is unreadable.

    Returns:
        texts: one for each entry; empty where the entry is unreadable.
        reasons: why an entry is unreadable, by its index, for each that is.
    """
    texts, reasons = [], {}
    for place, value in enumerate(values):
        text = ""
        try:
            if isinstance(value, str):
                text = document(value, kind, "it")
            if not text:
                raise UserError("it is empty" if isinstance(value, str) else "it is not text")
            if kind == "smiles" and cleaning is not None:
                molecule = clean(text, cleaning)
                if molecule is None:
                    raise UserError(f"RDKit cannot read {text!r} as a molecule")
                text = molecule.spelling
        except UserError as error:
            # Drops the remedy after the last semicolon; the quoted entry may hold semicolons, too.
            text, reasons[place] = "", re.sub(r"; [\w ]+$", "", str(error))
        texts.append(text)
    return texts, reasons


def check_batch_size(batch_size: int) -> None:
    """Refuse a size with which no text would be read."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1")


def tell(
    reasons: Mapping[int, str],
    where: str,
    end: str,
    report: Callable[[str], None],
    first: int = 0,
) -> None:
    """Report each unreadable entry, up to ``NUM_TOLD``, and how many more there are.

    Args:
        reasons: why entries are unreadable, by index; see ``readable``.
        where: how a line names an entry by its number, such as "row {}".
        end: what happens to these entries; it ends each line.
        first: number of the first entry.
    """
    for place, reason in sorted(reasons.items())[:NUM_TOLD]:
        report(f"{where.format(first + place)}: {reason}; {end}")
    if (more := len(reasons) - NUM_TOLD) > 0:
        report(f"{more:,} more are unreadable")
