"""A batch read at once says what each row says by itself, and what its paths say.

Shapes: B rows, N tokens of a row, L states, R masks of all rows, k states of a mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_guesses import MODELS, SPECIAL, make_model, ragged_batch
from torch import Tensor

from exlm_lab.experiments.states import read_rows
from exlm_mini.model import ExLM
from exlm_mini.reading.decoding import read_states
from exlm_mini.reading.entropy import entropy_bits, path_entropy
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
def test_state_entropy_is_the_path_entropy_of_single_rows(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading = read_rows(model, batch)
    want_R = torch.cat([path_entropy(read_states(model, row)).word_S for row in rows(batch)])
    torch.testing.assert_close(reading.state_entropy_bits(), want_R)
    # Mixing never makes a word more certain.
    assert (reading.state_entropy_bits() <= entropy_bits(reading.mask_token_log_probs())).all()


@pytest.mark.parametrize("config", CTC)
def test_without_links_state_entropy_is_the_mean_over_a_masks_states(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading, found = read_rows(model, batch), []
    for row in rows(batch):
        states = read_states(model, row).states
        entropy_L = entropy_bits(states.log_token_LV)
        found += [entropy_L[states.owner_L == s].mean() for s in states.owner_L.unique()[1:-1]]
    torch.testing.assert_close(reading.state_entropy_bits(), torch.stack(found))
    with pytest.raises(ValueError, match="the states of ctc are not linked"):
        _ = reading.visits


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
def test_visits_go_by_the_words_of_the_rows(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    reading = read_rows(model, batch)
    visits = reading.visits
    num_targets_B = reading.scores.graph.num_targets_B.double()
    torch.testing.assert_close(visits.state_BL.sum(dim=1), num_targets_B)
    if config.sparse or config.transition == "uniform":
        is_mask_BM = reading.is_mask_BM
        ones_R = torch.ones(int(is_mask_BM.sum()), dtype=torch.float64)
        torch.testing.assert_close(visits.once_BM[is_mask_BM], ones_R)
        assert visits.twice_BM.abs().max() == 0
    other_BN = batch.token_ids_BN.masked_fill(batch.is_masked_BN, 9)
    other = read_rows(model, batch._replace(token_ids_BN=other_BN)).visits
    assert not torch.equal(other.state_BL, visits.state_BL)
