"""Objectives against results by hand, against MLM with one state, and as probabilities.

Shapes: B rows, N tokens, M targets, L states, S masked tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import groupby, product

import pytest
import small_models
import torch
from small_models import BOS, EOS, MASK, UNK, assert_same, loss_of, masked_rows
from torch import Tensor, nn

from exlm_mini.alignment.ctc import run_log_likelihood
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import StateScores, log_likelihood
from exlm_mini.model.objectives import mlm_loss, states_alignment_loss

V = 8
BATCH = masked_rows([BOS, -6, 7, -6, EOS], [BOS, 7, -6, EOS], [BOS, -6, -7, 7, -6, EOS])
BOUNDARIES = pytest.mark.parametrize("boundary", ["official", "paper"])


def make_model(**changes) -> nn.Module:
    return small_models.make_model(num_layers=1, vocab_size=V, std=0.5, **changes).eval()


# ---- masked language modelling ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mlm_loss_is_the_mean_of_minus_log_probability(dtype):
    logits_SV = small_models.drawn(5, V, dtype=dtype)
    target_ids_S = torch.tensor([0, 7, 3, 3, 1])
    probability_SV = logits_SV.double().exp()
    probability_SV = probability_SV / probability_SV.sum(1, keepdim=True)
    by_hand = -sum(probability_SV[s, y].log() for s, y in enumerate(target_ids_S.tolist())) / 5
    ours = mlm_loss(logits_SV, target_ids_S)
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    assert abs(ours - by_hand) < (1e-12 if dtype == torch.float64 else 1e-6)


def test_mlm_loss_of_no_masks_is_zero_with_zero_gradient():
    logits_SV = torch.zeros(0, V, requires_grad=True)
    loss = mlm_loss(logits_SV * 2, torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0
    loss.backward()
    assert logits_SV.grad.shape == (0, V)


# ---- the alignment loss ----


def nats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_the_loss_by_hand_with_rows_without_a_path_left_out():
    log_likelihood_B, num_scored_B = nats(-6.0, -math.inf, -4.0), torch.tensor([3, 7, 1])
    loss = states_alignment_loss(log_likelihood_B, num_scored_B)
    assert loss.item() == 3.0  # the mean of 6 / 3 and 4 / 1
    loss.backward()
    assert_same(log_likelihood_B.grad, torch.tensor([-1 / 6, 0.0, -1 / 2]).double(), 1e-7)
    whole = log_likelihood_B.detach()[[0, 2]]
    assert states_alignment_loss(whole, num_scored_B[[0, 2]]).item() == 3.0
    assert states_alignment_loss(nats(-math.inf), torch.tensor([2])).item() == 0


def test_nan_is_not_hidden():
    assert states_alignment_loss(nats(-1.0, math.nan), torch.ones(2)).isnan()


# ---- one state per mask: ExLM is MLM ----


def twin(model: ExLM) -> MaskedLM:
    """A masked language model with the same weights."""
    masked_lm = MaskedLM(model.config, V).double().eval()
    own = masked_lm.state_dict()
    masked_lm.load_state_dict({n: t for n, t in model.state_dict().items() if n in own})
    return masked_lm


@pytest.mark.parametrize(
    ("transition", "boundary"),
    [("gated", "official"), ("gated", "paper"), ("paper", "paper"), ("uniform", "paper")],
)
def test_with_one_state_the_gradient_on_token_logits_is_that_of_mlm(transition, boundary):
    """The head's gradient is the same too, since the loss reaches it only through the logits. If no
    transitions are learned, the loss and all other gradients are the same as well."""
    # With one state and 1D positions, expansion changes nothing: both models see the same input.
    model = make_model(states_per_mask=1, transition=transition, boundary=boundary, rope="1d")
    log_likelihood_B = log_likelihood(model(*BATCH), with_boundaries=False)
    loss = -log_likelihood_B.sum() / BATCH.is_masked_BN.sum()
    loss.backward()
    masked_lm = twin(model)
    expected = loss_of(masked_lm, BATCH)
    expected.backward()
    is_mlm = transition == "uniform"
    assert not is_mlm or abs(loss - expected) < 1e-12
    ours = dict(model.named_parameters())
    for name, parameter in masked_lm.named_parameters():
        assert parameter.grad.any()
        if is_mlm or name.startswith("head."):
            assert_same(ours[name].grad, parameter.grad, 1e-11)


# ---- probabilities ----


def every_combination(*row: int) -> MaskedBatch:
    """A batch of copies of a row, with every combination of tokens behind its masks."""
    places = [n for n, token in enumerate(row) if token == MASK]
    token_ids_BN = torch.tensor(row).repeat(V ** len(places), 1)
    token_ids_BN[:, places] = torch.tensor(list(product(range(V), repeat=len(places))))
    masked_ids_BN = torch.tensor(row).expand_as(token_ids_BN)
    return MaskedBatch(masked_ids_BN, masked_ids_BN == MASK, token_ids_BN)


TWO_MASKS = every_combination(BOS, MASK, 7, MASK, EOS)
TWO_SPANS = every_combination(BOS, MASK, MASK, 7, MASK, EOS)


def likelihood_by_hand(scores: StateScores, b: int, is_counted_M: Tensor) -> float:
    """Sum over the paths of row b by matrix products, with only the counted emissions."""
    probability_LL = scores.log_transition_BLL[b].exp()
    emission_ML = torch.where(is_counted_M.unsqueeze(1), scores.log_emission_BML[b].exp(), 1.0)
    reach_L = torch.zeros_like(emission_ML[0])
    reach_L[0] = emission_ML[0, 0]
    for emission_L in emission_ML[1 : int(scores.graph.num_targets_B[b])]:
        reach_L = (reach_L @ probability_LL) * emission_L
    return reach_L[int(scores.graph.num_states_B[b]) - 1].item()


@pytest.mark.parametrize("with_boundaries", [True, False])
@BOUNDARIES
@pytest.mark.parametrize("transition", ["gated", "paper", "uniform", "spans", "chains"])
def test_likelihood_equals_powers_of_the_transition_matrix(
    transition, boundary, with_boundaries
):
    model = make_model(states_per_mask=3, transition=transition, boundary=boundary)
    scores = model(*BATCH)
    ours_B = log_likelihood(scores, with_boundaries)
    for b in range(3):
        is_counted_M = ~scores.graph.is_boundary_BM[b]
        if with_boundaries and boundary == "official":
            is_counted_M = torch.ones_like(is_counted_M)
        expected = likelihood_by_hand(scores, b, is_counted_M)
        assert abs(ours_B[b].exp() - expected) < 1e-12
        assert expected > 0
    # The paper's boundaries are never scored, so leaving them out changes nothing.
    if boundary == "paper":
        assert torch.equal(ours_B, log_likelihood(scores, not with_boundaries))
    assert_same(log_likelihood(scores, with_boundaries, backend="naive"), ours_B)


@BOUNDARIES
@pytest.mark.parametrize(
    ("transition", "chain_share"),
    [("uniform", 0.0), ("gated", 1.0), ("spans", 0.0), ("spans", 0.5), ("chains", 0.0)],
)
def test_without_edges_that_skip_a_mask_the_joint_is_a_distribution(
    transition, chain_share, boundary
):
    model = make_model(states_per_mask=3, transition=transition, boundary=boundary)
    scores = model(*TWO_SPANS, chain_share=chain_share)
    joint_VVV = log_likelihood(scores, with_boundaries=False).exp().reshape(V, V, V)
    assert abs(joint_VVV.sum() - 1) < 1e-12
    if transition == "uniform" or chain_share:
        return
    # Spans are independent of each other, but the masks of a span are not.
    span_VV, single_V = joint_VVV.sum(2), joint_VVV.sum((0, 1))
    assert_same(joint_VVV, span_VV[:, :, None] * single_V)
    assert (span_VV - span_VV.sum(1, keepdim=True) * span_VV.sum(0)).abs().max() > 1e-4


def spells(labels: tuple[int, ...]) -> list[int]:
    """What labels spell in CTC: merge equal neighbours, then drop blanks; [UNK] if none remain."""
    return [label for label, _ in groupby(labels) if label != UNK] or [UNK]


@BOUNDARIES
@pytest.mark.parametrize("k", [1, 3])
def test_ctc_equals_the_sum_over_labelings_of_each_target(k, boundary):
    model = make_model(states_per_mask=k, transition="ctc", boundary=boundary)
    scores = model(*TWO_MASKS)
    hidden_BTD, graph = model.encode(*(t[:1] for t in TWO_MASKS))
    probability_LV = model.token_logits(model.states(hidden_BTD, graph))[0].softmax(-1)
    spelled_V = torch.zeros(4, V, dtype=torch.float64)  # P(a target's states spell a token)
    for i in range(4):
        own_UV = probability_LV[graph.owner_BL[0] == i]
        for labels in product(range(V), repeat=len(own_UV)):
            if len(spells(labels)) == 1:
                spelled_V[i, spells(labels)[0]] += math.prod(
                    own_V[label].item() for own_V, label in zip(own_UV, labels, strict=True)
                )
    joint_B = torch.outer(spelled_V[1], spelled_V[2]).flatten()
    assert_same(log_likelihood(scores, with_boundaries=False).exp(), joint_B)
    # Labelings that spell several tokens do not count, but a single state always spells one.
    assert joint_B.sum() < 1 if k > 1 else abs(joint_B.sum() - 1) < 1e-12
    ends = spelled_V[0, BOS] * spelled_V[3, EOS] if boundary == "official" else 1.0
    assert_same(log_likelihood(scores).exp(), joint_B * ends)


def test_ctc_stands_huge_scores():
    log_target_BMk, log_blank_BMk = (
        torch.tensor([[row]]) for row in ([-1e4, -1.0, -1e4], [-2.0, -1e4, -3.0])
    )
    assert (
        run_log_likelihood(log_target_BMk, log_blank_BMk, torch.zeros(1, 1) > 0).item() == -6.0
    )
