"""Several processes make the same run as one, and lose no work when one is stopped or killed.

Most tests look at what ``workers.py`` left: it makes many runs in two processes, started only once.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import TOY
from workers import PLAIN, SPREAD, STEPS, Witness, changed, copy_checkpoints

from exlm_mini.config import SpecialIds
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.evaluation import evaluate
from exlm_mini.training.parts import load_model, make_masker
from exlm_mini.training.processes import Engine

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "helpers" / "workers.py"
LAST = f"checkpoints/step-{STEPS:06d}"


def torchrun(num_processes, *arguments, max_restarts=0):
    """Start a command with torchrun; return the process of torchrun."""
    options = ["--nproc-per-node", num_processes, "--max-restarts", max_restarts]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process):
    """Wait for a command that must end by itself; return its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Directory with what ``workers.py`` recorded of its runs in two processes."""
    directory = tmp_path_factory.mktemp("two")
    for rank in (0, 1):
        (directory / f"rank-{rank}").mkdir()
    code, _, err = finished(torchrun(2, WORKERS, "trainings", directory))
    assert code == 0, err
    return directory


def run_alone(config, packs, output):
    """Train in this process alone; return what it recorded."""
    return Witness(config, packs, output, Engine(torch.device("cpu"))).run()


def seen(directory, name, num_processes=2):
    """What each process of a run recorded."""
    return [
        json.loads((directory / name / f"rank-{rank}.json").read_text())
        for rank in range(num_processes)
    ]


def same_tensors(first, second, tolerance=0.0):
    a, b = load_checkpoint(first).tensors, load_checkpoint(second).tensors
    assert a.keys() == b.keys()
    for group in a:
        torch.testing.assert_close(a[group], b[group], rtol=0, atol=tolerance)


# ---- the same run ----


@pytest.mark.parametrize(("precision", "step"), [("fp32", 1), ("fp32", 4), ("bf16", 3)])
def test_two_processes_resume_as_if_never_stopped(two, precision, step):
    same_tensors(two / precision / LAST, two / f"{precision}-from-{step}" / LAST)
    whole, resumed = seen(two, precision), seen(two, f"{precision}-from-{step}")
    for rank in (0, 1):
        for what in ("losses", "weights"):
            assert resumed[rank][what] == whole[rank][what][step:]


@pytest.mark.parametrize("name", SPREAD)
def test_processes_and_accumulation_change_no_loss(name, two, packs, tmp_path):
    ranks = seen(two, name)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    sizes = () if name == "tokens" else (None, 1)
    configs = [changed(SPREAD[name], micro_batch_size=size) for size in sizes]
    for number, config in enumerate(configs or [SPREAD[name]]):
        alone = run_alone(config, packs, tmp_path / str(number))
        assert alone["losses"] == pytest.approx(ranks[0]["losses"], rel=1e-6, abs=1e-6)
        same_tensors(tmp_path / str(number) / LAST, two / name / LAST, tolerance=1e-4)


def test_validation_batches_dealt_out_are_validation(two, packs):
    # Five batches for one, two, three or seven processes; two of the seven have none.
    model, config = load_model(load_checkpoint(two / "fp32" / LAST))
    masker = make_masker(config, SpecialIds())

    def evaluated(rank, world_size, add_up):
        engine = Engine(torch.device("cpu"))
        engine.rank, engine.world_size, engine.add_up = rank, world_size, add_up
        return evaluate(model, packs[1], masker, 19, engine, batch_rows=4)

    whole = evaluated(0, 1, lambda own: own)
    for world_size in (2, 3, 7):
        own_sums = []
        for rank in range(world_size):
            evaluated(rank, world_size, lambda own, sums=own_sums: sums.append(own) or own)
        assert evaluated(0, world_size, lambda own, sums=own_sums: sum(sums)) == whole


def test_a_run_of_two_processes_goes_on_in_one(two, packs, tmp_path):
    copy_checkpoints(two / "fp32", tmp_path, 3, Engine(torch.device("cpu")))
    whole, _ = seen(two, "fp32")
    assert run_alone(PLAIN, packs, tmp_path)["losses"] == pytest.approx(
        whole["losses"][3:], rel=1e-5
    )
    same_tensors(two / "fp32" / LAST, tmp_path / LAST, tolerance=1e-4)


# ---- what goes wrong in one process ----


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(two):
    for entry in seen(two, "nan"):
        is_finite = [loss == loss for loss in entry["losses"]]
        assert is_finite == [True, True, False, True, True, True]
        assert entry["weights"][2] == entry["weights"][1]
        assert len(set(entry["weights"])) == STEPS - 1
        assert (entry["skipped"], entry["step"]) == (1, STEPS)
    before, after = (two / "nan" / f"checkpoints/step-00000{n}" for n in (2, 3))
    same_tensors(before, after)
    assert load_checkpoint(after).state["update"]["skipped_steps"] == 1
    lines = [json.loads(line) for line in (two / "nan/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped_steps"]) for line in lines] == [
        (2, 0), (3, 1), (4, 1), (6, 1),
    ]  # fmt: skip
    assert lines[1]["loss"] is None


def test_too_many_such_steps_in_a_row_stop_all(two):
    first, second = seen(two, "nans")
    assert first["error"] == second["error"]
    assert "at step 5" in first["error"]
    assert "2 steps in a row (train.max_skipped 2)" in first["error"]
    assert len(first["losses"]) == 4  # one bad step alone had not stopped it
    assert load_checkpoint(two / "nans/checkpoints/step-000004").step == 4
    assert not (two / "nans/checkpoints/step-000005").exists()


def test_a_disk_full_for_the_first_process_ends_all_in_one_line(two):
    first, second = seen(two, "full")
    assert first["error"] == second["error"]
    assert "no space left" in first["error"]


def test_memory_that_is_too_small_for_one_process_ends_all_in_one_line(two):
    assert seen(two, "small") == ["too little memory"] * 2


# ---- the command, under torchrun ----

COMMAND = [*TOY, "--train.steps", "12", "--train.save_every", "3"]


def weights_of(output, step=12):
    directory = output / f"checkpoints/step-{step:06d}"
    return [path.read_bytes() for path in sorted(directory.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Output of a whole run in two processes."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    code, out, err = finished(
        torchrun(2, "-m", "exlm_mini.pretrain", *COMMAND, "--output", output)
    )
    assert code == 0, err
    # Only the first process prints.
    assert len(re.findall("^exlm reached", out, re.M)) == 1
    assert len(re.findall("^exlm 12/12", err, re.M)) == 1
    return output


def disturbed(directory, events, output, max_restarts=0):
    (directory / "events").mkdir()
    words = ["disturbed", directory / "events", events, *COMMAND, "--output", output]
    return torchrun(2, WORKERS, *words, max_restarts=max_restarts)


def test_two_processes_killed_end_as_if_never_disturbed(undisturbed, tmp_path):
    process = disturbed(tmp_path, "KILL:1:4,KILL:0:8", tmp_path / "run", max_restarts=3)
    code, out, err = finished(process)
    assert code == 0, err
    assert len(list((tmp_path / "events").iterdir())) == 2
    assert "exlm reached" in out
    assert weights_of(tmp_path / "run") == weights_of(undisturbed)


def test_a_signal_to_one_process_saves_one_step_and_the_rest_is_the_same(undisturbed, tmp_path):
    output = tmp_path / "run"
    code, out, err = finished(disturbed(tmp_path, "TERM:1:4", output, 3))
    assert (code, out) == (0, ""), err
    # A signal takes effect at the end of the step it comes in, the fifth (number 4 from 0).
    assert "stopped at step 5 of 12; run the same command again with --output" in err
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000005"]
    assert "Traceback" not in err
    code, out, err = finished(
        torchrun(2, "-m", "exlm_mini.pretrain", *COMMAND, "--output", output)
    )
    assert code == 0, err
    assert weights_of(output) == weights_of(undisturbed)


def test_a_signal_to_torchrun_saves_before_the_processes_end(tmp_path):
    output = tmp_path / "run"
    options = [*COMMAND, "--train.steps", "100000", "--train.save_every", "100000"]
    process = torchrun(2, "-m", "exlm_mini.pretrain", *options, "--output", output)
    for line in process.stderr:
        if line.startswith("exlm 1/"):
            break
    process.send_signal(signal.SIGTERM)
    code, _, err = finished(process)
    assert code != 0  # torchrun's own exit code, because it was stopped
    (told,) = re.findall(r"stopped at step (\d+) of 100000", err)
    (saved,) = (output / "checkpoints").iterdir()
    assert load_checkpoint(saved).step == int(told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--train.batch_size", "7"], "train.batch_size 7 cannot be spread over 2 devices"),
        (["--seed", "5"], "seed: 1 -> 5"),
    ],
)
def test_a_mistake_ends_all_processes_in_one_line(change, words, undisturbed):
    before = sorted(undisturbed.rglob("*"))
    code, out, err = finished(
        torchrun(2, "-m", "exlm_mini.pretrain", *COMMAND, *change, "--output", undisturbed)
    )
    assert (code, out) == (1, "")  # torchrun's own exit code
    (line,) = re.findall("^error:.*$", err, re.M)
    assert words in line
    # The first process to end has exit code 2, a mistake; torchrun may kill the other process.
    assert re.findall(r"exitcode +: (-?\d+)", err)[-1] == "2"
    ours, _, _ = err.partition("torch.distributed.elastic.multiprocessing.errors")
    assert "exlm_mini" not in ours.replace(line, "").split("Traceback")[0]
    assert sorted(undisturbed.rglob("*")) == before
