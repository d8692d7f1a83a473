"""Sphinx extension that labels bibliography entries by authors and year, as the text cites them.

``bibtex_default_style: author_year`` is the ``plain`` style with such labels in place of numbers.
"""

from __future__ import annotations

from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle


def label(entry) -> str:
    """The label of an entry: its one or two authors, or the first and "et al.", then the year."""
    names = [
        " ".join(str(name) for name in (*person.rich_prelast_names, *person.rich_last_names))
        for person in entry.persons["author"]
    ]
    who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{who}, {entry.fields['year']}"


class AuthorYearLabels(BaseLabelStyle):
    """Labels such as "Zheng et al., 2025"."""

    def format_labels(self, sorted_entries):
        return [label(entry) for entry in sorted_entries]


class AuthorYearStyle(Style):
    """The ``plain`` style with author-year labels; order and format of the entries are the same."""

    default_label_style = AuthorYearLabels


def setup(app):
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
