"""``exlm COMMAND`` and ``python -m exlm_mini COMMAND``: run any command by its name.

For example::

    exlm pretrain --recipe smiles-tiny --output runs/molecules
    exlm fill "CC(=O)N[MASK]" --run runs/molecules
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

from exlm_mini import __version__
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.training.console import exit_code

COMMANDS = {
    name: f"{package}.{name}"
    for package, names in {
        "exlm_mini": ("prepare", "pretrain", "fill", "plot", "export", "doctor"),
        "exlm_lab": ("finetune", "predict", "embed", "sweep", "bench"),
    }.items()
    for name in names
}
"""The module of each command, by name. It is imported only when its command runs."""


def about(module: str) -> str:
    """What a command does, taken from the first line of its module's docstring."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of ours
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    first = text.partition("\n")[0]
    first = (first.partition("``: ")[2] or first).removesuffix(" ::").replace("``", "")
    return first[0].lower() + first[1:]


def main(argv: list[str] | None = None) -> int:
    """Run a command, or list them all; returns the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name]).main(rest)
    return exit_code(lambda: _tell(name), unread=0)


def _tell(name: str) -> None:
    """Answer ``--help`` and ``--version``; refuse anything else."""
    if name == "--version":
        print(f"exlm-mini {__version__}")
        return
    if name not in ("-h", "--help"):
        raise UserError(f"unknown command '{name}'; {nearest(name, COMMANDS)}")
    print("exlm COMMAND [--help | --option VALUE ...]  or  exlm --version\n")
    for command, module in COMMANDS.items():
        print(f"  {command:9} {about(module)}")


if __name__ == "__main__":
    sys.exit(main())
