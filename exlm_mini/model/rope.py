"""2D rotary position embedding: token index and clone index (§4.2).

Shapes: B rows, T tokens, H heads, d head size.

A head is split into two contiguous halves. The first is rotated by the token index i, the second
by the clone index j, so an attention score depends on positions only through (i - i', j - j'). As
in the released code, an ordinary token has j = 0 and only half of each head sees its position.
Angles are computed from integer positions at every call: without a cache nothing can be stale after
loading a checkpoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.autograd import is_in_torch_func

_BASE = 10_000.0


class Rotation(NamedTuple):
    """Cosine and sine of every angle, each (B, 1, T, d): one value per head coordinate."""

    cos_B1Td: Tensor
    sin_B1Td: Tensor
    num_parts: int
    """How many independently rotated parts a head has: 2 (2D) or 1 (1D)."""


def _angles(index_BT: Tensor, part_dim: int, dtype: torch.dtype) -> Tensor:
    """Angles index * 10000^(-2j / part_dim), repeated for both halves: (B, T, part_dim)."""
    exponent_j = torch.arange(0, part_dim, 2, dtype=dtype, device=index_BT.device) / part_dim
    angle_BTj = index_BT.to(dtype).unsqueeze(-1) * _BASE**-exponent_j
    return torch.cat([angle_BTj, angle_BTj], dim=-1)


def rotation_2d(
    position_BT: Tensor, clone_BT: Tensor, head_dim: int, dtype: torch.dtype = torch.float32
) -> Rotation:
    """Rotation by token index (first half of each head) and clone index (second half).

    Args:
        position_BT: int64, token index i.
        clone_BT: int64, clone index j; 0 for ordinary tokens.
        head_dim: d, a multiple of 4.

    Raises:
        ValueError: if the halves of a head cannot be rotated in pairs.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; 2D RoPE needs a multiple of 4")
    half = head_dim // 2
    angle_B1Td = torch.cat(
        [_angles(position_BT, half, dtype), _angles(clone_BT, half, dtype)], dim=-1
    ).unsqueeze(1)
    return Rotation(angle_B1Td.cos(), angle_B1Td.sin(), num_parts=2)


def rotation_1d(
    place_BT: Tensor, head_dim: int, dtype: torch.dtype = torch.float32
) -> Rotation:
    """Rotation of whole heads by one index: ordinary RoPE, for "w/o 2D RoPE" (Table 2)."""
    angle_B1Td = _angles(place_BT, head_dim, dtype).unsqueeze(1)
    return Rotation(angle_B1Td.cos(), angle_B1Td.sin(), num_parts=1)


def rotate(x_BHTd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys by their positions; same shape and dtype as the input.

    In each part, coordinate j pairs with coordinate j + part_dim / 2. Differentiable in ``x_BHTd``.
    """
    if is_in_torch_func():
        return _turn(x_BHTd, rotation, 1)
    return _Rotate.apply(x_BHTd, *rotation, 1)


class _Rotate(torch.autograd.Function):
    """The inverse of a rotation is its transpose: backward rotates back and does not need x."""

    @staticmethod
    def forward(
        ctx: Any, x_BHTd: Tensor, cos_B1Td: Tensor, sin_B1Td: Tensor, num_parts: int, sign: int
    ) -> Tensor:
        ctx.save_for_backward(cos_B1Td, sin_B1Td)
        ctx.num_parts, ctx.sign = num_parts, sign
        return _turn(x_BHTd, Rotation(cos_B1Td, sin_B1Td, num_parts), sign)

    @staticmethod
    def backward(ctx: Any, grad_BHTd: Tensor) -> tuple[Tensor, None, None, None, None]:
        back_BHTd = _Rotate.apply(grad_BHTd, *ctx.saved_tensors, ctx.num_parts, -ctx.sign)
        return back_BHTd, None, None, None, None


def _turn(x_BHTd: Tensor, rotation: Rotation, sign: int) -> Tensor:
    """Map (a, b) to (a cos - b sin, b cos + a sin); sign -1 rotates back."""
    if x_BHTd.device.type == "cpu":  # same memory order as the angles
        x_BHTd = x_BHTd.contiguous()
    turned_BHTd = x_BHTd * rotation.cos_B1Td
    x, turned, sin = (
        t.unflatten(-1, (rotation.num_parts, 2, -1))
        for t in (x_BHTd, turned_BHTd, rotation.sin_B1Td)
    )
    # By index: if views of unbind are written to, torch.compile recompiles for each length.
    turned[..., 0, :].addcmul_(x[..., 1, :], sin[..., 0, :], value=-sign)
    turned[..., 1, :].addcmul_(x[..., 0, :], sin[..., 1, :], value=sign)
    return turned_BHTd.to(x_BHTd.dtype)
