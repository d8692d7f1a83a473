"""The models: every combination trains, and rows of a batch do not affect each other.

Shapes: B rows, N tokens, T expanded tokens, S masked tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from small_models import (
    BOS,
    EOS,
    PAD,
    SEP,
    SMALL,
    V,
    alone,
    assert_same,
    loss_of,
    make_model,
    masked_rows,
)

from exlm_mini.config import ModelConfig
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import log_likelihood
from exlm_mini.model.exlm import token_states
from exlm_mini.model.expansion import expand_masks, gather_states

EVERY_KIND = [
    {"transition": "gated", "boundary": "official"},
    {"transition": "gated", "boundary": "paper", "sparse": True, "use_position": False},
    {"transition": "paper", "boundary": "official", "sparse": True, "rope": "1d"},
    {"transition": "paper", "boundary": "paper", "states_per_mask": 1},
    {"transition": "ctc", "boundary": "official", "clone_embedding_std": 0.3},
    {"transition": "ctc", "boundary": "paper"},
    {"transition": "uniform", "boundary": "official", "states_per_mask": 1},
    {"transition": "uniform", "boundary": "paper", "expand_at": 1},
    {"transition": "gated", "boundary": "paper", "expand_at": 1, "clone_embedding_std": 0.3},
    {"transition": "spans", "boundary": "official", "expand_at": 1},
    {"transition": "spans", "boundary": "paper", "use_position": False},
    {"transition": "chains", "boundary": "official"},
]
TRAINED_ONLY = [
    {"kind": MaskedLM},
    {"emission": "chunked", "emission_chunk": 7},
    {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
]
BATCH = masked_rows(
    [BOS, -6, 7, -8, EOS],
    [BOS, 9, -10, EOS],
    [BOS, 6, 11, 12, EOS],
    [BOS, -13, -14, 15, SEP, -16, EOS],
)


@pytest.mark.parametrize("changes", [*EVERY_KIND, *TRAINED_ONLY])
def test_every_kind_of_model_gives_finite_loss_and_gradients(changes):
    model = make_model(**changes)
    assert not list(model.buffers())  # checkpoints hold parameters alone
    loss = loss_of(model, BATCH)
    loss.backward()
    assert loss.isfinite() and loss > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # A key bias shifts all scores of a state equally, so its gradient is rounding noise.
        assert name == "transition.key.bias" or parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("changes", EVERY_KIND)
def test_a_rows_likelihood_does_not_depend_on_its_batch_mates(changes):
    model = make_model(**changes).eval()
    for with_boundaries in (True, False):
        ours_B = log_likelihood(model(*BATCH), with_boundaries)
        rows = [log_likelihood(model(*alone(BATCH, b)), with_boundaries) for b in range(4)]
        assert_same(ours_B, torch.cat(rows), 1e-10)


@pytest.mark.parametrize("expand_at", [0, 1])
def test_the_clone_embedding_reaches_states_and_layers_above_a_late_expansion(expand_at):
    """It is added to clones alone, and to no layer unless the expansion is late."""
    model = make_model(clone_embedding_std=0.3, expand_at=expand_at, boundary="paper").eval()
    seen = []
    model.encoder.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    hidden_BTD, graph = model.encode(*BATCH)
    state_BLD = gather_states(hidden_BTD, graph) + model.clone.weight[graph.clone_BL]
    assert torch.equal(model.states(hidden_BTD, graph), state_BLD)
    weight = model.clone.weight.detach().clone()
    with torch.no_grad():
        model.clone.weight.zero_()
    model.encode(*BATCH)
    added_BTD = seen[0] - seen[1]
    is_clone_BT = added_BTD.abs().sum(2) > 0
    is_above_BL = (graph.clone_BL > 0) & (expand_at > 0)
    expected_BT = torch.zeros_like(is_clone_BT).scatter(1, graph.place_BL, is_above_BL)
    assert torch.equal(is_clone_BT, expected_BT) and expected_BT.any() == (expand_at > 0)
    own_BLD = weight[graph.clone_BL] * is_above_BL.unsqueeze(2)
    assert_same(gather_states(added_BTD, graph), own_BLD)


SHORT_WITH_MASKS = masked_rows([BOS, -6, -7, -8, EOS], [BOS, *[9] * 8, EOS])
"""The first row is the longest once expanded, so its padding would come after the last place."""


@pytest.mark.parametrize("batch", [BATCH, SHORT_WITH_MASKS])
@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_a_token_has_the_state_of_its_first_clone(boundary, batch):
    model, ids_BN = make_model(boundary=boundary).eval(), batch.masked_ids_BN
    kind = (model.config.states_per_mask, boundary, model.special_ids)
    expanded, _ = expand_masks(ids_BN, ids_BN == model.special_ids.mask, ids_BN, *kind)
    hidden_BTD = model.encoder(*expanded)
    is_first_BT = (expanded.clone_BT <= 1) & expanded.is_real_BT
    state_BND = token_states(model, ids_BN)
    assert_same(state_BND[ids_BN != PAD], hidden_BTD[is_first_BT])


def test_a_token_has_the_state_of_its_first_copy():
    repeated = make_model(MaskedLM).eval()
    row_1N = BATCH.masked_ids_BN[1:2, :4]
    copies_1TD = repeated.encode(row_1N.repeat_interleave(3, dim=1))
    assert_same(token_states(repeated, row_1N, 3), copies_1TD[:, ::3])


def test_the_tokens_behind_the_masks_reach_the_model_as_targets_alone():
    model = make_model(states_per_mask=2).eval()
    other = BATCH._replace(token_ids_BN=BATCH.token_ids_BN.masked_fill(BATCH.is_masked_BN, 17))
    assert torch.equal(model.encode(*other)[0], model.encode(*BATCH)[0])
    ours, theirs = model(*BATCH), model(*other)
    assert torch.equal(ours.log_transition_BLL, theirs.log_transition_BLL)
    assert not torch.equal(ours.log_emission_BML, theirs.log_emission_BML)


# ---- the encoder by itself ----


@pytest.mark.parametrize("expand_at", [0, 1])
def test_with_the_papers_boundary_the_encoder_is_that_of_a_masked_language_model(expand_at):
    model = make_model(boundary="paper", expand_at=expand_at).eval()
    masked_lm = make_model(MaskedLM, seed=1).eval()
    masked_lm.encoder.load_state_dict(model.encoder.state_dict())
    _, is_masked_BN, token_ids_BN = BATCH
    hidden_BTD, _ = model.encode(token_ids_BN, torch.zeros_like(is_masked_BN), token_ids_BN)
    is_real_BN = token_ids_BN != PAD
    assert torch.equal(hidden_BTD[is_real_BN], masked_lm.encode(token_ids_BN)[is_real_BN])


def test_too_long_rows_are_refused():
    row = masked_rows([BOS, *[-6] * 7, *[6] * 11, EOS])
    # 20 tokens with 7 masks and 2 boundaries of 3 states each: 20 + 9 * 2 = 38
    for kind, length in ((ExLM, 38), (MaskedLM, 20)):
        loss_of(make_model(kind, states_per_mask=3, max_positions=length), row)
        with pytest.raises(ValueError, match=f"{length} tokens .* {length - 1}"):
            loss_of(make_model(kind, states_per_mask=3, max_positions=length - 1), row)


# ---- chains at the start of training ----


def test_while_the_chains_stand_transitions_learn_and_nothing_else_heeds_them():
    grads = []
    for factor in (1.0, 2.0):
        model = make_model()
        with torch.no_grad():
            for parameter in model.transition.parameters():
                parameter.mul_(factor)
        loss_of(model, BATCH, chain_share=1.0).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]) != name.startswith("transition."), name


# ---- low precision, and training ----


@pytest.mark.parametrize("transition", ["gated", "paper", "ctc", "uniform", "spans", "chains"])
def test_bfloat16_autocast_scores_in_float32(transition):
    torch.manual_seed(0)
    model = ExLM(ModelConfig(**SMALL, transition=transition), V)
    exact = loss_of(model, BATCH)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(*BATCH)
        loss = loss_of(model, BATCH)
    for score in (scores.log_emission_BML, scores.log_transition_BLL, scores.log_blank_BL):
        assert score is None or score.dtype == torch.float32
    if transition != "ctc":  # a bfloat16 softmax sums to one only within 1%
        total_BL = scores.log_transition_BLL.exp().sum(2)
        assert_same(total_BL, (total_BL > 0).float(), 1e-5)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.02 * exact
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
