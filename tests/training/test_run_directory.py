"""Run directories: one writer, settings that stay, metrics that fit the checkpoint."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import stored_config
from exlm_mini.training import run_directory
from exlm_mini.training.run_directory import (
    FREE_SETTINGS,
    MetricsLog,
    as_begun,
    changed_settings,
    locked_directory,
    read_metrics,
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


def settled(path: Path, config: RunConfig) -> list[str]:
    """What is told of a start with these settings."""
    lines: list[str] = []
    settle(path, config, torch.device("cpu"), 1, lines.append)
    return lines


def test_settings_are_written_once_and_then_compared(tmp_path):
    assert settled(tmp_path, CONFIG) == []
    file = tmp_path / "config.yaml"
    before = file.read_text()
    assert stored_config(file) == CONFIG
    assert settled(tmp_path, CONFIG) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "versions.json"}
    for other, words in (
        (replace(with_train(save_every=10), seed=2), "seed: 1 -> 2;"),
        (with_train(steps=99), "train.steps: 100 -> 99"),
    ):
        line = told(lambda other=other: settled(tmp_path, other), words, "another --output")
        assert "save_every" not in line and file.read_text() == before
    (line,) = settled(tmp_path, with_train(steps=101))
    assert line.startswith(
        "changed since the last start: train.steps: 100 -> 101; from here on"
    )
    assert stored_config(file).train.steps == 101


def test_a_run_goes_on_in_the_precision_of_its_start(tmp_path):
    device = torch.device("cpu")
    assert as_begun(tmp_path, CONFIG, device).train.precision == "fp32"
    settled(tmp_path, with_train(precision="bf16"))
    assert as_begun(tmp_path, CONFIG, device).train.precision == "bf16"
    asked = as_begun(tmp_path, with_train(precision="fp32"), device)
    told(lambda: changed_settings(tmp_path, asked), "train.precision: bf16 -> fp32")


def test_what_weights_depend_on_is_not_free():
    fixed = (
        "steps", "batch_size", "micro_batch_size", "batch_tokens", "micro_batch_tokens",
        "learning_rate", "warmup_steps", "decay_from", "adam_betas", "adam_eps", "weight_decay",
        "clip_norm", "grow_at", "start_from", "chain_warmup", "precision", "compile",
    )  # fmt: skip
    names = {f"train.{field.name}" for field in fields(TrainConfig)}
    assert names - FREE_SETTINGS == {f"train.{name}" for name in fixed}
    assert names >= FREE_SETTINGS


def test_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with locked_directory(tmp_path):
        told(lambda: settled(tmp_path, CONFIG), "holds thesis.tex")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "thesis.tex"}


def test_a_log_goes_on_behind_the_last_step_that_is_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(file, 0)) as log:
        assert log.last is None
        log.write({"step": 10, "loss": 0.1 + 0.2})
        assert read_metrics(file) == [{"step": 10, "loss": 0.1 + 0.2}]  # on the disk at once
        log.write({"step": 20, "loss": float("nan"), "bits": float("-inf")})
        log.write({"step": 30})
    # Every line is plain JSON, for readers that take no NaN.
    assert file.read_text().splitlines()[1] == '{"step": 20, "loss": null, "bits": null}'
    with open(file, "ab") as stream:
        stream.write(b'{"step": 4')
    for step, kept in ((29, 20), (20, 20), (19, 10)):
        with closing(MetricsLog(file, step)) as log:
            assert log.last["step"] == kept
            log.write({"step": 30, "again": True})
        assert [record["step"] for record in read_metrics(file)][-2:] == [kept, 30]
    with closing(MetricsLog(file, 9)) as log:
        assert log.last is None


@given(st.integers(0, 50), st.sampled_from([b"", bytes(99), b"{"]))
def test_a_torn_end_is_dropped(tmp_path_factory, length, more):
    file = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    whole = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'[:length]
    file.write_bytes(whole + more)
    kept = whole[: whole.rfind(b"\n") + 1]
    assert [record["step"] for record in read_metrics(file)] == [1, 2][: kept.count(b"\n")]
    MetricsLog(file, 9).close()
    assert file.read_bytes() == kept


@pytest.mark.parametrize("damaged", [b'{"step": ', b"\xff", b"[1]", b'{"step": "x"}', b"{}"])
def test_a_damaged_line_in_the_middle_is_told(tmp_path, damaged):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(before := b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    told(lambda: read_metrics(file), "line 2 is damaged")
    told(lambda: MetricsLog(file, 9), "line 2 is damaged")
    assert file.read_bytes() == before


@pytest.mark.reliability
def test_full_disk_leaves_whole_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(MetricsLog(file, 0)) as log:
        log.write({"step": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
            with pytest.raises(OSError, match=r"File too large.*metrics\.jsonl"):
                log.write({"step": 2, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.read_text() == '{"step": 1}\n'
        log.write({"step": 2})
    assert [record["step"] for record in read_metrics(file)] == [1, 2]
