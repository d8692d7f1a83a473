"""Pairs of dependent symbols of a molecule, hidden together: does the model link them?

Symbols that only occur together, such as both digits of a ring, cannot be predicted
independently: each may be likely on its own while the combination is impossible. As a control, two
symbols of the same kinds are hidden that belong to different groups of the molecule. With two masks
the probability of every filling is computed exactly in one pass.

Shapes: B rows, N tokens of a row, k states, L states of a row, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream.inputs import evaluation_batches, padded
from exlm_mini.data.masking import MaskedBatch, counter_uniform
from exlm_mini.data.molecules import read_molecule
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import nats_to_bits

KINDS = ("rings", "brackets", "aromatics")
"""Kinds of pairs: both digits of a ring, both ends of a branch, two aromatic atoms of a ring."""
ARRANGEMENTS = ("together", "apart")
"""Two symbols of one group, or the first of these and the second's counterpart in another group."""
NUM_MOLECULES = 1000
"""Most molecules to measure for each kind."""
NUM_DRAWS = 4
"""Fillings drawn for each molecule."""
BATCH_ROWS = 64


def groups_of(symbols: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Groups of symbols that belong together in a SMILES, by kind; each group as its places."""
    groups: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
    open_rings: dict[str, int] = {}
    open_branches, atoms = [], []
    for place, symbol in enumerate(symbols):
        if symbol[0] == "%" or symbol.isdigit():
            if symbol in open_rings:
                groups["rings"].append((open_rings.pop(symbol), place))
            else:
                open_rings[symbol] = place
        elif symbol == "(":
            open_branches.append(place)
        elif symbol == ")":
            groups["brackets"].append((open_branches.pop(), place))
        elif symbol[0] in "[*" or symbol[0].isalpha():
            atoms.append(place)
    molecule = read_molecule("".join(symbols))
    # RDKit drops explicit hydrogens; its atom numbers are then not those of the symbols.
    has_all = len(atoms) == molecule.GetNumAtoms()
    for ring in molecule.GetRingInfo().AtomRings() if has_all else ():
        if all(molecule.GetAtomWithIdx(atom).GetIsAromatic() for atom in ring):
            groups["aromatics"].append(tuple(sorted(atoms[atom] for atom in ring)))
    return groups


def choose(groups: list[tuple[int, ...]], seed: int) -> tuple[tuple[int, int], ...] | None:
    """Places of a pair for each arrangement; None for a molecule without two disjoint groups."""
    disjoint = [(a, b) for a in groups for b in groups if not set(a) & set(b)]
    if not disjoint:
        return None
    rng = np.random.default_rng(seed)
    one, other = disjoint[rng.integers(len(disjoint))]
    places = rng.choice(min(len(one), len(other)), 2, replace=False)
    i, j = sorted(places.tolist())
    return (one[i], one[j]), tuple(sorted((one[i], other[j])))


@torch.no_grad()
def joint_table(model: MaskedLM | ExLM, token_ids_BN: Tensor, place_B2: Tensor) -> Tensor:
    """P(both hidden tokens | context) of every filling, (B, V, V), float64.

    Args:
        model: in evaluation mode; ExLM's states must be linked (not ``ctc``).
        token_ids_BN: int64, framed and padded.
        place_B2: int64, the two places to hide in each row, in increasing order.

    Returns:
        For MLM the product of the two predictions. For ExLM the sum over paths with one state per
        mask; a table may sum to less than 1, because other paths take more or fewer steps (see
        ``decoding``).
    """
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool).scatter(1, place_B2, True)
    masked_ids_BN = token_ids_BN.masked_fill(is_masked_BN, model.special_ids.mask)
    if isinstance(model, MaskedLM):
        token_SV = model(masked_ids_BN, is_masked_BN).double().softmax(dim=1)
        first_BV, second_BV = token_SV.unflatten(0, (-1, 2)).unbind(dim=1)
        return first_BV.unsqueeze(2) * second_BV.unsqueeze(1)
    scores = model.answer(MaskedBatch(masked_ids_BN, is_masked_BN, token_ids_BN)).double()
    assert scores.log_transition_BLL is not None
    edge_BLL = scores.log_transition_BLL.exp().triu(1)
    # A path has three steps: from the first state, by one state per mask, to the last.
    path_BLL = edge_BLL[:, :1].transpose(1, 2) * edge_BLL * edge_BLL[:, :, -1:].transpose(1, 2)
    token_BLV = scores.log_token_BLV.exp()
    return token_BLV.transpose(1, 2) @ path_BLL @ token_BLV


def pair_metrics(
    model: MaskedLM | ExLM, tokenizer: Tokenizer, rows: list[np.ndarray]
) -> dict[str, float]:
    """Bits of hidden pairs, and the share of fillings RDKit accepts, by kind and arrangement.

    Returns:
        ``rings_together_bits``: -log2 P(both true symbols | context), mean over molecules;
        ``rings_gap_bits``: the same minus that of the control, ``rings_apart_bits``;
        ``rings_together_linked``: bits the joint saves over the product of its own marginals;
        ``rings_together_valid``: share of ``NUM_DRAWS`` fillings drawn from the joint that make a
        molecule; and likewise for the other kinds. A kind that no molecule has is left out.
    """
    symbols: list[list[str]] = []
    pairs: dict[str, dict[int, tuple]] = {kind: {} for kind in KINDS}
    for n, row in enumerate(rows):
        symbols.append([tokenizer.token(i) for i in row[1:-1].tolist()])
        for kind, groups in groups_of(symbols[n]).items():
            pair = choose(groups, n)
            if pair is not None and len(pairs[kind]) < NUM_MOLECULES:
                pairs[kind][n] = pair
        if all(len(of_kind) == NUM_MOLECULES for of_kind in pairs.values()):
            break
    numbers: dict[str, float] = {}
    for kind, of_kind in pairs.items():
        if not of_kind:
            continue
        for arrangement, places in zip(
            ARRANGEMENTS, zip(*of_kind.values(), strict=True), strict=True
        ):
            values = _read(
                model, tokenizer, rows, symbols, dict(zip(of_kind, places, strict=True))
            )
            numbers |= {f"{kind}_{arrangement}_{name}": value for name, value in values.items()}
        together, apart = (numbers[f"{kind}_{name}_bits"] for name in ARRANGEMENTS)
        numbers[f"{kind}_gap_bits"] = together - apart
    return numbers


def _read(
    model: MaskedLM | ExLM,
    tokenizer: Tokenizer,
    rows: list[np.ndarray],
    symbols: list[list[str]],
    places: dict[int, tuple[int, int]],
) -> dict[str, float]:
    """``bits``, ``linked`` and ``valid`` for one pair in each of some rows, given by its places."""
    read, num_valid, numbers = [], 0, np.array(list(places))
    device, pad = next(model.parameters()).device, model.special_ids.pad
    for batch in evaluation_batches(np.array([len(rows[n]) for n in numbers]), BATCH_ROWS):
        chosen = numbers[batch]
        token_ids_BN = padded([rows[n] for n in chosen], pad)
        place_B2 = torch.tensor([places[n] for n in chosen]) + 1  # after [BOS]
        joint_BVV = joint_table(model, token_ids_BN.to(device), place_B2.to(device)).cpu()
        read.append(torch.stack(bits_of(joint_BVV, token_ids_BN.gather(1, place_B2))))
        for n, drawn_D2 in zip(chosen, draw(joint_BVV, chosen), strict=True):
            text, (i, j) = symbols[n].copy(), places[n]
            for filling in drawn_D2.tolist():
                text[i], text[j] = map(tokenizer.token, filling)
                num_valid += read_molecule("".join(text)) is not None
    bits, linked = torch.cat(read, dim=1).mean(dim=1).tolist()
    return {"bits": bits, "linked": linked, "valid": num_valid / (NUM_DRAWS * len(numbers))}


def bits_of(joint_BVV: Tensor, token_ids_B2: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of the true tokens under the joint, and how many more under its own marginals; (B,).

    For the second, the joint is scaled to sum to one. Its mean over fillings drawn from the joint
    is never below 0, and is 0 if the two predictions do not depend on each other.
    """
    row_B = torch.arange(len(joint_BVV))
    first_B, second_B = token_ids_B2.unbind(dim=1)
    joint_B, whole_B = joint_BVV[row_B, first_B, second_B], joint_BVV.sum(dim=(1, 2))
    first_B, second_B = joint_BVV.sum(2)[row_B, first_B], joint_BVV.sum(1)[row_B, second_B]
    linked_B = nats_to_bits((joint_B * whole_B).log() - (first_B * second_B).log())
    return nats_to_bits(-joint_B.log()), linked_B


def draw(joint_BVV: Tensor, number_B: np.ndarray) -> Tensor:
    """Draw fillings from the joint of each row, which need not sum to one; (B, NUM_DRAWS, 2).

    The random numbers depend only on the row numbers, not on the batch.
    """
    noise_BD = torch.from_numpy(
        counter_uniform(number_B[:, None], np.arange(NUM_DRAWS)[None, :])
    )
    rising_BX = joint_BVV.flatten(1).cumsum(dim=1)
    at_BD = torch.searchsorted(rising_BX, noise_BD * rising_BX[:, -1:], right=True)
    return torch.stack((at_BD // joint_BVV.shape[2], at_BD % joint_BVV.shape[2]), dim=2)
