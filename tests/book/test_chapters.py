"""A chapter is two files with the same cells, and every output is compared or checked."""

import ast
import base64
import io
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
from live import chapter_scale
from nbformat.v4 import new_output
from PIL import Image

import chapters
from exlm_mini.config.checks import UserError

ROOT = Path(__file__).resolve().parents[2]

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


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Folder of a small chapter, which is executed once for all tests."""
    folder = tmp_path_factory.mktemp("executed")
    shutil.copy(ROOT / "pyproject.toml", folder)  # jupytext reads its settings from it
    (folder / "01_page.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chapters, "CHAPTERS", folder)
        assert chapters.main(["--run"]) == 0
    return folder


@pytest.fixture
def pair(executed, tmp_path, monkeypatch):
    """Source of a copy of the small chapter, which a test may change."""
    folder = shutil.copytree(executed, tmp_path / "chapters")
    monkeypatch.setattr(chapters, "CHAPTERS", folder)
    return folder / "01_page.py"


def change(source: Path, number: int, edit) -> None:
    """Edit one cell of a chapter's stored notebook."""
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    edit(notebook.cells[number])
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
    assert chapters.problems(source) == [] == chapters.orphans()


@every_chapter
def test_stored_outputs_name_no_path_and_pictures_have_256_colours(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert set(notebook.metadata) == {"kernelspec"}
    for cell in notebook.cells:
        assert "execution" not in cell.metadata  # timestamps
        for output in cell.get("outputs", []):
            text = str({k: v for k, v in output.get("data", {}).items() if k != "image/png"})
            text += output.get("text", "")
            assert not re.search(r"/(home|tmp|Users)/|0x[0-9a-f]{6,}", text), text[:200]
            if png := output.get("data", {}).get("image/png"):
                assert Image.open(io.BytesIO(base64.b64decode(png))).mode == "P"
                assert chapters.with_palette(png) == png


@every_chapter
def test_a_chapter_has_what_every_chapter_has(source):
    cells = jupytext.read(source).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    # The first cell installs the package where a chapter is opened by itself, as on Colab.
    model = next(c for c in jupytext.read(SOURCES[0]).cells if c.cell_type == "code")
    assert code[0].source == model.source
    assert code[0].metadata["tags"] == ["remove-cell", "nbval-skip"]
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
    assert f'"{config["repository"]["url"]}"' in code[0].source
    assert sum(cell.source.count("assert ") for cell in code) >= 3
    folded = [c for c in cells if "hide-cell" in chapters.tags_of(c)]
    judging = [c for c in folded if "save" not in chapters.tags_of(c)]
    assert len(judging) >= 2 and all("assert" in cell.source for cell in judging)
    # Lines must fit the text column of the page.
    assert [x for cell in code for x in cell.source.splitlines() if len(x) > 84] == []
    assert f"chapters/{source.stem}\n" in (ROOT / "book" / "_toc.yml").read_text()


@pytest.mark.parametrize("with_book", [True, False])
def test_a_copy_of_a_chapter_finds_the_book_of_its_package_or_says_how_to_get_it(
    with_book, tmp_path
):
    package = tmp_path / "site" / "exlm_mini"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if with_book:
        (package.parent / "chapters").mkdir()
        (package.parent / "chapters" / "beside.py").touch()
    cell = next(c for c in jupytext.read(SOURCES[0]).cells if c.cell_type == "code")
    copy = tmp_path / "copies" / "page.py"
    copy.parent.mkdir()
    copy.write_text(cell.source + "\nimport beside")
    result = subprocess.run(
        [sys.executable, copy],
        cwd=copy.parent,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == (0 if with_book else 1), result.stderr
    if not with_book:
        assert re.fullmatch("a chapter needs the book .*clone of https.*\n", result.stderr)


# ---- the core: one growing program ----

CORE = [source for source in SOURCES if source.stem < "09"]
every_core_chapter = pytest.mark.parametrize("source", CORE, ids=lambda path: path.stem)


def test_the_program_is_what_the_chapters_write():
    assert chapters.stale() == []


def test_no_class_or_function_is_written_twice_in_the_core():
    seen, twice = {}, []
    for source in CORE:
        cells = jupytext.read(source).cells
        for cell in cells:
            if cell.cell_type != "code" or "nbval-skip" in chapters.tags_of(cell):
                continue
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    twice += [(node.name, source.stem)] if node.name in seen else []
                    seen[node.name] = source.stem
    assert twice == []


@pytest.mark.slow
def test_the_program_trains_to_one_bit():
    import exlm_so_far as program
    import torch

    from exlm_mini.data.toy_grammars import grammar

    language = grammar("pairs")
    row_BN = program.every_row(language)
    masked_BN = program.hide(row_BN, [1 + n for n in language.slots])
    draw = torch.Generator().manual_seed(1)

    def some_rows():
        chosen = torch.randint(len(row_BN), (64,), generator=draw)
        return masked_BN[chosen], row_BN[chosen]

    torch.manual_seed(1)
    model = program.AidedExLM(vocab_size=6 + len(language.words))
    program.train(model, some_rows, steps=300)
    model.has_chains = False
    program.train(model, some_rows, steps=300, peak=1e-3)
    bits = model.bits(masked_BN, row_BN).mean().item()
    assert 1 <= bits < 1.02, bits


@every_core_chapter
def test_a_core_chapter_is_short(source):
    cells = chapters.stored_notebook(source).cells
    hidden = {"hide-cell", "remove-cell", "remove-input"}
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert sum(not hidden & set(chapters.tags_of(cell)) for cell in code) <= 12
    assert not any("hide-input" in chapters.tags_of(cell) for cell in code)


@every_chapter
def test_figures_fit_a_phone_and_three_lines_at_most_only_confirm(source):
    code = [c for c in chapters.stored_notebook(source).cells if c.cell_type == "code"]
    assert sum("check" in chapters.tags_of(cell) for cell in code) <= 3
    for cell in code:
        if "figure" in cell.metadata.get("mystnb", {}):
            assert "remove-input" in chapters.tags_of(cell)
            assert len(cell.metadata["mystnb"]["image"]["alt"]) > 40
        for output in cell.outputs:
            if png := output.get("data", {}).get("image/png"):
                width, _ = Image.open(io.BytesIO(base64.b64decode(png))).size
                assert width <= 2 * 110 * 4.1, cell.source[:80]


# ---- book/chapters.py ----


def test_running_again_changes_nothing(pair):
    assert chapters.problems(pair) == []
    assert chapters.main(["--check"]) == 0
    before = pair.with_suffix(".ipynb").read_bytes()
    assert chapters.main(["--run", "01"]) == 0
    assert pair.with_suffix(".ipynb").read_bytes() == before


def test_half_a_pair_is_refused(pair):
    stored = pair.with_suffix(".ipynb").read_bytes()
    pair.with_suffix(".ipynb").unlink()
    assert "missing" in chapters.problems(pair)[0]
    assert chapters.main(["--check"]) == 1
    pair.with_suffix(".ipynb").write_bytes(stored)
    pair.unlink()
    assert chapters.orphans() == ["01_page.ipynb has no source 01_page.py"]
    assert chapters.main(["--check"]) == 1


def test_an_edited_source_is_out_of_step_until_it_is_run(pair):
    pair.write_text(SOURCE.replace("6 * 7", "6 * 8"))
    assert "differs" in chapters.problems(pair)[0]
    assert chapters.main([]) == 0  # the cells agree again, but the old output is gone
    assert "count None, but a run gives 1" in chapters.problems(pair)[0]
    assert chapters.main(["--run"]) == 0
    assert chapters.problems(pair) == []


def test_another_output_than_that_of_a_run_is_seen(pair):
    change(pair, 1, lambda cell: cell.outputs[0].data.update({"text/plain": "48"}))
    assert chapters.problems(pair) == []
    assert compare_with_nbval(pair).returncode == 1


@pytest.mark.parametrize(
    ("number", "edit", "complaint"),
    [
        # A cell that was never run, which nbval does not notice.
        (1, lambda c: c.update(execution_count=None, outputs=[]), "count None, but a run"),
        (1, lambda c: c.update(execution_count=3), "count 3, but a run gives 1"),
        (1, lambda c: c.outputs[0].data.update({"text/latex": "$42$"}), "nbval never compares"),
        (1, lambda c: c.outputs.append(new_output("error", ename="E")), "an error"),
        (
            1,
            lambda c: c.outputs.append(new_output("stream", name="stderr", text="x")),
            "stderr",
        ),
        (2, lambda c: c.update(execution_count=2), "count 2, but a run gives None"),
        (2, lambda c: c.outputs.append(new_output("stream")), "stores an output"),
    ],
)
def test_an_untrustworthy_output_is_refused(pair, number, edit, complaint):
    change(pair, number, edit)
    assert complaint in chapters.problems(pair)[0]


def test_an_output_that_is_never_compared_needs_a_check_behind_it(pair):
    tagged = SOURCE.replace("# %%\nnumber", '# %% tags=["nbval-ignore-output"]\nnumber')
    pair.write_text(tagged)
    chapters.synchronize(pair)
    assert "cell 1 is not compared with anything" in " ".join(chapters.problems(pair))
    check = '# %% tags=["check"]\nassert number == 42\n'
    pair.write_text(
        tagged.replace('# %% tags=["nbval-skip"]', check + '\n# %% tags=["nbval-skip"]')
    )
    chapters.synchronize(pair)
    assert "compared with anything" not in " ".join(chapters.problems(pair))


def test_saved_cells_are_collected_in_the_order_of_the_chapters(pair):
    def save(source):
        return source.replace("# %%\nnumber", '# %% tags=["save"]\nnumber')

    pair.write_text(save(SOURCE))
    (pair.parent / "02_page.py").write_text(save(SOURCE.replace("6 * 7", "number + 1")))
    assert chapters.stale() != []
    assert chapters.main([]) == 0
    assert chapters.stale() == []
    scope = {}
    exec((pair.parent / chapters.PROGRAM).read_text(), scope)
    assert scope["number"] == 43


@pytest.mark.parametrize("text", ["", "[]", '{"nbformat": 4, "metadata": {}}'])
def test_what_is_no_notebook_or_no_text_is_named_and_kept(pair, text, capsys):
    path = pair.with_suffix(".ipynb")
    path.write_text(text)
    assert "01_page.ipynb (" in chapters.problems(pair)[0]
    assert chapters.main([]) == 2
    assert "make chapters ARGS=01_page" in capsys.readouterr().err
    pair.write_bytes(b"# %%\n\xff")
    assert chapters.main(["--run"]) == 2
    assert "01_page.py (" in capsys.readouterr().err
    for argv in (["--run", "nosuch"], ["--slides", "slides.html", "nosuch"]):
        assert chapters.main(argv) == 2
        assert "nosuch" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_cell_that_fails_is_shown_and_the_notebook_keeps_its_outputs(pair, capsys):
    pair.write_text(SOURCE.replace("# %% tags", "# %%\n1 / 0\n\n# %% tags"))
    assert chapters.main(["--run"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "nbclient" not in err
    assert err.splitlines()[-1].startswith("error: 01_page.py failed, see above")
    stored = nbformat.read(pair.with_suffix(".ipynb"), as_version=4)
    assert stored.cells[1].outputs[0].data["text/plain"] == "42"


def test_the_larger_scale_is_asked_for_and_named(monkeypatch):
    for scale, words in (("cpu", "small sizes, on c.* 1"), ("gpu", "large sizes, on c.* 2")):
        monkeypatch.setenv("EXLM_SCALE", scale)
        chosen = chapter_scale()
        assert re.fullmatch(f"EXLM_SCALE={scale}: {words}", f"{chosen} {chosen.pick(1, 2)}")
    monkeypatch.setenv("EXLM_SCALE", "huge")
    with pytest.raises(UserError, match="EXLM_SCALE is 'huge'; "):
        chapter_scale()
