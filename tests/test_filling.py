"""Filling masks: one pass as for a single row, draws with the model's own probabilities, turns."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from test_prize import MASK, V, make_batch, make_model

import exlm_mini
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.smiles import read_molecule
from exlm_mini.model import ExLM
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.reading.decoding import not_offered, read_masked_lm, read_states
from exlm_mini.reading.filling import fill_at_once, fill_in_turn, measure_fillings
from exlm_mini.reading.pretrained import SHIPPED
from exlm_mini.training.parts import make_masker

MODELS = {
    "mlm": make_model,
    **{
        name: lambda name=name: make_model(ExLM, transition=name, chain_bonus=1.0)
        for name in ("gated", "spans", "chains", "ctc")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_filling_of_a_batch_is_that_of_each_row(name):
    model, batch = MODELS[name](), make_batch()
    filled_ids_BN = fill_at_once(model, batch)
    assert torch.equal(
        filled_ids_BN[~batch.is_masked_BN], batch.masked_ids_BN[~batch.is_masked_BN]
    )
    for b, masked_N in enumerate(batch.masked_ids_BN):
        row_1N = masked_N[masked_N != model.special_ids.pad][None]
        reading = (read_masked_lm if name == "mlm" else read_states)(model, row_1N)
        assert torch.equal(filled_ids_BN[b][batch.is_masked_BN[b]], reading.token_ids_S)


@pytest.mark.parametrize("name", ["mlm", "gated", "spans"])
def test_fillings_are_drawn_with_the_probabilities_of_the_model(name):
    model, batch, num_draws = MODELS[name](), make_batch(), 4000
    part = MaskedBatch(
        *(t[2:, :5].expand(num_draws, -1) for t in batch)
    )  # two masks that touch
    drawn = fill_at_once(model, part, torch.Generator().manual_seed(1))[:, 1:3]
    probability = joint_by_hand(model, part)
    deviation = 0.0
    for tokens, expected in probability.items():
        count = int((drawn == torch.tensor(tokens)).all(dim=1).sum())
        deviation += (count - num_draws * expected) ** 2 / (num_draws * expected)
    # Chi-squared: mean of one per filling, and a few standard deviations of sqrt(2 x fillings).
    assert deviation < len(probability) + 5 * math.sqrt(2 * len(probability))


@torch.no_grad()
def joint_by_hand(model, batch: MaskedBatch) -> dict[tuple[int, ...], float]:
    """Of every filling of two masks: the sum over the paths that reach the end in three steps."""
    one = MaskedBatch(*(t[:1] for t in batch))
    offered = [i for i in range(V) if i not in not_offered(model.special_ids)]

    def tokens_of(logits_V: torch.Tensor) -> torch.Tensor:
        hidden_V = torch.full_like(logits_V, -torch.inf)
        hidden_V[offered] = logits_V[offered]
        return hidden_V.softmax(0)

    if not isinstance(model, ExLM):
        first, second = map(tokens_of, model(one.masked_ids_BN, one.is_masked_BN))
        return {(a, b): float(first[a] * second[b]) for a in offered for b in offered}
    hidden_BTD, graph = model.encode(*one)
    state_BLD = model.states(hidden_BTD, graph)
    edge_LL = model.score(state_BLD, graph).log_transition_BLL[0].exp()
    tokens_LV = [tokens_of(logits_V) for logits_V in model.token_logits(state_BLD)[0]]
    L = len(edge_LL)
    paths = {
        (v, u): float(edge_LL[0, v] * edge_LL[v, u] * edge_LL[u, L - 1])
        for v, u in itertools.combinations(range(1, L - 1), 2)
    }
    total = sum(paths.values())
    return {
        (a, b): sum(p * float(tokens_LV[v][a] * tokens_LV[u][b]) for (v, u), p in paths.items())
        / total
        for a in offered
        for b in offered
    }


@pytest.mark.parametrize("name", ["mlm", "spans"])
def test_in_turn_each_mask_sees_the_tokens_before_it(name):
    model, batch = MODELS[name](), make_batch()
    filled_ids_BN = fill_in_turn(model, batch)
    for b, is_masked_N in enumerate(batch.is_masked_BN):
        known_1N = batch.masked_ids_BN[b : b + 1].clone()
        for place in is_masked_N.nonzero().flatten().tolist():
            one = MaskedBatch(known_1N, known_1N == MASK, known_1N)
            known_1N[0, place] = fill_at_once(model, one)[0, place]
        assert torch.equal(filled_ids_BN[b], known_1N[0])


def test_one_mask_is_filled_alike_at_once_and_in_turn():
    batch = MaskedBatch(*(t[1:2, :4] for t in make_batch()))
    for make in MODELS.values():
        model = make()
        assert torch.equal(fill_at_once(model, batch), fill_in_turn(model, batch))


def test_readable_and_exact_molecules_are_counted(tmp_path):
    trained = exlm_mini.load("molecules")
    data = replace(
        trained.config.data, max_documents=400, max_unknown=1.0,
        tokenizer=str(SHIPPED["molecules"] / "data" / "tokenizer.json"),
    )  # fmt: skip
    corpus = prepare_corpus(data, tmp_path / "data", 1)
    special_ids = trained.tokenizer.special_ids
    masker = make_masker(trained.config, special_ids)
    shares = measure_fillings(trained.model, trained.tokenizer, corpus.validation, masker, 24)
    (batch,) = validation_batches(corpus.validation, masker, 24, 32)
    for name, fill in (("at once", fill_at_once), ("in turn", fill_in_turn)):
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


@pytest.mark.parametrize("name", ["gated", "spans"])
@torch.no_grad()
def test_of_many_paths_the_filling_with_the_largest_joint_is_taken(name):
    model, batch = MODELS[name](), make_batch()
    offered = [i for i in range(V) if i not in not_offered(model.special_ids)]

    def joint(filled_ids_BN: torch.Tensor) -> torch.Tensor:
        scores = model(batch.masked_ids_BN, batch.is_masked_BN, filled_ids_BN)
        return log_likelihood(scores, with_boundaries=False)

    fewer, more = (fill_at_once(model, batch, num_paths=n) for n in (0, 200))
    assert torch.all(joint(more) >= joint(fewer))
    best_B = torch.full((len(more),), -torch.inf, dtype=torch.float64)
    for tokens in itertools.product(offered, repeat=3):
        filled_ids_BN = batch.masked_ids_BN.clone()
        for b, is_masked_N in enumerate(batch.is_masked_BN):
            filled_ids_BN[b, is_masked_N] = torch.tensor(tokens[: int(is_masked_N.sum())])
        best_B = torch.maximum(best_B, joint(filled_ids_BN))
    # Few states: some path's likeliest tokens are the likeliest filling, or close to it.
    assert torch.all(joint(more) > best_B - 0.3) and torch.any(joint(more) > best_B - 1e-9)
