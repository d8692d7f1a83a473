"""Filling masks: all at once, by draws with the model's own probabilities, and in turn."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from linked_models import CONFIGS, OFFERED, V, exlm, log_joints, masked_lm, ragged_batch
from small_models import MASK, alone

import exlm_mini
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.molecules import read_molecule
from exlm_mini.reading import filling
from exlm_mini.reading.decoding import read_row, top_tokens
from exlm_mini.reading.filling import fill_at_once, fill_in_turn, measure_fillings
from exlm_mini.reading.prize import every_other
from exlm_mini.reading.trained import SHIPPED
from exlm_mini.training.parts import make_masker

NAMES = ["mlm", "gated", "spans", "chains", "ctc official"]


def model_of(name: str):
    if name == "mlm":
        return masked_lm()
    # Edges that prefer the next mask make some fillings likely.
    return exlm(replace(CONFIGS[name], chain_bonus=1.0))


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_filling_of_a_batch_is_that_of_each_row(name):
    model, batch = model_of(name), ragged_batch()
    filled_ids_BN = fill_at_once(model, batch)
    assert torch.equal(
        filled_ids_BN[~batch.is_masked_BN], batch.masked_ids_BN[~batch.is_masked_BN]
    )
    for b, filled_N in enumerate(filled_ids_BN):
        reading = read_row(model, alone(batch, b).masked_ids_BN)
        assert torch.equal(filled_N[batch.is_masked_BN[b]], reading.token_ids_S)


@pytest.mark.parametrize("name", ["mlm", "gated", "spans"])
def test_fillings_are_drawn_with_the_probabilities_of_the_model(name):
    model, num_draws = model_of(name), 4000
    row = alone(ragged_batch(), 2)  # two masks that touch
    batch = MaskedBatch(*(part_1N.expand(num_draws, -1) for part_1N in row))
    drawn = fill_at_once(model, batch, torch.Generator().manual_seed(1))[batch.is_masked_BN]
    expected = num_draws * offered_joint(model, row)[OFFERED][:, OFFERED]
    counts = torch.zeros(V, V, dtype=torch.float64).index_put_(
        tuple(drawn.view(-1, 2).T), torch.ones((), dtype=torch.float64), accumulate=True
    )[OFFERED][:, OFFERED]
    assert counts.sum() == num_draws
    # For n fillings chi-squared has mean n and standard deviation sqrt(2 n); allow five of those.
    deviation = ((counts - expected) ** 2 / expected).sum()
    assert deviation < expected.numel() + 5 * math.sqrt(2 * expected.numel())


@torch.no_grad()
def offered_joint(model, row: MaskedBatch) -> torch.Tensor:
    """Joint distribution of two masks, given that states emit only words and that a path fits.

    Changes the bias of the model's head.
    """
    is_offered_V = torch.zeros(V).index_fill(0, torch.tensor(OFFERED), 1.0)
    model.head.bias += is_offered_V.log()
    joint_VV = log_joints(model, row).exp()
    return joint_VV / joint_VV.sum()


@pytest.mark.parametrize("name", ["mlm", "spans"])
def test_in_turn_each_mask_sees_the_tokens_before_it(name):
    model, batch = model_of(name), ragged_batch()
    filled_ids_BN = fill_in_turn(model, batch)
    for b, is_masked_N in enumerate(batch.is_masked_BN):
        known_1N = batch.masked_ids_BN[b : b + 1].clone()
        for place in is_masked_N.nonzero().flatten().tolist():
            one = MaskedBatch(known_1N, known_1N == MASK, known_1N)
            known_1N[0, place] = fill_at_once(model, one)[0, place]
        assert torch.equal(filled_ids_BN[b], known_1N[0])


@pytest.mark.parametrize(("name", "seed", "better"), [("gated", 13, 1), ("spans", 10, 2)])
def test_of_many_paths_the_filling_with_the_largest_joint_is_taken(name, seed, better):
    """In row ``better``, a likelier filling lies along a path other than the likeliest one."""
    model = exlm(replace(CONFIGS[name], chain_bonus=1.0, states_per_mask=3))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.7)
    batch = ragged_batch()
    plain, best = (fill_at_once(model, batch, num_paths=n) for n in (0, 16))
    for b, is_masked_N in enumerate(batch.is_masked_BN):
        log_joint = log_joints(model, alone(batch, b))
        before, mine = (log_joint[tuple(filled[b][is_masked_N])] for filled in (plain, best))
        assert mine > before + 0.05 if b == better else mine >= before
        places = torch.meshgrid(*[torch.tensor(OFFERED)] * log_joint.dim(), indexing="ij")
        # States are few: some path's likeliest tokens are the likeliest filling or close to it.
        assert mine > log_joint[places].max() - 0.3


def test_a_row_without_a_path_is_filled_from_its_own_last_state():
    model, batch = model_of("gated"), ragged_batch()
    model.transition.forward = lambda state_BLD, graph: state_BLD.new_full(
        (*state_BLD.shape[:2], state_BLD.shape[1]), -torch.inf
    )
    filled_ids_BN = fill_at_once(model, batch)
    for b in range(3):
        row = alone(batch, b)
        assert torch.equal(
            filled_ids_BN[b, : row.token_ids_BN.shape[1]], fill_at_once(model, row)[0]
        )
        last_1V = model.answer(row).log_token_BLV[:, -1].detach()
        token_id = top_tokens(last_1V, 1, model.special_ids)[0].item()
        assert set(filled_ids_BN[b][batch.is_masked_BN[b]].tolist()) == {token_id}


def test_two_passes_are_two_and_have_the_chains_of_their_step(monkeypatch):
    shares, fill = [], filling.fill_at_once

    def noted(model, part, generator, chain_share):
        shares.append(chain_share)
        return fill(model, part, generator, chain_share)

    monkeypatch.setattr(filling, "fill_at_once", noted)
    fill_in_turn(exlm(), ragged_batch(), None, 0.5, every_other)
    assert shares == [0.5, 0.5]  # two turns, although one row has three masks


def test_readable_and_exact_molecules_are_counted(tmp_path):
    trained = exlm_mini.load("molecules")
    data = replace(
        trained.config.data, max_documents=400, max_unknown=1.0,
        tokenizer=str(SHIPPED["molecules"] / "checkpoints/step-006000/tokenizer.json"),
    )  # fmt: skip
    corpus = prepare_corpus(data, tmp_path / "data", 1)
    special_ids = trained.tokenizer.special_ids
    masker = make_masker(trained.config, special_ids)
    model = trained.model.train()
    shares = measure_fillings(model, trained.tokenizer, corpus.validation, masker, 24)
    assert model.training
    model.eval()
    (batch,) = validation_batches(corpus.validation, masker, 24, 32)
    for name, fill in (
        ("at once", fill_at_once),
        ("at once, best of 16", partial(fill_at_once, num_paths=16)),
        ("in two passes", partial(fill_in_turn, turns=every_other)),
        ("in turn", fill_in_turn),
    ):
        filled = fill(trained.model, batch)
        texts = [
            re.sub(r"\[(PAD|BOS|EOS)\]", "", "".join(map(trained.tokenizer.token, row)))
            for row in filled.tolist()
        ]
        readable = sum(read_molecule(text) is not None for text in texts)
        exact = sum(map(torch.equal, filled, batch.token_ids_BN))
        assert shares[name] == (readable / len(texts), exact / len(texts))
    assert all(way.exact <= way.readable <= 1 for way in shares.values())
    assert shares["in turn"].exact > 0
