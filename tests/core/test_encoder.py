"""The encoder: against the formulas written out, and what its output may depend on.

Shapes: B rows, T tokens, D width, H heads, d head size.
"""

from __future__ import annotations

import math

import pytest
import torch
from small_models import PAD, assert_same, drawn, gradients, make_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.config import ModelConfig
from exlm_mini.model.encoder import Encoder, SelfAttention, attend, initialise
from exlm_mini.model.rope import Rotation, rotate, rotation_1d, rotation_2d


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three expanded rows of 7, 4 and 6 tokens."""
    token_ids_BT = torch.tensor(
        [[1, 5, 5, 7, 5, 5, 2], [1, 8, 9, 2, 0, 0, 0], [1, 5, 5, 5, 9, 2, 0]]
    )
    position_BT = torch.tensor(
        [[0, 1, 1, 2, 3, 3, 4], [0, 1, 2, 3, 0, 0, 0], [0, 1, 1, 1, 2, 3, 0]]
    )
    clone_BT = torch.tensor(
        [[0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0]]
    )
    return token_ids_BT, position_BT, clone_BT, token_ids_BT != PAD


def attention_by_hand(
    attention: SelfAttention, x_BTD: Tensor, rotation: Rotation, is_real_BT: Tensor
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v, head by head and row by row."""
    query_BTD, key_BTD, value_BTD = attention.query_key_value(x_BTD).chunk(3, dim=-1)
    d = x_BTD.shape[-1] // attention.num_heads
    out_BTD = torch.zeros_like(x_BTD)
    for h in range(attention.num_heads):
        part = slice(h * d, (h + 1) * d)
        query_BTd, key_BTd = (
            rotate(t[..., part].unsqueeze(1), rotation).squeeze(1) for t in (query_BTD, key_BTD)
        )
        for b in range(len(x_BTD)):
            real_T = is_real_BT[b]
            score_TT = query_BTd[b] @ key_BTd[b, real_T].t() / math.sqrt(d)
            weight_TT = score_TT.exp() / score_TT.exp().sum(1, keepdim=True)
            out_BTD[b, :, part] = weight_TT @ value_BTD[b, real_T][:, part]
    return attention.output(out_BTD)


def encoder_by_hand(
    encoder: Encoder, token_ids_BT: Tensor, rotation: Rotation, is_real_BT: Tensor
) -> Tensor:
    x_BTD = encoder.embedding.weight[token_ids_BT]
    for layer in encoder.layers:
        x_BTD = x_BTD + attention_by_hand(
            layer.attention, layer.attention_norm(x_BTD), rotation, is_real_BT
        )
        x_BTD = x_BTD + layer.ffn_out(F.gelu(layer.ffn_in(layer.ffn_norm(x_BTD))))
    return encoder.final_norm(x_BTD)


@pytest.mark.parametrize("rope", ["2d", "1d"])
def test_encoder_equals_its_formula(rope):
    """Whatever the padding holds."""
    encoder = make_encoder(rope=rope)
    *inputs, is_real_BT = make_batch()
    token_ids_BT, position_BT, clone_BT = (x.masked_fill(~is_real_BT, 9) for x in inputs)
    ours_BTD = encoder(token_ids_BT, position_BT, clone_BT, is_real_BT)
    if rope == "2d":
        rotation = rotation_2d(position_BT, clone_BT, encoder.head_dim, torch.float64)
    else:  # places in the expanded row
        rotation = rotation_1d(torch.arange(7).expand(3, 7), encoder.head_dim, torch.float64)
    expected_BTD = encoder_by_hand(encoder, token_ids_BT, rotation, is_real_BT)
    assert_same(ours_BTD[is_real_BT], expected_BTD[is_real_BT])
    for b, length in enumerate(is_real_BT.sum(1).tolist()):  # a row alone
        alone_1TD = encoder(*(t[b : b + 1, :length] for t in make_batch()))
        assert_same(ours_BTD[b, :length], alone_1TD[0])


@pytest.mark.parametrize(("expand_at", "rope"), [(1, "2d"), (2, "2d"), (2, "1d")])
def test_layers_below_the_expansion_see_the_row_and_clones_begin_alike(expand_at, rope):
    encoder = make_encoder(num_layers=3, expand_at=expand_at, rope=rope)
    inputs = make_batch()
    row_ids_BN = torch.tensor([[1, 5, 7, 5, 2], [1, 8, 9, 2, 0], [1, 5, 9, 2, 0]])
    hidden_BTD = encoder(*inputs, row_ids_BN)
    ids_BT, position_BT, clone_BT, is_real_BT = inputs

    def rotation(position_1T: Tensor, clone_1T: Tensor) -> Rotation:
        if rope == "1d":
            place_1T = torch.arange(position_1T.shape[1])[None]
            return rotation_1d(place_1T, encoder.head_dim, torch.float64)
        return rotation_2d(position_1T, clone_1T, encoder.head_dim, torch.float64)

    for b, is_real_T in enumerate(is_real_BT):
        row_1N = row_ids_BN[b : b + 1, row_ids_BN[b] != PAD]
        position_1T, clone_1T = position_BT[None, b, is_real_T], clone_BT[None, b, is_real_T]
        assert torch.equal(row_1N.gather(1, position_1T), ids_BT[None, b, is_real_T])
        x_1ND, place_1N = encoder.embedding(row_1N), torch.arange(row_1N.shape[1])[None]
        for layer in encoder.layers[:expand_at]:
            x_1ND = layer(x_1ND, rotation(place_1N, 0 * place_1N), None)
        x_1TD = x_1ND[:, position_1T[0]]
        for layer in encoder.layers[expand_at:]:
            x_1TD = layer(x_1TD, rotation(position_1T, clone_1T), None)
        assert_same(hidden_BTD[b, is_real_T], encoder.final_norm(x_1TD)[0])


EYE = torch.eye(16)
ATTENTION = "layers.0.attention"
SITES = {
    "the embedding": ("dropout", {"embedding.weight": 1.0}),
    "attention": ("dropout", {f"{ATTENTION}.output.bias": 1.0}),
    "the feed-forward": ("dropout", {"layers.0.ffn_out.bias": 1.0}),
    "the activation": (
        "activation_dropout", {"layers.0.ffn_in.bias": 1.0, "layers.0.ffn_out.weight": EYE},
    ),
    "attention probabilities": (
        "attention_dropout",
        {f"{ATTENTION}.query_key_value.bias": 1.0, f"{ATTENTION}.output.weight": EYE},
    ),
}  # fmt: skip
"""The setting of each dropout, and weights (all others 0) with which what stands there is the
same everywhere and all there is."""


@pytest.mark.parametrize("expand_at", [0, 1])
@pytest.mark.parametrize("site", SITES)
def test_dropout_strikes_its_share_at_every_place(site, expand_at):
    setting, weights = SITES[site]
    p, B = 0.3, 2000
    encoder = make_encoder(num_layers=2, ffn_width=16, expand_at=expand_at, **{setting: p})
    encoder.final_norm = nn.Identity()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(torch.as_tensor(weights.get(name, 0.0)))
        # Rows of one token: its attention has a single probability in each head.
        token_B1 = torch.ones(B, 1, dtype=torch.int64)
        rows = [token_B1] if expand_at else []
        inputs = token_B1, 0 * token_B1, 0 * token_B1, token_B1 == 1, *rows
        (whole,) = encoder(*inputs).unique().tolist()
        hidden_BD = encoder.train()(*inputs)[:, 0]
    if setting == "attention_dropout":
        hidden_BD = hidden_BD[:, ::8]  # one of each head
    assert hidden_BD.unique().tolist() == pytest.approx([0.0, whole / (1 - p)])
    share = (hidden_BD == 0).double().mean().item()
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / hidden_BD.numel())


def test_padding_gets_no_gradient():
    encoder = make_encoder()
    token_ids_BT, *rest = make_batch()
    hidden_BTD = encoder(token_ids_BT.masked_fill(token_ids_BT == PAD, 13), *rest)
    (hidden_BTD[rest[-1]] ** 2).sum().backward()
    assert not encoder.embedding.weight.grad[13].any()
    assert encoder.embedding.weight.grad[5].any()
    encoder.zero_grad()
    (encoder(token_ids_BT, *rest) ** 2).sum().backward()
    assert not encoder.embedding.weight.grad[PAD].any()


def test_initial_weights_have_the_stated_spread():
    std = 0.1
    torch.manual_seed(0)
    encoder = Encoder(ModelConfig(preset="tiny"), 500, pad=3)
    initialise(encoder, std)
    assert not encoder.embedding.weight[3].any()
    num_weights = 0
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias") or "norm" in name:
            assert (parameter == name.endswith("norm.weight")).all(), name
            continue
        weight = parameter.detach().double()
        weight = weight[weight != 0]
        n = weight.numel()
        num_weights += n
        assert abs(weight.mean()) < 4 * std / math.sqrt(n), name
        assert abs(weight.std() - std) < 4 * std / math.sqrt(2 * n), name
    assert num_weights > 100_000


def test_rows_of_any_length_share_a_compiled_layer():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()  # what other tests have compiled
    counter = CompileCounterWithBackend("aot_eager")
    encoder, plain = make_encoder(num_layers=1), make_encoder(num_layers=1)
    for layer in encoder.layers:
        layer.compile(backend=counter)
    for length in range(5, 9):
        row_1T = torch.arange(1, length + 1).unsqueeze(0)
        batch = row_1T, row_1T, torch.zeros_like(row_1T), row_1T != PAD
        hidden_1TD = encoder(*batch)
        torch.testing.assert_close(hidden_1TD, plain(*batch))
        hidden_1TD.sum().backward()
    assert counter.frame_count == 2, "one for the first length, one for all others"


def test_a_cpu_attends_in_float32_to_what_is_bfloat16():
    heads = [drawn(1, 2, 15, 4, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    wide = [x.detach().float().requires_grad_() for x in heads]
    with torch.autocast("cpu", torch.bfloat16):
        out_BHTd = attend(*heads, None)
    expected_BHTd = attend(*wide, None)
    assert out_BHTd.dtype == torch.bfloat16
    assert torch.equal(out_BHTd, expected_BHTd.bfloat16())
    pairs = zip(gradients(out_BHTd, heads), gradients(expected_BHTd, wide), strict=True)
    for ours, true in pairs:
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), true, rtol=0.02, atol=0.02)
