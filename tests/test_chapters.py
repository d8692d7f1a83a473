"""A chapter is two files with the same cells, and nothing in it passes nbval unseen."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "book" / "chapters.py"


def load_script():
    """book/chapters.py as a module; it is not part of a package."""
    spec = importlib.util.spec_from_file_location("book_chapters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chapters = load_script()
SOURCES = chapters.sources()
every_chapter = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)

SOURCE = """\
# %% [markdown]
# # A page

# %%
number = 6 * 7
number

# %% tags=["nbval-skip"]
import nowhere
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A small chapter of its own folder, executed."""
    monkeypatch.setattr(chapters, "CHAPTERS", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # jupytext reads its settings there
    source = tmp_path / "01_page.py"
    source.write_text(SOURCE)
    assert chapters.main(["--run"]) == 0
    return source


def change(source: Path, edit) -> None:
    """Edit the stored notebook of a chapter."""
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    edit(notebook)
    nbformat.write(notebook, path)


def compare_with_nbval(source: Path) -> subprocess.CompletedProcess:
    """Run the strict comparison as `make test` does."""
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider"]
    options = ["--nbval-current-env", "-c", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [*command, *options, str(source.with_suffix(".ipynb"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@every_chapter
def test_a_chapter_is_in_step_and_was_run_in_order(source):
    assert chapters.problems(source) == []


def test_every_notebook_has_a_source_and_there_are_some():
    assert chapters.orphans() == []
    assert len(SOURCES) >= 12


@every_chapter
def test_stored_outputs_name_no_path_time_or_address(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert set(notebook.metadata) == {"kernelspec"}
    for cell in notebook.cells:
        assert "execution" not in cell.metadata  # timestamps
        for output in cell.get("outputs", []):
            text = str({k: v for k, v in output.get("data", {}).items() if k != "image/png"})
            text += output.get("text", "")
            assert not re.search(r"/(home|tmp|Users)/|0x[0-9a-f]{6,}", text), text[:200]


@every_chapter
def test_a_chapter_can_be_opened_alone_on_colab(source):
    """Every chapter has the same install cell, and what it installs is what the book names."""
    first = next(c for c in jupytext.read(source).cells if c.cell_type == "code")
    model = next(c for c in jupytext.read(SOURCES[0]).cells if c.cell_type == "code")
    assert first.source == model.source
    assert first.metadata["tags"] == ["remove-cell", "nbval-skip"]
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
    assert f'"{config["repository"]["url"]}"' in first.source


@every_chapter
def test_a_chapter_shows_its_scale_and_asserts_what_it_claims(source):
    code = [c.source for c in jupytext.read(source).cells if c.cell_type == "code"]
    assert any("chapter_scale()" in cell for cell in code)
    assert sum(cell.count("assert ") for cell in code) >= 3
    hidden = [
        c for c in jupytext.read(source).cells if "hide-cell" in c.metadata.get("tags", [])
    ]
    assert len(hidden) >= 2  # solutions of the exercises
    assert all("assert" in cell.source for cell in hidden)


@every_chapter
def test_code_fits_the_column_of_the_page(source):
    cells = [c.source for c in jupytext.read(source).cells if c.cell_type == "code"]
    assert [line for cell in cells for line in cell.splitlines() if len(line) > 84] == []


@every_chapter
def test_a_chapter_has_a_page_in_the_book(source):
    assert f"chapters/{source.stem}\n" in (ROOT / "book" / "_toc.yml").read_text()


def test_a_fresh_pair_has_no_problem(pair):
    assert chapters.problems(pair) == []
    assert chapters.main(["--check"]) == 0
    assert compare_with_nbval(pair).returncode == 0


def test_running_again_changes_nothing(pair):
    before = pair.with_suffix(".ipynb").read_bytes()
    assert chapters.main(["--run", "01"]) == 0
    assert pair.with_suffix(".ipynb").read_bytes() == before


def test_a_missing_notebook_is_refused(pair):
    pair.with_suffix(".ipynb").unlink()
    assert "missing" in chapters.problems(pair)[0]
    assert chapters.main(["--check"]) == 1


def test_a_notebook_without_a_source_is_refused(pair):
    pair.unlink()
    assert chapters.orphans() == ["01_page.ipynb has no source 01_page.py"]
    assert chapters.main(["--check"]) == 1


def test_an_edited_source_is_out_of_step_until_it_is_run(pair):
    pair.write_text(SOURCE.replace("6 * 7", "6 * 8"))
    assert "differs" in chapters.problems(pair)[0]
    assert chapters.main([]) == 0  # the cells agree again; the output is still the old one
    assert chapters.problems(pair) == []
    assert compare_with_nbval(pair).returncode == 1
    assert chapters.main(["--run"]) == 0
    assert chapters.problems(pair) == []


def test_a_cell_that_was_never_run_is_refused_where_nbval_is_silent(pair):
    def forget(notebook):
        notebook.cells[1].execution_count = None
        notebook.cells[1].outputs = []

    change(pair, forget)
    assert compare_with_nbval(pair).returncode == 0  # the hole
    assert "never run" in chapters.problems(pair)[0]


def test_a_changed_digit_is_seen_by_nbval(pair):
    def change_digit(notebook):
        notebook.cells[1].outputs[0].data["text/plain"] = "43"

    change(pair, change_digit)
    assert compare_with_nbval(pair).returncode == 1


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda c: c.update(execution_count=3), "not run in order"),
        (lambda c: c.outputs[0].data.update({"text/latex": "$42$"}), "nbval never compares"),
        (lambda c: c.outputs.append(nbformat.v4.new_output("error", ename="E")), "an error"),
        (
            lambda c: c.outputs.append(
                nbformat.v4.new_output("stream", name="stderr", text="warning")
            ),
            "stderr",
        ),
    ],
)
def test_an_untrustworthy_output_is_refused(pair, edit, complaint):
    change(pair, lambda notebook: edit(notebook.cells[1]))
    assert complaint in chapters.problems(pair)[0]


def test_an_output_that_is_never_compared_is_refused(pair):
    pair.write_text(SOURCE.replace("# %%\nnumber", '# %% tags=["nbval-ignore-output"]\nnumber'))
    assert chapters.main(["--run"]) == 0
    assert "checked by nobody" in chapters.problems(pair)[0]


def test_a_skipped_cell_stores_no_output(pair):
    change(pair, lambda notebook: notebook.cells[2].update(execution_count=2))
    assert "stores an output" in chapters.problems(pair)[0]


def test_an_unknown_chapter_is_a_mistake(pair, capsys):
    assert chapters.main(["--run", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err


def one_line(capsys, *arguments: str) -> str:
    """What a mistake is told in."""
    capsys.readouterr()
    assert chapters.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    "text", ["", "words", "[]", "{}", '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}']
)
def test_what_is_no_notebook_is_named_and_kept(pair, text, capsys):
    path = pair.with_suffix(".ipynb")
    path.write_text(text)
    assert "01_page.ipynb is damaged or of another kind" in chapters.problems(pair)[0]
    assert "make chapters ARGS=01_page" in one_line(capsys)
    assert "01_page.ipynb is damaged" in one_line(capsys, "--run")
    assert path.read_text() == text


def test_a_source_that_is_no_text_is_named(pair, capsys):
    stored = pair.with_suffix(".ipynb").read_bytes()
    pair.write_bytes(b"# %%\n\xff")
    assert "01_page.py is damaged or of another kind" in chapters.problems(pair)[0]
    assert "01_page.py is damaged or of another kind" in one_line(capsys, "--run")
    assert pair.with_suffix(".ipynb").read_bytes() == stored


def test_options_that_cannot_be_are_told(pair, capsys):
    assert "not allowed with" in one_line(capsys, "--run", "--check")
    assert "--runn" in one_line(capsys, "--runn")


def test_a_cell_that_fails_is_shown_and_the_notebook_keeps_its_outputs(pair, capsys):
    pair.write_text(SOURCE.replace("# %% tags", "# %%\n1 / 0\n\n# %% tags"))
    assert chapters.main(["--run"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "nbclient" not in err
    assert err.splitlines()[-1].startswith("error: 01_page.py does not run, see above")
    stored = nbformat.read(pair.with_suffix(".ipynb"), as_version=4)
    assert stored.cells[1].outputs[0].data["text/plain"] == "42"


def test_an_interrupt_is_told_in_one_line(pair, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    capsys.readouterr()
    monkeypatch.setattr(chapters, "execute", interrupted)
    assert chapters.main(["--run"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_the_larger_scale_is_asked_for_and_named():
    program = (
        "from exlm_mini.training.live import chapter_scale\n"
        "s = chapter_scale(); print(s, s.pick(1, 2))"
    )

    def run(scale):
        environment = {**os.environ, "EXLM_SCALE": scale}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    assert run("cpu").stdout.startswith("EXLM_SCALE=cpu: small sizes, on c")
    assert run("cpu").stdout.endswith(" 1\n")
    assert run("gpu").stdout.startswith("EXLM_SCALE=gpu: large sizes, on c")
    assert run("gpu").stdout.endswith(" 2\n")
    assert "EXLM_SCALE is 'huge'; " in run("huge").stderr
