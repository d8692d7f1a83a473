"""What models answer to a ragged batch agrees with validation and with sums over paths.

Shapes: B rows, L states, R masks of all rows, k states of a mask, V vocabulary.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from linked_models import CONFIGS, LINKED, exlm, ragged_batch
from scipy.spatial.distance import jensenshannon
from small_models import SPECIAL

from exlm_lab.experiments.states import (
    entropy_bits,
    fully_masked,
    log_token_alone,
    pairwise_divergence_bits,
)
from exlm_mini.alignment.enumeration import paths
from exlm_mini.training.evaluation import row_bits_and_correct

every = pytest.mark.parametrize("name", CONFIGS)
every_linked = pytest.mark.parametrize("name", LINKED)


@every
def test_joint_probability_is_that_of_validation(name):
    model, batch = exlm(CONFIGS[name]), ragged_batch()
    scores = model.answer(batch).double()
    own_ids_R = batch.token_ids_BN[batch.is_masked_BN]
    other_ids_R = own_ids_R.flip(0)
    other_ids_R[0] = SPECIAL.unk  # which ctc uses as its blank
    for target_ids_R in (own_ids_R, other_ids_R):
        token_ids_BN = batch.token_ids_BN.masked_scatter(batch.is_masked_BN, target_ids_R)
        bits_B, _ = row_bits_and_correct(model, batch._replace(token_ids_BN=token_ids_BN))
        torch.testing.assert_close(scores.log_joint(target_ids_R), -math.log(2) * bits_B)


@every
def test_what_a_mask_says_by_itself_is_a_distribution(name):
    scores = exlm(CONFIGS[name]).answer(ragged_batch()).double()
    p_RV = log_token_alone(scores).exp()
    share_R = scores.log_token_SV.exp().sum(dim=1)  # less than one for ctc
    assert (share_R < 0.999).all() if not scores.is_linked else (share_R > 0.999).all()
    torch.testing.assert_close(p_RV, scores.log_token_SV.exp() / share_R.unsqueeze(1))


@every
def test_values_of_states_are_sorted_by_mask_and_clone(name):
    k, graph = CONFIGS[name].states_per_mask, exlm(CONFIGS[name]).answer(ragged_batch()).graph
    assert graph.of_masks(graph.clone_BL).tolist() == [list(range(1, k + 1))] * 6
    # The rows have three, one and two masks; the owners are numbered from each row's [BOS].
    assert graph.of_masks(graph.owner_BL).tolist() == [[i] * k for i in (1, 2, 3, 1, 1, 2)]


@every_linked
def test_visits_and_length_are_those_of_every_path_weighed_by_the_words_of_the_rows(name):
    scores, length_B = exlm(LINKED[name]).answer(ragged_batch()).double(), []
    found_BL = scores.visits()
    want_BL = torch.zeros_like(found_BL)
    is_mask_BM1 = scores.graph.is_mask_BM.unsqueeze(2)
    log_E_BML = scores.log_emission_BML.masked_fill(~is_mask_BM1, 0.0)
    counts = scores.graph.num_targets_B.tolist(), scores.graph.num_states_B.tolist()
    for b, (m, num) in enumerate(zip(*counts, strict=True)):
        length = 0.0
        for path in map(list, paths(m, num)):
            links = scores.log_transition_BLL[b, path[:-1], path[1:]].sum()
            want_BL[b, path] += (links + log_E_BML[b, range(m), path].sum()).exp()
            length += links.exp()
        want_BL[b] *= m / want_BL[b].sum()  # a path visits one state per target
        length_B.append(length.log())
    torch.testing.assert_close(found_BL, want_BL, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(scores.log_fit(), torch.stack(length_B), rtol=1e-6, atol=1e-6)


def test_pairwise_divergence_is_the_mean_of_scipys():
    p_3kV = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    p_3kV = p_3kV / p_3kV.sum(dim=2, keepdim=True)
    for found, p_kV in zip(pairwise_divergence_bits(p_3kV), p_3kV.numpy(), strict=True):
        pairs = [jensenshannon(p, q, base=2) ** 2 for p, q in itertools.combinations(p_kV, 2)]
        assert found.item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    # Clones with no word in common are one bit apart.
    assert pairwise_divergence_bits(torch.eye(3).double()).item() == pytest.approx(1)


# ---- entropies ----


@pytest.mark.parametrize(
    ("probabilities", "bits"),
    [
        ([1.0], 0.0),
        ([0, 1, 0], 0.0),
        ([1 / 7] * 7, math.log2(7)),
        ([1 / 4, 3 / 4], 2 - 3 / 4 * math.log2(3)),
        ([1 / 2, 0, 1 / 2, 0], 1.0),
    ],
)
def test_entropies_in_closed_form(probabilities, bits):
    log_p_V = torch.tensor(probabilities, dtype=torch.float64).log()
    assert entropy_bits(log_p_V).item() == pytest.approx(bits, abs=1e-12)
    assert str(entropy_bits(log_p_V).item()) != "-0.0"
    assert torch.equal(entropy_bits(log_p_V.tile(2, 3, 1)), entropy_bits(log_p_V).tile(2, 3))


def test_a_token_is_lost_when_every_copy_is_masked():
    is_masked_BN = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1, 1]]).bool()
    assert fully_masked(is_masked_BN, 2).tolist() == [
        [True, False, False, False],
        [False, False, True, True],
    ]
    assert fully_masked(is_masked_BN, 4).tolist() == [[False, False], [False, True]]
    assert torch.equal(fully_masked(is_masked_BN, 1), is_masked_BN)
    for num_copies in (0, 3):
        with pytest.raises(ValueError, match=f"8 positions do not hold {num_copies} copies"):
            fully_masked(is_masked_BN, num_copies)
