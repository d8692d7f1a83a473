"""The log fits the checkpoint, what it says of the machine is right, and so are its copies."""

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

from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.options import parse
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.training.cost import mean_flops_per_token, row_flops
from exlm_mini.training.metrics import MetricsLog, ScalarLog, peak_memory_mib, read_metrics
from exlm_mini.training.trainer import Trainer

CPU = torch.device("cpu")
CONFIG = RunConfig(train=TrainConfig(precision="fp32"))
SMALL = """
    --recipe toy-pairs --objective exlm --data.num_sentences 128 --model.preset tiny
    --train.steps 6 --train.batch_size 8 --train.validation_rows 32 --train.validate_every 3
    --train.save_every 2 --train.log_every 1 --train.device cpu
"""


# ---- operations ----


def test_operations_are_those_of_all_rows_over_all_tokens():
    lengths = [5, 40, 5, 17, 3, 40, 40]
    total = sum(row_flops(CONFIG, 300, length) for length in lengths)
    mean = mean_flops_per_token(CONFIG, 300, np.array(lengths))
    assert mean == pytest.approx(total / sum(lengths), rel=1e-12)


# ---- memory ----


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_the_most_that_was_resident():
    status = Path("/proc/self/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) / 2**10
    spare = peak_memory_mib(CPU) - resident + 64
    held = np.ones(int(spare * 2**20), dtype=np.int8)
    # The kernel adds up its counts for each core now and then.
    assert peak_memory_mib(CPU) >= resident + spare - 16
    del held


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


# ---- a run ----


@pytest.fixture(scope="module")
def toy_corpus(tmp_path_factory):
    config = parse(SMALL.split()).config
    return prepare_corpus(config.data, tmp_path_factory.mktemp("toy") / "data", config.seed)


def make_trainer(toy_corpus, output, *options: str) -> Trainer:
    config = parse([*SMALL.split(), *options]).config
    output.mkdir(exist_ok=True)
    return Trainer(config, toy_corpus.train, toy_corpus.validation, output)


def test_a_line_says_how_well_the_model_and_the_machine_do(toy_corpus, tmp_path):
    trainer = make_trainer(toy_corpus, tmp_path / "run")
    trainer.run()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    validated = [r for r in records if "validation_bits_per_mask" in r]
    assert [r["step"] for r in validated] == [3, 6]
    for record in records:
        speed = trainer.flops_per_token * record["tokens_per_second"]
        assert record["model_flops_per_second"] == pytest.approx(speed)
        assert record["peak_memory_mib"] > 10
    for record in validated:
        perplexity = 2 ** record["validation_bits_per_mask"]
        assert record["validation_perplexity"] == pytest.approx(perplexity)
        assert 0 <= record["validation_mask_accuracy"] <= 1
    evaluation = trainer.evaluation
    assert evaluation.mask_accuracy == validated[-1]["validation_mask_accuracy"]
    assert evaluation.mask_accuracy == evaluation.num_correct / evaluation.num_masks
    # A run that goes on keeps the last validation.
    again = make_trainer(toy_corpus, tmp_path / "run")
    assert again.run() and again.evaluation == evaluation


# ---- TensorBoard ----


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By name: value by step, as TensorBoard shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


def test_scalars_are_the_numbers_of_the_log(toy_corpus, tmp_path):
    pytest.importorskip("tensorboard")
    output = tmp_path / "run"
    make_trainer(toy_corpus, output, "--train.tensorboard", "true").run()
    expected: dict[str, dict[int, float]] = {}
    for record in read_metrics(output / "metrics.jsonl"):
        for name, value in record.items():
            if name != "step" and value is not None:
                expected.setdefault(name, {})[record["step"]] = value
    assert {"loss", "tokens_per_second", "validation_mask_accuracy"} <= expected.keys()
    found = scalars(output / "tensorboard")
    assert found.keys() == expected.keys()
    for name, curve in expected.items():
        assert found[name] == pytest.approx(curve, rel=1e-6), name  # they are float32 there


def test_a_run_that_goes_on_hides_what_it_does_again(tmp_path):
    pytest.importorskip("tensorboard")
    with closing(ScalarLog(tmp_path, step=0)) as log:
        for step in range(1, 6):
            log.write({"step": step, "loss": float(step), "mask_accuracy": None})
    with closing(ScalarLog(tmp_path, step=3)) as log:
        for step in range(4, 7):
            log.write({"step": step, "loss": 10.0 * step})
        # On the disk at once, for a run may be killed.
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


def test_wandb_gets_the_lines_where_its_project_is_named(toy_corpus, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("WANDB_PROJECT", "exlm")
    make_trainer(toy_corpus, tmp_path / "no-package").run()
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = make_trainer(toy_corpus, tmp_path / "run")
    trainer.run()
    first, *lines, last = importlib.import_module("wandb").calls
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines == [(record["step"], record) for record in records]
    assert (first["group"], first["config"], last) == (
        "run",
        asdict(trainer.config),
        "finished",
    )
    del sys.modules["wandb"]
