"""The kernels of the compiled backend: by the judge, in range, and every barrier needed.

Those for a CPU are called as they are. Those for a GPU run on a CPU, too: ``cuda/dag_fibers.cpp``
compiles the very templates that nvcc compiles, and the threads of a block run as fibers whose order
is shuffled between barriers. Both are called as the package calls them, in buffers that hold NaN.
Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hard_graphs import (
    DTYPES,
    GRAPH_FOR_NAN,
    PLACES_OF_NAN,
    assert_counts_paths,
    flat_graph,
    judge,
    spread_graph,
    two_ways,
    with_score,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.alignment import native, viterbi
from exlm_mini.alignment.build import BuildError, cxx, nvcc
from exlm_mini.alignment.cases import (
    CASES,
    Graph,
    all_ones_graph,
    fill_padding,
    is_padding,
    likelihood_and_gradients,
    limits,
    random_graph,
    relative_error,
    weights,
)
from exlm_mini.alignment.native import CUDA_LAYOUT, Kernels

CUDA = Path(__file__).resolve().parents[1] / "cuda"
TILED, LOG_SPACE, NO_PATH, NAN = range(4)
FLOAT32, FLOAT64 = DTYPES
BARRIER = r"\bc\.sync(_warp)?\(\);"
STRESS = (
    random_graph(20, [70, 12], [110, 40], scale=0.5),  # several warps and tiles
    random_graph(21, [140], [170], scale=0.5),  # two passes of targets in a tile
    random_graph(22, [8, 3], [50, 9], scale=300.0),  # redone in log space
)


class Answer(NamedTuple):
    """What the kernels say of a graph."""

    log_likelihood_B: Tensor
    grad_emission_BML: Tensor
    grad_transition_BLL: Tensor
    path_BM: Tensor
    log_score_B: Tensor
    status: list[int]


class DivergenceError(Exception):
    """Threads of a block waited for others that had left."""


def compiler() -> str:
    """The C++ compiler; skips without one."""
    try:
        return cxx().path
    except BuildError as error:
        pytest.skip(str(error))


def compile_fibers(source_dir: Path, target: Path, *flags: str) -> ctypes.CDLL:
    """Build the fiber library."""
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", *flags]
    source = str(source_dir / "dag_fibers.cpp")
    command = [compiler(), *options, "-o", str(target), source]
    subprocess.run(command, check=True, timeout=300)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The fiber library of this checkout."""
    return compile_fibers(
        CUDA, tmp_path_factory.mktemp("fibers") / "fibers.so", "-Wall", "-Werror"
    )


@pytest.fixture(autouse=True, scope="module")
def nan_in_uninitialised_memory():
    """torch.empty gives NaN, so that a number never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_fibers(library: ctypes.CDLL, seed: int = 1) -> Kernels:
    """The kernels of a GPU on a CPU; with seed 0 threads run in order."""
    return Kernels(
        library,
        "dag_fibers_",
        CUDA_LAYOUT,
        lambda device: ctypes.c_uint64(seed),
        lambda result: DivergenceError(),
    )


@pytest.fixture(scope="module", params=["cpu", "fibers"])
def kernels(request) -> Kernels:
    """Both kinds."""
    if request.param == "fibers":
        return on_fibers(request.getfixturevalue("library"))
    if reason := native.why_not("cpu"):
        pytest.skip(f"no C++ backend here: {reason}")
    return native._kernels(torch.device("cpu"))


def run(kernels: Kernels, graph: Graph, grad_B: Tensor | None = None) -> Answer:
    """Likelihood, both gradients (incoming: ``weights``), best path and status of each row."""
    log_likelihood_B, *sweeps = native.log_likelihood_with(kernels, graph)
    grad_B = weights(graph) if grad_B is None else grad_B
    gradients = native.gradients_with(kernels, grad_B, graph, tuple(sweeps))
    best = native.viterbi_with(kernels, graph)
    return Answer(log_likelihood_B, *gradients, *best, sweeps[2][:, 0].tolist())


def same(ours: Tensor | list[int], other: Tensor | list[int]) -> bool:
    """Bit by bit, but that NaN equals NaN."""
    if isinstance(ours, list):
        return ours == other
    return torch.equal(ours.isnan(), other.isnan()) and torch.equal(
        ours.nan_to_num(), other.nan_to_num()
    )


def assert_is_near(kernels: Kernels, graph: Graph, truth_by: str = "vectorized") -> Answer:
    """Against float64 on the same inputs, by the bounds each dtype has to keep."""
    answer = run(kernels, graph)
    truth = likelihood_and_gradients(graph.double(), truth_by)
    allowed = limits("native", graph, graph.log_emission_BML.dtype).values()
    for ours, true, limit in zip(answer[:3], truth, allowed, strict=True):
        assert relative_error(ours, true) <= limit
    return answer


# ---- by the judge ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_enumeration(name, dtype, kernels):
    answer = assert_is_near(kernels, CASES[name].to(dtype), "enumerate")
    expected = judge(name, dtype)
    assert torch.equal(answer.path_BM, expected.path_BM)
    rounding = 1e-6 if dtype == FLOAT32 else 1e-12
    assert relative_error(answer.log_score_B, expected.log_score_B) <= rounding


# Tiles hold 16 float32 or 8 float64 states, on a GPU 32.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [7, 8, 9, 15, 16, 17, 31, 32, 33, 65])
def test_every_cone_and_remainder_of_a_tile_equals_the_vectorized_backend(L, dtype, kernels):
    num_targets = [1, 2, 3, L // 2, max(L - 9, 1), max(L - 8, 1), L - 2, L - 1, L]
    assert_is_near(kernels, random_graph(L, num_targets, [L] * 9).to(dtype))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    M=st.integers(1, 40),
    L=st.integers(1, 70),
    density=st.sampled_from([0.2, 0.8, 1.0]),
    scale=st.sampled_from([0.1, 2.0, 30.0, 300.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_random_graphs_equal_the_vectorized_backend(library, seed, M, L, density, scale, dtype):
    graph = random_graph(seed, [M, 1 + M // 2], [1 + L // 2, L], density, scale).to(dtype)
    answer = assert_is_near(on_fibers(library, seed), graph)
    path_BM, log_score_B = viterbi(*graph.double(), backend="vectorized")
    assert torch.equal(answer.path_BM, path_BM)
    assert relative_error(answer.log_score_B, log_score_B) <= 1e-6


@pytest.mark.slow
def test_an_exp2_as_rough_as_that_of_a_gpu_is_good_enough(tmp_path):
    """ex2.approx may be off by 2^-22; here it always is, up or down."""
    flags = "-DDAG_ONLY_FLOAT32", "-DDAG_ROUGH_EXP2"
    rough = on_fibers(compile_fibers(CUDA, tmp_path / "rough.so", *flags))
    sharp = random_graph(2, [77, 60], [308, 291], scale=3.0).to(FLOAT32)
    assert assert_is_near(rough, sharp).status == [TILED, TILED]
    assert assert_is_near(rough, flat_graph([77], [308]).to(FLOAT32)).status == [TILED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ones_graph_counts_its_paths(dtype, kernels):
    assert_counts_paths(lambda graph: run(kernels, graph).log_likelihood_B, dtype)


def test_the_order_of_threads_and_blocks_does_not_change_a_bit(library):
    for graph in STRESS:
        first, other = (run(on_fibers(library, seed), graph) for seed in (0, 1))
        assert all(same(a, b) for a, b in zip(first, other, strict=True))


# ---- range ----


def without_emission_in_a_tile() -> Graph:
    graph = random_graph(13, [20, 40], [70, 96], scale=0.5)
    graph.log_emission_BML[0, 8, 32:64] = -torch.inf
    graph.log_emission_BML[1, 31:33, 32:64] = -torch.inf  # the hand over between two warps
    return graph


def growing_within_tiles() -> Graph:
    """Later states of a tile are likelier by far: units grow column by column."""
    graph = random_graph(11, [12, 20], [30, 64], scale=0.5)
    for u in (9, 40):
        graph.log_emission_BML[:, :, u] += 30.0
    return graph


@pytest.mark.parametrize(
    ("graph", "dtype"),
    [
        (random_graph(2, [77], [308], scale=3.0), FLOAT32),
        (spread_graph(1), FLOAT32),
        (flat_graph([64], [512]), FLOAT32),
        # A pass takes 128 targets of a tile: here a cone has up to 140 in one, and 300 in all.
        (random_graph(3, [140, 129], [300, 150], scale=0.5), FLOAT32),
        (random_graph(4, [300], [310], scale=0.2), FLOAT64),
        (without_emission_in_a_tile(), FLOAT32),
        (without_emission_in_a_tile(), FLOAT64),
        (growing_within_tiles(), FLOAT32),
    ],
)
def test_these_stay_tiled_and_near_float64(graph, dtype, kernels):
    assert set(assert_is_near(kernels, graph.to(dtype)).status) == {TILED}


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_that_never_emit_cost_no_range_however_likely_they_are_reached(dtype, library):
    graph = random_graph(13, [20], [96], scale=0.5)
    graph.log_emission_BML[..., 32:64:2] = -torch.inf
    graph.log_transition_BLL[..., 32:64:2] += 50.0 if dtype == FLOAT32 else 400.0
    assert assert_is_near(on_fibers(library), graph.to(dtype)).status == [TILED]


@pytest.mark.slow
@pytest.mark.parametrize("graph", [flat_graph([256], [1024]), random_graph(6, [256], [1024])])
def test_1024_states_stay_tiled_and_near_float64(graph, kernels):
    assert assert_is_near(kernels, graph.to(FLOAT32)).status == [TILED]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["edges", "emissions"])
def test_a_path_that_looks_lost_from_both_ends_is_found(by, dtype, kernels):
    unit = 1.0 if dtype == FLOAT32 else 8.0  # e^-130 and e^-1040 are flushed
    graph = two_ways(unit, by).to(dtype)
    answer = run(kernels, graph, grad_B=torch.ones(1, dtype=dtype))
    assert math.isclose(answer.log_likelihood_B.item(), -260 * unit, rel_tol=1e-6)
    assert math.isclose(answer.grad_emission_BML[0, 4, 7].item(), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_an_edge_is_finite_however_unlikely_the_edge(dtype, kernels):
    """Its sum over targets, before the edge is multiplied in, may be beyond the range."""
    for nats in range(20, 140) if dtype == FLOAT32 else range(650, 900, 5):
        graph = random_graph(3, [2], [12], scale=0.5)
        graph.log_transition_BLL[:] = -torch.inf
        graph.log_transition_BLL[0, 1, 2] = 0.0  # what all edges are scaled by
        graph.log_transition_BLL[0, 0, 11] = -float(nats)  # the only path
        answer = assert_is_near(kernels, graph.to(dtype))
        assert answer.grad_transition_BLL[0, 0, 11] == pytest.approx(weights(graph)[0].item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e9, -1e5, 1e5, 1e9])
def test_scores_beyond_all_exponents_go_to_log_space(size, dtype, kernels):
    graph = all_ones_graph([3, 3], [6, 6])
    graph.log_emission_BML[0] += size
    graph.log_transition_BLL[1] += size
    graph = graph.to(dtype)
    answer = run(kernels, graph)
    assert answer.status == [LOG_SPACE] * 2
    truth = likelihood_and_gradients(graph.double(), "enumerate")
    for ours, true in zip(answer[:3], truth, strict=True):
        assert relative_error(ours, true) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_huge_score_among_others_is_not_forgotten(dtype, kernels):
    graph = random_graph(12, [4], [40])
    graph.log_emission_BML[0, 2, 35] = 1e5  # its tile alone is beyond all exponents
    answer = run(kernels, graph.to(dtype))
    assert answer.status == [LOG_SPACE]
    assert math.isclose(answer.log_likelihood_B.item(), 1e5, rel_tol=1e-3)


def test_the_status_tells_how_a_row_was_computed(kernels):
    statuses = {
        "huge_spread": [LOG_SPACE, LOG_SPACE],
        "ragged": [TILED] * 5,
        "no_path_through_missing_edges": [NO_PATH, NO_PATH, TILED],
        "one_target_many_states": [NO_PATH, NO_PATH, TILED],
    }
    for name, expected in statuses.items():
        assert run(kernels, CASES[name].to(FLOAT32)).status == expected


# ---- what is read and written ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_never_read_and_gets_no_gradient(dtype, kernels):
    graph = random_graph(6, [20, 3, 1, 11], [37, 16, 1, 25]).to(dtype)
    expected = run(kernels, graph)
    for value in (math.nan, math.inf, 1e4):
        answer = run(kernels, fill_padding(graph, value))
        assert all(same(a, b) for a, b in zip(answer, expected, strict=True))
    is_beyond_BML, is_beyond_BLL = is_padding(graph)
    assert not expected.grad_emission_BML[is_beyond_BML].any()
    assert not expected.grad_transition_BLL[is_beyond_BLL].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "place"), PLACES_OF_NAN)
def test_nan_gives_nan(which, place, dtype, kernels):
    answer = run(kernels, with_score(GRAPH_FOR_NAN.to(dtype), which, place, math.nan))
    assert answer.status == [NAN, TILED]
    assert answer.log_likelihood_B.isnan().tolist() == [True, False]
    assert all(g[0].isnan().any() and g[1].isfinite().all() for g in answer[1:3])
    assert answer.log_score_B.isnan().tolist() == [True, False]
    assert answer.path_BM[0].tolist() == [-1] * 9


@pytest.mark.parametrize(
    ("which", "place"), [("log_emission_BML", (0, 1, 2)), ("log_transition_BLL", (0, 0, 2))]
)
def test_infinity_is_not_swallowed(which, place, kernels):
    graph = with_score(random_graph(8, [3, 3], [6, 6]), which, place, math.inf)
    log_likelihood_B = run(kernels, graph).log_likelihood_B
    assert log_likelihood_B.isfinite().tolist() == [False, True]
    assert log_likelihood_B[0] != -torch.inf


def test_nan_among_huge_scores_gives_nan(kernels):
    graph = random_graph(14, [2, 3], [2, 6])
    graph.log_transition_BLL[:, 0, 1] = 1e9  # straight to log space, emissions unseen
    graph.log_emission_BML[0, 1, 1] = math.nan
    assert run(kernels, graph).log_likelihood_B.isnan().tolist() == [True, False]


def test_a_state_that_cannot_emit_gets_exactly_no_gradient(kernels):
    graph = CASES["impossible_state"].to(FLOAT32)
    answer = run(kernels, graph)
    for scores, gradient in zip(graph[:2], answer[1:3], strict=True):
        is_impossible = scores == -torch.inf
        assert is_impossible.any() and not gradient[is_impossible].any()


@pytest.mark.parametrize("counts", [(0, 8), (6, 8), (-3, 8), (4, 0), (4, 9), (4, -(2**40))])
def test_counts_out_of_range_give_nan_and_no_gradient(counts, library):
    """The host does not look at counts on a GPU, so the kernel must not read elsewhere."""
    graph = random_graph(9, [5, 4], [8, 8])
    graph.num_targets_B[1], graph.num_states_B[1] = counts
    answer = run(on_fibers(library), graph)
    assert answer.log_likelihood_B.isnan().tolist() == [False, True]
    assert answer.log_score_B.isnan().tolist() == [False, True]
    assert not answer.grad_emission_BML[1].any() and not answer.grad_transition_BLL[1].any()
    assert answer.path_BM[1].tolist() == [-1] * 5


# ---- barriers ----


def barriers() -> list[tuple[str, int]]:
    """File and line of every barrier of the kernels."""
    return [
        (file.name, number)
        for file in sorted(CUDA.glob("dag_block*.h"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(BARRIER, line)
    ]


def copy_with_change(folder: Path, name: str, number: int, pattern: str, by: str) -> None:
    """The sources of the fiber library with one line of one header changed."""
    for file in (*CUDA.glob("*.h"), CUDA / "dag_fibers.cpp"):
        shutil.copy(file, folder)
    lines = (CUDA / name).read_text().splitlines(keepends=True)
    lines[number - 1], count = re.subn(pattern, by, lines[number - 1])
    assert count == 1, lines[number - 1]
    (folder / name).write_text("".join(lines))


def mutant(folder: Path, name: str, number: int, pattern: str, by: str) -> ctypes.CDLL:
    """The float32 library with that change."""
    copy_with_change(folder, name, number, pattern, by)
    return compile_fibers(folder, folder / "mutant.so", "-DDAG_ONLY_FLOAT32")


def survives(library: ctypes.CDLL, expected: list[Answer]) -> bool:
    """Whether the library says the same as an intact one of ``STRESS``, in any order."""
    for seed in (1, 2, 3):
        for graph, truth in zip(STRESS, expected, strict=True):
            try:
                answer = run(on_fibers(library, seed), graph.to(FLOAT32))
            except DivergenceError:
                return False
            if not all(same(a, b) for a, b in zip(answer, truth, strict=True)):
                return False
    return True


@pytest.fixture(scope="module")
def expected(library) -> list[Answer]:
    """What the intact library says of ``STRESS``."""
    return [run(on_fibers(library), graph.to(FLOAT32)) for graph in STRESS]


SAME, OTHER = 0, 3
"""Exit codes; 1 would be an exception of the test itself."""


def verdict(library: ctypes.CDLL, expected: list[Answer]) -> int:
    """``SAME``, ``OTHER`` or, negative, the signal it died of.

    A missing barrier may make a wild pointer, so a process of its own asks.
    """

    def ask() -> None:
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        os._exit(SAME if survives(library, expected) else OTHER)

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    process.join()
    assert process.exitcode in (SAME, OTHER) or process.exitcode < 0, "the check itself failed"
    return process.exitcode


def test_the_intact_kernels_say_the_same_in_any_order_of_threads(library, expected):
    assert verdict(library, expected) == SAME


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), barriers())
def test_every_barrier_is_needed(name, number, expected, tmp_path):
    broken = mutant(tmp_path, name, number, BARRIER, ";")
    assert verdict(broken, expected) != SAME, f"nobody noticed that {name}:{number} has gone"


@pytest.mark.slow
def test_threads_that_wait_in_vain_are_reported(tmp_path):
    name = "dag_block_sweep.h"
    number = next(n for file, n in barriers() if file == name)
    leaves = "if (c.thread() == 5) return; c.sync();"
    broken = mutant(tmp_path, name, number, BARRIER, leaves)
    with pytest.raises(DivergenceError):
        run(on_fibers(broken), random_graph(0, [3], [5]).to(FLOAT32))


# ---- races ----


def race_check(folder: Path, source_dir: Path) -> Path:
    """The program of ``dag_races.cpp``; skips where no race detector works."""
    program = folder / "races"
    options = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-Wno-unknown-pragmas"]
    defines = ["-DDAG_OS_THREADS", "-DDAG_ONLY_FLOAT32"]
    sources = [str(source_dir / "dag_fibers.cpp"), str(CUDA / "dag_races.cpp"), "-lpthread"]
    done = subprocess.run(
        [compiler(), *options, *defines, "-o", str(program), *sources],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no race detector: {done.stderr.splitlines()[-1]}")
    return program


def race(program: Path, *arguments: float) -> str:
    """What the race detector and the program say."""
    # A report is dropped when the stack of one of the two accesses has been forgotten by then.
    environment = os.environ | {"TSAN_OPTIONS": "history_size=7 halt_on_error=1"}
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    return done.stdout + done.stderr


@pytest.mark.slow
def test_threads_never_race(tmp_path):
    """No two threads touch the same number, one of them writing, without a barrier between."""
    program = race_check(tmp_path, CUDA)
    for M, L, spread in [(2, 96, 1), (40, 70, 0.5), (140, 170, 0.3)]:
        assert race(program, M, L, spread) == f"status {TILED}, {M:.3f} targets\n"
    assert race(program, 12, 40, 300) == f"status {LOG_SPACE}, 12.000 targets\n"


@pytest.mark.slow
def test_the_race_detector_sees_a_race(tmp_path):
    copy_with_change(tmp_path, *barriers()[0], BARRIER, ";")
    program = race_check(tmp_path, tmp_path)
    assert any("ThreadSanitizer: data race" in race(program, 40, 70, 1) for _ in range(5))


# ---- nvcc ----


@pytest.mark.parametrize(
    "arch", [*(pytest.param(arch, marks=pytest.mark.slow) for arch in ("75", "80")), "90"]
)
def test_nvcc_compiles_without_warnings_and_without_local_memory(arch, tmp_path):
    """Never run here: no test of this file needs a GPU."""
    try:
        path = nvcc().path
    except BuildError as error:
        pytest.skip(str(error))
    options = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v", "-cubin"]
    target = [f"-arch=sm_{arch}", "-o", str(tmp_path / "x.cubin")]
    done = subprocess.run(
        [path, *options, *target, str(CUDA / "dag_cuda.cu")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    found = re.findall(
        r"entry function '\w+?dag\d+(\w+_kernel)I(f|d)E.*?(\d+) bytes stack frame, (\d+) bytes "
        r"spill stores, (\d+) bytes spill loads",
        done.stderr,
        re.DOTALL,
    )
    kernels = {"scan_kernel", "sweep_kernel", "finish_kernel", "gradient_kernel"}
    assert {(kernel, dtype) for kernel, dtype, *_ in found} == {
        (kernel, dtype) for kernel in (*kernels, "viterbi_kernel") for dtype in "fd"
    }
    for kernel, dtype, *memory in found:
        assert memory == ["0", "0", "0"], (kernel, dtype)
