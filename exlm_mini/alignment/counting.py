"""How many paths a graph has: an exact integer, however large.

Shapes: M targets, L states, R moduli; W = L - M + 1 states that can emit a given target.

Paths are counted as Appendix H adds them up, with 1 for every score above 0. Their number soon
exceeds what a float64 holds, so it is counted modulo several numbers without common divisor, each
small enough for float64 matrix products to be exact, and put together by the Chinese remainder
theorem.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exlm_mini.alignment.arguments import checked

EXACT = 2**53
"""float64 holds every integer up to this one."""


def path_count(
    log_emission_BML: Tensor,
    log_transition_BLL: Tensor,
    num_targets_B: Tensor,
    num_states_B: Tensor,
) -> list[int]:
    """Exact number of paths of positive probability, row by row.

    A path counts when neither an emission nor a transition along it is -inf; what the scores are
    beyond that, NaN included, does not matter. Between all states there are
    comb(L - 2, M - 2) paths, a number of 998 digits for M = 1024 and L = 4096: more than a float
    holds, but ``math.log`` takes it.

    Time grows as M (L - M)^2 times the digits of comb(L - 2, M - 2).

    Args:
        log_emission_BML, log_transition_BLL, num_targets_B, num_states_B: as for
            ``dag_log_likelihood``.

    Returns:
        One integer per row; 0 where no path fits.

    Raises:
        ValueError: if the arguments do not fit each other.
    """
    graph = checked(log_emission_BML, log_transition_BLL, num_targets_B, num_states_B)
    counts = zip(num_targets_B.tolist(), num_states_B.tolist(), strict=True)
    return [
        _count(graph[0][b, :M, :L] != -torch.inf, graph[1][b, :L, :L] != -torch.inf)
        for b, (M, L) in enumerate(counts)
    ]


def _count(is_emission_ML: Tensor, is_transition_LL: Tensor) -> int:
    """Paths of one row without padding."""
    M, L = is_emission_ML.shape
    if M > L:
        return 0
    # M - i - 1 states still follow target i, and i came before: it stands in i .. i + W - 1.
    W = L - M + 1
    moduli = _moduli(math.comb(max(L - 2, 0), max(M - 2, 0)), most_terms=W)
    modulus_R1 = torch.tensor(
        moduli, dtype=torch.float64, device=is_emission_ML.device
    ).unsqueeze(1)
    edge_LL = is_transition_LL.triu(1).double()
    emission_ML = is_emission_ML.double()
    count_RW = torch.zeros(len(moduli), W, dtype=torch.float64, device=edge_LL.device)
    count_RW[:, 0] = emission_ML[0, 0]
    for i in range(1, M):
        # At most W terms below a modulus: the product is exact.
        count_RW = (count_RW @ edge_LL[i - 1 : i - 1 + W, i : i + W]) % modulus_R1
        count_RW *= emission_ML[i, i : i + W]
    return _chinese_remainder(count_RW[:, -1].long().tolist(), moduli)


def _moduli(bound: int, most_terms: int) -> list[int]:
    """Numbers without common divisor whose product exceeds a bound.

    Each is so small that a sum of ``most_terms`` integers below it is exact in float64.
    """
    moduli, product = [], 1
    candidate = EXACT // most_terms
    while product <= bound:
        if math.gcd(candidate, product) == 1:
            moduli.append(candidate)
            product *= candidate
        candidate -= 1
    return moduli


def _chinese_remainder(remainders: list[int], moduli: list[int]) -> int:
    """The one number below the product of the moduli that leaves these remainders."""
    number, product = 0, 1
    for remainder, modulus in zip(remainders, moduli, strict=True):
        number += product * ((remainder - number) * pow(product, -1, modulus) % modulus)
        product *= modulus
    return number
