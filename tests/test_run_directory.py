"""Run directories: one writer, settings that stay, metrics that fit the checkpoint."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from exlm_mini.config import TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import write_atomically, write_json
from exlm_mini.training import run_directory
from exlm_mini.training.run_directory import (
    FREE_SETTINGS,
    MetricsLog,
    RunDirectory,
    read_metrics,
    settle_config,
)

HOLDER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from exlm_mini.training.run_directory import RunDirectory\n"
    "with RunDirectory(Path(sys.argv[1])):\n"
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
            with pytest.raises(UserError) as error, RunDirectory(path):
                pass
        finally:
            holder.kill()
    message = str(error.value)
    assert f"process {holder.pid} on {socket.gethostname()}" in message
    assert str(path) in message and "another --output" in message and "\n" not in message
    # SIGKILL gave the holder no chance to clean up: its lock file is still there.
    assert (path / ".lock").read_text().startswith(f"{holder.pid} ")
    (path / ".lock").write_text("1234567 a host of a longer name\n" * 10)
    with RunDirectory(path):
        assert (path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_lock_is_given_back_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), RunDirectory(tmp_path):
        raise KeyError
    with RunDirectory(tmp_path):
        with pytest.raises(UserError, match=f"process {os.getpid()}"), RunDirectory(tmp_path):
            pass
        # The refused attempt must not have freed the lock of the first.
        with pytest.raises(UserError), RunDirectory(tmp_path):
            pass
    with RunDirectory(tmp_path):
        pass


def test_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    lines = []
    with RunDirectory(tmp_path, lines.append):
        pass
    assert len(lines) == 1 and str(tmp_path) in lines[0]


CONFIG = {
    "recipe": "toy",
    "model": {"preset": "tiny", "states_per_mask": 4},
    "train": {"steps": 100, "save_every": 50, "adam_betas": (0.9, 0.98), "num_threads": None},
    "seed": 1,
}


def changed(**values: object) -> dict:
    config = json.loads(json.dumps(CONFIG))
    for key, value in values.items():
        *parents, last = key.split("__")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return config


def settle(path, config: dict) -> list[str]:
    return settle_config(path, json.dumps(config), config, json.loads)


def test_config_is_written_once_and_then_compared(tmp_path):
    assert settle_config(tmp_path, json.dumps(CONFIG), CONFIG, json.loads) == []
    assert (tmp_path / "config.yaml").read_text() == json.dumps(CONFIG)
    # A tuple and the list that comes back from the file are the same setting.
    assert settle_config(tmp_path, "other text", CONFIG, json.loads) == []
    assert (tmp_path / "config.yaml").read_text() == json.dumps(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.reliability
def test_other_settings_may_not_change(tmp_path):
    settle(tmp_path, CONFIG)
    before = (tmp_path / "config.yaml").read_text()
    config = changed(train__save_every=10, model__preset="base", seed=2, recipe="x")
    config["train"].pop("steps")
    with pytest.raises(UserError) as error:
        settle(tmp_path, config)
    message = str(error.value)
    assert "model.preset: tiny -> base; recipe: toy -> x; seed: 1 -> 2 and 1 more" in message
    assert "save_every" not in message and "another --output" in message
    assert (tmp_path / "config.yaml").read_text() == before
    with pytest.raises(UserError, match=r"train\.steps: 100 -> \(absent\)"):
        settle(tmp_path, {**CONFIG, "train": config["train"]})


def test_what_weights_depend_on_is_not_free():
    fixed = (
        "steps", "batch_size", "micro_batch_size", "batch_tokens", "micro_batch_tokens",
        "learning_rate", "warmup_steps", "adam_betas", "adam_eps", "weight_decay", "clip_norm",
        "chain_warmup", "precision", "compile",
    )  # fmt: skip
    names = {f"train.{field.name}" for field in fields(TrainConfig)}
    assert names - FREE_SETTINGS == {f"train.{name}" for name in fixed}
    assert names >= FREE_SETTINGS


def test_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with RunDirectory(tmp_path), pytest.raises(UserError, match=r"holds thesis\.tex"):
        settle(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "thesis.tex"}


@pytest.mark.parametrize(
    "name",
    [".lock", "config.yaml", "versions.json.tmp", "checkpoints", "data/train.bin.partial"],
)
def test_a_link_inside_is_not_followed(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "thesis.tex"
    target.write_text("years of work")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(target)
    with (
        pytest.raises(UserError, match=rf"{name} is a symbolic link.*--output"),
        RunDirectory(run),
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


def test_metrics_come_back_and_are_on_disk_at_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsLog(file, 0) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2})
        assert read_metrics(file) == [{"step": 1, "loss": 0.1 + 0.2}]
        log.write({"step": 2, "loss": float("nan"), "parts": [float("-inf"), {"x": 1e400}]})
    assert read_metrics(file)[1] == {"step": 2, "loss": None, "parts": [None, {"x": None}]}
    # Every line is plain JSON, for readers that know no NaN.
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_steps_of_metrics_only_rise(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsLog(file, 0) as log:
        log.write({"step": 0})
        log.write({"step": 7})
        for step in (7, 6, -1):
            with pytest.raises(ValueError, match="above 7"):
                log.write({"step": step})
    with MetricsLog(file, 7) as log, pytest.raises(ValueError, match="above 7"):
        log.write({"step": 7})
    with MetricsLog(file, 6) as log:
        log.write({"step": 7, "again": True})
    assert read_metrics(file) == [{"step": 0}, {"step": 7, "again": True}]


def test_resume_forgets_later_steps_and_a_torn_last_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsLog(file, 0) as log:
        for step in (10, 20, 30, 40):
            log.write({"step": step})
    with open(file, "ab") as stream:
        stream.write(b'{"step": 5')
    assert [record["step"] for record in read_metrics(file)] == [10, 20, 30, 40]
    with MetricsLog(file, 20) as log:
        log.write({"step": 30, "again": True})
    assert file.read_text() == '{"step": 10}\n{"step": 20}\n{"step": 30, "again": true}\n'


def test_a_log_knows_the_line_it_goes_on_from(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsLog(file, 0) as log:
        assert log.last is None
        for step in (10, 20, 30):
            log.write({"step": step, "seconds": step / 2})
    for step, last in ((30, 30), (29, 20)):
        with MetricsLog(file, step) as log:
            assert log.last == {"step": last, "seconds": last / 2}
    with MetricsLog(file, 9) as log:
        assert log.last is None


@pytest.mark.parametrize(
    ("end", "is_told"), [(b"", False), (b'{"step": 2', True), (b"\0\0\n", True), (b"{", True)]
)
def test_a_last_line_cut_short_is_told(tmp_path, end, is_told):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + end)
    told = []
    assert read_metrics(file, told.append) == [{"step": 1}]
    assert told == [f"{file}: the last line is cut short and left out"] * is_told


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
        b"", b"[1]", b'{"step": "x"}', b"\xff", b"[" * 100_000, b'{"step": 1}',
        b'{"step": 2, "loss": NaN}', b'{"step": 2, "step": 2}', b'{"step": %d}' % 2**63,
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
    with MetricsLog(file, 0) as log:
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
