"""The input of all backends: a graph whose parts are checked against each other.

Shapes: B rows, M targets, L states, T states that an edge may reach forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Graph(NamedTuple):
    """The four arguments of every backend, in order."""

    log_emission_BML: Tensor
    log_transition_BLL: Tensor
    num_targets_B: Tensor
    num_states_B: Tensor

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Graph:
        """The same graph with scores in another dtype and, if given, on another device."""
        scores = (t.to(device=device, dtype=dtype) for t in self[:2])
        return Graph(*scores, *(t.to(device=device) for t in self[2:]))

    def double(self) -> Graph:
        """The same graph with scores in float64."""
        return self.to(torch.float64)

    @property
    def is_state_BL(self) -> Tensor:
        """bool, false beyond the states of a row."""
        _, _, L = self.log_emission_BML.shape
        return torch.arange(L, device=self.num_states_B.device) < self.num_states_B[:, None]

    @property
    def log_edge_BLL(self) -> Tensor:
        """The transitions, with -inf wherever there is no edge v < u between two states."""
        is_forward_BLL = torch.ones_like(self.log_transition_BLL, dtype=torch.bool).triu(1)
        is_edge_BLL = is_forward_BLL & self.is_state_BL[:, None]  # v < u, so v is a state too
        return torch.where(is_edge_BLL, self.log_transition_BLL, -torch.inf)

    @property
    def nothing(self) -> Tensor:
        """0 that depends on both score tensors, so that their gradients are 0, not missing."""
        return self.log_emission_BML[:0].sum() + self.log_transition_BLL[:0].sum()


def checked(
    log_emission: Tensor,
    log_transition: Tensor,
    num_targets: Tensor | int,
    num_states: Tensor | int,
) -> Graph:
    """Check the arguments; return scores in float32 or float64 and counts as int64 (B,).

    Half precision is good enough for log-scores as inputs, but not for their sums: in bfloat16 the
    gradients of a whole dynamic programme are noise.

    Raises:
        ValueError: if shapes, dtypes, devices or counts do not fit each other.
    """
    if log_emission.dim() != 3:
        raise ValueError(f"emission must be (B, M, L), got {tuple(log_emission.shape)}")
    B, M, L = log_emission.shape
    if log_transition.shape[:-1] == (B, L) and log_transition.shape[-1] < L:
        log_transition = unbanded(log_transition)
    if log_transition.shape != (B, L, L):
        raise ValueError(
            f"transition must be {(B, L, L)}, or (B, L, T) with T < L for edges that reach at most "
            f"T states, to match emission (B, M, L) = {(B, M, L)}; got "
            f"{tuple(log_transition.shape)}"
        )
    for what in ("dtype", "device"):
        one, other = getattr(log_emission, what), getattr(log_transition, what)
        if one != other:
            raise ValueError(
                f"emission has {what} {one}, but transition has {other}; use the same {what} for "
                "both"
            )
    if not log_emission.dtype.is_floating_point:
        raise ValueError(f"scores are {log_emission.dtype}; give floating-point numbers")
    dtype = torch.promote_types(log_emission.dtype, torch.float32)
    return Graph(
        log_emission.to(dtype),
        log_transition.to(dtype),
        _count_per_row("num_targets", num_targets, M, log_emission),
        _count_per_row("num_states", num_states, L, log_emission),
    )


def _count_per_row(
    name: str, count: Tensor | int, largest: int, log_emission: Tensor
) -> Tensor:
    """Check counts; return them as int64 (B,) on the device of the scores."""
    B, count = len(log_emission), torch.as_tensor(count)
    if not _is_integer(count.dtype) or count.shape not in ((B,), ()):
        raise ValueError(
            f"{name} must be an integer or an integer tensor of shape ({B},), got {count.dtype} "
            f"{tuple(count.shape)}"
        )
    count = count.to(torch.int64)  # min() does not support uint16 and wider unsigned types
    # A traced count has no value to compare, and for one on a GPU the host would have to wait.
    is_known = B > 0 and count.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_known and not (int(count.min()) >= 1 and int(count.max()) <= largest):
        raise ValueError(f"{name} must lie in 1..{largest}, got {count.tolist()}")
    return count.to(log_emission.device).expand(B)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def unbanded(log_transition_BLT: Tensor) -> Tensor:
    """log_transition_BLL from log E[v, v + 1 + t] (B, L, T); -inf where there is no edge."""
    B, L, T = log_transition_BLT.shape
    place_L = torch.arange(L, device=log_transition_BLT.device)
    reached_LT = place_L.unsqueeze(1) + 1 + place_L[:T]
    wide_BLX = log_transition_BLT.new_full((B, L, L + T), -torch.inf)
    return wide_BLX.scatter(2, reached_LT.expand(B, L, T), log_transition_BLT)[:, :, :L]
