"""Reading a row: its paths and probabilities are checked against plain enumeration."""

import itertools
import math

import pytest
import torch
from linked_models import (
    CONFIGS,
    CTC,
    LINKED,
    OFFERED,
    exlm,
    log_joints,
    masked_lm,
    ragged_batch,
)
from small_models import SPECIAL, alone

from exlm_mini.alignment.enumeration import paths
from exlm_mini.config.checks import UserError
from exlm_mini.reading.decoding import Reading, read_row, top_tokens

ROW = alone(ragged_batch(), 2)
"""A row with two adjacent masks."""
IDS = ROW.masked_ids_BN


def best_by_hand(reading: Reading) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Probability, path and tokens of the likeliest pair of a path and offered tokens."""
    transition = reading.graph.log_transition_LL.exp()
    emission = reading.states.log_token_LV.exp()
    candidates = []
    for path in paths(4, len(transition)):
        links = math.prod(transition[v, u].item() for v, u in itertools.pairwise(path))
        for tokens in itertools.product(OFFERED, repeat=2):
            said = [emission[u, w].item() for u, w in zip(path[1:-1], tokens, strict=True)]
            candidates.append((links * math.prod(said), path, tokens))
    return max(candidates)


@pytest.mark.parametrize("name", LINKED)
def test_path_joint_and_fit_are_those_of_all_paths_and_tokens(name):
    model = exlm(LINKED[name])
    reading = read_row(model, IDS)
    probability, path, tokens = best_by_hand(reading)
    assert math.exp(reading.graph.log_path) == pytest.approx(probability, rel=1e-10)
    assert tuple(reading.graph.path_M.tolist()) == path
    assert tuple(reading.token_ids_S.tolist()) == tokens
    log_joint_VV = log_joints(model, ROW, "enumerate")
    assert reading.log_joint == pytest.approx(log_joint_VV[tokens].item(), abs=1e-10)
    assert reading.log_joint >= reading.graph.log_path - 1e-12
    total = log_joint_VV.exp().sum().item()
    assert total == pytest.approx(math.exp(reading.graph.log_fit), rel=1e-10)
    assert total <= 1 + 1e-12


@pytest.mark.parametrize("name", [*CTC, "mlm"])
def test_independent_masks_get_the_best_filling_there_is(name):
    model = masked_lm() if name == "mlm" else exlm(CTC[name])
    reading, log_joint_VV = read_row(model, IDS), log_joints(model, ROW)
    log_first_V, log_second_V = reading.log_token_SV
    torch.testing.assert_close(log_first_V[:, None] + log_second_V, log_joint_VV)
    best = max(itertools.product(OFFERED, repeat=2), key=lambda filling: log_joint_VV[filling])
    assert tuple(reading.token_ids_S.tolist()) == best
    assert reading.log_joint == pytest.approx(log_joint_VV[best].item(), abs=1e-10)
    assert reading.graph is None and (reading.states is None) == (name == "mlm")


@pytest.mark.parametrize("name", CONFIGS)
def test_states_carry_the_labels_of_their_masks(name):
    config = CONFIGS[name]
    states, clones = read_row(exlm(config), IDS).states, range(1, config.states_per_mask + 1)
    labels = [f"{owner}.{clone}" for owner in ("BOS", 1, 2, "EOS") for clone in clones]
    if config.boundary == "paper":
        labels = ["BOS", *(label for label in labels if label[0].isdigit()), "EOS"]
    assert states.labels == labels
    ones_L = torch.ones(len(labels), dtype=torch.float64)
    torch.testing.assert_close(states.log_token_LV.exp().sum(dim=1), ones_L)


@pytest.mark.parametrize("chain_share", [0.0, 0.3, 1.0])
@torch.no_grad()
def test_transitions_are_those_of_the_forward_pass(chain_share):
    model = exlm()
    log_transition_BLL = model(*ROW, chain_share).log_transition_BLL
    reading = read_row(model, IDS, chain_share)
    assert torch.equal(reading.graph.log_transition_LL, log_transition_BLL[0])


def test_top_tokens_are_sorted_words_with_their_own_probabilities():
    # The special tokens are likelier than any word; two words tie.
    p_V = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.01, 0.09, 0.05, 0.05, 0.04, 0.06])
    log_token_XV = p_V[None].log()
    token_ids, probability = top_tokens(log_token_XV, 4, SPECIAL)
    assert token_ids.tolist() == [[9, 6, 7, 8]]
    torch.testing.assert_close(probability, torch.tensor([[0.06, 0.05, 0.05, 0.04]]))
    token_ids, _ = top_tokens(log_token_XV, 100, SPECIAL)
    assert token_ids.tolist() == [[9, 6, 7, 8, SPECIAL.sep]]


@pytest.mark.parametrize("make", [exlm, masked_lm])
def test_only_a_row_with_masks_is_read_and_without_dropout(make):
    model = make()
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        read_row(model, torch.tensor([[SPECIAL.bos, 6, SPECIAL.eos]]))
    with pytest.raises(ValueError, match="training mode"):
        read_row(model.train(), IDS)


def test_a_graph_without_a_path_is_an_error_that_says_so():
    model = exlm(LINKED["paper"])
    model.transition.forward = lambda state_BLD, graph: torch.full(
        (1, state_BLD.shape[1], state_BLD.shape[1]), -torch.inf, dtype=torch.float64
    )
    with pytest.raises(UserError, match="no path"):
        read_row(model, IDS)
