"""The dynamic programme, the vocabulary head and a training step as they are measured.

Shapes: B rows, M targets, L states, S any number of states, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from exlm_lab.benchmarks import dag as dag_benchmark
from exlm_lab.benchmarks import step as step_benchmark
from exlm_lab.benchmarks.dag import (
    dag,
    forward_and_backward,
    judge,
    made_graph,
    too_large,
)
from exlm_lab.benchmarks.emission import emission
from exlm_lab.benchmarks.record import Shape
from exlm_lab.benchmarks.step import (
    made_batch,
    model_of,
    row_length,
    step,
)
from exlm_mini.alignment import BACKENDS, dag_log_likelihood, posteriors
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.training.provenance import MIB

pytestmark = pytest.mark.usefixtures("three_runs")
CPU = torch.device("cpu")
SHAPE = Shape(2, 3, 6)
FLOAT = 4


def tiny_model(**settings) -> ModelConfig:
    return ModelConfig(num_layers=1, width=16, ffn_width=32, num_heads=2, **settings)


# ---- the dynamic programme ----


@pytest.mark.parametrize("is_sharp", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(2, 4, 4), Shape(3, 2, 9)])
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


def test_a_wrong_value_and_a_wrong_gradient_are_seen():
    graph = made_graph(SHAPE, False, CPU)
    function = BACKENDS["vectorized"].log_likelihood
    verdict = judge(graph, CPU)
    assert {t.dtype for t in verdict.exact} == {torch.float64}
    log_likelihood_B, grad_BML, grad_BLL = forward_and_backward(function, graph)
    size = verdict.exact[0].abs().max().item()
    off = verdict.errors((log_likelihood_B + 1, 2 * grad_BML, grad_BLL))
    assert off["log_likelihood"] == pytest.approx(1 / size, rel=1e-4)
    assert off["grad_emission"] == pytest.approx(1, rel=1e-4)
    assert off["grad_transition"] < 1e-5


def test_the_first_judge_that_is_fast_enough_judges(monkeypatch):
    graph = made_graph(Shape(5, 3, 6), False, CPU)
    monkeypatch.setattr(dag_benchmark, "estimated_seconds", lambda *_: 2.0)
    assert judge(graph, CPU, seconds=3).name == "vectorized"
    assert judge(graph, CPU, seconds=1) is None
    broken = BACKENDS["vectorized"]._replace(why_not=lambda device_type: "it does not")
    monkeypatch.setitem(BACKENDS, "vectorized", broken)
    assert judge(graph, CPU).name == "scaled"


@pytest.mark.parametrize(
    ("backend", "shape", "is_refused"),
    [
        ("enumerate", Shape(2, 5, 20), False),  # 2 * 816 paths
        ("enumerate", Shape(8, 20, 80), True),
        ("enumerate", Shape(8, 1, 1), False),
        ("enumerate", Shape(1, 1024, 4096), True),  # 10^997, beyond any float
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
    found = list(dag(SHAPE, functions, CPU, False, notes.append))
    assert [record["backend"] for record in found] == ["good"]
    for name, note in zip(functions, notes, strict=False):
        assert note.startswith(f"{name} is left out at B,M,L = 2,3,6")
    assert "one log-likelihood per row, (2,), not ()" in notes[1]

    monkeypatch.setattr(dag_benchmark, "judge", lambda *_: None)
    monkeypatch.setattr(dag_benchmark, "estimated_seconds", lambda *_: 30.0)
    notes.clear()
    assert not list(dag(SHAPE, {"good": good}, CPU, False, notes.append))
    assert ["no error is given" in notes[0], "about 180 s" in notes[1]] == [True, True]
    assert len(list(dag(SHAPE, {"good": good}, CPU, False, notes.append, {"good"}))) == 1


# ---- the vocabulary head ----


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.bfloat16, 0.03), (torch.float64, 1e-13)],
)
def test_both_ways_of_the_vocabulary_head_agree(dtype, rounding):
    found = list(emission(Shape(2, 3, 5), 50, CPU, dtype, 8, 4))
    assert [record["backend"] for record in found] == ["buffer", "chunked"]
    for record in found:
        assert set(record["errors"]) == {"log_emission", "grad_state", "grad_embedding"}
        assert record["max_error"] < rounding
        assert record["dtype"] == str(dtype).removeprefix("torch.")
    assert max(record["max_error"] for record in found) > 0


def test_the_chunked_head_takes_memory_for_a_chunk_the_other_for_all_states():
    # The gradient of the embedding is as large as V x D for both; a chunk is 16 x V.
    V = 1000
    peak = {}
    for L in (32, 64):
        for record in emission(Shape(2, 3, L), V, CPU, torch.float32, 8, 16):
            peak[record["backend"], L] = record["peak_mib"] * MIB
    more_logits = 2 * (64 - 32) * V * FLOAT
    assert peak["buffer", 64] - peak["buffer", 32] > 0.95 * more_logits
    assert peak["chunked", 64] - peak["chunked", 32] < 0.05 * more_logits


# ---- a training step ----


@pytest.mark.parametrize("M", [3, 21])
def test_a_made_batch_and_its_graph_have_the_shape_asked_for(M):
    shape = Shape(4, M, 3 * M)
    batch, N = made_batch(shape, vocab_size=8), row_length(shape)
    assert batch.token_ids_BN.shape == (4, N) and (N == 128) == (M == 21)
    assert batch.token_ids_BN[:, 1:-1].min() >= len(SpecialIds())
    assert (batch.is_masked_BN.sum(1) == M - 2).all()
    assert (M - 2) / (N - 2) >= 0.15 > (M - 2) / (N - 1)
    scores = ExLM(dataclasses.replace(model_of(shape, "tiny"), num_layers=1), 50)(*batch)
    assert scores.log_emission_BML.shape == shape
    assert scores.graph.num_states_B.tolist() == [3 * M] * 4


@pytest.mark.parametrize("kind", [MaskedLM, ExLM])
def test_every_part_of_a_step_is_timed_forward_and_backward(kind):
    model = kind(tiny_model(), 50)
    parts = step_benchmark.time_parts(model, made_batch(Shape(2, 4, 16), 50), CPU)
    names = ("encoder", "head", "transition", "dynamic programme")
    assert tuple(parts) == (names if kind is ExLM else names[:2])
    for spent in parts.values():
        assert spent["forward_ms"] > 0 < spent["backward_ms"]


def test_a_node_of_the_backward_pass_belongs_to_the_part_that_made_it():
    now = iter(range(100))

    def event(name, us, above=None, node=-1, scope=0):
        return SimpleNamespace(
            name=name, cpu_time_total=us, device_time_total=0, cpu_parent=above, scope=scope,
            sequence_nr=node, device_type=DeviceType.CPU,
            time_range=SimpleNamespace(start=next(now)),
        )  # fmt: skip

    encoder = event("encoder", 1000)
    events = [
        encoder,
        event("aten::mul", 900, encoder, 0),
        event("aten::detach", 50, encoder, 1),
    ]
    events += [event("aten::gather", 400, None, 1)]  # the detached one made no node of number 1
    head = event("head", 3000)
    events += [head, event("aten::linear", 2000, head, 2), event("aten::mm", 1900, head, 2)]
    backward = {2: 5000, 1: 700, 0: 2500, -1: 100}
    events += [event(f"{step_benchmark.NODE}X", us, None, n, 1) for n, us in backward.items()]
    assert step_benchmark._parts(events, CPU) == {
        "encoder": {"forward_ms": 1.0, "backward_ms": 2.5},
        "head": {"forward_ms": 3.0, "backward_ms": 5.0},
    }


def test_both_models_are_timed_with_their_parts():
    config = tiny_model(states_per_mask=3, dropout=0.1)
    found = mlm, exlm = list(step(Shape(2, 4, 12), config, CPU, 50, "bf16"))
    assert (mlm["backend"], exlm["backend"]) == ("mlm", "exlm")
    assert list(mlm["parts"]) == ["encoder", "head"]
    assert list(exlm["parts"]) == [*mlm["parts"], "transition", "dynamic programme"]
    for record in found:
        assert record["dtype"] == "bfloat16" and 0 < record["max_error"] < 0.1
        tokens = record["step_tokens_per_second"] * record["median_ms"] / 1000
        assert tokens == pytest.approx(2 * record["num_tokens"])


def test_a_step_is_compiled_layer_by_layer(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    config = dataclasses.replace(tiny_model(states_per_mask=3), num_layers=2)
    found = list(step(Shape(1, 3, 9), config, CPU, 50, "fp32", True, [1]))
    assert [type(module).__name__ for module in compiled] == ["EncoderLayer"] * 6
    assert [record["backend"] for record in found] == ["mlm", "exlm", "exlm-at-1"]


# ---- what is on record ----

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("cuda/*.h", "cuda/*.cpp", "cuda/*.cu")


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


@pytest.fixture
def last_kernels() -> str:
    """The commit that last changed a kernel."""
    try:
        is_shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    except OSError as error:
        pytest.skip(f"no git: {error}")
    if is_shallow != "false":
        pytest.skip("without the whole history no commit is known to be the older one")
    return git("log", "-1", "--format=%H", "--", *KERNELS).stdout.strip()


def is_newer(commit: str, kernels: str) -> bool:
    """Whether a commit holds these kernels."""
    return git("merge-base", "--is-ancestor", kernels, commit).returncode == 0


def test_the_recorded_benchmark_is_of_the_kernels_of_today(last_kernels):
    records = json.loads((ROOT / "book" / "results" / "bench-dag.json").read_text())
    (commit,) = {record["machine"]["commit"] for record in records}
    assert is_newer(commit, last_kernels), (
        f"{commit} is older than the kernels of {last_kernels}, or no commit: run the command of "
        "chapter 11 again, from a checkout without changes"
    )


def test_a_commit_before_the_kernels_is_older(last_kernels):
    assert is_newer(last_kernels, last_kernels)
    assert not is_newer(f"{last_kernels}~1", last_kernels)
    assert not is_newer(f"{last_kernels} with changes", last_kernels)
