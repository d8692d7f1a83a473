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

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import parse_stored, plain
from exlm_mini.data.files import write_atomically, write_json
from exlm_mini.training import run_directory
from exlm_mini.training.run_directory import (
    FREE_SETTINGS,
    MetricsLog,
    locked_directory,
    read_metrics,
    settle_config,
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


def test_settings_are_written_once_and_then_compared(tmp_path):
    assert settle_config(tmp_path, CONFIG) == []
    before = (tmp_path / "config.yaml").read_text()
    assert parse_stored(before) == plain(CONFIG)
    assert settle_config(tmp_path, CONFIG) == []
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    for other, words in (
        (replace(with_train(save_every=10), seed=2), "seed: 1 -> 2;"),
        (with_train(steps=99), "train.steps: 100 -> 99"),
    ):
        with pytest.raises(UserError, match=words) as error:
            settle_config(tmp_path, other)
        assert "save_every" not in str(error.value) and "another --output" in str(error.value)
        assert (tmp_path / "config.yaml").read_text() == before
    (line,) = settle_config(tmp_path, with_train(steps=101))
    assert line.startswith("train.steps: 100 -> 101; from here on the learning rate")
    assert parse_stored((tmp_path / "config.yaml").read_text())["train"]["steps"] == 101


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
    with locked_directory(tmp_path), pytest.raises(UserError, match=r"holds thesis\.tex"):
        settle_config(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "thesis.tex"}


@pytest.mark.parametrize(
    "name",
    [".lock", "data/train.bin.partial"],
)
def test_a_link_inside_is_not_followed(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "thesis.tex"
    target.write_text("years of work")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(target)
    with (
        pytest.raises(UserError, match=rf"{name} is a symbolic link.*--output"),
        locked_directory(run),
    ):
        pass
    assert target.read_text() == "years of work"
    assert [path.name for path in run.rglob("*")] == [*Path(name).parts]  # and no lock either


@pytest.mark.parametrize(
    ("draft", "write"),
    [
        ("record.json.tmp", lambda path: write_atomically(path, b"{}")),
        ("record.json.PID.partial", lambda path: write_json(path, {})),
    ],
    ids=["atomic", "whole"],
)
def test_a_draft_is_not_written_through_a_link(draft, write, tmp_path):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    (tmp_path / draft.replace("PID", str(os.getpid()))).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        write(tmp_path / "record.json")
    assert target.read_text() == "years of work"


@pytest.mark.parametrize(
    ("end", "is_told"), [(b"", False), (b'{"step": 2', True), (b"\0\0\n", True), (b"{", True)]
)
def test_a_last_line_cut_short_is_told(tmp_path, end, is_told):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + end)
    told = []
    assert read_metrics(file, told.append) == [{"step": 1}]
    assert told == [f"{file}: the last line is cut short and left out"] * is_told


def test_a_log_goes_on_behind_the_last_step_that_is_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(file, 0)) as log:
        assert log.last is None
        log.write({"step": 10, "loss": 0.1 + 0.2})
        assert read_metrics(file) == [{"step": 10, "loss": 0.1 + 0.2}]  # on the disk at once
        log.write({"step": 20, "loss": float("nan"), "of": {"x": [float("-inf"), 1]}})
        log.write({"step": 30})
    # Every line is plain JSON, for readers that take no NaN.
    assert (
        file.read_text().splitlines()[1] == '{"step": 20, "loss": null, "of": {"x": [null, 1]}}'
    )
    with open(file, "ab") as stream:
        stream.write(b'{"step": 4')
    for step, kept in ((29, 20), (20, 20), (19, 10)):
        with closing(MetricsLog(file, step)) as log:
            assert log.last["step"] == kept
            log.write({"step": 30, "again": True})
        assert [record["step"] for record in read_metrics(file)][-2:] == [kept, 30]
    with closing(MetricsLog(file, 9)) as log:
        assert log.last is None


def test_every_torn_end_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        kept = whole[:length].count(b"\n")
        assert [record["step"] for record in read_metrics(file)] == [1, 2][:kept]
        MetricsLog(file, 9).close()
        assert file.read_bytes() == whole[: whole.rfind(b"\n", 0, length) + 1]
    file.write_bytes(whole + bytes(4096) + b"\n")
    assert len(read_metrics(file)) == 2


def test_a_damaged_line_in_the_middle_is_told(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for damaged in (
        b"[1]", b'{"step": "x"}', b"\xff", b"[" * 100_000, b'{"step": 1}',
        b'{"step": 2, "loss": NaN}', b'{"step": 2, "step": 2}', b'{"step": 2, "loss": "x"}',
    ):  # fmt: skip
        file.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
        before = file.read_bytes()
        with pytest.raises(UserError, match="line 2 is damaged"):
            read_metrics(file)
        with pytest.raises(UserError, match="line 2 is damaged"):
            MetricsLog(file, 9)
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
