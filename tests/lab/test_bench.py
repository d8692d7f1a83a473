"""The benchmark command and its measuring tools; no test depends on how long anything takes.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import fails
from torch.autograd import DeviceType

from exlm_lab import bench
from exlm_lab.benchmarks import dag as dag_benchmark
from exlm_lab.benchmarks import step as step_benchmark
from exlm_lab.benchmarks.dag import (
    RELEASED,
    TERMS,
    dag,
    forward_and_backward,
    judged,
    made_graph,
)
from exlm_lab.benchmarks.measure import LEAST_RUNS, peak_bytes, time_side_by_side
from exlm_lab.benchmarks.record import Shape, compared
from exlm_mini.alignment import BACKENDS
from exlm_mini.training import provenance

pytestmark = pytest.mark.usefixtures("three_runs")
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPE = Shape(2, 3, 6)
FLOAT = 4
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def working() -> set[str]:
    """Backends that work on a CPU; the first call may build one."""
    return {name for name in BACKENDS if BACKENDS[name].why_not("cpu") is None}


def records_of(path: Path, *argv: str) -> list[dict]:
    """Run a benchmark and return the records that it writes to ``path / "bench.json"``."""
    output = path / "bench.json"
    assert bench.main([*argv, "--output", str(output)]) == 0
    return json.loads(output.read_text())


# ---- the command ----


@pytest.mark.parametrize("name", ["dag", "step"])
def test_there_is_one_record_and_one_line_for_each_backend_and_shape(
    name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(step_benchmark, "ENOUGH_SECONDS", 0.0)
    if name == "dag":
        names, reference, shapes = working(), "vectorized", [(2, 3, 6), (1, 3, 9)]
        argv = ["--shape", "2,3,6", "--shape", "1,3,9"]
    else:
        names, reference, shapes = {"mlm", "exlm", "exlm-at-1"}, "mlm", [(128, 13)]
        argv = ["--recipe", "toy-pairs"]
    before = torch.get_num_threads()
    records = records_of(tmp_path, name, *argv, "--threads", "1")
    _machine, _head, *table = capsys.readouterr().out.splitlines()
    found = [(record["backend"], tuple(record["shape"])) for record in records]
    assert sorted(found) == sorted((n, shape) for n in names for shape in shapes)
    base = {tuple(r["shape"]): r for r in records if r["backend"] == reference}
    for record in records:
        assert record["benchmark"] == name and record["reference"] == reference
        assert record["median_ms"] > 0 and record["peak_mib"] > 0 and record["threads"] == 1
        assert record["machine"] == provenance.machine(CPU)
        theirs = base[tuple(record["shape"])]
        assert record["wall_ratio"] == record["median_ms"] / theirs["median_ms"]
        if name == "dag":
            assert 0 <= record["max_error"] < 1e-4
            continue
        tokens = record["step_tokens_per_second"] * record["median_ms"] / 1000
        assert tokens == pytest.approx(128 * 13)
        parts = ["encoder", "head", "transition", "dynamic programme"]
        assert list(record["parts"]) == parts[: 2 if record["backend"] == "mlm" else 4]
        for spent in record["parts"].values():
            assert spent["forward_ms"] > 0 < spent["backward_ms"]
    assert torch.get_num_threads() == before
    for record in records:
        assert any(f" {record['median_ms']:.3f} " in line for line in table)


def test_without_its_reference_there_is_no_ratio():
    (alone,) = compared([{"backend": "a", "median_ms": 2.0}], "b")
    assert alone["reference"] is alone["wall_ratio"] is None


def test_backends_of_somebody_else_are_timed_and_judged(tmp_path, monkeypatch):
    for name in ("naive", "scaled"):
        monkeypatch.delitem(BACKENDS, name)
    mine, released = tmp_path / "mine.py", tmp_path / "theirs" / RELEASED
    argv = ["dag", "--shape", "2,3,6"]
    for file, extra, function, counts in (
        (mine, mine, "log_likelihood", "targets, states"),
        (released, tmp_path / "theirs", "torch_dag_loss", "states, targets"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "from exlm_mini.alignment import dag_log_likelihood\nassert __file__\n"
            f"def {function}(match, links, {counts}):\n"
            "    return dag_log_likelihood(match, links, targets, states) + 1.0\n"
        )
        argv += ["--extra-backend", str(extra)]
    found = {record["backend"]: record for record in records_of(tmp_path, *argv)}
    for name in ("mine", "theirs"):
        theirs, ours = found[name], found["vectorized"]
        assert theirs["errors"]["log_likelihood"] > 1e-3 > ours["errors"]["log_likelihood"]
        assert theirs["errors"]["grad_emission"] < 1e-5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dag --extra-backend nowhere.py", ["nowhere.py", "--extra-backend"]),
        ("dag --extra-backend .", ["dag_loss.py", "torch_dag_loss"]),
        ("dag --shape 2,6,5", ["2,6,5", "L at least M"]),
        ("dag --shape 2,1,5", ["2,1,5", "M at least 2"]),
        ("dag --shape 2,x,3", ["2,x,3", "B,M,L"]),
        ("dag --shape 1000000,100,1000", ["GiB", "smaller"]),
        ("dag --device tpu", ["device", "tpu", "known"]),
        ("step --recipe text-tinny", ["text-tinny", "text-tiny"]),
    ],
)
def test_a_mistake_is_told_in_one_line(line, words, capsys):
    fails(capsys, bench.main, *line.split(), parts=words)


def test_a_record_that_is_being_written_is_no_change_of_the_code(monkeypatch, tmp_path):
    code = tmp_path / "exlm_mini" / "training" / "provenance.py"
    record = tmp_path / "book" / "results" / "bench.json"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for path in (code, record):
        path.parent.mkdir(parents=True)
        path.write_text("[]")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert provenance.commit() == "not a git checkout"
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    record.write_text("")  # as `> book/results/bench.json` leaves it
    assert re.fullmatch("[0-9a-f]{40}", provenance.commit())
    code.write_text("[1]")
    assert provenance.commit().endswith(" with changes")


# ---- the dynamic programme ----


def test_a_wrong_value_and_a_wrong_gradient_are_seen():
    graph = made_graph(SHAPE, False, CPU)
    exact = judged(graph)
    assert {t.dtype for t in exact} == {torch.float64}
    log_likelihood_B, grad_BML, grad_BLL = forward_and_backward(
        BACKENDS["vectorized"].log_likelihood, graph
    )
    off = dag_benchmark.errors(
        (log_likelihood_B + 1, 2 * grad_BML, grad_BLL * torch.inf), exact
    )
    assert off["log_likelihood"] == pytest.approx(1 / exact[0].abs().max().item(), rel=1e-4)
    assert off["grad_emission"] == pytest.approx(1, rel=1e-4)
    assert off["grad_transition"] is None
    of_first = [t[:1].expand_as(t) for t in (log_likelihood_B, grad_BML, grad_BLL)]
    assert all(error > 1e-3 for error in dag_benchmark.errors(of_first, exact).values())


def test_what_cannot_be_timed_is_told_and_the_others_go_on():
    notes = []
    good = BACKENDS["vectorized"].log_likelihood
    functions = {
        "raises": lambda *_: torch.ones(2, 3) @ torch.ones(2),
        "scalar": lambda emission, *_: emission.sum(),
        "one_sided": lambda emission, *_: emission.sum((1, 2)),
        "enumerate": BACKENDS["enumerate"].log_likelihood,
        "good": good,
    }
    assert TERMS["enumerate"](SHAPE) == 2 * 3 * 4 and TERMS["naive"](SHAPE) == 2 * 2 * 15
    large = Shape(1, 8, 30)
    found = list(dag(large, functions, CPU, False, notes.append))
    assert [record["backend"] for record in found] == ["good"]
    for name, note in zip(functions, notes, strict=False):
        assert note.startswith(f"{name} is left out at B,M,L = 1,8,30")
    assert "one log-likelihood per row, shape (1,), not ()" in notes[1] and "terms" in notes[3]


# ---- a training step ----


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
    events += [event("aten::gather", 400, None, 1)]  # detach made no node: 1 is gather's
    head = event("head", 3000)
    events += [head, event("aten::linear", 2000, head, 2), event("aten::mm", 1900, head, 2)]
    backward = {2: 5000, 1: 700, 0: 2500, -1: 100}
    events += [event(f"{step_benchmark.NODE}X", us, None, n, 1) for n, us in backward.items()]
    assert step_benchmark._parts(events, CPU) == {
        "encoder": {"forward_ms": 1.0, "backward_ms": 2.5},
        "head": {"forward_ms": 3.0, "backward_ms": 5.0},
    }


# ---- time and memory ----


def test_calls_are_timed_in_turn_after_one_run_each_to_warm_up():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_side_by_side(calls, CPU, enough_seconds=0)
    assert order == ["a", "b"] * (1 + LEAST_RUNS)
    assert [timing.runs for timing in timings.values()] == [LEAST_RUNS] * 2


def test_peak_memory_is_what_is_alive_at_one_time_to_the_byte():
    before = torch.ones(1000, 1000)  # was there before, so it does not count
    x = torch.ones(1000, requires_grad=True)

    def two_alive_then_one() -> None:
        _ = before + 1 + before
        for _ in range(5):
            torch.ones(1000)

    def forward() -> torch.Tensor:
        return (x * 2 * x).sum()

    assert peak_bytes(two_alive_then_one, CPU) == 2 * 1000 * 1000 * FLOAT
    assert peak_bytes(lambda: torch.autograd.grad(forward(), x), CPU) > peak_bytes(forward, CPU)


@pytest.mark.gpu
@on_gpu
def test_peak_memory_of_a_gpu_leaves_out_what_was_there_before():
    device = torch.device("cuda")
    before = torch.ones(1000, 1024, device=device)
    assert peak_bytes(lambda: before + 1 + before, device) == 2 * 1000 * 1024 * FLOAT
    assert time_side_by_side({"": lambda: before + 1}, device)[""].median_ms > 0


# ---- what is on record ----


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def test_the_recorded_benchmark_is_of_the_kernels_of_today():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone cannot tell which commit is older")
    files = ("cuda/*.h", "cuda/*.cpp", "cuda/*.cu")
    kernels = git("log", "-1", "--format=%H", "--", *files).stdout.strip()
    records = json.loads((ROOT / "book" / "results" / "bench-dag.json").read_text())
    (commit,) = {record["machine"]["commit"] for record in records}
    is_newer = git("merge-base", "--is-ancestor", kernels, commit).returncode == 0
    assert is_newer, (
        f"the benchmark was recorded at {commit}, which is unknown or older than the last change "
        f"of the kernels, {kernels}: rerun the command in chapter 11 from a clean checkout"
    )
