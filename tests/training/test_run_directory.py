"""Run directories: one writer, settings that stay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from refusals import told

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import stored_config
from exlm_mini.training import run_directory
from exlm_mini.training.run_directory import (
    FREE_SETTINGS,
    as_begun,
    locked_directory,
    settle,
)

HOLDER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from exlm_mini.training.run_directory import locked_directory\n"
    "with locked_directory(Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(600)\n"
)


@pytest.mark.reliability
def test_second_process_is_refused_and_a_dead_one_is_succeeded(tmp_path):
    path = tmp_path / "runs" / "a"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UserError) as error, locked_directory(path):
                pass
        finally:
            holder.kill()
    message = str(error.value)
    assert f"process {holder.pid} on {socket.gethostname()}" in message
    assert str(path) in message and "another --output" in message and "\n" not in message
    # SIGKILL gave the holder no chance to clean up: its lock file is still there.
    assert (path / ".lock").read_text().startswith(f"{holder.pid} ")
    (path / ".lock").write_text("1234567 a host of a longer name\n" * 10)
    with locked_directory(path):
        assert (path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_lock_is_given_back_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked_directory(tmp_path):
        raise KeyError
    with locked_directory(tmp_path):
        # A refused attempt must not free the lock of the first.
        for _ in range(2):
            with pytest.raises(UserError, match=f"process {os.getpid()}"):
                locked_directory(tmp_path).__enter__()


def test_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    lines = []
    with locked_directory(tmp_path, lines.append):
        pass
    assert len(lines) == 1 and str(tmp_path) in lines[0]


CONFIG = RunConfig(train=TrainConfig(steps=100, save_every=50))


def with_train(**settings: object) -> RunConfig:
    return replace(CONFIG, train=replace(CONFIG.train, **settings))


CPU = torch.device("cpu")


def started(path: Path, config: RunConfig) -> list[str]:
    """What is told of a start with these settings."""
    lines: list[str] = []
    settle(path, as_begun(path, config, CPU, lines.append), CPU, 1)
    return lines


def test_settings_are_written_once_and_then_compared(tmp_path):
    assert started(tmp_path, CONFIG) == []
    file = tmp_path / "config.yaml"
    before = file.read_text()
    assert stored_config(file) == with_train(precision="fp32")
    assert started(tmp_path, CONFIG) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "versions.json"}
    for other, words in (
        (replace(with_train(save_every=10), seed=2), "seed: 1 -> 2;"),
        (with_train(steps=99), "train.steps: 100 -> 99"),
    ):
        line = told(lambda other=other: started(tmp_path, other), words, "another --output")
        assert "save_every" not in line and file.read_text() == before
    (line,) = started(tmp_path, with_train(steps=101))
    assert line.startswith(
        "changed since the last start: train.steps: 100 -> 101; from here on"
    )
    assert stored_config(file).train.steps == 101


def test_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with locked_directory(tmp_path):
        told(lambda: started(tmp_path, CONFIG), "holds thesis.tex")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "thesis.tex"}


def test_what_a_killed_start_left_is_removed(tmp_path):
    (tmp_path / "versions.json.99.partial").write_text("{")
    assert started(tmp_path, CONFIG) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "versions.json"}


def test_a_run_goes_on_in_the_precision_of_its_start(tmp_path):
    assert as_begun(tmp_path, CONFIG, CPU, print).train.precision == "fp32"
    started(tmp_path, with_train(precision="bf16"))
    assert as_begun(tmp_path, CONFIG, CPU, print).train.precision == "bf16"
    told(
        lambda: as_begun(tmp_path, with_train(precision="fp32"), CPU, print),
        "train.precision: bf16 -> fp32",
    )


def test_what_weights_depend_on_is_not_free():
    fixed = (
        "steps", "batch_size", "micro_batch_size", "batch_tokens", "micro_batch_tokens",
        "learning_rate", "warmup_steps", "decay_from", "adam_betas", "adam_eps", "weight_decay",
        "clip_norm", "grow_at", "start_from", "chain_warmup", "precision", "compile",
    )  # fmt: skip
    names = {f"train.{field.name}" for field in fields(TrainConfig)}
    assert names - FREE_SETTINGS == {f"train.{name}" for name in fixed}
    assert names >= FREE_SETTINGS
