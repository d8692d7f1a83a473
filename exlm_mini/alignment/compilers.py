"""Finds the tools that build the compiled backend, and the GPUs to build it for.

Each is searched for when it is needed; the error for a missing one names the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

IN_TOOLKIT = Path("/usr/local/cuda/bin/nvcc")
"""The compiler of the CUDA toolkit, which is often not on the PATH."""
IN_WHEELS = "nvidia/cu[0-9]*/bin/nvcc"
"""The compiler that pip installs, below a folder of Python packages."""


class BuildError(RuntimeError):
    """A library could not be built; the message gives the reason and the remedy."""


class Tool(NamedTuple):
    """A compiler."""

    path: str
    version: str
    """The output of ``--version``."""


def cxx() -> Tool:
    """The C++ compiler: CXX, or c++.

    Raises:
        BuildError: if there is none, or it does not report its version.
    """
    name = os.environ.get("CXX") or "c++"
    return _asked(name, f"no C++ compiler '{name}': install g++, or name one in CXX")


def nvcc() -> Tool:
    """The CUDA compiler: that of CUDA_HOME, the first on the PATH, or that of pip's wheels.

    Raises:
        BuildError: if there is none, or it does not report its version.
    """
    remedy = (
        "install the CUDA toolkit (or pip install nvidia-cuda-nvcc nvidia-cuda-cccl), or name its "
        "folder in CUDA_HOME"
    )
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return _asked(f"{home}/bin/nvcc", f"no nvcc in CUDA_HOME, {home}/bin: {remedy}")
    wheels = sorted(file for folder in sys.path for file in Path(folder).glob(IN_WHEELS))
    others = [file for file in (IN_TOOLKIT, *reversed(wheels)) if file.is_file()]
    path = shutil.which("nvcc") or str((others or [IN_TOOLKIT])[0])
    return _asked(path, f"no CUDA compiler nvcc: {remedy}")


def runtime_flags(nvcc_path: str) -> list[str]:
    """Link options for a CUDA runtime that this nvcc would not find by itself.

    A toolkit has it in ``lib64``, pip's wheels have it in ``lib``.
    """
    folder = Path(nvcc_path).resolve().parents[1] / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").is_file() else []


def ninja() -> str:
    """Path of ninja, on the PATH or beside Python, where pip puts it.

    Raises:
        BuildError: if there is none.
    """
    folders = [os.environ.get("PATH") or os.defpath, str(Path(sys.executable).parent)]
    path = shutil.which("ninja", path=os.pathsep.join(folders))
    if path is None:
        raise BuildError("no ninja to build with: pip install ninja")
    return path


def _asked(name: str, complaint: str) -> Tool:
    """Path and version of a compiler."""
    path = shutil.which(name)
    if path is None:
        raise BuildError(complaint)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True)
    if answer.returncode != 0:
        raise BuildError(f"'{path} --version' fails: {what_matters(answer.stderr)}")
    return Tool(path, answer.stdout)


def architectures() -> list[str]:
    """GPUs to compile for, as 9.0 or 9.0+PTX: TORCH_CUDA_ARCH_LIST, or those of this machine.

    Raises:
        BuildError: if neither names one.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if names := listed.replace(";", " ").split():
        return names
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not gpus:
        raise BuildError(
            "no GPU to compile for: name a compute capability in TORCH_CUDA_ARCH_LIST, "
            "for example 9.0"
        )
    found = {torch.cuda.get_device_capability(gpu) for gpu in gpus}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def gencode(architecture: str) -> list[str]:
    """Options of nvcc for one architecture; PTX also serves later GPUs."""
    number, _, ptx = architecture.partition("+")
    number = number.replace(".", "")
    codes = [f"sm_{number}", *([f"compute_{number}"] if ptx else [])]
    return [f"-gencode=arch=compute_{number},code={code}" for code in codes]


def what_matters(output: str, most: int = 12) -> str:
    """The lines of a compiler's output that name an error, or else its last lines."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    wanted = re.compile(r"\berror\b|\bfatal\b|undefined (reference|symbol)|not found", re.I)
    found = [line for line in lines if wanted.search(line)]
    if len(found) > most:
        found = [*found[:most], f"... and {len(found) - most} more"]
    return "\n".join(found or lines[-most:])
