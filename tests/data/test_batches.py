"""Which rows a step has: every row once per epoch, by (seed, step) alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import pack_of

from exlm_mini.config import MaskingConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.batches import (
    TokenBatches,
    TrainingBatches,
    epoch_order,
    validation_batches,
)
from exlm_mini.data.masking import Masker

SPECIAL = SpecialIds()
VOCAB_SIZE = 5000


def make_pack(path, lengths):
    """Rows of the given lengths; the second token of a row is 10 + its number."""
    rows = []
    for row, length in enumerate(lengths):
        rows.append([SPECIAL.bos, *[10 + row] * (length - 2), SPECIAL.eos])
    return pack_of(path, rows, VOCAB_SIZE, lengths[0] if len(set(lengths)) == 1 else None)


@pytest.fixture(params=["equal", "ragged"])
def pack(request, tmp_path):
    lengths = {"equal": [8] * 23, "ragged": [4 + n % 9 for n in range(23)]}[request.param]
    return make_pack(tmp_path / "pack.json", lengths)


def masker():
    return Masker(MaskingConfig(0.4), SPECIAL, seed=3)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rows_of(batch):
    """Which row each line of a batch is."""
    return (batch.token_ids_BN[:, 1] - 10).tolist()


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=300),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 2**31),
)
def test_an_epoch_visits_every_row_once(lengths, batch_size, seed, epoch):
    order_R = epoch_order(np.array(lengths, dtype=np.int64), batch_size, seed, epoch)
    assert sorted(order_R.tolist()) == list(range(len(lengths)))
    again_R = epoch_order(np.array(lengths, dtype=np.int64), batch_size, seed, epoch)
    assert np.array_equal(order_R, again_R)


@pytest.mark.parametrize("lengths", [np.full(500, 8), np.arange(500) % 30 + 3])
def test_the_order_depends_on_seed_and_epoch(lengths):
    orders = [
        tuple(epoch_order(lengths, 4, seed, epoch)) for seed in range(3) for epoch in range(3)
    ]
    assert len(set(orders)) == 9


def padding_share(lengths, order, batch_size):
    batches = [lengths[order[i : i + batch_size]] for i in range(0, len(order), batch_size)]
    padded = sum(len(batch) * batch.max() for batch in batches)
    return 1 - lengths.sum() / padded


def test_bucketing_leaves_little_padding_and_does_not_sort_the_epoch():
    lengths = np.random.default_rng(0).integers(5, 101, size=20_000)
    order_R = epoch_order(lengths, 32, 1, 0)
    plain = padding_share(lengths, np.random.default_rng(1).permutation(len(lengths)), 32)
    assert plain > 0.4
    assert padding_share(lengths, order_R, 32) < 0.03
    # Batches of short and long rows come mixed, or training would see a curriculum.
    of_batch = lengths[order_R[: 32 * 600]].reshape(600, 32).mean(axis=1)
    assert abs(np.corrcoef(of_batch, np.arange(600))[0, 1]) < 0.2
    assert abs(np.corrcoef(of_batch[1:], of_batch[:-1])[0, 1]) < 0.2


def test_every_row_comes_once_per_epoch_across_seams(pack):
    batches = TrainingBatches(pack, masker(), batch_size=5, seed=1)
    # 23 steps of 5 rows are 5 epochs of 23 rows, and no epoch ends at the end of a batch.
    seen = [row for step in range(23) for row in rows_of(batches.batch(step))]
    for epoch in range(5):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)]) == list(range(23))
    assert seen[:23] != seen[23:46]


def test_a_batch_does_not_depend_on_the_calls_before(pack):
    forward = TrainingBatches(pack, masker(), batch_size=4, seed=1)
    in_order = [forward.batch(step) for step in range(20)]
    for step in (19, 0, 7, 7, 13):
        fresh = TrainingBatches(pack, masker(), batch_size=4, seed=1).batch(step)
        assert equal(in_order[step], fresh)
        assert equal(in_order[step], forward.batch(step))


def test_a_row_gets_other_masks_in_another_epoch(pack):
    batches = TrainingBatches(pack, masker(), batch_size=23, seed=1)
    first, second = (
        dict(zip(rows_of(b), map(tuple, b.is_masked_BN.tolist()), strict=True))
        for b in (batches.batch(0), batches.batch(1))
    )
    assert sum(first[row] != second[row] for row in range(23)) > 5


def test_another_seed_gives_other_rows(pack):
    rows = [
        tuple(TrainingBatches(pack, masker(), batch_size=23, seed=seed).rows(0)[0])
        for seed in range(3)
    ]
    assert len(set(rows)) == 3


def masks_by_row(batches):
    masks = {}
    for batch in batches:
        for row, mask in zip(rows_of(batch), batch.is_masked_BN, strict=True):
            assert row not in masks
            masks[row] = tuple(mask.nonzero().flatten().tolist())
    return masks


@pytest.mark.parametrize("asked", [1, 20, 1000])
def test_validation_covers_the_asked_rows_once(pack, asked):
    masks = masks_by_row(validation_batches(pack, masker(), asked, 6))
    assert sorted(masks) == list(range(min(asked, 23)))
    assert all(masks.values())


def test_validation_masks_do_not_depend_on_batches_or_on_how_many_rows(pack):
    all_rows = masks_by_row(validation_batches(pack, masker(), 23, 23))
    assert masks_by_row(validation_batches(pack, masker(), 23, 4)) == all_rows
    fewer = masks_by_row(validation_batches(pack, masker(), 9, 4))
    assert fewer == {row: all_rows[row] for row in range(9)}


def test_validation_masks_are_not_those_of_training(pack):
    validation = masks_by_row(validation_batches(pack, masker(), 23, 23))
    batches = TrainingBatches(pack, masker(), batch_size=23, seed=1)
    training = masks_by_row([batches.batch(0)])
    assert sum(validation[row] != training[row] for row in range(23)) > 5


# ---- micro-batches, and processes ----


def test_micro_batches_keep_rows_and_lose_padding(tmp_path):
    pack = make_pack(tmp_path / "pack.json", [4, 4, 12, 6, 5, 9, 7])
    batches = TrainingBatches(pack, masker(), 6, seed=1, micro_size=2)
    batch, parts = batches.batch(0), batches.parts(0)
    assert [len(part.token_ids_BN) for part in parts] == [2, 2, 2]
    for part, start in zip(parts, (0, 2, 4), strict=True):
        width = part.token_ids_BN.shape[1]
        assert width == pack.lengths_R[rows_of(part)].max()
        for cut, whole in zip(part, batch, strict=True):
            assert torch.equal(cut, whole[start : start + 2, :width])
        assert (batch.token_ids_BN[start : start + 2, width:] == SPECIAL.pad).all()
    assert sum(int(part.is_masked_BN.sum()) for part in parts) == int(batch.is_masked_BN.sum())


def test_a_batch_is_masked_by_its_rows_epochs_and_step(pack):
    batches = TrainingBatches(pack, masker(), 6, seed=1)
    for step in range(20):
        row_B, epoch_B = batches.rows(step)
        expected = masker()(pack.gather(row_B)[0], epoch_B, row_B, step)
        (part,) = batches.parts(step)  # one micro-batch is the batch
        assert equal(batches.batch(step), expected) and equal(part, expected)


def dealt(batches, step, world_size):
    """Micro-batches of all processes, in their order."""
    of_rank = [batches.parts(step, rank, world_size) for rank in range(world_size)]
    assert len({len(parts) for parts in of_rank}) == 1
    return [part for parts in zip(*of_rank, strict=True) for part in parts]


@settings(max_examples=20)
@given(
    world_size=st.integers(1, 4),
    num_accumulated=st.integers(1, 3),
    micro=st.integers(1, 4),
    step=st.integers(0, 40),
    seed=st.integers(0, 2**31),
)
def test_processes_share_the_micro_batches_of_a_step(
    ragged, world_size, num_accumulated, micro, step, seed
):
    num_parts = world_size * num_accumulated
    for batches in (
        TrainingBatches(ragged, masker(), micro * num_parts, seed, micro_size=micro),
        TokenBatches(ragged, masker(), 12 * micro, num_parts, seed),
    ):
        alone = batches.parts(step)
        assert len(alone) == num_parts
        shared = dealt(batches, step, world_size)
        assert all(equal(a, b) for a, b in zip(shared, alone, strict=True))
    whole = TrainingBatches(ragged, masker(), micro * num_parts, seed)
    rows = [row for part in dealt(whole, step, world_size) for row in rows_of(part)]
    assert rows == rows_of(whole.batch(step))


def test_a_process_reads_its_own_rows_alone(pack, monkeypatch):
    asked = []
    gather = pack.gather
    monkeypatch.setattr(pack, "gather", lambda rows: asked.extend(rows) or gather(rows))
    batches = TrainingBatches(pack, masker(), 12, seed=1, micro_size=2)
    parts = batches.parts(0, rank=1, world_size=3)
    assert asked == [row for part in parts for row in rows_of(part)]
    assert len(asked) == 4


# ---- batches counted in tokens ----

RAGGED = [4 + n % 9 for n in range(23)]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("ragged") / "pack.json", RAGGED)


@pytest.mark.parametrize("num_tokens", [12, 30, 10_000])
def test_an_epoch_of_token_batches_visits_every_row_once(ragged, num_tokens):
    batches = TokenBatches(ragged, masker(), num_tokens, 3, seed=1)
    num_micro = len(batches.starts) - 1
    for epoch in range(3):
        pieces = [batches.rows(epoch * num_micro + place) for place in range(num_micro)]
        assert sorted(np.concatenate([rows for rows, _ in pieces])) == list(range(23))
        assert {number for _, number in pieces} == {epoch}


@pytest.mark.parametrize("num_tokens", [12, 13, 100])
def test_no_micro_batch_has_more_tokens_than_asked_and_none_could_take_another_row(
    ragged, num_tokens
):
    batches = TokenBatches(ragged, masker(), num_tokens, 1, seed=1)
    sizes = []
    for step in range(len(batches.starts) - 1):
        (part,) = batches.parts(step)
        num_rows, longest = part.token_ids_BN.shape
        assert num_rows * longest <= num_tokens
        sizes.append((num_rows + 1) * longest > num_tokens)
    assert sizes.count(False) <= 1  # the last of an epoch takes what is left


def test_token_batches_hold_rows_of_similar_length():
    # As fairseq's --max-tokens: nearly nothing of a batch is padding.
    class Lengths:
        lengths_R = np.random.default_rng(0).integers(5, 101, size=20_000)

        def __len__(self):
            return len(self.lengths_R)

    batches = TokenBatches(Lengths(), masker(), 4000, 1, seed=1)
    rows = [batches.rows(part)[0] for part in range(len(batches.starts) - 1)]
    padded = sum(len(r) * Lengths.lengths_R[r].max() for r in rows)
    assert 1 - Lengths.lengths_R.sum() / padded < 0.02
    lengths = [Lengths.lengths_R[r].mean() for r in rows]
    assert abs(np.corrcoef(lengths[1:], lengths[:-1])[0, 1]) < 0.2  # shuffled, not sorted


def test_token_batches_are_masked_by_their_rows_epoch_and_step(ragged):
    batches = TokenBatches(ragged, masker(), 30, 2, seed=1)
    for step in range(20):
        for micro, part in enumerate(batches.parts(step)):
            row_B, epoch = batches.rows(2 * step + micro)
            token_ids_BN, _ = ragged.gather(row_B)
            epoch_B = np.full(len(row_B), epoch)
            assert equal(part, masker()(token_ids_BN, epoch_B, row_B, step))


def test_epochs_and_seeds_of_token_batches_differ(ragged):
    num_micro = len(TokenBatches(ragged, masker(), 30, 1, seed=1).starts) - 1
    orders = {
        tuple(np.concatenate([batches.rows(e * num_micro + n)[0] for n in range(num_micro)]))
        for batches in (TokenBatches(ragged, masker(), 30, 1, seed) for seed in range(3))
        for e in range(3)
    }
    assert len(orders) == 9


def test_a_row_of_more_tokens_than_a_micro_batch_is_refused(ragged):
    with pytest.raises(UserError, match=r"12 tokens, more than the 11 .*micro_batch_tokens"):
        TokenBatches(ragged, masker(), 11, 1, seed=1)
