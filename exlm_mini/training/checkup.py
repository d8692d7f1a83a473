"""What this machine offers, and whether it computes correctly: the report of ``doctor``."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator

import torch

from exlm_mini.alignment import BACKENDS, build, fastest
from exlm_mini.alignment.check import JUDGE, TOLERANCE, largest_error
from exlm_mini.config.checks import EXTRAS
from exlm_mini.training.provenance import MIB, machine

Rows = Iterator[tuple[str, str]]


def devices() -> list[torch.device]:
    """The CPU, and every GPU that PyTorch sees."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in range(num_gpus))]


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


def tools() -> Rows:
    """Where the tools are that build the compiled backend, or what is missing."""

    def found(find: Callable[[], str]) -> str:
        try:
            return find()
        except build.BuildError as error:
            return str(error)

    yield "C++ compiler", found(build.cxx)
    yield "nvcc", found(build.nvcc)
    yield "kept in", str(build.cache_dir())


def libraries() -> Rows:
    """Versions of the optional libraries by extra, and how to install missing ones."""
    packages = importlib.metadata.packages_distributions()
    for extra in dict.fromkeys(EXTRAS.values()):
        modules = [module for module, its_extra in EXTRAS.items() if its_extra == extra]
        names = [packages[module][0] for module in modules if module in packages]
        versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
        rows = textwrap.wrap(", ".join(versions), 63)
        if missing := [module for module in modules if module not in packages]:
            rows.append(f"missing {', '.join(missing)}: pip install 'exlm-mini[{extra}]'")
        yield from zip([extra, *[""] * len(rows)], rows, strict=False)


def automatic() -> Rows:
    """The backend that ``auto`` uses on each device."""
    for device in devices():
        with warnings.catch_warnings(action="ignore"):  # the report says the same
            yield str(device), fastest(device.type)


def verdict(name: str, device: torch.device) -> tuple[str, str]:
    """The largest errors of a backend by dtype, and ``right``, ``WRONG`` or ``not here`` with the
    reason."""
    if (reason := BACKENDS[name].why_not(device.type)) is not None:
        return "", f"not here: {reason}"
    errors, wrong = [], ""
    for dtype, tolerance in TOLERANCE.items():
        try:
            errors.append(f"{largest_error(name, dtype, device):.0e}")
        except Exception as raised:  # of any kind: the report must continue
            errors.append("-")
            wrong = wrong or f"{type(raised).__name__}: {raised}"
            continue
        if float(errors[-1]) > tolerance:
            wrong = wrong or f"{dtype} differs from enumeration by {errors[-1]}"
    return "".join(f"{error:>9}" for error in errors), f"WRONG: {wrong}" if wrong else "right"


def report() -> Iterator[str]:
    """The lines of the report."""
    about = machine(torch.device("cpu"))
    yield f"exlm-mini {about['exlm_mini']}, commit {about['commit']}"
    for title, rows in (
        ("machine", computer()),
        ("to build with", tools()),
        ("optional libraries", libraries()),
        ("backend that auto uses", automatic()),
    ):
        yield f"\n{title}"
        yield from (f"  {name:<14}{text}" for name, text in rows)
    yield "\nbackends: largest error against enumeration, in float32 and float64"
    for device in devices():
        for name in BACKENDS:
            if name != JUDGE:
                errors, words = verdict(name, device)
                first, *rest = words.split("\n")
                yield f"  {device!s:<8}{name:<12}{errors:<18}  {first}"
                yield from (f"      {line}" for line in rest)
