"""Run directories have one writer at a time, and settings that stay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import TOY
from refusals import told

from exlm_mini.config import RunConfig
from exlm_mini.pretrain import main
from exlm_mini.training import run_directory
from exlm_mini.training.run_directory import as_begun, locked_directory, settle

HOLDER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from exlm_mini.training.run_directory import locked_directory\n"
    "with locked_directory(Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Refuse a directory in use at once, without waiting for it to become free."""
    monkeypatch.setattr(run_directory._take, "__defaults__", (0.0,))


@pytest.mark.reliability
def test_second_process_is_refused_and_a_dead_one_is_succeeded(tmp_path):
    path = tmp_path / "runs" / "a"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            told(
                lambda: locked_directory(path).__enter__(),
                f"process {holder.pid} on {socket.gethostname()}", path, "another --output",
            )  # fmt: skip
        finally:
            holder.kill()
    # SIGKILL gave the holder no chance to clean up: its lock file is still there.
    assert (path / ".lock").read_text().startswith(f"{holder.pid} ")
    (path / ".lock").write_text("1234567 a host of a longer name\n" * 10)
    with locked_directory(path):
        assert (path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_lock_is_given_back_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked_directory(tmp_path):
        raise KeyError
    with locked_directory(tmp_path):
        # A refused attempt must not free the lock of the holder.
        for _ in range(2):
            told(lambda: locked_directory(tmp_path).__enter__(), f"process {os.getpid()}")


def test_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    lines = []
    with locked_directory(tmp_path, lines.append):
        pass
    assert len(lines) == 1 and str(tmp_path) in lines[0]


CONFIG, CPU = RunConfig(), torch.device("cpu")


def with_train(**settings: object) -> RunConfig:
    return replace(CONFIG, train=replace(CONFIG.train, **settings))


def start(path: Path, config: RunConfig) -> None:
    settle(path, as_begun(path, config, CPU, print), CPU, 1)


def test_a_refused_start_leaves_nothing_behind(tmp_path):
    def refused() -> None:
        with locked_directory(tmp_path / "new"):
            start(tmp_path, with_train(steps=0))

    told(refused, "train.steps")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()  # made by the user, so it stays
    told(refused, "train.steps")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


def test_a_start_that_is_refused_after_it_wrote_keeps_its_lock_file(tmp_path):
    def refused() -> None:
        with locked_directory(tmp_path):
            start(tmp_path, CONFIG)
            start(tmp_path, with_train(steps=1))

    told(refused, "train.steps: ")
    names = {".lock", "config.yaml", "versions.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_who_waited_for_a_start_that_was_refused_has_no_lock_without_a_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_directory, "_take", lambda lock: (tmp_path / ".lock").unlink())
    told(lambda: locked_directory(tmp_path).__enter__(), tmp_path, "run this one again")


def test_what_a_killed_start_left_is_removed_and_what_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "versions.json.99.partial").write_text("{")
    start(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "versions.json"}
    (tmp_path / "config.yaml").rename(tmp_path / "thesis.tex")
    with locked_directory(tmp_path):
        told(lambda: start(tmp_path, CONFIG), "holds thesis.tex")
    names = {".lock", "thesis.tex", "versions.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_run_goes_on_in_the_precision_of_its_start(tmp_path):
    assert as_begun(tmp_path, CONFIG, CPU, print).train.precision == "fp32"
    start(tmp_path, with_train(precision="bf16"))
    assert as_begun(tmp_path, CONFIG, CPU, print).train.precision == "bf16"
    for other in ({"precision": "fp32"}, {"steps": 1}):
        (name,) = other
        told(lambda other=other: start(tmp_path, with_train(**other)), f"train.{name}: ")


def test_a_corpus_may_move(tmp_path):
    run = [*TOY, "--train.steps"]
    assert main([*run, "1", "--output", str(tmp_path / "made")]) == 0
    old, new = tmp_path / "made" / "data", tmp_path / "moved"
    run += ["2", "--output", str(tmp_path / "run"), "--data.pack"]
    assert main([*run, str(old)]) == 0
    old.rename(new)
    assert main([*run, str(new)]) == 0
