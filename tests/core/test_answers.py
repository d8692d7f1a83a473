"""The distribution of a single mask, summed over all paths and all tokens of the other masks.

Shapes: B rows, N tokens of a row, S masks of all rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from linked_models import CONFIGS, V, exlm, log_joints, masked_lm, of_mask, ragged_batch
from small_models import BOS, EOS, SPECIAL, alone, masked_rows

from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model.answers import StateScores
from exlm_mini.model.expansion import expand_masks
from exlm_mini.training.evaluation import Evaluation, row_bits_and_correct


@pytest.mark.parametrize("name", [*CONFIGS, "mlm"])
def test_a_mask_by_itself_is_summed_over_all_fillings_of_the_others(name):
    model, batch = masked_lm() if name == "mlm" else exlm(CONFIGS[name]), ragged_batch()
    said = model.answer(batch)
    token_SV = said.log_token_SV.exp()
    marginals = []
    for b in range(3):
        row = alone(batch, b)
        joint = log_joints(model, row).exp()
        marginals += [of_mask(joint, s) for s in range(joint.dim())]
    marginal_SV = torch.stack(marginals)
    # With ctc, the k states of a mask may also emit nothing but blanks, or spell two words.
    share_S1 = token_SV.sum(dim=1, keepdim=True)
    assert (share_S1 < 1).all() if "ctc" in name else torch.allclose(share_S1, share_S1 * 0 + 1)
    torch.testing.assert_close(
        token_SV / share_S1, marginal_SV / marginal_SV.sum(dim=1, keepdim=True)
    )
    assert torch.equal(said.guesses(), marginal_SV.argmax(dim=1))


@pytest.mark.parametrize(
    "name", [*(n for n, config in CONFIGS.items() if config.boundary == "official"), "mlm"]
)
def test_a_row_of_padding_alone_changes_nothing(name):
    model, batch = masked_lm() if name == "mlm" else exlm(CONFIGS[name]), ragged_batch()
    fillers = (part_BN.new_full((1, part_BN.shape[1]), 0) for part_BN in batch)
    longer = model.answer(MaskedBatch(*map(torch.cat, zip(batch, fillers, strict=True))))
    said = model.answer(batch)
    torch.testing.assert_close(longer.scored().loss, said.scored().loss)
    torch.testing.assert_close(longer.log_token_SV, said.log_token_SV)
    torch.testing.assert_close(longer.log_joint()[:3], said.log_joint())
    assert longer.log_joint()[3] == 0


def test_copies_of_a_mask_count_by_their_mean():
    model, batch = masked_lm(), ragged_batch()
    found_SV = model.answer(batch, num_copies=3).log_token_SV
    copies = (part_BN.repeat_interleave(3, dim=1) for part_BN in batch[:2])
    mean_SV = model(*copies).softmax(dim=1).view(-1, 3, V).mean(dim=1)
    torch.testing.assert_close(found_SV.exp(), mean_SV)


@pytest.mark.parametrize("name", ["gated", "paper", "ctc official", "mlm"])
def test_correct_guesses_of_a_row_are_counted_without_its_boundaries(name):
    model, batch = masked_lm() if name == "mlm" else exlm(CONFIGS[name]), ragged_batch()
    guess_ids_S = model.answer(batch).guesses()
    is_right_S = torch.tensor([False, True, False, False, True, True])
    target_ids_S = torch.where(is_right_S, guess_ids_S, (guess_ids_S + 1) % V)
    token_ids_BN = batch.token_ids_BN.masked_scatter(batch.is_masked_BN, target_ids_S)
    _, correct_B = row_bits_and_correct(model, batch._replace(token_ids_BN=token_ids_BN))
    assert correct_B.tolist() == [1, 0, 2]


def test_low_precision_of_the_encoder_does_not_round_the_mixture():
    """A preference for a token that is too small for bfloat16 still decides the guess."""

    class Model:
        def token_logits(self, state_LD):
            return (torch.arange(8) == 7).float().expand(len(state_LD), -1) * 0.001

    row = masked_rows([BOS, -6, EOS])
    graph = expand_masks(*row, 2, "paper", SPECIAL)[1]
    log_transition_BLL = torch.full((1, 4, 4), 0.25).log()
    log_emission_BML, state_BLD = torch.zeros(1, 3, 4), torch.zeros(1, 4, 2)
    scores = StateScores(
        log_emission_BML, log_transition_BLL, None, graph, graph.is_mask_BM, state_BLD, Model()
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert scores.guesses().tolist() == [7]


def test_perplexity_is_that_of_the_masks_and_infinite_beyond_all_numbers():
    evaluation = Evaluation(30.0, num_masks=10, num_rows=4, num_without_path=0, num_correct=4)
    assert evaluation.perplexity == 8.0
    assert evaluation._replace(bits=10 * 1023.0).perplexity == 2.0**1023
    for bits in (10 * 1024.0, 1e6):
        assert evaluation._replace(bits=bits).perplexity == float("inf")
