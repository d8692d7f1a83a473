"""Attention over rows of unequal length, padded or packed: one function for the whole encoder.

Shapes: B rows, T tokens of a padded row, S real tokens of the whole batch, H heads, d head size.

A *padded* batch is B rows of T tokens, and no token attends to padding. In a *packed* batch the
real tokens lie end to end in a single row, and each attends to its own row alone. The values are
the same, and no part of a layer spends time on padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class PackedRows(NamedTuple):
    """The positions of the real tokens of a padded batch, for packing and unpacking."""

    place_S: Tensor
    """int64, index of each token in the flattened padded batch, from 0 to B * T - 1."""
    bound_X: Tensor
    """int32, (B + 1,): row b has the packed tokens from ``bound_X[b]`` up to ``bound_X[b + 1]``."""
    num_columns: int
    """T, the padded length."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.bound_X) - 1

    def pack(self, x_BT: Tensor) -> Tensor:
        """(B, T, ...) to (1, S, ...): the real tokens, row after row."""
        return x_BT.flatten(0, 1)[self.place_S].unsqueeze(0)

    def unpack(self, x_1S: Tensor) -> Tensor:
        """(1, S, ...) back to (B, T, ...), with zeros at padding."""
        x_P = x_1S.new_zeros(self.num_rows * self.num_columns, *x_1S.shape[2:])
        x_P = x_P.index_copy(0, self.place_S, x_1S[0])
        return x_P.unflatten(0, (self.num_rows, self.num_columns))


def packed_rows(is_real_BT: Tensor) -> PackedRows:
    """The packing of a batch.

    Args:
        is_real_BT: bool, false at padding, anywhere in a row.
    """
    place_S = is_real_BT.flatten().nonzero().squeeze(1)
    bound_X = F.pad(is_real_BT.sum(dim=1).cumsum(dim=0), (1, 0)).int()
    return PackedRows(place_S, bound_X, is_real_BT.shape[1])


def attend(
    query_BHTd: Tensor,
    key_BHTd: Tensor,
    value_BHTd: Tensor,
    layout: Tensor | PackedRows | None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v within each row.

    Packed rows use a variable-length kernel where it applies: on GPUs since Ampere, in half
    precision, without dropout, which the kernel lacks. A CPU always computes in float32, because
    its backward pass in bf16 took 1.5 to more than 2 times as long where it was measured.

    Args:
        query_BHTd, key_BHTd, value_BHTd: of a padded batch, or of packed rows: B = 1, T = S.
        layout: for a padded batch is_key_B11T, bool, false at padding, or None without padding;
            for a packed batch its rows.
        dropout: share of the attention probabilities set to 0.

    Returns:
        attended_BHTd, same shape and dtype. Packed and padded agree without dropout; with it
        they drop the same share, but different probabilities.
    """
    if query_BHTd.device.type == "cpu" and query_BHTd.dtype == torch.bfloat16:
        q_BHTd, k_BHTd, v_BHTd = (x.float() for x in (query_BHTd, key_BHTd, value_BHTd))
        with torch.autocast("cpu", enabled=False):
            return attend(q_BHTd, k_BHTd, v_BHTd, layout, dropout).bfloat16()
    if not isinstance(layout, PackedRows):
        return F.scaled_dot_product_attention(
            query_BHTd, key_BHTd, value_BHTd, attn_mask=layout, dropout_p=dropout
        )
    qkv = (query_BHTd, key_BHTd, value_BHTd)
    if query_BHTd.device.type == "cpu":
        return _row_by_row(*qkv, layout, dropout)
    if dropout == 0 and _has_kernel(query_BHTd):
        return _end_to_end(*qkv, layout)
    return _padded_again(*qkv, layout, dropout)


def _has_kernel(q_1HSd: Tensor) -> bool:
    """The variable-length kernel takes half precision, and head sizes 8, 16, ... 256."""
    is_half = q_1HSd.dtype in (torch.bfloat16, torch.float16)
    is_fit = q_1HSd.shape[-1] <= 256 and q_1HSd.shape[-1] % 8 == 0
    return is_half and is_fit and torch.cuda.get_device_capability(q_1HSd.device) >= (8, 0)


def _end_to_end(q_1HSd: Tensor, k_1HSd: Tensor, v_1HSd: Tensor, rows: PackedRows) -> Tensor:
    """One call of the variable-length kernel, whose shapes are (S, H, d)."""
    from torch.nn.attention.varlen import varlen_attn  # takes two seconds, and only GPUs use it

    q_SHd, k_SHd, v_SHd = (x_1HSd[0].transpose(0, 1) for x_1HSd in (q_1HSd, k_1HSd, v_1HSd))
    # The seven arguments that all its versions have; there is no mask within a row.
    longest = rows.num_columns
    out_SHd = varlen_attn(q_SHd, k_SHd, v_SHd, rows.bound_X, rows.bound_X, longest, longest)
    assert isinstance(out_SHd, torch.Tensor)  # a tuple only if its statistics are requested
    return out_SHd.transpose(0, 1).unsqueeze(0)


def _row_by_row(
    q_1HSd: Tensor, k_1HSd: Tensor, v_1HSd: Tensor, rows: PackedRows, dropout: float
) -> Tensor:
    """One call per row: on a CPU calls are cheap, and no product is wasted.

    Measured on one core (32 molecules of 15 to 70 tokens, 4 heads of 16, both passes) this took
    0.8 times as long as padding again, and an eighth of the time of all S x S products under a
    block-diagonal mask; with 64 molecules and 12 heads of 64, half as long and a 17th.
    """
    lengths = rows.bound_X.diff().tolist()
    parts = (x_1HSd.split(lengths, dim=2) for x_1HSd in (q_1HSd, k_1HSd, v_1HSd))
    attended = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(attended, dim=2)


def _padded_again(
    q_1HSd: Tensor, k_1HSd: Tensor, v_1HSd: Tensor, rows: PackedRows, dropout: float
) -> Tensor:
    """Pads for attention alone: on a GPU one kernel launch per row would take longer."""
    q_BHTd, k_BHTd, v_BHTd = (
        rows.unpack(x_1HSd.transpose(1, 2)).transpose(1, 2)
        for x_1HSd in (q_1HSd, k_1HSd, v_1HSd)
    )
    is_key_BT = rows.unpack(torch.ones_like(rows.place_S, dtype=torch.bool).unsqueeze(0))
    attended_BHTd = F.scaled_dot_product_attention(
        q_BHTd, k_BHTd, v_BHTd, attn_mask=is_key_BT[:, None, None, :], dropout_p=dropout
    )
    return rows.pack(attended_BHTd.transpose(1, 2)).transpose(1, 2)
