"""The sum over all paths as a drop-in loss for other models, such as DA-Transformer."""

from __future__ import annotations

from torch import Tensor

from exlm_mini.alignment.api import dag_log_likelihood


def dag_loss(
    log_emission: Tensor,
    log_transition: Tensor,
    *,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    backend: str = "auto",
) -> Tensor:
    """-log P(targets), where P is summed over all paths from the first state to the last.

    Returns:
        (B,), in nats, float32 or float64; inf, with zero gradient, where no path fits. Autograd
        and ``torch.func.grad``, ``vjp`` and ``jacrev`` differentiate it once. Second derivatives
        and forward mode raise a RuntimeError, except in the backends ``naive`` and ``enumerate``;
        ``vmap`` is not supported.
    """
    return -dag_log_likelihood(log_emission, log_transition, num_targets, num_states, backend)


def torch_dag_loss(
    match_all: Tensor, links: Tensor, output_length: Tensor | int, target_length: Tensor | int
) -> Tensor:
    """``dag_log_likelihood`` under the name and arguments of DA-Transformer's ``torch_dag_loss``.

    Args:
        match_all: (B, M, L), log-probability of each target in each state.
        links: (B, L, L) or (B, L, T), log-probability of each edge.

    Returns:
        (B,), log P(targets) in nats; -inf where no path fits.
    """
    return dag_log_likelihood(match_all, links, target_length, output_length)
