"""Training inside a chapter equals training with the command."""

import pytest
import torch
from live import Scale, chapter_scale, train_live

from exlm_mini.config.options import parse
from exlm_mini.model import ExLM
from exlm_mini.pretrain import main
from exlm_mini.training.metrics import read_metrics

CPU = Scale("cpu", torch.device("cpu"))
OPTIONS = [
    "--recipe", "toy-pairs", "--train.steps", "4", "--train.batch_size", "8",
    "--train.validate_every", "2", "--train.validation_rows", "16", "--train.device", "cpu",
    "--data.num_sentences", "64",
]  # fmt: skip


def test_a_live_run_equals_the_command(tmp_path):
    options = [*OPTIONS, "--objective", "exlm"]
    run = train_live(parse(options).config, CPU)
    assert main([*options, "--output", str(tmp_path / "run")]) == 0
    recorded = {
        record["step"]: record["validation_bits_per_row"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "validation_bits_per_row" in record
    }
    assert run.bits_per_row() == pytest.approx(recorded, rel=1e-6)
    assert list(recorded) == [2, 4]
    assert isinstance(run.model, ExLM) and not run.model.training
    assert run.tokenizer.token(5) == "[MASK]"


def test_a_chapter_on_a_cpu_uses_one_thread(monkeypatch):
    monkeypatch.delenv("EXLM_SCALE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert chapter_scale() == CPU
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
