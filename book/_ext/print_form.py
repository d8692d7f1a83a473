"""Sphinx extension: what the book on paper needs and the pages do not.

Long tables go over several pages, and chapters have the numbers that the text gives them: what
stands before and after them has none.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.addnodes import start_of_file

MOST_ROWS = 8
"""A table with more is allowed to break; a page may be too short for it."""
NARROWEST, WIDEST = 8, 40
"""Width of a column, in letters of its longest cell."""
UNNUMBERED = r"\setcounter{secnumdepth}{-1}\setcounter{chapter}{0}"
NUMBERED = r"\setcounter{secnumdepth}{2}"


def break_long_tables(document) -> None:
    """Let long tables go over several pages; each gets widths, for such a one wraps no words."""
    for table in document.findall(nodes.table):
        rows = list(table.findall(nodes.row))
        if len(rows) <= MOST_ROWS:
            continue
        table["classes"].append("longtable")
        if "colwidths-given" not in table["classes"]:
            table["classes"].append("colwidths-given")
            columns = zip(*rows, strict=True)
            for column, cells in zip(table.findall(nodes.colspec), columns, strict=True):
                longest = max(len(cell.astext()) for cell in cells)
                column["colwidth"] = min(max(longest, NARROWEST), WIDEST)


def number_chapters_alone(document) -> None:
    """Turn the numbers of chapters on before the first, and off behind the last."""
    files = list(document.findall(start_of_file))
    chapters = [n for n, file in enumerate(files) if file["docname"].startswith("chapters/")]
    document.insert(0, nodes.raw("", UNNUMBERED, format="latex"))
    files[chapters[0]].insert(0, nodes.raw("", NUMBERED, format="latex"))
    for after in files[chapters[-1] + 1 :][:1]:
        after.insert(0, nodes.raw("", UNNUMBERED, format="latex"))


def prepare(app, document, docname) -> None:
    if app.builder.format == "latex":
        break_long_tables(document)
        number_chapters_alone(document)


def setup(app):
    app.connect("doctree-resolved", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
