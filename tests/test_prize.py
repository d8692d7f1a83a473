"""The prize: the chain rule by hand, what links win where there are any, and what is printed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.pretrain import main
from exlm_mini.reading.prize import Prize, at_once, in_turn

PAD, BOS, EOS, UNK, SEP, MASK = SpecialIds()
V = 12
SMALL = {
    "num_layers": 1, "width": 16, "ffn_width": 24, "num_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "max_positions": 48, "init_std": 0.5, "states_per_mask": 3,
}  # fmt: skip


def make_model(kind: type = MaskedLM, **changes):
    torch.manual_seed(0)
    return kind(ModelConfig(**{**SMALL, **changes}), V).double().eval()


def make_batch() -> MaskedBatch:
    """Rows with 3, 1 and 2 masks."""
    token_ids_BN = torch.tensor(
        [[BOS, 6, 7, 8, 9, EOS], [BOS, 7, 6, EOS, PAD, PAD], [BOS, 6, 11, 7, EOS, PAD]]
    )
    is_masked_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    is_masked_BN[0, [1, 2, 4]] = is_masked_BN[1, 2] = is_masked_BN[2, [1, 2]] = True
    return MaskedBatch(token_ids_BN.masked_fill(is_masked_BN, MASK), is_masked_BN, token_ids_BN)


def left_to_right(batch: MaskedBatch) -> Tensor:
    return torch.arange(batch.token_ids_BN.shape[1]).expand(batch.token_ids_BN.shape)


@pytest.mark.parametrize("is_reversed", [False, True])
@torch.no_grad()
def test_in_turn_is_the_chain_rule_by_hand(is_reversed):
    model, batch = make_model(), make_batch()
    order_BN = -left_to_right(batch) if is_reversed else left_to_right(batch)
    ours_B = in_turn(model, batch, order_BN)
    for b, (masked_N, is_masked_N, token_N) in enumerate(zip(*batch, strict=True)):
        known_N, expected = masked_N.clone(), 0.0
        places = is_masked_N.nonzero().flatten().tolist()
        for place in sorted(places, reverse=is_reversed):
            at_place_N = torch.arange(len(known_N)) == place
            logits_V = model(known_N[None], at_place_N[None])[0]
            expected -= logits_V.log_softmax(0)[token_N[place]].item() / torch.log(
                torch.tensor(2.0)
            )
            known_N[place] = token_N[place]
        assert abs(ours_B[b] - expected) < 1e-5


@torch.no_grad()
def test_one_mask_costs_the_same_at_once_and_in_turn():
    batch = make_batch()
    for model in (make_model(), make_model(ExLM, transition="spans")):
        alone_S, joint_B, _ = at_once(model, batch)
        only_B = in_turn(model, batch, left_to_right(batch))
        assert abs(only_B[1] - alone_S[3]) < 1e-9 and abs(only_B[1] - joint_B[1]) < 1e-5


@pytest.mark.parametrize("boundary", ["official", "paper"])
@torch.no_grad()
def test_links_win_nothing_between_spans_and_something_within(boundary):
    batch = make_batch()
    for transition, is_linked in (("uniform", False), ("spans", True)):
        model = make_model(ExLM, transition=transition, boundary=boundary)
        alone_S, joint_B, use_k = at_once(model, batch)
        row_S = batch.is_masked_BN.nonzero()[:, 0]
        gap_B = torch.zeros(3, dtype=torch.float64).index_add(0, row_S, alone_S) - joint_B
        assert (gap_B.abs() > 1e-3).tolist() == [is_linked, False, is_linked]
        assert abs(use_k.sum() - 6) < 1e-5 and use_k.min() >= 0  # a path passes each mask once


def test_the_line_names_bits_links_prize_and_clones():
    prize = Prize(
        9, at_once=16.6, left_to_right=12.0, any_order=12.5, joint=16.0, clones_used=1.96
    )
    assert prize.describe(2) == (
        "16.00 bits a row (links win 0.60 of a prize of 4.60; 1.96 of 2 clones used)"
    )
    assert prize._replace(joint=16.6, clones_used=None).describe(1) == (
        "16.60 bits a row (a prize of 4.60)"
    )


def test_pretraining_ends_with_it(tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text("""
        objective: exlm
        model: {width: 16, ffn_width: 16, num_heads: 2, transition: spans}
        masking: {strategy: spans}
        data: {kind: smiles, max_documents: 200}
        train: {steps: 2, batch_size: 4, warmup_steps: 1, validation_rows: 8}
    """)
    assert main(["--recipe", str(file), "--output", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    line = re.search(r"exlm, held-out rows: .*", output)
    assert line and "bits a row (links win" in line[0] and "clones used" in line[0]
    filled = re.findall(
        r"held-out rows filled ([a-z0-9, ]+): [\d.]+% readable, [\d.]+% exact", output
    )
    assert filled == [
        "at once", "at once, best of 16", "in turn", "at once, sampled", "in turn, sampled",
    ]  # fmt: skip
