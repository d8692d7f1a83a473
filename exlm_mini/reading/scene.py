"""The content of an explorer, and the distributions of its masks after a reader's choices.

Shapes: S masks, M targets (S + 2), L states, W words of a scene, N input tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, posteriors
from exlm_mini.config.checks import UserError
from exlm_mini.data.tokenizer import Tokenizer, visible
from exlm_mini.reading.decoding import Reading, States, top_tokens

NUM_WORDS_IN_NODE = 3


class Scene(NamedTuple):
    """The content of an explorer, in plain Python for JSON; probabilities, not logs."""

    text: list[str]
    """The visible text before, between and after the masks, S + 1 pieces."""
    labels: list[str]
    """Names of the states, as in ``decoding.States``."""
    owners: list[int]
    """The target each state is a clone of: 0 for [BOS], 1..S for the masks, S + 1 for [EOS]."""
    words: list[str]
    """W words of the vocabulary, as shown by ``visible``."""
    offered: list[list[int]]
    """For each mask the words to choose from, likeliest first; indices into ``words``."""
    token_LW: list[list[float]]
    """P_u(w). Rows sum to less than one where other words of the vocabulary are likely."""
    transition_LL: list[list[float]]
    """E[v, u], zero unless v < u."""

    @property
    def num_masks(self) -> int:
        return len(self.offered)

    def to_json(self) -> str:
        """The scene as one line of JSON, for ``scene_from_json``."""
        return json.dumps(self._asdict(), ensure_ascii=False, allow_nan=False)


class Conditionals(NamedTuple):
    """Distributions once some masks are fixed; all zero if no path allows these choices."""

    probability: float
    """Probability of the choices, summed over all paths; without any, of one step per target."""
    word_SW: np.ndarray
    """P(word of each mask | choices, the path fits)."""
    state_SL: np.ndarray
    """P(state that emits each mask | choices, the path fits)."""
    edge_LL: np.ndarray
    """P(the path takes the edge | choices, the path fits)."""


def scene_from_json(text: str) -> Scene:
    """The scene that ``Scene.to_json`` wrote."""
    return Scene(**json.loads(text))


def read_scene(
    reading: Reading, tokenizer: Tokenizer, masked_ids_BN: Tensor, num_words: int = 12
) -> Scene:
    """Turn a reading into a scene, with numbers of four significant digits.

    Args:
        reading: result of ``read_row``. That of a masked language model becomes a graph with one
            state for each mask, which leads to the next.
        num_words: number of words to choose from for each mask. The scene has the probabilities of
            all these words, and of the likeliest words of each state, for every state.
    """
    states, log_transition_LL = _states_and_links(reading)
    special_ids = tokenizer.special_ids
    offered_SC = top_tokens(reading.log_token_SV, num_words, special_ids)[0].tolist()
    of_states_LC = top_tokens(states.log_token_LV, NUM_WORDS_IN_NODE, special_ids)[0].tolist()
    ids_W = list(dict.fromkeys(i for row in offered_SC + of_states_LC for i in row))
    place = {token_id: w for w, token_id in enumerate(ids_W)}
    return Scene(
        text=_text_between(tokenizer, masked_ids_BN[0]),
        labels=states.labels,
        owners=states.owner_L.tolist(),
        words=[visible(tokenizer, token_id) for token_id in ids_W],
        offered=[[place[token_id] for token_id in row] for row in offered_SC],
        token_LW=_short(states.log_token_LV[:, ids_W].double().exp()),
        transition_LL=_short(log_transition_LL.double().exp()),
    )


def conditionals(
    scene: Scene,
    words: Mapping[int, str] | None = None,
    states: Mapping[int, str] | None = None,
) -> Conditionals:
    """The distribution of every mask given choices for some, summed over all paths.

    Args:
        words: the chosen word of a mask, by the mask's number, from 1.
        states: the label of the state that emits a mask, by the mask's number. A mask may have a
            word or a state, not both.

    Returns:
        Distributions in float64. A mask with a chosen word has that word with probability 1.

    Raises:
        ValueError: for a word, state or mask the scene does not have, or two choices for a mask.
    """
    words, states = dict(words or {}), dict(states or {})
    L, M = len(scene.labels), scene.num_masks + 2
    token_LW = torch.tensor(scene.token_LW, dtype=torch.float64)
    transition_LL = torch.tensor(scene.transition_LL, dtype=torch.float64)
    emission_ML = torch.ones(M, L, dtype=torch.float64)
    for mask in [*words, *states]:
        if not 1 <= mask <= scene.num_masks or (mask in words and mask in states):
            raise ValueError(f"mask {mask}: give one choice for a mask in 1..{scene.num_masks}")
    for mask, word in words.items():
        emission_ML[mask] = token_LW[:, scene.words.index(word)]
    for mask, label in states.items():
        emission_ML[mask] = 0.0
        emission_ML[mask, scene.labels.index(label)] = 1.0
    graph = (emission_ML.log()[None], transition_LL.log()[None])
    counts = (torch.tensor([M]), torch.tensor([L]))
    passes = posteriors(*graph, *counts)
    state_SL = passes.state_BML[0, 1:-1]
    word_SW = state_SL @ token_LW
    for mask, word in words.items():
        # All remaining paths emit this word; without a path, all is zero.
        word_SW[mask - 1] = 0.0
        word_SW[mask - 1, scene.words.index(word)] = state_SL[mask - 1].sum()
    probability = dag_log_likelihood(*graph, *counts).exp().item()
    edge_LL = passes.edge_BLL[0].numpy()
    return Conditionals(probability, word_SW.numpy(), state_SL.numpy(), edge_LL)


def _states_and_links(reading: Reading) -> tuple[States, Tensor]:
    """The states of a reading and log E[v, u] between them, in nats."""
    if reading.states is not None and reading.graph is not None:
        return reading.states, reading.graph.log_transition_LL
    if reading.states is not None:
        raise UserError(
            "an explorer shows the links between states, but those of this model have none; give "
            "a run of an MLM, or of an ExLM with linked states"
        )
    num_masks = len(reading.log_token_SV)
    # The words of [BOS] and [EOS] play no role; those of the masks next to them stand in.
    rows_L = torch.arange(-1, num_masks + 1).clamp(0, num_masks - 1)
    owner_L = torch.arange(num_masks + 2)
    states = States(owner_L, torch.zeros_like(owner_L), reading.log_token_SV[rows_L])
    return states, torch.ones(num_masks + 1).diag(1).log()


def _text_between(tokenizer: Tokenizer, row_N: Tensor) -> list[str]:
    """The text around the masks, without [BOS] and [EOS]."""
    inner_X = row_N[1:-1]
    ends = (inner_X == tokenizer.special_ids.mask).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    pieces = zip(starts, [*ends, len(inner_X)], strict=True)
    return [tokenizer.decode(inner_X[a:b].tolist()).strip() for a, b in pieces]


def _short(probability: Tensor) -> list[list[float]]:
    """Round to four significant digits."""
    return [[float(f"{p:.4g}") for p in row] for row in probability.tolist()]
