"""The dynamic programme in C++: tiled over states, rescaled, on all CPU threads.

Shapes: B rows, M targets, L states.

Sources lie in ``cuda/`` of a checkout (``exlm_mini/cuda_src`` of an installed package) and are
built on first use: through ninja, into a cache, under a name that holds everything the result
depends on. They know nothing of torch, so this takes seconds; ctypes calls them, and
``torch.library`` operators wrap the calls for autograd and ``torch.compile``.

float32 and float64 are computed as such. Rescaled probabilities hold one exponent per target and
tile of states; each row carries a bound of what underflow may have taken away, and a row whose
bound exceeds rounding is done again in log space and double precision. Against float64 on the
same float32 inputs the gradients differ by about 1e-6 of the largest (measured to M = 256), the
likelihood by 1e-7 of itself. No path gives -inf and zero gradients, NaN among the scores NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from exlm_mini.autograd import differentiable_once

PACKAGE = Path(__file__).resolve().parents[1]
CFLAGS = (
    "-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",
)  # fmt: skip
LIBRARY = "libexlm_dag.so"
NAMES = {torch.float32: "float32", torch.float64: "float64"}
RESULTS = {
    1: (MemoryError, "the dynamic programme ran out of memory"),
    2: (ValueError, "num_targets_B must lie in 1..M and num_states_B in 1..L"),
}


class BuildError(RuntimeError):
    """The C++ sources could not be built here; the message says why, and the remedy."""


# ---- building ----


def source_dir() -> Path:
    """The folder of the C++ sources.

    Raises:
        BuildError: if neither a checkout nor the installed package has them.
    """
    candidates = [PACKAGE.parent / "cuda", PACKAGE / "cuda_src"]
    for folder in candidates:
        if (folder / "dag_cpu.cpp").is_file():
            return folder
    raise BuildError(
        f"no C++ sources in {' or '.join(map(str, candidates))}: reinstall exlm-mini"
    )


def cache_dir() -> Path:
    """Where builds are kept: TORCH_EXTENSIONS_DIR, XDG_CACHE_HOME, or ~/.cache."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder) / "exlm_mini"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exlm_mini"


def _compiler() -> tuple[str, str]:
    """Path and version of the C++ compiler: CXX, or c++."""
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler '{name}': install g++, or name one in CXX")
    version = subprocess.run([path, "--version"], capture_output=True, text=True)
    if version.returncode != 0:
        raise BuildError(f"'{path} --version' fails: {_what_matters(version.stderr)}")
    return path, version.stdout


def _machine() -> str:
    """What -march=native depends on: a cache may be shared by unlike machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


def build_key(compiler: tuple[str, str]) -> str:
    """A name for everything the built library depends on."""
    digest = hashlib.sha256()
    parts = [torch.__version__, sys.platform, _machine(), *compiler, *CFLAGS]
    for file in sorted(source_dir().iterdir()):
        if file.suffix in {".h", ".cpp"}:
            parts += [file.name, file.read_text()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _what_matters(output: str, most: int = 12) -> str:
    """The lines of a compiler's output that name the trouble; else its last ones."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    wanted = re.compile(r"\berror\b|\bfatal\b|undefined (reference|symbol)|not found", re.I)
    # "ninja: build stopped" and Python's own summary repeat that something went wrong.
    noise = re.compile(r"^(ninja:|Error building extension|FAILED:)")
    found = [line for line in lines if wanted.search(line) and not noise.search(line)]
    if len(found) > most:
        found = [*found[:most], f"... and {len(found) - most} more"]
    return "\n".join(found or lines[-most:])


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


@contextlib.contextmanager
def _tools(compiler: str) -> Iterator[None]:
    """This compiler for cpp_extension, and a ninja installed beside Python on the PATH."""
    before = {name: os.environ.get(name) for name in ("CXX", "PATH")}
    os.environ["CXX"] = compiler
    os.environ["PATH"] = (
        f"{before['PATH'] or os.defpath}{os.pathsep}{Path(sys.executable).parent}"
    )
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _compile(compiler: str, target: Path) -> None:
    """Build into a folder of its own and rename: the target is whole or absent."""
    from torch.utils import cpp_extension  # slow to import, and rarely needed

    # torch's own OpenMP runtime serves the library as well: one pool of threads, not two.
    ldflags = [] if torch.backends.openmp.is_available() else ["-fopenmp"]
    with (
        _tools(compiler),
        tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder,
    ):
        try:
            cpp_extension.load(
                "exlm_dag",
                [str(source_dir() / "dag_cpu.cpp")],
                extra_cflags=list(CFLAGS),
                extra_ldflags=ldflags,
                build_directory=folder,
                is_python_module=False,
                with_cuda=False,
            )
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            if "Ninja is required" in str(error):
                raise BuildError("no ninja to build with: pip install ninja") from None
            raise BuildError(
                f"the C++ sources do not build with {compiler}:\n{_what_matters(str(error))}"
            ) from None
        (built,) = Path(folder).glob("*.so")
        os.replace(built, target)


def build() -> Path:
    """Build the library, or find it built.

    Returns:
        Its path, ``<cache>/<key>/libexlm_dag.so``.

    Raises:
        BuildError: without sources, compiler or ninja, when the compiler fails, and when another
            process holds the lock for more than EXLM_BUILD_TIMEOUT (default 300) seconds.
    """
    compiler = _compiler()
    folder = cache_dir() / build_key(compiler)
    target = folder / LIBRARY
    if target.exists():
        return target
    try:
        timeout = float(os.environ.get("EXLM_BUILD_TIMEOUT") or 300)
    except ValueError as error:
        raise BuildError(f"EXLM_BUILD_TIMEOUT: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / "lock", timeout):
            if not target.exists():  # nobody finished it while we waited
                _compile(compiler[0], target)
    except OSError as error:
        raise BuildError(
            f"cannot build in {folder}: {error}; set TORCH_EXTENSIONS_DIR to a writable folder"
        ) from None
    return target


@functools.cache
def _load() -> ctypes.CDLL | BuildError:
    """The library, or why there is none; tried once per process."""
    try:
        return ctypes.CDLL(str(build()))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"the built library does not load: {error}")


def why_not() -> str | None:
    """Why this backend does not work here; none if it does. Builds it if need be."""
    found = _load()
    return str(found) if isinstance(found, BuildError) else None


def _call(function: str, dtype: torch.dtype, *arguments: Tensor | int) -> None:
    """Call ``dag_<function>_<dtype>``: tensors as pointers, integers as int64, then threads."""
    library = _load()
    if isinstance(library, BuildError):
        raise BuildError(str(library))
    result = getattr(library, f"dag_{function}_{NAMES[dtype]}")(
        *(
            ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x)
            for x in arguments
        ),
        ctypes.c_int(torch.get_num_threads()),
    )
    if result != 0:
        kind, message = RESULTS[result]
        raise kind(message)


# ---- operators ----


def _graph(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor | int, ...]:
    """The arguments all C functions begin with, checked: a wrong shape would read elsewhere."""
    B, M, L = log_emission_BML.shape
    dtype = log_emission_BML.dtype
    if dtype not in NAMES or log_transition_BLL.dtype != dtype:
        raise ValueError(
            f"want float32 or float64 for both, got emission {dtype} and transition "
            f"{log_transition_BLL.dtype}"
        )
    if log_transition_BLL.shape != (B, L, L):
        raise ValueError(f"want transition {(B, L, L)}, got {tuple(log_transition_BLL.shape)}")
    for count_B in (num_targets_B, num_states_B):
        if count_B.shape != (B,) or count_B.dtype != torch.int64:
            raise ValueError(f"want counts int64 {(B,)}, got {count_B.dtype} {count_B.shape}")
    tensors = (log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return (*(t.contiguous() for t in tensors), B, M, L)


def _sweep_buffers(log_emission_BML: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mantissa, exponent and info of both sweeps, as ``cuda/dag_cpu.cpp`` lays them out."""
    B, M, L = log_emission_BML.shape
    tile = 64 // log_emission_BML.element_size()
    num_tiles = (L + tile - 1) // tile
    integers = {"dtype": torch.int32, "device": log_emission_BML.device}
    return (
        log_emission_BML.new_empty(B, 3, M, num_tiles * tile),
        torch.empty(B, 6, M, num_tiles, **integers),
        torch.empty(B, 2, **integers),
    )


@torch.library.custom_op(
    "exlm_mini::dag_log_likelihood",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor emission, Tensor transition, Tensor num_targets, Tensor num_states)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _log_likelihood(emission, transition, num_targets, num_states):
    graph = _graph(emission, transition, num_targets, num_states)
    buffers = _sweep_buffers(emission)
    log_likelihood_B = emission.new_empty(emission.shape[0])
    _call("log_likelihood", emission.dtype, *graph, *buffers, log_likelihood_B)
    return log_likelihood_B, *buffers


@_log_likelihood.register_fake
def _(emission, transition, num_targets, num_states):
    return emission.new_empty(emission.shape[0]), *_sweep_buffers(emission)


@torch.library.custom_op(
    "exlm_mini::dag_gradients",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor grad, Tensor emission, Tensor transition, Tensor num_targets,"
    " Tensor num_states, Tensor mantissa, Tensor exponent, Tensor info) -> (Tensor, Tensor)",
)
def _gradients(grad, emission, transition, num_targets, num_states, *buffers):
    graph = _graph(emission, transition, num_targets, num_states)
    grad_emission = torch.empty_like(graph[0])
    grad_transition = torch.empty_like(graph[1])
    gradients = (grad_emission, grad_transition)
    _call("gradients", emission.dtype, *graph, *buffers, grad.contiguous(), *gradients)
    return gradients


@_gradients.register_fake
def _(grad, emission, transition, num_targets, num_states, mantissa, exponent, info):
    layout = {"memory_format": torch.contiguous_format}
    return torch.empty_like(emission, **layout), torch.empty_like(transition, **layout)


@torch.library.custom_op(
    "exlm_mini::dag_viterbi",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor emission, Tensor transition, Tensor num_targets, Tensor num_states)"
    " -> (Tensor, Tensor)",
)
def _viterbi(emission, transition, num_targets, num_states):
    graph = _graph(emission, transition, num_targets, num_states)
    path_BM = torch.empty(emission.shape[:2], dtype=torch.int64)
    log_score_B = emission.new_empty(emission.shape[0])
    _call("viterbi", emission.dtype, *graph, path_BM, log_score_B)
    return path_BM, log_score_B


@_viterbi.register_fake
def _(emission, transition, num_targets, num_states):
    return (
        emission.new_empty(emission.shape[:2], dtype=torch.int64),
        emission.new_empty(emission.shape[0]),
    )


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as the sweeps, for nothing
    ctx.save_for_backward(*inputs, *output[1:])


@differentiable_once
def _backward(ctx, grad_B, *_):
    if grad_B is None:
        return None, None, None, None
    return *_gradients(grad_B, *ctx.saved_tensors), None, None


_log_likelihood.register_autograd(_backward, setup_context=_keep_for_backward)


def log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> Tensor:
    """See ``alignment.dag_log_likelihood``; on CPU, float32 or float64, differentiable once.

    Raises:
        BuildError: if the library cannot be built here (``why_not`` tells beforehand).
    """
    graph = (log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return _log_likelihood(*graph)[0]


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``alignment.viterbi``; sums in double precision, on CPU. NaN has no path, and NaN."""
    return _viterbi(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
