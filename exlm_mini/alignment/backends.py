"""The table of backends, and which of them ``auto`` means.

A backend answers the questions of the public interface with arguments that have been checked.
``enumerate`` is the judge of all others, ``naive`` reads like Appendix H, ``vectorized`` is plain
PyTorch in log space, ``scaled`` the same in rescaled probabilities, ``native`` compiled C++ or
CUDA. All are exact in float32 and float64; they differ in time, memory and rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from exlm_mini.alignment import enumeration, naive, native, scaled, vectorized
from exlm_mini.config.checks import nearest


def _works_anywhere(device_type: str) -> None:
    return None


def _needs_float64(device_type: str) -> str | None:
    return "it adds up in float64, which mps lacks" if device_type == "mps" else None


class Backend(NamedTuple):
    """What a backend offers; both functions take the four arguments of the public ones."""

    log_likelihood: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """log f_{M,L} (B,), differentiable by both score tensors."""
    viterbi: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """path_BM and log_score_B of the best path."""
    why_not: Callable[[str], str | None] = _works_anywhere
    """Takes a device type such as ``cpu``: why the backend does not work there, or none."""


BACKENDS: dict[str, Backend] = {}
FASTEST_FIRST = ("native", "scaled", "vectorized")
"""``auto`` is the first of them that works on the device; the last works anywhere."""


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
register("scaled", Backend(scaled.log_likelihood, vectorized.viterbi, _needs_float64))
register("native", Backend(native.log_likelihood, native.viterbi, native.why_not))


@cache
def _first_that_works(device_type: str) -> str:
    reasons = {}
    for name in FASTEST_FIRST:
        if (reason := BACKENDS[name].why_not(device_type)) is None:
            break
        reasons[name] = reason
    if reasons:
        without = "; ".join(
            f"'{name}': {reason.splitlines()[0].rstrip(':')}"
            for name, reason in reasons.items()
        )
        warnings.warn(
            f"states alignment uses the backend '{name}', without {without}. "
            "`python -m exlm_mini.doctor` tells more.",
            stacklevel=2,
        )
    return name


def fastest(device_type: str) -> str:
    """Name of the backend that ``auto`` means on a device of this type.

    Warns once if a faster one does not work there. The first call may build the compiled
    backend, which takes seconds.
    """
    return _first_that_works(device_type)


# Nothing in it is for a compiler to trace. ``torch.compiler.assume_constant_result`` does just
# this, and imports torch._dynamo for it, which takes as long as torch.
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose(name: str, device_type: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: if there is none.
    """
    name = fastest(device_type) if name == "auto" else name
    if name not in BACKENDS:
        raise ValueError(f"alignment backend '{name}': {nearest(name, ['auto', *BACKENDS])}")
    return BACKENDS[name]
