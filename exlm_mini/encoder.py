"""The Transformer encoder: pre-norm, GELU, rotary positions, no absolute ones.

Shapes: B rows, T tokens, D width, H heads, d head size. Between the first layer and the last a
batch may be packed (``attention.PackedRows``): B is 1 then, and T counts its real tokens.

As in the released code (after ESM-2) embeddings are neither scaled nor normalised, dropout
follows them, and a last LayerNorm is applied after the final layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.attention import PackedRows, attend, packed_rows
from exlm_mini.config import ModelConfig
from exlm_mini.rope import Rotation, rotate, rotation_1d, rotation_2d


class SelfAttention(nn.Module):
    """Multi-head attention over all tokens of a row; (B, T, D) in and out."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation, layout: Tensor | PackedRows | None
    ) -> Tensor:
        """Attend to every real token of the own row; ``layout`` as for ``attention.attend``."""
        query_BHTd, key_BHTd, value_BHTd = (
            part_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part_BTD in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        attended_BHTd = attend(
            rotate(query_BHTd, rotation),
            rotate(key_BHTd, rotation),
            value_BHTd,
            layout,
            self.dropout if self.training else 0.0,
        )
        return self.output(attended_BHTd.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.shape
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape.width, shape.num_heads, config.attention_dropout)
        self.ffn_norm = nn.LayerNorm(shape.width)
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation, layout: Tensor | PackedRows | None
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        attended_BTD = self.attention(self.attention_norm(x_BTD), rotation, layout)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        inner_BTF = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_BTD))))
        return x_BTD + self.dropout(self.ffn_out(inner_BTF))


class Encoder(nn.Module):
    """Token ids and their 2D positions to contextual hidden states H (§4.2)."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad: int) -> None:
        super().__init__()
        shape = config.shape
        self.rope, self.is_packed = config.rope, config.attention == "packed"
        self.head_dim = shape.width // shape.num_heads
        self.embedding = nn.Embedding(vocab_size, shape.width, padding_idx=pad)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(shape.num_layers))
        self.final_norm = nn.LayerNorm(shape.width)

    def forward(
        self, token_ids_BT: Tensor, position_BT: Tensor, clone_BT: Tensor, is_real_BT: Tensor
    ) -> Tensor:
        """Encode a batch.

        Args:
            token_ids_BT: int64.
            position_BT: int64, token index of each token.
            clone_BT: int64, clone index; 0 for an ordinary token.
            is_real_BT: bool, false at padding, which no token attends to.

        Returns:
            hidden_BTD after the final LayerNorm; at padding, zeros with packed attention and of
            no meaning with padded.
        """
        layout, place_BT = None, torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
        place_BT = place_BT.expand_as(token_ids_BT)
        if not bool(is_real_BT.all()):
            layout = is_real_BT[:, None, None, :]
            if self.is_packed:
                layout = packed_rows(is_real_BT)
                token_ids_BT, position_BT, clone_BT, place_BT = (
                    layout.pack(x_BT)
                    for x_BT in (token_ids_BT, position_BT, clone_BT, place_BT)
                )
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
        if self.rope == "2d":
            rotation = rotation_2d(position_BT, clone_BT, self.head_dim, dtype)
        else:
            rotation = rotation_1d(place_BT, self.head_dim, dtype)
        x_BTD = self.dropout(self.embedding(token_ids_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotation, layout)
        hidden_BTD = self.final_norm(x_BTD)
        return layout.unpack(hidden_BTD) if isinstance(layout, PackedRows) else hidden_BTD


def initialise(module: nn.Module, std: float) -> None:
    """Weights of linear and embedding layers N(0, std²), biases and the pad row 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            with torch.no_grad():
                part.weight[part.padding_idx].zero_()
