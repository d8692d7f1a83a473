"""The paper's tables with our numbers beside its own, one function for each sweep.

Each takes the runs of one input, in the order of the cells, and gives lines of Markdown. A number
is mean ± standard deviation over seeds unless its column says otherwise; the paper's stand in
brackets or in columns of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.catalogue import experiment
from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.correlations import STATISTICS, lost_share, over_seeds
from exlm_lab.experiments.metric_names import DOWNSTREAM, PROBE, SHARES
from exlm_lab.experiments.paper import ENTROPY, cost_ratio, printed_average, printed_grid
from exlm_lab.experiments.records import (
    EMPTY,
    LEFT_BY,
    LEFT_SHARE,
    by_cell,
    by_seed,
    grid,
    leaving,
    measured,
    runs,
    shown,
)
from exlm_mini.config.checks import UserError

MATRICES = {
    DOWNSTREAM: ("Downstream accuracy, % (Figure 3: MNLI)", 1, ("Figure 3", "mnli")),
    PROBE: ("Latents read by a probe, %", 1, None),
    "read_structure": ("Structure read from frozen states, % of the variance", 1, None),
    "entropy_bits": ("Entropy of lost tokens, bits (Figure 5)", 2, ("Figure 5", ENTROPY)),
    "optimum_entropy_bits": ("Entropy of lost tokens, bits, exact optimum", 2, None),
    "excess_bits": ("Bits per lost token above the exact optimum", 3, None),
    "accuracy": ("Lost tokens guessed, %", 1, None),
    "validation_bits_per_mask": ("Bits per masked copy, lost or not (Figure 9)", 3, None),
    "validation_mask_accuracy": ("Masked copies guessed, lost or not, % (Figure 9)", 1, None),
}
"""Metric: title, digits, where the paper prints the same."""
PAPER_GRIDS = {
    DOWNSTREAM: {
        "paper, MNLI (Figure 3)": ("Figure 3", "mnli"),
        "paper, mean of 4 tasks (Figure 8)": ("Figure 8", "average"),
    },
    "entropy_bits": {"paper (Figure 5)": ("Figure 5", ENTROPY)},
}
HEADS = {
    DOWNSTREAM: "downstream, %",
    PROBE: "read by a probe, %",
    "bits_per_row": "bits per row",
    "captured_bits": "captured bits per row",
    "linked_bits": "won by links, bits",
    "bits_per_mask": "bits per mask",
    "entropy_bits": "entropy, bits",
    "excess_bits": "above the optimum, bits",
    "cost_ratio": "measured ratio",
    "cost_ratio_floor": "floor by operations",
}


# ---- parts of tables ----


def _table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of Markdown, and an empty one."""
    return [*markdown_table([tuple(columns), *zip(*columns.values(), strict=True)]), ""]


def _matrix(texts: Mapping[tuple[float, int], str]) -> list[str]:
    """Texts by (p, k) as a table with k down and p across, as in the paper's figures."""
    matrix = pd.Series(texts).unstack(0, fill_value="").sort_index(axis=0).sort_index(axis=1)
    columns = {f"{100 * p:.4g}%": matrix[p] for p in matrix}
    return _table({"k \\ p": [str(k) for k in matrix.index], **columns})


def _measured(table: pd.DataFrame, **digits: int) -> dict[str, list[str]]:
    """A column per metric, with the given number of digits."""
    cells = by_cell(table).values()
    return {
        HEADS[metric]: [shown(_factor(metric) * measured(cell, metric), n) for cell in cells]
        for metric, n in digits.items()
    }


def _known(table: pd.DataFrame, **digits: int) -> dict[str, list[str]]:
    """The same without empty columns."""
    columns = _measured(table, **digits)
    return {head: texts for head, texts in columns.items() if set(texts) != {EMPTY}}


def _factor(metric: str) -> float:
    """100 for shares, which are shown in percent."""
    return 100 if metric in SHARES else 1


def _names(table: pd.DataFrame) -> list[str]:
    """The cells without the input they begin with."""
    return [
        cell.removeprefix(f"{rows['input'].iloc[0]}-") for cell, rows in by_cell(table).items()
    ]


def _first(table: pd.DataFrame) -> pd.DataFrame:
    """A run of each cell, for what does not depend on the seed."""
    return table.loc[~table.index.get_level_values("cell").duplicated()]


def _printed(table: pd.DataFrame, shift: float = 0.0, sign: str = "") -> list[str]:
    """The paper's mean for each cell, minus ``shift``."""
    means = [paper and printed_average(*paper) for paper in _first(table)["paper"]]
    return [EMPTY if mean is None else f"{mean - shift:{sign}.1f}" for mean in means]


# ---- the tables ----


def repeated_mlm(table: pd.DataFrame) -> list[str]:
    """Matrices of p and k as in Figures 3, 4, 5 and 9, and statistics of them."""
    dials = _first(table)[["masking.mask_ratio", "masking.num_copies"]]
    shares = {(p, k): f"{100 * lost_share(p, k):.4g}" for _, (p, k) in dials.iterrows()}
    shares = {(p, int(k)): text for (p, k), text in shares.items()}
    lines = ["Lost share of tokens, % (Figure 4)", "", *_matrix(shares)]
    for metric, (title, digits, place) in MATRICES.items():
        numbers = printed_grid(*place) if place else {}
        texts = {
            cell: shown(_factor(metric) * values, digits)
            + (f" ({numbers[cell]:.{digits}f})" if cell in numbers else "")
            for cell, values in grid(table, metric).items()
        }
        if texts:
            lines += [title, "", *_matrix(texts)]
    for metric, title, unit in (
        (DOWNSTREAM, "Downstream accuracy", "points"),
        ("read_structure", "Structure read", "shares of the variance"),
        ("entropy_bits", "Entropy", "bits"),
    ):
        if len(measured(table, metric)):
            lines += [f"{title}, changes in {unit}", "", *statistics_table(table, metric)]
    return lines


def statistics_table(table: pd.DataFrame, metric: str) -> list[str]:
    """Each statistic over the seeds, of the means over seeds, and of the paper's numbers."""
    ours = grid(table, metric)
    num_seeds = len(ours.dropna())
    columns = {
        "": [statistic.title for statistic in STATISTICS.values()],
        f"ours, {num_seeds} seed{'s' * (num_seeds != 1)}": [
            shown(over_seeds(statistic.of, ours), 2, "+") for statistic in STATISTICS.values()
        ],
    }
    grids = {"ours, mean of seeds": dict(ours.mean())}
    grids |= {name: printed_grid(*place) for name, place in PAPER_GRIDS.get(metric, {}).items()}
    for name, one in grids.items():
        numbers = [statistic.of(one) for statistic in STATISTICS.values()]
        columns[name] = [
            EMPTY if math.isnan(number) else f"{number:+.2f}" for number in numbers
        ]
    return _table(columns)


def ablations(table: pd.DataFrame) -> list[str]:
    """Tables 2 and 13: each variant, and its paired difference to ExLM."""
    cells = by_cell(table)
    columns = {
        "variant": _names(table),
        "steps": [f"{steps:,}" for steps in _first(table)["train.steps"]],
    }
    columns |= _known(
        table, downstream=1, probe_accuracy=1, bits_per_row=2, captured_bits=2, linked_bits=3,
        bits_per_mask=3, entropy_bits=2,
    )  # fmt: skip
    base = next((c for c, n in zip(cells, _names(table), strict=True) if n == "exlm"), None)
    for metric, title in (
        (DOWNSTREAM, "points to ExLM"),
        (PROBE, "probe, points to ExLM"),
        ("captured_bits", "captured bits to ExLM"),
    ):
        if base and len(by_seed(table, base, metric)):
            columns[title] = [_difference(table, cell, base, metric) for cell in cells]
    exlm = printed_average("Table 2", "ExLM")
    assert exlm is not None
    columns["paper's mean, %"] = _printed(table)
    columns["paper's points to ExLM"] = _printed(table, exlm, "+")
    notes = [
        "Differences to ExLM: mean over seeds ± its standard error, equal seeds compared.",
        "",
    ]
    first = next(iter(cells.values()))
    floor, joint = (measured(first, f"{end}_bits_per_row").mean() for end in ("floor", "joint"))
    if not (math.isnan(floor) or math.isnan(joint)):
        notes += [
            f"Exact bits per row: joint entropy {joint:.3f}, floor of MLM {floor:.3f}; "
            "captured bits are counted from the floor and are negative above it.",
            "",
        ]
    return [*_table(columns), *notes]


def _difference(table: pd.DataFrame, cell: str, base: str, metric: str) -> str:
    """A difference of two cells, paired by seed, with the standard error of its mean.

    Equal seeds have the same data order and, where the models agree, the same initial weights, so
    much of the noise cancels.
    """
    points = (by_seed(table, cell, metric) - by_seed(table, base, metric)).dropna()
    if cell == base or points.empty:
        return EMPTY
    points *= _factor(metric)
    return f"{points.mean():+.2f}" + (f" ± {points.sem():.2f}" if len(points) > 1 else "")


def saddle(table: pd.DataFrame) -> list[str]:
    """How many seeds of each cell left the floor, when, and where they ended."""
    cells = by_cell(table).values()
    totals = [measured(cell, "total_correlation_bits") for cell in cells]
    columns = {
        "cell": _names(table),
        "total correlation": [f"{t.mean():.2f}" if len(t) else EMPTY for t in totals],
        "left the floor": [],
        "first step below it": [],
    }
    for cell in cells:
        steps = [leaving(run) for _, run in cell.iterrows()]
        known = [step for step in steps if step is not None]
        left = sorted(int(step) for step in known if math.isfinite(step))
        columns["left the floor"].append(f"{len(left)} of {len(known)}" if known else EMPTY)
        ends = dict.fromkeys((*left[:1], *left[-1:]))
        columns["first step below it"].append(" to ".join(map(str, ends)) or EMPTY)
    columns |= _known(
        table, bits_per_row=3, captured_bits=3, bits_per_mask=3, probe_accuracy=1, downstream=1
    )
    note = (
        f"A run has left the floor of MLM when it is {LEFT_BY:.2g} bits or {LEFT_SHARE:.0%} of the "
        "total correlation below it, whichever is less, and stays there."
    )
    return [*_table(columns), note, ""]


def cost(table: pd.DataFrame) -> list[str]:
    """Table 12: the cost of a step of ExLM relative to MLM, measured and counted."""
    first = _first(table)
    columns = {
        "cell": _names(table),
        "k": [str(k) for k in first["model.states_per_mask"]],
        **_measured(table, cost_ratio=2, cost_ratio_floor=2),
    }
    columns["paper (k = 4, p = 15%)"] = [
        f"{cost_ratio():.2f}" if paper else EMPTY for paper in first["paper"]
    ]
    return _table(columns)


def k_and_p(table: pd.DataFrame) -> list[str]:
    """Table 4, with the entropy of Figure 12, for which the paper prints no numbers."""
    first = _first(table)
    columns = {
        "p": [f"{p:.1%}" for p in first["masking.mask_ratio"]],
        "model": [
            f"ExLM k={k}" if objective == "exlm" else "MLM"
            for k, objective in zip(
                first["model.states_per_mask"], first["objective"], strict=True
            )
        ],
        **_measured(table, downstream=1),
        "paper's mean, %": _printed(table),
    }
    columns |= _measured(
        table, probe_accuracy=1, entropy_bits=3, bits_per_mask=3, excess_bits=3
    )
    return _table(columns)


TABLES: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "repeated-mlm": repeated_mlm,
    "ablations": ablations,
    "saddle": saddle,
    "cost": cost,
    "k-and-p": k_and_p,
}
"""By the name of the sweep."""


# ---- reports ----

SHOWN_MISSING = 6
"""Most missing records that are named; of further ones only the number is given."""


def report(name: str, directory: Path) -> str:
    """The report of a sweep as Markdown."""
    cells, table = experiment(name).cells, runs(name, directory)
    if table.empty:
        raise UserError(f"{directory / name} holds no record; run the sweep first")
    lines = [f"# {name}", ""]
    for kind, of_input in in_order(table, cells).groupby("input", sort=False):
        lines += [f"## Input: {kind}", "", *TABLES[name](of_input)]
    return "\n".join([*lines, *missing(table, cells), made_with(table)])


def in_order(table: pd.DataFrame, cells: Sequence[Cell]) -> pd.DataFrame:
    """The runs in the order of the cells; those of unknown cells come last."""
    order = {cell.name: number for number, cell in enumerate(cells)}
    return table.loc[sorted(table.index, key=lambda key: (order.get(key[0], len(order)), key))]


def missing(table: pd.DataFrame, cells: Sequence[Cell]) -> list[str]:
    """One line about missing records; empty if there are none."""
    planned = [(cell.name, seed) for cell in cells for seed in cell.seeds]
    gone = [f"{name} seed {seed}" for name, seed in planned if (name, seed) not in table.index]
    if not gone:
        return []
    more = len(gone) - SHOWN_MISSING
    names = ", ".join(gone[:SHOWN_MISSING]) + (f" and {more} more" if more > 0 else "")
    return [f"{len(gone)} of {len(planned)} records missing: {names}.", ""]


def made_with(table: pd.DataFrame) -> str:
    """Devices, commits and total time of all records, in one line."""
    devices, commits = sorted(set(table["device"])), sorted(set(table["commit"].str[:7]))
    return (
        f"{len(table)} records, made on {', '.join(devices)} at commit {', '.join(commits)} in "
        f"{table['seconds'].sum() / 60:,.0f} minutes."
    )
