"""The prize: bits of masks at once, in turn and together, against sums over all fillings."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from linked_models import CONFIGS, LINKED, exlm, log_joints, masked_lm, of_mask, ragged_batch
from small_models import MASK, alone

from exlm_mini.pretrain import main
from exlm_mini.reading import prize
from exlm_mini.reading.prize import Prize, at_once, every_other, from_left, in_turn

ROWS = [alone(ragged_batch(), b) for b in range(3)]


def bits(p: torch.Tensor, *token_ids: int) -> float:
    """Bits of one token for each mask; the table of probabilities is normalised first."""
    return -math.log2(p[token_ids] / p.sum())


@pytest.mark.parametrize("name", ["gated", "spans", "chains", "mlm"])
@torch.no_grad()
def test_at_once_each_mask_is_by_itself_and_together_they_are_joint(name):
    model = masked_lm() if name == "mlm" else exlm(LINKED[name])
    alone_S, joint_B, use_k = at_once(model, ragged_batch())
    want_S, want_B = [], []
    for row in ROWS:
        joint = log_joints(model, row).exp()
        hidden = row.token_ids_BN[row.is_masked_BN].tolist()
        want_S += [bits(of_mask(joint, s), token_id) for s, token_id in enumerate(hidden)]
        want_B.append(-math.log2(joint[tuple(hidden)]))
    assert alone_S.tolist() == pytest.approx(want_S, rel=1e-6)
    assert joint_B.tolist() == pytest.approx(want_B, rel=1e-6)
    if name in ("spans", "chains"):  # their paths pass each mask once
        assert abs(use_k.sum() - 6) < 1e-5 and use_k.min() >= 0


@pytest.mark.parametrize("order", ["forwards", "backwards", "two passes"])
@pytest.mark.parametrize("name", ["gated", "mlm"])
@torch.no_grad()
def test_in_turn_each_mask_is_given_those_of_earlier_turns(name, order):
    model, batch = masked_lm() if name == "mlm" else exlm(LINKED[name]), ragged_batch()
    is_masked_BN = batch.is_masked_BN
    turn_BN = every_other(is_masked_BN) if order == "two passes" else from_left(is_masked_BN)
    if order == "backwards":
        turn_BN = is_masked_BN.sum(dim=1, keepdim=True) - 1 - turn_BN
    ours_B = in_turn(model, batch, turn_BN)
    for row, turn_N, ours in zip(ROWS, turn_BN, ours_B.tolist(), strict=True):
        places, expected = row.is_masked_BN[0].nonzero().flatten().tolist(), 0.0
        for place in places:
            known_1N, token_id = row.masked_ids_BN.clone(), row.token_ids_BN[0, place]
            for other in places:
                if turn_N[other] < turn_N[place]:
                    known_1N[0, other] = row.token_ids_BN[0, other]
            part = row._replace(masked_ids_BN=known_1N, is_masked_BN=known_1N == MASK)
            asked = int((known_1N[0, :place] == MASK).sum())
            expected += bits(of_mask(log_joints(model, part).exp(), asked), int(token_id))
        assert ours == pytest.approx(expected, rel=1e-6)


def test_two_passes_take_every_other_mask_of_a_run():
    is_masked_1N = torch.tensor([[True, True, True, False, True, False, False, True, True]])
    assert every_other(is_masked_1N)[is_masked_1N].tolist() == [0, 1, 0, 0, 0, 1]


@torch.no_grad()
def test_in_turn_has_the_chains_of_its_step():
    model, batch = exlm(LINKED["gated"]), ragged_batch()
    row_S = batch.is_masked_BN.nonzero()[:, 0]
    one_turn_BN = torch.zeros_like(batch.token_ids_BN)
    bits_2B = []
    for share in (0.0, 0.5):
        alone_S = at_once(model, batch, share)[0]
        bits_2B.append(torch.zeros(3, dtype=torch.float64).index_add(0, row_S, alone_S))
        torch.testing.assert_close(in_turn(model, batch, one_turn_BN, share), bits_2B[-1])
    assert not torch.allclose(*bits_2B)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_prize_is_the_mean_of_all_rows_without_dropout(is_training, monkeypatch):
    batches = [ragged_batch(), ROWS[0]]
    monkeypatch.setattr(prize, "validation_batches", lambda *_: iter(batches))
    model, sums, use_k = exlm(replace(LINKED["spans"], dropout=0.5)), 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            alone_S, joint_B, own_use_k = at_once(model, batch, 0.25)
            turned = (
                in_turn(model, batch, turns(batch.is_masked_BN), 0.25).sum()
                for turns in (from_left, every_other)
            )
            sums = sums + torch.stack([alone_S.sum(), *turned, joint_B.sum()])
            use_k = use_k + own_use_k
    found = prize.measure_prize(model.train(is_training), None, None, chain_share=0.25)
    assert found.num_rows == 4 and model.training is is_training
    assert found[1:5] == pytest.approx((sums / 4).tolist())
    entropy = torch.distributions.Categorical(use_k).entropy()
    assert found.clones_used == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("name", ["uniform", "spans", "late"])
@torch.no_grad()
def test_links_win_nothing_between_spans_and_something_within(name):
    batch = ragged_batch()
    alone_S, joint_B, _ = at_once(exlm(CONFIGS[name]), batch)
    row_S = batch.is_masked_BN.nonzero()[:, 0]
    gap_B = torch.zeros(3, dtype=torch.float64).index_add(0, row_S, alone_S) - joint_B
    is_linked = name != "uniform"
    assert (gap_B.abs() > 1e-3).tolist() == [is_linked, False, is_linked]


def test_the_line_says_what_there_was_to_win_and_what_was_won():
    measured = Prize(
        num_rows=9, at_once=16.6, left_to_right=12.0, two_passes=13.5, joint=16.0,
        clones_used=1.96,
    )  # fmt: skip
    assert measured.describe(2) == (
        "16.00 bits a row (links win 0.60, a second pass 3.10 of a prize of 4.60; "
        "1.96 of 2 clones used)"
    )
    assert "links" not in measured._replace(joint=16.6, clones_used=None).describe(1)


@pytest.mark.parametrize(("kind", "strategy"), [("smiles", "spans"), ("text", "units")])
def test_pretraining_ends_with_it(kind, strategy, tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(f"""
        objective: exlm
        model: {{width: 16, ffn_width: 16, num_heads: 2, transition: spans}}
        masking: {{strategy: {strategy}}}
        data: {{kind: {kind}, max_documents: 200, block_length: 64, vocab_size: 400}}
        train: {{steps: 2, batch_size: 4, warmup_steps: 1, validation_rows: 8}}
    """)
    assert main(["--recipe", str(file), "--output", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    line = re.search(r"exlm, held-out rows: .*", output)
    assert line and "bits a row (links win" in line[0] and "clones used" in line[0]
    ways = r"held-out rows filled ([a-z0-9, ]+): [\d.]+% readable, [\d.]+% exact"
    assert len(set(re.findall(ways, output))) == (6 if kind == "smiles" else 0)
