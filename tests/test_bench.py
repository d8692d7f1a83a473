"""The benchmark command and what it measures with; no test asks how long something took.

Shapes: B rows, M targets, L states, S any number of states, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm_mini import batches, bench, measure
from exlm_mini import emission as emission_module
from exlm_mini.alignment import BACKENDS, dag_log_likelihood, posteriors
from exlm_mini.benchmarks import Record, Shape, as_json
from exlm_mini.benchmarks import dag as dag_benchmark
from exlm_mini.benchmarks import emission as emission_benchmark
from exlm_mini.benchmarks import step as step_benchmark
from exlm_mini.benchmarks import training as training_benchmark
from exlm_mini.benchmarks.dag import (
    dag,
    estimated_seconds,
    forward_and_backward,
    judge,
    made_graph,
    too_large,
)
from exlm_mini.benchmarks.data import (
    BATCH_TOKENS,
    MASKERS,
    MOLECULE_BATCH,
    MOLECULE_LENGTHS,
    MOLECULE_VOCABULARY,
    epochs,
    made_pack,
)
from exlm_mini.benchmarks.emission import emission
from exlm_mini.benchmarks.options import bench_parser
from exlm_mini.benchmarks.step import made_batch, row_length, step, step_in_parts, whole_step
from exlm_mini.benchmarks.training import (
    LEAST_STEPS,
    WARM_UP_STEPS,
    DoesNotFit,
    singles,
    train,
)
from exlm_mini.config import DataConfig, ModelConfig, RunConfig, SpecialIds
from exlm_mini.corpora import prepare_corpus
from exlm_mini.emission import log_sum_exp_logits
from exlm_mini.measure import (
    LEAST_RUNS,
    MIB,
    MOST_RUNS,
    Timing,
    peak_bytes,
    relative_error,
    resident_bytes,
    time_side_by_side,
)
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.settings import load_recipe, parse
from exlm_mini.throughput import SAME_SPEED
from exlm_mini.training import make_model
from exlm_mini.update import Updater

CPU = torch.device("cpu")
SHAPE = Shape(2, 3, 6)
FLOAT = 4


@pytest.fixture(autouse=True)
def three_runs(monkeypatch):
    """No more runs than a median needs."""
    monkeypatch.setattr(measure, "MOST_RUNS", LEAST_RUNS)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Compiling takes half a minute, and tests/test_emission.py does it."""
    function = emission_module._normalise_rounded_
    monkeypatch.setattr(emission_module, "_fused", lambda: function)


@pytest.fixture
def written(tmp_path):
    """Write a Python file; its path."""

    def write(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def working() -> set[str]:
    """Backends that work on a CPU; the first call may build one."""
    return {name for name in BACKENDS if BACKENDS[name].why_not("cpu") is None}


def skip_unless_working(backend: str) -> None:
    if reason := BACKENDS[backend].why_not("cpu"):
        pytest.skip(reason)


def tiny_model(**settings) -> ModelConfig:
    return ModelConfig(num_layers=1, width=16, ffn_width=32, num_heads=2, **settings)


def records_of(capsys, *argv: str) -> list[dict]:
    assert bench.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuses(argv: list[str], words: list[str], capsys) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr with all the words."""
    assert bench.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and told.err.count("\n") == 1, told.err
    for word in words:
        assert word in told.err


# ---- time ----


def test_calls_are_timed_in_turn_after_one_run_each_to_warm_up():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_side_by_side(calls, CPU, enough_seconds=0)
    assert order == ["a", "b"] * (1 + LEAST_RUNS)
    assert {name: len(timing.wall_ms) for name, timing in timings.items()} == {
        "a": LEAST_RUNS,
        "b": LEAST_RUNS,
    }


def test_a_warm_call_is_not_run_uncounted():
    order = []
    measure.time_call(lambda: order.append(0), CPU, enough_seconds=0, is_warm=True)
    assert len(order) == LEAST_RUNS


def test_quick_calls_are_run_no_more_than_is_useful(monkeypatch):
    monkeypatch.setattr(measure, "MOST_RUNS", MOST_RUNS)
    assert len(time_side_by_side({"": int}, CPU)[""].wall_ms) == MOST_RUNS


def test_one_slow_run_does_not_move_the_median():
    timing = Timing([3.0, 100.0, 2.0], [1.0, 1.0, 70.0])
    assert (timing.median_ms, timing.median_cpu_ms) == (3.0, 1.0)


def test_the_number_of_threads_is_set_for_a_while_only():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), measure.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


# ---- memory ----


def test_peak_memory_is_counted_to_the_byte():
    kept = torch.ones(1000, 1000)  # was there before: does not count

    def two_alive() -> torch.Tensor:
        return kept + 1 + kept

    assert peak_bytes(two_alive, CPU) == 2 * 1000 * 1000 * FLOAT


def test_peak_memory_is_what_is_alive_at_one_time():
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.ones(1000)

    assert peak_bytes(one_after_the_other, CPU) == 1000 * FLOAT


def test_peak_memory_counts_the_backward_pass():
    x = torch.ones(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        return (x * 2 * x).sum()

    assert peak_bytes(lambda: torch.autograd.grad(forward(), x), CPU) > peak_bytes(forward, CPU)


def test_resident_memory_sees_what_pytorch_did_not_allocate():
    size = 32 * MIB
    resident = resident_bytes(lambda: np.ones(size, dtype=np.uint8))
    if resident is None:
        pytest.skip("this system does not tell")
    assert abs(resident - size) < size / 4
    assert peak_bytes(lambda: np.ones(size, dtype=np.uint8), CPU) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_memory_of_a_gpu_leaves_out_what_was_there_before():
    device = torch.device("cuda")
    kept = torch.ones(1000, 1024, device=device)
    assert peak_bytes(lambda: kept + 1 + kept, device) == 2 * 1000 * 1024 * FLOAT
    assert min(measure.time_call(lambda: kept + 1, device).wall_ms) > 0


# ---- error ----


def test_relative_error_is_the_largest_difference_over_the_largest_value():
    exact = torch.tensor([4.0, -8.0, 1.0], dtype=torch.float64)
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([5.0, -8.0, 1.5]), exact) == 1 / 8
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5


def test_relative_error_takes_infinities_only_where_they_belong():
    exact = torch.tensor([-torch.inf, -2.0])
    assert relative_error(torch.tensor([-torch.inf, -3.0]), exact) == 0.5
    assert relative_error(torch.tensor([-5.0, -2.0]), exact) == math.inf
    assert relative_error(torch.tensor([-torch.inf, torch.nan]), exact) == math.inf


# ---- the machine ----


def test_the_machine_is_described():
    about = measure.machine(CPU)
    assert about["torch"] == torch.__version__
    assert about["device"] == "cpu"
    assert about["cpu"] and about["num_cpus"] >= 1
    assert re.fullmatch(r"[0-9a-f]{40}( with changes)?|not a git checkout", about["commit"])


def test_a_package_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "measure.py"))
    assert measure.commit() == "not a git checkout"


# ---- the dynamic programme ----


@pytest.mark.parametrize("is_sharp", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 1, 1), Shape(2, 4, 4), Shape(3, 2, 9)])
def test_made_transitions_are_probabilities_of_forward_edges(shape, is_sharp):
    graph = made_graph(shape, is_sharp, CPU, torch.float64)
    assert graph.log_emission_BML.shape == shape
    probability_BLL = graph.log_transition_BLL.exp()
    is_backward_LL = torch.ones(shape.L, shape.L, dtype=torch.bool).tril()
    assert probability_BLL[:, is_backward_LL].eq(0).all()
    sums_BL = probability_BLL.sum(2)
    torch.testing.assert_close(sums_BL[:, :-1], torch.ones_like(sums_BL[:, :-1]))
    assert dag_log_likelihood(*graph).isfinite().all()


def test_one_path_stands_out_of_a_sharp_graph_and_none_of_a_flat_one():
    sharp, flat = (
        posteriors(*made_graph(Shape(2, 8, 32), is_sharp, CPU, torch.float64)).state_BML
        for is_sharp in (True, False)
    )
    assert sharp.amax(2).min() > 0.9
    assert flat[:, 2:-2].amax(2).max() < 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_judged_exact_in_float64(backend):
    skip_unless_working(backend)
    graph = made_graph(SHAPE, False, CPU, torch.float64)
    ours = forward_and_backward(BACKENDS[backend].log_likelihood, graph)
    errors = dag_benchmark.errors_of(ours, judge(graph, CPU, seconds=60))
    assert set(errors) == {"log_likelihood", "grad_emission", "grad_transition"}
    assert max(errors.values()) < 1e-12


def test_a_wrong_value_and_a_wrong_gradient_are_seen():
    graph = made_graph(SHAPE, False, CPU)
    function = BACKENDS["vectorized"].log_likelihood
    verdict = judge(graph, CPU, seconds=60)
    log_likelihood_B, grad_BML, grad_BLL = forward_and_backward(function, graph)
    size = verdict.exact[0].abs().max().item()
    off = dag_benchmark.errors_of((log_likelihood_B + 1, 2 * grad_BML, grad_BLL), verdict)
    assert off["log_likelihood"] == pytest.approx(1 / size, rel=1e-4)
    assert off["grad_emission"] == pytest.approx(1, rel=1e-4)
    assert off["grad_transition"] < 1e-5


def test_the_judge_takes_as_many_rows_as_there_is_time_for(monkeypatch):
    graph = made_graph(Shape(5, 3, 6), False, CPU)
    monkeypatch.setattr(dag_benchmark, "estimated_seconds", lambda *_: 2.0)
    assert len(judge(graph, CPU, seconds=7).exact[0]) == 3
    assert len(judge(graph, CPU, seconds=70).exact[0]) == 5
    assert judge(graph, CPU, seconds=1) is None


def test_the_judge_answers_in_float64_on_the_same_numbers():
    graph = made_graph(SHAPE, True, CPU)
    exact = judge(graph, CPU, seconds=60).exact
    assert {t.dtype for t in exact} == {torch.float64}
    expected_B = dag_log_likelihood(
        graph.log_emission_BML.double(), graph.log_transition_BLL.double(), *graph[2:]
    )
    torch.testing.assert_close(exact[0], expected_B)


def test_time_is_estimated_from_fewer_targets(monkeypatch):
    asked = []

    def a_second_and_half_a_second_per_target(call, device) -> float:
        asked.append(call()[1].shape)
        return 1.0 + 0.5 * asked[-1][1]

    monkeypatch.setattr(dag_benchmark, "once_seconds", a_second_and_half_a_second_per_target)
    function = BACKENDS["vectorized"].log_likelihood
    assert estimated_seconds(function, made_graph(Shape(2, 21, 24), False, CPU), CPU) == 11.5
    assert asked == [(2, 4, 24), (2, 2, 24)]
    assert estimated_seconds(function, made_graph(Shape(2, 3, 24), False, CPU), CPU) == 2.5


@pytest.mark.parametrize(
    ("backend", "shape", "is_refused"),
    [
        ("enumerate", Shape(2, 5, 20), False),  # 2 * 816 paths
        ("enumerate", Shape(8, 20, 80), True),
        ("enumerate", Shape(8, 1, 1), False),
        ("naive", Shape(2, 5, 20), False),
        ("naive", Shape(8, 20, 80), True),
        ("vectorized", Shape(1, 1024, 4096), False),
    ],
)
def test_teaching_backends_do_small_graphs_only(backend, shape, is_refused):
    assert (too_large(backend, shape) is not None) == is_refused


def test_what_cannot_be_timed_is_told_and_the_others_go_on(monkeypatch):
    notes = []
    good = BACKENDS["vectorized"].log_likelihood
    functions = {
        "raises": lambda *_: torch.ones(2, 3) @ torch.ones(2),
        "scalar": lambda emission, *_: emission.sum(),
        "constant": lambda emission, *_: emission.detach().sum((1, 2)),
        "one_sided": lambda emission, *_: emission.sum((1, 2)),
        "good": good,
    }
    found = dag(SHAPE, functions, CPU, torch.float32, False, 60, notes.append)
    assert [record.backend for record in found] == ["good"]
    for name, note in zip(functions, notes, strict=False):
        assert note.startswith(f"{name} is left out at B,M,L = 2,3,6")
    assert "no gradient to the transitions" in notes[3]

    monkeypatch.setattr(dag_benchmark, "judge", lambda *_: None)
    monkeypatch.setattr(dag_benchmark, "estimated_seconds", lambda *_: 30.0)
    notes.clear()
    assert not list(dag(SHAPE, {"good": good}, CPU, torch.float32, False, 60, notes.append))
    assert ["no error is given" in notes[0], "about 180 s" in notes[1]] == [True, True]


# ---- the vocabulary head ----


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float64, 1e-13)],
)
def test_four_ways_of_the_vocabulary_head_agree(dtype, rounding):
    found = list(emission(Shape(2, 3, 5), 8, 50, 4, CPU, dtype, print))
    assert [record.backend for record in found] == ["plain", "buffer", "fused", "chunked"]
    for record in found:
        assert set(record.errors) == {"log_emission", "grad_state", "grad_embedding"}
        assert record.max_error < rounding
        assert record.details["dtype"] == str(dtype).removeprefix("torch.")
    assert max(record.max_error for record in found) > 0


def test_what_does_not_compile_is_told_and_the_others_go_on(monkeypatch):
    def no_compiler():
        raise OSError("no compiler\nand many lines more")

    monkeypatch.setattr(emission_module, "_fused", no_compiler)
    notes = []
    found = emission(Shape(2, 3, 5), 8, 50, 4, CPU, torch.float32, notes.append)
    assert [record.backend for record in found] == ["plain", "buffer", "chunked"]
    (note,) = notes
    assert note.startswith("fused is left out") and note.endswith("here: no compiler")


def test_what_is_compiled_is_compiled_before_anything_is_timed(monkeypatch):
    order = []

    def compiles():
        order.append("compiled")
        return emission_module._normalise_rounded_

    def timed(calls, device):
        order.append("timed")
        return time_side_by_side(calls, device)

    monkeypatch.setattr(emission_module, "_fused", compiles)
    monkeypatch.setattr(emission_benchmark, "time_side_by_side", timed)
    list(emission(Shape(2, 3, 5), 8, 50, 4, CPU, torch.float32, print))
    assert order[:2] == ["compiled", "timed"]


def test_the_chunked_head_takes_memory_for_a_chunk_the_others_for_all_states():
    # The gradient of the embedding is as large as V x D for all; a chunk is 16 x V.
    V = 2000
    peak = {}
    for L in (32, 128):
        for record in emission(Shape(2, 3, L), 8, V, 16, CPU, torch.float32, print):
            peak[record.backend, L] = record.peak_mib * MIB
    more_logits = 2 * (128 - 32) * V * FLOAT
    assert peak["buffer", 128] - peak["buffer", 32] > 0.95 * more_logits
    assert peak["plain", 128] - peak["plain", 32] > 1.9 * more_logits
    assert peak["chunked", 128] - peak["chunked", 32] < 0.05 * more_logits


@pytest.mark.parametrize(("S", "V"), [(64, 3000), (512, 3000), (512, 6000)])
def test_chunked_log_sum_exp_peaks_at_chunk_times_vocabulary(S, V):
    D, chunk = 4, 16
    inputs = [torch.ones(n, D).requires_grad_() for n in (S, V)]
    inputs.append(torch.ones(V).requires_grad_())

    def call() -> None:
        log_sum_exp_logits(*inputs, chunk).sum().backward(inputs=inputs)
        for tensor in inputs:
            tensor.grad = None

    # A chunk of logits, twice, and the gradients of weight and bias, of which a part is new.
    bound = 2 * chunk * V + 3 * V * (D + 1) + 4 * S * (D + 2)
    assert chunk * V * FLOAT < peak_bytes(call, CPU) < bound * FLOAT


# ---- a training step ----


@pytest.mark.parametrize("mask_ratio", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("M", [3, 7, 21])
def test_a_made_batch_has_the_masks_asked_for(M, mask_ratio):
    batch = made_batch(Shape(4, M, 2 * M), mask_ratio, vocab_size=50)
    N = row_length(Shape(4, M, 2 * M), mask_ratio)
    assert batch.token_ids_BN.shape == (4, N)
    assert (batch.is_masked_BN.sum(1) == M - 2).all()
    assert (M - 2) / (N - 2) >= mask_ratio > (M - 2) / (N - 1)


def test_the_text_shape_is_a_row_of_128_tokens():
    assert row_length(Shape(16, 21, 84), 0.15) == 128


def test_the_graph_of_a_step_has_the_shape_asked_for():
    shape = Shape(2, 5, 15)
    config = bench._step_config(
        bench_parser("", []).parse_args(
            ["step", "--width", "16", "--heads", "2", "--layers", "1"]
        ),
        shape,
    )
    scores = ExLM(config, 50)(*made_batch(shape, 0.15, 50))
    assert scores.log_emission_BML.shape == shape
    assert scores.graph.num_states_B.tolist() == [15, 15]


@pytest.mark.parametrize("kind", [MaskedLM, ExLM])
def test_a_step_in_parts_is_the_whole_step(kind):
    torch.manual_seed(0)
    model = kind(tiny_model(clone_embedding_std=0.1), 50).double().eval()
    batch = made_batch(Shape(2, 4, 16), 0.3, 50)
    loss = whole_step(model, batch)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    ran = []

    class Noted:
        def __init__(self, part: str, direction: str) -> None:
            ran.append((part, direction))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    torch.testing.assert_close(step_in_parts(model, batch, Noted), loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)
    assert len(set(ran)) == len(ran) == (8 if kind is ExLM else 4)


def test_a_step_is_measured_part_by_part_and_exact():
    config = tiny_model(states_per_mask=3, dropout=0.1)
    found = list(step(Shape(2, 4, 12), 0.3, 50, config, CPU))
    assert [record.backend for record in found] == ["mlm", "exlm"]
    assert list(found[0].details["parts"]) == ["encoder", "head"]
    assert list(found[1].details["parts"]) == [
        "encoder", "head", "transition", "dynamic programme",
    ]  # fmt: skip
    for record in found:
        assert 0 <= record.max_error < 1e-5
        for spent in record.details["parts"].values():
            assert set(spent) == {
                "forward_ms", "backward_ms", "forward_cpu_ms", "backward_cpu_ms",
            }  # fmt: skip


def test_the_released_layout_is_timed_on_the_same_work():
    config = tiny_model(states_per_mask=3, dropout=0.1)
    found = list(step(Shape(2, 4, 12), 0.3, 50, config, CPU, "bf16", layout="released"))
    assert [record.backend for record in found] == ["mlm", "exlm", "exlm-released"]
    mlm, _, released = (record.details for record in found)
    assert released["parts"] == {} and list(mlm["parts"]) == ["encoder", "head"]
    for record in found:
        assert record.details["dtype"] == "bfloat16" and 0 < record.max_error < 0.1
        tokens = record.details["step_tokens_per_second"] * record.median_ms / 1000
        assert tokens == pytest.approx(2 * record.details["num_tokens"])
    work = [r.details["flops_per_second"] * r.median_ms for r in found]
    assert work[1] == pytest.approx(work[2]) and work[0] < work[1]


def test_a_step_is_compiled_layer_by_layer_and_the_released_layout_is_not(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    config = dataclasses.replace(tiny_model(states_per_mask=3), num_layers=2)
    found = list(step(Shape(2, 4, 12), 0.3, 50, config, CPU, "fp32", True, "released"))
    assert [type(module).__name__ for module in compiled] == ["EncoderLayer"] * 4
    assert [record.details["is_compiled"] for record in found] == [True, True, False]


def test_errors_are_those_of_the_first_rows():
    config = tiny_model(states_per_mask=3)
    shape = Shape(step_benchmark.ERROR_ROWS + 2, 4, 12)
    model, batch = ExLM(config, 50), made_batch(shape, 0.3, 50)
    found = step_benchmark._errors(model, batch, "fp32")
    batch.token_ids_BN[step_benchmark.ERROR_ROWS :] = 7  # rows that are not looked at
    assert step_benchmark._errors(model, batch, "fp32") == found
    assert model.training and model.encoder.embedding.weight.grad is None


def test_the_memory_of_a_step_is_that_of_a_model_without_gradients():
    config = tiny_model(max_positions=64)
    shape = Shape(2, 4, 16)
    batch = made_batch(shape, 0.3, 500)
    mlm, exlm = step(shape, 0.3, 500, config, CPU)
    for record, kind in ((mlm, MaskedLM), (exlm, ExLM)):
        model = kind(config, 500)
        assert record.peak_mib * MIB == peak_bytes(
            lambda model=model: whole_step(model, batch), CPU
        )


# ---- the command ----

BENCHMARKS = {
    "dag": ["dag", "--shape", "2,3,6"],
    "emission": ["emission", "--shape", "2,3,6", "--width", "8", "--vocab-size", "50"],
    "step": [
        "step", "--shape", "2,3,6", "--width", "16", "--heads", "2", "--layers", "1",
        "--vocab-size", "50",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_json_has_one_record_for_each_backend_and_shape(name, capsys):
    argv = [*BENCHMARKS[name], "--shape", "1,3,9", "--threads", "1"]
    records = records_of(capsys, *argv)
    backends = {
        "dag": working(),
        "emission": {"plain", "buffer", "fused", "chunked"},
        "step": {"mlm", "exlm"},
    }[name]
    found = [(record["backend"], tuple(record["shape"])) for record in records]
    assert sorted(found) == sorted((b, s) for b in backends for s in [(2, 3, 6), (1, 3, 9)])
    for record in records:
        assert record["benchmark"] == name
        assert record["median_ms"] > 0
        assert record["peak_mib"] > 0
        assert 0 <= record["max_error"] < 1e-4
        assert record["threads"] == 1
        assert record["machine"] == measure.machine(CPU)
        assert record["reference"] == bench.REFERENCE[name]
        if record["backend"] == record["reference"]:
            assert (record["wall_ratio"], record["cpu_ratio"]) == (1, 1)


def test_ratios_compare_with_the_reference_of_the_same_shape(capsys):
    records = records_of(capsys, *BENCHMARKS["dag"], "--shape", "2,4,9", "--against", "naive")
    base = {tuple(r["shape"]): r for r in records if r["backend"] == "naive"}
    for record in records:
        reference = base[tuple(record["shape"])]
        assert record["reference"] == "naive"
        assert record["wall_ratio"] == record["median_ms"] / reference["median_ms"]


def test_without_its_reference_a_record_has_no_ratio():
    (record,) = dag(
        SHAPE, {"a": BACKENDS["naive"].log_likelihood}, CPU, torch.float32, False, 60, print
    )
    assert as_json(record, None, {})["wall_ratio"] is None


def test_every_number_of_threads_is_measured(capsys):
    before = torch.get_num_threads()
    argv = ["dag", "--shape", "2,3,6", "--backend", "vectorized"]
    found = records_of(capsys, *argv, "--threads", "1,2")
    assert [record["threads"] for record in found] == [1, 2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_table_names_every_backend_and_what_it_is_compared_with(name, capsys):
    assert bench.main([*BENCHMARKS[name], "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert f"vs {bench.REFERENCE[name]}" in out
    named = {
        "dag": working(),
        "emission": ["plain", "chunked"],
        "step": ["exlm", "transition:"],
    }
    for word in named[name]:
        assert re.search(rf"\b{word}", out), word
    assert ("2,3,6 V50 " in out) == (name == "emission")


def test_what_is_too_large_is_told_on_stderr(capsys):
    records = bench.main(["dag", "--shape", "8,20,80", "--json"])
    told = capsys.readouterr()
    assert records == 0
    assert not {"enumerate", "naive"} & {r["backend"] for r in json.loads(told.out)}
    assert "enumerate is left out at B,M,L = 8,20,80: 10^18 paths" in told.err
    assert "naive is left out at B,M,L = 8,20,80" in told.err


@pytest.mark.parametrize("backend", ["vectorized", "scaled", "native"])
def test_half_precision_is_judged_on_its_own_inputs(backend, capsys):
    skip_unless_working(backend)
    argv = [*BENCHMARKS["dag"], "--backend", backend, "--against", backend, "--dtype"]
    half, single, double = (
        records_of(capsys, *argv, dtype)[0] for dtype in ("bfloat16", "float32", "float64")
    )
    assert double["max_error"] < 1e-14 < single["max_error"] < 1e-5
    assert half["dtype"] == "bfloat16" and half["max_error"] < 4e-3  # of its own rounding


def test_an_extra_backend_is_timed_and_judged_beside_ours(capsys, written):
    path = written(
        "from exlm_mini.alignment import dag_log_likelihood\n"
        "print('hello')\n"
        "def log_likelihood(*graph):\n"
        "    print('again')\n"
        "    return dag_log_likelihood(*graph) + 1.0\n"
    )
    argv = [*BENCHMARKS["dag"], "--backend", "vectorized", "--extra-backend", path]
    ours, theirs = records_of(capsys, *argv)
    assert (ours["backend"], theirs["backend"]) == ("vectorized", "mine")
    assert theirs["errors"]["log_likelihood"] > 1e-3 > ours["errors"]["log_likelihood"]
    assert theirs["errors"]["grad_emission"] < 1e-5
    assert theirs["wall_ratio"] == theirs["median_ms"] / ours["median_ms"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["dag|emission|step"]),
        (["dog"], ["dog", "dag"]),
        (["dag", "--shape", "2,6,5"], ["2,6,5", "no path", "L at least M"]),
        (["dag", "--shape", "2,1,5"], ["2,1,5", "no path"]),
        (["dag", "--shape", "2,3"], ["2,3", "B,M,L"]),
        (["dag", "--shape", "2,x,3"], ["2,x,3", "B,M,L"]),
        (["dag", "--shape", "2,3,4,5"], ["2,3,4,5", "B,M,L"]),
        (["dag", "--shape", "0,2,3"], ["0,2,3", "at least 1"]),
        (["dag", "--shape", "1000000,100,1000"], ["GiB", "smaller"]),
        (["dag", "--backend", "vectorised"], ["vectorised", "did you mean vectorized"]),
        (["dag", "--against", "naiv"], ["naiv", "did you mean naive"]),
        (["dag", "--extra-backend", "nowhere.py"], ["nowhere.py", "no such file"]),
        (["dag", "--dtype", "float31"], ["float31", "float32"]),
        (["dag", "--seconds", "0"], ["--seconds", "above 0"]),
        (["dag", "--seconds", "nan"], ["--seconds", "above 0"]),
        (["dag", "--threads", "0"], ["--threads", "0"]),
        (["dag", "--device", "tpu"], ["--device", "tpu", "known"]),
        (["dag", "--transitions", "round"], ["round", "sharp"]),
        (["dag", "--jsno"], ["--jsno", "--help"]),
        (["emission", "--chunk", "0"], ["--chunk", "above 0"]),
        (["emission", "--shape", "1000,2,1000000"], ["GiB", "smaller"]),
        (["step", "--shape", "2,4,6"], ["2,4,6", "k M states"]),
        (["step", "--shape", "2,2,4"], ["2,2,4", "masks + 2"]),
        (["step", "--mask-ratio", "1"], ["--mask-ratio", "between 0 and 1"]),
        (["step", "--vocab-size", "6"], ["--vocab-size", "at least"]),
        (["step", "--layout", "theirs"], ["theirs", "released"]),
        (["step", "--precision", "fp8"], ["fp8", "bf16"]),
        (["data", "--tokens", "1000"], ["1,000 tokens", "65,536"]),
        (["data", "--epoch-rows", "0"], ["--epoch-rows", "above 0"]),
        (["train"], ["--recipe"]),
        (["train", "--recipe", "toy-pair"], ["toy-pair", "did you mean toy-pairs"]),
        (["train", "--recipe", "no.yaml"], ["no.yaml", "existing path"]),
        (["train", "--recipe", "toy-pairs", "--steps", "2"], ["--steps is 2", "at least 3"]),
        (["train", "--recipe", "toy-pairs", "--micro-batch", "5"], ["micro_batch_size 5", "128"]),
        (["train", "--recipe", "toy-pairs", "--micro-batch", "0"], ["--micro-batch", "above 0"]),
        (["train", "--recipe", "toy-pairs", "--accumulate", "0"], ["--accumulate", "above 0"]),
        (["train", "--recipe", "toy-pairs", "--precision", "bf61"], ["bf61", "bf16"]),
        (["train", "--recipe", "toy-pairs", "--objective", "mml"], ["mml", "mlm"]),
        (["train", "--recipe", "toy-pairs", "--device", "tpu"], ["--device", "tpu"]),
        (["train", "--recipe", "text-large", "--micro-batch", "1024"],
         ["text-large does not fit", "1,024 rows", "lower --micro-batch"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(argv, words, capsys):
    refuses(argv, words, capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", ["no function log_likelihood"]),
        ("log_likelihood = 3", ["no function log_likelihood"]),
        ("raise KeyError('a\\nb')", ["does not run", "KeyError"]),
        ("import sys; sys.exit(0)", ["does not run", "SystemExit"]),
        ("def (", ["does not run", "SyntaxError"]),
    ],
)
def test_a_file_that_is_no_backend_is_told_in_one_line(text, words, capsys, written):
    path = written(text)
    refuses(["dag", "--extra-backend", path], [Path(path).name, *words], capsys)


def test_nothing_measured_is_no_success(capsys):
    argv = [*BENCHMARKS["dag"], "--backend", "vectorized", "--seconds", "1e-9"]
    assert bench.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "vectorized is left out" in told.err
    assert told.err.endswith("error: nothing was measured; the lines above say why\n")


def test_an_extra_backend_may_not_take_the_name_of_another(capsys, written):
    path = written("def log_likelihood(*graph): ...", "naive.py")
    refuses(["dag", "--extra-backend", path], ["'naive' is taken"], capsys)


def test_an_interruption_ends_in_one_line_and_no_half_json(written):
    path = written(
        "import sys, time\n"
        "def log_likelihood(*graph):\n"
        "    print('at work', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "exlm_mini.bench", "dag", "--json", "--shape", "2,3,6"]
    command += ["--backend", "vectorized", "--extra-backend", path]
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what it runs in the background deaf to SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_backend_that_does_not_work_here_is_left_out_with_its_reason(monkeypatch, capsys):
    broken = BACKENDS["naive"]._replace(why_not=lambda device_type: f"no {device_type}\nmore")
    monkeypatch.setitem(BACKENDS, "naive", broken)
    assert bench.main([*BENCHMARKS["dag"], "--json"]) == 0
    out, err = capsys.readouterr()
    assert {row["backend"] for row in json.loads(out)} == working() - {"naive"}
    assert "naive is left out: no cpu\n" in err
    refuses(
        [*BENCHMARKS["dag"], "--against", "naive", "--backend", "scaled"], ["no cpu"], capsys
    )


def test_the_judge_is_one_that_works_here(monkeypatch):
    broken = BACKENDS["vectorized"]._replace(why_not=lambda device_type: "it does not")
    monkeypatch.setitem(BACKENDS, "vectorized", broken)
    assert judge(made_graph(SHAPE, False, CPU), CPU, seconds=60).name == "scaled"


def test_a_vocabulary_of_full_size_is_measured_by_default(monkeypatch, capsys):
    asked = []

    def noted(shape, width, vocab_size, chunk, device, dtype, note):
        asked.append((shape, vocab_size, chunk, dtype))
        details = {"threads": 1, "vocab_size": vocab_size}
        return [Record("emission", "plain", shape, 1.0, 1.0, 3, 1.0, None, 0.0, {}, details)]

    monkeypatch.setattr(bench, "emission", noted)
    records_of(capsys, "emission", "--dtype", "bfloat16")
    half = torch.bfloat16
    text, long = bench.TEXT_SHAPE, Shape(4, 78, 312)
    assert asked == [(text, 8192, 128, half), (long, 8192, 128, half), (text, 50265, 128, half)]
    asked.clear()
    records_of(capsys, "emission", "--vocab-size", "60")
    assert [(shape, vocab_size) for shape, vocab_size, *_ in asked] == [(text, 60), (long, 60)]


def test_special_tokens_are_never_drawn_for_a_step():
    batch = made_batch(Shape(8, 9, 18), 0.3, vocab_size=8)
    inner = batch.token_ids_BN[:, 1:-1]
    assert inner.min() >= len(SpecialIds())


# ---- from a pack to a batch ----


@given(
    st.integers(1, 3000), st.one_of(st.none(), st.integers(2, 60)), st.integers(7, 70000),
    st.one_of(st.none(), st.integers(20, 60)),
)  # fmt: skip
def test_a_made_pack_has_rows_of_ordinary_tokens(
    tmp_path_factory, num_tokens, row_length, vocab_size, longest
):
    special = SpecialIds()
    folder = tmp_path_factory.mktemp("pack")
    pack = made_pack(folder, num_tokens, row_length, vocab_size, longest)
    token_ids_BN, lengths_B = pack.gather(range(len(pack)))
    if row_length:
        assert pack.row_length == row_length
    else:
        assert set(lengths_B.tolist()) <= {min(n, longest or n) for n in MOLECULE_LENGTHS}
    longest_row = row_length or max(MOLECULE_LENGTHS)
    assert abs(pack.num_tokens - num_tokens) <= max(0.5 * num_tokens, 2 * longest_row)
    assert token_ids_BN[:, 0].eq(special.bos).all()
    for row_N, length in zip(token_ids_BN, lengths_B.tolist(), strict=True):
        assert row_N[length - 1] == special.eos
        inner = row_N[1 : length - 1]
        assert inner.numel() == 0 or len(special) <= inner.min() <= inner.max() < vocab_size


def test_a_vocabulary_of_special_tokens_alone_makes_no_pack(tmp_path):
    with pytest.raises(ValueError, match="no ordinary token"):
        made_pack(tmp_path, 100, 10, len(SpecialIds()))


def test_molecule_lengths_are_those_of_the_embedded_molecules(tmp_path):
    pytest.importorskip("rdkit")
    corpus = prepare_corpus(DataConfig(kind="smiles", block_length=256), tmp_path, seed=1)
    assert corpus.train.vocab_size == MOLECULE_VOCABULARY
    lengths_R = np.concatenate([corpus.train.lengths_R, corpus.validation.lengths_R])
    shares = np.arange(0.025, 1, 0.05)
    assert np.quantile(lengths_R, shares, method="nearest").tolist() == list(MOLECULE_LENGTHS)


def test_data_is_measured_in_every_part_on_one_thread(capsys):
    before = torch.get_num_threads()
    found = records_of(capsys, "data", "--tokens", "70000", "--epoch-rows", "500")
    assert torch.get_num_threads() == before
    kinds = ["64 x 128", "32 x 512", "64 x 512", f"{MOLECULE_BATCH} molecules"]
    counted = [f"{BATCH_TOKENS} tokens, {rows}" for rows in ("text of 128", "text of 512")]
    names = {
        "reading": set(kinds),
        "masking": {f"{kind}, {masker}" for kind in kinds for masker in MASKERS},
        "batch": {*kinds, *counted, f"{BATCH_TOKENS} tokens, molecules"},
        "epoch": {"rows of 128", "molecules", f"molecules, batches of {BATCH_TOKENS} tokens"},
    }
    for part, expected in names.items():
        assert {row["name"] for row in found if row["part"] == part} == expected
    assert len(found) == sum(map(len, names.values()))
    for row in found:
        assert row["benchmark"] == "data" and row["threads"] == 1
        assert row["machine"] == measure.machine(CPU)
        assert row["runs"] >= LEAST_RUNS
        assert row["tokens_per_second"] == 1000 * row["num_tokens"] / row["median_ms"]
        assert row["tokens_per_cpu_second"] == 1000 * row["num_tokens"] / row["median_cpu_ms"]
    by_name = {(row["part"], row["name"]): row for row in found}
    assert by_name["reading", "64 x 512"]["num_tokens"] == 64 * 512
    assert by_name["epoch", "rows of 128"]["num_tokens"] == 500 * 128
    assert by_name["batch", counted[1]]["num_tokens"] <= BATCH_TOKENS


def test_every_timed_epoch_is_ordered_anew(monkeypatch):
    ordered = []
    order = batches.epoch_order

    def noted(lengths_R, batch_size, seed, epoch):
        ordered.append((len(lengths_R), epoch))
        return order(lengths_R, batch_size, seed, epoch)

    monkeypatch.setattr(batches, "epoch_order", noted)
    found = list(epochs(text_rows=600, molecule_rows=700))
    assert [reading.num_rows for reading in found] == [600, 700, 700]
    for num_rows, reading in zip((600, 700), found, strict=False):
        counters = [epoch for rows, epoch in ordered if rows == num_rows]
        assert len(set(counters)) == len(counters) >= reading.runs


# ---- steps of a recipe ----


def toy(**changes) -> RunConfig:
    """The recipe toy-pairs, one of its objectives, with some settings of training replaced."""
    config = singles(load_recipe("toy-pairs"))[1]
    settings = {"device": "cpu", "micro_batch_size": 32}
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, **settings | changes)
    )


def test_a_recipe_is_read_alike_with_and_without_the_parser_of_options():
    for name in ("toy-pairs", "text-base", "smiles-base", "repeated-mlm"):
        assert load_recipe(name) == parse(["--recipe", name]).config


def test_the_speed_of_a_recipe_names_all_that_it_depends_on(capsys):
    found = records_of(capsys, "train", "--recipe", "toy-pairs", "--steps", "3")
    assert [row["objective"] for row in found] == ["mlm", "exlm"]
    for row, config in zip(found, singles(load_recipe("toy-pairs")), strict=True):
        assert row["benchmark"] == "train" and row["recipe"] == "toy-pairs"
        assert set(row["settings"]) == set(SAME_SPEED)
        assert row["settings"]["objective"] == row["objective"]
        assert row["settings"]["train.precision"] == "fp32"  # what auto is on a CPU
        assert row["tokens_per_step"] == 128 * 13
        assert row["tokens_per_second"] == pytest.approx(128 * 13 / row["median_ms"] * 1000)
        assert row["flops_per_second"] == row["flops_per_token"] * row["tokens_per_second"]
        assert row["steps"] == 3
        assert (row["accumulated"], row["accumulated_by_recipe"]) == (1, 1)
        assert row["threads"] == config.train.num_threads == 1
        model = make_model(config, row["vocab_size"], SpecialIds())
        assert row["num_parameters"] == sum(p.numel() for p in model.parameters())
        assert row["peak_mib"] is None or row["peak_mib"] >= 0
        assert row["machine"]["torch"] == torch.__version__


def test_the_speed_of_a_recipe_is_shown_to_a_person(capsys):
    argv = ["train", "--recipe", "toy-pairs", "--steps", "3", "--objective", "exlm"]
    assert bench.main([*argv, "--micro-batch", "64", "--accumulate", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^toy-pairs, exlm: [\d,]+ tokens/s, \S+ FLOP/s, peak memory", out, re.M)
    assert re.search(r"3 steps of \d+ ms = 1 \(of 2\) x 64 rows, fp32, 0.1 M parameters", out)


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_real_steps_are_made_and_the_first_are_not_timed(seconds, monkeypatch):
    made = []
    step = Updater.step

    def noted(self, number, rate):
        before = [p.detach().clone() for p in self.model.parameters()]
        update = step(self, number, rate)
        is_changed = any(
            not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True)
        )
        made.append((number, rate > 0, is_changed, update.num_tokens))
        return update

    monkeypatch.setattr(Updater, "step", noted)
    found = train(toy(), steps=5, seconds=seconds, accumulate=2)
    timed = 5 if seconds else LEAST_STEPS
    assert len(found.seconds) == len(found.num_tokens) == timed
    assert made == [(n, True, True, 2 * 32 * 13) for n in range(WARM_UP_STEPS + timed)]
    assert (found.accumulated, found.accumulated_by_recipe) == (2, 4)
    assert found.settings["train.batch_size"] == 128  # the recipe's, not the shorter step's


@pytest.mark.parametrize(
    ("name", "tokens"), [("smiles-tiny", range(32 * 11, 32 * 69)), ("text-tiny", [64 * 64])]
)
def test_the_rows_of_a_recipe_are_of_its_kind(name, tokens):
    (config,) = singles(load_recipe(name))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    found = train(config, steps=3)
    assert all(n in tokens for n in found.num_tokens)
    assert found.vocab_size == {"smiles-tiny": MOLECULE_VOCABULARY, "text-tiny": 500}[name]


def test_batches_counted_in_tokens_are_measured_in_tokens():
    (config,) = singles(load_recipe("smiles-base"))
    small = ModelConfig(preset="tiny", states_per_mask=2)
    counted = {"batch_tokens": 2000, "micro_batch_tokens": 500, "device": "cpu"}
    settings = dataclasses.replace(config.train, **counted, precision="fp32")
    found = train(dataclasses.replace(config, model=small, train=settings), 3, accumulate=2)
    assert found.vocab_size == config.data.vocab_size
    assert all(300 < n <= 1000 for n in found.num_tokens)
    assert found.accumulated_by_recipe == 4


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_a_recipe_that_does_not_fit_says_what_to_lower(error, monkeypatch, capsys):
    def full(*_):
        raise error

    monkeypatch.setattr(training_benchmark, "_timed_steps", full)
    argv = ["train", "--recipe", "toy-pairs", "--device", "cpu"]
    refuses(argv, ["toy-pairs does not fit", "128 rows", "lower --micro-batch"], capsys)


def test_another_failure_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(training_benchmark, "_timed_steps", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(toy())


def test_what_does_not_fit_holds_on_to_nothing(monkeypatch):
    kept = []

    def full(*_):
        tensor = torch.ones(1000)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(training_benchmark, "_timed_steps", full)
    with pytest.raises(DoesNotFit) as told:
        train(toy())
    assert told.value.__context__ is None and kept[0]() is None


def test_where_memory_is_not_told_steps_are_timed_all_the_same(monkeypatch):
    monkeypatch.setattr(training_benchmark, "resident_bytes", lambda call: None)
    found = train(toy(), steps=3)
    assert found.peak_mib is None and len(found.seconds) == 3


def test_steps_of_a_recipe_need_no_library_for_data_or_options():
    missing = ["accelerate", "datasets", "jsonargparse", "rdkit", "tokenizers", "tqdm"]
    program = f"""
import sys
for name in {missing!r}:
    sys.modules[name] = None
from exlm_mini.bench import main
sys.exit(main(["train", "--recipe", "toy-pairs", "--objective", "mlm", "--steps", "3"]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_recipe_on_a_gpu_runs_in_bf16_and_gives_its_memory_back():
    before = torch.cuda.memory_allocated()
    found = train(toy(device="cuda"), steps=3)
    assert found.settings["train.precision"] == "bf16"
    assert found.peak_mib > 4 * found.num_parameters / MIB
    assert torch.cuda.memory_allocated() <= before + MIB


def test_paths_beyond_any_float_are_still_told():
    assert "10^997 paths" in (too_large("enumerate", Shape(1, 1024, 4096)) or "")
