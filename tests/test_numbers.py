"""Numbers no machine holds are refused before anything of their size is made."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from bad_cases import main_of

from exlm_lab.downstream.catalogue import ReadingConfig
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.recipes import load_recipe, recipe_names
from exlm_mini.data import memory
from exlm_mini.data.memory import device_memory
from exlm_mini.training.cost import check_memory
from exlm_mini.training.dry_run import objectives_of, row_length_of
from exlm_mini.training.precision import with_precision

CPU = torch.device("cpu")
GIB = 2**30
GROUPS = (
    ModelConfig, MaskingConfig, DataConfig, TrainConfig, RunConfig, TuneConfig, ReadingConfig,
)  # fmt: skip
PRETRAIN = "pretrain --recipe toy-pairs --objective exlm --train.device cpu --output out"
MODEL = ["about", "GiB, this machine has 24.0 GiB", "lower model.width"]
TOO_LARGE = [
    (f"{PRETRAIN} --model.width 200000", MODEL),
    (f"{PRETRAIN} --model.width 2147483632", ["model.width 2,147,483,632", "lower it"]),
    (f"{PRETRAIN} --model.num_layers 1000 --model.width 6400", MODEL),
    (f"{PRETRAIN} --train.batch_size 2147483647", ["GiB", "lower train.micro_batch_size"]),
    (
        f"{PRETRAIN} --train.batch_size 2147483647 --train.micro_batch_size 1",
        ["GiB", "lower train.batch_size"],
    ),
    (
        f"{PRETRAIN} --train.batch_size 32 --train.batch_tokens 2147483647",
        ["GiB", "lower train.micro_batch_tokens"],
    ),
    (f"{PRETRAIN} --data.num_sentences 2147483647", ["data.num_sentences", "GiB"]),
    (f"{PRETRAIN} --data.vocab_size 2147483647", ["data.vocab_size", "at most"]),
    (f"{PRETRAIN} --train.num_threads 100000", ["train.num_threads", "at most 1024"]),
    ("pretrain --recipe toy-pairs --dry-run --devices 2147483647", ["use --devices 128"]),
    ("bench step --shape 2147483647,4,8 --device cpu", ["GiB, this machine has 24.0 GiB"]),
    ("bench dag --shape 2147483647,4,8 --device cpu", ["--shape 2147483647,4,8", "GiB"]),
    ("prepare --source x.txt --workers 100000 --output out", ["--workers", "at most 1024"]),
    ("prepare --source x.txt --data.max_documents 2147483648 --output out", ["max_documents"]),
    ("finetune --checkpoint x --threads 100000", ["--threads", "at most 1024"]),
    ("finetune --checkpoint x --train.epochs 2147483648", ["epochs", "2**31"]),
    ("sweep ablations --seeds 9999999999999999999 --list", ["--seeds", "2**63"]),
    (f"sweep ablations --seeds {'9' * 5000} --list", ["--seeds", "999"]),
]


@pytest.fixture
def memory_of_24_gib(monkeypatch):
    """Any machine as one with 24 GiB and no GPU."""
    monkeypatch.setattr(memory, "device_memory", lambda device: 24 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("group", GROUPS)
def test_every_whole_number_of_the_settings_fits_its_type(group):
    hints = get_type_hints(group)
    for name in (f.name for f in fields(group) if hints[f.name] in (int, int | None)):
        bits = 63 if name.endswith("seed") else 31
        with pytest.raises(UserError, match=rf"{name} is {2**bits}; .*2\*\*{bits}"):
            group(**{name: 2**bits})


@pytest.mark.parametrize(("command", "words"), TOO_LARGE, ids=[c[:80] for c, _ in TOO_LARGE])
def test_what_does_not_fit_is_told_with_its_figure(
    command, words, memory_of_24_gib, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    assert main_of(name)(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and len(lines) == 1
    for word in words:
        assert word in lines[-1]


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_is_refused_where_it_fits(name, memory_of_24_gib):
    for single in objectives_of(with_precision(load_recipe(name), CPU)):
        vocab_size = single.model.vocab_size or single.data.vocab_size
        check_memory(single, vocab_size, row_length_of(single), CPU, 1)


def test_a_dry_run_tells_what_no_machine_holds(capsys, memory_of_24_gib, monkeypatch):
    from exlm_mini.pretrain import main

    argv = ["--recipe", "text-large", "--dry-run", "--model.vocab_size", "50265"]
    argv += ["--model.num_layers", "1000", "--train.batch_size", "2147483647"]
    assert main([*argv, "--train.micro_batch_size", "1", "--train.device", "cpu"]) == 0
    assert "parameters         12,6" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "is_less"), [("1000000000", True), ("max", False)])
def test_a_container_has_no_more_than_it_may_take(limit, is_less, tmp_path, monkeypatch):
    whole = device_memory(CPU)
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert device_memory(CPU) == (10**9 if is_less else whole)
