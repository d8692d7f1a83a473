"""Objectives: by hand, against MLM where ExLM reduces to it, and as probabilities that add up.

Shapes: B rows, N tokens, M targets, L states, S masked tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import groupby, product

import pytest
import torch
from torch import Tensor

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import (
    StateScores,
    log_likelihood,
    mlm_loss,
    nats_to_bits,
    states_alignment_loss,
)

PAD, BOS, EOS, UNK, SEP, MASK = SpecialIds()
V = 8
SMALL = {
    "num_layers": 1, "width": 16, "ffn_width": 24, "num_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "max_positions": 32, "init_std": 0.5,
}  # fmt: skip
LEARNED = ("gated", "paper")


def make_model(seed: int = 0, **changes) -> ExLM:
    torch.manual_seed(seed)
    return ExLM(ModelConfig(**{**SMALL, **changes}), V).double().eval()


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three rows with 2, 1 and 3 masks: masked ids, which are masked, tokens."""
    token_ids_BN = torch.tensor(
        [[BOS, 6, 7, 6, EOS, PAD], [BOS, 7, 6, EOS, PAD, PAD], [BOS, 6, 7, 7, 6, EOS]]
    )
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, [1, 3]] = True
    is_masked_BN[1, 2] = True
    is_masked_BN[2, [1, 2, 4]] = True
    return token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# ---- masked language modelling ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mlm_loss_is_the_mean_of_minus_log_probability(dtype):
    rng = torch.Generator().manual_seed(0)
    logits_SV = torch.randn(5, V, generator=rng, dtype=torch.float64).to(dtype)
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


def test_a_bit_is_log_two_nats():
    assert_same(nats_to_bits(torch.tensor([math.log(2), math.log(8)])), torch.tensor([1.0, 3]))


# ---- the alignment loss ----


def nats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_the_loss_by_hand():
    log_likelihood_B, num_scored_B = nats(-6.0, -4.0), torch.tensor([3, 1])
    loss = states_alignment_loss(log_likelihood_B, num_scored_B)
    assert loss.item() == 3.0  # 6 / 3 and 4 / 1, then their mean
    loss.backward()
    assert_same(log_likelihood_B.grad, -1 / (2 * num_scored_B.double()))


def test_rows_without_a_path_are_named():
    with pytest.raises(ValueError, match=r"row\(s\) \[1, 3\]"):
        states_alignment_loss(
            nats(-1.0, -math.inf, -2.0, -math.inf), torch.tensor([1, 1, 1, 1])
        )


def test_rows_without_a_path_can_be_left_out():
    log_likelihood_B = nats(-6.0, -math.inf, -4.0)
    loss = states_alignment_loss(log_likelihood_B, torch.tensor([3, 7, 1]), "skip")
    assert loss.item() == 3.0
    loss.backward()
    assert log_likelihood_B.grad[1] == 0 and (log_likelihood_B.grad[[0, 2]] < 0).all()
    nothing = states_alignment_loss(nats(-math.inf), torch.tensor([2]), "skip")
    assert nothing.item() == 0


@pytest.mark.parametrize("on_no_path", ["raise", "skip"])
def test_nan_is_not_hidden(on_no_path):
    loss = states_alignment_loss(
        nats(-1.0, math.nan), torch.tensor([1, 1]), on_no_path=on_no_path
    )
    assert loss.isnan()


def test_a_row_without_masks_costs_nothing_where_boundaries_are_not_scored():
    token_ids_BN = torch.tensor([[BOS, 6, 7, EOS]])
    model = make_model(boundary="paper")
    scores = model(token_ids_BN, torch.zeros_like(token_ids_BN, dtype=torch.bool), token_ids_BN)
    assert not scores.is_scored_BM.any()
    loss = states_alignment_loss(log_likelihood(scores), scores.is_scored_BM.sum(1))
    assert abs(loss.item()) < 1e-12
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


# ---- one state per mask: ExLM is MLM ----


def keep_token_logits(model: ExLM, monkeypatch) -> list[Tensor]:
    """Let the head build all logits the plain way and keep them, with their gradient."""
    kept = []

    def log_emission(state_BLD: Tensor, embedding_VD: Tensor, target_ids_BM: Tensor) -> Tensor:
        logits_BLV = model.head.logits(state_BLD, embedding_VD)
        logits_BLV.retain_grad()
        kept.append(logits_BLV)
        index_BLM = target_ids_BM.unsqueeze(1).expand(-1, logits_BLV.shape[1], -1)
        return logits_BLV.log_softmax(-1).gather(2, index_BLM).transpose(1, 2)

    monkeypatch.setattr(model.head, "log_emission", log_emission)
    return kept


def twin(model: ExLM) -> MaskedLM:
    """A masked language model with the same weights."""
    masked_lm = MaskedLM(model.config, V).double().eval()
    own = masked_lm.state_dict()
    masked_lm.load_state_dict({n: t for n, t in model.state_dict().items() if n in own})
    return masked_lm


@pytest.mark.parametrize(
    ("transition", "boundary"),
    [("gated", "official"), ("gated", "paper"), ("paper", "paper")],
)
def test_with_one_state_the_gradient_on_token_logits_is_that_of_mlm(
    transition, boundary, monkeypatch
):
    # In 1D, with one state, the expanded row is the row: both models see the same input.
    model = make_model(states_per_mask=1, transition=transition, boundary=boundary, rope="1d")
    masked_ids_BN, is_masked_BN, token_ids_BN = make_batch()
    kept = keep_token_logits(model, monkeypatch)
    scores = model(masked_ids_BN, is_masked_BN, token_ids_BN)
    num_scored_B = scores.is_scored_BM.sum(1)
    states_alignment_loss(log_likelihood(scores), num_scored_B).backward()
    # State i is target i, and those that are no boundary stand for the masks, in order.
    is_mask_BL = ~scores.graph.is_boundary_BM & scores.graph.is_state_BL
    logits_SV, ours_SV = kept[0][is_mask_BL], kept[0].grad[is_mask_BL]

    token_logits_SV = twin(model)(masked_ids_BN, is_masked_BN)
    token_logits_SV.retain_grad()
    mlm_loss(token_logits_SV, token_ids_BN[is_masked_BN]).backward()
    assert_same(logits_SV, token_logits_SV)
    # Each token's weight: 1 / S for MLM, here 1 / (rows * targets of its row).
    row_S = is_masked_BN.nonzero()[:, 0]
    weight_S = 1 / (3 * num_scored_B[row_S].double())
    factor_S1 = (weight_S * len(row_S)).unsqueeze(1)
    # mlm_loss may work in float32.
    assert_same(ours_SV, token_logits_SV.grad * factor_S1, 1e-7)
    assert ours_SV.abs().max() > 1e-3


def test_without_transitions_to_learn_one_state_is_mlm_in_everything():
    model = make_model(states_per_mask=1, transition="uniform", boundary="paper", rope="1d")
    masked_ids_BN, is_masked_BN, token_ids_BN = make_batch()
    scores = model(masked_ids_BN, is_masked_BN, token_ids_BN)
    loss = -log_likelihood(scores).sum() / scores.is_scored_BM.sum()
    loss.backward()
    masked_lm = twin(model)
    expected = mlm_loss(masked_lm(masked_ids_BN, is_masked_BN), token_ids_BN[is_masked_BN])
    expected.backward()
    assert abs(loss - expected) < 1e-6
    ours = dict(model.named_parameters())
    for name, parameter in masked_lm.named_parameters():
        assert_same(ours[name].grad, parameter.grad, 1e-5)


# ---- probabilities ----


def every_combination(*row: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row, [BOS] [MASK] 7 [MASK] [EOS] by default, with all tokens behind its masks."""
    row_N = torch.tensor(row or (BOS, MASK, 7, MASK, EOS))
    is_masked_N = row_N == MASK
    combinations = torch.tensor(list(product(range(V), repeat=int(is_masked_N.sum()))))
    token_ids_BN = row_N.repeat(len(combinations), 1)
    is_masked_BN = is_masked_N.expand_as(token_ids_BN)
    token_ids_BN[:, is_masked_N] = combinations
    return token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN


def likelihood_by_hand(scores: StateScores, b: int, is_counted_M: Tensor) -> float:
    """Sum over paths of row b by powers of a matrix, with the counted emissions alone."""
    probability_LL = scores.log_transition_BLL[b].exp()
    emission_ML = torch.where(is_counted_M.unsqueeze(1), scores.log_emission_BML[b].exp(), 1.0)
    reach_L = torch.zeros_like(emission_ML[0])
    reach_L[0] = emission_ML[0, 0]
    for emission_L in emission_ML[1 : int(scores.graph.num_targets_B[b])]:
        reach_L = (reach_L @ probability_LL) * emission_L
    return reach_L[int(scores.graph.num_states_B[b]) - 1].item()


@pytest.mark.parametrize("with_boundaries", [True, False])
@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize("transition", [*LEARNED, "uniform", "spans", "chains"])
def test_likelihood_equals_powers_of_the_transition_matrix(
    transition, boundary, with_boundaries
):
    model = make_model(states_per_mask=3, transition=transition, boundary=boundary)
    scores = model(*make_batch())
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


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize(
    ("transition", "chain_share"),
    [("uniform", 0.0), ("gated", 1.0), ("spans", 0.0), ("spans", 0.5), ("chains", 0.0)],
)
def test_without_edges_that_skip_a_mask_the_joint_is_a_distribution(
    transition, chain_share, boundary
):
    model = make_model(states_per_mask=3, transition=transition, boundary=boundary)
    batch = every_combination(BOS, MASK, MASK, 7, MASK, EOS)
    log_joint_B = log_likelihood(model(*batch, chain_share=chain_share), with_boundaries=False)
    assert abs(log_joint_B.exp().sum() - 1) < 1e-12


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize("transition", ["spans", "chains"])
def test_spans_are_independent_of_each_other_and_masks_in_a_span_are_not(transition, boundary):
    model = make_model(states_per_mask=3, transition=transition, boundary=boundary)
    batch = every_combination(BOS, MASK, MASK, 7, MASK, EOS)
    log_joint_B = log_likelihood(model(*batch), with_boundaries=False)
    joint_VVV = log_joint_B.exp().reshape(V, V, V)
    span_VV, single_V = joint_VVV.sum(2), joint_VVV.sum((0, 1))
    assert_same(joint_VVV, span_VV[:, :, None] * single_V)
    assert (span_VV - span_VV.sum(1, keepdim=True) * span_VV.sum(0)).abs().max() > 1e-4


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize(("k", "sparse"), [(1, False), (3, True)])
def test_with_transitions_probability_leaks_to_other_lengths(k, boundary, sparse):
    """The joint sums to the probability of a path of the right length that ends at the end.

    Transitions do not depend on the number of targets: a walk from the start may skip masks,
    visit one twice or stop at an earlier copy of [EOS]. Such walks spell nothing, so the sum
    over all targets is the share of the others, which is below one.
    """
    model = make_model(states_per_mask=k, boundary=boundary, sparse=sparse)
    scores = model(*every_combination())
    total = log_likelihood(scores, with_boundaries=False).exp().sum()
    walk_LL = torch.linalg.matrix_power(scores.log_transition_BLL[0].exp(), 3)
    assert abs(total - walk_LL[0, -1]) < 1e-12
    assert 0 < total < 1 - 1e-4
    # Scoring the boundaries as well takes away more, where they are scored.
    scored = log_likelihood(scores).exp().sum()
    assert scored < total if boundary == "official" else abs(scored - total) < 1e-12


def spells(labels: tuple[int, ...]) -> list[int]:
    """CTC's reading of labels: merge neighbours, then drop blanks; [UNK] is nothing but blanks."""
    return [label for label, _ in groupby(labels) if label != UNK] or [UNK]


@pytest.mark.parametrize("boundary", ["official", "paper"])
@pytest.mark.parametrize("k", [1, 3])
def test_ctc_equals_the_sum_over_labelings_of_each_mask(k, boundary):
    model = make_model(states_per_mask=k, transition="ctc", boundary=boundary)
    batch = every_combination()
    scores = model(*batch)
    ours_B = log_likelihood(scores, with_boundaries=False)
    hidden_BTD, graph = model.encode(*(t[:1] for t in batch))
    states_BLD = model.states(hidden_BTD, graph)
    probability_LV = model.token_logits(states_BLD)[0].softmax(-1)
    mask_V = []  # of each mask: probability that its states spell each token
    for target in (1, 2):
        own_kV = probability_LV[graph.owner_BL[0] == target]
        spelled_V = torch.zeros(V, dtype=torch.float64)
        for labels in product(range(V), repeat=k):
            if len(spells(labels)) == 1:
                spelled_V[spells(labels)[0]] += math.prod(
                    own_kV[place, label].item() for place, label in enumerate(labels)
                )
        mask_V.append(spelled_V)
    expected_B = torch.outer(*mask_V).flatten()
    assert_same(ours_B.exp(), expected_B)
    # Labelings that spell several tokens are lost; one state spells one.
    assert ours_B.exp().sum() < 1 if k > 1 else abs(ours_B.exp().sum() - 1) < 1e-12


@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_ctc_scores_official_boundaries_like_masks(boundary):
    model = make_model(states_per_mask=2, transition="ctc", boundary=boundary)
    scores = model(*make_batch())
    difference_B = log_likelihood(scores) - log_likelihood(scores, with_boundaries=False)
    if boundary == "paper":
        assert not difference_B.any()
    else:
        assert (difference_B < 0).all()


@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_ctc_of_a_row_does_not_depend_on_longer_ones_beside_it(boundary):
    model = make_model(states_per_mask=2, transition="ctc", boundary=boundary)
    batch = make_batch()
    alone = [log_likelihood(model(*(t[row : row + 1] for t in batch))) for row in range(3)]
    assert_same(log_likelihood(model(*batch)), torch.cat(alone))


def test_backends_agree_on_a_model():
    scores = make_model(states_per_mask=2)(*make_batch())
    expected_B = log_likelihood(scores, backend="enumerate")
    for backend in ("naive", "vectorized", "auto"):
        assert_same(log_likelihood(scores, backend=backend), expected_B)
