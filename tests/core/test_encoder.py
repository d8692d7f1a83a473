"""The encoder against its formulas written out, and what its output may depend on.

Shapes: B rows, T tokens, D width, H heads, d head size.
"""

from __future__ import annotations

import math

import pytest
import torch
from small_models import (
    BOS,
    EOS,
    PAD,
    SPECIAL,
    assert_same,
    drawn,
    gradients,
    make_encoder,
    masked_rows,
)
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.config import ModelConfig
from exlm_mini.model.encoder import Encoder, SelfAttention, attend, initialise
from exlm_mini.model.expansion import expand_masks
from exlm_mini.model.rope import Rotation, rotate, rotation_1d, rotation_2d

BATCH = masked_rows([BOS, -6, 7, -8, EOS], [BOS, 8, 9, EOS], [BOS, -6, 9, EOS])
EXPANDED, _ = expand_masks(*BATCH, 2, "paper", SPECIAL)


def attention_by_hand(attention: SelfAttention, x_TD: Tensor, rotation: Rotation) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v of one row, head by head."""
    num_heads, out = attention.num_heads, []
    heads = (x.chunk(num_heads, dim=1) for x in attention.query_key_value(x_TD).chunk(3, dim=1))
    for *query_and_key, value_Td in zip(*heads, strict=True):
        query_Td, key_Td = (rotate(x_Td[None, None], rotation)[0, 0] for x_Td in query_and_key)
        weight_TT = (query_Td @ key_Td.t() / math.sqrt(query_Td.shape[1])).exp()
        out.append(weight_TT / weight_TT.sum(1, keepdim=True) @ value_Td)
    return attention.output(torch.cat(out, dim=1))


@pytest.mark.parametrize("rope", ["2d", "1d"])
@pytest.mark.parametrize("expand_at", [0, 1, 2])
def test_encoder_equals_its_formula(expand_at, rope):
    """Outputs are compared row by row, whatever the padding holds. Layers below the expansion see
    the row unexpanded."""
    encoder = make_encoder(num_layers=3, expand_at=expand_at, rope=rope)
    *inputs, is_real_BT = EXPANDED
    rows = [BATCH.masked_ids_BN] if expand_at else []
    hidden_BTD = encoder(*(x.masked_fill(~is_real_BT, 2) for x in inputs), is_real_BT, *rows)
    for b, is_real_T in enumerate(is_real_BT):
        row_N = BATCH.masked_ids_BN[b, BATCH.masked_ids_BN[b] != PAD]
        _, expanded_T, clone_T = (x_BT[b, is_real_T] for x_BT in inputs)
        x_TD, position_T = encoder.embedding.weight[row_N], torch.arange(len(row_N))
        clones = {True: clone_T, False: 0 * position_T}
        for number, layer in enumerate(encoder.layers):
            if number == expand_at:
                x_TD, position_T = x_TD[expanded_T], expanded_T
            if rope == "2d":
                places = position_T[None], clones[number >= expand_at][None]
                rotation = rotation_2d(*places, encoder.head_dim, torch.float64)
            else:  # positions in the row as this layer sees it
                place_1T = torch.arange(len(x_TD))[None]
                rotation = rotation_1d(place_1T, encoder.head_dim, torch.float64)
            x_TD = x_TD + attention_by_hand(
                layer.attention, layer.attention_norm(x_TD), rotation
            )
            x_TD = x_TD + layer.ffn_out(F.gelu(layer.ffn_in(layer.ffn_norm(x_TD))))
        assert_same(hidden_BTD[b, is_real_T], encoder.final_norm(x_TD))


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
"""The setting of each dropout, and the only weights that are not 0: with them the values that it
drops are all equal, and the output depends on nothing else."""


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
        # In rows of one token, each head has a single attention probability.
        token_B1 = torch.ones(B, 1, dtype=torch.int64)
        rows = [token_B1] if expand_at else []
        inputs = token_B1, 0 * token_B1, 0 * token_B1, token_B1 == 1, *rows
        (whole,) = encoder(*inputs).unique().tolist()
        hidden_BD = encoder.train()(*inputs)[:, 0]
    if setting == "attention_dropout":
        hidden_BD = hidden_BD[:, ::8]  # one value per head
    assert hidden_BD.unique().tolist() == pytest.approx([0.0, whole / (1 - p)])
    share = (hidden_BD == 0).double().mean().item()
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / hidden_BD.numel())


def test_padding_gets_no_gradient():
    encoder = make_encoder()
    (encoder(*EXPANDED) ** 2).sum().backward()
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

    torch._dynamo.reset()  # forget what other tests have compiled
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


def test_attention_in_bfloat16_drops_out_too():
    q_BHTd, k_BHTd, v_BHTd = torch.randn(3, 1, 2, 50, 8).bfloat16()
    first, second = (attend(q_BHTd, k_BHTd, v_BHTd, None, 0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_model_in_half_precision_tells_distant_places_apart():
    model = Encoder(ModelConfig(preset="tiny"), 500, PAD).bfloat16()
    place_BT = torch.arange(600)[None]
    rotation, _ = model._frame(place_BT, torch.zeros_like(place_BT), place_BT >= 0)
    assert rotation.cos_B1Td.dtype == torch.float32


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
