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
from pathlib import Path

import pytest
import torch

from exlm_lab.benchmarks import measure
from exlm_lab.benchmarks.limits import REPLAYS, SWEEPS, Limits, floor, replay_ms
from exlm_lab.benchmarks.record import Shape
from exlm_lab.benchmarks.training import speed_settings
from exlm_mini.alignment import BACKENDS, Backend
from exlm_mini.alignment.cases import JUDGE
from exlm_mini.config.recipes import load_recipe, recipe_names
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.model import emission
from exlm_mini.training import provenance
from exlm_mini.training.console import INTERRUPTED
from exlm_mini.training.dry_run import objectives_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
import evidence  # noqa: E402
import measurements  # noqa: E402

CPU = torch.device("cpu")
CHECKS = ("--quick", "--device", "cpu", "--only", "checks")
STOPPED_AFTER = 2
"""Results."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No more runs than a median needs, nothing compiled by torch."""
    with pytest.MonkeyPatch.context() as patch:
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
    assert status == 0 and content["passed"] is True, out
    assert set(content) == {
        "command", "begun", "machine", "backends", "quick", "passed", "sections",
    }  # fmt: skip
    about = content["machine"]
    here = provenance.machine(CPU)
    assert re.match(r"[0-9a-f]{40}|not a git checkout", about["commit"])
    assert {**here, **about} == {**about, **here, "commit": about["commit"]}
    assert about["threads"] == torch.get_num_threads()
    assert set(content["backends"]) == set(BACKENDS)
    assert list(content["sections"]) == list(evidence.SECTIONS)
    for results in content["sections"].values():
        assert results
        for result in results.values():
            assert result["seconds"] >= 0 and "error" not in result


def test_every_working_backend_meets_every_case_in_both_dtypes(whole):
    content = read(whole[0])
    working = {name for name, reason in content["backends"].items() if reason is None}
    assert {"enumerate", "naive", "vectorized", "scaled"} <= working
    assert set(content["sections"]["checks"]) == working - {JUDGE}
    for result in content["sections"]["checks"].values():
        assert result["passed"] is True and result["failure"] is None
        assert set(result["errors"]) == {"float32", "float64"}
        assert all(0 < error < 1 for error in result["errors"].values())


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
    assert exlm["wall_ratio"] == exlm["median_ms"] / mlm["median_ms"]
    for row in base["records"]:
        expected = 2 * row["num_tokens"] / (row["median_ms"] / 1000)
        assert row["step_tokens_per_second"] == pytest.approx(expected)
    per_second = [row["flops_per_second"] * row["median_ms"] for row in (exlm, released)]
    assert per_second[0] == pytest.approx(per_second[1])  # the same work is counted


def test_recipes_are_measured_too(whole):
    sections = read(whole[0])["sections"]
    assert list(sections["train"]) == ["toy-pairs mlm", "toy-pairs exlm"]
    for result in sections["train"].values():
        for row in result["records"]:
            assert row["tokens_per_second"] > 0 and "machine" not in row


# ---- what it sees ----


def doubled(*graph):
    return 2 * BACKENDS["vectorized"].log_likelihood(*graph)


def wrong_gradient(log_emission_BML, *others):
    value_B = BACKENDS["vectorized"].log_likelihood(log_emission_BML, *others)
    finite = torch.where(log_emission_BML.isfinite(), log_emission_BML, 0.0).sum()
    return value_B + (finite - finite.detach()) * 1e-3


def raises(*graph):
    raise RuntimeError("there is no kernel")


@pytest.mark.parametrize(
    ("section", "log_likelihood", "words"),
    [
        ("checks", doubled, "wrong: float32 differs from enumeration by"),
        ("checks", raises, "wrong: RuntimeError: there is no kernel"),
        ("dag", doubled, "flat: wrong: log_likelihood is off by"),
        ("dag", wrong_gradient, "flat: wrong: grad_emission is off by"),
    ],
)
def test_a_wrong_backend_is_named_and_the_exit_status_is_1(
    section, log_likelihood, words, monkeypatch, tmp_path
):
    good = BACKENDS["vectorized"]
    for name in set(BACKENDS) - {"enumerate", "vectorized"}:
        monkeypatch.delitem(BACKENDS, name)
    monkeypatch.setitem(BACKENDS, "wrong", Backend(log_likelihood, good.viterbi))
    file = tmp_path / "wrong.json"
    arguments = ("--quick", "--device", "cpu", "--only", section, "--output", file)
    for _ in range(2):  # a second run does not forget
        status, out = made(*arguments)
        assert status == 1
        assert words in out and f"FAILED {section}: " in out
        assert out.splitlines()[-1] == f"NOT ALL IS WELL: {file}"
    content = read(file)
    assert content["passed"] is False
    if section == "checks":
        assert content["sections"]["checks"]["vectorized"]["passed"] is True


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
    setting = measurements.Setting(torch.device(device), False)
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
        [speed_settings(single) for single in objectives_of(load_recipe(name))]
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
    setting = measurements.Setting(CPU, True)
    for item in measurements.train_times(setting):
        assert item.run() == {
            "skipped": "text-large does not fit in the memory of this machine"
        }


# ---- going on ----


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -9)]
)
def test_a_stopped_run_goes_on_where_it_was(number, status, tmp_path):
    file = tmp_path / "stopped.json"
    arguments = [*CHECKS, "--output", str(file)]
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
    kept = stopped["sections"]["checks"]
    assert len(kept) == STOPPED_AFTER
    status, out = made(*arguments)
    assert status == 0
    done = read(file)["sections"]["checks"]
    assert out.startswith(f"{len(kept)} of {len(done)} results are there already\n")
    assert len(done) > len(kept)
    assert {key: done[key] for key in kept} == kept


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


def test_results_of_another_commit_are_not_mixed(whole, tmp_path, capsys):
    file = shutil.copy(whole[0], tmp_path / "other.json")
    before = file.read_bytes()
    another = [*CHECKS, "--commit", "abc", "--output", file]
    refused(capsys, another, [file, "another commit", "--again"])
    assert file.read_bytes() == before
    assert made(*another, "--again")[0] == 0
    assert read(file)["machine"]["commit"] == "abc"


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
        (["--device", "tpu"], ["--device", "tpu"]),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, words, capsys, tmp_path):
    refused(capsys, ["--output", tmp_path / "a.json", *arguments], words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"machine": 3}'])
def test_a_file_of_something_else_is_not_replaced(text, tmp_path, capsys):
    file = tmp_path / "notes.json"
    file.write_text(text)
    refused(capsys, ["--device", "cpu", "--output", file], [file, "choose another --output"])
    assert file.read_text() == text
