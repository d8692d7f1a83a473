"""The compiled dynamic programme: C++ on all CPU threads, CUDA on a GPU.

Shapes: B rows, M targets, L states.

``build`` compiles a library for each, which is called through ctypes; for compilers and transforms,
``torch.library`` operators wrap the calls. On a GPU all work goes to the current stream, and the
host never waits.

float32 and float64 are computed in their own precision, as rescaled probabilities with one exponent
per target and tile of states. The loss by underflow is bounded for each row; a row whose bound
exceeds the rounding error is computed again in log space and double precision. Compared with
float64 on the same float32 inputs, the gradients differ by about 1e-6 of the largest (measured on a
CPU up to M = 256) and the likelihood by 1e-7 of itself. A row without a path gives -inf and zero
gradients, and NaN among the scores gives NaN.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import vectorized
from exlm_mini.alignment.autograd import is_eager, is_in_torch_func, with_gradients
from exlm_mini.alignment.build import BuildError, build
from exlm_mini.alignment.graphs import Graph

NAMES = {torch.float32: "float32", torch.float64: "float64"}


# ---- the libraries ----


class Layout(NamedTuple):
    """Layout of the working memory of a device's kernels."""

    tile: dict[torch.dtype, int]
    """Number of states that share an exponent, by dtype."""
    num_planes: int
    """Second dimension of the mantissa buffer, (B, num_planes, M, tiles * tile)."""
    keeps_came_from: bool
    """Whether ``viterbi`` needs an int32 workspace (B, M, L)."""


# Tile sizes as in dag_simd.h and dag_block.h.
CPU_LAYOUT = Layout({torch.float32: 16, torch.float64: 8}, 3, False)
CUDA_LAYOUT = Layout({torch.float32: 32, torch.float64: 32}, 4, True)


class Kernels(NamedTuple):
    """The functions of one library and how they are called."""

    library: ctypes.CDLL
    prefix: str
    layout: Layout
    last_argument: Callable[[torch.device], ctypes.c_int | ctypes.c_void_p | ctypes.c_uint64]
    explain: Callable[[int], Exception]
    """Turns a non-zero result of a function into an exception."""

    def call(self, function: str, emission: Tensor, *arguments: Tensor | int) -> None:
        """Call ``<prefix><function>_<dtype>``: tensors as pointers, integers as int64."""
        if not len(emission):
            return
        values = [
            ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x)
            for x in arguments
        ]
        name = f"{self.prefix}{function}_{NAMES[emission.dtype]}"
        with torch.cuda.device_of(emission):  # does nothing on a CPU
            result = getattr(self.library, name)(*values, self.last_argument(emission.device))
        if result != 0:
            raise self.explain(result)


def _num_threads(device: torch.device) -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _explain_cpu(result: int) -> Exception:
    if result == 1:
        return MemoryError("the dynamic programme ran out of memory")
    return ValueError("num_targets must lie in 1..M and num_states in 1..L")


@functools.cache
def _load(device_type: str) -> Kernels | BuildError:
    """The kernels for a type of device, or an error that tells why there are none; tried once."""
    try:
        if device_type not in ("cpu", "cuda"):
            raise BuildError(
                f"the compiled backend supports only CPU and CUDA, not '{device_type}'"
            )
        if device_type == "cuda" and not torch.cuda.is_available():
            raise BuildError("PyTorch sees no CUDA GPU")
        library = ctypes.CDLL(str(build(device_type)))
        if device_type == "cpu":
            return Kernels(library, "dag_", CPU_LAYOUT, _num_threads, _explain_cpu)
        text = library.dag_cuda_error
        text.restype = ctypes.c_char_p

        def explain_cuda(result: int) -> Exception:
            return RuntimeError(f"CUDA: {text(result).decode()}")

        return Kernels(library, "dag_cuda_", CUDA_LAYOUT, _stream, explain_cuda)
    except BuildError as error:
        return error
    except Exception as error:  # whatever it is, other backends work
        return BuildError(f"{type(error).__name__}: {error}")


@functools.cache
def why_not(device_type: str) -> str | None:
    """Why this backend does not work on a type of device such as ``cpu``; None if it does.

    The first call builds the library if necessary and runs it once: a library may load and still
    fail, for example if the driver is older than the compiler.
    """
    kernels = _load(device_type)
    if isinstance(kernels, BuildError):
        return str(kernels)
    try:
        with torch._C._DisableFuncTorch():  # a transform would wrap the tensors
            score = torch.zeros(1, 1, 1, dtype=torch.float32, device=device_type)
            one = torch.ones(1, dtype=torch.int64, device=device_type)
            if type(score) is Tensor:  # not a fake one, which has no values
                log_likelihood_with(kernels, (score, score, one, one))[0].item()
    except Exception as error:
        return f"the library was built but fails to run: {error}"
    return None


def _kernels(device: torch.device) -> Kernels:
    kernels = _load(device.type)
    if isinstance(kernels, BuildError):
        raise BuildError(str(kernels))
    return kernels


# ---- calling the kernels ----


def _contiguous(arguments: Sequence[Tensor]) -> Graph:
    return Graph(*(tensor.contiguous() for tensor in arguments))


def sweep_buffers(log_emission_BML: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised mantissa, exponent and info of both sweeps, laid out as in ``cuda/``."""
    B, M, L = log_emission_BML.shape
    tile = layout.tile[log_emission_BML.dtype]
    num_tiles = (L + tile - 1) // tile
    return (
        log_emission_BML.new_empty(B, layout.num_planes, M, num_tiles * tile),
        log_emission_BML.new_empty(B, 6, M, num_tiles, dtype=torch.int32),
        log_emission_BML.new_empty(B, 2, dtype=torch.int32),
    )


def log_likelihood_with(kernels: Kernels, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """log_likelihood_B, and the buffers of the sweeps, which ``gradients_with`` takes."""
    graph = _contiguous(arguments)
    emission = graph.log_emission_BML
    log_likelihood_B = emission.new_empty(len(emission))
    sweeps = sweep_buffers(emission, kernels.layout)
    kernels.call("log_likelihood", emission, *graph, *emission.shape, *sweeps, log_likelihood_B)
    return log_likelihood_B, *sweeps


def gradients_with(
    kernels: Kernels, grad_B: Tensor, arguments: Sequence[Tensor], sweeps: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """grad_emission_BML and grad_transition_BLL."""
    graph = _contiguous(arguments)
    emission = graph.log_emission_BML
    gradients = (torch.empty_like(emission), torch.empty_like(graph.log_transition_BLL))
    others = (*sweeps, grad_B.contiguous(), *gradients)
    kernels.call("gradients", emission, *graph, *emission.shape, *others)
    return gradients


def viterbi_with(kernels: Kernels, arguments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """path_BM and log_score_B."""
    graph = _contiguous(arguments)
    emission = graph.log_emission_BML
    path_BM = emission.new_empty(emission.shape[:2], dtype=torch.int64)
    log_score_B = emission.new_empty(len(emission))
    workspace = []
    if kernels.layout.keeps_came_from:
        workspace = [emission.new_empty(emission.shape, dtype=torch.int32)]
    others = (path_BM, log_score_B, *workspace)
    kernels.call("viterbi", emission, *graph, *emission.shape, *others)
    return path_BM, log_score_B


# ---- operators ----

GRAPH = "Tensor emission, Tensor transition, Tensor num_targets, Tensor num_states"


def _operator(name: str, schema: str) -> Callable:
    return torch.library.custom_op(
        f"exlm_mini::{name}", mutates_args=(), device_types=("cpu", "cuda"), schema=schema
    )


def _log_likelihood(*graph: Any) -> tuple[Tensor, ...]:
    return log_likelihood_with(_kernels(graph[0].device), graph)


def _gradients(grad: Tensor, *graph_and_sweeps: Any) -> tuple[Tensor, ...]:
    graph, sweeps = graph_and_sweeps[:4], graph_and_sweeps[4:]
    return gradients_with(_kernels(grad.device), grad, graph, sweeps)


_log_likelihood_operator = _operator(
    "dag_log_likelihood", f"({GRAPH}) -> (Tensor, Tensor, Tensor, Tensor)"
)(_log_likelihood)
_gradients_operator = _operator(
    "dag_gradients",
    f"(Tensor grad, {GRAPH}, Tensor mantissa, Tensor exponent, Tensor info)"
    " -> (Tensor, Tensor)",
)(_gradients)


@_log_likelihood_operator.register_fake
def _(emission: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    layout = CUDA_LAYOUT if emission.device.type == "cuda" else CPU_LAYOUT
    return emission.new_empty(emission.shape[0]), *sweep_buffers(emission, layout)


@_gradients_operator.register_fake
def _(
    grad: Tensor, emission: Tensor, transition: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    empty_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    return empty_like(emission), empty_like(transition)


_compiled = with_gradients(
    torch.ops.exlm_mini.dag_log_likelihood, torch.ops.exlm_mini.dag_gradients
)
_eager = with_gradients(_log_likelihood, _gradients)


# ---- the backend ----


def log_likelihood(*arguments: Tensor) -> Tensor:
    """See ``alignment.dag_log_likelihood``; float32 or float64, differentiable once.

    Counts out of range raise a ValueError on a CPU; on a GPU the result of such a row is NaN.

    Raises:
        BuildError: if the library cannot be built here; ``why_not`` tells so beforehand.
    """
    # For a few rows, calling an operator takes longer than the kernels do.
    is_direct = is_eager() and type(arguments[0]) is Tensor
    return (_eager if is_direct else _compiled)(*arguments)[0]


def viterbi(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """See ``alignment.viterbi``; sums in double precision. NaN gives no path and a score of NaN."""
    if is_in_torch_func() or type(arguments[0]) is not Tensor:  # without memory to read
        return vectorized.viterbi(*arguments)
    return viterbi_with(_kernels(arguments[0].device), arguments)
