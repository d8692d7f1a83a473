"""States alignment: the sum over all paths through the state graph (§4.3, Appendix H).

Shapes: B rows, M targets, L states.

A path visits one state per target, always moving forward: it starts in state 0, ends in the last
state, and scores the product of its emissions and transitions. Every backend answers the same
questions; ``enumerate`` is the judge, ``naive`` reads like Appendix H, ``vectorized`` is the one
to train with. Another backend plugs in with ``register``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import enumeration, naive, vectorized
from exlm_mini.config import nearest


class Backend(NamedTuple):
    """What a backend offers; both functions take the four arguments of the public ones."""

    log_likelihood: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """log f_{M,L} (B,), differentiable by both score tensors."""
    viterbi: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """path_BM and log_score_B of the best path."""


class Posteriors(NamedTuple):
    """What the paths agree on, given the targets."""

    state_BML: Tensor
    """P(target i is emitted by state u); sums to 1 over u for each target of a row."""
    edge_BLL: Tensor
    """Expected number of times a path takes the edge v -> u; sums to M - 1 over a row."""


BACKENDS: dict[str, Backend] = {}


def register(name: str, backend: Backend) -> None:
    """Offer a backend under a name.

    Raises:
        ValueError: if the name is taken.
    """
    if name in BACKENDS:
        raise ValueError(f"an alignment backend named '{name}' is registered already")
    BACKENDS[name] = backend


def _connected(log_likelihood: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give both score tensors a gradient, zero if need be, even where no path uses them."""

    def connected(
        log_emission_BML: Tensor, log_transition_BLL: Tensor, *counts: Tensor
    ) -> Tensor:
        nothing = sum(
            torch.where(torch.zeros_like(scores, dtype=torch.bool), scores, 0.0).sum()
            for scores in (log_emission_BML, log_transition_BLL)
        )
        return log_likelihood(log_emission_BML, log_transition_BLL, *counts) + nothing

    return connected


register("enumerate", Backend(_connected(enumeration.log_likelihood), enumeration.viterbi))
register("naive", Backend(_connected(naive.log_likelihood), naive.viterbi))
register("vectorized", Backend(vectorized.log_likelihood, vectorized.viterbi))


def _choose(backend: str) -> Backend:
    """The backend of that name; ``auto`` is the fastest that is exact everywhere."""
    name = "vectorized" if backend == "auto" else backend
    if name not in BACKENDS:
        raise ValueError(f"alignment backend '{name}': {nearest(name, ['auto', *BACKENDS])}")
    return BACKENDS[name]


def _check(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> None:
    if log_emission_BML.dim() != 3:
        raise ValueError(f"want emission (B, M, L), got {tuple(log_emission_BML.shape)}")
    B, M, L = log_emission_BML.shape
    if log_transition_BLL.shape != (B, L, L):
        raise ValueError(
            f"want transition {(B, L, L)} for emission {(B, M, L)}, "
            f"got {tuple(log_transition_BLL.shape)}"
        )
    if log_emission_BML.dtype != log_transition_BLL.dtype:
        raise ValueError(
            f"emission is {log_emission_BML.dtype}, transition {log_transition_BLL.dtype}; "
            "give both one dtype"
        )
    for name, count_B, largest in (
        ("num_targets_B", num_targets_B, M),
        ("num_states_B", num_states_B, L),
    ):
        if count_B.shape != (B,) or count_B.dtype != torch.int64:
            raise ValueError(
                f"want {name} int64 {(B,)}, got {count_B.dtype} {tuple(count_B.shape)}"
            )
        if B and (int(count_B.min()) < 1 or int(count_B.max()) > largest):
            raise ValueError(f"{name} must lie in 1..{largest}, got {count_B.tolist()}")


def dag_log_likelihood(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of the targets, summed over every path through the graph.

    Appendix H::

        f[i, u] = sum over v < u of f[i-1, v] * E[v, u] * P_u(y_i),      L_SA = -log f[M, L]

    Appendix H fixes the end of a path (f_{M,L}) but not its start; like the released code and
    Appendix P, a path starts in state 0.

    Args:
        log_emission_BML: log P_u(y_i), float32 or float64; larger is likelier.
        log_transition_BLL: log E[v, u], same dtype; read only at v < u.
        num_targets_B: int64, valid rows of the emission, from 1 to M.
        num_states_B: int64, valid states, from 1 to L. What stands beyond the valid rows and
            states is never read.
        backend: a name in ``BACKENDS``, or ``auto``.

    Returns:
        log_likelihood_B in nats, same dtype; -inf, with zero gradient, where no path fits.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other, or the backend is unknown.
    """
    _check(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return _choose(backend).log_likelihood(
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B
    )


def posteriors(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> Posteriors:
    """State and edge posteriors: alpha beta / f_{M,L} of Appendix I, per row.

    They are the gradients of log f_{M,L} by the log-scores, so any backend provides them.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend: as for
            ``dag_log_likelihood``.

    Returns:
        Posteriors, detached; all zero for a row without a path.
    """
    log_emission_BML = log_emission_BML.detach().requires_grad_()
    log_transition_BLL = log_transition_BLL.detach().requires_grad_()
    with torch.enable_grad():
        log_likelihood_B = dag_log_likelihood(
            log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend
        )
        total = log_likelihood_B.masked_fill(log_likelihood_B == -torch.inf, 0.0).sum()
    return Posteriors(*torch.autograd.grad(total, (log_emission_BML, log_transition_BLL)))


def viterbi(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The single best path and its score.

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B, backend: as for
            ``dag_log_likelihood``.

    Returns:
        path_BM: int64, the state that emits each target; -1 beyond ``num_targets_B`` and where
            no path fits. Among equal paths the one with the earliest states, compared from the
            end, wins.
        log_score_B: log-probability of that path in nats; -inf where no path fits.
    """
    _check(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return _choose(backend).viterbi(
        log_emission_BML.detach(), log_transition_BLL.detach(), num_targets_B, num_states_B
    )
