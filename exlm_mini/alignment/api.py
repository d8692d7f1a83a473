"""The likelihood of the targets, posteriors, and the best path (§4.3, Appendices H and I).

Shapes: B rows, M targets, L states.

Backends compute these from checked arguments. ``enumerate`` is the reference for all others,
``naive`` reads like Appendix H, ``vectorized`` is plain PyTorch in log space, ``scaled`` works
with rescaled probabilities, ``native`` is compiled C++ or CUDA. None of them approximates; they
differ in time, memory and rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import enumeration, naive, native, scaled, vectorized
from exlm_mini.alignment.autograd import is_in_torch_func
from exlm_mini.alignment.graphs import Graph, checked
from exlm_mini.config.checks import nearest

# ---- the table of backends ----


class Backend(NamedTuple):
    """The functions of a backend, which take the four tensors of a checked ``Graph``."""

    log_likelihood: Callable[..., Tensor]
    """Returns log f_{M,L}, (B,), differentiable with respect to both score tensors."""
    viterbi: Callable[..., tuple[Tensor, Tensor]]
    """Returns path_BM and log_score_B of the best path."""
    why_not: Callable[[str], str | None] = lambda device_type: None
    """Returns why the backend does not work on a device type such as ``cpu``; None if it does."""


BACKENDS: dict[str, Backend] = {
    "enumerate": Backend(enumeration.log_likelihood, enumeration.viterbi),
    "naive": Backend(naive.log_likelihood, vectorized.viterbi),
    "vectorized": Backend(vectorized.log_likelihood, vectorized.viterbi),
    "scaled": Backend(scaled.log_likelihood, vectorized.viterbi),
    "native": Backend(native.log_likelihood, native.viterbi, native.why_not),
}


@cache
def _first_that_works(device_type: str) -> str:
    reason = BACKENDS["native"].why_not(device_type)
    if reason is None:
        return "native"
    warnings.warn(
        "states alignment falls back to the backend 'scaled' because 'native' is not available: "
        f"{reason.splitlines()[0].rstrip(':')}. Run `python -m exlm_mini.doctor` for details.",
        stacklevel=2,
    )
    return "scaled"


def fastest(device_type: str) -> str:
    """Name of the backend that ``auto`` selects on a type of device.

    It is ``native`` or, where that does not work, ``scaled``, with one warning. The first call may
    build the compiled backend, which takes some seconds.
    """
    return _first_that_works(device_type)


# A compiler takes the result as a constant instead of tracing the function. So does
# ``torch.compiler.assume_constant_result``, but it imports torch._dynamo, which takes as long as
# importing torch.
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose(name: str, device_type: str) -> Backend:
    """The backend with this name; ``auto`` chooses the fastest that works on the device type."""
    name = fastest(device_type) if name == "auto" else name
    if name not in BACKENDS:
        raise ValueError(
            f"unknown alignment backend '{name}'; {nearest(name, ['auto', *BACKENDS])}"
        )
    return BACKENDS[name]


# ---- the public functions ----


class Posteriors(NamedTuple):
    """Posterior probabilities, given the targets."""

    state_BML: Tensor
    """P(target i is emitted by state u); sums to 1 over u for each target of a row."""
    edge_BLL: Tensor
    """Expected number of times a path takes the edge v -> u; sums to M - 1 over a row."""


def dag_log_likelihood(
    log_emission: Tensor,
    log_transition: Tensor,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    backend: str = "auto",
) -> Tensor:
    """Log-probability of the targets, summed over every path through the graph.

    Appendix H::

        f[i, u] = sum over v < u of f[i-1, v] * E[v, u] * P_u(y_i),      L_SA = -log f[M, L]

    Appendix H fixes the end of a path (f_{M,L}) but not its start; here it starts in state 0, as in
    the released code and Appendix P.

    Args:
        log_emission: (B, M, L), log P_u(y_i), any floating dtype; larger is likelier. Half
            precision is raised to float32 first.
        log_transition: (B, L, L), log E[v, u], same dtype, read only at v < u; or (B, L, T) with
            T < L, log E[v, v + 1 + t], where every edge reaches at most T states forward.
        num_targets: number of targets, from 1 to M; integers (B,), or one for all rows.
        num_states: number of states, from 1 to L; integers (B,), or one for all rows. Scores beyond
            these targets and states are not read.
        backend: a name in ``BACKENDS``, or ``auto``: the fastest that works on this device.

    Returns:
        log_likelihood_B in nats, float32 or float64; -inf, with zero gradient, where no path
        fits. In float32 the gradients of ``native`` and ``scaled`` are exact to about 1e-6 of
        the largest. In log space the logarithms themselves become large, which costs precision:
        ``vectorized`` is off by about 2e-5 at M = 77 and 8e-5 at M = 256, and ``naive``, whose
        gradient is autograd's, by several times as much.

    Raises:
        ValueError: if shapes, dtypes or counts do not fit each other, or the backend is unknown.
            Counts on a GPU are not compared with M and L, as the host would have to wait for it.
    """
    graph = checked(log_emission, log_transition, num_targets, num_states)
    return choose(backend, log_emission.device.type).log_likelihood(*graph)


def posteriors(
    log_emission: Tensor,
    log_transition: Tensor,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    backend: str = "auto",
) -> Posteriors:
    """State and edge posteriors of each row: alpha beta / f_{M,L}, both as in Appendix I.1.

    They are the gradients of log f_{M,L} with respect to the log-scores, so any backend provides
    them. If ``probability_BLV`` holds P_u(w) of all tokens, ``state_BML @ probability_BLV`` is the
    marginal distribution of each target.

    Returns:
        Posteriors, detached; all zero for a row without a path.
    """
    graph = checked(log_emission, log_transition, num_targets, num_states)
    log_likelihood = choose(backend, log_emission.device.type).log_likelihood

    def total(*scores: Tensor) -> Tensor:
        return log_likelihood(*scores, *graph[2:]).sum()

    if is_in_torch_func():  # where requires_grad_() is not allowed
        by_scores = torch.func.grad(total, argnums=(0, 1))
        return Posteriors(*by_scores(*(t.detach() for t in graph[:2])))
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd refuses tensors that were made in inference mode.
        graph = Graph(*(t.clone() if t.is_inference() else t for t in graph))
        scores = tuple(t.detach().requires_grad_() for t in graph[:2])
        return Posteriors(*torch.autograd.grad(total(*scores), scores))


def viterbi(
    log_emission: Tensor,
    log_transition: Tensor,
    num_targets: Tensor | int,
    num_states: Tensor | int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The single best path and its score.

    Returns:
        path_BM: int64, the state that emits each target; -1 beyond the targets and where no path
            fits. Among equal paths the one with the earliest states, compared from the end, wins.
        log_score_B: log-probability of that path in nats; -inf where no path fits. If the score of
            any path is NaN, this is NaN, and the row counts as having no path.
    """
    graph = checked(log_emission, log_transition, num_targets, num_states)
    own = choose(backend, log_emission.device.type)
    path_BM, log_score_B = own.viterbi(*(t.detach() for t in graph))
    return path_BM.masked_fill(log_score_B.isnan().unsqueeze(1), -1), log_score_B
