"""Show what this machine offers and check that it computes correctly. ::

    python -m exlm_mini.doctor              look, build the backend, check all
    python -m exlm_mini.doctor --no-build   check what is built already

On every device, every alignment backend is compared with the enumeration of all paths on a few
small graphs: likelihood, gradients and best path, in float32 and float64. A missing library is
only reported; the exit status is 1 only if a result is wrong.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator

import torch

from exlm_mini.alignment import BACKENDS, build, fastest
from exlm_mini.alignment.cases import DTYPES, JUDGE, Check, check, short
from exlm_mini.config.checks import EXTRAS
from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code
from exlm_mini.training.provenance import MIB, machine

NOT_BUILT = "not built yet; without --no-build it would be"

Rows = Iterable[tuple[str, str]]


# ---- looking ----


def computer() -> Rows:
    """Versions, processor, threads and GPUs."""
    about = machine(torch.device("cpu"))
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    safetensors = importlib.metadata.version("safetensors")
    yield "system", about["platform"]
    yield "processor", f"{about['cpu']}, {about['num_cpus']} CPUs"
    yield "Python", f"{about['python']}, {sys.executable}"
    yield "PyTorch", f"{about['torch']}, {cuda}, {torch.get_num_threads()} CPU threads"
    yield "needs besides", f"numpy {about['numpy']}, safetensors {safetensors}"
    for device in devices()[1:]:
        gpu = torch.cuda.get_device_properties(device)
        capability, memory = f"{gpu.major}.{gpu.minor}", gpu.total_memory // MIB
        yield "GPU", f"{gpu.name}, compute capability {capability}, {memory} MiB"
    if len(devices()) == 1:
        yield "GPU", "none that PyTorch sees"


def devices() -> list[torch.device]:
    """The CPU, and every GPU that PyTorch sees."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(num_gpus))]


def tools() -> Rows:
    """The tools that build the compiled backend: path and version, or what is missing."""

    def ninja() -> build.Tool:
        path = build.ninja()
        version = subprocess.run([path, "--version"], capture_output=True, text=True)
        return build.Tool(path, version.stdout)

    for name, ask in (("C++ compiler", build.cxx), ("ninja", ninja), ("nvcc", build.nvcc)):
        try:
            path, version = ask()
        except build.BuildError as error:
            yield name, str(error)
            continue
        release = re.search(r"release ([\d.]+)", version) if name == "nvcc" else None
        yield name, f"{path}, {release[1] if release else version.strip().splitlines()[0]}"
    yield "kept in", str(build.cache_dir())


def libraries() -> Rows:
    """Versions of the optional libraries by extra, and how to install missing ones."""
    packages = importlib.metadata.packages_distributions()
    for extra in dict.fromkeys(EXTRAS.values()):
        modules = [module for module, its_extra in EXTRAS.items() if its_extra == extra]
        names = [packages[module][0] for module in modules if module in packages]
        rows = textwrap.wrap(", ".join(_with_version(name) for name in names), 63)
        if missing := [module for module in modules if module not in packages]:
            rows.append(f"missing {', '.join(missing)}: pip install 'exlm-mini[{extra}]'")
        yield from zip([extra, *[""] * len(rows)], rows, strict=False)


def _with_version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"


# ---- checking ----


def checks(may_build: bool) -> list[Check]:
    """Compare every backend on every device with the enumeration."""
    return [
        check(name, device, _why_not(name, device.type, may_build))
        for device in devices()
        for name in BACKENDS
        if name != JUDGE
    ]


def automatic(may_build: bool) -> Rows:
    """The backend that ``auto`` uses on each device."""
    for device in devices():
        is_unbuilt = not may_build and _why_not("native", device.type, False) == NOT_BUILT
        with warnings.catch_warnings(action="ignore"):  # the report says the same
            yield str(device), "native" if is_unbuilt else fastest(device.type)


def _why_not(name: str, device_type: str, may_build: bool) -> str | None:
    """Why a backend does not work on a type of device; builds it only if allowed."""
    if name == "native" and not may_build:
        try:
            if not build.plan(device_type).target.exists():
                return NOT_BUILT
        except build.BuildError as error:
            return str(error)
    return BACKENDS[name].why_not(device_type)


# ---- showing ----


def lines(found: list[Check], may_build: bool) -> Iterator[str]:
    """The report."""
    about = machine(torch.device("cpu"))
    yield f"exlm-mini {about['exlm_mini']}, commit {about['commit']}"
    for title, rows in (
        ("machine", computer()),
        ("to build with", tools()),
        ("optional libraries", libraries()),
        ("backend that auto uses", automatic(may_build)),
    ):
        yield f"\n{title}"
        yield from (f"  {name:<14}{text}" for name, text in rows)
    yield "\nbackends: largest error against enumeration, by dtype"
    dtypes = [short(dtype) for dtype in DTYPES]
    form = "  {:<8}{:<12}" + "{:>9}" * len(dtypes) + "  {}"
    yield form.format("", "", *dtypes, "").rstrip()
    for c in found:
        errors = [c.errors.get(dtype) for dtype in dtypes]
        shown = ["-" if error is None else f"{error:.0e}" for error in errors]
        verdict = {True: "right", False: "WRONG: ", None: "not here: "}[c.is_right]
        first, *rest = (verdict + (c.reason or "")).split("\n")
        yield form.format(c.device, c.backend, *shown, first)
        yield from (f"      {line}" for line in rest)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 works, 1 a wrong result, 2 a mistake of the user, 130 interrupted."""

    def command() -> int:
        parser = command_parser("python -m exlm_mini.doctor", __doc__)
        parser.add_argument("--no-build", action="store_true", help="build nothing")
        may_build = not parser.parse_args(argv).no_build
        found = checks(may_build)
        for line in lines(found, may_build):
            print(line)
        is_right = all(c.is_right is not False for c in found)
        print("\nevery result is right" if is_right else "\nSOME RESULTS ARE WRONG: see above")
        return 0 if is_right else 1

    return exit_code(command, unread=0)


if __name__ == "__main__":
    sys.exit(main())
