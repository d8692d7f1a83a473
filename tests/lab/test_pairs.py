"""Symbols that belong together are paired, and their joint probability is the alignment's.

Shapes: B rows, N tokens of a row, V vocabulary.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from exlm_lab.downstream.inputs import padded
from exlm_lab.experiments import pairs
from exlm_lab.experiments.pairs import bits_of, choose, draw, groups_of, joint_table
from exlm_mini.config import ModelConfig
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.tokenizer import SMILES_SYMBOL, train_smiles
from exlm_mini.model import ExLM, MaskedLM

MOLECULES = [
    "c1ccc2c(c1)Nc1nccnc1S2",
    "CC(=O)C(C)C1CC1C1CC1",
    "c1ccccc1c1ccco1",
    "C%12CC%12C1CC1",
]
TOKENIZER = train_smiles(MOLECULES)
SPECIAL = TOKENIZER.special_ids
SMALL = {"width": 16, "num_heads": 2, "ffn_width": 16, "states_per_mask": 2}
ROWS = [np.array([SPECIAL.bos, *TOKENIZER.encode(text), SPECIAL.eos]) for text in MOLECULES]


def symbols(smiles: str) -> list[str]:
    return re.findall(SMILES_SYMBOL, smiles)


def untrained(kind, **settings):
    torch.manual_seed(3)
    model = kind(ModelConfig(**SMALL, init_std=0.5, **settings), TOKENIZER.vocab_size)
    return model.eval()


def test_groups_are_both_digits_of_a_ring_both_ends_of_a_branch_and_aromatic_rings():
    found = groups_of(symbols("c1ccc2c(c1)Nc1nccnc1S2"))
    assert found["rings"] == [(1, 9), (13, 19), (5, 21)]
    assert found["brackets"] == [(7, 10)]
    assert found["aromatics"] == [(0, 2, 3, 4, 6, 8), (12, 14, 15, 16, 17, 18)]
    assert groups_of(symbols("C%12CC%12[Si]1CC1"))["rings"] == [(1, 4), (6, 9)]
    assert groups_of(symbols("*c1ccccc1"))["aromatics"] == [(1, 3, 4, 5, 6, 7)]
    assert not groups_of(symbols("[H]c1ccccc1"))["aromatics"]


def test_a_control_keeps_the_first_symbol_and_takes_the_second_from_a_group_apart():
    groups = [(1, 9), (13, 19), (5, 21)]
    for seed in range(20):
        together, apart = choose(groups, seed)
        assert together in groups
        (other,) = set(apart) - {together[0]}
        assert other in {group[1] for group in groups} - {together[1]}
        assert (together, apart) == choose(groups, seed)
    assert choose([(0, 1, 2), (2, 3, 4)], 0) is None  # fused rings share an atom


@pytest.mark.parametrize("settings", [{}, {"boundary": "paper"}, {"transition": "uniform"}])
def test_the_joint_is_the_sum_over_paths_of_the_alignment(settings):
    model = untrained(ExLM, **settings)
    token_ids_BN = padded(ROWS, 0)
    place_B2 = torch.tensor([[2, 10], [3, 4], [1, 6], [2, 8]])
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool).scatter(1, place_B2, True)
    masked_BN = token_ids_BN.masked_fill(is_masked_BN, SPECIAL.mask)
    scores = model.answer(MaskedBatch(masked_BN, is_masked_BN, token_ids_BN)).double()
    joint_BVV = joint_table(model, token_ids_BN, place_B2)
    for first, second in ((6, 7), (9, 6)):
        want_B = scores.log_joint(torch.tensor([first, second] * 4)).exp()
        torch.testing.assert_close(joint_BVV[:, first, second], want_B, rtol=1e-5, atol=0)


def test_two_symbols_that_only_go_together_are_one_bit_not_two():
    joint_BVV = torch.tensor([[[0.5, 0.0], [0.0, 0.5]]]).double()
    bits_B, linked_B = bits_of(joint_BVV, torch.tensor([[1, 1]]))
    assert (bits_B.item(), linked_B.item()) == (1.0, 1.0)
    _, scaled_B = bits_of(0.3 * joint_BVV, torch.tensor([[1, 1]]))
    assert scaled_B.item() == pytest.approx(1.0)


def test_fillings_are_drawn_as_often_as_they_are_likely(monkeypatch):
    monkeypatch.setattr(pairs, "NUM_DRAWS", 4000)
    joint_BVV = torch.tensor([[[0.1, 0.3], [0.0, 0.2]]]).double()  # scaled to sum to one
    drawn_D2 = draw(joint_BVV, np.array([5]))[0]
    share_VV = torch.zeros(2, 2).index_put(
        (drawn_D2[:, 0], drawn_D2[:, 1]), torch.tensor(1 / 4000), accumulate=True
    )
    error = 4 * (0.5 * 0.5 / 4000) ** 0.5
    assert (share_VV - joint_BVV[0] / 0.6).abs().max() < error
    assert share_VV[1, 0] == 0
    assert torch.equal(drawn_D2, draw(joint_BVV, np.array([5]))[0])


class Oracle(MaskedLM):
    """Knows the molecules, and is certain of two hidden symbols that are the same."""

    doubt: float
    """Bits that each of two hidden symbols costs if they differ."""

    def forward(self, masked_ids_BN, is_masked_BN):
        found, sure = [], []
        for row_N, is_masked_N in zip(masked_ids_BN, is_masked_BN, strict=True):
            for known in padded(ROWS, 0)[:, : len(row_N)]:
                if torch.equal(known[~is_masked_N], row_N[~is_masked_N]):
                    found.append(known[is_masked_N])
                    sure += [2.0 ** -(self.doubt * (len(set(found[-1].tolist())) > 1))] * 2
                    break
        p_S1 = torch.tensor(sure).unsqueeze(1)
        rest_SV = ((1 - p_S1) / (TOKENIZER.vocab_size - 1)).expand(-1, TOKENIZER.vocab_size)
        return rest_SV.scatter(1, torch.cat(found).unsqueeze(1), p_S1).log()


@pytest.mark.parametrize("doubt", [0.0, 3.0])
def test_bits_are_those_that_each_pair_costs(doubt):
    model = untrained(Oracle)
    model.doubt = doubt
    found = pairs.pair_metrics(model, TOKENIZER, ROWS)
    assert len(found) == 3 * (2 * 3 + 1)
    cost = {}
    for kind in pairs.KINDS:
        costs = []
        for n, smiles in enumerate(MOLECULES):
            if pair := choose(groups_of(symbols(smiles))[kind], n):
                alike = (len({symbols(smiles)[i] for i in places}) == 1 for places in pair)
                costs.append([0 if is_alike else 2 * doubt for is_alike in alike])
        together, apart = np.mean(costs, axis=0)
        cost |= {f"{kind}_together_bits": together, f"{kind}_apart_bits": apart}
        cost[f"{kind}_gap_bits"] = together - apart
    for name, value in found.items():
        if name.endswith("valid"):
            assert (value == 1) == (cost[name.replace("valid", "bits")] == 0)
        else:
            assert value == pytest.approx(cost.get(name, 0), abs=1e-6)
    assert found["rings_gap_bits"] < 0 or doubt == 0
