"""The estimated cost of a run is what the run really costs."""

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import dry_run
from refusals import told
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, SpecialIds, TrainConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import load_recipe
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.training.cost import (
    check_fits,
    count_parameters,
    estimate,
    mask_count,
    plan_batch,
    row_flops,
)
from exlm_mini.training.parts import make_model

SPECIAL = SpecialIds()


@pytest.mark.parametrize(
    ("recipe", "vocab_size", "millions"),
    [("text-base", 50_265, 128), ("text-large", 50_265, 361), ("smiles-base", 369, 50.5)],
)
def test_parameters_are_those_of_the_paper(recipe, vocab_size, millions):
    costs = estimate(load_recipe(recipe), vocab_size, row_length=128)  # Appendices J and N
    count = costs.num_parameters
    if recipe == "smiles-base":
        count -= costs.num_transition_parameters
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("transition", ["gated", "paper", "spans", "ctc", "uniform", "chains"])
@pytest.mark.parametrize("use_position", [True, False])
def test_parameters_are_those_of_the_model(transition, use_position):
    model = ModelConfig(
        num_layers=3, width=16, ffn_width=40, num_heads=2, states_per_mask=3,
        transition=transition, use_position=use_position, clone_embedding_std=1.0,
    )  # fmt: skip
    made = make_model(RunConfig(model=model), 30, SPECIAL)
    of_links = getattr(made, "transition", None) or torch.nn.Identity()
    counts = tuple(sum(p.numel() for p in part.parameters()) for part in (made, of_links))
    assert count_parameters(RunConfig(model=model), 30) == counts


def batch_of(config, vocab_size, num_rows, row_length, num_masks):
    """Random rows, each with ``num_masks`` masks."""
    token_ids_BN = torch.randint(6, vocab_size, (num_rows, row_length))
    token_ids_BN[:, 0], token_ids_BN[:, -1] = SPECIAL.bos, SPECIAL.eos
    token_ids_BN = token_ids_BN.repeat_interleave(config.num_copies, dim=1)
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[:, 2 : 2 + num_masks] = True
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, SPECIAL.mask)
    return MaskedBatch(masked_ids_BN, is_masked_BN, token_ids_BN)


def saved_bytes(config, vocab_size, row_length):
    """Bytes of the distinct storages autograd keeps of one micro-batch, without the weights."""
    model = make_model(config, vocab_size, SPECIAL).train()
    num_masks = math.ceil(mask_count(config, row_length))
    batch = batch_of(config, vocab_size, config.train.batch_size, row_length, num_masks)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        # Keep the tensor too, so that its address is not reused.
        kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    is_low = config.train.precision == "bf16"
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_low),
    ):
        assert model.answer(batch).scored().loss.requires_grad
    return sum(size for address, (_, size) in kept.items() if address not in weights)


@pytest.mark.parametrize(
    ("objective", "model", "vocab_size", "precision"),
    [
        ("mlm", {}, 2000, "bf16"),
        ("repeated-mlm", {}, 2000, "fp32"),
        ("exlm", {}, 2000, "fp32"),
        ("exlm", {}, 2000, "bf16"),
        ("exlm", {"boundary": "paper", "transition": "paper"}, 2000, "fp32"),
        ("exlm", {"transition": "ctc"}, 2000, "fp32"),
        ("exlm", {"emission": "chunked"}, 20_000, "fp32"),
        ("exlm", {"dropout": 0.0}, 2000, "fp32"),
        ("exlm", {"expand_at": 3}, 2000, "fp32"),
        # Here almost all of the memory is that of the states.
        ("exlm", {"states_per_mask": 8, "emission": "chunked", "num_layers": 1}, 2000, "fp32"),
    ],
)
def test_activations_are_what_autograd_keeps(objective, model, vocab_size, precision):
    # Without attention dropout, because with it attention on a CPU keeps its probabilities.
    settings = {"preset": "mini", "attention_dropout": 0.0} | model
    config = RunConfig(
        objective=objective,
        model=ModelConfig(**settings),
        train=TrainConfig(batch_size=4, precision=precision),
    )
    kept = saved_bytes(config, vocab_size, 128)
    costs = estimate(config, vocab_size, 128)
    assert costs.activation_bytes == pytest.approx(kept, rel=0.13)


# ---- operations ----


def counted_flops(config, vocab_size, num_rows, row_length, num_masks, backward):
    """Operations per row, counted by PyTorch while the matrix products run."""
    model = make_model(config, vocab_size, SPECIAL).train()
    batch = batch_of(config, vocab_size, num_rows, row_length, num_masks)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss = model.answer(batch).scored().loss
        if backward:
            loss.backward()
    return counter.get_total_flops() / num_rows


@pytest.mark.parametrize(
    ("objective", "model"),
    [
        ("mlm", {}),
        ("repeated-mlm", {"expand_at": 1}),
        ("exlm", {"use_position": False}),
        ("exlm", {"use_position": False, "num_layers": 4, "expand_at": 3}),
        ("exlm", {"use_position": False, "states_per_mask": 2, "boundary": "paper"}),
        ("exlm", {"transition": "paper"}),
        ("exlm", {"transition": "ctc"}),
        ("exlm", {"transition": "uniform"}),
    ],
)
def test_operations_are_those_that_run(objective, model):
    config = RunConfig(
        objective=objective,
        model=ModelConfig(**model),
        masking=MaskingConfig(mask_ratio=0.25, num_copies=2),
    )
    num_masks = 32 if objective == "repeated-mlm" else 16
    forward = counted_flops(config, 500, 3, 66, num_masks, backward=False)
    assert row_flops(config, 500, 66) == 3 * forward
    # The backward pass of the head has one more product, with a vector.
    both = counted_flops(config, 500, 3, 66, num_masks, backward=True)
    assert row_flops(config, 500, 66) == pytest.approx(both, rel=0.015)


def test_slots_are_counted_where_they_are_what_is_masked():
    toy = replace(load_recipe("toy-pairs"), objective="mlm")
    two_of_11 = replace(toy, masking=MaskingConfig(mask_ratio=2 / 11))
    assert row_flops(toy, 27, 13) == pytest.approx(row_flops(two_of_11, 27, 13), rel=1e-12)
    # Repeated MLM draws each mask independently, whatever the strategy.
    repeated = replace(toy, objective="repeated-mlm")
    by_draws = replace(repeated, masking=replace(toy.masking, strategy="bernoulli"))
    assert row_flops(repeated, 27, 13) == row_flops(by_draws, 27, 13)


# ---- batches ----


ROWS = {"batch_size": 4096, "micro_batch_size": 64}
TOKENS = {"batch_tokens": 64_000}


@pytest.mark.parametrize(
    ("train", "num_devices", "remedy"),
    [
        (ROWS, 3, "use --devices 2, or train.batch_size 4,224"),
        (TOKENS, 7, "6 tokens are left over; use --devices 8, or train.batch_tokens 64,001"),
        (
            {**TOKENS, "micro_batch_tokens": 16_000},
            8,
            "use --devices 4, or train.micro_batch_tokens 8,000",
        ),
    ],
)
def test_a_batch_that_cannot_be_spread_is_told_with_what_can(train, num_devices, remedy):
    told(lambda: plan_batch(TrainConfig(**train), num_devices), remedy)


def test_batches_of_tokens_are_counted_in_tokens():
    train = TrainConfig(steps=7, batch_tokens=600, micro_batch_tokens=200)
    costs = estimate(RunConfig(train=train), 100, 50)
    assert (costs.tokens_per_step, costs.num_tokens) == (600, 4200)
    rows = RunConfig(train=TrainConfig(steps=7, batch_size=12, micro_batch_size=4))
    assert costs.activation_bytes == estimate(rows, 100, 50).activation_bytes


def test_tokens_and_operations_are_those_of_rows_as_long_as_they_are():
    config = RunConfig(train=TrainConfig(steps=7, batch_size=12))
    lengths_R = np.array([10, 20, 50, 40])
    costs, most = estimate(config, 100, 50, lengths_R), estimate(config, 100, 50)
    assert (costs.num_tokens, most.num_tokens) == (7 * 12 * 30, 7 * 12 * 50)
    flops = sum(row_flops(config, 100, int(length)) for length in lengths_R) / 4
    assert costs.num_flops == pytest.approx(7 * 12 * flops)
    assert costs.activation_bytes == most.activation_bytes


def test_a_dry_run_on_molecules_counts_the_tokens_of_the_run(tmp_path, capsys):
    asked = ["--recipe", "smiles-tiny", "--data.max_documents", "200", *CPU]
    (tmp_path / "some.smi").write_text("".join("C" * n + "O\n" for n in range(1, 60)))
    printed, _ = dry_run(capsys, *asked, "--data.source", tmp_path / "some.smi")
    longest, mean = re.fullmatch(
        r"up to (\d+) tokens, \d+ expanded; (.+) on average", printed["row"]
    ).groups()
    assert 55 < int(longest) <= 62 and 25 < float(mean) < 40
    steps = int(printed["steps"].replace(",", ""))
    tokens = int(printed["tokens"].replace(",", ""))
    assert tokens == pytest.approx(32 * float(mean) * steps, rel=0.02)


def test_rows_that_just_fit_are_taken_and_longer_ones_of_either_pack_refused():
    config = RunConfig(objective="mlm", model=ModelConfig(max_positions=20))
    just, longer = (
        SimpleNamespace(vocab_size=30, lengths_R=np.array([9, n])) for n in (20, 21)
    )
    check_fits(config, just, just, torch.device("cpu"), 1)
    for packs in ((longer, just), (just, longer)):
        refused = partial(check_fits, config, *packs, torch.device("cpu"), 1)
        told(refused, "rows of 21 tokens", "raise it to 21")


CPU = ["--train.device", "cpu"]
TOY = ["--recipe", "toy-pairs", "--data.num_sentences", "64", *CPU]


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    dry_run(capsys, *TOY, "--output", "run")
    # Parts of torch that are first used here may create their cache.
    assert [p.name for p in tmp_path.iterdir() if "torchinductor" not in p.name] == []


def test_a_dry_run_knows_the_disk_of_checkpoints_and_rows(tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text("a word and a word\n" * 50_000)
    argv = ["--recipe", "text-tiny", "--model.vocab_size", "300", "--train.steps", "1001"]
    argv += ["--data.source", str(source), "--train.save_every", "100"]
    num_bytes = 12 * count_parameters(parse(argv).config, 300)[0]
    each, rows = num_bytes / 2**20, 2 * 900_000 / 4.3 / 2**20
    for keep_last, num in (("2", 3), ("0", 11), ("90", 11)):
        printed, _ = dry_run(capsys, *argv, *CPU, "--train.keep_last", keep_last)
        checkpoints = f"{num} checkpoints x {each:,.1f} MiB + {rows:,.0f} MiB packed rows"
        assert printed["disk"] == f"about {num * each + rows:,.0f} MiB = {checkpoints}"


def test_a_dry_run_reads_no_more_documents_than_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("exlm_mini.training.dry_run.DRY_RUN_DOCUMENTS", 30)
    (tmp_path / "some.smi").write_text("".join("C" * n + "O\n" for n in range(1, 60)))
    for asked, num_read in (("50", 30), ("20", 20), ("null", 30)):
        argv = ["--recipe", "smiles-tiny", "--data.max_documents", asked, *CPU]
        _, said = dry_run(capsys, *argv, "--data.source", tmp_path / "some.smi")
        assert f"read {num_read} documents" in said


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(2**16, 2), (2**16 + 1, 4)])
def test_a_dry_run_knows_the_bytes_of_a_packed_token(vocab_size, num_bytes, tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text("a word and a word\n" * 200_000)
    argv = ["--recipe", "text-tiny", "--model.vocab_size", vocab_size, "--data.source", source]
    printed, _ = dry_run(capsys, *argv, *CPU)
    rows = num_bytes * 3_600_000 / 4.3 / 2**20
    assert printed["disk"].endswith(f" + {rows:,.0f} MiB packed rows")


@pytest.mark.parametrize(("most", "is_told"), [(13, False), (12, True)])
def test_a_dry_run_tells_of_rows_that_are_longer_than_a_micro_batch(most, is_told, capsys):
    tokens = ["--train.batch_size", 32, "--train.batch_tokens", most]
    _, said = dry_run(capsys, *TOY, *tokens)
    assert ("stops the run" in said) == is_told


@pytest.mark.parametrize("vocabulary", [[], ["--model.vocab_size", "27"]])
def test_a_dry_run_knows_the_slots_of_the_toy_language(vocabulary, capsys):
    printed, _ = dry_run(capsys, *TOY, *vocabulary, "--objective", "mlm")
    assert (printed["row"], printed["vocabulary"]) == ("13 tokens, 13 expanded", "27")
    printed, _ = dry_run(capsys, *TOY, *vocabulary)
    # Two slots and two boundaries have one more state each.
    assert printed["row"] == "13 tokens, 17 expanded"
    assert printed["tokens per step"] == f"{13 * 128:,}"
