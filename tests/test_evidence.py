"""``book/evidence.py``: what it checks, what it keeps, and that a wrong backend does not pass.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exlm_lab.benchmarks import measure
from exlm_lab.benchmarks.limits import REPLAYS, SWEEPS, floor, replay_ms
from exlm_lab.benchmarks.record import Shape
from exlm_mini.alignment import BACKENDS, Backend, cases
from exlm_mini.alignment.cases import JUDGE
from exlm_mini.data.memory import DoesNotFit
from exlm_mini.model import emission
from exlm_mini.training import provenance
from exlm_mini.training.console import INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
import evidence  # noqa: E402
import measurements  # noqa: E402

pytestmark = pytest.mark.slow  # each measures for seconds

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No more runs than a median needs, few graphs to check, nothing compiled by torch."""
    some = dict(list(cases.CASES.items())[:4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "MOST_RUNS", measure.LEAST_RUNS)
        patch.setattr(emission, "_fused", lambda: emission._normalise_rounded_)
        patch.setattr(cases, "CASES", some)
        yield


def made(*arguments: str | Path) -> tuple[int, str]:
    """Exit status and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = evidence.main(["--device", "cpu", *map(str, arguments)])
    return status, out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, int, str]:
    """Everything at tiny sizes: the file, exit status and output."""
    file = tmp_path_factory.mktemp("evidence") / "whole.json"
    return file, *made("--quick", "--output", file)


def read(file: Path) -> dict:
    return json.loads(file.read_text())


# ---- the whole ----


def test_evidence_says_what_was_measured_on_what(whole):
    file, status, out = whole
    content = read(file)
    assert status == 0 and content["passed"] is True, out
    about = provenance.machine(CPU) | {"threads": torch.get_num_threads()}
    assert content["machine"] == about
    assert set(content["backends"]) == set(BACKENDS)
    assert list(content["sections"]) == list(evidence.SECTIONS)
    for results in content["sections"].values():
        assert results
        for result in results.values():
            assert result["seconds"] >= 0 and "error" not in result
            for row in result.get("records", []):
                assert row["median_ms"] > 0 and "machine" not in row
                limit = 0.05 if row.get("dtype") == "bfloat16" else 1e-4
                assert row.get("max_error", 0) < limit
    working = {name for name, reason in content["backends"].items() if reason is None}
    assert {"enumerate", "naive", "vectorized", "scaled"} <= working
    assert set(content["sections"]["checks"]) == working - {JUDGE}
    for result in content["sections"]["checks"].values():
        assert result["passed"] is True and result["failure"] is None
        assert set(result["errors"]) == {"float32", "float64"}


def test_every_section_measures_what_it_promises(whole):
    sections = read(whole[0])["sections"]
    for kind in ("flat", "sharp"):
        result = sections["dag"][f"2,3,6 {kind}"]
        assert result["floor"] == floor(Shape(2, 3, 6))._asdict()
        assert {r["reference"] for r in result["records"]} == {"vectorized"}
        assert {r["transitions"] for r in result["records"]} == {kind}
    heads = sections["emission"]["2,3,6 vocabulary 50 float32"]["records"]
    assert [r["backend"] for r in heads] == ["plain", "buffer", "fused", "chunked"]
    for dropout in ("0", "0.1"):
        steps = sections["step"][f"dropout {dropout} threads {torch.get_num_threads()}"]
        mlm, exlm = steps["records"]
        assert mlm["dropout"] == exlm["dropout"] == [float(dropout)] * 2
    (base,) = [r for key, r in sections["step"].items() if "base" in key]
    assert [row["backend"] for row in base["records"]] == ["mlm", "exlm", "exlm-released"]
    assert list(sections["train"]) == ["toy-pairs mlm", "toy-pairs exlm"]


# ---- what it sees ----


def doubled(*graph):
    return 2 * BACKENDS["vectorized"].log_likelihood(*graph)


def wrong_gradient(log_emission_BML, *others):
    value_B = BACKENDS["vectorized"].log_likelihood(log_emission_BML, *others)
    finite = torch.where(log_emission_BML.isfinite(), log_emission_BML, 0.0).sum()
    return value_B + (finite - finite.detach()) * 1e-3


def infinite(*graph):
    return BACKENDS["vectorized"].log_likelihood(*graph) + torch.inf


def raises(*graph):
    raise RuntimeError("there is no kernel")


@pytest.mark.parametrize(
    ("section", "log_likelihood", "words"),
    [
        ("checks", doubled, "wrong: float32 differs from enumeration by"),
        ("checks", raises, "wrong: RuntimeError: there is no kernel"),
        ("dag", doubled, "flat: wrong: log_likelihood is off by"),
        ("dag", wrong_gradient, "flat: wrong: grad_emission is off by"),
        ("dag", infinite, "flat: wrong: log_likelihood is off by inf"),
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
    for _ in range(2):  # a second run does not forget
        status, out = made("--quick", "--only", section, "--output", file)
        assert status == 1
        assert words in out and f"FAILED {section}: " in out
        assert out.splitlines()[-1] == f"NOT ALL IS WELL: {file}"
    content = read(file)
    assert content["passed"] is False
    if section == "checks":
        assert content["sections"]["checks"]["vectorized"]["passed"] is True


# ---- the floor ----


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3, 8), (5, 5), (6, 17)])
def test_the_floor_counts_every_edge_inside_the_cone(shape):
    M, L = shape

    def may_be(i: int, u: int) -> bool:
        return i <= u <= L - M + i and (i > 0 or u == 0) and (i < M - 1 or u == L - 1)

    pairs = sum(
        may_be(i - 1, v) and may_be(i, u)
        for i in range(1, M) for u in range(L) for v in range(u)
    )  # fmt: skip
    least = floor(Shape(3, M, L))
    assert least.num_multiply_adds == 3 * SWEEPS * pairs
    edges = sum(v < u for u in range(L) for v in range(L))
    # Edges and emissions are read by both passes, whole gradients written by the second.
    assert least.num_bytes == 3 * 4 * (2 * (edges + M * L) + L * L + M * L)


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


def test_a_cpu_trains_recipes_with_data_of_their_own_a_gpu_all_speeds_once():
    on_cpu, on_gpu = recipes_of("cpu"), recipes_of("cuda")
    assert on_cpu == [
        "smiles-tiny exlm", "text-tiny exlm", "toy-pairs mlm", "toy-pairs exlm",
    ]  # fmt: skip
    assert {"text-base exlm", "text-large exlm", "smiles-base exlm", *on_cpu} <= set(on_gpu)
    # They differ in the number of steps alone.
    assert "vanilla-mlm mlm" in on_gpu and "vanilla-mlm-plus-plus mlm" not in on_gpu
    assert len(on_gpu) == len(set(on_gpu))


def test_a_recipe_that_does_not_fit_is_kept_as_such(monkeypatch):
    def full(config, steps, seconds, accumulate):
        assert config.train.device == "cpu"
        raise DoesNotFit("text-large does not fit in the memory of this machine")

    monkeypatch.setattr(measurements, "train", full)
    for item in measurements.train_times(measurements.Setting(CPU, True)):
        assert item.run()["skipped"].startswith("text-large does not fit")


# ---- going on ----


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -9)]
)
def test_a_stopped_run_goes_on_where_it_was(number, status, tmp_path, monkeypatch):
    file = tmp_path / "stopped.json"
    # A signal from outside may come when all is done: so the run is hit by its own hand.
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs in the background
sys.path.insert(0, {str(ROOT / "book")!r})
import evidence, measurements

def item(number, is_last):
    def run():
        if is_last:
            os.kill(os.getpid(), {int(number)})
        return {{"errors": {{"a": number}}}}
    return measurements.Item(str(number), run)

evidence.SECTIONS = {{"mine": lambda setting: iter([item(1.0, False), item(2.0, True)])}}
sys.exit(evidence.main(["--device", "cpu", "--only", "mine", "--output", {str(file)!r}]))
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == status, process.stderr
    told = "interrupted; the same command goes on from here\n" if status > 0 else ""
    assert process.stderr == told
    assert list(read(file)["sections"]["mine"]) == ["1.0"]
    # The command goes on with what is missing; what raised an exception is tried again.
    before = read(file)["sections"]["mine"]["1.0"]
    outcomes = [RuntimeError("out of\nmemory"), {"errors": {}}]

    def second():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    items = [measurements.Item("1.0", lambda: {"errors": {}}), measurements.Item("2.0", second)]
    monkeypatch.setattr(evidence, "SECTIONS", {"mine": lambda setting: iter(items)})
    arguments = ("--only", "mine", "--output", file)
    status, out = made(*arguments)
    assert status == 1 and "FAILED mine: 2.0: RuntimeError: out of memory" in out
    assert out.startswith("1 of 2 results are there already\n")
    assert made(*arguments)[0] == 0
    assert read(file)["passed"] is True and read(file)["sections"]["mine"]["1.0"] == before
    outcomes.append({"errors": {}})
    assert made(*arguments, "--again")[0] == 0 and not outcomes


def test_results_of_another_commit_are_not_mixed(whole, tmp_path, capsys):
    file = Path(shutil.copy(whole[0], tmp_path / "other.json"))
    before = file.read_bytes()
    another = ["--quick", "--only", "train", "--commit", "abc", "--output", file]
    refused(capsys, another, [file, "another commit", "--again"])
    assert file.read_bytes() == before


# ---- the command ----


def refused(capsys, arguments: list, words: list) -> None:
    assert evidence.main(["--device", "cpu", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert str(word) in err


@pytest.mark.parametrize("text", ["", "[]", '{"machine": 3}'])
def test_mistakes_are_told_and_a_file_of_something_else_is_not_replaced(text, tmp_path, capsys):
    file = tmp_path / "notes.json"
    file.write_text(text)
    refused(capsys, ["--output", file], [file, "choose another --output"])
    refused(capsys, ["--output", file, "--only", "check"], ["check", "did you mean checks"])
    refused(capsys, ["--output", file, "--device", "tpu"], ["--device", "tpu"])
    assert file.read_text() == text
