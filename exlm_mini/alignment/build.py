"""Builds the compiled backend where it is to run: once, into a cache, one process at a time.

There are two libraries: ``cpu``, of ``dag_cpu.cpp`` by the C++ compiler, and ``cuda``, of
``dag_cuda.cu`` by nvcc. Their sources lie in ``cuda/`` of a checkout (``exlm_mini/cuda_src`` of an
installed package) and include nothing of torch, so this takes seconds. What is built is kept under
a name that depends on everything it was built from. ninja runs both compilers, from a file that is
written here: ``torch.utils.cpp_extension`` would include torch, and insists on an nvcc of the
version that PyTorch was built with.
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
    """What the flags do not say of the machine it is built for."""

    @property
    def key(self) -> str:
        """A name for everything the built library depends on."""
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
        """Where the built library is, or will be."""
        return cache_dir() / self.key / f"libexlm_dag_{self.device_type}.so"


# ---- what is there ----


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
    """Where builds are kept: TORCH_EXTENSIONS_DIR, XDG_CACHE_HOME, or ~/.cache."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder) / "exlm_mini"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exlm_mini"


def machine() -> str:
    """What -march=native depends on: a cache may be shared by unlike machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


# ---- building ----


def plan(device_type: str) -> Plan:
    """How the library for ``cpu`` or ``cuda`` is to be built here.

    Raises:
        BuildError: without sources or compiler, for CUDA also when no GPU to compile for is
            known, and for any other device.
    """
    if device_type not in SOURCES:
        raise BuildError(f"it is written for {' and '.join(SOURCES)}, not for '{device_type}'")
    source = source_dir() / SOURCES[device_type]
    if device_type == "cpu":
        # torch's own OpenMP runtime serves the library as well: one pool of threads, not two.
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
    """Build a library, or find it built.

    Args:
        device_type: ``cpu`` or ``cuda``. CUDA compiles without a GPU if TORCH_CUDA_ARCH_LIST
            says for which.

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
            fcntl.flock(stream, fcntl.LOCK_EX)  # the system takes it back when its holder dies
            if not _is_whole(target):  # nobody finished it while we waited
                _compile(todo, target)
    except OSError as error:
        raise BuildError(
            f"cannot build in {target.parent}: {error}; "
            "set TORCH_EXTENSIONS_DIR to a writable folder"
        ) from None
    return target


def _is_whole(target: Path) -> bool:
    """A library is as it was built: to load a damaged one can be the end of the process."""
    try:
        return _sum_file(target).read_text() == _sha256(target)
    except (OSError, UnicodeDecodeError):
        return False


def _sum_file(target: Path) -> Path:
    """Where the sha256 of a library stands."""
    return target.with_suffix(".sha256")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compile(todo: Plan, target: Path) -> None:
    """Build into a folder of its own and rename: the target is whole or absent."""
    command = [ninja()]  # where there is none, this is said before anything else
    language = LANGUAGES[todo.device_type]
    if "ipykernel" not in sys.modules:  # in a notebook the line would become a cell's result
        print(
            f"building the {language} dynamic programme once, which takes some seconds; kept in "
            f"{target.parent}",
            file=sys.stderr,
            flush=True,
        )
    for left in target.parent.glob("build-*"):  # by a process that was killed
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
    """A file for ninja: compile, then link."""

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
