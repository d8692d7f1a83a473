"""Bits of held-out rows: what they sum and leave out, and what they do not depend on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import told
from workers import PLAIN, VOCAB_SIZE, changed, make_trainer

from exlm_mini.config import SpecialIds
from exlm_mini.data.batches import validation_batches
from exlm_mini.model import ExLM, MaskedLM, answers
from exlm_mini.model.answers import log_likelihood
from exlm_mini.training import evaluation
from exlm_mini.training.checkpoint import latest_checkpoint
from exlm_mini.training.cost import longest_row
from exlm_mini.training.evaluation import evaluate, row_bits_and_correct
from exlm_mini.training.parts import load_model, make_masker, make_model
from exlm_mini.training.processes import Engine

SPECIAL = SpecialIds()
ENGINE = Engine(torch.device("cpu"))
CONFIG = changed(PLAIN, model={"num_layers": 1}, micro_batch_size=None)


def untrained(config):
    return make_model(config, VOCAB_SIZE, SPECIAL).eval()


def batch_of(packs, config):
    (batch,) = validation_batches(packs[1], make_masker(config, SPECIAL), 19, 64)
    return batch


# ---- bits ----


@pytest.mark.parametrize("objective", ["mlm", "repeated-mlm"])
def test_bits_of_mlm_are_a_sum_over_masks(packs, objective):
    config = changed(CONFIG, objective)
    model, batch = untrained(config), batch_of(packs, config)
    bits_B = row_bits_and_correct(model, batch)[0]
    for row, bits in enumerate(bits_B.tolist()):
        length = int((batch.token_ids_BN[row] != SPECIAL.pad).sum())
        masked_ids, is_masked, token_ids = (t[row : row + 1, :length] for t in batch)
        with torch.no_grad():
            p = model(masked_ids, is_masked).double().softmax(dim=1)
        targets = token_ids[is_masked].tolist()
        by_hand = -sum(math.log2(p[s, y]) for s, y in enumerate(targets))
        assert bits == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(bits_B > 0, batch.is_masked_BN.any(dim=1))


@pytest.mark.parametrize(
    ("transition", "boundary"), [("gated", "official"), ("gated", "paper"), ("ctc", "official")]
)
def test_a_row_without_masks_costs_no_bits_and_counts_in_no_loss(packs, transition, boundary):
    config = changed(CONFIG, model={"transition": transition, "boundary": boundary})
    model, batch = untrained(config), batch_of(packs, config)
    is_masked_BN = batch.is_masked_BN & (torch.arange(len(batch.is_masked_BN)) < 3)[:, None]
    masked_ids_BN = torch.where(is_masked_BN, batch.masked_ids_BN, batch.token_ids_BN)
    batch = batch._replace(masked_ids_BN=masked_ids_BN, is_masked_BN=is_masked_BN)
    bits_B = row_bits_and_correct(model, batch)[0]
    assert (bits_B[:3] > 0).all() and not bits_B[3:].any()
    masked_alone = type(batch)(*(part_BN[:3] for part_BN in batch))
    loss, alone = (model.answer(rows).scored().loss.item() for rows in (batch, masked_alone))
    assert loss == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("objective", "is_training"), [("mlm", True), ("exlm", False)])
def test_evaluation_is_repeatable_and_leaves_the_model_as_it_was(packs, objective, is_training):
    config = changed(CONFIG, objective)
    model = untrained(config).train(is_training)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    results = set()
    for seed in range(2):
        torch.manual_seed(seed)
        results.add(evaluate(model, packs[1], make_masker(config, SPECIAL), 19, ENGINE))
    assert len(results) == 1
    assert all(part.training is is_training for part in model.modules())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_does_not_depend_on_the_batch_size(packs):
    model, masker = untrained(CONFIG), make_masker(CONFIG, SPECIAL)
    large = evaluate(model, packs[1], masker, 13, ENGINE, 0.5)
    small = evaluate(model, packs[1], masker, 13, ENGINE, 0.5, batch_rows=7)
    assert small[1:] == large[1:] and large.num_rows == 13
    assert small.bits == pytest.approx(large.bits, rel=1e-5)
    assert large.bits_per_row * 13 == pytest.approx(large.bits)
    assert large.bits_per_mask * large.num_masks == pytest.approx(large.bits)
    assert large.perplexity == pytest.approx(2**large.bits_per_mask)
    assert large.mask_accuracy * large.num_masks == pytest.approx(large.num_correct)


# ---- rows without a path ----


def test_rows_without_a_path_are_left_out_of_the_loss_and_counted(packs, monkeypatch):
    batch = batch_of(packs, CONFIG)
    whole_B = log_likelihood(untrained(CONFIG)(*batch)).detach()
    lost_B = whole_B.index_fill(0, torch.tensor([3, 4]), -torch.inf)
    monkeypatch.setattr(answers, "log_likelihood", lambda scores: lost_B)
    scored = untrained(CONFIG).answer(batch).scored()
    num_targets_B = batch.is_masked_BN.sum(dim=1) + 2  # [BOS] and [EOS]
    expected = -(whole_B / num_targets_B)[torch.isfinite(lost_B)].mean().item()
    assert scored.num_without_path == 2
    assert scored.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("longest", [2, -1], ids=["some", "none"])
def test_rows_without_a_path_are_counted_apart(packs, monkeypatch, longest):
    def bits_and_correct(model, batch, share):
        num_masks_B = batch.is_masked_BN.sum(dim=1)
        return torch.where(num_masks_B > longest, torch.inf, 3.0), num_masks_B

    monkeypatch.setattr(evaluation, "row_bits_and_correct", bits_and_correct)
    num_masks_B = batch_of(packs, CONFIG).is_masked_BN.sum(dim=1)
    fits_B = num_masks_B <= longest
    num_rows = int(fits_B.sum())
    assert num_rows < 19 and (num_rows > 0) == (longest == 2)
    result = evaluate(untrained(CONFIG), packs[1], make_masker(CONFIG, SPECIAL), 19, ENGINE)
    assert (result.num_rows, result.num_without_path) == (num_rows, 19 - num_rows)
    assert result.num_masks == result.num_correct == int(num_masks_B[fits_B].sum())
    assert result.bits == 3.0 * num_rows and result.is_finite == (num_rows > 0)


# ---- models ----


@pytest.mark.parametrize(
    ("objective", "model", "strategy"),
    [
        ("repeated-mlm", {}, "fixed_count"),
        ("exlm", {}, "fixed_count"),
        ("exlm", {"boundary": "paper", "states_per_mask": 3}, "fixed_count"),
        ("exlm", {}, "bernoulli"),
    ],
)
def test_no_batch_is_longer_than_the_longest_row(packs, objective, model, strategy):
    config = changed(CONFIG, objective, masking={"strategy": strategy}, model=model)
    masker, model = make_masker(config, SPECIAL), untrained(config)
    lengths, bound = [], longest_row(config, 11)
    model.encoder.register_forward_hook(
        lambda module, inputs, hidden_BTD: lengths.append(hidden_BTD.shape[1])
    )
    token_ids_BN = packs[0].gather(range(37))
    for step in range(5):
        model.answer(masker(token_ids_BN, np.full(37, step), np.arange(37), step)).scored()
    assert max(lengths) <= bound
    assert max(lengths) == bound or strategy == "bernoulli"


@pytest.mark.parametrize("objective", ["mlm", "repeated-mlm", "exlm"])
def test_a_trained_model_comes_back(packs, tmp_path, objective):
    config = changed(CONFIG, objective)
    trainer = make_trainer(config, packs, tmp_path)
    trainer.run()
    model, stored = load_model(latest_checkpoint(tmp_path / "checkpoints", print))
    learned = {"block_length": int(packs[0].lengths_R.max()), "vocab_size": packs[0].vocab_size}
    assert stored == replace(config, data=replace(config.data, **learned))
    assert type(model) is (ExLM if objective == "exlm" else MaskedLM)
    assert not model.training
    ours, theirs = model.state_dict(), trainer.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_with_a_part_that_the_package_does_not_make_is_refused(packs, tmp_path):
    make_trainer(CONFIG, packs, tmp_path).run()
    checkpoint = latest_checkpoint(tmp_path / "checkpoints", print)
    checkpoint.tensors["model"]["transition.own"] = torch.zeros(3)
    told(lambda: load_model(checkpoint), "transition.own is (3,), not None", "custom parts")


def test_a_validation_without_masks_is_refused(packs, tmp_path):
    masking = {"strategy": "bernoulli", "mask_ratio": 1e-9}
    trainer = make_trainer(changed(CONFIG, masking=masking), packs, tmp_path)
    told(trainer.run, "held-out rows has a masked token", "masking.mask_ratio")
