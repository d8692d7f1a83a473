"""The package reads from left to right: a module imports only from modules to its left."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "exlm_mini"

# In the order the data flows. A folder counts as one stage; where its own modules have an order
# they stand in brackets. The commands share the last place: they import nothing of each other.
STAGES = """
    checks config autograd memory durable outside tokenization corpora[toy contexts grammars
    english text smiles rows sealed packing vocabulary building cleaning lmdb_pages unimol
    sources wanted shards mixing sizes passes preparation] masking expansion rope attention
    encoder transition emission alignment objectives guesses model official decoding tasks[task
    files plain_metrics metrics scaffolds molecule_tables moleculenet embedded_molecules seen
    drawing inputs glue_tasks glue squad_scores squad spans inference sections catalogue] batches
    evaluation manifest checkpoint optimizer_state run_directory training precision estimate
    watching engine update trainer settings_file settings pretrained downstream encoded_task
    task_checks problems finetuning_config finetuning grid results throughput console costs
    options measure downstream_runs benchmarks filling readout live analysis plotting
    curves experiments widgets
"""
COMMANDS = {"prepare", "pretrain", "finetune", "fill", "sweep", "plot", "bench", "doctor"}

# These run on a bare GPU machine: they, and what they import at module level, need no more than
# these libraries.
CORE = {
    "checks", "config", "corpora.rows", "corpora.sealed", "corpora.packing", "masking", "expansion",
    "rope", "attention", "encoder", "transition", "emission", "alignment", "objectives",
    "guesses", "model", "batches", "manifest", "checkpoint", "run_directory", "training",
    "precision",
    "estimate", "memory", "watching", "engine", "update", "trainer", "autograd", "durable",
    "outside", "evaluation", "optimizer_state", "console", "options", "measure",
    "benchmarks", "bench", "doctor", "pretrained", "downstream", "encoded_task", "task_checks",
    "problems", "finetuning_config", "finetuning", "grid", "results",
}  # fmt: skip
CORE_LIBRARIES = {"torch", "numpy", "safetensors"}
OPTIONAL_LIBRARIES = {
    "accelerate", "datasets", "jsonargparse", "matplotlib", "pandas", "rdkit", "scipy",
    "seaborn", "sklearn", "tokenizers", "tqdm", "yaml",
}  # fmt: skip
MAY_DRAW = {"plotting", "experiments.drawings", "experiments.figures"}
MAY_READ_OPTIONS = COMMANDS | {"settings", "options", "benchmarks.options"}


def parse_order(stages: str) -> dict[str, tuple[int, int]]:
    """Place of every stage, and of every module whose folder gives an order."""
    order, inner, stage = {}, 0, ""
    for word in stages.replace("[", " [ ").replace("]", " ] ").split():
        if word == "[":
            inner = 1
        elif word == "]":
            inner = 0
        elif inner:
            order[f"{stage}.{word}"] = (order[stage][0], inner)
            inner += 1
        else:
            stage = word
            order[stage] = (len(order), 0)
    return order | dict.fromkeys(COMMANDS, (len(order), 0))


ORDER = parse_order(STAGES)


class Import:
    """One imported name: dotted, and whether it runs when the module is imported."""

    def __init__(self, name: str, line: int, is_module_level: bool):
        self.name, self.line, self.is_module_level = name, line, is_module_level
        self.library, _, rest = name.partition(".")
        self.module = rest if self.library == PACKAGE else None


def imports_of(source: str, module: str, is_folder: bool = False) -> list[Import]:
    """All imports of a module, relative ones resolved, inside functions too."""
    found = []
    parts = [PACKAGE, *module.split(".")] if module else [PACKAGE]

    def visit(node: ast.AST, is_module_level: bool) -> None:
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_module_level = False
        elif isinstance(node, ast.Import):
            found.extend(Import(a.name, node.lineno, is_module_level) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_folder] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from exlm_mini import masking` imports a module, not a name of the package.
                is_module = is_package_folder(base) and not alias.name.startswith("__")
                name = f"{base}.{alias.name}" if is_module else base
                found.append(Import(name, node.lineno, is_module_level))
        for child in ast.iter_child_nodes(node):
            visit(child, is_module_level)

    visit(ast.parse(source), True)
    return found


def is_package_folder(dotted: str) -> bool:
    return dotted.split(".")[0] == PACKAGE and (ROOT / dotted.replace(".", "/")).is_dir()


def place(module: str) -> tuple[int, int] | None:
    """Place of a module: its own, or its folder's; none if the order does not know it."""
    while module and module not in ORDER:
        module = module.rpartition(".")[0]
    return ORDER.get(module)


def problems(source: str, module: str, is_folder: bool = False) -> list[str]:
    """What is wrong with the imports of one module, one line each."""
    if not module:
        found = imports_of(source, "", is_folder=True)
        return [f"line {i.line}: the package root imports nothing" for i in found]
    here = place(module)
    if here is None:
        return [f"{module} is not in the order of stages: give it a place in STAGES"]
    out = []
    stage = module.split(".")[0]
    for item in imports_of(source, module, is_folder):
        where = f"{module}:{item.line}: "
        if item.library in {"matplotlib", "seaborn"} and not {stage, module} & MAY_DRAW:
            out.append(f"{where}only {' and '.join(sorted(MAY_DRAW))} draw, not {module}")
        if (
            item.library in {"argparse", "jsonargparse"}
            and not {stage, module} & MAY_READ_OPTIONS
        ):
            out.append(f"{where}only the commands read options")
        if not item.module or item.module == module:
            continue
        there = place(item.module)
        if there is None:
            out.append(f"{where}{item.module} is not in the order of stages")
            continue
        is_same_stage = item.module.split(".")[0] == stage
        is_left = there[0] < here[0] or (
            is_same_stage and (is_folder or not (here[1] and there[1]) or there[1] < here[1])
        )
        if not is_left:
            out.append(f"{where}{item.module} stands to the right")
    return out


def modules() -> dict[str, Path]:
    """Dotted name inside the package (the root is '') and file of every module."""
    out = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


def core_modules() -> list[str]:
    return [m for m in modules() if m in CORE or m.split(".")[0] in CORE]


def foreign_libraries(module: str, seen: set[str]) -> set[str]:
    """Libraries outside the core's that importing a module brings in, and who asks for them."""
    paths = modules()
    if module in seen or module not in paths:
        return set()
    seen.add(module)
    out = set()
    is_folder = paths[module].name == "__init__.py"
    for item in imports_of(paths[module].read_text(), module, is_folder):
        if not item.is_module_level:
            continue
        if item.module is not None:
            target = item.module if item.module in paths else item.module.rpartition(".")[0]
            out |= foreign_libraries(target, seen)
        elif item.library not in CORE_LIBRARIES | sys.stdlib_module_names:
            out.add(f"{item.library} ({module}:{item.line})")
    return out | foreign_libraries(module.rpartition(".")[0], seen)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_from_its_left(module):
    path = modules()[module]
    assert problems(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module", core_modules())
def test_core_needs_no_library_but_torch_numpy_safetensors(module):
    assert foreign_libraries(module, set()) == set()


def test_core_imports_where_the_optional_libraries_are_missing():
    # The same again as Python does it: the test above does not see importlib or __import__.
    program = f"""
import importlib, sys
import torch
for name in {sorted(OPTIONAL_LIBRARIES)!r}:
    sys.modules[name] = None
for module in {core_modules()!r}:
    importlib.import_module("{PACKAGE}." + module)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("source", "module", "complaint"),
    [
        ("from exlm_mini.model import ExLM", "masking", "stands to the right"),
        ("from exlm_mini import training", "model", "stands to the right"),
        ("from . import model", "expansion", "stands to the right"),
        ("from .packing import read", "corpora.toy", "stands to the right"),
        ("def f():\n    import exlm_mini.training", "model", "stands to the right"),
        ("from exlm_mini.fill import main", "pretrain", "stands to the right"),
        ("from exlm_mini.pretrain import main", "training", "stands to the right"),
        ("import exlm_mini.nowhere", "model", "not in the order"),
        ("import torch", "nowhere", "not in the order"),
        ("def f():\n    import matplotlib.pyplot as plt", "analysis", "draw"),
        ("import argparse", "training", "only the commands"),
        ("import torch", "", "imports nothing"),
    ],
)
def test_the_checker_sees_a_forbidden_import(source, module, complaint):
    found = problems(source, module)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from exlm_mini.masking import x", "model"),
        ("from ..config import UserError", "corpora.text"),
        ("from exlm_mini.corpora.toy import x", "corpora.packing"),
        ("from exlm_mini.alignment.naive import x", "alignment.vectorized"),
        ("import seaborn", "plotting"),
        ("from exlm_mini.training import x\nimport argparse", "pretrain"),
        ("from exlm_mini import __version__", "checkpoint"),
    ],
)
def test_the_checker_allows_the_left(source, module):
    assert problems(source, module) == []


def test_an_import_inside_a_function_is_not_at_module_level():
    source = "import torch\ndef f():\n  import rdkit\nif TYPE_CHECKING:\n  import datasets"
    found = {i.library: i.is_module_level for i in imports_of(source, "text")}
    assert found == {"torch": True, "rdkit": False, "datasets": False}
