"""Sphinx extension: the bibliography calls a work as the text does, by authors and year.

``bibtex_default_style: author_year`` is the plain style with such labels in place of numbers.
"""

from __future__ import annotations

from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle


def label(entry) -> str:
    """The label of a work: one or two names, or the first "et al.", and the year."""
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
    """Sorted and written as in ``plain``."""

    default_label_style = AuthorYearLabels


def setup(app):
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
