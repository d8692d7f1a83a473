"""Linear probes of a model's states, trained on a few labelled sentences.

Fine-tuning changes the whole model, and whether a tiny model learns a task at all is partly chance.
A probe leaves the model unchanged: each unmasked sentence of the toy language is represented by the
mean of its words' last hidden states, and logistic regression learns to predict the latents from
``NUM_LABELLED`` sentences. Better representations need fewer labels.

Shapes: S sentences, D width, C latents, Z joint values of the latents, W words of the language.
"""

from __future__ import annotations

import numpy as np
import torch

from exlm_lab.experiments.toy_contexts import Contexts
from exlm_mini.data.toy import Grammar
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states

NUM_LABELLED = 60
NUM_TO_LABEL, NUM_TEST = 400, 1000
NUM_DRAWS = 10
"""Draws of the labelled sentences; the result is the mean over them."""
ROWS_TOGETHER = 100
WEIGHT_PENALTY = 10.0
"""Factor of half the squared weights, added to the sum of the sentences' losses; 60 labels overfit
easily."""


def probe_accuracy(
    model: MaskedLM | ExLM,
    num_copies: int,
    language: Grammar,
    token_ids_W: np.ndarray,
    seed: int = 0,
) -> float:
    """Accuracy of probes on test sentences, averaged over the latents.

    It lies between chance and 1; the right answer is the likeliest value given the sentence. The
    seed is for drawing sentences, and for choosing which of them are labelled.

    Args:
        model: in evaluation mode.
        token_ids_W: token id of each word of the language.
    """
    word_ids_SN = language.sample(NUM_TO_LABEL + NUM_TEST, (seed, NUM_TEST))
    state_SD = sentence_states(model, num_copies, token_ids_W[word_ids_SN])
    return readable(state_SD, likeliest_latents(language, word_ids_SN), seed)


@torch.no_grad()
def sentence_states(
    model: MaskedLM | ExLM, num_copies: int, token_ids_SN: np.ndarray
) -> np.ndarray:
    """The mean of the last hidden states of each sentence's words, with nothing masked; (S, D)."""
    device, special = next(model.parameters()).device, model.special_ids
    states = []
    for ids_BN in torch.from_numpy(token_ids_SN).split(ROWS_TOGETHER):
        frame_B1 = torch.ones(len(ids_BN), 1, dtype=ids_BN.dtype)
        framed_BN = torch.cat((special.bos * frame_B1, ids_BN, special.eos * frame_B1), dim=1)
        hidden_BND = token_states(model, framed_BN.to(device), num_copies)
        states.append(hidden_BND[:, 1:-1].mean(dim=1).float().cpu())
    return torch.cat(states).numpy()


def likeliest_latents(language: Grammar, word_ids_SN: np.ndarray) -> np.ndarray:
    """Index of the likeliest value of each latent given the whole sentence; (S, C)."""
    is_masked_SN = np.zeros(word_ids_SN.shape, dtype=bool)
    latent_SZ = Contexts(language, word_ids_SN, is_masked_SN).latent_SZ
    joint = latent_SZ.reshape(len(word_ids_SN), *language.prior.shape)
    axes = range(1, joint.ndim)
    return np.stack(
        [joint.sum(axis=tuple(a for a in axes if a != axis)).argmax(axis=1) for axis in axes],
        axis=1,
    )


def readable(state_SD: np.ndarray, latent_SC: np.ndarray, seed: int = 0) -> float:
    """Accuracy on the last ``NUM_TEST`` sentences of probes trained on some of the others."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    num_to_label = len(state_SD) - NUM_TEST
    state_SD = StandardScaler().fit(state_SD[:num_to_label]).transform(state_SD)
    rng, scores = np.random.default_rng(seed), []
    for _ in range(NUM_DRAWS):
        labelled = rng.permutation(num_to_label)[:NUM_LABELLED]
        for value_S in latent_SC.T:
            probe = LogisticRegression(C=1 / WEIGHT_PENALTY, max_iter=500)
            probe.fit(state_SD[labelled], value_S[labelled])
            scores.append(probe.score(state_SD[num_to_label:], value_S[num_to_label:]))
    return float(np.mean(scores))
