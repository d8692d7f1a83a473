"""Keep the sources of the chapters, their notebooks and the program they write in step.

chapters/NN_name.py is a source, and NN_name.ipynb has the same cells with outputs. The program,
chapters/exlm_so_far.py, collects the cells that later chapters import.

    python book/chapters.py                 write every notebook from its source; cells with
                                            unchanged code keep their outputs
    python book/chapters.py --run [NAME…]   write and run all, or those whose name contains a NAME
    python book/chapters.py --check         change nothing; exit 1 and say why a pair is not in step
    python book/chapters.py --student DIR [NAME…]  write notebooks without their solutions
    python book/chapters.py --figures DIR [NAME…]  run chapters and write their figures as SVG
    python book/chapters.py --slides FILE [NAME…]  write a page of slides with figures and captions
"""

import argparse
import base64
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import handouts
import jupytext
import nbformat
from nbformat import NotebookNode

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data.files import reading, write_atomically
from exlm_mini.training.console import exit_code, say

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
NOT_RUN = "nbval-skip"
"""Tag of a cell that is never run because most machines lack what it needs; it has no output."""
NOT_COMPARED = "nbval-ignore-output"
"""Tag of a cell whose digits differ between machines; a later cell tagged ``check`` tests them."""
CHECK = "check"
SAVED = "save"
"""Tag of a cell that later chapters import from ``PROGRAM``."""
PROGRAM = "exlm_so_far.py"
COMPARED = {"text/plain", "text/html", "image/svg+xml", "image/png"}
"""MIME types that an output may hold: nbval compares these, except PNG, and ignores all others."""


def sources(*names: str) -> list[Path]:
    """Sources of the chapters whose name contains one of ``names``; without names, of all."""
    paths = sorted(CHAPTERS.glob("[0-9]*.py"))
    return [path for path in paths if not names or any(name in path.stem for name in names)]


def cells(notebook: NotebookNode) -> list[tuple]:
    """The part of each cell that must agree between a source and its notebook."""
    return [
        (c.cell_type, c.source.strip(), tags_of(c), c.metadata.get("mystnb"))
        for c in notebook.cells
    ]


def program() -> str:
    """The program that readers write: the cells tagged ``SAVED`` of all chapters, in order."""
    parts = ['"""The program that the chapters write: their cells tagged "save", collected."""']
    for source in sources():
        saved = [c.source for c in written_notebook(source).cells if SAVED in tags_of(c)]
        parts += [f"# ---- {source.stem} ----", *saved] if saved else []
    return "\n\n\n".join(parts) + "\n"


def tags_of(cell: NotebookNode) -> list[str]:
    """Tags of a cell; empty if it has none."""
    return cell.metadata.get("tags", [])


def problems(source: Path) -> list[str]:
    """Reasons why the notebook of a source cannot be trusted; empty if it can.

    nbval compares nothing in cells that were never run, in outputs of other types than
    ``COMPARED``, and in cells tagged ``NOT_COMPARED``. The first two are refused here, and a check
    must follow the third.
    """
    path, remedy = source.with_suffix(".ipynb"), _remedy(source)
    if not path.exists():
        return [f"{path.name} is missing; {remedy}"]
    try:
        written, stored = written_notebook(source), stored_notebook(source)
    except UserError as error:
        return [str(error)]
    if cells(written) != cells(stored):
        return [f"{path.name} differs from {source.name}; {remedy}"]
    reasons, count, unjudged = [], 0, None
    for number, cell in enumerate(stored.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        is_run = NOT_RUN not in tags_of(cell)
        if NOT_COMPARED in tags_of(cell):
            unjudged = number
        elif CHECK in tags_of(cell):
            unjudged = None
        count += is_run
        expected = count if is_run else None
        if cell.execution_count != expected:
            reasons.append(
                f"{path.name} cell {number} has execution count {cell.execution_count}, but a run "
                f"gives {expected}; {remedy}"
            )
        reasons += [f"{path.name} cell {number} {reason}" for reason in _unseen(cell)]
    if unjudged is not None:
        reasons.append(
            f"{path.name} cell {unjudged} is not compared with anything; add a check"
        )
    return reasons


def _unseen(cell: NotebookNode) -> Iterator[str]:
    """A complaint for everything that a cell stores but nbval ignores."""
    tags = tags_of(cell)
    if NOT_RUN in tags and cell.outputs:
        yield f"is tagged {NOT_RUN} but stores an output"
    for output in cell.outputs:
        if output.output_type == "error" and "raises-exception" not in tags:
            yield "stores an error"
        if unseen := set(output.get("data", {})) - COMPARED:
            yield f"stores {', '.join(sorted(unseen))}, which nbval never compares"
        if output.get("name") == "stderr":
            yield "writes to stderr"


def written_notebook(source: Path) -> NotebookNode:
    """The notebook that a source describes, without outputs."""
    with reading(source, "restore it", errors=Exception):
        return jupytext.read(source)


def stored_notebook(source: Path) -> NotebookNode:
    """The notebook stored beside a source, with its outputs."""
    path = source.with_suffix(".ipynb")
    remedy = f"restore it, or remove it and {_remedy(source)}"
    with reading(path, remedy, errors=Exception):  # nbformat raises whatever its parts raise
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        return notebook


def _remedy(source: Path) -> str:
    return f"run make chapters ARGS={source.stem}"


def orphans() -> list[str]:
    """Notebooks without a source."""
    return [
        f"{path.name} has no source {path.stem}.py"
        for path in sorted(CHAPTERS.glob("*.ipynb"))
        if not path.with_suffix(".py").exists()
    ]


def stale() -> list[str]:
    """A complaint if the stored program differs from what the chapters write; else empty."""
    written = CHAPTERS / PROGRAM
    if written.exists() and written.read_text() == program():
        return []
    return [f"{PROGRAM} differs from the chapters; run python book/chapters.py"]


def synchronize(source: Path) -> None:
    """Write the notebook from its source; a cell keeps its output only if its code is unchanged.

    Changes go one way only. With ``jupytext --sync`` the newer file would win, and a notebook that
    was only touched would overwrite an edited source.
    """
    from jupytext.cli import jupytext as run_jupytext

    path = source.with_suffix(".ipynb")
    written_notebook(source)
    # Reading refuses to overwrite a notebook that cannot be read.
    known = [c.source.strip() for c in stored_notebook(source).cells] if path.exists() else []
    run_jupytext(["--quiet", "--to", "ipynb", "--update", str(source)])
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip() not in known:
            cell.outputs, cell.execution_count = [], None
    write(notebook, path)


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook without metadata of tools and editors, which would be noise in a diff.

    Pictures are reduced to 256 colours, which makes them a third as large.
    """
    for name in ("jupytext", "language_info"):
        notebook.metadata.pop(name, None)
    for cell in notebook.cells:
        cell.metadata.pop("lines_to_next_cell", None)
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                output.data["image/png"] = with_palette(png)
    nbformat.write(notebook, path)


def with_palette(png: str) -> str:
    """A PNG in base64, reduced to 256 colours chosen for it; one with a palette is left alone."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    written = io.BytesIO()
    colours = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def execute(source: Path) -> None:
    """Run a chapter's notebook in place; it is written only once all cells have run."""
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    run_cells(notebook, source.name)
    write(notebook, path)


def run_cells(notebook: NotebookNode, name: str) -> None:
    """Run the cells of a notebook and store their outputs in it; ``name`` is for messages."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    for cell in notebook.cells:
        if NOT_RUN in tags_of(cell):
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # otherwise output is split at random
        skip_cells_with_tag=NOT_RUN,
        resources={"metadata": {"path": str(CHAPTERS)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # otherwise it warns about sockets
    )
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:
        say(f"\n{error}")
        raise UserError(
            f"{name} failed, see above; its notebook keeps its previous outputs"
        ) from None


def chosen(*names: str) -> list[Path]:
    """As ``sources``, but raises ``UserError`` if no chapter matches."""
    if found := sources(*names):
        return found
    every = ", ".join(source.stem for source in sources())
    raise UserError(
        f"no chapter matches {' '.join(names)}; the chapters are: {every or 'none'}"
    )


def hand_out(way: str, path: str, *names: str) -> None:
    """Write a handout of ``handouts.WAYS`` for chapters whose name contains one of ``names``."""
    notebooks = {source.stem: stored_notebook(source) for source in chosen(*names)}
    if way == "figures":
        for name, notebook in notebooks.items():
            notebook.cells.insert(0, nbformat.v4.new_code_cell(handouts.AS_SVG))
            run_cells(notebook, name)
    handouts.WAYS[way](notebooks, Path(path))
    print(f"{way} of {len(notebooks)} chapters: {path}")


def make(options: argparse.Namespace) -> int:
    """Do what the options ask for; returns 1 if ``--check`` finds a pair out of step, else 0."""
    if options.check:
        reasons = (
            orphans()
            + stale()
            + [reason for source in sources() for reason in problems(source)]
        )
        print("\n".join(reasons) or f"{len(sources())} chapters in step")
        return 1 if reasons else 0
    for way in handouts.WAYS:
        if values := getattr(options, way):
            hand_out(way, *values)
            return 0
    every = chosen(*(options.run or []))
    write_atomically(CHAPTERS / PROGRAM, program().encode())
    for number, source in enumerate(every, 1):
        synchronize(source)
        if options.run is not None:
            start = time.monotonic()
            print(f"{number}/{len(every)} {source.stem} ", end="", flush=True)
            execute(source)
            print(f"{time.monotonic() - start:.0f} s")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit codes: 0 done, 1 not in step, 2 user error, 130 interrupted."""
    parser = command_parser("python book/chapters.py", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", nargs="*", metavar="NAME")
    what.add_argument("--check", action="store_true")
    for way in handouts.WAYS:
        what.add_argument(f"--{way}", nargs="+", metavar="PATH")
    return exit_code(lambda: make(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
