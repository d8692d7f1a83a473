"""The benchmark command; no test asks how long something took."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_runs import records_of, refuses, skip_unless_working, working

from exlm_lab import bench
from exlm_lab.benchmarks.dag import RELEASED, dag, judge, made_graph
from exlm_lab.benchmarks.record import Record, Shape, as_json
from exlm_lab.benchmarks.step import made_batch
from exlm_lab.benchmarks.table import lines
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import SpecialIds
from exlm_mini.training import provenance

pytestmark = pytest.mark.usefixtures("three_runs", "uncompiled")
CPU = torch.device("cpu")
SHAPE = Shape(2, 3, 6)


@pytest.fixture
def written(tmp_path):
    """Write a Python file; its path."""

    def write(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


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
        assert record["machine"] == provenance.machine(CPU)
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
    too_short = dataclasses.replace(record, benchmark="emission", median_cpu_ms=0.0)
    row = as_json(too_short, too_short, {}) | {"vocab_size": 9}
    assert (row["wall_ratio"], row["cpu_ratio"]) == (1, None)
    assert "1.00, cpu -" in lines(row)[0]


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


def test_the_function_of_a_released_checkout_takes_its_counts_in_its_own_order(
    capsys, tmp_path
):
    file = tmp_path / RELEASED
    file.parent.mkdir(parents=True)
    file.write_text(
        "from exlm_mini.alignment import dag_log_likelihood\n"
        "def torch_dag_loss(match, links, output_length, target_length):\n"
        "    return dag_log_likelihood(match, links, target_length, output_length)\n"
    )
    argv = [*BENCHMARKS["dag"], "--backend", "vectorized", "--extra-backend", str(tmp_path)]
    _, theirs = records_of(capsys, *argv)
    assert theirs["backend"] == tmp_path.stem and theirs["max_error"] < 1e-5


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
        (["dag", "--extra-backend", "."], ["no such file", "dag_loss.py in it"]),
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
    command = [sys.executable, "-m", "exlm_lab.bench", "dag", "--json", "--shape", "2,3,6"]
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
