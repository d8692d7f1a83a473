"""The paper's tables with our numbers beside its own, one function for each sweep.

Each takes the groups of one input, in the order of the grid, and gives lines of Markdown. A
number is mean ± standard deviation over seeds unless its column says otherwise; the paper's
stand in brackets or in columns of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.correlations import (
    STATISTICS,
    lost_share,
    over_seeds,
    paired_difference,
)
from exlm_lab.experiments.grids import cells_of
from exlm_lab.experiments.metric_names import PROBE, SHARES
from exlm_lab.experiments.paper import ENTROPY, cost_ratio, printed_average, printed_grid
from exlm_lab.experiments.records import (
    DOWNSTREAM,
    LEFT_BY,
    LEFT_SHARE,
    Group,
    Record,
    grids_by_seed,
    grouped,
    leaving,
    read_records,
    summaries,
)
from exlm_mini.config.checks import UserError

EMPTY = "–"
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
    found = pd.Series(texts).unstack(0, fill_value="").sort_index(axis=0).sort_index(axis=1)
    columns = {f"{100 * p:.4g}%": found[p] for p in found}
    return _table({"k \\ p": [str(k) for k in found.index], **columns})


def _measured(groups: Sequence[Group], **digits: int) -> dict[str, list[str]]:
    """A column per metric, with the given number of digits."""
    columns = {}
    for metric, number in digits.items():
        found, factor = [group.summary(metric) for group in groups], _factor(metric)
        columns[HEADS[metric]] = [s.scaled(factor).shown(number) if s else EMPTY for s in found]
    return columns


def _known(groups: Sequence[Group], **digits: int) -> dict[str, list[str]]:
    """The same without empty columns."""
    columns = _measured(groups, **digits)
    return {head: texts for head, texts in columns.items() if set(texts) != {EMPTY}}


def _factor(metric: str) -> float:
    """100 for shares, which are shown in percent."""
    return 100 if metric in SHARES else 1


def _printed(groups: Sequence[Group], shift: float = 0.0, sign: str = "") -> list[str]:
    """The paper's mean for each group, minus ``shift``."""
    found = [g.paper_row and printed_average(*g.paper_row) for g in groups]
    return [EMPTY if mean is None else f"{mean - shift:{sign}.1f}" for mean in found]


# ---- the tables ----


def repeated_mlm(groups: Sequence[Group]) -> list[str]:
    """Matrices of p and k as in Figures 3, 4, 5 and 9, and statistics of them."""
    cells = [(g.first.mask_ratio, g.first.num_copies) for g in groups]
    shares = {cell: f"{100 * lost_share(*cell):.4g}" for cell in cells}
    lines = ["Lost share of tokens, % (Figure 4)", "", *_matrix(shares)]
    for metric, (title, digits, place) in MATRICES.items():
        numbers = printed_grid(*place) if place else {}
        texts = {
            cell: summary.scaled(_factor(metric)).shown(digits)
            + (f" ({numbers[cell]:.{digits}f})" if cell in numbers else "")
            for cell, summary in summaries(groups, metric).items()
        }
        if texts:
            lines += [title, "", *_matrix(texts)]
    for metric, title, unit in (
        (DOWNSTREAM, "Downstream accuracy", "points"),
        ("read_structure", "Structure read", "shares of the variance"),
        ("entropy_bits", "Entropy", "bits"),
    ):
        if summaries(groups, metric):
            lines += [f"{title}, changes in {unit}", "", *statistics_table(groups, metric)]
    return lines


def statistics_table(groups: Sequence[Group], metric: str) -> list[str]:
    """Each statistic over the seeds, of the means over seeds, and of the paper's numbers."""
    of_seeds = grids_by_seed(groups, metric)
    grids = {"ours, mean of seeds": {c: s.mean for c, s in summaries(groups, metric).items()}}
    grids |= {name: printed_grid(*place) for name, place in PAPER_GRIDS.get(metric, {}).items()}
    seeds = [over_seeds(statistic.of, of_seeds) for statistic in STATISTICS.values()]
    columns = {
        "": [statistic.title for statistic in STATISTICS.values()],
        f"ours, {len(of_seeds)} seed{'s' * (len(of_seeds) != 1)}": [
            found.shown(2, "+") if found else EMPTY for found in seeds
        ],
    }
    for name, grid in grids.items():
        numbers = [statistic.of(grid) for statistic in STATISTICS.values()]
        columns[name] = [
            EMPTY if math.isnan(number) else f"{number:+.2f}" for number in numbers
        ]
    return _table(columns)


def ablations(groups: Sequence[Group]) -> list[str]:
    """Tables 2 and 13: each variant, and its paired difference to ExLM."""
    columns = {
        "variant": [group.name for group in groups],
        "steps": [f"{group.first.data['config']['train']['steps']:,}" for group in groups],
    }
    columns |= _known(
        groups, downstream=1, probe_accuracy=1, bits_per_row=2, captured_bits=2, linked_bits=3,
        bits_per_mask=3, entropy_bits=2,
    )  # fmt: skip
    base = next((group for group in groups if group.name == "exlm"), None)
    for metric, title in (
        (DOWNSTREAM, "points to ExLM"),
        (PROBE, "probe, points to ExLM"),
        ("captured_bits", "captured bits to ExLM"),
    ):
        if base and base.summary(metric):
            columns[title] = [_difference(group, base, metric) for group in groups]
    exlm = printed_average("Table 2", "ExLM")
    assert exlm is not None
    columns["paper's mean, %"] = _printed(groups)
    columns["paper's points to ExLM"] = _printed(groups, exlm, "+")
    notes = [
        "Differences to ExLM: mean over seeds ± its standard error, equal seeds compared.",
        "",
    ]
    floor, joint = (groups[0].summary(f"{name}_bits_per_row") for name in ("floor", "joint"))
    if floor and joint:
        notes += [
            f"Exact bits per row: joint entropy {joint.mean:.3f}, floor of MLM {floor.mean:.3f}; "
            "captured bits are counted from the floor and are negative above it.",
            "",
        ]
    return [*_table(columns), *notes]


def _difference(group: Group, base: Group, metric: str) -> str:
    """A paired difference with the standard error of its mean."""
    found = paired_difference(group.by_seed(metric), base.by_seed(metric))
    if group is base or found is None:
        return EMPTY
    found = found.scaled(_factor(metric))
    error = found.standard_error
    return f"{found.mean:+.2f}" + ("" if error is None else f" ± {error:.2f}")


def saddle(groups: Sequence[Group]) -> list[str]:
    """How many seeds of each cell left the floor, when, and where they ended."""
    totals = [group.summary("total_correlation_bits") for group in groups]
    columns = {
        "cell": [group.name for group in groups],
        "total correlation": [f"{total.mean:.2f}" if total else EMPTY for total in totals],
        "left the floor": [],
        "first step below it": [],
    }
    for group in groups:
        known = [leave.step for record in group.records if (leave := leaving(record))]
        left = sorted(step for step in known if step is not None)
        columns["left the floor"].append(f"{len(left)} of {len(known)}" if known else EMPTY)
        ends = dict.fromkeys((*left[:1], *left[-1:]))
        columns["first step below it"].append(" to ".join(map(str, ends)) or EMPTY)
    columns |= _known(
        groups, bits_per_row=3, captured_bits=3, bits_per_mask=3, probe_accuracy=1, downstream=1
    )
    note = (
        f"A run has left the floor of MLM when it is {LEFT_BY:.2g} bits or {LEFT_SHARE:.0%} of the "
        "total correlation below it, whichever is less, and stays there."
    )
    return [*_table(columns), note, ""]


def cost(groups: Sequence[Group]) -> list[str]:
    """Table 12: the cost of a step of ExLM relative to MLM, measured and counted."""
    columns = {
        "cell": [group.name for group in groups],
        "k": [str(group.first.states_per_mask) for group in groups],
        **_measured(groups, cost_ratio=2, cost_ratio_floor=2),
    }
    columns["paper (k = 4, p = 15%)"] = [
        f"{cost_ratio():.2f}" if group.paper_row else EMPTY for group in groups
    ]
    return _table(columns)


def k_and_p(groups: Sequence[Group]) -> list[str]:
    """Table 4, with the entropy of Figure 12, for which the paper prints no numbers."""
    first = [group.first for group in groups]
    columns = {
        "p": [f"{record.mask_ratio:.1%}" for record in first],
        "model": [
            f"ExLM k={record.states_per_mask}" if record.objective == "exlm" else "MLM"
            for record in first
        ],
        **_measured(groups, downstream=1),
        "paper's mean, %": _printed(groups),
    }
    columns |= _measured(
        groups, probe_accuracy=1, entropy_bits=3, bits_per_mask=3, excess_bits=3
    )
    return _table(columns)


TABLES: dict[str, Callable[[Sequence[Group]], list[str]]] = {
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


def read_sweep(name: str, directory: Path) -> list[Record]:
    """The records of a sweep.

    Raises:
        UserError: if there is none yet, or one is damaged.
    """
    if records := read_records(name, directory):
        return records
    raise UserError(f"{directory / name} holds no record; run the sweep first")


def report(name: str, directory: Path) -> str:
    """The report of a sweep as Markdown.

    Args:
        name: of the sweep.
        directory: that holds the folders of all sweeps.

    Raises:
        UserError: if the sweep is unknown, a record is damaged, or there is none yet.
    """
    cells = cells_of(name)
    records = read_sweep(name, directory)
    lines = [f"# {name}", ""]
    for kind, groups in by_input(records, cells).items():
        lines += [f"## Input: {kind}", "", *TABLES[name](groups)]
    return "\n".join([*lines, *missing(records, cells), made_with(records)])


def by_input(records: Sequence[Record], cells: Sequence[Cell]) -> dict[str, list[Group]]:
    """Groups by input, in the order of the cells; groups of unknown cells come last."""
    order = [cell.name for cell in cells]
    found: dict[str, list[Group]] = {cell.input: [] for cell in cells}
    for group in grouped(records).values():
        found.setdefault(group.input, []).append(group)
    for groups in found.values():
        groups.sort(key=lambda g: order.index(g.cell) if g.cell in order else len(order))
    return {kind: groups for kind, groups in found.items() if groups}


def missing(records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    """One line about missing records; empty if there are none."""
    asked = [(cell.name, seed) for cell in cells for seed in cell.seeds]
    known = {(record.cell, record.seed) for record in records}
    gone = [f"{name} seed {seed}" for name, seed in asked if (name, seed) not in known]
    if not gone:
        return []
    more = len(gone) - SHOWN_MISSING
    shown = ", ".join(gone[:SHOWN_MISSING]) + (f" and {more} more" if more > 0 else "")
    return [f"{len(gone)} of {len(asked)} records missing: {shown}.", ""]


def made_with(records: Sequence[Record]) -> str:
    """Devices, commits and total time of all records, in one line."""
    versions = [record.data["versions"] for record in records]
    devices = sorted({str(found.get("device")) for found in versions})
    commits = sorted({str(found.get("commit"))[:7] for found in versions})
    seconds = sum(sum((record.data.get("seconds") or {}).values()) for record in records)
    return (
        f"{len(records)} records, made on {', '.join(devices)} at commit {', '.join(commits)} in "
        f"{seconds / 60:,.0f} minutes."
    )
