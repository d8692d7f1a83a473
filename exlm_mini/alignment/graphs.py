"""What all backends share: checking that the parts of a graph fit, and masking what is not read.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

import torch
from torch import Tensor


def checked(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four arguments, with half-precision scores raised to float32.

    Half precision is good enough for log-scores as inputs, but not for their sums: in bfloat16 the
    gradients of a whole dynamic programme are noise.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other. Counts on a GPU are not
            compared with M and L, because reading them would wait for the GPU.
    """
    check_shapes(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    B, M, L = log_emission_BML.shape
    for name, count_B, largest in (
        ("num_targets_B", num_targets_B, M),
        ("num_states_B", num_states_B, L),
    ):
        if B == 0 or count_B.device.type != "cpu" or torch.compiler.is_compiling():
            continue  # a traced value has no number to compare
        if int(count_B.min()) < 1 or int(count_B.max()) > largest:
            raise ValueError(f"{name} must lie in 1..{largest}, got {count_B.tolist()}")
    dtype = torch.promote_types(log_emission_BML.dtype, torch.float32)
    return log_emission_BML.to(dtype), log_transition_BLL.to(dtype), num_targets_B, num_states_B


def check_shapes(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> None:
    """Whether shapes and dtypes fit each other, without a look at the numbers.

    Raises:
        ValueError: if they do not.
    """
    if log_emission_BML.dim() != 3:
        raise ValueError(f"want emission (B, M, L), got {tuple(log_emission_BML.shape)}")
    B, M, L = log_emission_BML.shape
    if log_transition_BLL.shape != (B, L, L):
        raise ValueError(
            f"want transition {(B, L, L)} for emission {(B, M, L)}, "
            f"got {tuple(log_transition_BLL.shape)}"
        )
    dtype = log_emission_BML.dtype
    if dtype != log_transition_BLL.dtype:
        raise ValueError(
            f"emission is {dtype}, transition {log_transition_BLL.dtype}; give both one dtype"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"scores are {dtype}; give floating-point numbers")
    for name, count_B in (("num_targets_B", num_targets_B), ("num_states_B", num_states_B)):
        if count_B.shape != (B,) or count_B.dtype != torch.int64:
            raise ValueError(
                f"want {name} int64 {(B,)}, got {count_B.dtype} {tuple(count_B.shape)}"
            )


def edges_only(log_transition_BLL: Tensor, is_state_BL: Tensor) -> Tensor:
    """The transitions, with -inf wherever there is no edge v < u between two states."""
    L = is_state_BL.shape[1]
    is_forward_LL = torch.ones(L, L, dtype=torch.bool, device=is_state_BL.device).triu(1)
    is_edge_BLL = is_forward_LL & is_state_BL.unsqueeze(1)  # v < u < n, so v is a state too
    return torch.where(is_edge_BLL, log_transition_BLL, -torch.inf)


def is_state(log_emission_BML: Tensor, num_states_B: Tensor) -> Tensor:
    """True for the states that a row has, bool (B, L)."""
    state_L = torch.arange(log_emission_BML.shape[2], device=log_emission_BML.device)
    return state_L < num_states_B.unsqueeze(1)
