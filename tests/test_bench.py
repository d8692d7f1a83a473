"""The benchmark command; no test asks how long something took."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from exlm_lab import bench
from exlm_lab.benchmarks import command
from exlm_lab.benchmarks import step as step_benchmark
from exlm_lab.benchmarks.dag import RELEASED
from exlm_lab.benchmarks.record import compared
from exlm_mini.alignment import BACKENDS
from exlm_mini.training import provenance

pytestmark = pytest.mark.usefixtures("three_runs")


def working() -> set[str]:
    """Backends that work on a CPU; the first call may build one."""
    return {name for name in BACKENDS if BACKENDS[name].why_not("cpu") is None}


def records_of(path: Path, *argv: str) -> list[dict]:
    """What a benchmark writes to ``path / "bench.json"``."""
    output = path / "bench.json"
    assert bench.main([*argv, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def refuses(argv: list[str], words: list[str], capsys) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr with all the words."""
    assert bench.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


BACKENDS_OF = {
    "dag": ("vectorized", working),
    "emission": ("buffer", lambda: {"buffer", "chunked"}),
    "step": ("mlm", lambda: {"mlm", "exlm", "exlm-at-2", "exlm-at-3"}),
}
"""The reference, and all that are compared with it."""


@pytest.fixture
def small(monkeypatch):
    """A step and a vocabulary of a size for tests."""
    monkeypatch.setattr(command, "VOCAB_SIZE", 50)
    sizes = {"num_layers": 4, "width": 16, "ffn_width": 16, "num_heads": 2}
    monkeypatch.setattr(step_benchmark, "SIZES", sizes)


@pytest.mark.parametrize("name", BACKENDS_OF)
def test_there_is_one_record_and_one_line_for_each_backend_and_shape(
    name, small, tmp_path, capsys
):
    before = torch.get_num_threads()
    reference, backends = BACKENDS_OF[name]
    argv = [name, "--shape", "2,3,6", "--shape", "1,3,9", "--threads", "1"]
    records = records_of(tmp_path, *argv)
    _machine, *table = capsys.readouterr().out.splitlines()
    found = [(record["backend"], tuple(record["shape"])) for record in records]
    assert sorted(found) == sorted((b, s) for b in backends() for s in [(2, 3, 6), (1, 3, 9)])
    base = {tuple(r["shape"]): r for r in records if r["backend"] == reference}
    for record in records:
        assert record["benchmark"] == name and record["reference"] == reference
        assert record["median_ms"] > 0 and record["peak_mib"] > 0
        assert 0 <= record["max_error"] < 1e-4
        assert record["threads"] == 1
        assert record["machine"] == provenance.machine(torch.device("cpu"))
        theirs = base[tuple(record["shape"])]
        assert record["wall_ratio"] == record["median_ms"] / theirs["median_ms"]
        assert record["cpu_ratio"] == record["median_cpu_ms"] / theirs["median_cpu_ms"]
    assert torch.get_num_threads() == before

    assert all(len(line) <= 80 for line in table)
    for record in records:
        (line,) = [
            line for line in table if line.split()[0] == ",".join(map(str, record["shape"]))
            and record["backend"] in line.split()
        ]  # fmt: skip
        assert f"{record['median_ms']:.3f}" in line and f"{record['max_error']:.1e}" in line
    assert any("transition: forward" in line for line in table) == (name == "step")


def test_without_its_reference_or_a_clock_that_moved_there_is_no_ratio():
    row = {"backend": "a", "median_ms": 2.0, "median_cpu_ms": 0.0}
    (alone,) = compared([row], "b")
    assert alone["reference"] is alone["wall_ratio"] is None
    (itself,) = compared([row], "a")
    assert (itself["wall_ratio"], itself["cpu_ratio"]) == (1, None)


def test_what_is_too_large_or_does_not_work_here_is_told_on_stderr(
    monkeypatch, tmp_path, capsys
):
    broken = BACKENDS["scaled"]._replace(why_not=lambda device_type: f"no {device_type}\nmore")
    monkeypatch.setitem(BACKENDS, "scaled", broken)
    records = records_of(tmp_path, "dag", "--shape", "1,8,20")
    err = capsys.readouterr().err
    left_out = {"enumerate", "scaled"}
    assert {row["backend"] for row in records} == working() - left_out
    assert "enumerate is left out at B,M,L = 1,8,20: 10^4 paths" in err
    assert "scaled is left out: no cpu\n" in err


@pytest.mark.parametrize("counts", ["targets, states", "states, targets"])
def test_a_backend_of_somebody_else_is_timed_and_judged(counts, tmp_path):
    is_released = counts.startswith("states")
    file = tmp_path / (RELEASED if is_released else "mine.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "from exlm_mini.alignment import dag_log_likelihood\n"
        f"def {'torch_dag_loss' if is_released else 'log_likelihood'}(match, links, {counts}):\n"
        "    return dag_log_likelihood(match, links, targets, states) + 1.0\n"
    )
    extra = tmp_path if is_released else file
    argv = ["dag", "--shape", "2,3,6", "--extra-backend", str(extra)]
    found = {record["backend"]: record for record in records_of(tmp_path, *argv)}
    theirs, ours = found[extra.stem], found["vectorized"]
    assert theirs["errors"]["log_likelihood"] > 1e-3 > ours["errors"]["log_likelihood"]
    assert theirs["errors"]["grad_emission"] < 1e-5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dag", "--extra-backend", "nowhere.py"], ["nowhere.py", "--extra-backend"]),
        (["dag", "--extra-backend", "no-python"], ["no-python", "--extra-backend"]),
        (["dag", "--extra-backend", "."], ["dag_loss.py", "torch_dag_loss"]),
        (["dag", "--shape", "2,6,5"], ["2,6,5", "no path"]),
        (["dag", "--shape", "2,1,5"], ["2,1,5", "no path"]),
        (["dag", "--shape", "2,x,3"], ["2,x,3", "B,M,L"]),
        (["dag", "--shape", "1000000,100,1000"], ["GiB", "smaller"]),
        (["dag", "--threads", "0"], ["--threads", "0"]),
        (["dag", "--device", "tpu"], ["--device", "tpu", "known"]),
        (["emission", "--shape", "1000,2,1000000"], ["GiB", "smaller"]),
        (["step", "--shape", "2,4,6"], ["2,4,6", "k M states"]),
        (["step", "--dropout", "1"], ["--dropout: it is '1'"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(argv, words, capsys):
    refuses(argv, words, capsys)


def test_a_package_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    assert re.match(r"[0-9a-f]{40}|not a git checkout", provenance.commit())
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() == "not a git checkout"


def test_a_record_that_is_being_written_is_no_change_of_the_code(monkeypatch, tmp_path):
    code = tmp_path / "exlm_mini" / "training" / "provenance.py"
    record = tmp_path / "book" / "results" / "bench.json"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for path in (code, record):
        path.parent.mkdir(parents=True)
        path.write_text("[]")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(code))
    record.write_text("")  # as `> book/results/bench.json` leaves it
    assert re.fullmatch("[0-9a-f]{40}", provenance.commit())
    code.write_text("[1]")
    assert provenance.commit().endswith(" with changes")
