"""What a lecturer hands out agrees with the chapters: notebooks, slides, figures, minutes."""

import ast
import base64
import json
import re

import course_minutes
import nbformat
import pytest

import chapters


def read(path):
    return nbformat.read(path, as_version=4).cells


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    assert chapters.main(["--student", str(folder)]) == 0
    return folder


def names(source: str, kind: type) -> set[str]:
    """Names that a cell binds (``ast.Store``) or reads (``ast.Load``)."""
    tree = list(ast.walk(ast.parse(source)))
    found = {n.id for n in tree if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}
    if kind is ast.Store:
        found |= {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        found |= {a.asname or a.name for n in tree if hasattr(n, "names") for a in n.names
                  if isinstance(a, ast.alias)}  # fmt: skip
    return found


@pytest.mark.parametrize("source", chapters.sources(), ids=lambda path: path.stem)
def test_a_student_gets_everything_but_the_solutions(source, student):
    """Nor does a later cell need a name that only a solution binds."""
    ours, theirs = read(source.with_suffix(".ipynb")), read(student / f"{source.stem}.ipynb")
    bound, of_solutions, num = set(), set(), 0
    for our, their in zip(ours, theirs, strict=True):
        if our.source == their.source:
            assert our == their
            if our.cell_type == "code":
                bound |= names(our.source, ast.Store)
                assert not names(our.source, ast.Load) & (of_solutions - bound)
            continue
        assert our.metadata["mystnb"] == course_minutes.SOLUTION == their.metadata["mystnb"]
        assert their.source.startswith("# Your solution") and not their.outputs
        of_solutions |= names(our.source, ast.Store)
        assert not re.search(r"\n    ", their.source)  # function heads without their bodies
        bound |= names(their.source, ast.Store)
        num += 1
    assert num >= 1


def test_slides_show_every_figure_of_the_chapters(tmp_path):
    page = tmp_path / "slides.html"
    assert chapters.main(["--slides", str(page), "05", "06"]) == 0
    text = page.read_text()
    pictures = []
    for source in chapters.sources("05", "06"):
        for cell in read(source.with_suffix(".ipynb")):
            for output in cell.get("outputs", []) if "figure" in str(cell.metadata) else ():
                pictures.append("".join(output.data["image/png"].split()))
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', text)
    assert found == pictures and all(map(base64.b64decode, found))
    assert text.count("<h1>") == 2 and text.count("<section>") == 2 + len(pictures)
    assert not re.search(r"https?://|\{ref\}|SECTIONS", text)


def test_figures_of_a_run_are_svg_with_a_licence(tmp_path, monkeypatch):
    source = tmp_path / "01_page.py"
    source.write_text("")
    figure = {"mystnb": {"figure": {"name": "fig-line", "caption": "A line."}}}
    code = "import matplotlib.pyplot as plt\n_ = plt.plot([0, 1])"
    cells = [nbformat.v4.new_code_cell(code, metadata=figure)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source.with_suffix(".ipynb"))
    monkeypatch.setattr(chapters, "CHAPTERS", tmp_path)
    assert chapters.main(["--figures", str(tmp_path / "figures")]) == 0
    (path,) = (tmp_path / "figures").iterdir()
    assert path.name == "fig-line.svg"
    assert re.search(r"<!-- fig-line of .*, MIT licence -->\n<svg", path.read_text())


def test_minutes_are_those_of_what_a_page_shows(tmp_path):
    text = "**It takes** an hour, and a\nminute of one CPU core. " + "word " * 329
    aside = "\n```{admonition} Aside\n:class: dropdown\n" + "word " * 999 + "\n```"
    line = "# why\n\nx = 1\n"
    cells = [
        nbformat.v4.new_markdown_cell(text + aside),
        nbformat.v4.new_code_cell(60 * line),
        nbformat.v4.new_code_cell(900 * line, metadata={"tags": ["hide-cell", "check"]}),
        nbformat.v4.new_code_cell(line, metadata={"mystnb": course_minutes.SOLUTION}),
    ]
    path = tmp_path / "01.ipynb"
    path.write_text(json.dumps(nbformat.v4.new_notebook(cells=cells)))
    assert course_minutes.minutes(path) == (2 + 7, "a minute", 7)
    rows = list(course_minutes.rows())
    assert len(rows) == len(chapters.sources())
    assert all(int(to_read) and int(to_solve) for _, to_read, _, to_solve in rows)


def test_the_readme_lists_every_chapter_with_its_minutes():
    text = (chapters.CHAPTERS.parent / "README.md").read_text()
    listed = re.findall(r"\]\(chapters/(\S+)\.ipynb\) \| .* \| (\d+) \|", text)
    notebooks = sorted(chapters.CHAPTERS.glob("[0-9]*.ipynb"))
    assert [name for name, _ in listed] == [path.stem for path in notebooks]
    for path, (_, told) in zip(notebooks, listed, strict=True):
        to_read = course_minutes.minutes(path)[0]
        assert abs(to_read - int(told)) <= 5 and to_read <= 35, path.name
