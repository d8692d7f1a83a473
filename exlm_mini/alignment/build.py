"""Builds the compiled backend where it is to run: once, into a cache, one process at a time.

There are two libraries: ``cpu``, of ``dag_cpu.cpp`` by the C++ compiler, and ``cuda``, of
``dag_cuda.cu`` by nvcc. Their sources lie in ``cuda/`` of a checkout (``exlm_mini/cuda_src`` of an
installed package) and know nothing of torch, so this takes seconds and nvcc need not be of the
version that PyTorch was built with. What is built is kept under a name that holds everything it
depends on. Both go through ninja: the C++ library by ``torch.utils.cpp_extension``, which for CUDA
would insist on equal versions, so nvcc gets a ninja file of its own.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    search_path,
    what_matters,
)

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cpp", ".cu"}
CFLAGS = (
    "-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",
)  # fmt: skip
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-cudart", "static")
SOURCES = {"cpu": "dag_cpu.cpp", "cuda": "dag_cuda.cu"}
LANGUAGES = {"cpu": "C++", "cuda": "CUDA"}
SECONDS = {"cpu": 5, "cuda": 15}
"""How long a build takes, for the person who waits."""


class Plan(NamedTuple):
    """How one of the libraries is built on this machine."""

    device_type: str
    source: Path
    compiler: Tool
    flags: tuple[str, ...]
    machine: str
    """What the flags do not say of the machine it is built for."""

    @property
    def key(self) -> str:
        """A name for everything the built library depends on."""
        digest = hashlib.sha256()
        parts = [torch.__version__, str(torch.version.cuda), sys.platform, self.machine]
        parts += [self.source.name, *self.compiler, *self.flags]
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
        return Plan("cpu", source, cxx(), CFLAGS, machine())
    flags = [flag for name in architectures() for flag in gencode(name)]
    if os.environ.get("CXX"):  # otherwise nvcc chooses
        flags += ["-ccbin", cxx().path]
    compiler = nvcc()
    flags += runtime_flags(compiler.path)
    return Plan("cuda", source, compiler, (*NVCC_FLAGS, *flags), platform.machine())


def build(device_type: str) -> Path:
    """Build a library, or find it built.

    Args:
        device_type: ``cpu`` or ``cuda``. CUDA compiles without a GPU if TORCH_CUDA_ARCH_LIST
            says for which.

    Returns:
        Its path, ``<cache>/<key>/libexlm_dag_<device_type>.so``.

    Raises:
        BuildError: as ``plan``; without ninja, when the compiler fails, and when another process
            holds the lock for more than EXLM_BUILD_TIMEOUT (default 300) seconds.
    """
    todo = plan(device_type)
    target = todo.target
    if _is_whole(target):
        return target
    try:
        timeout = float(os.environ.get("EXLM_BUILD_TIMEOUT") or 300)
    except ValueError as error:
        raise BuildError(f"EXLM_BUILD_TIMEOUT: {error}") from None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.parent / "lock", timeout):
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


@contextlib.contextmanager
def _one_at_a_time(file: Path, timeout: float) -> Iterator[None]:
    """Hold a lock that the system takes back when its holder dies."""
    deadline = time.monotonic() + timeout
    with open(file, "w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has been building for {timeout:g} s (lock {file}); "
                        "wait for it, or set EXLM_BUILD_TIMEOUT to more seconds"
                    ) from None
                time.sleep(0.05)
        yield


def _compile(todo: Plan, target: Path) -> None:
    """Build into a folder of its own and rename: the target is whole or absent."""
    ninja()  # its absence is told before anything else
    language = LANGUAGES[todo.device_type]
    if "ipykernel" not in sys.modules:  # in a notebook the line would become a cell's result
        print(
            f"building the {language} dynamic programme once, about "
            f"{SECONDS[todo.device_type]} s; kept in {target.parent}",
            file=sys.stderr,
            flush=True,
        )
    for left in target.parent.glob("build-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        try:
            if todo.device_type == "cpu":
                _by_cpp_extension(todo, folder)
            else:
                _by_ninja(todo, folder)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stdout", None) or str(error)
            raise BuildError(
                f"the {language} sources do not build with {todo.compiler.path}:\n"
                f"{what_matters(output)}"
            ) from None
        (built,) = Path(folder).glob("*.so")
        _sum_file(target).write_text(_sha256(built))
        os.replace(built, target)


def _by_cpp_extension(todo: Plan, folder: str) -> None:
    from torch.utils import cpp_extension  # slow to import, and rarely needed

    # torch's own OpenMP runtime serves the library as well: one pool of threads, not two.
    ldflags = [] if torch.backends.openmp.is_available() else ["-fopenmp"]
    with _environment(CXX=todo.compiler.path, PATH=search_path()):
        cpp_extension.load(
            "exlm_dag",
            [str(todo.source)],
            extra_cflags=list(todo.flags),
            extra_ldflags=ldflags,
            build_directory=folder,
            is_python_module=False,
            with_cuda=False,
        )


def _by_ninja(todo: Plan, folder: str) -> None:
    output = "libexlm_dag.so"
    command = [todo.compiler.path, *todo.flags, "-shared", str(todo.source), "-o", output]
    line = shlex.join(command).replace("$", "$$")  # as ninja wants it
    rules = f"rule compile\n  command = {line}\nbuild {output}: compile\n"
    Path(folder, "build.ninja").write_text(rules)
    run: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    subprocess.run([ninja()], cwd=folder, check=True, **run)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables of the environment, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
