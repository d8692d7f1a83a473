"""The compiled kernels: when they fall back to log space, and that each barrier is needed.

``test_alignment`` compares them with enumeration. GPU kernels run on a CPU here (``fibers.py``).
Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    EMISSION,
    FLOAT32,
    GRAPH_FOR_NAN,
    LARGE,
    PLACES_OF_NAN,
    all_ones_graph,
    flat_graph,
    limits,
    shifted,
    with_score,
)
from fibers import (
    CUDA,
    DivergenceError,
    can_be_built,
    compile_fibers,
    intact_library,
    on_fibers,
)
from torch import Tensor

from exlm_mini.alignment import native
from exlm_mini.alignment.build import BuildError, nvcc
from exlm_mini.alignment.check import (
    likelihood_and_gradients,
    random_graph,
    relative_error,
    weights,
)
from exlm_mini.alignment.graphs import Graph
from exlm_mini.alignment.native import Kernels

TILED, LOG_SPACE, NO_PATH, NAN = range(4)
BARRIER = r"\bc\.sync(_warp)?\(\);"
STRESS = (
    random_graph(20, [70, 12], [110, 40], scale=0.5),  # several warps and tiles
    random_graph(21, [140], [170], scale=0.5),  # two passes of targets in a tile
    random_graph(22, [8, 3], [50, 9], scale=300.0),  # computed again in log space
)

pytestmark = pytest.mark.usefixtures("nan_in_uninitialised_memory", "has_compiler")


@pytest.fixture(scope="module")
def has_compiler() -> None:
    can_be_built("cpu")


@pytest.fixture(params=["cpu", "fibers"])
def kernels(request) -> Kernels:
    """The CPU kernels, and the GPU kernels run on a CPU."""
    if request.param == "fibers":
        return on_fibers(intact_library())
    return native._kernels(torch.device("cpu"))


def run(kernels: Kernels, graph: Graph) -> list[Tensor]:
    """Log-likelihood, both gradients (for the incoming gradient ``weights``), best path, its score,
    and how each row was computed."""
    log_likelihood_B, *sweeps = native.log_likelihood_with(kernels, graph)
    gradients = native.gradients_with(kernels, weights(graph), graph, tuple(sweeps))
    best = native.viterbi_with(kernels, graph)
    return [log_likelihood_B, *gradients, *best, sweeps[2][:, 0]]


def status(kernels: Kernels, graph: Graph) -> list[int]:
    """How each row was computed: ``TILED``, ``LOG_SPACE``, ``NO_PATH`` or ``NAN``."""
    return native.log_likelihood_with(kernels, graph)[3][:, 0].tolist()


def is_same(ours: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all numbers are exactly equal; NaN counts as equal to NaN."""
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, other, strict=True)
    )


# ---- range ----


def assert_near_float64(kernels: Kernels, graph: Graph) -> None:
    """Assert that every row is tiled, and within ``limits`` of float64 on the same numbers."""
    *answer, _, _, how_B = run(kernels, graph)
    assert set(how_B.tolist()) == {TILED}
    truth = likelihood_and_gradients(graph.double(), "vectorized")
    value, gradient = limits("native", graph)
    for ours, true, most in zip(answer, truth, (value, gradient, gradient), strict=True):
        assert relative_error(ours, true) <= most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_sizes_to_train_on_stay_tiled(name, dtype, kernels):
    assert set(status(kernels, LARGE[name].to(dtype))) == {TILED}


@pytest.mark.slow
@pytest.mark.parametrize("graph", [flat_graph([256], [1024]), random_graph(6, [256], [1024])])
def test_1024_states_stay_tiled_and_near_float64(graph, kernels):
    assert_near_float64(kernels, graph.to(FLOAT32))


@pytest.mark.slow
def test_an_exp2_as_rough_as_that_of_a_gpu_is_good_enough(tmp_path):
    """A GPU's ex2.approx may be off by 2^-22; in this build it always is, up or down."""
    flags = "-DDAG_ONLY_FLOAT32", "-DDAG_ROUGH_EXP2"
    rough = on_fibers(compile_fibers(CUDA, tmp_path / "rough.so", *flags))
    assert_near_float64(rough, LARGE["size_of_the_paper"].to(FLOAT32))
    assert_near_float64(rough, flat_graph([77], [308]).to(FLOAT32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_that_never_emit_cost_no_range_however_likely_they_are_reached(dtype):
    graph = random_graph(13, [20], [96], scale=0.5)
    graph.log_emission_BML[..., 32:64:2] = -torch.inf
    graph.log_transition_BLL[..., 32:64:2] += 50.0 if dtype == FLOAT32 else 400.0
    assert_near_float64(on_fibers(intact_library()), graph.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [-1e9, -1e5, 1e5, 1e9])
def test_scores_beyond_all_exponents_go_to_log_space(size, dtype, kernels):
    graph = all_ones_graph([3, 3], [6, 6])
    for where in ((size, 0.0), (0.0, size)):
        assert status(kernels, shifted(graph, *where).to(dtype)) == [LOG_SPACE] * 2
    # A single huge score; its tile is the only one beyond the range of exponents.
    graph = with_score(random_graph(12, [4], [40]), EMISSION, (0, 2, 35), 1e5)
    assert status(kernels, graph.to(dtype)) == [LOG_SPACE]
    value_1 = native.log_likelihood_with(kernels, graph.to(dtype))[0]
    assert value_1.item() == pytest.approx(1e5, rel=1e-3)


def test_the_status_tells_how_a_row_was_computed(kernels):
    for name, expected in {
        "huge_spread": [LOG_SPACE, LOG_SPACE],
        "ragged": [TILED] * 5,
        "no_path_through_missing_edges": [NO_PATH, NO_PATH, TILED],
        "one_target_many_states": [NO_PATH, NO_PATH, TILED],
    }.items():
        assert status(kernels, CASES[name].to(FLOAT32)) == expected
    for place in PLACES_OF_NAN:
        assert status(kernels, with_score(GRAPH_FOR_NAN, *place, torch.nan)) == [NAN, TILED]


def test_a_row_with_nan_has_nan_for_all_that_could_be_on_a_path(kernels):
    graph = random_graph(8, [3, 3], [9, 9])
    is_on_path_ML = run(kernels, graph)[1][0] != 0
    graph = with_score(graph, "log_transition_BLL", (0, 2, 5), torch.nan)
    _, emission_BML, transition_BLL, *_ = run(kernels, graph)
    assert torch.equal(emission_BML[0].isnan(), is_on_path_ML)
    is_forward_LL = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert torch.equal(transition_BLL[0].isnan(), is_forward_LL)
    assert transition_BLL[1].isfinite().all()


@pytest.mark.parametrize("counts", [(0, 8), (6, 8), (-3, 8), (4, 0), (4, 9), (4, -(2**40))])
def test_counts_out_of_range_give_nan_and_no_gradient(counts):
    """On a GPU the host does not check counts, so the kernel must not read out of bounds."""
    graph = random_graph(9, [5, 4], [8, 8])
    graph.num_targets_B[1], graph.num_states_B[1] = counts
    answer = run(on_fibers(intact_library()), graph)
    value_B, emission_BML, transition_BLL, path_BM, log_score_B, _ = answer
    assert value_B.isnan().tolist() == log_score_B.isnan().tolist() == [False, True]
    assert not emission_BML[1].any() and not transition_BLL[1].any()
    assert path_BM[1].tolist() == [-1] * 5


# ---- barriers ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_threads_and_blocks_does_not_change_a_bit(dtype):
    for graph in STRESS:
        first, other = (
            run(on_fibers(intact_library(), seed), graph.to(dtype)) for seed in (0, 1)
        )
        assert is_same(first, other)


def barriers() -> list[tuple[str, int]]:
    """File and line of every barrier in the kernels."""
    return [
        (file.name, number)
        for file in sorted(CUDA.glob("dag_block*.h"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(BARRIER, line)
    ]


def mutant(folder: Path, name: str, number: int, by: str) -> ctypes.CDLL:
    """Compile the float32 library with ``by`` in the place of one barrier."""
    for file in (*CUDA.glob("*.h"), CUDA / "dag_fibers.cpp"):
        shutil.copy(file, folder)
    lines = (CUDA / name).read_text().splitlines(keepends=True)
    lines[number - 1] = re.sub(BARRIER, by, lines[number - 1])
    (folder / name).write_text("".join(lines))
    return compile_fibers(folder, folder / "mutant.so", "-DDAG_ONLY_FLOAT32")


SAME, OTHER = 0, 3
"""Exit codes; 1 would mean an exception in the test itself."""


def verdict(library: ctypes.CDLL, expected: list[list[Tensor]]) -> int:
    """Whether a library's results for ``STRESS`` are the expected ones, in any order of threads:
    ``SAME``, ``OTHER`` or, as a negative number, the signal that ended the process.

    The library runs in a separate process, because a missing barrier may yield a wild pointer.
    """

    def ask() -> None:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        for seed in (1, 2, 3):
            for graph, truth in zip(STRESS, expected, strict=True):
                try:
                    is_fine = is_same(run(on_fibers(library, seed), graph.to(FLOAT32)), truth)
                except DivergenceError:
                    is_fine = False
                if not is_fine:
                    os._exit(OTHER)
        os._exit(SAME)

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    process.join()
    assert process.exitcode in (SAME, OTHER) or process.exitcode < 0, "the check itself failed"
    return process.exitcode


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    """The intact library's results for ``STRESS``, the same in any order of threads."""
    library = intact_library()
    answers = [run(on_fibers(library), graph.to(FLOAT32)) for graph in STRESS]
    assert verdict(library, answers) == SAME
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), barriers())
def test_every_barrier_is_needed(name, number, expected, tmp_path):
    broken = mutant(tmp_path, name, number, ";")
    assert verdict(broken, expected) != SAME, "the results are right without this barrier"


@pytest.mark.slow
def test_threads_that_wait_in_vain_are_reported(tmp_path):
    name = "dag_block_sweep.h"
    number = next(n for file, n in barriers() if file == name)
    broken = mutant(tmp_path, name, number, "if (c.thread() == 5) return; c.sync();")
    with pytest.raises(DivergenceError):
        run(on_fibers(broken), random_graph(0, [3], [5]).to(FLOAT32))


# ---- nvcc ----


@pytest.mark.parametrize(
    "arch", [*(pytest.param(arch, marks=pytest.mark.slow) for arch in ("75", "80")), "90"]
)
def test_nvcc_compiles_without_warnings_and_without_local_memory(arch, tmp_path):
    """The code is compiled but not run: no test in this file needs a GPU."""
    try:
        path = nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    options = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v", "-cubin"]
    target = [f"-arch=sm_{arch}", "-o", tmp_path / "x.cubin", CUDA / "dag_cuda.cu"]
    done = subprocess.run([path, *options, *target], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    entries = re.findall(
        r"entry function '\w+?dag\d+(\w+)_kernelI(f|d)E.*?(\d+) bytes stack frame, (\d+) bytes "
        r"spill stores, (\d+) bytes spill loads",
        done.stderr,
        re.DOTALL,
    )
    names = ("scan", "sweep", "finish", "gradient", "viterbi")
    assert {(*entry[:2], *map(int, entry[2:])) for entry in entries} == {
        (name, dtype, 0, 0, 0) for name in names for dtype in "fd"
    }
