"""The compiled backend: large graphs, its operators, and the host side of its CUDA library.

``test_alignment`` and ``test_kernels`` check its numbers. Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial

import pytest
import torch
from cases import DTYPES, FLOAT32, RAGGED, assert_right, flat_graph
from fibers import can_be_built
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from exlm_mini.alignment import native, viterbi
from exlm_mini.alignment.build import cxx
from exlm_mini.alignment.check import likelihood_and_gradients, random_graph


@pytest.fixture(scope="module", autouse=True)
def _has_compiler() -> None:
    can_be_built("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "M", "L"),
    [(flat_graph, 2048, 2048), (flat_graph, 256, 4096), (partial(random_graph, 6), 300, 4096)],
)
def test_thousands_of_states(make, M, L):
    assert_right(make([M], [L]).to(FLOAT32), "native", "scaled")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    graph = random_graph(9, [12, 30, 5], [60, 40, 33]).to(dtype)
    runs = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        runs.append((*likelihood_and_gradients(graph, "native"), *viterbi(*graph, "native")))
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


# ---- the operator ----


def test_operators_pass_opcheck():
    graph = RAGGED.to(FLOAT32)
    torch.library.opcheck(torch.ops.exlm_mini.dag_log_likelihood, tuple(graph))
    _, *buffers = torch.ops.exlm_mini.dag_log_likelihood(*graph)
    grad_B = torch.ones(len(graph.num_targets_B))
    torch.library.opcheck(torch.ops.exlm_mini.dag_gradients, (grad_B, *graph, *buffers))


# ---- the host side of the CUDA library ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_tensors_get_the_shapes_of_a_gpu(dtype):
    """opcheck looks only at the shapes of a CPU."""
    B, M, L = 2, 3, 70
    with FakeTensorMode():
        scores = {"dtype": dtype, "device": "cuda"}
        counts = torch.ones(2, B, dtype=torch.int64, device="cuda")
        graph = (torch.zeros(B, M, L, **scores), torch.zeros(B, L, L, **scores), *counts)
        results = torch.ops.exlm_mini.dag_log_likelihood(*graph)
    assert [t.shape for t in results] == [(B,), (B, 4, M, 96), (B, 6, M, 3), (B, 2)]
    assert [t.dtype for t in results] == [dtype, dtype, torch.int32, torch.int32]
    assert {t.device.type for t in results} == {"cuda"}


def test_a_best_path_of_fake_tensors_has_a_shape():
    with FakeTensorMode():
        path_BM, log_score_B = viterbi(*(torch.zeros(2, M, 7) for M in (3, 7)), 3, 7)
    assert path_BM.shape == (2, 3) and log_score_B.shape == (2,)


def test_it_works_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert native.why_not.__wrapped__("cpu") is None
    finally:
        torch.set_default_dtype(torch.float32)


STUB = """
extern "C" const char* dag_cuda_error(int code) { return code == 209 ? "no image" : "?"; }
extern "C" int dag_cuda_viterbi_float32() { return 209; }
extern "C" int dag_cuda_log_likelihood_float32() { return 0; }
"""


def test_a_result_of_cuda_is_told_in_its_words_and_no_rows_never_ask(tmp_path, monkeypatch):
    """A stub, whose functions only return result codes, is loaded as the GPU's library."""
    source, library = tmp_path / "stub.cpp", tmp_path / "stub.so"
    source.write_text(STUB)
    subprocess.run([cxx(), "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "build", lambda device_type: library)
    kernels = native._load.__wrapped__("cuda")
    assert kernels.last_argument is native._stream  # replaced, as there is no stream here
    kernels = kernels._replace(last_argument=lambda device: ctypes.c_void_p(0))
    graph = random_graph(1, [3], [5]).to(FLOAT32)
    native.log_likelihood_with(kernels, graph)
    with pytest.raises(RuntimeError, match="CUDA: no image"):
        native.viterbi_with(kernels, graph)
    path_BM, log_score_B = native.viterbi_with(kernels, tuple(t[:0] for t in graph))
    assert path_BM.shape == (0, 3) and log_score_B.shape == (0,)


def test_counts_out_of_range_and_a_lack_of_memory_are_told_by_the_kernels_themselves():
    kernels = native._kernels(torch.device("cpu"))
    graph = random_graph(1, [3, 3], [5, 5])
    graph.num_states_B[1] = 6
    with pytest.raises(ValueError, match=r"num_states in 1\.\.L"):
        native.log_likelihood_with(kernels, graph)
    assert isinstance(kernels.explain(1), MemoryError)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.vmap])
def test_the_library_works_if_a_transform_is_the_first_to_ask(transform):
    reasons = []

    def ask(x: Tensor) -> Tensor:
        reasons.append(native.why_not.__wrapped__("cpu"))
        return x

    transform(ask)(torch.ones(3) if transform is torch.func.vmap else torch.ones(()))
    assert reasons == [None]


# ---- on a GPU ----


@pytest.mark.gpu
def test_a_gpu_computes_on_the_current_stream_and_in_a_graph():
    can_be_built("cuda")
    graph = random_graph(2, [20, 77], [80, 300]).to(FLOAT32, "cuda")
    scores = [t.clone().requires_grad_() for t in graph[:2]]

    def step() -> tuple[Tensor, ...]:
        log_likelihood_B = native.log_likelihood(*scores, *graph[2:])
        return log_likelihood_B, *torch.autograd.grad(log_likelihood_B.sum(), scores)

    expected = [t.detach().clone() for t in step()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    for result in results:
        result.detach().fill_(torch.nan)
    captured.replay()
    torch.cuda.synchronize()
    for again, once in zip(results, expected, strict=True):
        assert torch.equal(again, once)
