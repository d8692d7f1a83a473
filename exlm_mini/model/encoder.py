"""The Transformer encoder: pre-norm, GELU, rotary instead of absolute positions.

Shapes: B rows, N tokens before expansion, T after it, D width, H heads, d head size.

As in the released code (after ESM-2), embeddings are neither scaled nor normalised, dropout follows
them, and a LayerNorm follows the last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exlm_mini.config import ModelConfig
from exlm_mini.model.rope import Rotation, rotate, rotation_1d, rotation_2d


def attend(
    query_BHTd: Tensor,
    key_BHTd: Tensor,
    value_BHTd: Tensor,
    is_key_B11T: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v within each row; on a CPU, bfloat16 is computed in float32, because
    the backward pass in bfloat16 took 1.5 to more than 2 times as long where it was measured.

    Args:
        is_key_B11T: bool, false at padding, which no token attends to; None without padding.
        dropout: share of the attention probabilities set to 0.
    """
    if query_BHTd.device.type == "cpu" and query_BHTd.dtype == torch.bfloat16:
        q_BHTd, k_BHTd, v_BHTd = (x.float() for x in (query_BHTd, key_BHTd, value_BHTd))
        with torch.autocast("cpu", enabled=False):
            return attend(q_BHTd, k_BHTd, v_BHTd, is_key_B11T, dropout).bfloat16()
    return F.scaled_dot_product_attention(
        query_BHTd, key_BHTd, value_BHTd, attn_mask=is_key_B11T, dropout_p=dropout
    )


class SelfAttention(nn.Module):
    """Multi-head attention over all tokens of a row; (B, T, D) in and out."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, rotation: Rotation, is_key_B11T: Tensor | None) -> Tensor:
        """Attend to the real tokens of the same row; ``is_key_B11T`` as in ``attend``."""
        qkv_BXTd = self.query_key_value(x_BTD).unflatten(-1, (3 * self.num_heads, -1))
        qk_BXTd, value_BHTd = qkv_BXTd.transpose(1, 2).split(
            (2 * self.num_heads, self.num_heads), dim=1
        )
        query_BHTd, key_BHTd = rotate(qk_BXTd, rotation).chunk(2, dim=1)
        dropout = self.dropout if self.training else 0.0
        attended_BHTd = attend(query_BHTd, key_BHTd, value_BHTd, is_key_B11T, dropout)
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

    def forward(self, x_BTD: Tensor, rotation: Rotation, is_key_B11T: Tensor | None) -> Tensor:
        """Map (B, T, D) to (B, T, D); arguments as in ``SelfAttention``."""
        attended_BTD = self.attention(self.attention_norm(x_BTD), rotation, is_key_B11T)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        inner_BTF = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_BTD))))
        return x_BTD + self.dropout(self.ffn_out(inner_BTF))


class Encoder(nn.Module):
    """Maps token ids and their 2D positions to contextual hidden states H (§4.2)."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad: int) -> None:
        super().__init__()
        shape = config.shape
        self.rope, self.expand_at, self.pad = config.rope, config.expand_at, pad
        self.head_dim = shape.width // shape.num_heads
        self.embedding = nn.Embedding(vocab_size, shape.width, padding_idx=pad)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(shape.num_layers))
        self.final_norm = nn.LayerNorm(shape.width)

    def forward(
        self,
        token_ids_BT: Tensor,
        position_BT: Tensor,
        clone_BT: Tensor,
        is_real_BT: Tensor,
        row_ids_BN: Tensor | None = None,
        clone_embedding: nn.Embedding | None = None,
    ) -> Tensor:
        """Encode a batch.

        Deviation from §4.2 if ``expand_at`` is above 0: that many layers see each row before
        expansion, and the state of each mask is then copied to all its clones.

        Args:
            token_ids_BT: int64.
            position_BT: int64, index of the original token; all its clones share it.
            clone_BT: int64, clone index; 0 for an ordinary token.
            is_real_BT: bool, false at padding, which no token attends to.
            row_ids_BN: int64, the rows before expansion, padded; without them, ``expand_at`` has
                no effect.
            clone_embedding: a vector per clone index, added when ``expand_at`` makes the clones.

        Returns:
            hidden_BTD after the final LayerNorm; meaningless at padding.
        """
        layers = self.layers
        if row_ids_BN is not None and self.expand_at:
            layers = layers[self.expand_at :]
            x_BND = self._below(row_ids_BN)
            B, N, _ = x_BND.shape
            source_BT = position_BT + N * torch.arange(B, device=x_BND.device).unsqueeze(1)
            # F.embedding instead of indexing, because its backward pass is a fast sum.
            x_BTD = F.embedding(source_BT, x_BND.flatten(0, 1))
            if clone_embedding is not None:
                x_BTD = x_BTD + clone_embedding(clone_BT) * (clone_BT > 0).unsqueeze(2)
        else:
            x_BTD = self.dropout(self.embedding(token_ids_BT))
        frame = self._frame(position_BT, clone_BT, is_real_BT)
        for layer in layers:
            x_BTD = layer(x_BTD, *frame)
        return self.final_norm(x_BTD)

    def _below(self, row_ids_BN: Tensor) -> Tensor:
        """x_BND after the layers below the expansion."""
        place_BN = torch.arange(row_ids_BN.shape[1], device=row_ids_BN.device)
        place_BN = place_BN.expand_as(row_ids_BN)
        frame = self._frame(place_BN, torch.zeros_like(place_BN), row_ids_BN != self.pad)
        x_BND = self.dropout(self.embedding(row_ids_BN))
        for layer in self.layers[: self.expand_at]:
            x_BND = layer(x_BND, *frame)
        return x_BND

    def _frame(
        self, position_BT: Tensor, clone_BT: Tensor, is_real_BT: Tensor
    ) -> tuple[Rotation, Tensor | None]:
        """What all layers need: the rotation of the tokens, and ``is_key_B11T`` of ``attend``."""
        is_key_B11T = None if bool(is_real_BT.all()) else is_real_BT[:, None, None, :]
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
        if self.rope == "2d":
            return rotation_2d(position_BT, clone_BT, self.head_dim, dtype), is_key_B11T
        place_BT = torch.arange(position_BT.shape[1], device=position_BT.device)
        return rotation_1d(place_BT.expand_as(position_BT), self.head_dim, dtype), is_key_B11T


def initialise(module: nn.Module, std: float) -> None:
    """Draw the weights of linear and embedding layers from N(0, std²); zero biases and pad row."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            with torch.no_grad():
                part.weight[part.padding_idx].zero_()
