"""The log agrees with the checkpoint, and its copies and its figures of the machine are right."""

from __future__ import annotations

import importlib
import resource
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import told
from workers import PLAIN, changed, make_trainer

from exlm_mini.training.cost import mean_flops_per_token, row_flops
from exlm_mini.training.metrics import MetricsLog, ScalarLog, peak_memory_mib, read_metrics

CPU = torch.device("cpu")


def test_operations_are_those_of_all_rows_over_all_tokens():
    lengths = [5, 40, 5, 17, 3, 40, 40]
    total = sum(row_flops(PLAIN, 300, length) for length in lengths)
    mean = mean_flops_per_token(PLAIN, 300, np.array(lengths))
    assert mean == pytest.approx(total / sum(lengths), rel=1e-12)


# ---- memory ----


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_the_most_that_was_resident():
    def resident() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 2**10

    held = np.ones(256 * 2**20, dtype=np.int8)
    most = resident()
    del held
    assert resident() <= most - 128
    # The kernel adds up its counts of each core only now and then.
    assert most - 16 <= peak_memory_mib(CPU)
    # The peak of getrusage may be that of the program that started this one: an upper bound.
    assert (
        peak_memory_mib(CPU) <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 + 16
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_memory_of_a_gpu_counts_what_was_allocated_there():
    before = peak_memory_mib(torch.device("cuda"))
    held = torch.empty(int((before + 64) * 2**20), dtype=torch.int8, device="cuda")
    assert peak_memory_mib(torch.device("cuda")) >= before + 64
    del held


# ---- the log ----


def test_a_log_goes_on_behind_the_last_step_that_is_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(file, 0)) as log:
        assert log.last is None
        log.write({"step": 10, "loss": 0.1 + 0.2})
        assert read_metrics(file) == [{"step": 10, "loss": 0.1 + 0.2}]  # on the disk at once
        log.write({"step": 20, "loss": float("nan"), "bits": float("-inf")})
        log.write({"step": 30})
    # Every line is standard JSON, for readers that do not accept NaN.
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


# ---- its copies ----


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The curves that TensorBoard shows, by name; each maps steps to values."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


def test_a_run_that_goes_on_hides_what_it_does_again(tmp_path):
    pytest.importorskip("tensorboard")
    with closing(ScalarLog(tmp_path, step=0)) as log:
        for step in range(1, 6):
            log.write({"step": step, "loss": float(step), "mask_accuracy": None})
    with closing(ScalarLog(tmp_path, step=3)) as log:
        for step in range(4, 7):
            log.write({"step": step, "loss": 10.0 * step})
        # The numbers are on the disk at once, because a run may be killed.
        assert scalars(tmp_path) == {"loss": {1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60}}


STAND_IN = """
calls = []
class Run:
    def log(self, numbers, step):
        calls.append((step, numbers))
    def finish(self):
        calls.append("finished")
def init(**named):
    calls.append(named)
    return Run()
"""


def test_tensorboard_and_wandb_get_the_lines_where_they_are_asked_for(
    packs, tmp_path, monkeypatch
):
    pytest.importorskip("tensorboard")
    config = changed(PLAIN, "mlm", tensorboard=True)
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("WANDB_PROJECT", "exlm")
    # Here nothing but the folder is found that W&B leaves beside its runs.
    (tmp_path / "left" / "wandb").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "left"))
    make_trainer(config, packs, tmp_path / "no-package").run()
    monkeypatch.syspath_prepend(str(tmp_path))
    output = tmp_path / "run"
    make_trainer(config, packs, output).run()
    records = read_metrics(output / "metrics.jsonl")
    first, *lines, last = importlib.import_module("wandb").calls
    del sys.modules["wandb"]
    assert lines == [(record["step"], record) for record in records]
    assert (first["group"], first["config"], last) == ("run", asdict(config), "finished")
    curves = scalars(output / "tensorboard")
    names = {name for record in records for name in record} - {"step"}
    assert curves.keys() == names > {"loss", "mask_accuracy", "validation_mask_accuracy"}
    for name, curve in curves.items():
        expected = {record["step"]: record[name] for record in records if name in record}
        assert curve == pytest.approx(expected, rel=1e-6), name  # TensorBoard has float32
