"""Show what this machine offers and check that it computes correctly. ::

    python -m exlm_mini.doctor

The command builds the compiled backend. On every device, it compares every alignment backend with
the enumeration of all paths on a few small graphs: likelihood, gradients and best path, in float32
and float64. A missing library is only reported; the exit code is 1 only if a result is wrong.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator

from exlm_mini.config.checks import EXTRAS
from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    import torch

    from exlm_mini import alignment
    from exlm_mini.alignment import build
    from exlm_mini.training.provenance import machine

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ["cpu", *(f"cuda:{n}" for n in range(num_gpus))]
    about = machine(torch.device("cpu"))
    seen = "{device}, compute capability {compute_capability}, {gpu_memory_mib} MiB"
    gpus = [seen.format_map(machine(torch.device(device))) for device in devices[1:]]
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    packages = importlib.metadata.packages_distributions()
    with warnings.catch_warnings(action="ignore"):  # the report gives the reason itself
        automatic = [(d, alignment.fastest(d.partition(":")[0])) for d in devices]
    sections = {
        "machine": [
            ("system", about["platform"]),
            ("processor", f"{about['cpu']}, {about['num_cpus']} CPUs"),
            ("Python", f"{about['python']}, {sys.executable}"),
            ("PyTorch", f"{about['torch']}, {cuda}, {torch.get_num_threads()} CPU threads"),
            *([("GPU", gpu) for gpu in gpus] or [("GPU", "none that PyTorch can use")]),
        ],
        "compilers": [
            ("C++ compiler", _found(build.cxx)),
            ("nvcc", _found(build.nvcc)),
            ("cache folder", str(build.cache_dir())),
        ],
        "optional libraries": [(name, _version(packages.get(name), name)) for name in EXTRAS],
        "backend that auto uses": automatic,
    }  # fmt: skip
    yield f"exlm-mini {about['exlm_mini']}, commit {about['commit']}"
    for title, rows in sections.items():
        yield f"\n{title}"
        yield from (f"  {name:<13} {text}" for name, text in rows)
    yield "\nbackends: largest error against enumeration, in float32 and float64"
    for device in devices:
        for name in alignment.BACKENDS:
            if name != "enumerate":
                first, *rest = verdict(name, device).split("\n")
                yield f"  {device:<8}{name:<12}{first}"
                yield from (f"      {line}" for line in rest)


def verdict(name: str, device: str) -> str:
    """A backend's largest errors with ``right`` or ``WRONG``, or why it is ``not available``."""
    from exlm_mini.alignment import BACKENDS
    from exlm_mini.alignment.check import TOLERANCE, largest_error

    if (reason := BACKENDS[name].why_not(device.partition(":")[0])) is not None:
        return f"not available: {reason}"
    errors, wrong = [], ""
    for dtype, tolerance in TOLERANCE.items():
        try:
            errors.append(f"{largest_error(name, dtype, device):.0e}")
        except Exception as raised:  # any error: the report must go on
            errors.append("-")
            wrong = wrong or f"{type(raised).__name__}: {raised}"
            continue
        if float(errors[-1]) > tolerance:
            wrong = wrong or f"{dtype} differs from enumeration by {errors[-1]}"
    return f"{'  '.join(errors)}  {f'WRONG: {wrong}' if wrong else 'right'}"


def _found(find: Callable[[], str]) -> str:
    """Path of a compiler for the compiled backend, or a message that it is missing."""
    try:
        return find()
    except RuntimeError as error:
        return str(error)


def _version(packages: list[str] | None, module: str) -> str:
    """The version of an optional library, or the extra that installs it if it is missing."""
    if packages is None:
        return f"not installed; it comes with the extra {EXTRAS[module]}"
    return importlib.metadata.version(packages[0])


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (right), 1 (wrong result), 2 (user error) or 130 (interrupted)."""

    def command() -> int:
        command_parser("python -m exlm_mini.doctor", __doc__).parse_args(argv)
        is_right = True
        for line in report():
            print(line)
            is_right &= "  WRONG: " not in line
        print("\nall results are right" if is_right else "\nSOME RESULTS ARE WRONG: see above")
        return 0 if is_right else 1

    return exit_code(command, unread=0)


if __name__ == "__main__":
    sys.exit(main())
