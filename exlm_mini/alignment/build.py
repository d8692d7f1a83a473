"""Builds the compiled backend on the machine that runs it: once, into a cache, under a lock.

There are two libraries: the C++ compiler makes ``cpu`` from ``dag_cpu.cpp``, nvcc makes ``cuda``
from ``dag_cuda.cu``. The sources are in ``cuda/`` of a checkout (``exlm_mini/cuda_src`` of an
installed package) and include no header of torch, so this takes seconds. The name of a build is a
hash of everything it was made from. ninja runs the compilers from a file written here;
``torch.utils.cpp_extension`` would include torch, and requires the nvcc version that PyTorch was
built with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from exlm_mini.alignment.compilers import (
    BuildError,
    Tool,
    architectures,
    cxx,
    gencode,
    ninja,
    nvcc,
    runtime_flags,
    what_matters,
)

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cpp", ".cu"}
CFLAGS = (
    "-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi", "-fPIC",
)  # fmt: skip
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC")
SOURCES = {"cpu": "dag_cpu.cpp", "cuda": "dag_cuda.cu"}
LANGUAGES = {"cpu": "C++", "cuda": "CUDA"}


class Plan(NamedTuple):
    """How one of the libraries is built on this machine."""

    device_type: str
    source: Path
    compiler: Tool
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    machine: str
    """What else of the machine matters, besides the flags."""

    @property
    def key(self) -> str:
        """A hash of everything the library depends on."""
        digest = hashlib.sha256()
        parts = [torch.__version__, str(torch.version.cuda), sys.platform, self.machine]
        parts += [self.source.name, *self.compiler, *self.flags, *self.link_flags]
        for file in sorted(self.source.parent.iterdir()):
            if file.suffix in SUFFIXES:
                parts += [file.name, file.read_text()]
        for part in parts:
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:16]

    @property
    def target(self) -> Path:
        """Path of the built library, whether it exists yet or not."""
        return cache_dir() / self.key / f"libexlm_dag_{self.device_type}.so"


# ---- inputs ----


def source_dir() -> Path:
    """The folder of the C++ and CUDA sources.

    Raises:
        BuildError: if neither a checkout nor the installed package has them.
    """
    candidates = [PACKAGE.parent / "cuda", PACKAGE / "cuda_src"]
    for folder in candidates:
        if (folder / SOURCES["cpu"]).is_file():
            return folder
    raise BuildError(
        f"no C++ sources in {' or '.join(map(str, candidates))}: reinstall exlm-mini"
    )


def cache_dir() -> Path:
    """Folder of the builds: TORCH_EXTENSIONS_DIR, XDG_CACHE_HOME, or ~/.cache."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder) / "exlm_mini"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exlm_mini"


def machine() -> str:
    """What -march=native depends on, because different machines may share a cache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


# ---- building ----


def plan(device_type: str) -> Plan:
    """How to build the library for ``cpu`` or ``cuda`` on this machine.

    Raises:
        BuildError: without sources or a compiler, for CUDA also if the target GPU is unknown, and
            for any other device.
    """
    if device_type not in SOURCES:
        raise BuildError(f"it is written for {' and '.join(SOURCES)}, not for '{device_type}'")
    source = source_dir() / SOURCES[device_type]
    if device_type == "cpu":
        # Share torch's OpenMP runtime: one pool of threads, not two.
        openmp = () if torch.backends.openmp.is_available() else ("-fopenmp",)
        return Plan("cpu", source, cxx(), CFLAGS, openmp, machine())
    targets = [flag for name in architectures() for flag in gencode(name)]
    if os.environ.get("CXX"):  # otherwise nvcc chooses
        targets += ["-ccbin", cxx().path]
    compiler = nvcc()
    runtime = ("-cudart", "static", *runtime_flags(compiler.path))
    flags, link_flags = (*NVCC_FLAGS, *targets), (*targets, *runtime)
    return Plan("cuda", source, compiler, flags, link_flags, platform.machine())


def build(device_type: str) -> Path:
    """Build a library unless the cache has it.

    Args:
        device_type: ``cpu`` or ``cuda``. CUDA compiles without a GPU if TORCH_CUDA_ARCH_LIST
            names the architecture.

    Returns:
        Its path, ``<cache>/<key>/libexlm_dag_<device_type>.so``.

    Raises:
        BuildError: as ``plan``; without ninja, and when the compiler fails.
    """
    todo = plan(device_type)
    target = todo.target
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / "lock", "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # released by the system when its holder dies
            if not _is_whole(target):  # not built by others while we waited
                _compile(todo, target)
    except OSError as error:
        raise BuildError(
            f"cannot build in {target.parent}: {error}; "
            "set TORCH_EXTENSIONS_DIR to a writable folder"
        ) from None
    return target


def _is_whole(target: Path) -> bool:
    """The library is intact; loading a damaged one can crash the process."""
    try:
        return _sum_file(target).read_text() == _sha256(target)
    except (OSError, UnicodeDecodeError):
        return False


def _sum_file(target: Path) -> Path:
    """The file that holds the sha256 of a library."""
    return target.with_suffix(".sha256")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compile(todo: Plan, target: Path) -> None:
    """Build in a temporary folder and rename, so the target is complete or absent."""
    command = [ninja()]  # a missing ninja is reported first
    language = LANGUAGES[todo.device_type]
    if "ipykernel" not in sys.modules:  # in a notebook the line would become a cell's result
        print(
            f"building the {language} dynamic programme once, which takes some seconds; kept in "
            f"{target.parent}",
            file=sys.stderr,
            flush=True,
        )
    for left in target.parent.glob("build-*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        Path(folder, "build.ninja").write_text(_rules(todo))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(
                f"the {language} sources do not build with {todo.compiler.path}:\n"
                f"{what_matters(done.stdout + done.stderr)}"
            )
        built = Path(folder, "built.so")
        _sum_file(target).write_text(_sha256(built))
        os.replace(built, target)


def _rules(todo: Plan) -> str:
    """The build file for ninja: compile, then link."""

    def command(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")  # as ninja wants it

    compiler = todo.compiler.path
    compiling = command(compiler, *todo.flags, "-c", str(todo.source), "-o", "built.o")
    linking = command(compiler, "-shared", "built.o", "-o", "built.so", *todo.link_flags)
    return (
        f"rule compile\n  command = {compiling}\n"
        f"rule link\n  command = {linking}\n"
        "build built.o: compile\nbuild built.so: link built.o\n"
    )
