"""Which rows a step gets: every row once per epoch, determined by seed and step alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import pack_of, whole

from exlm_mini.config import MaskingConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.batches import (
    VALIDATION_EPOCH,
    TokenBatches,
    TrainingBatches,
    epoch_order,
    validation_batches,
)
from exlm_mini.data.masking import Masker

SPECIAL = SpecialIds()
VOCAB_SIZE = 5000


def make_pack(path, lengths):
    """A pack of rows of the given lengths; the second token of a row is 10 + the row number."""
    rows = [
        [SPECIAL.bos, *[10 + n] * (lengths[n] - 2), SPECIAL.eos] for n in range(len(lengths))
    ]
    return pack_of(path, rows, VOCAB_SIZE, lengths[0] if len(set(lengths)) == 1 else None)


LENGTHS = {"equal": [8] * 23, "ragged": [4 + n % 9 for n in range(23)]}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {name: make_pack(folder / f"{name}.json", some) for name, some in LENGTHS.items()}


@pytest.fixture(params=LENGTHS)
def pack(request, packs):
    return packs[request.param]


@pytest.fixture(scope="module")
def ragged(packs):
    return packs["ragged"]


def masker():
    return Masker(MaskingConfig(0.4), SPECIAL, seed=3)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rows_of(batch):
    """The row number of each line of a batch."""
    return (batch.token_ids_BN[:, 1] - 10).tolist()


KINDS = {
    "rows": lambda pack, seed=1: TrainingBatches(pack, masker(), 5, seed),
    "tokens": lambda pack, seed=1: TokenBatches(pack, masker(), 30, 1, seed),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def rows_and_epochs(batches, step):
    row_B, epoch_B = batches.rows(step)
    return row_B, np.broadcast_to(epoch_B, row_B.shape)


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


@every_kind
def test_every_row_comes_once_per_epoch_in_an_order_of_its_own(make, pack):
    """23 rows cannot be divided into batches of five, so batches extend across epochs."""
    orders = set()
    for seed in range(3):
        steps = [rows_and_epochs(make(pack, seed), step) for step in range(60)]
        row_X, epoch_X = (np.concatenate(some) for some in zip(*steps, strict=True))
        assert (np.diff(epoch_X) >= 0).all()
        for epoch in range(5):
            order = row_X[epoch_X == epoch].tolist()
            assert sorted(order) == list(range(23))
            orders.add(tuple(order))
    assert len(orders) == 15


@every_kind
def test_a_batch_is_its_rows_masked_by_epochs_and_step_whatever_was_asked_before(make, pack):
    batches = make(pack)
    for step in (19, 0, 7, 7, 13):
        row_B, epoch_B = rows_and_epochs(make(pack), step)
        expected = masker()(pack.gather(row_B), epoch_B, row_B, step)
        (part,) = batches.parts(step)
        assert equal(part, expected)


class Lengths:
    """A stand-in for a pack, with all that batches need of it."""

    lengths_R = np.random.default_rng(0).integers(5, 101, size=20_011)

    def __len__(self):
        return len(self.lengths_R)


@pytest.mark.parametrize("is_of_tokens", [False, True])
def test_batches_hold_rows_of_similar_length_and_come_in_no_order_of_length(is_of_tokens):
    if is_of_tokens:
        batches = TokenBatches(Lengths(), masker(), 4000, 1, seed=1)
        pieces = [batches.rows(part)[0] for part in range(len(batches.starts) - 1)]
    else:  # two epochs, which end inside a batch
        batches = TrainingBatches(Lengths(), masker(), 32, seed=1)
        pieces = [batches.rows(step)[0] for step in range(626, 1876)]
    padded = sum(len(piece) * Lengths.lengths_R[piece].max() for piece in pieces)
    real = sum(Lengths.lengths_R[piece].sum() for piece in pieces)
    assert 1 - real / padded < 0.03  # in a random order 0.4 is padding
    # Batches sorted by length would be a curriculum.
    means = np.array([Lengths.lengths_R[piece].mean() for piece in pieces])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2


def masks_by_row(batches):
    masks = {}
    for batch in batches:
        for row, mask in zip(rows_of(batch), batch.is_masked_BN, strict=True):
            assert row not in masks
            masks[row] = tuple(mask.nonzero().flatten().tolist())
    return masks


def test_validation_takes_rows_from_all_over_once_each_with_masks_of_its_own(pack):
    all_rows = masks_by_row(validation_batches(pack, masker(), 1000, 23))
    assert sorted(all_rows) == list(range(23)) and all(all_rows.values())
    if pack.row_length is not None:  # 2.4 masks, rounded separately for each row
        assert {len(places) for places in all_rows.values()} == {2, 3}
    for asked, size in ((23, 4), (9, 4), (1, 6)):
        found = masks_by_row(validation_batches(pack, masker(), asked, size))
        assert found == {row: all_rows[row] for row in np.arange(asked) * 23 // asked}
    row_R = np.argsort(pack.lengths_R, kind="stable")
    (batch,) = validation_batches(pack, masker(), 23, 23)
    own, first = (
        masker()(pack.gather(row_R), np.full(23, epoch), row_R, row_R)
        for epoch in (VALIDATION_EPOCH, 0)
    )
    assert equal(batch, own) and not equal(batch, first)


# ---- micro-batches, and processes ----


def test_micro_batches_keep_rows_and_lose_padding(ragged):
    batches = TrainingBatches(ragged, masker(), 6, seed=1, micro_size=2)
    batch, parts = whole(batches, 0), batches.parts(0)
    assert len(parts) == 3
    for part, start in zip(parts, (0, 2, 4), strict=True):
        width = part.token_ids_BN.shape[1]
        assert width == ragged.lengths_R[rows_of(part)].max()
        for cut, uncut in zip(part, batch, strict=True):
            assert torch.equal(cut, uncut[start : start + 2, :width])
        assert (batch.token_ids_BN[start : start + 2, width:] == SPECIAL.pad).all()


def dealt(batches, step, world_size):
    """Micro-batches of all processes, in the order in which the processes take turns."""
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
    one = TrainingBatches(ragged, masker(), micro * num_parts, seed)
    rows = [row for part in dealt(one, step, world_size) for row in rows_of(part)]
    assert rows == rows_of(whole(one, step))


def test_a_process_reads_its_own_rows_alone(pack, monkeypatch):
    asked = []
    gather = pack.gather
    monkeypatch.setattr(pack, "gather", lambda rows: asked.extend(rows) or gather(rows))
    batches = TrainingBatches(pack, masker(), 12, seed=1, micro_size=2)
    parts = batches.parts(0, rank=1, world_size=3)
    assert asked == [row for part in parts for row in rows_of(part)]
    assert len(asked) == 4


# ---- batches counted in tokens ----


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
    assert sizes.count(False) <= 1  # an epoch's last batch takes what is left


def test_a_row_of_more_tokens_than_a_micro_batch_is_refused(ragged):
    with pytest.raises(UserError, match=r"12 tokens, more than the 11 .*micro_batch_tokens"):
        TokenBatches(ragged, masker(), 11, 1, seed=1)
