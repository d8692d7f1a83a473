"""What this machine offers, and whether it computes correctly. ::

    python -m exlm_mini.doctor              look, build the backend, check all
    python -m exlm_mini.doctor --no-build   check what is built already
    python -m exlm_mini.doctor --json       the same as one JSON object

Every backend of the alignment meets a few small graphs on every device, and is compared with
the enumeration of all paths: likelihood, gradients and best path, in float32 and float64. What is
missing is advice: the exit status is 1 only if a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from exlm_mini.alignment import BACKENDS, build, fastest
from exlm_mini.alignment.cases import DTYPES, JUDGE, check, short
from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code
from exlm_mini.training.provenance import MIB, machine

NOT_BUILT = "not built yet; without --no-build it would be"

LIBRARIES = {
    "text": ("datasets", "tokenizers"),
    "chem": ("rdkit",),
    "train": ("jsonargparse", "PyYAML", "tokenizers", "tqdm"),
    "book": (
        "ipykernel", "jupyter-book", "jupytext", "matplotlib", "nbclient", "pandas", "scipy",
        "seaborn", "sphinx-mathjax-offline",
    ),
    "plot": ("matplotlib", "seaborn"),
    "tasks": ("pandas", "scikit-learn", "scipy"),
    "hf": ("accelerate", "tokenizers", "transformers"),
    "watch": ("tensorboard",),
    "test": (
        "hypothesis", "lmdb", "mypy", "nbval", "playwright", "pytest", "pytest-xdist", "ruff",
        "setuptools", "types-PyYAML",
    ),
}  # fmt: skip
"""What the extras of ``pyproject.toml`` ask for; packed data train without any of it."""


# ---- looking ----


def computer() -> dict[str, Any]:
    """Versions, processor, threads and GPUs."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": about.name,
                "compute_capability": f"{about.major}.{about.minor}",
                "memory_mib": about.total_memory // MIB,
            }
        )
    return {
        **machine(torch.device("cpu")),
        "safetensors": _version("safetensors"),
        "executable": sys.executable,
        "threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "gpus": gpus,
    }


def tools() -> dict[str, dict[str, str]]:
    """What builds the compiled backend: path and version of each, or what is missing."""

    def ninja() -> build.Tool:
        path = build.ninja()
        version = subprocess.run([path, "--version"], capture_output=True, text=True)
        return build.Tool(path, version.stdout)

    found = {}
    for name, ask in (("C++ compiler", build.cxx), ("ninja", ninja), ("nvcc", build.nvcc)):
        try:
            path, version = ask()
        except build.BuildError as error:
            found[name] = {"missing": str(error)}
            continue
        release = re.search(r"release ([\d.]+)", version) if name == "nvcc" else None
        first_line = version.strip().partition("\n")[0]
        found[name] = {"path": path, "version": release[1] if release else first_line}
    return found


def libraries() -> dict[str, dict[str, str | None]]:
    """Version of each optional library, by extra; none where it is missing."""
    return {
        extra: {name: _version(name) for name in names} for extra, names in LIBRARIES.items()
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- checking ----


def examine(may_build: bool) -> dict[str, Any]:
    """All that the command reports, ready for JSON."""
    report = {"machine": computer(), "tools": tools(), "libraries": libraries()}
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", n) for n in range(len(report["machine"]["gpus"]))]
    checks, automatic = [], {}
    for device in devices:
        for name in BACKENDS:
            if name != JUDGE:
                reason = _why_not(name, device.type, may_build)
                checks.append(check(name, device, reason))
        is_unbuilt = not may_build and _why_not("native", device.type, False) == NOT_BUILT
        with warnings.catch_warnings(action="ignore"):  # the report says the same
            automatic[str(device)] = "native" if is_unbuilt else fastest(device.type)
    return {
        "is_right": all(c.is_right is not False for c in checks),
        **report,
        "cache": str(build.cache_dir()),
        "backends": [c._asdict() for c in checks],
        "auto": automatic,
    }


def _why_not(name: str, device_type: str, may_build: bool) -> str | None:
    """Why a backend does not work on a type of device, building only if that is allowed."""
    if name == "native" and not may_build:
        try:
            if not build.plan(device_type).target.exists():
                return NOT_BUILT
        except build.BuildError as error:
            return str(error)
    return BACKENDS[name].why_not(device_type)


# ---- showing ----


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for a person."""
    about = report["machine"]
    tool_rows = [
        (name, f"{tool['path']}, {tool['version']}" if "path" in tool else tool["missing"])
        for name, tool in report["tools"].items()
    ]
    yield f"exlm-mini {about['exlm_mini']}, commit {about['commit']}"
    for title, rows in (
        ("machine", _machine_rows(about)),
        ("to build with", [*tool_rows, ("kept in", report["cache"])]),
        ("optional libraries", _library_rows(report["libraries"])),
        ("backend that auto uses", report["auto"].items()),
    ):
        yield f"\n{title}"
        yield from (f"  {name:<14}{text}" for name, text in rows)
    yield "\nbackends: largest error against enumeration, by dtype"
    yield from _check_lines(report["backends"])
    yield ""
    yield "every result is right" if report["is_right"] else "SOME RESULTS ARE WRONG: see above"


def _machine_rows(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "system", about["platform"]
    yield "processor", f"{about['cpu']}, {about['num_cpus']} CPUs"
    yield "Python", f"{about['python']}, {about['executable']}"
    cuda = f"for CUDA {about['torch_cuda']}" if about["torch_cuda"] else "without CUDA"
    yield "PyTorch", f"{about['torch']}, {cuda}, {about['threads']} CPU threads"
    yield "needs besides", f"numpy {about['numpy']}, safetensors {about['safetensors']}"
    form = "{name}, compute capability {compute_capability}, {memory_mib} MiB"
    for gpu in about["gpus"]:
        yield "GPU", form.format(**gpu)
    if not about["gpus"]:
        yield "GPU", "none that PyTorch sees"


def _library_rows(libraries: dict[str, dict[str, str | None]]) -> Iterator[tuple[str, str]]:
    for extra, versions in libraries.items():
        found = [f"{name}\u00a0{version}" for name, version in versions.items() if version]
        missing = [name for name, version in versions.items() if not version]
        rows = textwrap.wrap(", ".join(found), 63)  # not at the no-break spaces
        if missing:
            rows.append(f"missing {', '.join(missing)}: pip install 'exlm-mini[{extra}]'")
        for row in rows:
            yield extra, row.replace("\u00a0", " ")
            extra = ""


def _check_lines(checks: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each backend and device."""
    dtypes = [short(dtype) for dtype in DTYPES]
    form = "  {:<8}{:<12}" + "{:>9}" * len(dtypes) + "  {}"
    yield form.format("", "", *dtypes, "").rstrip()
    for c in checks:
        errors = [c["errors"].get(dtype) for dtype in dtypes]
        shown = ["-" if error is None else f"{error:.0e}" for error in errors]
        verdict = {True: "right", False: "WRONG: ", None: "not here: "}[c["is_right"]]
        first, *rest = (verdict + (c["reason"] or "")).split("\n")
        yield form.format(c["device"], c["backend"], *shown, first)
        yield from (f"      {line}" for line in rest)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_mini.doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-build", action="store_true", help="build nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 works, 1 a wrong result, 2 a mistake of the user, 130 interrupted."""

    def command() -> int:
        options = _parser().parse_args(argv)
        report = examine(may_build=not options.no_build)
        for line in [json.dumps(report, allow_nan=False)] if options.json else lines(report):
            print(line)
        return 0 if report["is_right"] else 1

    return exit_code(command, unread=0)


if __name__ == "__main__":
    sys.exit(main())
