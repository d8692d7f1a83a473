"""Whatever happens to a run, it ends with the same bytes as an undisturbed one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from crashes import Crash, crash_at
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from workers import PLAIN, changed, make_packs

from exlm_mini.config.checks import UserError
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.trainer import Trainer

LAST = "checkpoints/step-000006"
CONFIGS = {
    "mlm": changed(PLAIN, "mlm", save_every=2),
    "exlm": changed(PLAIN, save_every=2, keep_last=2),
    "repeated-mlm": changed(PLAIN, "repeated-mlm", log_every=1),
    "grown": changed(PLAIN, grow_at=0.4),
    "tokens": changed(
        PLAIN, batch_size=32, micro_batch_size=None, batch_tokens=60, micro_batch_tokens=20
    ),
}
MEASURED = ("tokens_per_second", "seconds", "model_flops_per_second", "peak_memory_mib")
"""Measured fields of a logged step, which differ from run to run."""


def train(config, packs, output, **asked):
    """Do what ``pretrain`` does in one start; return whether the run came to its end."""
    return Trainer(config, *packs, output).run(**asked)


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory):
    """Make the packs, and an uninterrupted run of each configuration to compare with."""
    folder = tmp_path_factory.mktemp("whole")
    packs = make_packs(folder)
    for name, config in CONFIGS.items():
        assert train(config, packs, folder / name)
    Run.packs, Run.folder = packs, folder


class Run(RuleBasedStateMachine):
    """A run that is stopped, killed, damaged and changed in any order."""

    def __init__(self):
        super().__init__()
        self.output = Path(tempfile.mkdtemp())

    @initialize(name=st.sampled_from(sorted(CONFIGS)))
    def choose(self, name):
        self.name, self.config = name, CONFIGS[name]

    @property
    def checkpoints(self):
        return sorted((self.output / "checkpoints").glob("step-??????"))

    @rule(steps=st.integers(1, 4))
    def stop_after(self, steps):
        left = iter(range(steps - 1))
        train(
            self.config, self.packs, self.output, should_stop=lambda: next(left, None) is None
        )

    @rule(count=st.integers(0, 25))
    def kill_at_a_change_of_the_disk(self, count):
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, count)
            with contextlib.suppress(Crash):
                train(self.config, self.packs, self.output)

    @precondition(lambda self: len(self.checkpoints) > 1)
    @rule(file=st.sampled_from(["manifest.json", "model.safetensors"]), at=st.floats(0, 1))
    def damage_the_newest_checkpoint(self, file, at):
        path = self.checkpoints[-1] / file
        if path.exists():
            data = bytearray(path.read_bytes())
            data[int(at * (len(data) - 1))] ^= 1
            path.write_bytes(data if at < 0.9 else data[:-1])
        for older in self.checkpoints[:-1]:  # at least one must be intact
            whole = self.folder / self.name / "checkpoints" / older.name
            if whole.exists():
                shutil.copytree(whole, older, dirs_exist_ok=True)
                return
        shutil.rmtree(self.checkpoints[-1])

    @rule(save=st.integers(1, 4), keep=st.integers(0, 3), log=st.integers(1, 3))
    def change_free_settings(self, save, keep, log):
        train = replace(self.config.train, save_every=save, keep_last=keep, log_every=log)
        self.config = replace(self.config, train=train)

    def teardown(self):
        if hasattr(self, "config"):
            try:
                assert train(self.config, self.packs, self.output)
            except UserError as error:
                assert "no checkpoint in" in str(error)  # it says that all are damaged
                return
            whole = self.folder / self.name
            for file in ("model.safetensors", "optimizer.safetensors"):
                expected = (whole / LAST / file).read_bytes()
                assert (self.output / LAST / file).read_bytes() == expected, file
            ends = [load_checkpoint(run / LAST).state for run in (whole, self.output)]
            assert [end.pop("config") is None for end in ends] == [False, False]
            assert ends[0] == ends[1]
            logs = [read_metrics(run / "metrics.jsonl") for run in (whole, self.output)]
            for line in (line for log in logs for line in log):
                assert all(line.pop(name) > 0 for name in MEASURED)
            at = {line["step"]: line for line in logs[0]}
            assert all(at.get(line["step"], line) == line for line in logs[1])
        shutil.rmtree(self.output, ignore_errors=True)


TestRun = Run.TestCase
TestRun.settings = settings(
    max_examples=8, stateful_step_count=8, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
