"""Graphs that test every alignment backend, and the comparison with the reference.

Shapes: B rows, M targets, L states.

The reference is the enumeration of all paths in float64 (``enumeration.py``, which has a test
with an independent enumeration). Cases are float64; ``Graph.to`` converts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import dag_log_likelihood, viterbi

JUDGE = "enumerate"
DTYPES = (torch.float32, torch.float64)
LOG_SPACE = ("enumerate", "naive", "vectorized")
QUANTITIES = ("log_likelihood", "grad_emission", "grad_transition")


class Graph(NamedTuple):
    """The four arguments of every alignment function, in order."""

    log_emission_BML: Tensor
    log_transition_BLL: Tensor
    num_targets_B: Tensor
    num_states_B: Tensor

    def to(
        self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Graph:
        """The same graph in another dtype; on another device, if one is given."""
        scores = (t.to(device=device, dtype=dtype) for t in self[:2])
        return Graph(*scores, *(t.to(device=device) for t in self[2:]))

    def double(self) -> Graph:
        """The same numbers in float64."""
        return self.to(torch.float64)

    def row(self, b: int) -> Graph:
        """Row b by itself, without padding."""
        M, L = int(self.num_targets_B[b]), int(self.num_states_B[b])
        return Graph(
            self.log_emission_BML[b : b + 1, :M, :L],
            self.log_transition_BLL[b : b + 1, :L, :L],
            self.num_targets_B[b : b + 1],
            self.num_states_B[b : b + 1],
        )


# ---- graphs ----


def is_padding(graph: Graph) -> tuple[Tensor, Tensor]:
    """Entries beyond the valid targets or states: of the emission, of the transition (bool)."""
    _, M, L = graph.log_emission_BML.shape
    is_state_BL = torch.arange(L) < graph.num_states_B.unsqueeze(1)
    is_target_BM = torch.arange(M) < graph.num_targets_B.unsqueeze(1)
    return (
        ~(is_target_BM.unsqueeze(2) & is_state_BL.unsqueeze(1)),
        ~(is_state_BL.unsqueeze(2) & is_state_BL.unsqueeze(1)),
    )


def random_graph(
    seed: int,
    num_targets: Sequence[int],
    num_states: Sequence[int],
    density: float = 1.0,
    scale: float = 2.0,
) -> Graph:
    """A graph with random emissions and normalised random transitions.

    Args:
        seed: of the numbers.
        num_targets, num_states: one entry per row; the tensors are as large as the largest.
        density: share of forward edges that exist.
        scale: standard deviation of the scores before they are normalised.

    Returns:
        The graph. Transitions are -inf wherever u <= v, padding holds finite random numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    B, M, L = len(num_states), max(num_targets), max(num_states)
    normal: dict[str, Any] = {"generator": rng, "dtype": torch.float64}
    log_emission_BML = scale * torch.randn(B, M, L, **normal) - 2 * scale
    scores_BLL = scale * torch.randn(B, L, L, **normal)
    is_forward_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    is_kept_BLL = torch.rand(B, L, L, **normal) < density
    graph = Graph(
        log_emission_BML, scores_BLL, torch.tensor(num_targets), torch.tensor(num_states)
    )
    _, is_beyond_BLL = is_padding(graph)
    is_edge_BLL = is_forward_LL & is_kept_BLL & ~is_beyond_BLL
    log_total_BL1 = scores_BLL.masked_fill(~is_edge_BLL, -torch.inf).logsumexp(2, keepdim=True)
    log_transition_BLL = torch.where(
        is_edge_BLL, scores_BLL - log_total_BL1.nan_to_num(neginf=0.0), -torch.inf
    )
    padding_BLL = torch.where(is_forward_LL, scores_BLL, -torch.inf)
    return graph._replace(
        log_transition_BLL=torch.where(is_beyond_BLL, padding_BLL, log_transition_BLL)
    )


def all_ones_graph(num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """Every score is log 1, so the likelihood counts the paths."""
    graph = random_graph(0, num_targets, num_states)
    return graph._replace(
        log_emission_BML=torch.zeros_like(graph.log_emission_BML),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(
            graph.log_transition_BLL != -torch.inf, 0.0
        ),
    )


def fill_padding(graph: Graph, value: float) -> Graph:
    """The same graph with a value wherever nothing is read: padding, and edges u <= v."""
    is_beyond_BML, is_beyond_BLL = is_padding(graph)
    is_forward_LL = torch.ones_like(is_beyond_BLL[0]).triu(1)
    return graph._replace(
        log_emission_BML=graph.log_emission_BML.masked_fill(is_beyond_BML, value),
        log_transition_BLL=graph.log_transition_BLL.masked_fill(
            is_beyond_BLL | ~is_forward_LL, value
        ),
    )


def without_edges(graph: Graph, edges: Sequence[tuple[int, int, int]]) -> Graph:
    """The same graph with edges (row, from, to) taken out."""
    log_transition_BLL = graph.log_transition_BLL.clone()
    for b, v, u in edges:
        log_transition_BLL[b, v, u] = -torch.inf
    return graph._replace(log_transition_BLL=log_transition_BLL)


def without_emissions(
    graph: Graph, b: int, targets: int | slice, states: int | slice | list[int]
) -> Graph:
    """The same graph with some emissions of row b made impossible."""
    log_emission_BML = graph.log_emission_BML.clone()
    log_emission_BML[b, targets, states] = -torch.inf
    return graph._replace(log_emission_BML=log_emission_BML)


def shifted(graph: Graph, emission: float, transition: float) -> Graph:
    """Every emission and every transition plus a number."""
    return graph._replace(
        log_emission_BML=graph.log_emission_BML + emission,
        log_transition_BLL=graph.log_transition_BLL + transition,
    )


def tied_graph(seed: int, num_targets: Sequence[int], num_states: Sequence[int]) -> Graph:
    """Scores are -1 or -2, exact in any order of summation: many best paths."""
    graph = random_graph(seed, num_targets, num_states, density=0.8)
    return graph._replace(
        log_emission_BML=-1.0 - (graph.log_emission_BML > -4).double(),
        log_transition_BLL=torch.where(
            graph.log_transition_BLL == -torch.inf,
            -torch.inf,
            -1.0 - (graph.log_transition_BLL > -2).double(),
        ),
    )


def _two_tied_paths() -> Graph:
    """0-1-4-5 and 0-2-3-5 are equally likely, and no other path exists."""
    graph = all_ones_graph([4], [6])
    edges = {(0, 1), (1, 4), (4, 5), (0, 2), (2, 3), (3, 5)}
    missing = [(0, v, u) for v in range(6) for u in range(6) if (v, u) not in edges]
    return without_edges(graph, missing)


def _cases() -> dict[str, Graph]:
    ragged = random_graph(5, [4, 2, 1, 3, 5], [7, 6, 1, 3, 8])
    square = random_graph(6, [4, 4], [7, 7])
    every = slice(None)
    return {
        "one_target_one_state": random_graph(0, [1, 1], [1, 1]),
        "one_target_many_states": random_graph(1, [1, 1, 1], [2, 5, 1]),
        "as_many_targets_as_states": random_graph(3, [6, 4], [6, 4]),
        "more_targets_than_states": random_graph(4, [5, 5], [3, 6]),
        "ragged": ragged,
        "33_states": random_graph(7, [4, 3], [33, 32]),
        # Row 0 has no way out of its start, row 1 none into its end, row 2 is whole.
        "no_path_through_missing_edges": without_edges(
            random_graph(11, [3, 3, 3], [5, 5, 5]),
            [(0, 0, u) for u in range(1, 5)] + [(1, v, 4) for v in range(4)],
        ),
        "sparse": random_graph(13, [3, 4, 5, 4], [6, 9, 7, 8], density=0.5),
        "very_sparse": random_graph(14, [3, 3, 3, 2], [6, 7, 5, 4], density=0.25),
        "huge_scores": shifted(ragged, 1e4, 1e4),
        "very_negative_scores": shifted(ragged, -1e4, -1e4),
        "huge_spread": random_graph(15, [4, 3], [8, 8], scale=1e4),
        "impossible_state": without_emissions(
            without_emissions(square, 0, every, 3), 1, every, [2, 5]
        ),
        "impossible_first_emission": without_emissions(square, 0, 0, 0),
        "impossible_last_emission": without_emissions(square, 1, 3, 6),
        "impossible_target": without_emissions(square, 0, 2, every),
        "ties": tied_graph(18, [3, 4, 5], [7, 8, 7]),
        "two_tied_paths": _two_tied_paths(),
        "all_ones": all_ones_graph([4, 6, 2], [9, 8, 5]),
        "all_minus_infinity": random_graph(19, [3], [5], density=0.0),
    }


CASES = _cases()
"""Name to graph."""

# ---- the comparison ----


def weights(graph: Graph) -> Tensor:
    """The incoming gradient of each of up to nine rows, (B,)."""
    grads = [1.5, -0.5, 0.0, 2.0, -1.0, 0.25, 3.0, -2.5, 1.0]
    return graph.log_emission_BML.new_tensor(grads[: len(graph.num_targets_B)])


def likelihood_and_gradients(
    graph: Graph, backend: str, grad_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log_likelihood_B and the gradients of its weighted sum by emission and transition.

    Args:
        graph: the graph.
        backend: a name in ``BACKENDS``.
        grad_B: the incoming gradient; none: ``weights``.
    """
    emission, transition = (t.detach().clone().requires_grad_() for t in graph[:2])
    log_likelihood_B = dag_log_likelihood(emission, transition, *graph[2:], backend)
    grad_B = weights(graph) if grad_B is None else grad_B
    gradients = torch.autograd.grad(log_likelihood_B, (emission, transition), grad_B)
    return log_likelihood_B.detach(), gradients[0], gradients[1]


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """``max |ours - exact| / max |exact|``, compared in float64; inf where either is not finite.

    Infinities at the same places on both sides agree and are left out.
    """
    ours, exact = ours.detach().double(), exact.detach().double()
    difference = torch.where(ours == exact, 0.0, (ours - exact).abs())
    if not bool(difference.isfinite().all()):
        return float("inf")
    size = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    largest = difference.max().item() if difference.numel() else 0.0
    return largest / size if size > 0 else largest


def limits(backend: str, graph: Graph, dtype: torch.dtype) -> dict[str, float]:
    """The allowed errors, relative to the largest value of each quantity.

    Rescaled probabilities suffer from rounding alone. In log space a posterior is the exponential
    of a sum of logarithms, whose rounding errors grow with the scores and the number of targets:
    four roundings of the largest path score.

    Args:
        backend: its name.
        graph: its input.
        dtype: float32 or float64, in which it computes.
    """
    is_single = dtype == torch.float32
    M = graph.log_emission_BML.shape[1]
    if backend in LOG_SPACE:
        finite = [scores[scores.isfinite()].abs() for scores in graph[:2]]
        largest = max((float(f.max()) for f in finite if f.numel()), default=0.0)
        gradient = 4 * torch.finfo(dtype).eps * M * (1 + largest)
    elif is_single:
        gradient = 1e-5 if M <= 77 else 1e-4
    else:
        gradient = 1e-10
    value = 1e-6 if is_single else 1e-12
    return dict(zip(QUANTITIES, (value, gradient, gradient), strict=True))


class Check(NamedTuple):
    """Result of comparing a backend on a device with enumeration."""

    backend: str
    device: str
    errors: dict[str, float | None]
    """Largest relative error by dtype; None if it is infinite or an exception was raised."""
    is_right: bool | None
    """None if the backend does not work on the device."""
    reason: str | None
    """Why it does not work, or is wrong."""


def largest_error(name: str, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """The largest error of a backend over all cases, with NaN wherever nothing is read.

    Returns:
        The largest relative error of a likelihood or gradient, and the largest share of the error
        that ``limits`` allows; both inf if a best path differs.
    """
    largest, largest_share = 0.0, 0.0
    for case in CASES.values():
        graph = case.to(dtype)
        exact, there = graph.to(torch.float64), fill_padding(graph, torch.nan).to(dtype, device)
        truth = likelihood_and_gradients(exact, JUDGE)
        ours = likelihood_and_gradients(there, name)
        path_BM = viterbi(*there, backend=name)[0].cpu()
        if not torch.equal(path_BM, viterbi(*exact, backend=JUDGE)[0]):
            return float("inf"), float("inf")
        for mine, true, limit in zip(
            ours, truth, limits(name, graph, dtype).values(), strict=True
        ):
            error = relative_error(mine.cpu(), true)
            largest, largest_share = max(largest, error), max(largest_share, error / limit)
    return largest, largest_share


def check(name: str, device: torch.device, reason: str | None) -> Check:
    """Compare a backend with enumeration.

    Args:
        name: in ``BACKENDS``.
        device: to compute on.
        reason: why the backend does not work there, if it does not.
    """
    if reason is not None:
        return Check(name, str(device), {}, None, reason)
    errors: dict[str, float | None] = {}
    for dtype in DTYPES:
        key = short(dtype)
        try:
            error, share = largest_error(name, dtype, device)
        except Exception as raised:  # of any kind: the report must continue
            errors[key] = None
            reason = reason or f"{type(raised).__name__}: {raised}"
            continue
        errors[key] = error if error < float("inf") else None
        if share > 1:
            reason = reason or f"{key} differs from enumeration by {error:.1e}"
    return Check(name, str(device), errors, reason is None, reason)


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
