"""The released layout computes what ours computes: loss and every gradient, in float64.

Shapes: B rows, N input tokens, T expanded tokens, M targets.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from exlm_lab.benchmarks.record import Shape
from exlm_lab.benchmarks.released import ReleasedLayout
from exlm_lab.benchmarks.step import made_batch, model_of, whole_step
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM

SHAPE = Shape(3, 5, 15)
SIZES = {"num_layers": 2, "width": 16, "num_heads": 2}


def tiny(**settings) -> ExLM:
    config = dataclasses.replace(model_of(SHAPE), **SIZES)
    torch.manual_seed(0)
    model = ExLM(ModelConfig(**{**vars(config), **settings, "init_std": 0.3}), 50)
    return model.double().eval()


def uneven_batch() -> MaskedBatch:
    """Rows that end up unequally long: fewer masks in one, padding in another."""
    batch = made_batch(SHAPE, 50)
    token_ids_BN, is_masked_BN = batch.token_ids_BN.clone(), batch.is_masked_BN.clone()
    special = SpecialIds()
    is_masked_BN[1, int(is_masked_BN[1].nonzero()[0])] = False
    token_ids_BN[2, -3], token_ids_BN[2, -2:] = special.eos, special.pad
    is_masked_BN[2, -3:] = False
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, special.mask)
    return MaskedBatch(masked_ids_BN, is_masked_BN, token_ids_BN)


@pytest.mark.parametrize("sparse", [False, True])
def test_loss_and_gradients_are_those_of_our_layout(sparse):
    model, batch = tiny(sparse=sparse), uneven_batch()
    loss = whole_step(model, batch)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    released = ReleasedLayout(model)
    torch.testing.assert_close(whole_step(released, batch), loss, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-9, atol=1e-13, msg=name
        )
    assert loss.dtype == torch.float64


def test_the_work_is_done_for_every_expanded_position(monkeypatch):
    model, batch = tiny(), uneven_batch()
    shapes = []
    logits = model.head.logits

    def noted(hidden_BTD, weight_VD):
        shapes.append(hidden_BTD.shape)
        return logits(hidden_BTD, weight_VD)

    monkeypatch.setattr(model.head, "logits", noted)
    scores = ReleasedLayout(model)(*batch)
    B, T, _ = shape = model.encode(*batch)[0].shape
    assert shapes == [shape] and scores.log_transition_BLL.shape == (B, T, T)
    assert model(*batch).log_emission_BML.shape[2] < T == scores.log_emission_BML.shape[2]


@pytest.mark.parametrize(
    "settings",
    [
        {"boundary": "paper"}, {"transition": "paper"}, {"rope": "1d"},
        {"clone_embedding_std": 0.1}, {"use_position": False}, {"expand_at": 1},
    ],
)  # fmt: skip
def test_other_choices_than_the_released_ones_are_refused(settings):
    with pytest.raises(ValueError, match="released layout"):
        ReleasedLayout(tiny(**settings))
