"""Fill the masks of whole batches, and measure how many fillings are molecules.

In one pass, an MLM fills each mask by itself; ExLM fills all of them together, along one path
through its states. In turn, each mask is filled in a pass of its own, which sees the tokens filled
in before: it takes as many passes as there are masks, and is the best that either model can do.

Shapes: B rows, N tokens, S masked tokens of a batch, M targets, L states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.vectorized import log_to_come
from exlm_mini.data.batches import validation_batches
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.data.molecules import read_molecule, require_rdkit
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.answers import StateScores
from exlm_mini.reading.decoding import not_offered
from exlm_mini.reading.prize import every_other, from_left, num_turns

ROWS_AT_ONCE = 32
NUM_PATHS = 16
"""Paths that ``measure_fillings`` samples, see ``num_paths`` of ``fill_at_once``."""


class Filled(NamedTuple):
    """How well the hidden symbols of some molecules were filled, as shares of these molecules."""

    readable: float
    """Share that RDKit can read."""
    exact: float
    """Share that equals the molecule before masking."""

    def describe(self) -> str:
        """Both as percentages."""
        return f"{100 * self.readable:.1f}% readable, {100 * self.exact:.1f}% exact"


@torch.no_grad()
def fill_at_once(
    model: MaskedLM | ExLM,
    batch: MaskedBatch,
    generator: torch.Generator | None = None,
    chain_share: float = 0.0,
    num_paths: int = 0,
) -> Tensor:
    """Fill all masks of each row in one pass; returns filled_ids_BN.

    A row for which no path fits is filled with tokens of its last state.

    Args:
        model: in evaluation mode.
        batch: rows without copies; their true tokens are not read.
        generator: on the CPU, to sample: for ExLM first a path, by its probability, then a token
            from each of its states. If None, the likeliest tokens are filled in, for ExLM those of
            the best path (``decoding.read_row``).
        num_paths: ExLM without a generator also tries the likeliest tokens along this many sampled
            paths (the same at every call), and takes the filling with the largest joint
            probability, a sum over all paths that needs no other pass. For an MLM the likeliest
            tokens are the likeliest filling; for ExLM those of the best path need not be.
    """
    masked_ids_BN, is_masked_BN, _ = batch
    filled_ids_BN = masked_ids_BN.clone()
    said = model.answer(batch._replace(token_ids_BN=masked_ids_BN), chain_share)
    if not isinstance(said, StateScores) or not said.is_linked:
        filled_ids_BN[is_masked_BN] = _choose(said.log_token_SV, model, generator)
        return filled_ids_BN
    graph, log_token_BLV = said.graph, said.log_token_BLV.clone()
    log_token_BLV[..., not_offered(model.special_ids)] = -torch.inf
    draws = torch.Generator().manual_seed(0)
    paths = [_path(said, log_token_BLV, generator)]
    paths += [_path(said, log_token_BLV, draws) for _ in range(num_paths)]
    row_S, target_S = graph.is_mask_BM.nonzero(as_tuple=True)
    state_CS = torch.stack([path_BM[row_S, target_S] for path_BM in paths])
    state_CS = torch.where(state_CS < 0, graph.num_states_B[row_S] - 1, state_CS)
    tokens_CS = torch.stack(
        [_choose(log_token_BLV[row_S, state_S], model, generator) for state_S in state_CS]
    )
    best_B = torch.zeros_like(graph.num_targets_B)
    if num_paths:
        best_B = torch.stack([*map(said.log_joint, tokens_CS)]).argmax(dim=0)
    filled_ids_BN[is_masked_BN] = tokens_CS[best_B[row_S], torch.arange(len(row_S))]
    return filled_ids_BN


@torch.no_grad()
def fill_in_turn(
    model: MaskedLM | ExLM,
    batch: MaskedBatch,
    generator: torch.Generator | None = None,
    chain_share: float = 0.0,
    turns: Callable[[Tensor], Tensor] = from_left,
) -> Tensor:
    """Fill the masks of each row in turn; other arguments as for ``fill_at_once``.

    Args:
        turns: gives the turn of each mask, from 0, for ``is_masked_BN``.
    """
    filled_ids_BN, is_masked_BN, turn_BN = (
        batch.masked_ids_BN.clone(),
        batch.is_masked_BN,
        turns(batch.is_masked_BN),
    )
    for turn in range(num_turns(is_masked_BN, turn_BN)):
        is_left_BN = is_masked_BN & (turn_BN >= turn)
        has_B = is_left_BN.any(dim=1)
        part = MaskedBatch(filled_ids_BN[has_B], is_left_BN[has_B], filled_ids_BN[has_B])
        filled = fill_at_once(model, part, generator, chain_share)
        is_now_BN = is_left_BN & (turn_BN == turn)
        filled_ids_BN[is_now_BN] = filled[is_now_BN[has_B]]
    return filled_ids_BN


def measure_fillings(
    model: MaskedLM | ExLM,
    tokenizer: Tokenizer,
    pack: Pack,
    masker: Masker,
    num_rows: int = 128,
    chain_share: float = 0.0,
) -> dict[str, Filled]:
    """Measure how well some held-out molecules are filled; rows and masks are always the same.

    Returns:
        The shares of readable and exact molecules for each way of filling: ``at once``,
        ``at once, best of 16`` (see ``NUM_PATHS``), ``in two passes`` (see ``every_other``),
        ``in turn``, ``at once, sampled`` and ``in turn, sampled``.
    """
    require_rdkit()
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    best = partial(fill_at_once, num_paths=NUM_PATHS)
    ways: dict[str, tuple[Callable[..., Tensor], torch.Generator | None]] = {
        "at once": (fill_at_once, None),
        f"at once, best of {NUM_PATHS}": (best, None),
        "in two passes": (partial(fill_in_turn, turns=every_other), None),
        "in turn": (fill_in_turn, None),
        "at once, sampled": (fill_at_once, generators[0]),
        "in turn, sampled": (fill_in_turn, generators[1]),
    }
    counts, num_filled = {name: [0, 0] for name in ways}, 0
    for batch in validation_batches(pack, masker, num_rows, ROWS_AT_ONCE):
        batch = batch.to(device)
        num_filled += len(batch.token_ids_BN)
        for name, (fill, generator) in ways.items():
            filled_ids_BN = fill(model, batch, generator, chain_share)
            counts[name][0] += sum(
                read_molecule(_smiles(row_N, tokenizer)) is not None
                for row_N in filled_ids_BN.tolist()
            )
            counts[name][1] += int((filled_ids_BN == batch.token_ids_BN).all(dim=1).sum())
    model.train(was_training)
    return {name: Filled(*(n / num_filled for n in both)) for name, both in counts.items()}


def _smiles(row_N: list[int], tokenizer: Tokenizer) -> str:
    special = {*tokenizer.special_ids} - {tokenizer.special_ids.unk}
    return "".join(tokenizer.token(i) for i in row_N if i not in special)


def _path(
    scores: StateScores, log_token_BLV: Tensor, generator: torch.Generator | None
) -> Tensor:
    """path_BM: the best path or, with a generator, a sampled one; -1 at padding."""
    if generator is None:
        return scores.best_path(log_token_BLV.amax(dim=2))[0]
    graph, any_token_BML = scores.graph, torch.zeros_like(scores.log_emission_BML)
    log_to_come_MBL, log_edge_BLL = log_to_come(any_token_BML, *scores.links)
    row_B = torch.arange(len(log_edge_BLL), device=log_edge_BLL.device)
    path_BM = torch.zeros_like(graph.target_ids_BM)
    for i in range(1, path_BM.shape[1]):
        log_next_BL = log_edge_BLL[row_B, path_BM[:, i - 1]] + log_to_come_MBL[i]
        is_on_B = i < graph.num_targets_B
        log_next_BL[~is_on_B] = 0.0
        path_BM[:, i] = _draw(log_next_BL, generator).masked_fill(~is_on_B, 0)
    target_M = torch.arange(path_BM.shape[1], device=path_BM.device)
    return path_BM.masked_fill(target_M >= graph.num_targets_B.unsqueeze(1), -1)


def _choose(
    log_token_SV: Tensor, model: MaskedLM | ExLM, generator: torch.Generator | None
) -> Tensor:
    """token_ids_S: the likeliest tokens or, with a generator, sampled ones."""
    log_token_SV = log_token_SV.clone()
    log_token_SV[:, not_offered(model.special_ids)] = -torch.inf
    return log_token_SV.argmax(dim=1) if generator is None else _draw(log_token_SV, generator)


def _draw(log_share_XY: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index of Y for each X, with probabilities proportional to exp(log_share_XY)."""
    noise_XY = torch.rand(log_share_XY.shape, generator=generator, dtype=torch.float64)
    # The argmax of log p plus Gumbel noise is a sample from p.
    gumbel_XY = -(-noise_XY.log()).log()
    return (log_share_XY.double() + gumbel_XY.to(log_share_XY.device)).argmax(dim=1)
