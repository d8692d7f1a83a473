"""Packed rows attend as padded ones do, whatever their lengths, and so do the models on them.

Shapes: B rows, T tokens of a padded row, S real tokens of a batch, H heads, d head size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from exlm_mini.config import MaskingConfig, ModelConfig, SpecialIds
from exlm_mini.data.masking import MaskedBatch, Masker
from exlm_mini.model import ExLM, attention
from exlm_mini.model.attention import PackedRows, attend, packed_rows
from exlm_mini.model.encoder import Encoder, initialise
from exlm_mini.model.objectives import log_likelihood, states_alignment_loss

SMALL = ModelConfig(
    num_layers=2, width=16, ffn_width=24, num_heads=2, dropout=0.0, attention_dropout=0.0,
    states_per_mask=3,
)  # fmt: skip
VOCAB_SIZE = 30
lengths_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def real_tokens(lengths: list[int], num_columns: int | None = None) -> Tensor:
    """is_real_BT of rows padded on the right."""
    T = num_columns or max(lengths)
    return torch.arange(T) < torch.tensor(lengths).unsqueeze(1)


def random_heads(rows: PackedRows, seed: int = 0, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys and values of packed rows, (1, H, S, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, 2, len(rows.place_S), 4)
    heads = torch.randn(shape, generator=generator, dtype=dtype).unbind(0)
    return [x_1HSd.clone().requires_grad_() for x_1HSd in heads]


def under_block_mask(heads: list[Tensor], rows: PackedRows) -> Tensor:
    """All S x S products, those between rows forbidden."""
    row_S = rows.place_S // rows.num_columns
    is_mate_SS = row_S.unsqueeze(1) == row_S
    return F.scaled_dot_product_attention(*heads, attn_mask=is_mate_SS)


def gradients_of(out: Tensor, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Of a random projection of the output, so that every element counts."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


# ---- packing ----


@settings(max_examples=20)
@given(lengths_of_rows, st.integers(0, 3))
def test_packing_keeps_the_real_tokens_in_order(lengths, spare):
    is_real_BT = real_tokens(lengths, max(lengths) + spare)
    rows = packed_rows(is_real_BT)
    number_BT = torch.arange(is_real_BT.numel()).view_as(is_real_BT)
    packed_1S = rows.pack(number_BT)
    assert packed_1S.tolist() == [number_BT[is_real_BT].tolist()]
    assert rows.bound_X.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert rows.bound_X.dtype == torch.int32
    assert torch.equal(rows.unpack(packed_1S), number_BT * is_real_BT)


def test_padding_may_stand_anywhere_and_fill_a_row():
    is_real_BT = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    rows = packed_rows(is_real_BT)
    assert rows.place_S.tolist() == [1, 3, 8, 9, 10]
    assert rows.bound_X.tolist() == [0, 2, 2, 5]
    heads = random_heads(rows)
    expected = under_block_mask(heads, rows)
    torch.testing.assert_close(attend(*heads, rows), expected, rtol=0, atol=1e-12)


# ---- attention ----


@pytest.mark.parametrize("way", [attention._row_by_row, attention._padded_again])
@settings(max_examples=10)
@given(lengths=lengths_of_rows)
def test_every_way_equals_a_mask_with_one_block_for_each_row(way, lengths):
    rows = packed_rows(real_tokens(lengths))
    heads = random_heads(rows)
    ours, expected = way(*heads, rows, 0.0), under_block_mask(heads, rows)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for got, wanted in zip(
        gradients_of(ours, heads), gradients_of(expected, heads), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", [attention._row_by_row, attention._padded_again])
def test_every_way_honours_dropout(way):
    rows = packed_rows(real_tokens([40, 60]))
    query, key, _ = random_heads(rows)
    # With uniform weights and values 1 an output is the share that was kept, over its mean.
    heads = [0 * query, key, torch.ones_like(key)]
    torch.manual_seed(0)
    kept = way(*heads, rows, 0.3)
    assert torch.equal(way(*heads, rows, 0.0), torch.ones_like(kept))
    num_probabilities = 2 * (40 * 40 + 60 * 60)
    # Rows weigh alike here, whatever their length: at most the error of the shorter one.
    assert kept.std() > 0
    standard_error = np.sqrt(0.3 / 0.7 / num_probabilities) * np.sqrt(60 / 40)
    assert abs(kept.mean().item() - 1) < 4 * standard_error


@pytest.mark.parametrize(("dropout", "way"), [(0.0, "_end_to_end"), (0.1, "_padded_again")])
def test_the_kernel_for_packed_rows_is_not_asked_for_dropout(monkeypatch, dropout, way):
    rows = packed_rows(real_tokens([2, 3]))
    taken = []
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    for name in ("_end_to_end", "_padded_again"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: taken.append(name))
    attend(*(x_1HSd.to("meta") for x_1HSd in random_heads(rows)), rows, dropout)
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
        assert all(g.shape == (1, 2, S, 8) for g in gradients_of(out_1HSd, heads))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[1], [7, 1, 130], [64, 64], [300, 2, 2, 99, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_packed_rows_is_as_close_as_padding(lengths, dtype):
    """Its error against float64 is at most twice that of padded attention in the same dtype."""
    rows = packed_rows(real_tokens(lengths).cuda())
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(3, 1, 4, sum(lengths), 64, generator=generator, dtype=torch.float64)
    results = {}
    for name, way, kind in (
        ("exact", lambda q, k, v: attention._padded_again(q, k, v, rows, 0.0), torch.float64),
        ("padded", lambda q, k, v: attention._padded_again(q, k, v, rows, 0.0), dtype),
        ("packed", lambda q, k, v: attend(q, k, v, rows), dtype),
    ):
        inputs = [x.to(dtype).to(kind).cuda().requires_grad_() for x in heads]
        out = way(*inputs)
        results[name] = [out, *gradients_of(out.cpu(), inputs)]
    assert attention._has_kernel(heads[0].to(dtype).cuda())
    for exact, padded, packed in zip(*results.values(), strict=True):
        error = (packed.double() - exact).abs().max()
        allowed = 2 * (padded.double() - exact).abs().max()
        assert error <= allowed + torch.finfo(dtype).eps * exact.abs().max()


# ---- the encoder ----


def make_encoders(rope: str) -> list[Encoder]:
    """A padded and a packed encoder of the same weights, large enough for all to matter."""
    encoders = []
    for way in ("padded", "packed"):
        torch.manual_seed(0)
        config = ModelConfig(**{**vars(SMALL), "rope": rope, "attention": way})
        encoders.append(Encoder(config, VOCAB_SIZE, pad=0).double())
        initialise(encoders[-1], 0.3)
    return encoders


def random_rows(is_real_BT: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the encoder with any positions and clones."""
    generator = torch.Generator().manual_seed(seed)
    token_ids_BT = torch.randint(1, VOCAB_SIZE, is_real_BT.shape, generator=generator)
    position_BT = torch.randint(0, 9, is_real_BT.shape, generator=generator)
    clone_BT = torch.randint(0, 4, is_real_BT.shape, generator=generator)
    return *(x_BT * is_real_BT for x_BT in (token_ids_BT, position_BT, clone_BT)), is_real_BT


@pytest.mark.parametrize("rope", ["2d", "1d"])
@settings(max_examples=10)
@given(lengths=lengths_of_rows, spare=st.integers(0, 2), seed=st.integers(0, 99))
def test_a_packed_encoder_equals_a_padded_one(rope, lengths, spare, seed):
    is_real_BT = real_tokens(lengths, max(lengths) + spare)
    inputs = random_rows(is_real_BT, seed)
    results = []
    for encoder in make_encoders(rope):
        hidden_BTD = encoder(*inputs)
        gradients = gradients_of(hidden_BTD * is_real_BT.unsqueeze(2), [*encoder.parameters()])
        results.append([hidden_BTD[is_real_BT], *gradients])
    for padded, packed in zip(*results, strict=True):
        scale = max(1.0, padded.abs().max().item())
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-12 * scale)


def test_packed_layers_see_no_padding():
    padded, packed = make_encoders("2d")
    inputs = random_rows(real_tokens([9, 2, 5]), seed=0)
    widths = []
    for encoder in (padded, packed):
        encoder.layers[0].ffn_in.register_forward_hook(
            lambda module, x, y: widths.append(y.shape[:2].numel())
        )
        encoder(*inputs)
    assert widths == [3 * 9, 9 + 2 + 5]
    assert not packed(*inputs)[~inputs[-1]].any()


# ---- the models ----


def ragged_batch(lengths: list[int], seed: int) -> MaskedBatch:
    """Rows like molecules: [BOS], tokens, [EOS], padding."""
    special = SpecialIds()
    random = np.random.default_rng(seed)
    token_ids_BN = np.full((len(lengths), max(lengths) + 2), special.pad)
    for row_N, length in zip(token_ids_BN, lengths, strict=True):
        row_N[0], row_N[length + 1] = special.bos, special.eos
        row_N[1 : length + 1] = random.integers(6, VOCAB_SIZE, length)
    masker = Masker(MaskingConfig(mask_ratio=0.3), special, seed=1)
    rows_B = np.arange(len(lengths))
    return masker(torch.from_numpy(token_ids_BN), 0 * rows_B, rows_B, 0)


@pytest.mark.parametrize("changes", [{}, {"expand_at": 1}])
@settings(max_examples=8)
@given(lengths=lengths_of_rows, seed=st.integers(0, 99))
def test_a_packed_exlm_equals_a_padded_one(changes, lengths, seed):
    batch = ragged_batch(lengths, seed)
    results = []
    for way in ("padded", "packed"):
        torch.manual_seed(0)
        config = ModelConfig(**{**vars(SMALL), "init_std": 0.3, "attention": way, **changes})
        model = ExLM(config, VOCAB_SIZE).double()
        scores = model(*batch)
        log_likelihood_B = log_likelihood(scores)
        loss = states_alignment_loss(log_likelihood_B, scores.is_scored_BM.sum(dim=1))
        results.append([log_likelihood_B, *torch.autograd.grad(loss, [*model.parameters()])])
    for padded, packed in zip(*results, strict=True):
        scale = max(1.0, padded.abs().max().item())
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_cpu_attends_in_float32_to_what_is_bfloat16(is_packed):
    is_real_BT = real_tokens([5, 5, 5])
    rows = packed_rows(is_real_BT)
    heads = [x.detach().bfloat16().requires_grad_() for x in random_heads(rows)]
    wide = [x.detach().float().requires_grad_() for x in heads]
    layout = rows if is_packed else None
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*heads, layout)
    expected = attend(*wide, layout)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    grads = [g.bfloat16() for g in gradients_of(expected, wide)]
    for found, grad in zip(gradients_of(out, heads), grads, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, grad, rtol=0.02, atol=0.02)
