"""What this machine offers, and whether it computes correctly: the report of ``doctor``."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from exlm_mini.alignment import BACKENDS, build, fastest
from exlm_mini.alignment.check import JUDGE, TOLERANCE, largest_error
from exlm_mini.config.checks import EXTRAS
from exlm_mini.training.provenance import MIB, machine


def report() -> Iterator[str]:
    """The lines of the report."""
    about = machine(torch.device("cpu"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in range(num_gpus))]
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    packages = importlib.metadata.packages_distributions()
    safetensors = importlib.metadata.version("safetensors")
    with warnings.catch_warnings(action="ignore"):  # the report says the same
        automatic = [(str(device), fastest(device.type)) for device in devices]
    sections = {
        "machine": [
            ("system", about["platform"]),
            ("processor", f"{about['cpu']}, {about['num_cpus']} CPUs"),
            ("Python", f"{about['python']}, {sys.executable}"),
            ("PyTorch", f"{about['torch']}, {cuda}, {torch.get_num_threads()} CPU threads"),
            ("needs besides", f"numpy {about['numpy']}, safetensors {safetensors}"),
            *(
                [("GPU", _gpu(device)) for device in devices[1:]]
                or [("GPU", "none for PyTorch")]
            ),
        ],
        "to build with": [
            ("C++ compiler", _found(build.cxx)),
            ("nvcc", _found(build.nvcc)),
            ("kept in", str(build.cache_dir())),
        ],
        "optional libraries": [(name, _version(packages.get(name), name)) for name in EXTRAS],
        "backend that auto uses": automatic,
    }
    yield f"exlm-mini {about['exlm_mini']}, commit {about['commit']}"
    for title, rows in sections.items():
        yield f"\n{title}"
        yield from (f"  {name:<13} {text}" for name, text in rows)
    yield "\nbackends: largest error against enumeration, in float32 and float64"
    for device in devices:
        for name in BACKENDS:
            if name != JUDGE:
                errors, words = verdict(name, device)
                first, *rest = words.split("\n")
                yield f"  {device!s:<8}{name:<12}{errors:<18}  {first}"
                yield from (f"      {line}" for line in rest)


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


def _gpu(device: torch.device) -> str:
    gpu = torch.cuda.get_device_properties(device)
    capability, memory = f"{gpu.major}.{gpu.minor}", gpu.total_memory // MIB
    return f"{gpu.name}, compute capability {capability}, {memory} MiB"


def _found(find: Callable[[], str]) -> str:
    """Where a tool is that builds the compiled backend, or what is missing."""
    try:
        return find()
    except build.BuildError as error:
        return str(error)


def _version(packages: list[str] | None, module: str) -> str:
    """The version of an optional library, from the packages that have it, or how to install it."""
    if packages is None:
        return f"missing: pip install 'exlm-mini[{EXTRAS[module]}]'"
    return importlib.metadata.version(packages[0])
