"""Probes read what the states hold and nothing else."""

import numpy as np
import pytest
import torch

from exlm_lab.experiments import probes
from exlm_lab.experiments.probes import (
    NUM_TEST,
    NUM_TO_LABEL,
    likeliest_latents,
    readable,
    sentence_states,
)
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import repeat_tokens
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.model import MaskedLM

SMALL = ModelConfig(width=16, num_heads=2, ffn_width=16, states_per_mask=2)
SENTENCES = NUM_TO_LABEL + NUM_TEST


@pytest.fixture(scope="module")
def town():
    language = grammar("town")
    word_ids_SN = language.sample(SENTENCES, 3)
    return language, word_ids_SN, likeliest_latents(language, word_ids_SN)


def test_the_likeliest_latents_are_those_of_bayes(town):
    language, word_ids_SN, latent_SC = town
    assert latent_SC.shape == (SENTENCES, 4)
    is_visible_N = np.zeros(language.length, dtype=bool)
    for s in range(20):
        posterior = language._posterior(word_ids_SN[s], is_visible_N)
        posterior = posterior.reshape(language.prior.shape)
        for axis in range(4):
            of_axis = posterior.sum(axis=tuple(a for a in range(4) if a != axis))
            assert latent_SC[s, axis] == of_axis.argmax()


def test_states_that_hold_the_latents_are_read_without_error(town):
    _, _, latent_SC = town
    one_hot_SD = np.concatenate([np.eye(6)[value_S] for value_S in latent_SC.T], axis=1)
    assert readable(one_hot_SD, latent_SC) > 0.999


def test_states_of_the_test_sentences_change_no_probe():
    is_yes_S = np.random.default_rng(0).integers(2, size=SENTENCES)
    state_SD = np.random.default_rng(1).normal(2.0 * is_yes_S - 1, 0.1)[:, None]
    beyond = NUM_TO_LABEL + np.flatnonzero(is_yes_S[NUM_TO_LABEL:])[:5]
    state_SD[beyond] = 1e9  # a scaler that saw these would make all others alike
    assert readable(state_SD, is_yes_S[:, None]) > 0.999


def test_labels_of_the_test_sentences_are_not_seen(town):
    _, _, latent_SC = town
    noise_SD = np.random.default_rng(0).normal(size=(SENTENCES, 16))
    told_SD = noise_SD.copy()
    told_SD[-NUM_TEST:, 0] += 100 * latent_SC[-NUM_TEST:, 0]
    chance = np.mean([np.bincount(value_S).max() / SENTENCES for value_S in latent_SC.T])
    assert readable(told_SD, latent_SC) < chance + 0.05


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_sentence_is_the_mean_of_its_words(num_copies):
    torch.manual_seed(0)
    model = MaskedLM(SMALL, 20).eval()
    ids_SN = np.random.default_rng(0).integers(6, 20, size=(3, 5))
    special = SpecialIds()
    row_1N = torch.tensor([[special.bos, *ids_SN[1].tolist(), special.eos]])
    hidden_1TD = model.encode(repeat_tokens(row_1N, num_copies))
    expected_D = hidden_1TD[0, num_copies:-num_copies:num_copies].mean(dim=0)
    found_SD = sentence_states(model, num_copies, ids_SN)
    np.testing.assert_allclose(found_SD[1], expected_D.detach().numpy(), atol=1e-6)


def test_the_labelled_sentences_are_drawn_by_the_seed(monkeypatch):
    monkeypatch.setattr(probes, "readable", lambda state_SD, latent_SC, seed=0: seed)
    language = grammar("town")
    model = MaskedLM(SMALL, 6 + len(language.words)).eval()
    token_ids_W = 6 + np.arange(len(language.words))
    assert probes.probe_accuracy(model, 1, language, token_ids_W, 7) == 7
