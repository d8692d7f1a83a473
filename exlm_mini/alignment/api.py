"""The likelihood of the targets, what it agrees on, and the best path (§4.3, Appendices H and I).

Shapes: B rows, M targets, L states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment.backends import choose


class Posteriors(NamedTuple):
    """What the paths agree on, given the targets."""

    state_BML: Tensor
    """P(target i is emitted by state u); sums to 1 over u for each target of a row."""
    edge_BLL: Tensor
    """Expected number of times a path takes the edge v -> u; sums to M - 1 over a row."""


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
        log_emission_BML: log P_u(y_i), any floating dtype; larger is likelier. Half precision is
            raised to float32 first.
        log_transition_BLL: log E[v, u], same dtype; read only at v < u.
        num_targets_B: int64, valid rows of the emission, from 1 to M.
        num_states_B: int64, valid states, from 1 to L. What stands beyond the valid rows and
            states is never read.
        backend: a name in ``BACKENDS``, or ``auto``: the fastest that works on this device.

    Returns:
        log_likelihood_B in nats, float32 or float64; -inf, with zero gradient, where no path
        fits. In float32 the gradients of ``native`` and ``scaled`` are exact to about 1e-6 of
        the largest. In log space the logarithms themselves become large and take digits with
        them: ``vectorized`` is off by about 2e-5 at M = 77 and 8e-5 at M = 256, ``naive``, whose
        gradient is autograd's, by several times that.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other, the backend is unknown, or
            the graph has more paths than ``enumerate``, or more terms than ``naive`` can add up.
            Counts that lie on a GPU are not compared with M and L, as that would wait for it.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return choose(backend, graph[0].device.type).log_likelihood(*graph)


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
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    emission, transition = (t.detach().requires_grad_() for t in graph[:2])
    with torch.enable_grad():
        total = dag_log_likelihood(emission, transition, *graph[2:], backend).sum()
    return Posteriors(*torch.autograd.grad(total, (emission, transition)))


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
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    return choose(backend, graph[0].device.type).viterbi(*(t.detach() for t in graph))


def checked(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four arguments, scores in half precision raised to float32.

    Log-scores of half precision are good enough as inputs, but not to add up: from bfloat16 the
    gradients of a whole dynamic programme come out as noise.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other. The values of counts that
            lie on a GPU are not looked at, as that would wait for the GPU.
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
    for name, count_B, largest in (
        ("num_targets_B", num_targets_B, M),
        ("num_states_B", num_states_B, L),
    ):
        if count_B.shape != (B,) or count_B.dtype != torch.int64:
            raise ValueError(
                f"want {name} int64 {(B,)}, got {count_B.dtype} {tuple(count_B.shape)}"
            )
        # A traced value has no number to compare.
        if B == 0 or count_B.device.type != "cpu" or torch.compiler.is_compiling():
            continue
        if int(count_B.min()) < 1 or int(count_B.max()) > largest:
            raise ValueError(f"{name} must lie in 1..{largest}, got {count_B.tolist()}")
    dtype = torch.promote_types(dtype, torch.float32)
    return log_emission_BML.to(dtype), log_transition_BLL.to(dtype), num_targets_B, num_states_B
