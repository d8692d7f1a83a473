"""``book/evidence.py``: what it checks, what it keeps, and that a wrong backend does not pass.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from exlm_lab.benchmarks import measure
from exlm_lab.benchmarks.dag import Graph
from exlm_lab.benchmarks.limits import (
    REPLAYS,
    SWEEPS,
    Floor,
    Limits,
    floor,
    measured_limits,
    replay_ms,
)
from exlm_lab.benchmarks.record import Shape
from exlm_lab.benchmarks.training import singles, speed_settings
from exlm_mini.alignment import BACKENDS, Backend
from exlm_mini.alignment import viterbi as public_viterbi
from exlm_mini.alignment.cases import CASES, random_graph
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.model import emission
from exlm_mini.recipes import load_recipe, recipe_names
from exlm_mini.training import provenance
from exlm_mini.training.console import INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
import correctness  # noqa: E402
import evidence  # noqa: E402
import measurements  # noqa: E402
import sanitizing  # noqa: E402

CPU = torch.device("cpu")
SCRIPT = str(ROOT / "book" / "evidence.py")
CHECKS = ("--quick", "--device", "cpu", "--only", "checks", "--backend", "vectorized")
STOPPED_AFTER = 2
"""Results."""
hash_of_sources = evidence.sources
LIBRARIES = {
    "accelerate", "datasets", "hypothesis", "jsonargparse", "matplotlib", "numba", "pandas",
    "pytest", "rdkit", "scipy", "seaborn", "sklearn", "tokenizers", "tqdm", "transformers", "yaml",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No more runs than a median needs, nothing compiled by torch, sources as they are now."""
    with pytest.MonkeyPatch.context() as patch:
        now = hash_of_sources()
        patch.setattr(evidence, "sources", lambda: now)
        patch.setattr(measure, "MOST_RUNS", measure.LEAST_RUNS)
        patch.setattr(emission, "_fused", lambda: emission._normalise_rounded_)
        yield


def made(*arguments: str) -> tuple[int, str]:
    """Exit status and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = evidence.main([str(argument) for argument in arguments])
    return status, out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, int, str]:
    """Everything at tiny sizes: the file, exit status and output."""
    file = tmp_path_factory.mktemp("evidence") / "whole.json"
    return file, *made("--quick", "--device", "cpu", "--output", file)


def read(file: Path) -> dict:
    return json.loads(file.read_text())


# ---- the whole ----


def test_evidence_says_what_was_measured_on_what(whole):
    file, status, out = whole
    content = read(file)
    assert status == 0 and content["passed"] is True and content["missing"] == [], out
    assert set(content) == {
        "command", "begun", "machine", "backends", "quick", "passed", "missing", "sections",
    }  # fmt: skip
    about = content["machine"]
    here = provenance.machine(CPU)
    assert re.match(r"[0-9a-f]{40}|not a git checkout", about["commit"])
    assert {**here, **about} == {**about, **here, "commit": about["commit"]}
    assert about["threads"] == torch.get_num_threads()
    assert about["sources"] == evidence.sources()
    assert set(content["backends"]) == set(BACKENDS)
    assert list(content["sections"]) == list(evidence.SECTIONS)
    for results in content["sections"].values():
        assert results
        for result in results.values():
            assert result["seconds"] >= 0 and "error" not in result


def test_every_working_backend_meets_every_case_in_both_dtypes(whole):
    content = read(whole[0])
    working = [name for name, reason in content["backends"].items() if reason is None]
    assert {"enumerate", "naive", "vectorized", "scaled"} <= set(working)
    for backend, dtype in product(working, ("float32", "float64")):
        result = content["sections"]["checks"][f"cases {backend} {dtype}"]
        is_slow = backend in correctness.TEACHING
        assert result["num_graphs"] == len(CASES) * (1 if is_slow else 2)
        assert result["passed"] is True and result["failures"] == []
        assert set(result["worst"]) == set(correctness.QUANTITIES)
        for found in result["worst"].values():
            assert 0 <= found["error"] <= found["limit"]
            assert found["graph"].partition(",")[0] in CASES
        assert (result["rows_redone"] is not None) == (backend in ("scaled", "native"))


def test_times_stand_beside_the_floor_and_one_reference(whole):
    sections = read(whole[0])["sections"]
    limits = sections["dag"]["limits"]
    for kind in ("flat", "sharp"):
        result = sections["dag"][f"2,3,6 {kind}"]
        least = floor(Shape(2, 3, 6))
        expected = {**least._asdict(), "milliseconds": least.milliseconds(
            Limits(limits["bytes_per_second"], limits["multiply_adds_per_second"])
        )}  # fmt: skip
        assert result["floor"] == expected
        assert {r["reference"] for r in result["records"]} == {"vectorized"}
        assert {r["transitions"] for r in result["records"]} == {kind}
    heads = sections["emission"]["2,3,6 vocabulary 50 float32"]["records"]
    assert [r["backend"] for r in heads] == ["plain", "buffer", "fused", "chunked"]
    for dropout in ("0", "0.1"):
        steps = sections["step"][f"dropout {dropout} threads {torch.get_num_threads()}"]
        mlm, exlm = steps["records"]
        assert mlm["dropout"] == exlm["dropout"] == [float(dropout)] * 2
        assert exlm["cpu_ratio"] == exlm["median_cpu_ms"] / mlm["median_cpu_ms"]
    for section in ("dag", "emission", "step"):
        for result in sections[section].values():
            for row in result.get("records", []):
                assert row["median_ms"] > 0 and row["peak_mib"] > 0
                assert row["max_error"] < (0.05 if row["dtype"] == "bfloat16" else 1e-4)
                assert "machine" not in row


def test_the_released_layout_stands_beside_ours(whole):
    (base,) = [r for key, r in read(whole[0])["sections"]["step"].items() if "base" in key]
    mlm, exlm, released = base["records"]
    assert [row["backend"] for row in base["records"]] == ["mlm", "exlm", "exlm-released"]
    assert base["cost_ratio"] == exlm["median_ms"] / mlm["median_ms"]
    assert base["times_released"] == released["median_ms"] / exlm["median_ms"]
    for row in base["records"]:
        expected = 2 * row["num_tokens"] / (row["median_ms"] / 1000)
        assert row["step_tokens_per_second"] == pytest.approx(expected)
    per_second = [row["flops_per_second"] * row["median_ms"] for row in (exlm, released)]
    assert per_second[0] == pytest.approx(per_second[1])  # the same work is counted


def test_traffic_and_arithmetic_stand_beside_the_ceilings(whole):
    found = read(whole[0])["sections"]["dag"]
    limits, result = found["limits"], found["2,3,6 flat"]
    for row in result["records"]:
        per_second = result["floor"]["num_bytes"] / (row["median_ms"] / 1000)
        assert row["of_ceiling"]["bytes"] == per_second / limits["bytes_per_second"]


def test_data_and_recipes_are_measured_too(whole):
    sections = read(whole[0])["sections"]
    parts = {row["part"] for row in sections["data"]["batches"]["records"]}
    assert parts == {"reading", "masking", "batch"}
    assert {row["part"] for row in sections["data"]["epochs"]["records"]} == {"epoch"}
    assert list(sections["train"]) == ["toy-pairs mlm", "toy-pairs exlm"]
    for name in ("data", "train"):
        for result in sections[name].values():
            for row in result["records"]:
                assert row["tokens_per_second"] > 0 and "machine" not in row


def test_each_result_is_told_in_a_line_with_progress(whole):
    file, _, out = whole
    lines = out.splitlines()
    total = sum(len(results) for results in read(file)["sections"].values())
    told = [line for line in lines if line.endswith(" s]")]
    assert len(told) == total
    for number, line in enumerate(told, 1):
        assert f"[{number}/{total}, " in line and ", ETA " in line
    assert "checks cases scaled float32: right, log_likelihood " in out
    assert lines[-1] == f"all is well: {file}"


def test_no_backend_is_its_own_judge():
    shape = Shape(3, 9, 36)
    own = correctness.check_graph("vectorized", shape, "flat", torch.float64, CPU)
    assert own == {"passed": None, "skipped": "it is the judge"}
    other = correctness.check_graph("scaled", shape, "flat", torch.float64, CPU)
    assert (other["passed"], other["judge"]) == (True, "vectorized")
    assert other["worst"]["grad_emission"]["error"] > 0


def test_the_full_set_has_the_graphs_that_matter():
    working = ["enumerate", "naive", "vectorized", "scaled", "native"]
    found = list(correctness.groups(working, is_quick=False))
    for shape, kind in correctness.GRAPHS:
        for backend in ("vectorized", "scaled", "native"):
            for dtype in (torch.float32, torch.float64):
                assert (backend, shape, kind, dtype) in found
    for dtype in (torch.bfloat16, torch.float16):
        assert ("native", None, "", dtype) in found
        assert ("native", Shape(8, 77, 308), "flat", dtype) in found
    shapes = [shape for shape, _ in correctness.GRAPHS]
    assert {(1, 256, 1024), (1, 1024, 4096), (2, 1, 1)} <= set(shapes)
    assert any(M == L > 1 for _, M, L in shapes) and any(M == 1 < L for _, M, L in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_as_well(dtype):
    for backend in ("vectorized", "scaled"):
        assert correctness.check_cases(backend, dtype, CPU)["failures"] == []
        for kind in ("flat", "sharp", "ragged", "spread"):
            result = correctness.check_graph(backend, Shape(3, 9, 36), kind, dtype, CPU)
            assert result["passed"], result


# ---- what it sees ----


def doubled(*graph):
    return 2 * BACKENDS["vectorized"].log_likelihood(*graph)


def wrong_gradient(log_emission_BML, *others):
    value_B = BACKENDS["vectorized"].log_likelihood(log_emission_BML, *others)
    finite = torch.where(log_emission_BML.isfinite(), log_emission_BML, 0.0).sum()
    return value_B + (finite - finite.detach()) * 1e-3


def reads_padding(log_emission_BML, *others):
    value_B = BACKENDS["vectorized"].log_likelihood(log_emission_BML, *others)
    return value_B + 0 * log_emission_BML.detach().nan_to_num(0, 0, 0).sum() + (
        torch.nan if log_emission_BML.isnan().any() else 0.0
    )  # fmt: skip


def raises(*graph):
    raise RuntimeError("there is no kernel")


def latest_path(*graph):
    path_BM, log_score_B = public_viterbi(*graph, backend="vectorized")
    return path_BM.clone().fill_(0), log_score_B


@pytest.mark.parametrize(
    ("log_likelihood", "viterbi", "words"),
    [
        (doubled, None, "log_likelihood is off by"),
        (wrong_gradient, None, "grad_emission is off by"),
        (reads_padding, None, "padding nan: log_likelihood is off by inf"),
        (raises, None, "RuntimeError: there is no kernel"),
        (None, latest_path, "another best path"),
    ],
)
def test_a_wrong_backend_is_named_and_the_exit_status_is_1(
    log_likelihood, viterbi, words, monkeypatch, tmp_path
):
    good = BACKENDS["vectorized"]
    wrong = Backend(log_likelihood or good.log_likelihood, viterbi or good.viterbi)
    monkeypatch.setitem(BACKENDS, "wrong", wrong)
    file = tmp_path / "wrong.json"
    arguments = (*CHECKS, "--backend", "wrong", "--output", file)
    status, out = made(*arguments)
    assert status == 1
    assert "FAILED checks: cases wrong float64: " in out
    assert out.splitlines()[-1] == f"NOT ALL IS WELL: {file}"
    content = read(file)
    assert content["passed"] is False
    results = content["sections"]["checks"]
    bad = [key for key, r in results.items() if "error" in r or r.get("passed") is False]
    failed = {key.split()[-2] for key in bad}
    assert failed == {"wrong"}
    assert any(words in line for line in results["cases wrong float64"]["failures"])
    assert made(*arguments)[0] == 1  # a second run does not forget


def test_a_path_scores_what_lies_on_it():
    graph = Graph(*random_graph(3, [3, 2], [6, 4]))
    path_BM = torch.tensor([[0, 2, 5], [0, 3, -1]])
    e, t = graph.log_emission_BML, graph.log_transition_BLL
    expected = [
        e[0, 0, 0] + t[0, 0, 2] + e[0, 1, 2] + t[0, 2, 5] + e[0, 2, 5],
        e[1, 0, 0] + t[1, 0, 3] + e[1, 1, 3],
    ]
    torch.testing.assert_close(correctness.path_score(graph, path_BM), torch.stack(expected))
    for not_a_path in (
        [[1, 2, 5], [0, 3, -1]],
        [[0, 2, 4], [0, 3, -1]],
        [[0, 0, 5], [-1, -1, -1]],
    ):
        assert correctness.path_score(graph, torch.tensor(not_a_path))[0] == -torch.inf


def test_rows_done_again_are_counted():
    ordinary, spread = CASES["ragged"], CASES["huge_spread"]
    for backend in ("scaled", "native"):
        if BACKENDS[backend].why_not("cpu"):
            continue
        assert correctness.rows_redone(backend, ordinary.to(torch.float32)) == 0
        assert correctness.rows_redone(backend, spread.to(torch.float32)) > 0
    assert correctness.rows_redone("vectorized", spread) is None


# ---- the floor ----


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 7), (3, 3), (3, 8), (5, 5), (6, 17)])
def test_the_floor_counts_every_edge_inside_the_cone(shape):
    M, L = shape

    def may_be(i: int, u: int) -> bool:
        return i <= u <= L - M + i and (i > 0 or u == 0) and (i < M - 1 or u == L - 1)

    pairs = sum(
        may_be(i - 1, v) and may_be(i, u)
        for i in range(1, M) for u in range(L) for v in range(u)
    )  # fmt: skip
    assert floor(Shape(3, M, L)).num_multiply_adds == 3 * SWEEPS * pairs


def test_the_floor_is_the_slower_of_traffic_and_arithmetic():
    B, M, L = 2, 3, 6
    edges = L * (L - 1) // 2
    assert floor(Shape(B, M, L), 8).num_bytes == 8 * B * (2 * edges + L * L + 3 * M * L)
    assert Floor(1000, 10).milliseconds(Limits(1e6, 1e6)) == 1.0
    assert Floor(10, 3000).milliseconds(Limits(1e6, 1e6)) == 3.0


def test_limits_leave_the_precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert min(measured_limits(CPU, size=32)) > 0
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_call_is_captured_and_replayed():
    device = torch.device("cuda")
    total = torch.zeros(1000, device=device)
    assert replay_ms(lambda: total.add_(1), device) > 0
    assert total.unique().numel() == 1 and total[0] > REPLAYS
    with pytest.raises(RuntimeError):
        replay_ms(lambda: total.sum().item(), device)


# ---- the recipes ----


def recipes_of(device: str) -> list[str]:
    setting = measurements.Setting(torch.device(device), False, [], {}, lambda *_: None)
    return [item.key for item in measurements.train_times(setting)]


def test_on_a_cpu_the_recipes_that_bring_their_data_are_measured():
    assert recipes_of("cpu") == [
        "smiles-tiny exlm", "text-tiny exlm", "toy-pairs mlm", "toy-pairs exlm",
    ]  # fmt: skip


def test_on_a_gpu_every_speed_there_is_in_the_recipes_is_measured_once():
    found = recipes_of("cuda")
    assert {"text-base exlm", "text-large exlm", "smiles-base exlm"} <= set(found)
    assert set(recipes_of("cpu")) < set(found) and len(found) == len(set(found))
    # They differ in the number of steps alone.
    assert "vanilla-mlm mlm" in found and "vanilla-mlm-plus-plus mlm" not in found
    named = {key.split()[0] for key in found}
    speeds = [
        [speed_settings(single) for single in singles(load_recipe(name))]
        for name in recipe_names()
    ]
    for name, settings in zip(recipe_names(), speeds, strict=True):
        is_twin = any(settings == other for other in speeds if other is not settings)
        assert name in named or is_twin


def test_a_recipe_that_does_not_fit_is_kept_as_such(monkeypatch):
    def full(config, steps, seconds, accumulate):
        assert config.train.device == "cpu"
        raise DoesNotFit("text-large does not fit in the memory of this machine")

    monkeypatch.setattr(measurements, "train", full)
    setting = measurements.Setting(CPU, True, [], {}, lambda *_: None)
    for item in measurements.train_times(setting):
        assert item.run() == {
            "skipped": "text-large does not fit in the memory of this machine"
        }


def test_without_yaml_the_reason_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    setting = measurements.Setting(CPU, True, [], {}, lambda *_: None)
    (item,) = measurements.train_times(setting)
    assert item.run() == {"skipped": "reading a recipe needs PyYAML; run: pip install PyYAML"}


# ---- going on ----


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -9)]
)
def test_a_stopped_run_goes_on_where_it_was(number, status, tmp_path, monkeypatch):
    file = tmp_path / "stopped.json"
    arguments = [*CHECKS, "--backend", "enumerate", "--output", str(file)]
    # A signal from outside may come when all is done: so the run is hit by its own hand.
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "book")!r})
import evidence

def tell(line, told=[]):
    told.append(line)
    if len(told) == {STOPPED_AFTER}:
        os.kill(os.getpid(), {int(number)})

evidence._tell = tell
sys.exit(evidence.main(sys.argv[1:]))
"""
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    err = process.stderr
    assert process.returncode == status, err
    assert err == ("interrupted; the same command goes on from here\n" if status > 0 else "")
    stopped = read(file)
    monkeypatch.setattr(evidence, "sources", lambda: stopped["machine"]["sources"])
    kept = stopped["sections"]["checks"]
    assert len(kept) == STOPPED_AFTER
    status, out = made(*arguments)
    assert status == 0
    done = read(file)["sections"]["checks"]
    assert out.startswith(f"{len(kept)} of {len(done)} results are there already\n")
    assert len(done) > len(kept)
    assert {key: done[key] for key in kept} == kept


def test_a_part_that_is_made_later_leaves_the_rest_as_it_is(whole, tmp_path):
    file = shutil.copy(whole[0], tmp_path / "part.json")
    before = read(file)
    extra = tmp_path / "theirs.py"
    extra.write_text("def log_likelihood(*graph): ...")
    arguments = ("--quick", "--device", "cpu", "--only", "dag", "--backend", "vectorized")
    assert made(*arguments, "--extra-backend", extra, "--output", file)[0] == 0
    after = read(file)
    for result in ("2,3,6 flat", "2,3,6 sharp"):
        added = after["sections"]["dag"].pop(f"{result} (vectorized, theirs)")
        assert "theirs is left out" in added["notes"][0]
    assert after == before


def test_what_could_not_be_measured_is_told_and_tried_again(monkeypatch, tmp_path):
    calls = []

    def broken():
        calls.append("broken")
        raise RuntimeError("out of\nmemory")

    def works():
        calls.append("works")
        return {"number": 1.0}

    items = [measurements.Item("broken", broken), measurements.Item("works", works)]
    monkeypatch.setattr(evidence, "SECTIONS", {"mine": lambda setting: iter(items)})
    arguments = ("--device", "cpu", "--output", tmp_path / "mine.json")
    status, out = made(*arguments)
    assert status == 1 and calls == ["broken", "works"]
    assert "FAILED mine: broken: RuntimeError: out of memory" in out
    calls.clear()
    items[0] = measurements.Item("broken", works)
    status, out = made(*arguments)
    assert status == 0 and calls == ["works"]
    assert read(tmp_path / "mine.json")["passed"] is True
    assert made(*arguments, "--again")[0] == 0 and calls == ["works"] * 3


def test_results_of_other_sources_are_not_mixed(whole, monkeypatch, tmp_path, capsys):
    file = shutil.copy(whole[0], tmp_path / "other.json")
    before = file.read_bytes()
    monkeypatch.setattr(evidence, "sources", lambda: "other")
    refused(capsys, ["--quick", "--output", file], [file, "another sources", "--again"])
    assert file.read_bytes() == before
    assert made(*CHECKS, "--output", file, "--again")[0] == 0
    assert read(file)["machine"]["sources"] == "other"


def test_the_hash_of_the_sources_sees_every_change(tmp_path, monkeypatch):
    for name in ("book", "exlm_mini/model", "exlm_lab", "cuda"):
        (tmp_path / name).mkdir(parents=True)
    scripts = ("evidence", "evidence_file", "measurements", "correctness", "sanitizing")
    for name in scripts:
        (tmp_path / "book" / f"{name}.py").write_text("")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    seen = {hash_of_sources()}
    changed = (
        "exlm_mini/model/exlm.py",
        "exlm_lab/bench.py",
        "cuda/dag.h",
        "cuda/dag.cu",
        "cuda/dag.cpp",
    )
    for name in changed:
        (tmp_path / name).write_text("")
        seen.add(hash_of_sources())
    (tmp_path / "cuda" / "README.md").write_text("words")
    seen.add(hash_of_sources())
    assert len(seen) == 6


# ---- the command ----


def refused(capsys, arguments: list, words: list) -> None:
    assert evidence.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert str(word) in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "check"], ["check", "did you mean checks"]),
        (["--only", ""], ["--only ''", "checks"]),
        (["--backend", "nativ"], ["nativ", "did you mean native"]),
        (["--extra-backend", "nowhere.py"], ["nowhere.py", "no such file"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--qiuck"], ["--qiuck", "--help"]),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, words, capsys, tmp_path):
    refused(capsys, ["--output", tmp_path / "a.json", *arguments], words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"machine": 3}', '[{"command": "x"}]', "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_a_file_of_something_else_is_not_replaced(text, tmp_path, capsys):
    file = tmp_path / "notes.json"
    file.write_text(text)
    refused(capsys, ["--device", "cpu", "--output", file], [file, "no evidence"])
    assert file.read_text() == text


@pytest.mark.parametrize(
    "damage", [{"sections": {"checks": [1]}}, {"sections": {"checks": {"a": 3}}},
               {"missing": 3}, {"backends": [1]}],
)  # fmt: skip
def test_a_damaged_file_is_not_replaced(damage, whole, tmp_path, capsys):
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(read(whole[0]) | damage))
    before = file.read_bytes()
    refused(capsys, ["--device", "cpu", "--quick", "--output", file], [file, "no evidence"])
    assert file.read_bytes() == before


def test_an_interrupt_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    def interrupted(setting):
        raise KeyboardInterrupt

    monkeypatch.setitem(evidence.SECTIONS, "data", interrupted)
    arguments = ["--quick", "--device", "cpu", "--only", "data"]
    assert evidence.main([*arguments, "--output", str(tmp_path / "a.json")]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on from here\n"


def test_a_reader_who_has_seen_enough_gets_no_traceback(tmp_path):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *CHECKS, "--output", str(tmp_path / "a.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 130


def test_a_folder_that_takes_no_file_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "a.json"
    assert evidence.main([*CHECKS, "--output", str(target)]) == 2
    assert f"error: cannot write {target}" in capsys.readouterr().err


def test_the_file_is_named_by_the_device():
    gpu = {"device": "NVIDIA H200", "cpu": "Some CPU"}
    results = ROOT / "book" / "results"
    assert evidence._usual_path(gpu, False) == results / "evidence-nvidia-h200.json"
    cpu = {"device": "cpu", "cpu": "AMD EPYC (TM) 9R14 "}
    name = "evidence-amd-epyc-tm-9r14.json"
    assert evidence._usual_path(cpu, True) == ROOT / "build" / name


def test_an_extra_backend_is_timed_beside_ours_under_a_key_of_its_own(tmp_path):
    extra = tmp_path / "theirs.py"
    extra.write_text(
        "from exlm_mini.alignment import dag_log_likelihood\n"
        "def log_likelihood(*graph):\n"
        "    return dag_log_likelihood(*graph) + 1\n"
    )
    file = tmp_path / "extra.json"
    arguments = ("--quick", "--device", "cpu", "--only", "dag", "--backend", "vectorized")
    status, _ = made(*arguments, "--extra-backend", extra, "--output", file, "--commit", "abc")
    assert status == 0  # what is wrong with theirs is not for us to fail
    content = read(file)
    assert content["machine"]["commit"] == "abc"
    ours, theirs = content["sections"]["dag"]["2,3,6 flat (vectorized, theirs)"]["records"]
    assert (ours["backend"], theirs["backend"]) == ("vectorized", "theirs")
    assert theirs["max_error"] > 1e-3 > ours["max_error"]
    assert theirs["wall_ratio"] == theirs["median_ms"] / ours["median_ms"]


def test_it_runs_from_a_copy_with_nothing_but_torch_numpy_and_safetensors(
    tmp_path, monkeypatch
):
    """As on a machine with a GPU and nothing else: no git, nothing installed, no network."""
    unwanted = shutil.ignore_patterns("__pycache__", "_build", "_generated", "results")
    for folder in ("exlm_mini", "exlm_lab", "book", "cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unwanted)
    program = f"""
import sys
sys.path.remove({str(ROOT)!r}) if {str(ROOT)!r} in sys.path else None
for name in {sorted(LIBRARIES)!r}:
    sys.modules[name] = None
sys.argv = ["evidence.py", *{[*CHECKS, "--output", "out.json"]!r}]
sys.path.insert(0, "book")
import evidence, exlm_mini
assert exlm_mini.__file__.startswith({str(tmp_path)!r}), exlm_mini.__file__
sys.exit(evidence.main())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    content = read(tmp_path / "out.json")
    assert content["machine"]["commit"] == "not a git checkout"
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    assert content["machine"]["sources"] == hash_of_sources()


# ---- compute-sanitizer ----


@pytest.fixture
def fake_sanitizer(tmp_path):
    """Write a program in its place."""

    def write(script: str) -> str:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return str(program)

    return write


def test_the_verdict_of_the_sanitizer_is_kept(fake_sanitizer):
    program = fake_sanitizer('echo "========= ERROR SUMMARY: 0 errors"')
    result = sanitizing._sanitize(program, "memcheck", CPU)
    assert result == {"passed": True, "verdict": ["========= ERROR SUMMARY: 0 errors"]}
    program = fake_sanitizer('echo "$@"; echo "========= ERROR SUMMARY: 2 errors"; exit 99')
    result = sanitizing._sanitize(program, "racecheck", torch.device("cuda"))
    assert (result["passed"], result["exit_status"]) == (False, 99)
    asked = result["failures"][0]
    assert (
        asked.startswith("--tool racecheck ") and f" {SCRIPT} --only checks --quick " in asked
    )
    assert " --device cuda " in asked


def test_a_slow_sanitizer_is_stopped_with_all_it_started(fake_sanitizer, monkeypatch, tmp_path):
    monkeypatch.setattr(sanitizing, "SANITIZER_SECONDS", 0.5)
    program = fake_sanitizer(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    result = sanitizing._sanitize(program, "memcheck", CPU)
    assert result == {"skipped": "memcheck was not done after 0.5 s"}
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    with contextlib.suppress(FileNotFoundError):  # gone, or dead until somebody asks for it
        assert status.read_text().split()[2] == "Z"


def test_without_a_gpu_or_a_sanitizer_the_reason_is_kept(monkeypatch, tmp_path):
    def reasons(device: str, backends: list[str]) -> set[str]:
        setting = measurements.Setting(
            torch.device(device), True, backends, {}, lambda *_: None
        )
        return {item.run()["skipped"] for item in sanitizing.sanitizer(setting)}

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert reasons("cpu", ["native"]) == {"the device is no GPU"}
    assert reasons("cuda", []) == {"the compiled backend does not work here"}
    (reason,) = reasons("cuda", ["native"])
    assert reason == f"compute-sanitizer is neither on PATH nor in {tmp_path / 'bin'}"
