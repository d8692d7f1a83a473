"""A batch read at once says what each row says by itself, and what its paths say.

Shapes: B rows, N tokens of a row, L states, R masks of all rows, k states of a mask.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from test_guesses import MODELS, SPECIAL, make_model, ragged_batch
from torch import Tensor

from exlm_lab.experiments.states import pairwise_divergence_bits, read_rows
from exlm_mini.alignment.enumeration import paths
from exlm_mini.model import ExLM
from exlm_mini.reading.decoding import read_states
from exlm_mini.training.evaluation import row_bits_and_correct

LINKED = [config for config in MODELS if config.transition != "ctc"]
CTC = [config for config in MODELS if config.transition == "ctc"]


def rows(batch) -> list[Tensor]:
    """Each masked row by itself, without padding."""
    return [ids_N[ids_N != SPECIAL.pad].unsqueeze(0) for ids_N in batch.masked_ids_BN]


@pytest.mark.parametrize("config", MODELS)
def test_masks_by_themselves_are_as_in_single_rows(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    found_RV = read_rows(model, batch).mask_token_log_probs()
    want_RV = torch.cat([read_states(model, row).log_token_SV for row in rows(batch)])
    # A row of decoding keeps what ctc spreads over several tokens as missing probability.
    torch.testing.assert_close(found_RV, want_RV.log_softmax(dim=1))
    ones_R = torch.ones(len(found_RV), dtype=torch.float64)
    torch.testing.assert_close(found_RV.exp().sum(dim=1), ones_R)


@pytest.mark.parametrize("config", LINKED)
def test_length_bits_are_of_all_paths_with_as_many_states_as_targets(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading, want = read_rows(model, batch), []
    graph = reading.scores.graph
    for b, (m, num) in enumerate(zip(graph.num_targets_B, graph.num_states_B, strict=True)):
        edge_LL = reading.scores.log_transition_BLL[b, :num, :num].exp()
        # Walks of m - 1 edges from the first state to the last.
        want.append(-math.log2(torch.linalg.matrix_power(edge_LL, int(m) - 1)[0, -1]))
    torch.testing.assert_close(
        reading.length_bits(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("config", MODELS)
def test_joint_probability_is_that_of_validation(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading = read_rows(model, batch)
    target_ids_R = batch.token_ids_BN[batch.is_masked_BN]
    want_B = -math.log(2) * row_bits_and_correct(model, batch)[0]
    torch.testing.assert_close(reading.log_joint(target_ids_R), want_B)
    # Other words in the same masks: as if the rows had held them.
    other_ids_R = target_ids_R.flip(0)
    other_ids_R[0] = SPECIAL.unk  # the blank of ctc
    other_BN = batch.token_ids_BN.masked_scatter(batch.is_masked_BN, other_ids_R)
    want_B = (
        -math.log(2) * row_bits_and_correct(model, batch._replace(token_ids_BN=other_BN))[0]
    )
    torch.testing.assert_close(reading.log_joint(other_ids_R), want_B)


@pytest.mark.parametrize("config", MODELS)
def test_values_of_states_are_sorted_by_mask_and_clone(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading = read_rows(model, batch)
    graph = reading.scores.graph
    k, R = config.states_per_mask, int(batch.is_masked_BN.sum())
    clone_Rk = reading.of_masks(graph.clone_BL)
    assert clone_Rk.tolist() == [list(range(1, k + 1))] * R
    owner_Rk = reading.of_masks(graph.owner_BL)
    # Rows of one, three and two masks, numbered behind their [BOS].
    assert owner_Rk[:, 0].tolist() == [1, 1, 2, 3, 1, 2]
    assert (owner_Rk == owner_Rk[:, :1]).all()


@pytest.mark.parametrize("config", LINKED)
def test_visits_are_those_of_every_path_weighed_by_the_words_of_the_rows(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading = read_rows(model, batch)
    graph, want_BL = reading.scores.graph, torch.zeros_like(reading.visits())
    log_E_BML = reading.scores.log_emission_BML.masked_fill(
        ~reading.is_mask_BM.unsqueeze(2), 0.0
    )
    for b, (m, num) in enumerate(zip(graph.num_targets_B, graph.num_states_B, strict=True)):
        for path in map(list, paths(int(m), int(num))):
            score = log_E_BML[b, range(m), path].sum()
            score += reading.scores.log_transition_BLL[b, path[:-1], path[1:]].sum()
            want_BL[b, path] += score.exp()
        want_BL[b] *= m / want_BL[b].sum()  # a path passes a state for each target
    torch.testing.assert_close(reading.visits(), want_BL, rtol=1e-6, atol=1e-9)


def test_states_of_ctc_are_not_linked():
    reading = read_rows(make_model(ExLM, CTC[0]), ragged_batch())
    for asked in (reading.visits, reading.length_bits):
        with pytest.raises(ValueError, match="the states of ctc are not linked"):
            asked()


def test_pairwise_divergence_is_the_mean_of_scipys():
    p_3kV = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    p_3kV = p_3kV / p_3kV.sum(dim=2, keepdim=True)
    for found, p_kV in zip(pairwise_divergence_bits(p_3kV), p_3kV.numpy(), strict=True):
        pairs = [jensenshannon(p, q, base=2) ** 2 for p, q in itertools.combinations(p_kV, 2)]
        assert found.item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    # Clones without a common word are one bit apart.
    assert pairwise_divergence_bits(torch.eye(3).double()).item() == pytest.approx(1)
