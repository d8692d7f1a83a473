"""Packages import only from packages before them, and the core needs only four libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A package may import from the lines above its own, but not from others on its line.
ORDER = """
    exlm_mini.config
    exlm_mini.data exlm_mini.alignment
    exlm_mini.model
    exlm_mini.training
    exlm_mini.reading exlm_mini.plot
    exlm_mini.hf
    exlm_mini.prepare exlm_mini.pretrain exlm_mini.fill exlm_mini.doctor
    exlm_mini.export exlm_mini.__main__
    exlm_lab.benchmarks exlm_lab.ledger
    exlm_lab.downstream
    exlm_lab.experiments
    exlm_lab.finetune exlm_lab.predict exlm_lab.embed exlm_lab.sweep exlm_lab.bench
    chapters book
"""
PLACE = {
    package: n for n, line in enumerate(ORDER.strip().splitlines()) for package in line.split()
}

# These run on a bare GPU machine: they, and what they import at module level, need no libraries
# except torch, numpy, pydantic and safetensors.
CORE = {
    "exlm_mini.alignment", "exlm_mini.model", "exlm_mini.training", "exlm_mini.config.recipes",
    "exlm_mini.data.packs", "exlm_mini.data.corpus", "exlm_mini.data.masking",
    "exlm_mini.data.batches",
    "exlm_mini.reading.trained", "exlm_mini.config.options", "exlm_mini.doctor",
    "exlm_lab.benchmarks", "exlm_lab.bench",
}  # fmt: skip
MAY_DRAW = {
    "exlm_lab.downstream.figure", "exlm_mini.plot", "exlm_lab.experiments", "chapters", "book",
}  # fmt: skip
MAY_READ_OPTIONS = {
    "exlm_mini.config.options", "exlm_mini.plot", "exlm_mini.prepare", "exlm_mini.fill",
    "exlm_mini.doctor", "exlm_mini.export", "exlm_lab.finetune", "exlm_lab.sweep",
    "exlm_lab.bench", "book",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name and file of every module of the packages, the book and the chapters."""
    out = {}
    for folder in ("exlm_mini", "exlm_lab", "book", "chapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_build" not in path.parts:
                parts = path.relative_to(ROOT).with_suffix("").parts
                out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules()


@cache
def imports_of(source: str) -> list[tuple[str, bool]]:
    """Dotted name of every imported module, and whether importing ``source`` imports it."""
    found = []

    def visit(node: ast.AST, is_at_once: bool) -> None:
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_at_once = False
        elif isinstance(node, ast.Import):
            found.extend((alias.name, is_at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not allowed; name the module in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            is_folder = all(name in MODULES for name in inner)
            found.extend((name, is_at_once) for name in (inner if is_folder else [node.module]))
        for child in ast.iter_child_nodes(node):
            visit(child, is_at_once)

    visit(ast.parse(source), True)
    return found


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def package_of(module: str) -> str | None:
    """The package in ``ORDER`` that holds a module; None for exlm_mini, exlm_lab and libraries."""
    return max(
        (package for package in PLACE if is_in(module, {package})), key=len, default=None
    )


def problems(source: str, module: str) -> list[str]:
    """What is wrong with the imports of one module, one line each."""
    here, out = package_of(module), []
    for name, is_at_once in imports_of(source):
        library, there = name.partition(".")[0], package_of(name)
        if library in {"exlm_mini", "exlm_lab"} and name != library:
            if there is None:
                out.append(f"{name} has no place in ORDER")
            elif here is None:
                if is_at_once:
                    out.append(f"{name}: a package imports its modules only on demand")
            elif there != here and PLACE[there] >= PLACE[here]:
                out.append(f"{name} does not come before {here} in ORDER")
        if library in {"matplotlib", "seaborn"} and not is_in(module, MAY_DRAW):
            out.append(f"{name}: only {', '.join(sorted(MAY_DRAW))} may draw")
        if library == "argparse" and not is_in(module, MAY_READ_OPTIONS):
            out.append(f"{name}: only commands may read options")
    return out


def test_a_module_imports_only_from_rooms_before_its_own():
    found = {name: problems(path.read_text(), name) for name, path in MODULES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_two_modules_of_a_room_need_each_other():
    for package in PLACE:
        inside = {
            module: {n for n, _ in imports_of(MODULES[module].read_text()) if n in MODULES}
            for module in MODULES
            if is_in(module, {package}) and module != package
        }
        TopologicalSorter(inside).prepare()  # raises CycleError


def test_core_brings_in_no_library_but_its_four():
    core = [module for module in MODULES if is_in(module, CORE)]
    program = f"""
import importlib, sys
import numpy, pydantic, safetensors.torch, torch
before = {{name.partition(".")[0] for name in sys.modules}}
for module in {core!r}:
    importlib.import_module(module)
print(*{{name.partition(".")[0] for name in sys.modules}} - before - sys.stdlib_module_names)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    more = {name for name in result.stdout.split() if not name.startswith("_")}
    assert more <= {"exlm_mini", "exlm_lab", "annotated_types"}  # the last comes with pydantic


@pytest.mark.parametrize(
    ("library", "extra", "door"),
    [
        ("tokenizers", "text", "import exlm_mini; exlm_mini.load('molecules')"),
        ("transformers", "hf", "import exlm_mini.hf"),
    ],
)
def test_a_door_without_its_library_names_the_extra(library, extra, door):
    program = f"import sys; sys.modules['{library}'] = None; {door}"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: this needs the package {library}; pip install "
        f"'exlm-mini[{extra}] @ git+https://github.com/exlm-book/exlm-book', "
        "or [all] for every extra"
    )
    assert "During handling" not in result.stderr
