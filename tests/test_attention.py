"""Packed rows attend as padded ones do, whatever their lengths, and so do the models on them.

Shapes: B rows, T tokens of a padded row, S real tokens of a batch, H heads, d head size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    BOS,
    EOS,
    V,
    assert_all_same,
    assert_same,
    drawn,
    gradients,
    make_encoder,
    make_model,
    masked_rows,
)
from torch import Tensor
from torch.nn import functional as F

from exlm_mini.model import attention
from exlm_mini.model.attention import PackedRows, attend, packed_rows
from exlm_mini.model.objectives import log_likelihood, states_alignment_loss

lengths_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)
WAYS = [attention._row_by_row, attention._padded_again]


def real_tokens(lengths: list[int], num_columns: int | None = None) -> Tensor:
    """is_real_BT of rows padded on the right."""
    T = num_columns or max(lengths)
    return torch.arange(T) < torch.tensor(lengths).unsqueeze(1)


def random_heads(rows: PackedRows, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of packed rows, (1, H, S, d)."""
    return [drawn(1, 2, len(rows.place_S), 4, seed=seed, dtype=dtype) for seed in range(3)]


def under_block_mask(heads: list[Tensor], rows: PackedRows) -> Tensor:
    """All S x S products, those between rows forbidden."""
    row_S = rows.place_S // rows.num_columns
    is_mate_SS = row_S.unsqueeze(1) == row_S
    return F.scaled_dot_product_attention(*heads, attn_mask=is_mate_SS)


# ---- packing ----


@settings(max_examples=20)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_packing_keeps_the_real_tokens_in_order(rows_of_flags):
    """Padding may stand anywhere and fill a row."""
    is_real_BT = torch.tensor(rows_of_flags)
    rows = packed_rows(is_real_BT)
    number_BT = torch.arange(is_real_BT.numel()).view_as(is_real_BT)
    packed_1S = rows.pack(number_BT)
    assert packed_1S.tolist() == [number_BT[is_real_BT].tolist()]
    assert rows.bound_X.tolist() == [
        0,
        *np.cumsum([sum(row) for row in rows_of_flags]).tolist(),
    ]
    assert rows.bound_X.dtype == torch.int32
    assert torch.equal(rows.unpack(packed_1S), number_BT * is_real_BT)
    heads = random_heads(rows)
    assert_same(attend(*heads, rows), under_block_mask(heads, rows))


# ---- attention ----


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(lengths=lengths_of_rows)
def test_every_way_equals_a_mask_with_one_block_for_each_row(way, lengths):
    rows = packed_rows(real_tokens(lengths))
    heads = random_heads(rows)
    ours, expected = way(*heads, rows, 0.0), under_block_mask(heads, rows)
    assert_same(ours, expected, 1e-12)
    assert_all_same(gradients(ours, heads), gradients(expected, heads), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_honours_dropout(way):
    rows = packed_rows(real_tokens([40, 60]))
    query, key, _ = random_heads(rows)
    # With uniform weights and values 1 an output is the share that was kept, over its mean.
    heads = [0 * query, key, torch.ones_like(key)]
    torch.manual_seed(0)
    share = way(*heads, rows, 0.3)
    assert torch.equal(way(*heads, rows, 0.0), torch.ones_like(share))
    num_probabilities = 2 * (40 * 40 + 60 * 60)
    # Rows weigh alike here, whatever their length: at most the error of the shorter one.
    assert share.std() > 0
    standard_error = np.sqrt(0.3 / 0.7 / num_probabilities) * np.sqrt(60 / 40)
    assert abs(share.mean().item() - 1) < 4 * standard_error


@pytest.mark.parametrize(
    ("dtype", "dropout", "way"),
    [
        (torch.bfloat16, 0.0, "_end_to_end"),
        (torch.bfloat16, 0.1, "_padded_again"),
        (torch.float32, 0.0, "_padded_again"),
    ],
)
def test_the_kernel_for_packed_rows_is_asked_for_what_it_can(monkeypatch, dtype, dropout, way):
    rows = packed_rows(real_tokens([2, 3]))
    taken = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("_end_to_end", "_padded_again"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: taken.append(name))
    heads = [torch.empty(1, 2, 5, 8, dtype=dtype, device="meta") for _ in range(3)]
    attend(*heads, rows, dropout)
    assert taken == [way]


@pytest.mark.parametrize("lengths", [[1], [4, 1, 7]])
def test_the_kernel_for_packed_rows_gets_the_shapes_it_wants(lengths):
    """On tensors without numbers: the kernel checks its arguments, and there is no GPU here."""
    with torch.device("meta"):
        S, B = sum(lengths), len(lengths)
        rows = PackedRows(
            torch.empty(S, dtype=torch.int64),
            torch.empty(B + 1, dtype=torch.int32),
            max(lengths),
        )
        heads = [
            torch.empty(1, 2, S, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        out_1HSd = attention._end_to_end(*heads, rows)
        assert out_1HSd.shape == (1, 2, S, 8) and out_1HSd.dtype == torch.bfloat16
        grads = torch.autograd.grad(out_1HSd.sum(), heads)
        assert all(g.shape == (1, 2, S, 8) for g in grads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[1], [7, 1, 130], [64, 64], [300, 2, 2, 99, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_packed_rows_is_as_close_as_padding(lengths, dtype):
    """Its error against float64 is at most twice that of padded attention in the same dtype."""
    rows = packed_rows(real_tokens(lengths).cuda())
    heads = [drawn(1, 4, sum(lengths), 64, seed=seed).detach() for seed in range(3)]
    results = {}
    for name, way, kind in (
        ("exact", lambda q, k, v: attention._padded_again(q, k, v, rows, 0.0), torch.float64),
        ("padded", lambda q, k, v: attention._padded_again(q, k, v, rows, 0.0), dtype),
        ("packed", lambda q, k, v: attend(q, k, v, rows), dtype),
    ):
        inputs = [x.to(dtype).to(kind).cuda().requires_grad_() for x in heads]
        out = way(*inputs)
        results[name] = [out, *gradients(out, inputs)]
    assert attention._has_kernel(heads[0].to(dtype).cuda())
    for exact, padded, packed in zip(*results.values(), strict=True):
        error = (packed.double() - exact).abs().max()
        allowed = 2 * (padded.double() - exact).abs().max()
        assert error <= allowed + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_cpu_attends_in_float32_to_what_is_bfloat16(is_packed):
    rows = packed_rows(real_tokens([5, 5, 5]))
    heads = random_heads(rows, torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in heads]
    layout = rows if is_packed else None
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*heads, layout)
    expected = attend(*wide, layout)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.bfloat16())
    for ours, true in zip(gradients(out, heads), gradients(expected, wide), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), true, rtol=0.02, atol=0.02)


# ---- the encoder and the models ----


def random_rows(is_real_BT: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the encoder with any positions and clones."""
    rng = torch.Generator().manual_seed(seed)
    drawn_BT = (
        torch.randint(*of, is_real_BT.shape, generator=rng) for of in [(1, V), (9,), (4,)]
    )
    return *(x_BT * is_real_BT for x_BT in drawn_BT), is_real_BT


@pytest.mark.parametrize("rope", ["2d", "1d"])
@settings(max_examples=10)
@given(lengths=lengths_of_rows, spare=st.integers(0, 2), seed=st.integers(0, 99))
def test_a_packed_encoder_equals_a_padded_one(rope, lengths, spare, seed):
    is_real_BT = real_tokens(lengths, max(lengths) + spare)
    results = []
    for way in ("padded", "packed"):
        encoder = make_encoder(attention=way, rope=rope)
        hidden_BTD = encoder(*random_rows(is_real_BT, seed))
        grads = gradients(hidden_BTD * is_real_BT.unsqueeze(2), [*encoder.parameters()])
        results.append([hidden_BTD[is_real_BT], *grads])
    assert_all_same(*results, 1e-12)


def test_packed_layers_see_no_padding():
    inputs, widths = random_rows(real_tokens([9, 2, 5]), seed=0), []
    for way in ("padded", "packed"):
        encoder = make_encoder(attention=way)
        encoder.layers[0].ffn_in.register_forward_hook(
            lambda module, x, y: widths.append(y.shape[:2].numel())
        )
        hidden_BTD = encoder(*inputs)
    assert widths == [3 * 9, 9 + 2 + 5]
    assert not hidden_BTD[~inputs[-1]].any()


@pytest.mark.parametrize("expand_at", [0, 1])
@settings(max_examples=8)
@given(
    st.lists(st.lists(st.sampled_from([6, 7, 8, -6, -7]), max_size=9), min_size=1, max_size=6)
)
def test_a_packed_exlm_equals_a_padded_one(expand_at, rows):
    batch = masked_rows(*([BOS, *row, EOS] for row in rows))
    results = []
    for way in ("padded", "packed"):
        model = make_model(attention=way, expand_at=expand_at, states_per_mask=3)
        scores = model(*batch)
        log_likelihood_B = log_likelihood(scores)
        loss = states_alignment_loss(log_likelihood_B, scores.is_scored_BM.sum(dim=1))
        results.append([log_likelihood_B, *torch.autograd.grad(loss, [*model.parameters()])])
    assert_all_same(*results, 1e-12)
