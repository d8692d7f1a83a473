"""2D rotary positions: relative in both coordinates, equal to complex multiplication.

Shapes: B rows, T tokens, H heads, d head size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same, drawn
from torch import Tensor

from exlm_mini.model.rope import Rotation, rotate, rotation_1d, rotation_2d

HEAD_DIM = 16
FLOAT64 = torch.float64


def at(position: int, clone: int, dtype: torch.dtype = FLOAT64) -> Rotation:
    """The rotation of a single token."""
    return rotation_2d(torch.tensor([[position]]), torch.tensor([[clone]]), HEAD_DIM, dtype)


def by_complex_numbers(x_BHTd: Tensor, index_BT: Tensor) -> Tensor:
    """RoPE of one part: coordinates j and j + d/2 form a complex number, times e^{i angle}."""
    half = x_BHTd.shape[-1] // 2
    z_BHTj = torch.complex(x_BHTd[..., :half], x_BHTd[..., half:])
    frequency_j = torch.tensor([10_000.0 ** (-j / half) for j in range(half)], dtype=FLOAT64)
    angle_BTj = index_BT.double().unsqueeze(-1) * frequency_j
    z_BHTj = z_BHTj * torch.polar(torch.ones_like(angle_BTj), angle_BTj).unsqueeze(1)
    return torch.cat([z_BHTj.real, z_BHTj.imag], dim=-1)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.booleans())
def test_rotation_equals_multiplication_of_complex_numbers(seed, is_2d):
    """In 2D, the halves of a head rotate by two indices; in 1D, the whole head by one."""
    # A transposed view, as the queries in attention are.
    x_BHTd = drawn(2, 5, 3, HEAD_DIM).transpose(1, 2)
    rng = torch.Generator().manual_seed(seed)
    position_BT, clone_BT = torch.randint(0, 2000, (2, 2, 5), generator=rng)
    if is_2d:
        rotation = rotation_2d(position_BT, clone_BT, HEAD_DIM, FLOAT64)
        parts = zip(x_BHTd.chunk(2, dim=-1), (position_BT, clone_BT), strict=True)
    else:
        rotation, parts = rotation_1d(position_BT, HEAD_DIM, FLOAT64), [(x_BHTd, position_BT)]
    expected = torch.cat([by_complex_numbers(*part) for part in parts], dim=-1)
    assert_same(rotate(x_BHTd, rotation), expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_queries_is_kept(dtype):
    x_BHTd = drawn(1, 2, 1, HEAD_DIM, dtype=dtype)
    ours = rotate(x_BHTd, at(1000, 3, torch.float32))
    assert ours.dtype == dtype
    exact = rotate(x_BHTd.double(), at(1000, 3))
    # Angles are float32 for queries of any dtype, so the result is only rounded once.
    allowed = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-3
    assert ((ours.double() - exact).abs() <= allowed * (1 + exact.abs())).all()


def test_halves_that_cannot_be_paired_are_refused():
    index_11 = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="head_dim is 6"):
        rotation_2d(index_11, index_11, 6)


@pytest.mark.parametrize("is_2d", [True, False])
def test_derivatives_are_those_of_the_formula_and_of_torch_func(is_2d):
    position_BT, clone_BT = torch.arange(2).view(1, 2), torch.tensor([[3, 1]])
    rotation = rotation_1d(position_BT, 8, FLOAT64)
    if is_2d:
        rotation = rotation_2d(position_BT, clone_BT, 8, FLOAT64)

    def cubes(x_BHTd: Tensor) -> Tensor:
        return rotate(x_BHTd, rotation).pow(3)

    x_BHTd = drawn(1, 2, 1, 8).transpose(1, 2)
    assert torch.autograd.gradcheck(cubes, x_BHTd)
    assert torch.autograd.gradgradcheck(cubes, x_BHTd)
    (expected,) = torch.autograd.grad(cubes(x_BHTd).sum(), x_BHTd)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        assert_same(transform(lambda x: cubes(x).sum())(x_BHTd.detach()), expected)
