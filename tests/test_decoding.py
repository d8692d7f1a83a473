"""Reading a model: every claim about paths and probabilities against plain enumeration."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from exlm_mini.alignment.enumeration import paths
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.reading.decoding import (
    Reading,
    not_offered,
    read_masked_lm,
    read_states,
    top_tokens,
)

SPECIAL = SpecialIds()
NUM_WORDS = 4
VOCABULARY = range(len(SPECIAL) + NUM_WORDS)
WORDS = [i for i in VOCABULARY if i not in not_offered(SPECIAL)]
# [BOS] w [MASK] [MASK] w [EOS]
ROW = torch.tensor([[SPECIAL.bos, 6, SPECIAL.mask, SPECIAL.mask, 7, SPECIAL.eos]])
IS_MASKED = ROW.eq(SPECIAL.mask)
CONFIG = ModelConfig(
    width=16, num_heads=2, ffn_width=16, max_positions=64, states_per_mask=3, init_std=0.5
)
GRAPHS = [
    replace(CONFIG, states_per_mask=1),
    CONFIG,
    replace(CONFIG, boundary="paper", states_per_mask=2, sparse=True),
    replace(CONFIG, boundary="paper", transition="paper", clone_embedding_std=1.0),
    replace(CONFIG, states_per_mask=2, transition="uniform"),
    replace(CONFIG, transition="spans"),
    replace(CONFIG, boundary="paper", transition="spans", expand_at=1, clone_embedding_std=1.0),
    replace(CONFIG, boundary="paper", transition="chains"),
]
CTC = [replace(CONFIG, boundary=b, transition="ctc") for b in ("official", "paper")]


def exlm(config: ModelConfig, seed: int = 0) -> ExLM:
    torch.manual_seed(seed)
    return ExLM(config, len(VOCABULARY)).double().eval()


def masked_lm(seed: int = 0) -> MaskedLM:
    torch.manual_seed(seed)
    return MaskedLM(CONFIG, len(VOCABULARY)).double().eval()


@torch.no_grad()
def log_joint(model: ExLM, fillings: list[tuple[int, int]]) -> torch.Tensor:
    """log-probability of each filling, as validation computes it but path by path."""
    filled = ROW.repeat(len(fillings), 1)
    is_masked = IS_MASKED.expand_as(filled)
    filled[is_masked] = torch.tensor(fillings).flatten()
    scores = model(ROW.expand_as(filled), is_masked, filled)
    return log_likelihood(scores, with_boundaries=False, backend="enumerate")


def best_by_hand(reading: Reading) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Probability, path and tokens of the best of all paths with all offered tokens."""
    transition = reading.graph.log_transition_LL.exp()
    emission = reading.states.log_token_LV.exp()
    num_masks = len(reading.token_ids_S)
    candidates = []
    for path in paths(num_masks + 2, len(transition)):
        links = math.prod(transition[v, u].item() for v, u in itertools.pairwise(path))
        for tokens in itertools.product(WORDS, repeat=num_masks):
            said = [emission[u, w].item() for u, w in zip(path[1:-1], tokens, strict=True)]
            candidates.append((links * math.prod(said), path, tokens))
    return max(candidates)


@pytest.mark.parametrize("config", GRAPHS)
def test_best_path_is_the_best_of_all_paths_and_tokens(config):
    reading = read_states(exlm(config), ROW)
    probability, path, tokens = best_by_hand(reading)
    assert math.exp(reading.graph.log_path) == pytest.approx(probability, rel=1e-10)
    assert tuple(reading.graph.path_M.tolist()) == path
    assert tuple(reading.token_ids_S.tolist()) == tokens


@pytest.mark.parametrize("config", GRAPHS)
def test_the_joint_is_that_of_all_paths_and_all_joints_sum_to_the_probability_of_fitting(
    config,
):
    model = exlm(config)
    reading = read_states(model, ROW)
    fillings = list(itertools.product(VOCABULARY, repeat=2))
    log_joint_VV = log_joint(model, fillings).view(len(VOCABULARY), len(VOCABULARY))
    chosen = log_joint_VV[tuple(reading.token_ids_S.tolist())].item()
    assert reading.log_joint == pytest.approx(chosen, abs=1e-10)
    assert reading.log_joint >= reading.graph.log_path - 1e-12
    total = log_joint_VV.exp().sum().item()
    assert total <= 1 + 1e-12
    assert total == pytest.approx(math.exp(reading.graph.log_fit), rel=1e-10)
    # The masks by themselves: the same joints summed over the other mask, given that they fit.
    marginal_SV = torch.stack([log_joint_VV.exp().sum(dim=1), log_joint_VV.exp().sum(dim=0)])
    torch.testing.assert_close(reading.log_token_SV.exp(), marginal_SV / total)


@pytest.mark.parametrize("config", CTC)
def test_ctc_reads_each_mask_by_itself(config):
    model = exlm(config)
    reading = read_states(model, ROW)
    assert reading.graph is None
    fillings = list(itertools.product(VOCABULARY, repeat=2))
    log_joint_VV = log_joint(model, fillings).view(len(VOCABULARY), len(VOCABULARY))
    log_first_V, log_second_V = reading.log_token_SV
    torch.testing.assert_close(log_first_V[:, None] + log_second_V, log_joint_VV)
    # Independent masks: the chosen tokens are the best filling there is.
    best = max(itertools.product(WORDS, repeat=2), key=lambda filling: log_joint_VV[filling])
    assert tuple(reading.token_ids_S.tolist()) == best
    assert reading.log_joint == pytest.approx(log_joint_VV[best].item(), abs=1e-10)
    # The k states may also spell blanks alone or two words: words alone sum to less than one.
    words_only = [i for i in VOCABULARY if i != SPECIAL.unk]
    assert (reading.log_token_SV.exp()[:, words_only].sum(dim=1) < 1).all()


@pytest.mark.parametrize("config", GRAPHS + CTC)
def test_states_carry_the_labels_of_their_masks(config):
    states = read_states(exlm(config), ROW).states
    k = config.states_per_mask
    masks = [f"{mask}.{clone}" for mask in (1, 2) for clone in range(1, k + 1)]
    ends = [[name] for name in ("BOS", "EOS")]
    if config.boundary == "official":
        ends = [[f"{name}.{clone}" for clone in range(1, k + 1)] for name in ("BOS", "EOS")]
    assert states.labels == [*ends[0], *masks, *ends[1]]
    assert states.log_token_LV.shape == (len(states.labels), len(VOCABULARY))
    torch.testing.assert_close(
        states.log_token_LV.exp().sum(dim=1), torch.ones(len(states.labels)).double()
    )


@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_transitions_are_those_of_the_forward_pass(boundary):
    model = exlm(replace(CONFIG, boundary=boundary))
    with torch.no_grad():
        for chain_share in (0.0, 0.3, 1.0):
            scores = model(ROW, IS_MASKED, ROW, chain_share)
            reading = read_states(model, ROW, chain_share)
            assert torch.equal(reading.graph.log_transition_LL, scores.log_transition_BLL[0])


def test_masked_lm_multiplies_independent_predictions():
    model = masked_lm()
    reading = read_masked_lm(model, ROW)
    with torch.no_grad():
        log_token_SV = model(ROW, IS_MASKED).log_softmax(dim=1)
    torch.testing.assert_close(reading.log_token_SV, log_token_SV)
    chosen = [max(WORDS, key=lambda w, row=row: row[w]) for row in log_token_SV]
    assert reading.token_ids_S.tolist() == chosen
    expected = sum(row[w].item() for row, w in zip(log_token_SV, chosen, strict=True))
    assert reading.log_joint == pytest.approx(expected)
    assert reading.states is None
    assert reading.graph is None


def test_repeated_mlm_averages_the_copies_of_a_mask():
    model = masked_lm()
    reading = read_masked_lm(model, ROW, num_copies=3)
    with torch.no_grad():
        row = ROW.repeat_interleave(3, dim=1)
        probability_XV = model(row, row == SPECIAL.mask).softmax(dim=1)
    for mask in (0, 1):
        mean_V = probability_XV[3 * mask : 3 * mask + 3].mean(dim=0)
        torch.testing.assert_close(reading.log_token_SV[mask].exp(), mean_V)


def test_top_tokens_are_sorted_words_with_their_own_probabilities():
    # The special tokens are likelier than any word; two words tie.
    log_token_XV = torch.tensor([[0.3, 0.2, 0.1, 0.1, 0.01, 0.09, 0.05, 0.05, 0.04, 0.06]])
    log_token_XV = log_token_XV.log()
    token_ids, probability = top_tokens(log_token_XV, 4, SPECIAL)
    assert token_ids.tolist() == [[9, 6, 7, 8]]
    torch.testing.assert_close(probability, torch.tensor([[0.06, 0.05, 0.05, 0.04]]))
    token_ids, _ = top_tokens(log_token_XV, 100, SPECIAL)
    assert token_ids.tolist() == [[9, 6, 7, 8, SPECIAL.sep]]


def test_a_row_without_mask_is_the_users_mistake():
    row = torch.tensor([[SPECIAL.bos, 6, SPECIAL.eos]])
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        read_states(exlm(CONFIG), row)
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        read_masked_lm(masked_lm(), row)


@pytest.mark.parametrize(
    "row",
    [ROW.repeat(2, 1), ROW[0], ROW[:, 1:], ROW[:, :-1], torch.cat([ROW, ROW], dim=1)],
)
def test_only_one_framed_row_is_read(row):
    with pytest.raises(ValueError, match="want"):
        read_states(exlm(CONFIG), row)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        read_states(exlm(CONFIG).train(), ROW)


def test_a_graph_without_a_path_is_an_error_that_says_so():
    model = exlm(replace(CONFIG, transition="paper"))

    class NoEdges(torch.nn.Module):
        def forward(self, state_BLD, graph):
            L = state_BLD.shape[1]
            return state_BLD.new_full((1, L, L), -torch.inf)

    model.transition = NoEdges()
    with pytest.raises(UserError, match="no path"):
        read_states(model, ROW)
