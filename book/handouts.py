"""Handouts for lecturers: student notebooks, figures, slides. The repository keeps none of them."""

import base64
import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import yaml
from nbformat import NotebookNode

Notebooks = dict[str, NotebookNode]
"""Notebooks by the name of their chapter."""
BOOK = Path(__file__).resolve().parent
AS_SVG = """\
import matplotlib_inline.backend_inline as inline
inline.set_matplotlib_formats("svg")
inline.set_matplotlib_formats = lambda *formats: None  # the style asks for pixels"""
"""Code for a first cell, after which all other cells draw their figures as SVG."""
_HEADING = re.compile(r"(?m)^(##?) (.*)")
_ROLE = re.compile(r"\{[\w:]+\}`([^`<]*?)\s*(?:<[^`]*>)?`")


def write_student_version(notebooks: Notebooks, directory: Path) -> None:
    """Write notebooks and the modules they import; solutions are emptied, other cells stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, notebook in notebooks.items():
        before = ""
        for cell in notebook.cells:
            if cell.metadata.get("mystnb", {}).get("code_prompt_show") == "Solution":
                cell.source = _stub(cell.source, before)
                cell.outputs, cell.execution_count = [], None
            before += cell.source
        nbformat.write(notebook, directory / f"{name}.ipynb")
    for module in (BOOK.parent / "chapters").glob("[!0-9]*.py"):
        shutil.copy(module, directory)


def _stub(solution: str, before: str) -> str:
    """Headers of what a solution defines, without those already in ``before``, the cells above."""
    heads = re.findall(r"(?m)^((?:class|def) \w+)(\(.*\))", solution)
    heads = [name + rest for name, rest in heads if not re.search(rf"{name}\b", before)]
    return "\n\n\n".join(["# Your solution", *(f"{head}: ..." for head in heads)])


def all_cells(notebooks: Notebooks) -> Iterator[NotebookNode]:
    """The cells of all notebooks, one notebook after the other."""
    return (cell for notebook in notebooks.values() for cell in notebook.cells)


def figures(cell: NotebookNode) -> Iterator[tuple[dict, str, str]]:
    """Name and caption, MIME type and content of each image that a figure cell has stored."""
    figure = cell.metadata.get("mystnb", {}).get("figure")
    for output in cell.get("outputs", []) if figure else ():
        for kind, content in output.get("data", {}).items():
            if kind.startswith("image/"):
                yield figure, kind, content


def write_figures(notebooks: Notebooks, directory: Path) -> None:
    """Write the figures of notebooks run after ``AS_SVG``, each with its licence in a comment."""
    directory.mkdir(parents=True, exist_ok=True)
    address = yaml.safe_load((BOOK / "_config.yml").read_text())["repository"]["url"]
    for cell in all_cells(notebooks):
        for figure, _, content in figures(cell):
            start, tag, rest = content.partition("<svg")
            line = f"<!-- {figure['name']} of the ExLM book, {address}, MIT licence -->\n"
            (directory / f"{figure['name']}.svg").write_text(start + line + tag + rest)


def write_slides(notebooks: Notebooks, path: Path) -> None:
    """Write a page of slides: each chapter's title, and each figure under its section's heading."""
    slides, title = [], ""
    for cell in all_cells(notebooks):
        if cell.cell_type == "markdown" and (heading := _HEADING.search(cell.source)):
            title = _plain(heading[2])
            if heading[1] == "#":
                slides.append(f"<h1>{title}</h1>")
        for figure, kind, content in figures(cell):
            caption = _plain(figure["caption"])
            if kind != "image/png":
                content = base64.b64encode(content.encode()).decode()
            picture = f'<img alt="" src="data:{kind};base64,{"".join(content.split())}">'
            slides.append(f"<h2>{title}</h2>\n{picture}\n<p>{caption}</p>")
    sections = "\n".join(f"<section>\n{slide}\n</section>" for slide in slides)
    path.write_text((BOOK / "slides.html").read_text().replace("SECTIONS", sections))


def _plain(text: str) -> str:
    """MyST as plain text for HTML: roles become what they name; ticks, dollars and stars go."""
    return html.escape(re.sub(r"[`$*]", "", _ROLE.sub(r"\1", text)))


WAYS = {"student": write_student_version, "figures": write_figures, "slides": write_slides}
"""Functions that write the handouts, by their option of ``chapters.py``."""
