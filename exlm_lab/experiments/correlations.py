"""Statistics of a grid of cells: rank correlations, and changes along its lines.

A grid maps (p, k), mask ratio and copies per token, to a number from the paper or our runs. The
share of *lost* tokens, those whose copies are all masked, is p^k (Appendix C). The paper's cells
have only five different shares (Figure 4); cells with equal shares are ties. A statistic is nan
where it is undefined: with too few cells to compare, or for a correlation of equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # tables of cells import this file, too, and need no pandas
    import pandas as pd

Grid = Mapping[tuple[float, int], float]
PAPER_SHARES = (0.0225, 0.15, 0.387, 0.622, 0.789)
"""Shares of lost tokens in Figure 4."""
SMALLEST_SHARE = 0.15
"""Below this share the paper's curve turns, because the task becomes too easy (§3.3)."""


def lost_share(mask_ratio: float, num_copies: int) -> float:
    """The share of lost tokens, p^k; within 1% of a share in Figure 4, that rounded share."""
    exact = mask_ratio**num_copies
    nearest = min(PAPER_SHARES, key=lambda share: abs(share - exact))
    return nearest if abs(exact / nearest - 1) < 0.01 else exact


def _cells(grid: Grid, smallest: float = SMALLEST_SHARE) -> pd.DataFrame:
    """p, share and value of each cell whose share is at least ``smallest``."""
    import pandas as pd

    cells = [(p, lost_share(p, k), value) for (p, k), value in grid.items()]
    cells = pd.DataFrame(cells, columns=["p", "share", "value"], dtype=float)
    return cells[cells["share"] >= smallest]


def rank_correlation(grid: Grid) -> float:
    """Spearman's rho between the share of lost tokens and the numbers of a grid, from -1 to 1."""
    cells = _cells(grid)[["share", "value"]]
    return float(cells.corr(method="spearman", min_periods=3).iloc[0, 1])


def rank_correlation_at_fixed_share(grid: Grid) -> float:
    """Rank correlation between the mask ratio p and the numbers of a grid, share held fixed.

    Mask ratios and numbers are ranked and centred within each share, then correlated over all
    cells. So only cells of equal share are compared, and a share with a single cell has no effect.
    """
    cells = _cells(grid)
    ranks = cells.groupby("share")[["p", "value"]].rank()
    centred = ranks - ranks.groupby(cells["share"]).transform("mean")
    return float(centred.corr().iloc[0, 1])


def effect_of_share(grid: Grid, smallest: float = SMALLEST_SHARE) -> float:
    """Change from the smallest to the largest share at one mask ratio, averaged over mask ratios.

    This is the paper's second comparison in §3.2 (82.8 to 79.6 at p = 78.9%). The result is in the
    unit of the grid.
    """
    return _mean_change(_cells(grid, smallest), "p", "share")


def effect_of_mask_ratio(grid: Grid) -> float:
    """Change from the smallest to the largest mask ratio at one share, averaged over shares.

    This is the paper's first comparison in §3.2 (83.6 to 82.8 at a share of 15%). The result is in
    the unit of the grid.
    """
    return _mean_change(_cells(grid), "share", "p")


def drop_at_low_share(grid: Grid) -> float:
    """Change from 15% to 2.25% of lost tokens at one mask ratio, averaged over mask ratios.

    The result is in the unit of the grid, and negative if numbers are lower at the low share.
    """
    cells = _cells(grid, smallest=0.0)
    pairs = cells[cells["share"].isin((PAPER_SHARES[0], SMALLEST_SHARE))]
    return -_mean_change(pairs, "p", "share")


def _mean_change(cells: pd.DataFrame, fixed: str, along: str) -> float:
    """Last value minus first along each line of two or more cells, averaged over lines."""
    lines = cells.sort_values(along).groupby(fixed)["value"]
    ends = lines.agg(["first", "last", "size"]).query("size > 1")
    return float((ends["last"] - ends["first"]).mean())


class Statistic(NamedTuple):
    """A statistic of a grid, and its title in reports."""

    title: str
    of: Callable[[Grid], float]


STATISTICS = {
    "rank-share": Statistic(
        "rank correlation with the lost share, shares ≥ 15%", rank_correlation
    ),
    "rank-ratio": Statistic(
        "rank correlation with p at fixed share, shares ≥ 15%", rank_correlation_at_fixed_share
    ),
    "change-share": Statistic("change from 15% to the largest share, p fixed", effect_of_share),
    "change-ratio": Statistic(
        "change from the smallest to the largest p, share fixed", effect_of_mask_ratio
    ),
    "change-low": Statistic("change from 15% to 2.25%, p fixed", drop_at_low_share),
}
"""Statistics by a short name, in the order of reports; a ``change`` is in the unit of the grid."""


def over_seeds(statistic: Callable[[Grid], float], grids: pd.DataFrame) -> pd.Series:
    """A statistic by seed, without seeds whose grid lacks a cell or whose statistic is nan."""
    import pandas as pd

    by_seed = {seed: statistic(dict(cells)) for seed, cells in grids.dropna().iterrows()}
    return pd.Series(by_seed, dtype=float).dropna()
