"""The speed of whole steps of a recipe."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from bench_runs import records_of, refuses
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from exlm_lab import bench
from exlm_lab.benchmarks import training as training_benchmark
from exlm_lab.benchmarks.training import (
    LEAST_STEPS,
    MOLECULE_LENGTHS,
    MOLECULE_VOCABULARY,
    WARM_UP_STEPS,
    made_pack,
    train,
)
from exlm_mini.config import DataConfig, ModelConfig, RunConfig, SpecialIds
from exlm_mini.config.recipes import load_recipe
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.training.dry_run import objectives_of
from exlm_mini.training.parts import make_model
from exlm_mini.training.provenance import MIB
from exlm_mini.training.step import Updater

pytestmark = pytest.mark.usefixtures("three_runs", "uncompiled")


# ---- made-up tokens ----


@given(
    st.integers(1, 3000), st.one_of(st.none(), st.integers(2, 60)), st.integers(7, 70000),
    st.one_of(st.none(), st.integers(20, 60)),
)  # fmt: skip
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_made_pack_has_rows_of_ordinary_tokens(
    tmp_path_factory, num_tokens, row_length, vocab_size, longest
):
    assume(row_length is None or longest is None or row_length <= longest)
    special = SpecialIds()
    folder = tmp_path_factory.mktemp("pack")
    pack = made_pack(folder, num_tokens, row_length, vocab_size, longest)
    token_ids_BN, lengths_B = pack.gather(range(len(pack)))
    if row_length:
        assert pack.row_length == row_length
    else:
        assert set(lengths_B.tolist()) <= {min(n, longest or n) for n in MOLECULE_LENGTHS}
    longest_row = row_length or max(MOLECULE_LENGTHS)
    assert abs(pack.num_tokens - num_tokens) <= max(0.5 * num_tokens, 2 * longest_row)
    assert token_ids_BN[:, 0].eq(special.bos).all()
    for row_N, length in zip(token_ids_BN, lengths_B.tolist(), strict=True):
        assert row_N[length - 1] == special.eos
        inner = row_N[1 : length - 1]
        assert inner.numel() == 0 or len(special) <= inner.min() <= inner.max() < vocab_size


def test_molecule_lengths_are_those_of_the_embedded_molecules(tmp_path):
    pytest.importorskip("rdkit")
    corpus = prepare_corpus(DataConfig(kind="smiles", block_length=256), tmp_path, seed=1)
    assert corpus.train.vocab_size == MOLECULE_VOCABULARY
    lengths_R = np.concatenate([corpus.train.lengths_R, corpus.validation.lengths_R])
    shares = np.arange(0.025, 1, 0.05)
    assert np.quantile(lengths_R, shares, method="nearest").tolist() == list(MOLECULE_LENGTHS)


# ---- steps of a recipe ----


def toy(**changes) -> RunConfig:
    """The recipe toy-pairs, one of its objectives, with some settings of training replaced."""
    config = objectives_of(load_recipe("toy-pairs"))[1]
    settings = {"device": "cpu", "micro_batch_size": 32}
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, **settings | changes)
    )


def test_the_speed_of_a_recipe_is_measured_and_shown(capsys, monkeypatch):
    argv = ["train", "--recipe", "toy-pairs", "--micro-batch", "64", "--accumulate", "1"]
    found = records_of(capsys, *argv, "--steps", "3")
    assert [row["objective"] for row in found] == ["mlm", "exlm"]
    for row, config in zip(found, objectives_of(load_recipe("toy-pairs")), strict=True):
        assert row["benchmark"] == "train" and row["recipe"] == "toy-pairs"
        assert row["settings"]["objective"] == row["objective"]
        assert row["settings"]["train.precision"] == "fp32"  # what auto is on a CPU
        assert "vocab_size" not in row["settings"]["model"]
        assert row["tokens_per_step"] == 64 * 13 and row["steps"] == 3
        assert row["tokens_per_second"] == pytest.approx(64 * 13 / row["median_ms"] * 1000)
        assert row["flops_per_second"] == row["flops_per_token"] * row["tokens_per_second"]
        assert (row["accumulated"], row["accumulated_by_recipe"]) == (1, 2)
        assert row["threads"] == config.train.num_threads == 1
        model = make_model(config, row["vocab_size"], SpecialIds())
        assert row["num_parameters"] == sum(p.numel() for p in model.parameters())
        assert row["peak_mib"] is None or row["peak_mib"] >= 0
        assert row["machine"]["torch"] == torch.__version__
    shown = iter(found)
    monkeypatch.setattr(bench, "train", lambda *_, **__: next(shown))
    assert bench.main([*argv, "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^toy-pairs, exlm: [\d,]+ tokens/s, \S+ FLOP/s, peak memory", out, re.M)
    assert re.search(r"3 steps of \d+ ms = 1 \(of 2\) x 64 rows, fp32, 0.1 M parameters", out)


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_real_steps_are_made_and_the_first_are_not_timed(seconds, monkeypatch):
    made = []
    step = Updater.step

    def noted(self, number):
        before = [p.detach().clone() for p in self.model.parameters()]
        update = step(self, number)
        is_changed = any(
            not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True)
        )
        made.append((number, update.learning_rate > 0, is_changed, update.num_tokens))
        return update

    monkeypatch.setattr(Updater, "step", noted)
    found = train(toy(), steps=5, seconds=seconds, accumulate=2)
    timed = 5 if seconds else LEAST_STEPS
    assert found["steps"] == timed and found["tokens_per_step"] == 2 * 32 * 13
    assert made == [(n, True, True, 2 * 32 * 13) for n in range(WARM_UP_STEPS + timed)]
    assert (found["accumulated"], found["accumulated_by_recipe"]) == (2, 4)
    assert found["settings"]["train.batch_size"] == 128  # the recipe's, not the shorter step's


@pytest.mark.parametrize(
    ("name", "vocab_size", "least", "most"),
    [("smiles-tiny", MOLECULE_VOCABULARY, 32 * 11, 32 * 69), ("text-tiny", 500, 64**2, 64**2)],
)
def test_the_rows_of_a_recipe_are_of_its_kind(name, vocab_size, least, most, monkeypatch):
    monkeypatch.setattr(training_benchmark, "WARM_UP_STEPS", 0)
    (config,) = objectives_of(load_recipe(name))
    small = dataclasses.replace(config.model, width=16, num_heads=1, ffn_width=16)
    train_config = dataclasses.replace(config.train, device="cpu", precision="fp32")
    found = train(dataclasses.replace(config, model=small, train=train_config), steps=3)
    assert least <= found["tokens_per_step"] <= most
    assert found["vocab_size"] == vocab_size


def test_batches_counted_in_tokens_are_measured_in_tokens():
    (config,) = objectives_of(load_recipe("smiles-base"))
    small = ModelConfig(preset="tiny", width=16, num_heads=1, ffn_width=16, states_per_mask=2)
    counted = {"batch_tokens": 2000, "micro_batch_tokens": 500, "device": "cpu"}
    settings = dataclasses.replace(config.train, **counted, precision="fp32")
    found = train(dataclasses.replace(config, model=small, train=settings), 3, accumulate=2)
    assert found["vocab_size"] == config.data.vocab_size
    assert 300 < found["tokens_per_step"] <= 1000
    assert found["accumulated_by_recipe"] == 4


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_a_recipe_that_does_not_fit_says_what_to_lower(error, monkeypatch, capsys):
    def full(*_):
        raise error

    monkeypatch.setattr(training_benchmark, "_timed_steps", full)
    argv = ["train", "--recipe", "toy-pairs", "--device", "cpu"]
    refuses(argv, ["toy-pairs does not fit", "128 rows", "lower --micro-batch"], capsys)


def test_another_failure_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(training_benchmark, "_timed_steps", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(toy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_recipe_on_a_gpu_runs_in_bf16_and_gives_its_memory_back():
    before = torch.cuda.memory_allocated()
    found = train(toy(device="cuda"), steps=3)
    assert found["settings"]["train.precision"] == "bf16"
    assert found["peak_mib"] > 4 * found["num_parameters"] / MIB
    assert torch.cuda.memory_allocated() <= before + MIB
