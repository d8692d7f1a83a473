"""What all backends share: checking that the parts of a graph fit, and masking what is not read.

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COUNTS = ("num_targets_B", "num_states_B")
"""What messages call the counts, unless a function has other names for them."""


def checked(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    names: tuple[str, str] = COUNTS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four arguments: scores of at least single precision, counts as int64 (B,).

    Half precision is good enough for log-scores as inputs, but not for their sums: in bfloat16 the
    gradients of a whole dynamic programme are noise.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other. Counts on a GPU are not
            compared with M and L, because reading them would wait for the GPU.
    """
    check_scores(log_emission_BML, log_transition_BLL)
    _, M, L = log_emission_BML.shape
    dtype = torch.promote_types(log_emission_BML.dtype, torch.float32)
    return (
        log_emission_BML.to(dtype),
        log_transition_BLL.to(dtype),
        _count_per_row(names[0], num_targets, M, log_emission_BML),
        _count_per_row(names[1], num_states, L, log_emission_BML),
    )


def _count_per_row(
    name: str, count: Tensor | int, largest: int, log_emission_BML: Tensor
) -> Tensor:
    """Counts as int64 (B,), from integers per row or one for all, on the device of the scores."""
    B, device = len(log_emission_BML), log_emission_BML.device
    counted = range(1, largest + 1)
    if isinstance(count, Integral) and not isinstance(count, bool):
        if B and count not in counted:
            raise ValueError(f"{name} must lie in 1..{largest}, got {count}")
        return torch.full((B,), int(count), device=device)
    if not isinstance(count, Tensor):
        raise ValueError(f"want {name} one integer or int64 ({B},), got {count!r:.100}")
    if count.dtype not in INTEGERS or count.shape not in ((B,), ()):
        shown = f"{count.dtype} {tuple(count.shape)}"
        raise ValueError(f"want {name} one integer or int64 ({B},), got {shown}")
    # A traced value has no number to compare, and that of a GPU would have to be waited for.
    is_known = B > 0 and count.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_known and not (int(count.min()) in counted and int(count.max()) in counted):
        raise ValueError(f"{name} must lie in 1..{largest}, got {count.tolist()}")
    return count.to(device, torch.int64).expand(B)


def check_scores(log_emission_BML: Tensor, log_transition_BLL: Tensor) -> None:
    """Whether shapes and dtypes of the scores fit each other.

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
