"""A toy language small enough to list all of its sentences with their probabilities.

Shapes: S sentences, N words.
"""

import itertools

import numpy as np

from exlm_mini.data.toy import Grammar, Position

# Small enough to list, with everything the large one has: interacting latents, a word
# shared by two values, unequal weights, a position driven by two latents, free and fixed words.
SMALL = Grammar(
    "small",
    {"mood": ("glad", "grim"), "number": ("one", "many")},
    np.array([[0.4, 0.2], [0.1, 0.3]]),
    (
        Position({("glad",): "a b shared", ("grim",): "c shared shared"}, ("mood",)),
        Position({(): "x y y"}),
        Position(
            {
                ("one", "glad"): "p",
                ("one", "grim"): "q",
                ("many", "glad"): "q r",
                ("many", "grim"): "p q r",
            },
            ("number", "mood"),
        ),
        Position({(): "end"}),
        Position({("one",): "is", ("many",): "are is"}, ("number",)),
    ),
)
MASKS = [np.array(m) for m in itertools.product([False, True], repeat=SMALL.length) if any(m)]


def whole_language(language: Grammar) -> tuple[np.ndarray, np.ndarray]:
    """Every sentence with its probability, computed from the definition alone."""
    ids = {word: i for i, word in enumerate(language.words)}
    latent_values = list(itertools.product(*language.latents.values()))
    sentences, probabilities = [], []
    options = [sorted({*" ".join(p.choices.values()).split()}) for p in language.positions]
    for words in itertools.product(*options):
        total = 0.0
        for values, prior in zip(latent_values, language.prior.reshape(-1), strict=True):
            value = dict(zip(language.latents, values, strict=True))
            for word, position in zip(words, language.positions, strict=True):
                choice = position.choices[tuple(value[n] for n in position.latents)].split()
                prior *= choice.count(word) / len(choice)
            total += prior
        if total > 0:
            sentences.append([ids[word] for word in words])
            probabilities.append(total)
    return np.array(sentences), np.array(probabilities)


SENTENCES, PROBABILITY = whole_language(SMALL)


def log_probability(
    language: Grammar, word_ids_SN: np.ndarray, is_kept_N: np.ndarray | None = None
) -> np.ndarray:
    """Log-probability of sentences, or of their kept words, (S,) in nats; -inf if impossible."""
    weight_SZ = language.prior.reshape(-1)
    for n in range(language.length) if is_kept_N is None else np.flatnonzero(is_kept_N):
        weight_SZ = weight_SZ * language.word_probability_NZV[n].T[word_ids_SN[:, n]]
    with np.errstate(divide="ignore"):
        return np.log(weight_SZ.sum(axis=-1))
