"""2D rotary positions: relative in both coordinates, equal to complex multiplication.

Shapes: B rows, T tokens, H heads, d head size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_mini.model.rope import Rotation, rotate, rotation_1d, rotation_2d

HEAD_DIM = 16
FLOAT64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


def at(position: int, clone: int) -> Rotation:
    """The rotation of a single token."""
    return rotation_2d(
        torch.tensor([[position]]), torch.tensor([[clone]]), HEAD_DIM, dtype=FLOAT64
    )


def turned(vector_d: Tensor, position: int, clone: int) -> Tensor:
    return rotate(vector_d.view(1, 1, 1, -1), at(position, clone)).flatten()


def by_complex_numbers(x_BHTd: Tensor, index_BT: Tensor) -> Tensor:
    """RoPE of one part: coordinates j and j + d/2 are one complex number, times e^{i angle}."""
    half = x_BHTd.shape[-1] // 2
    z_BHTj = torch.complex(x_BHTd[..., :half], x_BHTd[..., half:])
    frequency_j = torch.tensor([10_000.0 ** (-j / half) for j in range(half)], dtype=FLOAT64)
    angle_BTj = index_BT.double().unsqueeze(-1) * frequency_j
    z_BHTj = z_BHTj * torch.polar(torch.ones_like(angle_BTj), angle_BTj).unsqueeze(1)
    return torch.cat([z_BHTj.real, z_BHTj.imag], dim=-1)


positions = st.integers(0, 2000)
clones = st.integers(0, 64)


@settings(max_examples=20)
@given(positions, clones, positions, clones, st.integers(0, 500), st.integers(0, 20))
def test_scores_depend_on_both_differences_alone(i, j, other_i, other_j, shift_i, shift_j):
    query_d, key_d = drawn(2, HEAD_DIM)
    score = turned(query_d, i, j) @ turned(key_d, other_i, other_j)
    moved = turned(query_d, i + shift_i, j + shift_j) @ turned(
        key_d, other_i + shift_i, other_j + shift_j
    )
    assert abs(score - moved) < 1e-10


def test_rotation_equals_multiplication_of_complex_numbers():
    x_BHTd = drawn(2, 3, 5, HEAD_DIM)
    rng = torch.Generator().manual_seed(0)
    position_BT = torch.randint(0, 500, (2, 5), generator=rng)
    clone_BT = torch.randint(0, 9, (2, 5), generator=rng)
    ours = rotate(x_BHTd, rotation_2d(position_BT, clone_BT, HEAD_DIM, FLOAT64))
    half = HEAD_DIM // 2
    expected = torch.cat(
        [
            by_complex_numbers(x_BHTd[..., :half], position_BT),
            by_complex_numbers(x_BHTd[..., half:], clone_BT),
        ],
        dim=-1,
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_one_coordinate_rotates_whole_heads():
    x_BHTd = drawn(2, 3, 5, HEAD_DIM)
    place_BT = torch.arange(5).expand(2, 5) * 7
    ours = rotate(x_BHTd, rotation_1d(place_BT, HEAD_DIM, FLOAT64))
    torch.testing.assert_close(ours, by_complex_numbers(x_BHTd, place_BT), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_queries_is_kept(dtype):
    rotation = rotation_2d(torch.tensor([[1000]]), torch.tensor([[3]]), HEAD_DIM)
    x_BHTd = drawn(1, 2, 1, HEAD_DIM)
    ours = rotate(x_BHTd.to(dtype), rotation)
    assert ours.dtype == dtype
    exact = rotate(
        x_BHTd.to(dtype).double(),
        rotation_2d(torch.tensor([[1000]]), torch.tensor([[3]]), HEAD_DIM, FLOAT64),
    )
    # Angles are float32 whatever the queries are: only one rounding of the result is lost.
    allowed = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-3
    assert ((ours.double() - exact).abs() <= allowed * (1 + exact.abs())).all()


def test_halves_that_cannot_be_paired_are_refused():
    index_11 = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="head_dim is 6"):
        rotation_2d(index_11, index_11, 6)


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_the_gradient_is_that_of_the_formula(kind):
    position_BT, clone_BT = torch.arange(6).view(2, 3), torch.tensor([[0, 1, 2], [3, 0, 1]])
    if kind == "2d":
        rotation = rotation_2d(position_BT, clone_BT, HEAD_DIM, FLOAT64)
    else:
        rotation = rotation_1d(position_BT, HEAD_DIM, FLOAT64)
    # Queries of a transposed projection, as attention has them.
    x_BHTd = drawn(2, 3, 2, HEAD_DIM).transpose(1, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation), x_BHTd)


def test_a_second_derivative_is_that_of_the_formula():
    x_BHTd = drawn(1, 1, 1, HEAD_DIM).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, at(3, 1)).pow(3), x_BHTd)


def test_torch_func_gives_the_gradient_of_autograd():
    def total(x_BHTd: torch.Tensor) -> torch.Tensor:
        return rotate(x_BHTd, at(3, 1)).pow(3).sum()

    x_BHTd = drawn(1, 1, 1, HEAD_DIM).requires_grad_()
    (expected,) = torch.autograd.grad(total(x_BHTd), x_BHTd)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(total)(x_BHTd.detach()), expected)
