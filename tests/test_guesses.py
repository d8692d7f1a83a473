"""What is guessed for each mask is its likeliest token over all paths and all other tokens.

Shapes: B rows, N tokens of a row, M targets, S masks of a row, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from small_models import BOS, EOS, SPECIAL, alone, masked_rows
from torch import Tensor

from exlm_mini.config import ModelConfig
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.expansion import StateGraph
from exlm_mini.model.guesses import guess_targets
from exlm_mini.training.evaluation import Evaluation, row_bits_and_correct

VOCAB_SIZE = len(SPECIAL) + 4
CONFIG = ModelConfig(
    width=16, num_heads=2, ffn_width=16, max_positions=64, states_per_mask=3, init_std=0.5
)
MODELS = [
    replace(CONFIG, boundary="official", transition="gated"),
    replace(CONFIG, boundary="paper", transition="paper", clone_embedding_std=1.0),
    replace(CONFIG, boundary="paper", transition="gated", sparse=True, states_per_mask=2),
    replace(CONFIG, boundary="official", transition="uniform", states_per_mask=2),
    replace(CONFIG, boundary="official", transition="ctc"),
]


def ragged_batch() -> MaskedBatch:
    """Rows with one, three and two masks, the second longer than the others."""
    return masked_rows([BOS, 6, -7, EOS], [BOS, -8, -9, -6, 7, EOS], [BOS, -9, 9, -8, EOS])


def make_model(kind, config: ModelConfig):
    torch.manual_seed(0)
    return kind(config, VOCAB_SIZE).double().eval()


def filled(row: MaskedBatch, fillings: list[tuple[int, ...]]) -> MaskedBatch:
    """One row as often as there are fillings of its masks."""
    rows = MaskedBatch(*(x_1N.repeat(len(fillings), 1) for x_1N in row))
    token_ids_BN = rows.token_ids_BN.masked_scatter(
        rows.is_masked_BN, torch.tensor(fillings).flatten()
    )
    return rows._replace(token_ids_BN=token_ids_BN)


def guesses_by_enumeration(model: ExLM, row: MaskedBatch) -> list[int]:
    """Add up the joint probability of all fillings that have a token in a mask."""
    num_masks = int(row.is_masked_BN.sum())
    fillings = list(itertools.product(range(VOCAB_SIZE), repeat=num_masks))
    probability = torch.exp2(-row_bits_and_correct(model, filled(row, fillings))[0].double())
    probability = probability.view([VOCAB_SIZE] * num_masks)
    others = [[s for s in range(num_masks) if s != mask] for mask in range(num_masks)]
    return [
        int((probability.sum(dim=dims) if dims else probability).argmax()) for dims in others
    ]


def guesses(model: ExLM, batch: MaskedBatch) -> list[list[int]]:
    """Of the masks of each row."""
    scores = model(*batch, with_guesses=True)
    counts = batch.is_masked_BN.sum(dim=1).tolist()
    # The first target is [BOS].
    return [scores.guess_ids_BM[b, 1 : 1 + count].tolist() for b, count in enumerate(counts)]


@pytest.mark.parametrize("config", MODELS)
def test_a_guess_is_the_likeliest_token_over_all_fillings_of_the_others(config):
    batch, model = ragged_batch(), make_model(ExLM, config)
    ours = guesses(model, batch)
    for b in range(3):
        assert ours[b] == guesses_by_enumeration(model, alone(batch, b))


def test_guesses_are_made_only_when_asked_for_and_change_no_score():
    model, batch = make_model(ExLM, CONFIG), ragged_batch()
    scores, with_guesses = model(*batch), model(*batch, with_guesses=True)
    assert scores.guess_ids_BM is None
    assert torch.equal(scores.log_emission_BML, with_guesses.log_emission_BML)
    assert torch.equal(scores.log_transition_BLL, with_guesses.log_transition_BLL)


@pytest.mark.parametrize("config", [MODELS[0], MODELS[1], MODELS[4]])
def test_correct_guesses_of_a_row_are_counted_without_its_boundaries(config):
    model, batch = make_model(ExLM, config), ragged_batch()
    # Let the first mask of the second row, and both of the third, be what the model guesses.
    rights = guesses(model, batch)
    token_ids_BN = batch.token_ids_BN.clone()
    token_ids_BN[1, 1] = rights[1][0]
    token_ids_BN[2, 1], token_ids_BN[2, 3] = rights[2]
    token_ids_BN[0, 2] = (rights[0][0] + 1) % VOCAB_SIZE
    for n, right in ((2, rights[1][1]), (3, rights[1][2])):
        token_ids_BN[1, n] = (right + 1) % VOCAB_SIZE
    batch = batch._replace(token_ids_BN=token_ids_BN)
    _, correct_B = row_bits_and_correct(model, batch)
    assert correct_B.tolist() == [0, 1, 2]


def test_a_masked_lm_guesses_its_likeliest_token():
    model, batch = make_model(MaskedLM, CONFIG), ragged_batch()
    guess_ids_S = model(batch.masked_ids_BN, batch.is_masked_BN).argmax(dim=1)
    assert len(guess_ids_S) == 1 + 3 + 2
    is_right_S = torch.tensor([False, True, True, False, False, True])
    target_ids_S = torch.where(is_right_S, guess_ids_S, (guess_ids_S + 1) % VOCAB_SIZE)
    token_ids_BN = batch.token_ids_BN.masked_scatter(batch.is_masked_BN, target_ids_S)
    batch = batch._replace(token_ids_BN=token_ids_BN)
    _, correct_B = row_bits_and_correct(model, batch)
    assert correct_B.tolist() == [0, 2, 1]


def test_low_precision_of_the_encoder_does_not_round_the_mixture():
    """Two states that each prefer a token by less than bfloat16 can hold still differ."""

    def integers(*rows: list[int]) -> Tensor:
        return torch.tensor(rows)

    graph = StateGraph(
        place_BL=integers([0, 1, 2, 3]), owner_BL=integers([0, 1, 1, 2]),
        clone_BL=integers([0, 1, 2, 0]), num_states_B=torch.tensor([4]),
        target_ids_BM=integers([1, 6, 2]), is_boundary_BM=integers([1, 0, 1]).bool(),
        num_targets_B=torch.tensor([3]),
    )  # fmt: skip
    log_transition_BLL = (
        torch.full((1, 4, 4), 0.25)
        .log()
        .masked_fill(~torch.ones(4, 4).triu(1).bool(), -torch.inf)
    )
    logits_LV = torch.zeros(4, 8)
    logits_LV[:, 7] = 0.001
    with torch.autocast("cpu", torch.bfloat16):
        guess_ids_BM = guess_targets(
            lambda state_LD: logits_LV, torch.zeros(1, 4, 2), log_transition_BLL, graph, unk=3
        )
    assert guess_ids_BM.tolist() == [[7, 7, 7]]


def test_perplexity_and_accuracy_are_those_of_the_masks():
    evaluation = Evaluation(bits=30.0, num_masks=10, num_rows=4, num_without_path=0)
    assert evaluation.perplexity == 8.0 and evaluation.mask_accuracy is None
    assert evaluation._replace(num_correct=4).mask_accuracy == 0.4
    assert evaluation._replace(bits=1e6).perplexity == float("inf")
