"""The CUDA kernels as alignment backends: on a CPU as ``fibers``, on a GPU as ``cuda``.

``cuda/dag_fibers.cpp`` compiles the very templates that nvcc compiles, and the threads of a block
run as fibers whose order is shuffled between barriers. The package's own code calls the kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from exlm_mini.alignment import BACKENDS, Backend, native
from exlm_mini.alignment.autograd import with_gradients
from exlm_mini.alignment.build import BuildError, cxx, nvcc
from exlm_mini.alignment.native import CUDA_LAYOUT, Kernels

CUDA = Path(__file__).resolve().parents[2] / "cuda"


class DivergenceError(Exception):
    """Raised when threads of a block wait for others that have already left."""


def compile_fibers(source_dir: Path, target: Path, *flags: str) -> ctypes.CDLL:
    """Compile the fiber library to ``target``, and load it."""
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", *flags]
    source = str(source_dir / "dag_fibers.cpp")
    command = [cxx(), *options, "-o", str(target), source]
    subprocess.run(command, check=True, timeout=300)
    return ctypes.CDLL(str(target))


@cache
def intact_library() -> ctypes.CDLL:
    """The fiber library of this checkout, with the kernels as they are."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_fibers(CUDA, Path(folder, "fibers.so"), "-Wall", "-Werror")


def on_fibers(library: ctypes.CDLL, seed: int = 1) -> Kernels:
    """The GPU's kernels to be called on a CPU; with seed 0, blocks and threads run in order."""
    return Kernels(
        library,
        "dag_fibers_",
        CUDA_LAYOUT,
        lambda device: ctypes.c_uint64(seed),
        lambda result: DivergenceError(),
    )


def fiber_backend() -> Backend:
    """The fibers as a backend, in the form that ``BACKENDS`` holds."""
    kernels = on_fibers(intact_library())
    log_likelihood = with_gradients(
        lambda *graph: native.log_likelihood_with(kernels, graph),
        lambda grad_B, *rest: native.gradients_with(kernels, grad_B, rest[:4], rest[4:]),
    )
    return Backend(
        lambda *graph: log_likelihood(*graph)[0],
        lambda *graph: native.viterbi_with(kernels, graph),
    )


def can_be_built(device: str) -> None:
    """Skip the test if the compiler or the GPU is missing; else a failing backend is a failure."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        (cxx if device == "cpu" else nvcc)()
    except BuildError as error:
        pytest.skip(str(error))


def gpu_backend() -> Backend:
    """The backend ``native`` on the GPU, for tensors that are on the CPU."""
    native = BACKENDS["native"]
    return Backend(
        lambda *graph: native.log_likelihood(*(t.cuda() for t in graph)).cpu(),
        lambda *graph: tuple(t.cpu() for t in native.viterbi(*(t.cuda() for t in graph))),
    )


@pytest.fixture(autouse=True)
def works_here(request):
    """Add ``fibers`` or ``cuda`` to the backends if a test uses it; skip what cannot be built."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name = parameters.get("backend")
    if name in ("native", "fibers", "cuda"):
        can_be_built("cuda" if name == "cuda" else "cpu")
    if name == "fibers":
        BACKENDS[name] = fiber_backend()
    elif name == "cuda":
        assert native.why_not("cuda") is None
        BACKENDS[name] = gpu_backend()
    assert name not in BACKENDS or BACKENDS[name].why_not("cpu") is None
    yield
    BACKENDS.pop("fibers", None)
    BACKENDS.pop("cuda", None)
