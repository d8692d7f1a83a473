"""Builds the compiled backend once, on the machine that runs it, and keeps it in a cache.

``torch.utils.cpp_extension`` builds two libraries: ``cpu`` from ``dag_cpu.cpp`` and ``cuda`` from
``dag_cuda.cu``.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).resolve().parents[1] / "cuda_src"
"""Folder of the C++ and CUDA sources; in a checkout, a link to ``cuda``."""
SUFFIXES = {".h", ".cpp", ".cu"}
SOURCES = {"cpu": "dag_cpu.cpp", "cuda": "dag_cuda.cu"}
CFLAGS = [
    "-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",
]  # fmt: skip


class BuildError(RuntimeError):
    """A library could not be built; the message gives the reason and the remedy."""


def cache_dir() -> Path:
    """Folder of the builds: ``exlm_mini`` in TORCH_EXTENSIONS_DIR, XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path.home() / ".cache") / "exlm_mini"


def machine() -> str:
    """Architecture and CPU flags, for -march=native: different machines may share a cache."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    flags = (line for line in lines if line.startswith(("flags", "Features")))
    return platform.machine() + next(flags, platform.processor())


def cxx() -> str:
    """Path of the C++ compiler: the one named in CXX, or c++."""
    name = os.environ.get("CXX") or "c++"
    if path := shutil.which(name):
        return path
    raise BuildError(f"no C++ compiler '{name}': install g++, or set CXX to a compiler")


def nvcc() -> str:
    """Path of the CUDA compiler: in CUDA_HOME, on the PATH, in /usr/local, or in pip's wheels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    wheels = (file for folder in sys.path for file in Path(folder).glob("nvidia/cu*/bin/nvcc"))
    elsewhere = ["nvcc", "/usr/local/cuda/bin/nvcc", *sorted(wheels, reverse=True)]
    for name in [f"{home}/bin/nvcc"] if home else elsewhere:
        if path := shutil.which(str(name)):
            return path
    raise BuildError(
        f"no CUDA compiler nvcc{f' in CUDA_HOME, {home}/bin' if home else ''}: install the CUDA "
        "toolkit (or pip install nvidia-cuda-nvcc nvidia-cuda-cccl), or set CUDA_HOME to its folder"
    )


def build(device_type: str) -> Path:
    """Path of the library for ``cpu`` or ``cuda``, which is built if the cache does not have it.

    CUDA compiles without a GPU if TORCH_CUDA_ARCH_LIST names the architecture.

    Raises:
        BuildError: if a compiler or ninja is missing, or the build fails.
        KeyboardInterrupt: if the build is interrupted, whatever signal handlers are installed.
    """
    source, target = SOURCE_DIR / SOURCES[device_type], machine()
    compiler = cxx() if device_type == "cpu" else nvcc()
    if device_type == "cuda":
        gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        target = os.environ.get("TORCH_CUDA_ARCH_LIST") or str(list(gpus))
    texts = [torch.__version__, compiler, target, *CFLAGS]
    for file in sorted(source.parent.iterdir()):
        if file.suffix in SUFFIXES:
            texts += [file.name, file.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    library = cache_dir() / key / f"exlm_dag_{device_type}.so"
    if library.exists():  # perhaps where nobody may write
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # released by the system when its holder dies
            if not library.exists():  # not built by others while we waited
                _compile(source, compiler, library)
    except OSError as error:
        raise BuildError(
            f"cannot build in {library.parent}: {error}; "
            "set TORCH_EXTENSIONS_DIR to a writable folder"
        ) from None
    return library


def _compile(source: Path, compiler: str, library: Path) -> None:
    """Build in a separate folder, then rename, so that the library is complete or absent."""
    folder = library.parent / "build"
    shutil.rmtree(folder, ignore_errors=True)  # a killed process leaves PyTorch's lock in it
    folder.mkdir()
    # It warns about an nvcc without a GPU, even when only C++ is built.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension  # slow to import, and needed only here

    # Without -fopenmp the library shares PyTorch's OpenMP runtime: one pool of threads, not two.
    links = [] if torch.backends.openmp.is_available() else ["-fopenmp"]
    language = "C++" if source.suffix == ".cpp" else "CUDA"
    if language == "CUDA":
        home = Path(compiler).parents[1]
        cpp_extension.CUDA_HOME = str(home)
        links = ["-L.", *(f"-Wl,-rpath,{home / name}" for name in ("lib64", "lib"))]
        for runtime in home.glob("lib/libcudart.so.*"):  # wheels have no libcudart.so to link
            (folder / "libcudart.so").symlink_to(runtime)
    if not shutil.which("ninja"):  # pip installs it next to Python
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    if "ipykernel" not in sys.modules:  # a notebook would keep the line as output
        print(
            f"compiling the {language} backend; this takes some seconds and happens only once "
            f"(cached in {library.parent})",
            file=sys.stderr,
            flush=True,
        )
    try:
        built = cpp_extension.load(
            library.stem,
            [str(source)],
            extra_cflags=CFLAGS,
            extra_cuda_cflags=["-O3", "-std=c++17"],
            extra_ldflags=links,
            build_directory=str(folder),
            is_python_module=False,
        )
    except RuntimeError as error:
        if "interrupted by user" in str(error):  # ninja got the signal
            raise KeyboardInterrupt from None
        lines = [line for line in str(error).splitlines() if re.search(r"\berror\b", line)]
        reason = "\n".join((lines or [str(error)])[:12])
        raise BuildError(
            f"compiling the {language} sources with {compiler} failed: {reason}"
        ) from None
    os.replace(built, library)
