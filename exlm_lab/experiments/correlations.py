"""What the reports say of a grid of cells in one number: rank correlations and paired differences.

A grid is a mapping from (p, k), mask ratio and copies per token, to a number, the paper's or ours.
The share of tokens that lose every copy is p^k (Appendix C). The paper chose its cells so that
only five shares occur (Figure 4); cells of equal share are ties for a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from exlm_lab.experiments.records import Summary, summarize

Grid = Mapping[tuple[float, int], float]
SHARES = (0.0225, 0.15, 0.387, 0.622, 0.789)
"""Of lost tokens, in Figure 4."""
SMALLEST_SHARE = 0.15
"""Below it the paper's curve turns: the task becomes too easy (§3.3)."""


def lost_share(mask_ratio: float, num_copies: int) -> float:
    """p^k, as Figure 4 rounds it where the figure has it.

    Args:
        mask_ratio: p.
        num_copies: k.
    """
    exact = mask_ratio**num_copies
    nearest = min(SHARES, key=lambda share: abs(share - exact))
    return nearest if abs(exact / nearest - 1) < 0.01 else exact


def rank_correlation(grid: Grid, smallest: float = SMALLEST_SHARE) -> float:
    """Spearman's rho between the share of lost tokens and the numbers of a grid.

    Args:
        grid: numbers by (p, k).
        smallest: cells that lose a smaller share are left out; 0 takes all.

    Returns:
        Between -1 and 1; nan with fewer than three cells, or where all numbers are equal.
    """
    from scipy.stats import rankdata

    kept = [(lost_share(*cell), value) for cell, value in grid.items()]
    kept = [(share, value) for share, value in kept if share >= smallest]
    if len(kept) < 3:
        return float("nan")
    shares, values = (rankdata(column) for column in zip(*kept, strict=True))
    return _cosine(shares - shares.mean(), values - values.mean())


def rank_correlation_at_fixed_share(grid: Grid, smallest: float = SMALLEST_SHARE) -> float:
    """Rank correlation between the mask ratio p and the numbers of a grid, share held fixed.

    Mask ratio and number are ranked among the cells of one share, the mean rank of these is
    taken off, and the correlation is that of all cells together. So only cells of one share are
    ever compared, and a share counts by the number of its cells; one with a single cell is silent.

    Args:
        grid: numbers by (p, k).
        smallest: cells that lose a smaller share are left out; 0 takes all.

    Returns:
        Between -1 and 1; nan where no share has two cells, or all numbers of each are equal.
    """
    from scipy.stats import rankdata

    ratios, values = [], []
    for cells in _by_share(grid, smallest).values():
        for ranks, column in ((ratios, [p for p, _ in cells]), (values, [v for _, v in cells])):
            ranked = rankdata(column)
            ranks.extend(ranked - ranked.mean())
    return _cosine(np.array(ratios), np.array(values))


def effect_of_share(grid: Grid, smallest: float = SMALLEST_SHARE) -> float:
    """Change from the smallest to the largest share at one mask ratio, mean over mask ratios.

    This is the paper's second comparison in §3.2 (82.8 to 79.6 at p = 78.9%).

    Returns:
        In the unit of the grid; nan where no mask ratio has two shares.
    """
    ratios: dict[float, list[tuple[float, float]]] = {}
    for (p, k), value in grid.items():
        if lost_share(p, k) >= smallest:
            ratios.setdefault(p, []).append((lost_share(p, k), value))
    return _mean_change(ratios)


def effect_of_mask_ratio(grid: Grid, smallest: float = SMALLEST_SHARE) -> float:
    """Change from the smallest to the largest mask ratio at one share, mean over shares.

    This is the paper's first comparison in §3.2 (83.6 to 82.8 at a share of 15%).

    Returns:
        In the unit of the grid; nan where no share has two cells.
    """
    return _mean_change(_by_share(grid, smallest))


def drop_at_low_share(grid: Grid) -> float:
    """Change from 15% to 2.25% of lost tokens at one mask ratio, mean over mask ratios.

    Returns:
        In the unit of the grid, negative where the low share is worse; nan without such a pair.
    """
    by_place = {(p, lost_share(p, k)): value for (p, k), value in grid.items()}
    changes = [
        value - by_place[p, SMALLEST_SHARE]
        for (p, share), value in by_place.items()
        if share == SHARES[0] and (p, SMALLEST_SHARE) in by_place
    ]
    return float(np.mean(changes)) if changes else float("nan")


class Statistic(NamedTuple):
    """A question that a grid answers with one number."""

    title: str
    of: Callable[[Grid], float]
    is_change: bool
    """In the unit of the grid; otherwise a correlation."""


STATISTICS = {
    "rank-share": Statistic(
        "rank correlation with the lost share, shares ≥ 15%", rank_correlation, False
    ),
    "rank-ratio": Statistic(
        "rank correlation with p at fixed share, shares ≥ 15%",
        rank_correlation_at_fixed_share,
        False,
    ),
    "change-share": Statistic(
        "change from 15% to the largest share, p fixed", effect_of_share, True
    ),
    "change-ratio": Statistic(
        "change from the smallest to the largest p, share fixed", effect_of_mask_ratio, True
    ),
    "change-low": Statistic("change from 15% to 2.25%, p fixed", drop_at_low_share, True),
}
"""By a short name, in the order of the reports."""


def over_seeds(statistic: Callable[[Grid], float], grids: Mapping[int, Grid]) -> Summary | None:
    """A statistic of each seed's grid, put together; grids for which it is nan do not count."""
    found = [statistic(grid) for grid in grids.values()]
    return summarize([value for value in found if not np.isnan(value)])


def paired_difference(ours: Mapping[int, float], base: Mapping[int, float]) -> Summary | None:
    """Differences between two cells seed by seed; none if they share no seed.

    Equal seeds have equal data order and initial weights where the models agree, so that much of
    the noise cancels. ``standard_error`` of the result is the error to quote.
    """
    return summarize([ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())])


def decided_sign(differences: Sequence[float], level: float = 0.05) -> int:
    """On which side of zero the mean of some seeds is, where they are enough to tell.

    A one-sided t-test for each side. Three seeds must agree well: their mean has to be 2.9
    standard errors from zero.

    Args:
        differences: one for each seed.
        level: of each test.

    Returns:
        1 or -1; 0 where neither is decided, as for a single seed.
    """
    from scipy.stats import t

    found = summarize(list(differences))
    if found is None or found.sd is None:
        return 0
    if found.sd == 0:
        return int(np.sign(found.mean))
    is_far = abs(found.mean) / found.standard_error > t.ppf(1 - level, found.num - 1)
    return int(np.sign(found.mean)) if is_far else 0


def _by_share(grid: Grid, smallest: float) -> dict[float, list[tuple[float, float]]]:
    """(mask ratio, number) of the cells of each share that has several."""
    shares: dict[float, list[tuple[float, float]]] = {}
    for (p, k), value in grid.items():
        shares.setdefault(lost_share(p, k), []).append((p, value))
    return {s: cells for s, cells in shares.items() if s >= smallest and len(cells) > 1}


def _mean_change(lines: Mapping[float, list[tuple[float, float]]]) -> float:
    """Last value less first of each line of (place, value), places ascending; the mean."""
    ordered = [sorted(line) for line in lines.values() if len(line) > 1]
    return float(np.mean([line[-1][1] - line[0][1] for line in ordered])) if ordered else np.nan


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of two centred columns; nan if one of them does not vary."""
    length = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / length if length else float("nan")
