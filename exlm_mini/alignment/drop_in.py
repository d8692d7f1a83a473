"""The sum over all paths as a loss for other people's models, such as DA-Transformer.

Shapes: B rows, M targets, L states, T how many states an edge may reach forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exlm_mini.alignment.api import choose
from exlm_mini.alignment.graphs import checked


def dag_loss(
    log_emission: Tensor,
    log_transition: Tensor,
    *,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    backend: str = "auto",
) -> Tensor:
    """-log P(targets), summed over all paths from the first state to the last.

    Args:
        log_emission: (B, M, L), log P(target i | state u), of any floating dtype.
        log_transition: (B, L, L), log P(v -> u), read at v < u alone; or (B, L, T) with T < L,
            log P(v -> v + 1 + t), where every edge reaches at most T states forward.
        num_targets, num_states: (B,), integers on the device of the scores or on the CPU, or one
            int for all rows: how many targets and states are valid. What stands beyond them is
            never read. They are compared with M and L, which waits for a GPU they lie on.
        backend: see ``dag_log_likelihood``.

    Returns:
        (B,), in nats, float32 or float64; inf, with zero gradient, where no path fits. Autograd
        and ``torch.func.grad``, ``vjp`` and ``jacrev`` differentiate it once. Second derivatives
        and forward mode are refused with a RuntimeError; ``naive`` and ``enumerate`` have them.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    names, counts = ("num_targets", "num_states"), (num_targets, num_states)
    return -_log_likelihood(log_emission, log_transition, counts, names, backend)


def torch_dag_loss(
    match_all: Tensor, links: Tensor, output_length: Tensor | int, target_length: Tensor | int
) -> Tensor:
    """``dag_loss`` with name, arguments and sign of DA-Transformer's ``torch_dag_loss``.

    Args:
        match_all: (B, M, L), log-probability of each target in each state.
        links: (B, L, L) or (B, L, T), log-probability of each edge.
        output_length: (B,), states, or one int for all rows.
        target_length: (B,), targets, or one int for all rows.

    Returns:
        (B,), log P(targets) in nats; -inf where no path fits.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    names, counts = ("target_length", "output_length"), (target_length, output_length)
    return _log_likelihood(match_all, links, counts, names)


def _log_likelihood(
    log_emission: Tensor,
    log_transition: Tensor,
    counts: tuple[Tensor | int, Tensor | int],
    names: tuple[str, str],
    backend: str = "auto",
) -> Tensor:
    """log P(targets); ``names`` are the user's for the counts of targets and states."""
    if log_transition.dim() == 3 and log_transition.shape[2] < log_transition.shape[1]:
        log_transition = unbanded(log_transition)
    num_targets, num_states = counts
    if not torch.compiler.is_compiling():
        num_targets, num_states = (c.cpu() if isinstance(c, Tensor) else c for c in counts)
    graph = checked(log_emission, log_transition, num_targets, num_states, names)
    return choose(backend, log_emission.device.type).log_likelihood(*graph)


def unbanded(log_transition_BLT: Tensor) -> Tensor:
    """log_transition_BLL of edges that are given by how far they reach; -inf where none is."""
    B, L, T = log_transition_BLT.shape
    place_L = torch.arange(L, device=log_transition_BLT.device)
    reached_LT = place_L.unsqueeze(1) + 1 + place_L[:T]
    wide_BLX = log_transition_BLT.new_full((B, L, L + T), -torch.inf)
    return wide_BLX.scatter(2, reached_LT.expand(B, L, T), log_transition_BLT)[:, :, :L]
