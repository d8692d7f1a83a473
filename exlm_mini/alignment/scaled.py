"""Rescaled probabilities: one matrix-vector product per target, one product for the gradient.

Shapes: B rows, M targets, L states.

The recursions of Appendix I.1 on probabilities. The masses of each target, which are its entries of
alpha or back, are divided by the largest of them::

    alpha[i, u] = P_u(y_i) * sum over v < u of alpha[i-1, v] * E[v, u]
    back[i, v]  = P_v(y_i) * sum over u > v of E[v, u] * back[i+1, u]

``back`` is beta including the state's own emission. An edge is exponentiated once, not once per
target, and the gradient for the transitions, E * (A^T B), is a single product of the two sweeps.
All sums are float64, whatever the dtype of the scores.

Underflow. Edges, emissions and masses are at most 1, and anything below t = 2^-1022, the smallest
normal number, may be flushed to zero. From one target to the next, a mass therefore loses at most
(4 L + 1) t: 3 L t for the masses, edges and products of L predecessors, L t for its emission, and
t for the last product. To make up for this, lift = 8 L^2 t is added to every mass that a path may
use (its emission is not -inf, and it is inside the cone: with enough states before and after it),
so that no mass is ever below its true value. The effect of the lifts is then bounded from above.
In each sweep, the L states of a target receive L lift together, and each counts at most L times,
the most that may reach its state in the other sweep; for both sweeps this makes 2 L^2 lift. It is
compared with the likelihood in the same units: d[i] = sum over u of (what reaches u) * back[i, u],
times the divisor of back[i]. If these ratios, summed over the targets, are at most 2^-40, then
value and posteriors are exact to that precision.

Rows with a larger sum are computed again by ``vectorized`` in float64, both value and gradient:
their scores spread over more than about 600 nats, or missing edges leave no path. Rows in which
some target has no usable state have no path either, but they need not be computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import vectorized
from exlm_mini.alignment.autograd import with_gradients
from exlm_mini.alignment.graphs import Graph

SMALLEST = torch.finfo(torch.float64).tiny
TOLERANCE = 2.0**-40
"""Largest share of a likelihood that may come from the lift against underflow."""
CACHE_BYTES = 8 * 2**20
"""On a CPU, rows are processed in groups whose edges fit into a cache of this size."""


def _is_cpu_at_work(tensor: Tensor) -> bool:
    """True on a CPU outside a compiler: reading a value costs nothing there, and caches matter."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _peak(log_scores: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest score; 0 where all are -inf, NaN where one is. It is float64, so that everything
    computed from it is float64 too."""
    peak = log_scores.amax(dims, keepdim=True).double()
    return peak.masked_fill(peak == -torch.inf, 0.0)


def _in_cone(graph: Graph) -> Tensor:
    """The states in which a path may emit each target, bool (B, M, L): its start and end are fixed,
    and it always moves forward."""
    _, M, L = graph.log_emission_BML.shape
    num_targets_B11, num_states_B11 = (count_B.view(-1, 1, 1) for count_B in graph[2:])
    target_M1 = torch.arange(M, device=num_targets_B11.device).unsqueeze(1)
    state_L = torch.arange(L, device=num_targets_B11.device)
    is_last_BM1 = target_M1 == num_targets_B11 - 1
    first_BM1 = torch.where(is_last_BM1, num_states_B11 - 1, target_M1)
    last_BM1 = torch.where(target_M1 == 0, 0, num_states_B11 - num_targets_B11 + target_M1)
    is_target_BM1 = target_M1 < num_targets_B11
    return is_target_BM1 & (state_L >= first_BM1) & (state_L <= last_BM1)


class _Sweep(NamedTuple):
    """The result of a sweep in one direction."""

    mass_BML: Tensor
    """Masses, divided so that the largest of each target is 1."""
    reach_BML: Tensor
    """Masses before emission, in the unit of the target visited before."""
    scale_BM1: Tensor
    """Divisor of each target's masses; 0 where no state is usable."""


def _sweep(
    edge_BLL: Tensor, emission_BML: Tensor, seed_BML: Tensor, order: Iterable[int], width: int
) -> _Sweep:
    """Sweep from target to target, along the edges or, if they are transposed, against them.

    In every row, target i can only be in the states i .. i + ``width``.
    """
    mass_BML, reach_BML = torch.zeros_like(seed_BML), torch.zeros_like(seed_BML)
    scale_BM1 = torch.ones_like(seed_BML[:, :, :1])
    before = None
    for i in order:
        here = (slice(None), slice(i, i + 1), slice(i, i + width + 1))
        mass_B1L, scale_B11 = seed_BML[here], scale_BM1[:, i : i + 1]
        if before is not None:
            step_BLL = edge_BLL[:, before[2], here[2]]
            reach_B1L = torch.bmm(mass_BML[before], step_BLL)
            reach_BML[here] = reach_B1L
            mass_B1L = torch.addcmul(mass_B1L, reach_B1L, emission_BML[here])
        torch.amax(mass_B1L, 2, keepdim=True, out=scale_B11)
        torch.div(mass_B1L, scale_B11.clamp(min=SMALLEST), out=mass_BML[here])
        before = here
    return _Sweep(mass_BML, reach_BML, scale_BM1)


def _forward_backward(graph: Graph) -> tuple[Tensor, ...]:
    """Run both sweeps, bound their error, and compute the posteriors, all in float64.

    Returns:
        log_likelihood_B, is_exact_B, is_live_B (exact, and a path fits), and the posteriors
        state_BML and edge_BLL, which are meaningless in rows that are not live.
    """
    num_targets_B, num_states_B = graph[2:]
    # Probabilities of all scores that are read; the rest is 0, even where it was NaN. They are
    # scaled so that the largest edge of a row and the largest emission of a target are 1.
    log_edge_BLL = graph.log_edge_BLL
    edge_peak_B11 = _peak(log_edge_BLL, (1, 2))
    edge_BLL = (log_edge_BLL - edge_peak_B11).exp_()
    log_emission_BML = torch.where(_in_cone(graph), graph.log_emission_BML, -torch.inf)
    emission_peak_BM1 = _peak(log_emission_BML, (2,))
    emission_BML = (log_emission_BML - emission_peak_BM1).exp_()

    _, M, L = emission_BML.shape
    lift = 8 * L * L * SMALLEST
    target_M = torch.arange(M, device=num_targets_B.device)
    is_target_BM = target_M < num_targets_B.unsqueeze(1)
    is_last_BM = target_M == num_targets_B.unsqueeze(1) - 1
    is_usable_BML = log_emission_BML != -torch.inf

    def sweep(edge_BLL: Tensor, is_seed: Tensor, order: Iterable[int]) -> _Sweep:
        seed_BML = is_usable_BML * is_seed.double().clamp(min=lift).unsqueeze(-1)
        return _sweep(edge_BLL, emission_BML, seed_BML, order, width)

    width, num_steps = L - 1, min(M, L)  # no path has more steps
    if _is_cpu_at_work(num_targets_B):  # elsewhere reading the counts would wait for the device
        width = int((num_states_B - num_targets_B).max().clamp(min=0))
    alpha = sweep(edge_BLL, target_M == 0, range(num_steps))
    back = sweep(edge_BLL.mT, is_last_BM, range(num_steps - 1, 0, -1))
    log_scale_BM = alpha.scale_BM1.squeeze(2).log().masked_fill(~is_target_BM, 0.0)
    log_peak_B = emission_peak_BM1.sum((1, 2)) + (num_targets_B - 1) * edge_peak_B11.view(-1)
    log_likelihood_B = log_scale_BM.sum(1) + log_peak_B

    # From here on only targets 1, 2, ...: target 0 is always in state 0, which needs no sum.
    state_BML = alpha.reach_BML[:, 1:] * back.mass_BML[:, 1:]
    likelihood_BM1 = state_BML.sum(2, keepdim=True)
    added_BM1 = 2 * L * L * lift / (likelihood_BM1 * back.scale_BM1[:, 1:])
    added_B = added_BM1.squeeze(2).masked_fill(~is_target_BM[:, 1:], 0.0).sum(1)
    is_lost_B, is_nan_B = log_likelihood_B == -torch.inf, log_likelihood_B.isnan()
    is_exact_B = (added_B <= TOLERANCE) | is_lost_B | is_nan_B
    is_live_B = is_exact_B & ~is_lost_B

    # 1 / likelihood may reach 1e300, so each of the two factors is scaled by its square root.
    is_live_BM1 = (is_target_BM[:, 1:] & is_live_B.unsqueeze(1)).unsqueeze(2)
    # The sweeps miss a NaN among the emissions of the first or last target.
    one_B11 = torch.where(is_nan_B, torch.nan, 1.0).view(-1, 1, 1)
    root_BM1 = torch.where(is_live_BM1, likelihood_BM1.rsqrt(), 0.0) * one_B11
    passed_BLL = torch.bmm(
        (alpha.mass_BML[:, :-1] * root_BM1).mT, back.mass_BML[:, 1:] * root_BM1
    )
    state_BML = torch.cat([alpha.mass_BML[:, :1] * one_B11, state_BML * root_BM1.square()], 1)
    return log_likelihood_B, is_exact_B, is_live_B, state_BML, passed_BLL.mul_(edge_BLL)


def _compute(*arguments: Tensor) -> tuple[Tensor, ...]:
    """``_forward_backward`` in the dtype of the scores. Posteriors are computed together with the
    value, while both sweeps are at hand."""
    log_emission_BML, log_transition_BLL, num_targets_B, _ = arguments
    B, _, L = log_emission_BML.shape
    log_likelihood_B = log_emission_BML.new_empty(B)
    results = (
        log_likelihood_B,
        torch.empty_like(log_likelihood_B, dtype=torch.bool),
        torch.empty_like(log_likelihood_B, dtype=torch.bool),
        torch.empty_like(log_emission_BML),
        torch.empty_like(log_transition_BLL),
    )
    num_rows = max(1, CACHE_BYTES // (8 * L * L)) if _is_cpu_at_work(num_targets_B) else B
    for first in range(0, B, max(1, num_rows)):
        rows = slice(first, first + num_rows)
        parts = _forward_backward(Graph(*(t[rows] for t in arguments)))
        for result, part in zip(results, parts, strict=True):
            result[rows] = part
    return results


def _gradients(grad_B: Tensor, *inputs_and_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The posteriors of each row, times its incoming gradient."""
    *_, is_live_B, state_BML, edge_BLL = inputs_and_rows
    grad_B11 = torch.where(is_live_B, grad_B, 0.0).view(-1, 1, 1)
    return state_BML * grad_B11, edge_BLL * grad_B11


_differentiable = with_gradients(_compute, _gradients)


def rescaled_log_likelihood(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood by the sweeps alone, before any row is computed again.

    Returns:
        log_likelihood_B: where it is not exact, it is meaningless and its gradient is zero.
        is_exact_B: bool, whether value and gradient are exact to 2^-40 of the likelihood. Rows
            with NaN count as exact: they give NaN.
    """
    log_likelihood_B, is_exact_B, *_ = _differentiable(*arguments)
    return log_likelihood_B, is_exact_B


def log_likelihood(*arguments: Tensor) -> Tensor:
    """See ``alignment.dag_log_likelihood``; differentiable once.

    The host waits for the device once, to learn whether any row must be computed again; there
    ``torch.compile`` breaks the graph.
    """
    log_likelihood_B, is_exact_B = rescaled_log_likelihood(*arguments)
    if is_exact_B.all():
        return log_likelihood_B
    rows_R = (~is_exact_B).nonzero().squeeze(1)
    rows = Graph(*(t[rows_R] for t in arguments)).double()
    again_R = vectorized.log_likelihood(*rows)
    return log_likelihood_B.index_copy(0, rows_R, again_R.to(log_likelihood_B.dtype))
