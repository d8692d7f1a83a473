"""The sum over all paths as a loss for other people's models, such as DA-Transformer.

Shapes: B rows, M targets, L states, T how many states an edge may reach forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.api import dag_log_likelihood
from exlm_mini.alignment.graphs import checked


def dag_loss(
    log_emission: Tensor,
    log_transition: Tensor,
    *,
    num_targets: Tensor,
    num_states: Tensor,
    backend: str = "auto",
) -> Tensor:
    """-log P(targets), summed over all paths from the first state to the last.

    Args:
        log_emission: (B, M, L), log P(target i | state u), of any floating dtype.
        log_transition: (B, L, L), log P(v -> u), read at v < u alone; or (B, L, T) with T < L,
            log P(v -> v + 1 + t), where every edge reaches at most T states forward.
        num_targets, num_states: (B,), integers on the device of the scores or on the CPU: how
            many targets and states are valid. What stands beyond them is never read. They are
            compared with M and L, which waits for a GPU they lie on.
        backend: see ``dag_log_likelihood``.

    Returns:
        (B,), in nats, float32 or float64; inf, with zero gradient, where no path fits. Autograd
        and ``torch.func.grad``, ``vjp`` and ``jacrev`` differentiate it once. Second derivatives
        and forward mode are refused with a RuntimeError; ``naive`` and ``enumerate`` have them.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    if log_transition.dim() == 3 and log_transition.shape[2] < log_transition.shape[1]:
        log_transition = unbanded(log_transition)
    for name, count_B in (("num_targets", num_targets), ("num_states", num_states)):
        if count_B.dtype.is_floating_point or count_B.dtype == torch.bool:
            raise ValueError(f"{name} is {count_B.dtype}; give integers")
    if not torch.compiler.is_compiling():
        counts = (count_B.to("cpu", torch.int64) for count_B in (num_targets, num_states))
        checked(log_emission, log_transition, *counts)
    num_targets, num_states = (
        count_B.to(log_emission.device, torch.int64) for count_B in (num_targets, num_states)
    )
    return -dag_log_likelihood(log_emission, log_transition, num_targets, num_states, backend)


def torch_dag_loss(
    match_all: Tensor, links: Tensor, output_length: Tensor, target_length: Tensor
) -> Tensor:
    """``dag_loss`` with name, arguments and sign of DA-Transformer's ``torch_dag_loss``.

    Args:
        match_all: (B, M, L), log-probability of each target in each state.
        links: (B, L, L) or (B, L, T), log-probability of each edge.
        output_length: (B,), states.
        target_length: (B,), targets.

    Returns:
        (B,), log P(targets) in nats; -inf where no path fits.
    """
    return -dag_loss(match_all, links, num_targets=target_length, num_states=output_length)


def unbanded(log_transition_BLT: Tensor) -> Tensor:
    """log_transition_BLL of edges that are given by how far they reach; -inf where none is."""
    B, L, T = log_transition_BLT.shape
    place_L = torch.arange(L, device=log_transition_BLT.device)
    reached_LT = place_L.unsqueeze(1) + 1 + place_L[:T]
    wide_BLX = log_transition_BLT.new_full((B, L, L + T), -torch.inf)
    return wide_BLX.scatter(2, reached_LT.expand(B, L, T), log_transition_BLT)[:, :, :L]
