"""The correctness checks of ``book/evidence.py``: every backend against float64.

Shapes: B rows, M targets, L states.

Likelihood, both gradients and the best path are compared with float64 on the same numbers: those
of the input dtype, raised. Half precision goes in as such and is computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_lab.benchmarks.dag import (
    Judge,
    errors_of,
    estimated_seconds,
    forward_and_backward,
    judge,
    made_graph,
)
from exlm_lab.benchmarks.record import Shape
from exlm_mini.alignment import dag_log_likelihood, viterbi
from exlm_mini.alignment.cases import (
    CASES,
    QUANTITIES,
    Graph,
    fill_padding,
    likelihood_and_gradients,
    limits,
    relative_error,
    weights,
)
from exlm_mini.alignment.scaled import rescaled_log_likelihood

TEACHING = ("enumerate", "naive")
"""Too slow for anything but the table of cases."""
REDONE = 1
"""How the compiled backend marks a row that was done again in log space."""
SECONDS = 150.0
"""That one pass may take, the judge's too."""
MOST_VITERBI = 4e8
"""Maxima that a CPU takes to find the best paths of one graph."""

GRAPHS = (
    (Shape(8, 77, 308), "flat"),
    (Shape(8, 77, 308), "sharp"),
    (Shape(8, 77, 308), "ragged"),
    (Shape(8, 77, 308), "spread"),
    (Shape(2, 100, 100), "flat"),
    (Shape(2, 1, 65), "flat"),
    (Shape(2, 1, 1), "flat"),
    (Shape(1, 256, 1024), "flat"),
    (Shape(1, 256, 1024), "sharp"),
    (Shape(1, 1024, 4096), "flat"),
    (Shape(1, 1024, 4096), "sharp"),
)
"""Beyond the table of cases; ``spread``: emissions of a target 30 nats apart."""
QUICK_GRAPHS = ((Shape(2, 5, 40), "flat"), (Shape(3, 9, 36), "ragged"))


class Tally:
    """The worst error of each quantity over some graphs, in shares of what is allowed."""

    def __init__(self) -> None:
        self.worst: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.num_graphs = 0

    def add(self, graph: str, errors: dict[str, float], limits: dict[str, float]) -> None:
        """Count a graph; limits may be of fewer quantities than errors."""
        self.num_graphs += 1
        for name, limit in limits.items():
            found = {"error": errors[name], "limit": limit, "graph": graph}
            if name not in self.worst or _share(found) > _share(self.worst[name]):
                self.worst[name] = found
            if not errors[name] <= limit:
                self.failures.append(f"{graph}: {name} is off by {errors[name]:.1e}")

    def result(self, **more: Any) -> dict[str, Any]:
        """For JSON, which knows no infinity: an error that is none stands for it."""
        for found in self.worst.values():
            found["error"] = found["error"] if found["error"] < float("inf") else None
        return {
            "passed": not self.failures,
            "num_graphs": self.num_graphs,
            "worst": self.worst,
            "failures": self.failures,
            **more,
        }


def _share(found: dict[str, Any]) -> float:
    return found["error"] / found["limit"]


def rows_redone(backend: str, graph: Graph) -> int | None:
    """How many rows a rescaling backend did again in log space; none for the others."""
    scores = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in graph[:2]]
    with torch.no_grad():
        if backend == "native":
            info_B2 = torch.ops.exlm_mini.dag_log_likelihood(*scores, *graph[2:])[3]
            return int((info_B2[:, 0] == REDONE).sum())
        if backend == "scaled":
            return int((~rescaled_log_likelihood(*scores, *graph[2:])[1]).sum())
    return None


# ---- the table of cases ----


@cache
def _truth(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Likelihood, gradients and best path of a case, by enumeration in float64 on the CPU."""
    exact = CASES[name].to(dtype).to(torch.float64)
    answers = likelihood_and_gradients(exact, "enumerate", weights(exact))
    return *answers, viterbi(*exact, backend="enumerate")[0]


def check_cases(backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """All cases of the table, as they are and with NaN wherever nothing is read."""
    tally, redone = Tally(), 0
    for name, case in CASES.items():
        graph = case.to(dtype)
        *exact, path_BM = _truth(name, dtype)
        allowed = limits(backend, graph, dtype)
        variants = {name: graph}
        if backend not in TEACHING:
            variants[f"{name}, padding nan"] = fill_padding(graph, torch.nan)
        for label, variant in variants.items():
            there = variant.to(dtype, device)
            try:
                grad_B = weights(case).to(device, torch.promote_types(dtype, torch.float32))
                ours = likelihood_and_gradients(there, backend, grad_B)
                found_BM = viterbi(*there, backend=backend)[0]
            except Exception as error:  # whatever it is, the other cases go on
                tally.failures.append(f"{label}: {type(error).__name__}: {error}"[:300])
                continue
            errors = [relative_error(a.cpu(), b) for a, b in zip(ours, exact, strict=True)]
            tally.add(label, dict(zip(QUANTITIES, errors, strict=True)), allowed)
            if not torch.equal(found_BM.cpu(), path_BM):
                tally.failures.append(f"{label}: another best path")
            redone += rows_redone(backend, there) or 0
    is_counted = rows_redone(backend, CASES["two_targets"].to(dtype, device)) is not None
    return tally.result(judge="enumerate", rows_redone=redone if is_counted else None)


# ---- larger graphs ----


class Truth(NamedTuple):
    """A graph and what float64 says of it."""

    graph: Graph
    judge: Judge | None
    log_score_B: Tensor | None
    """Of the best path; none where it would take too long."""


def large_graph(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device) -> Graph:
    """One of ``GRAPHS``."""
    graph = made_graph(shape, kind == "sharp", device, dtype)
    if kind == "ragged":
        row_B = torch.arange(shape.B, device=device)
        return graph._replace(
            num_targets_B=graph.num_targets_B - 2 * row_B,
            num_states_B=graph.num_states_B - 5 * row_B,
        )
    if kind == "spread":
        rng = torch.Generator().manual_seed(1)
        spread_BML = 30 * torch.rand(tuple(shape), generator=rng)
        return graph._replace(log_emission_BML=-spread_BML.to(device, dtype))
    return graph


@lru_cache(maxsize=1)
def _truth_of(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device) -> Truth:
    graph = large_graph(shape, kind, dtype, device)
    is_small = shape.B * shape.M * shape.L**2 <= MOST_VITERBI
    log_score_B = None
    if is_small or device.type == "cuda":
        log_score_B = viterbi(*graph.double(), backend="vectorized")[1]
    return Truth(graph, judge(graph, device, SECONDS), log_score_B)


def path_score(graph: Graph, path_BM: Tensor) -> Tensor:
    """Sum of the scores along each path, (B,) float64; -inf for what is no path."""
    graph = graph.double()
    row_B1 = torch.arange(len(path_BM), device=path_BM.device).unsqueeze(1)
    target_M = torch.arange(path_BM.shape[1], device=path_BM.device)
    is_target_BM = target_M < graph.num_targets_B.unsqueeze(1)
    state_BM = path_BM.clamp(min=0)
    emission_BM = graph.log_emission_BML[row_B1, target_M, state_BM]
    edge_BM = graph.log_transition_BLL[row_B1, state_BM[:, :-1], state_BM[:, 1:]]
    edge_BM = edge_BM.where(state_BM[:, 1:] > state_BM[:, :-1], -torch.inf)
    total_B = emission_BM.masked_fill(~is_target_BM, 0).sum(1)
    total_B += edge_BM.masked_fill(~is_target_BM[:, 1:], 0).sum(1)
    last_B = path_BM.gather(1, graph.num_targets_B.unsqueeze(1) - 1).squeeze(1)
    is_path_B = (path_BM[:, 0] == 0) & (last_B == graph.num_states_B - 1)
    return total_B.masked_fill(~is_path_B, -torch.inf)


def check_graph(
    backend: str, shape: Shape, kind: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """One of ``GRAPHS``; its best path may be another than float64's if its score is as good."""
    graph, verdict, best_B = _truth_of(shape, kind, dtype, device)
    if verdict is None:
        return {"passed": None, "skipped": f"no backend does it in float64 in {SECONDS:g} s"}
    if verdict.name == backend and dtype == torch.float64:
        return {"passed": None, "skipped": "it is the judge"}
    log_likelihood = partial(dag_log_likelihood, backend=backend)
    seconds = estimated_seconds(log_likelihood, graph, device)
    if seconds > SECONDS:
        return {"passed": None, "skipped": f"it would take about {seconds:.0f} s"}
    tally = Tally()
    errors = errors_of(forward_and_backward(log_likelihood, graph), verdict)
    allowed = limits(backend, graph, dtype)
    if best_B is not None:
        path_BM = viterbi(*graph, backend=backend)[0]
        errors["best_path"] = relative_error(path_score(graph, path_BM), best_B)
        allowed["best_path"] = allowed["log_likelihood"]
    tally.add(f"{shape} {kind}", errors, allowed)
    return tally.result(
        judge=verdict.name,
        judged_rows=len(verdict.exact[0]),
        rows_redone=rows_redone(backend, graph),
    )


def groups(
    backends: list[str], is_quick: bool
) -> Iterator[tuple[str, Shape | None, str, torch.dtype]]:
    """What is checked, in order: backend, graph (none: all cases), its kind, dtype."""
    dtypes = [torch.float32, torch.float64]
    halves = [] if is_quick else [torch.bfloat16, torch.float16]
    for backend in backends:
        for dtype in dtypes + (halves if backend not in TEACHING else []):
            yield backend, None, "", dtype
    fast = [backend for backend in backends if backend not in TEACHING]
    for shape, kind in QUICK_GRAPHS if is_quick else GRAPHS:
        is_first = shape == GRAPHS[0][0] and kind in ("flat", "sharp")
        for dtype in dtypes + (halves if is_first else []):
            for backend in fast:
                yield backend, shape, kind, dtype
